/* SPDX-License-Identifier: Apache-2.0 */
/* rules_resize.c - ops that move or interpolate pixels: upsampling, padding, shuffles, patches, grids. */
#include "rules.h"

#include <string.h>

enum { SPATIAL_MAX = 3 };

/* --- upsampling: input, output_size, [align_corners,] scale_factors --------------------------- */

static KlStatus
read_sizes(const KlCall *call, int32_t n, const KlMeta *input, int64_t *sizes)
{
    const KlArg *scales = &call->args[call->n_args - 1];
    bool has_scales = kl_rules_is_given(call, call->n_args - 1);
    if (kl_rules_is_given(call, 1)) {
        return has_scales ? KL_DECLINED : kl_rules_spatial_each(call, 1, n, sizes);
    }
    if (!has_scales || scales->n != (uint32_t)n ||
        (scales->kind != KL_ARG_FLOATS && scales->kind != KL_ARG_INTS)) {
        return KL_DECLINED;
    }
    for (int32_t i = 0; i < n; i++) {
        double scale =
            scales->kind == KL_ARG_FLOATS ? scales->u.floats[i] : (double)scales->u.ints[i];
        double size = (double)input->shape[2 + i] * scale;
        if (!(size >= 1.0 && size < 1e15)) {
            return KL_DECLINED;
        }
        sizes[i] = (int64_t)size;
    }
    return KL_OK;
}

KL_SHAPE(upsample)
{
    const KlMeta *input = kl_rules_input(call, 0);
    int64_t sizes[SPATIAL_MAX] = {0};
    const int32_t n = call->row->n_spatial;
    if (input == NULL || input->n_dims != n + 2 || kl_meta_n_elements(input) == 0) {
        return KL_DECLINED;
    }
    KlStatus status = read_sizes(call, n, input, sizes);
    if (status != KL_OK) {
        return status;
    }
    KlMeta out = *input;
    for (int32_t i = 0; i < n; i++) {
        if (sizes[i] <= 0) {
            return KL_DECLINED;
        }
        out.shape[2 + i] = sizes[i];
    }
    return kl_rules_out_format(call, result, &out, error);
}

/* --- padding: input, pad, mode, value --------------------------------------------------------- */

typedef enum { PAD_CONSTANT, PAD_REFLECT, PAD_REPLICATE, PAD_CIRCULAR } PadMode;

static KlStatus
read_mode(const KlCall *call, PadMode *mode)
{
    static const char *const names[] = {"constant", "reflect", "replicate", "circular"};
    const char *text = NULL;
    KlStatus status = kl_rules_text(call, 2, "constant", &text);
    for (int i = 0; status == KL_OK && i < 4; i++) {
        if (strcmp(text, names[i]) == 0) {
            *mode = (PadMode)i;
            return KL_OK;
        }
    }
    return KL_DECLINED;
}

/* Read the padding before and after each dim of the input. */
static KlStatus
read_pads(const KlCall *call, const KlMeta *input, int64_t (*pads)[2])
{
    const int64_t *ints = NULL;
    uint32_t n = 0;
    if (kl_rules_ints(call, 1, &ints, &n) != KL_OK || n % 2 != 0 ||
        n / 2 > (uint32_t)input->n_dims) {
        return KL_DECLINED;
    }
    memset(pads, 0, sizeof(pads[0]) * KL_DIMS_MAX);
    for (uint32_t i = 0; i < n / 2; i++) {
        int32_t dim = input->n_dims - 1 - (int32_t)i;
        pads[dim][0] = ints[2 * i];
        pads[dim][1] = ints[2 * i + 1];
    }
    return KL_OK;
}

/* Check the limits of the modes that fill the border from the input. */
static KlStatus
check_border(const KlMeta *input, int64_t (*pads)[2], PadMode mode, uint32_t n_given)
{
    int32_t n = (int32_t)(n_given / 2);
    if (n < 1 || n > SPATIAL_MAX || (input->n_dims != n + 1 && input->n_dims != n + 2) ||
        kl_meta_n_elements(input) == 0) {
        return KL_DECLINED;
    }
    for (int32_t dim = 0; dim < input->n_dims; dim++) {
        for (int side = 0; side < 2; side++) {
            int64_t most = mode == PAD_REFLECT    ? input->shape[dim] - 1
                           : mode == PAD_CIRCULAR ? input->shape[dim]
                                                  : pads[dim][side];
            if (pads[dim][side] < 0 || pads[dim][side] > most) {
                return KL_DECLINED;
            }
        }
    }
    return KL_OK;
}

