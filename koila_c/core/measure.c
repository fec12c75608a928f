/* SPDX-License-Identifier: Apache-2.0 */
/* measure.c - walks the instructions of a step and lists the bytes that it needs at each moment. */
#include "measure.h"

#include <math.h>
#include <string.h>

#include "alloc.h"
#include "measure_value.h"

/* -- moments ------------------------------------------------------------------------------------------ */

/* Return the bytes of a piece of a chunk: it has 1 / n_pieces of the rows, or of the second axis, rounded up. */
static KlBytes
of_piece(const Step *step, KlBytes bytes)
{
    bool is_whole = step->n_pieces <= 1;
    double across = (double)step->policy->n_across;
    double more = is_whole ? 0 : bytes.per_row;
    return (KlBytes){.fixed = bytes.fixed + (across > 0 ? 0 : more),
                     .per_row = bytes.per_row / step->n_pieces + (across > 0 ? more / across : 0)};
}

/* Add to the moments from `first` on, which count only their own run, the bytes that are held outside it. */
static void
add_held(Step *step, size_t first)
{
    for (size_t i = first; i < step->moments->n; i++) {
        KlMoment *moment = &step->moments->moments[i];
        KlBytes own = of_piece(step, (KlBytes){moment->fixed, moment->per_row});
        KlBytes come = of_piece(step, (KlBytes){moment->gradients, moment->gradients_per_row});
        KlBytes brief = of_piece(step, (KlBytes){moment->temporary, moment->temporary_per_row});
        moment->fixed = own.fixed + step->held;
        moment->per_row = own.per_row + step->held_per_row;
        moment->per_chunk = step->held_per_chunk;
        moment->gradients = (float)(come.fixed + step->gradients);
        moment->gradients_per_row = (float)(come.per_row + step->gradients_per_row);
        moment->temporary = (float)brief.fixed;
        moment->temporary_per_row = (float)brief.per_row;
        moment->step = step->at;
        moment->is_back = step->is_back;
    }
}

static void
note(Step *step, KlMoment moment)
{
    KlMoments *moments = step->moments;
    if (step->status == KL_OK) {
        step->status = kl_alloc_reserve((void **)&moments->moments, &moments->n_max, moments->n + 1,
                                        sizeof(KlMoment), step->error);
    }
    if (step->status == KL_OK) {
        moments->moments[moments->n++] = moment;
        add_held(step, moments->n - 1);
    }
}

/* Add a moment at the end of the step, with `more` bytes, at the last node that runs. */
static void
note_end(Step *step, double more)
{
    for (KlNodeId node = (KlNodeId)step->stages->n_nodes; node-- > 0;) {
        if (step->stages->node_stage[node] != KL_STAGE_NONE) {
            note(step, (KlMoment){.fixed = more, .node = node});
            return;
        }
    }
}

/* Sweep the forward pass of a span and append its moments; NULL: only the sweep's state and peak are needed. */
static void
sweep_span(Step *step, KlSpan span, KlMoments *moments)
{
    size_t first = step->moments->n;
    kl_sweep_open(&step->sweep, &span);
    if (step->status == KL_OK) {
        step->status = kl_sweep_forward(&step->sweep, moments, step->error);
        add_held(step, first);
    }
}

static void
sweep_forward(Step *step, const KlRun *run, bool is_graph)
{
    sweep_span(step, kl_sweep_span(step->program, run, is_graph), step->moments);
}

/* Sweep the forward pass of a run again to restore the sweep's state; its moments have been counted before. */
static void
sweep_again(Step *step, const KlRun *run, bool is_graph)
{
    sweep_span(step, kl_sweep_span(step->program, run, is_graph), NULL);
}

static void
sweep_back(Step *step)
{
    size_t first = step->moments->n;
    if (step->status == KL_OK) {
        step->status = kl_sweep_back(&step->sweep, step->moments, step->error);
        step->is_back = true;
        add_held(step, first);
        step->is_back = false;
    }
}

/* Add the bytes of gradients that outlive a run, or of a chunk's; negative numbers remove them. */
static void
hold_gradients(Step *step, double bytes, double per_row)
{
    step->held += bytes;
    step->gradients += bytes;
    step->held_per_row += per_row;
    step->gradients_per_row += per_row;
}

