/* SPDX-License-Identifier: Apache-2.0 */
/* test_meta.c - facts of dtypes, sizes, row-major strides as torch counts them, equality of places. */
#include "meta.h"

#include <string.h>

#include "check.h"

static KlMeta
sized(int32_t n_dims, int64_t first, int64_t second, int64_t third)
{
    KlMeta meta = {.dtype = KL_DTYPE_FLOAT32, .n_dims = n_dims, .place = KL_PLACE_WHOLE};
    meta.shape[0] = first;
    meta.shape[1] = second;
    meta.shape[2] = third;
    return meta;
}

static void
test_dtypes(void)
{
    static const struct {
        KlDtype dtype;
        const char *name;
        size_t bytes;
        bool is_float, is_complex;
    } facts[] = {
        {KL_DTYPE_BOOL, "bool", 1, false, false},
        {KL_DTYPE_UINT8, "uint8", 1, false, false},
        {KL_DTYPE_INT8, "int8", 1, false, false},
        {KL_DTYPE_INT16, "int16", 2, false, false},
        {KL_DTYPE_INT32, "int32", 4, false, false},
        {KL_DTYPE_INT64, "int64", 8, false, false},
        {KL_DTYPE_FLOAT16, "float16", 2, true, false},
        {KL_DTYPE_BFLOAT16, "bfloat16", 2, true, false},
        {KL_DTYPE_FLOAT32, "float32", 4, true, false},
        {KL_DTYPE_FLOAT64, "float64", 8, true, false},
        {KL_DTYPE_COMPLEX64, "complex64", 8, false, true},
        {KL_DTYPE_COMPLEX128, "complex128", 16, false, true},
        {KL_DTYPE_OTHER, "other", 0, false, false},
    };
    size_t n = sizeof(facts) / sizeof(facts[0]);
    CHECK(n == KL_N_DTYPES + 1); /* every dtype and OTHER, in order */
    for (size_t i = 0; i < n; i++) {
        CHECK(facts[i].dtype == (KlDtype)i);
        CHECK(strcmp(kl_meta_dtype_name(facts[i].dtype), facts[i].name) == 0);
        CHECK(kl_meta_dtype_bytes(facts[i].dtype) == facts[i].bytes);
        CHECK(kl_meta_dtype_is_float(facts[i].dtype) == facts[i].is_float);
        CHECK(kl_meta_dtype_is_complex(facts[i].dtype) == facts[i].is_complex);
    }
}

static void
test_sizes(void)
{
    KlMeta scalar = sized(0, 7, 7, 7); /* what is past n_dims does not count */
    KlMeta block = sized(3, 2, 3, 5);
    KlMeta empty = sized(3, 2, 0, 5);
    CHECK(kl_meta_n_elements(&scalar) == 1 && kl_meta_n_bytes(&scalar) == 4);
    CHECK(kl_meta_n_elements(&block) == 30 && kl_meta_n_bytes(&block) == 120);
    CHECK(kl_meta_n_elements(&empty) == 0 && kl_meta_n_bytes(&empty) == 0);
    KlMeta large = sized(3, 1 << 20, 1 << 20, 4); /* more than 32 bits */
    CHECK(kl_meta_n_bytes(&large) == INT64_C(1) << 44);
}

static bool
has_strides(const KlMeta *meta, int64_t first, int64_t second, int64_t third)
{
    return meta->strides[0] == first && meta->strides[1] == second && meta->strides[2] == third;
}

static void
test_row_major_strides(void)
{
    KlMeta block = sized(3, 2, 3, 5);
    CHECK(!block.is_strided);
    kl_meta_set_contiguous(&block);
    CHECK(block.is_strided && has_strides(&block, 15, 5, 1));
    KlMeta empty = sized(3, 2, 0, 5); /* torch.empty(2, 0, 5).stride() == (5, 5, 1) */
    kl_meta_set_contiguous(&empty);
    CHECK(has_strides(&empty, 5, 5, 1));
}

