/* SPDX-License-Identifier: Apache-2.0 */
/* rules_embedding.c - look-ups in a table: embedding, embedding_bag, one_hot. */
#include "rules.h"

#include <string.h>

static bool
is_index(const KlMeta *meta)
{
    return meta->dtype == KL_DTYPE_INT64 || meta->dtype == KL_DTYPE_INT32;
}

/* weight (n, d), indices (*) -> (*, d) */
KL_SHAPE(embedding)
{
    const KlMeta *weight = kl_rules_tensor(call, 0, 0, KL_DIMS_MAX);
    const KlMeta *indices = kl_rules_tensor(call, 1, 0, KL_DIMS_MAX - 1);
    kl_rules_require(call, is_index(indices));
    kl_rules_check(call, weight->n_dims == 2);
    KlMeta out = *indices;
    out.shape[out.n_dims++] = weight->shape[1];
    return kl_rules_out_contiguous(result, &out);
}

KL_PLACE(embedding)
{
    int32_t n = call->inputs[1]->n_dims;
    if (kl_rules_bool(call, 3, false)) {
        return kl_rules_once(result, "the gradient is scaled by frequency in the batch");
    }
    KlWiring wiring = {.inputs = {{{0, KL_LETTER_COLUMN}}, kl_rules_letters(n)},
                       .outs = {kl_rules_letters(n)},
                       .reason = "the batch is in entries of the table"};
    wiring.outs[0].of[n] = KL_LETTER_COLUMN;
    return kl_rules_wire(call, result, &wiring);
}

/* input (n, d), indices, max_norm, norm_type: rescales in place the rows of the table that are looked up */
KL_SHAPE(embedding_renorm)
{
    (void)kl_rules_out(result, kl_rules_tensor(call, 0, 2, 2));
    return is_index(kl_rules_tensor(call, 1, 0, KL_DIMS_MAX)) ? KL_OK : KL_DECLINED;
}

KL_SHAPE(one_hot)
{
    const KlMeta *input = kl_rules_tensor(call, 0, 0, KL_DIMS_MAX - 1);
    int64_t n_classes = kl_rules_int(call, 1, -1); /* without it the shape depends on the data */
    kl_rules_require(call, input->dtype == KL_DTYPE_INT64 && n_classes > 0);
    KlMeta out = *input;
    out.shape[out.n_dims++] = n_classes;
    return kl_rules_out_contiguous(result, &out);
}

/* --- embedding_bag: input (n, l), weight (v, d), ..., per_sample_weights (n, l) -> (n, d). Bags of several lengths
 * (one dim, and offsets), and what shrinks the table, are not described. ---------------------------------------- */

/* The numbers of its arguments. */
enum { BAG_OFFSETS = 2, BAG_NORM, BAG_SCALE = 5, BAG_MODE, BAG_SPARSE, BAG_WEIGHTS, BAG_PAD = 10 };

/* Return the mode: 's'um, 'm'ean, or ma'x'; 0: the call is declined. */
static char
read_bag(const KlCall *call)
{
    const KlMeta *input = kl_rules_input(call, 0), *weight = kl_rules_input(call, 1);
    const KlMeta *each = kl_rules_input(call, BAG_WEIGHTS);
    const char *mode = kl_rules_text(call, BAG_MODE, "mean");
    const bool is_scaled = kl_rules_bool(call, BAG_SCALE, false);
    const bool is_sparse = kl_rules_bool(call, BAG_SPARSE, false);
    if (input == NULL || weight == NULL || kl_rules_is_given(call, BAG_OFFSETS) ||
        kl_rules_is_given(call, BAG_NORM) || is_scaled) {
        return 0;
    }
    bool is_mode = strcmp(mode, "sum") == 0 || strcmp(mode, "mean") == 0 ||
                   (strcmp(mode, "max") == 0 && !is_sparse);
    bool is_fit = is_mode && is_index(input) && input->n_dims == 2 && weight->n_dims == 2 &&
                  kl_meta_n_elements(input) > 0 && kl_meta_dtype_is_float(weight->dtype);
    if (is_fit && kl_rules_is_given(call, BAG_WEIGHTS)) {
        is_fit = each != NULL && mode[0] == 's' && each->n_dims == 2 &&
                 each->dtype == weight->dtype && each->shape[0] == input->shape[0] &&
                 each->shape[1] == input->shape[1];
    }
    return (char)(!is_fit ? 0 : mode[1] == 'a' ? 'x' : mode[0]);
}

