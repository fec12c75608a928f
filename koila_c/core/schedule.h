/* SPDX-License-Identifier: Apache-2.0 */
/* schedule.h - a step as data: what is run, forward and back, in which order, and when a value is freed.
 *
 * A schedule is an array of instructions. A body runs in a loop over its chunks, and the loop is part of the array:
 * so what is made, kept and freed of a chunk is written down once, and the same array is measured, run and printed.
 *
 * What leaves a body by rows has a home: it is kept to its backward, by chunk, or written into one tensor of all
 * rows where it is read whole; or offloaded, beside the memory of its device; or freed when it was read for the
 * last time going forward, and recomputed going back. Where all is kept, the graphs of a body's chunks may wait
 * for its backward, which then does not run it again; and what cheap calls make of what is kept may be emptied
 * meanwhile. */
#ifndef KL_SCHEDULE_H
#define KL_SCHEDULE_H

#include "waiting.h"

typedef enum KlStepOp {
#define KL_INSTRUCTION(name, effect, meaning) KL_STEP_##name,
#include "schedule.def"
#undef KL_INSTRUCTION
} KlStepOp;

/* The graph of what is run on a chunk. */
typedef enum KlGraph {
    KL_GRAPH_NONE,
    KL_GRAPH_NOW, /* it goes back in the same turn of the loop */
    KL_GRAPH_FIRST, /* of the first chunk alone, and it does not go back: it tells what has a gradient */
    KL_GRAPH_WAIT,   /* it waits for the loop that goes back */
    KL_GRAPH_ACROSS, /* as NOW, along a second axis: across.py */
} KlGraph;

typedef struct KlStep {
    uint8_t op;             /* KlStepOp */
    uint8_t graph;          /* KlGraph: of RUN and BACK; of LOOP: of what goes back in it */
    uint32_t run;           /* the joint, the segment, or the first segment of the body */
    uint32_t n_runs;        /* the body's segments; 0: it is about values alone */
    KlSlice values, others; /* of the schedule's values: schedule.def says what they are */
} KlStep;

typedef struct KlSchedule {
    KlStep *steps; /* [n_steps] */
    size_t n_steps, n_steps_max;
    size_t n_forward; /* the steps from here on go back */
    KlIds values;
    KlLights lights; /* what is emptied */
} KlSchedule;

/* What a schedule is to be. */
typedef struct KlHomes {
    bool is_graph; /* the roots are differentiated */
    uint32_t
        offload_every; /* of the bodies that leave something for others, what every so manieth leaves is
                               offloaded meanwhile: 1 is all; 0: none is */
    uint32_t keep_every; /* of what crosses from body to body, every so manieth is kept: 1 is all */
    uint32_t n_pieces;   /* of each chunk, for the head of a program that is cut before that, or for
                          its last segment; 1: none */
    uint32_t n_light;    /* the longest chain of values that are emptied; 0: none is */
    uint32_t
        n_across; /* pieces are parts of a second axis of so many entries a row; 0: they are rows */
    uint32_t n_chunks; /* in so many, if that is known: graphs of many small chunks do not wait */
    bool is_live; /* no schedule: it is measured as it is run live, in the order of the calls */
} KlHomes;

/* Build the schedule of a program. On success the caller owns what it holds: kl_schedule_fini. */
KlStatus kl_schedule_build(const KlTape *tape, const KlProgram *program, const KlHomes *homes,
                           KlSchedule *schedule, KlError *error);
void kl_schedule_fini(KlSchedule *schedule);

#endif
