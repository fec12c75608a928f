/* SPDX-License-Identifier: Apache-2.0 */
/* tape.c - owns the recorded program. Appending a node takes constant time, and ids stay valid until kl_tape_clear. */
#include "tape.h"

#include <string.h>

#include "alloc.h"

void
kl_tape_init(KlTape *tape)
{
    memset(tape, 0, sizeof(*tape));
}

void
kl_tape_fini(KlTape *tape)
{
    kl_alloc_free(tape->nodes);
    kl_alloc_free(tape->values);
    kl_alloc_free(tape->inputs);
    kl_alloc_free(tape->rewrites);
    kl_alloc_free(tape->storages);
    kl_alloc_free(tape->axis_rows);
    kl_alloc_free(tape->orders);
    kl_alloc_free(tape->axis_of);
    kl_tape_init(tape);
}

bool
kl_tape_is_roomy(size_t n, size_t n_max)
{
    return n_max > 1 << 14 && n < n_max / 4;
}

void
kl_tape_clear(KlTape *tape)
{
    if (kl_tape_is_roomy(tape->n_values, tape->n_values_max)) {
        kl_tape_fini(tape);
        return;
    }
    tape->n_nodes = 0;
    tape->n_values = 0;
    tape->n_inputs = 0;
    tape->n_rewrites = 0;
    tape->n_storages = 0;
    tape->n_axes = 0;
    tape->n_done = 0;
    tape->n_aside = 0;
    tape->n_wanted = 0;
    tape->has_regions = false;
}

KlStatus
kl_tape_axis(KlTape *tape, int64_t rows, KlAxisId *axis)
{
    if (KL_RESERVE(tape, axis_of, tape->n_axes + 1) != KL_OK ||
        KL_RESERVE(tape, axis_rows, tape->n_axes + 1) != KL_OK ||
        KL_RESERVE(tape, orders, tape->n_axes + 1) != KL_OK) {
        return KL_ERROR_MEMORY;
    }
    *axis = (KlAxisId)tape->n_axes++;
    tape->axis_rows[*axis] = rows;
    tape->axis_of[*axis] = *axis;
    tape->orders[*axis] = (KlOrder){.of = KL_ID_NONE};
    return KL_OK;
}

void
kl_tape_axis_merge(KlTape *tape, KlAxisId left, KlAxisId right)
{
    left = kl_tape_axis_find(tape, left);
    right = kl_tape_axis_find(tape, right);
    if (left < right) {
        tape->axis_of[right] = left;
    } else {
        tape->axis_of[left] = right;
    }
    for (size_t i = 0; i < tape->n_axes; i++) {
        tape->orders[i].of = kl_tape_axis_find(tape, tape->orders[i].of);
    }
}

bool
kl_tape_is_index(const KlTape *tape, KlValueId value)
{
    while (value != KL_ID_NONE && tape->values[value].node != KL_ID_NONE &&
           tape->values[value].meta.dtype == KL_DTYPE_INT64) {
        const KlNode *node = &tape->nodes[tape->values[value].node];
        KlTie tie = node->row != NULL ? node->row->tie : KL_TIE_NONE;
        if (tie == KL_TIE_INDICES || tie == KL_TIE_SORT || tie == KL_TIE_ARGSORT) {
            return value == node->first_out + node->n_outs - 1;
        }
        if (node->row == NULL || node->row->kind != KL_ROW_VIEW) {
            return false;
        }
        value = tape->inputs[node->first_input].value;
    }
    return false;
}

static bool
is_of_order(const KlTape *tape, KlValueId value, KlAxisId order)
{
    const KlMeta *meta = value != KL_ID_NONE ? &tape->values[value].meta : NULL;
    return meta != NULL &&
           (meta->place.axis == order || (meta->role != KL_ROLE_NONE && meta->order == order));
}

void
kl_tape_run_once(KlTape *tape, KlNode *node, const char *reason)
{
    node->mode = KL_MODE_ONCE;
    node->reduce = KL_REDUCE_NONE;
    node->axis = KL_ID_NONE;
    node->reason = reason;
    node->n_rewrites = 0;
    node->row_ranges = 0;
    for (uint32_t k = 0; k < node->n_inputs; k++) {
        tape->inputs[node->first_input + k].place = KL_PLACE_WHOLE;
    }
}

