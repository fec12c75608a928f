/* SPDX-License-Identifier: Apache-2.0 */
/* rules_order.c - splits calls on rows that each chunk sorts on its own.
 *
 * NOTE [orders] A mixture of experts sorts its entries by expert, computes, and puts them back. Sorting the whole batch
 * mixes the rows of all chunks. But if the calls in between work on each entry alone, or on entries with the same key,
 * each chunk may sort its own rows, and the result after putting them back is the same. So sorted values get an axis
 * of their own, an *order*. Calls run along it as along any axis; until kl_tape_close_orders it is another axis than
 * the one that was sorted. Values that connect the two have a *role* (KlRole), and a rule here: indexing by SOURCES
 * takes rows into the order, indexing by TARGETS takes them back, COUNTS of keys tell where groups end. Any other call
 * that reads values in the order *breaks* it: calls that sort, take and put back then run once, on the whole batch, and
 * the order is an axis like any other, along which calls on sorted values still run, and of which segments are taken. */
#include "rules.h"

static bool
is_order(const KlCall *call, KlAxisId axis)
{
    return axis != KL_ID_NONE && call->orders != NULL && axis < call->n_axes &&
           call->orders[axis].of != KL_ID_NONE;
}

KlAxisId
kl_rules_order(const KlCall *call)
{
    for (uint32_t i = 0; i < call->n_inputs && call->orders != NULL; i++) {
        const KlMeta *meta = call->inputs[i];
        if (meta != NULL && is_order(call, meta->place.axis)) {
            return meta->place.axis;
        }
        if (meta != NULL && meta->role != KL_ROLE_NONE && is_order(call, meta->order)) {
            return meta->order;
        }
    }
    return KL_ID_NONE;
}

/* Whether the rows of input `i` are those of `axis`, and all of dim 0. */
static bool
is_along(const KlCall *call, uint32_t i, KlAxisId axis, int64_t n_of_row)
{
    const KlPlace *place = &call->inputs[i]->place;
    return place->axis == axis && place->dim == 0 && place->outer == 1 && place->inner == n_of_row;
}

static bool
has_role(const KlCall *call, uint32_t i, KlRole role, KlAxisId order)
{
    const KlMeta *meta = call->inputs[i];
    return meta->role == (uint8_t)role && meta->order == order && meta->n_dims == 1;
}

static bool
is_plain(const KlMeta *meta)
{
    return meta->role == KL_ROLE_NONE || meta->role == KL_ROLE_KEYS;
}

/* Whether input `i` has positions in the order of rows or of their entries. */
static bool
has_points(const KlCall *call, uint32_t i, KlAxisId order)
{
    return has_role(call, i, KL_ROLE_SOURCES, order) || has_role(call, i, KL_ROLE_POINTS, order);
}

/* Make the call run by rows: each input at its own place, as infer.c has set, the result at `place`. Return true. */
static bool
go(KlInferred *result, const KlPlace *place)
{
    result->split.axis = place->axis;
    result->outs[0].place = *place;
    return true;
}

/* The rule for indexing dim 0 of input `x` by input `index`: takes rows into the order, or back. */
static bool
take(const KlCall *call, uint32_t x, uint32_t index, KlAxisId order, KlInferred *result)
{
    const KlMeta *of = call->inputs[index];
    KlAxisId rows = call->orders[order].of;
    KlPlace place = of->place;
    bool is_into = has_points(call, index, order) && place.axis == order &&
                   is_along(call, x, rows, of->n_of_row);
    bool is_back = has_role(call, index, KL_ROLE_TARGETS, order) && place.axis == rows &&
                   is_along(call, x, order, place.inner);
    return call->inputs[x]->role == KL_ROLE_NONE && (is_into || is_back) && go(result, &place);
}

/* Return the input that is the index in x[index] or x[index] = ...; KL_ID_NONE: the index has more items. */
static uint32_t
index_of(const KlCall *call)
{
    const KlArg *index = &call->args[1];
    bool is_one =
        index->kind == KL_ARG_INDEX && index->n == 1 && index->u.items[0].kind == KL_INDEX_TENSOR;
    return is_one ? index->u.items[0].input : KL_ID_NONE;
}

