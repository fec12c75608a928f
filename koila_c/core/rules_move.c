/* SPDX-License-Identifier: Apache-2.0 */
/* rules_move.c - views that reorder, remove, add or repeat whole dims. A shape rule stores in dim_map the output dim of
 * each input dim, from which place_moved finds the rows. */
#include "rules.h"

#include <string.h>

/* Make one output that is a view of the first input; its dims are added later. */
static KlStatus
begin_view(const KlCall *call, KlInferred *result, KlError *error)
{
    KlStatus status = kl_ops_reserve_outs(result, 1, error);
    if (status == KL_OK) {
        result->outs[0].is_strided = call->inputs[0]->is_strided;
        kl_rules_alias(result, KL_ALIAS_VIEW, 0);
    }
    return status;
}

static void
push_dim(KlMeta *out, int64_t size, int64_t stride)
{
    out->shape[out->n_dims] = size;
    out->strides[out->n_dims] = stride;
    out->n_dims++;
}

/* Make one output that is a view of the first input without the dims of the set. */
static KlStatus
view_without(const KlCall *call, KlInferred *result, uint32_t dims, KlError *error)
{
    const KlMeta *input = call->inputs[0];
    KlStatus status = begin_view(call, result, error);
    for (int32_t dim = 0; status == KL_OK && dim < input->n_dims; dim++) {
        bool is_dropped = (dims >> dim & 1) != 0;
        result->dim_map[dim] = is_dropped ? -1 : (int8_t)result->outs[0].n_dims;
        if (!is_dropped) {
            push_dim(&result->outs[0], input->shape[dim], input->strides[dim]);
        }
    }
    return status;
}

/* Output dim i is input dim order[i]. */
static KlStatus
view_in_order(const KlCall *call, KlInferred *result, const int32_t *order, KlError *error)
{
    const KlMeta *input = call->inputs[0];
    KlStatus status = begin_view(call, result, error);
    for (int32_t i = 0; status == KL_OK && i < input->n_dims; i++) {
        push_dim(&result->outs[0], input->shape[order[i]], input->strides[order[i]]);
        result->dim_map[order[i]] = (int8_t)i;
    }
    return status;
}

KL_SHAPE(permute)
{
    const KlMeta *input = call->inputs[0];
    int32_t order[KL_DIMS_MAX] = {0};
    uint32_t used = 0;
    const int64_t *dims = NULL;
    uint32_t n = 0;
    KlStatus status = kl_rules_ints(call, 1, &dims, &n);
    if (status == KL_OK && (int32_t)n != input->n_dims) {
        return kl_error_set(error, KL_ERROR_ARGUMENT, "%u dims given for a value of %d", n,
                            (int)input->n_dims);
    }
    for (uint32_t i = 0; status == KL_OK && i < n; i++) {
        status = kl_rules_wrap(dims[i], input->n_dims, &order[i], error);
        if (status == KL_OK && (used >> order[i] & 1) != 0) {
            return kl_error_set(error, KL_ERROR_ARGUMENT, "dim %d appears twice", (int)order[i]);
        }
        used |= UINT32_C(1) << order[i];
    }
    return status == KL_OK ? view_in_order(call, result, order, error) : status;
}

static KlStatus
swap_dims(const KlCall *call, KlInferred *result, int32_t dim0, int32_t dim1, KlError *error)
{
    int32_t order[KL_DIMS_MAX] = {0};
    for (int32_t i = 0; i < call->inputs[0]->n_dims; i++) {
        order[i] = i == dim0 ? dim1 : i == dim1 ? dim0 : i;
    }
    return view_in_order(call, result, order, error);
}

KL_SHAPE(transpose)
{
    int32_t n_dims = call->inputs[0]->n_dims, dim0 = 0, dim1 = 0;
    if (!kl_rules_is_given(call, 1) || !kl_rules_is_given(call, 2)) {
        return KL_DECLINED;
    }
    KlStatus status = kl_rules_dim(call, 1, 0, n_dims, &dim0, error);
    status = status == KL_OK ? kl_rules_dim(call, 2, 0, n_dims, &dim1, error) : status;
    return status == KL_OK ? swap_dims(call, result, dim0, dim1, error) : status;
}