/* Whether a node needs an order: it reads or makes values in it, and does not go along it as it would along any axis. */
static bool
needs_order(const KlTape *tape, const KlNode *node, KlAxisId order)
{
    bool is_of = false, goes_along = node->axis == order && node->mode != KL_MODE_ONCE;
    for (uint32_t k = 0; k < node->n_inputs + node->n_outs; k++) {
        const KlInput *input = k < node->n_inputs ? &tape->inputs[node->first_input + k] : NULL;
        KlValueId value = input != NULL ? input->value : node->first_out + k - node->n_inputs;
        bool is_in = is_of_order(tape, value, order), is_reduced = node->mode == KL_MODE_REDUCE;
        uint8_t role = is_in ? tape->values[value].meta.role : KL_ROLE_NONE;
        bool is_cut = input != NULL ? input->place.axis == order : !is_reduced;
        bool is_whole = input != NULL ? !kl_place_is_rows(&input->place) : is_reduced;
        goes_along &= (is_in ? is_cut : is_whole) && (role == KL_ROLE_NONE || role == KL_ROLE_KEYS);
        is_of |= is_in;
    }
    return is_of && !goes_along;
}

void
kl_tape_break_order(KlTape *tape, KlAxisId order)
{
    for (size_t i = 0; i < tape->n_nodes; i++) {
        if (needs_order(tape, &tape->nodes[i], order)) {
            kl_tape_run_once(tape, &tape->nodes[i], "what is sorted is read in another way");
        }
    }
    for (size_t v = 0; v < tape->n_values; v++) {
        if (is_of_order(tape, (KlValueId)v, order)) {
            tape->values[v].meta.role = KL_ROLE_NONE;
        }
    }
    tape->orders[order].of = KL_ID_NONE;
}

void
kl_tape_close_orders(KlTape *tape)
{
    for (KlAxisId order = 0; order < tape->n_axes; order++) {
        bool is_private = tape->orders[order].of != KL_ID_NONE && tape->axis_of[order] == order;
        bool is_broken = false;
        for (size_t v = 0; v < tape->n_values && is_private && !is_broken; v++) {
            KlValueId value = (KlValueId)v;
            is_broken = is_of_order(tape, value, order) &&
                        (tape->values[v].is_wanted || kl_tape_is_looked_at(tape, value));
        }
        if (is_broken) {
            kl_tape_break_order(tape, order);
        } else if (is_private) {
            tape->axis_of[order] = kl_tape_axis_find(tape, tape->orders[order].of);
        }
    }
}

static KlStatus
reserve_values(KlTape *tape, size_t n_values, size_t n_storages)
{
    KlStatus status = KL_RESERVE(tape, values, tape->n_values + n_values);
    return status == KL_OK ? KL_RESERVE(tape, storages, tape->n_storages + n_storages) : status;
}

/* Append a value; the caller has reserved the memory. `storage` KL_ID_NONE: it has a storage of its own. */
static KlValueId
new_value(KlTape *tape, const KlMeta *meta, KlNodeId node, KlStorageId storage)
{
    KlValueId id = (KlValueId)tape->n_values++;
    if (storage == KL_ID_NONE) {
        storage = (KlStorageId)tape->n_storages++;
        tape->storages[storage] = (KlStorage){.base = id, .apart = KL_ID_NONE};
    }
    tape->values[id] = (KlValue){
        .meta = *meta,
        .node = node,
        .storage = storage,
        .version = tape->storages[storage].version,
        .view_of = KL_ID_NONE,
        .retained_as = KL_ID_NONE,
        .state = KL_STATE_PENDING,
    };
    tape->values[id].meta.is_there =
        node == KL_ID_NONE || tape->nodes[node].mode == (uint8_t)KL_MODE_ONCE;
    return id;
}

KlStatus
kl_tape_leaf(KlTape *tape, const KlMeta *meta, KlValueId *value)
{
    KlStatus status = reserve_values(tape, 1, 1);
    if (status != KL_OK) {
        return status;
    }
    *value = new_value(tape, meta, KL_ID_NONE, KL_ID_NONE);
    tape->values[*value].state = KL_STATE_LIVE;
    return KL_OK;
}

