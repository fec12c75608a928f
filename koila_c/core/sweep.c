/* SPDX-License-Identifier: Apache-2.0 */
/* sweep.c - simulates the memory of one run: what each call allocates, saves for backward and frees. */
#include "sweep.h"

#include <string.h>

#include "alloc.h"

/* The state of a storage in run `serial`; storage_of() resets the state of an earlier run. */
struct KlSweepStorage {
    uint32_t serial;
    uint32_t made_at;  /* the position of the node that makes it; KL_ID_NONE: an import */
    uint32_t region;   /* the region that ran again when this was found */
    uint32_t last_use; /* the position of the last node that makes or reads it */
    uint32_t saved_by; /* of the first node that saves it, whose backward runs last; KL_ID_NONE */
    bool is_held;      /* it lives to the end of the forward pass */
    bool is_result;    /* likewise, and longer: it is a result of the run */
    bool is_copy;      /* an import that is copied for this run */
    bool is_live;
    KlBytes size; /* live: the bytes that were counted */
};

struct KlSweepValue {
    uint32_t serial;
    KlValueId buffer;  /* the value in whose gradient its own is; KL_ID_NONE: no gradient */
    uint32_t n_users;  /* values whose gradient is in its buffer */
    uint32_t n_coming; /* of an import: gradients that nodes of the run still have to make */
    bool is_inside;    /* the run makes it */
    bool is_second;    /* it had a gradient when the node made another one */
    bool is_left;      /* an export: other runs send its gradient, and gradients here are added */
    bool is_expanded;  /* its gradient counts no bytes: it is expanded, or the caller counts it */
    bool is_broadcast; /* its gradient is expanded from a smaller one, or a view of such */
};

static const KlBytes zero = {0};

static void
add(KlBytes *sum, KlBytes more)
{
    *sum = kl_sweep_plus(*sum, more);
}

static KlBytes
times(double n, KlBytes bytes)
{
    return (KlBytes){n * bytes.fixed, n * bytes.per_row};
}

/* Return the larger of two, by the sum of their members. */
static KlBytes
larger(KlBytes left, KlBytes right)
{
    return right.fixed + right.per_row > left.fixed + left.per_row ? right : left;
}

static KlSweepStorage
new_storage(const KlSweep *sweep, uint32_t at)
{
    return (KlSweepStorage){.serial = sweep->serial,
                            .made_at = at,
                            .region = sweep->region,
                            .last_use = at,
                            .saved_by = KL_ID_NONE};
}

static KlSweepStorage *
storage_of(const KlSweep *sweep, KlValueId value)
{
    KlSweepStorage *storage = &sweep->storages[sweep->sizes[value].storage];
    if (storage->serial != sweep->serial) {
        *storage = new_storage(sweep, KL_ID_NONE);
    }
    return storage;
}

static KlSweepValue *
state_of(const KlSweep *sweep, KlValueId value)
{
    KlSweepValue *state = &sweep->values[value];
    if (state->serial != sweep->serial) {
        *state = (KlSweepValue){.serial = sweep->serial, .buffer = KL_ID_NONE};
    }
    return state;
}

/* -- sizes -------------------------------------------------------------------------------------------- */

/* Return the bytes of a chunk's rows of an import. */
static KlBytes
size_of_rows(const KlSweep *sweep, KlValueId value)
{
    const KlSize *size = &sweep->sizes[value];
    double whole = (double)(size->n_elements * size->itemsize);
    bool has_rows = size->cut_in != sweep->serial && size->per_row > 0;
    return (KlBytes){0, has_rows ? size->per_row : whole / (double)sweep->rows};
}

/* Return the bytes of a value in the run: per row, if chunks have only their rows of it. */
static KlBytes
size_of(const KlSweep *sweep, KlValueId value)
{
    const KlSize *size = &sweep->sizes[value];
    double whole = (double)(size->n_elements * size->itemsize);
    if (!sweep->span.is_body) {
        return (KlBytes){whole, 0};
    }
    bool has_rows = size->per_row > 0 && size->gathered_in != sweep->serial;
    return has_rows || size->cut_in == sweep->serial ? size_of_rows(sweep, value)
                                                     : (KlBytes){whole, 0};
}

static const KlSweepNode *
node_at(const KlSweep *sweep, uint32_t at)
{
    return &sweep->nodes[sweep->span.nodes[at]];
}

static const KlValueId *
inputs_of(const KlSweep *sweep, const KlSweepNode *node)
{
    return &sweep->inputs[node->first_input];
}

static bool
is_wanted(const KlSweep *sweep, KlValueId value)
{
    return value != KL_ID_NONE && sweep->sizes[value].needs_gradient;
}

static bool
has_gradient(const KlSweep *sweep, const KlSweepNode *node)
{
    return sweep->span.has_graph && node->has_gradient;
}

/* Return what a reduction holds in chunks; NULL: it is no reduction, or runs on the whole batch. */
static const KlParts *
parts_of(const KlSweep *sweep, const KlSweepNode *node)
{
    return sweep->span.is_body ? node->parts : NULL;
}

static const KlHeld *
held_by(const KlSweep *sweep, const KlSweepNode *node)
{
    const KlParts *parts = parts_of(sweep, node);
    return parts != NULL && parts->held != NULL ? parts->held : node->held;
}

