/* SPDX-License-Identifier: Apache-2.0 */
/* test_infer.c - what inference adds to a row's rules: refusals, in-place targets, gradients, places. */
#include "infer.h"

#include "record.h"

static const int64_t rows_of[] = {8, 8, 0};

/* Infer a call whose words are its tensors, then `more`. */
static KlStatus
infer(Bound *bound, KlInferred *result, const char *name, uint32_t n, const KlMeta *const *inputs,
      KlArg more)
{
    KlArg args[ARGS_MAX];
    for (uint32_t i = 0; i < n; i++) {
        args[i] = VALUE(i);
    }
    args[n] = more;
    bind(bound, name, n + (more.kind != KL_ARG_ABSENT), args, n, inputs);
    bound->call.axis_rows = rows_of;
    bound->call.n_axes = 3;
    return kl_infer_call(&bound->call, result);
}

#define INFER(name, ...)                                                                           \
    infer(&bound, &result, name, sizeof((const KlMeta *[]){__VA_ARGS__}) / sizeof(void *),         \
          (const KlMeta *[]){__VA_ARGS__}, (KlArg){0})
#define INFER_MORE(name, more, ...)                                                                \
    infer(&bound, &result, name, sizeof((const KlMeta *[]){__VA_ARGS__}) / sizeof(void *),         \
          (const KlMeta *[]){__VA_ARGS__}, more)

static Bound bound;
static KlInferred result;

static void
test_outputs_are_zeroed_whole_and_grow(void)
{
    CHECK(kl_ops_reserve_outs(&result, 2) == KL_OK);
    CHECK(result.n_outs == 2);
    result.outs[0] = by_rows(0, with_grad(TENSOR(INT64, 3)));
    CHECK(kl_ops_reserve_outs(&result, 40) == KL_OK);
    CHECK(result.n_outs == 40);
    for (uint32_t i = 0; i < 40; i++) {
        const KlMeta *out = &result.outs[i];
        CHECK(out->dtype == KL_DTYPE_BOOL && out->n_dims == 0 && !out->requires_grad);
        CHECK(!out->is_strided && !kl_place_is_rows(&out->place) && out->place.outer == 1);
    }
    kl_alloc_fail_after(0);
    CHECK(kl_ops_reserve_outs(&result, 4000) == KL_ERROR_MEMORY);
    kl_alloc_fail_after(-1);
    CHECK(result.n_outs == 40);
    kl_infer_fini(&result);
    CHECK(result.outs == NULL && result.n_outs == 0 && result.n_outs_max == 0);
    kl_infer_fini(&result); /* what owns nothing may be released */
}

static void
test_what_is_declined(void)
{
    const KlMeta x = by_rows(0, TENSOR(FLOAT32, 8, 4)), w = TENSOR(FLOAT32, 3, 4);
    CHECK(INFER("linear", &x, &w) == KL_OK);
    CHECK(INFER("linear", &x, NULL) == KL_DECLINED); /* None among the tensors */
    CHECK(INFER_MORE("gelu", ((KlArg){.kind = KL_ARG_OTHER}), &x) == KL_DECLINED);
    KlMeta odd = x;
    odd.dtype = KL_DTYPE_OTHER;
    CHECK(INFER("relu", &odd) == KL_DECLINED);
    odd = x;
    odd.n_dims = KL_DIMS_MAX + 1;
    CHECK(INFER("sum", &odd) == KL_DECLINED);
    bind(&bound, "relu", 0, ARGS(NONE), 0, (const KlMeta *[]){&x});
    CHECK(kl_infer_call(&bound.call, &result) == KL_DECLINED); /* no tensor at all */
}

static void
test_devices(void)
{
    const KlMeta x = TENSOR(FLOAT32, 8, 4);
    KlMeta there = x, number = tensor(KL_DTYPE_FLOAT32, 0, SIZES(0));
    there.device = 1;
    CHECK(INFER("add", &x, &there) == KL_DECLINED);
    CHECK(INFER("add", &there, &x) == KL_DECLINED);
    CHECK(INFER("add", &there, &there) == KL_OK && result.outs[0].device == 1);
    /* a 0-dim value on the CPU goes with any device, on either side */
    CHECK(INFER("add", &number, &there) == KL_OK && result.outs[0].device == 1);
    CHECK(INFER("add", &there, &number) == KL_OK && result.outs[0].device == 1);
    number.device = 1;
    CHECK(INFER("add", &x, &number) == KL_DECLINED);
    CHECK(INFER("add", &number, &x) == KL_DECLINED);
    CHECK(INFER("relu", &x) == KL_OK && result.outs[0].device == 0);
}

