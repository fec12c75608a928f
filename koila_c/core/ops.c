/* SPDX-License-Identifier: Apache-2.0 */
/* ops.c - expands ops.def into ids, rows and aliases, and reductions.def into the table of reductions. */
#include "ops.h"

#include <string.h>

#include "alloc.h"
#include "rules.h"

/* One id per row, so that a duplicate row or an alias without a row does not compile. The names are pasted here and not
 * in a nested macro, because some of them (bool) are macros. */
enum {
#define OP(name_, ...) KL_OP_##name_,
#define BOTH(name_, ...) KL_OP_##name_, KL_OP_##name_##_,
#define VIEW(name_, ...) KL_OP_##name_,
#define INPLACE(name_, ...) KL_OP_##name_,
#define ALIAS(alias_, name_)
#define ALIASES(alias_, name_)
#include "ops.def"
    KL_N_OPS
};

enum { WEIGHT_CHEAP = false, WEIGHT_HEAVY = true };

/* Optional cells. HOLDS takes fields of KlHeld, BACK is the most frequent case. */
#define HELD(...) (&(const KlHeld){__VA_ARGS__})
#define HOLDS(...) .held = HELD(__VA_ARGS__)
#define EACH(n) {n, n, n}
#define BACK(n) HOLDS(.back_outs = EACH(n))
#define BY_DEVICE .is_laid_out_by_device = true
#define CAST(cpu_, cuda_) .cast = {KL_CAST_##cpu_, KL_CAST_##cuda_}
#define COPIES .copies_expanded = true
#define DRAWS(what_) .draws = #what_
#define GATHERS(how_, word_) .gathers = #how_, .gathered = word_
#define TIE(to_) .tie = KL_TIE_##to_
#define WRITES_STATS .effects = 3 << 3

/* The cells `saves` that list arguments and outputs which torch saves for backward (derivatives.yaml). The other cells
 * are functions. `for_grad`: saved only if the gradient that needs it is required. */
enum { W0 = 1, W1 = 2, W2 = 4, W3 = 8, W4 = 16 };
#define KEEPS(...) kl_rules_keep, .keeps = {__VA_ARGS__}
#define saves_nothing KEEPS(.words = 0)
#define saves_no_grad KEEPS(.has_no_gradient = true)
#define saves_addcdiv KEEPS(.words = W2, .for_grad = {[2] = W1})
#define saves_both KEEPS(.words = W0 | W1)
#define saves_copysign KEEPS(.for_grad = {[0] = W0}, .outputs = 1)
#define saves_cummax KEEPS(.words = W0, .outputs = 2) /* the input for its shape, and the indices */
#define saves_div KEEPS(.words = W1, .for_grad = {[1] = W0})
#define saves_factors KEEPS(.for_grad = {[1] = W2, [2] = W1}) /* each for the other's gradient */
#define saves_gather KEEPS(.words = W0 | W2)                  /* the input for its shape */
#define saves_groups KEEPS(.words = W2, .for_grad = {W1, W0}) /* word 2: the ends of the groups */
#define saves_hypot KEEPS(.for_grad = {W0, W1}, .outputs = 1)
#define saves_index_add KEEPS(.for_grad = {[3] = W2 | W3}) /* the source for its shape */
#define saves_index_copy KEEPS(.words = W2, .for_grad = {[3] = W3})
#define saves_indices KEEPS(.outputs = 2)
#define saves_input KEEPS(.words = W0)
#define saves_input_output KEEPS(.words = W0, .outputs = 1)
#define saves_inputs KEEPS(.words = W0 | W1 | W2)
#define saves_leaf KEEPS(.has_no_gradient = true, .is_leaf = true)
#define saves_lerp KEEPS(.for_grad = {W2, W2, W0 | W1})
#define saves_lerp_written KEEPS(.words = W2, .for_grad = {[2] = W0 | W1})
#define saves_other KEEPS(.for_grad = {W1, W0}) /* each operand for the other's gradient */
#define saves_output KEEPS(.outputs = 1)
#define saves_own KEEPS(.for_grad = {W0, W1}) /* each for its own gradient */
#define saves_remainder KEEPS(.for_grad = {[1] = W0 | W1})
#define saves_scatter_add KEEPS(.for_grad = {[3] = W2})
#define saves_scatter_reduce saves_scatter_reduce, .keeps = {.words = W0 | W2 | W3, .outputs = 1}
#define saves_word1 KEEPS(.words = W1)
#define saves_word2 KEEPS(.words = W2)

