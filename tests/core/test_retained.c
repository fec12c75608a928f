/* SPDX-License-Identifier: Apache-2.0 */
/* test_retained.c - which graphs are retained until their backward, and which of their values are recomputed. */
#include "retained.h"

#include "record.h"

#define MAX_VALUES 64

/* A program of three bodies: what runs in the one in the middle is the test's. */
typedef struct Made {
    Program p;
    Start s;
    KlValueId square, mean; /* a layer; what the rows of its input meet in */
    KlValueId given;        /* to the body in the middle, by rows */
    KlProgram program;
    bool retains;
    KlIds again;
    KlIds needs;          /* the values to rematerialize, whose storage FREE_STORAGE freed */
    KlCheapSet cheap_set; /* which the runs leave */
    uint8_t policies[MAX_VALUES];
} Made;

static void
open(Made *made)
{
    *made = (Made){0};
    made->s = start(&made->p);
    made->square = leaf(&made->p, with_grad(TENSOR(FLOAT32, 3, 3)));
    made->mean = CALL1(&made->p, "mean", made->s.h, INTS(0));
    made->given = call2(&made->p, "sub", made->s.h, made->mean);
}

/* The rows of `left` meet again, and a body goes on from there; then ask. */
static KlStatus
find(Made *made, KlValueId left)
{
    static const bool nothing[MAX_VALUES];
    static const uint32_t nobody[MAX_VALUES];
    uint8_t marks[MAX_VALUES] = {0};
    Program *p = &made->p;
    KlValueId mean = CALL1(p, "mean", left, INTS(0));
    KlValueId loss = call1(p, "mean", call1(p, "exp", call2(p, "sub", left, mean)));
    const KlAsked asked = {.goal = {.wanted = &loss, .n_wanted = 1, .roots = &loss, .n_roots = 1},
                           .n_segments = 1,
                           .reached = &loss,
                           .n_reached = 1,
                           .has_real = nothing,
                           .has_number = nothing,
                           .n_handles = nobody};
    CHECK(p->tape.n_values <= MAX_VALUES);
    CHECK(kl_program_build(&p->tape, &asked, &made->program) == KL_OK);
    made->cheap_set.number = kl_alloc_zeroed(p->tape.n_values, sizeof(uint32_t));
    KlStatus status = KL_OK;
    const KlRetained retained = {.tape = &p->tape,
                                 .program = &made->program,
                                 .policies = made->policies,
                                 .marks = marks,
                                 .cheap_set = &made->cheap_set,
                                 .status = &status};
    for (uint32_t r = 0; r < made->program.n_staged && status == KL_OK; r++) {
        if (kl_program_is_body(&made->program.runs[r])) {
            kl_retained_find_cheap(&retained, r);
        }
    }
    uint32_t stage = made->program.stages.node_stage[node_of(p, made->given)];
    for (uint32_t r = 0; r < made->program.n_staged && status == KL_OK; r++) {
        const KlRun *run = &made->program.runs[r];
        made->again.n = run->stage == stage ? 0 : made->again.n;
        if (run->stage == stage) {
            made->retains = kl_retained_find(&retained, run, &made->again, &made->needs);
        }
    }
    for (size_t v = 0; v < MAX_VALUES; v++) {
        CHECK(status != KL_OK || marks[v] == 0);
    }
    return status;
}

static void
fini(Made *made)
{
    kl_alloc_free(made->again.ids);
    kl_alloc_free(made->needs.ids);
    kl_alloc_free(made->cheap_set.values);
    kl_alloc_free(made->cheap_set.ids.ids);
    kl_alloc_free(made->cheap_set.number);
    kl_program_fini(&made->program);
    program_fini(&made->p);
}

static bool
is_in(const KlIds *ids, KlValueId value)
{
    for (size_t i = 0; i < ids->n; i++) {
        if (ids->ids[i] == value) {
            return true;
        }
    }
    return false;
}

