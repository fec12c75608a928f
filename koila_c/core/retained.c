/* SPDX-License-Identifier: Apache-2.0 */
/* retained.c - finds whether all tensors that autograd saves in a run exist anyway or can be recomputed by cheap calls. */
#include "retained.h"

#include "alloc.h"
#include "ops.h"

/* Bits about a value. No bit: the run reads it from outside. */
enum {
    IS_MADE = 1,    /* the run makes it */
    IS_STORED = 2,  /* the run leaves it, with rows, for other runs, and it is near */
    IS_CHEAP = 4,   /* cheap calls recompute it from values that are kept */
    IS_LISTED = 8,  /* it is in `again` */
    IS_WALKED = 16, /* walk() has still to find the calls that recompute it */
    IS_NEEDED = 32, /* it is in `needs` */
    IS_LEFT = 64,   /* the run leaves it, with rows, for other runs */
};

static uint32_t
cheap_number(const KlRetained *retained, KlValueId value)
{
    return retained->cheap_set->number[value];
}

/* Add a value to `needs`, once, if it is cheap. */
static void
need(const KlRetained *retained, KlValueId value, KlIds *needs)
{
    uint8_t *marks = &retained->marks[value];
    if (cheap_number(retained, value) != 0 && (*marks & IS_NEEDED) == 0) {
        *marks |= IS_NEEDED;
        kl_program_push(needs, value, retained->status);
    }
}

/* Sort needs[first:] in the order in which they are made, and clear their bits. Insertion sort: they are few. */
static void
settle_needs(const KlRetained *retained, const KlIds *needs, size_t first)
{
    for (size_t i = first; i < needs->n; i++) {
        KlValueId value = needs->ids[i];
        uint32_t number = cheap_number(retained, value);
        size_t at = i;
        retained->marks[value] &= (uint8_t)~IS_NEEDED;
        for (; at > first && cheap_number(retained, needs->ids[at - 1]) > number; at--) {
            needs->ids[at] = needs->ids[at - 1];
        }
        needs->ids[at] = value;
    }
}

/* Whether a value exists before the chunk's backward, or can be recomputed then. */
static bool
is_there(const KlRetained *retained, KlValueId value)
{
    uint8_t marks = value != KL_ID_NONE ? retained->marks[value] : 0;
    return (marks & IS_MADE) == 0 || (marks & (IS_STORED | IS_CHEAP)) != 0;
}

/* Whether the node is a batch normalization that is given the statistics of all chunks: it saves only its inputs. */
static bool
is_given_norm(const KlRetained *retained, const KlNode *node)
{
    return kl_tape_reads_for_chunks(retained->tape, node) && node->row->is_batch_norm;
}

/* Whether the node writes nothing, or only a value that the run made and that no other run reads. */
static bool
writes_its_own(const KlRetained *retained, const KlNode *node)
{
    KlValueId written =
        node->n_inputs > 0 ? kl_tape_inputs(retained->tape, node)[0].value : KL_ID_NONE;
    return node->writes == 0 || (node->n_outs == 1 && written != KL_ID_NONE &&
                                 (retained->marks[written] & (IS_MADE | IS_LEFT)) == IS_MADE);
}

/* Set the bits of a node's results. Return false if the node cannot be recomputed alone; then its graph cannot wait. */
static bool
note_made(const KlRetained *retained, const KlNode *node)
{
    if (node->row == NULL || node->row->is_derivative || node->is_random ||
        node->refresh_of != KL_ID_NONE || !writes_its_own(retained, node) ||
        (node->leaf_writes != 0 && !is_given_norm(retained, node))) {
        return false;
    }
    bool is_cheap = node->mode == KL_MODE_ROWS && !node->row->is_heavy;
    for (uint32_t k = 0; k < node->n_inputs && is_cheap; k++) {
        is_cheap = is_there(retained, kl_tape_inputs(retained->tape, node)[k].value);
    }
    for (uint32_t k = 0; k < node->n_outs; k++) {
        retained->marks[node->first_out + k] |= (uint8_t)(IS_MADE | (is_cheap ? IS_CHEAP : 0));
    }
    return true;
}

/* Handle one tensor that autograd saves. If the run made it, it must be kept, or is added to `again`. If it is an
 * input of the run, its chunk must be a view: the graphs of all chunks would keep copies. Return whether that holds. */
