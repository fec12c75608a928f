/* SPDX-License-Identifier: Apache-2.0 */
/* test_tape.c - values and their memory, versions and views, axes that become one, and what is left to do. */
#include "tape.h"

#include "record.h"

static const KlValue *
value(const Program *program, KlValueId id)
{
    return &program->tape.values[id];
}

static const KlNode *
last_node(const Program *program)
{
    return &program->tape.nodes[program->node];
}

/* -- values ------------------------------------------------------------------------------------------ */

static void
test_a_leaf_is_live_and_has_memory_of_its_own(void)
{
    Program p = {0};
    KlValueId x = leaf(&p, TENSOR(FLOAT32, 8, 4)), y = leaf(&p, TENSOR(FLOAT32, 8, 4));
    CHECK(x == 0 && y == 1);
    CHECK(value(&p, x)->state == KL_STATE_LIVE && value(&p, x)->node == KL_ID_NONE);
    CHECK(value(&p, x)->view_of == KL_ID_NONE && value(&p, x)->version == 0);
    CHECK(value(&p, x)->storage != value(&p, y)->storage);
    CHECK(p.tape.storages[value(&p, y)->storage].base == y);
    CHECK(!kl_tape_is_stale(&p.tape, x) && kl_tape_is_dead(&p.tape, x));
    program_fini(&p);
}

static void
test_a_call_becomes_a_node(void)
{
    Program p = {0};
    (void)axis(&p, 5);
    KlAxisId batch = axis(&p, 8);
    KlValueId x = leaf(&p, by_rows(batch, TENSOR(FLOAT32, 8, 4)));
    KlValueId w = leaf(&p, TENSOR(FLOAT32, 3, 4));
    KlValueId h = call2(&p, "linear", x, w);
    const KlNode *node = last_node(&p);
    CHECK(p.node == 0 && node->row == kl_ops_find("linear") && !node->is_done);
    CHECK(node->n_inputs == 2 && node->first_out == h && node->n_outs == 1);
    CHECK(node->mode == KL_MODE_ROWS && node->axis == batch && node->reason == NULL);
    CHECK(p.tape.inputs[node->first_input].value == x);
    CHECK(kl_place_is_rows(&p.tape.inputs[node->first_input].place));
    CHECK(!kl_place_is_rows(&p.tape.inputs[node->first_input + 1].place));
    CHECK(value(&p, h)->state == KL_STATE_PENDING && value(&p, h)->node == 0);
    CHECK(value(&p, h)->storage != value(&p, x)->storage);
    KlValueId sorted = call1(&p, "sort", h);
    CHECK(p.node == 1 && last_node(&p)->n_outs == 2 && sorted == h + 1);
    CHECK(value(&p, sorted + 1)->node == 1 && p.tape.n_values == 5);
    program_fini(&p);
}

static void
test_readers_are_counted(void)
{
    Program p = {0};
    KlValueId x = leaf(&p, TENSOR(FLOAT32, 4));
    p.tape.values[x].is_wanted = true;
    (void)call2(&p, "mul", x, x); /* once for each time it is given */
    CHECK(value(&p, x)->n_pending == 2);
    (void)unknown(&p, TENSOR(FLOAT32, 4), 3, IDS(KL_ID_NONE, x, KL_ID_NONE));
    CHECK(value(&p, x)->n_pending == 3 && last_node(&p)->n_inputs == 3);
    CHECK(last_node(&p)->row == NULL && last_node(&p)->mode == KL_MODE_ONCE);
    kl_tape_set_done(&p.tape, 0);
    CHECK(value(&p, x)->n_pending == 1);
    p.tape.values[x].is_wanted = false;
    CHECK(!kl_tape_is_dead(&p.tape, x)); /* a pending node reads it */
    kl_tape_set_done(&p.tape, 1);
    CHECK(value(&p, x)->n_pending == 0 && kl_tape_is_dead(&p.tape, x));
    p.tape.values[x].is_wanted = true;
    CHECK(!kl_tape_is_dead(&p.tape, x)); /* the user holds it */
    program_fini(&p);
}