static const KlMeta *
attend(const KlMeta *x)
{
    CHECK(INFER("scaled_dot_product_attention", x, x, x) == KL_OK);
    return &result.outs[0];
}

/* Only on the CPU is it known that attention lays out its result as its query: elsewhere the kernel is chosen when the
 * call runs, and that for float64 makes one matrix after the other. */
static void
test_layout_of_attention(void)
{
    KlMeta x = TENSOR(FLOAT32, 2, 3, 8, 4);
    memcpy(x.strides, SIZES(96, 4, 12, 1), 4 * sizeof(int64_t));
    x.is_strided = true;
    for (int i = 0; i < 2; i++) {
        KlMeta there = x;
        there.device = 1;
        there.dtype = i == 0 ? KL_DTYPE_FLOAT32 : KL_DTYPE_FLOAT64;
        CHECK(!attend(&there)->is_strided);
    }
}

static void
test_illegal_calls(void)
{
    const KlMeta x = TENSOR(FLOAT32, 8, 4), w = TENSOR(FLOAT32, 3, 5);
    CHECK(INFER("linear", &x, &w) == KL_ILLEGAL);
    KlMeta misplaced = by_rows(0, TENSOR(FLOAT32, 7, 4));
    CHECK(INFER("relu", &misplaced) == KL_ERROR_INTERNAL);
    misplaced = by_rows(3, TENSOR(FLOAT32, 8, 4)); /* there is no axis 3 */
    CHECK(INFER("relu", &misplaced) == KL_ERROR_INTERNAL);
    misplaced = by_rows(0, TENSOR(FLOAT32, 8, 4));
    misplaced.place.dim = 2; /* of two */
    misplaced.shape[2] = 8;
    CHECK(INFER("relu", &misplaced) == KL_ERROR_INTERNAL);
}

static void
test_inplace_results_must_fit(void)
{
    const KlMeta row = TENSOR(FLOAT32, 4), block = TENSOR(FLOAT64, 8, 4), ints = TENSOR(INT64, 4);
    CHECK(INFER("add_", &row, &block) == KL_ILLEGAL);
    CHECK(INFER("add_", &ints, &row) == KL_ILLEGAL);
    CHECK(INFER("add_", &block, &row) == KL_OK);
    CHECK(result.n_outs == 1 && result.effects == 1);
    CHECK(result.alias == KL_ALIAS_SAME && result.alias_input == 0);
    const KlMeta doubles = TENSOR(FLOAT64, 4); /* the target keeps its dtype */
    CHECK(INFER("add_", &row, &doubles) == KL_OK && result.outs[0].dtype == KL_DTYPE_FLOAT32);
    const KlMeta x = by_rows(0, TENSOR(FLOAT32, 8, 4));
    CHECK(INFER("add_", &x, &row) == KL_OK && result.split.mode == KL_MODE_ROWS);
    CHECK(kl_place_is_equal(&result.outs[0].place, &x.place));
}

static void
test_who_requires_grad(void)
{
    const KlMeta x = TENSOR(FLOAT32, 8, 4), w = with_grad(TENSOR(FLOAT32, 8, 4));
    CHECK(INFER("mul", &x, &x) == KL_OK && !result.outs[0].requires_grad);
    CHECK(INFER("mul", &x, &w) == KL_OK && result.outs[0].requires_grad);
    CHECK(INFER("eq", &x, &w) == KL_OK && !result.outs[0].requires_grad);
    CHECK(INFER("detach", &w) == KL_OK && !result.outs[0].requires_grad);
    CHECK(INFER("sort", &w) == KL_OK && result.n_outs == 2);
    CHECK(result.outs[0].requires_grad && !result.outs[1].requires_grad); /* values, indices */
    CHECK(INFER("add_", &x, &w) == KL_OK && result.outs[0].requires_grad);
}

