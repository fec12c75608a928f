/* SPDX-License-Identifier: Apache-2.0 */
/* rules_join.c - ops that join values or take them apart along a dim: cat, stack, split. Along the rows' dim they change
 * the size left or right of the row's digit (NOTE [digits] in rules_digits.c). */
#include "rules.h"

static const char not_all_rows[] = "samples are joined with values that are none";
static const char several_batches[] = "two different batches are combined";
static const char batch_split[] = "the batch itself is split";

/* --- cat and stack ------------------------------------------------------------------------------------- */

/* Whether a value is like torch.tensor([]): cat ignores its shape, and only its dtype counts. */
static bool
is_legacy_empty(const KlMeta *meta)
{
    return meta->n_dims == 1 && meta->shape[0] == 0;
}

/* Return the first input that cat does not ignore, or the last input. */
static uint32_t
first_joined(const KlCall *call)
{
    uint32_t i = 0;
    while (i + 1 < call->n_inputs && is_legacy_empty(call->inputs[i])) {
        i++;
    }
    return i;
}

/* Set the strides of cat: row-major, unless all inputs, with `n_added` dims of size 1 at the end, are NHWC in memory. */
static void
set_join_strides(const KlCall *call, KlMeta *out, int32_t n_added)
{
    bool is_known = out->n_dims == 4 && n_added == 0;
    for (uint32_t i = 0; i < call->n_inputs; i++) {
        KlMeta input = *call->inputs[i];
        for (int32_t k = 0; k < n_added; k++) {
            input.strides[input.n_dims] = 1;
            input.shape[input.n_dims++] = 1;
        }
        if (!kl_rules_is_like_channels_last(&input)) {
            kl_meta_set_contiguous(out);
            return;
        }
        is_known = is_known && input.is_strided;
    }
    if (is_known) {
        kl_rules_set_channels_last(out);
    }
}

KL_SHAPE(cat)
{
    uint32_t first = first_joined(call);
    kl_rules_require(call,
                     call->args[0].kind == KL_ARG_VALUES && !is_legacy_empty(call->inputs[first]));
    int32_t at = kl_rules_dim(call, 1, 0, call->inputs[first]->n_dims);
    KlMeta *out = kl_rules_out(result, call->inputs[first]);
    for (uint32_t i = 0; i < call->n_inputs; i++) {
        KlMeta other = *call->inputs[i];
        kl_rules_require(call, other.n_dims > 0);
        if (i > first && !is_legacy_empty(&other)) {
            int64_t size = out->shape[at] + other.shape[at];
            other.shape[at] = out->shape[at];
            kl_rules_check(call, kl_rules_is_shape(&other, out));
            out->shape[at] = size;
        }
    }
    set_join_strides(call, out, 0);
    return KL_OK;
}

KL_SHAPE(stack)
{
    if (call->args[0].kind != KL_ARG_VALUES || call->inputs[0]->n_dims == KL_DIMS_MAX) {
        return KL_DECLINED;
    }
    const KlMeta *first = call->inputs[0];
    KlMeta *out = kl_rules_outs(result, 1);
    int32_t at = kl_rules_dim(call, 1, 0, first->n_dims + 1);
    for (uint32_t i = 1; i < call->n_inputs; i++) {
        kl_rules_check(call, kl_rules_is_shape(call->inputs[i], first));
    }
    for (int32_t dim = 0; dim <= first->n_dims; dim++) {
        if (dim == at) {
            out->shape[out->n_dims++] = (int64_t)call->n_inputs;
        }
        if (dim < first->n_dims) {
            result->dim_map[dim] = (int8_t)out->n_dims;
            out->shape[out->n_dims++] = first->shape[dim];
        }
    }
    set_join_strides(call, out, at == first->n_dims ? 1 : 0);
    return KL_OK;
}

KL_DTYPE(join)
{
    KlDtype dtype = call->inputs[0]->dtype;
    for (uint32_t i = 1; i < call->n_inputs; i++) {
        kl_rules_require(call, (call->inputs[i]->n_dims == 0) == (call->inputs[0]->n_dims == 0));
        dtype = kl_rules_promote(dtype, call->inputs[i]->dtype);
    }
    return kl_rules_set_dtypes(result, dtype);
}

