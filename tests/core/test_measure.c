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
begin(Step *s, bool is_root)
{
    static const uint32_t no_handles[64];
    *s = (Step){.outside.known = {s->flags, s->flags, s->flags}};
    KlAxisId batch = axis(&s->p, 8);
    KlValueId x = leaf(&s->p, by_rows(batch, TENSOR(FLOAT32, 8, 4)));
    KlValueId w = leaf(&s->p, with_grad(TENSOR(FLOAT32, 3, 4)));
    KlValueId a = call1(&s->p, "exp", call2(&s->p, "linear", x, w));
    KlValueId loss = call1(&s->p, "mean", call1(&s->p, "sin", a));
    const KlAsked asked = {.goal = {&loss, 1, &loss, is_root ? 1 : 0},
                           .reached = &loss,
                           .n_reached = 1,
                           .has_real = s->flags,
                           .has_number = s->flags,
                           .n_handles = no_handles};
    CHECK(kl_program_build(&s->p.tape, &asked, &s->program, &s->p.error) == KL_OK);
}

static KlStatus
measure(Step *s, bool is_graph)
{
    const KlHomes homes = {.is_graph = is_graph, .keep_every = 1};
    return kl_measure_step(&s->p.tape, &s->program, &s->outside, &homes, &s->measured, &s->p.error);
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
    CHECK(worst.per_row == 52 && worst.fixed == 52 && worst.per_chunk == 0);
    CHECK(kl_measure_largest_chunk(&s.measured, 52 + 5 * 52) == 5);
    CHECK(kl_measure_largest_chunk(&s.measured, 52 + 52 - 1) == 0);
    kl_measure_fini(&s.measured);
    s.outside = (KlOutside){.known = s.outside.known, .bytes_state = 100, .bytes_drawn = 7};
    CHECK(measure(&s, true) == KL_OK); /* the generator's, before and after */
    CHECK(kl_measure_peak(&s.measured, 2, &worst) == 207 + 52 + 2 * (16 + 36));
    kl_measure_fini(&s.measured);
    s.outside.bytes_graphs = 1e6; /* what torch takes when it goes on from here */
    CHECK(measure(&s, true) == KL_OK && s.measured.whole == 1e6 + 4 + 48);
    CHECK(kl_measure_peak(&s.measured, 2, &worst) > 1e6);
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

/* More chunks are not always less memory: the largest that fits lies between two bounds. */
static void
test_parts_of_many_chunks(void)
{
    KlMoment moment = {.fixed = 100, .per_row = 10, .per_chunk = 50}, worst = {0};
    const KlMeasured measured = {.moments = {.moments = &moment, .n = 1}, .rows = 1000};
    CHECK(kl_measure_peak(&measured, 1000, &worst) == 100 + 10000 + 50);
    CHECK(kl_measure_peak(&measured, 300, &worst) == 100 + 3000 + 4 * 50);
    int64_t rows = kl_measure_largest_chunk(&measured, 3000);
    CHECK(kl_measure_peak(&measured, rows, &worst) <= 3000);
    CHECK(kl_measure_peak(&measured, rows + 20, &worst) > 3000);
    CHECK(kl_measure_largest_chunk(&measured, 1000) == 0);
    const KlMeasured nothing = {.rows = 10};
    CHECK(kl_measure_peak(&nothing, 1, &worst) == 0);
    CHECK(kl_measure_largest_chunk(&nothing, 1) == 10);
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
        CHECK(status == KL_OK || strstr(s.p.error.text, "no memory") != NULL);
    }
    CHECK(n_refused > 11);
    finish(&s);
}

int
main(void)
{
    test_a_step();
    test_without_a_graph();
    test_parts_of_many_chunks();
    test_no_memory();
    CHECK(kl_alloc_n_blocks() == 0);
    return check_result();
}
