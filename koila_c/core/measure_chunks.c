/* measure_chunks.c - what moments need in chunks of some size, and the largest chunks that fit. */
#include "measure.h"

#include <math.h>

double
kl_measure_peak(const KlMeasured *measured, int64_t rows, KlMoment *worst)
{
    int64_t size = rows > 1 ? rows : 1;
    double n_chunks = (double)((measured->rows + size - 1) / size), most = 0;
    for (size_t i = 0; i < measured->moments.n; i++) {
        const KlMoment *moment = &measured->moments.moments[i];
        double bytes =
            moment->fixed + moment->per_row * (double)rows + moment->per_chunk * n_chunks;
        if (i == 0 || bytes > most) {
            most = bytes;
            *worst = *moment;
        }
    }
    return most;
}

int64_t
kl_measure_largest_chunk(const KlMeasured *measured, double budget)
{
    double best = (double)measured->rows, least = 1;
    for (size_t i = 0; i < measured->moments.n; i++) {
        const KlMoment *moment = &measured->moments.moments[i];
        /* The number of chunks is rounded up. */
        double left = budget - moment->fixed - moment->per_chunk;
        double parts = moment->per_chunk * (double)measured->rows;
        double discriminant = left * left - 4 * moment->per_row * parts;
        if (left < 0 || discriminant < 0) {
            return 0;
        }
        /* per_row * r + parts / r <= left, between the two roots */
        double root = left + sqrt(discriminant);
        if (moment->per_row > 0) {
            best = fmin(best, floor(root / (2 * moment->per_row)));
        }
        if (parts > 0) {
            least = fmax(least, 2 * parts / fmax(root, 1));
        }
    }
    return best >= least ? (int64_t)best : 0;
}
