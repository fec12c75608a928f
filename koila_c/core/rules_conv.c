/* SPDX-License-Identifier: Apache-2.0 */
/* rules_conv.c - convolutions, plain and transposed, of one to three spatial dims, batched or not. */
#include "rules.h"

#include <string.h>

enum { SPATIAL_MAX = 3 };
static const int64_t zeros[SPATIAL_MAX] = {0};

void
kl_rules_spatial(const KlCall *call, uint32_t arg, int32_t n, const int64_t *fallback,
                 int64_t *values)
{
    uint32_t n_given = 0;
    const int64_t *ints = kl_rules_ints(call, arg, &n_given);
    const bool is_each = n_given == (uint32_t)n;
    kl_rules_require(call, n_given <= 1 || is_each);
    for (int32_t i = 0; i < n; i++) {
        values[i] = n_given == 0 ? fallback[i] : ints[is_each ? i : 0];
    }
}

void
kl_rules_spatial_each(const KlCall *call, uint32_t arg, int32_t n, int64_t *values)
{
    const KlArg *given = &call->args[arg];
    kl_rules_require(call, kl_rules_is_given(call, arg) &&
                               (given->kind != KL_ARG_INTS || given->n == (uint32_t)n));
    kl_rules_spatial(call, arg, n, values, values);
}

/* The parameters of a convolution; arrays have an entry for each spatial dim. */
typedef struct {
    int32_t n;                                                   /* spatial dims */
    bool is_last, is_transposed, is_same, is_dilated, is_padded; /* the last two in some dim */
    int64_t stride[SPATIAL_MAX], padding[SPATIAL_MAX];
    int64_t dilation[SPATIAL_MAX], output_padding[SPATIAL_MAX];
    int64_t groups, n_kernel, n_stride,
        n_rows; /* positions of the kernel, strides multiplied, samples */
} Conv;

/* conv: input, weight, bias, stride, padding, dilation, groups
 * transposed: input, weight, bias, stride, padding, output_padding, groups, dilation */
static KlStatus
read_conv(const KlCall *call, Conv *conv)
{
    static const int64_t ones[SPATIAL_MAX] = {1, 1, 1};
    const int32_t n = call->row->n_spatial;
    const bool is_transposed = call->row->is_transposed;
    *conv = (Conv){.n = n, .is_transposed = is_transposed};
    kl_rules_spatial(call, 3, n, ones, conv->stride);
    if (is_transposed) {
        kl_rules_spatial(call, 5, n, zeros, conv->output_padding);
    }
    if (is_transposed || call->args[4].kind != KL_ARG_TEXT) {
        kl_rules_spatial(call, 4, n, zeros, conv->padding);
    } else {
        conv->is_same = strcmp(call->args[4].u.text, "same") == 0;
        kl_rules_require(call, conv->is_same || strcmp(call->args[4].u.text, "valid") == 0);
    }
    kl_rules_spatial(call, is_transposed ? 7 : 5, n, ones, conv->dilation);
    conv->groups = kl_rules_int(call, 6, 1);
    bool is_declined = conv->groups <= 0;
    for (int32_t i = 0; i < n; i++) {
        is_declined |= conv->stride[i] <= 0 || conv->dilation[i] <= 0 || conv->padding[i] < 0 ||
                       conv->output_padding[i] < 0 ||
                       conv->output_padding[i] >= kl_larger(conv->stride[i], conv->dilation[i]) ||
                       (conv->is_same && conv->stride[i] != 1);
    }
    return is_declined ? KL_DECLINED : KL_OK;
}