/* Cells with parameters, and variants of rules: conv(2) is the rule shape_conv() with n_spatial 2. */
#define shape_added(equation_) shape_product, .equation = equation_, .has_addend = true
#define shape_added_outer(equation_) shape_outer, .equation = equation_, .has_addend = true
#define shape_adaptive_pool(n_, outs_) shape_adaptive_pool, .n_spatial = n_, .n_outs = outs_
#define shape_avg_pool(n_) shape_pool, .n_spatial = n_, .n_outs = 1
#define shape_conv(n_) shape_conv, .n_spatial = n_
#define shape_conv_transpose(n_) shape_conv, .n_spatial = n_, .is_transposed = true
#define shape_cumulate(outs_) shape_cumulate, .n_outs = outs_
#define shape_cross shape_cross, .pair_dim = -1
#define shape_feature_dropout shape_dropout, .is_feature = true
#define shape_like(option_) shape_like, .first_option = option_
#define shape_loss_cosine shape_loss_vectors, .n_vectors = 2, .plain = W2
#define shape_loss_equal(plain_) shape_loss_equal, .plain = plain_
#define shape_loss_margin shape_loss_margin, .plain = W4
#define shape_loss_plain(plain_) shape_loss, .plain = plain_
#define shape_loss_triplet shape_loss_vectors, .n_vectors = 3
#define shape_max_pool(n_, outs_)                                                                  \
    shape_max_pool, .n_spatial = n_, .n_outs = outs_, .has_dilation = true
#define shape_new(option_) shape_new, .first_option = option_
#define shape_nll(least_, most_) shape_nll, .n_least = least_, .n_most = most_
#define shape_outer(equation_) shape_outer, .equation = equation_
#define shape_packed_rnn(gates_) shape_rnn, .n_gates = gates_, .is_packed = true
#define shape_pair(dim_) shape_pair, .pair_dim = dim_
#define shape_product(equation_) shape_product, .equation = equation_
#define shape_reshape shape_view, .can_copy = true
#define shape_reshape_as shape_view_as, .can_copy = true
#define shape_rnn(gates_) shape_rnn, .n_gates = gates_
#define shape_rnn_cell(gates_) shape_rnn_cell, .n_gates = gates_
#define shape_sort(outs_) shape_sort, .n_outs = outs_
#define shape_std(outs_) shape_std, .n_outs = outs_
#define shape_unsafe_chunk shape_chunk, .is_untracked = true
#define shape_unsafe_split shape_split, .is_untracked = true
#define shape_upsample(n_) shape_upsample, .n_spatial = n_
#define dtype_all_same(kinds_) dtype_all_same, .kinds = KL_KINDS_##kinds_
#define dtype_all_float dtype_all_same, .kinds = KL_KINDS_FLOAT | KL_KINDS_COMPLEX
#define dtype_compare(kinds_) dtype_compare, .kinds = KL_KINDS_##kinds_
#define dtype_like(kinds_) dtype_like, .kinds = KL_KINDS_##kinds_
#define dtype_promote(kinds_) dtype_promote, .kinds = KL_KINDS_##kinds_
#define dtype_same(kinds_) dtype_same, .kinds = KL_KINDS_##kinds_
#define dtype_to_float(kinds_) dtype_to_float, .kinds = KL_KINDS_##kinds_
#define dtype_with_indices dtype_with_indices, .kinds = KL_KINDS_FLOAT
#define dtype_cast(to_) dtype_cast, .dtype_to = KL_DTYPE_##to_
#define place_batch_norm place_batch_norm, .is_batch_norm = true
#define place_but_last(n_, reason_) place_but_last, .n_mixed = n_, .reason = reason_
#define place_cat place_cat, .is_joining = true
#define place_col2im place_but_last(2, "the batch is in channels or positions")
#define place_conv(n_)                                                                             \
    place_but_last((n_) + 1, "the batch is in channels, positions or weights of a convolution")
#define place_gradient_of place_gradient_of, .is_derivative = true
#define place_im2col place_but_last(3, "the batch is in channels or positions")
#define place_once(reason_) place_once, .reason = reason_
#define place_reduced(by_) place_reduced, .reduce = KL_REDUCE_##by_
#define place_spatial(n_) place_but_last(n_, "the batch is in positions of a window")

/* Declare the rules, which begin what a cell stands for. If one is not defined, the extension does not link: hidden names
 * are not looked up when it is loaded. */
