/* SPDX-License-Identifier: Apache-2.0 */
/* schedule_units.h - the bodies and barriers of a program and the values that pass between them, from which schedule.c
 * builds a schedule. */
#pragma once

#include "schedule.h"

#define KL_NOWHERE UINT32_MAX

/* A body with all its segments, or a barrier. */
typedef struct KlUnit {
    KlSlice runs; /* of the program's runs */
    bool is_body;
    bool has_gradient;
    bool is_fused;        /* each chunk's backward runs right after its forward */
    bool is_retained;     /* the graphs of its chunks are retained until its backward */
    KlSlice to_recompute; /* of the schedule's values: saved tensors to recompute in backward */
    KlSlice needs;        /* likewise: values to rematerialize before that, for its graphs */
} KlUnit;

/* Facts about a value that one unit makes and another unit, or another segment of the same body, reads. */
typedef struct KlFacts {
    uint32_t unit, run;   /* the unit and run that make it; KL_NOWHERE: it is a leaf */
    uint32_t last_read;   /* the last other unit to read it in forward; KL_NOWHERE: none */
    bool is_open;         /* a call outside the checkpoint that makes it reads it */
    bool is_inner;        /* only segments of the body that makes it read it */
    bool is_for_segments; /* a later segment of the body that makes it reads it */
    bool is_freed;        /* the schedule has freed it at this point */
    bool is_read_whole;   /* a unit reads all its rows as one tensor */
    bool is_root;
    bool is_used_back; /* a body whose backward runs later makes or reads it */
} KlFacts;

/* A schedule that is being built. The first failure stays in `status`, and nothing is added after it. */
typedef struct KlBuild {
    const KlTape *tape;
    const KlProgram *program;
    const KlPolicy *policy;
    KlSchedule *schedule;
    KlStatus status;
    KlStep nowhere; /* add() returns it after a failure */
    KlUnit *units;  /* [n_units] */
    uint32_t n_units;
    KlFacts *facts;    /* [n_values] */
    bool *is_needed;   /* [n_staged] scratch: a run of a body to recompute now */
    uint8_t *policies; /* [n_values] KlValuePolicy */
    uint8_t *marks;    /* [n_values] scratch of kl_retained_find */
} KlBuild;

/* Find the units, and how each boundary value can be stored. For each unit, choose whether its graphs are retained. */
void kl_units_find(KlBuild *build);

void kl_units_add_value(KlBuild *build, KlValueId value);

/* Whether a value consists of the partial results of a reduction. */
bool kl_units_is_parts(const KlBuild *build, KlValueId value);

static inline const KlRun *
kl_units_run(const KlBuild *build, const KlUnit *unit, uint32_t i)
{
    return &build->program->runs[unit->runs.first + i];
}
