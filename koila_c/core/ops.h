/* SPDX-License-Identifier: Apache-2.0 */
/* ops.h - turns ops.def into an enum, rows and a look-up by name; adds no knowledge of its own.
 *
 * A *call* is a row with bound arguments: args[i] belongs to the i-th word of the row's call signature.
 * A rule sees metas, ints and floats, never data and never a Python object. */
#ifndef KL_OPS_H
#define KL_OPS_H

#include "meta.h"

typedef enum {
    KL_ARG_ABSENT = 0, /* not given: the signature's default applies */
    KL_ARG_NONE,       /* Python's None */
    KL_ARG_VALUE,      /* one tensor */
    KL_ARG_VALUES,     /* a list or tuple of tensors (or None entries: meta NULL) */
    KL_ARG_INT,
    KL_ARG_INTS, /* a list or tuple of ints, or varargs gathered */
    KL_ARG_FLOAT,
    KL_ARG_FLOATS, /* a list or tuple of numbers, one a float at least: scale factors */
    KL_ARG_BOOL,
    KL_ARG_COMPLEX,
    KL_ARG_DTYPE,
    KL_ARG_INDEX, /* what stands between the brackets of x[...]: items[n] */
    KL_ARG_TEXT,  /* a string: reduction="mean", approximate="tanh" */
    KL_ARG_DEVICE, /* a torch.device, or what a word with `:device` was given; u.i: the binding's index */
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
    KL_INDEX_SLICE,    /* x[a:b:c], as written: has_start and its kin say what was given */
    KL_INDEX_NONE,     /* x[None] */
    KL_INDEX_ELLIPSIS, /* x[...] */
    KL_INDEX_TENSOR,   /* x[index]: an int or bool tensor, possibly the value of the tape */
    KL_INDEX_BOOL,     /* x[True] */
    KL_INDEX_INTS,     /* x[[0, 2, 5]]: a Python list of ints */
    KL_INDEX_OTHER,
} KlIndexKind;

