/* SPDX-License-Identifier: Apache-2.0 */
/* rules_fft.c - discrete Fourier transforms: of all rows alike, along dims that do not hold the rows. */
#include <string.h>

#include "rules.h"

/* The words of a transform: the input; the sizes to which its dims are cut or padded; these dims; the norm. */
enum { SIZES = 1, DIMS = 2, NORM = 3 };

typedef struct Transform {
    int32_t n;
    int32_t dims[KL_DIMS_MAX];  /* [n] in the call's order */
    int64_t sizes[KL_DIMS_MAX]; /* [n] entries of the signal, or both ways if it is complex */
    int64_t reads[KL_DIMS_MAX]; /* [n] entries of the input, cut or padded */
    bool is_cut, is_padded;
    bool is_last; /* these are the last dims of a contiguous input, at most three */
} Transform;

/* Read the arguments. `is_half`: the input is the first half of the spectrum of a real signal, in its last dim. */
static Transform
read_transform(const KlCall *call, bool is_half)
{
    const KlMeta *input = call->inputs[0];
    uint32_t n_sizes = 0, n_dims = 0, done = 0;
    const int64_t *sizes = kl_rules_ints(call, SIZES, &n_sizes);
    const int64_t *dims = kl_rules_ints(call, DIMS, &n_dims);
    const char *norm = kl_rules_text(call, NORM, "backward");
    kl_rules_require(call, strcmp(norm, "backward") == 0 || strcmp(norm, "forward") == 0 ||
                               strcmp(norm, "ortho") == 0);
    const uint32_t n_usual = n_sizes > 0 ? n_sizes : (uint32_t)input->n_dims;
    const uint32_t n_spatial = (uint32_t)call->row->n_spatial;
    const uint32_t n = n_dims > 0 ? n_dims : n_spatial > 0 ? n_spatial : n_usual;
    const bool is_legal = n > 0 && n <= (uint32_t)input->n_dims && (n_sizes == 0 || n_sizes == n);
    kl_rules_require(call, is_legal);
    Transform made = {.n = is_legal ? (int32_t)n : 0,
                      .is_last = n <= 3 && kl_meta_is_contiguous(input)};
    for (int32_t i = 0; i < made.n; i++) {
        const int32_t dim = kl_rules_wrap(call, n_dims > 0 ? dims[i] : i - made.n, input->n_dims);
        const bool is_half_dim = is_half && i + 1 == made.n;
        const bool is_given = n_sizes > 0 && sizes[i] != -1;
        const int64_t own = input->shape[dim];
        const int64_t size = is_given ? sizes[i] : is_half_dim ? 2 * (own - 1) : own;
        kl_rules_require(call, (done >> dim & 1) == 0 && size > 0); /* each dim at most once */
        done |= 1U << dim;
        made.dims[i] = dim;
        made.sizes[i] = size;
        made.reads[i] = is_half_dim ? size / 2 + 1 : size;
        made.is_cut |= made.reads[i] < own;
        made.is_padded |= made.reads[i] > own;
        made.is_last = made.is_last && dim >= input->n_dims - made.n;
    }
    return made;
}

/* Make the output, of which the last dim is the first half of a spectrum if `is_half_out`. */
static KlStatus
transform(const KlCall *call, KlInferred *result, bool is_half_in, bool is_half_out)
{
    const Transform made = read_transform(call, is_half_in);
    KlMeta *out = kl_rules_out(result, call->inputs[0]);
    for (int32_t i = 0; i < made.n; i++) {
        const bool is_half = is_half_out && i + 1 == made.n;
        out->shape[made.dims[i]] = is_half ? made.sizes[i] / 2 + 1 : made.sizes[i];
        result->dim_map[made.dims[i]] = -1;
    }
    if (made.is_last) { /* all libraries write such results so */
        kl_meta_set_contiguous(out);
    }
    return KL_OK;
}

