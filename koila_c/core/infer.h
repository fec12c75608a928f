/* SPDX-License-Identifier: Apache-2.0 */
/* infer.h - apply a row's rules to a call: shapes, dtypes, requires_grad, places and mode of a node. */
#ifndef KL_INFER_H
#define KL_INFER_H

#include "ops.h"

/* Fill `result` for one call. KL_DECLINED: the row cannot describe it. KL_ERROR_SHAPE and
 * KL_ERROR_ARGUMENT: torch refuses such a call; the text starts with the op's name.
 * requires_grad of each output follows from grad mode, the inputs and the output's dtype. */
KlStatus kl_infer_call(const KlCall *call, KlInferred *result, KlError *error);

/* Make room for `n` outputs and set n_outs; new metas are zeroed and WHOLE. */
KlStatus kl_infer_reserve_outs(KlInferred *result, uint32_t n, KlError *error);

/* What torch keeps for the backward of an inferred call. */
void kl_infer_saves(const KlCall *call, const KlInferred *result, KlSaves *saves);

/* Release what `result` owns. */
void kl_infer_fini(KlInferred *result);

#endif