static void
test_rewrites_are_copied(void)
{
    Program p = {0};
    KlValueId x = leaf(&p, by_rows(axis(&p, 8), TENSOR(FLOAT32, 8, 4)));
    (void)CALL1(&p, "view", x, INTS(8, 2, 2));
    (void)CALL1(&p, "view", x, INTS(16, 2));
    CHECK(p.tape.nodes[0].n_rewrites == 1 && p.tape.nodes[1].n_rewrites == 1);
    CHECK(p.tape.rewrites[p.tape.nodes[0].first_rewrite].scale == 1);
    CHECK(p.tape.rewrites[p.tape.nodes[1].first_rewrite].scale == 2);
    program_fini(&p);
}

static void
test_an_open_value_gets_its_rows_from_its_first_reader(void)
{
    Program p = {0};
    KlAxisId batch = axis(&p, 8), other = axis(&p, 8);
    KlValueId x = leaf(&p, by_rows(batch, TENSOR(FLOAT32, 8, 4)));
    KlValueId made = CALL1(&p, "new_zeros", x, INTS(3, 16, 4));
    const KlNode *node = last_node(&p);
    CHECK(node->is_open && node->n_rewrites == 0 && node->mode == KL_MODE_ROWS);
    CHECK(!kl_place_is_rows(&value(&p, made)->meta.place));
    KlPlace place = {.axis = other, .dim = 1, .outer = 1, .inner = 2};
    kl_tape_settle_open(&p.tape, made, &place);
    CHECK(node->is_open); /* rows of another batch */
    place.axis = batch;
    kl_tape_settle_open(&p.tape, x, &place);
    kl_tape_settle_open(&p.tape, made, &place);
    CHECK(!node->is_open && node->n_rewrites == 1);
    const KlRewrite *rewrite = &p.tape.rewrites[node->first_rewrite];
    CHECK(rewrite->entry == 1 && rewrite->scale == 2);
    CHECK(kl_place_is_equal(&value(&p, made)->meta.place, &place));
    KlValueId read = CALL1(&p, "new_ones", x, INTS(8, 4));
    (void)call1(&p, "neg", read);
    place = (KlPlace){.axis = batch, .dim = 0, .outer = 1, .inner = 1};
    kl_tape_settle_open(&p.tape, read, &place);
    CHECK(!kl_place_is_rows(&value(&p, read)->meta.place)); /* it is read whole already */
    program_fini(&p);
}

/* -- memory: views, versions, writes ----------------------------------------------------------------- */

static void
test_views_share_memory(void)
{
    Program p = {0};
    KlValueId x = leaf(&p, TENSOR(FLOAT32, 1, 4));
    KlValueId view = CALL1(&p, "select", x, INT(0), INT(0));
    KlValueId of_view = CALL1(&p, "view", view, INTS(2, 2));
    CHECK(value(&p, view)->storage == value(&p, x)->storage && value(&p, view)->view_of == x);
    CHECK(value(&p, of_view)->storage == value(&p, x)->storage);
    CHECK(value(&p, of_view)->view_of == view);
    CHECK(p.tape.n_storages == 1 && p.tape.storages[value(&p, x)->storage].base == x);
    CHECK(!p.tape.storages[value(&p, x)->storage].is_uncertain);
    program_fini(&p);
}

static void
test_a_view_that_may_be_a_copy_is_uncertain(void)
{
    Program p = {0};
    KlMeta meta = TENSOR(FLOAT32, 8, 4);
    meta.is_strided = false;
    KlValueId x = leaf(&p, meta);
    KlValueId maybe = CALL1(&p, "reshape", x, INTS(4, 8));
    CHECK(value(&p, maybe)->storage != value(&p, x)->storage);
    CHECK(value(&p, maybe)->view_of == KL_ID_NONE);
    CHECK(p.tape.storages[value(&p, x)->storage].is_uncertain);
    CHECK(p.tape.storages[value(&p, maybe)->storage].is_uncertain);
    program_fini(&p);
}

