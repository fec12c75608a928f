/* SPDX-License-Identifier: Apache-2.0 */
/* rules_like.c - copies, casts, and new values that take only a shape or a dtype from another. */
#include "rules.h"

/* Get the memory format in args[arg]; PRESERVE is torch's default for copies. */
static KlStatus
get_format(const KlCall *call, uint32_t arg, KlFormat fallback, KlFormat *format)
{
    bool is_given = kl_rules_is_given(call, arg);
    bool is_format = is_given && call->args[arg].kind == KL_ARG_FORMAT;
    *format = is_format ? (KlFormat)call->args[arg].u.i : fallback;
    return is_given && !is_format ? KL_DECLINED : KL_OK;
}

static KlStatus
set_format(KlMeta *out, const KlMeta *input, KlFormat format)
{
    if (format == KL_FORMAT_PRESERVE) {
        kl_rules_preserve(out, input);
        return KL_OK;
    }
    if (format == KL_FORMAT_CONTIGUOUS) {
        kl_meta_set_contiguous(out);
        return KL_OK;
    }
    if (format == KL_FORMAT_CHANNELS_LAST && out->n_dims == 4) {
        kl_rules_set_channels_last(out);
        return KL_OK;
    }
    return KL_DECLINED;
}

/* Make the output the first input, the same Python object. */
static void
set_same(const KlCall *call, KlInferred *result)
{
    result->outs[0] = *call->inputs[0];
    result->outs[0].place = KL_PLACE_WHOLE;
    kl_rules_alias(result, KL_ALIAS_SAME, 0);
}

/* Whether a dim has size 1. Without one, a dense value has only one row-major stride order. */
static bool
has_one(const KlMeta *meta)
{
    for (int32_t dim = 0; dim < meta->n_dims; dim++) {
        if (meta->shape[dim] <= 1) {
            return true;
        }
    }
    return false;
}

KL_SHAPE(contiguous)
{
    const KlMeta *input = call->inputs[0];
    KlFormat format = KL_FORMAT_CONTIGUOUS;
    KlStatus status = get_format(call, 1, KL_FORMAT_CONTIGUOUS, &format);
    if (status != KL_OK || format == KL_FORMAT_PRESERVE) {
        return KL_DECLINED;
    }
    status = kl_rules_out(result, input, error);
    if (status != KL_OK) {
        return status;
    }
    bool is_contiguous = format == KL_FORMAT_CONTIGUOUS && kl_meta_is_contiguous(input);
    bool is_last = format == KL_FORMAT_CHANNELS_LAST && kl_rules_is_channels_last(input);
    if (is_contiguous || is_last) {
        set_same(call, result);
        return KL_OK;
    }
    if (!input->is_strided) {
        kl_rules_alias(result, KL_ALIAS_MAYBE, 0);
        return has_one(input) ? KL_OK : set_format(&result->outs[0], input, format);
    }
    return set_format(&result->outs[0], input, format);
}

/* The first input itself. */
KL_SHAPE(itself)
{
    KlStatus status = kl_rules_out(result, call->inputs[0], error);
    if (status == KL_OK) {
        set_same(call, result);
    }
    return status;
}

KL_SHAPE(clone)
{
    KlFormat format = KL_FORMAT_PRESERVE;
    KlStatus status = get_format(call, 1, KL_FORMAT_PRESERVE, &format);
    status = status == KL_OK ? kl_rules_out(result, call->inputs[0], error) : status;
    return status == KL_OK ? set_format(&result->outs[0], call->inputs[0], format) : status;
}

/* Return the memory format among a cast's arguments. */
static KlFormat
find_format(const KlCall *call)
{
    const KlArg *found = kl_rules_find(call, KL_ARG_FORMAT);
    return found != NULL ? (KlFormat)found->u.i : KL_FORMAT_PRESERVE;
}

/* x.float(memory_format=None): a copy, until the dtype rule finds that none is needed */
KL_SHAPE(cast)
{
    if (kl_rules_find(call, KL_ARG_TEXT) != NULL) {
        return KL_DECLINED;
    }
    KlStatus status = kl_rules_out(result, call->inputs[0], error);
    return status == KL_OK ? set_format(&result->outs[0], call->inputs[0], find_format(call))
                           : status;
}

