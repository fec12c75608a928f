/* sweep.c - goes through one run as it goes through memory: what each call makes, keeps and lets go. */
#include "sweep.h"

#include <string.h>

#include "alloc.h"

/* Of the sweep `number`; of another: as if it were all zeros. */
struct KlSweepStorage {
    uint32_t number;
    uint32_t last_use; /* the position of the last node that makes or reads it */
    KlNodeId saved_by; /* the first node that saves it, the last to need it; KL_ID_NONE: none */
    bool is_held;      /* to the end of the run */
    bool is_copy;      /* made for this run */
    bool is_live;
    KlBytes size; /* live: as it was counted */
};

struct KlSweepValue {
    uint32_t number;
    KlValueId buffer;  /* in whose buffer its gradient lies; KL_ID_NONE: it has none now */
    uint32_t n_users;  /* values whose gradient lies in its buffer */
    uint32_t n_coming; /* from outside: gradients that are still to come */
    bool is_inside;    /* made here */
    bool is_outside;   /* it comes from outside, and a gradient goes back to it */
};

static const KlBytes zero = {0};

static KlBytes
plus(KlBytes left, KlBytes right)
{
    return (KlBytes){left.fixed + right.fixed, left.per_row + right.per_row};
}

static KlBytes
times(double n, KlBytes bytes)
{
    return (KlBytes){n * bytes.fixed, n * bytes.per_row};
}

/* The larger of two, by the sum of their numbers. */
static KlBytes
larger(KlBytes left, KlBytes right)
{
    return right.fixed + right.per_row > left.fixed + left.per_row ? right : left;
}

static KlSweepStorage *
storage_of(const KlSweep *sweep, KlValueId value)
{
    KlSweepStorage *storage = &sweep->storages[sweep->sizes[value].storage];
    if (storage->number != sweep->number) {
        *storage = (KlSweepStorage){.number = sweep->number, .saved_by = KL_ID_NONE};
    }
    return storage;
}

static KlSweepValue *
state_of(const KlSweep *sweep, KlValueId value)
{
    KlSweepValue *state = &sweep->values[value];
    if (state->number != sweep->number) {
        *state = (KlSweepValue){.number = sweep->number, .buffer = KL_ID_NONE};
    }
    return state;
}

/* -- sizes -------------------------------------------------------------------------------------------- */

/* A value as it is in the run. */
static KlBytes
size_of(const KlSweep *sweep, KlValueId value)
{
    const KlSize *size = &sweep->sizes[value];
    double whole = (double)(size->n_elements * size->itemsize);
    if (!sweep->span.is_body) {
        return (KlBytes){whole, 0};
    }
    if (size->cut_in == sweep->number) {
        return (KlBytes){0, whole / (double)sweep->rows};
    }
    return size->per_row > 0 ? (KlBytes){0, size->per_row} : (KlBytes){whole, 0};
}

static const KlInput *
inputs_of(const KlSweep *sweep, const KlNode *node)
{
    return &sweep->tape->inputs[node->first_input];
}

static bool
is_reading(const KlNode *node, const KlInput *input)
{
    return input->value != KL_ID_NONE && !node->is_open;
}

static bool
has_gradient(const KlSweep *sweep, const KlNode *node)
{
    bool is_found = false;
    for (uint32_t k = 0; k < node->n_outs && sweep->span.has_graph; k++) {
        is_found = is_found || sweep->sizes[node->first_out + k].needs_gradient;
    }
    return is_found;
}

static bool
is_wanted(const KlSweep *sweep, KlValueId value)
{
    return value != KL_ID_NONE && sweep->sizes[value].needs_gradient;
}

static bool
leaves_parts(const KlSweep *sweep, uint32_t at)
{
    return sweep->span.parts != NULL && sweep->span.parts[at] != 0;
}

static const KlParts *
parts_of(const KlSweep *sweep, uint32_t at)
{
    const KlNode *node = &sweep->tape->nodes[sweep->span.nodes[at]];
    bool is_parts = leaves_parts(sweep, at);
    return is_parts ? kl_ops_parts((KlReduce)node->reduce, node->is_for_chunks) : NULL;
}