/* Return the temporary bytes of a node: multiples of its first output, its first input and masks of these. */
static KlBytes
bytes_of(const KlSweep *sweep, const KlSweepNode *node, double outs, double ins, double masks)
{
    KlValueId out = node->first_out;
    KlValueId first = node->n_inputs > 0 ? inputs_of(sweep, node)[0] : KL_ID_NONE;
    first = first != KL_ID_NONE ? first : out;
    KlBytes bytes = outs > 0 ? times(outs, size_of(sweep, out)) : zero;
    bytes = ins > 0 ? kl_sweep_plus(bytes, times(ins, size_of(sweep, first))) : bytes;
    if (masks > 0) {
        bool is_first = sweep->sizes[first].n_elements > sweep->sizes[out].n_elements;
        KlValueId most = is_first ? first : out;
        double share = masks / sweep->sizes[most].itemsize;
        add(&bytes, times(share, size_of(sweep, most)));
    }
    return bytes;
}

/* Convert bytes that were recorded for all rows of a call. */
static KlBytes
by_rows(const KlSweep *sweep, const KlNode *node, int64_t bytes)
{
    KlAxisId axis = kl_tape_axis_find(sweep->tape, node->axis);
    int64_t rows = axis != KL_ID_NONE ? sweep->tape->axis_rows[axis] : 0;
    return sweep->span.is_body && rows > 0 ? (KlBytes){0, (double)bytes / (double)rows}
                                           : (KlBytes){(double)bytes, 0};
}

/* Return the bytes of a layer over rows of many lengths (KlUneven). */
static KlBytes
by_steps(const KlSweep *sweep, uint32_t at, KlUneven of)
{
    const KlNode *node = &sweep->tape->nodes[sweep->span.nodes[at]];
    const float *uneven = node->saves.uneven;
    KlSkew skew = {1, 1};
    if (sweep->span.is_body) {
        skew = sweep->is_in_pieces ? sweep->facts.pieces : sweep->facts.chunks;
    }
    double steps = uneven[KL_UNEVEN_STEPS] * skew.steps;
    double turns = uneven[KL_UNEVEN_TURNS] * skew.turns;
    return by_rows(sweep, node, (int64_t)(uneven[of] * steps + uneven[of + 1] * turns));
}

/* Set `*further` to the bytes that a node saves besides values of the tape, and return its workspace. */
static KlBytes
find_kept(const KlSweep *sweep, uint32_t at, KlBytes *further)
{
    const KlSweepNode *node = node_at(sweep, at);
    const KlParts *parts = parts_of(sweep, node);
    const KlHeld *held = held_by(sweep, node);
    KlBytes workspace = zero, steps = zero;
    *further = zero;
    if (node->is_uneven) {
        *further = has_gradient(sweep, node) ? by_steps(sweep, at, KL_UNEVEN_KEPT) : zero;
        return by_steps(sweep, at, KL_UNEVEN_BESIDE);
    }
    if (node->has_bytes) {
        const KlNode *call = &sweep->tape->nodes[sweep->span.nodes[at]];
        *further = call->saves.is_extra_rows ? by_rows(sweep, call, call->saves.bytes_extra)
                                             : (KlBytes){(double)call->saves.bytes_extra, 0};
        further->fixed += (double)call->saves.bytes_fixed;
        workspace = by_rows(sweep, call, call->saves.bytes_workspace);
        workspace.fixed += (double)call->saves.bytes_row;
        steps = by_rows(sweep, call, call->saves.bytes_steps);
    }
    if (parts != NULL && parts->keeps != NULL) {
        const KlAmount *keeps = parts->keeps;
        *further = bytes_of(sweep, node, keeps->outs, keeps->ins, keeps->masks);
    }
    if (held != NULL) {
        const KlAmount *run = &held->run;
        add(&workspace, bytes_of(sweep, node, run->outs, run->ins, run->masks));
    }
    if (!has_gradient(sweep, node)) {
        workspace = held != NULL && held->is_stepwise ? kl_sweep_plus(workspace, steps)
                                                      : kl_sweep_plus(workspace, *further);
        *further = zero;
    }
    return workspace;
}

/* -- regions ------------------------------------------------------------------------------------------ */

/* Return the innermost region around node `at`, in a live run; KL_ID_NONE: none. */
static uint32_t
region_at(const KlSweep *sweep, uint32_t at)
{
    bool has_regions = sweep->span.is_live && sweep->facts.n_regions > 0;
    return has_regions ? sweep->facts.region_of[sweep->span.nodes[at]] : KL_ID_NONE;
}

/* Return the outermost region around node `at` that is inside of the one that runs again, or of the run. */
static uint32_t
inner_at(const KlSweep *sweep, uint32_t at)
{
    uint32_t inner = KL_ID_NONE;
    for (uint32_t i = region_at(sweep, at); i != sweep->region; i = sweep->facts.outer[i]) {
        inner = i;
    }
    return inner;
}

static bool
makes(const KlSweep *sweep, uint32_t region, const KlSweepStorage *storage)
{
    return storage->made_at >= sweep->regions[region].first &&
           storage->made_at < sweep->regions[region].end;
}

