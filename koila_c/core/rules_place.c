/* rules_place.c - how nodes that work row by row are split. */
#include "rules.h"

KlStatus
place_rowwise(const KlCall *call, KlInferred *result, KlError *error)
{
    (void)error;
    KlMeta *out = &result->outs[0];
    uint32_t first = kl_rules_first_rows(call);
    KlPlace want = call->inputs[first]->place;
    want.dim += out->n_dims - call->inputs[first]->n_dims;
    if (out->shape[want.dim] != kl_rules_span(&want, kl_rules_rows(call, result))) {
        return kl_rules_once(result, "a batch of one row is broadcast");
    }
    for (uint32_t i = 0; i < call->n_inputs; i++) {
        KlPlace own = want;
        own.dim -= out->n_dims - call->inputs[i]->n_dims;
        const char *reason = kl_rules_follow(call, result, i, &own);
        if (reason != NULL) {
            return kl_rules_once(result, reason);
        }
    }
    for (uint32_t i = 0; i < result->n_outs; i++) {
        result->outs[i].place = want;
    }
    return KL_OK;
}
