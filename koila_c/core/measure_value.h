/* SPDX-License-Identifier: Apache-2.0 */
/* measure_value.h - what measure.c knows of each value, and of each memory, at a moment of its walk. */
#ifndef KL_MEASURE_VALUE_H
#define KL_MEASURE_VALUE_H

#include "base.h"

typedef struct KlMeasureValue {
    uint32_t body;     /* the first segment, plus one, of the body whose segment made it last */
    bool is_gathering; /* its gradient gathers */
    bool is_gathering_whole; /* likewise, that of what is read of all its rows at once */
    bool is_read_by_tail, is_read_whole;
    bool is_one_gradient; /* what reads it whole and by rows adds to one gradient of all rows */
    bool is_whole;        /* its chunks are put together, for bodies */
    bool is_beside;       /* likewise, beside the chunks */
    bool is_inner;        /* segments of one body alone read it */
    bool is_handed;       /* a chunk of it is there for later segments of its body */
    bool is_coming;       /* and of its gradient, from these */
    bool is_offloaded;    /* it is kept beside its device */
    bool is_held;         /* what a body left, of all chunks */
    uint8_t is_filled;    /* it was emptied, and a chunk of it is there: from which level on */
    bool is_let_go;       /* what a joint left */
} KlMeasureValue;

typedef struct KlMeasureStorage {
    uint32_t n_held; /* values in it that bodies left and that are held */
    double bytes;    /* of these, counted once */
} KlMeasureStorage;

#endif
