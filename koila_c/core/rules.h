/* SPDX-License-Identifier: Apache-2.0 */
/* rules.h - declares all rules that cells of ops.def can name, and the functions that rules share.
 *
 * For ops.c, infer.c and rules_*.c only. A rule is a function of one call: shape rules make the outputs
 * (n_outs, shape, strides, alias), dtype rules fill their dtypes, place rules fill result->split and the
 * outputs' places, saves rules fill a zeroed KlSaves. infer.c has already checked that no tensor of the
 * call is missing or has an unknown dtype. It calls a place rule only if an input has rows (is in ROWS), over
 * one axis that is not empty, and starts with mode ROWS, each input at its own place, and each output WHOLE.
 * A rule returns KL_DECLINED for anything that it does not support. */
#ifndef KL_RULES_H
#define KL_RULES_H

#include "infer.h"

/* --- arguments (rules_args.c): KL_DECLINED if the argument has another kind ------------------------ */

/* Whether an argument is present and not None. */
bool kl_rules_is_given(const KlCall *call, uint32_t arg);

/* Get an int; `fallback` if it is absent or None. A bool is an int, as in Python. */
KlStatus kl_rules_int(const KlCall *call, uint32_t arg, int64_t fallback, int64_t *value);
KlStatus kl_rules_bool(const KlCall *call, uint32_t arg, bool fallback, bool *value);
/* Get a float or an int. */
KlStatus kl_rules_float(const KlCall *call, uint32_t arg, double fallback, double *value);
KlStatus kl_rules_text(const KlCall *call, uint32_t arg, const char *fallback, const char **value);
/* Get a tuple of ints, or one int; n is 0 if it is absent or None. */
KlStatus kl_rules_ints(const KlCall *call, uint32_t arg, const int64_t **ints, uint32_t *n);

/* Get a dim of a value with `n_dims` dims, wrapped to 0 .. n_dims - 1; a 0-dim value counts as one of one dim. */
KlStatus kl_rules_dim(const KlCall *call, uint32_t arg, int64_t fallback, int32_t n_dims,
                      int32_t *dim, KlError *error);
/* Likewise, after the shape rule has checked that the dim is legal. */
int32_t kl_rules_legal_dim(const KlCall *call, uint32_t arg, int64_t fallback, int32_t n_dims);
KlStatus kl_rules_wrap(int64_t dim, int32_t n_dims, int32_t *wrapped, KlError *error);
/* Get a set of dims, bit d for dim d; an absent argument, None or an empty tuple means all dims. */
KlStatus kl_rules_dims(const KlCall *call, uint32_t arg, int32_t n_dims, uint32_t *dims,
                       KlError *error);

/* Return the meta of a tensor argument, or NULL if the argument is no tensor. */
static inline const KlMeta *
kl_rules_input(const KlCall *call, uint32_t arg)
{
    return arg < call->n_args && call->args[arg].kind == KL_ARG_VALUE
               ? call->inputs[call->args[arg].input]
               : NULL;
}

static inline bool
kl_rules_is_number(const KlArg *arg)
{
    return arg->kind == KL_ARG_INT || arg->kind == KL_ARG_FLOAT || arg->kind == KL_ARG_BOOL ||
           arg->kind == KL_ARG_COMPLEX;
}

/* Return the first argument of kind DTYPE, or `fallback`. */
KlDtype kl_rules_dtype(const KlCall *call, KlDtype fallback);

/* --- shapes and strides (rules_shape.c, rules_strides.c) -------------------------------------------- */

/* Make one output with the shape of `like` and unknown strides. */
KlStatus kl_rules_out(KlInferred *result, const KlMeta *like, KlError *error);

/* Likewise, contiguous. */
KlStatus kl_rules_out_contiguous(KlInferred *result, const KlMeta *like, KlError *error);
/* Make one output of that shape; decline more than KL_DIMS_MAX dims. */
KlStatus kl_rules_out_shape(KlInferred *result, const int64_t *shape, int32_t n_dims,
                            KlError *error);
/* Make every output a view of (or the same as) that input. */
void kl_rules_alias(KlInferred *result, KlAlias alias, uint32_t input);
/* Note that only the shape or dtype of the tensor in args[arg] is read, so that it gets no gradient. */
void kl_rules_lend(const KlCall *call, KlInferred *result, uint32_t arg);
/* Widen `out`'s shape by broadcasting with `meta`'s. */
KlStatus kl_rules_broadcast(KlMeta *out, const KlMeta *meta, KlError *error);
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
/* Set shape and strides of input.expand(sizes), where -1 keeps a size. */
KlStatus kl_rules_expand(const KlMeta *input, KlMeta *out, const int64_t *sizes, int32_t n,
                         KlError *error);
