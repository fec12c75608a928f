/* SPDX-License-Identifier: Apache-2.0 */
/* rules.h - begins the definition of a rule that cells of ops.def name, and declares the functions that rules share.
 *
 * For ops.c, infer.c and rules_*.c only. A rule is a function of one call: shape rules make the outputs
 * (n_outs, shape, strides, alias), dtype rules fill their dtypes, place rules fill result->split and the
 * outputs' places, saves rules fill a zeroed KlSaves. infer.c has already checked that no tensor of the
 * call is missing or has an unknown dtype. It calls a place rule only if an input has rows (is in ROWS), over
 * one axis that is not empty, and starts with mode ROWS, each input at its own place, and each output WHOLE.
 * A rule returns KL_DECLINED for anything that it does not support. */
#pragma once

#include "infer.h"

/* --- arguments (rules_args.c) ------------------------------------------------------------------------
 * A rule reads arguments without asking whether that failed: if it did, the function returns the fallback, or zero, and
 * infer.c declines or refuses the call after the rule, whatever the rule returned. */

/* Whether an argument is present and not None. */
bool kl_rules_is_given(const KlCall *call, uint32_t arg);
/* Decline the call unless it is what the rule can describe. The rule goes on, so the rest must be safe for any call. */
void kl_rules_require(const KlCall *call, bool is_met);
/* Likewise, leave a call that torch refuses to torch. What was found first counts. */
void kl_rules_check(const KlCall *call, bool is_legal);

/* Get an int; `fallback` if it is absent or None. A bool is an int, as in Python. */
int64_t kl_rules_int(const KlCall *call, uint32_t arg, int64_t fallback);
bool kl_rules_bool(const KlCall *call, uint32_t arg, bool fallback);
/* Get a float or an int. */
double kl_rules_float(const KlCall *call, uint32_t arg, double fallback);
const char *kl_rules_text(const KlCall *call, uint32_t arg, const char *fallback);
/* Get a tuple of ints, or one int; n is 0 if it is absent or None. */
const int64_t *kl_rules_ints(const KlCall *call, uint32_t arg, uint32_t *n);

/* Get a dim of a value with `n_dims` dims, wrapped to 0 .. n_dims - 1; a 0-dim value counts as one of one dim. */
int32_t kl_rules_dim(const KlCall *call, uint32_t arg, int64_t fallback, int32_t n_dims);
int32_t kl_rules_wrap(const KlCall *call, int64_t dim, int32_t n_dims);
/* Get a set of dims, bit d for dim d; an absent argument, None or an empty tuple means all dims. */
uint32_t kl_rules_dims(const KlCall *call, uint32_t arg, int32_t n_dims);

/* Return the meta of a tensor argument, or NULL if the argument is no tensor. */
static inline const KlMeta *
kl_rules_input(const KlCall *call, uint32_t arg)
{
    return arg < call->n_args && call->args[arg].kind == KL_ARG_VALUE
               ? call->inputs[call->args[arg].input]
               : NULL;
}

/* Return a tensor argument that has `least` to `most` dims. Decline others: the rule goes on with `least` dims of size 1. */
const KlMeta *kl_rules_tensor(const KlCall *call, uint32_t arg, int32_t least, int32_t most);
/* Likewise; NULL if it is absent or None. */
const KlMeta *kl_rules_optional(const KlCall *call, uint32_t arg, int32_t least, int32_t most);

static inline bool
kl_rules_is_number(const KlArg *arg)
{
    return arg->kind == KL_ARG_INT || arg->kind == KL_ARG_FLOAT || arg->kind == KL_ARG_BOOL ||
           arg->kind == KL_ARG_COMPLEX;
}

/* Return the first argument of a kind, or NULL. */
const KlArg *kl_rules_find(const KlCall *call, KlArgKind kind);
/* Return the first argument of kind DTYPE, or `fallback`. */
KlDtype kl_rules_dtype(const KlCall *call, KlDtype fallback);

/* --- shapes and strides (rules_shape.c, rules_strides.c) -------------------------------------------- */

