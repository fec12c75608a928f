/* SPDX-License-Identifier: Apache-2.0 */
/* program.c - builds the runs of a staged program, one stage after the other. */
#include "program.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "alloc.h"
#include "segment.h"

/* The state of one build. After a failure `status` keeps the first failure, and push() does nothing. */
typedef struct Build {
    const KlTape *tape;
    const KlAsked *asked;
    KlProgram *program;
    KlStatus status;
    KlScratch scratch;
    uint32_t *first_reader; /* [n_values + 1] the start of a value's slice of `readers` */
    KlNodeId *readers;      /* [n_inputs] the nodes that read each value */
    uint32_t *first_at;     /* [n_stages + 1] the start of a stage's slice of `at` */
    KlNodeId *at;           /* [2 * n_nodes] the nodes of each stage, including late parts */
    bool *is_root;          /* [n_values] */
    uint32_t *last_use;  /* [n_values] the position of the last reader in this run, or UINT32_MAX */
    uint32_t *next_dead; /* [n_values] scratch: the next value that dies after the same node */
    uint32_t *made_in;   /* [n_values] serial_of the last run that makes it; 0: it has its number */
    uint32_t *given_in;  /* [n_imports] serial_of the last run that imports it */
    uint32_t *taken_in;  /* [n_nodes] serial_of the last run that contains it */
    uint32_t *written_in; /* [n_storages] serial_of the last run that writes it in place */
    KlIds stack;          /* scratch: of nodes, or of values */
    int64_t *kept;        /* [n_axes] scratch: the bytes that autograd saves for a stage's body */
    int64_t most_kept;    /* for the calls of one body */
} Build;

void
kl_program_push(KlIds *ids, uint32_t id, KlStatus *status)
{
    if (*status == KL_OK) {
        *status = kl_alloc_reserve((void **)&ids->ids, &ids->n_max, ids->n + 1, sizeof(uint32_t));
    }
    if (*status == KL_OK) {
        ids->ids[ids->n++] = id;
    }
}

static void
push(Build *build, KlIds *ids, uint32_t id)
{
    kl_program_push(ids, id, &build->status);
}

/* -- questions ---------------------------------------------------------------------------------------- */

/* Return the staged node that makes a value; KL_ID_NONE: the value is a leaf here. */
static KlNodeId
maker_of(const Build *build, KlValueId value)
{
    const KlStages *stages = &build->program->stages;
    KlNodeId id = stages->is_leaf[value] ? KL_ID_NONE : build->tape->values[value].node;
    return id != KL_ID_NONE && stages->node_stage[id] != KL_STAGE_NONE ? id : KL_ID_NONE;
}

static bool
is_at_stage(const KlStages *stages, KlNodeId id, uint32_t stage)
{
    return stages->node_stage[id] == stage || stages->late_stage[id] == stage;
}

static KlAxisId
axis_of(const Build *build, KlNodeId id)
{
    return kl_tape_axis_find(build->tape, build->tape->nodes[id].axis);
}

/* Return the index of the first input that a node reads in `stage`. An early part of a reduction reads only the sizes of
 * its first input, the logits; a node that is made by sizes alone reads no input. */
static uint32_t
first_read(const Build *build, KlNodeId id, uint32_t stage)
{
    const KlNode *node = &build->tape->nodes[id];
    if (node->is_open) {
        return node->n_inputs;
    }
    if (node->mode != KL_MODE_REDUCE || build->program->stages.node_stage[id] == stage) {
        return 0;
    }
    uint32_t k = 0;
    while (k < node->n_inputs && build->tape->inputs[node->first_input + k].value == KL_ID_NONE) {
        k++;
    }
    return k + 1;
}

/* Whether a node belongs to a run, by its stage, its axis and its segment. */
static bool
is_in_run(const Build *build, KlNodeId id, const KlRun *run)
{
    const KlStages *stages = &build->program->stages;
    bool is_of_body = is_at_stage(stages, id, run->stage) && axis_of(build, id) == run->axis;
    return is_of_body &&
           run->segment == (stages->node_stage[id] == run->stage ? stages->segment[id] : 0);
}

/* Whether a node gathers a value: reads all rows of it, although chunks make it. */
static bool
gathers(const Build *build, KlNodeId id, KlValueId value)
{
    const KlNode *node = &build->tape->nodes[id];
    bool is_gathered = false;
    for (uint32_t k = 0; k < node->n_inputs && !is_gathered; k++) {
        is_gathered = build->tape->inputs[node->first_input + k].value == value &&
                      kl_stage_is_gathered(build->tape, &build->program->stages, node, k);
    }
    return is_gathered;
}

/* Whether a value is read or kept outside a run (`is_beside_body`: outside all segments of its body). Other bodies that
 * read cheap work on data do not count, since they run it again. */