static KlStatus
check_operands(const KlCall *call, const Conv *conv)
{
    const KlMeta *input = kl_rules_tensor(call, 0, 0, KL_DIMS_MAX);
    const KlMeta *weight = kl_rules_tensor(call, 1, 0, KL_DIMS_MAX);
    int32_t n = conv->n;
    if (weight->n_dims != n + 2 || (input->n_dims != n + 1 && input->n_dims != n + 2)) {
        return KL_ILLEGAL;
    }
    const KlMeta *bias = kl_rules_optional(call, 2, 1, 1);
    int64_t channels = input->shape[input->n_dims - n - 1];
    int64_t expected = conv->is_transposed ? weight->shape[0] : weight->shape[1] * conv->groups;
    kl_rules_check(call, channels == expected);
    int64_t channels_out = conv->is_transposed ? weight->shape[1] * conv->groups : weight->shape[0];
    kl_rules_require(call, weight->shape[0] % conv->groups == 0 && channels != 0 &&
                               channels_out != 0 &&
                               (bias == NULL || bias->shape[0] == channels_out));
    return KL_OK;
}

static int64_t
size_out(const Conv *conv, int32_t i, int64_t size, int64_t kernel)
{
    int64_t reach = conv->dilation[i] * (kernel - 1);
    if (conv->is_transposed) {
        return (size - 1) * conv->stride[i] - 2 * conv->padding[i] + reach +
               conv->output_padding[i] + 1;
    }
    int64_t free = size + 2 * conv->padding[i] - reach - 1;
    return conv->is_same ? size : free < 0 ? 0 : free / conv->stride[i] + 1;
}

KL_SHAPE(conv)
{
    Conv conv;
    const int32_t n = call->row->n_spatial;
    KlStatus status = read_conv(call, &conv);
    status = status == KL_OK ? check_operands(call, &conv) : status;
    if (status != KL_OK) {
        return status;
    }
    const KlMeta *input = kl_rules_input(call, 0), *weight = kl_rules_input(call, 1);
    KlMeta out = *input;
    out.shape[input->n_dims - n - 1] =
        conv.is_transposed ? weight->shape[1] * conv.groups : weight->shape[0];
    for (int32_t i = 0; i < n; i++) {
        int32_t dim = input->n_dims - n + i;
        kl_rules_require(call, input->shape[dim] != 0 && weight->shape[2 + i] != 0);
        out.shape[dim] = size_out(&conv, i, input->shape[dim], weight->shape[2 + i]);
        kl_rules_check(call, out.shape[dim] > 0);
    }
    (void)kl_rules_out(result, &out);
    bool is_copied = n == 1 && input->is_strided && !kl_meta_is_contiguous(input);
    if (is_copied && kl_rules_is_plain(weight)) {
        kl_meta_set_contiguous(&result->outs[0]); /* with one spatial dim the copy is row-major */
    } else {
        kl_rules_settle_format(call, result, 2);
    }
    return KL_OK;
}

/* Whether the kernel reads the input without a copy: if it is row-major, or channels last if input or weight is. With
 * unknown strides it is taken to make a copy. Set `is_last` if the kernel is one for channels last. */
static bool
is_taken_as_it_lies(const KlCall *call, bool is_in_blocks, bool *is_last)
{
    const KlMeta *input = call->inputs[0], *weight = call->inputs[1];
    *is_last = (input->n_dims == 4 || (input->n_dims == 5 && is_in_blocks)) &&
               (kl_rules_is_like_channels_last(weight) ||
                (input->is_strided && kl_rules_is_like_channels_last(input)));
    return input->is_strided && (!*is_last            ? kl_meta_is_contiguous(input)
                                 : input->n_dims == 4 ? kl_rules_is_channels_last(input)
                                                      : kl_rules_is_like_channels_last(input));
}

/* The operands of oneDNN's kernels. A convolution computes `to` from `from`, a transposed one `from` from `to`. */
typedef struct {
    const KlMeta *from, *to, *weight;
    const Conv *conv;
    int64_t n_from, n_to;             /* channels */
    int64_t width;                    /* channels that lie side by side */
    bool is_strided, is_back_blocked; /* the gradient has channels last; a blocked layout */
    bool has_bias,
        is_emulated; /* a transposed convolution adds one, in the blocked layout; to a copy */
    bool is_few;     /* so few channels that only the backward may lay them in blocks */
    bool is_odd;     /* groups that fill no blocks: operands stay as they lie, results are copied */
    bool is_filled;  /* blocks are filled up with channels of zeros */
    bool is_plain;   /* depthwise, of volumes or dilated: a kernel for any layout */
} Sides;