/* Make `n` outputs, at most KL_OUTS_FEW, zeroed and WHOLE; infer.c has reserved the memory. */
KlMeta *kl_rules_outs(KlInferred *result, uint32_t n);
/* Likewise, with the shape of `like` and unknown strides. */
KlMeta *kl_rules_outs_like(KlInferred *result, uint32_t n, const KlMeta *like);
/* Likewise, one output. */
KlMeta *kl_rules_out(KlInferred *result, const KlMeta *like);
/* Likewise, contiguous. Return KL_OK. */
KlStatus kl_rules_out_contiguous(KlInferred *result, const KlMeta *like);
/* Make the results row-major. */
void kl_rules_set_contiguous(KlInferred *result);
/* Return the shape and strides of the first input without the dims of the set, or with size 1 instead. Set dim_map. */
KlMeta kl_rules_without(const KlCall *call, KlInferred *result, uint32_t dims, bool is_kept);
/* Make every output a view of (or the same as) that input. */
void kl_rules_alias(KlInferred *result, KlAlias alias, uint32_t input);
/* Note that only the shape or dtype of the tensor in args[arg] is read, so that it gets no gradient. */
void kl_rules_lend(const KlCall *call, KlInferred *result, uint32_t arg);
/* Widen `out`'s shape by broadcasting with `meta`'s; if that is impossible, the call is refused. */
void kl_rules_broadcast(const KlCall *call, KlMeta *out, const KlMeta *meta);
/* Likewise with all tensors of the call. */
void kl_rules_broadcast_all(const KlCall *call, KlMeta *out);
/* Whether `meta` broadcasts to the shape of `to` as it is. */
bool kl_rules_fits(const KlMeta *meta, const KlMeta *to);
/* Whether both have these first dims, with the same sizes. */
bool kl_rules_are_alike(const KlMeta *left, const KlMeta *right, int32_t n_dims);
bool kl_rules_is_shape(const KlMeta *left, const KlMeta *right);
/* Set the strides that torch's TensorIterator gives a new elementwise output of `out`'s shape. `has_number`: an
 * operand is a Python number. If an operand has unknown strides, so has the output. */
void kl_rules_iterate(KlMeta *out, const KlMeta *const *operands, uint32_t n, bool has_number);
/* Make the strides of the results unknown if a GPU may choose others. */
void kl_rules_settle_layout(const KlCall *call, KlInferred *result);

/* Set the strides of empty_like(meta): the same if `meta` is dense, else dense in the same order of dims. */
void kl_rules_preserve(KlMeta *out, const KlMeta *meta);
bool kl_rules_is_channels_last(const KlMeta *meta); /* NHWC in memory, without holes */
void kl_rules_set_channels_last(KlMeta *meta);
/* Whether torch would treat these 4 or 5 dims as NHWC; true for unknown strides. */
bool kl_rules_is_like_channels_last(const KlMeta *meta);
/* Whether the elements fill a block of memory without gaps or overlaps. */
bool kl_rules_is_dense(const KlMeta *meta);
/* Set shape and strides of input.expand(sizes), where -1 keeps a size; if that is impossible, the call is refused. */
void kl_rules_expand(const KlCall *call, const KlMeta *input, KlMeta *out, const int64_t *sizes,
                     int32_t n);
/* Set the strides of a view of `meta` with `out`'s shape (same number of elements); false: there is no such view. */
bool kl_rules_view_strides(const KlMeta *meta, KlMeta *out);

/* --- dtypes (rules_dtype.c) -------------------------------------------------------------------------- */

KlDtype kl_rules_promote(KlDtype left, KlDtype right);
bool kl_rules_is_integral(KlDtype dtype); /* bool counts */
bool kl_rules_can_cast(KlDtype from, KlDtype to);
/* Set the dtype of every output. Return KL_OK. */
KlStatus kl_rules_set_dtypes(KlInferred *result, KlDtype dtype);

/* --- places (rules_digits.c): see NOTE [digits] there ------------------------------------------------- */

/* Return the number of rows of the call's axis. */
static inline int64_t
kl_rules_rows(const KlCall *call, const KlInferred *result)
{
    return call->axis_rows[result->split.axis];
}