/* -- what outlives runs -------------------------------------------------------------------------------- */

/* Hold the states of the random generator: before and after the step, at the start of each random call, and of a call in
 * a body at the start and end of its last chunk; and the random numbers that are drawn for all rows at once. */
static void
hold_states(Step *step)
{
    double state = (double)step->outside->bytes_state;
    step->held = 2 * state + (double)step->outside->bytes_drawn;
    for (size_t i = 0; i < step->program->n_staged; i++) {
        const KlRun *run = &step->program->runs[i];
        for (uint32_t k = 0; k < run->nodes.n; k++) {
            KlNodeId id = step->program->nodes.ids[run->nodes.first + k];
            if (!step->sweep.nodes[id].is_random) {
                continue;
            }
            step->held += state;
            if (kl_program_is_body(run)) {
                const int64_t *drawn = step->outside->bytes_noise;
                int64_t noise = drawn != NULL ? drawn[id] : 0;
                step->held_per_chunk += noise < 0 ? state : 0;
                step->held += noise == 0 ? 2 * state : noise > 0 ? (double)noise : 0;
            }
        }
    }
}

/* Whether a held value has memory of its own: it is one tensor of all rows, or a copy of a part of its base. */
static bool
has_own_memory(const Step *step, KlValueId value)
{
    KlValueId of = value;
    while (step->tape->values[of].view_of != KL_ID_NONE) {
        of = step->tape->values[of].view_of;
    }
    return step->sweep.sizes[value].is_put_together || whole(step, value) < whole(step, of);
}

/* Hold `n` partial results of a reduction: for each chunk, or once if they are added up. */
static void
hold_parts(Step *step, KlValueId value, const KlParts *parts, double n)
{
    *(parts->added ? &step->held : &step->held_per_chunk) += n * result_of(step, value, parts);
}

/* Hold a result of a body, all chunks of it; each storage counts once. */
static void
hold(Step *step, KlValueId value)
{
    const KlParts *parts = parts_of(step, value);
    KlMeasureStorage *storage = &step->storages[storage_of(step, value)];
    if (step->values[value].is_held) {
        return;
    }
    step->values[value].is_held = true;
    if (parts != NULL) {
        hold_parts(step, value, parts, parts->left);
    } else if (has_own_memory(step, value)) {
        step->held += whole(step, value);
    } else if (storage->n_held++ == 0) {
        storage->bytes = whole(step, value);
        step->values[value].is_counted = true;
        step->held += storage->bytes;
    }
}

/* Set the bytes that barrier `i` holds to those that its sweep, which is open, has live. */
static void
hold_barrier(Step *step, uint32_t i)
{
    step->held += kl_sweep_live(&step->sweep).fixed - step->live[i];
    step->live[i] = kl_sweep_live(&step->sweep).fixed;
}

static void
free_value(Step *step, KlValueId value)
{
    KlMeasureStorage *storage = &step->storages[storage_of(step, value)];
    bool is_back = step->at >= step->schedule.n_forward;
    if (step->values[value].barrier > 0 && (is_back || !storage->is_shared)) {
        step->sweep.sizes[value].is_freed = true;
        uint32_t i = step->values[value].barrier - 1;
        sweep_again(step, &step->program->runs[i], step->policy->is_graph && !is_back);
        hold_barrier(step, i);
    }
    if (!step->values[value].is_held) {
        return;
    }
    const KlParts *parts = parts_of(step, value);
    step->values[value].is_held = step->values[value].is_counted = false;
    if (parts != NULL) {
        hold_parts(step, value, parts, -parts->left);
    } else if (has_own_memory(step, value)) {
        step->held -= whole(step, value);
    } else if (--storage->n_held == 0) {
        step->held -= storage->bytes;
    }
}

/* Hold a share of a reduction, for each chunk and once, `n` times. */
static void
hold_share(Step *step, KlValueId value, const double *share, double n)
{
    const KlParts *parts = parts_of(step, value);
    hold_parts(step, value, parts, n * share[0]);
    step->held += n * share[1] * result_of(step, value, parts);
}

