/* SPDX-License-Identifier: Apache-2.0 */
/* tape.h - the recorded program of a thread: nodes (calls) in call order, and the values they make, addressed by index.
 *
 * Call order: init; leaf and append while recording; then stage.h reads it. Ids stay valid until kl_tape_clear.
 * The tape knows no Python objects: the binding keeps the Python call of node i in an array of its own. */
#pragma once

#include "infer.h"

typedef enum {
    KL_STATE_PENDING,  /* recorded, not run */
    KL_STATE_COMPUTED, /* has its number, and its node can still run backward */
    KL_STATE_LIVE, /* has a real tensor with a plain autograd graph: after a live run; and each leaf */
    KL_STATE_FREED, /* has its number, but its graph is freed: it is read as a leaf */
} KlState;

typedef struct KlInput {
    KlValueId value; /* KL_ID_NONE: the argument is None */
    KlPlace place;   /* where its rows are when the node runs on a chunk; WHOLE: it is read whole */
} KlInput;

typedef struct KlValue {
    KlMeta meta;
    KlNodeId node;       /* KL_ID_NONE: a leaf (a real tensor that entered the program) */
    KlStorageId storage; /* values that share memory have the same */
    uint32_t version;    /* of the storage, when this value was made */
    KlValueId view_of;   /* the value it is a view of; KL_ID_NONE: it is no view */
    uint32_t n_pending;  /* pending nodes that read it */
    uint32_t n_aside;    /* of these, nodes that write it on the side */
    uint8_t state;       /* KlState */
    bool is_wanted;      /* the user can still reach it */
    bool is_reached;     /* scratch: a wanted value depends on it */
    bool has_history;    /* scratch: a backward may go through it */
    bool is_over;        /* scratch: a backward through it would get to a freed graph */
    bool is_hooked; /* a hook needs the gradient of all rows: its readers are in a later stage */
    KlValueId retained_as; /* retain_grad: the value whose .grad its gradient is; else KL_ID_NONE */
} KlValue;

typedef struct KlNode {
    const KlRow *row;     /* NULL: the op has no row; torch gave the shapes and dtypes */
    uint32_t first_input; /* into tape->inputs */
    uint32_t n_inputs;
    KlValueId first_out;
    uint32_t n_outs;
    uint32_t first_rewrite; /* into tape->rewrites */
    uint32_t n_rewrites;
    uint32_t context;     /* the binding's id of the context it was recorded in */
    uint32_t region;      /* the torch.utils.checkpoint body that makes this call; 0: none */
    uint32_t writes;      /* bit i: input i is written in place, and output 0 is its new version */
    uint32_t leaf_writes; /* bit i: input i, a leaf, is updated on the side (running statistics) */
    uint64_t row_ranges; /* bit i: input i counts the rows 0, 1, ...: a chunk gets its first ones */
    KlAxisId axis;
    const char *reason; /* why it runs ONCE, or NULL */
    KlSaves saves;
    uint8_t mode;   /* KlMode */
    uint8_t reduce; /* KlReduce */
    bool is_random;
    bool is_drawn;        /* the generator has moved past its draws: each run must repeat these */
    bool is_done;         /* it has run, or will never have to */
    bool is_failed;       /* done without a number: it, or a node it depends on, raised */
    KlNodeId failed_by;   /* failed: the node that raised */
    KlValueId refresh_of; /* a view taken again after a write: the view from before the write, whose
                             tensor a live run uses; other nodes: KL_ID_NONE */
    uint32_t refresh_out; /* the output of this node that replaces it */
    bool is_grad_enabled;
    bool reads_aside;  /* it reads the leaf that it writes on the side */
    bool is_open;      /* made by sizes alone: WHOLE until a reader determines where its rows are */
    bool must_run;     /* scratch of kl_tape_find_no_grad */
    bool is_dead_draw; /* scratch: it has still to draw, but its result is not reachable */
    bool is_for_chunks;  /* only needed in chunks: live, the next node computes this itself */
    bool is_graph_freed; /* a backward has freed its graph */
    bool is_abandoned;   /* a run with it raised, and its values were not asked for since */
} KlNode;

