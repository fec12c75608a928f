/* SPDX-License-Identifier: Apache-2.0 */
/* schedule.c - builds a schedule: the forward pass over bodies and barriers in their order, then the backward pass. */
#include "schedule.h"

#include <string.h>

#include "alloc.h"
#include "schedule_units.h"

/* Exports of runs that a step is about, as is_such() says. */
typedef enum Such {
    ALL,
    FREED,
    INNER,
    MISSING,
    OFFLOADED,
    READ,
    READ_OUTSIDE,
    READ_BY_TAIL,
    OTHER_ROOT,
    FOR_SEGMENTS,
    ONLY_FOR_SEGMENTS,
    WHOLE,
    KEPT,
    GRADIENT_WHOLE
} Such;

static const KlSlice NONE = {0};

static KlSlice
one(uint32_t run)
{
    return (KlSlice){.first = run, .n = 1};
}

static KlSlice
last_of(const KlUnit *unit)
{
    return one(unit->runs.first + unit->runs.n - 1);
}

/* Append a step and return it, for the caller to set its other fields; on failure return a dummy. */
static KlStep *
add(KlBuild *build, KlStepOp op, KlGraph graph, KlSlice runs, KlSlice values)
{
    KlSchedule *schedule = build->schedule;
    if (build->status == KL_OK) {
        build->status = KL_RESERVE(schedule, steps, schedule->n_steps + 1);
    }
    bool is_there = build->status == KL_OK;
    KlStep *step = is_there ? &schedule->steps[schedule->n_steps++] : &build->nowhere;
    *step = (KlStep){.op = (uint8_t)op,
                     .graph = (uint8_t)graph,
                     .run = runs.first,
                     .n_runs = runs.n,
                     .values = values};
    return step;
}

/* Append a step without runs, unless `values` is empty. */
static void
add_about(KlBuild *build, KlStepOp op, KlSlice values)
{
    if (values.n > 0) {
        add(build, op, KL_GRAPH_NONE, NONE, values);
    }
}

static bool
is_such(const KlBuild *build, KlValueId value, Such such)
{
    const KlFacts *facts = &build->facts[value];
    bool is_inner = facts->is_inner, is_read = !build->program->is_unread[value];
    bool is_offloaded = build->policies[value] == KL_POLICY_OFFLOAD;
    bool is_cut = kl_place_is_rows(&build->tape->values[value].meta.place);
    switch (such) {
    case ALL:
        return true;
    case FREED:
        return facts->is_freed;
    case INNER:
        return is_inner;
    case MISSING: /* it is not in memory when its body runs again */
        return facts->is_freed || is_inner;
    case OFFLOADED:
        return is_offloaded;
    case READ:
        return is_read;
    case READ_OUTSIDE: /* other units read it */
        return is_read && !is_inner;
    case READ_BY_TAIL: /* of a fused body: nothing else comes after that */
        return facts->last_read != KL_NOWHERE && !is_inner;
    case OTHER_ROOT:
        return facts->is_root && !is_inner && facts->last_read == KL_NOWHERE;
    case FOR_SEGMENTS:
        return facts->is_for_segments;
    case ONLY_FOR_SEGMENTS: /* later segments of its body read each chunk of it: no tensor holds all rows */
        return facts->is_for_segments && (is_inner || facts->is_freed);
    case WHOLE: /* it is written into one tensor of all rows, because something reads it whole */
        return (facts->is_read_whole || build->program->is_kept[value]) && is_cut &&
               !kl_units_is_parts(build, value);
    case KEPT: /* all its chunks stay in memory. Those of a fused body that nobody reads do not */
        return !is_inner && !is_offloaded &&
               (is_read || !build->units[facts->unit].is_fused || build->policy->second_size > 0);
    case GRADIENT_WHOLE: /* all its readers add their gradients into one tensor of all rows: one of them reads it whole,
                          * or a hook or retain_grad reads its gradient */
        return build->policy->is_graph && build->program->stages.needs_gradient[value] &&
               !kl_units_is_parts(build, value) && is_cut &&
               (facts->is_read_whole || kl_tape_is_looked_at(build->tape, value));
    }
    return false;
}

/* List the exports of `runs` that are such. */
static KlSlice
exports_of(KlBuild *build, KlSlice runs, Such such)
{
    size_t first = build->schedule->values.n;
    for (uint32_t r = runs.first; r < runs.first + runs.n; r++) {
        const KlRun *run = &build->program->runs[r];
        for (uint32_t i = 0; i < run->exports.n; i++) {
            KlValueId value = kl_program_export(build->program, run, i);
            if (is_such(build, value, such)) {
                kl_units_add_value(build, value);
            }
        }
    }
    return kl_program_since(&build->schedule->values, first);
}

