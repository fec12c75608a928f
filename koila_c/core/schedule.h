/* SPDX-License-Identifier: Apache-2.0 */
/* schedule.h - a step as data: what is run, forward and back, in which order, and when a value is let go.
 *
 * A step of the schedule runs a whole body, all its chunks, or a joint. What leaves a body by rows has a home:
 * it is kept to its backward, by chunk, or written into one tensor of all rows where it is read whole; or
 * offloaded, beside the memory of its device; or let go when it was read for the last time going forward, and
 * made again going back. Where all is kept, the graphs of a body's chunks may wait for its backward, which then
 * does not run it again; and what light calls make of what is kept may be emptied meanwhile. The schedule is measured and run from the same array, so the two cannot differ. */
#ifndef KL_SCHEDULE_H
#define KL_SCHEDULE_H

#include "waiting.h"

typedef enum KlStepOp {
    KL_STEP_JOINT, /* run a joint; differentiated: with its graph, which is kept */
    KL_STEP_FORWARD, /* run a body over its chunks without a graph, or with one that waits, and keep what
                        leaves it; `values` of it are offloaded */
    KL_STEP_AGAIN,      /* likewise, but keep only `values` */
    KL_STEP_FUSED,      /* run the last body, each chunk forward and at once back */
    KL_STEP_CHECK,      /* the gradients that a fused body was given were those of its tail */
    KL_STEP_JOINT_BACK, /* go back through the graph of a joint */
    KL_STEP_SEED,       /* what a body left: roots get their gradients, and hooks see whole ones */
    KL_STEP_BACK, /* run a body again, each chunk forward with its graph and back; or back through the
                           graph that waits: `values` go as their chunks go back */
    KL_STEP_RELEASE, /* `values`: let their numbers go, and keep the gradients that came */
    KL_STEP_PIECES, /* as FUSED, of two segments; the head of a chunk goes forward and at once back in pieces,
                           while the graph of the rest waits */
    KL_STEP_EMPTY, /* `values`, which are light: let their numbers go, also where graphs have them */
} KlStepOp;

typedef struct KlStep {
    uint8_t op;      /* KlStepOp */
    uint32_t run;    /* the joint, or the first segment of the body */
    uint32_t n_runs; /* the body's segments; a joint is one; RELEASE: 0 */
    KlSlice values;  /* of the schedule's values */
    KlSlice
        whole; /* FORWARD, FUSED, PIECES: likewise; each chunk is written into one tensor of all rows */
    bool waits; /* FORWARD, BACK: the graph of each chunk waits in between */
    KlSlice
        again; /* of such: likewise; what is made again, by light calls, before a chunk goes back */
    KlSlice needs; /* BACK: likewise; what is filled again before that, in this order */
} KlStep;

typedef struct KlSchedule {
    KlStep *steps; /* [n_steps] */
    size_t n_steps, n_steps_max;
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
    bool is_live; /* no schedule: it is measured as it is run live, in the order of the calls */
} KlHomes;

/* Build the schedule of a program. On success the caller owns what it holds: kl_schedule_fini. */
KlStatus kl_schedule_build(const KlTape *tape, const KlProgram *program, const KlHomes *homes,
                           KlSchedule *schedule, KlError *error);
void kl_schedule_fini(KlSchedule *schedule);

#endif
