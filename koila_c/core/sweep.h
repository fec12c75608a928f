/* SPDX-License-Identifier: Apache-2.0 */
/* sweep.h - the live bytes during one run (a segment on a chunk, or a barrier), in its forward and backward pass.
 *
 * Call order: init; then for each run open, forward, live, and if it has a graph back. The state is that of
 * the run that was opened last. Live are values that later calls read, saved tensors, and gradients that are not
 * yet used; each storage counts once. The time is linear in nodes, inputs and outputs of the run. */
#pragma once

#include "alloc.h"
#include "retained.h"

/* Bytes of a chunk: fixed + per_row * rows. */
typedef struct KlBytes {
    double fixed, per_row;
} KlBytes;

static inline KlBytes
kl_sweep_plus(KlBytes left, KlBytes right)
{
    return (KlBytes){left.fixed + right.fixed, left.per_row + right.per_row};
}

/* As KlBytes, in half of the memory: moments are many, and kept. */
typedef struct KlShare {
    float fixed, per_row;
} KlShare;

static inline KlShare
kl_sweep_share(KlBytes bytes)
{
    return (KlShare){(float)bytes.fixed, (float)bytes.per_row};
}

/* The bytes at one moment, besides per_chunk * chunks; of these, the gradients; and the node that runs then. */
typedef struct KlMoment {
    KlBytes bytes;
    double per_chunk;
    KlShare gradients, temporary; /* temporary: the workspace that only this node needs */
    KlNodeId node;
    uint32_t rows; /* of the axis whose chunks run, if that is not the longest; else 0 */
    uint32_t step; /* the index of the step in the schedule */
    bool is_back;  /* it is the node's backward */
} KlMoment;

typedef struct KlMoments {
    KlMoment *moments; /* [n] */
    size_t n, n_max;
    bool is_short; /* an allocation failed, and moments are missing */
} KlMoments;

void kl_sweep_add_moment(KlMoments *moments, KlMoment moment);

/* The steps and turns (KlUneven) of the longest part of the rows, relative to those of average rows. */
typedef struct KlSkew {
    double steps, turns;
} KlSkew;

/* Facts about a program that the binding supplies. */
typedef struct KlFacts {
    const bool *is_cut_in_place; /* [n_imports] a chunk of it is a view of the whole */
    const bool *has_grad;        /* [n_values] a leaf whose .grad exists already */
    const bool *is_cloned;       /* [n_nodes] instead of its input, it writes a clone of it */
    KlSkew chunks, pieces;       /* of the chunks; of the pieces that the head runs in */
    const uint32_t *region_of;   /* [n_nodes] the region that a node is in, or KL_ID_NONE */
    const uint32_t *outer;       /* [n_regions] the region around it, or KL_ID_NONE */
    size_t n_regions;            /* 0: region_of is not read */
} KlFacts;

/* The nodes that a sweep walks: a run, or the whole program in call order. */
typedef struct KlSpan {
    const KlNodeId *nodes;    /* [n_nodes] in the order they run */
    const uint32_t *imports;  /* [n_imports] */
    const KlValueId *exports; /* [n_exports] */
    const KlNodeId *combined; /* [n_combined] */
    uint32_t n_nodes, n_imports, n_exports, n_combined;
    uint32_t stage; /* KL_STAGE_NONE: nodes of all stages */
    bool is_body;
    bool has_graph;
    bool is_live; /* a live run: writes are in place, and each leaf keeps its gradient */
} KlSpan;

/* The size of a value, and facts about it. */
typedef struct KlSize {
    int64_t n_elements; /* of all rows */
    double per_row;     /* bytes; 0: it has no rows */
    KlStorageId storage;
    uint32_t gathered_in; /* the last run (serial) whose chunks read it whole, though it has rows */
    uint32_t cut_in;      /* the last run whose chunks read rows of it where it has none */
    uint8_t itemsize;
    bool needs_gradient;
    bool is_by_rows; /* a body makes it chunk by chunk */
    /* The fold over a schedule (measure_walk.h) sets these seven. */
    bool is_put_together; /* its chunks are written into one tensor of all rows */
    bool is_copied;       /* likewise, and its readers copy their rows, which are no view of it */
    bool is_there;        /* it exists already: the run that makes it allocates nothing */
    bool is_let_go;       /* likewise, but no gradient is sent to it: it is freed before backward */
    bool is_freed;        /* a barrier made it, and the schedule has freed it */
    bool is_remade;       /* its chunk's gradient is a new tensor: a sum of gradients, or a cast */
    bool is_summed;       /* of it, a gradient is there before a barrier's backward makes another */
    bool has_other_layout; /* its gradient has another memory layout than itself */
} KlSize;

