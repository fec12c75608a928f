/* SPDX-License-Identifier: Apache-2.0 */
/* rules_outline.h - describes the effect of an index expression on dims: the output dim of each input dim, the sizes of
 * slices, and the dims that index tensors index. For rules_index.c. */
#pragma once

#include "rules.h"

enum { KL_OUTLINE_TENSORS_MAX = KL_DIMS_MAX };

/* One index tensor, or Python list of ints. All of them are broadcast together to one block of output dims. */
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
    int32_t basic_of[KL_DIMS_MAX]; /* [input dims] its dim in basic, -1: an int removed it */
    KlOutlineTensor tensors[KL_OUTLINE_TENSORS_MAX]; /* [n_tensors] */
    int32_t n_tensors;
    KlMeta block;        /* the broadcast shape of the index tensors */
    int32_t block_start; /* first dim of the block in the result: that of the first index tensor if
                            these are adjacent, else 0 */
    int32_t n_dims;      /* of the result */
} KlOutline;

/* Read args[1], the index of args[0]. Return false if the call is refused, or if it is declined: a mask, or another index
 * whose result shape depends on values. */
bool kl_outline_read(const KlCall *call, KlOutline *outline);

/* Find the entries start .. stop - 1 that a slice with step 1 keeps of a dim of `size`. */
void kl_outline_slice_bounds(const KlIndex *item, int64_t size, int64_t *start, int64_t *stop);

/* Whether an index tensor indexes this dim of the outline. */
bool kl_outline_is_indexed(const KlOutline *outline, int32_t basic_dim);

/* Return the result dim of a dim of the outline that no index tensor indexes. */
int32_t kl_outline_result_dim(const KlOutline *outline, int32_t basic_dim);

/* Set the shape of the result, with the strides of the input's dims, and 0 in the block of the index tensors. */
void kl_outline_result_shape(const KlOutline *outline, KlMeta *out);
