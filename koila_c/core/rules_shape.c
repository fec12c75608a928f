/* SPDX-License-Identifier: Apache-2.0 */
/* rules_shape.c - shapes of results that follow from their inputs' shapes alone: elementwise ops. */
#include "rules.h"

#include <string.h>

KlMeta *
kl_rules_outs_like(KlInferred *result, uint32_t n, const KlMeta *like)
{
    for (uint32_t i = 0; i < n; i++) {
        result->outs[i] = (KlMeta){.place = KL_PLACE_WHOLE, .n_dims = like->n_dims};
        memcpy(result->outs[i].shape, like->shape, (size_t)like->n_dims * sizeof(like->shape[0]));
    }
    result->n_outs = n;
    return result->outs;
}

KlMeta *
kl_rules_outs(KlInferred *result, uint32_t n)
{
    static const KlMeta scalar = {.n_dims = 0};
    return kl_rules_outs_like(result, n, &scalar);
}

KlMeta *
kl_rules_out(KlInferred *result, const KlMeta *like)
{
    return kl_rules_outs_like(result, 1, like);
}

KlStatus
kl_rules_out_contiguous(KlInferred *result, const KlMeta *like)
{
    kl_meta_set_contiguous(kl_rules_out(result, like));
    return KL_OK;
}

void
kl_rules_set_contiguous(KlInferred *result)
{
    for (uint32_t i = 0; i < result->n_outs; i++) {
        kl_meta_set_contiguous(&result->outs[i]);
    }
}

KlMeta
kl_rules_without(const KlCall *call, KlInferred *result, uint32_t dims, bool is_kept)
{
    const KlMeta *input = call->inputs[0];
    KlMeta out = {.is_strided = input->is_strided, .place = KL_PLACE_WHOLE};
    for (int32_t dim = 0; dim < input->n_dims; dim++) {
        bool is_dropped = (dims >> dim & 1) != 0;
        result->dim_map[dim] = is_dropped ? -1 : (int8_t)out.n_dims;
        if (!is_dropped || is_kept) {
            out.strides[out.n_dims] = input->strides[dim];
            out.shape[out.n_dims++] = is_dropped ? 1 : input->shape[dim];
        }
    }
    return out;
}

void
kl_rules_alias(KlInferred *result, KlAlias alias, uint32_t input)
{
    result->alias = alias;
    result->alias_input = input;
}

void
kl_rules_lend(const KlCall *call, KlInferred *result, uint32_t arg)
{
    if (call->args[arg].kind == KL_ARG_VALUE && call->args[arg].input < 64) {
        result->inputs_no_grad |= UINT64_C(1) << call->args[arg].input;
    }
}

void
kl_rules_broadcast(const KlCall *call, KlMeta *out, const KlMeta *meta)
{
    if (meta->n_dims > out->n_dims) {
        int32_t shift = meta->n_dims - out->n_dims;
        for (int32_t dim = meta->n_dims - 1; dim >= 0; dim--) {
            out->shape[dim] = dim >= shift ? out->shape[dim - shift] : 1;
        }
        out->n_dims = meta->n_dims;
    }
    int32_t shift = out->n_dims - meta->n_dims;
    for (int32_t dim = shift; dim < out->n_dims; dim++) {
        int64_t size = meta->shape[dim - shift];
        if (out->shape[dim] == 1) {
            out->shape[dim] = size;
        } else {
            kl_rules_check(call, size == 1 || size == out->shape[dim]);
        }
    }
}

void
kl_rules_broadcast_all(const KlCall *call, KlMeta *out)
{
    for (uint32_t i = 0; i < call->n_inputs; i++) {
        kl_rules_broadcast(call, out, call->inputs[i]);
    }
}

bool
kl_rules_fits(const KlMeta *meta, const KlMeta *to)
{
    int32_t before = to->n_dims - meta->n_dims;
    bool is_fit = before >= 0;
    for (int32_t dim = 0; is_fit && dim < meta->n_dims; dim++) {
        is_fit = meta->shape[dim] == 1 || meta->shape[dim] == to->shape[before + dim];
    }
    return is_fit;
}

