/* SPDX-License-Identifier: Apache-2.0 */
/* rules_loss.c - losses whose terms are elements or rows, summed or averaged over all of them.
 *
 * A mean over the rows is combined from the sum of each chunk and the number of terms, see
 * KL_REDUCE_LOSS in koila/reductions/partials.py: the mean of the chunks' means is wrong if chunks
 * have different sizes. */
#include "rules.h"

#include <string.h>

enum { REDUCTION_NONE, REDUCTION_SUM = 2 };

/* Return the number of the word `reduction` in the row's signature. */
static uint32_t
reduction_arg(const KlCall *call)
{
    uint32_t position = 0;
    for (const char *at = call->row->call; *at != '\0'; at++) {
        if (strncmp(at, "reduction", 9) == 0) {
            return position;
        }
        position += *at == ',' && strncmp(at, ", *,", 4) != 0 ? 1 : 0;
    }
    return position;
}

bool
kl_rules_reduction(const KlCall *call)
{
    /* The schema's default is Mean, but torch's argument parser converts it to 0, "none". */
    int64_t reduction = kl_rules_int(call, reduction_arg(call), REDUCTION_NONE);
    kl_rules_require(call, reduction >= 0 && reduction <= REDUCTION_SUM);
    return reduction != REDUCTION_NONE;
}

KlStatus
kl_rules_make_loss(const KlCall *call, KlInferred *result, const KlMeta *terms)
{
    /* Of these torch refuses a gradient, or saves tensors that no rule describes. */
    for (uint32_t arg = 0; call->row->plain >> arg != 0; arg++) {
        kl_rules_require(call,
                         (call->row->plain >> arg & 1) == 0 || !kl_rules_needs_grad(call, arg));
    }
    const KlMeta scalar = {.n_dims = 0};
    return kl_rules_reduction(call) ? kl_rules_out_contiguous(result, &scalar)
                                    : kl_rules_out_plain(call, result, terms);
}

/* --- terms are elements: all tensors broadcast ------------------------------------------------ */

static KlMeta
find_terms(const KlCall *call)
{
    KlMeta terms = {.n_dims = 0};
    kl_rules_broadcast_all(call, &terms);
    return terms;
}

static int64_t
count_terms(const KlCall *call)
{
    const KlMeta terms = find_terms(call);
    return kl_meta_n_elements(&terms);
}

KL_SHAPE(loss)
{
    kl_rules_require(call, kl_rules_input(call, 0) != NULL && kl_rules_input(call, 1) != NULL);
    const KlMeta terms = find_terms(call);
    return kl_rules_make_loss(call, result, &terms);
}

/* input and target have one shape; weights broadcast to it */
KL_SHAPE(loss_equal)
{
    const KlMeta *input = kl_rules_tensor(call, 0, 0, KL_DIMS_MAX);
    const KlMeta *target = kl_rules_tensor(call, 1, 0, KL_DIMS_MAX);
    kl_rules_require(call, kl_rules_is_shape(input, target));
    for (uint32_t i = 0; i < call->n_inputs; i++) {
        kl_rules_require(call, kl_rules_fits(call->inputs[i], input));
    }
    return kl_rules_make_loss(call, result, input);
}

