/* SPDX-License-Identifier: Apache-2.0 */
/* meta.c - computes properties of metas and dtypes: sizes, names, contiguity, equality of places. */
#include "meta.h"

typedef struct {
    const char *name;
    uint8_t bytes;
} DtypeFacts;

static const DtypeFacts dtype_facts[] = {
    [KL_DTYPE_BOOL] = {"bool", 1},           [KL_DTYPE_UINT8] = {"uint8", 1},
    [KL_DTYPE_INT8] = {"int8", 1},           [KL_DTYPE_INT16] = {"int16", 2},
    [KL_DTYPE_INT32] = {"int32", 4},         [KL_DTYPE_INT64] = {"int64", 8},
    [KL_DTYPE_FLOAT16] = {"float16", 2},     [KL_DTYPE_BFLOAT16] = {"bfloat16", 2},
    [KL_DTYPE_FLOAT32] = {"float32", 4},     [KL_DTYPE_FLOAT64] = {"float64", 8},
    [KL_DTYPE_COMPLEX64] = {"complex64", 8}, [KL_DTYPE_COMPLEX128] = {"complex128", 16},
    [KL_DTYPE_OTHER] = {"other", 0},
};

size_t
kl_meta_dtype_bytes(KlDtype dtype)
{
    return dtype_facts[dtype].bytes;
}

const char *
kl_meta_dtype_name(KlDtype dtype)
{
    return dtype_facts[dtype].name;
}

bool
kl_meta_dtype_is_float(KlDtype dtype)
{
    return dtype >= KL_DTYPE_FLOAT16 && dtype <= KL_DTYPE_FLOAT64;
}

bool
kl_meta_dtype_is_complex(KlDtype dtype)
{
    return dtype == KL_DTYPE_COMPLEX64 || dtype == KL_DTYPE_COMPLEX128;
}

int64_t
kl_meta_n_elements(const KlMeta *meta)
{
    int64_t n = 1;
    for (int32_t dim = 0; dim < meta->n_dims; dim++) {
        n *= meta->shape[dim];
    }
    return n;
}

int64_t
kl_meta_n_bytes(const KlMeta *meta)
{
    return kl_meta_n_elements(meta) * (int64_t)kl_meta_dtype_bytes(meta->dtype);
}

void
kl_meta_set_contiguous(KlMeta *meta)
{
    int64_t stride = 1;
    for (int32_t dim = meta->n_dims - 1; dim >= 0; dim--) {
        meta->strides[dim] = stride;
        /* torch counts an empty dim as size 1 here */
        stride *= meta->shape[dim] > 1 ? meta->shape[dim] : 1;
    }
    meta->is_strided = true;
}

bool
kl_meta_is_contiguous(const KlMeta *meta)
{
    int64_t stride = 1;
    bool is_row_major = meta->is_strided;
    for (int32_t dim = meta->n_dims - 1; dim >= 0 && is_row_major; dim--) {
        is_row_major = meta->shape[dim] == 1 || meta->strides[dim] == stride;
        stride *= meta->shape[dim];
    }
    /* without elements every layout is row-major */
    return is_row_major || (meta->is_strided && kl_meta_n_elements(meta) == 0);
}

bool
kl_place_is_equal(const KlPlace *left, const KlPlace *right)
{
    return left->axis == right->axis &&
           (left->axis == KL_ID_NONE || (left->dim == right->dim && left->outer == right->outer &&
                                         left->inner == right->inner));
}

bool
kl_meta_is_cut_in_place(const KlMeta *meta, const KlPlace *place)
{
    int64_t end = meta->strides[place->dim] * meta->shape[place->dim];
    bool is_found = place->outer == 1;
    for (int32_t dim = 0; dim < meta->n_dims && is_found; dim++) {
        bool goes_on = end > 0 && meta->shape[dim] > 1 && meta->strides[dim] == end;
        is_found = meta->is_strided ? !goes_on : dim >= place->dim || meta->shape[dim] == 1;
    }
    return is_found;
}
