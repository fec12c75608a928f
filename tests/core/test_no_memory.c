/* SPDX-License-Identifier: Apache-2.0 */
/* test_no_memory.c - each request for memory refused in turn, over a whole record, inference and staging:
 * an error of memory, a tape that can still be used, the same result after, nothing left over. */
#include "record.h"

/* One block of the program: two layers, views with the batch written out, a barrier, a second body, writes
 * to a value and through a view, a draw, data, a loss of two parts. */
static KlValueId
block(Program *p, KlValueId x, KlValueId labels)
{
    const KlArg half = {.kind = KL_ARG_FLOAT, .u.f = 0.5};
    KlValueId first = leaf(p, with_grad(TENSOR(FLOAT32, 6, 4)));
    KlValueId second = leaf(p, with_grad(TENSOR(FLOAT32, 4, 6)));
    KlValueId bias = leaf(p, with_grad(TENSOR(FLOAT32, 6)));
    KlValueId h =
        record(p, "linear", 3, ARGS(VALUE(0), VALUE(1), VALUE(2)), 3, IDS(x, first, bias));
    h = CALL1(p, "dropout", call1(p, "relu", h), half, INT(1));
    KlValueId heads = CALL1(p, "view", h, INTS(8, 2, 3)); /* 8 is rewritten */
    h = CALL1(p, "reshape", CALL1(p, "transpose", heads, INT(1), INT(2)), INTS(8, 6));
    KlValueId out = call2(p, "linear", h, second);
    KlValueId mean = call1(p, "mean", out);
    KlValueId centred = call2(p, "sub", out, mean); /* the second body */
    centred = CALL1(p, "add_", centred, INT(1));
    KlValueId column = CALL1(p, "select", centred, INT(1), INT(0));
    KlValueId mask = CALL1(p, "ne", labels, INT(0));
    KlValueId written = call2(p, "mul_", column, mask); /* and, output 1, all of it */
    return CALL2(p, "cross_entropy_loss", written + 1, labels, NONE, INT(1));
}

#define N_BLOCKS 9 /* enough for every table to grow, more than 16 rewrites too */
#define N_AXES 40

static KlValueId
whole_program(Program *p)
{
    KlAxisId batch = axis(p, 8);
    for (int i = 1; i < N_AXES; i++) {
        kl_tape_axis_merge(&p->tape, batch, axis(p, 8));
    }
    KlValueId x = leaf(p, by_rows(batch, TENSOR(FLOAT32, 8, 4)));
    KlValueId labels = leaf(p, by_rows(batch, TENSOR(INT64, 8)));
    KlValueId loss = block(p, x, labels);
    for (int i = 1; i < N_BLOCKS; i++) {
        loss = call2(p, "add", loss, block(p, x, labels));
    }
    p->tape.values[loss].is_wanted = true;
    return loss;
}

/* -- the same program, and the same staging? --------------------------------------------------------- */

static void
check_same_tape(const KlTape *left, const KlTape *right)
{
    CHECK(left->n_nodes == right->n_nodes && left->n_values == right->n_values);
    CHECK(left->n_inputs == right->n_inputs && left->n_storages == right->n_storages);
    CHECK(left->n_rewrites == right->n_rewrites && left->n_axes == right->n_axes);
    for (size_t i = 0; i < left->n_nodes; i++) {
        const KlNode *a = &left->nodes[i], *b = &right->nodes[i];
        CHECK(a->row == b->row && a->first_out == b->first_out && a->n_outs == b->n_outs);
        CHECK(a->first_input == b->first_input && a->n_inputs == b->n_inputs);
        CHECK(a->first_rewrite == b->first_rewrite && a->n_rewrites == b->n_rewrites);
        CHECK(a->mode == b->mode && a->reduce == b->reduce && a->axis == b->axis);
        CHECK(a->saves.inputs == b->saves.inputs && a->writes == b->writes);
        CHECK(a->saves.bytes_extra == b->saves.bytes_extra && a->is_random == b->is_random);
    }
    for (size_t i = 0; i < left->n_values; i++) {
        const KlValue *a = &left->values[i], *b = &right->values[i];
        CHECK(a->node == b->node && a->storage == b->storage && a->version == b->version);
        CHECK(a->view_of == b->view_of && a->n_pending == b->n_pending && a->state == b->state);
        CHECK(a->meta.dtype == b->meta.dtype && a->meta.n_dims == b->meta.n_dims);
        CHECK(a->meta.requires_grad == b->meta.requires_grad);
        CHECK(kl_place_is_equal(&a->meta.place, &b->meta.place));
    }
    for (size_t i = 0; i < left->n_inputs; i++) {
        CHECK(left->inputs[i].value == right->inputs[i].value);
        CHECK(kl_place_is_equal(&left->inputs[i].place, &right->inputs[i].place));
    }
    for (size_t i = 0; i < left->n_axes; i++) {
        CHECK(left->axis_rows[i] == right->axis_rows[i] && left->axis_of[i] == right->axis_of[i]);
    }
}

