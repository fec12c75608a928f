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
turn(KlSweep *sweep, KlValueId value)
{
    int64_t n_elements = sweep->sizes[value].n_elements;
    while (value != KL_ID_NONE && !sweep->sizes[value].is_laid_otherwise &&
           sweep->sizes[value].n_elements == n_elements) {
        sweep->sizes[value].is_laid_otherwise = true;
        value = sweep->tape->values[value].view_of;
    }
}

void
kl_sweep_known_node(KlSweep *sweep, KlNodeId id)
{
    const KlNode *told = &sweep->tape->nodes[id];
    const KlSaves *saves = &told->saves;
    const bool is_reduction = told->mode == KL_MODE_REDUCE;
    KlSweepNode *node = &sweep->nodes[id];
    *node = (KlSweepNode){.first_input = told->first_input,
                          .n_inputs = told->n_inputs,
                          .first_out = told->first_out,
                          .n_outs = told->n_outs,
                          .held = told->row != NULL ? told->row->held : NULL,
                          .saved_inputs = told->row != NULL ? saves->inputs : UINT64_MAX,
                          .saved_outputs = told->row != NULL ? saves->outputs : UINT64_MAX,
                          .has_bytes = saves->bytes_extra != 0 || saves->bytes_fixed != 0 ||
                                       saves->bytes_workspace != 0 || saves->bytes_backward != 0 ||
                                       saves->bytes_row != 0,
                          .is_uneven = saves->uneven[KL_UNEVEN_STEPS] > 0,
                          .accruing = kl_stage_accruing(sweep->tape, told),
                          .is_open = told->is_open,
                          .is_writing = told->writes != 0,
                          .is_random = told->is_random,
                          .is_for_chunks = told->is_for_chunks};
    node->parts = is_reduction ? kl_ops_parts((KlReduce)told->reduce, told->is_for_chunks) : NULL;
    for (uint32_t k = 0; k < told->n_outs; k++) {
        node->has_gradient |= sweep->sizes[told->first_out + k].needs_gradient;
    }
    for (uint32_t k = 0; k < told->n_inputs; k++) {
        KlValueId value = sweep->tape->inputs[told->first_input + k].value;
        sweep->inputs[told->first_input + k] = value;
        if (value != KL_ID_NONE && !told->is_open && node->held != NULL && node->held->turns) {
            turn(sweep, value);
        }
    }
}
