/* SPDX-License-Identifier: Apache-2.0 */
/* tape.h - the recorded program: nodes in call order, addressed by index, and the values they make.
 *
 * Call order: init; leaf and append while recording; write for in-place calls; then stage.h reads it.
 * Ids survive growth. Nothing here knows Python: the binding keeps the call of node i beside node i. */
#ifndef KL_TAPE_H
#define KL_TAPE_H

#include "infer.h"

typedef enum {
    KL_STATE_PENDING, /* recorded, not run */
    KL_STATE_KNOWN,   /* has a number, and its node: it can still be differentiated */
    KL_STATE_LIVE,  /* has a real tensor on a real autograd graph: what ran whole, and every leaf */
    KL_STATE_SPENT, /* has a number, and is a leaf: no gradient goes through the call that made it */
    KL_STATE_OLD,   /* likewise, and a step ended since */
} KlState;

typedef struct KlInput {
    KlValueId value; /* KL_ID_NONE: None was given */
    KlPlace place;   /* where its rows are when the node runs on a chunk; WHOLE: given whole */
} KlInput;

typedef struct KlValue {
    KlMeta meta;
    KlNodeId node;                /* KL_ID_NONE: a leaf (a real tensor that entered the program) */
    KlStorageId storage;          /* values that share memory share it */
    uint32_t version;             /* of the storage, when this value was made */
    KlValueId view_of;            /* KL_ID_NONE: not a view; else the value it is a view of */
    uint32_t n_pending;           /* pending nodes that read it */
    uint32_t n_aside;             /* of these, how many write it on the side */
    uint8_t state;                /* KlState */
    bool is_wanted;               /* the user can still reach it */
    bool is_reached, has_history; /* scratch: it leads to what is wanted; a gradient leads to it */
    bool is_hooked; /* somebody looks at its whole gradient: what reads it is a stage later */
    KlValueId retained_as; /* its gradient is kept, as of this value; KL_ID_NONE: it is not */
} KlValue;

typedef struct KlNode {
    const KlRow *row;     /* NULL: no row; shape and dtype were asked of torch */
    uint32_t first_input; /* into tape->inputs */
    uint32_t n_inputs;
    KlValueId first_out;
    uint32_t n_outs;
    uint32_t first_rewrite; /* into tape->rewrites */
    uint32_t n_rewrites;
    uint32_t context; /* the binding's id of the context it was recorded in */
    uint32_t region;  /* the body of a checkpoint that it is a call of; 0: of none */
    uint32_t writes;  /* bit i: input i is written in place, and output 0 is its new version */
    uint32_t
        leaf_writes; /* bit i: input i, a leaf, is written on the side (batch_norm's statistics) */
    uint64_t row_ranges; /* bit i: input i counts a dim of rows, a chunk gets its first ones */
    KlAxisId axis;
    const char *reason; /* why it is ONCE, or NULL */
    KlSaves saves;
    uint8_t mode;   /* KlMode */
    uint8_t reduce; /* KlReduce */
    bool is_random;
    bool is_drawn;      /* the generator moved past its draws: every run of it must draw the same */
    bool is_done;       /* nothing is left to do for it */
    bool is_failed;     /* done without a number: it, or what it reads, raised */
    KlNodeId failed_by; /* failed: the node that raised */
    KlValueId
        refresh_of; /* a view taken again after a write: the value that stands for it from before,
                              whose tensor live replay uses; else KL_ID_NONE */
    uint32_t refresh_out; /* which output that is */
    bool is_grad_enabled;
    bool reads_aside;   /* it reads what it writes on the side */
    bool is_open;       /* made by sizes alone: WHOLE until a reader says where its rows are */
    bool must_run;      /* scratch of kl_tape_find_known */
    bool is_dead_draw;  /* scratch: it has still to draw, and nobody will look at it */
    bool is_for_chunks; /* only chunks need it: live, the node after it does that itself */
    bool is_spent;      /* a backward went through it, and kept nothing for another */
    bool is_abandoned;  /* a run of it raised, and nobody has asked for it since */
} KlNode;