/* Set the strides of a view of `meta` with `out`'s shape (same number of elements); false: there is no such view. */
bool kl_rules_view_strides(const KlMeta *meta, KlMeta *out);

/* --- dtypes (rules_dtype.c) -------------------------------------------------------------------------- */

KlDtype kl_rules_promote(KlDtype left, KlDtype right);
bool kl_rules_is_integral(KlDtype dtype); /* bool counts */
/* Find torch.result_type of args[first] .. args[first + n - 1]: tensors, 0-dim tensors and numbers. */
KlStatus kl_rules_result_type(const KlCall *call, uint32_t first, uint32_t n, KlDtype *dtype);
bool kl_rules_can_cast(KlDtype from, KlDtype to);
void kl_rules_set_dtypes(KlInferred *result, KlDtype dtype);

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

/* --- the rules --------------------------------------------------------------------------------------- */

#define KL_SHAPE(word) KlStatus shape_##word(const KlCall *call, KlInferred *result, KlError *error)
#define KL_DTYPE(word) KlStatus dtype_##word(const KlCall *call, KlInferred *result, KlError *error)
#define KL_PLACE(word) KlStatus place_##word(const KlCall *call, KlInferred *result, KlError *error)
#define KL_SAVES(word)                                                                             \
    void saves_##word(const KlCall *call, const KlInferred *result, KlSaves *saves)

/* elementwise: rules_shape.c */
KL_SHAPE(broadcast);   /* all tensors broadcast; numbers in words 0 and 1 count as 0-dim tensors */
KL_SHAPE(tensor_pair); /* broadcast; both words are tensors */
KL_SHAPE(tensors);     /* all tensors broadcast; numbers are parameters */
KL_SHAPE(swapped);     /* broadcast; the first two operands are exchanged */
KL_SHAPE(same);        /* the shape and the order of dims of the first input, new memory */
KL_SHAPE(isfinite);
KL_SHAPE(isinf);
KL_SHAPE(preserve);  /* the shape of the first input, the strides of empty_like */
KL_SHAPE(row_major); /* the shape of the first input, row-major */
KL_SHAPE(pow);
KL_SHAPE(where);
KL_SHAPE(masked_fill);
KL_SHAPE(fill);

/* copies, casts, new values: rules_like.c */
KL_SHAPE(cast);
KL_SHAPE(clone);
KL_SHAPE(contiguous);
KL_SHAPE(full_like); /* the fill value in word 1 */
KL_SHAPE(itself);
KL_SHAPE(like); /* options from word 1 on */
KL_SHAPE(new);  /* sizes in word 1 */
KL_SHAPE(new_full);

/* views: rules_view.c keeps the elements' order, rules_move.c the dims */
KL_SHAPE(flatten);
KL_SHAPE(ravel);
KL_SHAPE(reshape);
KL_SHAPE(reshape_as);
KL_SHAPE(unflatten);
KL_SHAPE(view);
KL_SHAPE(view_as);
KL_SHAPE(alias); /* the first input again */
KL_SHAPE(diagonal);
KL_SHAPE(expand);
KL_SHAPE(expand_as);
KL_SHAPE(movedim);
KL_SHAPE(narrow);
KL_SHAPE(permute);
KL_SHAPE(select);
KL_SHAPE(squeeze);
KL_SHAPE(t);
KL_SHAPE(transpose);
KL_SHAPE(unfold);
KL_SHAPE(unsqueeze);

/* rules_complex.c */
KL_SHAPE(conj);
KL_SHAPE(imag);
KL_SHAPE(real);
KL_SHAPE(view_as_complex);
KL_SHAPE(view_as_real);

/* rules_join.c, rules_repeat.c */
KL_SHAPE(cat);
KL_SHAPE(chunk);
KL_SHAPE(flip);
KL_SHAPE(repeat);
KL_SHAPE(repeat_interleave);
KL_SHAPE(roll);
KL_SHAPE(split); /* by one size or by a list of sizes */
KL_SHAPE(stack);
KL_SHAPE(tile);
KL_SHAPE(tril);
KL_SHAPE(unbind);
KL_SHAPE(unsafe_chunk);
KL_SHAPE(unsafe_split);

