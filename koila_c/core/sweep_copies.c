/* SPDX-License-Identifier: Apache-2.0 */
/* sweep_copies.c - copies what sweeps read of values, nodes and runs into small structs, which are faster to walk. */
#include "sweep.h"

void
kl_sweep_copy_sizes(KlSweep *sweep)
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
        size->is_by_rows = !stages->is_leaf[i] && kl_place_is_rows(&value->meta.place) &&
                           kl_stage_is_body(stages->node_stage[value->node]);
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
kl_sweep_copy_node(KlSweep *sweep, KlNodeId id)
{
    const KlNode *call = &sweep->tape->nodes[id];
    const KlSaves *saves = &call->saves;
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
    node->parts = kl_tape_parts(sweep->tape, call);
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

/* Note which values chunks read by rows although they are whole (or have other rows), and which they gather. */
void
kl_sweep_copy_cuts(KlSweep *sweep)
{
    const KlSpan *span = &sweep->span;
    const KlNode *last =
        span->n_nodes > 0 ? &sweep->tape->nodes[span->nodes[span->n_nodes - 1]] : NULL;
    KlAxisId axis = last != NULL ? kl_tape_axis_find(sweep->tape, last->axis) : KL_ID_NONE;
    sweep->rows = axis != KL_ID_NONE ? sweep->tape->axis_rows[axis] : 0;
    for (uint32_t i = 0; i < span->n_imports && span->is_body && sweep->rows > 0; i++) {
        const KlImport *import = &sweep->program->stages.imports[span->imports[i]];
        const KlValue *value = &sweep->tape->values[import->value];
        bool has_rows = kl_place_is_rows(&value->meta.place);
        if (kl_place_is_rows(&import->place) &&
            !kl_tape_is_place(sweep->tape, &value->meta.place, &import->place)) {
            sweep->sizes[import->value].cut_in = sweep->serial;
        } else if (!kl_place_is_rows(&import->place) && has_rows) {
            sweep->sizes[import->value].gathered_in = sweep->serial;
        }
    }
}

static const uint32_t *
part(const KlIds *ids, KlSlice slice)
{
    return slice.n > 0 ? &ids->ids[slice.first] : NULL;
}

KlSpan
kl_sweep_span(const KlProgram *program, const KlRun *run, bool is_graph)
{
    bool is_body = kl_program_is_body(run);
    return (KlSpan){.nodes = part(&program->nodes, run->nodes),
                    .imports = part(&program->imports, run->imports),
                    .exports = part(&program->exports, run->exports),
                    .combined = part(&program->combined, run->combined),
                    .n_nodes = run->nodes.n,
                    .n_imports = run->imports.n,
                    .n_exports = run->exports.n,
                    .n_combined = run->combined.n,
                    .stage = run->stage,
                    .is_body = is_body,
                    .has_graph = is_graph && (run->has_gradient || !is_body)};
}

KlSpan
kl_sweep_span_cheap(const KlProgram *program, const KlCheapSet *cheap_set, const KlCheap *cheap)
{
    KlSpan span = kl_sweep_span(program, &program->runs[cheap->run], false);
    span.nodes = part(&cheap_set->ids, cheap->nodes);
    span.n_nodes = cheap->nodes.n;
    span.exports = &cheap->value;
    span.n_exports = 1;
    return span;
}