/* Combine parts and hold what the graph of that saves; or (`is_back`) run it backward and hold the parts' gradients. */
static void
combine(Step *step, const KlRun *run, bool is_back)
{
    bool is_compared = is_barrier_after(step, run) && step->stages->is_tail_linear; /* CHECK */
    for (uint32_t i = 0; i < run->combined.n; i++) {
        KlNodeId id = step->program->combined.ids[run->combined.first + i];
        KlValueId value = step->tape->nodes[id].first_out;
        const KlParts *parts = parts_of(step, value);
        double saved = step->policy->is_graph && needs_gradient(step, value) ? 1 : 0;
        const double *most = is_back ? parts->sending : parts->combining;
        hold_share(step, value, parts->combined, is_back ? -saved : 0);
        hold_share(step, value, most, is_back ? saved : 1);
        note(step, (KlMoment){.node = id});
        hold_share(step, value, most, is_back ? -saved : -1);
        hold_share(step, value, parts->combined, is_back ? 0 : saved);
        hold_parts(step, value, parts, is_back && !is_compared ? saved * parts->seeds : 0);
    }
}

/* Hold the gradients of a run's inputs from outside its body, unless held, or (`are_copies`) only those that are copies of
 * what the run makes; return the bytes made chunk by chunk. */
static double
gather_gradients(Step *step, const KlRun *run, uint32_t body, bool are_copies)
{
    double by_chunks = 0;
    for (uint32_t i = 0; i < run->imports.n; i++) {
        KlValueId value = kl_program_import(step->program, run, i)->value;
        KlMeasureValue *known = &step->values[value];
        KlSize *size = &step->sweep.sizes[value];
        if (are_copies && gradient(step, value) == whole(step, value)) {
            continue;
        }
        if (!known->is_gathering && needs_gradient(step, value) && known->body != body) {
            bool is_by_chunks =
                kl_program_is_body(run) && size->is_by_rows && !known->is_one_gradient;
            known->is_gathering = true;
            hold_gradients(step, gradient(step, value), 0);
            by_chunks += is_by_chunks ? gradient(step, value) : 0;
        }
        size->is_summed |= known->is_gathering;
        size->is_remade |= known->is_root || gradient(step, value) > whole(step, value);
    }
    return by_chunks;
}

/* -- forward ------------------------------------------------------------------------------------------ */

static void
run_barrier(Step *step, const KlStep *of)
{
    const KlRun *run = &step->program->runs[of->run];
    combine(step, run, false);
    sweep_forward(step, run, step->policy->is_graph);
    hold_barrier(step, of->run);
}

/* Return the bytes per row that a loop loads back from offloaded values, and reset the state of its segments' results. */
static double
enter_body(Step *step, const KlStep *of)
{
    const KlRun *runs = &step->program->runs[of->run];
    double values = 0;
    for (uint32_t r = 0; r < of->n_runs; r++) {
        for (uint32_t i = 0; i < runs[r].imports.n; i++) {
            KlValueId value = kl_program_import(step->program, &runs[r], i)->value;
            KlMeasureValue *known = &step->values[value];
            bool is_beside = step->tape->values[value].meta.device != 0;
            if (known->is_offloaded && is_beside && known->given_in != step->at + 1) {
                known->given_in = step->at + 1;
                values += step->sweep.sizes[value].per_row;
            }
        }
        for (uint32_t i = 0; i < runs[r].exports.n; i++) {
            KlMeasureValue *known = &step->values[kl_program_export(step->program, &runs[r], i)];
            known->body = of->run + 1;
            known->is_handed = known->is_coming = false;
        }
    }
    return values;
}

/* Hold the gradients that a segment's backward made for results of earlier segments, until their backward. */
static void
hold_handed_gradients(Step *step, const KlRun *run)
{
    for (uint32_t i = 0; i < run->imports.n; i++) {
        KlValueId value = kl_program_import(step->program, run, i)->value;
        KlMeasureValue *known = &step->values[value];
        bool is_first = known->body == step->loop->run + 1 && !known->is_coming;
        if (is_first && needs_gradient(step, value)) {
            known->is_coming = true;
            step->sweep.sizes[value].is_remade |= known->is_gathering;
            hold_gradients(step, 0, step->sweep.sizes[value].per_row);
        }
    }
}

/* Free the gradients of a segment's results after its backward. */
static void
free_handed_gradients(Step *step, const KlRun *run)
{
    for (uint32_t i = 0; i < run->exports.n; i++) {
        KlValueId value = kl_program_export(step->program, run, i);
        KlMeasureValue *known = &step->values[value];
        hold_gradients(step, 0, known->is_coming ? -step->sweep.sizes[value].per_row : 0);
        known->is_coming = false;
    }
}

