/* SPDX-License-Identifier: Apache-2.0 */
/* rules_like.c - copies, casts, and new values that take only a shape or a dtype from another. */
#include "rules.h"

/* Get the memory format in args[arg]; PRESERVE is torch's default for copies. */
static KlFormat
get_format(const KlCall *call, uint32_t arg, KlFormat fallback)
{
    bool is_given = kl_rules_is_given(call, arg);
    bool is_format = is_given && call->args[arg].kind == KL_ARG_FORMAT;
    kl_rules_require(call, is_format || !is_given);
    return is_format ? (KlFormat)call->args[arg].u.i : fallback;
}

static KlStatus
set_format(KlMeta *out, const KlMeta *input, KlFormat format)
{
    if (format == KL_FORMAT_PRESERVE) {
        kl_rules_preserve(out, input);
    } else if (format == KL_FORMAT_CONTIGUOUS) {
        kl_meta_set_contiguous(out);
    } else if (format == KL_FORMAT_CHANNELS_LAST && out->n_dims == 4) {
        kl_rules_set_channels_last(out);
    } else {
        return KL_DECLINED;
    }
    return KL_OK;
}

/* The first input itself, the same Python object. */
KL_SHAPE(itself)
{
    KlMeta *out = kl_rules_outs(result, 1);
    *out = *call->inputs[0];
    out->place = KL_PLACE_WHOLE;
    kl_rules_alias(result, KL_ALIAS_SAME, 0);
    return KL_OK;
}

/* Whether a dim has size 1. Without one, a dense value has only one row-major stride order. */
static bool
has_one(const KlMeta *meta)
{
    bool is_found = false;
    for (int32_t dim = 0; dim < meta->n_dims && !is_found; dim++) {
        is_found = meta->shape[dim] <= 1;
    }
    return is_found;
}

KL_SHAPE(contiguous)
{
    const KlMeta *input = call->inputs[0];
    KlFormat format = get_format(call, 1, KL_FORMAT_CONTIGUOUS);
    KlMeta *out = kl_rules_out(result, input);
    bool is_contiguous = format == KL_FORMAT_CONTIGUOUS && kl_meta_is_contiguous(input);
    bool is_last = format == KL_FORMAT_CHANNELS_LAST && kl_rules_is_channels_last(input);
    kl_rules_require(call, format != KL_FORMAT_PRESERVE);
    if (is_contiguous || is_last) {
        return shape_itself(call, result);
    }
    if (!input->is_strided) {
        kl_rules_alias(result, KL_ALIAS_MAYBE, 0);
        return has_one(input) ? KL_OK : set_format(out, input, format);
    }
    return set_format(out, input, format);
}

KL_SHAPE(clone)
{
    KlFormat format = get_format(call, 1, KL_FORMAT_PRESERVE);
    return set_format(kl_rules_out(result, call->inputs[0]), call->inputs[0], format);
}

static KlFormat
find_format(const KlCall *call)
{
    const KlArg *found = kl_rules_find(call, KL_ARG_FORMAT);
    return found != NULL ? (KlFormat)found->u.i : KL_FORMAT_PRESERVE;
}

/* x.float(memory_format=None): a copy, until the dtype rule finds that none is needed */
KL_SHAPE(cast)
{
    kl_rules_require(call, kl_rules_find(call, KL_ARG_TEXT) == NULL);
    KlMeta *out = kl_rules_out(result, call->inputs[0]);
    return set_format(out, call->inputs[0], find_format(call));
}

static KlStatus
cast_to(const KlCall *call, KlInferred *result, KlDtype dtype, bool is_copied)
{
    const KlMeta *input = call->inputs[0];
    KlFormat format = find_format(call);
    /* torch compares with the format it would suggest, not with the strides */
    bool is_last = format != KL_FORMAT_PRESERVE && kl_rules_is_like_channels_last(input);
    kl_rules_require(call, dtype != KL_DTYPE_OTHER &&
                               !(is_last && (!input->is_strided || input->n_dims == 5)));
    bool is_laid_out = format == KL_FORMAT_PRESERVE ||
                       format == (is_last ? KL_FORMAT_CHANNELS_LAST : KL_FORMAT_CONTIGUOUS);
    if (dtype == input->dtype && result->device == input->device && !is_copied && is_laid_out) {
        return shape_itself(call, result);
    }
    result->outs[0].dtype = dtype;
    return KL_OK;
}

KL_DTYPE(cast)
{
    return cast_to(call, result, call->row->dtype_to, false);
}

/* to(dtype, non_blocking, copy), to(device, dtype, non_blocking, copy), to(other, non_blocking, copy);
 * to(0) is the first accelerator, which is not known by its number. */
