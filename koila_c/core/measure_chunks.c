/* SPDX-License-Identifier: Apache-2.0 */
/* measure_chunks.c - the bytes of moments for a given number of rows per chunk. */
#include "measure.h"

#include <math.h>

/* If there are enough rows, chunks have a multiple of 8 rows (koila/planning/planner.py). */
enum { UNIT = 8 };

static int64_t
parts(int64_t n, int64_t size)
{
    return (n + size - 1) / size;
}

/* Return the most rows of a chunk at a moment, if the chunks of the longest axis have `rows` rows. All axes are cut into
 * the same number of chunks. */
static int64_t
rows_at(const KlMeasured *measured, const KlMoment *moment, int64_t rows)
{
    if (moment->rows <= 0 || moment->rows >= measured->rows) {
        return rows;
    }
    int64_t own = moment->rows, n_chunks = parts(measured->rows, rows > 1 ? rows : 1);
    if (parts(own, rows > 1 ? rows : 1) < n_chunks) { /* otherwise the chunk may be a single unit */
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
    *gradients = fmax(0, moment->gradients.fixed + moment->gradients.per_row * own);
    *temporary = moment->temporary.fixed + moment->temporary.per_row * own;
    return moment->bytes.fixed + moment->bytes.per_row * own + moment->per_chunk * n_chunks;
}

/* Return the index of the first moment with the most bytes, which are stored in `most`. */
static size_t
find_worst(const KlMeasured *measured, int64_t rows, double *most)
{
    size_t worst = 0;
    double gradients, temporary;
    *most = 0;
    for (size_t i = 0; i < measured->moments.n; i++) {
        const KlMoment *moment = &measured->moments.moments[i];
        double bytes = kl_measure_at(measured, moment, rows, &gradients, &temporary);
        if (i == 0 || bytes > *most) {
            *most = bytes;
            worst = i;
        }
    }
    return worst;
}

double
kl_measure_peak(const KlMeasured *measured, int64_t rows, KlMoment *worst)
{
    double most;
    size_t at = find_worst(measured, rows, &most);
    if (measured->moments.n > 0) {
        *worst = measured->moments.moments[at];
    }
    return most;
}

/* Whether a moment never has more bytes than another one. A later one must have a byte more, since sums are rounded, and of
 * equal ones the first is the worst. */
static bool
is_below(const KlMoment *moment, const KlMoment *other, bool is_later)
{
    double fixed = other->bytes.fixed - moment->bytes.fixed;
    double per_row = other->bytes.per_row - moment->bytes.per_row;
    return moment->rows == other->rows && fixed >= 0 && per_row >= 0 &&
           other->per_chunk >= moment->per_chunk && fixed + per_row >= is_later;
}

void
kl_measure_front(KlMeasured *measured)
{
    enum { N = 3 };
    int64_t sizes[N] = {1, (int64_t)sqrt((double)measured->rows), measured->rows};
    size_t at[N], n = 0;
    KlMoment worst[N] = {0};
    for (int k = 0; k < N && measured->moments.n > 0; k++) {
        double most;
        at[k] = find_worst(measured, sizes[k], &most);
        worst[k] = measured->moments.moments[at[k]];
    }
    for (size_t i = 0; i < measured->moments.n; i++) {
        const KlMoment moment = measured->moments.moments[i];
        bool is_needed = true;
        for (int k = 0; k < N && is_needed; k++) {
            is_needed = at[k] == i || !is_below(&moment, &worst[k], at[k] > i);
        }
        measured->moments.moments[n] = moment;
        n += is_needed;
    }
    measured->moments.n = n;
}