static void
test_a_write_makes_a_version(void)
{
    Program p = {0};
    KlValueId x = leaf(&p, TENSOR(FLOAT32, 8, 4)), y = leaf(&p, TENSOR(FLOAT32, 8, 4));
    KlValueId view = call1(&p, "t", x);
    KlValueId written = call2(&p, "add_", x, y);
    const KlStorage *storage = &p.tape.storages[value(&p, x)->storage];
    CHECK(last_node(&p)->writes == 1 && last_node(&p)->n_inputs == 2 && last_node(&p)->n_outs == 1);
    CHECK(storage->version == 1 && storage->base == written);
    CHECK(value(&p, written)->storage == value(&p, x)->storage && value(&p, written)->version == 1);
    CHECK(value(&p, written)->view_of == KL_ID_NONE);
    CHECK(kl_tape_is_stale(&p.tape, x) && kl_tape_is_stale(&p.tape, view));
    CHECK(!kl_tape_is_stale(&p.tape, written) && !kl_tape_is_stale(&p.tape, y));
    KlValueId again = call2(&p, "mul_", written, y);
    CHECK(kl_tape_is_stale(&p.tape, written) && !kl_tape_is_stale(&p.tape, again));
    CHECK(value(&p, again)->version == 2);
    KlValueId view_again = call1(&p, "t", again);
    CHECK(value(&p, view_again)->version == 2 && !kl_tape_is_stale(&p.tape, view_again));
    program_fini(&p);
}

/* The base as it was is one input more, and its new version is output 1. */
static void
test_a_write_through_a_view(void)
{
    Program p = {0};
    KlAxisId batch = axis(&p, 8);
    KlValueId x = leaf(&p, by_rows(batch, TENSOR(FLOAT32, 8, 4)));
    KlValueId w = leaf(&p, with_grad(TENSOR(FLOAT32, 8)));
    KlValueId view = CALL1(&p, "select", x, INT(1), INT(0));
    KlValueId written = call2(&p, "add_", view, w);
    const KlNode *node = last_node(&p);
    const KlInput *base = &p.tape.inputs[node->first_input + 2];
    CHECK(node->n_inputs == 3 && node->n_outs == 2 && node->first_out == written);
    CHECK(base->value == x && kl_place_is_equal(&base->place, &value(&p, x)->meta.place));
    CHECK(value(&p, x)->n_pending == 2); /* select, and the write */
    CHECK(value(&p, written)->view_of == x && value(&p, written)->meta.n_dims == 1);
    const KlValue *whole = value(&p, written + 1);
    CHECK(whole->view_of == KL_ID_NONE && whole->meta.n_dims == 2 && whole->version == 1);
    CHECK(whole->storage == value(&p, x)->storage && whole->meta.shape[0] == 8);
    CHECK(whole->meta.requires_grad && !value(&p, x)->meta.requires_grad);
    CHECK(p.tape.storages[whole->storage].base == written + 1);
    CHECK(kl_tape_is_stale(&p.tape, x) && kl_tape_is_stale(&p.tape, view));
    /* The gradient of what is read of the view goes through the base: it is taken of that again. */
    CHECK(kl_tape_is_stale(&p.tape, written) && !kl_tape_is_stale(&p.tape, written + 1));
    kl_tape_set_done(&p.tape, 0);
    kl_tape_set_done(&p.tape, 1);
    CHECK(value(&p, x)->n_pending == 0 && value(&p, written + 1)->state == KL_STATE_LIVE);
    program_fini(&p);
}

