/* SPDX-License-Identifier: Apache-2.0 */
/* program.h - a staged program as runs: which nodes run together, what they read from outside, what leaves
 * them, and when their values die.
 *
 * A run is one joint, or one segment of a body over one axis: a body that is not cut has one. Runs are in the order they run; their lists lie one after
 * the other in arrays of the program, so that building them asks for memory a few times, however many there
 * are. All of it is linear in nodes, inputs and outputs, but for the sort of what a body has again. */
#ifndef KL_PROGRAM_H
#define KL_PROGRAM_H

#include "stage.h"

/* A part of an array of the program: entries first .. first + n - 1. */
typedef struct KlSlice {
    uint32_t first, n;
} KlSlice;

typedef struct KlRun {
    uint32_t stage;
    KlAxisId axis;    /* KL_ID_NONE: a joint */
    uint32_t segment; /* of its body: the segments of one follow each other */
    KlSlice nodes;    /* of nodes, parts and drops: in the order they run */
    KlSlice imports;  /* of imports: what is read from outside, in the order it is first read */
    KlSlice
        exports;   /* of exports: values that leave it; of a reduction, whose parts do, the first */
    KlSlice inner; /* of inner: exports that only other segments of its body read */
    KlSlice combined; /* of combined: reductions of the body before that become values here */
    KlSlice shadows;  /* of shadows: imports of which only sizes are read */
    bool has_gradient;
} KlRun;

typedef struct KlIds {
    uint32_t *ids; /* [n] */
    size_t n, n_max;
} KlIds;

typedef struct KlProgram {
    KlStages stages;
    KlRun *runs; /* [n_runs] */
    size_t n_runs, n_runs_max;
    size_t n_staged; /* of the runs, those that building made: parts of joints come after them */
    KlIds nodes;
    KlIds
        parts; /* beside nodes: bit p: part p of the reduction runs here; 0: the node runs as it is */
    KlIds
        drops; /* beside nodes: where its slice of `dropped` ends, which begins where the last one ended */
    KlIds dropped; /* values of which the node beside is the last reader */
    KlIds imports, exports, inner, combined, shadows;
    bool is_checkpointed; /* bodies of checkpoints are made again, as the user says */
    bool *is_kept;        /* [n_values] it must be there whole at the end */
    bool *is_unread;      /* [n_values] behind these: only its gradient is wanted */
    KlIds reached;        /* values made here whose numbers the user gets */
    KlIds roots;          /* values to be differentiated */
} KlProgram;

/* What is asked of a program beside its stages. */
typedef struct KlAsked {
    KlGoal goal;
    uint32_t n_segments; /* that bodies are cut into through which gradients go, at most; but where
                            the user's checkpoints are in any case. 0: not there either */
    bool
        is_headed; /* the last body is cut before its head, and what is before that into segments */
    const KlValueId *reached; /* [n_reached] the wanted values whose numbers the user gets */
    size_t n_reached;
    const bool *has_real;      /* [n_values] it has a real tensor */
    const bool *has_number;    /* [n_values] it has a number */
    const uint32_t *n_handles; /* [n_storages] how many lazies the user holds of a storage */
} KlAsked;

/* Stage and build what is asked. On success the caller owns what `program` holds: kl_program_fini. */
KlStatus kl_program_build(const KlTape *tape, const KlAsked *asked, KlProgram *program,
                          KlError *error);
void kl_program_fini(KlProgram *program);

/* Append the part of joint `run` that gradients go through, after those of its combined reductions of which
 * `is_made` has the first result; nothing dies in it. `*added` is its number. On failure nothing is changed
 * but that some lists have more room. */
KlStatus kl_program_add_gradient_part(const KlTape *tape, KlProgram *program, uint32_t run,
                                      const bool *is_made /* [n_values] */, uint32_t *added,
                                      KlError *error);

/* The run after the last segment of the body, or after the joint, that run `first` begins. */
static inline uint32_t
kl_program_end(const KlProgram *program, uint32_t first)
{
    const KlRun *run = &program->runs[first];
    uint32_t end = first + 1;
    while (end < program->n_staged && program->runs[end].stage == run->stage &&
           program->runs[end].axis == run->axis) {
        end++;
    }
    return end;
}

/* Whether the run makes something chunk by chunk. */
static inline bool
kl_program_is_body(const KlRun *run)
{
    return kl_stage_is_body(run->stage);
}

#endif