/* Return the peak of the tail, forward and backward, when it runs on zeros during the first chunk. */
static double
sweep_tail(Step *step)
{
    double held = 0, worst = 0;
    for (size_t i = 0; i < step->program->n_staged && step->status == KL_OK; i++) {
        const KlRun *run = &step->program->runs[i];
        if (is_barrier_after(step, run)) {
            sweep_again(step, run, true);
            double end = kl_sweep_live(&step->sweep).fixed;
            step->status = kl_sweep_back(&step->sweep, NULL, step->error);
            worst = fmax(worst, held + step->sweep.most);
            held += end;
        }
    }
    return fmax(worst, held);
}

/* Run the tail on zeros instead of a body's results, during the first chunk, and hold the gradients that it sends. */
static void
run_tail(Step *step, const KlStep *of)
{
    KlMoment moment = {.rows = (uint32_t)rows_of(step, &step->program->runs[of->run])};
    KlBytes live = kl_sweep_live(&step->sweep);
    double held_per_chunk = step->held_per_chunk;
    moment.per_row = live.per_row;
    moment.fixed = live.fixed + sweep_tail(step);
    step->open = KL_ID_NONE; /* BACK restores the sweep of the chunk */
    for (uint32_t r = of->run; r < of->run + of->n_runs; r++) {
        const KlRun *run = &step->program->runs[r];
        moment.node = step->program->nodes.ids[run->nodes.first + run->nodes.n - 1];
        for (uint32_t i = 0; i < run->exports.n; i++) {
            KlValueId value = kl_program_export(step->program, run, i);
            const KlParts *parts = step->values[value].is_inner ? NULL : parts_of(step, value);
            if (parts != NULL) {
                double left = parts->left * result_of(step, value, parts);
                *(parts->added ? &moment.fixed : &step->held_per_chunk) += left;
            } else if (step->values[value].is_read_by_tail && !step->values[value].is_inner) {
                moment.fixed += whole(step, value);
                step->sweep.sizes[value].is_remade |= step->values[value].is_root;
                hold_gradients(step, needs_gradient(step, value) ? whole(step, value) : 0, 0);
            }
        }
    }
    note(step, moment);
    step->held_per_chunk = held_per_chunk;
}

/* Return the bytes of gradients that exist twice while a head runs along a second axis: it is a program of its own, with
 * its own gradients of the inputs that it reads whole. */
static double
gradients_beside(const Step *step, const KlRun *last)
{
    double gradients = 0;
    bool is_one = step->policy->n_across == 0 || rows_of(step, last) <= 1;
    for (uint32_t i = 0; i < last->imports.n && !is_one; i++) {
        const KlImport *import = kl_program_import(step->program, last, i);
        bool is_whole = !kl_place_is_rows(&import->place);
        gradients +=
            is_whole && needs_gradient(step, import->value) ? whole(step, import->value) : 0;
    }
    return gradients;
}

/* Count what a chunk leaves for later segments of its body, the values of `put`; not what is only offloaded. */
static void
hold_chunk(Step *step, const KlStep *put)
{
    for (uint32_t k = 0; k < put->values.n; k++) {
        KlValueId value = value_of(step, put, k);
        KlMeasureValue *known = &step->values[value];
        bool stays_on_device = known->is_for_segments || !known->is_offloaded;
        if (!known->is_held && stays_on_device && !known->is_handed) {
            known->is_handed = true;
            step->held_per_row += step->sweep.sizes[value].per_row;
        }
    }
}

/* Set whether a run's sweep counts its results as there, except those of which each chunk reads a copy. */
static void
set_there(Step *step, const KlRun *run, bool is_there)
{
    for (uint32_t i = 0; i < run->exports.n; i++) {
        KlSize *size = &step->sweep.sizes[kl_program_export(step->program, run, i)];
        size->is_there = is_there && !size->is_copied;
    }
}

/* Return the bytes per row of a run's results of which all chunks are held: until a chunk makes its own, one is missing. */
static double
missing(const Step *step, const KlRun *run)
{
    double bytes = 0;
    for (uint32_t i = 0; i < run->exports.n; i++) {
        KlValueId value = kl_program_export(step->program, run, i);
        const KlSize *size = &step->sweep.sizes[value];
        bytes += step->values[value].is_counted && !size->is_put_together ? size->per_row : 0;
    }
    return bytes;
}

