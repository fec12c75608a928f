/* SPDX-License-Identifier: Apache-2.0 */
/* test_measure.c - the bytes of a step, by hand, and the chunks that fit. */
#include "measure.h"

#include "record.h"

typedef struct Step {
    Program p;
    KlProgram program;
    KlOutside outside;
    KlMeasured measured;
    bool flags[64]; /* [n_imports], [n_values] and [n_nodes]: nothing is known */
} Step;

/* The mean of sin(exp(linear(x, w))): 8 rows of 3 numbers are 96 bytes. */
static void
begin_with(Step *s, bool is_root, bool is_headed)
{
    static const uint32_t no_handles[64];
    *s = (Step){.outside.facts = {s->flags, s->flags, s->flags}};
    KlAxisId batch = axis(&s->p, 8);
    KlValueId x = leaf(&s->p, by_rows(batch, TENSOR(FLOAT32, 8, 4)));
    KlValueId w = leaf(&s->p, with_grad(TENSOR(FLOAT32, 3, 4)));
    KlValueId a = call1(&s->p, "exp", call2(&s->p, "linear", x, w));
    KlValueId loss = call1(&s->p, "mean", call1(&s->p, "sin", a));
    const KlAsked asked = {.goal = {&loss, 1, &loss, is_root ? 1 : 0},
                           .is_headed = is_headed,
                           .reached = &loss,
                           .n_reached = 1,
                           .has_real = s->flags,
                           .has_number = s->flags,
                           .n_handles = no_handles};
    CHECK(kl_program_build(&s->p.tape, &asked, &s->program) == KL_OK);
}

static void
begin(Step *s, bool is_root)
{
    begin_with(s, is_root, false);
}

static KlStatus
measure_in_pieces(Step *s, bool is_graph, uint32_t n_pieces)
{
    const KlPolicy policy = {.is_graph = is_graph, .n_pieces = n_pieces};
    return kl_measure_step(&s->p.tape, &s->program, &s->outside, &policy, &s->measured);
}

static KlStatus
measure(Step *s, bool is_graph)
{
    return measure_in_pieces(s, is_graph, 1);
}

static void
finish(Step *s)
{
    kl_measure_fini(&s->measured);
    kl_program_fini(&s->program);
    program_fini(&s->p);
}

static void
test_a_step(void)
{
    Step s;
    KlMoment worst = {0};
    begin(&s, true);
    CHECK(measure(&s, true) == KL_OK && s.measured.rows == 8);
    /* At the worst moment sin goes back: a, two gradients and one result more, and the loss. */
    CHECK(s.measured.whole == 4 * 96 + 4);
    /* In chunks x is copied, which linear keeps, and the gradient of w is summed: 48 bytes. That of the mean is
     * one number, and its part another. */
    CHECK(kl_measure_peak(&s.measured, 2, &worst) == 52 + 2 * (16 + 36));
    CHECK(worst.bytes.per_row == 52 && worst.bytes.fixed == 52 && worst.per_chunk == 0);
    kl_measure_fini(&s.measured);
    s.outside = (KlOutside){.facts = s.outside.facts, .bytes_state = 100, .bytes_drawn = 7};
    CHECK(measure(&s, true) == KL_OK); /* the generator's, before and after */
    CHECK(kl_measure_peak(&s.measured, 2, &worst) == 207 + 52 + 2 * (16 + 36));
    kl_measure_fini(&s.measured);
    s.outside.bytes_graphs = 1e6; /* what torch takes when it goes on from here */
    CHECK(measure(&s, true) == KL_OK && s.measured.whole == 1e6 + 4 + 48);
    CHECK(kl_measure_peak(&s.measured, 2, &worst) > 1e6);
    finish(&s);
}

/* A chunk's own bytes by rows, and of its head only those of a piece. */
static void
test_a_head_in_pieces(void)
{
    Step s;
    KlMoment worst = {0};
    begin_with(&s, true, true);
    uint32_t n_bodies = 0;
    for (size_t i = 0; i < s.program.n_staged; i++) {
        n_bodies += kl_program_is_body(&s.program.runs[i]);
    }
    CHECK(n_bodies == 2);
    CHECK(measure_in_pieces(&s, true, 4) == KL_OK);
    double in_pieces = kl_measure_peak(&s.measured, 8, &worst);
    /* The body keeps x, and what it hands on with its gradient; the head works on two rows, and is counted with
     * one more: 12 bytes each of exp, sin and their gradients. */
    CHECK(in_pieces >= 8 * (16 + 12 + 12) + 2 * 24 &&
          in_pieces <= 8 * (16 + 12 + 12) + 3 * 60 + 60);
    finish(&s);
}

static void
test_without_a_graph(void)
{
    Step s;
    KlMoment worst = {0};
    begin(&s, false);
    CHECK(measure(&s, false) == KL_OK && s.measured.whole == 2 * 96);
    CHECK(kl_measure_peak(&s.measured, 1, &worst) == 16 + 24);
    finish(&s);
}

static void
test_no_memory(void)
{
    Step s;
    begin(&s, true);
    int64_t n_blocks = kl_alloc_n_blocks(), n_refused = 0;
    KlStatus status = KL_ERROR_MEMORY;
    while (status != KL_OK) {
        kl_alloc_fail_after(n_refused++);
        status = measure(&s, true);
        kl_alloc_fail_after(-1);
        CHECK(status == KL_OK || (status == KL_ERROR_MEMORY && kl_alloc_n_blocks() == n_blocks));
    }
    CHECK(n_refused > 11);
    finish(&s);
}

int
main(void)
{
    test_a_step();
    test_a_head_in_pieces();
    test_without_a_graph();
    test_no_memory();
    CHECK(kl_alloc_n_blocks() == 0);
    return check_result();
}