/* rules_reduce.c: dims in word 1, keepdim in word 2, unless the op's own word says otherwise */
KL_SHAPE(reduce);
KL_SHAPE(reduce_given); /* declines an empty tuple of dims */
KL_SHAPE(amax);
KL_SHAPE(argmax);
KL_SHAPE(kthvalue);
KL_SHAPE(max);
KL_SHAPE(median);
KL_SHAPE(mode);
KL_SHAPE(prod);
KL_SHAPE(std);
KL_SHAPE(vector_norm);
KL_SHAPE(cumulate);
KL_SHAPE(histc);
KL_SHAPE(sort);
KL_SHAPE(topk);

/* rules_index.c, rules_gather.c */
KL_SHAPE(gather);
KL_SHAPE(getitem);
KL_SHAPE(index_add);
KL_SHAPE(index_fill);
KL_SHAPE(index_select);
KL_SHAPE(select_masked);
KL_SHAPE(scatter);
KL_SHAPE(setitem);
KL_SHAPE(take_along_dim);

/* rules_dtype.c: "same" is the dtype of the first input. Dtypes that torch refuses are declined. Variants for some kinds
 * of dtypes only, such as same_float, are in ops.c. */
KL_DTYPE(same);
KL_DTYPE(abs); /* complex gives real */
KL_DTYPE(square);
KL_DTYPE(to_float);      /* ints become the default dtype */
KL_DTYPE(promote);       /* torch's promotion of words 0 and 1 */
KL_DTYPE(promote_float); /* likewise, and ints become the default dtype */
KL_DTYPE(promote_sub);
KL_DTYPE(all_float); /* all tensors of one type, float or complex */
KL_DTYPE(all_same);
KL_DTYPE(clamp);
KL_DTYPE(compare);
KL_DTYPE(div);
KL_DTYPE(index); /* int64 */
KL_DTYPE(join);
KL_DTYPE(max);
KL_DTYPE(to_all);
KL_DTYPE(to_bool);
KL_DTYPE(to_complex);
KL_DTYPE(to_mean);
KL_DTYPE(to_sum); /* ints become int64; a dtype may be given */
KL_DTYPE(to_var);
KL_DTYPE(value_index);
KL_DTYPE(vector_norm);
KL_DTYPE(where);
KL_DTYPE(where_method);

/* rules_like.c: casts that need no copy return the input itself */
KL_DTYPE(cast);
KL_DTYPE(like);
KL_DTYPE(to);
KL_DTYPE(to_dense);
KL_DTYPE(type);
KL_DTYPE(type_as);

/* rules_place.c */
KL_PLACE(rowwise);  /* each row on its own; inputs are aligned from the right, by broadcasting */
KL_PLACE(moved);    /* the rows move by dim_map; ONCE if their dim is gone */
KL_PLACE(along);    /* likewise, for ops that mix a dim */
KL_PLACE(scan);     /* along; by rows if the call is given the totals of earlier chunks */
KL_PLACE(reduced);  /* along, or a reduction that is split if the rows' dim is gone */
KL_PLACE(constant); /* reads only sizes, no rows */

/* in the file of the op's shape rule */
KL_PLACE(cat);
KL_PLACE(chunk);
KL_PLACE(expand);
KL_PLACE(factor); /* kl_rules_factor finds the rows in the output */
KL_PLACE(factor_other);
KL_PLACE(factor_sizes); /* likewise, and in the sizes of word 1 */
KL_PLACE(gather);
KL_PLACE(getitem);
KL_PLACE(histc);
KL_PLACE(index_add);
KL_PLACE(index_fill);
KL_PLACE(index_select);
KL_PLACE(select_masked);
KL_PLACE(max);
KL_PLACE(narrow);
KL_PLACE(repeat);
KL_PLACE(repeat_interleave);
KL_PLACE(scatter);
KL_PLACE(setitem);
KL_PLACE(split);
KL_PLACE(squeeze);
KL_PLACE(stack);
KL_PLACE(take_along_dim);
KL_PLACE(unflatten);
KL_PLACE(vector_norm);

/* rules_saves.c: cells `saves` that are functions; the others are macros in ops.c */
void kl_rules_keep(const KlCall *call, const KlInferred *result, KlSaves *saves);
KL_SAVES(index);
KL_SAVES(scatter_reduce);
KL_SAVES(select_masked);
KL_SAVES(setitem);
KL_SAVES(log_sigmoid);
KL_SAVES(max);
KL_SAVES(roll);
KL_SAVES(pow);
KL_SAVES(softmax);
KL_SAVES(input_indices);

#include "rules_nn.h"

#endif
