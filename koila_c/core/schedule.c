/* SPDX-License-Identifier: Apache-2.0 */
/* schedule.c - forward through the bodies and joints in their order, and back. */
#include "schedule.h"

#include <string.h>

#include "alloc.h"

#define NOWHERE UINT32_MAX

/* A body with all its segments, or a joint. */
typedef struct Unit {
    uint32_t run, n_runs; /* [run, run + n_runs) of the program's */
    bool is_body;
    bool has_gradient;
    bool is_fused;
    bool is_again;     /* its outputs by rows are not kept, but recomputed going back */
    bool is_offloaded; /* its outputs are moved off their device until they are read again */
    bool waits;        /* the graphs of its chunks wait for its backward */
    KlSlice again;     /* of the schedule's values: what is made again for it then */
    KlSlice needs;     /* likewise: what is filled again for it before */
} Unit;

typedef struct Build {
    const KlTape *tape;
    const KlProgram *program;
    const KlHomes *homes;
    KlSchedule *schedule;
    KlError *error;
    Unit *units; /* [n_units] */
    uint32_t n_units;
    uint32_t *maker;       /* [n_values] the unit that it leaves; NOWHERE: none */
    uint32_t *made_by;     /* [n_values] likewise, the run */
    bool *is_needed;       /* [n_staged] scratch: a run of a body has to be made again now */
    bool *is_open;         /* [n_values] what is of no checkpoint, or of another, reads it */
    uint32_t *last_read;   /* [n_values] the last unit that reads it from outside, going forward */
    bool *is_inner;        /* [n_values] only segments of one body read it, and let it go */
    bool *is_gone;         /* [n_values] it was let go */
    bool *is_read_whole;   /* [n_values] it is read put together from its chunks */
    bool *is_read_by_rows; /* [n_values] another body reads it chunk by chunk */
    bool *is_used_back;    /* [n_values] a body with a later backward makes or reads it */
    bool *may_be_light;    /* [n_values] */
    uint8_t *known;        /* [n_values] scratch of kl_waiting_find */
} Build;

static KlStatus
add_value(Build *build, KlValueId value)
{
    KlIds *values = &build->schedule->values;
    KlStatus status = kl_alloc_reserve((void **)&values->ids, &values->n_max, values->n + 1,
                                       sizeof(uint32_t), build->error);
    if (status == KL_OK) {
        values->ids[values->n++] = value;
    }
    return status;
}

/* Append a step of a unit, with the values from `first_value` on. */
static KlStatus
add_step(Build *build, KlStepOp op, const Unit *unit, size_t first_value)
{
    KlSchedule *schedule = build->schedule;
    uint32_t n_values = (uint32_t)schedule->values.n;
    KlStatus status = kl_alloc_reserve((void **)&schedule->steps, &schedule->n_steps_max,
                                       schedule->n_steps + 1, sizeof(KlStep), build->error);
    if (status == KL_OK) {
        schedule->steps[schedule->n_steps++] = (KlStep){
            .op = (uint8_t)op,
            .run = unit != NULL ? unit->run : 0,
            .n_runs = unit != NULL ? unit->n_runs : 0,
            .values = {.first = (uint32_t)first_value, .n = n_values - (uint32_t)first_value},
            .whole = {.first = n_values},
            .waits = unit != NULL && unit->waits,
            .again = unit != NULL ? unit->again : (KlSlice){0},
            .needs = unit != NULL ? unit->needs : (KlSlice){0}};
    }
    return status;
}

/* -- what is known of the units ------------------------------------------------------------------------ */

static bool
is_parts(const Build *build, KlValueId value)
{
    KlNodeId node = build->tape->values[value].node;
    return node != KL_ID_NONE && build->tape->nodes[node].mode == KL_MODE_REDUCE;
}

/* Bodies for each of which the tail may be run on zeros. */
enum { FUSED_MAX = 16 };

/* The gradients of a fused body are known when its first chunk has run: its tail is linear, so it asks nothing of
 * what other bodies leave for the same joints. Of many only some are, for each goes through the tail. */