typedef struct KlIndex {
    KlIndexKind kind;
    bool has_start, has_stop, has_step;
    int64_t start, stop, step; /* INT keeps its number in start; INTS its length in stop */
    uint32_t input;            /* TENSOR: number among the call's inputs */
    bool is_row_range;         /* TENSOR: its values were looked at and are 0, 1, 2, ... */
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

typedef enum { KL_ROW_OP, KL_ROW_VIEW, KL_ROW_INPLACE, KL_ROW_RANDOM } KlRowKind;

typedef enum { KL_MODE_ROWS, KL_MODE_REDUCE, KL_MODE_ONCE } KlMode;

/* What a REDUCE node carries out of its chunks, by reductions.def; the torch code of each is koila/partials.py's. */
#define REDUCTION(name_, ...) KL_REDUCE_##name_,
typedef enum {
#include "reductions.def"
    KL_N_REDUCES,
} KlReduce;
#undef REDUCTION

/* An int of the call that is scale * rows and must follow the chunk. */
typedef struct KlRewrite {
    uint16_t arg;
    uint16_t entry; /* for INTS; for INDEX: the item, and `entry_part` says which number */
    uint8_t part;   /* INDEX: 0 start, 1 stop */
    int64_t scale;
} KlRewrite;

#define KL_REWRITES_MAX 8

/* How a node runs on a chunk. Filled by the row's place rule. A ROWS node with a WHOLE output reads no
 * rows (new_zeros, type_as): every chunk makes the same value. */
typedef struct KlSplit {
    KlMode mode;
    KlReduce reduce;    /* REDUCE only */
    KlAxisId axis;      /* ROWS and REDUCE: the axis */
    const char *reason; /* ONCE with an input in ROWS: why, a static string; else NULL */
    uint8_t again; /* ONCE: 1 + the dim of outputs that is rows of a batch of its own; 0: none */
    /* [n_inputs] where the rows of each tensor input are when it is given to a chunk; WHOLE: given
     * whole. A WHOLE value with a ROWS place here is sliced. */
    KlPlace *places;
    uint64_t row_ranges; /* bit i: input i counts a dim of rows, a chunk gets its first ones */
    uint32_t n_rewrites;
    KlRewrite rewrites[KL_REWRITES_MAX];
    /* The output is WHOLE only until something reads it by rows: it is made by sizes alone, and
     * rewrites[d], not in force yet, would let that of dim d follow the chunk. */
    bool is_open;
} KlSplit;

/* Bytes of a recurrent layer over a packed sequence, whose steps hold only the rows that are long enough; its padded
 * input and output count elsewhere (koila/uneven.py finds these numbers). From KEPT on they are pairs: bytes of one
 * step of one row, and bytes more at each *turn*, a step at which a backward direction starts on more rows. */
typedef enum {
    KL_UNEVEN_STEPS, /* of all rows; 0: it is no such layer */
    KL_UNEVEN_TURNS,
    KL_UNEVEN_BYTES,       /* of gradients of weights on their way */
    KL_UNEVEN_TURNED,      /* gradients that come are copied */
    KL_UNEVEN_KEPT,        /* for backward */
    KL_UNEVEN_RUN = 6,     /* until results are there */
    KL_UNEVEN_PLAIN = 8,   /* the same without a graph */
    KL_UNEVEN_BESIDE = 10, /* beside results, and beside the gradients that come for them */
    KL_UNEVEN_LAST = 12,   /* beside the gradients that it makes, when all else is gone */
    KL_UNEVEN_BACK =
        14, /* when those that come are gone, and what is made is not there: at most; */
    KL_UNEVEN_SECOND = 16,  /* in the second direction; */
    KL_UNEVEN_WEIGHTS = 18, /* and beside gradients of weights */
    KL_N_UNEVEN = 20,
} KlUneven;

/* What torch keeps for backward, given which inputs require grad. */
typedef struct KlSaves {
    uint64_t inputs;         /* bit i: input i is saved (inputs over 63 are never saved by a row) */
    uint64_t outputs;        /* bit i: output i is saved */
    int64_t bytes_extra;     /* new tensors saved, bytes for the whole call */
    bool is_extra_rows;      /* bytes_extra grows with the rows */
    int64_t bytes_fixed;     /* new tensors saved that do not: weights in another dtype */
    int64_t bytes_workspace; /* needed only while the op runs */
    int64_t bytes_backward;  /* needed only while its backward runs, beside gradients */
    int64_t bytes_row;       /* of one row, needed while either runs, however many rows there are */
    int64_t bytes_steps;     /* needed while the op runs without a graph: results of steps */
    bool gives_view;         /* as KlHeld's, for this call */
    float uneven[KL_N_UNEVEN];
} KlSaves;

typedef struct KlRow KlRow;

/* What an op is to rows that are ordered, and put back. */
typedef enum {
    KL_TIE_NONE,
    KL_TIE_SORT,
    KL_TIE_ARGSORT,
    KL_TIE_INDICES, /* its last result is an index, of some dim */
    KL_TIE_TAKE,
    KL_TIE_SELECT,
    KL_TIE_PUT,
    KL_TIE_ADD,
    KL_TIE_DIVIDE,
    KL_TIE_COUNT,
    KL_TIE_ADD_UP,
    KL_TIE_GROUPS,
} KlTie;

/* What torch's autocast does to the inputs of an op. */
typedef enum {
    KL_CAST_NONE,
    KL_CAST_LOWER,   /* to the lower dtype */
    KL_CAST_FLOAT,   /* to float32 */
    KL_CAST_REDUCE,  /* to float32, unless the call names a dtype */
    KL_CAST_WIDEST,  /* to the widest dtype among the inputs */
    KL_CAST_ERROR,   /* torch refuses the op under autocast */
    KL_CAST_LAYER,   /* recurrent layers whose results are lowered, from float32 inputs */
    KL_CAST_CELL,    /* nothing is cast where all are float32; of others it is not known */
    KL_CAST_EINSUM,  /* lowered where two operands are contracted */
    KL_CAST_PADDING, /* float32 where it reflects or replicates */
    KL_CAST_UNKNOWN,
} KlCast;

/* An axis may be an *order*: the rows of another one, sorted in each chunk on its own. */
typedef struct KlOrder {
    KlAxisId of; /* that axis; KL_ID_NONE: it is none, or is not any more */
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
    /* Dtypes of 16 bits, as bits, whose convolutions oneDNN runs on this CPU; of these, in tiles. */
    uint32_t blocked_halves, tiled_halves;
    int64_t block_width; /* channels that it lays side by side */
    bool is_grad_enabled;
    bool is_flash_allowed;    /* attention may use its fused kernel on the CPU */
    const int64_t *axis_rows; /* [n_axes] rows of each axis */
    const KlOrder *orders;    /* [n_axes], or NULL: none is one */
    uint64_t row_ranges; /* bit i: input i, of a call that reads an order, counts 0, 1, 2, ... */
    uint32_t n_axes;
} KlCall;

/* How the outputs share memory with an input. */
typedef enum {
    KL_ALIAS_NONE,  /* new memory */
    KL_ALIAS_VIEW,  /* a view of it */
    KL_ALIAS_SAME,  /* the very same tensor object: x.contiguous() of a dense x, in-place ops */
    KL_ALIAS_MAYBE, /* view, same or copy: the strides are not known */
} KlAlias;

/* Effects: which arguments the op writes. Bit i: word i of the signature. */
typedef uint32_t KlEffects;

/* What inference found. `outs` grows as needed and is reused from call to call. */
typedef struct KlInferred {
    KlMeta *outs; /* [n_outs] */
    uint32_t n_outs;
    size_t n_outs_max;
    KlAlias alias;           /* of all outputs; set by the shape rule */
    uint32_t alias_input;    /* which input, if any */
    uint8_t device;          /* of all outputs; a rule that moves a value (`to`) sets it */
    uint64_t inputs_no_grad; /* bit i: no gradient flows to input i; set by a rule */
    uint64_t outs_no_grad;   /* bit i: output i never requires grad; set by a rule */
    bool is_random;    /* the call draws from a generator: the row's kind, or what its rule says */
    KlEffects effects; /* what the call writes: the row's, or less where a shape rule says so */
    /* Where each dim of the first input went in the outputs, -1: reduced, mixed or gone. Set by a
     * shape rule for the place rule of the same row; the dims stay where they are by default. */
    int8_t dim_map[KL_DIMS_MAX];
    KlSplit split; /* split.places is owned: [n_places_max] */
    size_t n_places_max;
    bool is_ordered;  /* an order that it reads is kept */
    bool reads_aside; /* it reads what it writes on the side: statistics in evaluation */
    KlAxisId breaks;  /* declined: the order that it reads in another way; else KL_ID_NONE */
} KlInferred;

typedef KlStatus (*KlShapeRule)(const KlCall *call, KlInferred *result, KlError *error);
typedef KlStatus (*KlDtypeRule)(const KlCall *call, KlInferred *result, KlError *error);
typedef KlStatus (*KlPlaceRule)(const KlCall *call, KlInferred *result, KlError *error);
typedef void (*KlSavesRule)(const KlCall *call, const KlInferred *result, KlSaves *saves);

/* Multiples of a call's result, of its first operand, and of one byte for each element of the larger. */
typedef struct KlAmount {
    double outs, ins, masks;
} KlAmount;

/* What torch holds beside results while a call runs, and while the gradient of operand 0, 1 and of any
 * further one is made: a formula makes tensors on its way (d acos(x) makes five). As measured. */
typedef struct KlHeld {
    KlAmount run;
    double back_outs[3], back_ins[3], back_masks; /* as the parts of an amount */
    double relaid;     /* results, where the gradient that comes is laid out otherwise than them */
    uint8_t handed_on; /* bit i: the gradient of operand i is that of the result */
    bool
        gives_view; /* the result, of more than two dims, is a view of a tensor that nobody else sees */
    bool is_sliced;    /* the gradients of operands are parts of that of the result */
    bool is_wide;      /* others are as large as the result, until they are summed */
    bool is_stepwise;  /* what it keeps is made step by step, and does not gather without a graph */
    bool is_composed;  /* made of two calls: what is kept between them has a gradient of its own */
    bool is_of_terms;  /* a reduced loss, which lies in the memory of its terms */
    bool turns;        /* the gradient that it sends back is laid out otherwise */
    bool expands;      /* it is the result's, expanded: of no memory of its own */
    bool expands_part; /* the same of what a chunk leaves */
} KlHeld;

/* A reduction in chunks: what a chunk leaves, in multiples of the result, or of a row of the first operand where
 * that is `of_row`; what the graph that combines them
 * keeps of each, and their gradients; and where it is not computed by its call, what a chunk keeps for
 * backward and holds in flight; else NULL. */
typedef struct KlParts {
    double left, combined, seeds;
    const KlAmount *keeps;
    const KlHeld *held;
    bool of_row;
} KlParts;

/* Sets of dtypes, by their kinds. */
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

/* What torch keeps for backward, as words of the signature: bit i is word i. */
typedef struct KlKeeps {
    uint8_t words;        /* kept whichever gradient is wanted */
    uint8_t for_grad[4];  /* [i] kept where the gradient of word i is wanted */
    uint8_t outputs;      /* bit i: output i */
    bool has_no_gradient; /* no output requires grad */
} KlKeeps;

struct KlRow {
    const char *name; /* torch's own spelling */
    const char *call; /* the C-level function's signature: "x, dim=None, keepdim=False" */
    KlRowKind kind;
    bool is_heavy; /* takes too long to run again rather than keep its results: made of products */
    KlShapeRule shape;
    KlDtypeRule dtype;
    KlPlaceRule place;
    KlSavesRule saves; /* kl_rules_keep: what `keeps` says */
    KlKeeps keeps;
    KlEffects effects;
    /* What the cells are given, as conv(2) is: */
    uint8_t n_spatial; /* dims at the end that hold positions */
    uint8_t n_outs;    /* outputs, where a shape rule makes one or two */
    uint8_t n_gates;   /* of a recurrent layer or cell */
    bool is_packed;    /* a recurrent layer over sequences of several lengths */
    uint8_t n_mixed;   /* dims at the end that cannot hold the rows */
    KlDtype dtype_to;
    KlKinds kinds; /* of dtypes that a dtype rule takes */
    KlReduce reduce;
    KlTie tie;
    KlCast cast[2];      /* on the CPU, on CUDA */
    bool is_batch_norm;  /* may be given the statistics of all rows */
    const char *draws;   /* what it fills with random numbers: a word of koila/noise.py, or NULL */
    const char *gathers; /* how a matrix's gradient is added up: a word of accrue.py, or NULL */
    uint8_t gathered;    /* the word of that matrix */
    bool is_derivative;  /* it goes through the graph of other calls */
    bool is_joining;     /* its place rule knows inputs of several batches */
    bool is_laid_out_by_device; /* a GPU may lay the result out otherwise than the CPU */
    bool copies_expanded; /* its formula copies the gradient of the result where that is expanded */
    const KlHeld *held;   /* NULL: operands, results and gradients are all there is */
};

/* Rows in the order of ops.def, one per op id. */
extern const KlRow kl_ops_rows[];
extern const uint32_t kl_ops_n_rows;

/* The row of that name or alias, or NULL. Linear: for set-up, not for recording. */
const KlRow *kl_ops_find(const char *name);

/* What a row holds in flight. */
const KlHeld *kl_ops_held(const KlRow *row);

/* A way to split a reduction: its line of reductions.def. */
typedef struct KlReduction {
    const char *name;
    uint32_t n_parts;
    bool is_early;  /* part 1 may be of labels alone, and is then there before the scores */
    uint32_t saved; /* the parts that autograd keeps where they are put together, as bits */
    KlParts parts;
} KlReduction;

/* Indexed by KlReduce. */
extern const KlReduction kl_ops_reductions[KL_N_REDUCES];

/* What a reduction leaves and holds; `is_for_chunks`: the statistics of batch_norm. */
const KlParts *kl_ops_parts(KlReduce reduce, bool is_for_chunks);

/* A view of its input's memory that has no part in its graph: detach. */
bool kl_ops_is_detached(const KlRow *row);

/* The n-th alias and the row it stands for; false past the end. */
bool kl_ops_alias(uint32_t n, const char **alias, const KlRow **row);

#endif
