/* SPDX-License-Identifier: Apache-2.0 */
/* retained.h - decides which graphs are retained from the forward to the backward of their chunk, and which saved
 * tensors are recomputed then. "Cheap" means cheap to recompute: no product, convolution or attention (the cell CHEAP
 * of ops.def).
 *
 * A body whose backward comes later usually runs twice: the graphs of all its chunks together would keep every
 * activation. But if each tensor that autograd saves exists anyway (leaves, the body's inputs, its results with
 * rows), or cheap calls recompute it from those, the graph is retained without the cheap tensors, which are
 * recomputed before the chunk's backward. So heavy calls run once, and only inputs and results of bodies are kept.
 *
 * Likewise the storage of a result of a body can be freed between the passes, even if graphs saved it, and cheap
 * calls recompute it chunk by chunk: for example a residual sum whose terms are kept anyway. The inputs of these
 * calls may be such values themselves, but must be in memory otherwise. */
#pragma once

#include "program.h"

/* How the number of a boundary value, which a body leaves for others, is stored between the passes. Values up to REMATERIALIZE
 * are near: in memory, or recomputed by cheap calls alone. */
typedef enum KlValuePolicy {
    KL_POLICY_KEEP,
    KL_POLICY_REMATERIALIZE, /* its storage is freed, and cheap calls recompute it */
    KL_POLICY_RECOMPUTE,     /* it is freed, and its run recomputes it */
    KL_POLICY_OFFLOAD,       /* it is in another memory */
} KlValuePolicy;

/* A result of a body that cheap calls recompute. */
typedef struct KlCheap {
    KlValueId value;
    uint32_t run;  /* the run that makes it */
    KlSlice needs; /* of ids: other such values that the calls read, in the order they are made */
    KlSlice nodes; /* of ids: the calls that recompute it, in order */
} KlCheap;

typedef struct KlCheapSet {
    KlCheap *values; /* [n] in the order they are made */
    size_t n, n_max;
    KlIds ids;
    uint32_t *number; /* [n_values] 1 + the index in `values`; 0: it keeps its storage */
} KlCheapSet;

typedef struct KlRetained {
    const KlTape *tape;
    const KlProgram *program;
    const uint8_t *policies; /* [n_values] KlValuePolicy */
    uint8_t *marks; /* [n_values] scratch, all 0 between calls: bits about values of one run */
    KlCheapSet *cheap_set;
    KlStatus *status; /* the first failure stays, and nothing is added after it */
} KlRetained;

/* Of the results of a run that are to be rematerialized, add those that cheap calls can recompute to the set. Call it for the runs
 * in their order, if all inputs of the run are near. */
void kl_retained_find_cheap(const KlRetained *retained, uint32_t run);

/* Return whether a run, a body of one segment with near inputs, can retain its chunks' graphs. If so, append to `again`
 * the saved tensors to recompute (of a call that saves what it writes: the value before the write), and to `needs` the
 * cheap values to fill for the graph or for recomputing these. After a failure all results are invalid. */
bool kl_retained_find(const KlRetained *retained, const KlRun *run, KlIds *again, KlIds *needs);