/* Run a segment on a chunk. With a graph, its sweep stays open and counts its results, too, until BACK. */
static void
run_chunk(Step *step, const KlStep *of)
{
    const KlRun *run = &step->program->runs[of->run];
    bool is_graph = of->graph == KL_GRAPH_NOW || of->graph == KL_GRAPH_ACROSS;
    if (of->graph == KL_GRAPH_ACROSS) {
        hold_gradients(step, gradients_beside(step, run), 0);
        hold_handed_gradients(step, run);
        step->n_pieces = step->policy->n_pieces;
    }
    double bytes = is_graph ? 0 : missing(step, run);
    step->held_per_row -= bytes;
    sweep_forward(step, run, is_graph);
    step->held_per_row += bytes;
    if (!is_graph) {
        hold_chunk(step, of);
    }
    step->open = is_graph ? of->run : KL_ID_NONE;
}

/* Hold the results of a body that others read, except offloaded ones. */
static void
hold_left(Step *step, const KlStep *of)
{
    bool is_fused = of->graph == KL_GRAPH_NOW, is_alone = is_fused && step->policy->n_across == 0;
    for (uint32_t k = 0; k < of->values.n; k++) {
        step->values[value_of(step, of, k)].is_offloaded = true;
    }
    for (uint32_t k = 0; k < of->others.n; k++) {
        KlValueId value = step->schedule.values.ids[of->others.first + k];
        KlMeasureValue *known = &step->values[value];
        bool is_awaited = !is_fused || known->is_read_by_tail || known->is_root;
        step->sweep.sizes[value].is_put_together = true;
        step->sweep.sizes[value].is_copied = !is_cut_in_place(step, value);
        step->sweep.sizes[value].is_let_go = !(needs_gradient(step, value) && is_awaited);
    }
    for (uint32_t r = 0; r < of->n_runs; r++) {
        const KlRun *run = &step->program->runs[of->run + r];
        for (uint32_t i = 0; i < run->exports.n; i++) {
            KlValueId value = kl_program_export(step->program, run, i);
            KlMeasureValue *known = &step->values[value];
            bool is_gone = is_alone && step->program->is_unread[value];
            if (!known->is_inner && !known->is_offloaded && !is_gone) {
                hold(step, value);
            }
        }
    }
}

static void
sum_gradients(Step *step, const KlStep *of)
{
    for (uint32_t k = 0; k < of->values.n; k++) {
        KlValueId value = value_of(step, of, k);
        step->values[value].is_one_gradient = true;
        step->sweep.sizes[value].is_remade |= !is_cut_in_place(step, value);
    }
}

static void
hold_values(Step *step, const KlStep *of)
{
    for (uint32_t k = 0; k < of->values.n; k++) {
        hold(step, value_of(step, of, k));
    }
}

/* Free `values`: inside a loop those of a chunk, else of all chunks. */
static void
free_values(Step *step, const KlStep *of)
{
    for (uint32_t k = 0; k < of->values.n; k++) {
        KlValueId value = value_of(step, of, k);
        KlMeasureValue *known = &step->values[value];
        if (step->depth == 0) {
            free_value(step, value);
        } else {
            step->held_per_row -= known->is_handed ? step->sweep.sizes[value].per_row : 0;
            known->is_handed = false;
        }
    }
}

/* -- back --------------------------------------------------------------------------------------------- */

/* Count what a hook returns, beside the gradient of all rows that it gets. */
static void
call_hooks(Step *step, const KlStep *of)
{
    for (uint32_t r = of->run; r < of->run + of->n_runs; r++) {
        const KlRun *run = &step->program->runs[r];
        for (uint32_t i = 0; i < run->exports.n; i++) {
            KlValueId value = kl_program_export(step->program, run, i);
            KlNodeId of_node = step->tape->values[value].node;
            if (step->tape->values[value].is_hooked && needs_gradient(step, value)) {
                double made = gradient(step, value);
                note(step, (KlMoment){.fixed = made, .gradients = (float)made, .node = of_node});
            }
        }
    }
}

