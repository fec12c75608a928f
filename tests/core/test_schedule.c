/* SPDX-License-Identifier: Apache-2.0 */
/* test_schedule.c - what a step does, in which order, and when values are let go and made again. */
#include "schedule.h"

#include <string.h>

#include "record.h"

#define MAX_VALUES 128

typedef struct Made {
    Program p;
    KlProgram program;
    KlSchedule schedule;
    uint8_t policies[MAX_VALUES]; /* by value: the policies asked for */
    size_t n_more;                /* policies than there are boundary values */
} Made;

/* Write the policies in the order of the exports that bodies leave for others; return how many there are. */
static size_t
in_order(const Made *made, uint8_t *policies)
{
    size_t n = 0;
    for (size_t r = 0; r < made->program.n_staged; r++) {
        const KlRun *run = &made->program.runs[r];
        for (uint32_t i = 0; i < run->exports.n && kl_program_is_body(run); i++) {
            KlValueId value = kl_program_export(&made->program, run, i);
            bool is_inner = false;
            for (uint32_t k = 0; k < run->inner.n; k++) {
                is_inner |= made->program.inner.ids[run->inner.first + k] == value;
            }
            if (!is_inner) {
                policies[n++] = made->policies[value];
            }
        }
    }
    return n + made->n_more;
}

static KlStatus
try_to_build(Made *made, KlValueId wanted, uint32_t n_segments, const KlPolicy *policy)
{
    static const bool nothing[MAX_VALUES];
    static const uint32_t nobody[MAX_VALUES];
    const KlAsked asked = {.goal = {.wanted = &wanted,
                                    .n_wanted = 1,
                                    .roots = &wanted,
                                    .n_roots = policy->is_graph ? 1 : 0},
                           .n_segments = n_segments,
                           .reached = &wanted,
                           .n_reached = 1,
                           .has_real = nothing,
                           .has_number = nothing,
                           .n_handles = nobody};
    CHECK(made->p.tape.n_values <= MAX_VALUES);
    KlStatus status = kl_program_build(&made->p.tape, &asked, &made->program);
    if (status == KL_OK) {
        uint8_t policies[MAX_VALUES + 1] = {0};
        KlPolicy whole = *policy;
        whole.n_values = in_order(made, policies);
        whole.values = policies;
        status = kl_schedule_build(&made->p.tape, &made->program, &whole, &made->schedule);
        if (status != KL_OK) {
            kl_program_fini(&made->program);
        }
    }
    return status;
}

static void
build(Made *made, KlValueId wanted, uint32_t n_segments, bool is_graph)
{
    const KlPolicy policy = {.is_graph = is_graph};
    CHECK(try_to_build(made, wanted, n_segments, &policy) == KL_OK);
}

static void
fini(Made *made)
{
    kl_schedule_fini(&made->schedule);
    kl_program_fini(&made->program);
    CHECK(made->schedule.steps == NULL && made->schedule.n_steps == 0);
}

/* Whether the steps of runs that have calls, or of values, are these: the other runs are barriers. */
static bool
is_order(const Made *made, uint32_t n, const KlStepOp *expected)
{
    uint32_t k = 0;
    for (size_t i = 0; i < made->schedule.n_steps; i++) {
        const KlStep *step = &made->schedule.steps[i];
        const KlRun *run = &made->program.runs[step->run];
        bool is_empty = step->n_runs == 1 && run->nodes.n == 0 && run->combined.n == 0 &&
                        step->op != KL_STEP_SEED;
        if (is_empty) {
            continue;
        }
        if (k == n || step->op != expected[k++]) {
            return false;
        }
    }
    return k == n;
}

#define IS_ORDER(made, ...)                                                                        \
    is_order(made, sizeof((const KlStepOp[]){__VA_ARGS__}) / sizeof(KlStepOp),                     \
             (const KlStepOp[]){__VA_ARGS__})

/* How often values are let go, or made again, in steps of this kind. */
static uint32_t
n_times(const Made *made, KlStepOp op, KlValueId value)
{
    uint32_t n = 0;
    for (size_t i = 0; i < made->schedule.n_steps; i++) {
        const KlStep *step = &made->schedule.steps[i];
        for (uint32_t k = 0; k < step->values.n && step->op == op; k++) {
            n += made->schedule.values.ids[step->values.first + k] == value;
        }
    }
    return n;
}

