/* rules_nn.h - the words of the sections in ops_nn.def: products, layers, losses, attention, draws. */
#ifndef KL_RULES_NN_H
#define KL_RULES_NN_H

/* --- labels (rules_labels.c): see NOTE [labels] there -------------------------------------------- */

/* One letter for each dim of a value. Dims with the same letter run together; 0: a dim of its own. */
typedef struct KlLabels {
    uint8_t of[KL_DIMS_MAX]; /* [n_dims] */
} KlLabels;

enum { KL_LABELS_MAX = 8 }; /* inputs a rule labels; those after them have no letters */

/* How a call moves its rows. */
typedef struct KlWiring {
    KlLabels inputs[KL_LABELS_MAX]; /* [n_inputs] */
    KlLabels outs[4];               /* [n_outs] */
    KlReduce reduce;                /* rows that no output has: how they are combined; NONE: ONCE */
    const char *reason; /* ... with this reason; also for rows in a dim without letter */
} KlWiring;

/* Wire a call: find the letter of the rows, slice every input that has it, place the outputs. */
KlStatus kl_rules_wire(const KlCall *call, KlInferred *result, const KlWiring *wiring);

/* Letters 1 .. n_dims from the left for a value of the full shape. */
KlLabels kl_rules_letters(int32_t n_dims);
/* The letters of an operand with `n_dims` that broadcasts from the right to `full`, of n_dims_full. */
KlLabels kl_rules_letters_right(KlLabels full, int32_t n_dims_full, int32_t n_dims);

/* --- small tools (rules_labels.c) ------------------------------------------------------------------- */

/* The strides are those of a new row-major tensor, also in dims of size 1 (where torch's choice of memory
 * format looks at them). */
bool kl_rules_is_plain(const KlMeta *meta);
/* A new output: row-major strides if every tensor of the call is plain, else not known. */
void kl_rules_settle_plain(const KlCall *call, KlInferred *result);
/* Every tensor of the call has the dtype of the first, which is no bool. */
KlStatus kl_rules_uniform(const KlCall *call, KlDtype *dtype);
/* Input of args[arg] as bit of KlSaves.inputs; nothing where it is no tensor. */
void kl_rules_save(const KlCall *call, KlSaves *saves, uint32_t arg);
/* The tensor args[arg] requires grad. */
bool kl_rules_needs_grad(const KlCall *call, uint32_t arg);
/* New memory of n elements. */
void kl_rules_save_new(const KlInferred *result, KlSaves *saves, int64_t n, KlDtype dtype);
/* The other dims of `meta` can be merged into dim 0 without a copy: view(-1, shape[-1]). */
bool kl_rules_is_foldable(const KlMeta *meta);

KL_DTYPE(uniform);       /* all tensors share one dtype, the output's; no bool */
KL_DTYPE(uniform_float); /* ... and it is a real floating-point one */
KL_SAVES(all);           /* every tensor argument, whichever needs the gradient */
KL_SAVES(input);         /* the first argument */

/* --- products (rules_matmul.c, rules_einsum.c) ------------------------------------------------------- */

KL_SHAPE(addbmm);
KL_SHAPE(addmm);
KL_SHAPE(addmv);
KL_SHAPE(addr);
KL_SHAPE(baddbmm);
KL_SHAPE(bilinear);
KL_SHAPE(bmm);
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
KL_PLACE(dot);
KL_PLACE(einsum);
KL_PLACE(linear);
KL_PLACE(matmul);
KL_PLACE(mm);
KL_PLACE(mv);
KL_PLACE(outer);
KL_SAVES(addmm);
KL_SAVES(bilinear);
KL_SAVES(einsum);
KL_SAVES(linear);
KL_SAVES(matmul);
KL_SAVES(product);

#endif
