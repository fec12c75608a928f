/* SPDX-License-Identifier: Apache-2.0 */
/* rules_move.c - views that reorder, remove, add or repeat whole dims. A shape rule stores in dim_map the output dim of
 * each input dim, from which place_moved finds the rows. */
#include "rules.h"

#include <string.h>

/* Make one output that is a view of the first input; its dims are added later. */
static KlMeta *
begin_view(const KlCall *call, KlInferred *result)
{
    KlMeta *out = kl_rules_outs(result, 1);
    out->is_strided = call->inputs[0]->is_strided;
    kl_rules_alias(result, KL_ALIAS_VIEW, 0);
    return out;
}

static void
push_dim(KlMeta *out, int64_t size, int64_t stride)
{
    out->shape[out->n_dims] = size;
    out->strides[out->n_dims] = stride;
    out->n_dims++;
}

/* Make one output that is a view of the first input without the dims of the set. */
static KlMeta *
view_without(const KlCall *call, KlInferred *result, uint32_t dims)
{
    KlMeta *out = begin_view(call, result);
    *out = kl_rules_without(call, result, dims, false);
    return out;
}

/* Output dim i is input dim order[i]. Return KL_OK. */
static KlStatus
view_in_order(const KlCall *call, KlInferred *result, const int32_t *order)
{
    const KlMeta *input = call->inputs[0];
    KlMeta *out = begin_view(call, result);
    for (int32_t i = 0; i < input->n_dims; i++) {
        push_dim(out, input->shape[order[i]], input->strides[order[i]]);
        result->dim_map[order[i]] = (int8_t)i;
    }
    return KL_OK;
}

KL_SHAPE(permute)
{
    const int32_t n_dims = call->inputs[0]->n_dims;
    int32_t order[KL_DIMS_MAX] = {0};
    uint32_t n = 0;
    const int64_t *dims = kl_rules_ints(call, 1, &n);
    if ((int32_t)n != n_dims) {
        return KL_ILLEGAL;
    }
    (void)kl_rules_dims(call, 1, n_dims); /* each at most once */
    for (uint32_t i = 0; i < n; i++) {
        order[i] = kl_rules_wrap(call, dims[i], n_dims);
    }
    return view_in_order(call, result, order);
}

static KlStatus
swap_dims(const KlCall *call, KlInferred *result, int32_t dim0, int32_t dim1)
{
    int32_t order[KL_DIMS_MAX] = {0};
    for (int32_t i = 0; i < call->inputs[0]->n_dims; i++) {
        order[i] = i == dim0 ? dim1 : i == dim1 ? dim0 : i;
    }
    return view_in_order(call, result, order);
}

KL_SHAPE(transpose)
{
    const int32_t n_dims = call->inputs[0]->n_dims;
    kl_rules_require(call, kl_rules_is_given(call, 1) && kl_rules_is_given(call, 2));
    int32_t dim0 = kl_rules_dim(call, 1, 0, n_dims), dim1 = kl_rules_dim(call, 2, 0, n_dims);
    return swap_dims(call, result, dim0, dim1);
}

KL_SHAPE(t)
{
    int32_t n_dims = call->inputs[0]->n_dims;
    kl_rules_check(call, n_dims <= 2);
    return swap_dims(call, result, 0, n_dims == 2 ? 1 : 0);
}

KL_SHAPE(unsqueeze)
{
    const KlMeta *input = call->inputs[0];
    if (input->n_dims == KL_DIMS_MAX || !kl_rules_is_given(call, 1)) {
        return KL_DECLINED;
    }
    int32_t at = kl_rules_dim(call, 1, 0, input->n_dims + 1);
    KlMeta *out = begin_view(call, result);
    for (int32_t dim = 0; dim <= input->n_dims; dim++) {
        if (dim == at) {
            int64_t stride = dim < input->n_dims ? input->shape[dim] * input->strides[dim] : 1;
            push_dim(out, 1, stride);
        }
        if (dim < input->n_dims) {
            result->dim_map[dim] = (int8_t)out->n_dims;
            push_dim(out, input->shape[dim], input->strides[dim]);
        }
    }
    return KL_OK;
}