/* Make the node run once, on whole values, because of `reason`, a static string. Return KL_OK. */
KlStatus kl_rules_once(KlInferred *result, const char *reason);
/* Likewise; for later calls dim `dim` of the outputs is the rows of a new axis (below 0: no dim is). */
KlStatus kl_rules_once_again(KlInferred *result, const char *reason, int32_t dim);
/* Return the largest of the dims first .. last - 1; of equal ones, the outermost. */
int32_t kl_rules_largest_dim(const KlMeta *meta, int32_t first, int32_t last);
/* Make the node run by rows, with the rows of its one output at `place`. Return KL_OK. */
KlStatus kl_rules_at(KlInferred *result, KlPlace place);
/* Make the node reduce the rows, so that its outputs are WHOLE. Return KL_OK. */
KlStatus kl_rules_reduce(KlInferred *result, KlReduce reduce);
/* Likewise, unless dim_map says that the rows are in a dim of the output. Return KL_OK. */
KlStatus kl_rules_reduce_moved(const KlCall *call, KlInferred *result, KlReduce reduce);

/* Return the size of the dim that holds the rows: outer * rows * inner. */
static inline int64_t
kl_rules_span(const KlPlace *place, int64_t rows)
{
    return place->outer * rows * place->inner;
}

/* rules_order.c: return the order in which an input's rows are, or for which it has a role; KL_ID_NONE: none. */
KlAxisId kl_rules_order(const KlCall *call);
/* Try the rules for calls that read an order. If one applies, fill `result` and return true. */
bool kl_rules_goes_in_order(const KlCall *call, KlAxisId order, KlInferred *result);
/* Whether a call, placed by the rule of its row, gives each row the same result in any order of the rows. */
bool kl_rules_keeps_order(const KlCall *call, KlAxisId order, const KlInferred *result);
/* Set the roles of the results for the order. */
void kl_rules_pass_role(const KlCall *call, KlAxisId order, KlInferred *result);

/* Return the first input in ROWS; every call that a place rule sees has one. */
uint32_t kl_rules_first_rows(const KlCall *call);

/* Make `input` follow the rows of `want`, whose dim is a dim of that input. An input in ROWS must agree; a WHOLE one
 * is sliced if it has the full size there, and read whole if it has size 1. A dim below 0: the input lacks that dim.
 * Return NULL, or the reason why it cannot follow. */
const char *kl_rules_follow(const KlCall *call, KlInferred *result, uint32_t input,
                            const KlPlace *want);

/* Likewise for ops that do not broadcast: a WHOLE input must have the full size. */
const char *kl_rules_match(const KlCall *call, KlInferred *result, uint32_t input,
                           const KlPlace *want);

/* Find where the rows, which lie at `place` in a value of shape `from`, lie in a value of shape `to` with the same
 * elements in row-major order; false: they are split over two dims, or the value is empty. */
bool kl_rules_factor(const KlMeta *from, const KlPlace *place, int64_t rows, const KlMeta *to,
                     KlPlace *found);

/* Note that the int of args[arg] (entry, part) is scale * rows, so that it follows the chunk; false: too many. */
bool kl_rules_rewrite(KlInferred *result, uint32_t arg, uint32_t entry, uint8_t part,
                      int64_t scale);

/* --- labels (rules_labels.c): see NOTE [labels] there ----------------------------------------- */

/* A letter for each dim of a value (NOTE [labels] in rules_labels.c). Equal letters are aligned; 0: no letter. */
typedef struct KlLabels {
    uint8_t of[KL_DIMS_MAX]; /* [n_dims] */
} KlLabels;

/* Letters of dims of products and tables; those of batch dims are 1, 2, ... */
enum { KL_LETTER_ROW = 20, KL_LETTER_SUM, KL_LETTER_COLUMN };

enum { KL_LABELS_MAX = 8 }; /* the inputs that a rule can label; later ones have no letters */

/* The letters of a call's inputs and outputs. */
typedef struct KlWiring {
    KlLabels inputs[KL_LABELS_MAX]; /* [n_inputs] */
    KlLabels outs[4];               /* [n_outs] */
    KlReduce reduce;                /* rows that no output has: how they are combined; NONE: ONCE */
    const char *reason; /* ... with this reason; also for rows in a dim without letter */
} KlWiring;

/* Place a call: find the letter of the rows, slice each input that has it, and place the outputs. */
KlStatus kl_rules_wire(const KlCall *call, KlInferred *result, const KlWiring *wiring);

/* Likewise, with these letters for the first input and for every output; other inputs are read whole. */
KlStatus kl_rules_wire_alike(const KlCall *call, KlInferred *result, KlLabels labels,
                             const char *reason);