KL_SHAPE(embedding_bag)
{
    KlMeta out = *call->inputs[0];
    kl_rules_require(call, read_bag(call) != 0);
    out.shape[1] = kl_rules_tensor(call, 1, 2, 2)->shape[1];
    return kl_rules_out_contiguous(result, &out);
}

KL_DTYPE(embedding_bag)
{
    return kl_rules_set_dtypes(result, call->inputs[1]->dtype);
}

KL_PLACE(embedding_bag)
{
    const KlWiring wiring = {.inputs = {{{1}}, {{0, KL_LETTER_COLUMN}}, {{1}}},
                             .outs = {{{1, KL_LETTER_COLUMN}}},
                             .reason = "the batch is in entries of the table, or of a bag"};
    return kl_rules_wire(call, result, &wiring);
}

/* Saved: the bag of each index, and the start, the length and the maxima of each bag. Backward sorts the indices. For
 * sums in float32 torch has a kernel that saves less and computes the rest in backward. */
KL_SAVES(embedding_bag)
{
    const KlMeta *input = call->inputs[0], *weight = call->inputs[1];
    const KlMeta *each = kl_rules_input(call, BAG_WEIGHTS);
    const char mode = read_bag(call);
    const int64_t n_all = kl_meta_n_bytes(input), n_bags = n_all / input->shape[1];
    const int64_t n_out = kl_meta_n_bytes(&result->outs[0]);
    const bool is_sparse = kl_rules_bool(call, BAG_SPARSE, false);
    const bool is_fast = mode == 's' && weight->dtype == KL_DTYPE_FLOAT32;
    saves_all(call, result, saves);
    saves->inputs &= ~(kl_rules_needs_grad(call, BAG_WEIGHTS) ? 0 : UINT64_C(2));
    int64_t n_kept = (is_fast ? 0 : n_all) + 3 * n_bags;
    if (mode == 'x') {
        n_kept += kl_meta_n_elements(&result->outs[0]) * (n_bags / input->shape[0]) - n_bags;
        saves->bytes_backward = n_kept - n_all + n_out;
    } else if (is_sparse) { /* a row for each index, twice if those of the padding are left out */
        const int64_t n_rows = (kl_rules_is_given(call, BAG_PAD) ? 2 : 1) * input->shape[1];
        const int64_t n_copies = input->dtype == KL_DTYPE_INT32 ? 3 : 1; /* two are of 64 bits */
        saves->bytes_backward = n_rows * n_out + n_copies * n_all + (is_fast ? 0 : n_out);
    } else {
        saves->bytes_backward =
            (is_fast ? 4 : 3) * n_all + (each != NULL ? kl_meta_n_bytes(each) : 0);
    }
    int64_t n_sums = 2 * n_all + n_bags - n_kept; /* temporary, to find the bag of each index */
    int64_t n_more = mode == 's' ? 0 : mode == 'm' ? 3 * n_bags : n_bags;
    saves->bytes_workspace = is_fast ? 0 : n_sums > n_more ? n_sums : n_more;
    if (!kl_meta_is_contiguous(input)) {
        saves->inputs &= ~UINT64_C(1);
        n_kept += n_all;
    }
    if (each != NULL && !kl_meta_is_contiguous(each)) {
        saves->inputs &= ~UINT64_C(4);
        n_kept += kl_meta_n_bytes(each);
    }
    saves->bytes_extra = n_kept;
    saves->is_extra_rows = result->split.mode != KL_MODE_ONCE;
}
