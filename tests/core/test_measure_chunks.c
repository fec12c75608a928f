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

int
main(void)
{
    test_parts_of_many_chunks();
    test_a_shorter_axis();
    return check_result();
}