/* Return the dims that squeeze names; an empty tuple names none. */
static uint32_t
squeezed_dims(const KlCall *call)
{
    bool is_empty = call->args[1].kind == KL_ARG_INTS && call->args[1].n == 0;
    return is_empty ? 0 : kl_rules_dims(call, 1, call->inputs[0]->n_dims);
}

KL_SHAPE(squeeze)
{
    const KlMeta *input = call->inputs[0];
    uint32_t dims = squeezed_dims(call);
    for (int32_t dim = 0; dim < input->n_dims; dim++) {
        dims &= input->shape[dim] == 1 ? UINT32_MAX : ~(UINT32_C(1) << dim);
    }
    (void)view_without(call, result, dims);
    return call->args[1].kind == KL_ARG_NONE ? KL_DECLINED : KL_OK;
}

/* Squeeze leaves a dim that consists of the rows as it is, but would remove it in a chunk of one row. */
KL_PLACE(squeeze)
{
    const KlPlace *place = &call->inputs[0]->place;
    if ((squeezed_dims(call) >> place->dim & 1) != 0 && place->outer * place->inner == 1) {
        return kl_rules_once(result, "squeeze would drop the batch in a chunk of one sample");
    }
    return place_moved(call, result);
}

void
kl_rules_expand(const KlCall *call, const KlMeta *input, KlMeta *out, const int64_t *sizes,
                int32_t n)
{
    int32_t shift = n - input->n_dims;
    if (shift < 0) {
        kl_rules_check(call, false);
        return;
    }
    out->n_dims = n;
    for (int32_t dim = n - 1; dim >= 0; dim--) {
        int64_t size = dim >= shift ? input->shape[dim - shift] : 1;
        int64_t stride = 0;
        if (dim >= shift) {
            stride = input->strides[dim - shift];
        } else if (input->n_dims > 0) {
            stride = out->shape[dim + 1] * out->strides[dim + 1];
        }
        int64_t wanted = sizes[dim] == -1 && dim >= shift ? size : sizes[dim];
        kl_rules_check(call, wanted >= 0 && (size == wanted || size == 1));
        out->shape[dim] = wanted;
        out->strides[dim] = size == wanted ? stride : 0;
    }
}

KL_SHAPE(expand)
{
    const KlMeta *input = call->inputs[0];
    uint32_t n = 0;
    const int64_t *sizes = kl_rules_ints(call, 1, &n);
    if (n > KL_DIMS_MAX || !kl_rules_is_given(call, 1)) {
        return KL_DECLINED;
    }
    for (int32_t dim = 0; dim < input->n_dims; dim++) {
        result->dim_map[dim] = (int8_t)(dim + (int32_t)n - input->n_dims);
    }
    kl_rules_expand(call, input, begin_view(call, result), sizes, (int32_t)n);
    return KL_OK;
}

KL_PLACE(expand)
{
    KlPlace place = call->inputs[0]->place;
    int32_t dim = result->dim_map[place.dim];
    const KlArg *sizes = &call->args[1];
    if (result->outs[0].shape[dim] != call->inputs[0]->shape[place.dim]) {
        return kl_rules_once(result, "a batch of one sample is expanded");
    }
    int64_t size = sizes->kind == KL_ARG_INTS ? sizes->u.ints[dim] : sizes->u.i;
    if (size != -1) {
        (void)kl_rules_rewrite(result, 1, (uint32_t)dim, 0, place.outer * place.inner);
    }
    place.dim = dim;
    return kl_rules_at(result, place);
}

KL_SHAPE(expand_as)
{
    const KlMeta *other = kl_rules_tensor(call, 1, 0, KL_DIMS_MAX);
    kl_rules_lend(call, result, 1);
    kl_rules_expand(call, call->inputs[0], begin_view(call, result), other->shape, other->n_dims);
    return KL_OK;
}

