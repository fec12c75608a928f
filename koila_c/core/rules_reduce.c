/* SPDX-License-Identifier: Apache-2.0 */
/* rules_reduce.c - shapes of reductions, and of ops that work along a dim: sort, cumsum, topk. Their place
 * rules (rules_place.c) follow from dim_map: a dim that is reduced or mixed has -1 there. */
#include "rules.h"

#include <string.h>

/* Make `n_outs` dense outputs without the dims of the set, or with size 1 instead. */
static KlStatus
reduce_dims(const KlCall *call, KlInferred *result, uint32_t dims, bool is_kept, uint32_t n_outs,
            KlError *error)
{
    const KlMeta *input = call->inputs[0];
    KlMeta out = {.place = KL_PLACE_WHOLE};
    for (int32_t dim = 0; dim < input->n_dims; dim++) {
        bool is_reduced = (dims >> dim & 1) != 0;
        result->dim_map[dim] = is_reduced ? -1 : (int8_t)out.n_dims;
        if (!is_reduced || is_kept) {
            out.shape[out.n_dims++] = is_reduced ? 1 : input->shape[dim];
        }
    }
    kl_meta_set_contiguous(&out);
    KlStatus status = kl_ops_reserve_outs(result, n_outs, error);
    for (uint32_t i = 0; status == KL_OK && i < n_outs; i++) {
        result->outs[i] = out;
    }
    return status;
}

/* Reduce the dims in args[arg]; keepdim is in args[arg_kept]. */
static KlStatus
reduce_args(const KlCall *call, KlInferred *result, uint32_t arg, uint32_t arg_kept, KlError *error)
{
    uint32_t dims = 0;
    bool is_kept = false;
    KlStatus status = kl_rules_dims(call, arg, call->inputs[0]->n_dims, &dims, error);
    status = status == KL_OK ? kl_rules_bool(call, arg_kept, false, &is_kept) : status;
    return status == KL_OK ? reduce_dims(call, result, dims, is_kept, 1, error) : status;
}

KL_SHAPE(reduce)
{
    return reduce_args(call, result, 1, 2, error);
}

/* all, any, count_nonzero: an empty tuple means no dim, not all of them. */
KL_SHAPE(reduce_given)
{
    bool is_empty = call->args[1].kind == KL_ARG_INTS && call->args[1].n == 0;
    return is_empty ? KL_DECLINED : reduce_args(call, result, 1, 2, error);
}

KL_SHAPE(vector_norm)
{
    return reduce_args(call, result, 2, 3, error);
}

/* std(x), std(x, unbiased), std(x, dim, unbiased, keepdim), std(x, dim, *, correction, keepdim) */
KL_SHAPE(std)
{
    uint32_t dims = 0;
    bool is_kept = false;
    bool is_unbiased_alone = call->args[1].kind == KL_ARG_BOOL;
    if (is_unbiased_alone && (kl_rules_is_given(call, 2) || kl_rules_is_given(call, 3))) {
        return KL_DECLINED;
    }
    KlStatus status =
        is_unbiased_alone ? KL_OK : kl_rules_dims(call, 1, call->inputs[0]->n_dims, &dims, error);
    status = status == KL_OK ? kl_rules_bool(call, 3, false, &is_kept) : status;
    dims = is_unbiased_alone ? UINT32_MAX : dims;
    return status == KL_OK ? reduce_dims(call, result, dims, is_kept, call->row->n_outs, error)
                           : status;
}

/* Reduce one dim, or all dims if none is given. Decline an empty dim, which has no largest entry. */
static KlStatus
reduce_one(const KlCall *call, KlInferred *result, uint32_t arg, uint32_t n_outs, bool is_index,
           KlError *error)
{
    const KlMeta *input = call->inputs[0];
    bool is_kept = false;
    int32_t dim = 0;
    if (kl_meta_n_elements(input) == 0 || call->args[arg].kind == KL_ARG_INTS) {
        return KL_DECLINED;
    }
    bool has_dim = kl_rules_is_given(call, arg);
    KlStatus status = kl_rules_dim(call, arg, 0, input->n_dims, &dim, error);
    status = status == KL_OK ? kl_rules_bool(call, arg + 1, false, &is_kept) : status;
    if (status == KL_OK && !has_dim && is_kept && !is_index) {
        return KL_DECLINED;
    }
    uint32_t dims = has_dim ? UINT32_C(1) << dim : UINT32_MAX;
    return status == KL_OK ? reduce_dims(call, result, dims, is_kept, n_outs, error) : status;
}

KL_SHAPE(argmax)
{
    return reduce_one(call, result, 1, 1, true, error);
}

KL_SHAPE(prod)
{
    return reduce_one(call, result, 1, 1, false, error);
}

KL_SHAPE(amax)
{
    return kl_meta_n_elements(call->inputs[0]) == 0 ? KL_DECLINED
                                                    : reduce_args(call, result, 1, 2, error);
}

/* max(x), max(x, dim, keepdim) -> values, indices; max(x, other) is elementwise */
KL_SHAPE(max)
{
    if (call->args[1].kind == KL_ARG_VALUE) {
        return kl_rules_is_given(call, 2) ? KL_DECLINED : shape_broadcast(call, result, error);
    }
    return reduce_one(call, result, 1, kl_rules_is_given(call, 1) ? 2 : 1, false, error);
}

