/* SPDX-License-Identifier: Apache-2.0 */
/* measure.c - folds over the instructions of a step and lists the bytes that it needs at each moment.
 *
 * What an instruction does to the bytes is said by its function, by idea: measure_values.c, measure_gradients.c and
 * measure_runs.c. */
#include "measure.h"

#include "alloc.h"
#include "measure_walk.h"

/* -- moments ---------------------------------------------------------------------------------------------- */

/* Return the bytes of a piece of a chunk: it has 1 / n_pieces of the rows, or of the second axis, rounded up. */
static KlBytes
of_piece(const KlWalk *walk, double fixed, double per_row)
{
    bool is_whole = walk->n_pieces <= 1;
    double size = (double)walk->policy->second_size;
    double more = is_whole ? 0 : per_row;
    return (KlBytes){.fixed = fixed + (size > 0 ? 0 : more),
                     .per_row = per_row / walk->n_pieces + (size > 0 ? more / size : 0)};
}

/* Add to the moments from `first` on, which count only their own run, the bytes that are held outside it. */
static void
add_held(KlWalk *walk, size_t first)
{
    for (size_t i = first; i < walk->moments->n; i++) {
        KlMoment *moment = &walk->moments->moments[i];
        KlBytes own = of_piece(walk, moment->bytes.fixed, moment->bytes.per_row);
        moment->bytes = kl_sweep_plus(own, walk->held);
        KlBytes come = of_piece(walk, moment->gradients.fixed, moment->gradients.per_row);
        KlBytes brief = of_piece(walk, moment->temporary.fixed, moment->temporary.per_row);
        moment->gradients = kl_sweep_share(kl_sweep_plus(come, walk->gradients));
        moment->temporary = kl_sweep_share(brief);
        moment->per_chunk = walk->held_per_chunk;
        moment->step = walk->at;
        moment->is_back = walk->is_back;
    }
}

void
kl_walk_note(KlWalk *walk, KlMoment moment)
{
    size_t first = walk->moments->n;
    kl_sweep_add_moment(walk->moments, moment);
    add_held(walk, first);
}

void
kl_walk_sweep_span(KlWalk *walk, KlSpan span, KlMoments *moments)
{
    size_t first = walk->moments->n;
    kl_sweep_open(&walk->sweep, &span);
    kl_sweep_forward(&walk->sweep, moments);
    add_held(walk, first);
}

void
kl_walk_sweep_forward(KlWalk *walk, const KlRun *run, bool is_graph, KlMoments *moments)
{
    kl_walk_sweep_span(walk, kl_sweep_span(walk->program, run, is_graph), moments);
}

void
kl_walk_sweep_back(KlWalk *walk)
{
    size_t first = walk->moments->n;
    kl_sweep_back(&walk->sweep, walk->moments);
    walk->is_back = true;
    add_held(walk, first);
    walk->is_back = false;
}

/* Hold the states of the random generator: before and after the step, at the start of each random call, and of a call in
 * a body at the start and end of its last chunk; and the random numbers that are drawn for all rows at once. */
static void
hold_states(KlWalk *walk)
{
    double state = (double)walk->outside->bytes_state;
    walk->held.fixed = 2 * state + (double)walk->outside->bytes_drawn;
    for (size_t i = 0; i < walk->program->n_staged; i++) {
        const KlRun *run = &walk->program->runs[i];
        for (uint32_t k = 0; k < run->nodes.n; k++) {
            KlNodeId id = walk->program->nodes.ids[run->nodes.first + k];
            if (!walk->sweep.nodes[id].is_random) {
                continue;
            }
            walk->held.fixed += state;
            if (kl_program_is_body(run)) {
                const int64_t *drawn = walk->outside->bytes_noise;
                int64_t noise = drawn != NULL ? drawn[id] : 0;
                walk->held_per_chunk += noise < 0 ? state : 0;
                walk->held.fixed += noise == 0 ? 2 * state : noise > 0 ? (double)noise : 0;
            }
        }
    }
}

/* -- the schedule ----------------------------------------------------------------------------------------- */

void
kl_walk_nothing(KlWalk *walk, const KlStep *step)
{
    (void)walk, (void)step;
}

static KlEffect *const EFFECTS[] = {
#define KL_INSTRUCTION(name, effect, meaning) [KL_STEP_##name] = kl_walk_##effect,
#include "schedule.def"
#undef KL_INSTRUCTION
};

/* Count the delivery of the gradients: gradients of half-precision leaves, accumulated in float32, are cast, and torch
 * runs the backward of plain graphs that existed before the program. */