static void
test_what_is_contiguous(void)
{
    KlMeta meta = sized(3, 2, 3, 5);
    kl_meta_set_contiguous(&meta);
    CHECK(kl_meta_is_contiguous(&meta));
    meta.is_strided = false; /* strides that are not known are not contiguous, whatever they say */
    CHECK(!kl_meta_is_contiguous(&meta));
    meta.is_strided = true;
    meta.strides[0] = 30; /* every second one */
    CHECK(!kl_meta_is_contiguous(&meta));
    KlMeta transposed = sized(3, 2, 3, 5);
    transposed.is_strided = true;
    transposed.strides[0] = 1;
    transposed.strides[1] = 2;
    transposed.strides[2] = 6;
    CHECK(!kl_meta_is_contiguous(&transposed));
    transposed.shape[1] = 0; /* nothing is stored */
    CHECK(kl_meta_is_contiguous(&transposed));
    KlMeta single = sized(3, 2, 1, 5); /* the stride of a dim of one does not matter */
    kl_meta_set_contiguous(&single);
    single.strides[1] = 99;
    CHECK(kl_meta_is_contiguous(&single));
}

static void
test_places(void)
{
    const KlPlace place = {.axis = 1, .dim = 2, .outer = 3, .inner = 4};
    CHECK(kl_place_is_rows(&place) && kl_place_is_equal(&place, &place));
    for (int field = 0; field < 4; field++) {
        KlPlace other = place;
        other.axis += field == 0;
        other.dim += field == 1;
        other.outer += field == 2;
        other.inner += field == 3;
        CHECK(!kl_place_is_equal(&place, &other) && !kl_place_is_equal(&other, &place));
    }
    const KlPlace whole = KL_PLACE_WHOLE;
    KlPlace whole_too = place; /* without an axis the rest says nothing */
    whole_too.axis = KL_ID_NONE;
    CHECK(!kl_place_is_rows(&whole) && !kl_place_is_rows(&whole_too));
    CHECK(kl_place_is_equal(&whole, &whole_too));
    CHECK(!kl_place_is_equal(&whole, &place) && !kl_place_is_equal(&place, &whole));
}

/* Whether a chunk of rows at `dim` lies in the memory of the whole. */
static bool
is_cut_at(const KlMeta *meta, int32_t dim)
{
    KlPlace place = {.axis = 0, .dim = dim, .outer = 1, .inner = 1};
    return kl_meta_is_cut_in_place(meta, &place);
}

static void
test_what_is_cut_in_place(void)
{
    KlMeta meta = sized(3, 2, 3, 5);
    CHECK(is_cut_at(&meta, 0) && !is_cut_at(&meta, 1) && !is_cut_at(&meta, 2)); /* in order */
    kl_meta_set_contiguous(&meta);
    CHECK(is_cut_at(&meta, 0) && !is_cut_at(&meta, 1) && !is_cut_at(&meta, 2));
    meta.strides[0] = 5; /* transposed: rows are the second dim */
    meta.strides[1] = 10;
    CHECK(!is_cut_at(&meta, 0) && is_cut_at(&meta, 1));
    KlMeta narrow = sized(3, 2, 3, 5); /* a part of wider memory: nothing goes on where rows end */
    narrow.is_strided = true;
    narrow.strides[0] = 30;
    narrow.strides[1] = 5;
    narrow.strides[2] = 1;
    CHECK(is_cut_at(&narrow, 0) && is_cut_at(&narrow, 1));
    KlMeta single = sized(3, 1, 3, 5); /* a dim of one goes on nowhere */
    CHECK(is_cut_at(&single, 1));
    kl_meta_set_contiguous(&single);
    CHECK(is_cut_at(&single, 1));
    const KlPlace blocks = {.axis = 0, .dim = 0, .outer = 2, .inner = 1};
    kl_meta_set_contiguous(&meta);
    CHECK(!kl_meta_is_cut_in_place(&meta, &blocks));
}

int
main(void)
{
    test_dtypes();
    test_sizes();
    test_row_major_strides();
    test_what_is_contiguous();
    test_places();
    test_what_is_cut_in_place();
    return check_result();
}
