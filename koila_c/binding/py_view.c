/* SPDX-License-Identifier: Apache-2.0 */
/* py_view.c - takes views again after a write, so that no node reads an old version of a storage: staging could not
 * order such a read and the write */
#include "py_tape.h"

#include <string.h>

#include "alloc.h"

#define KL_VIEW_INPUTS 64

/* Copy the call of `node`, with now[k] in place of its input k. 0 or -1. */
static int
copy_call(Tape *tape, KlNodeId node, const KlValueId *now, KlPyNode *call)
{
    const KlInput *inputs = &tape->core.inputs[tape->core.nodes[node].first_input];
    uint32_t n_inputs = tape->core.nodes[node].n_inputs;
    const KlPyNode original = tape->nodes[node];
    if (KL_RESERVE(tape, slots, tape->n_slots + original.n_slots) != KL_OK) {
        return kl_py_done(PyErr_NoMemory());
    }
    *call = original;
    call->first_slot = (uint32_t)tape->n_slots;
    call->kwnames = Py_XNewRef(original.kwnames);
    call->code = NULL;
    call->error = NULL;
    for (uint32_t i = 0; i < original.n_slots; i++) {
        KlSlot slot = tape->slots[original.first_slot + i];
        uint32_t k = 0;
        while (slot.kind == KL_SLOT_VALUE && k < n_inputs && inputs[k].value != slot.n) {
            k++;
        }
        if (slot.kind == KL_SLOT_VALUE && k < n_inputs) {
            slot.n = now[k];
        }
        Py_XINCREF(slot.object);
        tape->slots[tape->n_slots++] = slot;
    }
    return 0;
}

KlValueId
kl_view_origin(const Tape *tape, KlValueId value)
{
    const KlNode *node = &tape->core.nodes[tape->core.values[value].node];
    while (node->writes != 0) {
        value = tape->core.inputs[node->first_input].value;
        node = &tape->core.nodes[tape->core.values[value].node];
    }
    return value;
}

/* Find the current versions of the inputs of a view's node, and their places; `source` replaces what it views.
 * Other inputs only lend their sizes, which no write changes. 0 or -1. */
static int
find_inputs(Tape *tape, const KlNode *node, KlValueId viewed, KlValueId source, KlValueId *now,
            KlPlace *places)
{
    if (node->n_inputs > KL_VIEW_INPUTS) {
        return kl_py_done(PyErr_Format(PyExc_SystemError, "koila: a view has too many inputs"));
    }
    for (uint32_t k = 0; k < node->n_inputs; k++) {
        const KlInput input = tape->core.inputs[node->first_input + k];
        now[k] = input.value == viewed ? source : input.value;
        places[k] = input.place;
        if (input.value != viewed && input.value != KL_ID_NONE &&
            kl_view_current(tape, input.value, &now[k]) < 0) {
            return -1;
        }
    }
    return 0;
}

/* The input of which the outputs of a view's node are views. */
static uint32_t
alias_input_of(const Tape *tape, const KlNode *node)
{
    const KlInput *inputs = &tape->core.inputs[node->first_input];
    const KlValue *outs = &tape->core.values[node->first_out];
    uint32_t k = 0;
    while (k + 1 < node->n_inputs && inputs[k].value != outs[0].view_of) {
        k++;
    }
    return k;
}

/* Move `*value` to what a detached view was taken of, and return the function that detached it; NULL if none did. */
static const Function *
detached_by(const Tape *tape, KlValueId *value)
{
    while (tape->core.values[*value].view_of != KL_ID_NONE) {
        const KlValue *origin = &tape->core.values[kl_view_origin(tape, *value)];
        *value = origin->view_of;
        if (kl_ops_is_detached(tape->core.nodes[origin->node].row)) {
            return kl_function_find(tape->nodes[origin->node].func);
        }
    }
    return NULL;
}

bool
kl_view_is_detached(const Tape *tape, KlValueId value)
{
    return detached_by(tape, &value) != NULL;
}

