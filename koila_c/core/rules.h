/* SPDX-License-Identifier: Apache-2.0 */
/* rules.h - every word that a cell of ops.def can say, and the tools that rules share.
 *
 * For ops.c, infer.c and rules_*.c only. A rule is a function of one call: shape rules make the outputs
 * (n_outs, shape, strides, alias), dtype rules fill their dtypes, place rules fill result->split and the
 * outputs' places, saves rules fill a zeroed KlSaves. infer.c has already made sure that no tensor of the
 * call is missing or of a dtype we do not know; it calls a place rule only where an input is in ROWS,
 * with one axis, that has rows, and with this to start from: mode ROWS, every input's place its own,
 * every output WHOLE. Whatever a rule does not understand it answers with KL_DECLINED. */
#ifndef KL_RULES_H
#define KL_RULES_H

#include "infer.h"

/* --- arguments (rules_args.c): KL_DECLINED where the argument is of another kind ------------------- */

/* Present and not None. */
bool kl_rules_is_given(const KlCall *call, uint32_t arg);

/* An int, `fallback` where it is absent or None. A bool is an int, as in Python. */
KlStatus kl_rules_int(const KlCall *call, uint32_t arg, int64_t fallback, int64_t *value);
KlStatus kl_rules_bool(const KlCall *call, uint32_t arg, bool fallback, bool *value);
/* A float or an int. */
KlStatus kl_rules_float(const KlCall *call, uint32_t arg, double fallback, double *value);
KlStatus kl_rules_text(const KlCall *call, uint32_t arg, const char *fallback, const char **value);
/* A tuple of ints or one int; n is 0 where it is absent or None. `value` must outlive `*ints`. */
KlStatus kl_rules_ints(const KlCall *call, uint32_t arg, int64_t *value, const int64_t **ints,
                       uint32_t *n);

/* A dim of a value with `n_dims`, wrapped to 0 .. n_dims - 1; a 0-dim value counts as one of one dim. */
KlStatus kl_rules_dim(const KlCall *call, uint32_t arg, int64_t fallback, int32_t n_dims,
                      int32_t *dim, KlError *error);
/* The same, where the rule for shapes has found it to be legal. */
int32_t kl_rules_legal_dim(const KlCall *call, uint32_t arg, int64_t fallback, int32_t n_dims);
KlStatus kl_rules_wrap(int64_t dim, int32_t n_dims, int32_t *wrapped, KlError *error);
/* A set of dims, bit d for dim d; none given, None or an empty tuple: all of them. */
KlStatus kl_rules_dims(const KlCall *call, uint32_t arg, int32_t n_dims, uint32_t *dims,
                       KlError *error);

/* The meta of a tensor argument, or NULL where the argument is no tensor. */
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

/* The first argument of kind DTYPE, or `fallback`. */
KlDtype kl_rules_dtype(const KlCall *call, KlDtype fallback);

/* --- shapes and strides (rules_shape.c, rules_strides.c) -------------------------------------------- */

/* One output with the shape of `like`, strides not known. */
KlStatus kl_rules_out(KlInferred *result, const KlMeta *like, KlError *error);

/* The same, row by row. */
KlStatus kl_rules_out_contiguous(KlInferred *result, const KlMeta *like, KlError *error);
/* One output of that shape; declines more than KL_DIMS_MAX dims. */
KlStatus kl_rules_out_shape(KlInferred *result, const int64_t *shape, int32_t n_dims,
                            KlError *error);
/* Every output is a view of (or the same as) that input. */
void kl_rules_alias(KlInferred *result, KlAlias alias, uint32_t input);
/* The tensor in args[arg] lends its shape or dtype and gets no gradient. */
void kl_rules_lend(const KlCall *call, KlInferred *result, uint32_t arg);
/* Widen `out`'s shape by broadcasting with `meta`'s. */
KlStatus kl_rules_broadcast(KlMeta *out, const KlMeta *meta, KlError *error);
/* The strides torch's TensorIterator gives a new elementwise output of `out`'s shape. `has_number`: a
 * Python number takes part. Unknown strides of an operand leave the output's unknown. */