/* -- forward ------------------------------------------------------------------------------------------- */

/* Return the `i`-th input of a run: its imports, then the reductions whose partial results it combines. */
static KlValueId
input_of(const KlBuild *build, const KlRun *run, uint32_t i)
{
    if (i < run->imports.n) {
        return kl_program_import(build->program, run, i)->value;
    }
    KlNodeId id = build->program->combined.ids[run->combined.first + i - run->imports.n];
    return build->tape->nodes[id].first_out;
}

/* Whether unit `u` is the last reader of a value in the forward pass, so that the value may be freed after it. */
static bool
is_read_last_by(const KlBuild *build, KlValueId value, uint32_t u)
{
    const KlFacts *facts = &build->facts[value];
    return facts->last_read == u && facts->unit != u && !facts->is_freed &&
           !build->program->is_kept[value];
}

/* Of the values that unit `u` reads last: free those that the backward pass does not need or recomputes, and empty
 * those that cheap calls recompute. */
static void
release_read(KlBuild *build, uint32_t u)
{
    for (int is_storage_only = 0; is_storage_only < 2; is_storage_only++) {
        size_t first = build->schedule->values.n;
        for (uint32_t r = 0; r < build->units[u].runs.n; r++) {
            const KlRun *run = kl_units_run(build, &build->units[u], r);
            for (uint32_t i = 0; i < run->imports.n + run->combined.n; i++) {
                KlValueId value = input_of(build, run, i);
                KlFacts *facts = &build->facts[value];
                bool is_last = is_read_last_by(build, value, u);
                /* Without a gradient, and if no body with a later backward makes or reads it. */
                bool is_done =
                    !build->policy->is_graph ||
                    (!build->program->stages.needs_gradient[value] && !facts->is_used_back);
                bool is_freed =
                    is_last && (is_done || build->policies[value] == KL_POLICY_RECOMPUTE);
                bool is_cheap = build->schedule->cheap_set.number[value] != 0;
                facts->is_freed |= is_freed && !is_storage_only;
                if (is_storage_only ? is_last && is_cheap : is_freed) {
                    kl_units_add_value(build, value);
                }
            }
        }
        add_about(build, is_storage_only ? KL_STEP_FREE_STORAGE : KL_STEP_FREE,
                  kl_program_since(&build->schedule->values, first));
    }
}

/* The backward of all segments but the last, in reverse order. Each segment first runs again, with its graph. Its
 * results are freed before that: the later segments have finished, and only the results' gradients are needed. */
static void
add_others_back(KlBuild *build, const KlUnit *unit)
{
    for (uint32_t r = last_of(unit).first; r-- > unit->runs.first;) {
        KlSlice made = exports_of(build, one(r), ONLY_FOR_SEGMENTS);
        add_about(build, KL_STEP_FREE, made);
        add(build, KL_STEP_RUN, KL_GRAPH_NOW, one(r), NONE);
        add(build, KL_STEP_BACK, KL_GRAPH_NOW, one(r), made);
    }
}

/* The forward loop of a body, without graphs or with graphs that are retained until its backward. */
static void
add_forward(KlBuild *build, const KlUnit *unit)
{
    KlGraph graph = unit->is_retained ? KL_GRAPH_RETAIN : KL_GRAPH_NONE;
    add(build, KL_STEP_LOOP, KL_GRAPH_NONE, unit->runs, exports_of(build, unit->runs, KEPT));
    for (uint32_t r = unit->runs.first; r <= last_of(unit).first; r++) {
        KlSlice left = exports_of(build, one(r), ALL);
        add(build, KL_STEP_RUN, graph, one(r), left)->others = unit->to_recompute;
    }
    add_about(build, KL_STEP_FREE, exports_of(build, unit->runs, INNER));
    add(build, KL_STEP_END, KL_GRAPH_NONE, unit->runs, NONE);
}

/* Forward and backward of the last segment of a fused body. In between, TAIL computes its results' gradients. */
static void
add_last(KlBuild *build, const KlUnit *unit)
{
    KlGraph graph = build->policy->second_size > 0 ? KL_GRAPH_SECOND_AXIS : KL_GRAPH_NOW;
    add(build, KL_STEP_RUN, graph, last_of(unit), exports_of(build, last_of(unit), READ));
    KlSlice read = exports_of(build, unit->runs, READ_BY_TAIL);
    KlSlice roots = exports_of(build, unit->runs, OTHER_ROOT);
    add(build, KL_STEP_TAIL, graph, unit->runs, read)->others = roots;
    add(build, KL_STEP_BACK, graph, last_of(unit), NONE);
}

