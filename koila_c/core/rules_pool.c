/* SPDX-License-Identifier: Apache-2.0 */
/* rules_pool.c - pooling by windows and to a given size, and patches as columns (im2col, col2im). Each channel is pooled
 * on its own, so rows may be in any dim that is not spatial. */
#include "rules.h"

enum { SPATIAL_MAX = 3 };

/* pool: input, kernel_size, stride, padding, [dilation,] ceil_mode */
typedef struct {
    int32_t n; /* spatial dims */
    bool has_dilation;
    int64_t kernel[SPATIAL_MAX];
    int64_t stride[SPATIAL_MAX];
    int64_t padding[SPATIAL_MAX];
    int64_t dilation[SPATIAL_MAX];
    bool is_ceil;
} Pool;

static bool
are_windows(const Pool *pool)
{
    bool is_legal = true;
    for (int32_t i = 0; i < pool->n; i++) {
        is_legal &= pool->kernel[i] > 0 && pool->stride[i] > 0 && pool->dilation[i] > 0 &&
                    pool->padding[i] >= 0;
    }
    return is_legal;
}

/* Read the windows. Return whether they are legal. */
static bool
read_pool(const KlCall *call, Pool *pool)
{
    static const int64_t ones[SPATIAL_MAX] = {1, 1, 1};
    static const int64_t zeros[SPATIAL_MAX] = {0};
    const int32_t n = pool->n;
    kl_rules_spatial(call, 1, n, ones, pool->kernel);
    kl_rules_spatial(call, 2, n, pool->kernel, pool->stride);
    kl_rules_spatial(call, 3, n, zeros, pool->padding);
    kl_rules_spatial(call, pool->has_dilation ? 4 : KL_ID_NONE, n, ones, pool->dilation);
    pool->is_ceil = kl_rules_bool(call, pool->has_dilation ? 5 : 4, false);
    bool is_legal = are_windows(pool);
    for (int32_t i = 0; i < n; i++) {
        is_legal &= pool->padding[i] <= pool->kernel[i] / 2;
    }
    return is_legal;
}

/* Likewise of patches of two dims: kernel_size, dilation, padding, stride, from args[arg] on. */
static bool
read_patches(const KlCall *call, uint32_t arg, Pool *pool)
{
    int64_t *parts[] = {pool->kernel, pool->dilation, pool->padding, pool->stride};
    *pool = (Pool){.n = 2};
    for (uint32_t i = 0; i < 4; i++) {
        kl_rules_spatial_each(call, arg + i, 2, parts[i]);
    }
    return are_windows(pool);
}

static int64_t
size_out(const Pool *pool, int32_t i, int64_t size)
{
    int64_t free = size + 2 * pool->padding[i] - pool->dilation[i] * (pool->kernel[i] - 1) - 1;
    free += pool->is_ceil ? pool->stride[i] - 1 : 0;
    if (free < 0) {
        return 0;
    }
    int64_t out = free / pool->stride[i] + 1;
    /* the last window must start inside the input or its left padding */
    bool is_outside = pool->is_ceil && (out - 1) * pool->stride[i] >= size + pool->padding[i];
    return is_outside ? out - 1 : out;
}

/* Return the input, whose last dims are spatial; an empty one is declined. */
static const KlMeta *
get_input(const KlCall *call, int32_t n)
{
    const KlMeta *input = kl_rules_tensor(call, 0, n + 1, n + 2);
    kl_rules_require(call, kl_meta_n_elements(input) > 0);
    return input;
}

KL_SHAPE(pool)
{
    const int32_t n = call->row->n_spatial;
    const bool has_dilation = call->row->has_dilation;
    const KlMeta *input = get_input(call, n);
    Pool pool = {.n = n, .has_dilation = has_dilation};
    if (!read_pool(call, &pool)) {
        return KL_DECLINED;
    }
    KlMeta out = *input;
    for (int32_t i = 0; i < n; i++) {
        int32_t dim = input->n_dims - n + i;
        out.shape[dim] = size_out(&pool, i, input->shape[dim]);
        kl_rules_check(call, out.shape[dim] > 0);
        /* avg_pool3d does not count the padding */
        kl_rules_require(call, n != 3 || has_dilation || input->shape[dim] >= pool.kernel[i]);
    }
    (void)kl_rules_outs_like(result, call->row->n_outs, &out);
    kl_rules_settle_format(call, result, 1);
    return KL_OK;
}