KL_SHAPE(diagonal)
{
    const KlMeta *input = call->inputs[0];
    const int64_t offset = kl_rules_int(call, 1, 0);
    int32_t dim1 = kl_rules_dim(call, 2, 0, input->n_dims);
    int32_t dim2 = kl_rules_dim(call, 3, 1, input->n_dims);
    kl_rules_check(call, dim1 != dim2);
    KlMeta *out = view_without(call, result, UINT32_C(1) << dim1 | UINT32_C(1) << dim2);
    int64_t size1 = input->shape[dim1] + (offset < 0 ? offset : 0);
    int64_t size2 = input->shape[dim2] - (offset > 0 ? offset : 0);
    int64_t size = size1 < size2 ? size1 : size2;
    push_dim(out, size > 0 ? size : 0, input->strides[dim1] + input->strides[dim2]);
    return KL_OK;
}

/* x.unfold(dim, size, step): windows of `size` in a new last dim. */
KL_SHAPE(unfold)
{
    const KlMeta *input = call->inputs[0];
    int32_t at = kl_rules_dim(call, 1, 0, input->n_dims);
    int64_t size = kl_rules_int(call, 2, 0), step = kl_rules_int(call, 3, 0);
    if (input->n_dims == 0 || input->n_dims == KL_DIMS_MAX) {
        return KL_DECLINED;
    }
    if (size < 0 || size > input->shape[at] || step <= 0) {
        return KL_ILLEGAL;
    }
    KlMeta *out = begin_view(call, result);
    for (int32_t dim = 0; dim < input->n_dims; dim++) {
        if (dim == at) {
            push_dim(out, (input->shape[dim] - size) / step + 1, input->strides[dim] * step);
            result->dim_map[dim] = -1;
        } else {
            push_dim(out, input->shape[dim], input->strides[dim]);
        }
    }
    push_dim(out, size, input->strides[at]);
    return KL_OK;
}

KL_SHAPE(select)
{
    const KlMeta *input = call->inputs[0];
    int32_t at = kl_rules_dim(call, 1, 0, input->n_dims);
    const int64_t index = kl_rules_int(call, 2, 0);
    kl_rules_require(call, input->n_dims > 0);
    kl_rules_check(call, index < input->shape[at] && index >= -input->shape[at]);
    (void)view_without(call, result, UINT32_C(1) << at);
    return KL_OK;
}

/* The first input again. */
KL_SHAPE(alias)
{
    KlMeta *out = kl_rules_out(result, call->inputs[0]);
    memcpy(out->strides, call->inputs[0]->strides, sizeof(out->strides));
    out->is_strided = call->inputs[0]->is_strided;
    kl_rules_alias(result, KL_ALIAS_VIEW, 0);
    return KL_OK;
}

/* narrow(x, dim, start, length) */
KL_SHAPE(narrow)
{
    const KlMeta *input = call->inputs[0];
    int32_t at = kl_rules_dim(call, 1, 0, input->n_dims);
    int64_t start = kl_rules_int(call, 2, 0), length = kl_rules_int(call, 3, 0);
    kl_rules_require(call, input->n_dims > 0);
    int64_t size = input->shape[at];
    start += start < 0 ? size : 0;
    kl_rules_check(call, start >= 0 && length >= 0 && start <= size - length);
    (void)shape_alias(call, result);
    result->outs[0].shape[at] = length;
    return KL_OK;
}

/* A part that consists of whole repetitions of all rows still has rows, as in a slice. */
KL_PLACE(narrow)
{
    KlPlace place = call->inputs[0]->place;
    int64_t turn = kl_rules_rows(call, result) * place.inner;
    int32_t at = kl_rules_dim(call, 1, 0, call->inputs[0]->n_dims);
    if (at != place.dim) {
        return place_moved(call, result);
    }
    int64_t start = call->args[2].u.i, length = call->args[3].u.i;
    if (start % turn != 0 || length % turn != 0 || length == 0) {
        return kl_rules_once_again(result, "a part of the samples is taken", at);
    }
    (void)kl_rules_rewrite(result, 2, 0, 0, start / turn * place.inner);
    (void)kl_rules_rewrite(result, 3, 0, 0, length / turn * place.inner);
    place.outer = length / turn;
    return kl_rules_at(result, place);
}
