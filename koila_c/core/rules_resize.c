/* SPDX-License-Identifier: Apache-2.0 */
/* rules_resize.c - ops that move or interpolate pixels: upsampling, padding, shuffles, sampling by a grid. */
#include "rules.h"

#include <string.h>

enum { SPATIAL_MAX = 3 };

/* --- upsampling: input, output_size, [align_corners,] scale_factors --------------------------- */

/* Return whether the sizes are given, as such or by scales. */
static bool
read_sizes(const KlCall *call, int32_t n, const KlMeta *input, int64_t *sizes)
{
    const KlArg *scales = &call->args[call->n_args - 1];
    bool has_scales = kl_rules_is_given(call, call->n_args - 1);
    if (kl_rules_is_given(call, 1)) {
        kl_rules_spatial_each(call, 1, n, sizes);
        return !has_scales;
    }
    if (!has_scales || scales->n != (uint32_t)n ||
        (scales->kind != KL_ARG_FLOATS && scales->kind != KL_ARG_INTS)) {
        return false;
    }
    for (int32_t i = 0; i < n; i++) {
        double scale =
            scales->kind == KL_ARG_FLOATS ? scales->u.floats[i] : (double)scales->u.ints[i];
        double size = (double)input->shape[2 + i] * scale;
        sizes[i] = size >= 1.0 && size < 1e15 ? (int64_t)size : 0;
    }
    return true;
}

KL_SHAPE(upsample)
{
    int64_t sizes[SPATIAL_MAX] = {0};
    const int32_t n = call->row->n_spatial;
    const KlMeta *input = kl_rules_tensor(call, 0, n + 2, n + 2);
    KlMeta out = *input;
    kl_rules_require(call, kl_meta_n_elements(input) > 0 && read_sizes(call, n, input, sizes));
    for (int32_t i = 0; i < n; i++) {
        kl_rules_require(call, sizes[i] > 0);
        out.shape[2 + i] = sizes[i];
    }
    return kl_rules_out_format(call, result, &out);
}

/* --- padding: input, pad, mode, value --------------------------------------------------------- */

typedef enum { PAD_CONSTANT, PAD_REFLECT, PAD_REPLICATE, PAD_CIRCULAR } PadMode;

static PadMode
read_mode(const KlCall *call)
{
    static const char *const names[] = {"constant", "reflect", "replicate", "circular"};
    const char *text = kl_rules_text(call, 2, "constant");
    int mode = 0;
    while (mode < 4 && strcmp(text, names[mode]) != 0) {
        mode++;
    }
    kl_rules_require(call, mode < 4);
    return (PadMode)mode;
}

/* Read the padding before and after each dim of the input. Return whether there are as many numbers as that takes. */
static bool
read_pads(const KlCall *call, const KlMeta *input, int64_t (*pads)[2])
{
    uint32_t n = 0;
    const int64_t *ints = kl_rules_ints(call, 1, &n);
    memset(pads, 0, sizeof(pads[0]) * KL_DIMS_MAX);
    for (uint32_t i = 0; i < n / 2 && i < (uint32_t)input->n_dims; i++) {
        int32_t dim = input->n_dims - 1 - (int32_t)i;
        pads[dim][0] = ints[2 * i];
        pads[dim][1] = ints[2 * i + 1];
    }
    return n % 2 == 0 && n / 2 <= (uint32_t)input->n_dims;
}

/* Whether the padding is within the limits of the modes that fill the border from the input. */
static bool
is_border(const KlMeta *input, int64_t (*pads)[2], PadMode mode, uint32_t n_given)
{
    int32_t n = (int32_t)(n_given / 2);
    bool is_fit = n >= 1 && n <= SPATIAL_MAX && kl_meta_n_elements(input) > 0 &&
                  (input->n_dims == n + 1 || input->n_dims == n + 2);
    for (int32_t dim = 0; dim < input->n_dims; dim++) {
        for (int side = 0; side < 2; side++) {
            int64_t most = mode == PAD_REFLECT    ? input->shape[dim] - 1
                           : mode == PAD_CIRCULAR ? input->shape[dim]
                                                  : pads[dim][side];
            is_fit = is_fit && pads[dim][side] >= 0 && pads[dim][side] <= most;
        }
    }
    return is_fit;
}