/* What a sweep reads of a node, close together: KlNode is several times as large. */
typedef struct KlSweepNode {
    uint32_t first_input, n_inputs; /* into the sweep's inputs */
    KlValueId first_out;
    uint32_t n_outs;
    const KlHeld *held;     /* the temporary memory of its call and backward */
    const KlParts *parts;   /* of its partial results in a body; NULL: it is no reduction */
    uint64_t saved_inputs;  /* bit i: input i is saved for backward; inputs over 63 always are */
    uint64_t saved_outputs; /* bit i: output i is saved for backward */
    uint32_t accruing;      /* kl_stage_accruing: the input, or KL_ID_NONE */
    KlBytes further;        /* bytes it saves in the open run that are no values of the tape */
    bool is_uneven;         /* a layer over rows of many lengths: KlUneven */
    bool has_bytes;         /* its KlSaves has byte counts: a workspace ... */
    bool has_gradient;
    bool is_open;
    bool is_writing;
    bool is_random;
    bool is_for_chunks; /* as of KlNode: a live run skips it */
} KlSweepNode;

/* The function of a checkpoint, whose nodes a live run makes again before their backward. */
typedef struct KlRegion {
    uint32_t first, end; /* its nodes have the positions [first, end) */
    uint32_t back; /* its first node with a gradient, whose backward is its last; KL_ID_NONE */
    bool is_again; /* its nodes have run again */
} KlRegion;

typedef struct KlSweepStorage KlSweepStorage;
typedef struct KlSweepValue KlSweepValue;

typedef struct KlSweep {
    const KlTape *tape;
    const KlProgram *program;
    KlFacts facts;
    KlScratch scratch;
    KlSize *sizes;            /* [n_values] */
    KlSweepStorage *storages; /* [n_storages] */
    KlSweepValue *values;     /* [n_values] */
    KlSweepNode *nodes;       /* [n_nodes] only staged nodes are filled in */
    KlValueId *inputs;        /* [n_inputs] as the tape's */
    KlRegion *regions;        /* [n_regions] in a live run */
    uint32_t region;          /* whose nodes run again now, or KL_ID_NONE */
    KlSpan span;
    bool is_in_pieces;                /* the open run, the head, runs in pieces of a chunk */
    uint32_t serial;                  /* the number of the open run, from 1 on */
    int64_t rows;                     /* of the body's axis */
    KlBytes made, further, gradients; /* live now: storages, other saved bytes, gradients */
    double most;                      /* the peak of the fixed bytes so far */
} KlSweep;

/* Prepare sweeps of a program. On success the caller must call kl_sweep_fini, and must not change the tape before. */
KlStatus kl_sweep_init(KlSweep *sweep, const KlTape *tape, const KlProgram *program,
                       const KlFacts *facts);
void kl_sweep_fini(KlSweep *sweep);

/* sweep_copies.c: set `sizes`; of the open run, cut_in and gathered_in; node by node, `nodes`, `inputs` and, where
 * gradients turn, has_other_layout. */
void kl_sweep_copy_sizes(KlSweep *sweep);
void kl_sweep_copy_cuts(KlSweep *sweep);
void kl_sweep_copy_node(KlSweep *sweep, KlNodeId id);

KlSpan kl_sweep_span(const KlProgram *program, const KlRun *run, bool is_graph);
KlSpan kl_sweep_span_cheap(const KlProgram *program, const KlCheapSet *cheap_set,
                           const KlCheap *cheap);
void kl_sweep_open(KlSweep *sweep, const KlSpan *span);

/* Run the nodes forward and append a moment for each to `moments`, if not NULL. */
void kl_sweep_forward(KlSweep *sweep, KlMoments *moments);

/* Return the live bytes without gradients; after the forward these are saved tensors and exports. */
KlBytes kl_sweep_live(const KlSweep *sweep);

/* Run the backward of the graph that the forward built, and append its moments, if `moments` is not NULL. */
void kl_sweep_back(KlSweep *sweep, KlMoments *moments);