void kl_rules_iterate(KlMeta *out, const KlMeta *const *operands, uint32_t n, bool has_number);
/* Take back what was said of the results' layout where a GPU chooses another. */
void kl_rules_settle_layout(const KlCall *call, KlInferred *result);

/* The strides of empty_like(meta): the same if dense, else dense in the same order. */
void kl_rules_preserve(KlMeta *out, const KlMeta *meta);
bool kl_rules_is_channels_last(const KlMeta *meta); /* NHWC in memory, without holes */
void kl_rules_set_channels_last(KlMeta *meta);
/* torch would take these 4 or 5 dims for NHWC; unknown strides may be. */
bool kl_rules_is_like_channels_last(const KlMeta *meta);
/* Every element of `meta` has its own place in a block without holes. */
bool kl_rules_is_dense(const KlMeta *meta);
/* `input` expanded to `sizes`, where -1 keeps a size: shape and strides of Tensor.expand. */
KlStatus kl_rules_expand(const KlMeta *input, KlMeta *out, const int64_t *sizes, int32_t n,
                         KlError *error);
/* Strides of a view of `meta` with `out`'s shape (same number of elements), or false: not viewable. */
bool kl_rules_view_strides(const KlMeta *meta, KlMeta *out);

/* --- dtypes (rules_dtype.c) -------------------------------------------------------------------------- */

KlDtype kl_rules_promote(KlDtype left, KlDtype right);
bool kl_rules_is_integral(KlDtype dtype); /* bool counts */
/* torch.result_type of args[first] .. args[first + n - 1]: tensors, 0-dim tensors and numbers. */
KlStatus kl_rules_result_type(const KlCall *call, uint32_t first, uint32_t n, KlDtype *dtype);
bool kl_rules_can_cast(KlDtype from, KlDtype to);
void kl_rules_set_dtypes(KlInferred *result, KlDtype dtype);

/* --- places (rules_digits.c): see NOTE [digits] there ------------------------------------------------- */

/* Rows of the call's axis. */
static inline int64_t
kl_rules_rows(const KlCall *call, const KlInferred *result)
{
    return call->axis_rows[result->split.axis];
}

/* The node runs on whole values because of `reason`, a static string. Returns KL_OK. */
KlStatus kl_rules_once(KlInferred *result, const char *reason);
/* So too; dim `dim` of the outputs, below 0: none, is rows again for what follows, of a batch of its own. */
KlStatus kl_rules_once_again(KlInferred *result, const char *reason, int32_t dim);
/* Of the dims first .. last - 1 the largest; the outermost of several. */
int32_t kl_rules_largest_dim(const KlMeta *meta, int32_t first, int32_t last);
/* The rows are reduced away: outputs are WHOLE. Returns KL_OK. */
KlStatus kl_rules_reduce(KlInferred *result, KlReduce reduce);
/* So, unless the rows went along dim_map. Returns KL_OK. */
KlStatus kl_rules_reduce_moved(const KlCall *call, KlInferred *result, KlReduce reduce);

/* Size of the dim that holds the digit: outer * rows * inner. */
static inline int64_t
kl_rules_span(const KlPlace *place, int64_t rows)
{
    return place->outer * rows * place->inner;
}

/* rules_order.c: the order that an input of the call is in, or has to do with; KL_ID_NONE: none. */
KlAxisId kl_rules_order(const KlCall *call);
/* Whether a call goes by rows in its order, for a reason of its own: `result` is filled then. */
bool kl_rules_goes_in_order(const KlCall *call, KlAxisId order, KlInferred *result);
/* Whether nothing depends on how the rows are ordered in a call that was placed as any other. */
bool kl_rules_keeps_order(const KlCall *call, KlAxisId order, const KlInferred *result);
/* What the results are to the order then. */
void kl_rules_pass_role(const KlCall *call, KlAxisId order, KlInferred *result);

/* First input in ROWS; there is one in every call a place rule sees. */
uint32_t kl_rules_first_rows(const KlCall *call);

