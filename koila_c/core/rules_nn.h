/* SPDX-License-Identifier: Apache-2.0 */
/* rules_nn.h - declares the rules of the ops in ops_nn.def: products, layers, losses, attention, draws. */
#ifndef KL_RULES_NN_H
#define KL_RULES_NN_H

/* --- labels (rules_labels.c): see NOTE [labels] there ----------------------------------------- */

/* A letter for each dim of a value (NOTE [labels] in rules_labels.c). Equal letters are aligned; 0: no letter. */
typedef struct KlLabels {
    uint8_t of[KL_DIMS_MAX]; /* [n_dims] */
} KlLabels;

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
/* kl_rules_out, then kl_rules_settle_plain. */
KlStatus kl_rules_out_plain(const KlCall *call, KlInferred *result, const KlMeta *like,
                            KlError *error);
/* Likewise, considering torch's memory formats: outputs of 4 dims are channels_last if one of the first
 * `n_deciders` inputs, all of 4 dims, suggests it, else row-major. Other numbers of dims: as
 * kl_rules_settle_plain. */
void kl_rules_settle_format(const KlCall *call, KlInferred *result, uint32_t n_deciders);
/* Note that args[arg] is saved, if it is a tensor. */
void kl_rules_save(const KlCall *call, KlSaves *saves, uint32_t arg);
/* Whether args[arg] is a tensor that requires grad. */
bool kl_rules_needs_grad(const KlCall *call, uint32_t arg);
/* Note that a new tensor of n elements is saved. */
void kl_rules_save_new(const KlInferred *result, KlSaves *saves, int64_t n, KlDtype dtype);
/* Whether view(-1, shape[-1]) needs no copy. */
bool kl_rules_is_foldable(const KlMeta *meta);
/* Get args[arg] as `n` numbers, one for each spatial dim: a tuple, one number for all, or the fallback. */
KlStatus kl_rules_spatial(const KlCall *call, uint32_t arg, int32_t n, const int64_t *fallback,
                          int64_t *values); /* rules_conv.c */
/* Likewise, but the argument is required, and a tuple must have `n` entries. */
KlStatus kl_rules_spatial_each(const KlCall *call, uint32_t arg, int32_t n, int64_t *values);

KL_DTYPE(uniform); /* all tensors share one dtype, the output's; no bool */
KL_DTYPE(embedding_bag);
KL_DTYPE(uniform_float); /* ... and it is a real floating-point one */
KL_SAVES(all);           /* every tensor argument, whichever needs the gradient */

/* --- products (rules_matmul.c, rules_einsum.c) ------------------------------------------------ */

KL_SHAPE(addbmm);
KL_SHAPE(addmm);
KL_SHAPE(addmv);
KL_SHAPE(addr);
KL_SHAPE(baddbmm);
KL_SHAPE(bilinear);
KL_SHAPE(bmm);
KL_SHAPE(grouped_mm); /* 2-D by 3-D, in groups of rows */
KL_SHAPE(dot);
KL_SHAPE(einsum);
KL_SHAPE(linear);
KL_SHAPE(matmul);
KL_SHAPE(mm);
KL_SHAPE(mv);
KL_SHAPE(outer);
KL_PLACE(addbmm);
KL_PLACE(addmm);
KL_PLACE(addmv);
KL_PLACE(addr);
KL_PLACE(baddbmm);
KL_PLACE(bilinear);
KL_PLACE(bmm);
KL_PLACE(grouped);
KL_PLACE(dot);
KL_PLACE(einsum);
KL_PLACE(linear);
KL_PLACE(matmul);
KL_PLACE(mm);
KL_PLACE(mv);
KL_PLACE(outer);
KL_SAVES(bilinear);
KL_SAVES(einsum);
KL_SAVES(linear);
KL_SAVES(matmul);

/* --- images (rules_conv.c, rules_pool.c, rules_resize.c, rules_patch.c) ----------------------- */

KL_SHAPE(adaptive_pool);
KL_SHAPE(affine_grid);
KL_SHAPE(avg_pool);
KL_SHAPE(channel_shuffle);
KL_SHAPE(col2im);
KL_SHAPE(constant_pad);
KL_SHAPE(conv);
KL_SHAPE(grid_sampler);
KL_SHAPE(im2col);
KL_SHAPE(linear_between); /* linear, bilinear, bicubic */
KL_SHAPE(max_pool);
KL_SHAPE(nearest);
KL_SHAPE(pad);
KL_SHAPE(pixel_shuffle);
KL_SHAPE(pixel_unshuffle);
KL_DTYPE(with_indices); /* the second output holds positions */
KL_PLACE(affine_grid);
KL_PLACE(channel_shuffle);
KL_PLACE(col2im);
KL_PLACE(conv);
KL_PLACE(grid_sampler);
KL_PLACE(im2col);
KL_PLACE(pad);
KL_PLACE(spatial); /* all dims but the last n_mixed may hold the rows */
KL_SAVES(adaptive_avg_pool);
KL_SAVES(conv);
KL_SAVES(max_pool);
KL_SAVES(pad);

