/* SPDX-License-Identifier: Apache-2.0 */
/* rules_strides.c - the strides that torch gives new values, and when a view needs no copy. It follows TensorIterator
 * step by step, because known strides must be exact; otherwise they are marked as unknown. */
#include "rules.h"

#include <string.h>

/* The strides of an operand after broadcasting: 0 in broadcast dims. */
typedef struct {
    int64_t strides[KL_DIMS_MAX]; /* [n_dims of the output] */
} Operand;

enum { OPERANDS_MAX = 16 };

/* The dims of channels last, the fastest first. */
static const int32_t NHWC[] = {1, 3, 2, 0}, NDHWC[] = {1, 4, 3, 2, 0};

bool
kl_rules_are_alike(const KlMeta *left, const KlMeta *right, int32_t n_dims)
{
    return left->n_dims >= n_dims && right->n_dims >= n_dims &&
           memcmp(left->shape, right->shape, (size_t)n_dims * sizeof(left->shape[0])) == 0;
}

bool
kl_rules_is_shape(const KlMeta *left, const KlMeta *right)
{
    return left->n_dims == right->n_dims && kl_rules_are_alike(left, right, left->n_dims);
}

bool
kl_rules_is_dense(const KlMeta *meta)
{
    if (!meta->is_strided || kl_meta_is_contiguous(meta)) {
        return meta->is_strided;
    }
    uint32_t used = 0; /* bit d: dim d has its place in memory, from the fastest on */
    int64_t stride = 1;
    for (int32_t dim = 0; dim < meta->n_dims; dim++) {
        bool is_next = meta->shape[dim] < 2 || meta->strides[dim] == stride;
        if ((used >> dim & 1) == 0 && is_next) {
            used |= UINT32_C(1) << dim;
            stride *= meta->shape[dim];
            dim = -1; /* the next one may be any dim */
        }
    }
    return used == (UINT32_C(1) << meta->n_dims) - 1;
}

bool
kl_rules_is_channels_last(const KlMeta *meta)
{
    int64_t stride = 1;
    bool is_last = meta->n_dims == 4 && meta->is_strided;
    for (int i = 0; i < 4 && is_last; i++) {
        is_last = meta->shape[NHWC[i]] == 1 || meta->strides[NHWC[i]] == stride;
        stride *= meta->shape[NHWC[i]];
    }
    return is_last;
}

/* Set dense strides in that order of dims, the fastest first. */
static void
set_dense(KlMeta *meta, const int32_t *order)
{
    int64_t stride = 1;
    for (int32_t i = 0; i < meta->n_dims; i++) {
        meta->strides[order[i]] = stride;
        stride *= meta->shape[order[i]]; /* of an empty value 0, where row-major strides count 1 */
    }
    meta->is_strided = true;
}

void
kl_rules_set_channels_last(KlMeta *meta)
{
    set_dense(meta, NHWC);
}

/* TensorIterator::fast_set_up: all operands have one shape and one layout. */
static bool
iterate_fast(KlMeta *out, const KlMeta *const *operands, uint32_t n)
{
    bool is_contiguous = true, is_last = true, is_dense = true;
    for (uint32_t i = 0; i < n; i++) {
        if (!kl_rules_is_shape(operands[i], out)) {
            return false;
        }
        is_contiguous = is_contiguous && kl_meta_is_contiguous(operands[i]);
        is_last = is_last && kl_rules_is_channels_last(operands[i]);
        is_dense = is_dense && kl_rules_is_dense(operands[i]);
    }
    if (is_contiguous) {
        kl_meta_set_contiguous(out);
        return true;
    }
    if (is_last) {
        kl_rules_set_channels_last(out);
        return true;
    }
    for (uint32_t i = 1; i < n && is_dense; i++) {
        is_dense = memcmp(operands[i]->strides, operands[0]->strides,
                          (size_t)out->n_dims * sizeof(out->strides[0])) == 0;
    }
    if (is_dense) {
        memcpy(out->strides, operands[0]->strides, sizeof(out->strides));
        out->is_strided = true;
    }
    return is_dense;
}

/* Return 1 if dim0 comes after dim1 in memory order, -1 if before, 0 if no operand decides it. */
static int
compare_dims(const KlMeta *out, const Operand *operands, uint32_t n, int32_t dim0, int32_t dim1)
{
    for (uint32_t i = 0; i < n; i++) {
        int64_t stride0 = operands[i].strides[dim0], stride1 = operands[i].strides[dim1];
        if (stride0 == 0 || stride1 == 0) {
            continue;
        }
        if (stride0 != stride1) {
            return stride0 < stride1 ? -1 : 1;
        }
        if (out->shape[dim0] > out->shape[dim1]) {
            return 1;
        }
    }
    return 0;
}

/* TensorIterator::reorder_dimensions, then dense strides in that order. */
static void
iterate_sorted(KlMeta *out, const Operand *operands, uint32_t n)
{
    int32_t order[KL_DIMS_MAX] = {0}; /* fastest first */
    for (int32_t i = 0; i < out->n_dims; i++) {
        order[i] = out->n_dims - 1 - i;
    }
    for (int32_t i = 1; i < out->n_dims; i++) {
        int32_t at = i;
        for (int32_t before = i - 1; before >= 0; before--) {
            int comparison = compare_dims(out, operands, n, order[before], order[at]);
            if (comparison > 0) {
                int32_t moved = order[before];
                order[before] = order[at];
                order[at] = moved;
                at = before;
            } else if (comparison < 0) {
                break;
            }
        }
    }
    bool is_row_major = true;
    for (int32_t i = 0; i < out->n_dims; i++) {
        is_row_major = is_row_major && order[i] == out->n_dims - 1 - i;
    }
    if (is_row_major) {
        kl_meta_set_contiguous(out);
    } else {
        set_dense(out, order);
    }
}