static void
find_regions(KlSweep *sweep)
{
    for (uint32_t at = 0; at < sweep->span.n_nodes; at++) {
        for (uint32_t i = region_at(sweep, at); i != KL_ID_NONE; i = sweep->facts.outer[i]) {
            KlRegion *region = &sweep->regions[i];
            *region = region->end > 0 ? *region : (KlRegion){.first = at, .back = KL_ID_NONE};
            region->end = at + 1;
            bool is_back = region->back == KL_ID_NONE && has_gradient(sweep, node_at(sweep, at));
            region->back = is_back ? at : region->back;
        }
    }
}

/* -- lifetimes ---------------------------------------------------------------------------------------- */

static void
save(const KlSweep *sweep, KlValueId value, uint32_t at)
{
    KlSweepStorage *storage = storage_of(sweep, value);
    storage->saved_by = storage->saved_by == KL_ID_NONE ? at : storage->saved_by;
}

/* Note a read of a storage by node `at`, which may save it. A region that runs again needs what it reads from outside of
 * it until the last backward of its nodes, and saves nothing before. */
static void
note_read(KlSweep *sweep, KlValueId value, uint32_t at, bool is_saved)
{
    KlSweepStorage *storage = storage_of(sweep, value);
    uint32_t inner = inner_at(sweep, at);
    if (sweep->region != KL_ID_NONE && !makes(sweep, sweep->region, storage)) {
        return; /* the region around, or the run, keeps it */
    }
    storage->last_use = node_at(sweep, at)->is_open ? storage->last_use : at;
    if (inner != KL_ID_NONE && !makes(sweep, inner, storage)) {
        save(sweep, value, sweep->regions[inner].back);
    } else if (inner == KL_ID_NONE && is_saved) {
        save(sweep, value, at);
    }
}

/* Find, for nodes [first, end), each storage's last use and first saver, and whether it is memory that the run writes,
 * which lives to the end. */
static void
find_lifetimes(KlSweep *sweep, uint32_t first, uint32_t end)
{
    for (uint32_t at = first; at < end; at++) {
        const KlSweepNode *node = node_at(sweep, at);
        const KlValueId *inputs = inputs_of(sweep, node);
        const KlParts *parts = parts_of(sweep, node); /* in chunks it may save other values */
        bool is_back = has_gradient(sweep, node);
        bool is_saving = is_back && (parts == NULL || parts->keeps == NULL);
        for (uint32_t k = 0; k < node->n_inputs; k++) {
            if (inputs[k] != KL_ID_NONE) {
                bool is_saved = k >= 64 || (node->saved_inputs >> k & 1) != 0;
                note_read(sweep, inputs[k], at, is_saving && is_saved);
            }
            if (is_back && is_wanted(sweep, inputs[k]) && sweep->region == KL_ID_NONE) {
                KlSweepValue *state = state_of(sweep, inputs[k]);
                state->n_coming += !state->is_inside;
            }
        }
        for (uint32_t k = 0; k < node->n_outs; k++) {
            KlValueId out = node->first_out + k;
            KlSweepStorage *storage = &sweep->storages[sweep->sizes[out].storage];
            if (storage->serial != sweep->serial ||
                (storage->made_at == at && storage->region != sweep->region)) {
                *storage = new_storage(sweep, at);
            }
            bool is_saved = is_saving && k < 64 && (node->saved_outputs >> k & 1) != 0;
            note_read(sweep, out, at, is_saved);
            storage->is_held |= sweep->span.is_live ? is_back && kl_tape_is_begun(sweep->tape, out)
                                                    : node->is_writing && k == 0;
            state_of(sweep, out)->is_inside = true;
        }
    }
}

void
kl_sweep_open(KlSweep *sweep, const KlSpan *span)
{
    sweep->span = *span;
    sweep->serial++;
    sweep->made = sweep->further = sweep->gradients = zero;
    sweep->most = 0;
    sweep->region = KL_ID_NONE;
    kl_sweep_copy_cuts(sweep);
    for (uint32_t i = 0; i < span->n_combined; i++) {
        const KlSweepNode *node = &sweep->nodes[span->combined[i]];
        for (uint32_t k = 0; k < node->n_outs; k++) {
            state_of(sweep, node->first_out + k)->is_inside = true;
            storage_of(sweep, node->first_out + k)->is_result =
                !sweep->sizes[node->first_out + k].is_freed;
        }
    }
    find_regions(sweep);
    find_lifetimes(sweep, 0, span->n_nodes);
    for (uint32_t i = 0; i < span->n_exports; i++) {
        storage_of(sweep, span->exports[i])->is_result |=
            span->is_live || !sweep->sizes[span->exports[i]].is_freed;
    }
}

/* -- forward ------------------------------------------------------------------------------------------ */

static void
hold(KlSweep *sweep, KlValueId value, KlBytes size)
{
    KlSweepStorage *storage = storage_of(sweep, value);
    if (!storage->is_live) {
        storage->is_live = true;
        storage->size = size;
        add(&sweep->made, size);
    }
}

/* Whether the rows of import `number` exist as a tensor or as a view of one; if not, each chunk copies them. */
static bool
is_given(const KlSweep *sweep, uint32_t number)
{
    const KlImport *import = &sweep->program->stages.imports[number];
    const KlSize *size = &sweep->sizes[import->value];
    return !sweep->span.is_body || !kl_place_is_rows(&import->place) ||
           sweep->facts.is_cut_in_place[number] || (size->is_by_rows && !size->is_copied);
}