#define FIRST(first_, ...) first_
#define NAME(...) FIRST(__VA_ARGS__, )
#define RULES(name_, call_, weight_cell, shape_cell, dtype_cell, place_cell, saves_cell, ...)      \
    KlRule NAME(shape_##shape_cell), NAME(dtype_##dtype_cell), NAME(place_##place_cell);           \
    KlSavesRule NAME(saves_##saves_cell);
#define OP(...) RULES(__VA_ARGS__, )
#define BOTH OP
#define VIEW OP
#define INPLACE OP
#define ALIAS(alias_, name_)
#define ALIASES(alias_, name_)
#pragma GCC visibility push(hidden)
#include "ops.def"
#pragma GCC visibility pop

/* The optional cells come last, as fields of KlRow. */
#define CELLS(weight_cell, shape_cell, dtype_cell, place_cell, saves_cell, ...)                    \
    .is_heavy = WEIGHT_##weight_cell, .shape = shape_##shape_cell, .dtype = dtype_##dtype_cell,    \
    .place = place_##place_cell, .saves = saves_##saves_cell, __VA_ARGS__
#define ROW(name_, call_, kind_, ...)                                                              \
    {.name = name_, .call = call_, .kind = KL_ROW_##kind_, CELLS(__VA_ARGS__, )},

#define OP(name_, call_, ...) ROW(#name_, call_, OP, __VA_ARGS__)
#define BOTH(name_, call_, ...)                                                                    \
    OP(name_, call_, __VA_ARGS__) WRITTEN(#name_ "_", call_, __VA_ARGS__)
#define VIEW(name_, call_, ...) ROW(#name_, call_, VIEW, __VA_ARGS__)
#define INPLACE(name_, call_, ...) WRITTEN(#name_, call_, __VA_ARGS__)
#define WRITTEN(name_, call_, ...) ROW(name_, call_, INPLACE, __VA_ARGS__, .effects = 1)
#define ALIAS(alias_, name_)
#define ALIASES(alias_, name_)

const KlRow kl_ops_rows[] = {
#include "ops.def"
};

const uint32_t kl_ops_n_rows = KL_N_OPS;

static const struct {
    const char *name;
    const KlRow *row;
} aliases[] = {
#define OP(...)
#define BOTH(...)
#define VIEW(...)
#define INPLACE(...)
#define ALIAS(alias_, name_) {#alias_, &kl_ops_rows[KL_OP_##name_]},
#define ALIASES(alias_, name_) ALIAS(alias_, name_){#alias_ "_", &kl_ops_rows[KL_OP_##name_##_]},
#include "ops.def"
};

bool
kl_ops_is_detached(const KlRow *row)
{
    return row->kind == KL_ROW_VIEW && row->keeps.has_no_gradient;
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

static const KlHeld nothing = {0};

const KlHeld *
kl_ops_held(const KlRow *row)
{
    return row->held != NULL ? row->held : &nothing;
}

static const KlAmount one_in = {.ins = 1};

#define REDUCTION(name_, n_parts_, is_early_, saved_, ...)                                         \
    [KL_REDUCE_##name_] = {#name_, n_parts_, is_early_, saved_, {__VA_ARGS__}},
const KlReduction kl_ops_reductions[KL_N_REDUCES] = {
#include "reductions.def"
};
#undef REDUCTION

/* The statistics for batch_norm and softmax in chunks: they save only the input, and one call makes its gradient. Those
 * of batch_norm are pooled chunk after chunk on a CPU (`_pooled` in sums.py). */
static const KlParts statistics = {
    2, 2, {6, 8}, {2.5, 2.25}, {5.25, 5}, NULL, HELD(.run = {.ins = 1}), false, 0};
static const KlParts pooled = {2,     3, {0, 10}, {0, 2}, {1, 21}, NULL, HELD(.run = {.ins = 1}),
                               false, 0};

const KlParts *
kl_ops_parts(KlReduce reduce, bool is_for_chunks, bool is_on_cpu)
{
    const KlParts *parts = reduce == KL_REDUCE_VAR && is_on_cpu ? &pooled : &statistics;
    return is_for_chunks ? parts : &kl_ops_reductions[reduce].parts;
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

KlStatus
kl_ops_reserve_outs(KlInferred *result, uint32_t n)
{
    KlStatus status = KL_RESERVE(result, outs, n);
    if (status == KL_OK) {
        (void)kl_rules_outs(result, n);
    }
    return status;
}
