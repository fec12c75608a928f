/* SPDX-License-Identifier: Apache-2.0 */
/* measure_walk.h - the state of the fold over a schedule: of the step, of each value and of each storage. */
#pragma once

#include "measure.h"

typedef struct KlMeasureValue {
    uint32_t body;     /* the first segment, plus one, of the body in whose loop it was made last */
    bool is_gathering; /* its gradient is being accumulated and is held */
    bool is_root;
    bool is_one_gradient;      /* all readers add to one gradient of all rows */
    bool is_for_segments;      /* a chunk of it is held for later segments of its body */
    bool is_coming;            /* a chunk of its gradient is held, made by these */
    bool is_offloaded;         /* it is offloaded from its device */
    uint32_t given_in;         /* the step, plus one, of the last loop that loaded it back */
    bool is_held;              /* a body made it, and all chunks of it are held */
    bool is_counted;           /* likewise, the first of its storage, whose bytes count */
    uint8_t is_rematerialized; /* 1 + the depth of the call that did it for a chunk; 0: not */
    uint32_t barrier;          /* the barrier that made it, plus one; 0: none did */
} KlMeasureValue;

typedef struct KlMeasureStorage {
    int n_held;     /* held values of this storage */
    double bytes;   /* of these, counted once */
    bool is_shared; /* a barrier's graph, or a body's result, may keep what a barrier made */
} KlMeasureStorage;

/* Bytes that the backward of a body frees (its results and their gradients) beyond those that it makes (its inputs'
 * gradients), and gradients of all rows: they are held to its end. */
typedef struct KlExchange {
    double held, gradients; /* all; of these, the gradients */
    double in_sweep; /* per row: minus the new gradients beyond what is freed: in sweeps, too */
} KlExchange;

/* The state of the walk. `held` are bytes that outlive the runs so far. */
typedef struct KlWalk {
    const KlTape *tape;
    const KlProgram *program;
    const KlOutside *outside;
    const KlPolicy *policy;
    KlScratch scratch;
    KlSweep sweep;
    KlMoments *moments;
    KlSchedule schedule;
    KlBytes held, gradients; /* of these, the gradients */
    double held_per_chunk;
    uint32_t at; /* the index of the current step of the schedule */
    bool is_back;
    uint32_t depth;             /* open loops */
    const KlStep *loop;         /* the outer open loop */
    uint32_t open;              /* the run whose sweep is open, with a graph; KL_ID_NONE: none */
    KlBytes retained;           /* the graph of the segments before a head that runs in pieces */
    KlExchange exchange;        /* of the outer loop */
    double n_pieces;            /* pieces of a chunk while the head runs; else 1 */
    double *live;               /* [n_staged] bytes that a barrier holds: results and its graph */
    KlMeasureValue *values;     /* [n_values] */
    KlMeasureStorage *storages; /* [n_storages] */
} KlWalk;

/* Bytes of all rows of a value. */
static inline double
whole(const KlWalk *walk, KlValueId value)
{
    const KlSize *size = &walk->sweep.sizes[value];
    return (double)(size->n_elements * size->itemsize);
}

static inline bool
needs_gradient(const KlWalk *walk, KlValueId value)
{
    return walk->sweep.sizes[value].needs_gradient;
}

static inline KlStorageId
storage_of(const KlWalk *walk, KlValueId value)
{
    return walk->sweep.sizes[value].storage;
}

/* Return the bytes of a gradient that is summed over chunks: for half precision it is float32. */
static inline double
gradient(const KlWalk *walk, KlValueId value)
{
    KlDtype dtype = walk->tape->values[value].meta.dtype;
    bool is_half = dtype == KL_DTYPE_FLOAT16 || dtype == KL_DTYPE_BFLOAT16;
    return whole(walk, value) * (is_half ? 2 : 1);
}

/* Whether chunks of one tensor of all rows are views of it. */
static inline bool
is_cut_in_place(const KlWalk *walk, KlValueId value)
{
    const KlMeta *meta = &walk->tape->values[value].meta;
    return kl_meta_is_cut_in_place(meta, &meta->place);
}

/* Return what a reduction holds in chunks, if `value` represents the partial results of one; else NULL. */
static inline const KlParts *
parts_of(const KlWalk *walk, KlValueId value)
{
    return kl_tape_parts(walk->tape, &walk->tape->nodes[walk->tape->values[value].node]);
}

/* Return the bytes that KlParts counts in: of a reduction's result (0: a single number), or of a row of its input; for
 * each chunk or, if partial results are not added up, for each of its pieces. */
static inline double
result_of(const KlWalk *walk, KlValueId value, const KlParts *parts)
{
    const KlSweepNode *node = &walk->sweep.nodes[walk->tape->values[value].node];
    bool is_for_each = walk->policy->n_pieces > 1 && walk->policy->second_size == 0;
    double n = is_for_each && !parts->added ? walk->policy->n_pieces : 1;
    if (parts->of_row) {
        return n * walk->sweep.sizes[walk->sweep.inputs[node->first_input]].per_row;
    }
    return walk->sweep.sizes[value].n_elements > 1 ? n * whole(walk, value) : 0;
}

/* Return the number of rows of a body's axis. */
static inline int64_t
rows_of(const KlWalk *walk, const KlRun *body)
{
    KlAxisId axis = kl_tape_axis_find(walk->tape, body->axis);
    return axis != KL_ID_NONE && walk->tape->axis_rows[axis] > 0 ? walk->tape->axis_rows[axis] : 1;
}

static inline KlValueId
value_of(const KlWalk *walk, const KlStep *step, uint32_t i)
{
    uint32_t at =
        i < step->values.n ? step->values.first + i : step->others.first + i - step->values.n;
    return walk->schedule.values.ids[at];
}

/* The bytes that an instruction adds and frees. */
typedef void KlEffect(KlWalk *walk, const KlStep *step);
#define KL_INSTRUCTION(name, effect, meaning) KlEffect kl_walk_##effect;
#include "schedule.def"
#undef KL_INSTRUCTION

/* Append a moment, which counts only its own run, and add the bytes that are held outside it. */
void kl_walk_note(KlWalk *walk, KlMoment moment);

/* Sweep the backward pass of the run that is open and append its moments. */
void kl_walk_sweep_back(KlWalk *walk);

/* Sweep the forward pass of a run; `moments` NULL: again, to restore the sweep's state. */
void kl_walk_sweep_forward(KlWalk *walk, const KlRun *run, bool is_graph, KlMoments *moments);

/* Sweep the forward pass of a span and append its moments; NULL: only the sweep's state and peak are needed. */
void kl_walk_sweep_span(KlWalk *walk, KlSpan span, KlMoments *moments);

/* Combine parts and hold what the graph of that saves; or (`is_back`) run it backward and hold the parts' gradients. */
void kl_walk_combine(KlWalk *walk, const KlRun *run, bool is_back);

/* Set the bytes that barrier `i` holds to those that its sweep, which is open, has live. */
void kl_walk_hold_barrier(KlWalk *walk, uint32_t i);

/* Hold the gradients of a run's inputs from outside its body, unless held, or (`are_copies`) only those that are copies of
 * what the run makes; return the bytes made chunk by chunk. */
double kl_walk_gather_gradients(KlWalk *walk, const KlRun *run, uint32_t body, bool are_copies);

/* Add the bytes of gradients that outlive a run, or of a chunk's; negative numbers remove them. */
void kl_walk_hold_gradients(KlWalk *walk, double bytes, double per_row);

/* Hold the gradients that a segment's backward made for results of earlier segments, until their backward. */
void kl_walk_hold_segment_gradients(KlWalk *walk, const KlRun *run);
