/* py_view.c - takes views again after a write, so that no node reads an old version: staging could not
 * order such a read and the write. */
#include "py.h"

#include <string.h>

#include "alloc.h"

/* The call of `node` again, on a later version of what it views. */
static int
copy_call(Tape *tape, KlNodeId node, KlValueId before, KlValueId after, KlPyNode *call)
{
    const KlPyNode original = tape->nodes[node];
    KlError error;
    if (kl_alloc_reserve((void **)&tape->slots, &tape->n_slots_max,
                         tape->n_slots + original.n_slots, sizeof(*tape->slots), &error) != KL_OK) {
        (void)kl_py_raise(&error);
        return -1;
    }
    *call = original;
    call->first_slot = (uint32_t)tape->n_slots;
    call->kwnames = Py_XNewRef(original.kwnames);
    call->code = NULL;
    call->error = NULL;
    for (uint32_t i = 0; i < original.n_slots; i++) {
        KlSlot slot = tape->slots[original.first_slot + i];
        if (slot.kind == KL_SLOT_VALUE && slot.n == before) {
            slot.n = after;
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

/* Append the view `value` again, on `source`, the current version of what it views. */
static int
take_again(Tape *tape, KlValueId value, KlValueId source, KlValueId *current)
{
    KlValueId origin = kl_view_origin(tape, value);
    const KlValue old = tape->core.values[origin];
    const KlNode node = tape->core.nodes[old.node];
    KlInferred *inferred = &tape->inferred;
    KlError error;
    KlPyNode call = {0};
    KlNodeId id = KL_ID_NONE;
    if (kl_infer_reserve_outs(inferred, node.n_outs, &error) != KL_OK) {
        (void)kl_py_raise(&error);
        return -1;
    }
    /* A write can bring a gradient to what had none; a view that was detached from one stays so. */
    bool is_newly = tape->core.values[source].meta.requires_grad &&
                    !tape->core.values[old.view_of].meta.requires_grad;
    for (uint32_t i = 0; i < node.n_outs; i++) {
        inferred->outs[i] = tape->core.values[node.first_out + i].meta;
        inferred->outs[i].requires_grad = inferred->outs[i].requires_grad || is_newly;
    }
    KlPlace place = tape->core.inputs[node.first_input].place;
    KlPlace *places = inferred->split.places;
    inferred->alias = KL_ALIAS_VIEW;
    inferred->alias_input = 0;
    inferred->split = (KlSplit){.mode = (KlMode)node.mode,
                                .axis = node.axis,
                                .reason = node.reason,
                                .places = &place,
                                .n_rewrites = node.n_rewrites};
    if (node.n_rewrites > 0) {
        memcpy(inferred->split.rewrites, &tape->core.rewrites[node.first_rewrite],
               node.n_rewrites * sizeof(KlRewrite));
    }
    const KlRecord record = {.row = node.row,
                             .inputs = &source,
                             .n_inputs = 1,
                             .inferred = inferred,
                             .saves = node.saves,
                             .context = node.context,
                             .is_grad_enabled = node.is_grad_enabled,
                             .review_of = value,
                             .review_out = origin - node.first_out};
    int result = copy_call(tape, old.node, old.view_of, source, &call);
    if (result == 0) {
        result = kl_record_append(tape, &record, tape->nodes[old.node].func, &call, &id);
        if (result < 0) {
            Py_CLEAR(call.kwnames);
            kl_call_truncate(tape, call.first_slot);
        }
    }
    inferred->split.places = places;
    if (result == 0) {
        *current = tape->core.nodes[id].first_out + record.review_out;
    }
    return result;
}

int
kl_view_refresh(Tape *tape)
{
    for (size_t i = 0; i < tape->core.n_values; i++) {
        Value *handle = tape->values[i].handle;
        KlValueId current = KL_ID_NONE;
        if (handle == NULL || !kl_tape_is_stale(&tape->core, (KlValueId)i)) {
            continue;
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
    if (!kl_tape_is_stale(&tape->core, value)) {
        *current = value;
        return 0;
    }
    if (core->view_of == KL_ID_NONE || core->node == KL_ID_NONE) {
        *current = tape->core.storages[core->storage].base;
        return 0;
    }
    KlValueId source = KL_ID_NONE;
    if (kl_view_current(tape, core->view_of, &source) < 0) {
        return -1;
    }
    return take_again(tape, value, source, current);
}