/* A view taken again: the value that stands for it from before has one reader more. */
static void
test_a_review_reads_its_earlier_version(void)
{
    Program p = {0};
    KlValueId x = leaf(&p, TENSOR(FLOAT32, 8, 4));
    KlValueId view = call1(&p, "t", x), written = call1(&p, "zero_", x);
    KlMeta meta = value(&p, view)->meta;
    KlInferred inferred = {.outs = &meta, .n_outs = 1, .alias = KL_ALIAS_VIEW};
    inferred.split = (KlSplit){.mode = KL_MODE_ONCE, .axis = KL_ID_NONE};
    const KlRecord review = {
        .node = {.row = kl_ops_find("t"), .n_inputs = 1, .refresh_of = view},
        .inputs = IDS(written),
        .inferred = &inferred,
    };
    KlNodeId id = KL_ID_NONE;
    CHECK(kl_tape_append(&p.tape, &review, &id) == KL_OK && id == 2);
    CHECK(value(&p, view)->n_pending == 1 && p.tape.nodes[id].refresh_of == view);
    CHECK(!kl_tape_is_stale(&p.tape, p.tape.nodes[id].first_out));
    p.tape.values[p.tape.nodes[id].first_out].is_wanted = true;
    kl_tape_retire(&p.tape, false);
    CHECK(p.tape.n_done == 0); /* it is run as well */
    kl_tape_set_done(&p.tape, id);
    CHECK(value(&p, view)->n_pending == 0);
    program_fini(&p);
}

/* -- axes -------------------------------------------------------------------------------------------- */

static void
test_axes_become_one(void)
{
    Program p = {0};
    for (int64_t i = 0; i < 40; i++) { /* 0 .. 39, kept when the table grows */
        CHECK(axis(&p, 100 + i % 2) == (KlAxisId)i);
    }
    for (KlAxisId i = 0; i < 40; i++) {
        CHECK(kl_tape_axis_find(&p.tape, i) == i && p.tape.axis_rows[i] == 100 + i % 2);
    }
    CHECK(kl_tape_axis_find(&p.tape, KL_ID_NONE) == KL_ID_NONE);
    kl_tape_axis_merge(&p.tape, 6, 4);
    kl_tape_axis_merge(&p.tape, 8, 10);
    CHECK(kl_tape_axis_find(&p.tape, 6) == 4 && kl_tape_axis_find(&p.tape, 10) == 8);
    kl_tape_axis_merge(&p.tape, 10, 6); /* two that stand for others already */
    for (KlAxisId i = 4; i <= 10; i += 2) {
        CHECK(kl_tape_axis_find(&p.tape, i) == 4);
    }
    kl_tape_axis_merge(&p.tape, 6, 8); /* once more changes nothing */
    kl_tape_axis_merge(&p.tape, 12, 12);
    kl_tape_axis_merge(&p.tape, 2, 10); /* all of them with another */
    for (KlAxisId i = 2; i <= 10; i += 2) {
        CHECK(kl_tape_axis_find(&p.tape, i) == 2);
    }
    CHECK(kl_tape_axis_find(&p.tape, 12) == 12);
    CHECK(kl_tape_axis_find(&p.tape, 0) == 0 && kl_tape_axis_find(&p.tape, 5) == 5);
    program_fini(&p);
}

/* -- what is done ------------------------------------------------------------------------------------ */

/* x -> relu 0 -> exp 1 -> sum 2, and beside it x -> neg 3. */
static KlValueId
small_program(Program *p)
{
    KlValueId x = leaf(p, TENSOR(FLOAT32, 4));
    KlValueId y = call1(p, "exp", call1(p, "relu", x));
    (void)call1(p, "sum", y);
    return call1(p, "neg", x);
}

static void
test_done_from_the_front(void)
{
    Program p = {0};
    KlValueId neg = small_program(&p);
    kl_tape_set_done(&p.tape, 3);
    CHECK(p.tape.n_done == 0 && value(&p, neg)->state == KL_STATE_LIVE);
    kl_tape_set_done(&p.tape, 0);
    CHECK(p.tape.n_done == 1);
    kl_tape_set_done(&p.tape, 2);
    kl_tape_set_done(&p.tape, 1);
    CHECK(p.tape.n_done == 4);
    program_fini(&p);
}

