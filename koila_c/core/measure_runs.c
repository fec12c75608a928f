/* SPDX-License-Identifier: Apache-2.0 */
/* measure_runs.c - the bytes of runs, forward and backward, and of the loops around them. */
#include <math.h>

#include "measure_walk.h"

void
kl_walk_run_barrier(KlWalk *walk, const KlStep *step)
{
    const KlRun *run = &walk->program->runs[step->run];
    kl_walk_combine(walk, run, false);
    kl_walk_sweep_forward(walk, run, walk->policy->is_graph, walk->moments);
    kl_walk_hold_barrier(walk, step->run);
}

/* Return the bytes per row that a loop loads back from offloaded values, and reset the state of its segments' results. */
static double
enter_body(KlWalk *walk, const KlStep *step)
{
    const KlRun *runs = &walk->program->runs[step->run];
    double values = 0;
    for (uint32_t r = 0; r < step->n_runs; r++) {
        for (uint32_t i = 0; i < runs[r].imports.n; i++) {
            KlValueId value = kl_program_import(walk->program, &runs[r], i)->value;
            KlMeasureValue *state = &walk->values[value];
            bool is_beside = walk->tape->values[value].meta.device != 0;
            if (state->is_offloaded && is_beside && state->given_in != walk->at + 1) {
                state->given_in = walk->at + 1;
                values += walk->sweep.sizes[value].per_row;
            }
        }
        for (uint32_t i = 0; i < runs[r].exports.n; i++) {
            KlMeasureValue *state = &walk->values[kl_program_export(walk->program, &runs[r], i)];
            state->body = step->run + 1;
            state->is_for_segments = state->is_coming = false;
        }
    }
    return values;
}

/* Return the peak of the tail, forward and backward, when it runs on zeros during the first chunk. */
static double
sweep_tail(KlWalk *walk)
{
    double held = 0, worst = 0;
    for (size_t i = 0; i < walk->program->n_staged; i++) {
        const KlRun *run = &walk->program->runs[i];
        if (kl_program_is_tail(walk->program, run)) {
            kl_walk_sweep_forward(walk, run, true, NULL);
            double end = kl_sweep_live(&walk->sweep).fixed;
            kl_sweep_back(&walk->sweep, NULL);
            worst = fmax(worst, held + walk->sweep.most);
            held += end;
        }
    }
    return fmax(worst, held);
}

/* Run the tail on zeros instead of a body's results, during the first chunk, and hold the gradients that it sends. */
void
kl_walk_run_tail(KlWalk *walk, const KlStep *step)
{
    const KlRun *last = &walk->program->runs[step->run + step->n_runs - 1];
    KlBytes live = kl_sweep_live(&walk->sweep);
    double held_per_chunk = walk->held_per_chunk;
    KlMoment moment = {.bytes = {live.fixed + sweep_tail(walk), live.per_row}};
    moment.rows = (uint32_t)rows_of(walk, last);
    moment.node = walk->program->nodes.ids[last->nodes.first + last->nodes.n - 1];
    walk->open = KL_ID_NONE; /* BACK restores the sweep of the chunk */
    for (uint32_t k = 0; k < step->values.n + step->others.n; k++) {
        KlValueId value = value_of(walk, step, k);
        KlSize *size = &walk->sweep.sizes[value];
        const KlParts *parts = parts_of(walk, value);
        if (parts != NULL) {
            double left = parts->left * result_of(walk, value, parts);
            *(parts->added ? &moment.bytes.fixed : &walk->held_per_chunk) += left;
            continue;
        }
        size->is_let_go &= !size->needs_gradient;
        if (k < step->values.n) {
            moment.bytes.fixed += whole(walk, value);
            size->is_remade |= walk->values[value].is_root;
            kl_walk_hold_gradients(walk, size->needs_gradient ? whole(walk, value) : 0, 0);
        }
    }
    kl_walk_note(walk, moment);
    walk->held_per_chunk = held_per_chunk;
}

/* Count what a chunk leaves for later segments of its body, the values of `put`; not what is only offloaded. */
static void
hold_chunk(KlWalk *walk, const KlStep *put)
{
    for (uint32_t k = 0; k < put->values.n; k++) {
        KlValueId value = value_of(walk, put, k);
        KlMeasureValue *state = &walk->values[value];
        if (!state->is_held && !state->is_offloaded && !state->is_for_segments) {
            state->is_for_segments = true;
            walk->held.per_row += walk->sweep.sizes[value].per_row;
        }
    }
}