static bool
is_read_elsewhere(const Build *build, KlValueId value, const KlRun *run, bool is_beside_body)
{
    const KlProgram *program = build->program;
    if (program->is_kept[value] || kl_tape_is_looked_at(build->tape, value)) {
        return true;
    }
    KlNodeId maker = maker_of(build, value);
    bool is_data = maker != KL_ID_NONE && program->stages.is_data[maker];
    for (uint32_t i = build->first_reader[value]; i < build->first_reader[value + 1]; i++) {
        KlNodeId reader = build->readers[i];
        if (build->tape->nodes[reader].mode == KL_MODE_ONCE || gathers(build, reader, value)) {
            return true;
        }
        bool is_here = is_beside_body ? is_at_stage(&program->stages, reader, run->stage) &&
                                            axis_of(build, reader) == run->axis
                                      : is_in_run(build, reader, run);
        if (!is_data && !is_here) {
            return true;
        }
    }
    return false;
}

/* Whether a barrier's result is needed after the barrier; if not, only the barrier's graph may keep it. */
static bool
is_read_beyond(const Build *build, KlValueId value, const KlRun *barrier)
{
    bool is_read = build->program->is_kept[value] || build->is_root[value] ||
                   kl_tape_is_looked_at(build->tape, value);
    for (uint32_t i = build->first_reader[value]; i < build->first_reader[value + 1]; i++) {
        KlNodeId reader = build->readers[i];
        is_read = is_read || build->tape->nodes[reader].mode != KL_MODE_ONCE ||
                  build->program->stages.node_stage[reader] != barrier->stage;
    }
    return is_read;
}

/* -- what is looked up -------------------------------------------------------------------------------- */

/* Fill `readers` and `first_reader`: count the readers of each value, then store them at these offsets. */
static void
find_readers(Build *build)
{
    const KlTape *tape = build->tape;
    uint32_t *first = build->first_reader;
    for (int is_placing = 0; is_placing < 2; is_placing++) {
        for (size_t i = build->program->stages.n_nodes; i-- > 0;) {
            const KlNode *node = &tape->nodes[i];
            bool is_staged = build->program->stages.node_stage[i] != KL_STAGE_NONE;
            for (uint32_t k = 0; k < node->n_inputs && is_staged && !node->is_open; k++) {
                KlValueId value = tape->inputs[node->first_input + k].value;
                if (value == KL_ID_NONE) {
                    continue;
                }
                if (is_placing) {
                    build->readers[--first[value]] = (KlNodeId)i;
                } else {
                    first[value]++;
                }
            }
        }
        for (size_t v = 1; !is_placing && v <= tape->n_values; v++) {
            first[v] += first[v - 1];
        }
    }
}

static void
find_nodes_of_stages(Build *build)
{
    const KlStages *stages = &build->program->stages;
    uint32_t *first = build->first_at;
    for (int is_placing = 0; is_placing < 2; is_placing++) {
        for (size_t i = stages->n_nodes; i-- > 0;) {
            uint32_t at[2] = {stages->node_stage[i], stages->late_stage[i]};
            for (int k = 0; k < 2 && at[0] != KL_STAGE_NONE; k++) {
                if (at[k] == KL_STAGE_NONE || (k == 1 && at[1] == at[0])) {
                    continue;
                }
                if (is_placing) {
                    build->at[--first[at[k]]] = (KlNodeId)i;
                } else {
                    first[at[k]]++;
                }
            }
        }
        for (uint32_t s = 1; !is_placing && s <= stages->n_stages; s++) {
            first[s] += first[s - 1];
        }
    }
}

/* List the roots and what the user's lazy tensors hold, of which all rows must exist at the end. If several lazy tensors
 * share a storage, keep its base: their numbers are views of it, so that they share memory as in eager. */
static void
note_asked(Build *build)
{
    const KlTape *tape = build->tape;
    const KlAsked *asked = build->asked;
    for (size_t i = 0; i < asked->goal.n_roots; i++) {
        push(build, &build->program->roots, asked->goal.roots[i]);
    }
    for (size_t i = 0; i < asked->n_reached; i++) {
        KlValueId value = asked->reached[i];
        const KlValue *v = &tape->values[value];
        KlValueId base = kl_tape_base(tape, value);
        bool is_view = v->view_of != KL_ID_NONE;
        if (maker_of(build, value) == KL_ID_NONE) {
            continue;
        }
        push(build, &build->program->reached, value);
        bool is_there = asked->has_number[base] || maker_of(build, base) != KL_ID_NONE;
        bool is_shared = is_view && asked->n_handles[v->storage] >= 2;
        bool is_made = !is_view || !asked->has_real[base];
        build->program->is_kept[is_shared && is_there ? base : value] |= is_made;
    }
}

/* -- one run ------------------------------------------------------------------------------------------ */

static uint32_t
serial_of(const Build *build)
{
    return (uint32_t)build->program->n_runs + 1;
}

