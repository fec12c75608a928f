/* SPDX-License-Identifier: Apache-2.0 */
/* waiting.h - decides which graphs wait for their backward, and which saved tensors are recomputed then.
 *
 * "Light" means cheap to recompute: no product, convolution or attention (the cell LIGHT of ops.def). A graph
 * "waits" if it is retained from the forward to the backward of its chunk.
 *
 * A body whose backward comes later usually runs twice: the graphs of all its chunks together would keep every
 * activation. But if each tensor that autograd saves exists anyway (leaves, the body's inputs, its results with
 * rows), or light calls recompute it from those, the graph can wait without the light tensors, which are
 * recomputed before the chunk's backward. So heavy calls run once, and only inputs and results of bodies are kept.
 *
 * Likewise the storage of a result of a body can be freed between the passes, even if graphs saved it, and light
 * calls recompute it chunk by chunk: for example a residual sum whose terms are kept anyway. The inputs of these
 * calls may be such values themselves, in chains up to a given length. */
#ifndef KL_WAITING_H
#define KL_WAITING_H

#include "program.h"

/* A result of a body that light calls recompute. */
typedef struct KlLight {
    KlValueId value;
    uint32_t run;    /* the run that makes it */
    uint32_t length; /* of the chain of such values that ends with it: 1 if it reads no other */
    KlSlice needs;   /* of ids: other such values that the calls read, in the order they are made */
    KlSlice nodes;   /* of ids: the calls that recompute it, in order */
} KlLight;

typedef struct KlLights {
    KlLight *lights; /* [n] in the order they are made */
    size_t n, n_max;
    KlIds ids;
    uint32_t *number; /* [n_values] 1 + the index in `lights`; 0: the value keeps its storage */
} KlLights;

typedef struct KlWaiting {
    const KlTape *tape;
    const KlProgram *program;
    uint8_t *known; /* [n_values] scratch, all 0 between calls: bits about values of one run */
    KlLights *lights;
    KlError *error;
} KlWaiting;

/* Add to the lights those results of a run that light calls recompute, out of the candidates `may_be`, with chains of
 * at most `longest`. Call it for the runs in their order. */
KlStatus kl_waiting_find_light(const KlWaiting *waiting, uint32_t run, const bool *may_be,
                               uint32_t longest);

/* Set `*can_wait` to whether the graphs of a run's chunks may wait; the run is a body of one segment. If so, append to
 * `again` the saved tensors to recompute (of a call that saves what it writes: the value before the write), and to
 * `needs` the lights to fill for the graph or for recomputing these. If it fails, which only an allocation can,
 * all results are invalid. */
KlStatus kl_waiting_find(const KlWaiting *waiting, const KlRun *run, bool *can_wait, KlIds *again,
                         KlIds *needs);

#endif
