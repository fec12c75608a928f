/* SPDX-License-Identifier: Apache-2.0 */
/* test_stage.c - where each node runs, whether the tail is linear, and who reads what from where. */
#include "stage.h"

#include "record.h"

/* "made in stage `at`, there after stage `after`" */
static bool
is_at(const Program *program, const KlStages *stages, KlValueId value, uint32_t at, uint32_t after)
{
    return stages->node_stage[node_of(program, value)] == at && stages->value_stage[value] == after;
}

/* -- stages ------------------------------------------------------------------------------------------ */

static void
test_bodies_and_barriers(void)
{
    Program p = {0};
    KlStages stages;
    Start s = start(&p);
    KlValueId doubled = call2(&p, "mul", s.w, s.w);     /* no rows at all */
    KlValueId mask = CALL1(&p, "ne", s.labels, INT(0)); /* data */
    KlValueId n = call1(&p, "sum", mask);               /* how many labels count */
    KlValueId share = CALL1(&p, "mul", n, INT(2));      /* what follows from that */
    KlValueId z = call2(&p, "linear", s.x, doubled);    /* the first body with parameters */
    KlValueId mean = call1(&p, "mean", z);              /* a reduction of it */
    KlValueId centred = call2(&p, "sub", z, mean);      /* reads a barrier: the second body */
    KlValueId picked = CALL1(&p, "select", centred, INT(1), INT(0));
    KlValueId kept = call2(&p, "mul", picked, mask);    /* data again, in a later body */
    KlValueId sorted = CALL1(&p, "sort", kept, INT(0)); /* once: waits for all chunks */
    KlValueId both = call2(&p, "sub", sorted, kept);    /* cut again: the third body */
    KlValueId loss = call2(&p, "div", call1(&p, "sum", both), share);
    stage(&p, loss, true, &stages);
    CHECK(stages.n_nodes == p.tape.n_nodes && stages.n_values == p.tape.n_values);
    CHECK(stages.is_leaf[s.x] && stages.is_leaf[s.w] && !stages.is_leaf[doubled]);
    CHECK(stages.value_stage[s.x] == 0 && is_at(&p, &stages, doubled, 0, 0));
    CHECK(is_at(&p, &stages, mask, 1, 1) && is_at(&p, &stages, n, 1, 2));
    CHECK(is_at(&p, &stages, share, 2, 2));
    CHECK(is_at(&p, &stages, z, 3, 3) && is_at(&p, &stages, mean, 3, 4));
    CHECK(is_at(&p, &stages, centred, 5, 5) && is_at(&p, &stages, kept, 5, 5));
    CHECK(is_at(&p, &stages, sorted, 6, 6) && stages.value_stage[sorted + 1] == 6);
    CHECK(is_at(&p, &stages, both, 7, 7) && is_at(&p, &stages, loss, 8, 8));
    CHECK(stages.n_stages == 9 && stages.last_body == 7);
    CHECK(stages.node_stage[node_of(&p, s.h)] == KL_STAGE_NONE); /* nobody asked for it */
    CHECK(kl_stage_is_body(7) && !kl_stage_is_body(8));
    kl_stage_fini(&stages);
    CHECK(stages.node_stage == NULL && stages.n_nodes == 0);
    program_fini(&p);
}