KL_SHAPE(t)
{
    int32_t n_dims = call->inputs[0]->n_dims;
    if (n_dims > 2) {
        return kl_error_set(error, KL_ERROR_SHAPE, "a value of %d dims has no t()", (int)n_dims);
    }
    return swap_dims(call, result, 0, n_dims == 2 ? 1 : 0, error);
}

KL_SHAPE(movedim)
{
    const KlMeta *input = call->inputs[0];
    int32_t order[KL_DIMS_MAX];
    const int64_t *from = NULL, *to = NULL;
    uint32_t n = 0, n_to = 0, used = 0;
    KlStatus status = kl_rules_ints(call, 1, &from, &n);
    status = status == KL_OK ? kl_rules_ints(call, 2, &to, &n_to) : status;
    if (status == KL_OK && (n != n_to || input->n_dims == 0)) {
        return KL_DECLINED;
    }
    for (int32_t i = 0; i < input->n_dims; i++) {
        order[i] = -1;
    }
    for (uint32_t i = 0; status == KL_OK && i < n; i++) {
        int32_t source = 0, target = 0;
        status = kl_rules_wrap(from[i], input->n_dims, &source, error);
        status = status == KL_OK ? kl_rules_wrap(to[i], input->n_dims, &target, error) : status;
        if (status == KL_OK && ((used >> source & 1) != 0 || order[target] >= 0)) {
            return kl_error_set(error, KL_ERROR_ARGUMENT, "a dim appears twice");
        }
        if (status == KL_OK) {
            order[target] = source;
            used |= UINT32_C(1) << source;
        }
    }
    int32_t next = 0;
    for (int32_t i = 0; status == KL_OK && i < input->n_dims; i++) {
        while ((used >> next & 1) != 0) {
            next++;
        }
        if (order[i] < 0) {
            order[i] = next++;
        }
    }
    return status == KL_OK ? view_in_order(call, result, order, error) : status;
}

KL_SHAPE(unsqueeze)
{
    const KlMeta *input = call->inputs[0];
    int32_t at = 0;
    if (input->n_dims == KL_DIMS_MAX || !kl_rules_is_given(call, 1)) {
        return KL_DECLINED;
    }
    KlStatus status = kl_rules_dim(call, 1, 0, input->n_dims + 1, &at, error);
    status = status == KL_OK ? begin_view(call, result, error) : status;
    for (int32_t dim = 0; status == KL_OK && dim <= input->n_dims; dim++) {
        if (dim == at) {
            int64_t stride = dim < input->n_dims ? input->shape[dim] * input->strides[dim] : 1;
            push_dim(&result->outs[0], 1, stride);
        }
        if (dim < input->n_dims) {
            result->dim_map[dim] = (int8_t)result->outs[0].n_dims;
            push_dim(&result->outs[0], input->shape[dim], input->strides[dim]);
        }
    }
    return status;
}

KL_SHAPE(squeeze)
{
    const KlMeta *input = call->inputs[0];
    uint32_t dims = 0;
    if (call->args[1].kind == KL_ARG_NONE) {
        return KL_DECLINED;
    }
    bool is_empty = call->args[1].kind == KL_ARG_INTS && call->args[1].n == 0;
    KlStatus status = is_empty ? KL_OK : kl_rules_dims(call, 1, input->n_dims, &dims, error);
    for (int32_t dim = 0; status == KL_OK && dim < input->n_dims; dim++) {
        dims &= input->shape[dim] == 1 ? UINT32_MAX : ~(UINT32_C(1) << dim);
    }
    return status == KL_OK ? view_without(call, result, dims, error) : status;
}

