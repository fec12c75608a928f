/* SPDX-License-Identifier: Apache-2.0 */
/* schedule.h - a step as an array of instructions: the order of forward and backward passes, and when values die.
 *
 * A body runs in a loop over its chunks, and LOOP and END are instructions of the array. So one array states what
 * each chunk computes, keeps and frees; measure.c counts its bytes, replay.py runs it, koila.plan prints it.
 *
 * Each boundary value, a result of a body that others read, has a storage policy of its own (KlValuePolicy). It is kept
 * until its backward (by chunk, or in one tensor of all rows if something reads it whole); offloaded; or freed after
 * its last reader of the forward pass and recomputed before its backward, by its run or by cheap calls. A body whose
 * inputs are kept, or recomputed by cheap calls, can retain its chunks' graphs, so that its forward runs once. */
#pragma once

#include "retained.h"

typedef enum KlStepOp {
#define KL_INSTRUCTION(name, effect, meaning) KL_STEP_##name,
#include "schedule.def"
#undef KL_INSTRUCTION
} KlStepOp;

/* The autograd graph of a chunk's forward pass. */
typedef enum KlGraph {
    KL_GRAPH_NONE,
    KL_GRAPH_NOW, /* its backward runs in the same iteration of the loop */
    KL_GRAPH_FIRST, /* of the first chunk only, to learn which results require a gradient; no backward */
    KL_GRAPH_RETAIN,      /* retained until the loop that runs the backward */
    KL_GRAPH_SECOND_AXIS, /* as NOW, in pieces along a second axis: second_axis.py */
} KlGraph;

typedef struct KlStep {
    uint8_t op;             /* KlStepOp */
    uint8_t graph;          /* KlGraph: of RUN and BACK; of LOOP: of the BACKs inside it */
    uint32_t run;           /* the barrier, the segment, or the first segment of the body */
    uint32_t n_runs;        /* segments of the body; 0: the instruction has only values */
    KlSlice values, others; /* of the schedule's values; schedule.def explains them */
} KlStep;

typedef struct KlSchedule {
    KlStep *steps; /* [n_steps] */
    size_t n_steps, n_steps_max;
    size_t n_forward; /* steps[n_forward] is the first step of the backward pass */
    KlIds values;
    KlCheapSet cheap_set; /* the values whose storage is freed */
} KlSchedule;

/* The memory policy of a step. */
typedef struct KlPolicy {
    bool is_graph; /* the step has a backward pass, from the roots */
    /* [n_values] KlValuePolicy of the boundary values, in the order of the exports. A value that cannot be stored so is
     * kept; so are all, if their number is another: then the policies are of another program. */
    const uint8_t *values;
    size_t n_values;
    uint32_t n_pieces; /* pieces of a chunk in the head, the last segment of the last body; 1: the
                          head is not cut into pieces */
    uint32_t second_size; /* size of the second axis that pieces are cut of; 0: pieces are rows */
    uint32_t n_chunks;    /* the number of chunks, if known: many small chunks retain no graphs */
    bool is_live;         /* build no schedule: measure a live run, in the order of the calls */
} KlPolicy;

/* Build the schedule of a program. On success the caller must free it with kl_schedule_fini. */
KlStatus kl_schedule_build(const KlTape *tape, const KlProgram *program, const KlPolicy *policy,
                           KlSchedule *schedule);
void kl_schedule_fini(KlSchedule *schedule);
