/* SPDX-License-Identifier: Apache-2.0 */
/* measure.h - predicts the bytes that a step needs at each moment, as a function of the rows per chunk.
 *
 * It walks the instructions of the schedule, as replay.py does. Inside a body the live bytes are
 * fixed + per_row * rows (sweep.h). Whatever outlives a run is fixed: values that other stages read, accumulated
 * gradients, the graphs of barriers until their backward. Partial results of reductions take per_chunk bytes. */
#pragma once

#include "schedule.h"
#include "sweep.h"

/* Facts about a step that the binding supplies. */
typedef struct KlOutside {
    KlFacts facts;
    long long bytes_state; /* the state of a random generator */
    long long bytes_drawn; /* generator states that earlier runs of the program saved */
    /* [n_nodes] bytes that a random call draws for all rows at once; -1: it saves a state per chunk; NULL: all 0 */
    const int64_t *bytes_noise;
    double bytes_graphs; /* of the backward through plain graphs that existed before the program */
    bool is_whole_known; /* the bytes of a live run are not computed */
} KlOutside;

/* Bytes that a program needs in addition to the tensors that exist already (leaves, parameters). */
typedef struct KlMeasured {
    KlMoments moments;
    int64_t rows; /* of the longest axis */
    double whole; /* the peak of a live run, which is not cut into chunks */
} KlMeasured;

/* Measure a step. On success the caller must free `measured` with kl_measure_fini. */
KlStatus kl_measure_step(const KlTape *tape, const KlProgram *program, const KlOutside *outside,
                         const KlPolicy *policy, KlMeasured *measured);
void kl_measure_fini(KlMeasured *measured);

/* Store the peak of a live run of the program of `sweep` in `most`, and append its moments to `moments`, if not NULL. */
KlStatus kl_measure_whole(KlSweep *sweep, bool is_graph, double bytes_graphs, KlMoments *moments,
                          double *most);

/* Return the bytes of a moment with chunks of `rows` rows; of these, `*gradients` are gradients and `*temporary` is the
 * workspace of its node. */
double kl_measure_at(const KlMeasured *measured, const KlMoment *moment, int64_t rows,
                     double *gradients, double *temporary);

/* Return the peak with chunks of `rows` rows and store its first moment in `worst`; 0 if there are no moments. */
double kl_measure_peak(const KlMeasured *measured, int64_t rows, KlMoment *worst);

/* Remove most of the moments that are the worst for no number of rows: the peaks stay the same, and take less time. */
void kl_measure_front(KlMeasured *measured);