static void
test_failure_spreads_to_readers(void)
{
    Program p = {0};
    KlValueId neg = small_program(&p);
    KlValueId both = call2(&p, "add", neg, 2); /* 4: of exp, which fails */
    CHECK(value(&p, 2)->node == 1);
    KlMeta meta = value(&p, neg)->meta;
    KlInferred inferred = {.outs = &meta, .n_outs = 1, .split = {.mode = KL_MODE_ONCE}};
    const KlRecord review = {
        .node = {.n_inputs = 1, .refresh_of = both}, .inputs = IDS(neg), .inferred = &inferred};
    KlNodeId id = KL_ID_NONE;
    CHECK(kl_tape_append(&p.tape, &review, &id) == KL_OK); /* 5: a review of a failed one */
    kl_tape_set_done(&p.tape, 0);
    kl_tape_set_failed(&p.tape, 1);
    static const bool has_failed[] = {false, true, true, false, true, true};
    for (KlNodeId i = 0; i < 6; i++) {
        CHECK(p.tape.nodes[i].is_failed == has_failed[i]);
        CHECK(!has_failed[i] || (p.tape.nodes[i].failed_by == 1 && p.tape.nodes[i].is_done));
    }
    CHECK(!p.tape.nodes[3].is_done && p.tape.n_done == 3);
    CHECK(value(&p, neg)->n_pending == 0 && value(&p, both)->n_pending == 0);
    program_fini(&p);
}

static void
test_retired_is_what_nobody_can_reach(void)
{
    Program p = {0};
    KlValueId neg = small_program(&p);
    p.tape.values[2].is_wanted = true; /* exp: relu leads to it, sum and neg do not */
    kl_tape_retire(&p.tape, false);
    CHECK(!p.tape.nodes[0].is_done && !p.tape.nodes[1].is_done);
    CHECK(p.tape.nodes[2].is_done && p.tape.nodes[3].is_done);
    CHECK(value(&p, neg)->state == KL_STATE_LIVE && value(&p, 0)->n_pending == 1);
    p.tape.values[2].is_wanted = false;
    kl_tape_retire(&p.tape, false);
    CHECK(p.tape.n_done == 4 && value(&p, 0)->n_pending == 0);
    program_fini(&p);
}

/* What made it is retired though its reader is wanted. */
static void
test_cut_is_a_leaf(void)
{
    Program p = {0};
    (void)small_program(&p);
    p.tape.values[2].is_wanted = true; /* exp reads relu */
    kl_tape_retire(&p.tape, false);
    CHECK(!p.tape.nodes[0].is_done && !p.tape.nodes[1].is_done);
    kl_tape_cut(&p.tape, 1);
    CHECK(value(&p, 1)->node == KL_ID_NONE && value(&p, 1)->state == KL_STATE_LIVE);
    CHECK(value(&p, 1)->n_pending == 1);
    kl_tape_retire(&p.tape, false);
    CHECK(p.tape.nodes[0].is_done && !p.tape.nodes[1].is_done);
    CHECK(value(&p, 0)->n_pending == 0 && p.tape.n_done == 1);
    program_fini(&p);
}

/* A write counts where the user holds any value of that memory, though not the written one. */
static void
test_a_write_to_held_memory_stays(void)
{
    Program p = {0};
    KlValueId x = leaf(&p, TENSOR(FLOAT32, 8, 4));
    KlValueId view = CALL1(&p, "select", x, INT(0), INT(0));
    KlValueId other = call1(&p, "exp", leaf(&p, TENSOR(FLOAT32, 4)));
    (void)call2(&p, "add_", view, other);
    (void)call1(&p, "t", x);
    p.tape.values[x].is_wanted = true;
    kl_tape_retire(&p.tape, false);
    CHECK(p.tape.n_done == 0);
    CHECK(!p.tape.nodes[1].is_done && !p.tape.nodes[2].is_done); /* what is added, and the write */
    CHECK(p.tape.nodes[3].is_done); /* shares the memory, but does not write it */
    p.tape.values[x].is_wanted = false;
    kl_tape_retire(&p.tape, false);
    CHECK(p.tape.n_done == 4);
    program_fini(&p);
}

