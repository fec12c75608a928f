/* SPDX-License-Identifier: Apache-2.0 */
/* ops.h - the op table: the type of its rows, which ops.c fills from ops.def, and a look-up by name.
 *
 * A *call* is a row with bound arguments: args[i] belongs to the i-th word of the row's call signature.
 * A rule sees metas, ints and floats, never data and never a Python object. */
#pragma once

#include "meta.h"

typedef enum {
    KL_ARG_ABSENT = 0, /* not given: the signature's default applies */
    KL_ARG_NONE,       /* Python's None */
    KL_ARG_VALUE,      /* one tensor */
    KL_ARG_VALUES,     /* a list or tuple of tensors (or None entries: meta NULL) */
    KL_ARG_INT,
    KL_ARG_INTS, /* a list or tuple of ints, or varargs gathered */
    KL_ARG_FLOAT,
    KL_ARG_FLOATS, /* a list or tuple of numbers, at least one a float: scale factors */
    KL_ARG_BOOL,
    KL_ARG_COMPLEX,
    KL_ARG_DTYPE,
    KL_ARG_INDEX, /* the index of x[...]: items[n] */
    KL_ARG_TEXT,  /* a string: reduction="mean", approximate="tanh" */
    KL_ARG_DEVICE, /* a torch.device, or the argument of a word with `:device`; u.i: the binding's index */
    KL_ARG_FORMAT, /* a torch.memory_format; u.i: KlFormat */
    KL_ARG_OTHER,  /* anything else: infer.c declines the call */
} KlArgKind;

typedef enum {
    KL_FORMAT_CONTIGUOUS,
    KL_FORMAT_PRESERVE,
    KL_FORMAT_CHANNELS_LAST,
    KL_FORMAT_CHANNELS_LAST_3D,
} KlFormat;

typedef enum {
    KL_INDEX_INT,      /* x[3] */
    KL_INDEX_SLICE,    /* x[a:b:c]; has_start, has_stop and has_step say which numbers were given */
    KL_INDEX_NONE,     /* x[None] */
    KL_INDEX_ELLIPSIS, /* x[...] */
    KL_INDEX_TENSOR,   /* x[index]: an int or bool tensor, lazy or plain */
    KL_INDEX_BOOL,     /* x[True] */
    KL_INDEX_INTS,     /* x[[0, 2, 5]]: a Python list of ints */
    KL_INDEX_OTHER,
} KlIndexKind;

typedef struct KlIndex {
    KlIndexKind kind;
    bool has_start, has_stop, has_step;
    int64_t start, stop, step; /* INT keeps its number in start; INTS its length in stop */
    uint32_t input;            /* TENSOR: number among the call's inputs */
    bool is_row_range;         /* TENSOR: its values have been read and are 0, 1, 2, ... */
} KlIndex;

typedef struct KlArg {
    KlArgKind kind;
    uint32_t n;     /* VALUES, INTS, FLOATS, INDEX: number of entries */
    uint32_t input; /* VALUE: number among the call's inputs; VALUES: of the first one */
    union {
        int64_t i;            /* INT, BOOL (0 or 1), DEVICE, FORMAT */
        double f;             /* FLOAT */
        KlDtype dtype;        /* DTYPE */
        const int64_t *ints;  /* INTS */
        const double *floats; /* FLOATS */
        const char *text;     /* TEXT */
        const KlIndex *items; /* INDEX */
    } u;
} KlArg;

typedef enum { KL_ROW_OP, KL_ROW_VIEW, KL_ROW_INPLACE } KlRowKind;

typedef enum { KL_MODE_ROWS, KL_MODE_REDUCE, KL_MODE_ONCE } KlMode;

/* The ways to split a reduction, from reductions.def; koila/reductions/partials.py has the torch code of each. */
#define REDUCTION(name_, ...) KL_REDUCE_##name_,
typedef enum {
#include "reductions.def"
    KL_N_REDUCES,
} KlReduce;
#undef REDUCTION

