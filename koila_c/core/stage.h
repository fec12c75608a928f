/* SPDX-License-Identifier: Apache-2.0 */
/* stage.h - cut a recorded program into bodies, which run chunk by chunk, and joints, which run once.
 *
 * Stages are numbered in the order they run: even ones are joints, odd ones bodies.
 *     0  joint   what needs no rows at all (w * 2)
 *     1  body    light work on inputs alone, no gradient: label counts, masks
 *     2  joint   ...   3  body: the first that needs parameters   4  joint   5 ...
 * A node that runs by rows belongs to the body after the last joint it reads; a reduction leaves partials
 * in that body and is a value at the next joint; a node that runs once waits for all chunks of what it
 * reads. What a node by rows reads whole, of all chunks, is *gathered*: the node is in the body after that.
 * Light work on data is run again where a later body needs it, rather than kept. */
#ifndef KL_STAGE_H
#define KL_STAGE_H

#include "tape.h"

#define KL_STAGE_NONE UINT32_MAX
#define KL_STAGE_DATA 1u

/* Something a stage reads that another stage, or the world, made: a value, whole or by rows. */
typedef struct KlImport {
    KlValueId value;
    KlPlace place; /* WHOLE: given whole */
    bool is_range; /* a chunk gets as many of its first entries as it has */
} KlImport;

typedef struct KlStages {
    size_t n_nodes;
    size_t n_values;
    uint32_t n_stages;
    uint32_t *node_stage; /* [n_nodes] where it runs; KL_STAGE_NONE: it is not needed */
    uint32_t
        *late_stage; /* [n_nodes] reductions of two parts: where part 1 runs; else KL_STAGE_NONE */
    uint32_t
        *value_stage; /* [n_values] the stage after which it is there; leaves and known values: 0 */
    bool *is_leaf; /* [n_values] it enters with a number: a leaf, or known and not differentiated */
    bool *is_data; /* [n_nodes] light work on inputs alone: may be run again in any body */
    uint32_t
        *segment; /* [n_nodes] which part of its body, see program.h; 0 where that is not cut */
    bool *needs_gradient; /* [n_values] a gradient flows back to it from a root */
    KlImport *imports;    /* [n_imports] */
    size_t n_imports, n_imports_max;
    uint32_t *import_of; /* [n_inputs of the tape] the import that serves this input */
    uint32_t last_body;  /* the last body with a gradient; KL_STAGE_NONE: there is none */
    bool is_tail_linear; /* the gradients that reach the last body do not depend on its values */
    KlNodeId tail_node;  /* not linear: the node that made it so, or KL_ID_NONE */
} KlStages;

/* What is asked of a program. */
typedef struct KlGoal {
    const KlValueId *wanted; /* [n_wanted] values to be computed */
    size_t n_wanted;
    const KlValueId *roots; /* [n_roots] values to be differentiated; among the wanted */
    size_t n_roots;
    const bool *is_unwanted; /* [n_values] leaves that get no gradient; NULL: all do */
} KlGoal;

/* Stage what the goal needs. On success the caller owns what `stages` holds: kl_stage_fini. */
KlStatus kl_stage_build(const KlTape *tape, const KlGoal *goal, KlStages *stages, KlError *error);
void kl_stage_fini(KlStages *stages);

/* stage_sink.c: place light calls where they are read, if less crosses then. */
KlStatus kl_stage_sink(const KlTape *tape, const KlGoal *goal, KlStages *stages, KlError *error);

/* stage_tail.c: before staging, make calls run once that end a program after a part of what chunks made was taken,
 * where that keeps its tail linear. The calls are none the worse for it: it is for good. */
KlStatus kl_stage_keep_tail(KlTape *tape, KlError *error);

/* Whether stage `stage` runs chunk by chunk. */
static inline bool
kl_stage_is_body(uint32_t stage)
{
    return (stage & 1) != 0;
}

/* Whether a gradient that the goal asks for goes through a node. */
static inline bool
kl_stage_has_gradient(const KlTape *tape, const KlStages *stages, const KlNode *node)
{
    for (uint32_t k = 0; k < node->n_outs; k++) {
        KlValueId out = node->first_out + k;
        if (stages->needs_gradient[out] && tape->values[out].meta.requires_grad) {
            return true;
        }
    }
    return false;
}

/* Whether the memory of input `k` of a node, or of output `k`, was written after the node; what the node writes
 * itself is an output. */
bool kl_stage_is_overwritten(const KlTape *tape, const KlNode *node, uint32_t k, bool is_output);

/* The last node before `before` through which a gradient goes, and that keeps for it, or may where it has no
 * row, what was written since; KL_ID_NONE: there is none. */
KlNodeId kl_stage_find_overwritten(const KlTape *tape, const KlStages *stages, KlNodeId before);

/* The input of a node by rows, a large weight, of which no chunk makes a gradient of its own: the call adds to
 * what gathers (accrue.py); KL_ID_NONE: there is none. */
uint32_t kl_stage_accruing(const KlTape *tape, const KlNode *node);

/* Whether a node by rows is given its `k`-th input whole although chunks make it: *gathered*, a body later. */
bool kl_stage_is_gathered(const KlTape *tape, const KlStages *stages, const KlNode *node,
                          uint32_t k);

#endif