/* Forward and backward of a chunk. All segments but the last run without a graph at first, and again in backward. */
static void
add_at_once(KlBuild *build, const KlUnit *unit)
{
    for (uint32_t r = unit->runs.first; r < last_of(unit).first; r++) {
        add(build, KL_STEP_RUN, KL_GRAPH_FIRST, one(r), exports_of(build, one(r), READ));
    }
    add_last(build, unit);
    add_others_back(build, unit);
    KlSlice between = exports_of(build, unit->runs, FOR_SEGMENTS);
    add(build, KL_STEP_TAKE, KL_GRAPH_NONE, unit->runs, between);
}

/* Forward and backward of a chunk whose head, the second segment, runs piece by piece. The graph of the first segment
 * and its results are retained meanwhile: pieces of these are cut of the results themselves, so no copy is kept. */
static void
add_in_pieces(KlBuild *build, const KlUnit *unit)
{
    KlSlice body = one(unit->runs.first), head = last_of(unit);
    add(build, KL_STEP_RUN, KL_GRAPH_NOW, body, exports_of(build, body, READ_OUTSIDE));
    KlSlice between = exports_of(build, body, FOR_SEGMENTS);
    add(build, KL_STEP_LOOP, KL_GRAPH_NOW, head, between);
    add_last(build, unit);
    add(build, KL_STEP_TAKE, KL_GRAPH_NONE, head, NONE);
    add(build, KL_STEP_END, KL_GRAPH_NONE, head, NONE);
    add(build, KL_STEP_BACK, KL_GRAPH_NOW, body, between);
    add_about(build, KL_STEP_FREE, exports_of(build, body, INNER));
    add(build, KL_STEP_TAKE, KL_GRAPH_NONE, body, between);
}

static void
add_body_forward(KlBuild *build, const KlUnit *unit)
{
    KlGraph graph = unit->is_fused ? KL_GRAPH_NOW : KL_GRAPH_NONE;
    KlSlice offloaded = exports_of(build, unit->runs, OFFLOADED);
    KlSlice whole = exports_of(build, unit->runs, WHOLE);
    add(build, KL_STEP_STORE, graph, unit->runs, offloaded)->others = whole;
    if (!unit->is_fused) {
        add_about(build, KL_STEP_SUM, exports_of(build, unit->runs, GRADIENT_WHOLE));
        add_forward(build, unit);
        return;
    }
    bool is_in_pieces = unit->runs.n == 2 && build->policy->n_pieces > 1;
    add(build, KL_STEP_LOOP, KL_GRAPH_NOW, unit->runs, exports_of(build, unit->runs, KEPT));
    (is_in_pieces ? add_in_pieces : add_at_once)(build, unit);
    add(build, KL_STEP_END, KL_GRAPH_NOW, unit->runs, NONE);
    add(build, KL_STEP_WATCH, KL_GRAPH_NONE, unit->runs, NONE);
}

static void
go_forward(KlBuild *build)
{
    for (uint32_t u = 0; u < build->n_units; u++) {
        const KlUnit *unit = &build->units[u];
        if (unit->is_body) {
            add_body_forward(build, unit);
        } else {
            add(build, KL_STEP_BARRIER, KL_GRAPH_NOW, unit->runs, NONE);
        }
        release_read(build, u);
    }
    build->schedule->n_forward = build->schedule->n_steps;
}

/* -- back ---------------------------------------------------------------------------------------------- */

/* Mark the runs to recompute for run `r`: those that make its imports that were freed, or that were kept only during
 * the loop of their body. */
static void
mark_needed(KlBuild *build, uint32_t r)
{
    const KlRun *run = &build->program->runs[r];
    for (uint32_t i = 0; i < run->imports.n; i++) {
        KlValueId value = kl_program_import(build->program, run, i)->value;
        if (build->facts[value].unit != KL_NOWHERE && is_such(build, value, MISSING)) {
            build->is_needed[build->facts[value].run] = true;
        }
    }
}

static bool
reads(const KlProgram *program, KlSlice runs, KlValueId value)
{
    for (uint32_t r = runs.first; r < runs.first + runs.n; r++) {
        for (uint32_t i = 0; i < program->runs[r].imports.n; i++) {
            if (kl_program_import(program, &program->runs[r], i)->value == value) {
                return true;
            }
        }
    }
    return false;
}

