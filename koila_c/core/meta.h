/* SPDX-License-Identifier: Apache-2.0 */
/* meta.h - the metadata of a value, known without running it: dtype, shape, strides, and where its rows are. */
#pragma once

#include "base.h"

typedef enum {
    KL_DTYPE_BOOL,
    KL_DTYPE_UINT8,
    KL_DTYPE_INT8,
    KL_DTYPE_INT16,
    KL_DTYPE_INT32,
    KL_DTYPE_INT64,
    KL_DTYPE_FLOAT16,
    KL_DTYPE_BFLOAT16,
    KL_DTYPE_FLOAT32,
    KL_DTYPE_FLOAT64,
    KL_DTYPE_COMPLEX64,
    KL_DTYPE_COMPLEX128,
    KL_DTYPE_OTHER, /* quantized, float8, uint16 ...: every row declines it */
    KL_N_DTYPES = KL_DTYPE_OTHER,
} KlDtype;

/* Where the rows of one axis are in a value. The size of dim `dim` is outer * rows * inner, and its index is
 * (o * rows + row) * inner + i. axis == KL_ID_NONE: WHOLE, the value has no rows and is the same for each chunk. */
typedef struct KlPlace {
    KlAxisId axis;
    int32_t dim;
    int64_t outer;
    int64_t inner;
} KlPlace;

/* The role of a value for an *order*: rows that each chunk sorts on its own, see NOTE [orders] in rules_order.c. */
typedef enum {
    KL_ROLE_NONE,
    KL_ROLE_KEYS,    /* in the order: the sorted keys, ascending */
    KL_ROLE_SOURCES, /* in the order: the old position of each entry, counted within the chunk */
    KL_ROLE_POINTS,  /* in the order: like SOURCES, but positions may be missing or occur twice */
    KL_ROLE_TARGETS, /* by rows: the position of each entry in the order */
    KL_ROLE_COUNTS,  /* whole: how many keys of the chunk are in each bin */
    KL_ROLE_OFFSETS, /* whole: the cumulative sum of COUNTS */
} KlRole;

#define KL_PLACE_WHOLE ((KlPlace){.axis = KL_ID_NONE, .dim = 0, .outer = 1, .inner = 1})

typedef struct KlMeta {
    KlDtype dtype;
    int32_t n_dims;
    int64_t shape[KL_DIMS_MAX];   /* [n_dims] */
    int64_t strides[KL_DIMS_MAX]; /* [n_dims], in elements; valid when is_strided */
    bool is_strided;              /* the strides are known */
    bool requires_grad;
    bool is_there;  /* all of it exists before the bodies that read it: a chunk may read any part */
    uint8_t device; /* index into the binding's table of devices; 0 is the CPU */
    uint8_t role;   /* KlRole */
    KlAxisId order; /* the order of that role */
    int64_t n_of_row; /* SOURCES, POINTS: how many entries each row has */
    KlPlace place;
} KlMeta;

/* Return the bytes of one element. */
size_t kl_meta_dtype_bytes(KlDtype dtype);
bool kl_meta_dtype_is_float(KlDtype dtype);   /* float16, bfloat16, float32, float64 */
bool kl_meta_dtype_is_complex(KlDtype dtype); /* complex64, complex128 */
const char *kl_meta_dtype_name(KlDtype dtype);

/* Return the number of elements; 1 for a 0-dim value. */
int64_t kl_meta_n_elements(const KlMeta *meta);

/* Return the bytes of all elements, without gaps between them. */
int64_t kl_meta_n_bytes(const KlMeta *meta);

/* Fill the strides of a dense row-major value. */
void kl_meta_set_contiguous(KlMeta *meta);
bool kl_meta_is_contiguous(const KlMeta *meta);

static inline bool
kl_place_is_rows(const KlPlace *place)
{
    return place->axis != KL_ID_NONE;
}

/* Whether a chunk of a value can be a view of the whole tensor. It must not be if another dim continues the dim of the
 * rows in memory: a later view may join the two dims, which is impossible in a slice. Unknown strides: row-major. */
bool kl_meta_is_cut_in_place(const KlMeta *meta, const KlPlace *place);

bool kl_place_is_equal(const KlPlace *left, const KlPlace *right);
