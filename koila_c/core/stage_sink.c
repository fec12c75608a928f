/* SPDX-License-Identifier: Apache-2.0 */
/* stage_sink.c - moves cheap calls from the first body that can run them into the later body that reads their results.
 *
 * Results that a later body reads are kept between the bodies. For example a normalization whose result only a later
 * residual sum reads would keep that result beside its inputs, which are kept anyway, and so would each sum. If these
 * calls run in the body that reads them, only the inputs are kept, as in a whole run. */
#include "stage.h"

#include "alloc.h"

/* The calls that read a value. Walking the calls from last to first, all of them are visited before its maker. */
typedef struct Readers {
    uint32_t first, last; /* the stages of the readers visited so far */
    KlAxisId axis;
    bool is_bound; /* it must exist at the end of its own body */
    bool crosses;  /* another stage reads it, before any call is moved */
} Readers;

static void
note_reads(const KlTape *tape, const KlStages *stages, KlNodeId id, Readers *readers)
{
    const KlNode *node = &tape->nodes[id];
    uint32_t late = stages->late_stage[id], at = stages->node_stage[id];
    at = late != KL_STAGE_NONE && late < at ? late : at; /* the first in which it reads inputs */
    KlAxisId axis = kl_tape_axis_find(tape, node->axis);
    for (uint32_t k = 0; k < node->n_inputs; k++) {
        KlValueId value = kl_tape_inputs(tape, node)[k].value;
        if (value == KL_ID_NONE) {
            continue;
        }
        Readers *of = &readers[value];
        bool is_new = of->first == KL_STAGE_NONE;
        of->is_bound |= node->mode == KL_MODE_ONCE || node->is_open ||
                        (!is_new && of->axis != axis) ||
                        kl_stage_is_gathered(tape, stages, node, k);
        of->axis = axis;
        of->first = is_new || at < of->first ? at : of->first;
        of->last = is_new || at > of->last ? at : of->last;
    }
}

/* Whether a call may run in a later body of its axis and gives the same numbers there. */
static bool
can_sink(const KlTape *tape, const KlStages *stages, KlNodeId id)
{
    const KlNode *node = &tape->nodes[id];
    bool is_able = node->mode == KL_MODE_ROWS && node->row != NULL && !node->row->is_heavy &&
                   !stages->is_data[id] && !node->is_open && !node->is_random &&
                   node->writes == 0 &&
                   (node->leaf_writes == 0 || kl_tape_reads_for_chunks(tape, node)) &&
                   node->refresh_of == KL_ID_NONE;
    for (uint32_t k = 0; k < node->n_inputs && is_able; k++) {
        KlValueId value = kl_tape_inputs(tape, node)[k].value;
        is_able = value == KL_ID_NONE || !kl_stage_is_overwritten(tape, node, k, false);
    }
    for (uint32_t k = 0; k < node->n_outs && is_able; k++) {
        is_able = !kl_tape_is_looked_at(tape, node->first_out + k);
    }
    return is_able;
}

/* Return the later body that alone reads all results of a call; its own stage if there is no such body. */
static uint32_t
find_target(const KlTape *tape, const KlStages *stages, KlNodeId id, const Readers *readers)
{
    const KlNode *node = &tape->nodes[id];
    uint32_t at = stages->node_stage[id], target = KL_STAGE_NONE;
    KlAxisId axis = kl_tape_axis_find(tape, node->axis);
    for (uint32_t k = 0; k < node->n_outs; k++) {
        const Readers *of = &readers[node->first_out + k];
        if (of->first == KL_STAGE_NONE) {
            continue;
        }
        bool is_one = !of->is_bound && of->first == of->last && of->axis == axis &&
                      of->first > at && kl_stage_is_body(of->first) &&
                      (target == KL_STAGE_NONE || target == of->first);
        if (!is_one) {
            return at;
        }
        target = of->first;
    }
    for (uint32_t k = 0; k < node->n_outs && target != KL_STAGE_NONE; k++) {
        target = readers[node->first_out + k].is_bound ? at : target;
    }
    return target == KL_STAGE_NONE ? at : target;
}

/* Whether moving a call keeps no more bytes between bodies: its results are no longer kept, but those of its inputs that
 * its own body makes are. */
static bool
saves_bytes(const KlTape *tape, const KlStages *stages, KlNodeId id, const Readers *readers)
{
    const KlNode *node = &tape->nodes[id];
    int64_t less = kl_tape_n_bytes(tape, id), more = 0;
    for (uint32_t k = 0; k < node->n_inputs; k++) {
        KlValueId value = kl_tape_inputs(tape, node)[k].value;
        bool is_here = value != KL_ID_NONE && !stages->is_leaf[value] &&
                       stages->value_stage[value] == stages->node_stage[id];
        if (is_here && !readers[value].crosses && !readers[value].is_bound) {
            more += kl_meta_n_bytes(&tape->values[value].meta);
        }
    }
    return more <= less; /* equal: the makers of its inputs may then be moved after it */
}

KlStatus
kl_stage_sink(const KlTape *tape, const KlGoal *goal, KlStages *stages)
{
    if (stages->n_stages <= KL_STAGE_DATA + 4) {
        return KL_OK; /* one body after that of data: no call can run later */
    }
    Readers *readers = kl_alloc_zeroed(tape->n_values, sizeof(Readers)); /* [n_values] */
    if (readers == NULL) {
        return KL_ERROR_MEMORY;
    }
    for (int is_sinking = 0; is_sinking < 2; is_sinking++) {
        for (size_t v = 0; v < tape->n_values; v++) {
            uint32_t last = readers[v].first == KL_STAGE_NONE ? 0 : readers[v].last;
            readers[v] =
                (Readers){.first = KL_STAGE_NONE, .crosses = last > stages->value_stage[v]};
        }
        for (size_t i = 0; i < goal->n_wanted; i++) {
            /* The result of a call that updates statistics is wanted only for that, unless the user holds it. */
            const KlValue *value = &tape->values[goal->wanted[i]];
            bool is_for_effect = value->node != KL_ID_NONE && !value->is_wanted &&
                                 tape->nodes[value->node].leaf_writes != 0;
            readers[goal->wanted[i]].is_bound = !is_for_effect;
        }
        for (size_t i = 0; i < goal->n_roots; i++) {
            readers[goal->roots[i]].is_bound = true;
        }
        for (size_t i = tape->n_nodes; i-- > 0;) {
            KlNodeId id = (KlNodeId)i;
            uint32_t at = stages->node_stage[i];
            if (at == KL_STAGE_NONE) {
                continue;
            }
            if (is_sinking && kl_stage_is_body(at) && can_sink(tape, stages, id)) {
                uint32_t target = find_target(tape, stages, id, readers);
                bool is_moved = target > at && saves_bytes(tape, stages, id, readers);
                stages->node_stage[i] = is_moved ? target : at;
                for (uint32_t k = 0; k < tape->nodes[i].n_outs && is_moved; k++) {
                    stages->value_stage[tape->nodes[i].first_out + k] = target;
                }
            }
            note_reads(tape, stages, id, readers);
        }
    }
    kl_alloc_free(readers);
    return KL_OK;
}