static void
find_fused(Build *build)
{
    const KlStages *stages = &build->program->stages;
    uint32_t n_fused = 0;
    for (uint32_t u = build->n_units; u-- > 0;) {
        Unit *unit = &build->units[u];
        bool is_last = build->program->runs[unit->run].stage == stages->last_body;
        bool can_fuse = build->homes->is_graph && stages->is_tail_linear;
        unit->is_fused = can_fuse && is_last && unit->has_gradient && n_fused < FUSED_MAX;
        n_fused += unit->is_fused;
    }
}

static void
find_units(Build *build)
{
    const KlProgram *program = build->program;
    for (uint32_t run = 0; run < program->n_staged; run = kl_program_end(program, run)) {
        Unit *unit = &build->units[build->n_units++];
        unit->run = run;
        unit->n_runs = kl_program_end(program, run) - run;
        unit->is_body = kl_program_is_body(&program->runs[run]);
        for (uint32_t i = 0; i < unit->n_runs; i++) {
            unit->has_gradient = unit->has_gradient || program->runs[run + i].has_gradient;
        }
    }
    find_fused(build);
}

/* Whether other units run between the forward of a body and its backward. */
static bool
goes_back(const Unit *unit)
{
    return unit->is_body && unit->has_gradient && !unit->is_fused;
}

/* Who makes a value that leaves a unit, and who is the last to read it. */
static void
find_crossing(Build *build)
{
    const KlProgram *program = build->program;
    for (uint32_t u = 0; u < build->n_units; u++) {
        const Unit *unit = &build->units[u];
        for (uint32_t r = unit->run; r < unit->run + unit->n_runs; r++) {
            const KlRun *run = &program->runs[r];
            for (uint32_t i = 0; i < run->exports.n; i++) {
                KlValueId value = program->exports.ids[run->exports.first + i];
                build->maker[value] = u;
                build->made_by[value] = r;
                build->is_used_back[value] = goes_back(unit);
            }
            for (uint32_t i = 0; i < run->inner.n; i++) {
                build->is_inner[program->inner.ids[run->inner.first + i]] = true;
            }
        }
    }
    for (uint32_t u = 0; u < build->n_units; u++) {
        const Unit *unit = &build->units[u];
        for (uint32_t r = unit->run; r < unit->run + unit->n_runs; r++) {
            const KlRun *run = &program->runs[r];
            for (uint32_t i = 0; i < run->imports.n; i++) {
                uint32_t id = program->imports.ids[run->imports.first + i];
                const KlImport *import = &program->stages.imports[id];
                KlValueId value = import->value;
                bool is_crossing = build->maker[value] != NOWHERE && build->maker[value] != u;
                build->last_read[value] = is_crossing ? u : build->last_read[value];
                build->is_read_whole[value] |= is_crossing && !kl_place_is_rows(&import->place);
                build->is_read_by_rows[value] |= is_crossing && kl_place_is_rows(&import->place);
                build->is_used_back[value] |= goes_back(unit);
            }
            for (uint32_t i = 0; i < run->combined.n; i++) {
                KlNodeId id = program->combined.ids[run->combined.first + i];
                build->last_read[build->tape->nodes[id].first_out] = u;
            }
        }
    }
}

/* Whether a value that leaves a body can be made again: bodies alone read it, by rows, and nobody looks at its
 * whole gradient. */
static bool
can_be_again(const Build *build, KlValueId value)
{
    const KlValue *v = &build->tape->values[value];
    return !is_parts(build, value) && !build->is_inner[value] && kl_place_is_rows(&v->meta.place) &&
           !build->is_read_whole[value] && !build->program->is_kept[value] &&
           !kl_tape_is_looked_at(build->tape, value) && build->last_read[value] != NOWHERE;
}