/* Make `input` follow the rows of `want`, whose dim is a dim of that input: an input in ROWS must agree,
 * a WHOLE one of full size there is sliced, one of size 1 there is given whole. A dim below 0 says that
 * the input lacks it. NULL, or the reason why it cannot. */
const char *kl_rules_follow(const KlCall *call, KlInferred *result, uint32_t input,
                            const KlPlace *want);

/* The same where nothing broadcasts: a WHOLE input must have the full size. */
const char *kl_rules_match(const KlCall *call, KlInferred *result, uint32_t input,
                           const KlPlace *want);

/* Find the digit `place` of a value of shape `from` in a value of the same elements in row-major order
 * of shape `to`; false: it is cut in two. */
bool kl_rules_factor(const KlMeta *from, const KlPlace *place, int64_t rows, const KlMeta *to,
                     KlPlace *found);

/* The int of args[arg] (entry, part) is scale * rows and follows the chunk; false: no room. */
bool kl_rules_rewrite(KlInferred *result, uint32_t arg, uint32_t entry, uint8_t part,
                      int64_t scale);

/* --- the words --------------------------------------------------------------------------------------- */

#define KL_SHAPE(word) KlStatus shape_##word(const KlCall *call, KlInferred *result, KlError *error)
#define KL_DTYPE(word) KlStatus dtype_##word(const KlCall *call, KlInferred *result, KlError *error)
#define KL_PLACE(word) KlStatus place_##word(const KlCall *call, KlInferred *result, KlError *error)
#define KL_SAVES(word)                                                                             \
    void saves_##word(const KlCall *call, const KlInferred *result, KlSaves *saves)

/* elementwise: rules_shape.c */
KL_SHAPE(broadcast);   /* all tensors broadcast, numbers in words 0 and 1 as 0-dim tensors */
KL_SHAPE(tensor_pair); /* broadcast, and both words are tensors */
KL_SHAPE(tensors);     /* all tensors broadcast, numbers are parameters */
KL_SHAPE(swapped);     /* broadcast, the first two operands in the other order */
KL_SHAPE(same);        /* that of the first input, fresh memory in its order */
KL_SHAPE(isfinite);
KL_SHAPE(isinf);
KL_SHAPE(preserve);  /* that of the first input, strides as empty_like's */
KL_SHAPE(row_major); /* that of the first input, row-major */
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

/* rules_dtype.c: "same" is the first input's; what torch refuses is declined. Words for
 * the same of some kinds of dtypes only, such as same_float, are in ops.c. */
KL_DTYPE(same);
KL_DTYPE(abs); /* complex gives real */
KL_DTYPE(square);
KL_DTYPE(to_float);      /* ints become the default dtype */
KL_DTYPE(promote);       /* torch's promotion of words 0 and 1 */
KL_DTYPE(promote_float); /* and ints become the default dtype */
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

/* rules_like.c: casts that need no copy give the input itself */
KL_DTYPE(cast);
KL_DTYPE(like);
KL_DTYPE(to);
KL_DTYPE(to_dense);
KL_DTYPE(type);
KL_DTYPE(type_as);

/* rules_place.c */
KL_PLACE(rowwise);  /* every row by itself, inputs aligned by broadcasting from the right */
KL_PLACE(moved);    /* the rows go with dim_map; taken apart: ONCE */
KL_PLACE(along);    /* the same, for ops that mix a dim */
KL_PLACE(scan);     /* along, and by rows where it goes on from what is given */
KL_PLACE(reduced);  /* the same, for a reduction that is split */
KL_PLACE(constant); /* reads no row, only sizes */

/* beside the shape rule of the same op */
KL_PLACE(cat);
KL_PLACE(chunk);
KL_PLACE(expand);
KL_PLACE(factor); /* the digit is found again in the output */
KL_PLACE(factor_other);
KL_PLACE(factor_sizes); /* and in the sizes of word 1 */
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

/* rules_saves.c: what more than words say; those of words are in ops.c */
void kl_rules_keep(const KlCall *call, const KlInferred *result, KlSaves *saves);
KL_SAVES(index);
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