static bool
is_again(const Made *made, KlValueId value)
{
    return is_in(&made->again, value);
}

/* A saved value that cheap calls can recompute is recomputed. */
static void
test_cheap_before_heavy(void)
{
    Made made;
    open(&made);
    KlValueId active = call1(&made.p, "relu", made.given);
    CHECK(find(&made, call2(&made.p, "linear", active, made.square)) == KL_OK);
    CHECK(made.retains);
    CHECK(made.again.n == 1 && is_again(&made, active));
    fini(&made);
}

/* What leaves the body is in its home, and cheap again from there. */
static void
test_cheap_after_heavy(void)
{
    Made made;
    open(&made);
    KlValueId active = call1(&made.p, "relu", made.given);
    KlValueId made_of = call2(&made.p, "linear", active, made.square);
    KlValueId other = call1(&made.p, "exp", made_of);
    KlValueId both = call2(&made.p, "mul", made_of, other);
    KlValueId heavy = call2(&made.p, "linear", both, made.square);
    KlValueId meets = CALL1(&made.p, "mean", made_of, INTS(0)); /* so it leaves the body too */
    CHECK(find(&made, call2(&made.p, "add", call2(&made.p, "sub", made_of, meets), heavy)) ==
          KL_OK);
    CHECK(made.retains);
    CHECK(is_again(&made, active) && is_again(&made, other) && is_again(&made, both));
    CHECK(!is_again(&made, made_of));
    fini(&made);
}

/* A product between would have to be kept, or made twice. */
static void
test_heavy_inside(void)
{
    Made made;
    open(&made);
    KlValueId inner = call2(&made.p, "linear", call1(&made.p, "relu", made.given), made.square);
    KlValueId active = call1(&made.p, "relu", inner);
    CHECK(find(&made, call2(&made.p, "linear", active, made.square)) == KL_OK);
    CHECK(!made.retains);
    fini(&made);
}

/* To run cheap calls again costs no more than to wait. */
static void
test_nothing_heavy(void)
{
    Made made;
    open(&made);
    CHECK(find(&made, call1(&made.p, "relu", made.given)) == KL_OK);
    CHECK(!made.retains);
    fini(&made);
}

/* What is drawn is not drawn again. */
static void
test_draws(void)
{
    Made made;
    open(&made);
    const KlArg args[] = {VALUE(0), {.kind = KL_ARG_FLOAT, .u.f = 0.5}};
    KlValueId drawn = record(&made.p, "dropout", 2, args, 1, IDS(made.given));
    CHECK(made.p.tape.nodes[node_of(&made.p, drawn)].is_random);
    CHECK(find(&made, call2(&made.p, "linear", drawn, made.square)) == KL_OK);
    CHECK(!made.retains);
    fini(&made);
}

/* Written in place, and saved as it is then. */
static void
test_writes(void)
{
    Made made;
    open(&made);
    KlValueId written = call1(&made.p, "relu_", made.given);
    CHECK(find(&made, call2(&made.p, "linear", written, made.square)) == KL_OK);
    CHECK(made.retains && is_again(&made, written));
    fini(&made);
}

/* Written by a call that saves it: what is copied is the value before. */
static void
test_saves_what_it_writes(void)
{
    Made made;
    open(&made);
    KlValueId before = call2(&made.p, "mul", made.given, made.given);
    KlValueId written = call1(&made.p, "silu_", before);
    CHECK(find(&made, call2(&made.p, "linear", written, made.square)) == KL_OK);
    CHECK(made.retains && is_again(&made, before) && is_again(&made, written));
    fini(&made);
}

/* Saved, and written since: torch raises where it is kept, which made again it would not. */
static void
test_saved_and_written(void)
{
    Made made;
    open(&made);
    KlValueId before = call1(&made.p, "exp", made.given);
    KlValueId written = call1(&made.p, "relu_", before);
    CHECK(find(&made, call2(&made.p, "linear", written, made.square)) == KL_OK);
    CHECK(!made.retains);
    fini(&made);
}