/* Append the outputs of a call that writes nothing. */
static void
append_outputs(KlTape *tape, const KlRecord *record, KlNodeId node)
{
    const KlInferred *inferred = record->inferred;
    for (uint32_t i = 0; i < inferred->n_outs; i++) {
        bool is_alias = inferred->alias != KL_ALIAS_NONE;
        KlValueId source = is_alias ? record->inputs[inferred->alias_input] : KL_ID_NONE;
        KlStorageId storage = KL_ID_NONE;
        if (inferred->alias == KL_ALIAS_VIEW || inferred->alias == KL_ALIAS_SAME) {
            storage = tape->values[source].storage;
        }
        KlValueId out = new_value(tape, &inferred->outs[i], node, storage);
        if (storage != KL_ID_NONE) {
            tape->values[out].view_of = source;
        } else if (inferred->alias == KL_ALIAS_MAYBE) {
            KlStorage *left = &tape->storages[tape->values[source].storage];
            KlStorage *right = &tape->storages[tape->values[out].storage];
            left->is_uncertain = right->is_uncertain = true;
            right->is_lost = left->is_lost;
        }
    }
}

/* Append the outputs of a call that writes input 0: the written value and, if that is a view, the new version of the
 * whole storage. */
static void
append_written(KlTape *tape, const KlRecord *record, KlNodeId node)
{
    const KlInferred *inferred = record->inferred;
    const KlValue before = tape->values[record->inputs[0]];
    KlStorage *storage = &tape->storages[before.storage];
    KlValueId base_before = storage->base;
    storage->version++;
    KlValueId out = new_value(tape, &inferred->outs[0], node, before.storage);
    if (before.view_of == KL_ID_NONE) {
        storage->base = out;
        return;
    }
    tape->inputs[tape->n_inputs++] =
        (KlInput){.value = base_before, .place = tape->values[base_before].meta.place};
    tape->values[base_before].n_pending++;
    tape->nodes[node].n_inputs++;
    KlMeta meta = tape->values[base_before].meta;
    meta.role = KL_ROLE_NONE;
    bool has_gradient = inferred->outs[0].requires_grad;
    meta.requires_grad = meta.requires_grad || (has_gradient && !record->is_detached);
    if (has_gradient && record->is_detached) {
        storage->apart = out;
    }
    KlValueId base = new_value(tape, &meta, node, before.storage);
    storage->base = base;
    tape->values[out].view_of = before.view_of;
    /* Its gradient must flow through the base, whose hooks see it, so readers take the view again. */
    tape->values[out].version -= meta.requires_grad && !record->is_detached ? 1 : 0;
    tape->nodes[node].n_outs = 2;
}

/* Reserve the memory for one more node with its inputs, outputs and rewrites. */
static KlStatus
reserve_node(KlTape *tape, const KlRecord *record)
{
    const size_t n_outs = record->inferred->n_outs + 1;
    size_t n_inputs = tape->n_inputs + record->node.n_inputs + 1;
    size_t n_rewrites = tape->n_rewrites + record->inferred->split.n_rewrites;
    KlStatus status = reserve_values(tape, n_outs, n_outs);
    status = status == KL_OK ? KL_RESERVE(tape, inputs, n_inputs) : status;
    status = status == KL_OK ? KL_RESERVE(tape, rewrites, n_rewrites) : status;
    return status == KL_OK ? KL_RESERVE(tape, nodes, tape->n_nodes + 1) : status;
}

static uint32_t
writes_aside(uint32_t leaf_writes, uint32_t input)
{
    return input < 32 ? leaf_writes >> input & 1 : 0;
}

bool
kl_tape_mixes_aside(const KlTape *tape, uint32_t n_inputs, const KlValueId *inputs,
                    uint32_t leaf_writes)
{
    for (uint32_t i = 0; i < n_inputs; i++) {
        const KlValue *value = inputs[i] != KL_ID_NONE ? &tape->values[inputs[i]] : NULL;
        if (value != NULL && (writes_aside(leaf_writes, i) != 0 ? value->n_pending > value->n_aside
                                                                : value->n_aside > 0)) {
            return true;
        }
    }
    return false;
}

