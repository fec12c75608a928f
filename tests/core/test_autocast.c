/* SPDX-License-Identifier: Apache-2.0 */
/* test_autocast.c - in which dtype autocast lets an op see its inputs, and what is saved of the copies. */
#include "autocast.h"

#include "record.h"

#define F16 KL_DTYPE_FLOAT16
#define BF16 KL_DTYPE_BFLOAT16
#define F32 KL_DTYPE_FLOAT32
#define F64 KL_DTYPE_FLOAT64
#define I64 KL_DTYPE_INT64
#define C64 KL_DTYPE_COMPLEX64
#define DECLINED KL_DTYPE_OTHER /* what `seen` has for a call that is declined */

static const KlAutocast cpu = {.lower = KL_DTYPE_BFLOAT16};
static const KlAutocast cuda = {.lower = KL_DTYPE_FLOAT16, .is_cuda = true};

/* The dtypes of at most three inputs before and after; an argument more. */
static void
expect_at(int line, const KlAutocast *autocast, const char *name, const KlDtype *given,
          const KlDtype *wanted, uint32_t n, KlArg more)
{
    KlMeta metas[3];
    KlMeta cast[3];
    const KlMeta *inputs[3];
    const KlMeta *seen[3] = {NULL};
    KlArg args[ARGS_MAX];
    for (uint32_t i = 0; i < n; i++) {
        metas[i] = tensor(given[i], 2, SIZES(8, 4));
        inputs[i] = &metas[i];
        args[i] = VALUE(i);
    }
    args[n] = more;
    Bound bound;
    bind(&bound, name, n + (more.kind != KL_ARG_ABSENT), args, n, inputs);
    KlStatus status = kl_autocast_inputs(autocast, &bound.call, cast, seen);
    CHECK_AT(line, status == (wanted[0] == DECLINED ? KL_DECLINED : KL_OK));
    for (uint32_t i = 0; i < n && status == KL_OK && wanted[0] != DECLINED; i++) {
        CHECK_AT(line, seen[i]->dtype == wanted[i]);
        /* the very input where nothing changes, else the copy; the input itself is left alone */
        CHECK_AT(line, seen[i] == (given[i] == wanted[i] ? &metas[i] : &cast[i]));
        CHECK_AT(line, metas[i].dtype == given[i]);
    }
}

#define EXPECT(...) expect_at(__LINE__, __VA_ARGS__)
#define DTYPES(...) ((const KlDtype[]){__VA_ARGS__})
#define EXPECT1(how, name, given, wanted)                                                          \
    EXPECT(how, name, DTYPES(given), DTYPES(wanted), 1, (KlArg){0})
#define EXPECT2(how, name, left, right, ...)                                                       \
    EXPECT(how, name, DTYPES(left, right), DTYPES(__VA_ARGS__), 2, (KlArg){0})

static void
test_lists_of_the_cpu(void)
{
    EXPECT2(&cpu, "linear", F32, F32, BF16, BF16);
    EXPECT2(&cpu, "linear", F32, BF16, BF16, BF16);
    EXPECT2(&cpu, "matmul", F16, F32, BF16, BF16);
    EXPECT2(&cpu, "mse_loss", BF16, F32, F32, F32);
    EXPECT1(&cpu, "prod", BF16, F32);
    /* on no list: what it is given */
    EXPECT2(&cpu, "add", BF16, F32, BF16, F32);
    EXPECT1(&cpu, "softmax", BF16, BF16);
    EXPECT1(&cpu, "exp", BF16, BF16);
    EXPECT2(&cpu, "mv", F32, F32, F32, F32);
}

static void
test_lists_of_cuda(void)
{
    EXPECT2(&cuda, "linear", F32, F32, F16, F16);
    EXPECT2(&cuda, "mv", F32, F32, F16, F16);
    EXPECT1(&cuda, "exp", F16, F32);
    EXPECT1(&cuda, "relu", F16, F16);
    EXPECT2(&cuda, "binary_cross_entropy", F32, F32, DECLINED, DECLINED); /* torch refuses it */
    EXPECT1(&cuda, "gru", F32, DECLINED);
    EXPECT1(&cuda, "pairwise_distance", F32, DECLINED);
}

/* A name that is part of a listed one is not on the list. */
static void
test_names_are_whole(void)
{
    EXPECT1(&cpu, "t", BF16, BF16);    /* triplet_margin_loss begins with it */
    EXPECT1(&cpu, "relu", BF16, BF16); /* rnn_relu ends with it */
    EXPECT1(&cpu, "max_pool2d", BF16, BF16);
    EXPECT1(&cpu, "avg_pool3d", BF16, F32); /* listed, behind adaptive_avg_pool3d */
    EXPECT1(&cpu, "max_pool3d", BF16, F32);
    EXPECT1(&cpu, "adaptive_max_pool3d", BF16, F32);
    EXPECT1(&cpu, "addmm", F32, BF16);
    EXPECT1(&cpu, "triplet_margin_loss", BF16, F32); /* the last of its list */
}