/* For each input of the node at `position`: note its last use, if this run makes it, else import it. */
static void
note_reads(Build *build, const KlRun *run, KlNodeId id, uint32_t position)
{
    const KlNode *node = &build->tape->nodes[id];
    for (uint32_t k = first_read(build, id, run->stage); k < node->n_inputs; k++) {
        KlValueId value = build->tape->inputs[node->first_input + k].value;
        uint32_t import = build->program->stages.import_of[node->first_input + k];
        if (value == KL_ID_NONE) {
            continue;
        }
        bool is_gathered = kl_stage_is_gathered(build->tape, &build->program->stages, node, k);
        if (build->made_in[value] == serial_of(build) && !is_gathered) {
            build->last_use[value] = position;
        } else if (build->given_in[import] != serial_of(build)) {
            build->given_in[import] = serial_of(build);
            push(build, &build->program->imports, import);
        }
    }
}

/* Add the results of a node that other runs read to the exports, and note whether the node has a gradient. */
static void
note_leaving(Build *build, KlRun *run, KlNodeId id, uint32_t parts)
{
    const KlProgram *program = build->program;
    const KlNode *node = &build->tape->nodes[id];
    bool is_of_run = program->stages.node_stage[id] == run->stage;
    bool is_body = kl_program_is_body(run);
    for (uint32_t k = 0; k < node->n_outs; k++) {
        KlValueId out = node->first_out + k;
        if (program->stages.is_leaf[out]) {
            continue; /* it has its number already; the node runs for another result */
        }
        bool is_read =
            is_body ? is_read_elsewhere(build, out, run, false) : is_read_beyond(build, out, run);
        bool is_leaving = parts != 0 ? k == 0 : is_of_run && (is_read || build->is_root[out]);
        bool is_inner = is_leaving && is_body && parts == 0 && !build->is_root[out] &&
                        !is_read_elsewhere(build, out, run, true);
        program->is_unread[out] = is_leaving && parts == 0 && !is_read;
        if (is_leaving) {
            push(build, &build->program->exports, out);
        }
        if (is_inner) {
            push(build, &build->program->inner, out);
        }
    }
    /* An early part of a reduction reads labels alone, so it has no gradient. */
    run->has_gradient = run->has_gradient ||
                        (is_of_run && kl_stage_has_gradient(build->tape, &program->stages, node));
}

/* Note the imports of which the run reads only sizes, and no numbers. */
static void
note_shadows(Build *build, const KlRun *run)
{
    const KlProgram *program = build->program;
    for (int is_open = 0; is_open < 2; is_open++) {
        for (uint32_t i = 0; i < run->nodes.n; i++) {
            KlNodeId id = program->nodes.ids[run->nodes.first + i];
            const KlNode *node = &build->tape->nodes[id];
            bool is_early = program->parts.ids[run->nodes.first + i] != 0 &&
                            program->stages.node_stage[id] != run->stage;
            if (is_open ? node->is_open : is_early) {
                uint32_t import = program->stages.import_of[node->first_input];
                if (build->given_in[import] != serial_of(build)) {
                    push(build, &build->program->shadows, import);
                }
            }
        }
    }
}

/* Note after which node each value dies: its last reader. Exports and values whose storage the run writes do not die. */
static void
note_deaths(Build *build, const KlRun *run)
{
    KlProgram *program = build->program;
    const KlTape *tape = build->tape;
    KlIds *by_reader = &build->stack; /* values, by position of their last reader: linked lists */
    by_reader->n = 0;
    for (uint32_t i = 0; i < run->nodes.n; i++) {
        push(build, by_reader, KL_ID_NONE);
    }
    for (uint32_t i = 0; i < run->exports.n; i++) {
        build->last_use[kl_program_export(program, run, i)] = UINT32_MAX;
    }
    for (uint32_t i = run->nodes.n; i-- > 0 && build->status == KL_OK;) {
        const KlNode *node = &tape->nodes[program->nodes.ids[run->nodes.first + i]];
        for (uint32_t k = node->n_outs; k-- > 0;) {
            KlValueId out = node->first_out + k;
            uint32_t at = build->last_use[out];
            bool is_written = build->written_in[tape->values[out].storage] == serial_of(build);
            build->last_use[out] = UINT32_MAX;
            if (at != UINT32_MAX && !is_written) {
                build->next_dead[out] = by_reader->ids[at];
                by_reader->ids[at] = out;
            }
        }
    }
    for (uint32_t i = 0; i < run->nodes.n && build->status == KL_OK; i++) {
        for (KlValueId v = by_reader->ids[i]; v != KL_ID_NONE; v = build->next_dead[v]) {
            push(build, &program->dropped, v);
        }
        push(build, &program->drops, (uint32_t)program->dropped.n);
    }
}

/* Note that this run makes the results of a node, unless they are leaves: those have their numbers already. */
static void
note_made(Build *build, const KlNode *node)
{
    for (KlValueId out = node->first_out; out < node->first_out + node->n_outs; out++) {
        build->made_in[out] = build->program->stages.is_leaf[out] ? 0 : serial_of(build);
    }
}

