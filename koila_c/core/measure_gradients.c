/* SPDX-License-Identifier: Apache-2.0 */
/* measure_gradients.c - the bytes of gradients that outlive the backward of a run: those that add up over chunks, and
 * those of a chunk on their way to an earlier segment. */
#include "measure_walk.h"

void
kl_walk_hold_gradients(KlWalk *walk, double bytes, double per_row)
{
    walk->held.fixed += bytes;
    walk->gradients.fixed += bytes;
    walk->held.per_row += per_row;
    walk->gradients.per_row += per_row;
}

double
kl_walk_gather_gradients(KlWalk *walk, const KlRun *run, uint32_t body, bool are_copies)
{
    double by_chunks = 0;
    for (uint32_t i = 0; i < run->imports.n; i++) {
        KlValueId value = kl_program_import(walk->program, run, i)->value;
        KlMeasureValue *state = &walk->values[value];
        KlSize *size = &walk->sweep.sizes[value];
        if (are_copies && gradient(walk, value) == whole(walk, value)) {
            continue;
        }
        if (!state->is_gathering && needs_gradient(walk, value) && state->body != body) {
            bool is_by_chunks =
                kl_program_is_body(run) && size->is_by_rows && !state->is_one_gradient;
            state->is_gathering = true;
            kl_walk_hold_gradients(walk, gradient(walk, value), 0);
            by_chunks += is_by_chunks ? gradient(walk, value) : 0;
        }
        size->is_summed |= state->is_gathering;
        size->is_remade |= state->is_root || gradient(walk, value) > whole(walk, value);
    }
    return by_chunks;
}

void
kl_walk_hold_segment_gradients(KlWalk *walk, const KlRun *run)
{
    for (uint32_t i = 0; i < run->imports.n; i++) {
        KlValueId value = kl_program_import(walk->program, run, i)->value;
        KlMeasureValue *state = &walk->values[value];
        bool is_first = state->body == walk->loop->run + 1 && !state->is_coming;
        if (is_first && needs_gradient(walk, value)) {
            state->is_coming = true;
            walk->sweep.sizes[value].is_remade |= state->is_gathering;
            kl_walk_hold_gradients(walk, 0, walk->sweep.sizes[value].per_row);
        }
    }
}

/* Free the gradients of a chunk of `values`, which only segments of one body read. */
void
kl_walk_free_segment_gradients(KlWalk *walk, const KlStep *step)
{
    for (uint32_t k = 0; k < step->values.n; k++) {
        KlValueId value = value_of(walk, step, k);
        KlMeasureValue *state = &walk->values[value];
        kl_walk_hold_gradients(walk, 0, state->is_coming ? -walk->sweep.sizes[value].per_row : 0);
        state->is_coming = false;
    }
}

void
kl_walk_sum_gradients(KlWalk *walk, const KlStep *step)
{
    for (uint32_t k = 0; k < step->values.n; k++) {
        KlValueId value = value_of(walk, step, k);
        walk->values[value].is_one_gradient = true;
        walk->sweep.sizes[value].is_remade |= !is_cut_in_place(walk, value);
    }
}

/* Count what a hook returns, beside the gradient of all rows that it gets. */
void
kl_walk_call_hooks(KlWalk *walk, const KlStep *step)
{
    for (uint32_t r = step->run; r < step->run + step->n_runs; r++) {
        const KlRun *run = &walk->program->runs[r];
        for (uint32_t i = 0; i < run->exports.n; i++) {
            KlValueId value = kl_program_export(walk->program, run, i);
            KlNodeId of_node = walk->tape->values[value].node;
            if (walk->tape->values[value].is_hooked && needs_gradient(walk, value)) {
                KlBytes made = {.fixed = gradient(walk, value)};
                KlMoment back = {made, .gradients = kl_sweep_share(made), .node = of_node};
                kl_walk_note(walk, back);
            }
        }
    }
}
