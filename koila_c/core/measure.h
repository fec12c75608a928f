/* SPDX-License-Identifier: Apache-2.0 */
/* measure.h - the bytes of a staged program: what it needs at each moment of a step in chunks, and how many
 * chunks that lets it run in.
 *
 * The step is gone through by its schedule, as replay.py does. In a body the bytes live at any moment are
 * fixed + per_row * rows (sweep.h). What outlives a run is fixed: values that cross stages, gradients that
 * gather, the graphs of joints until they are differentiated. Each chunk leaves parts of reductions. */
#ifndef KL_MEASURE_H
#define KL_MEASURE_H

#include "schedule.h"
#include "sweep.h"

/* What of a step only the binding knows. */
typedef struct KlOutside {
    KlKnown known;
    int64_t bytes_state; /* of the state of a generator */
    int64_t bytes_drawn; /* states that earlier runs of the program left */
    /* [n_nodes] what a random call draws whole; -1: a state for each chunk; NULL: none does */
    const int64_t *bytes_noise;
    double bytes_graphs; /* what backward takes through graphs that were there before */
} KlOutside;

/* What a program needs beyond what is there already (leaves, parameters). */
typedef struct KlMeasured {
    KlMoments moments;
    int64_t rows; /* of the longest axis */
    double whole; /* bytes of a live run: not cut, each gradient made once */
} KlMeasured;

/* On success the caller owns what `measured` holds: kl_measure_fini. */
KlStatus kl_measure_step(const KlTape *tape, const KlProgram *program, const KlOutside *outside,
                         const KlHomes *homes, KlMeasured *measured, KlError *error);
void kl_measure_fini(KlMeasured *measured);

/* The bytes of a live run, with what `sweep` was made for, and its moments; NULL: nobody asks for them. */
KlStatus kl_measure_whole(KlSweep *sweep, bool is_graph, double bytes_graphs, KlMoments *moments,
                          double *most, KlError *error);

/* Bytes of a moment with chunks of `rows` rows; of these, gradients, and what its node alone holds. */
double kl_measure_at(const KlMeasured *measured, const KlMoment *moment, int64_t rows,
                     double *gradients, double *temporary);

/* Bytes with chunks of `rows` rows, and the first moment that needs so many; 0 where there is none. */
double kl_measure_peak(const KlMeasured *measured, int64_t rows, KlMoment *worst);

#endif
