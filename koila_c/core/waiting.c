/* SPDX-License-Identifier: Apache-2.0 */
/* waiting.c - finds whether all tensors that autograd saves in a run exist anyway or can be recomputed by light calls. */
#include "waiting.h"

#include "alloc.h"
#include "ops.h"

/* Bits about a value. No bit: the run reads it from outside. */
enum {
    IS_MADE = 1,    /* the run makes it */
    IS_HOME = 2,    /* the run leaves it, with rows, for other runs: it is kept in any case */
    IS_LIGHT = 4,   /* light calls recompute it from values that are kept */
    IS_LISTED = 8,  /* it is in `again` */
    IS_WALKED = 16, /* walk() has still to find the calls that recompute it */
    IS_NEEDED = 32, /* it is in `needs` */
};

static uint32_t
light_number(const KlWaiting *waiting, KlValueId value)
{
    return waiting->lights->number[value];
}

/* Add a light value to `needs`, once. */
static KlStatus
need(const KlWaiting *waiting, KlValueId value, KlIds *needs)
{
    bool is_known = (waiting->known[value] & IS_NEEDED) != 0;
    waiting->known[value] |= IS_NEEDED;
    return is_known ? KL_OK : kl_program_push(needs, value, waiting->error);
}

/* Sort needs[first:] in the order in which they are made, and clear their bits. Insertion sort: they are few. */
static void
settle_needs(const KlWaiting *waiting, const KlIds *needs, size_t first)
{
    for (size_t i = first; i < needs->n; i++) {
        KlValueId value = needs->ids[i];
        uint32_t number = light_number(waiting, value);
        size_t at = i;
        waiting->known[value] &= (uint8_t)~IS_NEEDED;
        for (; at > first && light_number(waiting, needs->ids[at - 1]) > number; at--) {
            needs->ids[at] = needs->ids[at - 1];
        }
        needs->ids[at] = value;
    }
}

/* Whether a value exists before the chunk's backward, or can be recomputed then. */
static bool
is_there(const KlWaiting *waiting, KlValueId value)
{
    uint8_t known = value != KL_ID_NONE ? waiting->known[value] : 0;
    return (known & IS_MADE) == 0 || (known & (IS_HOME | IS_LIGHT)) != 0;
}

/* Whether the node is a batch normalization that is given the statistics of all chunks: it saves only its inputs. */
static bool
is_given_norm(const KlWaiting *waiting, const KlNode *node)
{
    return kl_tape_reads_for_chunks(waiting->tape, node) && node->row->is_batch_norm;
}

/* Whether the node writes nothing, or only a value that the run made and that no other run reads. */
static bool
writes_its_own(const KlWaiting *waiting, const KlNode *node)
{
    KlValueId written =
        node->n_inputs > 0 ? kl_tape_inputs(waiting->tape, node)[0].value : KL_ID_NONE;
    return node->writes == 0 || (node->n_outs == 1 && written != KL_ID_NONE &&
                                 (waiting->known[written] & (IS_MADE | IS_HOME)) == IS_MADE);
}

/* Set the bits of a node's results. Return false if the node cannot be recomputed alone; then its graph cannot wait. */
static bool
note_made(const KlWaiting *waiting, const KlNode *node)
{
    if (node->row == NULL || node->row->is_derivative || node->is_random ||
        node->refresh_of != KL_ID_NONE || !writes_its_own(waiting, node) ||
        (node->leaf_writes != 0 && !is_given_norm(waiting, node))) {
        return false;
    }
    bool is_light = node->mode == KL_MODE_ROWS && !node->row->is_heavy;
    for (uint32_t k = 0; k < node->n_inputs && is_light; k++) {
        is_light = is_there(waiting, kl_tape_inputs(waiting->tape, node)[k].value);
    }
    for (uint32_t k = 0; k < node->n_outs; k++) {
        waiting->known[node->first_out + k] |= (uint8_t)(IS_MADE | (is_light ? IS_LIGHT : 0));
    }
    return true;
}

/* Handle one tensor that autograd saves. If the run made it, it must be kept, or is added to `again`. If it is an
 * input of the run, its chunk must be a view: the graphs of all chunks would keep copies. */
static KlStatus
save(const KlWaiting *waiting, const KlNode *node, uint32_t k, bool is_output, bool *can_wait,
     KlIds *again, KlIds *needs)
{
    KlValueId value =
        is_output ? node->first_out + k : kl_tape_inputs(waiting->tape, node)[k].value;
    if (value == KL_ID_NONE) {
        return KL_OK;
    }
    uint8_t *known = &waiting->known[value];
    const KlValue *v = &waiting->tape->values[value];
    if ((*known & IS_MADE) == 0) {
        const KlPlace *place = &kl_tape_inputs(waiting->tape, node)[k].place;
        *can_wait &= !kl_place_is_rows(place) ||
                     kl_tape_is_place(waiting->tape, &v->meta.place, place) ||
                     kl_meta_is_cut_in_place(&v->meta, place);
        return light_number(waiting, value) != 0 ? need(waiting, value, needs) : KL_OK;
    }
    *can_wait &=
        is_there(waiting, value) && !kl_stage_is_overwritten(waiting->tape, node, k, is_output);
    if ((*known & (IS_HOME | IS_LISTED)) != 0 || !*can_wait) {
        return light_number(waiting, value) != 0 ? need(waiting, value, needs) : KL_OK;
    }
    *known |= IS_LISTED | IS_WALKED;
    return kl_program_push(again, value, waiting->error);
}

