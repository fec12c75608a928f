/* SPDX-License-Identifier: Apache-2.0 */
/* meta.h - what is known of a value without running it: dtype, shape, strides, and where the rows are. */
#ifndef KL_META_H
#define KL_META_H

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

/* Where one axis is in a value. The size of dim `dim` is outer * rows * inner, and its index is
 * (o * rows + row) * inner + i. axis == KL_ID_NONE: WHOLE, the same for every chunk. */
typedef struct KlPlace {
    KlAxisId axis;
    int32_t dim;
    int64_t outer;
    int64_t inner;
} KlPlace;

/* What a value is to an *order*: rows that each chunk sorts on its own, see rules_order.c. */
typedef enum {
    KL_ROLE_NONE,
    KL_ROLE_KEYS, /* what was sorted, ascending: in the order */
    KL_ROLE_SOURCES, /* in the order: where each entry was, all of them, counted from the chunk's first */
    KL_ROLE_POINTS, /* in the order: entries of rows, counted so, not all of them or several times */
    KL_ROLE_TARGETS, /* by rows: where each entry is in the order */
    KL_ROLE_COUNTS,  /* whole: how many keys of the chunk are in each bin */
    KL_ROLE_OFFSETS, /* whole: how many are in it and those before */
} KlRole;

#define KL_PLACE_WHOLE ((KlPlace){.axis = KL_ID_NONE, .dim = 0, .outer = 1, .inner = 1})

typedef struct KlMeta {
    KlDtype dtype;
    int32_t n_dims;
    int64_t shape[KL_DIMS_MAX];   /* [n_dims] */
    int64_t strides[KL_DIMS_MAX]; /* [n_dims], in elements; valid when is_strided */
    bool is_strided;              /* the strides are known */
    bool requires_grad;
    bool is_there;    /* whole before any body that reads it: a chunk may be given any part of it */
    uint8_t device;   /* index into the binding's table of devices; 0 is the CPU */
    uint8_t role;     /* KlRole */
    KlAxisId order;   /* of that: the axis of an order */
    int64_t n_of_row; /* SOURCES, POINTS: entries of one row, among which they point */
    KlPlace place;
} KlMeta;

/* Bytes of one element. */
size_t kl_meta_dtype_bytes(KlDtype dtype);
bool kl_meta_dtype_is_float(KlDtype dtype);   /* float16, bfloat16, float32, float64 */
bool kl_meta_dtype_is_complex(KlDtype dtype); /* complex64, complex128 */
const char *kl_meta_dtype_name(KlDtype dtype);

/* Number of elements; 1 for a 0-dim value. */
int64_t kl_meta_n_elements(const KlMeta *meta);

/* Bytes of the elements, as if dense. */
int64_t kl_meta_n_bytes(const KlMeta *meta);

/* Fill the strides of a dense row-major value. */
void kl_meta_set_contiguous(KlMeta *meta);
bool kl_meta_is_contiguous(const KlMeta *meta);

static inline bool
kl_place_is_rows(const KlPlace *place)
{
    return place->axis != KL_ID_NONE;
}

/* Whether a chunk of a value lies in the memory of the whole: no dim goes on where that of the rows ends, for a
 * view may join the two, and then cannot of a part. Where strides are not known the dims are in their order. */
bool kl_meta_is_cut_in_place(const KlMeta *meta, const KlPlace *place);

bool kl_place_is_equal(const KlPlace *left, const KlPlace *right);

#endif