/* Squeeze leaves a dim that consists of the rows as it is, but would remove it in a chunk of one row. */
KL_PLACE(squeeze)
{
    const KlPlace *place = &call->inputs[0]->place;
    uint32_t dims = 0;
    bool is_empty = call->args[1].kind == KL_ARG_INTS && call->args[1].n == 0;
    KlStatus status =
        is_empty ? KL_OK : kl_rules_dims(call, 1, call->inputs[0]->n_dims, &dims, error);
    if (status == KL_OK && (dims >> place->dim & 1) != 0 && place->outer * place->inner == 1) {
        return kl_rules_once(result, "squeeze would drop the batch in a chunk of one sample");
    }
    return status == KL_OK ? place_moved(call, result, error) : status;
}

KlStatus
kl_rules_expand(const KlMeta *input, KlMeta *out, const int64_t *sizes, int32_t n, KlError *error)
{
    int32_t shift = n - input->n_dims;
    if (shift < 0) {
        return kl_error_set(error, KL_ERROR_SHAPE, "a value of %d dims does not expand to %d",
                            (int)input->n_dims, (int)n);
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
        if (wanted < 0 || (size != wanted && size != 1)) {
            return kl_error_set(error, KL_ERROR_SHAPE,
                                "size %lld does not expand to %lld at dim %d", (long long)size,
                                (long long)wanted, (int)dim);
        }
        out->shape[dim] = wanted;
        out->strides[dim] = size == wanted ? stride : 0;
    }
    return KL_OK;
}

KL_SHAPE(expand)
{
    const KlMeta *input = call->inputs[0];
    const int64_t *sizes = NULL;
    uint32_t n = 0;
    if (kl_rules_ints(call, 1, &sizes, &n) != KL_OK || n > KL_DIMS_MAX ||
        !kl_rules_is_given(call, 1)) {
        return KL_DECLINED;
    }
    KlStatus status = begin_view(call, result, error);
    if (status == KL_OK) {
        status = kl_rules_expand(input, &result->outs[0], sizes, (int32_t)n, error);
    }
    for (int32_t dim = 0; status == KL_OK && dim < input->n_dims; dim++) {
        result->dim_map[dim] = (int8_t)(dim + (int32_t)n - input->n_dims);
    }
    return status;
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
    const KlMeta *other = kl_rules_input(call, 1);
    if (other == NULL) {
        return KL_DECLINED;
    }
    kl_rules_lend(call, result, 1);
    KlStatus status = begin_view(call, result, error);
    return status == KL_OK ? kl_rules_expand(call->inputs[0], &result->outs[0], other->shape,
                                             other->n_dims, error)
                           : status;
}

KL_SHAPE(diagonal)
{
    const KlMeta *input = call->inputs[0];
    int64_t offset = 0;
    int32_t dim1 = 0, dim2 = 0;
    KlStatus status = kl_rules_int(call, 1, 0, &offset);
    status = status == KL_OK ? kl_rules_dim(call, 2, 0, input->n_dims, &dim1, error) : status;
    status = status == KL_OK ? kl_rules_dim(call, 3, 1, input->n_dims, &dim2, error) : status;
    if (status == KL_OK && dim1 == dim2) {
        return kl_error_set(error, KL_ERROR_ARGUMENT, "the two dims of a diagonal must differ");
    }
    uint32_t dims = UINT32_C(1) << dim1 | UINT32_C(1) << dim2;
    status = status == KL_OK ? view_without(call, result, dims, error) : status;
    if (status != KL_OK) {
        return status;
    }
    int64_t size1 = input->shape[dim1] + (offset < 0 ? offset : 0);
    int64_t size2 = input->shape[dim2] - (offset > 0 ? offset : 0);
    int64_t size = size1 < size2 ? size1 : size2;
    push_dim(&result->outs[0], size > 0 ? size : 0, input->strides[dim1] + input->strides[dim2]);
    return KL_OK;
}

