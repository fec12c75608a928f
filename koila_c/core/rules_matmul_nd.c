/* SPDX-License-Identifier: Apache-2.0 */
/* rules_matmul_nd.c - torch.matmul, which runs a dot product, mv, mm, bmm or a folded mm, depending on the
 * number of dims, and the tensors that products save. The cases follow _matmul_impl in ATen's
 * LinearAlgebra.cpp, because autograd saves the copies that it makes. */
#include "rules.h"

#include <string.h>

static int32_t
n_batch(const KlMeta *meta)
{
    return meta->n_dims > 2 ? meta->n_dims - 2 : 0;
}

static KlMeta
swap_last(const KlMeta *meta)
{
    KlMeta swapped = *meta;
    int32_t n = meta->n_dims;
    swapped.shape[n - 1] = meta->shape[n - 2];
    swapped.shape[n - 2] = meta->shape[n - 1];
    swapped.strides[n - 1] = meta->strides[n - 2];
    swapped.strides[n - 2] = meta->strides[n - 1];
    return swapped;
}

/* Two batches of one dim that differ: torch drops the one of size 1 if that side needs a gradient. */
static void
squeeze_pair(KlMeta *left, KlMeta *right)
{
    bool is_pair = left->n_dims == 3 && right->n_dims == 3 && left->shape[0] != right->shape[0];
    KlMeta *squeezed = left->shape[0] == 1 && left->requires_grad ? left : right;
    if (is_pair && squeezed->shape[0] == 1 && squeezed->requires_grad) {
        squeezed->n_dims = 2;
        memmove(squeezed->shape, &squeezed->shape[1], 2 * sizeof(squeezed->shape[0]));
        memmove(squeezed->strides, &squeezed->strides[1], 2 * sizeof(squeezed->strides[0]));
    }
}

/* Whether torch folds the batch dims of the larger operand into the rows of a matrix and calls mm. */
static bool
is_folded(const KlMeta *left, const KlMeta *right)
{
    bool is_left_larger = left->n_dims >= right->n_dims;
    KlMeta larger = is_left_larger ? *left : swap_last(right);
    const KlMeta *smaller = is_left_larger ? right : left;
    if (larger.n_dims < 3 || smaller->n_dims > 2) {
        return false;
    }
    if (smaller->requires_grad) {
        return true;
    }
    if (left->n_dims == 2) {
        return false;
    }
    if (kl_meta_n_elements(&larger) == 0) {
        return true;
    }
    for (int32_t dim = 0; dim < larger.n_dims - 2; dim++) {
        if (!larger.is_strided ||
            larger.strides[dim] != larger.strides[dim + 1] * larger.shape[dim + 1]) {
            return false;
        }
    }
    return true;
}

/* Strides of a matrix times a batch of matrices with the batch folded: computed with rows and
 * columns exchanged, then `.mT.contiguous()`, which leaves sizes of 1 with the strides they had. */
static void
set_exchanged_strides(KlMeta *out)
{
    KlMeta exchanged = swap_last(out);
    kl_meta_set_contiguous(&exchanged);
    KlMeta back = swap_last(&exchanged);
    if (kl_meta_is_contiguous(&back)) {
        *out = back;
    }
}

KL_SHAPE(matmul)
{
    const KlMeta *left = kl_rules_tensor(call, 0, 0, KL_DIMS_MAX);
    const KlMeta *right = kl_rules_tensor(call, 1, 0, KL_DIMS_MAX);
    if (left->n_dims == 0 || right->n_dims == 0) {
        return KL_ILLEGAL;
    }
    int64_t size_sum = right->shape[right->n_dims >= 2 ? right->n_dims - 2 : 0];
    kl_rules_check(call, left->shape[left->n_dims - 1] == size_sum);
    KlMeta batch_left = *left, batch_right = *right, out = {.n_dims = 0};
    batch_left.n_dims = n_batch(left);
    batch_right.n_dims = n_batch(right);
    kl_rules_broadcast(call, &out, &batch_left);
    kl_rules_broadcast(call, &out, &batch_right);
    if (left->n_dims >= 2) {
        out.shape[out.n_dims++] = left->shape[left->n_dims - 2];
    }
    if (right->n_dims >= 2) {
        out.shape[out.n_dims++] = right->shape[right->n_dims - 1];
    }
    KlMeta used_left = *left, used_right = *right;
    squeeze_pair(&used_left, &used_right);
    (void)kl_rules_out_contiguous(result, &out);
    if (used_left.n_dims == 2 && used_right.n_dims > 2 && is_folded(&used_left, &used_right)) {
        set_exchanged_strides(&result->outs[0]);
    }
    return KL_OK;
}