/* An int argument of a call that is scale * rows: on a chunk it is replaced by scale * the chunk's rows. */
typedef struct KlRewrite {
    uint16_t arg;
    uint16_t entry; /* INTS: the entry; INDEX: the item, of which `part` is the number */
    uint8_t part;   /* INDEX: 0 start, 1 stop */
    int64_t scale;
} KlRewrite;

#define KL_REWRITES_MAX 8

/* How a node runs on a chunk; the row's place rule fills it. A ROWS node with a WHOLE output reads no
 * rows (new_zeros, type_as): every chunk makes the same value. */
typedef struct KlSplit {
    KlMode mode;
    KlReduce reduce;    /* REDUCE only */
    KlAxisId axis;      /* ROWS and REDUCE: the axis */
    const char *reason; /* ONCE with an input in ROWS: why, a static string; else NULL */
    uint8_t again; /* ONCE: 1 + the dim of the outputs that is the rows of a new axis; 0: none */
    /* [n_inputs] where the rows of each input are on a chunk; WHOLE: each chunk reads all of it. A
     * WHOLE value with a ROWS place here is sliced. */
    KlPlace *places;
    uint64_t row_ranges; /* bit i: input i counts the rows 0, 1, ...: a chunk gets its first ones */
    uint32_t n_rewrites;
    KlRewrite rewrites[KL_REWRITES_MAX];
    /* The output is made by sizes alone and is WHOLE until a call reads it by rows. If that finds the
     * rows in dim d, rewrites[d] is applied, so that this size follows the chunk. */
    bool is_open;
} KlSplit;

/* Byte counts of a recurrent layer over a packed sequence, in which each step holds only the rows that are long enough.
 * Its padded input and output are counted elsewhere; koila/memory/uneven.py computes these numbers. From KEPT on they are
 * pairs: bytes for one step of one row, and for each *turn*: the state of one row, copied at a step where the
 * reverse direction starts on more rows. */
typedef enum {
    KL_UNEVEN_STEPS,       /* the number of steps of all rows; 0: it is no such layer */
    KL_UNEVEN_TURNS,       /* the number of turns */
    KL_UNEVEN_BYTES,       /* of temporary gradients of weights */
    KL_UNEVEN_TURNED,      /* copies of the incoming gradients, in multiples of the result */
    KL_UNEVEN_KEPT,        /* saved for backward */
    KL_UNEVEN_RUN = 6,     /* while it runs, before the padded results exist */
    KL_UNEVEN_PLAIN = 8,   /* likewise, without a graph */
    KL_UNEVEN_BESIDE = 10, /* in addition to the padded results, or to their gradients */
    KL_UNEVEN_LAST = 12, /* at the end of backward, in addition to the gradients that it returns */
    KL_UNEVEN_BACK = 14, /* in the middle of backward, without padded gradients: the peak */
    KL_UNEVEN_SECOND = 16,  /* likewise in the second direction */
    KL_UNEVEN_WEIGHTS = 18, /* likewise, in addition to gradients of weights */
    KL_N_UNEVEN = 20,
} KlUneven;

/* The tensors that autograd saves for the backward of a call, and its other temporary memory. */
typedef struct KlSaves {
    uint64_t inputs;         /* bit i: input i is saved (inputs over 63 are never saved by a row) */
    uint64_t outputs;        /* bit i: output i is saved */
    int64_t bytes_extra;     /* saved tensors that are no inputs or outputs, for the whole call */
    bool is_extra_rows;      /* bytes_extra grows with the rows */
    int64_t bytes_fixed;     /* likewise, of a size without rows: weights in another dtype */
    int64_t bytes_workspace; /* needed only while the op runs */
    int64_t bytes_backward;  /* needed only while its backward runs, besides gradients */
    int64_t bytes_row;       /* needed while either runs, independent of the number of rows */
    int64_t bytes_steps;     /* needed while the op runs without a graph: results of time steps */
    bool gives_view;         /* as in KlHeld, for this call */
    float uneven[KL_N_UNEVEN];
} KlSaves;

typedef struct KlRow KlRow;