/* The rule for x[sources] = v, which writes every entry: with values in the order, or with 0, 1, 2, ... (TARGETS). */
static bool
put_back(const KlCall *call, KlAxisId order, KlInferred *result)
{
    uint32_t index = index_of(call);
    if (index == KL_ID_NONE || !has_role(call, index, KL_ROLE_SOURCES, order) ||
        call->args[2].kind != KL_ARG_VALUE) {
        return false;
    }
    KlPlace place = call->inputs[index]->place, back = place;
    uint32_t value = call->args[2].input;
    const KlMeta *target = call->inputs[0];
    back.axis = call->orders[order].of;
    bool is_range = value < 64 && (call->row_ranges >> value & 1) != 0 &&
                    call->inputs[value]->n_dims == 1 &&
                    call->inputs[value]->shape[0] == target->shape[0];
    bool is_fitting =
        is_along(call, 0, order, place.inner) || is_along(call, 0, back.axis, place.inner);
    bool is_moved = is_along(call, value, order, place.inner) &&
                    call->inputs[value]->role == KL_ROLE_NONE &&
                    call->inputs[value]->n_dims == target->n_dims;
    if (call->inputs[index]->n_of_row != place.inner || target->role != KL_ROLE_NONE ||
        !is_fitting || !(is_range ? target->n_dims == 1 : is_moved)) {
        return false;
    }
    (void)go(result, &back);
    if (is_range) {
        result->split.places[value] = place;
        result->split.row_ranges |= UINT64_C(1) << value;
        result->outs[0].role = KL_ROLE_TARGETS;
    }
    return true;
}

/* The rule for target.index_add(0, points, source): each chunk adds only to its own rows. */
static bool
add_back(const KlCall *call, KlAxisId order, KlInferred *result)
{
    if (call->args[2].kind != KL_ARG_VALUE || call->args[3].kind != KL_ARG_VALUE ||
        kl_rules_int(call, 1, 1) != 0) {
        return false;
    }
    uint32_t index = call->args[2].input, source = call->args[3].input;
    const KlMeta *of = call->inputs[index];
    return has_points(call, index, order) &&
           is_along(call, 0, call->orders[order].of, of->n_of_row) && is_plain(call->inputs[0]) &&
           is_plain(call->inputs[source]) && is_along(call, source, order, of->place.inner) &&
           go(result, &call->inputs[0]->place);
}

/* The rule for sources // n: from positions of entries to positions of the groups of n entries that they are in. */
static bool
divide(const KlCall *call, KlAxisId order, KlInferred *result)
{
    const KlMeta *of = call->inputs[0];
    int64_t by = call->args[1].kind == KL_ARG_INT ? call->args[1].u.i : 0;
    if (!has_points(call, 0, order) || call->n_inputs != 1 || by <= 0 || of->n_of_row % by != 0) {
        return false;
    }
    (void)go(result, &of->place);
    result->outs[0].role = KL_ROLE_POINTS;
    result->outs[0].n_of_row = of->n_of_row / by;
    return true;
}

/* The rule for argsort(sources), the inverse permutation: the position of each entry in the order. */
static bool
invert(const KlCall *call, KlAxisId order, KlInferred *result)
{
    KlPlace place = call->inputs[0]->place;
    if (!has_role(call, 0, KL_ROLE_SOURCES, order) || call->inputs[0]->n_of_row != place.inner ||
        kl_rules_bool(call, 2, false)) {
        return false;
    }
    place.axis = call->orders[order].of;
    (void)go(result, &place);
    result->outs[0].role = KL_ROLE_TARGETS;
    return true;
}

/* The rule for counting keys in bins. Keys are not negative, and keys above the last bin are sorted after all others. */
static bool
count(const KlCall *call, KlAxisId order, KlInferred *result)
{
    double least = kl_rules_float(call, 2, 0), most = kl_rules_float(call, 3, 0);
    if (!has_role(call, 0, KL_ROLE_KEYS, order) || !call->orders[order].is_ascending ||
        call->n_inputs != 1 || least > 0 || most <= least) {
        return false;
    }
    (void)go(result, &call->inputs[0]->place);
    result->outs[0].place = KL_PLACE_WHOLE;
    result->outs[0].role = KL_ROLE_COUNTS;
    return true;
}

/* Make the call run on COUNTS or OFFSETS: they are whole, as infer.c has set, but each chunk has its own. */
static bool
go_on(KlRole role, KlInferred *result)
{
    result->outs[0].role = (uint8_t)role;
    return true;
}

/* The rule for a product of groups of the order's entries, which end at the offsets. */
static bool
multiply_groups(const KlCall *call, KlAxisId order, KlInferred *result)
{
    const KlMeta *offsets = kl_rules_input(call, 2);
    const KlPlace place = call->inputs[0]->place;
    return offsets != NULL && offsets->role == KL_ROLE_OFFSETS && offsets->order == order &&
           call->n_inputs == 3 && call->inputs[0]->n_dims == 2 &&
           is_along(call, 0, order, place.inner) && call->inputs[0]->role == KL_ROLE_NONE &&
           call->inputs[1]->role == KL_ROLE_NONE && !kl_place_is_rows(&call->inputs[1]->place) &&
           go(result, &place);
}

