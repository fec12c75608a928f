/* SPDX-License-Identifier: Apache-2.0 */
/* rules_softmax.c - ops along one dim of each row: softmax, cosine_similarity, distances, glu, prelu. */
#include "rules.h"

KlRule shape_cross;

/* --- softmax, log_softmax: input, dim, dtype; logs, most: of a dim of the rows, see koila/reductions/batch_softmax.py */

KL_SHAPE(softmax)
{
    const KlMeta *input = kl_rules_tensor(call, 0, 0, KL_DIMS_MAX);
    kl_rules_require(call, kl_rules_is_given(call, 1));
    (void)kl_rules_dim(call, 1, 0, input->n_dims);
    return kl_rules_out_contiguous(result, input);
}

KL_DTYPE(softmax)
{
    KlDtype dtype = kl_rules_dtype(call, call->inputs[0]->dtype);
    kl_rules_require(call, !kl_rules_is_given(call, 2) || call->args[2].kind == KL_ARG_DTYPE);
    kl_rules_set_dtypes(result, dtype);
    return kl_meta_dtype_is_float(dtype) ? KL_OK : KL_DECLINED;
}

KL_PLACE(softmax)
{
    const KlMeta *input = call->inputs[0];
    int32_t dim = kl_rules_dim(call, 1, 0, input->n_dims);
    KlLabels labels = kl_rules_letters(input->n_dims);
    bool is_over_rows = kl_place_is_rows(&input->place) && input->place.dim == dim;
    bool is_met = call->n_args > 4 && kl_rules_is_given(call, 3) && kl_rules_is_given(call, 4);
    if (is_over_rows && !is_met) {
        return KL_DECLINED; /* recorded again, with the sums of exponentials as a call before it */
    }
    labels.of[dim] = is_met ? labels.of[dim] : 0;
    const KlWiring wiring = {
        .inputs = {labels, labels, labels}, .outs = {labels}, .reason = "softmax over the batch"};
    return kl_rules_wire(call, result, &wiring);
}

/* --- cosine_similarity: x1, x2, dim, eps ------------------------------------------------------ */

/* Two arguments that broadcast to `full`, along whose dim `dim` the op works. */
typedef struct {
    KlMeta full;
    int32_t dim;
    bool is_kept; /* the result has that dim */
} Pair;

/* Read a pair and its dim, in args[2]; pair_dim KL_PAIR_LAST: the last dim, and args[4] says whether it is kept. */
static bool
read_pair(const KlCall *call, Pair *pair)
{
    const KlMeta *left = kl_rules_input(call, 0), *right = kl_rules_input(call, 1);
    *pair = (Pair){.is_kept = false};
    if (left == NULL || right == NULL) {
        return false;
    }
    kl_rules_broadcast(call, &pair->full, left);
    kl_rules_broadcast(call, &pair->full, right);
    const int32_t n_dims = pair->full.n_dims;
    const bool is_last = call->row->pair_dim == KL_PAIR_LAST;
    pair->dim = is_last ? n_dims - 1 : kl_rules_dim(call, 2, call->row->pair_dim, n_dims);
    pair->is_kept = is_last ? kl_rules_bool(call, 4, false) : call->row->shape == shape_cross;
    return n_dims > 0 && kl_meta_n_elements(&pair->full) > 0;
}

KL_SHAPE(pair)
{
    Pair pair;
    KlMeta out = {.n_dims = 0};
    kl_rules_require(call, read_pair(call, &pair));
    for (int32_t i = 0; i < pair.full.n_dims; i++) {
        if (i != pair.dim || pair.is_kept) {
            out.shape[out.n_dims++] = i == pair.dim ? 1 : pair.full.shape[i];
        }
    }
    return kl_rules_out_plain(call, result, &out);
}

KL_PLACE(pair)
{
    Pair pair;
    (void)read_pair(call, &pair);
    const int32_t n_dims = pair.full.n_dims;
    KlLabels letters = kl_rules_letters(n_dims);
    letters.of[pair.dim] = 0;
    KlWiring wiring = {.reason = "the batch dim is summed over"};
    for (int i = 0; i < 2; i++) {
        wiring.inputs[i] = kl_rules_letters_right(letters, n_dims, call->inputs[i]->n_dims);
    }
    for (int32_t i = 0, n = 0; i < n_dims; i++) {
        if (i != pair.dim || pair.is_kept) {
            wiring.outs[0].of[n++] = letters.of[i];
        }
    }
    return kl_rules_wire(call, result, &wiring);
}

/* linalg_cross: input, other, dim */
KL_SHAPE(cross)
{
    Pair pair;
    bool is_fit = read_pair(call, &pair);
    for (int i = 0; i < 2 && is_fit; i++) { /* else torch says what is wrong */
        const KlMeta *input = call->inputs[i];
        is_fit = input->n_dims == pair.full.n_dims && input->shape[pair.dim] == 3;
    }
    return is_fit ? kl_rules_out_contiguous(result, &pair.full) : KL_DECLINED;
}

