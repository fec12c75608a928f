/* SPDX-License-Identifier: Apache-2.0 */
/* rules_place.c - the place rules of ops that work row by row, or along whole dims. */
#include "rules.h"

/* The call always runs once, as the row says why. */
KL_PLACE(once)
{
    return kl_rules_once(result, call->row->reason);
}

/* The entries of all dims but the last n_mixed are treated one by one; other inputs are read whole. */
KL_PLACE(but_last)
{
    int32_t n_alike = call->inputs[0]->n_dims - call->row->n_mixed;
    return kl_rules_wire_alike(call, result, kl_rules_letters(n_alike), call->row->reason);
}

/* Each row on its own; inputs are aligned from the right, by broadcasting. */
KL_PLACE(rowwise)
{
    KlMeta *out = &result->outs[0];
    uint32_t first = kl_rules_first_rows(call);
    KlPlace want = call->inputs[first]->place;
    want.dim += out->n_dims - call->inputs[first]->n_dims;
    if (out->shape[want.dim] != kl_rules_span(&want, kl_rules_rows(call, result))) {
        return kl_rules_once(result, "a batch of one sample is broadcast");
    }
    for (uint32_t i = 0; i < call->n_inputs; i++) {
        KlPlace own = want;
        own.dim -= out->n_dims - call->inputs[i]->n_dims;
        const char *reason = kl_rules_follow(call, result, i, &own);
        if (reason != NULL) {
            return kl_rules_once(result, reason);
        }
    }
    for (uint32_t i = 0; i < result->n_outs; i++) {
        result->outs[i].place = want;
    }
    return KL_OK;
}

/* Give the outputs the rows of the first input, moved by dim_map. Other inputs provide only a shape or a dtype and keep
 * their places. */
static KlStatus
move_first(const KlCall *call, KlInferred *result)
{
    const KlPlace *place = &call->inputs[0]->place;
    for (uint32_t i = 0; i < result->n_outs && kl_place_is_rows(place); i++) {
        result->outs[i].place = *place;
        result->outs[i].place.dim = result->dim_map[place->dim];
    }
    return KL_OK;
}

static bool
is_kept(const KlCall *call, const KlInferred *result)
{
    const KlPlace *place = &call->inputs[0]->place;
    return !kl_place_is_rows(place) || result->dim_map[place->dim] >= 0;
}

/* The rows move by dim_map; ONCE if their dim is gone. */
KL_PLACE(moved)
{
    return is_kept(call, result) ? move_first(call, result)
                                 : kl_rules_once(result, "the batch dim itself is taken apart");
}

/* Likewise, for ops that mix a dim. */
KL_PLACE(along)
{
    return is_kept(call, result) ? move_first(call, result)
                                 : kl_rules_once(result, "every sample depends on the others");
}

/* cumsum and similar ops. The last word is koila's own: the totals of the chunks before (koila/reductions/scans.py). By
 * rows is possible if the rows are the outermost digit of the dim. */
KL_PLACE(scan)
{
    const KlPlace *place = &call->inputs[0]->place;
    bool has_starts = call->n_args > 2 && call->args[call->n_args - 1].kind == KL_ARG_VALUE;
    if (is_kept(call, result) || place->outer != 1) {
        return place_along(call, result);
    }
    if (!has_starts) {
        return KL_DECLINED; /* recorded again, with the starts as a call before it */
    }
    result->dim_map[place->dim] = (int8_t)place->dim;
    return move_first(call, result);
}

KlStatus
kl_rules_reduce_moved(const KlCall *call, KlInferred *result, KlReduce reduce)
{
    return is_kept(call, result) ? move_first(call, result) : kl_rules_reduce(result, reduce);
}

/* As along, or a reduction that is split if the rows' dim is gone. */
KL_PLACE(reduced)
{
    return kl_rules_reduce_moved(call, result, call->row->reduce);
}