/* Complete a run whose nodes are listed: find its imports, exports and deaths, and append it to the program. */
static void
finish_run(Build *build, KlRun *run)
{
    KlProgram *program = build->program;
    const KlTape *tape = build->tape;
    const KlProgram before = *program;
    uint32_t serial = serial_of(build);
    if (build->status != KL_OK) {
        return;
    }
    run->nodes = kl_program_since(&program->nodes, run->nodes.first);
    for (uint32_t i = 0; i < run->nodes.n; i++) {
        KlNodeId id = program->nodes.ids[run->nodes.first + i];
        const KlNode *node = &tape->nodes[id];
        for (KlValueId out = node->first_out; out < node->first_out + node->n_outs; out++) {
            build->last_use[out] = i;
            const bool is_part = program->parts.ids[run->nodes.first + i] != 0;
            build->made_in[out] = is_part || program->stages.is_leaf[out] ? 0 : serial;
        }
        if (node->writes != 0) {
            build->written_in[tape->values[node->first_out].storage] = serial;
        }
    }
    for (uint32_t i = 0; i < run->combined.n; i++) {
        note_made(build, &tape->nodes[program->combined.ids[run->combined.first + i]]);
    }
    for (uint32_t i = 0; i < run->nodes.n; i++) {
        KlNodeId id = program->nodes.ids[run->nodes.first + i];
        note_reads(build, run, id, i);
        note_leaving(build, run, id, program->parts.ids[run->nodes.first + i]);
    }
    run->imports = kl_program_since(&program->imports, before.imports.n);
    run->exports = kl_program_since(&program->exports, before.exports.n);
    run->inner = kl_program_since(&program->inner, before.inner.n);
    note_shadows(build, run);
    run->shadows = kl_program_since(&program->shadows, before.shadows.n);
    note_deaths(build, run);
    if (build->status == KL_OK) {
        build->status = KL_RESERVE(program, runs, program->n_runs + 1);
    }
    if (build->status == KL_OK) {
        program->runs[program->n_runs++] = *run;
    }
}

static KlRun
run_at(const KlProgram *program, uint32_t stage, KlAxisId axis)
{
    return (KlRun){.stage = stage,
                   .axis = axis,
                   .nodes.first = (uint32_t)program->nodes.n,
                   .combined.first = (uint32_t)program->combined.n};
}

/* Add a node to the run, with the partial results that it computes in this stage if it is a reduction. */
static void
add_node(Build *build, KlNodeId id, uint32_t stage)
{
    const KlNode *node = &build->tape->nodes[id];
    const KlStages *stages = &build->program->stages;
    uint32_t all = (1u << kl_ops_reductions[node->reduce].n_parts) - 1;
    uint32_t here =
        (stages->node_stage[id] == stage ? 1u : 0) | (stages->late_stage[id] == stage ? 2u : 0);
    uint32_t parts = stages->late_stage[id] == KL_STAGE_NONE ? all : here;
    push(build, &build->program->nodes, id);
    push(build, &build->program->parts, node->mode == KL_MODE_REDUCE ? parts : 0);
}

static void
build_barrier(Build *build, uint32_t stage)
{
    KlProgram *program = build->program;
    const KlStages *stages = &program->stages;
    KlRun run = run_at(program, stage, KL_ID_NONE);
    uint32_t first_before = stage > 0 ? build->first_at[stage - 1] : build->first_at[stage];
    for (uint32_t i = first_before; i < build->first_at[stage]; i++) {
        KlNodeId id = build->at[i];
        if (build->tape->nodes[id].mode == KL_MODE_REDUCE && stages->node_stage[id] + 1 == stage) {
            push(build, &program->combined, id);
        }
    }
    run.combined = kl_program_since(&program->combined, run.combined.first);
    for (uint32_t i = build->first_at[stage]; i < build->first_at[stage + 1]; i++) {
        KlNodeId id = build->at[i];
        if (build->tape->nodes[id].mode == KL_MODE_ONCE && stages->node_stage[id] == stage) {
            add_node(build, id, stage);
        }
    }
    finish_run(build, &run);
}

static int
compare_ids(const void *left, const void *right)
{
    uint32_t a = *(const uint32_t *)left, b = *(const uint32_t *)right;
    return a < b ? -1 : a > b;
}

/* Add a node to `taken`, and with it the cheap work on data that it depends on, which may run in other bodies, too. */
static void
take(Build *build, KlNodeId id, uint32_t stage, KlIds *taken)
{
    KlIds *stack = &build->stack;
    stack->n = 0;
    push(build, stack, id);
    while (stack->n > 0 && build->status == KL_OK) {
        KlNodeId next = stack->ids[--stack->n];
        const KlNode *node = &build->tape->nodes[next];
        if (build->taken_in[next] == serial_of(build)) {
            continue;
        }
        build->taken_in[next] = serial_of(build);
        push(build, taken, next);
        for (uint32_t k = first_read(build, next, stage); k < node->n_inputs; k++) {
            KlValueId value = build->tape->inputs[node->first_input + k].value;
            KlNodeId maker = value != KL_ID_NONE ? maker_of(build, value) : KL_ID_NONE;
            if (maker != KL_ID_NONE && build->program->stages.is_data[maker] &&
                !kl_stage_is_gathered(build->tape, &build->program->stages, node, k)) {
                push(build, stack, maker);
            }
        }
    }
}

