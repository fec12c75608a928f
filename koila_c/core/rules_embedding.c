/* rules_embedding.c - look-ups in a table: embedding, one_hot. The table comes first in the
 * arguments. */
#include "rules.h"

static bool
is_index(const KlMeta *meta)
{
    return meta->dtype == KL_DTYPE_INT64 || meta->dtype == KL_DTYPE_INT32;
}

/* weight (n, d), indices (*) -> (*, d) */
KlStatus
shape_embedding(const KlCall *call, KlInferred *result, KlError *error)
{
    const KlMeta *weight = kl_rules_input(call, 0);
    const KlMeta *indices = kl_rules_input(call, 1);
    if (weight == NULL || indices == NULL || !is_index(indices) ||
        indices->n_dims + 1 > KL_DIMS_MAX) {
        return KL_DECLINED;
    }
    if (weight->n_dims != 2) {
        return kl_error_set(error, KL_ERROR_SHAPE, "the weight has %d dims", (int)weight->n_dims);
    }
    KlMeta out = *indices;
    out.shape[out.n_dims++] = weight->shape[1];
    KlStatus status = kl_rules_out(result, &out, error);
    if (status == KL_OK) {
        kl_meta_set_contiguous(&result->outs[0]);
    }
    return status;
}

KlStatus
place_embedding(const KlCall *call, KlInferred *result, KlError *error)
{
    (void)error;
    enum { LETTER_FEATURE = 20 };
    bool is_scaled = false;
    int32_t n = call->inputs[1]->n_dims;
    KlStatus status = kl_rules_bool(call, 3, false, &is_scaled);
    if (status != KL_OK || is_scaled) {
        return status == KL_OK
                   ? kl_rules_once(result, "the gradient is scaled by frequency in the batch")
                   : status;
    }
    KlWiring wiring = {.inputs = {{{0, LETTER_FEATURE}}, kl_rules_letters(n)},
                       .outs = {kl_rules_letters(n)},
                       .reason = "the rows are entries of the table"};
    wiring.outs[0].of[n] = LETTER_FEATURE;
    return kl_rules_wire(call, result, &wiring);
}

/* input (n, d), indices, max_norm, norm_type: rows of the table that are looked up are shrunk in
 * place */
KlStatus
shape_embedding_renorm(const KlCall *call, KlInferred *result, KlError *error)
{
    const KlMeta *weight = kl_rules_input(call, 0);
    const KlMeta *indices = kl_rules_input(call, 1);
    if (weight == NULL || indices == NULL || !is_index(indices) || weight->n_dims != 2) {
        return KL_DECLINED;
    }
    return kl_rules_out(result, weight, error);
}

KlStatus
place_embedding_renorm(const KlCall *call, KlInferred *result, KlError *error)
{
    (void)call;
    (void)error;
    return kl_rules_once(result, "the whole batch shrinks one table");
}

KlStatus
shape_one_hot(const KlCall *call, KlInferred *result, KlError *error)
{
    const KlMeta *input = kl_rules_input(call, 0);
    int64_t n_classes = 0;
    KlStatus status = kl_rules_int(call, 1, -1, &n_classes);
    if (status != KL_OK || input == NULL || input->dtype != KL_DTYPE_INT64 || n_classes <= 0 ||
        input->n_dims + 1 > KL_DIMS_MAX) {
        return KL_DECLINED; /* without num_classes the shape is in the data */
    }
    KlMeta out = *input;
    out.shape[out.n_dims++] = n_classes;
    status = kl_rules_out(result, &out, error);
    if (status == KL_OK) {
        kl_meta_set_contiguous(&result->outs[0]);
    }
    return status;
}

KlStatus
place_one_hot(const KlCall *call, KlInferred *result, KlError *error)
{
    (void)error;
    KlLabels letters = kl_rules_letters(call->inputs[0]->n_dims);
    const KlWiring wiring = {.inputs = {letters}, .outs = {letters}};
    return kl_rules_wire(call, result, &wiring);
}