static int64_t
fill(int64_t n, int64_t width)
{
    return (n + width - 1) / width * width;
}

/* Return the bytes of a side of n channels in oneDNN's blocked layout. */
static int64_t
count_blocked(const Sides *sides, const KlMeta *meta, int64_t n, int64_t width)
{
    int64_t n_bytes = kl_meta_n_bytes(meta);
    return sides->is_filled && n > 0 ? n_bytes / n * fill(n, width) : n_bytes;
}

/* Return the bytes of the weight with one or both of its channel dims in blocks. */
static int64_t
count_weight(const Sides *sides, int64_t width, bool is_from_filled)
{
    int64_t n_from = sides->n_from, n = n_from * sides->n_to;
    int64_t n_bytes = kl_meta_n_bytes(sides->weight);
    return sides->conv->groups > 1 || n == 0
               ? n_bytes
               : n_bytes / n * (is_from_filled ? fill(n_from, width) : n_from) *
                     fill(sides->n_to, width);
}

/* Return the temporary bytes of a pass, including its result, as measured: operands are copied into blocks, and the
 * result is copied back. */
static int64_t
pass_forward(const Sides *sides)
{
    int64_t width = sides->width, n_copied = kl_meta_n_bytes(sides->to);
    int64_t n_from = sides->is_few ? 0 : count_blocked(sides, sides->from, sides->n_from, width);
    n_from += count_weight(sides, width, !sides->is_few);
    n_copied *= sides->is_plain && !sides->conv->is_dilated ? 2 : 1;
    return count_blocked(sides, sides->to, sides->n_to, width) +
           kl_larger(sides->is_odd ? 0 : n_from, n_copied);
}

/* With strides, the gradient has channels last, is copied in that layout, and then made contiguous. */
static int64_t
pass_back(const Sides *sides)
{
    int64_t width = sides->width, n = kl_meta_n_bytes(sides->from), most = 0;
    int64_t n_from = count_blocked(sides, sides->from, sides->n_from, width);
    int64_t n_weight = count_weight(sides, width, true);
    int64_t n_to = count_blocked(sides, sides->to, sides->n_to, width) + n_weight;
    if (sides->is_strided) {
        int64_t n_given = sides->n_to > 1 ? kl_meta_n_bytes(sides->to) : 0;
        most = kl_larger(n_given + n_weight + n, sides->n_from > 1 ? 3 * n : 2 * n);
    } else if (sides->is_odd) {
        return 2 * n;
    }
    int64_t n_added = sides->is_emulated ? 2 * n : n;
    most = sides->has_bias ? kl_larger(most, n_from + n_to + n_added) : most;
    return sides->is_back_blocked ? kl_larger(most, n_from + kl_larger(n_to, n)) : most;
}

static int64_t
pass_to_weight(const Sides *sides)
{
    int64_t n = sides->n_from, width = sides->width;
    bool is_taken = sides->is_few && (width > 8 ? n < 4 : n == 3);
    width = sides->is_few && !is_taken ? 8 : width;
    return (is_taken ? 0 : count_blocked(sides, sides->from, n, width)) +
           count_blocked(sides, sides->to, sides->n_to, width) +
           count_weight(sides, width, !is_taken);
}

/* 16-bit kernels that need channels last (with AMX, or float16 arithmetic) copy the operands to that layout, and copy the
 * result back twice. They also hold, as measured, a row and the weight, padded, for any chunk size. */