static void
deliver(KlWalk *walk)
{
    double more = walk->outside->bytes_graphs;
    for (KlValueId value = 0; value < walk->program->stages.n_values; value++) {
        bool is_leaf = walk->values[value].is_gathering && walk->program->stages.is_leaf[value];
        if (is_leaf && gradient(walk, value) > whole(walk, value)) {
            more += whole(walk, value);
        }
    }
    KlNodeId end = (KlNodeId)walk->program->stages.n_nodes;
    while (end > 0 && walk->program->stages.node_stage[end - 1] == KL_STAGE_NONE) {
        end--;
    }
    if (end > 0) {
        kl_walk_note(walk, (KlMoment){.bytes.fixed = more, .node = end - 1});
    }
}

/* -- the whole -------------------------------------------------------------------------------------------- */

/* Set the facts about values that do not change during the walk, and the rows of the longest axis. */
static void
look_up(KlWalk *walk, KlMeasured *measured)
{
    for (size_t i = 0; i < walk->program->roots.n; i++) {
        walk->values[walk->program->roots.ids[i]].is_root = true;
    }
    for (size_t i = 0; i < walk->program->n_staged; i++) {
        const KlRun *run = &walk->program->runs[i];
        uint32_t barrier = kl_program_is_body(run) ? 0 : (uint32_t)i + 1;
        for (uint32_t k = 0; k < run->exports.n; k++) {
            KlValueId value = kl_program_export(walk->program, run, k);
            walk->values[value].barrier = barrier;
            walk->storages[storage_of(walk, value)].is_shared |= barrier == 0;
        }
        for (uint32_t k = 0; k < run->combined.n; k++) {
            KlNodeId id = walk->program->combined.ids[run->combined.first + k];
            walk->values[walk->tape->nodes[id].first_out].barrier = barrier;
        }
        for (uint32_t k = 0; k < run->imports.n; k++) {
            KlValueId value = kl_program_import(walk->program, run, k)->value;
            walk->storages[storage_of(walk, value)].is_shared |= barrier > 0;
        }
        KlAxisId axis = kl_tape_axis_find(walk->tape, run->axis);
        int64_t rows = axis != KL_ID_NONE ? walk->tape->axis_rows[axis] : 0;
        measured->rows = rows > measured->rows ? rows : measured->rows;
    }
}

KlStatus
kl_measure_step(const KlTape *tape, const KlProgram *program, const KlOutside *outside,
                const KlPolicy *policy, KlMeasured *measured)
{
    *measured = (KlMeasured){0};
    KlWalk walk = {.tape = tape,
                   .program = program,
                   .outside = outside,
                   .policy = policy,
                   .n_pieces = 1,
                   .moments = &measured->moments};
    KlScratch *scratch = &walk.scratch;
    walk.live = kl_alloc_scratch(scratch, program->n_staged, sizeof(double));
    walk.values = kl_alloc_scratch(scratch, program->stages.n_values, sizeof(KlMeasureValue));
    walk.storages = kl_alloc_scratch(scratch, tape->n_storages, sizeof(KlMeasureStorage));
    KlStatus status = scratch->is_short
                          ? KL_ERROR_MEMORY
                          : kl_sweep_init(&walk.sweep, tape, program, &outside->facts);
    if (status == KL_OK) {
        status = kl_schedule_build(tape, program, policy, &walk.schedule);
    }
    if (status != KL_OK) {
        goto done;
    }
    look_up(&walk, measured);
    hold_states(&walk);
    if (!policy->is_live) {
        for (; walk.at < walk.schedule.n_steps; walk.at++) {
            const KlStep *step = &walk.schedule.steps[walk.at];
            EFFECTS[step->op](&walk, step);
        }
        if (policy->is_graph) {
            deliver(&walk);
        }
    }
    if (!outside->is_whole_known) {
        KlMoments *moments = policy->is_live ? &measured->moments : NULL;
        status = kl_measure_whole(&walk.sweep, policy->is_graph, outside->bytes_graphs, moments,
                                  &measured->whole);
    }
    status = measured->moments.is_short ? KL_ERROR_MEMORY : status;
done:
    kl_sweep_fini(&walk.sweep);
    kl_schedule_fini(&walk.schedule);
    kl_alloc_scratch_free(&walk.scratch);
    if (status != KL_OK) {
        kl_measure_fini(measured);
    }
    return status;
}

void
kl_measure_fini(KlMeasured *measured)
{
    kl_alloc_free(measured->moments.moments);
    *measured = (KlMeasured){0};
}