KL_SHAPE(adaptive_pool)
{
    const int32_t n = call->row->n_spatial;
    const KlMeta *input = get_input(call, n);
    int64_t sizes[SPATIAL_MAX] = {0};
    kl_rules_spatial_each(call, 1, n, sizes);
    KlMeta out = *input;
    bool is_mean = true; /* of all positions: computed as a mean, with its strides */
    for (int32_t i = 0; i < n; i++) {
        kl_rules_require(call, sizes[i] > 0);
        is_mean = is_mean && sizes[i] == 1;
        out.shape[input->n_dims - n + i] = sizes[i];
    }
    (void)kl_rules_outs_like(result, call->row->n_outs, &out);
    kl_rules_settle_format(call, result, 1);
    /* an unbatched volume has four dims, too, but memory formats do not apply to it */
    bool is_volume = n == 3 && input->n_dims == n + 1;
    if (is_volume || (result->n_outs == 1 && is_mean)) {
        kl_rules_settle_plain(call, result);
    }
    return KL_OK;
}

KL_SHAPE(max_pool)
{
    /* With a gradient torch calls another kernel, whose result lies otherwise: it is recorded as that (composed.py). */
    bool is_other = call->row->n_spatial == 1 && call->row->n_outs == 1 && call->is_grad_enabled &&
                    kl_rules_needs_grad(call, 0);
    KlStatus status = shape_pool(call, result);
    return is_other ? KL_DECLINED : status;
}

/* The second output holds positions. */
KL_DTYPE(with_indices)
{
    KlStatus status = dtype_all_same(call, result);
    result->outs[1].dtype = KL_DTYPE_INT64;
    return status;
}

KL_SAVES(max_pool)
{
    kl_rules_save(call, saves, 0);
    if (result->n_outs > 1) {
        saves->outputs = 2;
    } else {
        kl_rules_save_new(result, saves, kl_meta_n_elements(&result->outs[0]), KL_DTYPE_INT64);
    }
}

/* With output size 1 torch computes a mean, which saves nothing. */
KL_SAVES(adaptive_avg_pool)
{
    const KlMeta *out = &result->outs[0];
    for (int32_t dim = out->n_dims - call->row->n_spatial; dim < out->n_dims; dim++) {
        if (out->shape[dim] != 1) {
            kl_rules_save(call, saves, 0);
        }
    }
}

/* --- patches ---------------------------------------------------------------------------------- */

/* Return the number of patches that fit into (height, width). */
static int64_t
count_windows(const Pool *window, const int64_t *size)
{
    return size_out(window, 0, size[0]) * size_out(window, 1, size[1]);
}

/* (n, c, h, w) -> (n, c * kernel, windows), or both without n */
KL_SHAPE(im2col)
{
    const KlMeta *input = kl_rules_tensor(call, 0, 3, 4);
    Pool window;
    if (!read_patches(call, 1, &window) || kl_meta_n_elements(input) == 0) {
        return KL_DECLINED;
    }
    int32_t channel = input->n_dims - 3;
    KlMeta out = *input;
    out.n_dims = input->n_dims - 1;
    out.shape[channel] *= window.kernel[0] * window.kernel[1];
    out.shape[channel + 1] = count_windows(&window, &input->shape[channel + 1]);
    kl_rules_check(call, out.shape[channel + 1] > 0);
    return kl_rules_out_plain(call, result, &out);
}

/* (n, c * kernel, windows) -> (n, c, h, w), or both without n */
KL_SHAPE(col2im)
{
    const KlMeta *input = kl_rules_tensor(call, 0, 2, 3);
    Pool window;
    int64_t size[2] = {0};
    kl_rules_spatial_each(call, 1, 2, size);
    if (!read_patches(call, 2, &window) || kl_meta_n_elements(input) == 0) {
        return KL_DECLINED;
    }
    int32_t channel = input->n_dims - 2;
    int64_t kernel = window.kernel[0] * window.kernel[1];
    kl_rules_check(call, input->shape[channel] % kernel == 0 &&
                             input->shape[channel + 1] == count_windows(&window, size));
    KlMeta out = *input;
    out.n_dims = input->n_dims + 1;
    out.shape[channel] /= kernel;
    out.shape[channel + 1] = size[0];
    out.shape[channel + 2] = size[1];
    return kl_rules_out_plain(call, result, &out);
}
