/* SPDX-License-Identifier: Apache-2.0 */
/* waiting.h - the graph of a chunk that waits from forward to backward, and what of it is made again meanwhile.
 *
 * A body whose backward comes later is run twice, for the graph of all its chunks would keep all that autograd
 * saves. Where that is what is there anyway (leaves, what crosses into the body, what leaves it by rows), or is
 * made of such by light calls, the graph may wait: without the light values, which are made once more before
 * the chunk goes back. Its heavy calls then run once, and it keeps nothing beside what crosses.
 *
 * Likewise a value that crosses may be let go although graphs have it, and be made once more, a chunk at a time,
 * by light calls of what else is there: a sum of several ways is kept as long as they are else. What it is made
 * of may be such a value itself: a chain of these is as long as it is let be. */
#ifndef KL_WAITING_H
#define KL_WAITING_H

#include "program.h"

/* A value that crosses and whose numbers light calls make again. */
typedef struct KlLight {
    KlValueId value;
    uint32_t run;    /* that makes it */
    uint32_t length; /* of the chain that ends with it: 1 if it is made of none */
    KlSlice needs;   /* of ids: such values that it is made of, in the order they are made */
    KlSlice nodes;   /* of ids: the calls that make it, in their order */
} KlLight;

typedef struct KlLights {
    KlLight *lights; /* [n] in the order they are made */
    size_t n, n_max;
    KlIds ids;
    uint32_t *number; /* [n_values] which of them a value is, from 1 on; 0: its numbers are kept */
} KlLights;

typedef struct KlWaiting {
    const KlTape *tape;
    const KlProgram *program;
    uint8_t *
        known; /* [n_values] scratch, all 0 before and after: what is known of what the run makes */
    KlLights *lights;
    KlError *error;
} KlWaiting;

/* Note which values that a run leaves are light: of those that may be, where a chain is not longer than `longest`.
 * The runs come in their order. */
KlStatus kl_waiting_find_light(const KlWaiting *waiting, uint32_t run, const bool *may_be,
                               uint32_t longest);

/* Whether the graphs of a run's chunks may wait; it is a body of one segment. Then what autograd saves and is
 * not there without them, the light values, is appended to `again`; of what a call writes and saves, the value
 * before; and to `needs` those of the lights that the graph needs, or what is made again. On failure, which is
 * for memory, nothing is of use. */
KlStatus kl_waiting_find(const KlWaiting *waiting, const KlRun *run, bool *can_wait, KlIds *again,
                         KlIds *needs);

#endif