/* Break the orders of a call's inputs, unless the call's rule supports orders. */
static void
break_orders(KlTape *tape, const KlRecord *record)
{
    for (uint32_t i = 0; i < record->node.n_inputs && !record->inferred->is_ordered; i++) {
        KlValueId value = record->inputs[i];
        const KlMeta *meta = value != KL_ID_NONE ? &tape->values[value].meta : NULL;
        if (meta == NULL || (meta->role == KL_ROLE_NONE && !kl_place_is_rows(&meta->place))) {
            continue;
        }
        KlAxisId order = meta->role != KL_ROLE_NONE ? meta->order : meta->place.axis;
        if (tape->orders[order].of != KL_ID_NONE) {
            kl_tape_break_order(tape, order);
        }
    }
}

KlStatus
kl_tape_append(KlTape *tape, const KlRecord *record, KlNodeId *node)
{
    const KlInferred *inferred = record->inferred;
    const KlSplit *split = &inferred->split;
    KlStatus status = reserve_node(tape, record);
    if (status != KL_OK) {
        return status;
    }
    break_orders(tape, record);
    *node = (KlNodeId)tape->n_nodes++;
    KlNode *made = &tape->nodes[*node];
    *made = record->node;
    made->first_input = (uint32_t)tape->n_inputs;
    made->first_out = (KlValueId)tape->n_values;
    made->n_outs = inferred->n_outs;
    made->first_rewrite = (uint32_t)tape->n_rewrites;
    made->n_rewrites = split->is_open ? 0 : split->n_rewrites;
    made->is_open = split->is_open;
    made->row_ranges = split->row_ranges;
    made->axis = split->axis;
    made->reason = split->reason;
    made->mode = (uint8_t)split->mode;
    made->reduce = (uint8_t)split->reduce;
    made->reads_aside = inferred->reads_aside;
    for (uint32_t i = 0; i < record->node.n_inputs; i++) {
        KlValueId value = record->inputs[i];
        KlPlace place = split->places != NULL ? split->places[i] : KL_PLACE_WHOLE;
        tape->inputs[tape->n_inputs++] = (KlInput){.value = value, .place = place};
        if (value != KL_ID_NONE) {
            kl_tape_ask(tape, value);
            tape->values[value].n_pending++;
            tape->values[value].n_aside += writes_aside(record->node.leaf_writes, i);
            tape->n_aside += writes_aside(record->node.leaf_writes, i);
        }
    }
    if (record->node.refresh_of != KL_ID_NONE) {
        tape->values[record->node.refresh_of].n_pending++;
    }
    if (split->n_rewrites > 0) {
        memcpy(&tape->rewrites[tape->n_rewrites], split->rewrites,
               split->n_rewrites * sizeof(*split->rewrites));
        tape->n_rewrites += split->n_rewrites;
    }
    if (record->node.writes != 0) {
        append_written(tape, record, *node);
    } else {
        append_outputs(tape, record, *node);
    }
    return KL_OK;
}

void
kl_tape_settle_open(KlTape *tape, KlValueId id, const KlPlace *place)
{
    KlValue *value = &tape->values[id];
    KlNode *node = value->node != KL_ID_NONE ? &tape->nodes[value->node] : NULL;
    if (node == NULL || !node->is_open || node->is_done || value->n_pending > 0 ||
        value->state != KL_STATE_PENDING ||
        kl_tape_axis_find(tape, node->axis) != kl_tape_axis_find(tape, place->axis)) {
        return;
    }
    node->is_open = false;
    node->first_rewrite += (uint32_t)place->dim; /* of one rewrite for each dim, keep this one */
    node->n_rewrites = 1;
    tape->rewrites[node->first_rewrite].scale = place->outer * place->inner;
    value->meta.place = *place;
}

void
kl_tape_set_done(KlTape *tape, KlNodeId id)
{
    KlNode *node = &tape->nodes[id];
    node->is_done = true;
    for (uint32_t i = 0; i < node->n_outs; i++) {
        KlValue *out = &tape->values[node->first_out + i];
        out->state = out->node == id ? KL_STATE_LIVE : out->state; /* otherwise kl_tape_cut it */
    }
    for (uint32_t i = 0; i < node->n_inputs; i++) {
        KlValueId value = tape->inputs[node->first_input + i].value;
        if (value != KL_ID_NONE) {
            tape->values[value].n_pending--;
            tape->values[value].n_aside -= writes_aside(node->leaf_writes, i);
            tape->n_aside -= writes_aside(node->leaf_writes, i);
        }
    }
    if (node->refresh_of != KL_ID_NONE) {
        tape->values[node->refresh_of].n_pending--;
    }
    while (tape->n_done < tape->n_nodes && tape->nodes[tape->n_done].is_done) {
        tape->n_done++;
    }
}