typedef struct KlStorage {
    uint32_t version;  /* counts writes */
    KlValueId base;    /* the value of the whole storage at that version */
    KlValueId apart;   /* a detached view that a write gave a graph of its own, as that left it */
    bool is_held;      /* scratch: one of its values is wanted */
    bool is_awaited;   /* kl_tape_find_awaited: a call that has not run makes a view of it */
    bool is_uncertain; /* another storage may be the same memory: a write to it must run live */
    bool is_hidden;    /* written through x.data: what was kept of it for backward is another now */
    bool is_lost; /* and nobody can tell any more, for it ran in chunks: a write to it is refused */
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
    uint32_t *axis_of;  /* [n_axes] union-find: the axis it was found equal to, or itself */
    KlOrder *orders;    /* [n_axes] */
    size_t n_axes, n_axes_max;
    size_t n_done;    /* every node before this one is done */
    size_t n_aside;   /* writes on the side that are still to be made */
    bool has_regions; /* a node is a call of the body of a checkpoint */
} KlTape;

void kl_tape_init(KlTape *tape);
void kl_tape_fini(KlTape *tape);

/* Whether a program that used `n` of `n_max` entries leaves more room than is worth keeping. */
bool kl_tape_is_roomy(size_t n, size_t n_max);

/* Forget all nodes and values; keeps the memory, unless the tape is roomy. */
void kl_tape_clear(KlTape *tape);

/* A new axis of `rows` rows. */
KlStatus kl_tape_axis(KlTape *tape, int64_t rows, KlAxisId *axis, KlError *error);

/* The axis that stands for `axis` now. */
static inline KlAxisId
kl_tape_axis_find(const KlTape *tape, KlAxisId axis)
{
    while (axis != KL_ID_NONE && tape->axis_of[axis] != axis) {
        axis = tape->axis_of[axis];
    }
    return axis;
}

/* Whether two places are one, whatever axes were merged since. */
static inline bool
kl_tape_is_place(const KlTape *tape, const KlPlace *left, const KlPlace *right)
{
    KlPlace one = *left, other = *right;
    one.axis = kl_tape_axis_find(tape, one.axis);
    other.axis = kl_tape_axis_find(tape, other.axis);
    return kl_place_is_equal(&one, &other);
}

/* Two axes of equal rows met aligned: from now on they are one. */
void kl_tape_axis_merge(KlTape *tape, KlAxisId left, KlAxisId right);

/* Whether a value was an index of something when its call made it: no less than 0. */
bool kl_tape_is_index(const KlTape *tape, KlValueId value);

/* What is in an order, or has to do with one, is read in another way: all of it runs once. */
void kl_tape_break_order(KlTape *tape, KlAxisId order);

/* Before the tape is staged: orders of which somebody holds or looks at something are broken; others are of the
 * rows that they order, and nothing recorded later reads them. */
void kl_tape_close_orders(KlTape *tape);

/* A real tensor enters the program. Its state is live. */
KlStatus kl_tape_leaf(KlTape *tape, const KlMeta *meta, KlValueId *value, KlError *error);

/* What a call needs to become a node. */
typedef struct KlRecord {
    const KlRow *row;
    const KlValueId *inputs; /* [n_inputs] current values, KL_ID_NONE for None */
    uint32_t n_inputs;
    const KlInferred *inferred;
    KlSaves saves;
    uint32_t context;
    uint32_t writes;      /* bit i: input i is written in place */
    uint32_t leaf_writes; /* bit i: input i, a leaf, is written on the side */
    bool is_detached; /* what is written is a detached view: its graph is not that of the base */
    bool is_random;
    bool is_grad_enabled;
    KlValueId
        refresh_of; /* KL_ID_NONE, or the value of which output `refresh_out` is a later version */
    uint32_t refresh_out;
} KlRecord;

/* Append a node. On success `*node` is its id and its outputs are values first_out, first_out + 1, ...
 * Where input 0 is written, output 0 is its new version; if it is a view, the base as it was before the
 * write becomes one input more, and output 1 is the base's new version. */
KlStatus kl_tape_append(KlTape *tape, const KlRecord *record, KlNodeId *node, KlError *error);