KL_PLACE(loss)
{
    const KlMeta terms = find_terms(call);
    const KlMeta *first = call->inputs[kl_rules_first_rows(call)];
    const bool is_reduced = kl_rules_reduction(call);
    int32_t dim = first->place.dim + terms.n_dims - first->n_dims;
    if (terms.shape[dim] != kl_rules_span(&first->place, kl_rules_rows(call, result))) {
        return kl_rules_once(result, "a batch of one sample is broadcast");
    }
    /* mse_loss and similar losses divide a mean's gradient by the operand's size, even if it is broadcast. */
    for (uint32_t i = 0; i < 2 && is_reduced; i++) {
        if (kl_meta_n_elements(call->inputs[i]) != kl_meta_n_elements(&terms)) {
            return kl_rules_once(result, "a loss broadcasts its operands");
        }
    }
    KlLabels full = kl_rules_letters(terms.n_dims);
    KlWiring wiring = {.reduce = is_reduced ? KL_REDUCE_LOSS : KL_REDUCE_NONE,
                       .reason = "the batch is in features of the loss"};
    for (uint32_t i = 0; i < call->n_inputs && i < KL_LABELS_MAX; i++) {
        wiring.inputs[i] = kl_rules_letters_right(full, terms.n_dims, call->inputs[i]->n_dims);
    }
    wiring.outs[0] = is_reduced ? (KlLabels){{0}} : full;
    return kl_rules_wire(call, result, &wiring);
}

/* l1_loss: the difference */
KL_SAVES(loss_l1)
{
    kl_rules_save_new(result, saves, count_terms(call), call->inputs[0]->dtype);
}

/* Backward computes with pos_weight, and for the gradient of a target, in temporary tensors. */
KL_SAVES(loss_logits)
{
    int64_t n = kl_rules_input(call, 3) != NULL ? 2 : 0;
    saves_all(call, result, saves);
    n += kl_rules_needs_grad(call, 1) ? 1 : 0;
    saves->bytes_backward = n * kl_meta_n_bytes(call->inputs[0]);
}

KL_SAVES(loss_kl)
{
    bool is_log = kl_rules_bool(call, 3, false), is_target = kl_rules_needs_grad(call, 1);
    if (is_log) {
        kl_rules_save_new(result, saves, count_terms(call) * (is_target ? 2 : 1),
                          call->inputs[0]->dtype);
        return;
    }
    kl_rules_save(call, saves, 1);
    if (is_target) {
        kl_rules_save(call, saves, 0);
    }
}

KL_SAVES(loss_poisson)
{
    kl_rules_save(call, saves, 1);
    kl_rules_save_new(result, saves, kl_meta_n_elements(call->inputs[0]), call->inputs[0]->dtype);
}

KL_SAVES(loss_hinge)
{
    kl_rules_save_new(result, saves, count_terms(call), call->inputs[0]->dtype);
    kl_rules_save_new(result, saves, 2 * count_terms(call), KL_DTYPE_BOOL);
}

KL_SAVES(loss_ranking)
{
    int64_t n = count_terms(call) + kl_meta_n_elements(call->inputs[2]);
    kl_rules_save_new(result, saves, n, call->inputs[0]->dtype);
}

/* --- terms are vectors: the last dim is summed into each -------------------------------------- */

/* Of vectors (n, d) or (d): the first n_vectors inputs have that shape, the others (n) or (). */
KL_SHAPE(loss_vectors)
{
    const KlMeta *first = call->inputs[0];
    int32_t n = first->n_dims;
    bool is_fit = call->n_inputs == 3 && (n == 1 || n == 2) && kl_meta_n_elements(first) > 0;
    for (uint32_t i = 1; i < call->n_inputs && is_fit; i++) {
        int32_t n_own = i < call->row->n_vectors ? n : n - 1;
        is_fit =
            call->inputs[i]->n_dims == n_own && kl_rules_are_alike(first, call->inputs[i], n_own);
    }
    KlMeta terms = *first;
    terms.n_dims = n - 1;
    return is_fit ? kl_rules_make_loss(call, result, &terms) : KL_DECLINED;
}

/* Make the loss of input (n, c) and a target of n_dims dims: (n) of one class, or (n, c) of several. */
static KlStatus
make_margins(const KlCall *call, int32_t n_dims, KlInferred *result)
{
    const KlMeta *input = kl_rules_tensor(call, 0, 2, 2);
    const KlMeta *target = kl_rules_tensor(call, 1, n_dims, n_dims);
    kl_rules_require(call, kl_meta_n_elements(input) > 0 && target->dtype == KL_DTYPE_INT64 &&
                               kl_rules_are_alike(input, target, n_dims));
    KlMeta terms = *input;
    terms.n_dims = 1;
    return kl_rules_make_loss(call, result, &terms);
}