static void
test_what_is_not_cast(void)
{
    EXPECT2(&cpu, "linear", F64, F32, F64, BF16);
    EXPECT2(&cpu, "matmul", I64, F32, I64, BF16);
    EXPECT2(&cpu, "matmul", C64, F32, C64, BF16);
    EXPECT2(&cpu, "cross_entropy_loss", BF16, I64, F32, I64);
    /* where nothing can be cast autocast does nothing, and refuses nothing */
    EXPECT2(&cuda, "binary_cross_entropy", F64, F64, F64, F64);
    EXPECT1(&cuda, "gru", F64, F64);
    EXPECT2(&cpu, "cat", F64, I64, F64, I64);
    KlMeta x = TENSOR(FLOAT32, 8, 4), cast[2];
    const KlMeta *seen[2] = {&x, &x};
    Bound bound;
    bind(&bound, "linear", 2, ARGS(VALUE(0), VALUE(1)), 2, (const KlMeta *[]){&x, NULL});
    CHECK(kl_autocast_inputs(&cpu, &bound.call, cast, seen) == KL_OK);
    CHECK(seen[0]->dtype == BF16 && seen[1] == NULL); /* None stays None */
}

static void
test_reductions_that_name_a_dtype(void)
{
    const KlArg dtype = {.kind = KL_ARG_DTYPE, .u.dtype = KL_DTYPE_FLOAT64};
    EXPECT1(&cuda, "sum", F16, F32);
    EXPECT(&cuda, "sum", DTYPES(F16), DTYPES(F16), 1, dtype);
    EXPECT(&cuda, "softmax", DTYPES(F16), DTYPES(F32), 1, INT(1));
}

static void
test_widest(void)
{
    EXPECT2(&cpu, "cat", F32, BF16, F32, F32);
    EXPECT2(&cpu, "cat", BF16, F32, F32, F32);
    EXPECT2(&cpu, "stack", BF16, BF16, BF16, BF16);
    EXPECT2(&cpu, "cat", BF16, I64, BF16, I64);
    EXPECT2(&cpu, "cat", BF16, F64, DECLINED, DECLINED);
    EXPECT2(&cpu, "cat", F32, F16, DECLINED, DECLINED); /* a lower dtype, but not the lower one */
    EXPECT2(&cuda, "cat", F32, F16, F32, F32);
    EXPECT2(&cuda, "cat", F16, BF16, DECLINED, DECLINED);
    EXPECT(&cuda, "addcmul", DTYPES(F16, F16, F32), DTYPES(F32, F32, F32), 3, (KlArg){0});
    EXPECT2(&cpu, "dot", BF16, F32, BF16, F32); /* only on CUDA's */
}

static void
test_layers(void)
{
    EXPECT2(&cpu, "lstm", F32, F32, BF16, BF16);
    EXPECT2(&cpu, "lstm", F32, BF16, DECLINED, DECLINED);
    EXPECT2(&cpu, "gru", F32, F32, F32, F32);
    EXPECT2(&cpu, "lstm_cell", F32, BF16, DECLINED, DECLINED);
    EXPECT2(&cpu, "rnn_tanh_cell", F32, F32, BF16, BF16);
    EXPECT2(&cuda, "gru_cell", F32, F16, F16, F16);
}

static void
expect_einsum_at(int line, KlArg equation, uint32_t n, KlStatus wanted_status, KlDtype wanted)
{
    KlMeta x = TENSOR(FLOAT32, 4, 4), cast[3];
    const KlMeta *inputs[3] = {&x, &x, &x};
    const KlMeta *seen[3] = {NULL};
    Bound bound;
    bind(&bound, "einsum", 2, ARGS(equation, VALUES(0, n)), n, inputs);
    CHECK_AT(line, kl_autocast_inputs(&cpu, &bound.call, cast, seen) == wanted_status);
    for (uint32_t i = 0; wanted_status == KL_OK && i < n; i++) {
        CHECK_AT(line, seen[i]->dtype == wanted);
    }
    CHECK_AT(line, kl_autocast_inputs(&cuda, &bound.call, cast, seen) == KL_OK);
    CHECK_AT(line, seen[0]->dtype == F16); /* CUDA lowers them all */
}

#define EXPECT_EINSUM(...) expect_einsum_at(__LINE__, __VA_ARGS__)

static void
test_einsum(void)
{
    EXPECT_EINSUM(TEXT("ab,bc->ac"), 2, KL_OK, BF16);
    EXPECT_EINSUM(TEXT("aB,Bc->ac"), 2, KL_OK, BF16); /* capitals are letters too */
    EXPECT_EINSUM(TEXT("ab,bc"), 2, KL_OK, BF16);     /* without an arrow, what occurs twice */
    EXPECT_EINSUM(TEXT("ab,cd"), 2, KL_OK, F32);
    EXPECT_EINSUM(TEXT("ab,ab->ab"), 2, KL_OK, F32); /* elementwise */
    EXPECT_EINSUM(TEXT("ab,bc->abc"), 2, KL_OK, F32);
    EXPECT_EINSUM(TEXT("ab,cd->a"), 2, KL_OK, F32); /* b is summed, not contracted */
    EXPECT_EINSUM(TEXT("a b, a c -> b c"), 2, KL_OK, BF16);
    EXPECT_EINSUM(TEXT("...a,...b->..."), 2, KL_OK, F32); /* the dots are no letters */
    EXPECT_EINSUM(TEXT("...a,...b"), 2, KL_OK, F32);
    EXPECT_EINSUM(TEXT("ab->b"), 1, KL_OK, F32);
    EXPECT_EINSUM(TEXT("ab,bc,cd->ad"), 3, KL_DECLINED, F32); /* in which order? */
    EXPECT_EINSUM(NONE, 2, KL_DECLINED, F32);                 /* written as lists */
}

