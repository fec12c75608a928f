/* SPDX-License-Identifier: Apache-2.0 */
/* rules_fft.c - the discrete Fourier transforms of ATen, of which those of torch.fft are composed: each along the dims in
 * args[1], of which a real signal's spectrum has the first half of the last one. */
#include "rules.h"

/* Make the output: that dim has `size` entries. Return whether the transformed dims are the last ones of a contiguous
 * input, where no library has to copy it. */
static bool
transform(const KlCall *call, KlInferred *result, int64_t size)
{
    const KlMeta *input = call->inputs[0];
    uint32_t n = 0;
    const int64_t *dims = kl_rules_ints(call, 1, &n);
    kl_rules_require(call, n > 0); /* and none below 0: ATen would read other memory */
    (void)kl_rules_dims(call, 1, input->n_dims); /* each at most once */
    KlMeta *out = kl_rules_out(result, input);
    bool is_last = n <= 3 && kl_meta_is_contiguous(input);
    for (uint32_t i = 0; i < n; i++) {
        int32_t dim = kl_rules_wrap(call, dims[i], input->n_dims);
        kl_rules_require(call, dims[i] >= 0);
        out->shape[dim] = i + 1 == n && size > 0 ? size : out->shape[dim];
        result->dim_map[dim] = -1;
        is_last = is_last && dim >= input->n_dims - (int32_t)n;
    }
    if (is_last) {
        kl_meta_set_contiguous(out);
    }
    return is_last;
}

/* The size of the last dim that the call transforms. */
static int64_t
last_size(const KlCall *call)
{
    uint32_t n = 0;
    const int64_t *dims = kl_rules_ints(call, 1, &n);
    return n == 0
               ? 0
               : call->inputs[0]->shape[kl_rules_wrap(call, dims[n - 1], call->inputs[0]->n_dims)];
}

KL_SHAPE(fft_c2c)
{
    (void)transform(call, result, 0);
    return KL_OK;
}

KL_SHAPE(fft_c2r)
{
    (void)transform(call, result, kl_rules_int(call, 3, 0));
    return KL_OK;
}

KL_SHAPE(fft_r2c)
{
    (void)transform(call, result, kl_rules_bool(call, 3, false) ? last_size(call) / 2 + 1 : 0);
    return KL_OK;
}

/* A copy with the transformed dims last; and of a spectrum of several dims, which the transforms of reals overwrite. */
KL_SAVES(fft)
{
    uint32_t n = 0;
    (void)kl_rules_ints(call, 1, &n);
    bool is_overwritten = n > 1 && !kl_meta_dtype_is_complex(result->outs[0].dtype);
    int64_t n_bytes = kl_meta_n_bytes(call->inputs[0]);
    saves->bytes_workspace = (kl_meta_is_contiguous(&result->outs[0]) ? 0 : n_bytes) +
                             (is_overwritten ? 2 * n_bytes : 0);
}

/* Its backward transforms a complex gradient of all entries. */
KL_SAVES(fft_r2c)
{
    saves_fft(call, result, saves);
    kl_rules_save(call, saves, 0);
    int64_t n_bytes = kl_meta_n_bytes(call->inputs[0]);
    bool is_relaid = saves->bytes_workspace > 0;
    saves->bytes_backward =
        !kl_rules_bool(call, 3, false) ? n_bytes : (is_relaid ? 6 : 4) * n_bytes;
}
