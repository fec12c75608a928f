/* SPDX-License-Identifier: Apache-2.0 */
/* sweep.h - the bytes that are live in one run, a body on a chunk or a joint, forward and back.
 *
 * Call order: init; then for each run open, forward, live, and where it has a graph seed and back. What is
 * looked up is of the run that was opened last. Each storage counts once: what later calls read, what autograd
 * keeps, gradients on their way. All of it is linear in nodes, inputs and outputs of the run. */
#ifndef KL_SWEEP_H
#define KL_SWEEP_H

#include "alloc.h"
#include "waiting.h"

typedef struct KlBytes {
    double fixed, per_row;
} KlBytes;

/* Bytes at one moment: fixed + per_row * rows + per_chunk * chunks; and the node that runs then. */
typedef struct KlMoment {
    double fixed, per_row, per_chunk;
    float gradients, gradients_per_row; /* of these: gradients on their way, or that gather */
    float temporary, temporary_per_row; /* and what is there only while the node runs */
    KlNodeId node;
    uint32_t rows; /* of the axis that a chunk is cut of, which may not be the longest; 0: that */
    uint32_t step; /* of the schedule */
    bool is_back;  /* autograd goes back through the node */
} KlMoment;

typedef struct KlMoments {
    KlMoment *moments; /* [n] */
    size_t n, n_max;
} KlMoments;

/* What of a program only the binding knows. */
typedef struct KlKnown {
    const bool *is_cut_in_place; /* [n_imports] a chunk of it lies in the memory of the whole */
    const bool *has_grad;        /* [n_values] a leaf of autograd, with a gradient from before */
    const bool *is_cloned;       /* [n_nodes] it writes a clone */
    double steps,
        turns; /* of a chunk, in parts of what its rows would have were all alike (KlUneven) */
} KlKnown;

/* What is gone through: a run, or the program as it was written. */
typedef struct KlSpan {
    const KlNodeId *nodes;    /* [n_nodes] in the order they run */
    const uint32_t *imports;  /* [n_imports] */
    const KlValueId *exports; /* [n_exports] */
    const KlNodeId *combined; /* [n_combined] */
    uint32_t n_nodes, n_imports, n_exports, n_combined;
    uint32_t stage; /* KL_STAGE_NONE: of all */
    bool is_body;
    bool has_graph;
    bool
        is_live; /* writes go where they say; gradients of leaves are there from their backward on */
} KlSpan;

/* What is known of a value, close together. */
typedef struct KlSize {
    int64_t n_elements; /* of all rows */
    double per_row;     /* bytes; 0: it is whole */
    KlStorageId storage;
    uint32_t
        gathered_in; /* the last sweep in which chunks are given all of it though it has rows */
    uint32_t cut_in; /* the last sweep in which a chunk is given rows of it though it is whole */
    uint8_t itemsize;
    bool needs_gradient;
    /* Who goes through the steps says these three. */
    bool is_put_together; /* its chunks are parts of one tensor */
    bool is_there;        /* a run that would make it is given it */
    bool is_let_go;       /* and what a run made goes before its backward, for no gradient comes */
    bool is_laid_otherwise; /* its gradient comes laid out otherwise than itself */
} KlSize;

/* What is known of a node, close together: the tape's own is several times as long. */
typedef struct KlSweepNode {
    uint32_t first_input, n_inputs; /* into the sweep's inputs */
    KlValueId first_out;
    uint32_t n_outs;
    const KlHeld *held;     /* by its call */
    const KlParts *parts;   /* what it leaves in a body; NULL: it is no reduction */
    uint64_t saved_inputs;  /* bit i: input i is saved for backward, and any over 63 */
    uint64_t saved_outputs; /* bit i */
    uint32_t accruing;      /* the input whose gradient a chunk adds to what gathers; KL_ID_NONE */
    KlBytes further;        /* what it keeps beside values in the run that is open */
    bool is_uneven;         /* a layer over rows of many lengths: KlUneven */
    bool has_bytes;         /* the tape tells of further bytes, a workspace ... */
    bool has_gradient;
    bool is_open;
    bool is_writing;
    bool is_random;
    bool is_for_chunks; /* only chunks need it */
} KlSweepNode;

typedef struct KlSweepStorage KlSweepStorage;
typedef struct KlSweepValue KlSweepValue;

typedef struct KlSweep {
    const KlTape *tape;
    const KlProgram *program;
    KlKnown known;
    KlScratch scratch;
    KlSize *sizes;            /* [n_values] */
    KlSweepStorage *storages; /* [n_storages] */
    KlSweepValue *values;     /* [n_values] */
    KlSweepNode *nodes;       /* [n_nodes] those that are staged */
    KlValueId *inputs;        /* [n_inputs] as the tape's */
    KlSpan span;
    uint32_t serial;                  /* of the run that is open, from 1 on */
    int64_t rows;                     /* of the axis of a body */
    uint32_t n_uneven;                /* nodes of the span that are KlUneven */
    KlBytes made, further, gradients; /* live now: storages, what else is kept, gradients */
    double freed;                     /* fixed bytes that going back has let go */
    double most;                      /* fixed bytes at the worst moment so far */
} KlSweep;

/* On success the caller owns what `sweep` holds: kl_sweep_fini. The tape must not change meanwhile. */
KlStatus kl_sweep_init(KlSweep *sweep, const KlTape *tape, const KlProgram *program,
                       const KlKnown *known, KlError *error);
void kl_sweep_fini(KlSweep *sweep);

/* sweep_known.c: the sizes of all values; then one node that is staged, in their order. */
void kl_sweep_known_sizes(KlSweep *sweep);
void kl_sweep_known_node(KlSweep *sweep, KlNodeId id);

KlSpan kl_sweep_span(const KlProgram *program, const KlRun *run, bool is_graph);
KlSpan kl_sweep_span_of_light(const KlProgram *program, const KlLights *lights,
                              const KlLight *light);
void kl_sweep_open(KlSweep *sweep, const KlSpan *span);

/* The moments of running the nodes in order; NULL: `most` is all that is wanted. */
KlStatus kl_sweep_forward(KlSweep *sweep, KlMoments *moments, KlError *error);

/* What is live now: after forward, what is kept for backward, or leaves. */
KlBytes kl_sweep_live(const KlSweep *sweep);

/* The gradient of `value` is there when going back starts, and to its end; who calls this counts it. */
void kl_sweep_seed(KlSweep *sweep, KlValueId value);

/* Nobody holds `value` any more but the graph, if that keeps it. */
void kl_sweep_let_go(KlSweep *sweep, KlValueId value);

/* The same of going back through the graph that forward left. */
KlStatus kl_sweep_back(KlSweep *sweep, KlMoments *moments, KlError *error);

#endif
