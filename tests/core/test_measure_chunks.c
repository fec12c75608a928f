/* SPDX-License-Identifier: Apache-2.0 */
/* test_measure_chunks.c - what chunks need. */
#include "measure.h"

#include "check.h"

/* More chunks are not always less memory. */
static void
test_parts_of_many_chunks(void)
{
    KlMoment moment = {.bytes = {100, 10}, .per_chunk = 50}, worst = {0};
    const KlMeasured measured = {.moments = {.moments = &moment, .n = 1}, .rows = 1000};
    CHECK(kl_measure_peak(&measured, 1000, &worst) == 100 + 10000 + 50);
    CHECK(kl_measure_peak(&measured, 300, &worst) == 100 + 3000 + 4 * 50);
    const KlMeasured nothing = {.rows = 10};
    CHECK(kl_measure_peak(&nothing, 1, &worst) == 0);
}

/* A shorter axis is cut into as many chunks as the longest, so its chunks have fewer rows, in whole units. */
static void
test_a_shorter_axis(void)
{
    KlMoment moments[] = {{.bytes.per_row = 1}, {.bytes = {100, 10}, .rows = 40}}, worst = {0};
    const KlMeasured measured = {.moments = {.moments = moments, .n = 2}, .rows = 1000};
    CHECK(kl_measure_peak(&measured, 1000, &worst) == 1000);
    CHECK(kl_measure_peak(&measured, 250, &worst) == 100 + 16 * 10);
    CHECK(kl_measure_peak(&measured, 2, &worst) == 100 + 2 * 10);
    CHECK(kl_measure_peak(&measured, 1, &worst) == 100 + 10);
}

/* Without the moments that are never the worst, each number of rows has the same peak, at the same node. */
static void
test_moments_that_peaks_need(void)
{
    enum { N = 40, ROWS = 100 };
    KlMoment all[N], some[N];
    uint32_t seed = 1;
    size_t n_left = 0;
    for (int round = 0; round < 200; round++) {
        for (uint32_t i = 0; i < N; i++) {
            double numbers[3]; /* few, so that some are equal */
            for (int k = 0; k < 3; k++) {
                seed = seed * 1664525u + 1013904223u;
                numbers[k] = (double)(seed >> 29) * (k == 0 ? 50 : 1);
            }
            all[i] = (KlMoment){.bytes = {numbers[0], numbers[1]},
                                .per_chunk = round % 2 == 0 ? numbers[2] : 0,
                                .node = i,
                                .rows = round % 3 == 0 && i % 2 == 0 ? 30 : 0};
            some[i] = all[i];
        }
        KlMeasured whole = {.moments = {.moments = all, .n = N}, .rows = ROWS};
        KlMeasured front = {.moments = {.moments = some, .n = N}, .rows = ROWS};
        kl_measure_front(&front);
        n_left += front.moments.n;
        for (int64_t rows = 1; rows <= ROWS; rows++) {
            KlMoment one = {0}, other = {0};
            CHECK(kl_measure_peak(&whole, rows, &one) == kl_measure_peak(&front, rows, &other));
            CHECK(one.node == other.node && one.bytes.fixed == other.bytes.fixed);
        }
    }
    CHECK(n_left < 200 * N / 2);
    /* Sums are rounded: with one row the bytes of these two are equal, and the first is the worst. */
    KlMoment near[] = {{.bytes.fixed = 0x1p53}, {.bytes = {0x1p53, 0.25}, .node = 1}};
    KlMeasured two = {.moments = {.moments = near, .n = 2}, .rows = ROWS};
    kl_measure_front(&two);
    CHECK(two.moments.n == 2);
    KlMeasured nothing = {.rows = 10};
    kl_measure_front(&nothing);
    CHECK(nothing.moments.n == 0);
}

int
main(void)
{
    test_parts_of_many_chunks();
    test_a_shorter_axis();
    test_moments_that_peaks_need();
    return check_result();
}