static bool
is_cast_of_integers(const KlCall *call, const KlInferred *result)
{
    KlDtype to = result->outs[0].dtype;
    bool is_exact = to == KL_DTYPE_FLOAT32 || to == KL_DTYPE_FLOAT64 || to == KL_DTYPE_INT64;
    bool is_count = call->inputs[0]->role != KL_ROLE_KEYS;
    return call->row->shape == shape_cast && call->n_inputs == 1 && result->n_outs == 1 &&
           (is_exact || (is_count && to == KL_DTYPE_INT32));
}

bool
kl_rules_goes_in_order(const KlCall *call, KlAxisId order, KlInferred *result)
{
    const KlMeta *first = call->inputs[0];
    for (uint32_t i = 0; i < call->n_inputs; i++) {
        const KlMeta *meta = call->inputs[i];
        if ((is_order(call, meta->place.axis) && meta->place.axis != order) ||
            (meta->role != KL_ROLE_NONE && meta->order != order)) {
            return false;
        }
    }
    bool is_whole = first->role == KL_ROLE_COUNTS || first->role == KL_ROLE_OFFSETS;
    if (is_whole && is_cast_of_integers(call, result)) {
        return go_on((KlRole)first->role, result);
    }
    uint32_t index = KL_ID_NONE;
    switch (call->row->tie) {
    case KL_TIE_TAKE:
        index = index_of(call);
        return index != KL_ID_NONE && take(call, 0, index, order, result);
    case KL_TIE_SELECT:
        return call->args[2].kind == KL_ARG_VALUE && kl_rules_int(call, 1, 1) == 0 &&
               take(call, 0, call->args[2].input, order, result);
    case KL_TIE_PUT:
        return put_back(call, order, result);
    case KL_TIE_ADD:
        return add_back(call, order, result);
    case KL_TIE_DIVIDE:
        return divide(call, order, result);
    case KL_TIE_ARGSORT:
        return invert(call, order, result);
    case KL_TIE_COUNT:
        return count(call, order, result);
    case KL_TIE_ADD_UP:
        return first->role == KL_ROLE_COUNTS && call->n_inputs == 1 &&
               go_on(KL_ROLE_OFFSETS, result);
    case KL_TIE_GROUPS:
        return multiply_groups(call, order, result);
    default:
        return false;
    }
}

bool
kl_rules_keeps_order(const KlCall *call, KlAxisId order, const KlInferred *result)
{
    const KlSplit *split = &result->split;
    bool reads_sizes = call->row->shape == shape_like && call->row->kind == KL_ROW_OP;
    bool is_sum = split->mode == KL_MODE_REDUCE &&
                  (split->reduce == KL_REDUCE_SUM || split->reduce == KL_REDUCE_MEAN);
    if (result->is_random || split->is_open || split->row_ranges != 0 ||
        call->row->place == place_scan || (split->mode != KL_MODE_ROWS && !is_sum)) {
        return false;
    }
    int64_t inner = 0;
    for (uint32_t i = 0; i < call->n_inputs; i++) {
        const KlMeta *meta = call->inputs[i];
        bool is_ordered = meta->place.axis == order;
        if (!kl_place_is_equal(&meta->place, &split->places[i]) ||
            (!is_ordered && kl_place_is_rows(&meta->place)) || !(is_plain(meta) || reads_sizes) ||
            (is_ordered &&
             (meta->place.outer != 1 || (inner != 0 && inner != meta->place.inner)))) {
            return false;
        }
        inner = is_ordered ? meta->place.inner : inner;
    }
    for (uint32_t i = 0; i < result->n_outs && !is_sum; i++) {
        const KlPlace *place = &result->outs[i].place;
        if (place->axis != order || place->outer != 1 || place->inner != inner) {
            return false;
        }
    }
    return true;
}

void
kl_rules_pass_role(const KlCall *call, KlAxisId order, KlInferred *result)
{
    const KlMeta *first = call->inputs[0];
    if (first->role == KL_ROLE_KEYS && result->split.mode == KL_MODE_ROWS &&
        result->outs[0].role == KL_ROLE_NONE && is_cast_of_integers(call, result)) {
        result->outs[0].role = KL_ROLE_KEYS;
    }
    for (uint32_t i = 0; i < result->n_outs; i++) {
        result->outs[i].order = order;
    }
}