KlNodeId
kl_tape_next_draw(const KlTape *tape, KlNodeId from)
{
    size_t first = from > tape->n_done ? from : tape->n_done;
    for (size_t i = first; i < tape->n_nodes; i++) {
        if (kl_tape_waits_to_draw(&tape->nodes[i])) {
            return (KlNodeId)i;
        }
    }
    return KL_ID_NONE;
}

static bool
reads_failed(const KlTape *tape, const KlNode *node)
{
    for (uint32_t i = 0; i < node->n_inputs; i++) {
        if (kl_tape_is_failed(tape, tape->inputs[node->first_input + i].value)) {
            return true;
        }
    }
    return kl_tape_is_failed(tape, node->refresh_of);
}

void
kl_tape_set_failed(KlTape *tape, KlNodeId id)
{
    for (size_t i = id; i < tape->n_nodes; i++) {
        if (i == id || (!tape->nodes[i].is_done && reads_failed(tape, &tape->nodes[i]))) {
            tape->nodes[i].is_failed = true;
            tape->nodes[i].failed_by = id;
            kl_tape_set_done(tape, (KlNodeId)i);
        }
    }
}

static bool
is_any_out_reached(const KlTape *tape, KlNodeId id)
{
    const KlNode *node = &tape->nodes[id];
    for (uint32_t k = 0; k < node->n_outs; k++) {
        const KlValue *out = &tape->values[node->first_out + k];
        if (out->is_reached && out->node == id) { /* not cut */
            return true;
        }
    }
    return false;
}

/* What find_reached starts from: all values that the user holds, and draws that wait; or only those values that have a
 * gradient; or those that have none and wait to be computed. */
typedef enum { ALL_HELD, HELD_WITH_GRADIENT, HELD_WITHOUT } Start;

/* Set is_reached of the values to start from, that a reached value depends on (a failed call needs nothing any more), or
 * that a draw that waits makes or reads. A write in place is reached if its storage is held. This allocates nothing,
 * since a commit calls it and must not fail. */
static void
find_reached(KlTape *tape, Start start)
{
    for (size_t i = 0; i < tape->n_storages; i++) {
        tape->storages[i].is_held = false;
    }
    for (size_t i = 0; i < tape->n_values; i++) {
        KlValue *value = &tape->values[i];
        bool is_meant = value->meta.requires_grad
                            ? start == HELD_WITH_GRADIENT
                            : start == HELD_WITHOUT && value->state == KL_STATE_PENDING;
        value->is_reached = value->is_wanted && (start == ALL_HELD || is_meant);
        tape->storages[value->storage].is_held |= value->is_reached;
    }
    for (size_t i = tape->n_nodes; i-- > 0;) {
        KlNode *node = &tape->nodes[i];
        KlValue *outs = &tape->values[node->first_out];
        bool is_reached = (node->writes != 0 && tape->storages[outs->storage].is_held) ||
                          is_any_out_reached(tape, (KlNodeId)i);
        node->is_dead_draw = !is_reached && start == ALL_HELD && kl_tape_waits_to_draw(node);
        is_reached = is_reached || node->is_dead_draw;
        for (uint32_t k = 0; is_reached && k < node->n_outs; k++) {
            outs[k].is_reached = true;
        }
        for (uint32_t k = 0; is_reached && !node->is_failed && k < node->n_inputs; k++) {
            KlValueId value = tape->inputs[node->first_input + k].value;
            if (value != KL_ID_NONE) {
                tape->values[value].is_reached = true;
            }
        }
        if (is_reached && node->refresh_of != KL_ID_NONE) {
            tape->values[node->refresh_of].is_reached = true; /* a live run uses its tensor */
        }
    }
}

