/* SPDX-License-Identifier: Apache-2.0 */
/* measure_values.c - the bytes of values that stages keep for each other: results of bodies, all rows or a chunk of them,
 * partial results of reductions, and what a barrier holds. */
#include "measure_walk.h"

/* Hold `n` partial results of a reduction: for each chunk, or once if they are added up. */
static void
hold_parts(KlWalk *walk, KlValueId value, const KlParts *parts, double n)
{
    *(parts->added ? &walk->held.fixed : &walk->held_per_chunk) +=
        n * result_of(walk, value, parts);
}

/* Whether a held value has memory of its own: it is one tensor of all rows, or a copy of a part of its base. */
static bool
has_own_memory(const KlWalk *walk, KlValueId value)
{
    KlValueId of = value;
    while (walk->tape->values[of].view_of != KL_ID_NONE) {
        of = walk->tape->values[of].view_of;
    }
    return walk->sweep.sizes[value].is_put_together || whole(walk, value) < whole(walk, of);
}

/* Hold a result of a body, all chunks of it, or (`n` is -1) free it; each storage counts once. */
static void
count(KlWalk *walk, KlValueId value, int n)
{
    const KlParts *parts = parts_of(walk, value);
    KlMeasureValue *state = &walk->values[value];
    KlMeasureStorage *storage = &walk->storages[storage_of(walk, value)];
    if (state->is_held == (n > 0)) {
        return;
    }
    state->is_held = n > 0;
    state->is_counted = false;
    if (parts != NULL) {
        hold_parts(walk, value, parts, n * parts->left);
    } else if (has_own_memory(walk, value)) {
        walk->held.fixed += n * whole(walk, value);
    } else if ((storage->n_held += n) == (n > 0)) {
        state->is_counted = n > 0;
        storage->bytes = n > 0 ? whole(walk, value) : storage->bytes;
        walk->held.fixed += n * storage->bytes;
    }
}

void
kl_walk_hold_values(KlWalk *walk, const KlStep *step)
{
    for (uint32_t k = 0; k < step->values.n; k++) {
        count(walk, value_of(walk, step, k), 1);
    }
}

void
kl_walk_hold_barrier(KlWalk *walk, uint32_t i)
{
    walk->held.fixed += kl_sweep_live(&walk->sweep).fixed - walk->live[i];
    walk->live[i] = kl_sweep_live(&walk->sweep).fixed;
}

void
kl_walk_store_results(KlWalk *walk, const KlStep *step)
{
    for (uint32_t k = 0; k < step->values.n; k++) {
        walk->values[value_of(walk, step, k)].is_offloaded = true;
    }
    bool is_fused = step->graph == KL_GRAPH_NOW; /* TAIL sends some a gradient */
    for (uint32_t k = 0; k < step->others.n; k++) {
        KlValueId value = value_of(walk, step, step->values.n + k);
        KlSize *size = &walk->sweep.sizes[value];
        size->is_put_together = true;
        size->is_copied = !is_cut_in_place(walk, value);
        size->is_let_go = is_fused || !size->needs_gradient;
    }
}

/* Hold a share of a reduction, for each chunk and once, `n` times. */
static void
hold_share(KlWalk *walk, KlValueId value, const double *share, double n)
{
    const KlParts *parts = parts_of(walk, value);
    hold_parts(walk, value, parts, n * share[0]);
    walk->held.fixed += n * share[1] * result_of(walk, value, parts);
}