static bool
save(const KlRetained *retained, const KlNode *node, uint32_t k, bool is_output, KlIds *again,
     KlIds *needs)
{
    KlValueId value =
        is_output ? node->first_out + k : kl_tape_inputs(retained->tape, node)[k].value;
    if (value == KL_ID_NONE) {
        return true;
    }
    uint8_t *marks = &retained->marks[value];
    const KlValue *v = &retained->tape->values[value];
    if ((*marks & IS_MADE) == 0) {
        const KlPlace *place = &kl_tape_inputs(retained->tape, node)[k].place;
        need(retained, value, needs);
        return !kl_place_is_rows(place) ||
               kl_tape_is_place(retained->tape, &v->meta.place, place) ||
               kl_meta_is_cut_in_place(&v->meta, place);
    }
    bool retains =
        is_there(retained, value) && !kl_stage_is_overwritten(retained->tape, node, k, is_output);
    if ((*marks & (IS_STORED | IS_LISTED)) != 0 || !retains) {
        need(retained, value, needs);
    } else {
        *marks |= IS_LISTED | IS_WALKED;
        kl_program_push(again, value, retained->status);
    }
    return retains;
}

/* Whether the node overwrites an input that its backward needs, so that autograd saves a copy of that input. */
static bool
saves_what_it_writes(const KlRetained *retained, const KlNode *node)
{
    const KlKeeps *keeps = &node->row->keeps;
    uint8_t words = keeps->words;
    for (uint32_t i = 0; i < sizeof(keeps->for_grad); i++) {
        words |= keeps->for_grad[i];
    }
    KlValueId written =
        node->n_inputs > 0 ? kl_tape_inputs(retained->tape, node)[0].value : KL_ID_NONE;
    return node->row->kind == KL_ROW_INPLACE && (words & 1) != 0 && written != KL_ID_NONE &&
           node->saves.bytes_extra == kl_meta_n_bytes(&retained->tape->values[written].meta);
}

/* Handle all tensors that autograd saves for a node. Return whether its graph can be retained. */
static bool
save_all(const KlRetained *retained, const KlNode *node, KlIds *again, KlIds *needs)
{
    const KlSaves *saves = &node->saves;
    const KlParts *parts = kl_tape_parts(retained->tape, node);
    bool is_given = is_given_norm(retained, node);
    bool is_copied = saves_what_it_writes(retained, node);
    bool saves_more = (saves->bytes_extra != 0 && !is_copied) || saves->bytes_fixed != 0;
    bool retains =
        (parts == NULL || parts->keeps == NULL) && (is_given || node->is_for_chunks || !saves_more);
    for (uint32_t k = 0; k < node->n_inputs && retains; k++) {
        bool is_saved = is_given || k >= 64 || (saves->inputs >> k & 1) != 0 ||
                        ((node->is_for_chunks || is_copied) && k == 0);
        retains = !is_saved || save(retained, node, k, false, again, needs);
    }
    for (uint32_t k = 0; k < node->n_outs && retains && parts == NULL; k++) {
        bool is_saved = !is_given && (k >= 64 || (saves->outputs >> k & 1) != 0);
        retains = !is_saved || save(retained, node, k, true, again, needs);
    }
    return retains;
}

static const KlNode *
node_at(const KlRetained *retained, const KlRun *run, uint32_t i)
{
    return &retained->tape->nodes[retained->program->nodes.ids[run->nodes.first + i]];
}

/* Clear the bits of the values that a run made: other runs read these values as inputs from outside. */
static void
forget_made(const KlRetained *retained, const KlRun *run)
{
    for (uint32_t i = 0; i < run->nodes.n; i++) {
        const KlNode *node = node_at(retained, run, i);
        for (uint32_t k = 0; k < node->n_outs; k++) {
            retained->marks[node->first_out + k] = 0;
        }
    }
}

/* Mark the results of a run that have rows. */
static void
note_left(const KlRetained *retained, const KlRun *run)
{
    for (uint32_t i = 0; i < run->exports.n; i++) {
        KlValueId value = kl_program_export(retained->program, run, i);
        const KlValue *v = &retained->tape->values[value];
        bool is_parts = retained->tape->nodes[v->node].mode == KL_MODE_REDUCE;
        if (kl_place_is_rows(&v->meta.place) && !is_parts) {
            bool is_near = retained->policies[value] <= KL_POLICY_REMATERIALIZE;
            retained->marks[value] |= is_near ? IS_LEFT | IS_STORED : IS_LEFT;
        }
    }
}

/* Walk back from the values marked IS_WALKED to values that are kept. Append the cheap values that are read on the way to
 * `needs`, and the calls, in reverse order, to `nodes`, unless that is NULL. */