/* As TensorIterator lays out the result. Return KL_OK. */
static KlStatus
iterate_all(const KlCall *call, KlInferred *result, bool is_mixed)
{
    KlMeta *out = kl_rules_outs(result, 1);
    kl_rules_broadcast_all(call, out);
    kl_rules_iterate(out, call->inputs, call->n_inputs, is_mixed);
    return KL_OK;
}

/* Whether one of the first `n` words is a number. It counts as a 0-dim tensor, so TensorIterator does not use its fast
 * path. */
static bool
has_number(const KlCall *call, uint32_t n)
{
    bool is_found = false;
    for (uint32_t i = 0; i < n && i < call->n_args; i++) {
        is_found = is_found || kl_rules_is_number(&call->args[i]);
    }
    return is_found;
}

KL_SHAPE(broadcast)
{
    return iterate_all(call, result, has_number(call, 2));
}

KL_SHAPE(tensor_pair)
{
    bool is_pair = call->args[0].kind == KL_ARG_VALUE && call->args[1].kind == KL_ARG_VALUE;
    return is_pair ? shape_broadcast(call, result) : KL_DECLINED;
}

/* Numbers are parameters, no operands. */
KL_SHAPE(tensors)
{
    return iterate_all(call, result, false);
}

/* pow(2, x) makes a tensor of its number, pow(x, 2) does not. */
KL_SHAPE(pow)
{
    bool is_parameter = kl_rules_is_number(&call->args[1]);
    return is_parameter ? shape_tensors(call, result) : shape_broadcast(call, result);
}

/* The first two inputs are exchanged: rsub(x, y) is y - x; x.where(condition, y). */
KL_SHAPE(swapped)
{
    KlMeta *out = kl_rules_outs(result, 1);
    kl_rules_broadcast_all(call, out);
    if (call->n_inputs > 3) {
        return KL_DECLINED;
    }
    const KlMeta *operands[3] = {NULL};
    for (uint32_t i = 0; i < call->n_inputs; i++) {
        operands[i] = call->inputs[i < 2 && call->n_inputs > 1 ? 1 - i : i];
    }
    kl_rules_iterate(out, operands, call->n_inputs, has_number(call, 3));
    return KL_OK;
}

KL_SHAPE(where)
{
    /* where(condition) is nonzero */
    kl_rules_require(call, kl_rules_is_given(call, 1) && kl_rules_is_given(call, 2));
    return iterate_all(call, result, has_number(call, 3));
}

static bool
is_scalar(const KlCall *call, uint32_t arg)
{
    const KlMeta *value = kl_rules_input(call, arg);
    return value == NULL ? kl_rules_is_number(&call->args[arg]) : value->n_dims == 0;
}

/* masked_fill(x, mask, value): a row-major copy, filled */
KL_SHAPE(masked_fill)
{
    const KlMeta *mask = kl_rules_input(call, 1);
    KlMeta *out = kl_rules_outs(result, 1);
    kl_rules_broadcast_all(call, out);
    kl_meta_set_contiguous(out);
    bool is_fit = mask != NULL && mask->dtype == KL_DTYPE_BOOL && is_scalar(call, 2);
    return is_fit ? KL_OK : KL_DECLINED;
}

/* fill_(x, value): a number or a 0-dim tensor */
KL_SHAPE(fill)
{
    (void)kl_rules_out(result, call->inputs[0]);
    return is_scalar(call, 1) ? KL_OK : KL_DECLINED;
}

/* The shape and the order of dims of the first input, new memory. */
KL_SHAPE(same)
{
    kl_rules_iterate(kl_rules_out(result, call->inputs[0]), call->inputs, 1, false);
    return KL_OK;
}

/* The shape of the first input, the strides of empty_like. */
KL_SHAPE(preserve)
{
    kl_rules_preserve(kl_rules_out(result, call->inputs[0]), call->inputs[0]);
    return KL_OK;
}

/* isinf runs abs and a comparison with a number, so the rule for the layout is applied twice. */
KL_SHAPE(isinf)
{
    (void)shape_same(call, result);
    KlMeta between = result->outs[0];
    const KlMeta *operand = &between;
    kl_rules_iterate(&result->outs[0], &operand, 1, true);
    result->outs[0].is_strided &= kl_meta_n_elements(&between) > 0;
    return KL_OK;
}

/* The output of log_sigmoid is row-major for any input. */
KL_SHAPE(row_major)
{
    return kl_rules_out_contiguous(result, call->inputs[0]);
}