/* Return the letters of an operand: those of the output's batch dims, then those of its last two dims. */
static KlLabels
label_operand(const KlMeta *meta, int32_t n_out_batch, uint8_t before, uint8_t last)
{
    KlLabels full = kl_rules_letters(n_out_batch);
    KlLabels labels = kl_rules_letters_right(full, n_out_batch, n_batch(meta));
    if (meta->n_dims >= 2) {
        labels.of[meta->n_dims - 2] = before;
        labels.of[meta->n_dims - 1] = last;
    }
    return labels;
}

KL_PLACE(matmul)
{
    const KlMeta *left = call->inputs[0], *right = call->inputs[1];
    int32_t n_out = n_batch(left) > n_batch(right) ? n_batch(left) : n_batch(right);
    KlWiring wiring = {.inputs = {label_operand(left, n_out, KL_LETTER_ROW, KL_LETTER_SUM),
                                  label_operand(right, n_out, KL_LETTER_SUM, KL_LETTER_COLUMN)},
                       .outs = {kl_rules_letters(n_out)},
                       .reduce = KL_REDUCE_SUM};
    if (left->n_dims == 1) {
        wiring.inputs[0].of[0] = KL_LETTER_SUM;
    } else {
        wiring.outs[0].of[n_out++] = KL_LETTER_ROW;
    }
    if (right->n_dims == 1) {
        wiring.inputs[1].of[0] = KL_LETTER_SUM;
    } else {
        wiring.outs[0].of[n_out] = KL_LETTER_COLUMN;
    }
    return kl_rules_wire(call, result, &wiring);
}

/* Note that args[arg], `meta`, is saved, or the copy that merging its first dims makes. With unknown
 * strides it may be either, so both are counted. */
static void
save_folded(const KlCall *call, const KlInferred *result, KlSaves *saves, uint32_t arg,
            const KlMeta *meta)
{
    bool is_view = meta->n_dims <= 2 || kl_rules_merges(meta, 1);
    if (is_view || !meta->is_strided) {
        kl_rules_save(call, saves, arg);
    }
    if (!is_view) {
        kl_rules_save_new(result, saves, kl_meta_n_elements(meta), meta->dtype);
    }
}

/* Likewise for an operand that is expanded to the output's batch dims and then folded to three dims: the
 * copy is saved for the other operand's gradient, or else freed after the product; and its own gradient
 * has the size of that copy until it is summed. */
static void
save_expanded(const KlCall *call, const KlInferred *result, KlSaves *saves, uint32_t arg,
              const KlMeta *meta, bool is_kept, int32_t n_out_batch)
{
    const KlMeta *out = &result->outs[0];
    KlMeta expanded = *meta;
    KlMeta folded = {.n_dims = 1, .shape = {1}};
    int32_t shift = n_out_batch - n_batch(meta);
    int32_t n_own = meta->n_dims < 2 ? meta->n_dims : 2;
    for (int32_t dim = 0; dim < n_own; dim++) {
        int32_t from = meta->n_dims - n_own + dim;
        expanded.shape[n_out_batch + dim] = meta->shape[from];
        expanded.strides[n_out_batch + dim] = meta->strides[from];
        folded.shape[folded.n_dims++] = meta->shape[from];
    }
    for (int32_t dim = 0; dim < n_out_batch; dim++) {
        bool is_own = dim >= shift && meta->shape[dim - shift] == out->shape[dim];
        expanded.shape[dim] = out->shape[dim];
        expanded.strides[dim] = is_own ? meta->strides[dim - shift] : 0;
        folded.shape[0] *= out->shape[dim];
    }
    expanded.n_dims = n_out_batch + n_own;
    bool is_view = meta->is_strided && kl_rules_view_strides(&expanded, &folded);
    int64_t n_elements = kl_meta_n_elements(&expanded);
    int64_t n_bytes = n_elements * (int64_t)kl_meta_dtype_bytes(meta->dtype);
    if (meta->requires_grad && n_elements > kl_meta_n_elements(meta)) {
        saves->bytes_backward += n_bytes;
    }
    if (!is_kept) {
        saves->bytes_workspace += is_view ? 0 : n_bytes;
        return;
    }
    if (is_view || !meta->is_strided) {
        kl_rules_save(call, saves, arg);
    }
    if (!is_view) {
        kl_rules_save_new(result, saves, n_elements, meta->dtype);
    }
}