bool
kl_tape_has_stranded(KlTape *tape)
{
    bool has_any = false;
    find_reached(tape, HELD_WITH_GRADIENT);
    for (size_t i = 0; i < tape->n_values; i++) {
        tape->values[i].has_history = tape->values[i].is_reached;
    }
    find_reached(tape, HELD_WITHOUT);
    for (size_t i = tape->n_done; i < tape->n_nodes && !has_any; i++) {
        const KlNode *node = &tape->nodes[i];
        bool is_pending = !node->is_done && !node->is_abandoned;
        for (uint32_t k = 0; is_pending && k < node->n_outs; k++) {
            const KlValue *out = &tape->values[node->first_out + k];
            has_any |= out->is_reached && !out->has_history && out->meta.requires_grad;
        }
    }
    return has_any;
}

bool
kl_tape_has_dead_draw(KlTape *tape)
{
    bool has_any = false;
    find_reached(tape, ALL_HELD);
    for (size_t i = tape->n_done; i < tape->n_nodes && !has_any; i++) {
        has_any = tape->nodes[i].is_dead_draw;
    }
    return has_any;
}

void
kl_tape_ask(KlTape *tape, KlValueId value)
{
    KlNodeId id = value < tape->n_values ? tape->values[value].node : KL_ID_NONE;
    if (id != KL_ID_NONE && tape->nodes[id].is_abandoned) {
        for (size_t i = 0; i < tape->n_nodes; i++) {
            tape->nodes[i].is_abandoned = false;
        }
    }
}

void
kl_tape_cut(KlTape *tape, KlValueId value)
{
    KlValue *of = &tape->values[value];
    tape->n_wanted -= of->is_wanted && of->node != KL_ID_NONE;
    of->node = KL_ID_NONE;
    of->state = KL_STATE_LIVE;
}

KlValueId
kl_tape_base(const KlTape *tape, KlValueId value)
{
    const KlStorage *storage = &tape->storages[tape->values[value].storage];
    const KlValue *of = &tape->values[value];
    for (; of->view_of != KL_ID_NONE && of->node != KL_ID_NONE; of = &tape->values[value]) {
        value = of->view_of;
    }
    return of->view_of != KL_ID_NONE && of->version == storage->version ? value : storage->base;
}

bool
kl_tape_is_abandoned(const KlTape *tape)
{
    bool result = tape->n_done < tape->n_nodes;
    for (size_t i = tape->n_done; result && i < tape->n_nodes; i++) {
        result = tape->nodes[i].is_done || tape->nodes[i].is_abandoned;
    }
    return result;
}

void
kl_tape_find_awaited(KlTape *tape)
{
    for (size_t i = 0; i < tape->n_storages; i++) {
        tape->storages[i].is_awaited = false;
    }
    for (size_t i = 0; i < tape->n_nodes; i++) {
        const KlNode *node = &tape->nodes[i];
        for (uint32_t k = 0; node->is_abandoned && !node->is_done && k < node->n_outs; k++) {
            tape->storages[tape->values[node->first_out + k].storage].is_awaited = true;
        }
    }
}

void
kl_tape_abandon(KlTape *tape, KlNodeId first)
{
    for (size_t i = first; i < tape->n_nodes; i++) {
        tape->nodes[i].is_abandoned = !tape->nodes[i].is_done;
    }
}

void
kl_tape_retire(KlTape *tape, bool is_abandoned_only)
{
    find_reached(tape, ALL_HELD);
    for (size_t i = 0; i < tape->n_nodes; i++) {
        const KlNode *node = &tape->nodes[i];
        bool is_meant = node->is_abandoned || !is_abandoned_only;
        if (is_meant && !node->is_done && !is_any_out_reached(tape, (KlNodeId)i)) {
            kl_tape_set_done(tape, (KlNodeId)i);
        }
    }
}

static void
include(size_t *n, uint32_t id)
{
    *n = id != KL_ID_NONE && id >= *n ? (size_t)id + 1 : *n;
}