static void
walk(const KlRetained *retained, const KlRun *run, KlIds *needs, KlIds *nodes)
{
    for (uint32_t i = run->nodes.n; i-- > 0;) {
        const KlNode *node = node_at(retained, run, i);
        bool is_walked = false;
        for (uint32_t k = 0; k < node->n_outs; k++) {
            uint8_t *marks = &retained->marks[node->first_out + k];
            is_walked |= (*marks & IS_WALKED) != 0;
            *marks &= (uint8_t)~IS_WALKED;
        }
        if (is_walked && nodes != NULL) {
            kl_program_push(nodes, (KlNodeId)(node - retained->tape->nodes), retained->status);
        }
        for (uint32_t k = 0; k < node->n_inputs && is_walked; k++) {
            KlValueId value = kl_tape_inputs(retained->tape, node)[k].value;
            if (value == KL_ID_NONE) {
                continue;
            }
            bool is_inside = (retained->marks[value] & (IS_MADE | IS_STORED)) == IS_MADE;
            retained->marks[value] |= is_inside ? IS_WALKED : 0;
            need(retained, value, needs);
        }
    }
}

/* Whether a result of a run is no view and shares its storage with no other result. */
static bool
is_alone(const KlRetained *retained, const KlRun *run, KlValueId value)
{
    const KlValue *values = retained->tape->values;
    bool is_found = values[value].view_of == KL_ID_NONE;
    for (uint32_t i = 0; i < run->exports.n && is_found; i++) {
        KlValueId other = kl_program_export(retained->program, run, i);
        is_found = other == value || values[other].storage != values[value].storage;
    }
    return is_found;
}

static void
add_cheap(const KlRetained *retained, uint32_t run, KlValueId value)
{
    KlCheapSet *cheap_set = retained->cheap_set;
    KlIds needs = {0}, nodes = {0};
    KlCheap cheap = {.value = value, .run = run};
    retained->marks[value] |= IS_WALKED;
    walk(retained, &retained->program->runs[run], &needs, &nodes);
    settle_needs(retained, &needs, 0);
    cheap.needs = (KlSlice){.first = (uint32_t)cheap_set->ids.n, .n = (uint32_t)needs.n};
    cheap.nodes = (KlSlice){.first = cheap.needs.first + cheap.needs.n, .n = (uint32_t)nodes.n};
    for (size_t i = 0; i < needs.n; i++) {
        kl_program_push(&cheap_set->ids, needs.ids[i], retained->status);
    }
    for (size_t i = nodes.n; i-- > 0;) {
        kl_program_push(&cheap_set->ids, nodes.ids[i], retained->status);
    }
    if (*retained->status == KL_OK) {
        *retained->status = kl_alloc_reserve((void **)&cheap_set->values, &cheap_set->n_max,
                                             cheap_set->n + 1, sizeof(KlCheap));
    }
    if (*retained->status == KL_OK) {
        cheap_set->values[cheap_set->n++] = cheap;
        cheap_set->number[value] = (uint32_t)cheap_set->n;
    }
    kl_alloc_free(nodes.ids);
    kl_alloc_free(needs.ids);
}

void
kl_retained_find_cheap(const KlRetained *retained, uint32_t number)
{
    const KlRun *run = &retained->program->runs[number];
    note_left(retained, run);
    for (uint32_t i = 0; i < run->nodes.n; i++) {
        const KlNode *node = node_at(retained, run, i);
        bool is_noted = note_made(retained, node);
        for (uint32_t k = 0; k < node->n_outs; k++) {
            KlValueId value = node->first_out + k;
            retained->marks[value] |= IS_MADE;
            if (is_noted && retained->policies[value] == KL_POLICY_REMATERIALIZE &&
                (retained->marks[value] & IS_CHEAP) != 0 && is_alone(retained, run, value) &&
                !kl_stage_is_overwritten(retained->tape, node, k, true)) {
                add_cheap(retained, number, value);
            }
        }
    }
    forget_made(retained, run);
}

bool
kl_retained_find(const KlRetained *retained, const KlRun *run, KlIds *again, KlIds *needs)
{
    bool has_heavy = false, retains = true;
    size_t first = needs->n;
    note_left(retained, run);
    for (uint32_t i = 0; i < run->nodes.n && retains; i++) {
        const KlNode *node = node_at(retained, run, i);
        retains = note_made(retained, node);
        has_heavy |= node->mode == KL_MODE_ROWS && node->row != NULL && node->row->is_heavy;
    }
    retains &= has_heavy; /* otherwise running the whole body again is cheap */
    for (uint32_t i = 0; i < run->nodes.n && retains; i++) {
        const KlNode *node = node_at(retained, run, i);
        retains = !kl_stage_has_gradient(retained->tape, &retained->program->stages, node) ||
                  save_all(retained, node, again, needs);
    }
    walk(retained, run, needs, NULL);
    settle_needs(retained, needs, first);
    forget_made(retained, run);
    return retains;
}