static KlStatus
infer_without_grad(const char *name, const KlMeta *input, KlArg more)
{
    KlStatus status = INFER_MORE(name, more, input);
    CHECK(status == KL_OK);
    bound.call.is_grad_enabled = false;
    return kl_infer_call(&bound.call, &result);
}

static void
test_grad_mode_off(void)
{
    KlMeta w = with_grad(TENSOR(FLOAT32, 8, 4));
    CHECK(infer_without_grad("relu", &w, (KlArg){0}) == KL_OK && !result.outs[0].requires_grad);
    CHECK(infer_without_grad("reshape", &w, INTS(4, 8)) == KL_OK);
    CHECK(result.alias == KL_ALIAS_VIEW && result.outs[0].requires_grad); /* torch asks its base */
    CHECK(infer_without_grad("detach", &w, (KlArg){0}) == KL_OK && !result.outs[0].requires_grad);
    w.is_strided = false; /* view or copy? only the first requires grad */
    CHECK(infer_without_grad("reshape", &w, INTS(4, 8)) == KL_DECLINED);
    CHECK(INFER_MORE("reshape", INTS(4, 8), &w) == KL_OK && result.alias == KL_ALIAS_MAYBE);
}

static void
test_modes_and_places(void)
{
    const KlMeta x = by_rows(0, TENSOR(FLOAT32, 8, 4)), w = TENSOR(FLOAT32, 3, 4);
    CHECK(INFER("linear", &x, &w) == KL_OK);
    CHECK(result.split.mode == KL_MODE_ROWS && result.split.axis == 0);
    CHECK(result.split.reason == NULL && result.outs[0].place.axis == 0);
    CHECK(kl_place_is_rows(&result.split.places[0]) && !kl_place_is_rows(&result.split.places[1]));
    CHECK(INFER("mean", &x) == KL_OK && result.split.mode == KL_MODE_REDUCE);
    CHECK(result.split.reduce == KL_REDUCE_MEAN && !kl_place_is_rows(&result.outs[0].place));
    CHECK(INFER("relu", &w) == KL_OK && result.split.mode == KL_MODE_ONCE);
    CHECK(result.split.axis == KL_ID_NONE && result.split.reason == NULL);
    /* along the batch: once, with a reason, and given whole */
    CHECK(INFER_MORE("cummax", INT(0), &x) == KL_OK && result.split.mode == KL_MODE_ONCE);
    CHECK(result.split.reason != NULL && result.split.axis == KL_ID_NONE);
    CHECK(!kl_place_is_rows(&result.split.places[0]) && !kl_place_is_rows(&result.outs[0].place));
}

static void
test_batches_that_run_once(void)
{
    const KlMeta x = by_rows(0, TENSOR(FLOAT32, 8, 4)), y = by_rows(1, TENSOR(FLOAT32, 8, 4));
    CHECK(INFER("add", &x, &y) == KL_OK && result.split.mode == KL_MODE_ONCE);
    CHECK(result.split.axis == KL_ID_NONE);
    CHECK(strcmp(result.split.reason, "two different batches are combined") == 0);
    const KlMeta empty = by_rows(2, TENSOR(FLOAT32, 0, 4));
    CHECK(INFER("relu", &empty) == KL_OK && result.split.mode == KL_MODE_ONCE);
    CHECK(strcmp(result.split.reason, "the batch has no samples") == 0);
    CHECK(!kl_place_is_rows(&result.outs[0].place));
}