static void
test_what_is_data(void)
{
    Program p = {0};
    KlStages stages;
    Start s = start(&p);
    const KlArg half = {.kind = KL_ARG_FLOAT, .u.f = 0.5};
    KlValueId w = leaf(&p, TENSOR(FLOAT32, 4, 4));
    KlValueId cheap = call1(&p, "exp", s.x), twice = call1(&p, "exp", cheap);
    KlValueId heavy = call2(&p, "matmul", s.x, w), of_heavy = call1(&p, "exp", heavy);
    KlValueId drawn = CALL1(&p, "dropout", s.x, half, INT(1));
    KlValueId of_barrier = call2(&p, "sub", s.x, call1(&p, "sum", s.x));
    KlValueId written = call1(&p, "neg", s.x), reduced = call1(&p, "sum", cheap);
    written = call1(&p, "zero_", written);
    KlValueId gram = call2(&p, "matmul", call1(&p, "t", s.x), s.x); /* heavy, but a reduction */
    KlValueId all[] = {cheap,      twice,   heavy,   of_heavy, drawn,
                       of_barrier, written, reduced, gram,     s.h};
    static const struct {
        bool is_data;
        uint32_t stage;
    } expected[] = {{true, 1},  {true, 1}, {false, 3}, {false, 3}, {false, 3},
                    {false, 3}, {true, 1}, {false, 1}, {false, 1}, {false, 3}};
    const KlGoal goal = {.wanted = all, .n_wanted = 10};
    CHECK(kl_stage_build(&p.tape, &goal, &stages) == KL_OK);
    for (size_t i = 0; i < 10; i++) {
        CHECK(stages.is_data[node_of(&p, all[i])] == expected[i].is_data);
        CHECK(stages.node_stage[node_of(&p, all[i])] == expected[i].stage);
    }
    kl_stage_fini(&stages);
    p.tape.nodes[node_of(&p, cheap)].refresh_of = s.x; /* a view that is taken again */
    CHECK(kl_stage_build(&p.tape, &goal, &stages) == KL_OK);
    CHECK(stages.is_data[node_of(&p, cheap)] && stages.is_data[node_of(&p, twice)]);
    kl_stage_fini(&stages);
    program_fini(&p);
}

/* A program reads the number of a computed value. If a gradient must flow through the call that made the value, the
 * program has that call in place of the number. */
static void
test_computed_values(void)
{
    Program p = {0};
    KlStages stages;
    Start s = start(&p);
    KlValueId mean = call1(&p, "mean", s.h);
    KlValueId loss = call2(&p, "mul", mean, mean);
    p.tape.values[mean].state = KL_STATE_COMPUTED;
    stage(&p, loss, false, &stages);
    CHECK(stages.is_leaf[mean] && stages.node_stage[node_of(&p, mean)] == KL_STAGE_NONE);
    CHECK(is_at(&p, &stages, loss, 0, 0) && stages.value_stage[mean] == 0);
    kl_stage_fini(&stages);
    stage(&p, loss, true, &stages);
    CHECK(!stages.is_leaf[mean] && is_at(&p, &stages, mean, 3, 4));
    CHECK(is_at(&p, &stages, loss, 4, 4));
    kl_stage_fini(&stages);
    bool is_unwanted[64] = {false}, is_end[64] = {false};
    is_unwanted[s.w] = is_end[mean] = true; /* its gradient is asked for, and that of no leaf */
    const KlGoal goal = {.wanted = &loss,
                         .n_wanted = 1,
                         .roots = &loss,
                         .n_roots = 1,
                         .is_unwanted = is_unwanted,
                         .is_end = is_end};
    CHECK(kl_stage_build(&p.tape, &goal, &stages) == KL_OK);
    CHECK(stages.is_leaf[mean] && stages.needs_gradient[mean] && !stages.needs_gradient[s.w]);
    CHECK(stages.node_stage[node_of(&p, mean)] == KL_STAGE_NONE && is_at(&p, &stages, loss, 0, 0));
    kl_stage_fini(&stages);
    kl_tape_set_done(&p.tape, node_of(&p, s.h)); /* ran live: it is not run again */
    kl_tape_set_done(&p.tape, node_of(&p, mean));
    stage(&p, loss, true, &stages);
    CHECK(stages.node_stage[node_of(&p, mean)] == KL_STAGE_NONE);
    kl_stage_fini(&stages);
    program_fini(&p);
}

/* A value that was cut from its call is a leaf, even while that call is pending and a gradient flows to the value;
 * the call does not run for it. */
