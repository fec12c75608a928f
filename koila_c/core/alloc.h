/* SPDX-License-Identifier: Apache-2.0 */
/* alloc.h - the one door to malloc. In test builds (KL_TEST_ALLOC) the nth request can be made to fail. */
#ifndef KL_ALLOC_H
#define KL_ALLOC_H

#include "base.h"

/* Resize `block` (NULL: a new one) to `n_items` of `size` bytes; NULL when there is no memory or the
 * product overflows, and `block` is then untouched. Zero items is a request for one. */
void *kl_alloc_resize(void *block, size_t n_items, size_t size);

/* A new zeroed block of `n_items` of `size` bytes, or NULL. */
void *kl_alloc_zeroed(size_t n_items, size_t size);

/* Release a block; NULL is allowed. */
void kl_alloc_free(void *block);

/* Blocks that one computation looks things up in, and that are released together. */
typedef struct KlScratch {
    void *blocks;  /* a list */
    bool is_short; /* there was no memory for one of them */
} KlScratch;

/* A zeroed block of `n_items` of `size` bytes, at most 16 of which need be aligned; NULL is noted in `is_short`. */
void *kl_alloc_scratch(KlScratch *scratch, size_t n_items, size_t size);
void kl_alloc_scratch_free(KlScratch *scratch);

/* Make sure `*block` has room for `n_needed` items of `size` bytes, growing `*n_max` geometrically. */
KlStatus kl_alloc_reserve(void **block, size_t *n_max, size_t n_needed, size_t size,
                          KlError *error);

/* Test hook: let `n` more requests succeed, then fail every one; a negative number switches it off.
 * Always present, because the extension that is tested is the one that is shipped. */
void kl_alloc_fail_after(int64_t n);

/* Blocks now held, for leak tests. */
int64_t kl_alloc_n_blocks(void);

#endif