typedef struct KlStorage {
    uint32_t version; /* the number of writes */
    KlValueId base;   /* the value of the whole storage at that version */
    KlValueId apart; /* a detached view to which a write gave a graph of its own, after the write */
    bool is_held;    /* scratch: one of its values is wanted */
    bool is_awaited; /* kl_tape_find_awaited: a call that has not run makes a view of it */
    bool is_uncertain; /* another storage may be the same memory: a write to it must run live */
    bool is_hidden;    /* written through x.data, so saved tensors of it have changed values */
    bool is_lost; /* uncertain, and it ran in chunks, so the truth is lost: a write is refused */
} KlStorage;

typedef struct KlTape {
    KlNode *nodes; /* [n_nodes] */
    size_t n_nodes, n_nodes_max;
    KlValue *values; /* [n_values] */
    size_t n_values, n_values_max;
    KlInput *inputs; /* [n_inputs] */
    size_t n_inputs, n_inputs_max;
    KlRewrite *rewrites; /* [n_rewrites] */
    size_t n_rewrites, n_rewrites_max;
    KlStorage *storages; /* [n_storages] */
    size_t n_storages, n_storages_max;
    int64_t *axis_rows; /* [n_axes] rows of each axis */
    uint32_t *axis_of;  /* [n_axes] union-find: the axis that it was merged into, or itself */
    KlOrder *orders;    /* [n_axes] */
    size_t n_axes, n_axis_rows_max, n_axis_of_max, n_orders_max;
    size_t n_done;    /* every node before this one is done */
    size_t n_aside;   /* pending writes on the side */
    size_t n_wanted;  /* wanted values that are no leaves */
    bool has_regions; /* a node has a region */
} KlTape;

void kl_tape_init(KlTape *tape);
void kl_tape_fini(KlTape *tape);

/* Whether an array with `n_max` entries, of which `n` were used, is too large to keep for the next program. */
bool kl_tape_is_roomy(size_t n, size_t n_max);

/* Remove all nodes and values. Keep the memory, unless the tape is roomy. */
void kl_tape_clear(KlTape *tape);

/* Add an axis of `rows` rows. */
KlStatus kl_tape_axis(KlTape *tape, int64_t rows, KlAxisId *axis);

/* Return the axis that `axis` has been merged into, or itself. */
static inline KlAxisId
kl_tape_axis_find(const KlTape *tape, KlAxisId axis)
{
    while (axis != KL_ID_NONE && tape->axis_of[axis] != axis) {
        axis = tape->axis_of[axis];
    }
    return axis;
}

/* Return the node that makes `value`; NULL: it is a leaf, or KL_ID_NONE. */
static inline const KlNode *
kl_tape_maker(const KlTape *tape, KlValueId value)
{
    KlNodeId node = value != KL_ID_NONE ? tape->values[value].node : KL_ID_NONE;
    return node != KL_ID_NONE ? &tape->nodes[node] : NULL;
}

/* Whether two places are equal, considering merged axes. */
static inline bool
kl_tape_is_place(const KlTape *tape, const KlPlace *left, const KlPlace *right)
{
    KlPlace one = *left, other = *right;
    one.axis = kl_tape_axis_find(tape, one.axis);
    other.axis = kl_tape_axis_find(tape, other.axis);
    return kl_place_is_equal(&one, &other);
}

/* Merge two axes with the same number of rows, after a call has read both aligned row by row. */
void kl_tape_axis_merge(KlTape *tape, KlAxisId left, KlAxisId right);

/* Whether the call that made a value returns indices (sort, argmax ...), so that no element is negative. */
bool kl_tape_is_index(const KlTape *tape, KlValueId value);

/* Set a node to run once, on the whole batch, because of `reason`; NULL: the user's report does not list it. */
void kl_tape_run_once(KlTape *tape, KlNode *node, const char *reason);

/* Make an order an axis like any other, since a call reads it in a way that is only right on the whole batch: nodes that
 * need the order run once. NOTE [orders] in rules_order.c explains orders. */