/* What the call of a node holds, whether it is made here or not; NULL: nothing. */
static const KlHeld *
held_by_call(const KlSweep *sweep, const KlNode *node)
{
    if (node->row == NULL || node->row->held != NULL || node->row->kind != KL_ROW_INPLACE) {
        return node->row != NULL ? node->row->held : NULL;
    }
    const KlHeld **held = &sweep->held[node->row - kl_ops_rows];
    if (*held == NULL) {
        *held = kl_ops_held(node->row);
    }
    return *held;
}

static const KlHeld *
held_by(const KlSweep *sweep, uint32_t at)
{
    const KlParts *parts = parts_of(sweep, at);
    return parts != NULL && parts->held != NULL
               ? parts->held
               : held_by_call(sweep, &sweep->tape->nodes[sweep->span.nodes[at]]);
}

/* Bytes of what a node holds in flight. */
static KlBytes
bytes_of(const KlSweep *sweep, const KlNode *node, KlAmount amount)
{
    KlValueId out = node->first_out;
    KlValueId first = node->n_inputs > 0 ? inputs_of(sweep, node)->value : KL_ID_NONE;
    first = first != KL_ID_NONE ? first : out;
    KlBytes bytes = times(amount.outs, size_of(sweep, out));
    bytes = plus(bytes, times(amount.ins, size_of(sweep, first)));
    if (amount.masks > 0) {
        bool is_first = sweep->sizes[first].n_elements > sweep->sizes[out].n_elements;
        KlValueId most = is_first ? first : out;
        double share = amount.masks / sweep->sizes[most].itemsize;
        bytes = plus(bytes, times(share, size_of(sweep, most)));
    }
    return bytes;
}

/* Bytes of a call that are told of all its rows. */
static KlBytes
by_rows(const KlSweep *sweep, const KlNode *node, int64_t bytes)
{
    KlAxisId axis = kl_tape_axis_find(sweep->tape, node->axis);
    int64_t rows = axis != KL_ID_NONE ? sweep->tape->axis_rows[axis] : 0;
    return sweep->span.is_body && rows > 0 ? (KlBytes){0, (double)bytes / (double)rows}
                                           : (KlBytes){(double)bytes, 0};
}

/* Whether values are kept for backward: not where a chunk keeps something else in their place. */
static bool
saves_values(const KlSweep *sweep, uint32_t at)
{
    const KlParts *parts = parts_of(sweep, at);
    return has_gradient(sweep, &sweep->tape->nodes[sweep->span.nodes[at]]) &&
           (parts == NULL || parts->keeps == NULL);
}

static bool
is_input_saved(const KlSweep *sweep, const KlNode *node, uint32_t k)
{
    return inputs_of(sweep, node)[k].value != KL_ID_NONE &&
           (node->row == NULL || k >= 64 || (node->saves.inputs >> k & 1) != 0);
}

static bool
is_output_saved(const KlNode *node, uint32_t k)
{
    return node->row == NULL || (k < 64 && (node->saves.outputs >> k & 1) != 0);
}

/* What a node keeps beside values, and what is there only while it runs. */
static void
find_kept(const KlSweep *sweep, uint32_t at, KlBytes *further, KlBytes *workspace)
{
    const KlNode *node = &sweep->tape->nodes[sweep->span.nodes[at]];
    const KlSaves *saves = &node->saves;
    const KlParts *parts = parts_of(sweep, at);
    const KlHeld *held = held_by(sweep, at);
    *further = saves->is_extra_rows ? by_rows(sweep, node, saves->bytes_extra)
                                    : (KlBytes){(double)saves->bytes_extra, 0};
    further->fixed += (double)saves->bytes_fixed;
    *workspace = by_rows(sweep, node, saves->bytes_workspace);
    if (parts != NULL && parts->keeps != NULL) {
        *further = bytes_of(sweep, node, *parts->keeps);
    }
    if (held != NULL) {
        *workspace = plus(*workspace, bytes_of(sweep, node, held->run));
    }
    if (!has_gradient(sweep, node)) {
        *workspace = held != NULL && held->is_stepwise ? *workspace : plus(*workspace, *further);
        *further = zero;
    }
}

