/* SPDX-License-Identifier: Apache-2.0 */
/* stage.c - finds the needed nodes in one pass from last to first, their stages in one from first to last, and then
 * whether the tail is linear. Each pass takes time linear in nodes and inputs. */
#include "stage.h"

#include <string.h>

#include "alloc.h"

/* -- what is needed ---------------------------------------------------------------------------------- */

static bool
is_wanted_node(const KlStages *stages, const KlNode *node, const bool *is_needed)
{
    for (uint32_t k = 0; k < node->n_outs; k++) {
        if (is_needed[node->first_out + k] && !stages->is_leaf[node->first_out + k]) {
            return true;
        }
    }
    return false;
}

/* Walk back from the goal. A value that has its number is a leaf, unless a gradient must flow through its node. */
static void
mark_needed(const KlTape *tape, const KlGoal *goal, KlStages *stages, bool *is_needed)
{
    for (size_t i = 0; i < goal->n_wanted; i++) {
        is_needed[goal->wanted[i]] = true;
    }
    for (size_t i = 0; i < goal->n_roots; i++) {
        is_needed[goal->roots[i]] = true;
        stages->needs_gradient[goal->roots[i]] = true;
    }
    for (size_t i = tape->n_nodes; i-- > 0;) {
        const KlNode *node = &tape->nodes[i];
        const KlInput *inputs = kl_tape_inputs(tape, node);
        bool needs_gradient = kl_stage_has_gradient(tape, stages, node);
        if (needs_gradient && node->mode == KL_MODE_REDUCE) {
            stages->needs_gradient[node->first_out] = true; /* it represents the partial results */
        }
        for (KlValueId out = node->first_out; out < node->first_out + node->n_outs; out++) {
            bool is_end = goal->is_end != NULL && goal->is_end[out];
            bool has_gradient =
                stages->needs_gradient[out] && tape->values[out].meta.requires_grad && !is_end;
            /* A value that ran live, or was cut from its call, has a plain autograd graph: a leaf that gets a gradient. */
            stages->is_leaf[out] |=
                tape->values[out].state != KL_STATE_PENDING && (!has_gradient || node->is_done);
        }
        if (node->is_done || !is_wanted_node(stages, node, is_needed)) {
            continue;
        }
        stages->node_stage[i] = 0;
        for (uint32_t k = 0; k < node->n_inputs && !node->is_open; k++) {
            KlValueId value = inputs[k].value;
            if (value != KL_ID_NONE) {
                is_needed[value] = true;
                bool is_unwanted = goal->is_unwanted != NULL && goal->is_unwanted[value];
                if (needs_gradient && tape->values[value].meta.requires_grad && !is_unwanted) {
                    stages->needs_gradient[value] = true;
                }
            }
        }
    }
}

/* If only some leaves get a gradient, clear needs_gradient for results that no such leaf leads to. */
static void
keep_on_way(const KlTape *tape, KlStages *stages)
{
    for (size_t i = 0; i < tape->n_nodes; i++) {
        const KlNode *node = &tape->nodes[i];
        bool is_on_way = stages->node_stage[i] == KL_STAGE_NONE;
        for (uint32_t k = 0; k < node->n_inputs && !is_on_way; k++) {
            KlValueId value = kl_tape_inputs(tape, node)[k].value;
            is_on_way = value != KL_ID_NONE && stages->needs_gradient[value];
        }
        for (uint32_t k = 0; k < node->n_outs && !is_on_way; k++) {
            stages->needs_gradient[node->first_out + k] = false;
        }
    }
}

/* -- stages ------------------------------------------------------------------------------------------- */

/* Whether a value has no gradient and exists before the first body, or cheap work on such values recomputes it.
 * Label counts and masks are made of these. */
static bool
is_data_value(const KlTape *tape, const KlStages *stages, KlValueId value)
{
    return !tape->values[value].meta.requires_grad &&
           (stages->value_stage[value] == 0 || stages->is_data[tape->values[value].node]);
}

/* Whether a node is cheap work on data values, so that any body may run it again. A reduction may be heavy: its result is
 * kept, so it runs only once. A write in place is allowed: each body that runs it also makes the value it writes, or
 * writes a clone, in call order. A write of running statistics is not: it must happen even if no body reads the node. */
static bool
is_data_node(const KlTape *tape, const KlStages *stages, const KlNode *node)
{
    if (node->is_open) {
        return true; /* made by sizes alone: bodies over any axis may run it */
    }
    bool is_cheap = node->mode == KL_MODE_REDUCE || (node->row != NULL && !node->row->is_heavy);
    if (node->mode == KL_MODE_ONCE || !is_cheap || node->is_random || node->leaf_writes != 0) {
        return false;
    }
    for (uint32_t k = 0; k < node->n_outs; k++) {
        if (tape->values[node->first_out + k].meta.requires_grad) {
            return false;
        }
    }
    for (uint32_t k = 0; k < node->n_inputs; k++) {
        KlValueId value = kl_tape_inputs(tape, node)[k].value;
        if (value != KL_ID_NONE && !is_data_value(tape, stages, value)) {
            return false;
        }
    }
    return true;
}