/* Whether a call would read a leaf that a pending node writes on the side, or write one on the side that a
 * pending node reads: all such writes are made on one copy, which each of them sees at another moment. */
bool kl_tape_mixes_aside(const KlTape *tape, uint32_t n_inputs, const KlValueId *inputs,
                         uint32_t leaf_writes);

/* `value` is about to be read at `place`. Where it is open, and nothing has read it, it is made there: from
 * now on its rows are at `place`. */
void kl_tape_settle_open(KlTape *tape, KlValueId value, const KlPlace *place);

/* Whether `value` was made before the last write to its storage. */
static inline bool
kl_tape_is_stale(const KlTape *tape, KlValueId value)
{
    const KlValue *v = &tape->values[value];
    return v->version != tape->storages[v->storage].version;
}

/* Whether the call that makes `value` failed; KL_ID_NONE has not. */
static inline bool
kl_tape_is_failed(const KlTape *tape, KlValueId value)
{
    KlNodeId source = value != KL_ID_NONE ? tape->values[value].node : KL_ID_NONE;
    return source != KL_ID_NONE && tape->nodes[source].is_failed;
}

/* Node `node` ran live: its outputs are live and its inputs have one reader less. */
void kl_tape_set_done(KlTape *tape, KlNodeId node);

/* Node `node` failed: it and all that read its outputs, directly or not, are done without a number. */
void kl_tape_set_failed(KlTape *tape, KlNodeId node);

/* `value` has a number, which is all that is left of it: from now on it is a leaf, and what made it need not
 * run again. */
void kl_tape_cut(KlTape *tape, KlValueId value);

/* A run raised: what is pending now waits until somebody asks for it by name. */
void kl_tape_abandon(KlTape *tape, bool is_abandoned);

/* Mark the storages that abandoned nodes make views of: run later, they are taken of the memory as it is then. */
void kl_tape_find_awaited(KlTape *tape);

/* The same of what was recorded from node `first` on: eager never came to it. */
void kl_tape_abandon_from(KlTape *tape, KlNodeId first);

/* Somebody asks for `value`: what was abandoned is pending again, if that is among it. */
void kl_tape_ask(KlTape *tape, KlValueId value);

/* What leads to nothing the user can reach, and has not to draw, is done: its leaves may change. Abandoned
 * only: leave all that no failed run has given up. */
void kl_tape_retire(KlTape *tape, bool is_abandoned_only);

/* Whether a node has still to draw: a draw made now, or the generator asked now, would come before it. */
static inline bool
kl_tape_waits_to_draw(const KlNode *node)
{
    return node->is_random && !node->is_done && !node->is_drawn && !node->is_abandoned;
}

/* The first node from `from` on that has still to draw; KL_ID_NONE: none has. */
KlNodeId kl_tape_next_draw(const KlTape *tape, KlNodeId from);

static inline bool
kl_tape_has_draw(const KlTape *tape)
{
    return kl_tape_next_draw(tape, 0) != KL_ID_NONE;
}

/* Whether a random call has still to draw whose result nobody can reach: it keeps what it reads. */
bool kl_tape_has_dead_draw(KlTape *tape);

/* Mark (must_run) the nodes that can be known for good: pending, wanted, no gradient in their history.
 * Returns whether there is one. */
bool kl_tape_find_known(KlTape *tape);

/* What a node reads. */
static inline const KlInput *
kl_tape_inputs(const KlTape *tape, const KlNode *node)
{
    return &tape->inputs[node->first_input];
}

/* Bytes that node `node` makes: views share theirs. */
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

/* Whether somebody looks at the whole gradient of `value`. */
static inline bool
kl_tape_is_looked_at(const KlTape *tape, KlValueId value)
{
    return tape->values[value].is_hooked || tape->values[value].retained_as != KL_ID_NONE;
}

/* Whether nobody needs the number of `value` any more: not the user, not a pending node. */
static inline bool
kl_tape_is_dead(const KlTape *tape, KlValueId value)
{
    return !tape->values[value].is_wanted && tape->values[value].n_pending == 0;
}

#endif