/* A join along another dim than the rows': all inputs follow the rows of the first input that has them. */
KL_PLACE(stack)
{
    KlPlace want = call->inputs[kl_rules_first_rows(call)]->place;
    for (uint32_t i = 0; i < call->n_inputs; i++) {
        const KlPlace *own = &call->inputs[i]->place;
        if (kl_place_is_rows(own) && own->axis != want.axis) {
            return kl_rules_once(result, several_batches);
        }
        const char *reason =
            is_legacy_empty(call->inputs[i]) ? NULL : kl_rules_follow(call, result, i, &want);
        if (reason != NULL) {
            return kl_rules_once(result, reason);
        }
    }
    want.dim = result->dim_map[want.dim];
    return kl_rules_at(result, want);
}

/* Place a cat along the rows' dim: [a; b] is (2, rows), so `outer` of the digit grows. */
static KlStatus
join_batch(const KlCall *call, KlInferred *result, int32_t at)
{
    KlPlace place = call->inputs[kl_rules_first_rows(call)]->place;
    place.outer = 0;
    for (uint32_t i = 0; i < call->n_inputs; i++) {
        const KlPlace *own = &call->inputs[i]->place;
        if (is_legacy_empty(call->inputs[i])) {
            continue;
        }
        if (!kl_place_is_rows(own)) {
            return kl_rules_once_again(result, not_all_rows, at);
        }
        if (own->axis != place.axis) {
            return kl_rules_once_again(result, several_batches, at);
        }
        if (own->dim != at || own->inner != place.inner) {
            return kl_rules_once_again(result, "two inputs have their samples in different order",
                                       at);
        }
        place.outer += own->outer;
    }
    return kl_rules_at(result, place);
}

KL_PLACE(cat)
{
    int32_t at = kl_rules_dim(call, 1, 0, call->inputs[first_joined(call)]->n_dims);
    bool is_batch = call->inputs[kl_rules_first_rows(call)]->place.dim == at;
    return is_batch ? join_batch(call, result, at) : place_stack(call, result);
}

/* --- split ---------------------------------------------------------------------------------------------- */

/* Make a view of each of `n` parts of dim `at`. They have `sizes`; NULL: each has `size`, the last one what remains. */
static KlStatus
make_parts(const KlCall *call, KlInferred *result, int32_t at, uint32_t n, const int64_t *sizes,
           int64_t size)
{
    const KlMeta *input = call->inputs[0];
    KlStatus status = kl_ops_reserve_outs(result, n);
    for (uint32_t i = 0; status == KL_OK && i < n; i++) {
        KlMeta *out = &result->outs[i];
        *out = *input;
        out->requires_grad = false;
        out->place = KL_PLACE_WHOLE;
        out->shape[at] = sizes != NULL ? sizes[i] : i + 1 < n ? size : input->shape[at] - size * i;
    }
    /* Autograd does not track the views of unsafe ops, so in no_grad mode they require no grad. */
    bool is_untracked = call->row->is_untracked && !call->is_grad_enabled;
    result->outs_no_grad = is_untracked ? UINT64_MAX : 0;
    kl_rules_alias(result, KL_ALIAS_VIEW, 0);
    kl_rules_require(call, !is_untracked || n <= 64);
    return status;
}

static KlStatus
split_evenly(const KlCall *call, KlInferred *result, int32_t at, int64_t size)
{
    int64_t total = call->inputs[0]->shape[at];
    int64_t n = size == 0 ? 1 : (total + size - 1) / size;
    n = n < 1 ? 1 : n;
    if (size < 0 || (size == 0 && total != 0) || n > 4096) {
        return KL_DECLINED;
    }
    return make_parts(call, result, at, (uint32_t)n, NULL, size);
}

