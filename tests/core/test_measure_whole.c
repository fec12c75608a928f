/* SPDX-License-Identifier: Apache-2.0 */
/* test_measure_whole.c - the bytes of a live run, by hand. */
#include "measure.h"

#include "record.h"

/* The regions of the calls below: linear and the first exp are in one, the second in one inside of it. */
static const uint32_t inside[] = {0, 0, 1, KL_ID_NONE, KL_ID_NONE}, outer[] = {KL_ID_NONE, 0};

/* The mean of relu(linear(x, w)), of 8 rows of 3 numbers; with regions, of relu(exp(exp(linear(x, w)))). */
static double
measure(bool is_held, bool is_graph, size_t n_regions)
{
    static const uint32_t no_handles[64];
    static const bool no_flags[64];
    const KlFacts facts = {.is_cut_in_place = no_flags,
                           .has_grad = no_flags,
                           .chunks = {1, 1},
                           .pieces = {1, 1},
                           .region_of = inside,
                           .outer = outer,
                           .n_regions = n_regions};
    Program p = {0};
    KlAxisId batch = axis(&p, 8);
    KlValueId x = leaf(&p, by_rows(batch, TENSOR(FLOAT32, 8, 4)));
    KlValueId w = leaf(&p, with_grad(TENSOR(FLOAT32, 3, 4)));
    KlValueId held = call2(&p, "linear", x, w), last = held;
    for (size_t i = 0; i < n_regions; i++) {
        held = last;
        last = call1(&p, "exp", last);
    }
    KlValueId loss = call1(&p, "mean", call1(&p, "relu", last));
    const KlValueId reached[] = {loss, held};
    const KlAsked asked = {.goal = {reached, 2, &loss, is_graph ? 1 : 0},
                           .reached = reached,
                           .n_reached = is_held ? 2 : 1,
                           .has_real = no_flags,
                           .has_number = no_flags,
                           .n_handles = no_handles};
    KlProgram program;
    KlSweep sweep;
    double most = 0;
    int64_t n_refused = 0;
    CHECK(kl_program_build(&p.tape, &asked, &program) == KL_OK);
    CHECK(kl_sweep_init(&sweep, &p.tape, &program, &facts) == KL_OK);
    KlStatus status = KL_ERROR_MEMORY;
    int64_t n_blocks = kl_alloc_n_blocks();
    while (status != KL_OK) {
        kl_alloc_fail_after(n_refused++);
        status = kl_measure_whole(&sweep, is_graph, 0, NULL, &most);
        kl_alloc_fail_after(-1);
        CHECK(status == KL_OK || (status == KL_ERROR_MEMORY && kl_alloc_n_blocks() == n_blocks));
    }
    CHECK(n_refused == 3);
    kl_sweep_fini(&sweep);
    kl_program_fini(&program);
    program_fini(&p);
    return most;
}

int
main(void)
{
    /* relu keeps what it made; going back, beside it and the loss are two gradients. What is held stays. */
    CHECK(measure(false, true, 0) == 3 * 96 + 4);
    CHECK(measure(true, true, 0) == 4 * 96 + 4);
    CHECK(measure(false, false, 0) == 2 * 96);
    /* Going back, what the second exp read and made is there again, and two gradients. What is held, which it read, is
     * there twice. */
    CHECK(measure(false, true, 2) == 4 * 96 + 4);
    CHECK(measure(true, true, 2) == 5 * 96 + 4);
    CHECK(measure(false, false, 2) == 2 * 96);
    CHECK(kl_alloc_n_blocks() == 0);
    return check_result();
}