/* Note which values are read outside of the body of the checkpoint that makes them. */
static void
find_open(Build *build)
{
    const KlTape *tape = build->tape;
    const KlStages *stages = &build->program->stages;
    for (size_t i = 0; i < stages->n_nodes && build->program->is_checkpointed; i++) {
        const KlNode *node = &tape->nodes[i];
        for (uint32_t k = 0; k < node->n_inputs && stages->node_stage[i] != KL_STAGE_NONE; k++) {
            KlValueId value = tape->inputs[node->first_input + k].value;
            KlNodeId maker = value != KL_ID_NONE ? tape->values[value].node : KL_ID_NONE;
            bool is_inside = maker != KL_ID_NONE && tape->nodes[maker].region == node->region;
            if (value != KL_ID_NONE && !is_inside) {
                build->is_open[value] = true;
            }
        }
    }
}

/* Whether what a unit leaves is let go when it was read for the last time going forward, and made again going back:
 * as its homes say, or since it is inside of a checkpoint of the user's. */
static bool
is_remade(const Build *build, const Unit *unit, KlValueId value)
{
    KlNodeId maker = build->tape->values[value].node;
    bool is_honoured = build->program->is_checkpointed && build->homes->offload_every == 0;
    bool is_inside = is_honoured && unit->is_body && unit->has_gradient && maker != KL_ID_NONE &&
                     build->tape->nodes[maker].region != 0 && !build->is_open[value];
    return (unit->is_again || is_inside) && can_be_again(build, value);
}

/* Say for each body that goes back where its outputs are until then: kept, recomputed, or offloaded. */
static void
choose_homes(Build *build)
{
    const KlProgram *program = build->program;
    const KlHomes *homes = build->homes;
    uint32_t n_leaving = 0;
    for (uint32_t u = 0; u < build->n_units; u++) {
        Unit *unit = &build->units[u];
        unit->is_offloaded = homes->offload_every == 1 && unit->is_body;
        bool leaves_rows = false;
        for (uint32_t r = unit->run; r < unit->run + unit->n_runs && unit->is_body; r++) {
            const KlRun *run = &program->runs[r];
            for (uint32_t i = 0; i < run->exports.n; i++) {
                leaves_rows = leaves_rows ||
                              can_be_again(build, program->exports.ids[run->exports.first + i]);
            }
        }
        if (leaves_rows && unit->has_gradient) {
            n_leaving++;
            unit->is_again = homes->keep_every > 1 && n_leaving % homes->keep_every != 0;
            unit->is_offloaded |= homes->offload_every > 1 && n_leaving % homes->offload_every == 0;
        }
    }
}

/* Whether a body goes forward and comes back later, with all that it leaves and is given kept meanwhile. */
static bool
is_kept_to_its_backward(const Build *build, const Unit *unit)
{
    const KlHomes *homes = build->homes;
    return !build->program->is_checkpointed && homes->is_graph && homes->keep_every <= 1 &&
           homes->offload_every == 0 && goes_back(unit) && unit->n_runs == 1;
}

/* Choose what is emptied: of what bodies leave for those that are not at once gone back through. */
static KlStatus
choose_light(Build *build, const KlWaiting *waiting)
{
    const KlProgram *program = build->program;
    KlStatus status = KL_OK;
    for (uint32_t u = 0; u < build->n_units && status == KL_OK && build->homes->n_light > 0; u++) {
        const KlRun *run = &program->runs[build->units[u].run];
        if (!is_kept_to_its_backward(build, &build->units[u])) {
            continue;
        }
        for (uint32_t i = 0; i < run->exports.n; i++) {
            KlValueId value = program->exports.ids[run->exports.first + i];
            build->may_be_light[value] =
                can_be_again(build, value) && !build->units[build->last_read[value]].is_fused;
        }
        status = kl_waiting_find_light(waiting, build->units[u].run, build->may_be_light,
                                       build->homes->n_light);
    }
    return status;
}

/* A body that goes back runs again, and reads all that it is given: those first that are made first. */
static KlStatus
need_given(Build *build, const Unit *unit)
{
    const KlProgram *program = build->program;
    const KlRun *run = &program->runs[unit->run];
    const uint32_t *number = build->schedule->lights.number;
    KlIds *values = &build->schedule->values;
    size_t first = values->n;
    KlStatus status = KL_OK;
    for (uint32_t i = 0; i < run->imports.n && status == KL_OK; i++) {
        KlValueId value =
            program->stages.imports[program->imports.ids[run->imports.first + i]].value;
        status = number[value] != 0 ? add_value(build, value) : KL_OK;
        for (size_t at = values->n; number[value] != 0 && status == KL_OK && --at > first;) {
            if (number[values->ids[at - 1]] > number[values->ids[at]]) {
                KlValueId later = values->ids[at - 1];
                values->ids[at - 1] = values->ids[at];
                values->ids[at] = later;
            }
        }
    }
    return status;
}

