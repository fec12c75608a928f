/* SPDX-License-Identifier: Apache-2.0 */
/* alloc.h - all allocations of the core. Tests can make the nth allocation fail. */
#pragma once

#include "base.h"

/* Resize `block` (NULL: allocate a new one) to `n_items` of `size` bytes. Return NULL, and leave `block` unchanged, if
 * there is no memory or the product overflows. For zero items, allocate one. */
void *kl_alloc_resize(void *block, size_t n_items, size_t size);

/* Allocate a zeroed block of `n_items` of `size` bytes; return NULL if there is no memory. */
void *kl_alloc_zeroed(size_t n_items, size_t size);

/* Free a block; NULL is allowed. */
void kl_alloc_free(void *block);

/* Temporary blocks of one computation, which are freed together. */
typedef struct KlScratch {
    void *blocks;  /* a linked list */
    bool is_short; /* an allocation failed */
} KlScratch;

/* Allocate a zeroed block of `n_items` of `size` bytes, aligned to 16. On failure return NULL and set `is_short`. */
void *kl_alloc_scratch(KlScratch *scratch, size_t n_items, size_t size);
void kl_alloc_scratch_free(KlScratch *scratch);

/* Grow `*block`, if necessary, to hold `n_needed` items of `size` bytes; new ones are zeros. `*n_max`, its capacity, grows
 * geometrically. */
KlStatus kl_alloc_reserve(void **block, size_t *n_max, size_t n_needed, size_t size);

/* Likewise for a member of a struct that has its capacity in the member n_<items>_max. */
#define KL_RESERVE(owner, items, n_needed)                                                         \
    kl_alloc_reserve((void **)&(owner)->items, &(owner)->n_##items##_max, n_needed,                \
                     sizeof(*(owner)->items))

/* For tests: let `n` more allocations succeed and make all later ones fail; a negative number turns this off. It is part
 * of every build, so that the tested extension is the one that is shipped. */
void kl_alloc_fail_after(int64_t n);

/* Return the number of allocated blocks, for leak tests. */
int64_t kl_alloc_n_blocks(void);