/* Return the bytes per row of the results that RUN keeps and of which all chunks are counted: it makes this chunk now. */
static double
missing(const KlWalk *walk, const KlStep *step)
{
    double bytes = 0;
    for (uint32_t k = 0; k < step->values.n; k++) {
        KlValueId value = value_of(walk, step, k);
        const KlSize *size = &walk->sweep.sizes[value];
        bytes += walk->values[value].is_counted && !size->is_put_together ? size->per_row : 0;
    }
    return bytes;
}

/* Set whether a run's sweep counts its results as there, except those of which each chunk reads a copy. */
static void
set_there(KlWalk *walk, const KlRun *run, bool is_there)
{
    for (uint32_t i = 0; i < run->exports.n; i++) {
        KlSize *size = &walk->sweep.sizes[kl_program_export(walk->program, run, i)];
        size->is_there = is_there && !size->is_copied;
    }
}

/* Return the bytes of gradients that exist twice while a head runs along a second axis: it is a program of its own, with
 * its own gradients of the inputs that it reads whole. */
static double
gradients_beside(const KlWalk *walk, const KlRun *last)
{
    double gradients = 0;
    bool is_one = walk->policy->second_size == 0 || rows_of(walk, last) <= 1;
    for (uint32_t i = 0; i < last->imports.n && !is_one; i++) {
        const KlImport *import = kl_program_import(walk->program, last, i);
        bool is_whole = !kl_place_is_rows(&import->place);
        gradients +=
            is_whole && needs_gradient(walk, import->value) ? whole(walk, import->value) : 0;
    }
    return gradients;
}

/* Run a segment on a chunk. With a graph, its sweep stays open and counts its results, too, until BACK. */
void
kl_walk_run_chunk(KlWalk *walk, const KlStep *step)
{
    const KlRun *run = &walk->program->runs[step->run];
    bool is_graph = step->graph == KL_GRAPH_NOW || step->graph == KL_GRAPH_SECOND_AXIS;
    if (step->graph == KL_GRAPH_SECOND_AXIS) {
        kl_walk_hold_gradients(walk, gradients_beside(walk, run), 0);
        kl_walk_hold_segment_gradients(walk, run);
        walk->n_pieces = walk->policy->n_pieces;
    }
    double bytes = is_graph ? 0 : missing(walk, step);
    walk->held.per_row -= bytes;
    kl_walk_sweep_forward(walk, run, is_graph, walk->moments);
    walk->held.per_row += bytes;
    if (!is_graph) {
        hold_chunk(walk, step);
    }
    walk->open = is_graph ? step->run : KL_ID_NONE;
}

void
kl_walk_go_back_barrier(KlWalk *walk, const KlStep *step)
{
    const KlRun *run = &walk->program->runs[step->run];
    kl_walk_call_hooks(walk, step);
    walk->held.fixed -= walk->live[step->run]; /* the sweep below counts it */
    walk->live[step->run] = 0;
    kl_walk_sweep_forward(walk, run, true, NULL);
    (void)kl_walk_gather_gradients(walk, run, UINT32_MAX, true);
    kl_walk_sweep_back(walk);
    (void)kl_walk_gather_gradients(walk, run, UINT32_MAX, false);
    for (uint32_t k = 0; k < run->exports.n; k++) {
        KlValueId value = kl_program_export(walk->program, run, k);
        kl_walk_hold_gradients(walk, walk->values[value].is_gathering ? -gradient(walk, value) : 0,
                               0);
        walk->values[value].is_gathering = false;
    }
    kl_walk_sweep_forward(walk, run, false, NULL); /* the graph is freed */
    kl_walk_hold_barrier(walk, step->run);
    kl_walk_combine(walk, run, true);
}

/* Run the backward of a segment's graph on a chunk: a graph that RUN just built, or one that waited. */
void
kl_walk_go_back_chunk(KlWalk *walk, const KlStep *step)
{
    const KlRun *run = &walk->program->runs[step->run];
    if (step->graph == KL_GRAPH_RETAIN) {
        set_there(walk, run, true);
        kl_walk_sweep_forward(walk, run, true, walk->moments);
    } else if (walk->open != step->run) {
        kl_walk_sweep_forward(walk, run, true, NULL);
    }
    kl_walk_sweep_back(walk); /* it counts the gradients of the segment's inputs while it runs */
    kl_walk_hold_segment_gradients(walk, run);
    kl_walk_free_segment_gradients(walk, step);
    set_there(walk, run, false);
    walk->open = KL_ID_NONE;
    if (step->graph == KL_GRAPH_SECOND_AXIS) {
        kl_walk_hold_gradients(walk, -gradients_beside(walk, run), 0);
        walk->n_pieces = 1;
    }
}