/* Whether the node overwrites an input that its backward needs, so that autograd saves a copy of that input. */
static bool
saves_what_it_writes(const KlWaiting *waiting, const KlNode *node)
{
    const KlKeeps *keeps = &node->row->keeps;
    uint8_t words = keeps->words;
    for (uint32_t i = 0; i < sizeof(keeps->for_grad); i++) {
        words |= keeps->for_grad[i];
    }
    KlValueId written =
        node->n_inputs > 0 ? kl_tape_inputs(waiting->tape, node)[0].value : KL_ID_NONE;
    return node->row->kind == KL_ROW_INPLACE && (words & 1) != 0 && written != KL_ID_NONE &&
           node->saves.bytes_extra == kl_meta_n_bytes(&waiting->tape->values[written].meta);
}

/* Handle each tensor that autograd saves for a node on a chunk. */
static KlStatus
save_all(const KlWaiting *waiting, const KlNode *node, bool *can_wait, KlIds *again, KlIds *needs)
{
    const KlSaves *saves = &node->saves;
    const KlParts *parts = node->mode == KL_MODE_REDUCE
                               ? kl_ops_parts((KlReduce)node->reduce, node->is_for_chunks)
                               : NULL;
    bool is_given = is_given_norm(waiting, node);
    bool is_copied = saves_what_it_writes(waiting, node);
    bool saves_more = (saves->bytes_extra != 0 && !is_copied) || saves->bytes_fixed != 0;
    KlStatus status = KL_OK;
    *can_wait &=
        (parts == NULL || parts->keeps == NULL) && (is_given || node->is_for_chunks || !saves_more);
    for (uint32_t k = 0; k < node->n_inputs && status == KL_OK && *can_wait; k++) {
        bool is_saved = is_given || k >= 64 || (saves->inputs >> k & 1) != 0 ||
                        ((node->is_for_chunks || is_copied) && k == 0);
        status = is_saved ? save(waiting, node, k, false, can_wait, again, needs) : KL_OK;
    }
    for (uint32_t k = 0; k < node->n_outs && status == KL_OK && *can_wait && parts == NULL; k++) {
        bool is_saved = !is_given && (k >= 64 || (saves->outputs >> k & 1) != 0);
        status = is_saved ? save(waiting, node, k, true, can_wait, again, needs) : KL_OK;
    }
    return status;
}

static const KlNode *
node_at(const KlWaiting *waiting, const KlRun *run, uint32_t i)
{
    return &waiting->tape->nodes[waiting->program->nodes.ids[run->nodes.first + i]];
}

/* Clear the bits of the values that a run made: other runs read these values as inputs from outside. */
static void
forget_made(const KlWaiting *waiting, const KlRun *run)
{
    for (uint32_t i = 0; i < run->nodes.n; i++) {
        const KlNode *node = node_at(waiting, run, i);
        for (uint32_t k = 0; k < node->n_outs; k++) {
            waiting->known[node->first_out + k] = 0;
        }
    }
}

/* Mark the results of a run that have rows: other runs read them, so they are kept. */
static void
note_homes(const KlWaiting *waiting, const KlRun *run)
{
    for (uint32_t i = 0; i < run->exports.n; i++) {
        KlValueId value = kl_program_export(waiting->program, run, i);
        const KlValue *v = &waiting->tape->values[value];
        bool is_parts = waiting->tape->nodes[v->node].mode == KL_MODE_REDUCE;
        if (kl_place_is_rows(&v->meta.place) && !is_parts) {
            waiting->known[value] |= IS_HOME;
        }
    }
}

/* Walk back from the values marked IS_WALKED to values that are kept. Append the lights that are read on the way to
 * `needs`, and the calls, in reverse order, to `nodes`, unless that is NULL. */
static KlStatus
walk(const KlWaiting *waiting, const KlRun *run, KlIds *needs, KlIds *nodes)
{
    KlStatus status = KL_OK;
    for (uint32_t i = run->nodes.n; i-- > 0 && status == KL_OK;) {
        const KlNode *node = node_at(waiting, run, i);
        bool is_walked = false;
        for (uint32_t k = 0; k < node->n_outs; k++) {
            uint8_t *known = &waiting->known[node->first_out + k];
            is_walked |= (*known & IS_WALKED) != 0;
            *known &= (uint8_t)~IS_WALKED;
        }
        if (is_walked && nodes != NULL) {
            status =
                kl_program_push(nodes, (KlNodeId)(node - waiting->tape->nodes), waiting->error);
        }
        for (uint32_t k = 0; k < node->n_inputs && is_walked && status == KL_OK; k++) {
            KlValueId value = kl_tape_inputs(waiting->tape, node)[k].value;
            if (value == KL_ID_NONE) {
                continue;
            }
            bool is_inside = (waiting->known[value] & (IS_MADE | IS_HOME)) == IS_MADE;
            waiting->known[value] |= is_inside ? IS_WALKED : 0;
            status = light_number(waiting, value) != 0 ? need(waiting, value, needs) : KL_OK;
        }
    }
    return status;
}