/* Get a dim in word 1, an int in word 2, and an int in word 3 if `third` is not NULL. */
static KlStatus
get_dim_and_ints(const KlCall *call, int32_t *dim, int64_t *second, int64_t *third, KlError *error)
{
    int32_t n_dims = call->inputs[0]->n_dims;
    KlStatus status = n_dims == 0 ? KL_DECLINED : kl_rules_dim(call, 1, 0, n_dims, dim, error);
    status = status == KL_OK ? kl_rules_int(call, 2, 0, second) : status;
    return status == KL_OK && third != NULL ? kl_rules_int(call, 3, 0, third) : status;
}

/* x.unfold(dim, size, step): windows of `size` in a new last dim. */
KL_SHAPE(unfold)
{
    const KlMeta *input = call->inputs[0];
    int32_t at = 0;
    int64_t size = 0, step = 0;
    if (input->n_dims == KL_DIMS_MAX) {
        return KL_DECLINED;
    }
    KlStatus status = get_dim_and_ints(call, &at, &size, &step, error);
    if (status == KL_OK && (size < 0 || size > input->shape[at] || step <= 0)) {
        return kl_error_set(error, KL_ERROR_ARGUMENT,
                            "windows of %lld by %lld do not fit into size %lld", (long long)size,
                            (long long)step, (long long)input->shape[at]);
    }
    status = status == KL_OK ? begin_view(call, result, error) : status;
    for (int32_t dim = 0; status == KL_OK && dim < input->n_dims; dim++) {
        if (dim == at) {
            push_dim(&result->outs[0], (input->shape[dim] - size) / step + 1,
                     input->strides[dim] * step);
            result->dim_map[dim] = -1;
        } else {
            push_dim(&result->outs[0], input->shape[dim], input->strides[dim]);
        }
    }
    if (status == KL_OK) {
        push_dim(&result->outs[0], size, input->strides[at]);
    }
    return status;
}

KL_SHAPE(select)
{
    const KlMeta *input = call->inputs[0];
    int32_t at = 0;
    int64_t index = 0;
    KlStatus status = get_dim_and_ints(call, &at, &index, NULL, error);
    if (status == KL_OK && (index >= input->shape[at] || index < -input->shape[at])) {
        return kl_error_set(error, KL_ERROR_ARGUMENT, "index %lld is out of range for size %lld",
                            (long long)index, (long long)input->shape[at]);
    }
    return status == KL_OK ? view_without(call, result, UINT32_C(1) << at, error) : status;
}

/* The first input again. */
KL_SHAPE(alias)
{
    KlStatus status = kl_rules_out(result, call->inputs[0], error);
    if (status == KL_OK) {
        memcpy(result->outs[0].strides, call->inputs[0]->strides, sizeof(result->outs[0].strides));
        result->outs[0].is_strided = call->inputs[0]->is_strided;
        kl_rules_alias(result, KL_ALIAS_VIEW, 0);
    }
    return status;
}

/* narrow(x, dim, start, length) */
KL_SHAPE(narrow)
{
    const KlMeta *input = call->inputs[0];
    int32_t at = 0;
    int64_t start = 0, length = 0;
    KlStatus status = get_dim_and_ints(call, &at, &start, &length, error);
    if (status != KL_OK) {
        return status;
    }
    int64_t size = input->shape[at];
    start += start < 0 ? size : 0;
    if (start < 0 || length < 0 || start > size - length) {
        return kl_error_set(error, KL_ERROR_ARGUMENT,
                            "%lld entries from %lld are not within size %lld", (long long)length,
                            (long long)start, (long long)size);
    }
    status = shape_alias(call, result, error);
    if (status == KL_OK) {
        result->outs[0].shape[at] = length;
    }
    return status;
}

/* A part that consists of whole repetitions of all rows still has rows, as in a slice. */
KL_PLACE(narrow)
{
    KlPlace place = call->inputs[0]->place;
    int64_t turn = kl_rules_rows(call, result) * place.inner;
    int32_t at = kl_rules_legal_dim(call, 1, 0, call->inputs[0]->n_dims);
    if (at != place.dim) {
        return place_moved(call, result, error);
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
