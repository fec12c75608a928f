/* SPDX-License-Identifier: Apache-2.0 */
/* measure_chunks.c - what moments need in chunks of some size, and the largest chunks that fit. */
#include "measure.h"

#include <math.h>

/* Rows of chunks are whole units where there are enough (koila/planner.py). */
enum { UNIT = 8 };

static bool
is_shorter(const KlMeasured *measured, const KlMoment *moment)
{
    return moment->rows > 0 && moment->rows < measured->rows;
}

static int64_t
parts(int64_t n, int64_t size)
{
    return (n + size - 1) / size;
}

/* The most rows of a chunk at a moment, where those of the longest axis have `rows`: every axis is cut into as
 * many chunks. */
static int64_t
rows_at(const KlMeasured *measured, const KlMoment *moment, int64_t rows)
{
    if (!is_shorter(measured, moment)) {
        return rows;
    }
    int64_t own = moment->rows, n_chunks = parts(measured->rows, rows > 1 ? rows : 1);
    if (parts(own, rows > 1 ? rows : 1) < n_chunks) { /* else a unit may be all of a chunk */
        int64_t of_units = parts(parts(own, UNIT), n_chunks) * UNIT;
        own = of_units < own ? of_units : own;
    }
    return own < rows ? own : rows;
}

double
kl_measure_at(const KlMeasured *measured, const KlMoment *moment, int64_t rows, double *gradients,
              double *temporary)
{
    double own = (double)rows_at(measured, moment, rows);
    double n_chunks = (double)parts(measured->rows, rows > 1 ? rows : 1);
    *gradients = fmax(0, moment->gradients + moment->gradients_per_row * own);
    *temporary = moment->temporary + moment->temporary_per_row * own;
    return moment->fixed + moment->per_row * own + moment->per_chunk * n_chunks;
}

double
kl_measure_peak(const KlMeasured *measured, int64_t rows, KlMoment *worst)
{
    double most = 0, gradients, temporary;
    for (size_t i = 0; i < measured->moments.n; i++) {
        const KlMoment *moment = &measured->moments.moments[i];
        double bytes = kl_measure_at(measured, moment, rows, &gradients, &temporary);
        if (i == 0 || bytes > most) {
            most = bytes;
            *worst = *moment;
        }
    }
    return most;
}

/* Rows between which a moment fits. */
typedef struct Range {
    double least, most;
} Range;

/* Those for which fixed + per_row * rows + what chunks leave is in the budget; `most` is 0: there are none. */
static Range
range_of(const KlMeasured *measured, const KlMoment *moment, double fixed, double per_row,
         double budget)
{
    /* The number of chunks is rounded up. */
    double left = budget - fixed - moment->per_chunk;
    double all = moment->per_chunk * (double)measured->rows;
    double discriminant = left * left - 4 * per_row * all;
    if (left < 0 || discriminant < 0) {
        return (Range){0, 0};
    }
    /* per_row * r + all / r <= left, between the two roots */
    double root = left + sqrt(discriminant);
    return (Range){.least = all > 0 ? 2 * all / fmax(root, 1) : 0,
                   .most = per_row > 0 ? floor(root / (2 * per_row)) : (double)measured->rows};
}

/* The most rows that all moments fit with; a chunk of a shorter axis has no more rows than one of the longest
 * and, where `is_close`, than that axis has, or than its share and two units. */
static int64_t
largest(const KlMeasured *measured, double budget, bool is_close)
{
    double best = (double)measured->rows, least = 1;
    for (size_t i = 0; i < measured->moments.n; i++) {
        const KlMoment *moment = &measured->moments.moments[i];
        double fixed = moment->fixed, per_row = moment->per_row, own = moment->rows;
        Range found = range_of(measured, moment, fixed, per_row, budget);
        if (is_close && is_shorter(measured, moment)) {
            const Range others[] = {
                range_of(measured, moment, fixed + per_row * own, 0, budget),
                range_of(measured, moment, fixed + per_row * 2 * UNIT,
                         per_row * own / (double)measured->rows, budget),
            };
            found = others[1].most > found.most ? others[1] : found;
            found = others[0].most > found.most ? others[0] : found;
        }
        best = fmin(best, found.most);
        least = fmax(least, found.least);
    }
    return best >= least ? (int64_t)best : 0;
}

int64_t
kl_measure_largest_chunk(const KlMeasured *measured, double budget)
{
    bool has_shorter = false;
    KlMoment worst;
    for (size_t i = 0; i < measured->moments.n && !has_shorter; i++) {
        has_shorter = is_shorter(measured, &measured->moments.moments[i]);
    }
    int64_t rows = has_shorter ? largest(measured, budget, true) : 0;
    bool is_close = rows > 0 && kl_measure_peak(measured, rows, &worst) <= budget;
    return is_close ? rows : largest(measured, budget, false);
}