/* Return the letters 1 .. n_dims, from the left. */
KlLabels kl_rules_letters(int32_t n_dims);
/* Return the letters of an operand with `n_dims` dims that broadcasts from the right to `full`, of n_dims_full. */
KlLabels kl_rules_letters_right(KlLabels full, int32_t n_dims_full, int32_t n_dims);

/* --- small tools (rules_labels.c) ------------------------------------------------------------- */

/* Whether the strides are those of a new row-major tensor, including dims of size 1 (which torch's choice
 * of memory format reads). */
bool kl_rules_is_plain(const KlMeta *meta);
/* Set the strides of a new output: row-major if every tensor of the call is plain, else unknown. */
void kl_rules_settle_plain(const KlCall *call, KlInferred *result);
/* kl_rules_out, then kl_rules_settle_plain. Return KL_OK. */
KlStatus kl_rules_out_plain(const KlCall *call, KlInferred *result, const KlMeta *like);
/* kl_rules_out, then kl_rules_settle_format by the first input. Return KL_OK. */
KlStatus kl_rules_out_format(const KlCall *call, KlInferred *result, const KlMeta *like);
/* As kl_rules_settle_plain, considering torch's memory formats: outputs of 4 dims are channels_last if one of the first
 * `n_deciders` inputs, all of 4 dims, suggests it, else row-major. Other numbers of dims: as
 * kl_rules_settle_plain. */
void kl_rules_settle_format(const KlCall *call, KlInferred *result, uint32_t n_deciders);
/* Note that args[arg] is saved, if it is a tensor. */
void kl_rules_save(const KlCall *call, KlSaves *saves, uint32_t arg);
/* Whether args[arg] is a tensor that requires grad. */
bool kl_rules_needs_grad(const KlCall *call, uint32_t arg);
/* Note that a new tensor of n elements is saved. */
void kl_rules_save_new(const KlInferred *result, KlSaves *saves, int64_t n, KlDtype dtype);
/* Whether all dims but the last `n_last` can be merged into one without a copy. */
bool kl_rules_merges(const KlMeta *meta, int32_t n_last);
/* Get args[arg] as `n` numbers, one for each spatial dim: a tuple, one number for all, or the fallback. */
void kl_rules_spatial(const KlCall *call, uint32_t arg, int32_t n, const int64_t *fallback,
                      int64_t *values); /* rules_conv.c */
/* Likewise, but the argument is required, and a tuple must have `n` entries; else `values` stay as they are. */
void kl_rules_spatial_each(const KlCall *call, uint32_t arg, int32_t n, int64_t *values);

/* --- losses (rules_loss.c, rules_loss_nll.c) -------------------------------------------------- */

/* Whether the loss's argument `reduction`, an int, is not "none". */
bool kl_rules_reduction(const KlCall *call);
/* Make the output of a loss: with the shape of its terms, or a scalar. */
KlStatus kl_rules_make_loss(const KlCall *call, KlInferred *result, const KlMeta *terms);

/* --- the rules --------------------------------------------------------------------------------------- */

/* The head of the definition of the rule for a cell `word` of ops.def; ops.c declares all rules that cells name. */
#define KL_SHAPE(word) KL_RULE(shape_##word)
#define KL_DTYPE(word) KL_RULE(dtype_##word)
#define KL_PLACE(word) KL_RULE(place_##word)
#define KL_RULE(name)                                                                              \
    KlRule name;                                                                                   \
    KlStatus name(const KlCall *call __attribute__((unused)),                                      \
                  KlInferred *result __attribute__((unused)))
#define KL_SAVES(word)                                                                             \
    KlSavesRule saves_##word;                                                                      \
    void saves_##word(const KlCall *call __attribute__((unused)),                                  \
                      const KlInferred *result __attribute__((unused)), KlSaves *saves)

/* Rules that other rules call, and that infer.c knows. */
KlRule shape_alias, shape_broadcast, shape_cast, shape_itself, shape_like, shape_tensor_pair;
KlRule dtype_all_same, dtype_promote, dtype_same, dtype_value_index;
KlRule place_along, place_moved, place_rowwise, place_scan;
KlSavesRule kl_rules_keep; /* as KlRow.keeps says */
KlSavesRule saves_all, saves_index;
