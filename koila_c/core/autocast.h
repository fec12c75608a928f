/* SPDX-License-Identifier: Apache-2.0 */
/* autocast.h - what torch's autocast does to a call's inputs before it runs: in which dtype the op sees
 * them. The lists are torch's own (ATen/autocast_mode.h and autocast_mode.cpp), by device type. */
#ifndef KL_AUTOCAST_H
#define KL_AUTOCAST_H

#include "ops.h"

typedef struct KlAutocast {
    KlDtype lower; /* the dtype autocast lowers to */
    bool is_cuda;  /* whose lists apply: CUDA's, or the CPU's */
} KlAutocast;

/* How the inputs of `call` look when autocast has cast them: seen[i] points to the input itself or to
 * cast[i]. Both arrays are [call->n_inputs]. DECLINED where the lists do not tell. */
KlStatus kl_autocast_inputs(const KlAutocast *autocast, const KlCall *call, KlMeta *cast,
                            const KlMeta **seen);

/* What is saved of a cast input is the cast copy: put its bytes where the input's bit was. */
void kl_autocast_saves(const KlCall *call, const KlMeta *const *seen, KlSaves *saves);

#endif