static KlStatus
choose_waiting(Build *build)
{
    KlIds *values = &build->schedule->values, needs = {0};
    KlLights *lights = &build->schedule->lights;
    const KlWaiting waiting = {.tape = build->tape,
                               .program = build->program,
                               .known = build->known,
                               .lights = lights,
                               .error = build->error};
    KlStatus status = choose_light(build, &waiting);
    for (uint32_t u = 0; u < build->n_units && status == KL_OK; u++) {
        Unit *unit = &build->units[u];
        const KlRun *run = &build->program->runs[unit->run];
        uint32_t first = (uint32_t)values->n;
        needs.n = 0;
        if (!is_kept_to_its_backward(build, unit)) {
            continue;
        }
        status = kl_waiting_find(&waiting, run, &unit->waits, values, &needs);
        values->n = unit->waits ? values->n : first;
        unit->again = (KlSlice){.first = first, .n = (uint32_t)values->n - first};
        first = (uint32_t)values->n;
        status = status == KL_OK && !unit->waits ? need_given(build, unit) : status;
        for (size_t i = 0; i < needs.n && status == KL_OK && unit->waits; i++) {
            status = add_value(build, needs.ids[i]);
        }
        unit->needs = (KlSlice){.first = first, .n = (uint32_t)values->n - first};
    }
    kl_alloc_free(needs.ids);
    return status;
}

/* -- forward ------------------------------------------------------------------------------------------- */

/* The `i`-th value that a run is given: what it reads from outside, or combines. */
static KlValueId
given_to(const Build *build, const KlRun *run, uint32_t i)
{
    const KlProgram *program = build->program;
    if (i < run->imports.n) {
        return program->stages.imports[program->imports.ids[run->imports.first + i]].value;
    }
    KlNodeId id = program->combined.ids[run->combined.first + i - run->imports.n];
    return build->tape->nodes[id].first_out;
}

/* Whether unit `u` is the last that reads a value going forward. */
static bool
is_read_last_by(const Build *build, KlValueId value, uint32_t u)
{
    return build->last_read[value] == u && build->maker[value] != u && !build->is_gone[value] &&
           !build->program->is_kept[value];
}

static bool
is_light(const Build *build, KlValueId value)
{
    return build->schedule->lights.number[value] != 0;
}

/* Whether no backward needs a value: it has no gradient, and no body with a later backward makes or reads it. */
static bool
is_done(const Build *build, KlValueId value)
{
    return !build->homes->is_graph ||
           (!build->program->stages.needs_gradient[value] && !build->is_used_back[value]);
}

/* Free what unit `u` is the last to read, if no backward needs it or it is recomputed; empty what is light. */
static KlStatus
release_read(Build *build, uint32_t u)
{
    KlStatus status = KL_OK;
    for (int is_emptying = 0; is_emptying < 2 && status == KL_OK; is_emptying++) {
        size_t first = build->schedule->values.n;
        for (uint32_t r = 0; r < build->units[u].n_runs; r++) {
            const KlRun *run = &build->program->runs[build->units[u].run + r];
            for (uint32_t i = 0; i < run->imports.n + run->combined.n && status == KL_OK; i++) {
                KlValueId value = given_to(build, run, i);
                bool is_last = is_read_last_by(build, value, u);
                bool is_gone =
                    is_last && (is_done(build, value) ||
                                is_remade(build, &build->units[build->maker[value]], value));
                bool is_due = is_emptying ? is_last && is_light(build, value) : is_gone;
                build->is_gone[value] |= is_gone && !is_emptying;
                status = is_due ? add_value(build, value) : KL_OK;
            }
        }
        KlStepOp op = is_emptying ? KL_STEP_EMPTY : KL_STEP_RELEASE;
        bool has_any = build->schedule->values.n > first;
        status = status == KL_OK && has_any ? add_step(build, op, NULL, first) : status;
    }
    return status;
}

