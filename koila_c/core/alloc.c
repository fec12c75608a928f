/* SPDX-License-Identifier: Apache-2.0 */
/* alloc.c - calls malloc for the core, counts the blocks, and can make the nth allocation fail for tests. */
#include "alloc.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

/* These counters for tests are the core's only writable globals. must_fail() reads and decrements the limit in two steps:
 * if threads race, an allocation may fail later than asked for. */
static _Atomic int64_t n_before_failure = -1;
static _Atomic int64_t n_blocks = 0;

static bool
must_fail(void)
{
    int64_t left = n_before_failure;
    if (left > 0) {
        n_before_failure = left - 1;
    }
    return left == 0;
}

void *
kl_alloc_resize(void *block, size_t n_items, size_t size)
{
    size_t bytes = 0;
    if (__builtin_mul_overflow(n_items == 0 ? 1 : n_items, size, &bytes) || must_fail()) {
        return NULL;
    }
    void *grown = realloc(block, bytes);
    n_blocks += grown != NULL && block == NULL;
    return grown;
}

void *
kl_alloc_zeroed(size_t n_items, size_t size)
{
    void *block = must_fail() ? NULL : calloc(n_items == 0 ? 1 : n_items, size);
    n_blocks += block != NULL;
    return block;
}

void
kl_alloc_free(void *block)
{
    if (block != NULL) {
        n_blocks--;
        free(block);
    }
}

/* The header of a scratch block, a link to the next one; its size keeps the alignment of malloc. */
typedef union Link {
    void *next;
    max_align_t align;
} Link;

void *
kl_alloc_scratch(KlScratch *scratch, size_t n_items, size_t size)
{
    size_t bytes = 0;
    bool is_too_much = __builtin_mul_overflow(n_items, size, &bytes) ||
                       __builtin_add_overflow(bytes, sizeof(Link), &bytes);
    Link *link = is_too_much ? NULL : kl_alloc_zeroed(1, bytes);
    if (link == NULL) {
        scratch->is_short = true;
        return NULL;
    }
    link->next = scratch->blocks;
    scratch->blocks = link;
    return link + 1;
}

void
kl_alloc_scratch_free(KlScratch *scratch)
{
    while (scratch->blocks != NULL) {
        Link *link = scratch->blocks;
        scratch->blocks = link->next;
        kl_alloc_free(link);
    }
}

KlStatus
kl_alloc_reserve(void **block, size_t *n_max, size_t n_needed, size_t size)
{
    if (n_needed <= *n_max) {
        return KL_OK;
    }
    size_t n_larger = *n_max < 16 ? 16 : *n_max + *n_max / 2;
    size_t n_grown = n_larger > n_needed ? n_larger : n_needed;
    void *grown = kl_alloc_resize(*block, n_grown, size);
    if (grown == NULL) {
        return KL_ERROR_MEMORY;
    }
    memset((char *)grown + *n_max * size, 0, (n_grown - *n_max) * size);
    *block = grown;
    *n_max = n_grown;
    return KL_OK;
}

void
kl_alloc_fail_after(int64_t n)
{
    n_before_failure = n;
}

int64_t
kl_alloc_n_blocks(void)
{
    return n_blocks;
}