/* List the values without storage that runs read, in the order in which they are rematerialized before that. */
static KlSlice
cheap_values_read_by(KlBuild *build, KlSlice runs)
{
    size_t first = build->schedule->values.n;
    for (size_t i = 0; i < build->schedule->cheap_set.n; i++) {
        KlValueId value = build->schedule->cheap_set.values[i].value;
        if (reads(build->program, runs, value)) {
            kl_units_add_value(build, value);
        }
    }
    return kl_program_since(&build->schedule->values, first);
}

/* Append a loop that recomputes segments of a body. Their results for other units are kept from here on, since the
 * backward of these units comes next. */
static void
recompute_segments(KlBuild *build, KlSlice runs)
{
    KlSlice needs = cheap_values_read_by(build, runs);
    add(build, KL_STEP_RECOMPUTE, KL_GRAPH_NONE, runs, exports_of(build, runs, FREED));
    add(build, KL_STEP_LOOP, KL_GRAPH_NONE, runs, NONE);
    add_about(build, KL_STEP_REMATERIALIZE, needs);
    for (uint32_t r = runs.first; r < runs.first + runs.n; r++) {
        const KlRun *run = &build->program->runs[r];
        add(build, KL_STEP_RUN, KL_GRAPH_NONE, one(r), exports_of(build, one(r), MISSING));
        for (uint32_t i = 0; i < run->exports.n; i++) {
            build->facts[kl_program_export(build->program, run, i)].is_freed = false;
        }
    }
    add_about(build, KL_STEP_FREE, exports_of(build, runs, INNER));
    add_about(build, KL_STEP_FREE_STORAGE, needs);
    add(build, KL_STEP_END, KL_GRAPH_NONE, runs, NONE);
}

/* Return the first segment of a unit to recompute; if there is none, the end of its segments. */
static uint32_t
first_needed(const KlBuild *build, const KlUnit *unit)
{
    uint32_t r = unit->runs.first;
    while (r < unit->runs.first + unit->runs.n && !build->is_needed[r]) {
        r++;
    }
    return r;
}

/* Recompute the freed inputs of unit `u`, starting from the nearest values that were kept. In each body, all segments
 * from the first to the last marked one run again. */
static void
recompute_inputs(KlBuild *build, uint32_t u)
{
    KlSlice runs = build->units[u].runs;
    memset(build->is_needed, 0, build->program->n_staged * sizeof(bool));
    for (uint32_t r = runs.first; r < runs.first + runs.n; r++) {
        mark_needed(build, r);
    }
    for (uint32_t before = u; before-- > 0;) {
        const KlUnit *unit = &build->units[before];
        bool is_needed = false; /* this segment or a later one is marked */
        for (uint32_t r = unit->runs.first + unit->runs.n; r-- > unit->runs.first;) {
            is_needed = is_needed || build->is_needed[r];
            if (is_needed && first_needed(build, unit) <= r) {
                build->is_needed[r] = true;
                mark_needed(build, r);
            }
        }
    }
    for (uint32_t before = 0; before < u; before++) {
        const KlUnit *unit = &build->units[before];
        uint32_t first = first_needed(build, unit), end = first;
        while (end < unit->runs.first + unit->runs.n && build->is_needed[end]) {
            end++;
        }
        if (end > first) {
            recompute_segments(build, (KlSlice){.first = first, .n = end - first});
        }
    }
}

/* List the results of a unit to free before its backward: the backward of all their readers has run, so only their
 * gradients are needed. */
static KlSlice
exports_to_free(KlBuild *build, const KlUnit *unit)
{
    size_t first = build->schedule->values.n;
    for (uint32_t r = 0; r < unit->runs.n; r++) {
        const KlRun *run = kl_units_run(build, unit, r);
        for (uint32_t i = 0; i < run->exports.n; i++) {
            KlValueId value = kl_program_export(build->program, run, i);
            KlFacts *facts = &build->facts[value];
            if (!build->program->is_kept[value] && !facts->is_inner && !facts->is_freed) {
                facts->is_freed = true;
                kl_units_add_value(build, value);
            }
        }
    }
    return kl_program_since(&build->schedule->values, first);
}