/* The role of an op for sorted rows: NOTE [orders] in rules_order.c. */
typedef enum {
    KL_TIE_NONE,
    KL_TIE_SORT,
    KL_TIE_ARGSORT,
    KL_TIE_INDICES, /* its last result is a tensor of indices into some dim */
    KL_TIE_TAKE,
    KL_TIE_SELECT,
    KL_TIE_PUT,
    KL_TIE_ADD,
    KL_TIE_DIVIDE,
    KL_TIE_COUNT,
    KL_TIE_ADD_UP,
    KL_TIE_GROUPS,
} KlTie;

/* How torch's autocast casts the inputs of an op. */
typedef enum {
    KL_CAST_NONE,
    KL_CAST_LOWER,   /* to the lower dtype */
    KL_CAST_FLOAT,   /* to float32 */
    KL_CAST_REDUCE,  /* to float32, unless the call names a dtype */
    KL_CAST_WIDEST,  /* to the widest dtype among the inputs */
    KL_CAST_ERROR,   /* torch refuses the op under autocast */
    KL_CAST_LAYER,   /* recurrent layers, whose results have the lower dtype for float32 inputs */
    KL_CAST_CELL,    /* nothing is cast if all inputs are float32; for others it is unknown */
    KL_CAST_EINSUM,  /* to the lower dtype if two operands are contracted */
    KL_CAST_PADDING, /* to float32 if it reflects or replicates */
    KL_CAST_UNKNOWN,
} KlCast;

/* An axis may be an *order*: the rows of another axis, which each chunk sorts on its own. */
typedef struct KlOrder {
    KlAxisId of; /* that axis; KL_ID_NONE: it is no order, or has been broken */
    bool is_ascending;
} KlOrder;

/* One call under inference. */
typedef struct KlCall {
    const KlRow *row;
    const KlArg *args; /* [n_args] one for each word of the signature */
    uint32_t n_args;
    const KlMeta *const *inputs; /* [n_inputs] tensor arguments in signature order; NULL: None */
    uint32_t n_inputs;
    KlDtype default_dtype;
    /* Bit sets of 16-bit dtypes whose convolutions oneDNN runs on this CPU; of those it runs in tiles; in float32. */
    uint32_t blocked_halves, tiled_halves, emulated_halves;
    int64_t block_width; /* channels per block of oneDNN's blocked layout */
    bool is_grad_enabled;
    bool is_flash_allowed;    /* attention may use its fused kernel on the CPU */
    const int64_t *axis_rows; /* [n_axes] rows of each axis */
    const KlOrder *orders;    /* [n_axes], or NULL: no axis is an order */
    uint64_t row_ranges; /* bit i: input i, of a call that reads an order, counts 0, 1, 2, ... */
    uint32_t n_axes;
    KlStatus *unread; /* why infer.c refuses the call: what rules could not read; or NULL */
} KlCall;

/* How the outputs share memory with an input. */
typedef enum {
    KL_ALIAS_NONE,  /* new memory */
    KL_ALIAS_VIEW,  /* a view of it */
    KL_ALIAS_SAME,  /* the very same tensor object: x.contiguous() of a dense x, in-place ops */
    KL_ALIAS_MAYBE, /* a view, the same or a copy: unknown strides decide it */
} KlAlias;

/* Effects: which arguments the op writes. Bit i: word i of the signature. */
typedef uint32_t KlEffects;

enum { KL_OUTS_FEW = 4 }; /* outputs for which a shape rule need not reserve memory */

/* The result of inference. `outs` grows as needed and is reused from call to call. */
typedef struct KlInferred {
    KlMeta *outs; /* [n_outs] */
    uint32_t n_outs;
    size_t n_outs_max;
    KlAlias alias;           /* of all outputs; set by the shape rule */
    uint32_t alias_input;    /* the input that they alias, if any */
    uint8_t device;          /* of all outputs; a rule that moves a value (`to`) sets it */
    uint64_t inputs_no_grad; /* bit i: no gradient flows to input i; set by a rule */
    uint64_t outs_no_grad;   /* bit i: output i never requires grad; set by a rule */
    bool is_random; /* the call draws from a generator: set by the row's cell DRAWS, or by a rule */
    KlEffects effects; /* the arguments that it writes: the row's, or fewer if a rule says so */
    bool writes_view;  /* it writes a view of its first argument, which it makes inside torch */
    /* The output dim of each dim of the first input; -1: reduced, mixed or removed. A shape rule sets it
     * for the place rule of the same row; by default each dim keeps its number. */
    int8_t dim_map[KL_DIMS_MAX];
    KlSplit split; /* split.places is owned: [n_places_max] */
    size_t n_places_max;
    bool is_ordered;  /* the call is right in each chunk, in the order that it reads */
    bool reads_aside; /* it reads a leaf that it may write on the side: running statistics */
    KlAxisId breaks;  /* declined: the order that must be broken first; else KL_ID_NONE */
} KlInferred;

