/* rules_shape.c - shapes of results that follow from their inputs' shapes alone: elementwise ops. */
#include "rules.h"

#include <string.h>

KlStatus
kl_rules_out(KlInferred *result, const KlMeta *like, KlError *error)
{
    return kl_rules_out_shape(result, like->shape, like->n_dims, error);
}

KlStatus
kl_rules_out_shape(KlInferred *result, const int64_t *shape, int32_t n_dims, KlError *error)
{
    if (n_dims > KL_DIMS_MAX) {
        return KL_DECLINED;
    }
    KlStatus status = kl_infer_reserve_outs(result, 1, error);
    if (status == KL_OK) {
        result->outs[0].n_dims = n_dims;
        if (n_dims > 0) {
            memcpy(result->outs[0].shape, shape, (size_t)n_dims * sizeof(shape[0]));
        }
    }
    return status;
}

void
kl_rules_alias(KlInferred *result, KlAlias alias, uint32_t input)
{
    result->alias = alias;
    result->alias_input = input;
}

KlStatus
kl_rules_broadcast(KlMeta *out, const KlMeta *meta, KlError *error)
{
    if (meta->n_dims > out->n_dims) {
        int32_t shift = meta->n_dims - out->n_dims;
        for (int32_t dim = meta->n_dims - 1; dim >= 0; dim--) {
            out->shape[dim] = dim >= shift ? out->shape[dim - shift] : 1;
        }
        out->n_dims = meta->n_dims;
    }
    int32_t shift = out->n_dims - meta->n_dims;
    for (int32_t dim = shift; dim < out->n_dims; dim++) {
        int64_t size = meta->shape[dim - shift];
        if (out->shape[dim] == 1) {
            out->shape[dim] = size;
        } else if (size != 1 && size != out->shape[dim]) {
            return kl_error_set(error, KL_ERROR_SHAPE,
                                "sizes %lld and %lld do not broadcast at dim %d",
                                (long long)out->shape[dim], (long long)size, (int)dim);
        }
    }
    return KL_OK;
}

KlStatus
shape_broadcast(const KlCall *call, KlInferred *result, KlError *error)
{
    KlStatus status = kl_infer_reserve_outs(result, 1, error);
    KlMeta *out = result->outs;
    bool has_number = false;
    for (uint32_t i = 0; status == KL_OK && i < call->n_inputs; i++) {
        status = kl_rules_broadcast(out, call->inputs[i], error);
    }
    for (uint32_t i = 0; i < call->n_args; i++) {
        has_number = has_number || kl_rules_is_number(&call->args[i]);
    }
    if (status == KL_OK) {
        kl_rules_iterate(out, call->inputs, call->n_inputs, has_number);
    }
    return status;
}

KlStatus
shape_same(const KlCall *call, KlInferred *result, KlError *error)
{
    KlStatus status = kl_rules_out(result, call->inputs[0], error);
    if (status == KL_OK) {
        kl_rules_iterate(&result->outs[0], call->inputs, 1, false);
    }
    return status;
}
