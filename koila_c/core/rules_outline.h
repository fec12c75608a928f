/* SPDX-License-Identifier: Apache-2.0 */
/* rules_outline.h - what an index expression does to dims, read once: which input dim stands where, what a
 * slice kept, which dims the index tensors take. For rules_index.c. */
#ifndef KL_RULES_OUTLINE_H
#define KL_RULES_OUTLINE_H

#include "rules.h"

enum { KL_OUTLINE_TENSORS_MAX = KL_DIMS_MAX };

/* One index tensor, or Python list of ints, after broadcasting takes part in one block of dims. */
typedef struct {
    KlMeta meta;
    int32_t dim;   /* of the outline */
    int32_t input; /* among the call's inputs, -1: a list */
    bool is_range; /* counts 0, 1, 2, ... */
} KlOutlineTensor;

typedef struct {
    KlMeta basic;                  /* after ints, slices, None and Ellipsis */
    int32_t origin[KL_DIMS_MAX];   /* [basic.n_dims] dim of the input, -1: a None */
    int32_t item[KL_DIMS_MAX];     /* [basic.n_dims] the item that made this dim, -1: none did */
    int32_t basic_of[KL_DIMS_MAX]; /* [input dims] where it went, -1: an int took one entry */
    KlOutlineTensor tensors[KL_OUTLINE_TENSORS_MAX]; /* [n_tensors] */
    int32_t n_tensors;
    KlMeta block;        /* what the index tensors broadcast to */
    int32_t block_start; /* first dim of the block in the result */
    bool is_adjacent;    /* the block stands where the first tensor stood, else in front */
} KlOutline;

/* Read args[1], the index of args[0]. Declines masks and whatever has a shape that depends on values. */
KlStatus kl_outline_read(const KlCall *call, KlOutline *outline, KlError *error);

/* The entries start .. stop - 1 that a slice by step 1 keeps of a dim of `size`. */
void kl_outline_slice_bounds(const KlIndex *item, int64_t size, int64_t *start, int64_t *stop);

/* An index tensor takes this dim of the outline. */
bool kl_outline_is_indexed(const KlOutline *outline, int32_t basic_dim);

/* The dim of the result where a dim of the outline is that no tensor takes. */
int32_t kl_outline_result_dim(const KlOutline *outline, int32_t basic_dim);

/* The result's shape, with the strides of the value; 0 in the block of the index tensors. */
void kl_outline_result_shape(const KlOutline *outline, KlMeta *out);

#endif