void kl_tape_break_order(KlTape *tape, KlAxisId order);

/* Before staging: break the orders of which the user holds a value or needs a gradient. Merge the others into the axis
 * of the rows that they order. */
void kl_tape_close_orders(KlTape *tape);

/* Add a leaf for a real tensor. Its state is live. */
KlStatus kl_tape_leaf(KlTape *tape, const KlMeta *meta, KlValueId *value);

/* A call that kl_tape_append makes a node of. */
typedef struct KlRecord {
    KlNode node;             /* without what follows from `inferred` and from the tape */
    const KlValueId *inputs; /* [node.n_inputs] their current versions; KL_ID_NONE: None */
    const KlInferred *inferred;
    bool is_detached; /* it writes a detached view, whose graph is not that of its base */
} KlRecord;

/* Append a node. On success `*node` is its id and its outputs are values first_out, first_out + 1, ...
 * If it writes input 0 in place, output 0 is the new version of that input. If the input is a view, the old version of
 * its base becomes one more input, and output 1 is the new version of the base. */
KlStatus kl_tape_append(KlTape *tape, const KlRecord *record, KlNodeId *node);

/* Whether a call would read a leaf that a pending node writes on the side, or write one that a pending node reads. All
 * writes on the side of a leaf go to one copy of it, so a reader could not see the value between two writes. */
bool kl_tape_mixes_aside(const KlTape *tape, uint32_t n_inputs, const KlValueId *inputs,
                         uint32_t leaf_writes);

/* Put the rows of `value` at `place`, for a reader, if its node is open (any dim may have them) and nothing reads it. */
void kl_tape_settle_open(KlTape *tape, KlValueId value, const KlPlace *place);

/* Whether `value` was made before the last write to its storage. */
static inline bool
kl_tape_is_stale(const KlTape *tape, KlValueId value)
{
    const KlValue *v = &tape->values[value];
    return v->version != tape->storages[v->storage].version;
}

/* Whether the call that makes `value` failed; false for KL_ID_NONE. */
static inline bool
kl_tape_is_failed(const KlTape *tape, KlValueId value)
{
    const KlNode *maker = kl_tape_maker(tape, value);
    return maker != NULL && maker->is_failed;
}

/* Note that a node ran live: its outputs become live, and its inputs have one pending reader less. */
void kl_tape_set_done(KlTape *tape, KlNodeId node);

/* Note that a node failed: it and all nodes that depend on it are done, without a number. */
void kl_tape_set_failed(KlTape *tape, KlNodeId node);

/* Make `value`, which has its number, a leaf, so that its node need not run again for it. */
void kl_tape_cut(KlTape *tape, KlValueId value);

/* Whether there are pending nodes, and all of them are abandoned. */
bool kl_tape_is_abandoned(const KlTape *tape);

/* Mark the storages of which abandoned nodes make views: run later, a view would see the memory as it is then. */
void kl_tape_find_awaited(KlTape *tape);

/* Abandon the pending nodes from `first` on: after a run raised, they wait until one of their values is asked for. */
void kl_tape_abandon(KlTape *tape, KlNodeId first);

/* Make all abandoned nodes pending again, if one of them makes `value`, which is asked for. */
void kl_tape_ask(KlTape *tape, KlValueId value);

/* Set nodes done whose values the user cannot reach, directly or through other nodes, and that need not draw, so that
 * their leaves may change. `is_abandoned_only`: only abandoned nodes. */
void kl_tape_retire(KlTape *tape, bool is_abandoned_only);

/* Find the part of a tape up to the last pending node, whose arrays `*part` shares. Return whether the rest can be
 * dropped: it has run, and neither wrote nor gave the user views of memory that values before it have. */
bool kl_tape_find_part(const KlTape *tape, KlTape *part);

/* Whether a node has still to draw. Until then no other draw and no read of the generator's state may happen. */
static inline bool
kl_tape_waits_to_draw(const KlNode *node)
{
    return node->is_random && !node->is_done && !node->is_drawn && !node->is_abandoned;
}

