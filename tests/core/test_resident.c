/* SPDX-License-Identifier: Apache-2.0 */
/* test_resident.c - a peak is seen, free memory is returned near the bound, and nothing is left. What a return does to
 * glibc's heap is in tests/test_heap.py: sanitizers have a heap of their own. */
#define _GNU_SOURCE
#include "resident.h"

#include <string.h>
#include <sys/mman.h>
#include <time.h>

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
    int64_t n_returns = -1, before = kl_resident_bytes();
    CHECK(before > 0 && kl_resident_watch((int64_t)1 << 62));
    void *pages = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memset(pages, 1, SIZE);
    sleep_ms(100);
    (void)munmap(pages, SIZE);
    int64_t most = kl_resident_stop(&n_returns);
    CHECK(most >= before + SIZE && most < before + 2 * (int64_t)SIZE);
    CHECK(n_returns == 0);
    CHECK(kl_resident_bytes() < before + SIZE);
}

static void
test_memory_is_returned_near_the_bound(void)
{
    int64_t n_returns = -1;
    for (int i = 0; i < 2; i++) {
        CHECK(kl_resident_watch(kl_resident_bytes()));
        sleep_ms(100);
        (void)kl_resident_stop(&n_returns);
        CHECK(n_returns == 1); /* the rest is in use */
    }
}

static void
test_it_stops_at_once(void)
{
    for (int i = 0; i < 200; i++) {
        int64_t n_returns = -1;
        CHECK(kl_resident_watch((int64_t)1 << 62) && kl_resident_stop(&n_returns) > 0);
        CHECK(n_returns == 0);
    }
}

static void
test_watches_at_the_same_time(void)
{
    int64_t n_returns = -1, start = kl_resident_bytes();
    CHECK(kl_resident_watch((int64_t)1 << 62) && kl_resident_watch(kl_resident_bytes()));
    sleep_ms(100);
    CHECK(kl_resident_stop(&n_returns) >= start && n_returns == 1); /* the lower bound holds */
    void *pages = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memset(pages, 1, SIZE);
    sleep_ms(100);
    (void)munmap(pages, SIZE);
    CHECK(kl_resident_stop(&n_returns) >= start + SIZE); /* it goes on for the other */
    CHECK(kl_resident_watch((int64_t)1 << 62));
    CHECK(kl_resident_stop(&n_returns) < start + SIZE && n_returns == 0); /* and begins anew */
}

int
main(void)
{
#ifdef __linux__
    test_a_peak_is_seen();
    test_memory_is_returned_near_the_bound();
    test_it_stops_at_once();
    test_watches_at_the_same_time();
#else
    CHECK(kl_resident_bytes() == -1);
#endif
    return check_result();
}