/* -- lifetimes ---------------------------------------------------------------------------------------- */

/* Whole values (plain tensors) of which a chunk is given its rows. */
static void
find_cut(KlSweep *sweep)
{
    const KlSpan *span = &sweep->span;
    const KlNode *last =
        span->n_nodes > 0 ? &sweep->tape->nodes[span->nodes[span->n_nodes - 1]] : NULL;
    KlAxisId axis = last != NULL ? kl_tape_axis_find(sweep->tape, last->axis) : KL_ID_NONE;
    sweep->rows = axis != KL_ID_NONE ? sweep->tape->axis_rows[axis] : 0;
    for (uint32_t i = 0; i < span->n_imports && span->is_body && sweep->rows > 0; i++) {
        const KlImport *import = &sweep->program->stages.imports[span->imports[i]];
        const KlValue *value = &sweep->tape->values[import->value];
        if (kl_place_is_rows(&import->place) && !kl_place_is_rows(&value->meta.place)) {
            sweep->sizes[import->value].cut_in = sweep->number;
        }
    }
}

/* Storages that live to the end of the run: what leaves it, and what it writes. Values that it makes. */
static void
find_held(KlSweep *sweep)
{
    const KlSpan *span = &sweep->span;
    for (uint32_t i = 0; i < span->n_exports; i++) {
        storage_of(sweep, span->exports[i])->is_held = true;
    }
    for (uint32_t i = 0; i < span->n_nodes + span->n_combined; i++) {
        bool is_here = i < span->n_nodes;
        KlNodeId id = is_here ? span->nodes[i] : span->combined[i - span->n_nodes];
        const KlNode *node = &sweep->tape->nodes[id];
        for (uint32_t k = 0; k < node->n_outs; k++) {
            state_of(sweep, node->first_out + k)->is_inside = true;
        }
        if (is_here && node->writes != 0) {
            storage_of(sweep, node->first_out)->is_held = true;
        }
    }
}

static void
save(const KlSweep *sweep, KlValueId value, KlNodeId id)
{
    KlSweepStorage *storage = storage_of(sweep, value);
    storage->saved_by = storage->saved_by == KL_ID_NONE ? id : storage->saved_by;
}