static void
go_back_barrier(Step *step, const KlStep *of)
{
    const KlRun *run = &step->program->runs[of->run];
    call_hooks(step, of);
    step->held -= step->live[of->run]; /* the sweep below counts it */
    step->live[of->run] = 0;
    sweep_again(step, run, true);
    (void)gather_gradients(step, run, UINT32_MAX, true);
    sweep_back(step);
    (void)gather_gradients(step, run, UINT32_MAX, false);
    for (uint32_t k = 0; k < run->exports.n; k++) {
        KlValueId value = kl_program_export(step->program, run, k);
        hold_gradients(step, step->values[value].is_gathering ? -gradient(step, value) : 0, 0);
        step->values[value].is_gathering = false;
    }
    sweep_again(step, run, false); /* the graph is freed */
    hold_barrier(step, of->run);
    combine(step, run, true);
}

/* Return the bytes of gradients accumulated for a body's results: by chunk, or (`is_whole`) those of all rows. */
static double
left_gradients(const Step *step, const KlStep *of, bool is_whole)
{
    double left = 0;
    for (uint32_t r = 0; r < of->n_runs; r++) {
        const KlRun *run = &step->program->runs[of->run + r];
        for (uint32_t i = 0; i < run->exports.n; i++) {
            KlValueId value = kl_program_export(step->program, run, i);
            const KlMeasureValue *known = &step->values[value];
            bool is_left = known->is_gathering && known->is_one_gradient == is_whole;
            left += is_left && parts_of(step, value) == NULL ? gradient(step, value) : 0;
        }
    }
    return left;
}

/* Note that the loop frees its `values` chunk by chunk. Return their bytes, which stay held until it ends. */
static double
free_by_chunk(Step *step, const KlStep *of)
{
    double before = step->held;
    for (uint32_t k = 0; k < of->values.n; k++) {
        free_value(step, value_of(step, of, k));
    }
    double left = before - step->held;
    step->held = before;
    return left;
}

static void
empty(Step *step, const KlIds *ids, KlSlice values, uint8_t level)
{
    for (uint32_t i = 0; i < values.n; i++) {
        uint8_t *is_filled = &step->values[ids->ids[values.first + i]].is_filled;
        *is_filled = *is_filled == level ? 0 : *is_filled;
    }
}

/* Count the recomputing of a chunk of emptied values, into their old place. Before each value the emptied values that it
 * is made of are filled, and after it emptied again, unless they were filled before. */
static void
fill(Step *step, const KlIds *ids, KlSlice values, uint8_t level)
{
    const KlCheapSet *cheap_set = &step->schedule.cheap_set;
    for (uint32_t i = 0; i < values.n; i++) {
        KlValueId value = ids->ids[values.first + i];
        const KlCheap *cheap = &cheap_set->values[cheap_set->number[value] - 1];
        double there = step->held_per_row + step->sweep.sizes[value].per_row;
        if (step->values[value].is_filled == 0) {
            fill(step, &cheap_set->ids, cheap->needs, level + 1);
            step->held_per_row += step->sweep.sizes[value].per_row;
            sweep_span(step, kl_sweep_span_cheap(step->program, cheap_set, cheap), step->moments);
            empty(step, &cheap_set->ids, cheap->needs, level + 1);
            step->values[value].is_filled = level;
            step->held_per_row = there;
        }
    }
}

static void
fill_chunk(Step *step, const KlStep *of)
{
    fill(step, &step->schedule.values, of->values, 1);
}

/* Empty `values`: inside a loop the chunk that FILL filled, else all chunks. */
static void
empty_values(Step *step, const KlStep *of)
{
    if (step->depth == 0) {
        free_values(step, of);
    } else {
        empty(step, &step->schedule.values, of->values, 1);
    }
}

/* Run the backward of a segment's graph on a chunk: a graph that RUN just built, or one that waited. */
static void
go_back_chunk(Step *step, const KlStep *of)
{
    const KlRun *run = &step->program->runs[of->run];
    if (of->graph == KL_GRAPH_RETAIN) {
        set_there(step, run, true);
        sweep_forward(step, run, true);
    } else if (step->open != of->run) {
        sweep_again(step, run, true);
    }
    sweep_back(step); /* it counts the gradients of the segment's inputs while it runs */
    hold_handed_gradients(step, run);
    free_handed_gradients(step, run);
    set_there(step, run, false);
    step->open = KL_ID_NONE;
    if (of->graph == KL_GRAPH_ACROSS) {
        hold_gradients(step, -gradients_beside(step, run), 0);
        step->n_pieces = 1;
    }
}