KL_DTYPE(to)
{
    const KlMeta *other = kl_rules_input(call, 1);
    KlArgKind first = call->args[1].kind, second = call->args[2].kind;
    bool has_device = !kl_rules_is_given(call, 1) || first == KL_ARG_DEVICE;
    bool is_shifted = !has_device && second == KL_ARG_BOOL; /* no dtype before non_blocking */
    bool is_known =
        (has_device || first == KL_ARG_DTYPE || other != NULL) &&
        (is_shifted || !kl_rules_is_given(call, 2) || (has_device && second == KL_ARG_DTYPE));
    kl_rules_lend(call, result, 1);
    kl_rules_require(call, is_known && !(is_shifted && kl_rules_is_given(call, 4)));
    KlDtype dtype = kl_rules_dtype(call, other != NULL ? other->dtype : call->inputs[0]->dtype);
    const KlArg *device = kl_rules_find(call, KL_ARG_DEVICE);
    result->device = device != NULL  ? (uint8_t)device->u.i
                     : other != NULL ? other->device
                                     : call->inputs[0]->device;
    return cast_to(call, result, dtype, kl_rules_bool(call, is_shifted ? 3 : 4, false));
}

KL_DTYPE(type_as)
{
    const KlMeta *other = kl_rules_tensor(call, 1, 0, KL_DIMS_MAX);
    kl_rules_lend(call, result, 1);
    result->device = other->device;
    return cast_to(call, result, other->dtype, false);
}

/* x.to_dense(dtype=None): what has rows is dense already */
KL_DTYPE(to_dense)
{
    return cast_to(call, result, kl_rules_dtype(call, call->inputs[0]->dtype), false);
}

/* x.type(dtype); x.type() only returns the name of the type */
KL_DTYPE(type)
{
    return call->args[1].kind == KL_ARG_DTYPE ? cast_to(call, result, call->args[1].u.dtype, false)
                                              : KL_DECLINED;
}

/* --- new values ------------------------------------------------------------------------------------------ */

/* Decline the call unless the words from `first` to the options are numbers; they may be left out. */
static void
check_numbers(const KlCall *call, uint32_t first)
{
    for (uint32_t i = first; i < call->row->first_option; i++) {
        kl_rules_require(call,
                         call->args[i].kind == KL_ARG_ABSENT || kl_rules_is_number(&call->args[i]));
    }
}

/* Check the options: dtype, layout, device, pin_memory, requires_grad. Set only the device. */
static void
read_options(const KlCall *call, KlInferred *result)
{
    const uint32_t first = call->row->first_option;
    const KlArg *dtype = &call->args[first], *device = &call->args[first + 2];
    const bool has_device = kl_rules_is_given(call, first + 2);
    kl_rules_require(call, !kl_rules_bool(call, first + 3, false) &&
                               !kl_rules_bool(call, first + 4, false) &&
                               !kl_rules_is_given(call, first + 1) &&
                               (!has_device || device->kind == KL_ARG_DEVICE) &&
                               (!kl_rules_is_given(call, first) ||
                                (dtype->kind == KL_ARG_DTYPE && dtype->u.dtype != KL_DTYPE_OTHER)));
    result->device = has_device ? (uint8_t)device->u.i : result->device;
}

/* input, numbers, options, memory_format */
KL_SHAPE(like)
{
    check_numbers(call, 1);
    read_options(call, result);
    KlFormat format = get_format(call, call->row->first_option + 5, KL_FORMAT_PRESERVE);
    return set_format(kl_rules_out(result, call->inputs[0]), call->inputs[0], format);
}

/* input, sizes, numbers, options */
KL_SHAPE(new)
{
    uint32_t n = 0;
    const int64_t *sizes = kl_rules_ints(call, 1, &n);
    KlMeta *out = kl_rules_outs(result, 1);
    check_numbers(call, 2);
    read_options(call, result);
    if (n > KL_DIMS_MAX) {
        return KL_DECLINED;
    }
    for (; out->n_dims < (int32_t)n; out->n_dims++) {
        kl_rules_check(call, sizes[out->n_dims] >= 0);
        out->shape[out->n_dims] = sizes[out->n_dims];
    }
    kl_meta_set_contiguous(out);
    return KL_OK;
}

/* The value depends on no row. Whether one of its sizes is the number of rows is decided when a call reads it. */
KL_PLACE(constant)
{
    result->split.is_open = true;
    for (int32_t dim = 0; dim < result->outs[0].n_dims; dim++) {
        (void)kl_rules_rewrite(result, 1, (uint32_t)dim, 0, 0);
    }
    return KL_OK;
}
