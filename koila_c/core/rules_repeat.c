/* SPDX-License-Identifier: Apache-2.0 */
/* rules_repeat.c - ops that copy entries to other indices of their dim: repeat, repeat_interleave,
 * roll, flip; and triangles. */
#include "rules.h"

/* Copies along each dim, as many as args[1] says, new dims first. */
KL_SHAPE(repeat)
{
    const KlMeta *input = call->inputs[0];
    uint32_t n_given = 0;
    const int64_t *repeats = kl_rules_ints(call, 1, &n_given);
    if (n_given > KL_DIMS_MAX || !kl_rules_is_given(call, 1)) {
        return KL_DECLINED;
    }
    const int32_t n = (int32_t)n_given;
    kl_rules_check(call, n >= input->n_dims);
    KlMeta *out = kl_rules_outs(result, 1);
    int32_t n_dims = n > input->n_dims ? n : input->n_dims;
    out->n_dims = n_dims;
    for (int32_t dim = 0; dim < n_dims; dim++) {
        int32_t own = dim - (n_dims - input->n_dims);
        int32_t at = dim - (n_dims - n);
        int64_t size = own >= 0 ? input->shape[own] : 1;
        int64_t times = at >= 0 ? repeats[at] : 1;
        kl_rules_check(call, times >= 0);
        out->shape[dim] = size * times;
        if (own >= 0) {
            result->dim_map[own] = (int8_t)dim;
        }
    }
    kl_meta_set_contiguous(out);
    return KL_OK;
}

/* [b0 b1] repeated is [b0 b1 b0 b1]: `outer` of the row's digit grows. */
KL_PLACE(repeat)
{
    const KlMeta *input = call->inputs[0];
    KlPlace place = input->place;
    int32_t dim = result->dim_map[place.dim];
    int64_t times = result->outs[0].shape[dim] / input->shape[place.dim];
    if (times == 0) {
        return kl_rules_once(result, "the samples are repeated zero times");
    }
    place.dim = dim;
    place.outer *= times;
    return kl_rules_at(result, place);
}

KL_SHAPE(repeat_interleave)
{
    const KlMeta *input = call->inputs[0];
    bool is_number = call->args[1].kind == KL_ARG_INT;
    int64_t times = is_number ? call->args[1].u.i : 0;
    kl_rules_require(call, is_number && !kl_rules_is_given(call, 3));
    kl_rules_check(call, times >= 0);
    if (!kl_rules_is_given(call, 2)) {
        const KlMeta flat = {.n_dims = 1, .shape = {kl_meta_n_elements(input) * times}};
        return kl_rules_out_contiguous(result, &flat);
    }
    kl_rules_require(call, input->n_dims > 0);
    KlMeta *out = kl_rules_out(result, input);
    out->shape[kl_rules_dim(call, 2, 0, input->n_dims)] *= times;
    if (kl_meta_is_contiguous(input)) {
        kl_meta_set_contiguous(out);
    }
    return KL_OK;
}

/* [b0 b1] interleaved is [b0 b0 b1 b1]: `inner` of the row's digit grows. Without a dim the value is flattened
 * first. */
KL_PLACE(repeat_interleave)
{
    const KlMeta *input = call->inputs[0];
    KlPlace place = input->place;
    int64_t times = call->args[1].u.i;
    int32_t at = kl_rules_dim(call, 2, 0, input->n_dims);
    if (times == 0) {
        return kl_rules_once(result, "the samples are repeated zero times");
    }
    if (!kl_rules_is_given(call, 2)) {
        KlMeta flat = {.n_dims = 1, .shape = {kl_meta_n_elements(input)}};
        if (!kl_rules_factor(input, &input->place, kl_rules_rows(call, result), &flat, &place)) {
            return kl_rules_once(result, "the batch is cut in two");
        }
        at = 0;
    }
    place.inner *= at == place.dim ? times : 1;
    return kl_rules_at(result, place);
}

/* Make the output of roll or flip, which move entries along the dims in args[arg]. Return the number of these dims. */
static uint32_t
move_within(const KlCall *call, KlInferred *result, uint32_t arg)
{
    const KlMeta *input = call->inputs[0];
    uint32_t n = 0;
    const int64_t *dims = kl_rules_ints(call, arg, &n);
    (void)kl_rules_out(result, input);
    for (uint32_t i = 0; i < n; i++) {
        result->dim_map[kl_rules_wrap(call, dims[i], input->n_dims)] = -1;
    }
    kl_rules_require(call, n == 0 || input->n_dims > 0);
    return n;
}

KL_SHAPE(flip)
{
    const KlMeta *input = call->inputs[0];
    kl_rules_require(call, kl_rules_is_given(call, 1));
    (void)kl_rules_dims(call, 1, input->n_dims); /* each at most once */
    (void)move_within(call, result, 1);
    kl_rules_preserve(&result->outs[0], input);
    return KL_OK;
}

/* Without dims it moves the entries of the flattened value. */
KL_SHAPE(roll)
{
    const KlMeta *input = call->inputs[0];
    uint32_t n_shifts = 0, n_dims = move_within(call, result, 2);
    (void)kl_rules_ints(call, 1, &n_shifts);
    kl_rules_require(call, n_dims == 0 ? n_shifts == 1 : n_dims == n_shifts);
    for (int32_t i = 0; n_dims == 0 && i < input->n_dims; i++) {
        result->dim_map[i] = -1;
    }
    if (kl_meta_is_contiguous(input) && kl_meta_n_elements(input) > 0) {
        kl_meta_set_contiguous(&result->outs[0]);
    }
    return KL_OK;
}

/* tril and triu mix the last two dims, since the diagonal depends on the position in both. */
KL_SHAPE(tril)
{
    const KlMeta *input = call->inputs[0];
    if (input->n_dims < 2) {
        return KL_ILLEGAL;
    }
    (void)kl_rules_int(call, 1, 0);
    result->dim_map[input->n_dims - 1] = -1;
    result->dim_map[input->n_dims - 2] = -1;
    return kl_rules_out_contiguous(result, input);
}