KL_DTYPE(max)
{
    bool is_other = call->args[1].kind == KL_ARG_VALUE;
    return (is_other ? dtype_promote : dtype_value_index)(call, result, error);
}

/* max without dim is split like amax, with the number of elements that have the maximum. With a dim it is not: if
 * elements are equal, torch chooses the index. */
KL_PLACE(max)
{
    if (call->args[1].kind == KL_ARG_VALUE) {
        return place_rowwise(call, result, error);
    }
    return kl_rules_is_given(call, 1) ? place_along(call, result, error)
                                      : kl_rules_reduce_moved(call, result, KL_REDUCE_AMAX);
}

/* mode, kthvalue: reduce one dim, by default the last, to values and indices. The last two words are dim and keepdim. */
KL_SHAPE(reduce_last)
{
    const uint32_t arg = call->n_args - 2;
    int32_t dim = 0;
    bool is_kept = false;
    if (kl_meta_n_elements(call->inputs[0]) == 0) {
        return KL_DECLINED;
    }
    KlStatus status = kl_rules_dim(call, arg, -1, call->inputs[0]->n_dims, &dim, error);
    status = status == KL_OK ? kl_rules_bool(call, arg + 1, false, &is_kept) : status;
    return status == KL_OK ? reduce_dims(call, result, UINT32_C(1) << dim, is_kept, 2, error)
                           : status;
}

KL_SHAPE(median)
{
    return reduce_one(call, result, 1, kl_rules_is_given(call, 1) ? 2 : 1, false, error);
}

KL_PLACE(vector_norm)
{
    double order = 2;
    KlStatus status = kl_rules_float(call, 1, 2, &order);
    if (status != KL_OK) {
        return status;
    }
    if (result->dim_map[call->inputs[0]->place.dim] >= 0) {
        return place_along(call, result, error);
    }
    if (order > 1e300 || order < -1e300) {
        return kl_rules_once(result, "an infinity norm shares ties among the samples");
    }
    return kl_rules_reduce(result, order > 0 || order < 0 ? KL_REDUCE_NORM : KL_REDUCE_SUM);
}

/* --- along a dim -------------------------------------------------------------------------------------- */

/* Make `n_outs` outputs of the input's shape; the op mixes the dim in args[arg]. */
static KlStatus
along_dim(const KlCall *call, KlInferred *result, uint32_t arg, uint32_t n_outs, KlError *error)
{
    const KlMeta *input = call->inputs[0];
    int32_t dim = 0;
    KlStatus status = kl_rules_dim(call, arg, -1, input->n_dims, &dim, error);
    status = status == KL_OK ? kl_ops_reserve_outs(result, n_outs, error) : status;
    for (uint32_t i = 0; status == KL_OK && i < n_outs; i++) {
        KlMeta *out = &result->outs[i];
        out->n_dims = input->n_dims;
        memcpy(out->shape, input->shape, sizeof(out->shape));
    }
    if (status == KL_OK) {
        result->dim_map[dim] = -1;
    }
    return status;
}

/* cumsum, and cummax with its indices */
KL_SHAPE(cumulate)
{
    if (!kl_rules_is_given(call, 1)) {
        return KL_DECLINED;
    }
    KlStatus status = along_dim(call, result, 1, call->row->n_outs, error);
    for (uint32_t i = 0; status == KL_OK && i < result->n_outs; i++) {
        kl_meta_set_contiguous(&result->outs[i]);
    }
    return status;
}

/* sort, and argsort without the values */
KL_SHAPE(sort)
{
    KlStatus status = along_dim(call, result, 1, call->row->n_outs, error);
    for (uint32_t i = 0; status == KL_OK && i < result->n_outs; i++) {
        kl_rules_preserve(&result->outs[i], call->inputs[0]);
    }
    return status;
}

KL_SHAPE(topk)
{
    const KlMeta *input = call->inputs[0];
    int64_t k = 0;
    int32_t dim = 0;
    KlStatus status = kl_rules_int(call, 1, 0, &k);
    status = status == KL_OK ? kl_rules_dim(call, 2, -1, input->n_dims, &dim, error) : status;
    int64_t size = input->n_dims == 0 ? 1 : input->shape[dim];
    if (status == KL_OK && (k < 0 || k > size)) {
        return kl_error_set(error, KL_ERROR_ARGUMENT, "k = %lld is not within size %lld",
                            (long long)k, (long long)size);
    }
    status = status == KL_OK ? along_dim(call, result, 2, 2, error) : status;
    for (uint32_t i = 0; status == KL_OK && i < 2; i++) {
        if (input->n_dims > 0) {
            result->outs[i].shape[dim] = k;
        }
        kl_meta_set_contiguous(&result->outs[i]);
    }
    return status;
}

KL_SHAPE(histc)
{
    int64_t bins = 0;
    KlStatus status = kl_rules_int(call, 1, 100, &bins);
    return status == KL_OK && bins > 0 ? kl_rules_out_shape(result, &bins, 1, error) : KL_DECLINED;
}
