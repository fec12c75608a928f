/* waiting.h - the graph of a chunk that waits from forward to backward, and what of it is made again meanwhile.
 *
 * A body whose backward comes later is run twice, for the graph of all its chunks would keep all that autograd
 * saves. Where that is what is there anyway (leaves, what crosses into the body, what leaves it by rows), or is
 * made of such by light calls, the graph may wait: without the light values, which are made once more before
 * the chunk goes back. Its heavy calls then run once, and it keeps nothing beside what crosses. */
#ifndef KL_WAITING_H
#define KL_WAITING_H

#include "program.h"

typedef struct KlWaiting {
    const KlTape *tape;
    const KlProgram *program;
    uint8_t *
        known; /* [n_values] scratch, all 0 before and after: what is known of what the run makes */
} KlWaiting;

/* Whether the graphs of a run's chunks may wait; it is a body of one segment. Then what autograd saves and is
 * not there without them, the light values, is appended to `again`; of what a call writes and saves, the value
 * before. On failure, which is for memory, nothing
 * is of use. */
KlStatus kl_waiting_find(const KlWaiting *waiting, const KlRun *run, bool *can_wait, KlIds *again,
                         KlError *error);

#endif