static bool
is_same(const void *left, const void *right, size_t n, size_t size)
{
    return memcmp(left, right, n * size) == 0;
}

static void
check_same_stages(const KlTape *tape, const KlStages *left, const KlStages *right)
{
    CHECK(left->n_nodes == right->n_nodes && left->n_values == right->n_values);
    CHECK(left->n_stages == right->n_stages && left->last_body == right->last_body);
    CHECK(left->is_tail_linear == right->is_tail_linear && left->tail_node == right->tail_node);
    CHECK(is_same(left->node_stage, right->node_stage, tape->n_nodes, sizeof(uint32_t)));
    CHECK(is_same(left->late_stage, right->late_stage, tape->n_nodes, sizeof(uint32_t)));
    CHECK(is_same(left->value_stage, right->value_stage, tape->n_values, sizeof(uint32_t)));
    CHECK(is_same(left->is_leaf, right->is_leaf, tape->n_values, sizeof(bool)));
    CHECK(is_same(left->is_data, right->is_data, tape->n_nodes, sizeof(bool)));
    CHECK(is_same(left->needs_gradient, right->needs_gradient, tape->n_values, sizeof(bool)));
    CHECK(is_same(left->import_of, right->import_of, tape->n_inputs, sizeof(uint32_t)));
    CHECK(left->n_imports == right->n_imports);
    for (size_t i = 0; i < left->n_imports; i++) {
        CHECK(left->imports[i].value == right->imports[i].value);
        CHECK(left->imports[i].is_range == right->imports[i].is_range);
        CHECK(kl_place_is_equal(&left->imports[i].place, &right->imports[i].place));
    }
}

/* -- at the commit ------------------------------------------------------------------------------------ */

/* A commit looks for what can be known and lets go of the rest: with no memory at all. The mask can be
 * known before the rest; then the user lets go of the loss and keeps the mask. */
static void
commit(Program *p, KlValueId loss, KlValueId mask)
{
    kl_alloc_fail_after(0);
    for (size_t i = 0; i < p->tape.n_nodes; i++) {
        p->tape.nodes[i].is_drawn = p->tape.nodes[i].is_random; /* or it would wait for that */
    }
    CHECK(kl_tape_find_no_grad(&p->tape));
    for (size_t i = 0; i < p->tape.n_nodes; i++) {
        CHECK(p->tape.nodes[i].must_run == (p->tape.values[mask].node == i));
    }
    p->tape.values[loss].is_wanted = false;
    kl_tape_retire(&p->tape, false);
    kl_alloc_fail_after(-1);
    CHECK(p->tape.n_done == p->tape.n_nodes - 1 && !p->tape.nodes[p->tape.n_done].is_done);
}

/* All of it, with the n-th request refused; below 0: none. */
static void
run(Program *p, KlStages *stages, int64_t n)
{
    kl_alloc_fail_after(n);
    KlValueId loss = whole_program(p);
    KlValueId mask = call1(p, "isnan", 1);
    p->tape.values[mask].is_wanted = true;
    stage(p, loss, true, stages);
    commit(p, loss, mask);
}

static void
test_every_request_may_be_refused(void)
{
    Program whole = {0};
    KlStages expected;
    run(&whole, &expected, -1);
    CHECK(!whole.was_refused && expected.n_stages == 7 && expected.n_imports > 20);
    CHECK(whole.tape.n_nodes > 100 && whole.tape.n_rewrites > 16);
    int64_t n_blocks = kl_alloc_n_blocks();
    int64_t n = 0;
    for (bool was_refused = true; was_refused && n < 1000; n++) {
        Program p = {0};
        KlStages stages;
        run(&p, &stages, n);
        was_refused = p.was_refused;
        check_same_tape(&p.tape, &whole.tape);
        check_same_stages(&p.tape, &stages, &expected);
        kl_stage_fini(&stages);
        program_fini(&p);
        CHECK(kl_alloc_n_blocks() == n_blocks);
    }
    CHECK(n > 40 && n < 1000); /* the last one asked for all it wanted */
    kl_stage_fini(&expected);
    program_fini(&whole);
    CHECK(kl_alloc_n_blocks() == 0);
}

int
main(void)
{
    test_every_request_may_be_refused();
    return check_result();
}