static void
test_a_value_that_was_cut_from_its_call(void)
{
    Program p = {0};
    KlStages stages;
    Start s = start(&p);
    KlValueId mean = call1(&p, "mean", s.h);
    KlNodeId maker = node_of(&p, mean);
    KlValueId loss = call2(&p, "mul", mean, mean);
    kl_tape_cut(&p.tape, mean);
    stage(&p, loss, true, &stages);
    CHECK(stages.is_leaf[mean] && stages.needs_gradient[mean]);
    CHECK(stages.node_stage[maker] == KL_STAGE_NONE && is_at(&p, &stages, loss, 0, 0));
    kl_stage_fini(&stages);
    program_fini(&p);
}

static void
test_gradients_flow_from_roots_only(void)
{
    Program p = {0};
    KlStages stages;
    Start s = start(&p);
    KlValueId loss = call1(&p, "mean", s.h);
    stage(&p, loss, true, &stages);
    CHECK(stages.needs_gradient[loss] && stages.needs_gradient[s.h] && stages.needs_gradient[s.w]);
    CHECK(!stages.needs_gradient[s.x] && stages.last_body == 3);
    kl_stage_fini(&stages);
    stage(&p, loss, false, &stages);
    CHECK(!stages.needs_gradient[loss] && !stages.needs_gradient[s.w]);
    CHECK(stages.last_body == KL_STAGE_NONE);
    CHECK(stages.is_tail_linear && stages.tail_node == KL_ID_NONE);
    kl_stage_fini(&stages);
    program_fini(&p);
}

/* -- reductions of two parts ------------------------------------------------------------------------- */

static void
test_parts(void)
{
    CHECK(kl_ops_reductions[KL_REDUCE_CROSS_ENTROPY].n_parts == 2 &&
          kl_ops_reductions[KL_REDUCE_VAR].n_parts == 3);
    CHECK(kl_ops_reductions[KL_REDUCE_SUM].saved == 0 &&
          kl_ops_reductions[KL_REDUCE_MEAN].saved == 0);
    CHECK(kl_ops_reductions[KL_REDUCE_LOSS].saved == 0 &&
          kl_ops_reductions[KL_REDUCE_COUNT].saved == 0);
    CHECK(kl_ops_reductions[KL_REDUCE_CROSS_ENTROPY].saved == 2); /* the denominator alone */
    CHECK(kl_ops_reductions[KL_REDUCE_VAR].saved == 3 &&
          kl_ops_reductions[KL_REDUCE_NORM].saved == 3);
}

static KlValueId
cross_entropy(Program *p, KlValueId scores, KlValueId labels)
{
    return CALL2(p, "cross_entropy_loss", scores, labels, NONE, INT(1));
}

static void
test_labels_are_counted_before_the_model_runs(void)
{
    Program p = {0};
    KlStages stages;
    Start s = start(&p);
    KlValueId loss = cross_entropy(&p, s.h, s.labels);
    stage(&p, loss, true, &stages);
    CHECK(p.tape.nodes[node_of(&p, loss)].reduce == KL_REDUCE_CROSS_ENTROPY);
    CHECK(is_at(&p, &stages, loss, 3, 4));
    CHECK(stages.late_stage[node_of(&p, loss)] == KL_STAGE_DATA);
    CHECK(stages.late_stage[node_of(&p, s.h)] == KL_STAGE_NONE);
    CHECK(stages.is_tail_linear && stages.tail_node == KL_ID_NONE);
    kl_stage_fini(&stages);
    program_fini(&p);
}

static void
test_labels_that_the_model_makes(void)
{
    Program p = {0};
    KlStages stages;
    Start s = start(&p);
    KlValueId loss = cross_entropy(&p, s.h, CALL1(&p, "argmax", s.h, INT(1)));
    stage(&p, loss, true, &stages);
    CHECK(stages.late_stage[node_of(&p, loss)] == 3); /* the denominator is the body's too */
    CHECK(!stages.is_tail_linear && stages.tail_node == node_of(&p, loss));
    kl_stage_fini(&stages);
    program_fini(&p);
}