/* split(x, size, dim) and split(x, [sizes], dim) */
KL_SHAPE(split)
{
    const KlArg *sizes = &call->args[1];
    kl_rules_require(call, call->inputs[0]->n_dims > 0);
    int32_t at = kl_rules_dim(call, 2, 0, call->inputs[0]->n_dims);
    if (sizes->kind != KL_ARG_INTS || sizes->n == 0) {
        return sizes->kind == KL_ARG_INT ? split_evenly(call, result, at, sizes->u.i) : KL_DECLINED;
    }
    int64_t total = 0;
    for (uint32_t i = 0; i < sizes->n; i++) {
        kl_rules_check(call, sizes->u.ints[i] >= 0);
        total += sizes->u.ints[i];
    }
    kl_rules_check(call, total == call->inputs[0]->shape[at]);
    return make_parts(call, result, at, sizes->n, sizes->u.ints, 0);
}

KL_SHAPE(chunk)
{
    const KlMeta *input = call->inputs[0];
    const int64_t n = kl_rules_int(call, 1, 0);
    int32_t at = kl_rules_dim(call, 2, 0, input->n_dims);
    if (input->n_dims == 0 || n < 1 || input->shape[at] == 0) {
        return KL_DECLINED;
    }
    return split_evenly(call, result, at, (input->shape[at] + n - 1) / n);
}

KL_SHAPE(unbind)
{
    const KlMeta *input = call->inputs[0];
    int32_t at = kl_rules_dim(call, 1, 0, input->n_dims);
    if (input->n_dims == 0 || input->shape[at] > 4096) {
        return KL_DECLINED;
    }
    KlStatus status = kl_ops_reserve_outs(result, (uint32_t)input->shape[at]);
    const KlMeta out = kl_rules_without(call, result, UINT32_C(1) << at, false);
    for (uint32_t i = 0; status == KL_OK && i < result->n_outs; i++) {
        result->outs[i] = out;
    }
    kl_rules_alias(result, KL_ALIAS_VIEW, 0);
    return status;
}

/* Set the places of the parts of the rows' dim. Return whether each consists of whole repetitions of all rows. */
static bool
place_turns(const KlCall *call, KlInferred *result, int64_t turn)
{
    bool is_fit = true;
    for (uint32_t i = 0; i < result->n_outs; i++) {
        KlMeta *out = &result->outs[i];
        out->place = call->inputs[0]->place;
        out->place.outer = out->shape[out->place.dim] / turn;
        is_fit = is_fit && out->shape[out->place.dim] % turn == 0 && out->place.outer > 0;
    }
    return is_fit;
}

KL_PLACE(split)
{
    const KlPlace *place = &call->inputs[0]->place;
    int64_t turn = kl_rules_rows(call, result) * place->inner;
    int32_t at = kl_rules_dim(call, 2, 0, call->inputs[0]->n_dims);
    if (at != place->dim) {
        return place_moved(call, result);
    }
    if (!place_turns(call, result, turn)) {
        return kl_rules_once_again(result, batch_split, at);
    }
    const KlArg *sizes = &call->args[1];
    if (sizes->kind == KL_ARG_INT && result->n_outs == 1) {
        return KL_OK; /* no chunk is longer than the size of a part, either */
    }
    for (uint32_t i = 0; i < (sizes->kind == KL_ARG_INTS ? sizes->n : 1); i++) {
        int64_t size = sizes->kind == KL_ARG_INTS ? sizes->u.ints[i] : sizes->u.i;
        if (size % turn != 0 || !kl_rules_rewrite(result, 1, i, 0, size / turn * place->inner)) {
            return kl_rules_once_again(result, batch_split, at);
        }
    }
    return KL_OK;
}

KL_PLACE(chunk)
{
    const KlPlace *place = &call->inputs[0]->place;
    int32_t at = kl_rules_dim(call, 2, 0, call->inputs[0]->n_dims);
    if (at != place->dim) {
        return place_moved(call, result);
    }
    /* The number of parts is fixed: in each chunk, each part must hold all rows a whole number of times. */
    bool is_fit = place->outer % call->args[1].u.i == 0 &&
                  place_turns(call, result, kl_rules_rows(call, result) * place->inner);
    return is_fit ? KL_OK : kl_rules_once_again(result, batch_split, at);
}
