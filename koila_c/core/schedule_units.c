/* SPDX-License-Identifier: Apache-2.0 */
/* schedule_units.c - finds the bodies and barriers of a program, and chooses where the results of each are stored. */
#include "schedule_units.h"

#include "alloc.h"

void
kl_units_add_value(KlBuild *build, KlValueId value)
{
    kl_program_push(&build->schedule->values, value, &build->status);
}

bool
kl_units_is_parts(const KlBuild *build, KlValueId value)
{
    const KlNode *maker = kl_tape_maker(build->tape, value);
    return maker != NULL && maker->mode == KL_MODE_REDUCE;
}

/* The most bodies that are fused: each of them runs the tail once more, on zeros. */
enum { FUSED_MAX = 16 };

/* Choose the bodies in which each chunk's backward follows its forward. That needs the gradients of the body's results
 * after its first chunk. A linear tail gives them: they depend on the results of no body. */
static void
find_fused(KlBuild *build)
{
    const KlStages *stages = &build->program->stages;
    uint32_t n_fused = 0;
    for (uint32_t u = build->n_units; u-- > 0;) {
        KlUnit *unit = &build->units[u];
        bool is_last = kl_units_run(build, unit, 0)->stage == stages->last_body;
        bool can_fuse = build->policy->is_graph && stages->is_tail_linear;
        unit->is_fused = can_fuse && is_last && unit->has_gradient && n_fused < FUSED_MAX;
        n_fused += unit->is_fused;
    }
}

static void
find_units(KlBuild *build)
{
    const KlProgram *program = build->program;
    for (uint32_t run = 0; run < program->n_staged; run = kl_program_end(program, run)) {
        KlUnit *unit = &build->units[build->n_units++];
        unit->runs = (KlSlice){.first = run, .n = kl_program_end(program, run) - run};
        unit->is_body = kl_program_is_body(&program->runs[run]);
        for (uint32_t i = 0; i < unit->runs.n; i++) {
            unit->has_gradient |= program->runs[run + i].has_gradient;
        }
    }
}

/* Whether a body has a backward that runs later, in a loop of its own. */
static bool
goes_back(const KlUnit *unit)
{
    return unit->is_body && unit->has_gradient && !unit->is_fused;
}

/* Note that run `r` of unit `u` makes its exports. */
static void
find_makers(KlBuild *build, uint32_t u, uint32_t r)
{
    const KlProgram *program = build->program;
    const KlRun *run = &program->runs[r];
    for (uint32_t i = 0; i < run->exports.n; i++) {
        KlFacts *facts = &build->facts[kl_program_export(build->program, run, i)];
        facts->unit = u;
        facts->run = r;
        facts->is_used_back = goes_back(&build->units[u]);
    }
    for (uint32_t i = 0; i < run->inner.n; i++) {
        build->facts[program->inner.ids[run->inner.first + i]].is_inner = true;
    }
}

/* Note how run `r` reads its imports, and that unit `u` is their last reader so far. */
static void
find_readers(KlBuild *build, uint32_t u, uint32_t r)
{
    const KlProgram *program = build->program;
    const KlRun *run = &program->runs[r];
    for (uint32_t i = 0; i < run->imports.n; i++) {
        const KlImport *import = kl_program_import(program, run, i);
        KlFacts *facts = &build->facts[import->value];
        bool is_crossing = facts->unit != KL_NOWHERE && facts->unit != u;
        facts->is_for_segments |= facts->unit == u;
        facts->last_read = is_crossing ? u : facts->last_read;
        facts->is_read_whole |= is_crossing && !kl_place_is_rows(&import->place);
        facts->is_used_back |= goes_back(&build->units[u]);
    }
    for (uint32_t i = 0; i < run->combined.n; i++) {
        KlNodeId id = program->combined.ids[run->combined.first + i];
        build->facts[build->tape->nodes[id].first_out].last_read = u;
    }
}

static void
find_crossing(KlBuild *build)
{
    for (int is_reading = 0; is_reading < 2; is_reading++) {
        for (uint32_t u = 0; u < build->n_units; u++) {
            KlSlice runs = build->units[u].runs;
            for (uint32_t r = runs.first; r < runs.first + runs.n; r++) {
                (is_reading ? find_readers : find_makers)(build, u, r);
            }
        }
    }
}

/* Whether a result of a body can be freed and recomputed (or offloaded): other bodies read it, only by rows, and
 * neither a hook nor retain_grad needs its whole gradient. */
static bool
can_be_freed(const KlBuild *build, KlValueId value)
{
    const KlFacts *facts = &build->facts[value];
    return !kl_units_is_parts(build, value) && !facts->is_inner &&
           kl_place_is_rows(&build->tape->values[value].meta.place) && !facts->is_read_whole &&
           !build->program->is_kept[value] && !kl_tape_is_looked_at(build->tape, value) &&
           facts->last_read != KL_NOWHERE;
}

/* Note which values are read outside the checkpoint whose calls make them. */
static void
find_open(KlBuild *build)
{
    const KlTape *tape = build->tape;
    const KlStages *stages = &build->program->stages;
    for (size_t i = 0; i < stages->n_nodes && build->program->is_checkpointed; i++) {
        const KlNode *node = &tape->nodes[i];
        for (uint32_t k = 0; k < node->n_inputs && stages->node_stage[i] != KL_STAGE_NONE; k++) {
            KlValueId value = tape->inputs[node->first_input + k].value;
            const KlNode *maker = kl_tape_maker(tape, value);
            bool is_inside = maker != NULL && maker->region == node->region;
            if (value != KL_ID_NONE && !is_inside) {
                build->facts[value].is_open = true;
            }
        }
    }
}

