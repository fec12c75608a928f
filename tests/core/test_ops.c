/* SPDX-License-Identifier: Apache-2.0 */
/* test_ops.c - the table: every row is whole and found by its names, and only products are heavy. */
#include "ops.h"

#include <string.h>

#include "check.h"

static void
test_every_row_is_whole(void)
{
    CHECK(kl_ops_n_rows > 400);
    for (uint32_t i = 0; i < kl_ops_n_rows; i++) {
        const KlRow *row = &kl_ops_rows[i];
        CHECK(row->name != NULL && row->call != NULL);
        CHECK(row->shape != NULL && row->dtype != NULL && row->place != NULL && row->saves != NULL);
    }
}

static void
test_every_row_is_found_by_its_name(void)
{
    for (uint32_t i = 0; i < kl_ops_n_rows; i++) {
        CHECK(kl_ops_find(kl_ops_rows[i].name) == &kl_ops_rows[i]);
    }
    CHECK(kl_ops_find("no_such_op") == NULL);
    CHECK(kl_ops_find("") == NULL);
    CHECK(kl_ops_find("ad") == NULL && kl_ops_find("add__") == NULL); /* whole names only */
}

static void
test_aliases_stand_for_rows(void)
{
    const char *name = NULL;
    const KlRow *row = NULL;
    uint32_t n = 0;
    for (; kl_ops_alias(n, &name, &row); n++) {
        CHECK(row >= kl_ops_rows && row < kl_ops_rows + kl_ops_n_rows);
        CHECK(kl_ops_find(name) == row);
        CHECK(strcmp(name, row->name) != 0);
    }
    CHECK(n > 50);
    const char *last = name;
    CHECK(!kl_ops_alias(n, &name, &row) && !kl_ops_alias(UINT32_MAX, &name, &row));
    CHECK(name == last); /* past the end nothing is said */
    CHECK(kl_ops_find("__rmul__") == kl_ops_find("mul"));
}

/* In-place rows write their first word; others write nothing, or the running mean and variance. */
static void
test_kinds_and_effects(void)
{
    uint32_t n_of[4] = {0};
    for (uint32_t i = 0; i < kl_ops_n_rows; i++) {
        const KlRow *row = &kl_ops_rows[i];
        n_of[row->kind]++;
        if (row->kind == KL_ROW_INPLACE) {
            CHECK(row->effects == 1);
        } else {
            bool has_statistics = strstr(row->call, "running_mean, running_var") != NULL;
            CHECK(row->effects == (has_statistics ? 1u << 3 | 1u << 4 : 0));
        }
    }
    CHECK(n_of[KL_ROW_OP] > 0 && n_of[KL_ROW_VIEW] > 0);
    CHECK(n_of[KL_ROW_INPLACE] > 0);
    CHECK(kl_ops_find("add_")->kind == KL_ROW_INPLACE);
    CHECK(kl_ops_find("transpose")->kind == KL_ROW_VIEW);
    CHECK(kl_ops_find("dropout")->draws != NULL && kl_ops_find("add")->draws == NULL);
}

static void
test_products_are_heavy(void)
{
    static const char *const heavy[] = {"linear", "matmul", "mm",       "bmm",    "baddbmm",
                                        "einsum", "addmm",  "addmv",    "addbmm", "conv2d",
                                        "mv",     "lstm",   "bilinear", "cdist",  "outer"};
    static const char *const cheap[] = {"add", "relu", "mean",    "view",       "softmax",
                                        "cat", "ne",   "dropout", "layer_norm", "add_"};
    for (size_t i = 0; i < sizeof(heavy) / sizeof(heavy[0]); i++) {
        CHECK(kl_ops_find(heavy[i]) != NULL && kl_ops_find(heavy[i])->is_heavy);
    }
    for (size_t i = 0; i < sizeof(cheap) / sizeof(cheap[0]); i++) {
        CHECK(kl_ops_find(cheap[i]) != NULL && !kl_ops_find(cheap[i])->is_heavy);
    }
}

int
main(void)
{
    test_every_row_is_whole();
    test_every_row_is_found_by_its_name();
    test_aliases_stand_for_rows();
    test_kinds_and_effects();
    test_products_are_heavy();
    return check_result();
}