static void
work_in_tiles(const KlCall *call, const Sides *sides, int64_t n_in, int64_t n_out, KlSaves *saves)
{
    int64_t n = sides->n_from, n_groups = sides->conv->groups;
    int64_t n_sides =
        count_blocked(sides, sides->from, n, 32) + count_blocked(sides, sides->to, sides->n_to, 32);
    n_sides *= n_groups > 1 && n_groups < n ? fill(n / n_groups, 32) * n_groups / n : 1;
    saves->bytes_row = 2 * n_sides / sides->conv->n_rows + 3 * count_weight(sides, 32, true);
    saves->bytes_workspace = kl_larger(n_in, 2 * n_out);
    int64_t to_input = kl_rules_needs_grad(call, 0) ? kl_larger(n_out, 2 * n_in) : 0;
    saves->bytes_backward = kl_larger(kl_rules_needs_grad(call, 1) ? n_in + n_out : 0, to_input);
}

/* Say whether the weight's gradient takes operands as they lie, patch by patch, as measured. */
static bool
is_weight_in_patches(const Sides *sides)
{
    const Conv *conv = sides->conv;
    const bool is_volume = conv->n == 3, is_any = sides->is_odd || sides->is_plain;
    if (is_any || sides->width <= 8) {
        return is_any || conv->is_dilated || (is_volume && conv->is_padded);
    }
    int64_t n_block = is_volume || conv->is_dilated ? 16 : 8;
    int64_t n_from = sides->n_from / conv->groups, n_to = sides->n_to / conv->groups;
    bool is_part = sides->is_filled ? sides->is_few && n_from >= 4 && n_block > 8
                                    : n_from % n_block != 0 || n_to % n_block != 0;
    return is_part || (is_volume && conv->is_dilated);
}

/* Return the patches of a plane, and sums of the weight, where its gradient is computed patch by patch. */
static int64_t
count_plane(const Sides *sides)
{
    int64_t n = sides->n_from * sides->conv->n_kernel / sides->conv->groups;
    for (int32_t i = 1; i <= 2 && i <= sides->conv->n; i++) {
        n *= sides->to->shape[sides->to->n_dims - i];
    }
    return n * (int64_t)sizeof(float) + 4 * kl_meta_n_bytes(sides->weight);
}

/* With channels last, operands stay as they lie, and the weight is copied, as measured. Its gradient, and a weight whose
 * groups fill no blocks, is computed with the channels of each group in whole blocks, but by a kernel of its own if it is
 * depthwise and small. Of 16 bits, sums are of 32 bits, and blocks twice as wide. */
static void
work_as_it_lies(const Sides *sides, bool is_depthwise, bool is_weight, KlSaves *saves)
{
    const Conv *conv = sides->conv;
    const bool is_half = sides->to->dtype != KL_DTYPE_FLOAT32;
    int64_t width = is_half && !is_depthwise ? 2 * sides->width : sides->width;
    int64_t of_from = sides->n_from / conv->groups, of_to = sides->n_to / conv->groups;
    int64_t n = kl_meta_n_bytes(sides->weight),
            n_blocks = fill(of_from, width) * fill(of_to, width);
    n_blocks *= n / (of_from * of_to) * (!is_half ? 1 : is_depthwise ? 4 : 2);
    bool is_small = is_depthwise && conv->n == 2 && conv->n_kernel <= 9 && !conv->is_dilated;
    saves->bytes_workspace = sides->is_odd ? n_blocks : n;
    int64_t n_weight = (conv->n_kernel > 1 ? n : 0) + (is_small ? n : n_blocks);
    saves->bytes_backward = is_weight ? n_weight : saves->bytes_workspace;
}

