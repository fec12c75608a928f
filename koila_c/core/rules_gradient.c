/* SPDX-License-Identifier: Apache-2.0 */
/* rules_gradient.c - gradient_of: gradients with create_graph=True of calls that treat each row alone (derived.py). */
#include "rules.h"

enum { INPUTS, READ = 3, N_KEPT = 5, N_ALONE };

static const KlMeta *
input_of(const KlCall *call, uint32_t i)
{
    return call->inputs[call->args[INPUTS].input + i];
}

/* Make the gradient of each input, with its shape and unknown strides. */
KL_SHAPE(gradient_of)
{
    if (call->args[INPUTS].kind != KL_ARG_VALUES) {
        return KL_DECLINED;
    }
    KlStatus status = kl_ops_reserve_outs(result, call->args[INPUTS].n);
    for (uint32_t i = 0; status == KL_OK && i < result->n_outs; i++) {
        result->outs[i] = *input_of(call, i);
        result->outs[i].is_strided = false;
        result->outs[i].place = KL_PLACE_WHOLE;
    }
    return status;
}

KL_DTYPE(gradient_of)
{
    return KL_OK; /* they have those of the inputs */
}

/* derived.py has checked that each row of an output depends only on the same row of the inputs. */
KL_PLACE(gradient_of)
{
    for (uint32_t i = 0; i < call->args[READ].input; i++) {
        if (!kl_place_is_rows(&call->inputs[i]->place)) {
            return kl_rules_once(result, "what is differentiated has no samples");
        }
    }
    for (uint32_t i = 0; i < result->n_outs; i++) {
        result->outs[i].place = input_of(call, i)->place;
    }
    return KL_OK;
}

/* The bytes are counted when the call is recorded. In its backward, gradients are held during the backward of the calls
 * that it differentiates. */
KL_SAVES(gradient_of)
{
    saves_all(call, result, saves);
    saves->is_extra_rows = true;
    saves->bytes_extra = kl_rules_int(call, N_KEPT, 0);
    saves->bytes_backward = saves->bytes_steps = kl_rules_int(call, N_ALONE, 0);
}