/* -- what can be known, and what draws --------------------------------------------------------------- */

static void
test_known_is_what_is_wanted_without_gradient(void)
{
    Program p = {0};
    KlValueId x = leaf(&p, by_rows(axis(&p, 8), TENSOR(FLOAT32, 8, 4)));
    KlValueId w = leaf(&p, with_grad(TENSOR(FLOAT32, 3, 4)));
    KlValueId h = call2(&p, "linear", x, w);
    KlValueId best = CALL1(&p, "argmax", h, INT(1)); /* no gradient, but h has one */
    KlValueId mask = call1(&p, "isnan", x);
    KlValueId n = call1(&p, "sum", mask);
    const KlNode *nodes = p.tape.nodes;
    p.tape.values[h].is_wanted = p.tape.values[best].is_wanted = true;
    CHECK(!kl_tape_find_no_grad(&p.tape));
    CHECK(!nodes[0].must_run && !nodes[1].must_run && !nodes[2].must_run && !nodes[3].must_run);
    p.tape.values[n].is_wanted = true;
    CHECK(kl_tape_find_no_grad(&p.tape));
    CHECK(!nodes[0].must_run && !nodes[1].must_run && !nodes[2].must_run && nodes[3].must_run);
    kl_tape_abandon(&p.tape, 0); /* until somebody asks by name */
    CHECK(!kl_tape_find_no_grad(&p.tape) && nodes[3].is_abandoned && !nodes[3].must_run);
    kl_tape_ask(&p.tape, n);
    CHECK(kl_tape_find_no_grad(&p.tape) && !p.tape.nodes[3].is_abandoned);
    p.tape.values[n].state = KL_STATE_COMPUTED;
    CHECK(!kl_tape_find_no_grad(&p.tape));
    p.tape.values[n].state = KL_STATE_PENDING;
    kl_tape_set_done(&p.tape, 3);
    CHECK(!kl_tape_find_no_grad(&p.tape));
    kl_tape_abandon(&p.tape, 0); /* what is done is not waiting */
    CHECK(!p.tape.nodes[3].is_abandoned && p.tape.nodes[0].is_abandoned);
    program_fini(&p);
}

static void
test_parameters_without_grad_mode_are_no_history(void)
{
    Program p = {.is_grad_off = true};
    KlValueId x = leaf(&p, by_rows(axis(&p, 8), TENSOR(FLOAT32, 8, 4)));
    KlValueId h = call2(&p, "linear", x, leaf(&p, with_grad(TENSOR(FLOAT32, 3, 4))));
    CHECK(!kl_tape_find_no_grad(&p.tape));
    p.tape.values[h].is_wanted = true;
    CHECK(kl_tape_find_no_grad(&p.tape));
    program_fini(&p);
}

/* Nothing will ever ask for a write on the side whose output is not reached. */
static void
test_an_effect_that_nothing_asks_for_must_run(void)
{
    Program p = {0};
    KlValueId x = leaf(&p, with_grad(TENSOR(FLOAT32, 8, 4)));
    KlValueId mean = leaf(&p, TENSOR(FLOAT32, 4)), var = leaf(&p, TENSOR(FLOAT32, 4));
    const KlArg tenth = {.kind = KL_ARG_FLOAT, .u.f = 0.1};
    const KlArg args[] = {VALUE(0), NONE, NONE, VALUE(1), VALUE(2), INT(1), tenth, tenth, INT(0)};
    KlValueId normed = record(&p, "batch_norm", 9, args, 3, IDS(x, mean, var));
    CHECK(last_node(&p)->leaf_writes != 0 && last_node(&p)->writes == 0);
    CHECK(kl_tape_find_no_grad(&p.tape));
    KlValueId loss = call1(&p, "sum", normed);
    CHECK(kl_tape_find_no_grad(&p.tape));
    p.tape.values[loss].is_wanted = true; /* backward will run it */
    CHECK(!kl_tape_find_no_grad(&p.tape));
    p.tape.values[loss].is_wanted = false;
    CHECK(kl_tape_find_no_grad(&p.tape));
    kl_tape_set_done(&p.tape, 0);
    CHECK(!kl_tape_find_no_grad(&p.tape));
    program_fini(&p);
}