/* Return the first node from `from` on that has still to draw; KL_ID_NONE: there is none. */
KlNodeId kl_tape_next_draw(const KlTape *tape, KlNodeId from);

static inline bool
kl_tape_has_draw(const KlTape *tape)
{
    return kl_tape_next_draw(tape, 0) != KL_ID_NONE;
}

/* Whether a random call has still to draw although its result is not reachable; until then it keeps its inputs alive. */
bool kl_tape_has_dead_draw(KlTape *tape);

/* Whether values without a gradient, which the user holds, are all that waits for calls with one: a metric of a forward
 * pass that nobody can differentiate any more, since its output is gone. */
bool kl_tape_has_stranded(KlTape *tape);

/* Set must_run of the nodes that can run now without a backward later: pending, wanted, and no input requires a
 * gradient, or one is of a freed graph. Return whether there is one. */
bool kl_tape_find_no_grad(KlTape *tape);

/* Return the memory that a node takes in chunks if it is a reduction; NULL: it is none. */
static inline const KlParts *
kl_tape_parts(const KlTape *tape, const KlNode *node)
{
    bool is_on_cpu = node->n_outs > 0 && tape->values[node->first_out].meta.device == 0;
    return node->mode == KL_MODE_REDUCE
               ? kl_ops_parts((KlReduce)node->reduce, node->is_for_chunks, is_on_cpu)
               : NULL;
}

static inline const KlInput *
kl_tape_inputs(const KlTape *tape, const KlNode *node)
{
    return &tape->inputs[node->first_input];
}

/* Whether the last input of a node is what a call that only chunks run (is_for_chunks) makes for it. */
static inline bool
kl_tape_reads_for_chunks(const KlTape *tape, const KlNode *node)
{
    uint32_t last = node->first_input + node->n_inputs - 1;
    const KlNode *maker =
        kl_tape_maker(tape, node->n_inputs > 0 ? tape->inputs[last].value : KL_ID_NONE);
    return maker != NULL && maker->is_for_chunks;
}

/* Return the bytes that a node allocates for its results; views have none. */
static inline int64_t
kl_tape_n_bytes(const KlTape *tape, KlNodeId node)
{
    int64_t bytes = 0;
    for (uint32_t k = 0; k < tape->nodes[node].n_outs; k++) {
        const KlValue *value = &tape->values[tape->nodes[node].first_out + k];
        bytes += value->view_of == KL_ID_NONE ? kl_meta_n_bytes(&value->meta) : 0;
    }
    return bytes;
}

/* Whether a hook or retain_grad needs the gradient of all rows of `value`. */
static inline bool
kl_tape_is_looked_at(const KlTape *tape, KlValueId value)
{
    return tape->values[value].is_hooked || tape->values[value].retained_as != KL_ID_NONE;
}

/* Set whether the user can still reach a value. */
static inline void
kl_tape_want(KlTape *tape, KlValueId id, bool is_wanted)
{
    KlValue *value = &tape->values[id];
    if (value->node != KL_ID_NONE) {
        tape->n_wanted = tape->n_wanted - value->is_wanted + is_wanted;
    }
    value->is_wanted = is_wanted;
}

/* Whether a call, as_leaf, makes a leaf of autograd's graph of `value`. */
static inline bool
kl_tape_is_begun(const KlTape *tape, KlValueId value)
{
    const KlNode *maker = kl_tape_maker(tape, value);
    return maker != NULL && maker->row != NULL && maker->row->keeps.is_leaf;
}

/* The value of the memory that views of `value` are taken of: the base of its storage, or the leaf that they are views
 * of, if that was cut from its call and its tensor shows the memory as it is. */
KlValueId kl_tape_base(const KlTape *tape, KlValueId value);

/* Whether neither the user nor a pending node needs the number of `value`. */
static inline bool
kl_tape_is_dead(const KlTape *tape, KlValueId value)
{
    return !tape->values[value].is_wanted && tape->values[value].n_pending == 0;
}