/* -- loops -------------------------------------------------------------------------------------------- */

/* A loop over the pieces of a chunk begins. The graph of the segments before the head is held until its end, and so are
 * the gradients of the head's inputs. */
static void
open_pieces(Step *step, const KlStep *of)
{
    step->retained = kl_sweep_live(&step->sweep);
    step->held += step->retained.fixed;
    step->held_per_row += step->retained.per_row;
    step->n_pieces = step->policy->n_pieces;
    step->sweep.is_in_pieces = true;
    hold_handed_gradients(step, &step->program->runs[of->run]);
    hold_gradients(step, 0, -step->exchange.in_sweep); /* sweeps count only a piece's */
}

/* The backward of each chunk frees its results and their gradients, and makes the gradients of its inputs. The two
 * never reach their full size together, so only what is more than the other is added, at the first chunk or at the end. */
static void
open_exchange(Step *step, const KlStep *of)
{
    double made = 0, freed_gradients = left_gradients(step, of, false);
    double freed = freed_gradients + free_by_chunk(step, of);
    for (uint32_t r = 0; r < of->n_runs; r++) {
        made += gather_gradients(step, &step->program->runs[of->run + r], of->run + 1, false);
    }
    double reused = fmin(made, freed), reused_gradients = fmin(made, freed_gradients);
    int64_t rows = rows_of(step, &step->program->runs[of->run]);
    step->held -= reused;
    step->gradients -= reused_gradients;
    step->exchange = (KlExchange){.held = freed - reused,
                                  .gradients = freed_gradients - reused_gradients,
                                  .in_sweep = fmin(freed - made, 0) / (double)rows};
    hold_gradients(step, 0, step->exchange.in_sweep);
}

static void
close_exchange(Step *step, const KlStep *of)
{
    hold_gradients(step, -left_gradients(step, of, true), 0);
    step->held -= step->exchange.held;
    step->gradients -= step->exchange.gradients;
}

static void
open_loop(Step *step, const KlStep *of)
{
    if (step->depth++ > 0) {
        open_pieces(step, of);
        return;
    }
    step->loop = of;
    step->open = KL_ID_NONE;
    step->held_per_row = enter_body(step, of);
    if (of->graph != KL_GRAPH_NONE) {
        open_exchange(step, of);
    }
}

static void
close_loop(Step *step, const KlStep *of)
{
    if (--step->depth > 0) {
        step->n_pieces = 1;
        step->sweep.is_in_pieces = false;
        step->held -= step->retained.fixed;
        step->held_per_row -= step->retained.per_row;
        return;
    }
    step->held_per_row = step->gradients_per_row = 0; /* no chunk is in memory */
    if (of->graph != KL_GRAPH_NONE) {
        close_exchange(step, of);
    }
}

/* -- the schedule ------------------------------------------------------------------------------------- */

typedef void Effect(Step *step, const KlStep *of);

static Effect *const EFFECTS[] = {
#define KL_INSTRUCTION(name, effect, meaning) [KL_STEP_##name] = effect,
#include "schedule.def"
#undef KL_INSTRUCTION
};

static void
walk(Step *step)
{
    for (size_t i = 0; i < step->schedule.n_steps && step->status == KL_OK; i++) {
        const KlStep *of = &step->schedule.steps[i];
        step->at = (uint32_t)i;
        if (EFFECTS[of->op] != NULL) {
            EFFECTS[of->op](step, of);
        }
    }
}

/* -- the end of the step ------------------------------------------------------------------------------ */

/* Count the delivery of the gradients: gradients of half-precision leaves, accumulated in float32, are cast, and torch
 * runs the backward of plain graphs that existed before the program. */
static void
deliver(Step *step)
{
    double more = step->outside->bytes_graphs;
    for (KlValueId value = 0; value < step->stages->n_values; value++) {
        bool is_leaf = step->values[value].is_gathering && step->stages->is_leaf[value];
        if (is_leaf && gradient(step, value) > whole(step, value)) {
            more += whole(step, value);
        }
    }
    note_end(step, more);
}