/* Whether a node of this stage must run there by itself. Cheap work on data must only if its result is exported;
 * otherwise take() adds it for its readers. */
static bool
is_sink(const Build *build, KlNodeId id, const KlRun *run)
{
    const KlNode *node = &build->tape->nodes[id];
    bool is_needed = !build->program->stages.is_data[id];
    for (uint32_t k = 0; k < node->n_outs && !is_needed; k++) {
        KlValueId out = node->first_out + k;
        is_needed = build->is_root[out] || is_read_elsewhere(build, out, run, false);
    }
    return is_needed;
}

static void
build_segment(Build *build, uint32_t stage, KlAxisId axis, uint32_t segment)
{
    KlProgram *program = build->program;
    KlRun run = run_at(program, stage, axis);
    KlIds taken = {0};
    run.segment = segment;
    for (uint32_t i = build->first_at[stage]; i < build->first_at[stage + 1]; i++) {
        KlNodeId id = build->at[i];
        bool is_here = build->tape->nodes[id].mode != KL_MODE_ONCE && is_in_run(build, id, &run);
        if (is_here && is_sink(build, id, &run)) {
            take(build, id, stage, &taken);
        }
    }
    size_t n_sorted = taken.n > 0; /* most often all are: only cheap work on data is taken late */
    while (n_sorted < taken.n && taken.ids[n_sorted - 1] < taken.ids[n_sorted]) {
        n_sorted++;
    }
    if (n_sorted < taken.n) {
        qsort(taken.ids, taken.n, sizeof(uint32_t), compare_ids);
    }
    for (size_t i = 0; i < taken.n; i++) {
        add_node(build, taken.ids[i], stage);
    }
    if (taken.n > 0) {
        finish_run(build, &run);
    }
    kl_alloc_free(taken.ids);
}

/* Whether the rows of a value are sorted within a chunk (NOTE [orders] in rules_order.c): in other chunks the order would
 * be another one. */
static bool
is_ordered(const KlTape *tape, KlValueId value)
{
    const KlMeta *meta = value != KL_ID_NONE ? &tape->values[value].meta : NULL;
    return meta != NULL &&
           (meta->role != KL_ROLE_NONE ||
            (kl_place_is_rows(&meta->place) && tape->orders[meta->place.axis].of != KL_ID_NONE));
}

/* Whether a node can belong to a head that runs in pieces, that is, on other rows at a time than its body. It must not
 * draw or write, nor read rows of another body or values made for chunks alone, and no other body may read its rows. */
static bool
can_be_of_head(const Build *build, KlNodeId id, uint32_t stage, KlAxisId axis)
{
    const KlStages *stages = &build->program->stages;
    const KlNode *node = &build->tape->nodes[id];
    bool is_able = !node->is_random && node->writes == 0 && node->leaf_writes == 0 &&
                   !node->is_open &&
                   (stages->late_stage[id] == KL_STAGE_NONE || stages->late_stage[id] == stage ||
                    stages->late_stage[id] == KL_STAGE_DATA);
    for (uint32_t k = 0; k < node->n_inputs && is_able; k++) {
        KlValueId value = build->tape->inputs[node->first_input + k].value;
        KlNodeId maker = value != KL_ID_NONE ? maker_of(build, value) : KL_ID_NONE;
        is_able = !is_ordered(build->tape, value);
        bool is_made = maker != KL_ID_NONE && build->tape->nodes[maker].mode == KL_MODE_ROWS &&
                       !stages->is_data[maker];
        bool is_for_chunks = maker != KL_ID_NONE && build->tape->nodes[maker].is_for_chunks;
        is_able = is_able && !is_for_chunks &&
                  (!is_made || stages->node_stage[maker] == stage ||
                   kl_stage_is_gathered(build->tape, stages, node, k));
    }
    for (KlValueId out = node->first_out; out < node->first_out + node->n_outs; out++) {
        is_able = is_able && !build->tape->values[out].is_hooked && !is_ordered(build->tape, out);
        for (uint32_t i = build->first_reader[out]; i < build->first_reader[out + 1]; i++) {
            KlNodeId reader = build->readers[i];
            is_able = is_able &&
                      (build->tape->nodes[reader].mode == KL_MODE_ONCE ||
                       (stages->node_stage[reader] == stage && axis_of(build, reader) == axis));
        }
    }
    return is_able;
}