/* One result serves call after call: nothing of a call may be left in the next. */
static void
test_a_result_is_used_again(void)
{
    const KlMeta x = by_rows(0, with_grad(TENSOR(FLOAT32, 8, 4))), w = TENSOR(FLOAT32, 3, 4);
    CHECK(INFER_MORE("view", INTS(8, 2, 2), &x) == KL_OK && result.split.n_rewrites == 1);
    CHECK(result.split.rewrites[0].arg == 1 && result.split.rewrites[0].entry == 0);
    CHECK(result.split.rewrites[0].scale == 1 && result.alias == KL_ALIAS_VIEW);
    CHECK(INFER_MORE("view", INTS(2, 4, 4), &x) == KL_OK); /* the batch is cut in two */
    CHECK(result.split.mode == KL_MODE_ONCE && result.split.n_rewrites == 0);
    CHECK(INFER("sort", &x) == KL_OK && result.n_outs == 2);
    const KlArg dropout[] = {VALUE(0), {.kind = KL_ARG_FLOAT, .u.f = 0.5}, INT(1)};
    bind(&bound, "dropout", 3, dropout, 1, (const KlMeta *[]){&w});
    CHECK(kl_infer_call(&bound.call, &result) == KL_OK && result.is_random);
    CHECK(INFER("mean", &x) == KL_OK && result.split.mode == KL_MODE_REDUCE);
    CHECK(INFER("relu", &w) == KL_OK);
    CHECK(result.n_outs == 1 && result.alias == KL_ALIAS_NONE && !result.is_random);
    CHECK(result.split.mode == KL_MODE_ONCE && result.split.reduce == KL_REDUCE_NONE);
    CHECK(result.split.n_rewrites == 0 && result.split.row_ranges == 0 && result.effects == 0);
    CHECK(!kl_place_is_rows(&result.split.places[0]) && !result.outs[0].requires_grad);
}

static void
test_what_is_saved(void)
{
    KlMeta x = by_rows(0, TENSOR(FLOAT32, 8, 4)), w = with_grad(TENSOR(FLOAT32, 3, 4));
    KlSaves saves = {.inputs = 7, .bytes_extra = 7};
    CHECK(INFER("linear", &x, &w) == KL_OK);
    kl_infer_saves(&bound.call, &result, &saves);
    CHECK(saves.inputs == 1 && saves.outputs == 0 && saves.bytes_extra == 0);
    x.requires_grad = true;
    CHECK(INFER("linear", &x, &w) == KL_OK);
    kl_infer_saves(&bound.call, &result, &saves);
    CHECK(saves.inputs == 3);
    CHECK(INFER("exp", &x) == KL_OK);
    kl_infer_saves(&bound.call, &result, &saves);
    CHECK(saves.inputs == 0 && saves.outputs == 1);
    bound.call.is_grad_enabled = false; /* nothing, for there is no backward */
    CHECK(kl_infer_call(&bound.call, &result) == KL_OK);
    kl_infer_saves(&bound.call, &result, &saves);
    CHECK(saves.inputs == 0 && saves.outputs == 0 && saves.bytes_extra == 0);
    const KlMeta other = TENSOR(FLOAT32, 8, 4);
    CHECK(INFER("mul_", &x, &other) == KL_OK);
    kl_infer_saves(&bound.call, &result, &saves);
    CHECK(saves.inputs == 2);
    bound.call.is_grad_enabled = false; /* x still requires grad, but the call has no backward */
    CHECK(kl_infer_call(&bound.call, &result) == KL_OK && result.outs[0].requires_grad);
    kl_infer_saves(&bound.call, &result, &saves);
    CHECK(saves.inputs == 0 && saves.outputs == 0);
}

static void
test_no_memory(void)
{
    const KlMeta x = by_rows(0, TENSOR(FLOAT32, 8, 4));
    int n = 0;
    for (;; n++) {
        KlInferred fresh = {0};
        kl_alloc_fail_after(n);
        KlStatus status = infer(&bound, &fresh, "relu", 1, (const KlMeta *[]){&x}, (KlArg){0});
        kl_alloc_fail_after(-1);
        CHECK(status == KL_OK || status == KL_ERROR_MEMORY);
        CHECK(infer(&bound, &fresh, "relu", 1, (const KlMeta *[]){&x}, (KlArg){0}) == KL_OK);
        CHECK(fresh.n_outs == 1 && fresh.split.mode == KL_MODE_ROWS);
        kl_infer_fini(&fresh);
        if (status == KL_OK) {
            break;
        }
    }
    CHECK(n == 2); /* places and outputs */
}

int
main(void)
{
    test_outputs_are_zeroed_whole_and_grow();
    test_what_is_declined();
    test_devices();
    test_layout_of_attention();
    test_illegal_calls();
    test_inplace_results_must_fit();
    test_who_requires_grad();
    test_grad_mode_off();
    test_modes_and_places();
    test_batches_that_run_once();
    test_a_result_is_used_again();
    test_what_is_saved();
    test_no_memory();
    kl_infer_fini(&result);
    CHECK(kl_alloc_n_blocks() == 0);
    return check_result();
}