KL_SAVES(matmul)
{
    KlMeta left = *call->inputs[0], right = *call->inputs[1];
    if (left.n_dims <= 2 && right.n_dims <= 2) {
        for (uint32_t arg = 0; arg < 2; arg++) {
            if (kl_rules_needs_grad(call, arg)) {
                kl_rules_save(call, saves, 1 - arg);
            }
        }
        return;
    }
    squeeze_pair(&left, &right);
    bool is_left_larger = left.n_dims >= right.n_dims;
    uint32_t larger = is_left_larger ? 0 : 1;
    if (is_folded(&left, &right)) {
        KlMeta folded = is_left_larger ? left : swap_last(&right);
        if (call->inputs[1 - larger]->requires_grad) {
            save_folded(call, result, saves, larger, &folded);
        }
        if (call->inputs[larger]->requires_grad) {
            kl_rules_save(call, saves, 1 - larger);
        }
        if (!is_left_larger && left.n_dims == 2) { /* computed with rows and columns exchanged */
            saves->bytes_workspace += kl_meta_n_bytes(&result->outs[0]);
            saves->bytes_backward += kl_meta_n_bytes(&result->outs[0]);
        }
        return;
    }
    int32_t n_out = n_batch(&left) > n_batch(&right) ? n_batch(&left) : n_batch(&right);
    save_expanded(call, result, saves, 0, &left, right.requires_grad, n_out);
    save_expanded(call, result, saves, 1, &right, left.requires_grad, n_out);
}

KL_SAVES(linear)
{
    if (kl_rules_needs_grad(call, 1)) {
        save_folded(call, result, saves, 0, call->inputs[0]);
    }
    if (kl_rules_needs_grad(call, 0)) {
        kl_rules_save(call, saves, 1);
    }
    saves->gives_view = call->inputs[0]->n_dims > 2 && kl_rules_input(call, 2) != NULL &&
                        kl_meta_is_contiguous(call->inputs[0]);
}

KL_SAVES(bilinear)
{
    const int64_t *sizes = call->inputs[2]->shape; /* of the result, and of both sides */
    int64_t n_second = kl_rules_needs_grad(call, 1) ? sizes[2] : 0;
    int64_t n_each =
        kl_rules_needs_grad(call, 0) /* products of both sides, before the second's gradient */
            ? sizes[1] * sizes[2] + sizes[1] - n_second
            : (n_second > 0 ? 2 * n_second : sizes[1]);
    saves->bytes_backward =
        kl_meta_n_bytes(&result->outs[0]) / (sizes[0] > 0 ? sizes[0] : 1) * n_each;
    for (uint32_t arg = 0; arg < 3; arg++) {
        bool is_needed = false;
        for (uint32_t other = 0; other < 3; other++) {
            is_needed = is_needed || (other != arg && kl_rules_needs_grad(call, other));
        }
        if (is_needed && arg < 2) {
            save_folded(call, result, saves, arg, call->inputs[arg]);
        } else if (is_needed) {
            kl_rules_save(call, saves, arg);
        }
    }
}