/* Allocate the inputs of the run: copies of imports, and combined reductions. Copies live to the end of forward, and to
 * the end of backward if they get a gradient. */
static void
enter(KlSweep *sweep)
{
    const KlSpan *span = &sweep->span;
    for (uint32_t i = 0; i < span->n_imports; i++) {
        KlValueId value = sweep->program->stages.imports[span->imports[i]].value;
        bool is_copy = !is_given(sweep, span->imports[i]);
        hold(sweep, value, is_copy ? size_of_rows(sweep, value) : zero);
        storage_of(sweep, value)->is_copy |= is_copy;
    }
    for (uint32_t i = 0; i < span->n_combined; i++) {
        const KlSweepNode *node = &sweep->nodes[span->combined[i]];
        for (uint32_t k = 0; k < node->n_outs; k++) {
            hold(sweep, node->first_out + k, size_of(sweep, node->first_out + k));
        }
    }
}

/* Return the size of a reduced loss's largest input, its terms, in whose memory its result lies; else 0. */
static KlBytes
terms_of(const KlSweep *sweep, const KlSweepNode *node)
{
    bool is_loss =
        node->parts != NULL && node->held != NULL && node->held->is_of_terms && !node->is_open;
    KlBytes most = zero;
    for (uint32_t k = 0; is_loss && k < node->n_inputs; k++) {
        KlValueId value = inputs_of(sweep, node)[k];
        most = larger(most, value != KL_ID_NONE ? size_of(sweep, value) : zero);
    }
    return most;
}

static void
drop_if_free(KlSweep *sweep, KlValueId value)
{
    KlSweepStorage *storage = storage_of(sweep, value);
    bool is_held = storage->is_held || storage->is_result || storage->is_copy;
    if (storage->is_live && !is_held && storage->saved_by == KL_ID_NONE) {
        storage->is_live = false;
        add(&sweep->made, times(-1, storage->size));
    }
}

/* Free the copies of imports that nothing saved, and what a barrier wrote. */
static void
drop_rest(KlSweep *sweep)
{
    bool is_barrier = !sweep->span.is_body && !sweep->span.is_live;
    for (uint32_t at = 0; at < sweep->span.n_nodes && is_barrier; at++) {
        storage_of(sweep, node_at(sweep, at)->first_out)->is_held = false;
        drop_if_free(sweep, node_at(sweep, at)->first_out);
    }
    for (uint32_t i = 0; i < sweep->span.n_imports; i++) {
        KlValueId value = sweep->program->stages.imports[sweep->span.imports[i]].value;
        storage_of(sweep, value)->is_copy &= sweep->span.has_graph && is_wanted(sweep, value);
        drop_if_free(sweep, value);
    }
}

static void
drop_dead(KlSweep *sweep, KlValueId value, uint32_t at)
{
    if (storage_of(sweep, value)->last_use == at) {
        drop_if_free(sweep, value);
    }
}

void
kl_sweep_add_moment(KlMoments *moments, KlMoment moment)
{
    moments->is_short |= kl_alloc_reserve((void **)&moments->moments, &moments->n_max,
                                          moments->n + 1, sizeof(KlMoment)) != KL_OK;
    if (!moments->is_short) {
        moments->moments[moments->n++] = moment;
    }
}

/* Count a moment. */
static void
note(KlSweep *sweep, KlNodeId node, KlBytes more, KlMoments *moments)
{
    KlBytes sum = kl_sweep_plus(kl_sweep_live(sweep), kl_sweep_plus(sweep->gradients, more));
    sweep->most = sum.fixed > sweep->most ? sum.fixed : sweep->most;
    if (moments != NULL) {
        KlMoment moment = {.bytes = sum,
                           .gradients = kl_sweep_share(sweep->gradients),
                           .temporary = kl_sweep_share(more),
                           .node = node,
                           .rows = sweep->rows < UINT32_MAX ? (uint32_t)sweep->rows : 0};
        kl_sweep_add_moment(moments, moment);
    }
}

/* Whether the run only computes a reduction's early part: it counts labels, without the logits. */
static bool
is_early(const KlSweep *sweep, uint32_t at)
{
    const KlStages *stages = &sweep->program->stages;
    KlNodeId id = sweep->span.nodes[at];
    return parts_of(sweep, node_at(sweep, at)) != NULL && sweep->span.stage != KL_STAGE_NONE &&
           stages->node_stage[id] != sweep->span.stage;
}