static void
test_draws_that_wait(void)
{
    Program p = {0};
    KlValueId x = leaf(&p, TENSOR(FLOAT32, 8, 4));
    (void)call1(&p, "relu", x);
    CHECK(!kl_tape_has_draw(&p.tape));
    (void)CALL1(&p, "dropout", x, ((KlArg){.kind = KL_ARG_FLOAT, .u.f = 0.5}), INT(1));
    CHECK(kl_tape_has_draw(&p.tape));
    kl_tape_abandon(&p.tape, 0);
    CHECK(!kl_tape_has_draw(&p.tape));
    p.tape.nodes[0].is_abandoned = p.tape.nodes[1].is_abandoned = false;
    p.tape.nodes[1].is_drawn = true;
    CHECK(!kl_tape_has_draw(&p.tape));
    p.tape.nodes[1].is_drawn = false;
    CHECK(kl_tape_has_draw(&p.tape));
    kl_tape_set_done(&p.tape, 1);
    CHECK(!kl_tape_has_draw(&p.tape));
    program_fini(&p);
}

/* A draw that nobody looks at still moves the generator: it stays, with what it reads, until it drew. */
static void
test_a_dead_draw_waits(void)
{
    Program p = {0};
    const KlArg half = {.kind = KL_ARG_FLOAT, .u.f = 0.5};
    KlValueId x = leaf(&p, TENSOR(FLOAT32, 8, 4));
    (void)CALL1(&p, "dropout", call1(&p, "relu", x), half, INT(1));
    (void)CALL1(&p, "dropout", call1(&p, "sin", x), half, INT(1));
    (void)call1(&p, "exp", x);
    CHECK(kl_tape_has_dead_draw(&p.tape));
    kl_tape_retire(&p.tape, false);
    CHECK(!p.tape.nodes[0].is_done && !p.tape.nodes[1].is_done && p.tape.nodes[4].is_done);
    CHECK(kl_tape_next_draw(&p.tape, 0) == 1 && kl_tape_next_draw(&p.tape, 2) == 3);
    p.tape.nodes[1].is_drawn = true;
    kl_tape_retire(&p.tape, false);
    CHECK(p.tape.nodes[0].is_done && p.tape.nodes[1].is_done && !p.tape.nodes[3].is_done);
    CHECK(kl_tape_next_draw(&p.tape, 0) == 3 && kl_tape_next_draw(&p.tape, 4) == KL_ID_NONE);
    p.tape.values[p.tape.nodes[3].first_out].is_wanted = true;
    CHECK(!kl_tape_has_dead_draw(&p.tape));
    program_fini(&p);
}

/* If it is zero, the user can reach no call: leaves do not count, nor what became one. */
static void
test_wanted_values_of_calls_are_counted(void)
{
    Program p = {0};
    KlValueId x = leaf(&p, TENSOR(FLOAT32, 8, 4));
    KlValueId one = call1(&p, "relu", x), other = call1(&p, "exp", one);
    kl_tape_want(&p.tape, x, true);
    CHECK(p.tape.n_wanted == 0 && value(&p, x)->is_wanted);
    kl_tape_want(&p.tape, one, true);
    kl_tape_want(&p.tape, one, true);
    kl_tape_want(&p.tape, other, true);
    CHECK(p.tape.n_wanted == 2);
    kl_tape_cut(&p.tape, one);
    kl_tape_cut(&p.tape, one);
    CHECK(p.tape.n_wanted == 1);
    kl_tape_want(&p.tape, one, false);
    kl_tape_want(&p.tape, other, false);
    CHECK(p.tape.n_wanted == 0);
    kl_tape_want(&p.tape, other, true);
    kl_tape_clear(&p.tape);
    CHECK(p.tape.n_wanted == 0);
    program_fini(&p);
}