/* The fifth word is the weight (c). */
KL_SHAPE(loss_margin)
{
    const KlMeta *input = kl_rules_input(call, 0), *weight = kl_rules_input(call, 4);
    const int64_t p = kl_rules_int(call, 2, 1);
    bool is_fit =
        weight == NULL || (input != NULL && weight->n_dims == 1 && weight->dtype == input->dtype &&
                           weight->shape[0] == input->shape[1]);
    return is_fit && (p == 1 || p == 2) ? make_margins(call, 1, result) : KL_DECLINED;
}

KL_SHAPE(loss_multilabel)
{
    return make_margins(call, 2, result);
}

KL_PLACE(loss_vectors)
{
    const bool is_reduced = kl_rules_reduction(call), is_batched = call->inputs[0]->n_dims == 2;
    KlWiring wiring = {.reduce = is_reduced ? KL_REDUCE_ROW_LOSS : KL_REDUCE_NONE,
                       .reason = "the batch is in features of the loss"};
    for (uint32_t i = 0; i < 3 && is_batched; i++) {
        const KlMeta *meta = kl_rules_input(call, i);
        if (meta != NULL) {
            wiring.inputs[call->args[i].input].of[0] = 1;
        }
    }
    wiring.outs[0].of[0] = is_batched && !is_reduced ? 1 : 0;
    return kl_rules_wire(call, result, &wiring);
}

/* cosine_embedding_loss: products, norms and masks, one entry for each row */
KL_SAVES(loss_cosine)
{
    const KlMeta *input = call->inputs[0];
    int64_t n = kl_meta_n_elements(input) / input->shape[input->n_dims - 1];
    bool is_both = kl_rules_needs_grad(call, 0) && kl_rules_needs_grad(call, 1);
    kl_rules_save(call, saves, 0);
    kl_rules_save(call, saves, 1);
    kl_rules_save_new(result, saves, n * (is_both ? 5 : 4), input->dtype);
    kl_rules_save_new(result, saves, 2 * n, KL_DTYPE_BOOL);
}

/* triplet_margin_loss: two differences (three with swap), their norms, the clamp */
KL_SAVES(loss_triplet)
{
    const KlMeta *input = call->inputs[0];
    int64_t n = kl_meta_n_elements(input), n_rows = n / input->shape[input->n_dims - 1];
    int64_t n_pairs = kl_rules_bool(call, 6, false) ? 3 : 2;
    kl_rules_save_new(result, saves, n_pairs * (n + n_rows) + n_rows, input->dtype);
}

/* multilabel_margin_loss: a tensor that marks the targets */
KL_SAVES(loss_multilabel)
{
    saves_all(call, result, saves);
    kl_rules_save_new(result, saves, kl_meta_n_elements(call->inputs[0]), call->inputs[0]->dtype);
}

/* All floats have one dtype; int tensors are class numbers and are allowed. */
KL_DTYPE(loss)
{
    KlDtype dtype = call->inputs[0]->dtype;
    for (uint32_t i = 0; i < call->n_inputs; i++) {
        KlDtype own = call->inputs[i]->dtype;
        kl_rules_require(call, own == dtype || own == KL_DTYPE_INT64 || own == KL_DTYPE_INT32);
    }
    kl_rules_set_dtypes(result, dtype);
    return kl_meta_dtype_is_float(dtype) ? KL_OK : KL_DECLINED;
}

/* Likewise, without half precision, for which the CPU has no kernel. */
KL_DTYPE(loss_wide)
{
    KlDtype dtype = call->inputs[0]->dtype;
    return dtype == KL_DTYPE_FLOAT32 || dtype == KL_DTYPE_FLOAT64 ? dtype_loss(call, result)
                                                                  : KL_DECLINED;
}