/* Whether a value that leaves a body is written into one tensor of all rows: somebody reads it whole. Who reads it by
 * rows is given views of that, where chunks can be such. */
static bool
is_put_together(const Build *build, KlValueId value)
{
    const KlMeta *meta = &build->tape->values[value].meta;
    return (build->is_read_whole[value] || build->program->is_kept[value]) &&
           kl_place_is_rows(&meta->place) && !is_parts(build, value) &&
           (!build->is_read_by_rows[value] || kl_meta_is_cut_in_place(meta, &meta->place));
}

/* Of what leaves a body, what has its home beside the device, or is written into one tensor. */
static KlStatus
add_left(Build *build, const Unit *unit, bool (*is_such)(const Build *, KlValueId))
{
    const KlProgram *program = build->program;
    KlStatus status = KL_OK;
    for (uint32_t r = unit->run; r < unit->run + unit->n_runs; r++) {
        const KlRun *run = &program->runs[r];
        for (uint32_t i = 0; i < run->exports.n && status == KL_OK; i++) {
            KlValueId value = program->exports.ids[run->exports.first + i];
            status = is_such(build, value) ? add_value(build, value) : KL_OK;
        }
    }
    return status;
}

static KlStatus
go_forward(Build *build)
{
    KlStatus status = KL_OK;
    for (uint32_t u = 0; u < build->n_units && status == KL_OK; u++) {
        const Unit *unit = &build->units[u];
        bool is_in_pieces = unit->is_fused && unit->n_runs == 2 && build->homes->n_pieces > 1;
        KlStepOp op = is_in_pieces     ? KL_STEP_PIECES
                      : unit->is_fused ? KL_STEP_FUSED
                      : unit->is_body  ? KL_STEP_FORWARD
                                       : KL_STEP_JOINT;
        size_t first = build->schedule->values.n;
        if (unit->is_offloaded) {
            status = add_left(build, unit, can_be_again);
        }
        status = status == KL_OK ? add_step(build, op, unit, first) : status;
        if (status == KL_OK && unit->is_body) {
            KlStep *step = &build->schedule->steps[build->schedule->n_steps - 1];
            status = add_left(build, unit, is_put_together);
            step->whole.n = (uint32_t)build->schedule->values.n - step->whole.first;
        }
        status = status == KL_OK ? release_read(build, u) : status;
    }
    return status;
}

/* -- back ---------------------------------------------------------------------------------------------- */

/* Mark the runs that make what a run reads and was let go, or is kept only while a body goes through its segments. */
static void
mark_needed(Build *build, uint32_t r)
{
    const KlProgram *program = build->program;
    const KlRun *run = &program->runs[r];
    for (uint32_t i = 0; i < run->imports.n; i++) {
        KlValueId value =
            program->stages.imports[program->imports.ids[run->imports.first + i]].value;
        if (build->maker[value] != NOWHERE && (build->is_gone[value] || build->is_inner[value])) {
            build->is_needed[build->made_by[value]] = true;
        }
    }
}

/* Run segments [first, end) of a unit again. All that they leave for others is kept from now on: those go back
 * next. */
static KlStatus
run_again(Build *build, const Unit *unit, uint32_t first, uint32_t end)
{
    const KlProgram *program = build->program;
    KlStatus status = KL_OK;
    Unit part = *unit;
    part.run = first;
    part.n_runs = end - first;
    size_t first_value = build->schedule->values.n;
    for (uint32_t r = first; r < end; r++) {
        const KlRun *run = &program->runs[r];
        for (uint32_t i = 0; i < run->exports.n && status == KL_OK; i++) {
            KlValueId value = program->exports.ids[run->exports.first + i];
            if (build->is_gone[value]) {
                build->is_gone[value] = false;
                status = add_value(build, value);
            }
        }
    }
    return status == KL_OK ? add_step(build, KL_STEP_AGAIN, &part, first_value) : status;
}

