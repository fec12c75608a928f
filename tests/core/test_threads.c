/* SPDX-License-Identifier: Apache-2.0 */
/* test_threads.c - two tapes on two threads have nothing in common: run under ThreadSanitizer too. */
#include <pthread.h>

#include "record.h"

enum { N_PROGRAMS = 200, N_CALLS = 12 };

/* Records a program, stages it, runs through it, abandons the half, and forgets it. */
static void
record_and_stage(Program *p)
{
    KlStages stages;
    KlAxisId batch = axis(p, 8);
    KlValueId h = leaf(p, by_rows(batch, TENSOR(FLOAT32, 8, 4)));
    KlValueId w = leaf(p, with_grad(TENSOR(FLOAT32, 4, 4)));
    for (int i = 0; i < N_CALLS; i++) {
        h = call1(p, "tanh", call2(p, "linear", h, w));
    }
    KlValueId loss = call1(p, "sum", h);
    const KlGoal goal = {.wanted = &h, .n_wanted = 1, .roots = &loss, .n_roots = 1};
    CHECK(kl_stage_build(&p->tape, &goal, &stages) == KL_OK);
    CHECK(stages.n_stages >= 3);
    kl_stage_fini(&stages);
    (void)kl_tape_find_no_grad(&p->tape);
    for (size_t i = 0; i < p->tape.n_nodes / 2; i++) {
        kl_tape_set_done(&p->tape, (KlNodeId)i);
    }
    kl_tape_abandon(&p->tape, 0);
    kl_tape_ask(&p->tape, loss);
    CHECK(!p->tape.nodes[p->node].is_abandoned);
    kl_tape_retire(&p->tape, false);
    kl_tape_clear(&p->tape);
}

static void *
work(void *is_right)
{
    Program p = {0};
    for (int i = 0; i < N_PROGRAMS; i++) {
        record_and_stage(&p);
    }
    *(bool *)is_right = p.tape.n_nodes == 0 && !p.was_refused;
    program_fini(&p);
    return NULL;
}

int
main(void)
{
    pthread_t threads[2];
    bool are_right[2] = {false, false};
    for (int i = 0; i < 2; i++) {
        CHECK(pthread_create(&threads[i], NULL, work, &are_right[i]) == 0);
    }
    for (int i = 0; i < 2; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0);
        CHECK(are_right[i]);
    }
    CHECK(kl_alloc_n_blocks() == 0);
    return check_result();
}
