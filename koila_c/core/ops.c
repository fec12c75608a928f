/* ops.c - expands ops.def into ids, rows and aliases. It adds nothing but this: a row is heavy (not to be
 * run again lightly) when it is made of products, and light otherwise. */
#include "ops.h"

#include <string.h>

#include "rules.h"

/* One id per row: a doubled row or an alias of no row does not compile. The names are pasted right here,
 * not in a macro further in, because some (bool) are macros themselves. */
enum {
#define OP(name_, ...) KL_OP_##name_,
#define VIEW(name_, ...) KL_OP_##name_,
#define INPLACE(name_, ...) KL_OP_##name_,
#define RANDOM(name_, ...) KL_OP_##name_,
#define ALIAS(alias_, name_)
#include "ops.def"
    KL_N_OPS
};

/* Effects: which words of the signature the op writes. */
enum { EFFECTS_NONE = 0, EFFECTS_ARG0 = 1, EFFECTS_STATS = 3 << 3 /* words 3 and 4 */ };

#define CELLS(shape_cell, dtype_cell, place_cell, saves_cell, effects_cell)                        \
    .shape = shape_##shape_cell, .dtype = dtype_##dtype_cell, .place = place_##place_cell,         \
    .saves = saves_##saves_cell, .effects = EFFECTS_##effects_cell

#define OP(name_, call_, ...)                                                                      \
    {.name = #name_, .call = call_, .kind = KL_ROW_OP, CELLS(__VA_ARGS__)},
#define VIEW(name_, call_, ...)                                                                    \
    {.name = #name_, .call = call_, .kind = KL_ROW_VIEW, CELLS(__VA_ARGS__)},
#define INPLACE(name_, call_, ...)                                                                 \
    {.name = #name_, .call = call_, .kind = KL_ROW_INPLACE, CELLS(__VA_ARGS__)},
#define RANDOM(name_, call_, ...)                                                                  \
    {.name = #name_, .call = call_, .kind = KL_ROW_RANDOM, CELLS(__VA_ARGS__)},
#define ALIAS(alias_, name_)

const KlRow kl_ops_rows[] = {
#include "ops.def"
};

const uint32_t kl_ops_n_rows = KL_N_OPS;

static const struct {
    const char *name;
    const KlRow *row;
} aliases[] = {
#define OP(...)
#define VIEW(...)
#define INPLACE(...)
#define RANDOM(...)
#define ALIAS(alias_, name_) {#alias_, &kl_ops_rows[KL_OP_##name_]},
#include "ops.def"
};

bool
kl_ops_is_light(const KlRow *row)
{
    static KlStatus (*const heavy[])(const KlCall *, KlInferred *, KlError *) = {
        place_attention, place_baddbmm, place_bilinear, place_bmm,      place_cdist,
        place_conv,      place_einsum,  place_linear,   place_matmul,   place_mm,
        place_mv,        place_outer,   place_rnn,      place_rnn_cell,
    };
    for (size_t i = 0; i < sizeof(heavy) / sizeof(heavy[0]); i++) {
        if (row->place == heavy[i]) {
            return false;
        }
    }
    return true;
}

bool
kl_ops_is_detached(const KlRow *row)
{
    return row->kind == KL_ROW_VIEW && row->saves == saves_no_grad;
}

const KlRow *
kl_ops_find(const char *name)
{
    for (uint32_t i = 0; i < kl_ops_n_rows; i++) {
        if (strcmp(kl_ops_rows[i].name, name) == 0) {
            return &kl_ops_rows[i];
        }
    }
    for (size_t i = 0; i < sizeof(aliases) / sizeof(aliases[0]); i++) {
        if (strcmp(aliases[i].name, name) == 0) {
            return aliases[i].row;
        }
    }
    return NULL;
}

bool
kl_ops_alias(uint32_t n, const char **alias, const KlRow **row)
{
    if (n >= sizeof(aliases) / sizeof(aliases[0])) {
        return false;
    }
    *alias = aliases[n].name;
    *row = aliases[n].row;
    return true;
}