/* Rows of a whole value that do not lie together are copied for each chunk: all copies would wait. */
static void
test_copies(void)
{
    for (int is_apart = 0; is_apart < 2; is_apart++) {
        Made made;
        open(&made);
        KlMeta meta = TENSOR(FLOAT32, 8, 3);
        meta.strides[0] = is_apart ? 1 : meta.strides[0];
        meta.strides[1] = is_apart ? 8 : meta.strides[1];
        KlValueId weights = leaf(&made.p, meta);
        KlValueId weighed = call2(&made.p, "mul", made.given, weights);
        CHECK(find(&made, call2(&made.p, "linear", weighed, made.square)) == KL_OK);
        CHECK(made.retains == !is_apart);
        fini(&made);
    }
}

/* What leaves the body and is saved, and is cheap: a sum goes around the rows' meeting. */
static void
test_emptied(void)
{
    for (int is_emptied = 0; is_emptied < 2; is_emptied++) {
        Made made;
        open(&made);
        KlValueId sum = call2(&made.p, "add", made.given, made.s.h);
        KlValueId active = call1(&made.p, "relu", sum);
        KlValueId heavy = call2(&made.p, "linear", active, made.square);
        made.policies[active] = made.policies[heavy] =
            is_emptied ? KL_POLICY_REMATERIALIZE : KL_POLICY_KEEP;
        KlValueId meets = CALL1(&made.p, "mean", heavy, INTS(0));
        KlValueId later = call2(&made.p, "add", call2(&made.p, "sub", heavy, meets), active);
        CHECK(find(&made, call2(&made.p, "linear", later, made.square)) == KL_OK);
        CHECK(made.retains && !is_again(&made, active));
        CHECK(is_in(&made.needs, active) == (is_emptied != 0));
        if (is_emptied) {
            const KlCheap *cheap = &made.cheap_set.values[made.cheap_set.number[active] - 1];
            CHECK(cheap->value == active && cheap->needs.n == 0);
            const uint32_t *nodes = &made.cheap_set.ids.ids[cheap->nodes.first];
            CHECK(cheap->nodes.n == 3 && nodes[1] == node_of(&made.p, sum) &&
                  nodes[2] == node_of(&made.p, active));
            CHECK(made.cheap_set.number[heavy] == 0);
        }
        fini(&made);
    }
}

/* What is made again is listed in the order it is made, whoever needs it first. */
static void
test_order_of_needs(void)
{
    Made made;
    open(&made);
    KlValueId first = call1(&made.p, "relu", made.given);
    KlValueId second = call1(&made.p, "sigmoid", made.given);
    KlValueId heavy = call2(&made.p, "linear", made.given, made.square);
    heavy = call2(&made.p, "mul", heavy, second);
    heavy = call2(&made.p, "mul", heavy, first);
    made.policies[first] = made.policies[second] = KL_POLICY_REMATERIALIZE;
    KlValueId meets = CALL1(&made.p, "mean", heavy, INTS(0));
    KlValueId later = call2(&made.p, "add", call2(&made.p, "sub", heavy, meets), first);
    later = call2(&made.p, "add", later, second);
    CHECK(find(&made, call2(&made.p, "linear", later, made.square)) == KL_OK);
    CHECK(made.cheap_set.number[first] == 1 && made.cheap_set.number[second] == 2);
    CHECK(made.needs.n == 2 && made.needs.ids[0] == first && made.needs.ids[1] == second);
    fini(&made);
}