static KlStatus
cast_to(const KlCall *call, KlInferred *result, KlDtype dtype, bool is_copied)
{
    const KlMeta *input = call->inputs[0];
    KlFormat format = find_format(call);
    if (dtype == KL_DTYPE_OTHER) {
        return KL_DECLINED;
    }
    /* torch compares with the format it would suggest, not with the strides */
    bool is_last = format != KL_FORMAT_PRESERVE && kl_rules_is_like_channels_last(input);
    if (is_last && (!input->is_strided || input->n_dims == 5)) {
        return KL_DECLINED;
    }
    bool is_laid_out = format == KL_FORMAT_PRESERVE ||
                       format == (is_last ? KL_FORMAT_CHANNELS_LAST : KL_FORMAT_CONTIGUOUS);
    if (dtype == input->dtype && result->device == input->device && !is_copied && is_laid_out) {
        set_same(call, result);
        return KL_OK;
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
    bool is_copied = false;
    kl_rules_lend(call, result, 1);
    KlStatus status = kl_rules_bool(call, is_shifted ? 3 : 4, false, &is_copied);
    if (!is_known || status != KL_OK || (is_shifted && kl_rules_is_given(call, 4))) {
        return KL_DECLINED;
    }
    KlDtype dtype = kl_rules_dtype(call, other != NULL ? other->dtype : call->inputs[0]->dtype);
    const KlArg *device = kl_rules_find(call, KL_ARG_DEVICE);
    result->device = device != NULL  ? (uint8_t)device->u.i
                     : other != NULL ? other->device
                                     : call->inputs[0]->device;
    return cast_to(call, result, dtype, is_copied);
}

KL_DTYPE(type_as)
{
    const KlMeta *other = kl_rules_input(call, 1);
    if (other == NULL) {
        return KL_DECLINED;
    }
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

/* Check that the words from `first` to the options are numbers; they may be left out. */
static KlStatus
check_numbers(const KlCall *call, uint32_t first)
{
    for (uint32_t i = first; i < call->row->first_option; i++) {
        if (call->args[i].kind != KL_ARG_ABSENT && !kl_rules_is_number(&call->args[i])) {
            return KL_DECLINED;
        }
    }
    return KL_OK;
}

/* Check args[first] to args[first + 4]: dtype, layout, device, pin_memory, requires_grad. Set only the device. */
static KlStatus
read_options(const KlCall *call, KlInferred *result, uint32_t first)
{
    bool is_pinned = false, is_leaf = false;
    if (kl_rules_bool(call, first + 3, false, &is_pinned) != KL_OK ||
        kl_rules_bool(call, first + 4, false, &is_leaf) != KL_OK || is_pinned || is_leaf ||
        kl_rules_is_given(call, first + 1)) {
        return KL_DECLINED;
    }
    if (kl_rules_is_given(call, first + 2)) {
        if (call->args[first + 2].kind != KL_ARG_DEVICE) {
            return KL_DECLINED;
        }
        result->device = (uint8_t)call->args[first + 2].u.i;
    }
    bool has_dtype = kl_rules_is_given(call, first);
    bool is_dtype =
        call->args[first].kind == KL_ARG_DTYPE && call->args[first].u.dtype != KL_DTYPE_OTHER;
    return has_dtype && !is_dtype ? KL_DECLINED : KL_OK;
}

/* input, numbers, options, memory_format */
KL_SHAPE(like)
{
    const uint32_t first = call->row->first_option;
    KlFormat format = KL_FORMAT_PRESERVE;
    KlStatus status = check_numbers(call, 1);
    status = status == KL_OK ? read_options(call, result, first) : status;
    status = status == KL_OK ? get_format(call, first + 5, KL_FORMAT_PRESERVE, &format) : status;
    status = status == KL_OK ? kl_rules_out(result, call->inputs[0], error) : status;
    return status == KL_OK ? set_format(&result->outs[0], call->inputs[0], format) : status;
}

KL_DTYPE(like)
{
    return kl_rules_set_dtypes(result, kl_rules_dtype(call, call->inputs[0]->dtype));
}

KL_DTYPE(like_float)
{
    KlStatus status = dtype_like(call, result, error);
    return status == KL_OK && !kl_meta_dtype_is_float(result->outs[0].dtype) ? KL_DECLINED : status;
}

KL_DTYPE(like_real)
{
    KlStatus status = dtype_like(call, result, error);
    return status == KL_OK && kl_meta_dtype_is_complex(result->outs[0].dtype) ? KL_DECLINED
                                                                              : status;
}

/* input, sizes, numbers, options */
KL_SHAPE(new)
{
    const int64_t *sizes = NULL;
    uint32_t n = 0;
    KlStatus status = check_numbers(call, 2);
    status = status == KL_OK ? kl_rules_ints(call, 1, &sizes, &n) : status;
    status = status == KL_OK ? read_options(call, result, call->row->first_option) : status;
    for (uint32_t i = 0; status == KL_OK && i < n; i++) {
        if (sizes[i] < 0) {
            return kl_error_set(error, KL_ERROR_ARGUMENT, "a size of %lld", (long long)sizes[i]);
        }
    }
    status = status == KL_OK ? kl_rules_out_shape(result, sizes, (int32_t)n, error) : status;
    if (status == KL_OK) {
        kl_meta_set_contiguous(&result->outs[0]);
    }
    return status;
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