bool
kl_view_has_leaf(const Tape *tape, KlValueId value)
{
    while (value != KL_ID_NONE && !kl_tape_is_begun(&tape->core, value)) {
        value = tape->core.values[value].view_of;
    }
    return value != KL_ID_NONE;
}

bool
kl_view_is_data(const Tape *tape, KlValueId value)
{
    const Function *function = detached_by(tape, &value);
    while (function != NULL && PyUnicode_CompareWithASCIIString(function->name, "data") != 0) {
        function = detached_by(tape, &value);
    }
    return function != NULL;
}

/* Set `inferred` as shape inference would for the node of a view, if that were a view of `source`. 0 or -1. */
static int
infer_again(Tape *tape, const KlNode *node, const KlValue *old, KlValueId source, KlPlace *places,
            KlInferred *inferred)
{
    if (kl_ops_reserve_outs(inferred, node->n_outs) != KL_OK) {
        return kl_py_done(PyErr_NoMemory());
    }
    /* A write can give memory without a gradient a graph. A detached view of it still has none. */
    bool is_newly = tape->core.values[source].meta.requires_grad &&
                    !tape->core.values[old->view_of].meta.requires_grad &&
                    !kl_ops_is_detached(node->row);
    for (uint32_t i = 0; i < node->n_outs; i++) {
        inferred->outs[i] = tape->core.values[node->first_out + i].meta;
        inferred->outs[i].requires_grad = inferred->outs[i].requires_grad || is_newly;
        inferred->outs[i].role = KL_ROLE_NONE; /* its numbers were written */
    }
    inferred->is_ordered = node->mode != KL_MODE_ONCE;
    inferred->alias = KL_ALIAS_VIEW;
    inferred->alias_input = alias_input_of(tape, node);
    inferred->split = (KlSplit){.mode = (KlMode)node->mode,
                                .axis = node->axis,
                                .reason = node->reason,
                                .places = places,
                                .n_rewrites = node->n_rewrites};
    if (node->n_rewrites > 0) {
        memcpy(inferred->split.rewrites, &tape->core.rewrites[node->first_rewrite],
               node->n_rewrites * sizeof(KlRewrite));
    }
    return 0;
}

/* If a write mixed sorted rows with unsorted ones, views of the memory are neither: break the order. */
static void
break_orders(KlTape *core, const KlMeta *was, const KlMeta *now)
{
    const KlAxisId axes[] = {was->place.axis, now->place.axis};
    for (int i = 0; i < 2 && axes[0] != axes[1]; i++) {
        if (axes[i] != KL_ID_NONE && core->orders[axes[i]].of != KL_ID_NONE) {
            kl_tape_break_order(core, axes[i]);
        }
    }
}

/* Record the view `value` once more, as a view of `source`: the latest version of the value it views. 0 or -1. */
static int
take_again(Tape *tape, KlValueId value, KlValueId source, KlValueId *current)
{
    KlValueId now[KL_VIEW_INPUTS];
    KlPlace again[KL_VIEW_INPUTS];
    KlValueId origin = kl_view_origin(tape, value);
    break_orders(&tape->core, &tape->core.values[tape->core.values[origin].view_of].meta,
                 &tape->core.values[source].meta);
    const KlValue old = tape->core.values[origin];
    const KlNode node = tape->core.nodes[old.node];
    KlPyNode call = {0};
    KlNodeId id = KL_ID_NONE;
    KlInferred inferred = {0}; /* the tape's own may be that of a call that reads this view */
    if (find_inputs(tape, &node, old.view_of, source, now, again) < 0) {
        return -1;
    }
    const KlRecord record = {.node = {.row = node.row,
                                      .n_inputs = node.n_inputs,
                                      .saves = node.saves,
                                      .context = node.context,
                                      .is_grad_enabled = node.is_grad_enabled,
                                      .refresh_of = value,
                                      .refresh_out = origin - node.first_out},
                             .inputs = now,
                             .inferred = &inferred};
    int result = infer_again(tape, &node, &old, source, again, &inferred);
    result = result == 0 ? copy_call(tape, old.node, now, &call) : result;
    if (result == 0) {
        result = kl_tape_append_call(tape, &record, tape->nodes[old.node].func, &call, &id);
        if (result < 0) {
            Py_CLEAR(call.kwnames);
            kl_call_truncate(tape, call.first_slot);
        }
    }
    inferred.split.places = NULL; /* `again` is not its memory */
    kl_infer_fini(&inferred);
    if (result == 0) {
        *current = tape->core.nodes[id].first_out + record.node.refresh_out;
    }
    return result;
}

