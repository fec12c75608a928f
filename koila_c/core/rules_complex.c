/* SPDX-License-Identifier: Apache-2.0 */
/* rules_complex.c - views of complex values as pairs of real numbers, and of their real and imaginary parts. */
#include "rules.h"

KL_SHAPE(conj)
{
    bool is_complex = kl_meta_dtype_is_complex(call->inputs[0]->dtype);
    return is_complex ? shape_alias(call, result) : shape_itself(call, result);
}

/* A view of every second number of a complex value. */
KL_SHAPE(imag)
{
    kl_rules_require(call, kl_meta_dtype_is_complex(call->inputs[0]->dtype));
    (void)shape_alias(call, result);
    for (int32_t dim = 0; dim < result->outs[0].n_dims; dim++) {
        result->outs[0].strides[dim] *= 2;
    }
    return KL_OK;
}

KL_SHAPE(real)
{
    bool is_complex = kl_meta_dtype_is_complex(call->inputs[0]->dtype);
    return is_complex ? shape_imag(call, result) : shape_itself(call, result);
}

KL_SHAPE(view_as_real)
{
    (void)shape_imag(call, result);
    KlMeta *out = &result->outs[0];
    if (out->n_dims == KL_DIMS_MAX) {
        return KL_DECLINED;
    }
    out->shape[out->n_dims] = 2;
    out->strides[out->n_dims] = 1;
    out->n_dims++;
    return KL_OK;
}

/* The last dim holds the pairs: its stride must be 1, and the other strides even. */
KL_SHAPE(view_as_complex)
{
    const KlMeta *input = call->inputs[0];
    int32_t last = input->n_dims - 1;
    kl_rules_require(call, input->dtype == KL_DTYPE_FLOAT32 || input->dtype == KL_DTYPE_FLOAT64);
    bool is_pairs = last >= 0 && input->shape[last] == 2;
    for (int32_t dim = 0; is_pairs && input->is_strided && dim <= last; dim++) {
        is_pairs = dim == last ? input->strides[dim] == 1 : input->strides[dim] % 2 == 0;
    }
    if (!is_pairs) {
        return KL_ILLEGAL;
    }
    (void)shape_alias(call, result);
    KlMeta *out = &result->outs[0];
    out->n_dims = last;
    for (int32_t dim = 0; dim < last; dim++) {
        out->strides[dim] /= 2;
    }
    result->dim_map[last] = -1;
    return KL_OK;
}

/* Two real tensors of one type. */
KL_DTYPE(to_complex)
{
    bool is_double = call->inputs[0]->dtype == KL_DTYPE_FLOAT64;
    kl_rules_require(call, is_double || call->inputs[0]->dtype == KL_DTYPE_FLOAT32);
    (void)dtype_all_same(call, result);
    return kl_rules_set_dtypes(result, is_double ? KL_DTYPE_COMPLEX128 : KL_DTYPE_COMPLEX64);
}
