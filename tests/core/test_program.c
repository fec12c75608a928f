/* SPDX-License-Identifier: Apache-2.0 */
/* test_program.c - which nodes run together, what they read, what leaves them, when their values die. */
#include "program.h"

#include "record.h"

#define MAX_VALUES 64

/* What the user holds, and what of it has a number. */
typedef struct Held {
    bool has_real[MAX_VALUES], has_number[MAX_VALUES];
    uint32_t n_handles[MAX_VALUES]; /* by storage */
} Held;

static KlStatus
try_to_build(Program *p, const Held *held, uint32_t n, const KlValueId *wanted, bool is_root,
             KlProgram *program)
{
    const KlAsked asked = {
        .goal = {.wanted = wanted, .n_wanted = n, .roots = wanted, .n_roots = is_root ? n : 0},
        .reached = wanted,
        .n_reached = n,
        .has_real = held->has_real,
        .has_number = held->has_number,
        .n_handles = held->n_handles};
    CHECK(p->tape.n_values <= MAX_VALUES && p->tape.n_storages <= MAX_VALUES);
    return kl_program_build(&p->tape, &asked, program);
}

static void
build(Program *p, KlValueId wanted, bool is_root, KlProgram *program)
{
    const Held held = {0};
    CHECK(try_to_build(p, &held, 1, &wanted, is_root, program) == KL_OK);
}

/* Whether a part of an array holds these ids, in this order. */
static bool
is_list(const KlIds *ids, KlSlice slice, uint32_t n, const uint32_t *expected)
{
    return slice.n == n &&
           (n == 0 || memcmp(&ids->ids[slice.first], expected, n * sizeof(*expected)) == 0);
}

/* The values that die after node `at` of a run. */
static KlSlice
deaths(const KlProgram *program, const KlRun *run, uint32_t at)
{
    uint32_t end = run->nodes.first + at;
    uint32_t first = end > 0 ? program->drops.ids[end - 1] : 0;
    return (KlSlice){.first = first, .n = program->drops.ids[end] - first};
}

static bool
is_read(const KlProgram *program, const KlRun *run, KlValueId value)
{
    bool is_found = false;
    for (uint32_t i = 0; i < run->imports.n; i++) {
        uint32_t import = program->imports.ids[run->imports.first + i];
        is_found = is_found || program->stages.imports[import].value == value;
    }
    return is_found;
}

static void
test_a_body_and_its_barrier(void)
{
    Program p = {0};
    KlProgram program;
    Start s = start(&p);
    KlValueId a = call1(&p, "exp", s.h), b = call1(&p, "sin", a);
    KlValueId mean = call1(&p, "mean", b), loss = call2(&p, "mul", mean, mean);
    build(&p, loss, true, &program);
    const KlRun *body = &program.runs[program.n_runs - 2], *barrier = body + 1;
    CHECK(program.n_runs == 4 && body->stage == 3 && barrier->stage == 4);
    CHECK(kl_program_is_body(body) && body->axis == s.batch && barrier->axis == KL_ID_NONE);
    const uint32_t nodes[] = {node_of(&p, s.h), node_of(&p, a), node_of(&p, b), node_of(&p, mean)};
    CHECK(is_list(&program.nodes, body->nodes, 4, nodes));
    CHECK(program.parts.ids[body->nodes.first] == 0);
    CHECK(program.parts.ids[body->nodes.first + 3] == 3); /* a sum and a count */
    CHECK(is_read(&program, body, s.x) && is_read(&program, body, s.w) && body->imports.n == 2);
    CHECK(is_list(&program.exports, body->exports, 1, &mean)); /* its parts */
    CHECK(is_list(&program.dropped, deaths(&program, body, 0), 0, NULL));
    CHECK(is_list(&program.dropped, deaths(&program, body, 1), 1, &s.h));
    CHECK(is_list(&program.dropped, deaths(&program, body, 2), 1, &a));
    CHECK(is_list(&program.dropped, deaths(&program, body, 3), 1, &b));
    CHECK(is_list(&program.combined, barrier->combined, 1, &nodes[3]));
    CHECK(barrier->imports.n == 0 && barrier->has_gradient && body->has_gradient);
    CHECK(is_list(&program.exports, barrier->exports, 1, &loss) && program.is_kept[loss]);
    CHECK(!program.is_kept[mean] && body->shadows.n == 0);
    kl_program_fini(&program);
    CHECK(program.runs == NULL && program.n_runs == 0);
    program_fini(&p);
}

/* Cheap work on inputs is run again where a later body reads it, and leaves its own only for a barrier. */
static void
test_cheap_work_is_run_again(void)
{
    Program p = {0};
    KlProgram program;
    Start s = start(&p);
    KlValueId mask = CALL1(&p, "ne", s.labels, INT(0)), n = call1(&p, "sum", mask);
    KlValueId picked = CALL1(&p, "select", s.h, INT(1), INT(0));
    KlValueId kept = call2(&p, "mul", picked, mask);
    KlValueId loss = call2(&p, "div", call1(&p, "sum", kept), n);
    build(&p, loss, true, &program);
    const KlRun *data = &program.runs[1], *body = &program.runs[3];
    CHECK(data->stage == 1 && body->stage == 3);
    const uint32_t first[] = {node_of(&p, mask), node_of(&p, n)};
    CHECK(is_list(&program.nodes, data->nodes, 2, first));
    CHECK(is_list(&program.exports, data->exports, 1, &n)); /* the mask stays */
    CHECK(program.nodes.ids[body->nodes.first + 1] == node_of(&p, mask) && body->nodes.n == 5);
    CHECK(is_read(&program, body, s.labels) && !is_read(&program, body, mask));
    kl_program_fini(&program);
    program_fini(&p);
}

