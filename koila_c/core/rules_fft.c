/* SPDX-License-Identifier: Apache-2.0 */
/* rules_fft.c - the discrete Fourier transforms of ATen, of which those of torch.fft are composed. Each is along the
 * dims in args[1]; of the spectrum of a real signal it has the first half of the last one, or all of it. */
#include "rules.h"

/* The last word is the size of a real result in that dim, or a bool: for a real input, whether half is enough. */
KL_SHAPE(fft)
{
    const KlMeta *input = call->inputs[0];
    const bool is_real = !kl_meta_dtype_is_complex(input->dtype);
    const KlArg *last = &call->args[3];
    uint32_t n = 0;
    const int64_t *dims = kl_rules_ints(call, 1, &n);
    (void)kl_rules_dims(call, 1, input->n_dims); /* each at most once */
    kl_rules_require(call, n > 0 && (last->kind == KL_ARG_INT || last->kind == KL_ARG_BOOL));
    KlMeta *out = kl_rules_out(result, input);
    bool is_last = n <= 3 && kl_meta_is_contiguous(input);
    for (uint32_t i = 0; i < n; i++) {
        int32_t dim = kl_rules_wrap(call, dims[i], input->n_dims);
        kl_rules_require(call, dims[i] >= 0); /* ATen would read other memory */
        if (i + 1 == n && last->kind == KL_ARG_INT) {
            out->shape[dim] = last->u.i;
        } else if (i + 1 == n && is_real && last->u.i != 0) {
            out->shape[dim] = out->shape[dim] / 2 + 1;
        }
        result->dim_map[dim] = -1;
        is_last = is_last && dim >= input->n_dims - (int32_t)n;
    }
    if (is_last) {
        kl_meta_set_contiguous(out);
    }
    return KL_OK;
}

/* A copy with the transformed dims last; and of a spectrum of several dims, which the transform to reals overwrites. A
 * real input is saved, and the gradient of half a spectrum is transformed as a complex one of all entries. */
KL_SAVES(fft)
{
    uint32_t n = 0;
    (void)kl_rules_ints(call, 1, &n);
    const int64_t n_bytes = kl_meta_n_bytes(call->inputs[0]);
    const bool is_copied = !kl_meta_is_contiguous(&result->outs[0]);
    const bool is_to_real = !kl_meta_dtype_is_complex(result->outs[0].dtype);
    saves->bytes_workspace = (is_copied ? n_bytes : 0) + (is_to_real && n > 1 ? 2 * n_bytes : 0);
    if (!kl_meta_dtype_is_complex(call->inputs[0]->dtype)) {
        kl_rules_save(call, saves, 0);
        saves->bytes_backward = (!kl_rules_bool(call, 3, false) ? 1 : is_copied ? 6 : 4) * n_bytes;
    }
}