/* Whether the early parts of reductions (label counts) allow pieces. They are computed on the same rows as the sums of
 * their losses, so these losses must be in the head, segment 1. Calls that only chunks need (is_for_chunks) must run on
 * the chunks of their body, so there must be none. */
static bool
is_counted_for_head(const Build *build, uint32_t stage, KlAxisId axis)
{
    const KlStages *stages = &build->program->stages;
    bool is_so = true;
    for (uint32_t i = build->first_at[KL_STAGE_DATA]; i < build->first_at[KL_STAGE_DATA + 1]; i++) {
        KlNodeId id = build->at[i];
        bool is_part = stages->late_stage[id] == KL_STAGE_DATA && axis_of(build, id) == axis;
        bool is_of_head = stages->node_stage[id] == stage && stages->segment[id] == 1;
        is_so = is_so && (!is_part || is_of_head) && !build->tape->nodes[id].is_for_chunks;
    }
    return is_so;
}

/* Find the most bytes that autograd saves for the calls of one body. */
static void
find_most_kept(Build *build)
{
    const KlStages *stages = &build->program->stages;
    for (uint32_t stage = 0; stage < stages->n_stages; stage++) {
        for (uint32_t i = build->first_at[stage]; i < build->first_at[stage + 1]; i++) {
            const KlNode *node = &build->tape->nodes[build->at[i]];
            KlAxisId axis = axis_of(build, build->at[i]);
            if (node->mode != KL_MODE_ONCE && stages->node_stage[build->at[i]] == stage &&
                axis != KL_ID_NONE && kl_stage_has_gradient(build->tape, stages, node)) {
                build->kept[axis] += kl_segment_kept(build->tape, build->at[i]);
                if (build->kept[axis] > build->most_kept) {
                    build->most_kept = build->kept[axis];
                }
            }
        }
        memset(build->kept, 0, build->tape->n_axes * sizeof(int64_t));
    }
}

/* Cut the first `n` nodes of a body into segments: at the user's checkpoints, or into `n_segments` if that is more. A
 * body that saves less than the largest is cut into fewer, of the same bytes: more would recompute it for nothing. */
static void
cut_nodes(Build *build, const KlIds *nodes, size_t n, uint32_t n_segments)
{
    uint32_t *segment = build->program->stages.segment, n_regions = 0;
    double kept = 0;
    for (size_t i = 0; i < n; i++) {
        kept += (double)kl_segment_kept(build->tape, nodes->ids[i]);
    }
    if (kept < (double)build->most_kept) {
        n_segments = (uint32_t)ceil(n_segments * kept / (double)build->most_kept);
    }
    if (build->program->is_checkpointed) {
        build->status = kl_segment_regions(build->tape, nodes->ids, n, segment, &n_regions);
    }
    if (build->status == KL_OK && n_segments > 1 && n_segments > n_regions) {
        build->status = kl_segment_cut(build->tape, nodes->ids, n, n_segments, segment);
    }
}

/* Cut a body with a linear tail before its head, if the head can run in pieces, and the rest into segments. */
static void
cut_head(Build *build, uint32_t stage, KlAxisId axis, const KlIds *nodes)
{
    KlStages *stages = &build->program->stages;
    size_t first = nodes->n;
    while (first > 0 && can_be_of_head(build, nodes->ids[first - 1], stage, axis)) {
        first--;
    }
    uint32_t n_before = build->asked->n_segments > 1 ? build->asked->n_segments : 1;
    build->status =
        kl_segment_head(build->tape, nodes->ids, nodes->n, n_before + 1, stages->segment, &first);
    for (size_t i = 0; i < nodes->n; i++) {
        stages->segment[nodes->ids[i]] = i >= first;
    }
    bool is_able = build->status == KL_OK && is_counted_for_head(build, stage, axis);
    for (size_t i = first; i < nodes->n && !is_able; i++) {
        stages->segment[nodes->ids[i]] = 0;
    }
    if (!is_able || n_before <= 1 || first == nodes->n) {
        return;
    }
    cut_nodes(build, nodes, first, n_before);
    uint32_t last = stages->segment[nodes->ids[first - 1]]; /* a head is never a whole body */
    for (size_t i = first; i < nodes->n; i++) {
        stages->segment[nodes->ids[i]] = last + 1;
    }
}