static KlStatus
shape_padded(const KlCall *call, PadMode mode, KlInferred *result, KlError *error)
{
    int64_t pads[KL_DIMS_MAX][2];
    const KlMeta *input = kl_rules_input(call, 0);
    KlStatus status = input == NULL ? KL_DECLINED : read_pads(call, input, pads);
    if (status == KL_OK && mode != PAD_CONSTANT) {
        status = check_border(input, pads, mode, call->args[1].n);
    }
    status = status == KL_OK ? kl_rules_out(result, input, error) : status;
    if (status != KL_OK) {
        return status;
    }
    KlMeta *out = &result->outs[0];
    bool is_cut = true; /* no padding is positive: torch clones a slice of the input */
    for (int32_t dim = 0; dim < input->n_dims; dim++) {
        out->shape[dim] += pads[dim][0] + pads[dim][1];
        is_cut = is_cut && pads[dim][0] <= 0 && pads[dim][1] <= 0;
        if (out->shape[dim] < 0 || -pads[dim][0] > input->shape[dim] ||
            -pads[dim][1] > input->shape[dim]) {
            return KL_DECLINED;
        }
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
    PadMode mode = PAD_CONSTANT;
    KlStatus status = read_mode(call, &mode);
    const KlMeta *input = kl_rules_input(call, 0);
    if (status == KL_OK && mode != PAD_CONSTANT &&
        (kl_rules_is_given(call, 3) || input == NULL || !kl_meta_dtype_is_float(input->dtype))) {
        status = KL_DECLINED;
    }
    return status == KL_OK ? shape_padded(call, mode, result, error) : status;
}

KL_SHAPE(constant_pad)
{
    return shape_padded(call, PAD_CONSTANT, result, error);
}

KL_PLACE(pad)
{
    int64_t pads[KL_DIMS_MAX][2];
    const KlMeta *input = call->inputs[0];
    KlStatus status = read_pads(call, input, pads);
    KlLabels labels = kl_rules_letters(input->n_dims);
    for (int32_t dim = 0; status == KL_OK && dim < input->n_dims; dim++) {
        if (pads[dim][0] != 0 || pads[dim][1] != 0) {
            labels.of[dim] = 0;
        }
    }
    return status == KL_OK ? kl_rules_wire_alike(call, result, labels, "the batch dim is padded")
                           : status;
}

KL_SAVES(pad)
{
    PadMode mode = PAD_CONSTANT;
    if (read_mode(call, &mode) == KL_OK && (mode == PAD_REFLECT || mode == PAD_REPLICATE)) {
        kl_rules_save(call, saves, 0);
    }
}

/* --- shuffles --------------------------------------------------------------------------------- */

/* Get the input, of 3 dims at least, and the factor. */
static bool
read_factor(const KlCall *call, const KlMeta **input, int64_t *factor)
{
    *input = kl_rules_input(call, 0);
    return kl_rules_int(call, 1, 0, factor) == KL_OK && *input != NULL && (*input)->n_dims >= 3 &&
           *factor >= 1 && *factor <= 1 << 20 && kl_meta_n_elements(*input) > 0;
}

/* (*, c * r * r, h, w) -> (*, c, h * r, w * r) */
KL_SHAPE(pixel_shuffle)
{
    const KlMeta *input = NULL;
    int64_t factor = 0;
    if (!read_factor(call, &input, &factor) ||
        input->shape[input->n_dims - 3] % (factor * factor) != 0) {
        return KL_DECLINED;
    }
    KlMeta out = *input;
    out.shape[input->n_dims - 3] /= factor * factor;
    out.shape[input->n_dims - 2] *= factor;
    out.shape[input->n_dims - 1] *= factor;
    return kl_rules_out_format(call, result, &out, error);
}

KL_SHAPE(pixel_unshuffle)
{
    const KlMeta *input = NULL;
    int64_t factor = 0;
    if (!read_factor(call, &input, &factor) || input->shape[input->n_dims - 2] % factor != 0 ||
        input->shape[input->n_dims - 1] % factor != 0) {
        return KL_DECLINED;
    }
    KlMeta out = *input;
    out.shape[input->n_dims - 3] *= factor * factor;
    out.shape[input->n_dims - 2] /= factor;
    out.shape[input->n_dims - 1] /= factor;
    return kl_rules_out_format(call, result, &out, error);
}

KL_SHAPE(channel_shuffle)
{
    const KlMeta *input = NULL;
    int64_t groups = 0;
    return read_factor(call, &input, &groups) && input->shape[1] % groups == 0
               ? kl_rules_out_format(call, result, input, error)
               : KL_DECLINED;
}

KL_PLACE(channel_shuffle)
{
    KlLabels labels = kl_rules_letters(call->inputs[0]->n_dims);
    labels.of[1] = 0;
    return kl_rules_wire_alike(call, result, labels, "the samples are shuffled");
}
