/* SPDX-License-Identifier: Apache-2.0 */
/* infer.h - infers the outputs of a call from its row: shapes, dtypes, requires_grad, places, and how it is split. */
#pragma once

#include "ops.h"

/* Fill `result` for one call. KL_DECLINED: the row cannot describe it. KL_ILLEGAL: torch refuses such a call.
 * requires_grad of each output follows from grad mode, the inputs and the output's dtype. */
KlStatus kl_infer_call(const KlCall *call, KlInferred *result);

/* Fill `saves` with the tensors that autograd saves for an inferred call. */
void kl_infer_saves(const KlCall *call, const KlInferred *result, KlSaves *saves);

void kl_infer_fini(KlInferred *result);