/* Assign the nodes of a body to segments and return the number of segments. */
static uint32_t
cut_body(Build *build, uint32_t stage, KlAxisId axis)
{
    KlStages *stages = &build->program->stages;
    KlIds nodes = {0};
    bool has_gradient = false;
    uint32_t n_segments = 1;
    for (uint32_t i = build->first_at[stage]; i < build->first_at[stage + 1]; i++) {
        KlNodeId id = build->at[i];
        const KlNode *node = &build->tape->nodes[id];
        if (node->mode != KL_MODE_ONCE && stages->node_stage[id] == stage &&
            axis_of(build, id) == axis) {
            push(build, &nodes, id);
            has_gradient = has_gradient || kl_stage_has_gradient(build->tape, stages, node);
        }
    }
    bool has_head = build->asked->is_headed && stage == stages->last_body &&
                    stages->is_tail_linear &&
                    (build->asked->n_segments > 1 || !build->program->is_checkpointed);
    if (build->status == KL_OK && has_gradient && has_head) {
        cut_head(build, stage, axis, &nodes);
    } else if (build->status == KL_OK && has_gradient) {
        cut_nodes(build, &nodes, nodes.n, build->asked->n_segments);
    }
    for (size_t i = 0; i < nodes.n; i++) {
        uint32_t segment = stages->segment[nodes.ids[i]];
        n_segments = segment >= n_segments ? segment + 1 : n_segments;
    }
    kl_alloc_free(nodes.ids);
    return n_segments;
}

/* Build a body for each axis over which a stage has calls, in the order of the axes. */
static void
build_bodies(Build *build, uint32_t stage)
{
    const bool is_cut =
        build->asked->n_segments > 1 || build->asked->is_headed || build->program->is_checkpointed;
    KlAxisId last = KL_ID_NONE; /* none yet */
    for (;;) {
        KlAxisId next = KL_ID_NONE;
        for (uint32_t i = build->first_at[stage]; i < build->first_at[stage + 1]; i++) {
            KlAxisId axis = axis_of(build, build->at[i]);
            bool is_after = last == KL_ID_NONE || axis > last;
            if (build->tape->nodes[build->at[i]].mode != KL_MODE_ONCE && axis != KL_ID_NONE &&
                is_after && axis < next) {
                next = axis;
            }
        }
        if (next == KL_ID_NONE) {
            return;
        }
        uint32_t n_segments = is_cut ? cut_body(build, stage, next) : 1;
        for (uint32_t i = 0; i < n_segments; i++) {
            build_segment(build, stage, next, i);
        }
        last = next;
    }
}

/* -- the whole ---------------------------------------------------------------------------------------- */

static void
allocate(Build *build)
{
    const KlTape *tape = build->tape;
    const KlStages *stages = &build->program->stages;
    KlScratch *scratch = &build->scratch;
    build->first_reader = kl_alloc_scratch(scratch, tape->n_values + 1, sizeof(uint32_t));
    build->readers = kl_alloc_scratch(scratch, tape->n_inputs, sizeof(KlNodeId));
    build->first_at = kl_alloc_scratch(scratch, (size_t)stages->n_stages + 1, sizeof(uint32_t));
    build->at = kl_alloc_scratch(scratch, 2 * tape->n_nodes, sizeof(KlNodeId));
    build->is_root = kl_alloc_scratch(scratch, tape->n_values, sizeof(bool));
    build->last_use = kl_alloc_scratch(scratch, tape->n_values, sizeof(uint32_t));
    build->next_dead = kl_alloc_scratch(scratch, tape->n_values, sizeof(uint32_t));
    build->made_in = kl_alloc_scratch(scratch, tape->n_values, sizeof(uint32_t));
    build->given_in = kl_alloc_scratch(scratch, stages->n_imports, sizeof(uint32_t));
    build->taken_in = kl_alloc_scratch(scratch, tape->n_nodes, sizeof(uint32_t));
    build->written_in = kl_alloc_scratch(scratch, tape->n_storages, sizeof(uint32_t));
    build->kept = kl_alloc_scratch(scratch, tape->n_axes, sizeof(int64_t));
    build->program->is_kept = kl_alloc_zeroed(2 * tape->n_values, sizeof(bool));
    build->program->is_unread = build->program->is_kept + tape->n_values;
    if (scratch->is_short || build->program->is_kept == NULL) {
        build->status = KL_ERROR_MEMORY;
    }
}

/* Take what cuts do not change from the program that is cut anew; it stays the owner (n_max is 0). */
static KlStatus
share(const KlProgram *staged, KlProgram *program)
{
    KlStages *stages = &program->stages;
    *stages = staged->stages;
    stages->blocks = (KlScratch){0};
    stages->n_imports_max = 0;
    stages->segment = kl_alloc_scratch(&stages->blocks, stages->n_nodes, sizeof(uint32_t));
    program->reached = (KlIds){.ids = staged->reached.ids, .n = staged->reached.n};
    program->roots = (KlIds){.ids = staged->roots.ids, .n = staged->roots.n};
    return !stages->blocks.is_short ? KL_OK : KL_ERROR_MEMORY;
}