/* -- the tail ---------------------------------------------------------------------------------------- */

typedef KlValueId (*Tail)(Program *p, const Start *s, KlValueId mean);

static KlValueId
scaled(Program *p, const Start *s, KlValueId mean)
{
    KlValueId n = call1(p, "sum", CALL1(p, "ne", s->labels, INT(0)));
    return call2(p, "div", CALL1(p, "mul", mean, INT(3)), n); /* n is saved, and known from data */
}

static KlValueId
rooted(Program *p, const Start *s, KlValueId mean)
{
    (void)s;
    KlValueId root = call1(p, "sqrt", mean); /* saves its output */
    return call2(p, "mul", root, root);      /* not the first */
}

static KlValueId
squared(Program *p, const Start *s, KlValueId mean)
{
    (void)s;
    return call2(p, "mul", mean, mean); /* saves its inputs */
}

static KlValueId
through_detach(Program *p, const Start *s, KlValueId mean)
{
    (void)s;
    return call2(p, "mul", call1(p, "detach", mean),
                 mean); /* no gradient, but a value of the body */
}

static KlValueId
by_barrier_before(Program *p, const Start *s, KlValueId mean)
{
    (void)s;
    KlValueId w = leaf(p, tensor(KL_DTYPE_FLOAT32, 0, SIZES(0)));
    return call2(p, "mul", mean, call1(p, "exp", w)); /* saves what no body made */
}

static KlValueId
drawn(Program *p, const Start *s, KlValueId mean)
{
    (void)s;
    const KlArg half = {.kind = KL_ARG_FLOAT, .u.f = 0.5};
    KlValueId out = CALL1(p, "dropout", mean, half, INT(1));
    p->tape.nodes[p->node].saves = (KlSaves){0}; /* whatever it saves, it must not draw twice */
    return out;
}

static KlValueId
written(Program *p, const Start *s, KlValueId mean)
{
    (void)s;
    return call2(p, "add_", CALL1(p, "mul", mean, INT(2)), mean);
}

static KlValueId
written_without_gradient(Program *p, const Start *s, KlValueId mean)
{
    (void)s;
    return call2(p, "add_", call1(p, "exp", call1(p, "detach", mean)), mean);
}

static KlValueId
asked_of_torch(Program *p, const Start *s, KlValueId mean)
{
    (void)s;
    return unknown(p, p->tape.values[mean].meta, 1, IDS(mean)); /* who knows what it saves */
}

static KlValueId
deviation(Program *p, const Start *s, KlValueId mean)
{
    (void)mean;
    return call1(p, "var", s->h); /* combining its parts saves them */
}

static void
judge_at(int line, Tail tail, bool is_linear, const char *culprit)
{
    Program p = {0};
    KlStages stages;
    Start s = start(&p);
    KlValueId loss = tail(&p, &s, call1(&p, "mean", s.h));
    CHECK_AT(line, p.tape.values[loss].meta.requires_grad);
    stage(&p, loss, true, &stages);
    CHECK_AT(line, stages.last_body == 3 && stages.is_tail_linear == is_linear);
    if (is_linear) {
        CHECK_AT(line, stages.tail_node == KL_ID_NONE);
    } else {
        const KlRow *row = p.tape.nodes[stages.tail_node].row;
        CHECK_AT(line, row == (culprit != NULL ? kl_ops_find(culprit) : NULL));
    }
    kl_stage_fini(&stages);
    program_fini(&p);
}

#define JUDGE(...) judge_at(__LINE__, __VA_ARGS__)

static void
test_tails(void)
{
    JUDGE(scaled, true, NULL);
    JUDGE(by_barrier_before, true, NULL);
    JUDGE(rooted, false, "sqrt");
    JUDGE(squared, false, "mul");
    JUDGE(through_detach, false, "mul");
    JUDGE(drawn, false, "dropout");
    JUDGE(written, true, NULL);
    JUDGE(written_without_gradient, false, "add_");
    JUDGE(asked_of_torch, false, NULL);
    JUDGE(deviation, false, "var");
}

