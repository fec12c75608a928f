/* SPDX-License-Identifier: Apache-2.0 */
/* rules_patch.c - patches as columns (im2col, col2im) and sampling by a grid. */
#include "rules.h"

enum { N = 2 };

/* kernel_size, dilation, padding, stride, from args[arg] on */
typedef struct {
    int64_t kernel[N];
    int64_t dilation[N];
    int64_t padding[N];
    int64_t stride[N];
} Window;

static bool
read_window(const KlCall *call, uint32_t arg, Window *window)
{
    int64_t *parts[] = {window->kernel, window->dilation, window->padding, window->stride};
    *window = (Window){.kernel = {0}};
    for (uint32_t i = 0; i < 4; i++) {
        kl_rules_spatial_each(call, arg + i, N, parts[i]);
    }
    bool is_legal = true;
    for (int i = 0; i < N; i++) {
        is_legal = is_legal && window->kernel[i] >= 1 && window->dilation[i] >= 1 &&
                   window->padding[i] >= 0 && window->stride[i] >= 1;
    }
    return is_legal;
}

/* Return the number of windows that fit into (height, width). */
static int64_t
count_windows(const Window *window, const int64_t *size)
{
    int64_t count = 1;
    for (int i = 0; i < N; i++) {
        int64_t free =
            size[i] + 2 * window->padding[i] - window->dilation[i] * (window->kernel[i] - 1) - 1;
        count *= free < 0 ? 0 : free / window->stride[i] + 1;
    }
    return count;
}

/* (n, c, h, w) -> (n, c * kernel, windows), or both without n */
KL_SHAPE(im2col)
{
    const KlMeta *input = kl_rules_tensor(call, 0, 3, 4);
    Window window;
    if (!read_window(call, 1, &window) || kl_meta_n_elements(input) == 0) {
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
    Window window;
    int64_t size[N] = {0};
    kl_rules_spatial_each(call, 1, N, size);
    if (!read_window(call, 2, &window) || kl_meta_n_elements(input) == 0) {
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

/* input (n, c, [d,] h, w), grid (n, [d',] h', w', 2 or 3) -> (n, c, [d',] h', w') */
KL_SHAPE(grid_sampler)
{
    const KlMeta *input = kl_rules_tensor(call, 0, 4, 5), *grid = kl_rules_tensor(call, 1, 4, 5);
    enum { BICUBIC = 2 };
    const bool is_bicubic = kl_rules_int(call, 2, 0) == BICUBIC;
    int32_t last = grid->n_dims - 1;
    kl_rules_require(call, input->n_dims == grid->n_dims && kl_meta_n_elements(input) > 0 &&
                               !(is_bicubic && input->n_dims == 5));
    kl_rules_check(call, input->shape[0] == grid->shape[0] && grid->shape[last] == last - 1);
    KlMeta out = *input;
    for (int32_t dim = 2; dim <= last; dim++) {
        out.shape[dim] = grid->shape[dim - 1];
    }
    return kl_rules_out_plain(call, result, &out);
}

KL_PLACE(grid_sampler)
{
    const KlWiring wiring = {.inputs = {{{1}}, {{1}}},
                             .outs = {{{1}}},
                             .reason = "the batch is in channels or positions"};
    return kl_rules_wire(call, result, &wiring);
}

/* theta (n, 2, 3) and size (n, c, h, w) -> (n, h, w, 2); with depth (n, 3, 4) -> (n, d, h, w, 3) */
KL_SHAPE(affine_grid)
{
    const KlMeta *theta = kl_rules_tensor(call, 0, 0, KL_DIMS_MAX);
    uint32_t n = 0;
    const int64_t *size = kl_rules_ints(call, 1, &n);
    if (n != 4 && n != 5) {
        return KL_DECLINED;
    }
    int64_t n_spatial = (int64_t)n - 2;
    kl_rules_check(call, theta->n_dims == 3 && theta->shape[0] == size[0] &&
                             theta->shape[1] == n_spatial && theta->shape[2] == n_spatial + 1);
    KlMeta out = {.n_dims = (int32_t)n, .shape = {size[0]}};
    for (uint32_t i = 2; i < n; i++) {
        kl_rules_require(call, size[i] >= 1);
        out.shape[i - 1] = size[i];
    }
    out.shape[n - 1] = n_spatial;
    return kl_rules_out_contiguous(result, &out);
}

KL_PLACE(affine_grid)
{
    KlStatus status =
        kl_rules_wire_alike(call, result, kl_rules_letters(1), "the batch is in theta");
    const KlPlace *place = &result->outs[0].place;
    if (status == KL_OK && result->split.mode == KL_MODE_ROWS &&
        !kl_rules_rewrite(result, 1, 0, 0, place->outer * place->inner)) {
        return KL_DECLINED;
    }
    return status;
}