/* For each side that needs a gradient, saves it, its norm before and after clamping, and the other side normalized. */
KL_SAVES(cosine_similarity)
{
    Pair pair;
    bool is_pair = read_pair(call, &pair);
    int64_t n = kl_meta_n_elements(&pair.full);
    for (uint32_t arg = 0; arg < 2 && is_pair; arg++) {
        if (kl_rules_needs_grad(call, arg)) {
            int64_t n_norms = 2 * (n / pair.full.shape[pair.dim]);
            kl_rules_save(call, saves, arg);
            kl_rules_save_new(result, saves, n + n_norms, result->outs[0].dtype);
        }
    }
}

/* --- pairwise_distance: x1, x2, p, eps, keepdim ----------------------------------------------- */

KL_SAVES(pairwise_distance)
{
    Pair pair;
    if (read_pair(call, &pair)) {
        saves->outputs = 1;
        kl_rules_save_new(result, saves, kl_meta_n_elements(&pair.full), result->outs[0].dtype);
    }
}

/* --- cdist: x1 (*, p, m), x2 (*, r, m) -> (*, p, r) ------------------------------------------- */

KL_SHAPE(cdist)
{
    const KlMeta *left = kl_rules_tensor(call, 0, 2, KL_DIMS_MAX);
    const KlMeta *right = kl_rules_tensor(call, 1, 2, KL_DIMS_MAX);
    KlMeta lead = *left, other = *right, out = {.n_dims = 0};
    kl_rules_require(call, kl_meta_n_elements(left) > 0 && kl_meta_n_elements(right) > 0 &&
                               kl_rules_float(call, 2, 2.0) >= 0.0);
    kl_rules_check(call, left->shape[left->n_dims - 1] == right->shape[right->n_dims - 1]);
    lead.n_dims -= 2;
    other.n_dims -= 2;
    kl_rules_broadcast(call, &out, &lead);
    kl_rules_broadcast(call, &out, &other);
    out.shape[out.n_dims++] = left->shape[left->n_dims - 2];
    out.shape[out.n_dims++] = right->shape[right->n_dims - 2];
    return kl_rules_out_plain(call, result, &out);
}

KL_PLACE(cdist)
{
    const KlMeta *out = &result->outs[0];
    KlLabels full = kl_rules_letters(out->n_dims - 2);
    KlWiring wiring = {.outs = {full}, .reason = "the batch is in coordinates"};
    uint8_t own[2] = {KL_LETTER_ROW, KL_LETTER_COLUMN};
    for (int i = 0; i < 2; i++) {
        int32_t n = call->inputs[i]->n_dims;
        int32_t n_points = (int32_t)out->shape[out->n_dims - 2 + i];
        /* With many points torch computes distances by a matrix product, which is far less exact;
         * with the fewer points of a chunk it would not. */
        bool is_fragile = n_points > 25 && call->args[3].kind != KL_ARG_INT;
        wiring.inputs[i] = kl_rules_letters_right(full, out->n_dims - 2, n - 2);
        wiring.inputs[i].of[n - 2] = is_fragile ? 0 : own[i];
        wiring.outs[0].of[out->n_dims - 2 + i] = wiring.inputs[i].of[n - 2];
    }
    return kl_rules_wire(call, result, &wiring);
}

KL_SAVES(cdist)
{
    const KlMeta *out = &result->outs[0];
    saves_all(call, result, saves);
    saves->outputs = 1;
    for (uint32_t i = 0; i < 2; i++) {
        const KlMeta *input = call->inputs[i];
        int64_t n = kl_meta_n_elements(out) / out->shape[out->n_dims - 1 - (int32_t)i] *
                    input->shape[input->n_dims - 1];
        if (n != kl_meta_n_elements(input)) {
            kl_rules_save_new(result, saves, n, input->dtype); /* repeated for every batch */
        }
    }
}

/* --- glu: input, dim; prelu: input, weight ---------------------------------------------------- */

KL_SHAPE(glu)
{
    const KlMeta *input = kl_rules_tensor(call, 0, 1, KL_DIMS_MAX);
    int32_t dim = kl_rules_dim(call, 1, -1, input->n_dims);
    kl_rules_check(call, input->shape[dim] % 2 == 0);
    KlMeta half = *input, *out = kl_rules_out(result, input);
    const KlMeta *halves[2] = {&half, &half};
    half.shape[dim] /= 2;
    out->shape[dim] /= 2;
    kl_rules_iterate(out, halves, 2, false);
    return KL_OK;
}

KL_PLACE(glu)
{
    int32_t n_dims = call->inputs[0]->n_dims;
    int32_t dim = kl_rules_dim(call, 1, -1, n_dims);
    KlLabels labels = kl_rules_letters(n_dims);
    labels.of[dim] = 0;
    return kl_rules_wire_alike(call, result, labels, "one half of the samples gates the other");
}

KL_SHAPE(prelu)
{
    const KlMeta *input = kl_rules_tensor(call, 0, 0, KL_DIMS_MAX);
    int64_t n = kl_meta_n_elements(kl_rules_tensor(call, 1, 0, 1));
    kl_rules_check(call, n == 1 || (input->n_dims >= 2 && input->shape[1] == n));
    return kl_rules_out_plain(call, result, input);
}

KL_PLACE(prelu)
{
    KlLabels labels = kl_rules_letters(call->inputs[0]->n_dims);
    if (kl_meta_n_elements(call->inputs[1]) != 1) {
        labels.of[1] = 0;
    }
    return kl_rules_wire_alike(call, result, labels,
                               "the batch is in channels or weights of a prelu");
}