KlValueId
kl_view_of_graph(const Tape *tape, KlValueId value)
{
    const KlTape *core = &tape->core;
    while (core->values[value].view_of == KL_ID_NONE && core->values[value].node != KL_ID_NONE) {
        const KlNode *node = &core->nodes[core->values[value].node];
        const KlInput *inputs = &core->inputs[node->first_input];
        bool is_kept = !node->is_grad_enabled;
        if (node->writes == 0 || !(is_kept || kl_view_is_detached(tape, inputs[0].value))) {
            break;
        }
        value = inputs[node->n_outs == 2 ? node->n_inputs - 1 : 0].value;
    }
    return value;
}

int
kl_view_refresh(Tape *tape)
{
    for (size_t i = 0; i < tape->core.n_values; i++) {
        Value *handle = tape->values[i].handle;
        KlNodeId maker = tape->core.values[i].node;
        bool is_abandoned = maker != KL_ID_NONE && tape->core.nodes[maker].is_abandoned;
        KlValueId current = KL_ID_NONE;
        if (handle == NULL || is_abandoned || !kl_tape_is_stale(&tape->core, (KlValueId)i)) {
            continue; /* a value that a failed run abandoned waits until somebody asks for it */
        }
        if (kl_view_current(tape, (KlValueId)i, &current) < 0) {
            return -1;
        }
        kl_lazy_move(handle, current);
    }
    return 0;
}

int
kl_view_current(Tape *tape, KlValueId value, KlValueId *current)
{
    const KlValue *core = &tape->core.values[value];
    const KlStorage *storage = &tape->core.storages[core->storage];
    bool is_view = core->view_of != KL_ID_NONE;
    /* The tensor of a view that was cut shows the memory as it is now. */
    if (!kl_tape_is_stale(&tape->core, value) || (is_view && core->node == KL_ID_NONE)) {
        *current = value;
    } else if (!is_view) {
        *current = storage->base;
    } else if (storage->apart != KL_ID_NONE &&
               kl_view_origin(tape, storage->apart) == kl_view_origin(tape, value)) {
        *current = storage->apart; /* a new view would lose the graph that a write gave this one */
    } else {
        KlValueId source = KL_ID_NONE;
        int result = kl_view_current(tape, core->view_of, &source);
        return result < 0 ? -1 : take_again(tape, value, source, current);
    }
    return 0;
}

/* Whether a value is a view of `other` that belongs to its graph. */
static bool
is_view_of(const Tape *tape, KlValueId value, KlValueId other)
{
    bool is_detached = false;
    while (value != KL_ID_NONE && value != other && !is_detached) {
        KlNodeId maker = tape->core.values[value].node;
        is_detached = maker != KL_ID_NONE && kl_ops_is_detached(tape->core.nodes[maker].row);
        value = tape->core.values[value].view_of;
    }
    return value == other && !is_detached;
}

bool
kl_view_is_shared(const Tape *tape, KlValueId id)
{
    const KlStorage *storage = &tape->core.storages[tape->core.values[id].storage];
    bool is_own = tape->core.values[storage->base].node != KL_ID_NONE, is_found = false;
    for (size_t i = 0; i < tape->core.n_values && !is_found; i++) {
        is_found = i != id && tape->values[i].handle != NULL &&
                   tape->core.values[i].storage == tape->core.values[id].storage &&
                   (is_own || is_view_of(tape, (KlValueId)i, id));
    }
    return is_found;
}
