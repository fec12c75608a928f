/* SPDX-License-Identifier: Apache-2.0 */
/* test_resident.c - a peak is seen, free memory is returned near the bound, and nothing is left. What a return does to
 * glibc's heap is in tests/test_heap.py: sanitizers have a heap of their own. */
#define _GNU_SOURCE
#include "resident.h"

#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "alloc.h"
#include "check.h"

enum { SIZE = 1 << 26 };

static void
sleep_ms(long n)
{
    struct timespec time = {.tv_nsec = n * 1000000};
    (void)nanosleep(&time, NULL);
}

static void
test_a_peak_is_seen(void)
{
    int64_t n_returns = -1, before = kl_resident_bytes(), n_blocks = kl_alloc_n_blocks();
    KlResident *watch = kl_resident_watch((int64_t)1 << 62);
    CHECK(before > 0 && watch != NULL);
    void *pages = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memset(pages, 1, SIZE);
    sleep_ms(100);
    (void)munmap(pages, SIZE);
    int64_t most = kl_resident_stop(watch, &n_returns);
    CHECK(most >= before + SIZE && most < before + 2 * (int64_t)SIZE);
    CHECK(n_returns == 0);
    CHECK(kl_resident_bytes() < before + SIZE);
    CHECK(kl_alloc_n_blocks() == n_blocks);
}

static void
test_memory_is_returned_near_the_bound(void)
{
    int64_t n_returns = -1;
    KlResident *watch = kl_resident_watch(kl_resident_bytes());
    sleep_ms(100);
    (void)kl_resident_stop(watch, &n_returns);
    CHECK(n_returns == 1); /* the rest is in use */
}

static void
test_it_stops_at_once(void)
{
    for (int i = 0; i < 200; i++) {
        int64_t n_returns = -1;
        CHECK(kl_resident_stop(kl_resident_watch((int64_t)1 << 62), &n_returns) > 0);
        CHECK(n_returns == 0);
    }
}

static void
test_no_memory(void)
{
    kl_alloc_fail_after(0);
    CHECK(kl_resident_watch(0) == NULL);
    kl_alloc_fail_after(-1);
}

int
main(void)
{
#ifdef __linux__
    test_a_peak_is_seen();
    test_memory_is_returned_near_the_bound();
    test_it_stops_at_once();
#else
    CHECK(kl_resident_bytes() == -1);
#endif
    test_no_memory();
    return check_result();
}
