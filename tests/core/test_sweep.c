/* SPDX-License-Identifier: Apache-2.0 */
/* test_sweep.c - what is live as a run goes forward and back, by hand: 8 rows of 3 numbers are 96 bytes. */
#include "sweep.h"

#include "record.h"

/* A program of one loss, staged for its gradient, and its body. */
typedef struct Staged {
    Program p;
    KlProgram program;
    KlSweep sweep;
    KlMoments moments;
    const KlRun *body;
    bool *flags; /* zeros: nothing is cut in place, cloned, or has a gradient from before */
    KlValueId x, w, h;
} Staged;

static void
begin(Staged *s)
{
    *s = (Staged){0};
    KlAxisId batch = axis(&s->p, 8);
    s->x = leaf(&s->p, by_rows(batch, TENSOR(FLOAT32, 8, 4)));
    s->w = leaf(&s->p, with_grad(TENSOR(FLOAT32, 3, 4)));
    s->h = call2(&s->p, "linear", s->x, s->w);
}

static void
build(Staged *s, KlValueId loss)
{
    s->flags = kl_alloc_zeroed(256, sizeof(bool));
    const KlAsked asked = {.goal = {.wanted = &loss, .n_wanted = 1, .roots = &loss, .n_roots = 1},
                           .reached = &loss,
                           .n_reached = 1,
                           .has_real = s->flags,
                           .has_number = s->flags,
                           .n_handles = (const uint32_t *)(const void *)s->flags};
    CHECK(kl_program_build(&s->p.tape, &asked, &s->program) == KL_OK);
    for (size_t i = 0; i < s->program.n_runs; i++) {
        const KlRun *run = &s->program.runs[i];
        s->body = kl_program_is_body(run) && run->has_gradient ? run : s->body;
    }
    s->flags[255] = true; /* chunks of the import that is given as number 0 are views */
    const KlFacts facts = {
        .is_cut_in_place = s->flags + 255, .has_grad = s->flags, .is_cloned = s->flags};
    CHECK(s->program.stages.imports[0].value == s->x);
    CHECK(kl_sweep_init(&s->sweep, &s->p.tape, &s->program, &facts) == KL_OK);
}

static void
finish(Staged *s)
{
    kl_alloc_free(s->moments.moments);
    kl_sweep_fini(&s->sweep);
    kl_program_fini(&s->program);
    kl_alloc_free(s->flags);
    program_fini(&s->p);
}

static void
go(Staged *s, bool is_graph)
{
    KlSpan span = kl_sweep_span(&s->program, s->body, is_graph);
    s->moments.n = 0;
    kl_sweep_open(&s->sweep, &span);
    kl_sweep_forward(&s->sweep, &s->moments);
}

static bool
is_moment(const Staged *s, size_t i, double fixed, double per_row)
{
    const KlMoment *moment = &s->moments.moments[i];
    return i < s->moments.n && moment->bytes.fixed == fixed && moment->bytes.per_row == per_row;
}

static void
test_a_body(void)
{
    Staged s;
    begin(&s);
    KlValueId a = call1(&s.p, "exp", s.h), b = call1(&s.p, "sin", a);
    build(&s, call1(&s.p, "mean", b));
    go(&s, false);
    CHECK(s.moments.n == 4 && is_moment(&s, 0, 0, 12)); /* h; x is a view, w is there */
    CHECK(is_moment(&s, 1, 0, 24) && is_moment(&s, 2, 0, 24));
    CHECK(is_moment(&s, 3, 4, 12)); /* the part of the mean, until it is added to those before */
    CHECK(kl_sweep_live(&s.sweep).per_row == 0);
    go(&s, true);
    CHECK(s.moments.n == 4 && is_moment(&s, 2, 0, 24) && is_moment(&s, 3, 4, 24)); /* a is kept */
    CHECK(kl_sweep_live(&s.sweep).per_row == 12 && kl_sweep_live(&s.sweep).fixed == 4);
    kl_sweep_back(&s.sweep, &s.moments);
    CHECK(s.moments.n == 9);
    CHECK(is_moment(&s, 4, 4, 12));  /* mean: the part, a; the gradient of b is one number */
    CHECK(is_moment(&s, 5, 4, 36));  /* sin: a, its gradient, one result in flight */
    CHECK(is_moment(&s, 6, 4, 36));  /* exp: a, two gradients */
    CHECK(is_moment(&s, 7, 52, 12)); /* linear: the gradients of w and h */
    CHECK(is_moment(&s, 8, 4, 0) && kl_sweep_live(&s.sweep).per_row == 0);
    CHECK(s.moments.moments[5].node == s.p.tape.values[b].node);
    kl_sweep_forward(&s.sweep, NULL); /* only the most is wanted */
    CHECK(s.sweep.most == 52 && s.moments.n == 9);
    finish(&s);
}