static void
expect_pad_at(int line, KlArg mode, KlDtype wanted)
{
    KlMeta x = TENSOR(BFLOAT16, 2, 3, 4), cast;
    const KlMeta *seen = NULL;
    Bound bound;
    bind(&bound, "pad", 3, ARGS(VALUE(0), INTS(1, 1), mode), 1, (const KlMeta *[]){&x});
    CHECK_AT(line, kl_autocast_inputs(&cpu, &bound.call, &cast, &seen) == KL_OK);
    CHECK_AT(line, seen->dtype == wanted);
}

#define EXPECT_PAD(...) expect_pad_at(__LINE__, __VA_ARGS__)

static void
test_padding(void)
{
    EXPECT_PAD(TEXT("reflect"), F32);
    EXPECT_PAD(TEXT("replicate"), F32);
    EXPECT_PAD(TEXT("constant"), BF16);
    EXPECT_PAD(TEXT("circular"), BF16);
    EXPECT_PAD((KlArg){0}, BF16); /* constant, if nothing is said */
}

/* The copy is laid out as torch's own: like a dense input, else dense. */
static void
test_strides_and_places_of_a_copy(void)
{
    KlMeta x = by_rows(0, TENSOR(FLOAT32, 8, 4)), w = with_grad(TENSOR(FLOAT32, 8, 4)), cast[2];
    const KlMeta *seen[2] = {NULL};
    x.strides[0] = 1; /* transposed */
    x.strides[1] = 8;
    w.strides[0] = 16; /* every second column */
    w.strides[1] = 2;
    Bound bound;
    bind(&bound, "linear", 2, ARGS(VALUE(0), VALUE(1)), 2, (const KlMeta *[]){&x, &w});
    CHECK(kl_autocast_inputs(&cpu, &bound.call, cast, seen) == KL_OK);
    CHECK(seen[0]->strides[0] == 1 && seen[0]->strides[1] == 8);
    CHECK(seen[1]->strides[0] == 4 && seen[1]->strides[1] == 1);
    CHECK(kl_place_is_equal(&seen[0]->place, &x.place) && seen[1]->requires_grad);
}

/* Of a cast input the copy is saved, in its own size; by rows, or the same for every chunk. */
static void
test_saved_copies(void)
{
    KlMeta x = by_rows(0, TENSOR(FLOAT32, 8, 4)), w = TENSOR(FLOAT32, 3, 4), cast[2];
    const KlMeta *seen[2] = {NULL};
    Bound bound;
    bind(&bound, "linear", 2, ARGS(VALUE(0), VALUE(1)), 2, (const KlMeta *[]){&x, &w});
    CHECK(kl_autocast_inputs(&cpu, &bound.call, cast, seen) == KL_OK);
    KlSaves saves = {.inputs = 3, .outputs = 1};
    kl_autocast_saves(&bound.call, seen, &saves);
    CHECK(saves.inputs == 0 && saves.outputs == 1);
    CHECK(saves.bytes_extra == 8 * 4 * 2 && saves.is_extra_rows);
    CHECK(saves.bytes_fixed == 3 * 4 * 2);
    saves = (KlSaves){.inputs = 2, .bytes_extra = 5}; /* x was not saved, and is not now */
    kl_autocast_saves(&bound.call, seen, &saves);
    CHECK(saves.inputs == 0 && saves.bytes_extra == 5 && saves.bytes_fixed == 3 * 4 * 2);
    CHECK(!saves.is_extra_rows);
    saves = (KlSaves){.inputs = 1, .bytes_extra = 5}; /* not all of it would grow with the rows */
    kl_autocast_saves(&bound.call, seen, &saves);
    CHECK(saves.bytes_extra == 5 + 8 * 4 * 2 && !saves.is_extra_rows);
    seen[0] = &x;
    seen[1] = &w;
    saves = (KlSaves){.inputs = 3}; /* nothing was cast: the inputs themselves */
    kl_autocast_saves(&bound.call, seen, &saves);
    CHECK(saves.inputs == 3 && saves.bytes_extra == 0 && saves.bytes_fixed == 0);
}

int
main(void)
{
    test_lists_of_the_cpu();
    test_lists_of_cuda();
    test_names_are_whole();
    test_what_is_not_cast();
    test_reductions_that_name_a_dtype();
    test_widest();
    test_layers();
    test_einsum();
    test_padding();
    test_strides_and_places_of_a_copy();
    test_saved_copies();
    return check_result();
}