static void
work_in_blocks(const KlCall *call, const KlMeta *out, const Conv *conv, KlSaves *saves)
{
    const bool is_transposed = conv->is_transposed;
    const bool is_input = kl_rules_needs_grad(call, 0), is_weight = kl_rules_needs_grad(call, 1);
    const bool is_single = out->dtype == KL_DTYPE_FLOAT32; /* others were not measured */
    const KlMeta *input = call->inputs[0], *weight = call->inputs[1];
    const KlMeta *from = is_transposed ? out : input, *to = is_transposed ? input : out;
    int64_t n_in = kl_meta_n_bytes(input), n_out = kl_meta_n_bytes(out), n_groups = conv->groups;
    int64_t n_kernel = conv->n_kernel, n_stride = conv->n_stride;
    int64_t n_from = from->shape[from->n_dims - conv->n - 1], n_squared = n_from * n_from;
    int64_t n_to = to->shape[to->n_dims - conv->n - 1];
    int64_t of_to = n_to / n_groups, width = kl_larger(call->block_width, 1);
    bool is_one = n_kernel == 1 && (n_stride == 1 || (!is_transposed && conv->n < 3));
    const bool is_depthwise = n_groups > 1 && n_groups == n_from && n_groups == n_to;
    const bool is_plain = is_depthwise && is_single && (conv->n == 3 || conv->is_dilated);
    Sides sides = {.from = from, .to = to, .weight = weight, .conv = conv, .width = width};
    sides.n_from = n_from, sides.n_to = n_to;
    sides.is_plain = is_plain;
    sides.has_bias = is_transposed && !is_plain && kl_rules_is_given(call, 2);
    sides.is_emulated = (call->emulated_halves >> out->dtype & 1) != 0;
    sides.is_filled = n_groups == 1 || (is_depthwise && !is_plain);
    sides.is_few = n_groups == 1 && !is_one && n_from < width;
    bool is_own = is_depthwise && out->dtype == KL_DTYPE_BFLOAT16; /* a kernel in blocks */
    if ((call->tiled_halves >> out->dtype & 1) != 0 && !is_own && !conv->is_last) {
        work_in_tiles(call, &sides, n_in, n_out, saves);
        return;
    }
    int64_t n_least = width > 8 ? 4 : 8; /* AVX-512 has kernels for groups in blocks of 4, too */
    sides.is_odd = is_single && n_groups > 1 && !is_depthwise &&
                   (n_from / n_groups % n_least != 0 || of_to % n_least != 0);
    if (conv->is_last) {
        work_as_it_lies(&sides, is_depthwise, is_weight, saves);
        return;
    }
    int64_t most = sides.is_odd ? 8 : is_single ? width : 0; /* channels, for kernels with blocks */
    sides.is_strided = n_stride > 1 && !is_depthwise && (n_groups == 1 || of_to > most);
    /* With strides the gradient has blocks only with groups, a large kernel on AVX-512, or a dilated 1x1 kernel. */
    bool is_large = width > 8 && n_kernel >= (n_to < 8 ? 56 : 72) * n_squared &&
                    (124 - n_kernel / n_squared) * from->shape[from->n_dims - 1] <= 720;
    sides.is_back_blocked =
        n_stride == 1 || n_groups > 1 || is_large || (is_one && conv->is_dilated);
    int64_t to_input = is_transposed ? pass_forward(&sides) : pass_back(&sides);
    saves->bytes_workspace = (is_transposed ? pass_back(&sides) : pass_forward(&sides)) - n_out;
    bool is_patch = is_single && is_weight_in_patches(&sides);
    saves->bytes_backward = kl_larger(is_weight && !is_patch ? pass_to_weight(&sides) : 0,
                                      is_input ? to_input - n_in : 0);
    if (n_stride > 1) { /* what one row is laid out in */
        saves->bytes_row =
            kl_larger(kl_meta_n_bytes(to), kl_meta_n_bytes(from) / n_stride) / conv->n_rows;
    }
    if (is_patch && !is_input) { /* the gradient of the input needs more */
        saves->bytes_row = kl_larger(saves->bytes_row, count_plane(&sides));
    }
}

/* The other kernels write patches as columns (im2col), for all rows at once or row by row. They copy the groups, compute
 * one after the other, and join the results. */