typedef KlStatus KlRule(const KlCall *call, KlInferred *result);
typedef void KlSavesRule(const KlCall *call, const KlInferred *result, KlSaves *saves);

/* Bytes as multiples of a call's result, of its first operand, and of masks: a byte per element of the larger. */
typedef struct KlAmount {
    double outs, ins, masks;
} KlAmount;

/* Temporary memory besides operands and results: while a call runs (`run`), and while the gradients of operand 0, of
 * operand 1 and of the others are computed (d acos(x) makes five temporaries). The numbers are measured. */
typedef struct KlHeld {
    KlAmount run;
    double back_outs[3], back_ins[3], back_masks; /* as the members of KlAmount */
    double relaid;     /* multiples of the result, if the incoming gradient has another layout */
    uint8_t handed_on; /* bit i: the gradient of operand i is the gradient of the result itself */
    bool gives_view;   /* its result, of more than 2 dims, is a view of a tensor inside torch */
    bool is_sliced;    /* the gradients of operands are slices of the gradient of the result */
    bool is_wide;      /* gradients of broadcast operands have the result's size until summed */
    bool is_stepwise;  /* it saves tensors of each time step; without a graph these are freed */
    bool is_composed; /* two calls inside torch: the value between them has a gradient of its own */
    bool is_of_terms; /* a reduced loss, whose result lies in the memory of its terms */
    bool turns;       /* the gradients that it returns have another memory layout */
    bool expands;     /* the gradient it returns is the result's, expanded: no memory of its own */
    bool expands_part; /* likewise for the partial results of a chunk */
} KlHeld;

/* A reduction in chunks, in multiples of the result, or if `of_row` of a row of the first operand: the partial results of
 * a chunk and their gradients; what there is beside partial results at most while they are combined, then in the
 * graph of that, and at most while it runs backward. If a chunk does not run the op itself: what it saves for backward
 * and its temporary memory; else NULL. The numbers are measured. */
typedef struct KlParts {
    double left, seeds, combining[2], combined[2], sending[2]; /* [2]: for each chunk, and once */
    const KlAmount *keeps;
    const KlHeld *held;
    bool of_row;
    uint32_t added; /* bit p: partial results p of all chunks are added up as chunks finish */
} KlParts;

/* Sets of kinds of dtypes. */
typedef enum {
    KL_KINDS_ALL = 0,
    KL_KINDS_BOOL = 1,
    KL_KINDS_INT = 2,
    KL_KINDS_FLOAT = 4,
    KL_KINDS_COMPLEX = 8,
    KL_KINDS_BITS = KL_KINDS_BOOL | KL_KINDS_INT,
    KL_KINDS_REAL = KL_KINDS_INT | KL_KINDS_FLOAT,
    KL_KINDS_ORDERED = KL_KINDS_BOOL | KL_KINDS_REAL,
    KL_KINDS_NUMBER = KL_KINDS_REAL | KL_KINDS_COMPLEX,
} KlKinds;

enum { KL_PAIR_LAST = -2 }; /* always the last dim */

/* The arguments that torch saves for backward, as words of the signature: bit i is word i. */
typedef struct KlKeeps {
    uint8_t words;        /* saved if any gradient is needed */
    uint8_t for_grad[4];  /* [i] saved if the gradient of word i is needed */
    uint8_t outputs;      /* bit i: output i */
    bool has_no_gradient; /* no gradient flows to an input */
    bool is_leaf;         /* the output is a leaf that requires grad */
} KlKeeps;