void
kl_rules_iterate(KlMeta *out, const KlMeta *const *operands, uint32_t n, bool has_number)
{
    out->is_strided = false;
    if (out->n_dims <= 1) {
        kl_meta_set_contiguous(out); /* whatever the operands are */
        return;
    }
    if (n > OPERANDS_MAX) {
        return;
    }
    for (uint32_t i = 0; i < n; i++) {
        if (!operands[i]->is_strided) {
            return;
        }
    }
    if (!(has_number && out->n_dims > 0) && iterate_fast(out, operands, n)) {
        return;
    }
    Operand sorted[OPERANDS_MAX] = {0};
    for (uint32_t i = 0; i < n; i++) {
        int32_t shift = out->n_dims - operands[i]->n_dims;
        for (int32_t dim = shift; dim < out->n_dims; dim++) {
            bool is_broadcast = operands[i]->shape[dim - shift] == 1 && out->shape[dim] != 1;
            sorted[i].strides[dim] = is_broadcast ? 0 : operands[i]->strides[dim - shift];
        }
    }
    iterate_sorted(out, sorted, n);
}

void
kl_rules_preserve(KlMeta *out, const KlMeta *meta)
{
    out->is_strided = meta->is_strided;
    if (!meta->is_strided) {
        if (meta->n_dims == 0 || (meta->n_dims == 1 && meta->shape[0] > 1)) {
            kl_meta_set_contiguous(out);
        }
    } else if (kl_rules_is_dense(meta)) {
        memcpy(out->strides, meta->strides, sizeof(out->strides));
    } else {
        Operand operand = {0};
        memcpy(operand.strides, meta->strides, sizeof(operand.strides));
        iterate_sorted(out, &operand, 1);
    }
}

bool
kl_rules_view_strides(const KlMeta *meta, KlMeta *out)
{
    int64_t n_elements = kl_meta_n_elements(meta);
    out->is_strided = true;
    if (n_elements == 0) {
        if (kl_rules_is_shape(meta, out)) {
            memcpy(out->strides, meta->strides, sizeof(out->strides));
        } else {
            kl_meta_set_contiguous(out);
        }
        return true;
    }
    if (meta->n_dims == 0) {
        kl_meta_set_contiguous(out); /* all of its dims have size 1 */
        return true;
    }
    int32_t view_dim = out->n_dims - 1;
    int64_t base = meta->strides[meta->n_dims - 1];
    int64_t n_chunk = 1; /* elements of the group of input dims that are contiguous to each other */
    int64_t n_view = 1;
    for (int32_t dim = meta->n_dims - 1; dim >= 0; dim--) {
        n_chunk *= meta->shape[dim];
        bool is_end =
            dim == 0 || (meta->shape[dim - 1] != 1 && meta->strides[dim - 1] != n_chunk * base);
        if (!is_end) {
            continue;
        }
        while (view_dim >= 0 && (n_view < n_chunk || out->shape[view_dim] == 1)) {
            out->strides[view_dim] = n_view * base;
            n_view *= out->shape[view_dim];
            view_dim--;
        }
        if (n_view != n_chunk) {
            out->is_strided = false;
            return false;
        }
        if (dim > 0) {
            base = meta->strides[dim - 1];
            n_chunk = 1;
            n_view = 1;
        }
    }
    out->is_strided = view_dim == -1;
    return view_dim == -1;
}

bool
kl_rules_is_like_channels_last(const KlMeta *meta)
{
    if ((meta->n_dims != 4 && meta->n_dims != 5) || (meta->is_strided && meta->strides[1] == 0)) {
        return false;
    }
    if (!meta->is_strided) {
        return true; /* not known to be another way */
    }
    const int32_t *order = meta->n_dims == 4 ? NHWC : NDHWC;
    int64_t least = 0;
    for (int32_t i = 0; i < meta->n_dims; i++) {
        int32_t dim = order[i];
        if (meta->shape[dim] == 0 || meta->strides[dim] < least ||
            (dim == 0 && least == meta->strides[1])) {
            return false;
        }
        least = meta->strides[dim] * (meta->shape[dim] > 1 ? meta->shape[dim] : 1);
    }
    return true;
}

/* The rules know the CPU's layouts. If a GPU may choose another one, the strides are unknown unless the input is
 * row-major. */
void
kl_rules_settle_layout(const KlCall *call, KlInferred *result)
{
    bool is_listed = result->device != 0 && call->row->is_laid_out_by_device;
    bool is_plain = call->inputs[0] != NULL && call->inputs[0]->is_strided &&
                    kl_meta_is_contiguous(call->inputs[0]);
    for (uint32_t i = 0; is_listed && !is_plain && i < result->n_outs; i++) {
        result->outs[i].is_strided = result->outs[i].is_strided && result->alias != KL_ALIAS_NONE;
    }
}