/* A chain of sums, of which some are kept: each emptied one needs the emptied one before it. */
static void
test_chains(void)
{
    for (uint32_t mix = 0; mix < 8; mix++) {
        Made made;
        KlValueId sums[4];
        open(&made);
        KlValueId h = made.given;
        for (int i = 0; i < 4; i++) { /* the last leaves no body */
            KlValueId heavy = call2(&made.p, "linear", h, made.square);
            KlValueId mean = CALL1(&made.p, "mean", heavy, INTS(0));
            h = sums[i] = call2(&made.p, "add", call2(&made.p, "sub", heavy, mean), h);
            made.policies[h] = mix >> i & 1 ? KL_POLICY_REMATERIALIZE : KL_POLICY_KEEP;
        }
        CHECK(find(&made, call2(&made.p, "linear", h, made.square)) == KL_OK);
        for (int i = 0; i < 4; i++) {
            uint32_t number = made.cheap_set.number[sums[i]];
            CHECK((number != 0) == ((mix >> i & 1) != 0));
            if (number > 0) {
                bool is_chain = i > 0 && (mix >> (i - 1) & 1) != 0;
                KlSlice needs = made.cheap_set.values[number - 1].needs;
                CHECK(needs.n == is_chain);
                CHECK(!is_chain || made.cheap_set.ids.ids[needs.first] == sums[i - 1]);
            }
        }
        fini(&made);
    }
}

/* A result that is not in memory between the passes: its graph is retained if cheap calls make what it saves of it. */
static void
test_results_elsewhere(void)
{
    for (int is_saved = 0; is_saved < 2; is_saved++) {
        for (int is_cheap = 0; is_cheap < 2; is_cheap++) {
            Made made;
            open(&made);
            KlValueId heavy = call2(&made.p, "linear", made.given, made.square);
            KlValueId left = is_cheap ? call1(&made.p, "exp", made.given) : heavy;
            KlValueId next =
                is_saved ? call1(&made.p, "sin", left) : call2(&made.p, "add", left, heavy);
            made.policies[left] = KL_POLICY_RECOMPUTE;
            KlValueId mean = CALL1(&made.p, "mean", next, INTS(0));
            KlValueId later = call2(&made.p, "add", call2(&made.p, "sub", left, mean), heavy);
            CHECK(find(&made, call2(&made.p, "linear", later, made.square)) == KL_OK);
            CHECK(made.retains == (is_cheap || !is_saved));
            fini(&made);
        }
    }
}

static void
test_no_memory(void)
{
    KlStatus status = KL_ERROR_MEMORY;
    for (int64_t n = 0; status != KL_OK; n++) {
        uint8_t marks[MAX_VALUES] = {0};
        Made made;
        open(&made);
        KlValueId active = call1(&made.p, "relu", made.given);
        CHECK(find(&made, call2(&made.p, "linear", active, made.square)) == KL_OK);
        const KlRetained retained = {.tape = &made.p.tape,
                                     .program = &made.program,
                                     .policies = made.policies,
                                     .marks = marks,
                                     .cheap_set = &made.cheap_set,
                                     .status = &status};
        status = KL_OK;
        KlIds again = {0}, needs = {0};
        uint32_t r = 0;
        while (made.program.runs[r].stage !=
               made.program.stages.node_stage[node_of(&made.p, active)]) {
            r++;
        }
        kl_alloc_fail_after(n);
        made.retains = kl_retained_find(&retained, &made.program.runs[r], &again, &needs);
        kl_alloc_fail_after(-1);
        CHECK(status == KL_OK || (status == KL_ERROR_MEMORY && again.ids == NULL && n == 0));
        kl_alloc_free(again.ids);
        fini(&made);
    }
}

int
main(void)
{
    test_cheap_before_heavy();
    test_cheap_after_heavy();
    test_heavy_inside();
    test_nothing_heavy();
    test_draws();
    test_writes();
    test_saves_what_it_writes();
    test_saved_and_written();
    test_copies();
    test_emptied();
    test_order_of_needs();
    test_chains();
    test_results_elsewhere();
    test_no_memory();
    CHECK(kl_alloc_n_blocks() == 0);
    return check_result();
}