static void
test_one_body(void)
{
    Made made = {0};
    Start s = start(&made.p);
    KlValueId loss = call1(&made.p, "mean", s.h);
    build(&made, loss, 1, true);
    CHECK(IS_ORDER(&made, KL_STEP_STORE, KL_STEP_LOOP, KL_STEP_RUN, KL_STEP_TAIL, KL_STEP_BACK,
                   KL_STEP_TAKE, KL_STEP_END, KL_STEP_WATCH, KL_STEP_BARRIER, KL_STEP_BARRIER_BACK,
                   KL_STEP_CHECK));
    CHECK(made.schedule.n_forward < made.schedule.n_steps);
    fini(&made);
    build(&made, loss, 1, false);
    CHECK(IS_ORDER(&made, KL_STEP_STORE, KL_STEP_LOOP, KL_STEP_RUN, KL_STEP_END, KL_STEP_BARRIER));
    CHECK(made.schedule.n_forward == made.schedule.n_steps);
    CHECK(n_times(&made, KL_STEP_FREE, loss) == 0); /* the user has it */
    fini(&made);
    program_fini(&made.p);
}

/* How often values are freed: at once, or as their chunks go back. */
static uint32_t
n_let_go(const Made *made, KlValueId value)
{
    return n_times(made, KL_STEP_FREE, value);
}

/* How many steps of a kind have a graph that waits. */
static uint32_t
n_waiting(const Made *made, KlStepOp op)
{
    uint32_t n = 0;
    for (size_t i = 0; i < made->schedule.n_steps; i++) {
        const KlStep *step = &made->schedule.steps[i];
        n += step->op == op && step->graph == KL_GRAPH_RETAIN;
    }
    return n;
}

/* A tail that is not linear: the body runs twice, and what it left goes before it goes back. */
static void
test_two_forwards(void)
{
    Made made = {0};
    Start s = start(&made.p);
    KlValueId h = call2(&made.p, "linear", call1(&made.p, "exp", s.h),
                        leaf(&made.p, with_grad(TENSOR(FLOAT32, 3, 3))));
    KlValueId mean = call1(&made.p, "mean", h), loss = call2(&made.p, "mul", mean, mean);
    build(&made, loss, 1, true);
    CHECK(IS_ORDER(&made, KL_STEP_STORE, KL_STEP_LOOP, KL_STEP_RUN, KL_STEP_END, KL_STEP_BARRIER,
                   KL_STEP_BARRIER_BACK, KL_STEP_SEED, KL_STEP_FREE, KL_STEP_LOOP, KL_STEP_RUN,
                   KL_STEP_BACK, KL_STEP_TAKE, KL_STEP_END));
    CHECK(n_times(&made, KL_STEP_FREE, mean) == 1);
    fini(&made);
    program_fini(&made.p);
}

/* A body that saves nothing of its own waits; one loop keeps what it left, and another frees it by chunk; not where
 * what it is given, or leaves, is somewhere else meanwhile, and not without a graph. */