KlStatus
kl_program_build(const KlTape *tape, const KlAsked *asked, KlProgram *program)
{
    memset(program, 0, sizeof(*program));
    Build build = {.tape = tape, .asked = asked, .program = program};
    build.status = asked->staged != NULL ? share(asked->staged, program)
                                         : kl_stage_build(tape, &asked->goal, &program->stages);
    program->is_checkpointed = tape->has_regions && asked->n_segments > 0;
    if (build.status == KL_OK) {
        allocate(&build);
    }
    if (build.status != KL_OK) {
        goto done;
    }
    memset(build.last_use, 0xff, tape->n_values * sizeof(uint32_t));
    if (asked->staged != NULL) {
        memcpy(program->is_kept, asked->staged->is_kept, program->stages.n_values);
    } else {
        note_asked(&build);
    }
    for (size_t i = 0; i < program->roots.n; i++) {
        build.is_root[program->roots.ids[i]] = true;
    }
    find_readers(&build);
    find_nodes_of_stages(&build);
    if (asked->n_segments > 1) {
        find_most_kept(&build);
    }
    for (uint32_t stage = 0; stage < program->stages.n_stages; stage++) {
        (kl_stage_is_body(stage) ? build_bodies : build_barrier)(&build, stage);
    }
    program->n_staged = program->n_runs;
done:
    kl_alloc_free(build.stack.ids);
    kl_alloc_scratch_free(&build.scratch);
    if (build.status != KL_OK) {
        kl_program_fini(program);
    }
    return build.status;
}

/* -- a part of a barrier -------------------------------------------------------------------------------- */

static void
add_differentiated(Build *build, KlNodeId id)
{
    KlProgram *program = build->program;
    const KlNode *node = &build->tape->nodes[id];
    if (!kl_stage_has_gradient(build->tape, &program->stages, node)) {
        return;
    }
    push(build, &program->nodes, id);
    push(build, &program->parts, 0);
    push(build, &program->drops, (uint32_t)program->dropped.n);
    note_made(build, node);
}

KlStatus
kl_program_add_gradient_part(const KlTape *tape, KlProgram *program, uint32_t run,
                             const bool *is_made, uint32_t *added)
{
    const KlRun barrier = program->runs[run];
    const KlProgram before = *program;
    Build build = {.tape = tape, .program = program};
    KlRun part = run_at(program, barrier.stage, barrier.axis);
    part.shadows.first = (uint32_t)program->shadows.n;
    build.made_in = kl_alloc_scratch(&build.scratch, tape->n_values, sizeof(uint32_t));
    build.last_use = kl_alloc_scratch(&build.scratch, tape->n_values, sizeof(uint32_t));
    build.given_in = kl_alloc_scratch(&build.scratch, program->stages.n_imports, sizeof(uint32_t));
    if (build.scratch.is_short) {
        build.status = KL_ERROR_MEMORY;
        goto done;
    }
    build.status = KL_RESERVE(program, runs, program->n_runs + 1);
    for (uint32_t i = 0; i < barrier.combined.n; i++) {
        KlNodeId id = program->combined.ids[barrier.combined.first + i];
        const KlNode *node = &tape->nodes[id];
        for (uint32_t k = 0; is_made[node->first_out] && k < node->n_outs; k++) {
            build.made_in[node->first_out + k] = serial_of(&build);
        }
        if (is_made[node->first_out]) {
            push(&build, &program->combined, id);
        }
    }
    part.combined = kl_program_since(&program->combined, part.combined.first);
    for (uint32_t i = 0; i < barrier.nodes.n; i++) {
        add_differentiated(&build, program->nodes.ids[barrier.nodes.first + i]);
    }
    part.nodes = kl_program_since(&program->nodes, part.nodes.first);
    for (uint32_t i = 0; i < barrier.exports.n; i++) {
        KlValueId value = kl_program_export(program, &barrier, i);
        if (build.made_in[value] == serial_of(&build)) {
            push(&build, &program->exports, value);
        }
    }
    part.exports = kl_program_since(&program->exports, before.exports.n);
    for (uint32_t i = 0; i < part.nodes.n; i++) {
        note_reads(&build, &part, program->nodes.ids[part.nodes.first + i], i);
    }
    part.imports = kl_program_since(&program->imports, before.imports.n);
    if (build.status == KL_OK) {
        *added = (uint32_t)program->n_runs;
        program->runs[program->n_runs++] = part;
    }
done:
    if (build.status != KL_OK) {
        program->nodes.n = before.nodes.n;
        program->parts.n = before.parts.n;
        program->drops.n = before.drops.n;
        program->imports.n = before.imports.n;
        program->exports.n = before.exports.n;
        program->combined.n = before.combined.n;
    }
    kl_alloc_scratch_free(&build.scratch);
    return build.status;
}

void
kl_program_fini(KlProgram *program)
{
    KlIds *lists[] = {&program->nodes,   &program->parts,   &program->drops, &program->dropped,
                      &program->imports, &program->exports, &program->inner, &program->combined,
                      &program->shadows, &program->reached, &program->roots};
    for (size_t i = 0; i < sizeof(lists) / sizeof(lists[0]); i++) {
        kl_alloc_free(lists[i]->n_max > 0 ? lists[i]->ids : NULL);
    }
    kl_stage_fini(&program->stages);
    kl_alloc_free(program->runs);
    kl_alloc_free(program->is_kept);
    memset(program, 0, sizeof(*program));
}