static void
find_lifetimes(KlSweep *sweep)
{
    for (uint32_t at = 0; at < sweep->span.n_nodes; at++) {
        KlNodeId id = sweep->span.nodes[at];
        const KlNode *node = &sweep->tape->nodes[id];
        const KlInput *inputs = inputs_of(sweep, node);
        bool is_saving = saves_values(sweep, at), is_back = has_gradient(sweep, node);
        for (uint32_t k = 0; k < node->n_outs; k++) {
            storage_of(sweep, node->first_out + k)->last_use = at;
            if (is_saving && is_output_saved(node, k)) {
                save(sweep, node->first_out + k, id);
            }
        }
        for (uint32_t k = 0; k < node->n_inputs; k++) {
            if (is_reading(node, &inputs[k])) {
                storage_of(sweep, inputs[k].value)->last_use = at;
            }
            if (is_saving && is_input_saved(sweep, node, k)) {
                save(sweep, inputs[k].value, id);
            }
            if (is_back && is_wanted(sweep, inputs[k].value)) {
                KlSweepValue *state = state_of(sweep, inputs[k].value);
                state->is_outside = !state->is_inside;
                state->n_coming += !state->is_inside;
            }
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
                    .parts = part(&program->parts, run->nodes),
                    .imports = part(&program->imports, run->imports),
                    .exports = part(&program->exports, run->exports),
                    .combined = part(&program->combined, run->combined),
                    .n_nodes = run->nodes.n,
                    .n_imports = run->imports.n,
                    .n_exports = run->exports.n,
                    .n_combined = run->combined.n,
                    .is_body = is_body,
                    .has_graph = is_graph && (run->has_gradient || !is_body)};
}

void
kl_sweep_open(KlSweep *sweep, const KlSpan *span)
{
    sweep->span = *span;
    sweep->number++;
    sweep->made = sweep->further = sweep->gradients = zero;
    sweep->freed = 0;
    find_cut(sweep);
    find_held(sweep);
    find_lifetimes(sweep);
}

/* -- forward ------------------------------------------------------------------------------------------ */

static void
hold(KlSweep *sweep, KlValueId value, KlBytes size)
{
    KlSweepStorage *storage = storage_of(sweep, value);
    if (!storage->is_live) {
        storage->is_live = true;
        storage->size = size;
        sweep->made = plus(sweep->made, size);
    }
}

static void
drop(KlSweep *sweep, KlSweepStorage *storage)
{
    if (storage->is_live) {
        storage->is_live = false;
        sweep->made = plus(sweep->made, times(-1, storage->size));
    }
}

/* Whether what is read is there already; else a copy is made for this run. */
static bool
is_given(const KlSweep *sweep, uint32_t number)
{
    const KlStages *stages = &sweep->program->stages;
    const KlImport *import = &stages->imports[number];
    if (sweep->span.is_body) {
        return !kl_place_is_rows(&import->place) || sweep->known.is_cut_in_place[number];
    }
    const KlValue *value = &sweep->tape->values[import->value];
    bool is_made = !stages->is_leaf[import->value] && value->node != KL_ID_NONE &&
                   stages->node_stage[value->node] != KL_STAGE_NONE;
    return !is_made || !kl_stage_is_body(stages->node_stage[value->node]) ||
           !kl_place_is_rows(&value->meta.place);
}

/* What the run is given: copies live to its end. */
static void
enter(KlSweep *sweep)
{
    const KlSpan *span = &sweep->span;
    for (uint32_t i = 0; i < span->n_imports; i++) {
        KlValueId value = sweep->program->stages.imports[span->imports[i]].value;
        bool is_copy = !is_given(sweep, span->imports[i]);
        hold(sweep, value, is_copy ? size_of(sweep, value) : zero);
        storage_of(sweep, value)->is_copy |= is_copy;
    }
    for (uint32_t i = 0; i < span->n_combined; i++) {
        const KlNode *node = &sweep->tape->nodes[span->combined[i]];
        for (uint32_t k = 0; k < node->n_outs; k++) {
            hold(sweep, node->first_out + k, size_of(sweep, node->first_out + k));
        }
    }
}

/* At the end of forward copies go that nothing keeps. */
static void
drop_copies(KlSweep *sweep)
{
    for (uint32_t i = 0; i < sweep->span.n_imports; i++) {
        KlValueId value = sweep->program->stages.imports[sweep->span.imports[i]].value;
        KlSweepStorage *storage = storage_of(sweep, value);
        if (storage->is_copy && storage->saved_by == KL_ID_NONE && !storage->is_held) {
            drop(sweep, storage);
        }
    }
}

/* What parts of a reduction, or its result, lie in: a reduced loss in the memory of its terms. */
static KlBytes
terms_of(const KlSweep *sweep, const KlNode *node)
{
    const KlHeld *held = held_by_call(sweep, node);
    KlBytes most = zero;
    for (uint32_t k = 0; held != NULL && held->is_of_terms && k < node->n_inputs; k++) {
        const KlInput *input = &inputs_of(sweep, node)[k];
        most = is_reading(node, input) ? larger(most, size_of(sweep, input->value)) : most;
    }
    return most;
}

static void
drop_dead(KlSweep *sweep, KlValueId value, uint32_t at)
{
    KlSweepStorage *storage = storage_of(sweep, value);
    if (storage->last_use == at && storage->saved_by == KL_ID_NONE && !storage->is_held &&
        !storage->is_copy) {
        drop(sweep, storage);
    }
}

/* There is room for the moment. */
static void
note(const KlSweep *sweep, KlNodeId node, KlBytes more, KlMoments *moments)
{
    KlBytes sum = plus(kl_sweep_live(sweep), plus(sweep->gradients, more));
    moments->moments[moments->n++] =
        (KlMoment){.fixed = sum.fixed, .per_row = sum.per_row, .node = node};
}

static KlStatus
make_room(const KlSweep *sweep, KlMoments *moments, KlError *error)
{
    return kl_alloc_reserve((void **)&moments->moments, &moments->n_max,
                            moments->n + sweep->span.n_nodes + 1, sizeof(KlMoment), error);
}

KlStatus
kl_sweep_forward(KlSweep *sweep, KlMoments *moments, KlError *error)
{
    const KlSpan *span = &sweep->span;
    KlStatus status = make_room(sweep, moments, error);
    if (status != KL_OK) {
        return status;
    }
    enter(sweep);
    for (uint32_t at = 0; at < span->n_nodes; at++) {
        KlNodeId id = span->nodes[at];
        const KlNode *node = &sweep->tape->nodes[id];
        bool is_parts = leaves_parts(sweep, at);
        if (is_parts || (span->is_live && node->mode == KL_MODE_REDUCE)) {
            sweep->made = plus(sweep->made, terms_of(sweep, node));
        }
        for (uint32_t k = 0; k < node->n_outs && !is_parts; k++) {
            hold(sweep, node->first_out + k, size_of(sweep, node->first_out + k));
        }
        if (!span->is_live &&
            sweep->known.is_cloned[id]) { /* to the end: what is written is held */
            sweep->made = plus(sweep->made, size_of(sweep, node->first_out + node->n_outs - 1));
        }
        KlBytes workspace;
        find_kept(sweep, at, &sweep->further_of[id], &workspace);
        sweep->further = plus(sweep->further, sweep->further_of[id]);
        note(sweep, id, workspace, moments);
        for (uint32_t k = 0; k < node->n_outs; k++) {
            drop_dead(sweep, node->first_out + k, at);
        }
        for (uint32_t k = 0; k < node->n_inputs; k++) {
            if (is_reading(node, &inputs_of(sweep, node)[k])) {
                drop_dead(sweep, inputs_of(sweep, node)[k].value, at);
            }
        }
    }
    drop_copies(sweep);
    return KL_OK;
}

KlBytes
kl_sweep_live(const KlSweep *sweep)
{
    return plus(sweep->made, sweep->further);
}

/* -- back --------------------------------------------------------------------------------------------- */

/* The gradient of a value arrives, in the buffer of that of `shared`, if any; false where one is there: the
 * two are added up. */
static bool
put(KlSweep *sweep, KlValueId value, KlValueId shared)
{
    KlSweepValue *state = state_of(sweep, value);
    if (state->buffer != KL_ID_NONE) {
        return false;
    }
    state->buffer = shared != KL_ID_NONE ? state_of(sweep, shared)->buffer : value;
    if (state_of(sweep, state->buffer)->n_users++ == 0) {
        sweep->gradients = plus(sweep->gradients, size_of(sweep, state->buffer));
    }
    return true;
}

/* The gradient of a value was used up. */
static void
take(KlSweep *sweep, KlValueId value)
{
    KlSweepValue *state = state_of(sweep, value);
    KlValueId buffer = state->buffer;
    state->buffer = KL_ID_NONE;
    if (buffer != KL_ID_NONE && --state_of(sweep, buffer)->n_users == 0) {
        sweep->gradients = plus(sweep->gradients, times(-1, size_of(sweep, buffer)));
    }
}

void
kl_sweep_seed(KlSweep *sweep, KlValueId value)
{
    (void)put(sweep, value, KL_ID_NONE);
    state_of(sweep, value)->n_users++;
}

/* Whether a joint reads a value put together from chunks, whose gradient is cut again. */
static bool
is_gathered(const KlSweep *sweep, const KlNode *node, uint32_t k)
{
    return !sweep->span.is_body &&
           !is_given(sweep, sweep->program->stages.import_of[node->first_input + k]);
}

/* Gradients of operands that were broadcast are as large as the result, all of them, until they are summed one
 * after the other. */
static KlBytes
wide_gradients(const KlSweep *sweep, const KlNode *node, const KlHeld *held)
{
    KlBytes most = zero, sum = zero;
    int n = 0;
    for (uint32_t k = 0; k < node->n_inputs; k++) {
        KlValueId value = inputs_of(sweep, node)[k].value;
        bool is_handed_on = k < 8 && (held->handed_on >> k & 1) != 0;
        if (is_wanted(sweep, value) && !is_handed_on &&
            sweep->sizes[value].n_elements < sweep->sizes[node->first_out].n_elements) {
            KlBytes size = size_of(sweep, value);
            most = n++ == 0 ? size : larger(most, size);
            sum = plus(sum, size);
        }
    }
    KlBytes more = plus(times(n, size_of(sweep, node->first_out)), most);
    return plus(more, times(-1, sum));
}

/* What the formulas for some operands' gradients hold beside these, at most. */
static KlBytes
in_flight(const KlSweep *sweep, const KlNode *node, const KlHeld *held)
{
    KlBytes more = zero;
    for (uint32_t k = 0; held != NULL && k < node->n_inputs; k++) {
        uint32_t i = k < 2 ? k : 2;
        const KlAmount amount = {held->back_outs[i], held->back_ins[i], held->back_masks};
        if (is_wanted(sweep, inputs_of(sweep, node)[k].value)) {
            more = larger(more, bytes_of(sweep, node, amount));
        }
    }
    if (held != NULL && held->turned > 0 && sweep->sizes[node->first_out].is_turned) {
        more = plus(more, times(held->turned, size_of(sweep, node->first_out)));
    }
    return held != NULL && held->is_wide ? plus(more, wide_gradients(sweep, node, held)) : more;
}

/* Whether an operand's gradient is the result's, or a view of it. */
static bool
is_handed_on(const KlSweep *sweep, const KlNode *node, const KlHeld *held, uint32_t k)
{
    KlValueId value = inputs_of(sweep, node)[k].value;
    KlBytes size = size_of(sweep, value), out = size_of(sweep, node->first_out);
    if (node->n_outs != 1 || size.fixed != out.fixed || size.per_row != out.per_row) {
        return false;
    }
    return (held != NULL && k < 8 && (held->handed_on >> k & 1) != 0) ||
           sweep->sizes[value].storage == sweep->sizes[node->first_out].storage;
}

/* The gradient of operand k is made; the bytes that adding it to another takes. */
static KlBytes
make_gradient(KlSweep *sweep, uint32_t at, const KlNode *node, uint32_t k)
{
    KlValueId value = inputs_of(sweep, node)[k].value, shared = KL_ID_NONE;
    KlSweepValue *state = state_of(sweep, value);
    if (state->is_inside || is_gathered(sweep, node, k)) {
        bool is_shared =
            !leaves_parts(sweep, at) && is_handed_on(sweep, node, held_by(sweep, at), k);
        shared = is_shared ? node->first_out : KL_ID_NONE;
    } else {
        state->n_coming--;
    }
    if (put(sweep, value, shared)) {
        return zero;
    }
    return times(state->is_outside ? 1 : 2,
                 size_of(sweep, value)); /* the second one, and the sum */
}

/* Whether the gradient of what entered is added to one there is: that of other chunks, or of the steps
 * before. */
static bool
is_added(const KlSweep *sweep, KlValueId value)
{
    return !sweep->span.is_live || sweep->known.has_grad[value];
}

/* What a node kept goes when its backward has run. */
static void
free_kept(KlSweep *sweep, uint32_t at)
{
    KlNodeId id = sweep->span.nodes[at];
    const KlNode *node = &sweep->tape->nodes[id];
    sweep->further = plus(sweep->further, times(-1, sweep->further_of[id]));
    uint32_t n = saves_values(sweep, at) ? node->n_inputs + node->n_outs : 0;
    for (uint32_t i = 0; i < n; i++) {
        bool is_input = i < node->n_inputs;
        uint32_t k = is_input ? i : i - node->n_inputs;
        if (is_input ? !is_input_saved(sweep, node, k) : !is_output_saved(node, k)) {
            continue;
        }
        KlValueId value = is_input ? inputs_of(sweep, node)[k].value : node->first_out + k;
        KlSweepStorage *storage = storage_of(sweep, value);
        if (storage->saved_by == id && !storage->is_held) {
            drop(sweep, storage);
        }
    }
}

static void
go_back_through(KlSweep *sweep, uint32_t at, KlMoments *moments)
{
    KlNodeId id = sweep->span.nodes[at];
    const KlNode *node = &sweep->tape->nodes[id];
    const KlHeld *of_call = held_by_call(sweep, node);
    for (uint32_t k = 0; k < node->n_outs && !leaves_parts(sweep, at); k++) {
        (void)put(sweep, node->first_out + k, KL_ID_NONE);
    }
    KlBytes more = by_rows(sweep, node, node->saves.bytes_backward);
    more = plus(more, in_flight(sweep, node, held_by(sweep, at)));
    if (of_call != NULL && of_call->is_composed) {
        more = plus(more, sweep->further_of[id]);
    }
    for (uint32_t k = 0; k < node->n_inputs; k++) {
        if (is_wanted(sweep, inputs_of(sweep, node)[k].value)) {
            more = plus(more, make_gradient(sweep, at, node, k));
        }
    }
    note(sweep, id, more, moments);
    for (uint32_t k = 0; k < node->n_outs; k++) {
        take(sweep, node->first_out + k);
    }
    for (uint32_t k = 0; k < node->n_inputs; k++) {
        KlValueId value = inputs_of(sweep, node)[k].value;
        bool is_done = is_wanted(sweep, value) && state_of(sweep, value)->is_outside &&
                       state_of(sweep, value)->n_coming == 0;
        if (is_done && is_added(sweep, value)) {
            take(sweep, value);
        }
    }
    free_kept(sweep, at);
}

KlStatus
kl_sweep_back(KlSweep *sweep, KlMoments *moments, KlError *error)
{
    KlStatus status = make_room(sweep, moments, error);
    if (status != KL_OK) {
        return status;
    }
    double before = kl_sweep_live(sweep).fixed;
    for (uint32_t at = sweep->span.n_nodes; at-- > 0;) {
        if (has_gradient(sweep, &sweep->tape->nodes[sweep->span.nodes[at]])) {
            go_back_through(sweep, at, moments);
        }
    }
    if (sweep->span.n_nodes > 0) {
        note(sweep, sweep->span.nodes[0], zero,
             moments); /* gradients of what was gathered are cut */
    }
    sweep->freed = before - kl_sweep_live(sweep).fixed;
    return KL_OK;
}

/* -- the whole ---------------------------------------------------------------------------------------- */

static void
find_sizes(KlSweep *sweep)
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
    for (size_t i = 0; i < stages->n_nodes; i++) {
        const KlNode *node = &tape->nodes[i];
        bool turns = node->row != NULL && node->row->held != NULL && node->row->held->turns;
        for (uint32_t k = 0; turns && stages->node_stage[i] != KL_STAGE_NONE && k < node->n_inputs;
             k++) {
            if (is_reading(node, &inputs_of(sweep, node)[k])) {
                sweep->sizes[inputs_of(sweep, node)[k].value].is_turned = true;
            }
        }
    }
}