/* -- the whole --------------------------------------------------------------------------------------- */

static void
test_ids_survive_growth(void)
{
    Program p = {0};
    KlValueId x = leaf(&p, TENSOR(FLOAT32, 4));
    for (KlNodeId i = 0; i < 1000; i++) {
        KlValueId y = call1(&p, "neg", x);
        CHECK(p.node == i && y == x + 1);
        x = y;
    }
    for (KlNodeId i = 0; i < 1000; i++) {
        const KlNode *node = &p.tape.nodes[i];
        CHECK(node->first_out == i + 1 && p.tape.inputs[node->first_input].value == i);
        CHECK(value(&p, node->first_out)->node == i);
    }
    program_fini(&p);
    CHECK(p.tape.n_nodes == 0 && p.tape.nodes == NULL && p.tape.n_nodes_max == 0);
}

static void
test_clearing_keeps_the_memory(void)
{
    Program p = {0};
    KlAxisId batch = axis(&p, 8);
    (void)small_program(&p);
    (void)CALL1(&p, "view", leaf(&p, by_rows(batch, TENSOR(FLOAT32, 8, 4))), INTS(8, 2, 2));
    CHECK(p.tape.n_rewrites == 1);
    kl_tape_set_done(&p.tape, 0);
    int64_t n_blocks = kl_alloc_n_blocks();
    kl_tape_clear(&p.tape);
    CHECK(kl_alloc_n_blocks() == n_blocks);
    CHECK(p.tape.n_nodes == 0 && p.tape.n_values == 0 && p.tape.n_inputs == 0);
    CHECK(p.tape.n_storages == 0 && p.tape.n_axes == 0 && p.tape.n_done == 0);
    CHECK(p.tape.n_rewrites == 0 && !kl_tape_has_draw(&p.tape));
    kl_alloc_fail_after(0); /* the same program fits into what there is */
    CHECK(axis(&p, 9) == 0 && p.tape.axis_rows[0] == 9 && kl_tape_axis_find(&p.tape, 0) == 0);
    CHECK(small_program(&p) == 4 && !p.was_refused);
    kl_alloc_fail_after(-1);
    CHECK(value(&p, 0)->n_pending == 2 && !kl_tape_is_stale(&p.tape, 0) && !p.tape.nodes->is_done);
    program_fini(&p);
}

static void
test_a_roomy_tape_gives_its_memory_back(void)
{
    Program p = {0};
    for (int n = 40000; n > 0; n /= 20000) { /* 40000 entries, then 2 of them */
        for (int i = 0; i < n; i++) {
            (void)leaf(&p, TENSOR(FLOAT32, 1));
        }
        kl_tape_clear(&p.tape);
        CHECK((p.tape.values != NULL) == (n == 40000));
    }
    program_fini(&p);
}

int
main(void)
{
    test_a_leaf_is_live_and_has_memory_of_its_own();
    test_a_call_becomes_a_node();
    test_readers_are_counted();
    test_rewrites_are_copied();
    test_an_open_value_gets_its_rows_from_its_first_reader();
    test_views_share_memory();
    test_a_view_that_may_be_a_copy_is_uncertain();
    test_a_write_makes_a_version();
    test_a_write_through_a_view();
    test_a_review_reads_its_earlier_version();
    test_axes_become_one();
    test_done_from_the_front();
    test_failure_spreads_to_readers();
    test_retired_is_what_nobody_can_reach();
    test_cut_is_a_leaf();
    test_a_write_to_held_memory_stays();
    test_known_is_what_is_wanted_without_gradient();
    test_parameters_without_grad_mode_are_no_history();
    test_an_effect_that_nothing_asks_for_must_run();
    test_draws_that_wait();
    test_a_dead_draw_waits();
    test_wanted_values_of_calls_are_counted();
    test_ids_survive_growth();
    test_clearing_keeps_the_memory();
    test_a_roomy_tape_gives_its_memory_back();
    CHECK(kl_alloc_n_blocks() == 0);
    return check_result();
}