static KlStatus
shape_padded(const KlCall *call, PadMode mode, KlInferred *result)
{
    int64_t pads[KL_DIMS_MAX][2];
    const KlMeta *input = kl_rules_tensor(call, 0, 0, KL_DIMS_MAX);
    kl_rules_require(call,
                     read_pads(call, input, pads) &&
                         (mode == PAD_CONSTANT || is_border(input, pads, mode, call->args[1].n)));
    KlMeta *out = kl_rules_out(result, input);
    bool is_cut = true; /* no padding is positive: torch clones a slice of the input */
    for (int32_t dim = 0; dim < input->n_dims; dim++) {
        out->shape[dim] += pads[dim][0] + pads[dim][1];
        is_cut = is_cut && pads[dim][0] <= 0 && pads[dim][1] <= 0;
        kl_rules_require(call, out->shape[dim] >= 0 && -pads[dim][0] <= input->shape[dim] &&
                                   -pads[dim][1] <= input->shape[dim]);
    }
    if (mode == PAD_CIRCULAR) {
        kl_meta_set_contiguous(out);
    } else if (is_cut && mode == PAD_CONSTANT) {
        KlMeta part = *out;
        memcpy(part.strides, input->strides, sizeof(part.strides));
        part.is_strided = input->is_strided;
        kl_rules_preserve(out, &part);
    } else {
        kl_rules_settle_format(call, result, 1);
    }
    return KL_OK;
}

KL_SHAPE(pad)
{
    const PadMode mode = read_mode(call);
    const KlMeta *input = kl_rules_input(call, 0);
    bool is_declined = mode != PAD_CONSTANT && (kl_rules_is_given(call, 3) || input == NULL ||
                                                !kl_meta_dtype_is_float(input->dtype));
    return is_declined ? KL_DECLINED : shape_padded(call, mode, result);
}

KL_SHAPE(constant_pad)
{
    return shape_padded(call, PAD_CONSTANT, result);
}

KL_PLACE(pad)
{
    int64_t pads[KL_DIMS_MAX][2];
    const KlMeta *input = call->inputs[0];
    KlLabels labels = kl_rules_letters(input->n_dims);
    (void)read_pads(call, input, pads);
    for (int32_t dim = 0; dim < input->n_dims; dim++) {
        if (pads[dim][0] != 0 || pads[dim][1] != 0) {
            labels.of[dim] = 0;
        }
    }
    return kl_rules_wire_alike(call, result, labels, "the batch dim is padded");
}

KL_SAVES(pad)
{
    const PadMode mode = read_mode(call);
    if (mode == PAD_REFLECT || mode == PAD_REPLICATE) {
        kl_rules_save(call, saves, 0);
    }
}

/* --- shuffles --------------------------------------------------------------------------------- */

/* Read the factor; of an illegal one, 1. Return the input, of 3 dims at least. */
static const KlMeta *
read_factor(const KlCall *call, int64_t *factor)
{
    const KlMeta *input = kl_rules_tensor(call, 0, 3, KL_DIMS_MAX);
    int64_t given = kl_rules_int(call, 1, 0);
    bool is_legal = given >= 1 && given <= 1 << 20;
    kl_rules_require(call, is_legal && kl_meta_n_elements(input) > 0);
    *factor = is_legal ? given : 1;
    return input;
}

/* (*, c * r * r, h, w) -> (*, c, h * r, w * r) */
KL_SHAPE(pixel_shuffle)
{
    int64_t factor = 0;
    const KlMeta *input = read_factor(call, &factor);
    KlMeta out = *input;
    kl_rules_require(call, input->shape[input->n_dims - 3] % (factor * factor) == 0);
    out.shape[input->n_dims - 3] /= factor * factor;
    out.shape[input->n_dims - 2] *= factor;
    out.shape[input->n_dims - 1] *= factor;
    return kl_rules_out_format(call, result, &out);
}

KL_SHAPE(pixel_unshuffle)
{
    int64_t factor = 0;
    const KlMeta *input = read_factor(call, &factor);
    KlMeta out = *input;
    kl_rules_require(call, input->shape[input->n_dims - 2] % factor == 0 &&
                               input->shape[input->n_dims - 1] % factor == 0);
    out.shape[input->n_dims - 3] *= factor * factor;
    out.shape[input->n_dims - 2] /= factor;
    out.shape[input->n_dims - 1] /= factor;
    return kl_rules_out_format(call, result, &out);
}

KL_SHAPE(channel_shuffle)
{
    int64_t groups = 0;
    const KlMeta *input = read_factor(call, &groups);
    kl_rules_require(call, input->shape[1] % groups == 0);
    return kl_rules_out_format(call, result, input);
}

KL_PLACE(channel_shuffle)
{
    KlLabels labels = kl_rules_letters(call->inputs[0]->n_dims);
    labels.of[1] = 0;
    return kl_rules_wire_alike(call, result, labels, "the samples are shuffled");
}

/* --- grids ------------------------------------------------------------------------------------ */

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