/* A loop over the pieces of a chunk begins. The graph of the segments before the head is held until its end, and so are
 * the gradients of the head's inputs. */
static void
open_pieces(KlWalk *walk, const KlStep *step)
{
    walk->depth++;
    walk->retained = kl_sweep_live(&walk->sweep);
    walk->held = kl_sweep_plus(walk->held, walk->retained);
    walk->n_pieces = walk->policy->n_pieces;
    walk->sweep.is_in_pieces = true;
    kl_walk_hold_segment_gradients(walk, &walk->program->runs[step->run]);
    kl_walk_hold_gradients(walk, 0, -walk->exchange.in_sweep); /* sweeps count only a piece's */
}

/* Return the bytes of gradients accumulated for a body's results: by chunk, or (`is_whole`) those of all rows. */
static double
left_gradients(const KlWalk *walk, const KlStep *step, bool is_whole)
{
    double left = 0;
    for (uint32_t r = 0; r < step->n_runs; r++) {
        const KlRun *run = &walk->program->runs[step->run + r];
        for (uint32_t i = 0; i < run->exports.n; i++) {
            KlValueId value = kl_program_export(walk->program, run, i);
            const KlMeasureValue *state = &walk->values[value];
            bool is_left = state->is_gathering && state->is_one_gradient == is_whole;
            left += is_left && parts_of(walk, value) == NULL ? gradient(walk, value) : 0;
        }
    }
    return left;
}

/* The backward of each chunk frees its results and their gradients, and makes the gradients of its inputs. The two
 * never reach their full size together, so only what is more than the other is added, at the first chunk or at the end. */
static void
open_exchange(KlWalk *walk, const KlStep *step)
{
    double made = 0, whole_gradients = left_gradients(walk, step, true);
    double freed_gradients = left_gradients(walk, step, false), held = walk->held.fixed;
    if (step->graph == KL_GRAPH_RETAIN) {
        kl_walk_free_values(walk, step);
    }
    double freed = freed_gradients + held - walk->held.fixed;
    walk->held.fixed = held; /* they stay to the end of the loop */
    for (uint32_t r = 0; r < step->n_runs; r++) {
        made += kl_walk_gather_gradients(walk, &walk->program->runs[step->run + r], step->run + 1,
                                         false);
    }
    double reused = fmin(made, freed), reused_gradients = fmin(made, freed_gradients);
    int64_t rows = rows_of(walk, &walk->program->runs[step->run]);
    walk->held.fixed -= reused;
    walk->gradients.fixed -= reused_gradients;
    walk->exchange = (KlExchange){.held = freed - reused + whole_gradients,
                                  .gradients = freed_gradients - reused_gradients + whole_gradients,
                                  .in_sweep = fmin(freed - made, 0) / (double)rows};
    kl_walk_hold_gradients(walk, 0, walk->exchange.in_sweep);
}

void
kl_walk_open_loop(KlWalk *walk, const KlStep *step)
{
    if (walk->depth > 0) {
        open_pieces(walk, step);
        return;
    }
    walk->loop = step;
    walk->open = KL_ID_NONE;
    walk->held.per_row = enter_body(walk, step);
    if (step->graph != KL_GRAPH_RETAIN) {
        kl_walk_hold_values(walk, step);
    }
    if (step->graph != KL_GRAPH_NONE) {
        open_exchange(walk, step);
    }
    walk->depth++;
}

void
kl_walk_close_loop(KlWalk *walk, const KlStep *step)
{
    if (--walk->depth > 0) {
        walk->n_pieces = 1;
        walk->sweep.is_in_pieces = false;
        walk->held.fixed -= walk->retained.fixed;
        walk->held.per_row -= walk->retained.per_row;
        return;
    }
    walk->held.per_row = walk->gradients.per_row = 0; /* no chunk is in memory */
    if (step->graph != KL_GRAPH_NONE) {
        walk->held.fixed -= walk->exchange.held;
        walk->gradients.fixed -= walk->exchange.gradients;
    }
}
