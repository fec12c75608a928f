/* SPDX-License-Identifier: Apache-2.0 */
/* schedule_units.h - what a schedule is made of: the bodies and joints of a program, and what is known of the values
 * between them. */
#ifndef KL_SCHEDULE_UNITS_H
#define KL_SCHEDULE_UNITS_H

#include "schedule.h"

#define KL_NOWHERE UINT32_MAX

/* A body with all its segments, or a joint. */
typedef struct KlUnit {
    KlSlice runs; /* of the program's */
    bool is_body;
    bool has_gradient;
    bool is_fused;     /* each chunk goes forward and at once back */
    bool is_again;     /* its outputs by rows are not kept, but recomputed going back */
    bool is_offloaded; /* its outputs are moved off their device until they are read again */
    bool waits;        /* the graphs of its chunks wait for its backward */
    KlSlice again;     /* of the schedule's values: what is made again for it then */
    KlSlice needs;     /* likewise: what is filled again for its graph before */
} KlUnit;

/* What is known of a value that leaves a unit, or is read by one. */
typedef struct KlFacts {
    uint32_t unit, run; /* that it leaves; KL_NOWHERE: none */
    uint32_t
        last_read;  /* the last unit that reads it from outside, going forward; KL_NOWHERE: none */
    bool is_open;   /* what is of no checkpoint, or of another, reads it */
    bool is_inner;  /* only segments of one body read it, and let it go */
    bool is_handed; /* a later segment of the body that makes it reads it */
    bool is_gone;   /* it was freed */
    bool is_read_whole;   /* it is read put together from its chunks */
    bool is_read_by_rows; /* another body reads it chunk by chunk */
    bool is_used_back;    /* a body with a later backward makes or reads it */
} KlFacts;

/* A schedule that is being built. The first failure stays in `status`, and nothing is added after it. */
typedef struct KlBuild {
    const KlTape *tape;
    const KlProgram *program;
    const KlHomes *homes;
    KlSchedule *schedule;
    KlError *error;
    KlStatus status;
    KlUnit *units; /* [n_units] */
    uint32_t n_units;
    KlFacts *facts;     /* [n_values] */
    bool *is_needed;    /* [n_staged] scratch: a run of a body has to be made again now */
    bool *may_be_light; /* [n_values] scratch */
    uint8_t *known;     /* [n_values] scratch of kl_waiting_find */
} KlBuild;

/* Find the units, and choose the home of what each leaves, which graphs wait, and what is emptied. */
void kl_units_find(KlBuild *build);

/* Append to the values of the schedule. */
void kl_units_add_value(KlBuild *build, KlValueId value);

/* The values that were added from `first` on. */
KlSlice kl_units_values_from(const KlBuild *build, size_t first);

/* Whether a value is the parts of a reduction. */
bool kl_units_is_parts(const KlBuild *build, KlValueId value);

/* Whether a value that leaves a body can be made again: bodies alone read it, by rows, and nobody looks at its
 * whole gradient. */
bool kl_units_can_be_again(const KlBuild *build, KlValueId value);

/* Whether what a unit leaves is freed when it was read for the last time going forward, and made again going back: as
 * its homes say, or since it is inside of a checkpoint of the user's. */
bool kl_units_is_remade(const KlBuild *build, const KlUnit *unit, KlValueId value);

/* The `i`-th value that leaves a run; that a run reads from outside. */
static inline KlValueId
kl_units_export(const KlBuild *build, const KlRun *run, uint32_t i)
{
    return build->program->exports.ids[run->exports.first + i];
}

static inline KlValueId
kl_units_import(const KlBuild *build, const KlRun *run, uint32_t i)
{
    const KlProgram *program = build->program;
    return program->stages.imports[program->imports.ids[run->imports.first + i]].value;
}

/* The runs of a unit, one by one. */
static inline const KlRun *
kl_units_run(const KlBuild *build, const KlUnit *unit, uint32_t i)
{
    return &build->program->runs[unit->runs.first + i];
}

#endif
