/* SPDX-License-Identifier: Apache-2.0 */
/* stage.h - divides a recorded program into bodies, which run chunk by chunk, and barriers, which run once.
 *
 * Stages are numbered in the order they run: even ones are barriers, odd ones bodies.
 *     0  barrier   what needs no rows at all (w * 2)
 *     1  body    cheap work on inputs alone, no gradient: label counts, masks
 *     2  barrier   ...   3  body: the first that needs parameters   4  barrier   5 ...
 * A node that runs by rows belongs to the first body after all barriers it reads from. A reduction computes partial
 * results in that body, and the next barrier combines them. A node that runs once waits for all chunks of its inputs.
 * An input that a node by rows reads whole, although chunks make it, is *gathered*: the node runs a body later.
 * Cheap work on data (no gradient) runs again in each body that reads it, rather than being kept. */
#pragma once

#include "alloc.h"
#include "tape.h"

#define KL_STAGE_NONE UINT32_MAX
#define KL_STAGE_DATA 1u

/* An input of a stage that a leaf or another stage provides. */
typedef struct KlImport {
    KlValueId value;
    KlPlace place; /* where its rows are; WHOLE: every chunk reads all of it */
    bool is_range; /* a chunk of n rows gets the first n entries: the value counts 0, 1, 2, ... */
} KlImport;

typedef struct KlStages {
    KlScratch blocks; /* all arrays but `imports` */
    size_t n_nodes;
    size_t n_values;
    uint32_t n_stages;
    uint32_t *node_stage;  /* [n_nodes] where it runs; KL_STAGE_NONE: the goal does not need it */
    uint32_t *late_stage;  /* [n_nodes] reductions whose partial result 1 may run in another stage
                             (KL_REDUCE_*, `early`): that stage; others: KL_STAGE_NONE */
    uint32_t *value_stage; /* [n_values] the stage that makes it available; leaves: 0 */
    bool *is_leaf; /* [n_values] a leaf, or it has a number already and its call gets no gradient */
    bool *is_data; /* [n_nodes] cheap work on inputs without gradient: any body may run it again */
    uint32_t *segment;    /* [n_nodes] its segment of the body (program.h); 0 in uncut bodies */
    bool *needs_gradient; /* [n_values] a gradient flows back to it from a root */
    KlImport *imports;    /* [n_imports] */
    size_t n_imports, n_imports_max;
    uint32_t *import_of; /* [n_inputs of the tape] the import that provides this input */
    uint32_t last_body;  /* the last body with a gradient; KL_STAGE_NONE: there is none */
    bool is_tail_linear; /* the gradients that reach the last body do not depend on its values */
    KlNodeId tail_node;  /* not linear: the first node that prevents it, or KL_ID_NONE */
} KlStages;

/* What a program is run for. */
typedef struct KlGoal {
    const KlValueId *wanted; /* [n_wanted] values to compute */
    size_t n_wanted;
    const KlValueId *roots; /* [n_roots] values to run backward from; they are also wanted */
    size_t n_roots;
    const bool *is_unwanted; /* [n_values] leaves that get no gradient; NULL: all leaves get one */
    const bool
        *is_end; /* [n_values] computed values that get one as leaves do; NULL as is_unwanted */
} KlGoal;

/* Assign a stage to each node that the goal needs. On success the caller must free `stages` with kl_stage_fini. */
KlStatus kl_stage_build(const KlTape *tape, const KlGoal *goal, KlStages *stages);
void kl_stage_fini(KlStages *stages);

/* stage_sink.c: move cheap calls into the body that reads their results, if fewer bytes are then kept between bodies. */
KlStatus kl_stage_sink(const KlTape *tape, const KlGoal *goal, KlStages *stages);

/* stage_tail.c: before staging, set cheap calls on a slice of the rows at the end of a program to run once, if that
 * keeps the tail linear. The nodes stay so for later runs: running once is correct for every call. */
KlStatus kl_stage_keep_tail(KlTape *tape);

/* Whether stage `stage` runs chunk by chunk. */
static inline bool
kl_stage_is_body(uint32_t stage)
{
    return (stage & 1) != 0;
}

/* Whether a gradient from the roots flows through a node. */
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

/* Whether a later call wrote the memory of input `k` (or output `k`) of a node. The node's own write counts as making
 * its output. */
bool kl_stage_is_overwritten(const KlTape *tape, const KlNode *node, uint32_t k, bool is_output);

/* Return the last node before `before` that has a gradient and saves for it a value that was overwritten later; a node
 * without a row may save any value. KL_ID_NONE: there is none. */
KlNodeId kl_stage_find_overwritten(const KlTape *tape, const KlStages *stages, KlNodeId before);

/* Return the index of the input, a large weight, whose gradient each chunk adds directly to the accumulated gradient
 * (accrue.py), instead of making one of its own; KL_ID_NONE: the node has no such input. */
uint32_t kl_stage_accruing(const KlTape *tape, const KlNode *node);

/* Whether input `k` of a node by rows is *gathered*: read whole, although chunks make it. */
bool kl_stage_is_gathered(const KlTape *tape, const KlStages *stages, const KlNode *node,
                          uint32_t k);