/* What an earlier body made is at rest when the last body runs: a tail may save it. */
static void
test_an_earlier_body_is_no_tail(void)
{
    Program p = {0};
    KlStages stages;
    Start s = start(&p);
    KlValueId mean = call1(&p, "mean", s.h);
    KlValueId last = call1(&p, "mean", call2(&p, "mul", s.h, mean));
    KlValueId loss = call2(&p, "mul", last, call1(&p, "detach", mean));
    stage(&p, loss, true, &stages);
    CHECK(stages.last_body == 5 && stages.is_tail_linear);
    kl_stage_fini(&stages);
    program_fini(&p);
}

/* -- hooks ------------------------------------------------------------------------------------------- */

static void
test_readers_of_a_hooked_value_are_a_stage_later(void)
{
    Program p = {0};
    KlStages stages;
    Start s = start(&p);
    KlValueId y = call1(&p, "exp", s.h), loss = call1(&p, "mean", y);
    p.tape.values[s.h].is_hooked = true;
    stage(&p, loss, true, &stages);
    CHECK(is_at(&p, &stages, s.h, 3, 4) && is_at(&p, &stages, y, 5, 5));
    CHECK(is_at(&p, &stages, loss, 5, 6) && stages.last_body == 5 && stages.n_stages == 7);
    CHECK(stages.is_tail_linear);
    kl_stage_fini(&stages);
    stage(&p, loss, false, &stages); /* no gradient, nothing to look at */
    CHECK(is_at(&p, &stages, s.h, 3, 3) && is_at(&p, &stages, y, 3, 3));
    kl_stage_fini(&stages);
    program_fini(&p);
}

static void
test_a_hooked_barrier(void)
{
    Program p = {0};
    KlStages stages;
    Start s = start(&p);
    KlValueId mean = call1(&p, "mean", s.h), loss = CALL1(&p, "mul", mean, INT(2));
    p.tape.values[mean].is_hooked = true;
    stage(&p, loss, true, &stages);
    CHECK(is_at(&p, &stages, mean, 3, 6) && is_at(&p, &stages, loss, 6, 6));
    CHECK(stages.n_stages == 7);
    CHECK(!stages.is_tail_linear); /* it shall see values */
    CHECK(stages.tail_node == node_of(&p, mean));
    kl_stage_fini(&stages);
    p.tape.values[loss].is_hooked = true; /* nothing reads it, and yet it is there later */
    stage(&p, loss, true, &stages);
    CHECK(is_at(&p, &stages, loss, 6, 8) && stages.n_stages == 9);
    kl_stage_fini(&stages);
    program_fini(&p);
}

/* -- imports ----------------------------------------------------------------------------------------- */

static const KlImport *
import_at(const Program *p, const KlStages *stages, KlValueId out, uint32_t input)
{
    const KlNode *node = &p->tape.nodes[node_of(p, out)];
    return &stages->imports[stages->import_of[node->first_input + input]];
}