/* A value that is read twice gets two gradients, which are added up: in place where nobody else has the first. */
static void
test_gradients_that_meet(void)
{
    Staged s;
    begin(&s);
    KlValueId a = call1(&s.p, "exp", s.h), b = call1(&s.p, "relu", s.h);
    build(&s, call1(&s.p, "mean", call2(&s.p, "add", a, b)));
    go(&s, true);
    CHECK(kl_sweep_live(&s.sweep).per_row == 24); /* a and b, which their own backward reads */
    kl_sweep_back(&s.sweep, &s.moments);
    CHECK(s.moments.n == 12);
    CHECK(is_moment(&s, 6, 4, 24)); /* add: its gradient, one number, is both operands' */
    CHECK(is_moment(&s, 7, 4, 36)); /* relu: a, b, the gradient of h */
    CHECK(is_moment(&s, 8, 4, 36)); /* exp: a, the gradient of h, the second one */
    CHECK(is_moment(&s, 9, 4, 24)); /* a has gone */
    finish(&s);
}

/* Where another value has the same gradient, the sum is a third. */
static void
test_a_gradient_that_is_shared(void)
{
    Staged s;
    begin(&s);
    KlValueId a = call1(&s.p, "exp", s.h), b = call2(&s.p, "add", a, s.h);
    KlValueId c = call1(&s.p, "relu", call2(&s.p, "add", b, a));
    build(&s, call1(&s.p, "mean", c));
    go(&s, true);
    CHECK(kl_sweep_live(&s.sweep).per_row == 24); /* a, c */
    kl_sweep_back(&s.sweep, &s.moments);
    CHECK(s.moments.n == 15);
    CHECK(is_moment(&s, 7, 4, 36));  /* relu: a, c, the gradient of what is added */
    CHECK(is_moment(&s, 8, 4, 24));  /* add: it is that of b and of a */
    CHECK(is_moment(&s, 9, 4, 24));  /* add: and, of b, that of h and once more of a */
    CHECK(is_moment(&s, 10, 4, 36)); /* the sum */
    finish(&s);
}

/* What each chunk copies lives to the end of the chunk; a write on a clone takes memory of its own. */
static void
test_copies_and_clones(void)
{
    Staged s;
    begin(&s);
    KlValueId a = call1(&s.p, "exp", s.h);
    build(&s, call1(&s.p, "mean", CALL1(&s.p, "mul_", a, INT(2))));
    s.flags[255] = false; /* a chunk of x is a copy */
    KlNodeId write = s.p.tape.values[a].node + 1;
    go(&s, false);
    CHECK(is_moment(&s, 0, 0, 28) && is_moment(&s, 1, 0, 40) && is_moment(&s, 2, 0, 28));
    s.flags[write] = true;
    go(&s, false);
    CHECK(is_moment(&s, 1, 0, 40) && is_moment(&s, 2, 0, 40));
    s.flags[write] = false;
    finish(&s);
}

int
main(void)
{
    test_a_body();
    test_gradients_that_meet();
    test_a_gradient_that_is_shared();
    test_copies_and_clones();
    CHECK(kl_alloc_n_blocks() == 0);
    return check_result();
}
