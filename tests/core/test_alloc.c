/* SPDX-License-Identifier: Apache-2.0 */
/* test_alloc.c - blocks are counted, growth keeps what was there, and the nth request can fail. */
#include "alloc.h"

#include <string.h>

#include "check.h"

static void
test_blocks_are_counted(void)
{
    int64_t n_before = kl_alloc_n_blocks();
    void *zeroed = kl_alloc_zeroed(3, 8);
    void *block = kl_alloc_resize(NULL, 1, 8);
    CHECK(kl_alloc_n_blocks() == n_before + 2);
    block = kl_alloc_resize(block, 100, 8);
    CHECK(kl_alloc_n_blocks() == n_before + 2);
    kl_alloc_free(block);
    kl_alloc_free(zeroed);
    kl_alloc_free(NULL);
    CHECK(kl_alloc_n_blocks() == n_before);
}

static void
test_zeroed_is_zero(void)
{
    unsigned char zeros[64] = {0};
    void *block = kl_alloc_zeroed(8, 8);
    CHECK(memcmp(block, zeros, sizeof(zeros)) == 0);
    kl_alloc_free(block);
}

static void
test_zero_items_are_a_block(void)
{
    void *zeroed = kl_alloc_zeroed(0, 8);
    void *block = kl_alloc_resize(NULL, 0, 8);
    CHECK(zeroed != NULL && block != NULL);
    block = kl_alloc_resize(block, 0, 8); /* to realloc() this would mean free() */
    CHECK(block != NULL);
    kl_alloc_free(zeroed);
    kl_alloc_free(block);
}

static void
test_overflow_is_no_memory(void)
{
    int64_t n_before = kl_alloc_n_blocks();
    CHECK(kl_alloc_zeroed(SIZE_MAX, 2) == NULL);
    CHECK(kl_alloc_resize(NULL, SIZE_MAX / 2 + 2, 2) == NULL); /* 2 bytes, if the product wrapped */
    CHECK(kl_alloc_n_blocks() == n_before);
}

static void
test_reserve_grows_geometrically_and_keeps_items(void)
{
    uint32_t *items = NULL; /* [n_max] */
    void *block = NULL;
    size_t n_max = 0;
    int n_growths = 0;
    for (uint32_t i = 0; i < 10000; i++) {
        size_t n_max_before = n_max;
        CHECK(kl_alloc_reserve(&block, &n_max, i + 1, sizeof(*items)) == KL_OK);
        n_growths += n_max != n_max_before;
        items = block;
        items[i] = i;
    }
    for (uint32_t i = 0; i < 10000; i++) {
        CHECK(items[i] == i);
    }
    CHECK(n_growths < 20);
    kl_alloc_free(block);
}

static void
test_failed_reserve_changes_nothing(void)
{
    void *block = NULL;
    size_t n_max = 0;
    CHECK(kl_alloc_reserve(&block, &n_max, 4, 1) == KL_OK);
    CHECK(n_max >= 4);
    void *block_before = block;
    size_t n_max_before = n_max;
    CHECK(kl_alloc_reserve(&block, &n_max, SIZE_MAX, 2) == KL_ERROR_MEMORY);
    kl_alloc_fail_after(0);
    CHECK(kl_alloc_reserve(&block, &n_max, n_max + 1, 1) == KL_ERROR_MEMORY);
    CHECK(kl_alloc_reserve(&block, &n_max, n_max, 1) == KL_OK); /* it has that already */
    kl_alloc_fail_after(-1);
    CHECK(block == block_before && n_max == n_max_before);
    kl_alloc_free(block);
}

/* Requests of `n_wanted` that succeed, in both ways to ask. */
static int
n_granted(int n_wanted)
{
    int n = 0;
    for (int i = 0; i < n_wanted; i++) {
        void *block = i % 2 == 0 ? kl_alloc_zeroed(1, 8) : kl_alloc_resize(NULL, 1, 8);
        n += block != NULL;
        kl_alloc_free(block);
    }
    return n;
}

static void
test_nth_request_and_all_after_it_fail(void)
{
    int64_t n_before = kl_alloc_n_blocks();
    for (int n = 0; n <= 6; n++) {
        kl_alloc_fail_after(n);
        CHECK(n_granted(6) == n);
        CHECK(n_granted(1) == 0);
    }
    kl_alloc_fail_after(-1);
    CHECK(n_granted(6) == 6);
    CHECK(kl_alloc_n_blocks() == n_before);
}

int
main(void)
{
    test_blocks_are_counted();
    test_zeroed_is_zero();
    test_zero_items_are_a_block();
    test_overflow_is_no_memory();
    test_reserve_grows_geometrically_and_keeps_items();
    test_failed_reserve_changes_nothing();
    test_nth_request_and_all_after_it_fail();
    return check_result();
}