struct KlRow {
    const char *name; /* torch's own spelling */
    const char *call; /* the C-level function's signature: "x, dim=None, keepdim=False" */
    KlRowKind kind;
    bool is_heavy; /* too slow to recompute: made of products */
    KlRule *shape, *dtype, *place;
    KlSavesRule *saves; /* kl_rules_keep: as `keeps` says */
    KlKeeps keeps;
    KlEffects effects;
    /* Parameters of cells, as the 2 of conv(2): */
    uint8_t n_spatial;    /* spatial dims, at the end */
    bool is_transposed;   /* a convolution */
    const char *equation; /* of a product, as einsum's: "rs,sc->rc" */
    bool has_addend;      /* a product that is added to the first argument */
    uint8_t n_outs;       /* outputs, if a shape rule can make one or two */
    uint8_t n_gates;      /* of a recurrent layer or cell */
    bool is_packed;       /* a recurrent layer over sequences of several lengths */
    uint8_t n_mixed;    /* dims at the end whose entries the op mixes: they cannot hold the rows */
    const char *reason; /* why the call runs once: always, or if its rows are in a mixed dim */
    uint8_t first_option;    /* the word `dtype` of a new value, before other options */
    bool can_copy;           /* a view, or a copy if the strides allow none */
    bool is_feature;         /* a dropout that drops whole features */
    bool is_untracked;       /* parts that autograd does not track */
    uint8_t plain;           /* bit i: a loss that is declined if word i requires grad */
    uint8_t n_vectors;       /* inputs of a loss that are vectors; others have an entry for each */
    uint8_t n_least, n_most; /* dims of the input of a loss */
    bool has_dilation;       /* windows of a pool */
    int8_t pair_dim;         /* the dim along which two arguments are compared, or KL_PAIR_LAST */
    KlDtype dtype_to;
    KlKinds kinds; /* of dtypes that a dtype rule accepts */
    KlReduce reduce;
    KlTie tie;
    KlCast cast[2];      /* on the CPU, on CUDA */
    bool is_batch_norm;  /* may be given the statistics of all rows */
    const char *draws;   /* the tensor it fills with random numbers: a word of noise.py, or NULL */
    const char *gathers; /* how a weight's gradient is accumulated: a word of accrue.py, or NULL */
    uint8_t gathered;    /* the argument that is that weight */
    bool is_derivative;  /* it differentiates the graph of other calls */
    bool is_joining;     /* its place rule supports inputs of several axes */
    bool is_laid_out_by_device; /* on a GPU the result may have another layout than on the CPU */
    bool copies_expanded; /* its backward copies the gradient of the result if that is expanded */
    const KlHeld *held;   /* NULL: it needs no temporary memory */
};

/* Rows in the order of ops.def, one per op id. */
extern const KlRow kl_ops_rows[];
extern const uint32_t kl_ops_n_rows;

/* Return the row with that name or alias, or NULL. The search is linear: use it at import, not for each call. */
const KlRow *kl_ops_find(const char *name);

/* Return the temporary memory of a row; never NULL. */
const KlHeld *kl_ops_held(const KlRow *row);

/* A way to split a reduction: its line of reductions.def. */
typedef struct KlReduction {
    const char *name;
    uint32_t n_parts;
    bool is_early;  /* partial result 1 reads labels alone: it may be computed before the logits */
    uint32_t saved; /* bit p: autograd saves partial result p when they are combined */
    KlParts parts;
} KlReduction;

/* Indexed by KlReduce. */
extern const KlReduction kl_ops_reductions[KL_N_REDUCES];

/* Return the memory of a reduction in chunks; `is_for_chunks`: of the statistics of batch_norm or softmax. */
const KlParts *kl_ops_parts(KlReduce reduce, bool is_for_chunks, bool is_on_cpu);

/* Whether the op is detach: a view without autograd graph. */
bool kl_ops_is_detached(const KlRow *row);

/* Store the n-th alias and its row; return false if there are no more. */
bool kl_ops_alias(uint32_t n, const char **alias, const KlRow **row);

/* Set n_outs to `n` and allocate the outputs, zeroed and WHOLE. */
KlStatus kl_ops_reserve_outs(KlInferred *result, uint32_t n);