static void
work_in_patches(const KlCall *call, const KlMeta *out, const Conv *conv, KlSaves *saves)
{
    const bool is_transposed = conv->is_transposed, is_dilated = conv->is_dilated;
    const KlMeta *input = call->inputs[0], *weight = call->inputs[1];
    const KlMeta *wide = is_transposed ? input : out; /* it has a patch for each position */
    const bool is_volume = conv->n == 3, is_plain = conv->n_kernel == 1 && conv->n_stride == 1;
    int64_t n_patch = weight->shape[1] * conv->n_kernel;
    int64_t n_places = kl_meta_n_elements(wide) / wide->shape[wide->n_dims - conv->n - 1];
    const bool has_copies = conv->groups > 1 && (is_transposed || is_dilated || !is_volume);
    int64_t n_in = kl_meta_n_bytes(input), n_out = kl_meta_n_bytes(out);
    int64_t n_all = n_places * n_patch * (int64_t)kl_meta_dtype_bytes(out->dtype);
    n_all *= is_plain ? 0 : conv->groups > 1 && !has_copies ? conv->groups : 1;
    if (is_dilated || is_transposed) {
        saves->bytes_row = n_all / conv->n_rows;
        n_all = is_dilated || is_volume ? 0 : n_all;
    }
    /* The result of a transposed volume begins as large as the input, and grows if it must; joined groups are exact. */
    int64_t n_made = is_transposed && is_volume ? kl_larger(n_in, n_out) : n_out;
    saves->bytes_workspace = n_all;
    saves->bytes_backward = is_transposed ? 0 : n_all;
    if (has_copies) {
        int64_t of_group = n_in / conv->groups, in_all = kl_rules_needs_grad(call, 0) ? n_in : 0;
        saves->bytes_workspace = n_made - n_out + kl_larger(n_all + of_group, n_out);
        saves->bytes_backward =
            kl_larger(saves->bytes_backward + of_group + n_out / conv->groups, in_all);
    } else {
        saves->bytes_workspace += is_transposed && is_volume && n_in < n_out ? n_in : 0;
        saves->bytes_extra = n_made - n_out;
        saves->is_extra_rows = true;
    }
}

static void
work(const KlCall *call, const KlInferred *result, Conv *conv, KlSaves *saves)
{
    const KlMeta *input = call->inputs[0], *weight = call->inputs[1], *out = &result->outs[0];
    if (out->device != 0) {
        return;
    }
    conv->n_rows = input->n_dims == weight->n_dims ? kl_larger(input->shape[0], 1) : 1;
    conv->n_kernel = conv->n_stride = 1;
    for (int32_t i = 0; i < conv->n; i++) {
        conv->n_kernel *= weight->shape[2 + i];
        conv->n_stride *= conv->stride[i];
        conv->is_dilated = conv->is_dilated || conv->dilation[i] > 1;
        conv->is_padded = conv->is_padded || conv->padding[i] > 0;
    }
    bool is_in_blocks =
        out->dtype == KL_DTYPE_FLOAT32 || (call->blocked_halves >> out->dtype & 1) != 0;
    bool is_taken = is_taken_as_it_lies(call, is_in_blocks, &conv->is_last);
    if (is_in_blocks) {
        work_in_blocks(call, out, conv, saves);
    } else {
        work_in_patches(call, out, conv, saves);
    }
    if (!is_taken) {
        saves->bytes_workspace += kl_meta_n_bytes(input);
        saves->bytes_backward += kl_meta_n_bytes(input);
    }
}

/* If padding="same" must pad the two sides differently, torch pads the input first and saves the padded copy. */
KL_SAVES(conv)
{
    Conv conv;
    const KlMeta *input = call->inputs[0], *weight = call->inputs[1];
    int64_t n_padded = 1;
    bool is_padded = false;
    kl_rules_save(call, saves, 0);
    kl_rules_save(call, saves, 1);
    (void)read_conv(call, &conv);
    work(call, result, &conv, saves);
    for (int32_t dim = 0; conv.is_same && dim < input->n_dims; dim++) {
        int32_t i = dim - (input->n_dims - conv.n);
        bool is_uneven = i >= 0 && conv.dilation[i] * (weight->shape[2 + i] - 1) % 2 != 0;
        n_padded *= input->shape[dim] + (is_uneven ? 1 : 0);
        is_padded = is_padded || is_uneven;
    }
    if (is_padded) {
        saves->inputs = 0;
        kl_rules_save(call, saves, 1);
        kl_rules_save_new(result, saves, n_padded, input->dtype);
    }
}