static void
test_one_import_for_each_way_to_read(void)
{
    Program p = {0};
    KlStages stages;
    Start s = start(&p);
    KlValueId first = call1(&p, "exp", s.x), second = call1(&p, "neg", s.x);
    KlValueId sorted = CALL1(&p, "sort", s.x, INT(0));
    KlValueId counted = call1(&p, "abs", s.x), ignored = call1(&p, "sin", s.labels);
    KlValueId with_none = unknown(&p, TENSOR(FLOAT32, 8, 4), 2, IDS(KL_ID_NONE, s.x));
    p.tape.nodes[node_of(&p, counted)].row_ranges = 1;
    p.tape.nodes[node_of(&p, with_none)].row_ranges = 2; /* it runs once: whole all the same */
    p.tape.inputs[p.tape.nodes[node_of(&p, with_none)].first_input + 1].place =
        p.tape.values[s.x].meta.place;
    const KlValueId wanted[] = {s.h, first, second, sorted, counted, with_none};
    const KlGoal goal = {.wanted = wanted, .n_wanted = 6};
    CHECK(kl_stage_build(&p.tape, &goal, &stages) == KL_OK);
    const KlImport *rows = import_at(&p, &stages, first, 0);
    CHECK(rows->value == s.x && kl_place_is_rows(&rows->place) && !rows->is_range);
    CHECK(import_at(&p, &stages, s.h, 0) == rows && import_at(&p, &stages, second, 0) == rows);
    const KlImport *whole = import_at(&p, &stages, sorted, 0);
    CHECK(whole != rows && whole->value == s.x && !kl_place_is_rows(&whole->place));
    CHECK(import_at(&p, &stages, with_none, 1) == whole && !whole->is_range);
    const KlImport *range = import_at(&p, &stages, counted, 0);
    CHECK(range != rows && range != whole && range->is_range && range->value == s.x);
    CHECK(import_at(&p, &stages, s.h, 1)->value == s.w);
    CHECK(stages.n_imports == 4); /* x in three ways, and w */
    CHECK(stages.node_stage[node_of(&p, ignored)] == KL_STAGE_NONE);
    kl_stage_fini(&stages);
    program_fini(&p);
}

static void
test_axes_that_became_one_are_one_import(void)
{
    Program p = {0};
    KlStages stages;
    KlAxisId left = axis(&p, 8), right = axis(&p, 8);
    KlValueId x = leaf(&p, by_rows(left, TENSOR(FLOAT32, 8)));
    KlValueId first = call1(&p, "exp", x);
    p.tape.values[x].meta.place.axis = right;
    KlValueId second = call1(&p, "neg", x);
    const KlValueId wanted[] = {first, second};
    const KlGoal goal = {.wanted = wanted, .n_wanted = 2};
    CHECK(kl_stage_build(&p.tape, &goal, &stages) == KL_OK);
    CHECK(stages.n_imports == 2 && import_at(&p, &stages, second, 0)->place.axis == right);
    kl_stage_fini(&stages);
    kl_tape_axis_merge(&p.tape, left, right);
    CHECK(kl_stage_build(&p.tape, &goal, &stages) == KL_OK);
    CHECK(stages.n_imports == 1 && stages.imports[0].place.axis == left);
    kl_stage_fini(&stages);
    program_fini(&p);
}

static void
test_nothing_to_stage(void)
{
    Program p = {0};
    KlStages stages;
    CHECK(kl_stage_build(&p.tape, &(KlGoal){0}, &stages) == KL_OK);
    CHECK(stages.n_nodes == 0 && stages.n_stages == 0 && stages.n_imports == 0);
    CHECK(stages.last_body == KL_STAGE_NONE && stages.is_tail_linear);
    kl_stage_fini(&stages);
    program_fini(&p);
}

/* A cheap call runs in the body that reads it, unless the user holds its result, another body reads it too, or
 * more would cross. */
static void
test_cheap_calls_run_where_they_are_read(void)
{
    enum { LATE, HELD, READ_TWICE, NOT_CHEAP, N };
    for (int which = 0; which < N; which++) {
        Program p = {0};
        Start s = start(&p);
        KlValueId square = leaf(&p, with_grad(TENSOR(FLOAT32, 3, 3)));
        KlValueId mean = CALL1(&p, "mean", s.h, INTS(0));
        KlValueId first = which == NOT_CHEAP
                              ? call2(&p, "linear", call2(&p, "sub", s.h, mean), square)
                              : call2(&p, "sub", s.h, mean);
        KlValueId early = call1(&p, "exp", first);
        KlNodeId node = p.node;
        KlValueId other =
            call2(&p, "linear", call1(&p, "relu", call2(&p, "mul", s.h, mean)), square);
        other = which == READ_TWICE ? call2(&p, "add", other, early) : other;
        KlValueId meets = CALL1(&p, "mean", other, INTS(0));
        KlValueId late = call2(&p, "add", call2(&p, "sub", other, meets), early);
        KlNodeId reader = p.node;
        KlValueId loss = call1(&p, "mean", late);
        p.tape.values[early].is_wanted = which == HELD;
        const KlValueId wanted[] = {loss, early};
        const KlGoal goal = {
            .wanted = wanted, .n_wanted = which == HELD ? 2 : 1, .roots = &loss, .n_roots = 1};
        KlStages stages;
        CHECK(kl_stage_build(&p.tape, &goal, &stages) == KL_OK);
        uint32_t at = stages.node_stage[node], last = stages.node_stage[reader];
        CHECK(last > stages.node_stage[node_of(&p, meets)]);
        CHECK(at == (which == LATE || which == NOT_CHEAP ? last : last - 2));
        CHECK(stages.value_stage[early] == at);
        CHECK((stages.node_stage[node_of(&p, first)] == last) == (which == LATE));
        kl_stage_fini(&stages);
        program_fini(&p);
    }
}