/* Run each chunk of a body again, with its graph, and then its backward. */
static void
add_again_and_back(KlBuild *build, const KlUnit *unit)
{
    for (uint32_t r = unit->runs.first; r < last_of(unit).first; r++) {
        add(build, KL_STEP_RUN, KL_GRAPH_NONE, one(r),
            exports_of(build, one(r), ONLY_FOR_SEGMENTS));
    }
    add(build, KL_STEP_RUN, KL_GRAPH_NOW, last_of(unit), NONE);
    add(build, KL_STEP_BACK, KL_GRAPH_NOW, last_of(unit), NONE);
    add_others_back(build, unit);
}

/* The backward of a body. Its results are freed before, since only their gradients are needed; a retained graph may
 * have saved them, so then they are freed chunk by chunk. */
static void
add_body_back(KlBuild *build, const KlUnit *unit)
{
    KlGraph graph = unit->is_retained ? KL_GRAPH_RETAIN : KL_GRAPH_NOW;
    KlSlice left = exports_to_free(build, unit);
    KlSlice needs = unit->is_retained ? unit->needs : cheap_values_read_by(build, unit->runs);
    KlSlice by_chunk = unit->is_retained ? left : NONE;
    add_about(build, KL_STEP_FREE, unit->is_retained ? NONE : left);
    add(build, KL_STEP_LOOP, graph, unit->runs, by_chunk);
    add_about(build, KL_STEP_REMATERIALIZE, needs);
    if (unit->is_retained) {
        add(build, KL_STEP_BACK, graph, unit->runs, NONE);
    } else {
        add_again_and_back(build, unit);
    }
    add_about(build, KL_STEP_FREE, by_chunk);
    add(build, KL_STEP_TAKE, KL_GRAPH_NONE, unit->runs,
        exports_of(build, unit->runs, FOR_SEGMENTS));
    add_about(build, KL_STEP_FREE_STORAGE, needs);
    add(build, KL_STEP_END, graph, unit->runs, NONE);
}

static void
go_back(KlBuild *build)
{
    for (uint32_t u = build->n_units; u-- > 0;) {
        const KlUnit *unit = &build->units[u];
        if (unit->is_fused) {
            add(build, KL_STEP_CHECK, KL_GRAPH_NONE, unit->runs, NONE);
        } else if (!unit->is_body) {
            add_about(build, KL_STEP_FREE, exports_to_free(build, unit));
            add(build, KL_STEP_BARRIER_BACK, KL_GRAPH_NOW, unit->runs, NONE);
        } else if (unit->has_gradient) {
            recompute_inputs(build, u);
            add(build, KL_STEP_SEED, KL_GRAPH_NONE, unit->runs, NONE);
            add_body_back(build, unit);
        }
    }
}

/* -- the whole ----------------------------------------------------------------------------------------- */

KlStatus
kl_schedule_build(const KlTape *tape, const KlProgram *program, const KlPolicy *policy,
                  KlSchedule *schedule)
{
    size_t n_values = program->stages.n_values;
    KlScratch scratch = {0};
    KlBuild build = {.tape = tape, .program = program, .policy = policy, .schedule = schedule};
    memset(schedule, 0, sizeof(*schedule));
    build.units = kl_alloc_scratch(&scratch, program->n_staged, sizeof(KlUnit));
    build.facts = kl_alloc_scratch(&scratch, n_values, sizeof(KlFacts));
    build.is_needed = kl_alloc_scratch(&scratch, program->n_staged, sizeof(bool));
    build.marks = kl_alloc_scratch(&scratch, n_values, sizeof(uint8_t));
    build.policies = kl_alloc_scratch(&scratch, n_values, sizeof(uint8_t));
    schedule->cheap_set.number = kl_alloc_zeroed(n_values, sizeof(uint32_t));
    if (scratch.is_short || schedule->cheap_set.number == NULL) {
        build.status = KL_ERROR_MEMORY;
        goto done;
    }
    for (size_t v = 0; v < n_values; v++) {
        build.facts[v].unit = build.facts[v].run = build.facts[v].last_read = KL_NOWHERE;
    }
    kl_units_find(&build);
    go_forward(&build);
    if (policy->is_graph) {
        go_back(&build);
    }
done:
    kl_alloc_scratch_free(&scratch);
    if (build.status != KL_OK) {
        kl_schedule_fini(schedule);
    }
    return build.status;
}

void
kl_schedule_fini(KlSchedule *schedule)
{
    kl_alloc_free(schedule->steps);
    kl_alloc_free(schedule->values.ids);
    kl_alloc_free(schedule->cheap_set.values);
    kl_alloc_free(schedule->cheap_set.ids.ids);
    kl_alloc_free(schedule->cheap_set.number);
    memset(schedule, 0, sizeof(*schedule));
}
