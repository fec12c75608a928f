/* SPDX-License-Identifier: Apache-2.0 */
/* program.h - a staged program as runs: the nodes of each run, its inputs and outputs, and when its values die.
 *
 * A run is a barrier, or one segment of a body over one axis (an uncut body has one segment). Runs are in execution
 * order. A run's imports are the values it reads from outside, its exports the values that others read. The lists
 * of all runs are slices of the program's arrays, so building them takes few allocations. The time is linear in
 * nodes, inputs and outputs, except for sorting the nodes of each body. */
#pragma once

#include "stage.h"

/* A part of an array of the program: entries first .. first + n - 1. */
typedef struct KlSlice {
    uint32_t first, n;
} KlSlice;

typedef struct KlRun {
    uint32_t stage;
    KlAxisId axis;    /* KL_ID_NONE: a barrier */
    uint32_t segment; /* its index in the body; the segments of a body are consecutive runs */
    KlSlice nodes;    /* of nodes, parts and drops: in execution order */
    KlSlice imports;  /* of imports: in the order they are first read */
    KlSlice exports;  /* of exports: a reduction's first output represents its partial results */
    KlSlice inner;    /* of inner: exports that only other segments of its body read */
    KlSlice combined; /* of combined: reductions of the body before whose parts are combined here */
    KlSlice shadows;  /* of shadows: imports of which only the sizes are read */
    bool has_gradient;
} KlRun;

typedef struct KlIds {
    uint32_t *ids; /* [n] */
    size_t n, n_max;
} KlIds;

/* Append an id, unless `*status` is a failure already; on failure set it. */
void kl_program_push(KlIds *ids, uint32_t id, KlStatus *status);

/* Return the ids from the `first` on. */
static inline KlSlice
kl_program_since(const KlIds *ids, size_t first)
{
    return (KlSlice){.first = (uint32_t)first, .n = (uint32_t)(ids->n - first)};
}

typedef struct KlProgram {
    KlStages stages;
    KlRun *runs; /* [n_runs] */
    size_t n_runs, n_runs_max;
    size_t n_staged; /* runs made by kl_program_build; kl_program_add_gradient_part adds others */
    KlIds nodes;
    KlIds parts;   /* parallel to nodes: bit p: compute partial result p of the reduction; 0: the
                      node runs as recorded */
    KlIds drops;   /* parallel to nodes: the end of the node's slice of `dropped` */
    KlIds dropped; /* values that die after a node, their last reader */
    KlIds imports, exports, inner, combined, shadows;
    bool is_checkpointed; /* backward recomputes the calls of torch.utils.checkpoint bodies */
    bool *is_kept;        /* [n_values] it must exist, all rows, at the end of the step */
    bool *is_unread;      /* [n_values] a root whose number is not read (same block as is_kept) */
    KlIds reached;        /* values made here that the user's lazy tensors hold */
    KlIds roots;          /* values whose backward is run */
} KlProgram;

/* What kl_program_build is asked for. */
typedef struct KlAsked {
    const KlProgram *staged; /* a program to cut anew, which must live longer; NULL: stage `goal` */
    KlGoal goal;
    uint32_t n_segments; /* cut the body that saves most for backward into at most so many segments,
                            others into segments as large, and all at the user's checkpoints; 0:
                            ignore the checkpoints, too */
    bool is_headed;      /* cut the last body before its head, the rest of it into n_segments */
    const KlValueId *reached; /* [n_reached] the wanted values that the user's lazy tensors hold */
    size_t n_reached;
    const bool *has_real;      /* [n_values] it has a real tensor */
    const bool *has_number;    /* [n_values] its number has been computed */
    const uint32_t *n_handles; /* [n_storages] how many lazy tensors share a storage */
} KlAsked;

/* Stage the tape for a goal and build its runs. On success the caller must free `program` with kl_program_fini. */
KlStatus kl_program_build(const KlTape *tape, const KlAsked *asked, KlProgram *program);
void kl_program_fini(KlProgram *program);

/* Append a run with the nodes of barrier `run` that have a gradient, and those of its combined reductions whose first
 * result is in `is_made`. No value dies in it. `*added` is its index. On failure the program is unchanged, except
 * that some lists have more capacity. */
KlStatus kl_program_add_gradient_part(const KlTape *tape, KlProgram *program, uint32_t run,
                                      const bool *is_made /* [n_values] */, uint32_t *added);

/* Return the index after the last run of the unit (a body with all its segments, or a barrier) that run `first` begins. */
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

/* Return the `i`-th value that leaves a run, and the `i`-th that it reads from outside. */
static inline KlValueId
kl_program_export(const KlProgram *program, const KlRun *run, uint32_t i)
{
    return program->exports.ids[run->exports.first + i];
}
static inline const KlImport *
kl_program_import(const KlProgram *program, const KlRun *run, uint32_t i)
{
    return &program->stages.imports[program->imports.ids[run->imports.first + i]];
}

/* Whether the run is a segment of a body, which runs chunk by chunk. */
static inline bool
kl_program_is_body(const KlRun *run)
{
    return kl_stage_is_body(run->stage);
}

/* Whether the run belongs to the tail, the barriers after the last body. */
static inline bool
kl_program_is_tail(const KlProgram *program, const KlRun *run)
{
    return !kl_program_is_body(run) && program->stages.last_body != KL_STAGE_NONE &&
           run->stage > program->stages.last_body;
}