static void
test_graphs_that_wait(void)
{
    Made made = {0};
    Start s = start(&made.p);
    KlValueId mean = CALL1(&made.p, "mean", s.h, INTS(0));
    KlValueId cheap = call1(&made.p, "exp", call2(&made.p, "sub", s.h, mean));
    KlValueId h = call2(&made.p, "linear", cheap, leaf(&made.p, with_grad(TENSOR(FLOAT32, 3, 3))));
    KlValueId next = CALL1(&made.p, "mean", h, INTS(0));
    KlValueId loss = call1(&made.p, "mean", call2(&made.p, "sub", h, next));
    build(&made, loss, 1, true);
    CHECK(n_waiting(&made, KL_STEP_RUN) == 2 && n_waiting(&made, KL_STEP_BACK) == 2);
    CHECK(n_times(&made, KL_STEP_LOOP, h) == 2 && n_times(&made, KL_STEP_LOOP, s.h) == 2);
    for (size_t i = 0; i < made.schedule.n_steps; i++) {
        const KlStep *step = &made.schedule.steps[i];
        uint32_t n_again = step->op == KL_STEP_RUN ? step->others.n : 0;
        bool is_cheap = n_again == 1 && made.schedule.values.ids[step->others.first] == cheap;
        CHECK(n_again == 0 || (step->graph == KL_GRAPH_RETAIN && is_cheap));
    }
    fini(&made);
    /* Only the bodies that read a value lose their graphs if it is somewhere else meanwhile. */
    for (int is_offloaded = 0; is_offloaded < 2; is_offloaded++) {
        made.policies[h] = is_offloaded ? KL_POLICY_OFFLOAD : KL_POLICY_RECOMPUTE;
        build(&made, loss, 1, true);
        CHECK(n_waiting(&made, KL_STEP_RUN) == 2 && n_waiting(&made, KL_STEP_BACK) == 2);
        made.policies[s.h] = made.policies[h];
        fini(&made);
        build(&made, loss, 1, true);
        CHECK(n_waiting(&made, KL_STEP_RUN) == 1 && n_waiting(&made, KL_STEP_BACK) == 1);
        fini(&made);
        made.policies[h] = made.policies[s.h] = KL_POLICY_KEEP;
    }
    build(&made, loss, 1, false);
    CHECK(n_waiting(&made, KL_STEP_RUN) == 0);
    fini(&made);
    /* So many chunks of a few numbers that graphs would be most of what is kept. */
    const KlPolicy many = {.is_graph = true, .n_chunks = 1000};
    CHECK(try_to_build(&made, loss, 1, &many) == KL_OK);
    CHECK(n_waiting(&made, KL_STEP_RUN) == 0);
    fini(&made);
    program_fini(&made.p);
}

/* Layers that each wait for a mean over the batch. */
static KlValueId
layers(Made *made, Start s, KlValueId *crossing, uint32_t n)
{
    KlValueId h = s.h;
    for (uint32_t i = 0; i < n; i++) {
        KlValueId mean = CALL1(&made->p, "mean", h, INTS(0));
        crossing[i] = h;
        h = call1(&made->p, "exp", call2(&made->p, "sub", h, mean));
    }
    return call1(&made->p, "mean", h);
}

/* The step frees a recomputed value after its last reader, recomputes it before that reader's backward, and frees it
 * again before the backward of its own body. It frees a kept value once, however others are stored. */
static void
test_what_is_made_again(void)
{
    for (uint32_t mix = 0; mix < 16; mix++) {
        Made made = {0};
        Start s = start(&made.p);
        KlValueId crossing[4];
        KlValueId loss = layers(&made, s, crossing, 4);
        for (int i = 0; i < 4; i++) {
            made.policies[crossing[i]] = mix >> i & 1 ? KL_POLICY_RECOMPUTE : KL_POLICY_KEEP;
        }
        build(&made, loss, 1, true);
        for (uint32_t i = 0; i < 4; i++) {
            /* A fused body reads the last value: its backward follows each chunk's forward. */
            uint32_t n_again = i < 3 && (mix >> i & 1) != 0;
            CHECK(n_times(&made, KL_STEP_RECOMPUTE, crossing[i]) == n_again);
            CHECK(n_times(&made, KL_STEP_FREE, crossing[i]) == 1 + n_again);
        }
        fini(&made);
        made.n_more = 1; /* policies of another program: all is kept */
        build(&made, loss, 1, true);
        for (int i = 0; i < 4; i++) {
            CHECK(n_times(&made, KL_STEP_RECOMPUTE, crossing[i]) == 0);
            CHECK(n_let_go(&made, crossing[i]) == 1);
        }
        fini(&made);
        program_fini(&made.p);
    }
}

