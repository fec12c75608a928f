/* SPDX-License-Identifier: Apache-2.0 */
/* measure_value.h - the state of measure.c's walk: of the step, of each value and of each storage. */
#ifndef KL_MEASURE_VALUE_H
#define KL_MEASURE_VALUE_H

#include "measure.h"

typedef struct KlMeasureValue {
    uint32_t body;     /* the first segment, plus one, of the body in whose loop it was made last */
    bool is_gathering; /* its gradient is being accumulated and is held */
    bool is_read_by_tail, is_root;
    bool is_for_segments; /* a later segment of the body that makes it reads it */
    bool is_one_gradient; /* all readers add to one gradient of all rows */
    bool is_inner;        /* only segments of one body read it */
    bool is_handed;       /* a chunk of it is held for later segments of its body */
    bool is_coming;       /* a chunk of its gradient is held, made by these */
    bool is_offloaded;    /* it is offloaded from its device */
    uint32_t given_in;    /* the step, plus one, of the last loop that loaded it back */
    bool is_held;         /* a body made it, and all chunks of it are held */
    bool is_counted;      /* likewise, the first of its storage, whose bytes count */
    uint8_t is_filled;    /* a chunk of it is filled: 1 + the depth of the fill() that did it */
    uint32_t barrier;     /* the barrier that made it, plus one; 0: none did */
} KlMeasureValue;

typedef struct KlMeasureStorage {
    uint32_t n_held; /* held values of this storage */
    double bytes;    /* of these, counted once */
    bool is_shared;  /* a barrier's graph, or a body's result, may keep what a barrier made */
} KlMeasureStorage;

/* Bytes that the backward of a body frees (its results and their gradients) beyond those that it makes (its inputs'
 * gradients), which are held to its end. */
typedef struct KlExchange {
    double held, gradients; /* all; of these, the gradients */
    double
        in_sweep; /* per row: minus the new gradients beyond what is freed: sweeps count them, too */
} KlExchange;

/* The state of the walk. `held` are bytes that outlive the runs so far. */
typedef struct Step {
    const KlTape *tape;
    const KlProgram *program;
    const KlStages *stages;
    const KlOutside *outside;
    const KlPolicy *policy;
    KlError *error;
    KlStatus status; /* the first failure stays, and nothing is noted after it */
    KlScratch scratch;
    KlSweep sweep;
    KlMoments *moments;
    KlSchedule schedule;
    double held, held_per_row, held_per_chunk;
    double gradients, gradients_per_row; /* the gradients among the held bytes */
    uint32_t at;                         /* the index of the current step of the schedule */
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
} Step;

/* Bytes of all rows of a value. */
static inline double
whole(const Step *step, KlValueId value)
{
    const KlSize *size = &step->sweep.sizes[value];
    return (double)(size->n_elements * size->itemsize);
}

static inline bool
needs_gradient(const Step *step, KlValueId value)
{
    return step->sweep.sizes[value].needs_gradient;
}

static inline KlStorageId
storage_of(const Step *step, KlValueId value)
{
    return step->sweep.sizes[value].storage;
}

/* Return the bytes of a gradient that is summed over chunks: for half precision it is float32. */
static inline double
gradient(const Step *step, KlValueId value)
{
    KlDtype dtype = step->tape->values[value].meta.dtype;
    bool is_half = dtype == KL_DTYPE_FLOAT16 || dtype == KL_DTYPE_BFLOAT16;
    return whole(step, value) * (is_half ? 2 : 1);
}

/* Whether chunks of one tensor of all rows are views of it. */
static inline bool
is_cut_in_place(const Step *step, KlValueId value)
{
    const KlMeta *meta = &step->tape->values[value].meta;
    return kl_meta_is_cut_in_place(meta, &meta->place);
}

/* Return what a reduction holds in chunks, if `value` represents the partial results of one; else NULL. */
static inline const KlParts *
parts_of(const Step *step, KlValueId value)
{
    const KlNode *node = &step->tape->nodes[step->tape->values[value].node];
    return node->mode == KL_MODE_REDUCE ? kl_ops_parts((KlReduce)node->reduce, node->is_for_chunks)
                                        : NULL;
}

/* Return the bytes that KlParts counts in: of a reduction's result (0: a single number), or of a row of its input; for
 * each chunk or, if partial results are not added up, for each of its pieces. */
static inline double
result_of(const Step *step, KlValueId value, const KlParts *parts)
{
    const KlSweepNode *node = &step->sweep.nodes[step->tape->values[value].node];
    bool is_for_each = step->policy->n_pieces > 1 && step->policy->n_across == 0;
    double n = is_for_each && !parts->added ? step->policy->n_pieces : 1;
    if (parts->of_row) {
        return n * step->sweep.sizes[step->sweep.inputs[node->first_input]].per_row;
    }
    return step->sweep.sizes[value].n_elements > 1 ? n * whole(step, value) : 0;
}

/* Return the number of rows of a body's axis. */
static inline int64_t
rows_of(const Step *step, const KlRun *body)
{
    KlAxisId axis = kl_tape_axis_find(step->tape, body->axis);
    return axis != KL_ID_NONE && step->tape->axis_rows[axis] > 0 ? step->tape->axis_rows[axis] : 1;
}

static inline bool
is_barrier_after(const Step *step, const KlRun *run)
{
    return !kl_program_is_body(run) && step->stages->last_body != KL_STAGE_NONE &&
           run->stage > step->stages->last_body;
}

static inline KlValueId
value_of(const Step *step, const KlStep *of, uint32_t i)
{
    return step->schedule.values.ids[of->values.first + i];
}

/* Whether a segment of the same body as `run` makes a value. */
static inline bool
is_made_in(const Step *step, const KlRun *run, KlValueId value)
{
    return kl_program_is_body(run) && !step->stages->is_leaf[value] &&
           step->stages->node_stage[step->tape->values[value].node] == run->stage;
}

#endif
