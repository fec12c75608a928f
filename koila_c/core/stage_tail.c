/* SPDX-License-Identifier: Apache-2.0 */
/* stage_tail.c - runs cheap calls on a slice of the rows once if they end the program, so that its tail stays linear.
 *
 * In loss[:n].mean() the slice is made by a barrier and has rows again. By rows, the mean would be a body of its own, and
 * the last one, so the model's body would have to run twice. Calls that save nothing for backward make a linear tail
 * if they run once instead, on all rows, and then the model's body runs once. */
#include "stage.h"

#include "alloc.h"

/* Bits about a value. */
enum {
    IS_READ_BY_ROWS = 1, /* a call that still runs by rows reads it */
    IS_THERE = 2,        /* a barrier makes it, or it exists already: no body has to make it */
    IS_OF_BODY = 4,      /* it depends on results of a body */
};

typedef struct Tail {
    KlTape *tape;
    uint8_t *marks; /* [n_values] */
    bool *is_end;   /* [n_nodes] it and all calls by rows that depend on it are cheap and linear */
} Tail;

/* Whether a call by rows is cheap, has a gradient, and saves at most leaves for backward. A call that reads a reduction's
 * result is excluded, because in chunks it may read the chunk's partial result instead. */
static bool
is_linear(const Tail *tail, const KlNode *node)
{
    bool has_gradient = false;
    if (node->mode == KL_MODE_ONCE || node->row == NULL || node->row->is_heavy || node->is_random ||
        node->writes != 0 || node->leaf_writes != 0 || node->row_ranges != 0 ||
        node->refresh_of != KL_ID_NONE || node->is_for_chunks || node->is_open || node->is_done ||
        node->saves.outputs != 0 || node->saves.bytes_extra > 0) {
        return false;
    }
    for (uint32_t k = 0; k < node->n_outs; k++) {
        has_gradient = has_gradient || tail->tape->values[node->first_out + k].meta.requires_grad;
    }
    for (uint32_t k = 0; k < node->n_inputs && has_gradient; k++) {
        const KlNode *maker = kl_tape_maker(tail->tape, kl_tape_inputs(tail->tape, node)[k].value);
        bool is_saved = k >= 64 || (node->saves.inputs >> k & 1) != 0;
        has_gradient = maker == NULL || !(is_saved || maker->mode == KL_MODE_REDUCE);
    }
    return has_gradient;
}

/* From last to first, clear is_end of calls whose results a call by rows reads. Return whether any was cleared. */
static bool
strike_read(Tail *tail)
{
    bool has_any = false;
    for (size_t i = 0; i < tail->tape->n_values; i++) {
        tail->marks[i] = 0;
    }
    for (size_t i = tail->tape->n_nodes; i-- > tail->tape->n_done;) {
        const KlNode *node = &tail->tape->nodes[i];
        for (uint32_t k = 0; k < node->n_outs && tail->is_end[i]; k++) {
            tail->is_end[i] = (tail->marks[node->first_out + k] & IS_READ_BY_ROWS) == 0;
            has_any = has_any || !tail->is_end[i];
        }
        bool stays = node->mode != KL_MODE_ONCE && !node->is_done && !tail->is_end[i];
        for (uint32_t k = 0; k < node->n_inputs && stays; k++) {
            KlValueId value = kl_tape_inputs(tail->tape, node)[k].value;
            if (value != KL_ID_NONE) {
                tail->marks[value] |= IS_READ_BY_ROWS;
            }
        }
    }
    return has_any;
}

/* From first to last, keep is_end if all inputs exist whole and one depends on a body. Return whether any changed. */
static bool
strike_early(Tail *tail)
{
    bool has_any = false;
    for (size_t i = tail->tape->n_done; i < tail->tape->n_nodes; i++) {
        const KlNode *node = &tail->tape->nodes[i];
        bool is_there = true, is_of_body = false;
        for (uint32_t k = 0; k < node->n_inputs; k++) {
            KlValueId value = kl_tape_inputs(tail->tape, node)[k].value;
            const KlNode *maker = kl_tape_maker(tail->tape, value);
            uint8_t marks = maker != NULL && !maker->is_done ? tail->marks[value] : IS_THERE;
            is_there = is_there && (marks & IS_THERE) != 0;
            is_of_body = is_of_body || (marks & IS_OF_BODY) != 0;
        }
        has_any = has_any || (tail->is_end[i] && !(is_there && is_of_body));
        tail->is_end[i] = tail->is_end[i] && is_there && is_of_body;
        bool is_once = node->mode == KL_MODE_ONCE || tail->is_end[i];
        uint8_t marks = is_once || node->mode == KL_MODE_REDUCE ? IS_THERE : 0;
        marks |= is_of_body || !is_once ? IS_OF_BODY : 0;
        for (uint32_t k = 0; k < node->n_outs; k++) {
            tail->marks[node->first_out + k] |= marks;
        }
    }
    return has_any;
}

/* Whether a call that runs once has a result with rows, which later calls can run by rows. */
static bool
has_rows_again(const KlTape *tape)
{
    bool is_found = false;
    for (size_t i = tape->n_done; i < tape->n_nodes && !is_found; i++) {
        const KlNode *node = &tape->nodes[i];
        for (uint32_t k = 0; k < node->n_outs && node->mode == KL_MODE_ONCE && !is_found; k++) {
            is_found = kl_place_is_rows(&tape->values[node->first_out + k].meta.place);
        }
    }
    return is_found;
}

KlStatus
kl_stage_keep_tail(KlTape *tape)
{
    KlStatus status = KL_OK;
    Tail tail = {.tape = tape};
    if (!has_rows_again(tape)) {
        return KL_OK;
    }
    KlScratch scratch = {0};
    tail.marks = kl_alloc_scratch(&scratch, tape->n_values, sizeof(uint8_t));
    tail.is_end = kl_alloc_scratch(&scratch, tape->n_nodes, sizeof(bool));
    if (scratch.is_short) {
        status = KL_ERROR_MEMORY;
        goto done;
    }
    for (size_t i = tape->n_done; i < tape->n_nodes; i++) {
        tail.is_end[i] = is_linear(&tail, &tape->nodes[i]);
    }
    (void)strike_read(&tail);
    while (strike_early(&tail) && strike_read(&tail)) {
    }
    for (size_t i = tape->n_done; i < tape->n_nodes; i++) {
        KlNode *node = &tape->nodes[i];
        if (tail.is_end
                [i]) { /* it could run by rows, so that it has no reason for the user's report */
            kl_tape_run_once(tape, node, NULL);
        }
        for (uint32_t k = 0; k < node->n_outs && tail.is_end[i]; k++) {
            tape->values[node->first_out + k].meta.is_there = true;
        }
    }
done:
    kl_alloc_scratch_free(&scratch);
    return status;
}