void
kl_walk_combine(KlWalk *walk, const KlRun *run, bool is_back)
{
    bool is_compared =
        kl_program_is_tail(walk->program, run) && walk->program->stages.is_tail_linear; /* CHECK */
    for (uint32_t i = 0; i < run->combined.n; i++) {
        KlNodeId id = walk->program->combined.ids[run->combined.first + i];
        KlValueId value = walk->tape->nodes[id].first_out;
        const KlParts *parts = parts_of(walk, value);
        double saved = walk->policy->is_graph && needs_gradient(walk, value) ? 1 : 0;
        const double *most = is_back ? parts->sending : parts->combining;
        hold_share(walk, value, parts->combined, is_back ? -saved : 0);
        hold_share(walk, value, most, is_back ? saved : 1);
        kl_walk_note(walk, (KlMoment){.node = id});
        hold_share(walk, value, most, is_back ? -saved : -1);
        hold_share(walk, value, parts->combined, is_back ? 0 : saved);
        hold_parts(walk, value, parts, is_back && !is_compared ? saved * parts->seeds : 0);
    }
}

static void
free_value(KlWalk *walk, KlValueId value)
{
    KlMeasureStorage *storage = &walk->storages[storage_of(walk, value)];
    bool is_back = walk->at >= walk->schedule.n_forward;
    if (walk->values[value].barrier > 0 && (is_back || !storage->is_shared)) {
        walk->sweep.sizes[value].is_freed = true;
        uint32_t i = walk->values[value].barrier - 1;
        kl_walk_sweep_forward(walk, &walk->program->runs[i], walk->policy->is_graph && !is_back,
                              NULL);
        kl_walk_hold_barrier(walk, i);
    }
    count(walk, value, -1);
}

/* Free `values`: inside a loop those of a chunk, else of all chunks. */
void
kl_walk_free_values(KlWalk *walk, const KlStep *step)
{
    for (uint32_t k = 0; k < step->values.n; k++) {
        KlValueId value = value_of(walk, step, k);
        KlMeasureValue *state = &walk->values[value];
        if (walk->depth == 0) {
            free_value(walk, value);
        } else {
            walk->held.per_row -= state->is_for_segments ? walk->sweep.sizes[value].per_row : 0;
            state->is_for_segments = false;
        }
    }
}

static void
free_storage(KlWalk *walk, const KlIds *ids, KlSlice values, uint8_t level)
{
    for (uint32_t i = 0; i < values.n; i++) {
        uint8_t *is_rematerialized = &walk->values[ids->ids[values.first + i]].is_rematerialized;
        *is_rematerialized = *is_rematerialized == level ? 0 : *is_rematerialized;
    }
}

/* Count the rematerialization of a chunk: the values are recomputed in their old storages. Before each value, those that it is
 * computed from are rematerialized too; after it they are freed again, unless they were there before. */
static void
rematerialize(KlWalk *walk, const KlIds *ids, KlSlice values, uint8_t level)
{
    const KlCheapSet *cheap_set = &walk->schedule.cheap_set;
    for (uint32_t i = 0; i < values.n; i++) {
        KlValueId value = ids->ids[values.first + i];
        const KlCheap *cheap = &cheap_set->values[cheap_set->number[value] - 1];
        double there = walk->held.per_row + walk->sweep.sizes[value].per_row;
        if (walk->values[value].is_rematerialized == 0) {
            rematerialize(walk, &cheap_set->ids, cheap->needs, level + 1);
            walk->held.per_row += walk->sweep.sizes[value].per_row;
            kl_walk_sweep_span(walk, kl_sweep_span_cheap(walk->program, cheap_set, cheap),
                               walk->moments);
            free_storage(walk, &cheap_set->ids, cheap->needs, level + 1);
            walk->values[value].is_rematerialized = level;
            walk->held.per_row = there;
        }
    }
}

void
kl_walk_rematerialize_chunk(KlWalk *walk, const KlStep *step)
{
    rematerialize(walk, &walk->schedule.values, step->values, 1);
}

/* Free the storages of `values`: inside a loop the chunk that was rematerialized, else all chunks. */
void
kl_walk_free_storages(KlWalk *walk, const KlStep *step)
{
    if (walk->depth == 0) {
        kl_walk_free_values(walk, step);
    } else {
        free_storage(walk, &walk->schedule.values, step->values, 1);
    }
}