/* What is cheap and linear, and ends a program after a part of the rows was taken, runs once: the model is the last
 * body. Not where products follow, where it keeps what chunks made, or where it is of leaves alone. */
static void
test_a_linear_end_of_a_part_runs_once(void)
{
    enum { ENDS, GOES_ON, KEEPS, OF_LEAVES, N };
    for (int which = 0; which < N; which++) {
        Program p = {0};
        Start s = start(&p);
        KlValueId square = leaf(&p, with_grad(TENSOR(FLOAT32, 3, 3)));
        KlValueId of = which == OF_LEAVES ? s.x : s.h;
        KlValueId taken = CALL1(&p, "flip", of, INTS(0));
        KlNodeId once = p.node;
        p.tape.values[taken].meta.place = p.tape.values[of].meta.place;
        p.tape.values[taken].meta.requires_grad = true;
        KlValueId twice = CALL1(&p, "mul", taken, INT(2));
        KlNodeId node = p.node;
        KlValueId late = which == GOES_ON ? call2(&p, "linear", twice, square) : twice;
        late = which == KEEPS ? call1(&p, "exp", twice) : late;
        KlValueId loss = call1(&p, "mean", late);
        CHECK(p.tape.nodes[once].mode == KL_MODE_ONCE && p.tape.nodes[node].mode == KL_MODE_ROWS);
        kl_alloc_fail_after(0);
        CHECK(kl_stage_keep_tail(&p.tape) == KL_ERROR_MEMORY);
        kl_alloc_fail_after(-1);
        CHECK(kl_stage_keep_tail(&p.tape) == KL_OK);
        CHECK((p.tape.nodes[node].mode == KL_MODE_ONCE) == (which == ENDS));
        CHECK((p.tape.nodes[node_of(&p, loss)].mode == KL_MODE_ONCE) == (which == ENDS));
        KlStages stages;
        stage(&p, loss, true, &stages);
        CHECK(which != ENDS || (stages.last_body == 3 && stages.is_tail_linear));
        CHECK(which == ENDS || which == OF_LEAVES || stages.last_body == 5);
        kl_stage_fini(&stages);
        program_fini(&p);
    }
}

int
main(void)
{
    test_bodies_and_barriers();
    test_what_is_data();
    test_computed_values();
    test_a_value_that_was_cut_from_its_call();
    test_gradients_flow_from_roots_only();
    test_parts();
    test_labels_are_counted_before_the_model_runs();
    test_labels_that_the_model_makes();
    test_tails();
    test_an_earlier_body_is_no_tail();
    test_readers_of_a_hooked_value_are_a_stage_later();
    test_a_hooked_barrier();
    test_one_import_for_each_way_to_read();
    test_axes_that_became_one_are_one_import();
    test_nothing_to_stage();
    test_cheap_calls_run_where_they_are_read();
    test_a_linear_end_of_a_part_runs_once();
    CHECK(kl_alloc_n_blocks() == 0);
    return check_result();
}
