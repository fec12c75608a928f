/* SPDX-License-Identifier: Apache-2.0 */
/* rules_reduce.c - shapes of reductions, and of ops that work along a dim: sort, cumsum, topk. Their place
 * rules (rules_place.c) follow from dim_map: a dim that is reduced or mixed has -1 there. */
#include "rules.h"

/* Make `n_outs` dense outputs without the dims of the set, or with size 1 instead. Return KL_OK. */
static KlStatus
reduce_dims(const KlCall *call, KlInferred *result, uint32_t dims, bool is_kept, uint32_t n_outs)
{
    const KlMeta out = kl_rules_without(call, result, dims, is_kept);
    (void)kl_rules_outs_like(result, n_outs, &out);
    kl_rules_set_contiguous(result);
    return KL_OK;
}

/* Reduce the dims in args[arg]; the next word is keepdim. */
static KlStatus
reduce_args(const KlCall *call, KlInferred *result, uint32_t arg)
{
    uint32_t dims = kl_rules_dims(call, arg, call->inputs[0]->n_dims);
    return reduce_dims(call, result, dims, kl_rules_bool(call, arg + 1, false), 1);
}

KL_SHAPE(reduce)
{
    return reduce_args(call, result, 1);
}

/* all, any, count_nonzero: an empty tuple means no dim, not all of them. */
KL_SHAPE(reduce_given)
{
    bool is_empty = call->args[1].kind == KL_ARG_INTS && call->args[1].n == 0;
    return is_empty ? KL_DECLINED : reduce_args(call, result, 1);
}

KL_SHAPE(vector_norm)
{
    return reduce_args(call, result, 2);
}

/* std(x), std(x, unbiased), std(x, dim, unbiased, keepdim), std(x, dim, *, correction, keepdim) */
KL_SHAPE(std)
{
    bool is_unbiased_alone = call->args[1].kind == KL_ARG_BOOL;
    kl_rules_require(call, !is_unbiased_alone ||
                               !(kl_rules_is_given(call, 2) || kl_rules_is_given(call, 3)));
    uint32_t dims =
        is_unbiased_alone ? UINT32_MAX : kl_rules_dims(call, 1, call->inputs[0]->n_dims);
    bool is_kept = kl_rules_bool(call, 3, false);
    return reduce_dims(call, result, dims, is_kept, call->row->n_outs);
}

/* Reduce the dim in word 1, or all dims if none is given. Decline an empty dim, which has no largest entry. */
static KlStatus
reduce_one(const KlCall *call, KlInferred *result, uint32_t n_outs, bool is_index)
{
    const KlMeta *input = call->inputs[0];
    bool has_dim = kl_rules_is_given(call, 1), is_kept = kl_rules_bool(call, 2, false);
    kl_rules_require(call, kl_meta_n_elements(input) > 0 && call->args[1].kind != KL_ARG_INTS &&
                               (has_dim || !is_kept || is_index));
    uint32_t dims = has_dim ? UINT32_C(1) << kl_rules_dim(call, 1, 0, input->n_dims) : UINT32_MAX;
    return reduce_dims(call, result, dims, is_kept, n_outs);
}

KL_SHAPE(argmax)
{
    return reduce_one(call, result, 1, true);
}

KL_SHAPE(prod)
{
    return reduce_one(call, result, 1, false);
}

KL_SHAPE(amax)
{
    return kl_meta_n_elements(call->inputs[0]) == 0 ? KL_DECLINED : reduce_args(call, result, 1);
}

/* With a dim, values and indices. */
KL_SHAPE(median)
{
    return reduce_one(call, result, kl_rules_is_given(call, 1) ? 2 : 1, false);
}

/* max(x), max(x, dim, keepdim) -> values, indices; max(x, other) is elementwise */
KL_SHAPE(max)
{
    if (call->args[1].kind == KL_ARG_VALUE) {
        return kl_rules_is_given(call, 2) ? KL_DECLINED : shape_broadcast(call, result);
    }
    return shape_median(call, result);
}

KL_DTYPE(max)
{
    bool is_other = call->args[1].kind == KL_ARG_VALUE;
    return (is_other ? dtype_promote : dtype_value_index)(call, result);
}

/* max without dim is split like amax, with the number of elements that have the maximum. With a dim it is not: if
 * elements are equal, torch chooses the index. */
KL_PLACE(max)
{
    if (call->args[1].kind == KL_ARG_VALUE) {
        return place_rowwise(call, result);
    }
    return kl_rules_is_given(call, 1) ? place_along(call, result)
                                      : kl_rules_reduce_moved(call, result, KL_REDUCE_AMAX);
}

/* mode, kthvalue: reduce one dim, by default the last, to values and indices. The last two words are dim and keepdim. */
KL_SHAPE(reduce_last)
{
    const uint32_t arg = call->n_args - 2;
    kl_rules_require(call, kl_meta_n_elements(call->inputs[0]) > 0);
    int32_t dim = kl_rules_dim(call, arg, -1, call->inputs[0]->n_dims);
    bool is_kept = kl_rules_bool(call, arg + 1, false);
    return reduce_dims(call, result, UINT32_C(1) << dim, is_kept, 2);
}

KL_PLACE(vector_norm)
{
    double order = kl_rules_float(call, 1, 2);
    if (result->dim_map[call->inputs[0]->place.dim] >= 0) {
        return place_along(call, result);
    }
    if (order > 1e300 || order < -1e300) {
        return kl_rules_once(result, "an infinity norm shares ties among the samples");
    }
    return kl_rules_reduce(result, order > 0 || order < 0 ? KL_REDUCE_NORM : KL_REDUCE_SUM);
}

/* --- along a dim -------------------------------------------------------------------------------------- */

/* Make `n_outs` outputs of the input's shape. Return the dim in args[arg], which the op mixes. */
static int32_t
along_dim(const KlCall *call, KlInferred *result, uint32_t arg, uint32_t n_outs)
{
    int32_t dim = kl_rules_dim(call, arg, -1, call->inputs[0]->n_dims);
    (void)kl_rules_outs_like(result, n_outs, call->inputs[0]);
    result->dim_map[dim] = -1;
    return dim;
}

/* cumsum, and cummax with its indices */
KL_SHAPE(cumulate)
{
    (void)along_dim(call, result, 1, call->row->n_outs);
    kl_rules_set_contiguous(result);
    return kl_rules_is_given(call, 1) ? KL_OK : KL_DECLINED;
}

/* sort, and argsort without the values */
KL_SHAPE(sort)
{
    (void)along_dim(call, result, 1, call->row->n_outs);
    for (uint32_t i = 0; i < result->n_outs; i++) {
        kl_rules_preserve(&result->outs[i], call->inputs[0]);
    }
    return KL_OK;
}

KL_SHAPE(topk)
{
    const KlMeta *input = call->inputs[0];
    int64_t k = kl_rules_int(call, 1, 0);
    int32_t dim = along_dim(call, result, 2, 2);
    int64_t size = input->n_dims == 0 ? 1 : input->shape[dim];
    kl_rules_check(call, k >= 0 && k <= size);
    for (uint32_t i = 0; i < 2 && input->n_dims > 0; i++) {
        result->outs[i].shape[dim] = k;
    }
    kl_rules_set_contiguous(result);
    return KL_OK;
}

KL_SHAPE(histc)
{
    const KlMeta counts = {.n_dims = 1, .shape = {kl_rules_int(call, 1, 100)}};
    (void)kl_rules_out(result, &counts);
    return counts.shape[0] > 0 ? KL_OK : KL_DECLINED;
}