/* The count of labels is there before the scores, of which it sees only the sizes. */
static void
test_a_part_that_is_early(void)
{
    Program p = {0};
    KlProgram program;
    Start s = start(&p);
    KlValueId loss = CALL2(&p, "cross_entropy_loss", s.h, s.labels, NONE, INT(1));
    build(&p, loss, true, &program);
    const KlRun *data = &program.runs[1], *body = &program.runs[3];
    CHECK(data->nodes.n == 1 && program.parts.ids[data->nodes.first] == 2);
    CHECK(is_read(&program, data, s.labels) && !is_read(&program, data, s.h));
    CHECK(data->shadows.n == 1);
    uint32_t shadow = program.shadows.ids[data->shadows.first];
    CHECK(program.stages.imports[shadow].value == s.h);
    CHECK(program.parts.ids[body->nodes.first + body->nodes.n - 1] == 1 && body->shadows.n == 0);
    kl_program_fini(&program);
    program_fini(&p);
}

/* Two lazies of one memory: that is kept whole, and the view taken of it; one alone is kept itself. */
static void
test_what_is_kept(void)
{
    Program p = {0};
    KlProgram program;
    Start s = start(&p);
    KlValueId view = CALL1(&p, "select", s.h, INT(1), INT(0));
    Held held = {0};
    const KlValueId wanted[] = {view, s.h};
    CHECK(try_to_build(&p, &held, 1, wanted, false, &program) == KL_OK);
    CHECK(program.is_kept[view] && !program.is_kept[s.h]);
    kl_program_fini(&program);
    held.n_handles[p.tape.values[view].storage] = 2;
    CHECK(try_to_build(&p, &held, 2, wanted, false, &program) == KL_OK);
    CHECK(!program.is_kept[view] && program.is_kept[s.h]);
    kl_program_fini(&program);
    held.has_real[s.h] = true; /* the view is had from what is there */
    CHECK(try_to_build(&p, &held, 1, wanted, false, &program) == KL_OK);
    CHECK(!program.is_kept[view] && !program.is_kept[s.h]);
    kl_program_fini(&program);
    program_fini(&p);
}

/* What is written stays to the end of the run, by whatever name. */
static void
test_what_is_written_does_not_die(void)
{
    Program p = {0};
    KlProgram program;
    Start s = start(&p);
    KlValueId made = call1(&p, "exp", s.h), column = CALL1(&p, "select", made, INT(1), INT(0));
    KlValueId written = call1(&p, "zero_", column);
    KlValueId loss = call1(&p, "mean", call1(&p, "sin", written + 1));
    build(&p, loss, false, &program);
    const KlRun *body = &program.runs[3];
    for (uint32_t i = 0; i < body->nodes.n; i++) {
        KlSlice dead = deaths(&program, body, i);
        for (uint32_t k = 0; k < dead.n; k++) {
            KlValueId value = program.dropped.ids[dead.first + k];
            CHECK(p.tape.values[value].storage != p.tape.values[made].storage);
        }
    }
    kl_program_fini(&program);
    program_fini(&p);
}

static void
test_bodies_of_two_batches(void)
{
    Program p = {0};
    KlProgram program;
    Start s = start(&p);
    KlAxisId others = axis(&p, 5);
    KlValueId y = leaf(&p, by_rows(others, TENSOR(FLOAT32, 5, 4)));
    KlValueId one = call1(&p, "mean", s.h), two = call1(&p, "mean", call2(&p, "linear", y, s.w));
    KlValueId loss = call2(&p, "add", one, two);
    build(&p, loss, true, &program);
    CHECK(program.n_runs == 5 && program.runs[2].stage == 3 && program.runs[3].stage == 3);
    CHECK(program.runs[2].axis == s.batch && program.runs[3].axis == others);
    CHECK(program.runs[4].combined.n == 2);
    kl_program_fini(&program);
    program_fini(&p);
}

static void
test_no_memory(void)
{
    Program p = {0};
    KlProgram program;
    Start s = start(&p);
    const Held held = {0};
    KlValueId loss = CALL2(&p, "cross_entropy_loss", s.h, s.labels, NONE, INT(1));
    int64_t n_blocks = kl_alloc_n_blocks(), n_refused = 0;
    KlStatus status = KL_ERROR_MEMORY;
    while (status != KL_OK) {
        kl_alloc_fail_after(n_refused++);
        status = try_to_build(&p, &held, 1, &loss, true, &program);
        kl_alloc_fail_after(-1);
        CHECK(status == KL_OK || (status == KL_ERROR_MEMORY && kl_alloc_n_blocks() == n_blocks));
    }
    CHECK(n_refused > 20);
    kl_program_fini(&program);
    CHECK(kl_alloc_n_blocks() == n_blocks);
    program_fini(&p);
}

int
main(void)
{
    test_a_body_and_its_barrier();
    test_cheap_work_is_run_again();
    test_a_part_that_is_early();
    test_what_is_kept();
    test_what_is_written_does_not_die();
    test_bodies_of_two_batches();
    test_no_memory();
    CHECK(kl_alloc_n_blocks() == 0);
    return check_result();
}
