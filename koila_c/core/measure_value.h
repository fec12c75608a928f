/* SPDX-License-Identifier: Apache-2.0 */
/* measure_value.h - what measure.c knows at a moment of its walk: of the step, of each value and of each memory. */
#ifndef KL_MEASURE_VALUE_H
#define KL_MEASURE_VALUE_H

#include "measure.h"

typedef struct KlMeasureValue {
    uint32_t body;     /* the first segment, plus one, of the body whose segment made it last */
    bool is_gathering; /* its gradient gathers */
    bool is_gathering_whole; /* likewise, that of what is read of all its rows at once */
    bool is_read_by_tail, is_read_whole, is_root;
    bool is_for_segments; /* a later segment of the body that makes it reads it */
    bool is_one_gradient; /* what reads it whole and by rows adds to one gradient of all rows */
    bool is_whole;        /* its chunks are put together, for bodies */
    bool is_beside;       /* likewise, beside the chunks */
    bool is_inner;        /* segments of one body alone read it */
    bool is_handed;       /* a chunk of it is there for later segments of its body */
    bool is_coming;       /* and of its gradient, from these */
    bool is_offloaded;    /* it is kept beside its device */
    uint32_t given_in;    /* the step, plus one, of the last loop that it is brought back for */
    bool is_held;         /* what a body left, of all chunks */
    uint8_t is_filled;    /* it was emptied, and a chunk of it is there: from which level on */
    bool is_let_go;       /* what a joint left */
} KlMeasureValue;

typedef struct KlMeasureStorage {
    uint32_t n_held; /* values in it that bodies left and that are held */
    double bytes;    /* of these, counted once */
} KlMeasureStorage;

/* Bytes of the zeros that the tail runs on instead of the results of the last body, and of that run. */
typedef struct KlStandIns {
    double values, seeds, parts, tail;
} KlStandIns;

/* The backward of a body frees its results and their gradients, and makes the gradients of its inputs. */
typedef struct KlExchange {
    double freed, freed_gradients; /* all that it frees; the gradients among that */
    double reused,
        reused_gradients; /* what it makes in place of that; in place of those gradients */
    double in_sweep;      /* of a row: what it makes beyond that, which sweeps count too */
} KlExchange;

/* The walk; `held` is what outlives the runs so far. */
typedef struct Step {
    const KlTape *tape;
    const KlProgram *program;
    const KlStages *stages;
    const KlOutside *outside;
    const KlHomes *homes;
    KlError *error;
    KlStatus status; /* the first failure stays, and nothing is noted after it */
    KlScratch scratch;
    KlSweep sweep;
    KlMoments *moments;
    KlSchedule schedule;
    double held, held_per_row, held_per_chunk;
    double gradients, gradients_per_row; /* of these */
    uint32_t at;                         /* which step of the schedule */
    bool is_back;
    uint32_t depth;         /* loops that are open */
    const KlStep *loop;     /* the outer one */
    uint32_t open;          /* the run whose sweep is open, with its graph; KL_ID_NONE: none is */
    KlBytes waiting;        /* the graph of a chunk that goes through its head in pieces */
    KlExchange exchange;    /* of the outer loop */
    KlStandIns stand_ins;   /* of the last body */
    double n_pieces;        /* of a chunk, for the head that is gone through now; 1: none */
    double *live;           /* [n_staged] of a joint: what its graph keeps */
    KlMeasureValue *values; /* [n_values] */
    KlMeasureStorage *storages; /* [n_storages] */
    KlValueId *met;             /* [n_storages] the last value met of it */
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

/* A gradient that is summed over chunks: of half precision in float32. */
static inline double
gradient(const Step *step, KlValueId value)
{
    KlDtype dtype = step->tape->values[value].meta.dtype;
    bool is_half = dtype == KL_DTYPE_FLOAT16 || dtype == KL_DTYPE_BFLOAT16;
    return whole(step, value) * (is_half ? 2 : 1);
}

/* What a reduction in chunks leaves, if the value is the first result of one that leaves a body. */
static inline const KlParts *
parts_of(const Step *step, KlValueId value)
{
    const KlNode *node = &step->tape->nodes[step->tape->values[value].node];
    return node->mode == KL_MODE_REDUCE ? kl_ops_parts((KlReduce)node->reduce, node->is_for_chunks)
                                        : NULL;
}

/* Bytes of a reduction's result, of which what it leaves are multiples; single numbers do not count. */
static inline double
result_of(const Step *step, KlValueId value)
{
    const KlSweepNode *node = &step->sweep.nodes[step->tape->values[value].node];
    if (node->parts != NULL && node->parts->of_row) {
        return step->sweep.sizes[step->sweep.inputs[node->first_input]].per_row;
    }
    return step->sweep.sizes[value].n_elements > 1 ? whole(step, value) : 0;
}

/* Rows of the axis of a body. */
static inline int64_t
rows_of(const Step *step, const KlRun *body)
{
    KlAxisId axis = kl_tape_axis_find(step->tape, body->axis);
    return axis != KL_ID_NONE && step->tape->axis_rows[axis] > 0 ? step->tape->axis_rows[axis] : 1;
}

static inline KlValueId
export_of(const Step *step, const KlRun *run, uint32_t i)
{
    return step->program->exports.ids[run->exports.first + i];
}

static inline KlValueId
import_of(const Step *step, const KlRun *run, uint32_t i)
{
    return step->stages->imports[step->program->imports.ids[run->imports.first + i]].value;
}

static inline bool
is_joint_after(const Step *step, const KlRun *run)
{
    return !kl_program_is_body(run) && step->stages->last_body != KL_STAGE_NONE &&
           run->stage > step->stages->last_body;
}

/* How many times a reduction leaves its parts for each chunk, at most. */
static inline double
n_parts_of(const Step *step)
{
    bool is_for_each = step->homes->n_pieces > 1 && step->homes->n_across == 0;
    return is_for_each ? (double)step->homes->n_pieces : 1;
}

static inline KlValueId
value_of(const Step *step, const KlStep *of, uint32_t i)
{
    return step->schedule.values.ids[of->values.first + i];
}

/* Whether a body reads an import whole, of a value that is made by rows. */
static inline bool
is_gathered(const Step *step, const KlRun *run, uint32_t i)
{
    const KlImport *import =
        &step->stages->imports[step->program->imports.ids[run->imports.first + i]];
    return kl_program_is_body(run) && !kl_place_is_rows(&import->place) &&
           kl_place_is_rows(&step->tape->values[import->value].meta.place);
}

/* Whether a body makes a value chunk by chunk. */
static inline bool
is_made_by_rows(const Step *step, KlValueId value)
{
    const KlValue *v = &step->tape->values[value];
    return !step->stages->is_leaf[value] && kl_place_is_rows(&v->meta.place) &&
           kl_stage_is_body(step->stages->node_stage[v->node]);
}

/* Whether a segment of the same body makes a value. */
static inline bool
is_made_in(const Step *step, const KlRun *run, KlValueId value)
{
    return kl_program_is_body(run) && !step->stages->is_leaf[value] &&
           step->stages->node_stage[step->tape->values[value].node] == run->stage;
}

#endif