/* -- the whole ---------------------------------------------------------------------------------------- */

static KlStatus
allocate(Step *step)
{
    KlScratch *scratch = &step->scratch;
    step->live = kl_alloc_scratch(scratch, step->program->n_staged, sizeof(double));
    step->values = kl_alloc_scratch(scratch, step->stages->n_values, sizeof(KlMeasureValue));
    step->storages = kl_alloc_scratch(scratch, step->tape->n_storages, sizeof(KlMeasureStorage));
    return !scratch->is_short
               ? KL_OK
               : kl_error_set(step->error, KL_ERROR_MEMORY, "no memory to measure %zu nodes",
                              step->stages->n_nodes);
}

/* Set the facts about values that do not change during the walk, and the rows of the longest axis. */
static void
look_up(Step *step, KlMeasured *measured)
{
    for (size_t i = 0; i < step->program->roots.n; i++) {
        step->values[step->program->roots.ids[i]].is_root = true;
    }
    for (size_t i = 0; i < step->program->n_staged; i++) {
        const KlRun *run = &step->program->runs[i];
        uint32_t barrier = kl_program_is_body(run) ? 0 : (uint32_t)i + 1;
        for (uint32_t k = 0; k < run->exports.n; k++) {
            step->values[kl_program_export(step->program, run, k)].barrier = barrier;
            step->storages[storage_of(step, kl_program_export(step->program, run, k))].is_shared |=
                barrier == 0;
        }
        for (uint32_t k = 0; k < run->combined.n; k++) {
            KlNodeId id = step->program->combined.ids[run->combined.first + k];
            step->values[step->tape->nodes[id].first_out].barrier = barrier;
        }
        for (uint32_t k = 0; k < run->inner.n; k++) {
            step->values[step->program->inner.ids[run->inner.first + k]].is_inner = true;
        }
        for (uint32_t k = 0; k < run->imports.n; k++) {
            KlMeasureValue *value = &step->values[kl_program_import(step->program, run, k)->value];
            step->storages[storage_of(step, kl_program_import(step->program, run, k)->value)]
                .is_shared |= barrier > 0;
            value->is_read_by_tail |= is_barrier_after(step, run);
            value->is_for_segments |=
                is_made_in(step, run, kl_program_import(step->program, run, k)->value);
        }
        KlAxisId axis = kl_tape_axis_find(step->tape, run->axis);
        if (axis != KL_ID_NONE && step->tape->axis_rows[axis] > measured->rows) {
            measured->rows = step->tape->axis_rows[axis];
        }
    }
}

KlStatus
kl_measure_step(const KlTape *tape, const KlProgram *program, const KlOutside *outside,
                const KlPolicy *policy, KlMeasured *measured, KlError *error)
{
    *measured = (KlMeasured){0};
    Step step = {.tape = tape,
                 .program = program,
                 .stages = &program->stages,
                 .outside = outside,
                 .policy = policy,
                 .error = error,
                 .n_pieces = 1,
                 .moments = &measured->moments};
    step.status = kl_sweep_init(&step.sweep, tape, program, &outside->known, error);
    step.status = step.status == KL_OK ? allocate(&step) : step.status;
    if (step.status == KL_OK) {
        step.status = kl_schedule_build(tape, program, policy, &step.schedule, error);
    }
    if (step.status != KL_OK) {
        goto done;
    }
    look_up(&step, measured);
    hold_states(&step);
    if (!policy->is_live) {
        walk(&step);
        step.at = (uint32_t)step.schedule.n_steps;
        if (policy->is_graph) {
            deliver(&step);
        }
    }
    if (step.status == KL_OK) {
        KlMoments *moments = policy->is_live ? &measured->moments : NULL;
        step.status = kl_measure_whole(&step.sweep, policy->is_graph, outside->bytes_graphs,
                                       moments, &measured->whole, error);
    }
done:
    kl_sweep_fini(&step.sweep);
    kl_schedule_fini(&step.schedule);
    kl_alloc_scratch_free(&step.scratch);
    if (step.status != KL_OK) {
        kl_measure_fini(measured);
    }
    return step.status;
}

void
kl_measure_fini(KlMeasured *measured)
{
    kl_alloc_free(measured->moments.moments);
    *measured = (KlMeasured){0};
}