/* Run a node: allocate its results and what it saves, count the moment, and free values that it read last. */
static void
go_through(KlSweep *sweep, uint32_t at, KlMoments *moments)
{
    KlSweepNode *node = &sweep->nodes[sweep->span.nodes[at]];
    if (is_early(sweep, at)) {
        KlValueId labels = node->n_inputs > 1 ? inputs_of(sweep, node)[1] : KL_ID_NONE;
        KlBytes more = labels != KL_ID_NONE ? times(2, size_of(sweep, labels)) : zero;
        note(sweep, sweep->span.nodes[at], more, moments); /* a mask of them, and their weights */
        return;
    }
    if (node->is_uneven) {
        KlUneven run = has_gradient(sweep, node) ? KL_UNEVEN_RUN : KL_UNEVEN_PLAIN;
        note(sweep, sweep->span.nodes[at], by_steps(sweep, at, run), moments);
    }
    bool is_parts = parts_of(sweep, node) != NULL;
    KlBytes terms = is_parts || sweep->span.is_live ? terms_of(sweep, node) : zero;
    if (is_parts) {
        /* With a graph, they live until its backward has run, and added up until the run ends; else see measure_values.c. */
        double left = sweep->span.has_graph || node->parts->added ? node->parts->left : 0;
        add(&sweep->made, kl_sweep_plus(terms, times(left, size_of(sweep, node->first_out))));
    }
    for (uint32_t k = 0; k < node->n_outs && !is_parts; k++) {
        KlValueId out = node->first_out + k;
        KlBytes size = sweep->sizes[out].is_there ? zero : size_of(sweep, out);
        hold(sweep, out, k == 0 ? kl_sweep_plus(size, terms) : size);
    }
    if (!sweep->span.is_live && sweep->facts.is_cloned != NULL &&
        sweep->facts.is_cloned[sweep->span.nodes[at]]) {
        /* The clone lives to the end of the run, like all memory that the run writes. */
        KlValueId written = node->first_out + node->n_outs - 1;
        add(&sweep->made, size_of(sweep, written));
        add(&storage_of(sweep, written)->size, size_of(sweep, written));
    }
    KlBytes workspace = find_kept(sweep, at, &node->further);
    bool is_inner = inner_at(sweep, at) != KL_ID_NONE; /* and saves nothing until it runs again */
    add(is_inner ? &workspace : &sweep->further, node->further);
    note(sweep, sweep->span.nodes[at], workspace, moments);
    for (uint32_t k = 0; k < node->n_outs; k++) {
        drop_dead(sweep, node->first_out + k, at);
    }
    for (uint32_t k = 0; k < node->n_inputs && !node->is_open; k++) {
        if (inputs_of(sweep, node)[k] != KL_ID_NONE) {
            drop_dead(sweep, inputs_of(sweep, node)[k], at);
        }
    }
}

void
kl_sweep_forward(KlSweep *sweep, KlMoments *moments)
{
    enter(sweep);
    for (uint32_t at = 0; at < sweep->span.n_nodes; at++) {
        go_through(sweep, at, moments);
    }
    drop_rest(sweep);
}

KlBytes
kl_sweep_live(const KlSweep *sweep)
{
    return kl_sweep_plus(sweep->made, sweep->further);
}

/* -- back --------------------------------------------------------------------------------------------- */

/* Give a value a gradient, in the buffer of `shared`'s gradient, if any. Return false if it has one already: the caller
 * adds the two. */
static bool
put(KlSweep *sweep, KlValueId value, KlValueId shared)
{
    KlSweepValue *state = state_of(sweep, value);
    if (state->buffer != KL_ID_NONE) {
        return false;
    }
    state->buffer = shared != KL_ID_NONE ? state_of(sweep, shared)->buffer : value;
    KlSweepValue *owner = state_of(sweep, state->buffer);
    if (owner->n_users++ == 0 && !owner->is_expanded) {
        add(&sweep->gradients, size_of(sweep, state->buffer));
    }
    return true;
}

/* Release the gradient of a value after its last use. */
static void
take(KlSweep *sweep, KlValueId value)
{
    KlSweepValue *state = state_of(sweep, value);
    KlValueId buffer = state->buffer;
    state->buffer = KL_ID_NONE;
    KlSweepValue *owner = buffer != KL_ID_NONE ? state_of(sweep, buffer) : NULL;
    if (owner != NULL && --owner->n_users == 0 && !owner->is_expanded) {
        add(&sweep->gradients, times(-1, size_of(sweep, buffer)));
    }
}

/* Give a result the gradient that other runs send to it, which is there to the end; the caller counts it, if it is not made
 * anew. */
static void
receive(KlSweep *sweep, KlValueId value)
{
    KlSweepValue *state = state_of(sweep, value);
    if (state->is_left && state->buffer == KL_ID_NONE) {
        state->is_expanded = !sweep->sizes[value].is_remade;
        (void)put(sweep, value, KL_ID_NONE);
        state->n_users++;
    }
}

static void
let_go_of(KlSweep *sweep, KlValueId value)
{
    storage_of(sweep, value)->is_held = storage_of(sweep, value)->is_result = false;
    drop_if_free(sweep, value);
}

/* Whether the backward formula passes the gradient of the result on to operand k as it is. */
static bool
hands_on(const KlHeld *held, uint32_t k)
{
    return held != NULL && k < 8 && (held->handed_on >> k & 1) != 0;
}

/* Return the bytes that gradients of broadcast operands take beyond their final size: all are as large as the result
 * until torch sums them to the operands' shapes, one after the other. */
static KlBytes
wide_gradients(const KlSweep *sweep, const KlSweepNode *node, const KlHeld *held)
{
    const KlSize *out = &sweep->sizes[node->first_out];
    KlBytes most = zero, sum = zero;
    int n = 0;
    for (uint32_t k = 0; k < node->n_inputs; k++) {
        KlValueId value = inputs_of(sweep, node)[k];
        if (is_wanted(sweep, value) && !hands_on(held, k) &&
            sweep->sizes[value].n_elements < out->n_elements) {
            KlBytes size = size_of(sweep, value);
            most = n++ == 0 ? size : larger(most, size);
            add(&sum, size);
        }
    }
    KlBytes more = n > 0 ? kl_sweep_plus(times(n, size_of(sweep, node->first_out)), most) : zero;
    return kl_sweep_plus(more, times(-1, sum));
}