/* Return the first stage from `stage` on in which a node can run: a body, or a barrier, where all chunks of its inputs
 * have run. */
static uint32_t
stage_from(const KlTape *tape, const KlStages *stages, const KlNode *node, uint32_t stage,
           bool is_barrier)
{
    for (uint32_t k = 0; k < node->n_inputs; k++) {
        KlValueId value = kl_tape_inputs(tape, node)[k].value;
        if (value == KL_ID_NONE || stages->is_leaf[value]) {
            continue;
        }
        uint32_t at = stages->value_stage[value];
        if (kl_stage_is_body(at) == is_barrier) {
            at++;
        } else if (!is_barrier && kl_stage_is_gathered(tape, stages, node, k)) {
            at += 2;
        }
        stage = at > stage ? at : stage;
    }
    return stage;
}

/* Whether partial result 1 of a reduction reads only data: labels and weights, but not the logits (input 0). */
static bool
is_late_part_data(const KlTape *tape, const KlStages *stages, const KlNode *node)
{
    for (uint32_t k = 1; k < node->n_inputs; k++) {
        KlValueId value = kl_tape_inputs(tape, node)[k].value;
        if (value != KL_ID_NONE &&
            (!is_data_value(tape, stages, value) || stages->value_stage[value] > KL_STAGE_DATA)) {
            return false;
        }
    }
    return true;
}

/* Whether a hook or retain_grad needs the gradient of all rows of a value: then no node of its own stage may read it. */
static bool
is_hooked(const KlTape *tape, const KlStages *stages, KlValueId value)
{
    return kl_tape_is_looked_at(tape, value) && stages->needs_gradient[value];
}

/* Return the stage of a node that runs once, `at` or later, so that side writes of a leaf (running statistics) happen in
 * call order. `aside`, [n_values], is the barrier of the last such write of each leaf. */
static uint32_t
barrier_of_aside(const KlTape *tape, const KlNode *node, uint32_t *aside, uint32_t at)
{
    for (uint32_t i = 0; i < 2 * node->n_inputs && node->leaf_writes != 0; i++) {
        uint32_t k = i % node->n_inputs; /* gone through twice: all get the last barrier */
        KlValueId value = kl_tape_inputs(tape, node)[k].value;
        if (k < 32 && (node->leaf_writes >> k & 1) != 0 && value != KL_ID_NONE) {
            at = aside[value] > at ? aside[value] : at;
            aside[value] = at;
        }
    }
    return at;
}

static void
place_node(const KlTape *tape, KlStages *stages, KlNodeId id, uint32_t *aside)
{
    const KlNode *node = &tape->nodes[id];
    uint32_t at = 0, after = 0;
    if (node->mode == KL_MODE_ONCE) {
        at = after = barrier_of_aside(tape, node, aside, stage_from(tape, stages, node, 0, true));
    } else {
        stages->is_data[id] = is_data_node(tape, stages, node);
        uint32_t first = stages->is_data[id] ? KL_STAGE_DATA : KL_STAGE_DATA + 2;
        at = node->is_open ? first : stage_from(tape, stages, node, first, false);
        after = node->mode == KL_MODE_REDUCE ? at + 1 : at;
    }
    if (node->mode == KL_MODE_REDUCE) {
        stages->is_data[id] = false; /* a barrier makes its result, which bodies do not recompute */
        if (kl_ops_reductions[node->reduce].is_early) {
            stages->late_stage[id] = is_late_part_data(tape, stages, node) ? KL_STAGE_DATA : at;
        }
    }
    stages->node_stage[id] = at;
    uint32_t last = after;
    for (KlValueId out = node->first_out; out < node->first_out + node->n_outs; out++) {
        if (!stages->is_leaf[out]) {
            uint32_t barrier = kl_stage_is_body(after) ? after + 1 : after + 2; /* the next one */
            stages->value_stage[out] = is_hooked(tape, stages, out) ? barrier : after;
            last = stages->value_stage[out] > last ? stages->value_stage[out] : last;
        }
    }
    if (last + 1 > stages->n_stages) {
        stages->n_stages = last + 1;
    }
}

/* -- is the tail linear? -------------------------------------------------------------------------------- */

