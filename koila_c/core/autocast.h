/* SPDX-License-Identifier: Apache-2.0 */
/* autocast.h - the dtypes to which torch's autocast casts the inputs of a call. The lists of ops are torch's own
 * (ATen/autocast_mode.h and autocast_mode.cpp), by device type. */
#pragma once

#include "ops.h"

typedef struct KlAutocast {
    KlDtype lower; /* autocast's lower dtype */
    bool is_cuda;  /* the lists of CUDA apply, else those of the CPU */
} KlAutocast;

/* Find the metas of the inputs of `call` after autocast: seen[i] points to the input itself or to
 * cast[i]. Both arrays are [call->n_inputs]. DECLINED: the lists do not determine the dtypes. */
KlStatus kl_autocast_inputs(const KlAutocast *autocast, const KlCall *call, KlMeta *cast,
                            const KlMeta **seen);

/* Correct `saves` for inputs that were cast: autograd saves the cast copy, so clear the input's bit and add the bytes. */
void kl_autocast_saves(const KlCall *call, const KlMeta *const *seen, KlSaves *saves);