/* The first segment of a unit that has to be made again; that after the last: none has. */
static uint32_t
first_needed(const Build *build, const Unit *unit)
{
    uint32_t r = unit->run;
    while (r < unit->run + unit->n_runs && !build->is_needed[r]) {
        r++;
    }
    return r;
}

/* Make again what unit `u` reads, from the nearest that was kept on: of a body the segments from the first that is
 * needed to the last. */
static KlStatus
make_again(Build *build, uint32_t u)
{
    const Unit *of = &build->units[u];
    KlStatus status = KL_OK;
    memset(build->is_needed, 0, build->program->n_staged * sizeof(bool));
    for (uint32_t r = of->run; r < of->run + of->n_runs; r++) {
        mark_needed(build, r);
    }
    for (uint32_t before = u; before-- > 0;) {
        const Unit *unit = &build->units[before];
        bool is_needed = false; /* a segment after this one is */
        for (uint32_t r = unit->run + unit->n_runs; r-- > unit->run;) {
            is_needed = is_needed || build->is_needed[r];
            if (is_needed && first_needed(build, unit) <= r) {
                build->is_needed[r] = true;
                mark_needed(build, r);
            }
        }
    }
    for (uint32_t before = 0; before < u && status == KL_OK; before++) {
        const Unit *unit = &build->units[before];
        uint32_t first = first_needed(build, unit), end = first;
        while (end < unit->run + unit->n_runs && build->is_needed[end]) {
            end++;
        }
        status = end > first ? run_again(build, unit, first, end) : KL_OK;
    }
    return status;
}

/* Whether a joint combines the parts of a value: their gradients come when it goes back. */
static bool
is_combined(const Build *build, const KlRun *run, KlValueId value)
{
    for (uint32_t i = 0; i < run->combined.n; i++) {
        if (build->program->combined.ids[run->combined.first + i] ==
            build->tape->values[value].node) {
            return true;
        }
    }
    return false;
}

/* Before a unit goes back, all that reads what it left has gone back: only the gradients are of use. */
static KlStatus
add_left_over(Build *build, const Unit *unit)
{
    const KlProgram *program = build->program;
    KlStatus status = KL_OK;
    for (uint32_t r = unit->run; r < unit->run + unit->n_runs; r++) {
        const KlRun *run = &program->runs[r];
        for (uint32_t i = 0; i < run->exports.n && status == KL_OK; i++) {
            KlValueId value = program->exports.ids[run->exports.first + i];
            if (!program->is_kept[value] && !build->is_inner[value] && !build->is_gone[value] &&
                !is_combined(build, run, value)) {
                build->is_gone[value] = true;
                status = add_value(build, value);
            }
        }
    }
    return status;
}

static KlStatus
release_left(Build *build, const Unit *unit)
{
    size_t first = build->schedule->values.n;
    KlStatus status = add_left_over(build, unit);
    bool has_any = build->schedule->values.n > first;
    return status == KL_OK && has_any ? add_step(build, KL_STEP_RELEASE, NULL, first) : status;
}

/* Likewise, and go back; a graph that waited may have kept what its body left, and lets it go chunk by chunk. */
static KlStatus
release_and_go_back(Build *build, const Unit *unit)
{
    KlStatus status = unit->waits ? KL_OK : release_left(build, unit);
    size_t first = build->schedule->values.n;
    status = status == KL_OK && unit->waits ? add_left_over(build, unit) : status;
    return status == KL_OK ? add_step(build, KL_STEP_BACK, unit, first) : status;
}

static KlStatus
go_back(Build *build)
{
    KlStatus status = KL_OK;
    for (uint32_t u = build->n_units; u-- > 0 && status == KL_OK;) {
        const Unit *unit = &build->units[u];
        if (!unit->is_body || unit->is_fused) {
            KlStepOp op = unit->is_fused ? KL_STEP_CHECK : KL_STEP_JOINT_BACK;
            status = unit->is_fused ? KL_OK : release_left(build, unit);
            status =
                status == KL_OK ? add_step(build, op, unit, build->schedule->values.n) : status;
        } else if (unit->has_gradient) {
            status = make_again(build, u);
            status = status == KL_OK
                         ? add_step(build, KL_STEP_SEED, unit, build->schedule->values.n)
                         : status;
            status = status == KL_OK ? release_and_go_back(build, unit) : status;
        }
    }
    return status;
}