/* Whether a result of a run is no view and shares its storage with no other result. */
static bool
is_alone(const KlWaiting *waiting, const KlRun *run, KlValueId value)
{
    const KlValue *values = waiting->tape->values;
    bool is_found = values[value].view_of == KL_ID_NONE;
    for (uint32_t i = 0; i < run->exports.n && is_found; i++) {
        KlValueId other = kl_program_export(waiting->program, run, i);
        is_found = other == value || values[other].storage != values[value].storage;
    }
    return is_found;
}

/* Add a value to the lights, unless its chain would be longer than `longest`. */
static KlStatus
add_light(const KlWaiting *waiting, uint32_t run, KlValueId value, uint32_t longest)
{
    KlLights *lights = waiting->lights;
    KlIds needs = {0}, nodes = {0};
    KlLight light = {.value = value, .run = run, .length = 1};
    waiting->known[value] |= IS_WALKED;
    KlStatus status = walk(waiting, &waiting->program->runs[run], &needs, &nodes);
    settle_needs(waiting, &needs, 0);
    for (size_t i = 0; i < needs.n; i++) {
        uint32_t before = lights->lights[light_number(waiting, needs.ids[i]) - 1].length;
        light.length = light.length > before ? light.length : before + 1;
    }
    if (status == KL_OK && light.length <= longest) {
        light.needs = (KlSlice){.first = (uint32_t)lights->ids.n, .n = (uint32_t)needs.n};
        light.nodes = (KlSlice){.first = light.needs.first + light.needs.n, .n = (uint32_t)nodes.n};
        for (size_t i = 0; i < needs.n && status == KL_OK; i++) {
            status = kl_program_push(&lights->ids, needs.ids[i], waiting->error);
        }
        for (size_t i = nodes.n; i-- > 0 && status == KL_OK;) {
            status = kl_program_push(&lights->ids, nodes.ids[i], waiting->error);
        }
        if (status == KL_OK) {
            status = kl_alloc_reserve((void **)&lights->lights, &lights->n_max, lights->n + 1,
                                      sizeof(KlLight), waiting->error);
        }
        if (status == KL_OK) {
            lights->lights[lights->n++] = light;
            lights->number[value] = (uint32_t)lights->n;
        }
    }
    kl_alloc_free(nodes.ids);
    kl_alloc_free(needs.ids);
    return status;
}

KlStatus
kl_waiting_find_light(const KlWaiting *waiting, uint32_t number, const bool *may_be,
                      uint32_t longest)
{
    const KlRun *run = &waiting->program->runs[number];
    KlStatus status = KL_OK;
    note_homes(waiting, run);
    for (uint32_t i = 0; i < run->nodes.n && status == KL_OK; i++) {
        const KlNode *node = node_at(waiting, run, i);
        bool is_known = note_made(waiting, node);
        for (uint32_t k = 0; k < node->n_outs && status == KL_OK; k++) {
            KlValueId value = node->first_out + k;
            waiting->known[value] |= IS_MADE;
            bool is_light = is_known && may_be[value] && (waiting->known[value] & IS_LIGHT) != 0 &&
                            is_alone(waiting, run, value) &&
                            !kl_stage_is_overwritten(waiting->tape, node, k, true);
            status = is_light ? add_light(waiting, number, value, longest) : KL_OK;
        }
    }
    forget_made(waiting, run);
    return status;
}

KlStatus
kl_waiting_find(const KlWaiting *waiting, const KlRun *run, bool *can_wait, KlIds *again,
                KlIds *needs)
{
    KlStatus status = KL_OK;
    bool has_heavy = false;
    size_t first = needs->n;
    *can_wait = true;
    note_homes(waiting, run);
    for (uint32_t i = 0; i < run->nodes.n && *can_wait; i++) {
        const KlNode *node = node_at(waiting, run, i);
        *can_wait = note_made(waiting, node);
        has_heavy |= node->mode == KL_MODE_ROWS && node->row != NULL && node->row->is_heavy;
    }
    *can_wait &= has_heavy; /* otherwise running the whole body again is cheap */
    for (uint32_t i = 0; i < run->nodes.n && *can_wait && status == KL_OK; i++) {
        const KlNode *node = node_at(waiting, run, i);
        if (kl_stage_has_gradient(waiting->tape, &waiting->program->stages, node)) {
            status = save_all(waiting, node, can_wait, again, needs);
        }
    }
    status = status == KL_OK ? walk(waiting, run, needs, NULL) : status;
    settle_needs(waiting, needs, first);
    forget_made(waiting, run);
    return status;
}