/* Return the workspace of a node's backward formulas, besides the gradients that they return. */
static KlBytes
backward_workspace(const KlSweep *sweep, const KlSweepNode *node, const KlHeld *held)
{
    KlBytes more = zero;
    for (uint32_t k = 0; k < node->n_inputs; k++) {
        uint32_t i = k < 2 ? k : 2;
        if (is_wanted(sweep, inputs_of(sweep, node)[k])) {
            more = larger(more, bytes_of(sweep, node, held->back_outs[i], held->back_ins[i],
                                         held->back_masks));
        }
    }
    if (held->relaid > 0 && sweep->sizes[node->first_out].has_other_layout) {
        add(&more, times(held->relaid, size_of(sweep, node->first_out)));
    }
    return held->is_wide ? kl_sweep_plus(more, wide_gradients(sweep, node, held)) : more;
}

/* Return the extra bytes of the backward of a write through a view. Autograd (CopySlices) makes the gradient of the base
 * and copies the view's part of it. If the base is hidden inside torch, no value of the tape counts its gradient:
 * the incoming gradient is first written into zeros, even if it is expanded. */
static KlBytes
behind_view(const KlSweep *sweep, const KlSweepNode *node)
{
    KlValueId value = node->is_writing ? inputs_of(sweep, node)[0] : KL_ID_NONE;
    const KlValue *written = value != KL_ID_NONE ? &sweep->tape->values[value] : NULL;
    if (written == NULL || !is_wanted(sweep, value)) {
        return zero;
    }
    const KlNode *maker = kl_tape_maker(sweep->tape, value);
    bool is_hidden = maker != NULL && maker->row != NULL && written->meta.n_dims > 2 &&
                     (kl_ops_held(maker->row)->gives_view || maker->saves.gives_view);
    double n = written->view_of != KL_ID_NONE                  ? 1
               : !is_hidden                                    ? 0
               : state_of(sweep, node->first_out)->is_expanded ? 3
                                                               : 2;
    return times(n, size_of(sweep, value));
}

/* Whether an operand's gradient is the result's gradient, or a view or slice of it. */
static bool
is_handed_on(const KlSweep *sweep, const KlSweepNode *node, const KlHeld *held, uint32_t k)
{
    KlValueId value = inputs_of(sweep, node)[k];
    if (held != NULL && held->is_sliced) {
        return sweep->sizes[value].itemsize == sweep->sizes[node->first_out].itemsize;
    }
    bool is_same =
        !node->is_writing && sweep->sizes[value].storage == sweep->sizes[node->first_out].storage;
    if (node->n_outs != 1 || !(is_same || hands_on(held, k))) {
        return false;
    }
    KlBytes size = size_of(sweep, value), out = size_of(sweep, node->first_out);
    return size.fixed == out.fixed && size.per_row == out.per_row;
}

/* Make the gradient of operand k. If the operand has a gradient already, return the bytes of the second one. */
static KlBytes
make_gradient(KlSweep *sweep, const KlSweepNode *node, uint32_t k)
{
    KlValueId value = inputs_of(sweep, node)[k], shared = KL_ID_NONE;
    KlSweepValue *state = state_of(sweep, value);
    bool is_last = !state->is_inside && --state->n_coming == 0;
    if (!state->is_inside && sweep->span.is_body && node->accruing == k) {
        return zero; /* the call adds it directly to the accumulated gradient */
    }
    const KlHeld *held = held_by(sweep, node);
    bool is_part = parts_of(sweep, node) != NULL;
    /* The last gradient of an import is copied, unless it is added to others. */
    if (!(is_last && state->buffer == KL_ID_NONE) && !is_part &&
        is_handed_on(sweep, node, held, k)) {
        shared = node->first_out;
    }
    bool is_expanded =
        state->is_inside && held != NULL && (is_part ? held->expands_part : held->expands);
    receive(sweep, value);
    state->is_second = state->buffer != KL_ID_NONE;
    if (!state->is_second) {
        state->is_expanded = is_expanded;
        state->is_broadcast =
            is_expanded || (shared != KL_ID_NONE && state_of(sweep, shared)->is_broadcast);
        (void)put(sweep, value, is_expanded && !is_part ? node->first_out : shared);
        return zero;
    }
    return is_expanded || shared != KL_ID_NONE ? zero : size_of(sweep, value);
}

/* Add second gradients to first ones: in place if only this value holds the first, else into new memory, which sets
 * `*has_sums`. Return the bytes of new sums that `gradients` does not count. */
static KlBytes
add_gradients(KlSweep *sweep, const KlSweepNode *node, bool *has_sums)
{
    KlBytes sums = zero;
    *has_sums = false;
    for (uint32_t k = 0; k < node->n_inputs; k++) {
        KlValueId value = inputs_of(sweep, node)[k];
        KlSweepValue *state = is_wanted(sweep, value) ? state_of(sweep, value) : NULL;
        if (state == NULL || !state->is_second) {
            continue;
        }
        state->is_second = false;
        bool is_alone = state_of(sweep, state->buffer)->n_users == 1 && !state->is_expanded;
        bool is_barrier = !sweep->span.is_body && !sweep->span.is_live; /* a call may send a view */
        if (is_alone && (state->is_inside || !is_barrier)) {
            continue;
        }
        *has_sums = true;
        if (state->buffer == value && !state->is_expanded) {
            add(&sums, size_of(sweep, value)); /* other values keep using its old buffer */
            continue;
        }
        take(sweep, value);
        state->n_users = state->is_left ? 0 : state->n_users; /* the sender keeps only its own */
        state->is_expanded = state->is_broadcast = false;
        (void)put(sweep, value, KL_ID_NONE);
    }
    return sums;
}