static void
find_last_body(const KlTape *tape, KlStages *stages)
{
    stages->last_body = KL_STAGE_NONE;
    for (size_t i = 0; i < tape->n_nodes; i++) {
        const KlNode *node = &tape->nodes[i];
        uint32_t at = stages->node_stage[i];
        bool is_body = at != KL_STAGE_NONE && kl_stage_is_body(at);
        if (is_body && kl_stage_has_gradient(tape, stages, node) &&
            (stages->last_body == KL_STAGE_NONE || at > stages->last_body)) {
            stages->last_body = at;
        }
    }
}

/* Whether a tensor that the node saves for backward depends on results of the last body; or whether it writes one that
 * the tail made without a gradient, by calls that its run on stand-ins leaves out. */
static bool
saves_body_value(const KlTape *tape, const KlStages *stages, KlNodeId id, const bool *depends)
{
    const KlNode *node = &tape->nodes[id];
    bool any_depends = false;
    for (uint32_t k = 0; k < node->n_inputs; k++) {
        KlValueId value = kl_tape_inputs(tape, node)[k].value;
        bool reads_body = value != KL_ID_NONE && depends[value];
        bool is_written = k < 32 && (node->writes >> k & 1) != 0;
        bool is_left_out = is_written && !tape->values[value].meta.requires_grad &&
                           stages->value_stage[value] >= stages->last_body;
        bool is_saved = node->row == NULL || k >= 64 || (node->saves.inputs >> k & 1) != 0;
        if (is_left_out || (reads_body && is_saved)) {
            return true;
        }
        any_depends = any_depends || reads_body;
    }
    return any_depends && (node->saves.outputs != 0 || node->saves.bytes_extra > 0);
}

/* Set is_tail_linear. The tail is linear exactly if no tensor that a tail node saves for backward depends on results of
 * the last body, since backward reads only saved tensors and sizes. */
static void
judge_tail(const KlTape *tape, KlStages *stages, bool *depends)
{
    stages->is_tail_linear = true;
    stages->tail_node = KL_ID_NONE;
    for (size_t i = 0; i < tape->n_nodes && stages->last_body != KL_STAGE_NONE; i++) {
        const KlNode *node = &tape->nodes[i];
        uint32_t at = stages->node_stage[i];
        if (at == KL_STAGE_NONE || at < stages->last_body) {
            continue;
        }
        bool is_combined = node->mode == KL_MODE_REDUCE && at == stages->last_body;
        bool is_of_body = at == stages->last_body;
        bool reads_body = is_of_body;
        for (uint32_t k = 0; k < node->n_inputs && !reads_body; k++) {
            KlValueId value = kl_tape_inputs(tape, node)[k].value;
            reads_body = value != KL_ID_NONE && depends[value];
        }
        bool is_seen = false;
        for (KlValueId out = node->first_out; out < node->first_out + node->n_outs; out++) {
            depends[out] = reads_body;
            is_seen = is_seen || is_hooked(tape, stages, out);
        }
        if (!kl_stage_has_gradient(tape, stages, node) || !stages->is_tail_linear) {
            continue;
        }
        bool has_effect = node->is_random || node->leaf_writes != 0;
        /* Combining saves partial results; result 1 may have been computed before the last body. */
        uint32_t of_body = stages->late_stage[i] == KL_STAGE_DATA ? ~2u : ~0u;
        bool saves_body = is_combined
                              ? (kl_ops_reductions[node->reduce].saved & of_body) != 0
                              : !is_of_body && saves_body_value(tape, stages, (KlNodeId)i, depends);
        if (is_seen || saves_body || (has_effect && !is_combined && !is_of_body)) {
            stages->is_tail_linear = false;
            stages->tail_node = (KlNodeId)i;
        }
    }
}

/* -- imports ------------------------------------------------------------------------------------------- */

static KlStatus
add_import(KlStages *stages, const KlImport *import, uint32_t *newest_of, uint32_t *next_of,
           uint32_t *found)
{
    for (uint32_t i = newest_of[import->value]; i != UINT32_MAX; i = next_of[i]) {
        const KlImport *other = &stages->imports[i];
        if (other->is_range == import->is_range &&
            kl_place_is_equal(&other->place, &import->place)) {
            *found = i;
            return KL_OK;
        }
    }
    KlStatus status = KL_RESERVE(stages, imports, stages->n_imports + 1);
    if (status == KL_OK) {
        *found = (uint32_t)stages->n_imports++;
        stages->imports[*found] = *import;
        next_of[*found] = newest_of[import->value];
        newest_of[import->value] = *found;
    }
    return status;
}

