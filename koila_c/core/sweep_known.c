/* SPDX-License-Identifier: Apache-2.0 */
/* sweep_known.c - copies what sweeps read of values and nodes into small structs, which are faster to walk. */
#include "sweep.h"

void
kl_sweep_known_sizes(KlSweep *sweep)
{
    const KlTape *tape = sweep->tape;
    const KlStages *stages = &sweep->program->stages;
    for (size_t i = 0; i < stages->n_values; i++) {
        const KlValue *value = &tape->values[i];
        KlAxisId axis = kl_tape_axis_find(tape, value->meta.place.axis);
        int64_t rows = axis != KL_ID_NONE ? tape->axis_rows[axis] : 0;
        KlSize *size = &sweep->sizes[i];
        size->n_elements = kl_meta_n_elements(&value->meta);
        size->itemsize = (uint8_t)kl_meta_dtype_bytes(value->meta.dtype);
        size->storage = value->storage;
        size->needs_gradient = stages->needs_gradient[i] && value->meta.requires_grad;
        if (rows > 0) {
            size->per_row = (double)(size->n_elements * size->itemsize) / (double)rows;
        }
    }
}

/* Note that the gradient of a value, and of the values it is a view of all of, has another layout than the value. */
static void
note_layout(KlSweep *sweep, KlValueId value)
{
    int64_t n_elements = sweep->sizes[value].n_elements;
    while (value != KL_ID_NONE && !sweep->sizes[value].has_other_layout &&
           sweep->sizes[value].n_elements == n_elements) {
        sweep->sizes[value].has_other_layout = true;
        value = sweep->tape->values[value].view_of;
    }
}

void
kl_sweep_known_node(KlSweep *sweep, KlNodeId id)
{
    const KlNode *call = &sweep->tape->nodes[id];
    const KlSaves *saves = &call->saves;
    const bool is_reduction = call->mode == KL_MODE_REDUCE;
    KlSweepNode *node = &sweep->nodes[id];
    *node = (KlSweepNode){.first_input = call->first_input,
                          .n_inputs = call->n_inputs,
                          .first_out = call->first_out,
                          .n_outs = call->n_outs,
                          .held = call->row != NULL ? call->row->held : NULL,
                          .saved_inputs = call->row != NULL ? saves->inputs : UINT64_MAX,
                          .saved_outputs = call->row != NULL ? saves->outputs : UINT64_MAX,
                          .has_bytes = saves->bytes_extra != 0 || saves->bytes_fixed != 0 ||
                                       saves->bytes_workspace != 0 || saves->bytes_backward != 0 ||
                                       saves->bytes_row != 0,
                          .is_uneven = saves->uneven[KL_UNEVEN_STEPS] > 0,
                          .accruing = kl_stage_accruing(sweep->tape, call),
                          .is_open = call->is_open,
                          .is_writing = call->writes != 0,
                          .is_random = call->is_random,
                          .is_for_chunks = call->is_for_chunks};
    node->parts = is_reduction ? kl_ops_parts((KlReduce)call->reduce, call->is_for_chunks) : NULL;
    for (uint32_t k = 0; k < call->n_outs; k++) {
        node->has_gradient |= sweep->sizes[call->first_out + k].needs_gradient;
    }
    for (uint32_t k = 0; k < call->n_inputs; k++) {
        KlValueId value = sweep->tape->inputs[call->first_input + k].value;
        sweep->inputs[call->first_input + k] = value;
        if (value != KL_ID_NONE && !call->is_open && node->held != NULL && node->held->turns) {
            note_layout(sweep, value);
        }
    }
}