/* Whether the gradient of an import is complete, and is now added to that of earlier chunks, or to its .grad. */
static bool
is_added(const KlSweep *sweep, KlValueId value)
{
    const KlSweepValue *state = &sweep->values[value];
    bool is_chunks = sweep->span.is_body && size_of(sweep, value).per_row > 0; /* of its own */
    return is_wanted(sweep, value) && !state->is_inside && state->n_coming == 0 && !is_chunks &&
           (sweep->span.is_body ||
            (sweep->span.is_live ? sweep->facts.has_grad[value] : sweep->sizes[value].is_summed));
}

static void
free_saved(KlSweep *sweep, KlValueId value, uint32_t at)
{
    KlSweepStorage *storage = value != KL_ID_NONE ? storage_of(sweep, value) : NULL;
    if (storage != NULL && storage->saved_by == at) {
        storage->saved_by = KL_ID_NONE;
        drop_if_free(sweep, value);
    }
}

/* Free what a node saved, after its backward, and what the second runs of regions read if this was their last. */
static void
free_kept(KlSweep *sweep, uint32_t at)
{
    uint32_t first = at, end = at + 1, i = region_at(sweep, at);
    for (; i != KL_ID_NONE && sweep->regions[i].back == at; i = sweep->facts.outer[i]) {
        first = sweep->regions[i].first;
        end = sweep->regions[i].end;
    }
    add(&sweep->further, times(-1, node_at(sweep, at)->further));
    for (uint32_t n = first; n < end; n++) {
        const KlSweepNode *node = node_at(sweep, n);
        for (uint32_t k = 0; k < node->n_inputs; k++) {
            free_saved(sweep, inputs_of(sweep, node)[k], at);
        }
        for (uint32_t k = 0; k < node->n_outs; k++) {
            free_saved(sweep, node->first_out + k, at);
        }
    }
}

/* Count the backward of a recurrent layer over rows of many lengths. It packs the incoming gradient, runs the backward of
 * the steps, and unpacks the input's gradient. At most one of these gradients is padded to the longest row. */
static void
go_back_through_steps(KlSweep *sweep, uint32_t at, KlBytes more, KlMoments *moments)
{
    KlNodeId id = sweep->span.nodes[at];
    KlValueId out = node_at(sweep, at)->first_out, buffer = state_of(sweep, out)->buffer;
    const float *uneven = sweep->tape->nodes[id].saves.uneven;
    KlBytes come = zero, beside = by_steps(sweep, at, KL_UNEVEN_BESIDE);
    if (buffer == KL_ID_NONE) { /* only the last states have gradients, which are small */
        come = times(-1, beside);
    } else if (state_of(sweep, buffer)->n_users == 1 && !state_of(sweep, buffer)->is_expanded) {
        come = times(-1, size_of(sweep, buffer));
    }
    if (buffer != KL_ID_NONE) {
        note(sweep, id, kl_sweep_plus(more, beside), moments);
        note(sweep, id, times(uneven[KL_UNEVEN_TURNED], size_of(sweep, out)), moments);
    }
    for (KlUneven of = KL_UNEVEN_BACK; of <= KL_UNEVEN_WEIGHTS; of += 2) {
        KlBytes weights = {.fixed = of == KL_UNEVEN_WEIGHTS ? uneven[KL_UNEVEN_BYTES] : 0};
        note(sweep, id, kl_sweep_plus(kl_sweep_plus(come, weights), by_steps(sweep, at, of)),
             moments);
    }
}