/* Build one import for each way in which a value is read: whole, or by rows at a certain place. */
static KlStatus
build_imports(const KlTape *tape, KlStages *stages, KlScratch *scratch)
{
    KlStatus status = KL_OK;
    uint32_t *newest_of = kl_alloc_scratch(scratch, tape->n_values, sizeof(uint32_t));
    uint32_t *next_of = kl_alloc_scratch(scratch, tape->n_inputs, sizeof(uint32_t));
    if (scratch->is_short) {
        return KL_ERROR_MEMORY;
    }
    memset(newest_of, 0xff, tape->n_values * sizeof(uint32_t));
    for (size_t i = 0; i < tape->n_nodes && status == KL_OK; i++) {
        const KlNode *node = &tape->nodes[i];
        for (uint32_t k = 0; k < node->n_inputs && status == KL_OK; k++) {
            const KlInput *input = &kl_tape_inputs(tape, node)[k];
            if (stages->node_stage[i] == KL_STAGE_NONE || input->value == KL_ID_NONE) {
                continue;
            }
            bool is_once = node->mode == KL_MODE_ONCE;
            KlImport import = {.value = input->value,
                               .place = is_once || node->is_open ? KL_PLACE_WHOLE : input->place,
                               .is_range = !is_once && k < 64 && (node->row_ranges >> k & 1) != 0};
            import.place.axis = kl_tape_axis_find(tape, import.place.axis);
            status = add_import(stages, &import, newest_of, next_of,
                                &stages->import_of[node->first_input + k]);
        }
    }
    return status;
}

/* -- the whole -------------------------------------------------------------------------------------------- */

static KlStatus
allocate(const KlTape *tape, KlStages *stages)
{
    KlScratch *blocks = &stages->blocks;
    stages->n_nodes = tape->n_nodes;
    stages->n_values = tape->n_values;
    stages->node_stage = kl_alloc_scratch(blocks, tape->n_nodes, sizeof(uint32_t));
    stages->late_stage = kl_alloc_scratch(blocks, tape->n_nodes, sizeof(uint32_t));
    stages->value_stage = kl_alloc_scratch(blocks, tape->n_values, sizeof(uint32_t));
    stages->is_leaf = kl_alloc_scratch(blocks, tape->n_values, sizeof(bool));
    stages->is_data = kl_alloc_scratch(blocks, tape->n_nodes, sizeof(bool));
    stages->segment = kl_alloc_scratch(blocks, tape->n_nodes, sizeof(uint32_t));
    stages->needs_gradient = kl_alloc_scratch(blocks, tape->n_values, sizeof(bool));
    stages->import_of = kl_alloc_scratch(blocks, tape->n_inputs, sizeof(uint32_t));
    if (blocks->is_short) {
        return KL_ERROR_MEMORY;
    }
    memset(stages->node_stage, 0xff, tape->n_nodes * sizeof(uint32_t));
    memset(stages->late_stage, 0xff, tape->n_nodes * sizeof(uint32_t));
    for (size_t i = 0; i < tape->n_values; i++) {
        stages->is_leaf[i] = tape->values[i].node == KL_ID_NONE;
    }
    return KL_OK;
}

KlStatus
kl_stage_build(const KlTape *tape, const KlGoal *goal, KlStages *stages)
{
    KlScratch scratch = {0};
    bool *is_needed = kl_alloc_scratch(&scratch, tape->n_values, sizeof(bool)); /* [n_values] */
    bool *depends = kl_alloc_scratch(&scratch, tape->n_values, sizeof(bool)); /* on the last body */
    uint32_t *aside = kl_alloc_scratch(&scratch, tape->n_values, sizeof(uint32_t)); /* [n_values] */
    memset(stages, 0, sizeof(*stages));
    KlStatus status = allocate(tape, stages);
    if (status == KL_OK && scratch.is_short) {
        status = KL_ERROR_MEMORY;
    }
    if (status != KL_OK) {
        goto done;
    }
    mark_needed(tape, goal, stages, is_needed);
    if (goal->is_unwanted != NULL) {
        keep_on_way(tape, stages);
    }
    for (size_t i = 0; i < tape->n_nodes; i++) {
        if (stages->node_stage[i] != KL_STAGE_NONE) {
            place_node(tape, stages, (KlNodeId)i, aside);
        }
    }
    status = kl_stage_sink(tape, goal, stages);
    if (status != KL_OK) {
        goto done;
    }
    find_last_body(tape, stages);
    judge_tail(tape, stages, depends);
    status = build_imports(tape, stages, &scratch);
done:
    kl_alloc_scratch_free(&scratch);
    if (status != KL_OK) {
        kl_stage_fini(stages);
    }
    return status;
}

void
kl_stage_fini(KlStages *stages)
{
    kl_alloc_scratch_free(&stages->blocks);
    kl_alloc_free(stages->n_imports_max > 0 ? stages->imports : NULL); /* else another's */
    memset(stages, 0, sizeof(*stages));
}