/* Return the policy of a result of a body for which `asked` is asked. What the user's checkpoints cover is recomputed,
 * unless it is offloaded. No fused body may be the last reader of a value without storage: nothing would be saved between its
 * forward and its backward. */
static uint8_t
policy_of(const KlBuild *build, KlValueId value, uint8_t asked)
{
    const KlFacts *facts = &build->facts[value];
    bool has_gradient = build->units[facts->unit].has_gradient;
    bool is_covered = build->program->is_checkpointed && has_gradient && !facts->is_open &&
                      build->tape->nodes[build->tape->values[value].node].region != 0;
    asked = is_covered && asked != KL_POLICY_OFFLOAD ? KL_POLICY_RECOMPUTE : asked;
    if (!can_be_freed(build, value) || (asked == KL_POLICY_RECOMPUTE && !has_gradient) ||
        (asked == KL_POLICY_REMATERIALIZE && build->units[facts->last_read].is_fused)) {
        return KL_POLICY_KEEP;
    }
    return asked;
}

/* Set the policies of the boundary values: those asked for, and KEEP beyond these. Return the number of values. */
static size_t
choose_policies(KlBuild *build, const uint8_t *asked, size_t n)
{
    size_t at = 0;
    for (uint32_t r = 0; r < build->program->n_staged; r++) {
        const KlRun *run = &build->program->runs[r];
        for (uint32_t i = 0; i < run->exports.n && kl_program_is_body(run); i++) {
            KlValueId value = kl_program_export(build->program, run, i);
            if (!build->facts[value].is_inner) {
                build->policies[value] = policy_of(build, value, at < n ? asked[at] : 0);
                at++;
            }
        }
    }
    return at;
}

/* Whether a body has a later backward, and all its inputs are near until then. */
static bool
is_near_to_its_backward(const KlBuild *build, const KlUnit *unit)
{
    bool is_near = !build->program->is_checkpointed && build->policy->is_graph && goes_back(unit) &&
                   unit->runs.n == 1;
    const KlRun *run = kl_units_run(build, unit, 0);
    for (uint32_t i = 0; i < run->imports.n && is_near; i++) {
        KlValueId value = kl_program_import(build->program, run, i)->value;
        is_near = build->policies[value] <= KL_POLICY_REMATERIALIZE;
    }
    return is_near;
}

/* A call of a retained graph takes about 4 KiB of the process for each chunk, in autograd's nodes and in koila's. */
#define BYTES_OF_A_CALL 4096
/* Retained graphs may take FEW_BYTES, or 1 / SMALL_PART of the body's results, which are kept in any case. */
#define FEW_BYTES (UINT64_C(1) << 20)
#define SMALL_PART 8

/* Whether the graphs of all chunks are small compared with their results. With many tiny chunks they are not. */
static bool
is_worth_it(const KlBuild *build, const KlRun *run)
{
    uint64_t left = 0, graphs = (uint64_t)build->policy->n_chunks * run->nodes.n * BYTES_OF_A_CALL;
    for (uint32_t i = 0; i < run->exports.n; i++) {
        KlValueId value = kl_program_export(build->program, run, i);
        const KlMeta *meta = &build->tape->values[value].meta;
        bool is_stored = !kl_units_is_parts(build, value) && kl_place_is_rows(&meta->place) &&
                         build->policies[value] <= KL_POLICY_REMATERIALIZE;
        left += is_stored ? (uint64_t)kl_meta_n_bytes(meta) : 0;
    }
    return graphs <= FEW_BYTES || graphs <= left / SMALL_PART;
}

static void
choose_retained(KlBuild *build)
{
    KlIds *values = &build->schedule->values, needs = {0};
    const KlRetained retained = {.tape = build->tape,
                                 .program = build->program,
                                 .policies = build->policies,
                                 .marks = build->marks,
                                 .cheap_set = &build->schedule->cheap_set,
                                 .status = &build->status};
    for (uint32_t u = 0; u < build->n_units && build->status == KL_OK; u++) {
        KlUnit *unit = &build->units[u];
        const KlRun *run = kl_units_run(build, unit, 0);
        size_t first = values->n;
        needs.n = 0;
        if (!is_near_to_its_backward(build, unit)) {
            continue;
        }
        kl_retained_find_cheap(&retained, unit->runs.first);
        unit->is_retained =
            kl_retained_find(&retained, run, values, &needs) && is_worth_it(build, run);
        values->n = unit->is_retained ? values->n : first;
        unit->to_recompute = kl_program_since(&build->schedule->values, first);
        first = values->n;
        for (size_t i = 0; i < needs.n && unit->is_retained; i++) {
            kl_units_add_value(build, needs.ids[i]);
        }
        unit->needs = kl_program_since(&build->schedule->values, first);
    }
    kl_alloc_free(needs.ids);
}

void
kl_units_find(KlBuild *build)
{
    find_units(build);
    find_fused(build);
    find_crossing(build);
    for (size_t i = 0; i < build->program->roots.n; i++) {
        build->facts[build->program->roots.ids[i]].is_root = true;
    }
    find_open(build);
    const KlPolicy *policy = build->policy;
    if (choose_policies(build, policy->values, policy->n_values) != policy->n_values) {
        choose_policies(build, NULL, 0);
    }
    choose_retained(build);
}
