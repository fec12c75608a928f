/* SPDX-License-Identifier: Apache-2.0 */
/* rules_digits.c - finds where the rows are after reshapes, and aligns the rows of several inputs.
 *
 * NOTE [digits]: write the row-major index of an element as a number of mixed radix. The row is one digit of it: in
 * dim `dim` of size outer * rows * inner, the index is (o * rows + row) * inner + i. Merging dims (view, flatten)
 * joins digits to a larger number, and splitting dims separates them again. So two sizes are
 * enough: left of the row's digit (outer, and the dims before) and right of it (inner, and the dims after). Two
 * values can be combined element by element in a chunk only if the digit is at the same place in both. */
#include "rules.h"

KlStatus
kl_rules_once(KlInferred *result, const char *reason)
{
    result->split.mode = KL_MODE_ONCE;
    result->split.reason = reason;
    return KL_OK;
}

KlStatus
kl_rules_once_again(KlInferred *result, const char *reason, int32_t dim)
{
    result->split.again = dim < 0 ? 0 : (uint8_t)(dim + 1);
    return kl_rules_once(result, reason);
}

int32_t
kl_rules_largest_dim(const KlMeta *meta, int32_t first, int32_t last)
{
    int32_t best = first;
    for (int32_t dim = first; dim < last; dim++) {
        best = meta->shape[dim] > meta->shape[best] ? dim : best;
    }
    return best < last ? best : -1;
}

KlStatus
kl_rules_at(KlInferred *result, KlPlace place)
{
    result->outs[0].place = place;
    return KL_OK;
}

KlStatus
kl_rules_reduce(KlInferred *result, KlReduce reduce)
{
    result->split.mode = KL_MODE_REDUCE;
    result->split.reduce = reduce;
    return KL_OK;
}

uint32_t
kl_rules_first_rows(const KlCall *call)
{
    uint32_t i = 0;
    while (i + 1 < call->n_inputs && !kl_place_is_rows(&call->inputs[i]->place)) {
        i++;
    }
    return i;
}

const char *
kl_rules_match(const KlCall *call, KlInferred *result, uint32_t input, const KlPlace *want)
{
    const KlMeta *meta = call->inputs[input];
    const KlPlace *own = &meta->place;
    if (kl_place_is_rows(own)) {
        if (own->dim != want->dim) {
            return "two inputs have their samples in different dims";
        }
        return kl_place_is_equal(own, want) ? NULL
                                            : "two inputs have their samples in different order";
    }
    if (want->dim < 0 || want->dim >= meta->n_dims ||
        meta->shape[want->dim] != kl_rules_span(want, kl_rules_rows(call, result))) {
        return "a plain input does not have the size of the batch";
    }
    result->split.places[input] = *want;
    return NULL;
}

const char *
kl_rules_follow(const KlCall *call, KlInferred *result, uint32_t input, const KlPlace *want)
{
    const KlMeta *meta = call->inputs[input];
    bool is_broadcast = want->dim < 0 || meta->shape[want->dim] == 1;
    return is_broadcast && !kl_place_is_rows(&meta->place)
               ? NULL
               : kl_rules_match(call, result, input, want);
}

bool
kl_rules_factor(const KlMeta *from, const KlPlace *place, int64_t rows, const KlMeta *to,
                KlPlace *found)
{
    int64_t left = place->outer; /* the product of the digits to the left of the rows */
    int64_t right = place->inner;
    for (int32_t dim = 0; dim < place->dim; dim++) {
        left *= from->shape[dim];
    }
    for (int32_t dim = place->dim + 1; dim < from->n_dims; dim++) {
        right *= from->shape[dim];
    }
    if (left == 0 || right == 0) {
        return false; /* nothing stored: no digit to follow */
    }
    int64_t after = 1;
    int32_t best = -1;
    for (int32_t dim = to->n_dims - 1; dim >= 0; dim--) {
        int64_t inner = right / after;
        if (right % after == 0 && to->shape[dim] % (inner * rows) == 0) {
            /* With one row the digit fits between any two others: prefer the dim it came from, else the
             * outermost. With more rows only one dim can hold it. */
            if (best < 0 || best != place->dim) {
                best = dim;
                *found = (KlPlace){.axis = place->axis,
                                   .dim = dim,
                                   .inner = inner,
                                   .outer = to->shape[dim] / (inner * rows)};
            }
        }
        after *= to->shape[dim];
    }
    return best >= 0;
}

bool
kl_rules_rewrite(KlInferred *result, uint32_t arg, uint32_t entry, uint8_t part, int64_t scale)
{
    KlSplit *split = &result->split;
    if (split->n_rewrites == KL_REWRITES_MAX) {
        return false;
    }
    split->rewrites[split->n_rewrites] =
        (KlRewrite){.arg = (uint16_t)arg, .entry = (uint16_t)entry, .part = part, .scale = scale};
    split->n_rewrites++;
    return true;
}