/* --- norms, softmax, tables, attention (rules_norm.c, rules_softmax.c, rules_embedding.c, rules_attention.c) */

KL_SHAPE(attention);
KL_SHAPE(batch_norm);
KL_SHAPE(cdist);
KL_SHAPE(cosine_similarity);
KL_SHAPE(cross);
KL_SHAPE(embedding);
KL_SHAPE(embedding_bag);
KL_SHAPE(embedding_renorm);
KL_SHAPE(glu);
KL_SHAPE(group_norm);
KL_SHAPE(instance_norm);
KL_SHAPE(layer_norm);
KL_SHAPE(one_hot);
KL_SHAPE(pairwise_distance);
KL_SHAPE(prelu);
KL_SHAPE(rms_norm);
KL_SHAPE(softmax);
KL_DTYPE(attention);
KL_DTYPE(norm); /* that of the first input; float32 weights may go with a half type */
KL_DTYPE(softmax);
KL_PLACE(attention);
KL_PLACE(batch_norm);
KL_PLACE(cdist);
KL_PLACE(cosine_similarity);
KL_PLACE(cross);
KL_PLACE(embedding);
KL_PLACE(embedding_bag);
KL_PLACE(embedding_renorm);
KL_PLACE(glu);
KL_PLACE(group_norm);
KL_PLACE(instance_norm);
KL_PLACE(layer_norm);
KL_PLACE(one_hot);
KL_PLACE(pairwise_distance);
KL_PLACE(prelu);
KL_PLACE(softmax);
KL_SAVES(attention);
KL_SAVES(batch_norm);
KL_SAVES(cdist);
KL_SAVES(cosine_similarity);
KL_SAVES(group_norm);
KL_SAVES(instance_norm);
KL_SAVES(layer_norm);
KL_SAVES(pairwise_distance);
KL_SAVES(rms_norm);

/* --- losses (rules_loss.c, rules_loss_nll.c) -------------------------------------------------- */

/* Find whether the loss's argument `reduction`, an int, is not "none". */
KlStatus kl_rules_reduction(const KlCall *call, bool *is_reduced);
/* Make the output of a loss: with the shape of its terms, or a scalar. */
KlStatus kl_rules_make_loss(const KlCall *call, KlInferred *result, const KlMeta *terms,
                            KlError *error);

KL_SHAPE(cross_entropy);
KL_SHAPE(ctc);
KL_SHAPE(loss);
KL_SHAPE(loss_cosine);
KL_SHAPE(loss_equal);
KL_SHAPE(loss_equal_target);
KL_SHAPE(loss_margin);
KL_SHAPE(loss_multilabel);
KL_SHAPE(loss_plain_target);
KL_SHAPE(loss_ranking);
KL_SHAPE(loss_triplet);
KL_SHAPE(nll);
KL_SHAPE(nll_2d);
KL_SHAPE(nll_flat);
KL_DTYPE(loss);
KL_DTYPE(loss_wide);
KL_DTYPE(nll);
KL_PLACE(ctc);
KL_PLACE(loss);
KL_PLACE(loss_vectors);
KL_PLACE(nll);
KL_SAVES(cross_entropy);
KL_SAVES(ctc);
KL_SAVES(loss_cosine);
KL_SAVES(loss_hinge);
KL_SAVES(loss_kl);
KL_SAVES(embedding_bag);
KL_SAVES(loss_l1);
KL_SAVES(loss_logits);
KL_SAVES(loss_multilabel);
KL_SAVES(loss_poisson);
KL_SAVES(loss_ranking);
KL_SAVES(loss_triplet);
KL_SAVES(nll);

/* --- draws, recurrent layers, gradients (rules_random.c, rules_rnn.c, rules_gradient.c) ---------- */

KL_SHAPE(draw);
KL_SHAPE(draw_inplace);
KL_SHAPE(dropout);
KL_SHAPE(feature_dropout);
KL_SHAPE(gradient_of);
KL_SHAPE(multinomial);
KL_SHAPE(native_dropout);
KL_SHAPE(randint_like);
KL_SHAPE(rnn);
KL_SHAPE(rnn_cell);
KL_SHAPE(rrelu);
KL_DTYPE(gradient_of);
KL_DTYPE(rnn);
KL_DTYPE(like_float);
KL_DTYPE(like_real);
KL_DTYPE(native_dropout);
KL_PLACE(feature_dropout);
KL_PLACE(gradient_of);
KL_PLACE(multinomial);
KL_PLACE(rnn);
KL_PLACE(rnn_cell);
KL_SAVES(dropout);
KL_SAVES(feature_dropout);
KL_SAVES(gradient_of);
KL_SAVES(rnn);
KL_SAVES(rnn_cell);
KL_SAVES(rrelu);

#endif