KL_SHAPE(fft)
{
    return transform(call, result, false, false);
}

/* Of a real input it is a conjugated view of other memory. */
KL_SHAPE(ifft)
{
    bool is_view = call->row->n_spatial == 1 && !kl_meta_dtype_is_complex(call->inputs[0]->dtype);
    kl_rules_require(call, !is_view);
    return transform(call, result, false, false);
}

KL_SHAPE(rfft)
{
    kl_rules_check(call, !kl_meta_dtype_is_complex(call->inputs[0]->dtype));
    return transform(call, result, false, true);
}

KL_SHAPE(irfft)
{
    return transform(call, result, true, false);
}

/* The complex dtype of the first input. */
KL_DTYPE(spectrum)
{
    KlDtype own = call->inputs[0]->dtype;
    KlDtype dtype = kl_rules_is_integral(own) ? call->default_dtype : own;
    kl_rules_require(call, dtype >= KL_DTYPE_FLOAT32);
    return kl_rules_set_dtypes(result, kl_rules_promote(dtype, KL_DTYPE_COMPLEX64));
}

/* The real dtype of a spectrum. */
KL_DTYPE(signal)
{
    (void)dtype_spectrum(call, result);
    bool is_double = result->outs[0].dtype == KL_DTYPE_COMPLEX128;
    return kl_rules_set_dtypes(result, is_double ? KL_DTYPE_FLOAT64 : KL_DTYPE_FLOAT32);
}

/* Note what torch saves, and its copies of the input: cast, padded, and with the transformed dims last. The numbers are
 * measured. */
static void
save_transform(const KlCall *call, const KlInferred *result, KlSaves *saves, bool is_half_in,
               bool is_half_out)
{
    const KlMeta *input = call->inputs[0];
    const Transform made = read_transform(call, is_half_in);
    const bool is_real = !kl_meta_dtype_is_complex(input->dtype);
    const bool reads_reals = is_half_out || (is_real && !is_half_in && call->row->n_spatial == 1);
    const bool is_double = kl_meta_dtype_bytes(result->outs[0].dtype) == (is_half_in ? 8 : 16);
    KlMeta read = *input;
    read.dtype = is_double ? KL_DTYPE_COMPLEX128 : KL_DTYPE_COMPLEX64;
    const int64_t n_cast =
        is_real && !reads_reals ? kl_meta_n_bytes(&read) : kl_meta_n_bytes(input);
    for (int32_t i = 0; i < made.n; i++) {
        read.shape[made.dims[i]] = made.reads[i];
    }
    const int64_t n_complex = kl_meta_n_bytes(&read);
    const int64_t n_read = reads_reals ? n_complex / 2 : n_complex;
    const bool is_cast = reads_reals ? kl_rules_is_integral(input->dtype) : is_real;
    saves->bytes_workspace = (is_cast ? n_cast : 0) + (made.is_padded ? n_read : 0) +
                             (made.is_last && !made.is_cut ? 0 : n_read) +
                             (is_half_in && made.n > 1 ? 2 * n_read : 0);
    if (is_half_out) { /* it goes back as a complex transform of the whole signal */
        saves->bytes_backward = (made.is_last ? 2 : 3) * n_complex;
    } else {
        saves->bytes_backward = (made.is_padded || made.is_cut ? n_complex : 0) +
                                (is_real ? kl_meta_n_bytes(input) : 0);
    }
    if (reads_reals && made.is_padded) {
        saves->bytes_extra = n_read;
        saves->is_extra_rows = kl_place_is_rows(&result->outs[0].place);
    } else if (reads_reals) {
        kl_rules_save(call, saves, 0);
    }
}

KL_SAVES(fft)
{
    save_transform(call, result, saves, false, false);
}

KL_SAVES(rfft)
{
    save_transform(call, result, saves, false, true);
}

KL_SAVES(irfft)
{
    save_transform(call, result, saves, true, false);
}