/* -- the whole ----------------------------------------------------------------------------------------- */

KlStatus
kl_schedule_build(const KlTape *tape, const KlProgram *program, const KlHomes *homes,
                  KlSchedule *schedule, KlError *error)
{
    size_t n_values = program->stages.n_values;
    Build build = {
        .tape = tape, .program = program, .homes = homes, .schedule = schedule, .error = error};
    KlStatus status = KL_OK;
    memset(schedule, 0, sizeof(*schedule));
    build.units = kl_alloc_zeroed(program->n_staged, sizeof(Unit));
    build.maker = kl_alloc_resize(NULL, n_values, sizeof(uint32_t));
    build.made_by = kl_alloc_resize(NULL, n_values, sizeof(uint32_t));
    build.is_needed = kl_alloc_zeroed(program->n_staged, sizeof(bool));
    build.is_open = kl_alloc_zeroed(n_values, sizeof(bool));
    build.last_read = kl_alloc_resize(NULL, n_values, sizeof(uint32_t));
    build.is_inner = kl_alloc_zeroed(n_values, sizeof(bool));
    build.is_gone = kl_alloc_zeroed(n_values, sizeof(bool));
    build.is_read_whole = kl_alloc_zeroed(n_values, sizeof(bool));
    build.is_read_by_rows = kl_alloc_zeroed(n_values, sizeof(bool));
    build.is_used_back = kl_alloc_zeroed(n_values, sizeof(bool));
    build.known = kl_alloc_zeroed(n_values, sizeof(uint8_t));
    build.may_be_light = kl_alloc_zeroed(n_values, sizeof(bool));
    schedule->lights.number = kl_alloc_zeroed(n_values, sizeof(uint32_t));
    if (build.units == NULL || build.maker == NULL || build.last_read == NULL ||
        build.is_inner == NULL || build.is_gone == NULL || build.is_read_whole == NULL ||
        build.known == NULL || build.made_by == NULL || build.is_needed == NULL ||
        build.is_open == NULL || build.is_used_back == NULL || build.is_read_by_rows == NULL ||
        build.may_be_light == NULL || schedule->lights.number == NULL) {
        status = kl_error_set(error, KL_ERROR_MEMORY, "no memory to schedule %zu runs",
                              program->n_staged);
        goto done;
    }
    memset(build.maker, 0xff, n_values * sizeof(uint32_t));
    memset(build.last_read, 0xff, n_values * sizeof(uint32_t));
    find_units(&build);
    find_crossing(&build);
    find_open(&build);
    choose_homes(&build);
    status = choose_waiting(&build);
    status = status == KL_OK ? go_forward(&build) : status;
    status = status == KL_OK && homes->is_graph ? go_back(&build) : status;
done:
    kl_alloc_free(build.is_open);
    kl_alloc_free(build.is_needed);
    kl_alloc_free(build.made_by);
    kl_alloc_free(build.may_be_light);
    kl_alloc_free(build.known);
    kl_alloc_free(build.is_used_back);
    kl_alloc_free(build.is_read_by_rows);
    kl_alloc_free(build.is_read_whole);
    kl_alloc_free(build.is_gone);
    kl_alloc_free(build.is_inner);
    kl_alloc_free(build.last_read);
    kl_alloc_free(build.maker);
    kl_alloc_free(build.units);
    if (status != KL_OK) {
        kl_schedule_fini(schedule);
    }
    return status;
}

void
kl_schedule_fini(KlSchedule *schedule)
{
    kl_alloc_free(schedule->steps);
    kl_alloc_free(schedule->values.ids);
    kl_alloc_free(schedule->lights.lights);
    kl_alloc_free(schedule->lights.ids.ids);
    kl_alloc_free(schedule->lights.number);
    memset(schedule, 0, sizeof(*schedule));
}