static void
go_back_through(KlSweep *sweep, uint32_t at, KlMoments *moments)
{
    KlNodeId id = sweep->span.nodes[at];
    const KlSweepNode *node = &sweep->nodes[id];
    const KlHeld *held = held_by(sweep, node);
    const bool is_made = parts_of(sweep, node) == NULL && !node->is_uneven;
    for (uint32_t k = 0; k < node->n_outs; k++) { /* indices have no gradient */
        KlValueId out = node->first_out + k;
        if (is_made && sweep->tape->values[out].meta.requires_grad) {
            receive(sweep, out);
            (void)put(sweep, out, KL_ID_NONE);
        }
    }
    KlBytes more = held != NULL ? backward_workspace(sweep, node, held) : zero, second = zero;
    const KlRow *row = sweep->tape->nodes[id].row;
    if (state_of(sweep, node->first_out)->is_broadcast && row != NULL && row->copies_expanded) {
        add(&more, size_of(sweep, node->first_out));
    }
    if (node->is_uneven) {
        go_back_through_steps(sweep, at, more, moments);
    } else if (node->has_bytes) {
        const KlNode *call = &sweep->tape->nodes[id];
        add(&more, by_rows(sweep, call, call->saves.bytes_backward));
        more.fixed += (double)call->saves.bytes_row;
    }
    if (node->held != NULL && node->held->is_composed) {
        add(&more, node->further);
    }
    add(&more, behind_view(sweep, node));
    for (uint32_t k = 0; k < node->n_inputs; k++) {
        if (is_wanted(sweep, inputs_of(sweep, node)[k])) {
            add(&second, make_gradient(sweep, node, k));
        }
    }
    if (!node->is_uneven) {
        note(sweep, id, kl_sweep_plus(more, second), moments);
    }
    if (sweep->span.is_live && kl_tape_is_begun(sweep->tape, node->first_out)) {
        add(&sweep->gradients, size_of(sweep, node->first_out)); /* torch keeps that of a leaf */
    }
    for (uint32_t k = 0; k < node->n_outs; k++) {
        take(sweep, node->first_out + k);
    }
    free_kept(sweep, at);
    if (node->is_uneven) {
        note(sweep, id, kl_sweep_plus(by_steps(sweep, at, KL_UNEVEN_LAST), second), moments);
    }
    bool has_sums = false;
    KlBytes sums = add_gradients(sweep, node, &has_sums);
    if (has_sums || second.fixed + second.per_row > 0) {
        note(sweep, id, kl_sweep_plus(second, sums), moments);
    }
    for (uint32_t k = 0; k < node->n_inputs; k++) {
        if (is_added(sweep, inputs_of(sweep, node)[k])) {
            take(sweep, inputs_of(sweep, node)[k]);
        }
    }
}

/* Before the backward of the last node of a region, run its nodes again, after those of the regions around it. */
static void
run_again(KlSweep *sweep, uint32_t region, KlMoments *moments)
{
    if (region == KL_ID_NONE || sweep->regions[region].is_again) {
        return;
    }
    run_again(sweep, sweep->facts.outer[region], moments);
    sweep->regions[region].is_again = true;
    sweep->region = region;
    find_lifetimes(sweep, sweep->regions[region].first, sweep->regions[region].end);
    for (uint32_t at = sweep->regions[region].first; at < sweep->regions[region].end; at++) {
        go_through(sweep, at, moments);
    }
    sweep->region = KL_ID_NONE;
}

/* Before the backward, note the results that have a gradient; and of a chunk free what was held only for the forward:
 * exports, of which backward needs no more than an edge of autograd's graph, the terms in whose memory a loss lies,
 * and memory that the run wrote. */
static void
let_go(KlSweep *sweep)
{
    const KlSpan *span = &sweep->span;
    for (uint32_t i = 0; i < span->n_exports; i++) {
        const KlSize *size = &sweep->sizes[span->exports[i]];
        state_of(sweep, span->exports[i])->is_left =
            span->is_body ? !size->is_let_go : size->is_summed;
        if (span->is_body) {
            let_go_of(sweep, span->exports[i]);
        }
    }
    for (uint32_t at = 0; at < span->n_nodes && span->is_body; at++) {
        const KlSweepNode *node = node_at(sweep, at);
        let_go_of(sweep, node->first_out);
        if (parts_of(sweep, node) != NULL) {
            add(&sweep->made, times(-1, terms_of(sweep, node)));
        }
    }
}

void
kl_sweep_back(KlSweep *sweep, KlMoments *moments)
{
    if (!sweep->span.is_live) {
        let_go(sweep);
    }
    for (uint32_t at = sweep->span.n_nodes; at-- > 0;) {
        if (has_gradient(sweep, node_at(sweep, at))) {
            run_again(sweep, region_at(sweep, at), moments);
            go_back_through(sweep, at, moments);
        }
    }
    if (sweep->span.n_nodes > 0) {
        note(sweep, sweep->span.nodes[0], zero, moments); /* gathered gradients are cut here */
    }
}

/* -- the whole ---------------------------------------------------------------------------------------- */

KlStatus
kl_sweep_init(KlSweep *sweep, const KlTape *tape, const KlProgram *program, const KlFacts *facts)
{
    const KlStages *stages = &program->stages;
    *sweep = (KlSweep){.tape = tape, .program = program, .facts = *facts};
    sweep->sizes = kl_alloc_scratch(&sweep->scratch, stages->n_values, sizeof(KlSize));
    sweep->storages = kl_alloc_scratch(&sweep->scratch, tape->n_storages, sizeof(KlSweepStorage));
    sweep->values = kl_alloc_scratch(&sweep->scratch, stages->n_values, sizeof(KlSweepValue));
    sweep->nodes = kl_alloc_scratch(&sweep->scratch, stages->n_nodes, sizeof(KlSweepNode));
    sweep->inputs = kl_alloc_scratch(&sweep->scratch, tape->n_inputs, sizeof(KlValueId));
    sweep->regions = kl_alloc_scratch(&sweep->scratch, facts->n_regions, sizeof(KlRegion));
    if (sweep->scratch.is_short) {
        kl_sweep_fini(sweep);
        return KL_ERROR_MEMORY;
    }
    kl_sweep_copy_sizes(sweep);
    for (size_t i = 0; i < stages->n_nodes; i++) {
        if (stages->node_stage[i] != KL_STAGE_NONE) {
            kl_sweep_copy_node(sweep, (KlNodeId)i);
        }
    }
    return KL_OK;
}

void
kl_sweep_fini(KlSweep *sweep)
{
    kl_alloc_scratch_free(&sweep->scratch);
    memset(sweep, 0, sizeof(*sweep));
}