bool
kl_tape_find_part(const KlTape *tape, KlTape *part)
{
    bool can_drop = !tape->has_regions;
    *part = *tape;
    for (; part->n_nodes > 0 && tape->nodes[part->n_nodes - 1].is_done; part->n_nodes--) {
        can_drop &= !tape->nodes[part->n_nodes - 1].is_failed;
    }
    if (part->n_nodes == 0 || part->n_nodes == tape->n_nodes) {
        return false;
    }
    const KlNode *last = &tape->nodes[part->n_nodes - 1];
    part->n_values = last->first_out + last->n_outs;
    part->n_inputs = last[1].first_input;
    part->n_rewrites = last->first_rewrite + last->n_rewrites;
    part->n_storages = part->n_axes = 0;
    for (size_t i = 0; i < part->n_values; i++) { /* axes are merged into those made before */
        const KlValue *value = &tape->values[i];
        const KlStorage *storage = &tape->storages[value->storage];
        bool is_role = value->meta.role != KL_ROLE_NONE;
        include(&part->n_storages, value->storage);
        include(&part->n_axes, value->meta.place.axis);
        include(&part->n_axes, is_role ? value->meta.order : KL_ID_NONE);
        can_drop &= storage->base < part->n_values &&
                    (storage->apart == KL_ID_NONE || storage->apart < part->n_values);
    }
    for (size_t i = part->n_values; i < tape->n_values; i++) {
        can_drop &= !tape->values[i].is_wanted || tape->values[i].storage >= part->n_storages;
    }
    return can_drop && !last->is_open;
}

/* Whether a pending node has a wanted output that requires no gradient, or updates statistics and has no output that is
 * reached, so that no later run would ask for it. */
static bool
must_run_now(const KlTape *tape, KlNodeId id)
{
    const KlNode *node = &tape->nodes[id];
    for (uint32_t k = 0; k < node->n_outs; k++) {
        const KlValue *out = &tape->values[node->first_out + k];
        bool has_history = out->has_history && !kl_tape_is_begun(tape, node->first_out + k);
        if (out->state == KL_STATE_PENDING && out->is_wanted && !has_history) {
            return true;
        }
    }
    return node->leaf_writes != 0 && !is_any_out_reached(tape, id);
}

/* Extend must_run to earlier nodes that write the leaves (running statistics) which nodes that run now read or write.
 * is_reached here means: a node that runs now reads or writes the value. */
static void
find_writers_before(KlTape *tape)
{
    for (size_t i = 0; i < tape->n_values; i++) {
        tape->values[i].is_reached = false;
    }
    for (size_t i = tape->n_nodes; i-- > 0;) {
        KlNode *node = &tape->nodes[i];
        const KlInput *inputs = &tape->inputs[node->first_input];
        bool is_run = node->must_run || is_any_out_reached(tape, (KlNodeId)i);
        for (uint32_t k = 0; node->leaf_writes >> k != 0; k++) {
            bool is_asked =
                inputs[k].value != KL_ID_NONE && tape->values[inputs[k].value].is_reached;
            node->must_run |= writes_aside(node->leaf_writes, k) != 0 && is_asked;
        }
        node->must_run = node->must_run && !node->is_done && !node->is_abandoned;
        is_run = !node->is_done && !node->is_abandoned && (is_run || node->must_run);
        for (uint32_t k = 0; is_run && k < node->n_inputs; k++) {
            if (inputs[k].value != KL_ID_NONE) {
                tape->values[inputs[k].value].is_reached = true;
            }
        }
    }
}

bool
kl_tape_find_no_grad(KlTape *tape)
{
    bool has_any = false;
    find_reached(tape, ALL_HELD);
    for (size_t i = 0; i < tape->n_values; i++) {
        tape->values[i].has_history = false;
        tape->values[i].is_over = tape->values[i].state == KL_STATE_FREED;
    }
    for (size_t i = 0; i < tape->n_nodes; i++) {
        KlNode *node = &tape->nodes[i];
        bool has_gradient = false, is_over = false;
        for (uint32_t k = 0; k < node->n_inputs; k++) {
            KlValueId value = tape->inputs[node->first_input + k].value;
            has_gradient = has_gradient || (value != KL_ID_NONE && tape->values[value].has_history);
            is_over = is_over || (value != KL_ID_NONE && tape->values[value].is_over);
        }
        for (uint32_t k = 0; k < node->n_outs; k++) {
            KlValue *out = &tape->values[node->first_out + k];
            if (out->node == i) { /* not cut */
                out->is_over = out->meta.requires_grad && is_over;
                out->has_history = has_gradient || (out->meta.requires_grad && !is_over);
            }
        }
        node->must_run = !node->is_done && !node->is_abandoned && must_run_now(tape, (KlNodeId)i);
        has_any = has_any || node->must_run;
    }
    if (tape->n_aside != 0) {
        find_writers_before(tape);
    }
    return has_any;
}