/* Offloaded results of bodies are not recomputed. Those that the user gets, or a barrier reads whole, stay. */
static void
test_what_is_offloaded(void)
{
    Made made = {0};
    Start s = start(&made.p);
    KlValueId crossing[3];
    KlValueId loss = layers(&made, s, crossing, 3);
    memset(made.policies, KL_POLICY_OFFLOAD, sizeof(made.policies));
    build(&made, loss, 1, true);
    for (int i = 0; i < 3; i++) {
        CHECK(n_times(&made, KL_STEP_STORE, crossing[i]) == 1);
        CHECK(n_times(&made, KL_STEP_RECOMPUTE, crossing[i]) == 0);
        CHECK(n_times(&made, KL_STEP_FREE, crossing[i]) == 1);
    }
    fini(&made);
    KlValueId sorted = CALL1(&made.p, "sort", crossing[1], INT(0));
    loss = call2(&made.p, "mul", loss, call1(&made.p, "mean", sorted));
    build(&made, loss, 1, true);
    CHECK(n_times(&made, KL_STEP_STORE, crossing[0]) == 1);
    CHECK(n_times(&made, KL_STEP_STORE, crossing[1]) == 0);
    fini(&made);
    program_fini(&made.p);
}

/* Without a graph each goes when it was read for the last time. */
static void
test_one_at_a_time(void)
{
    Made made = {0};
    Start s = start(&made.p);
    KlValueId crossing[3];
    KlValueId loss = layers(&made, s, crossing, 3);
    build(&made, loss, 1, false);
    for (int i = 0; i < 3; i++) {
        CHECK(n_times(&made, KL_STEP_FREE, crossing[i]) == 1);
    }
    CHECK(n_times(&made, KL_STEP_FREE, loss) == 0); /* the user has it */
    fini(&made);
    program_fini(&made.p);
}

/* Segments run as one body; what one hands to the next is theirs to let go. */
static void
test_segments(void)
{
    Made made = {0};
    Start s = start(&made.p);
    KlValueId h = s.h;
    for (int i = 0; i < 6; i++) {
        h = call1(&made.p, "exp", h);
    }
    KlValueId mean = call1(&made.p, "mean", h), loss = call2(&made.p, "mul", mean, mean);
    build(&made, loss, 3, true);
    uint32_t n_back = 0, n_run = 0;
    for (size_t i = 0; i < made.schedule.n_steps; i++) {
        const KlStep *step = &made.schedule.steps[i];
        n_back += step->op == KL_STEP_BACK;
        n_run += step->op == KL_STEP_RUN;
    }
    CHECK(n_back == 3 &&
          n_run == 3 + 2 + 3); /* forward; once more, all but the last; with their graphs */
    uint32_t n_inner = 0;
    for (size_t r = 0; r < made.program.n_runs; r++) {
        const KlRun *run = &made.program.runs[r];
        for (uint32_t i = 0; i < run->inner.n; i++, n_inner++) {
            KlValueId value = made.program.inner.ids[run->inner.first + i];
            CHECK(n_times(&made, KL_STEP_FREE, value) == 2); /* a chunk, forward and back */
        }
    }
    CHECK(n_inner == 2);
    CHECK(n_times(&made, KL_STEP_FREE, mean) == 1);
    fini(&made);
    program_fini(&made.p);
}

static void
test_no_memory(void)
{
    Made made = {0};
    Start s = start(&made.p);
    KlValueId crossing[4];
    KlValueId loss = layers(&made, s, crossing, 4);
    const KlPolicy policy = {.is_graph = true};
    made.policies[crossing[0]] = made.policies[crossing[2]] = KL_POLICY_RECOMPUTE;
    int64_t n_blocks = kl_alloc_n_blocks(), n_refused = 0;
    KlStatus status = KL_ERROR_MEMORY;
    while (status != KL_OK) {
        kl_alloc_fail_after(n_refused++);
        status = try_to_build(&made, loss, 2, &policy);
        kl_alloc_fail_after(-1);
        CHECK(status == KL_OK || (status == KL_ERROR_MEMORY && kl_alloc_n_blocks() == n_blocks));
    }
    CHECK(n_refused > 30);
    fini(&made);
    CHECK(kl_alloc_n_blocks() == n_blocks);
    program_fini(&made.p);
}

int
main(void)
{
    test_one_body();
    test_two_forwards();
    test_graphs_that_wait();
    test_what_is_made_again();
    test_what_is_offloaded();
    test_one_at_a_time();
    test_segments();
    test_no_memory();
    CHECK(kl_alloc_n_blocks() == 0);
    return check_result();
}