KlStatus
kl_sweep_init(KlSweep *sweep, const KlTape *tape, const KlProgram *program, const KlKnown *known,
              KlError *error)
{
    const KlStages *stages = &program->stages;
    *sweep = (KlSweep){.tape = tape, .program = program, .known = *known};
    sweep->sizes = kl_alloc_zeroed(stages->n_values, sizeof(KlSize));
    sweep->storages = kl_alloc_zeroed(tape->n_storages, sizeof(KlSweepStorage));
    sweep->values = kl_alloc_zeroed(stages->n_values, sizeof(KlSweepValue));
    sweep->further_of = kl_alloc_zeroed(stages->n_nodes, sizeof(KlBytes));
    sweep->held = kl_alloc_zeroed(kl_ops_n_rows, sizeof(*sweep->held));
    if (sweep->sizes == NULL || sweep->storages == NULL || sweep->values == NULL ||
        sweep->further_of == NULL || sweep->held == NULL) {
        kl_sweep_fini(sweep);
        return kl_error_set(error, KL_ERROR_MEMORY, "no memory to measure %zu nodes",
                            stages->n_nodes);
    }
    find_sizes(sweep);
    return KL_OK;
}

void
kl_sweep_fini(KlSweep *sweep)
{
    kl_alloc_free(sweep->sizes);
    kl_alloc_free(sweep->storages);
    kl_alloc_free(sweep->values);
    kl_alloc_free(sweep->further_of);
    kl_alloc_free(sweep->held);
    memset(sweep, 0, sizeof(*sweep));
}
