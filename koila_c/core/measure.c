/* SPDX-License-Identifier: Apache-2.0 */
/* measure.c - walks the schedule of a step and lists what it needs at each moment. */
#include "measure.h"

#include <math.h>
#include <string.h>

#include "alloc.h"
#include "measure_value.h"

/* -- moments ------------------------------------------------------------------------------------------ */

/* Bytes by rows that a piece of a chunk takes: its rows, or its entries of the second axis, are a share of the
 * chunk's, rounded up. */
static KlBytes
of_piece(const Step *step, KlBytes bytes)
{
    bool is_whole = step->n_pieces <= 1;
    double across = (double)step->homes->n_across;
    double more = is_whole ? 0 : bytes.per_row;
    return (KlBytes){.fixed = bytes.fixed + (across > 0 ? 0 : more),
                     .per_row = bytes.per_row / step->n_pieces + (across > 0 ? more / across : 0)};
}

/* What the moments from `first` on need beside their run is held. */
static void
add_held(Step *step, size_t first)
{
    for (size_t i = first; i < step->moments->n; i++) {
        KlMoment *moment = &step->moments->moments[i];
        KlBytes own = of_piece(step, (KlBytes){moment->fixed, moment->per_row});
        KlBytes come = of_piece(step, (KlBytes){moment->gradients, moment->gradients_per_row});
        KlBytes brief = of_piece(step, (KlBytes){moment->temporary, moment->temporary_per_row});
        moment->fixed = own.fixed + step->held;
        moment->per_row = own.per_row + step->held_per_row;
        moment->per_chunk = step->held_per_chunk;
        moment->gradients = (float)(come.fixed + step->gradients);
        moment->gradients_per_row = (float)(come.per_row + step->gradients_per_row);
        moment->temporary = (float)brief.fixed;
        moment->temporary_per_row = (float)brief.per_row;
        moment->step = step->at;
        moment->is_back = step->is_back;
    }
}

static KlStatus
note(Step *step, KlMoment moment)
{
    KlMoments *moments = step->moments;
    KlStatus status = kl_alloc_reserve((void **)&moments->moments, &moments->n_max, moments->n + 1,
                                       sizeof(KlMoment), step->error);
    if (status == KL_OK) {
        moments->moments[moments->n++] = moment;
        add_held(step, moments->n - 1);
    }
    return status;
}

/* At the end, when the last node that is needed has run. */
static KlStatus
note_end(Step *step, double more)
{
    size_t n = step->stages->n_nodes;
    while (n > 0 && step->stages->node_stage[n - 1] == KL_STAGE_NONE) {
        n--;
    }
    return n > 0 ? note(step, (KlMoment){.fixed = more, .node = (KlNodeId)(n - 1)}) : KL_OK;
}

/* What a body reads whole is put together from the chunks, which lie in that from then on; not those in whose
 * memory other values are. */
static KlStatus
put_together(Step *step, const KlRun *run)
{
    KlStatus status = KL_OK;
    for (uint32_t i = 0; i < run->imports.n && status == KL_OK; i++) {
        KlValueId id = import_of(step, run, i);
        KlMeasureValue *value = &step->values[id];
        if (value->is_whole || step->sweep.sizes[id].is_put_together || !value->is_held ||
            !is_gathered(step, run, i)) {
            continue;
        }
        KlNodeId node = step->program->nodes.ids[run->nodes.first];
        status = note(step, (KlMoment){.fixed = whole(step, id), .node = node});
        value->is_whole = true;
        value->is_beside = step->storages[storage_of(step, id)].n_held > 1;
        step->held += value->is_beside ? whole(step, id) : 0;
    }
    return status;
}

static KlStatus
sweep_span(Step *step, KlSpan span)
{
    size_t first = step->moments->n;
    kl_sweep_open(&step->sweep, &span);
    KlStatus status = kl_sweep_forward(&step->sweep, step->moments, step->error);
    add_held(step, first);
    return status;
}

static KlStatus
sweep_forward(Step *step, const KlRun *run, bool is_graph)
{
    KlStatus status = put_together(step, run);
    return status == KL_OK ? sweep_span(step, kl_sweep_span(step->program, run, is_graph)) : status;
}

static KlStatus
sweep_back(Step *step)
{
    size_t first = step->moments->n;
    KlStatus status = kl_sweep_back(&step->sweep, step->moments, step->error);
    step->is_back = true;
    add_held(step, first);
    step->is_back = false;
    return status;
}

/* Gradients that outlive a run come, or go. */
static void
hold_gradients(Step *step, double bytes)
{
    step->held += bytes;
    step->gradients += bytes;
}

static void
hold_gradients_by_row(Step *step, double bytes)
{
    step->held_per_row += bytes;
    step->gradients_per_row += bytes;
}

/* A body is done: nothing of a chunk is there. */
static void
drop_chunk(Step *step)
{
    step->held_per_row = step->gradients_per_row = 0;
}

/* -- what outlives runs -------------------------------------------------------------------------------- */

/* The generator's state, before and after, where each call starts, and where its last chunk started and
 * ended; what is drawn whole. */
static void
hold_states(Step *step)
{
    double state = (double)step->outside->bytes_state;
    step->held = 2 * state + (double)step->outside->bytes_drawn;
    for (size_t i = 0; i < step->program->n_staged; i++) {
        const KlRun *run = &step->program->runs[i];
        for (uint32_t k = 0; k < run->nodes.n; k++) {
            KlNodeId id = step->program->nodes.ids[run->nodes.first + k];
            if (!step->sweep.nodes[id].is_random) {
                continue;
            }
            step->held += state;
            if (kl_program_is_body(run)) {
                const int64_t *drawn = step->outside->bytes_noise;
                int64_t noise = drawn != NULL ? drawn[id] : 0;
                step->held_per_chunk += noise < 0 ? state : 0;
                step->held += noise == 0 ? 2 * state : noise > 0 ? (double)noise : 0;
            }
        }
    }
}

/* Whether what is held of a value has memory of its own: a part of the memory that it is a view of is a copy. */
static bool
is_apart(const Step *step, KlValueId value)
{
    KlValueId of = value;
    while (step->tape->values[of].view_of != KL_ID_NONE) {
        of = step->tape->values[of].view_of;
    }
    return step->sweep.sizes[value].is_put_together || whole(step, value) < whole(step, of);
}

/* What a body leaves, of all chunks: each memory once. */
static void
hold(Step *step, KlValueId value)
{
    const KlParts *parts = parts_of(step, value);
    KlMeasureStorage *storage = &step->storages[storage_of(step, value)];
    if (step->values[value].is_held) {
        return;
    }
    step->values[value].is_held = true;
    if (parts != NULL) {
        step->held_per_chunk += parts->left * result_of(step, value) * n_parts_of(step);
    } else if (is_apart(step, value)) {
        step->held += whole(step, value);
    } else if (storage->n_held++ == 0) {
        storage->bytes = whole(step, value);
        step->held += storage->bytes;
    }
}

static void
release_value(Step *step, KlValueId value)
{
    KlMeasureStorage *storage = &step->storages[storage_of(step, value)];
    if (!step->values[value].is_held) {
        step->values[value].is_let_go = true; /* a joint made it, whose graph counts */
        return;
    }
    const KlParts *parts = parts_of(step, value);
    step->values[value].is_held = false;
    step->held -= step->values[value].is_beside ? whole(step, value) : 0;
    step->values[value].is_beside = false;
    if (parts != NULL) {
        step->held_per_chunk -= parts->left * result_of(step, value) * n_parts_of(step);
    } else if (is_apart(step, value)) {
        step->held -= whole(step, value);
    } else if (--storage->n_held == 0) {
        step->held -= storage->bytes;
    }
}

/* Bytes for each chunk of what a joint combines: what its graph keeps of parts, and their gradients. */
static void
find_combined(const Step *step, const KlRun *run, double *kept, double *seeds)
{
    *kept = *seeds = 0;
    for (uint32_t i = 0; i < run->combined.n && step->homes->is_graph; i++) {
        KlNodeId id = step->program->combined.ids[run->combined.first + i];
        KlValueId value = step->tape->nodes[id].first_out;
        const KlParts *parts = parts_of(step, value);
        if (parts != NULL && needs_gradient(step, value)) {
            *kept += parts->combined * result_of(step, value) * n_parts_of(step);
            *seeds += parts->seeds * result_of(step, value) * n_parts_of(step);
        }
    }
}

/* The gradients that reach a run's inputs from other stages, and the leaves; those of what segments of its own
 * body hand on are a chunk's. Returns what of them comes chunk by chunk. */
static double
gather_gradients(Step *step, const KlRun *run, uint32_t body)
{
    double by_chunks = 0;
    for (uint32_t i = 0; i < run->imports.n; i++) {
        KlValueId value = import_of(step, run, i);
        KlMeasureValue *known = &step->values[value];
        if (known->is_one_gradient) {
            hold_gradients(step, known->is_gathering ? 0 : gradient(step, value));
            known->is_gathering = known->is_gathering_whole = true;
        } else if (is_gathered(step, run, i)) {
            bool is_first = !known->is_gathering_whole && needs_gradient(step, value);
            hold_gradients(step, is_first ? gradient(step, value) : 0);
            known->is_gathering_whole = true;
        } else if (!known->is_gathering && needs_gradient(step, value) && known->body != body) {
            known->is_gathering = true;
            hold_gradients(step, gradient(step, value));
            uint32_t import = step->program->imports.ids[run->imports.first + i];
            bool is_cut = kl_place_is_rows(&step->stages->imports[import].place);
            bool is_there_by_rows =
                is_cut && kl_program_is_body(run) && is_made_by_rows(step, value);
            by_chunks += is_there_by_rows ? gradient(step, value) : 0;
        }
    }
    return by_chunks;
}

/* -- forward ------------------------------------------------------------------------------------------ */

static KlStatus
run_joint(Step *step, uint32_t i)
{
    double kept, seeds;
    find_combined(step, &step->program->runs[i], &kept, &seeds);
    step->held_per_chunk += kept;
    KlStatus status = sweep_forward(step, &step->program->runs[i], step->homes->is_graph);
    step->live[i] = kl_sweep_live(&step->sweep).fixed;
    step->held += step->live[i];
    return status;
}

/* Note what the segments of a body make, and return the bytes of a row of what they hand to later ones. What is held
 * of all chunks is there already. */
static double
find_handed(Step *step, const KlStep *of)
{
    const KlRun *runs = &step->program->runs[of->run];
    double values = 0;
    for (uint32_t r = 0; r < of->n_runs; r++) {
        for (uint32_t i = 0; i < runs[r].imports.n; i++) {
            KlValueId value = import_of(step, &runs[r], i);
            const KlSize *size = &step->sweep.sizes[value];
            if (step->values[value].is_offloaded && step->tape->values[value].meta.device != 0) {
                values += size->per_row; /* it is brought back */
            }
            KlMeasureValue *known = &step->values[value];
            if (r > 0 && known->body == of->run + 1 && !known->is_held && !known->is_handed) {
                known->is_handed = true;
                values += size->per_row;
            }
        }
        for (uint32_t i = 0; i < runs[r].exports.n; i++) {
            KlMeasureValue *known = &step->values[export_of(step, &runs[r], i)];
            known->body = of->run + 1;
            known->is_handed = known->is_coming = false;
        }
    }
    return values;
}

/* A segment goes back: the gradients of what earlier ones handed to it are there from now on. */
static void
come_to_handed(Step *step, const KlStep *of, const KlRun *run)
{
    for (uint32_t i = 0; i < run->imports.n; i++) {
        KlValueId value = import_of(step, run, i);
        KlMeasureValue *known = &step->values[value];
        bool is_first = known->body == of->run + 1 && !known->is_coming;
        if (is_first && needs_gradient(step, value)) {
            known->is_coming = true;
            hold_gradients_by_row(step, step->sweep.sizes[value].per_row);
        }
    }
}

/* All that a segment handed on was read for the last time; or its gradients have gone back through it. */
static void
let_go_of_handed(Step *step, const KlRun *run, bool is_gradient)
{
    for (uint32_t i = 0; i < run->exports.n; i++) {
        KlValueId value = export_of(step, run, i);
        KlMeasureValue *known = &step->values[value];
        double per_row = step->sweep.sizes[value].per_row;
        if (is_gradient) {
            hold_gradients_by_row(step, known->is_coming ? -per_row : 0);
        } else {
            step->held_per_row -= known->is_handed ? per_row : 0;
        }
        known->is_handed = false;
        known->is_coming = known->is_coming && !is_gradient;
    }
}

/* A body without a graph; of what leaves it, what is held was said. */
static KlStatus
run_forward(Step *step, const KlStep *of)
{
    KlStatus status = KL_OK;
    step->held_per_row = find_handed(step, of);
    for (uint32_t r = 0; r < of->n_runs && status == KL_OK; r++) {
        status = sweep_forward(step, &step->program->runs[of->run + r], false);
    }
    drop_chunk(step);
    return status;
}

/* The segments of a body but for the last, without their graphs; or with them, the last first, and back. */
static KlStatus
run_others(Step *step, const KlStep *of, bool is_back)
{
    KlStatus status = KL_OK;
    for (uint32_t i = 0; i + 1 < of->n_runs && status == KL_OK; i++) {
        const KlRun *run = &step->program->runs[of->run + (is_back ? of->n_runs - 2 - i : i)];
        if (is_back) {
            let_go_of_handed(step, run, false);
        }
        status = sweep_forward(step, run, is_back);
        if (is_back && status == KL_OK) {
            come_to_handed(step, of, run);
            status = sweep_back(step);
            let_go_of_handed(step, run, true);
        }
    }
    return status;
}

/* What the tail needs when it is run on zeros, in the midst of the first chunk. */
static KlStatus
run_tail(Step *step, double *worst)
{
    double held = 0;
    KlStatus status = KL_OK;
    *worst = 0;
    for (size_t i = 0; i < step->program->n_staged && status == KL_OK; i++) {
        const KlRun *run = &step->program->runs[i];
        if (!is_joint_after(step, run)) {
            continue;
        }
        KlSpan span = kl_sweep_span(step->program, run, true);
        kl_sweep_open(&step->sweep, &span);
        status = kl_sweep_forward(&step->sweep, NULL, step->error);
        double end = kl_sweep_live(&step->sweep).fixed;
        status = status == KL_OK ? kl_sweep_back(&step->sweep, NULL, step->error) : status;
        *worst = fmax(*worst, held + step->sweep.most);
        held += end;
    }
    *worst = fmax(*worst, held);
    return status;
}

/* What stands in for what a body leaves, when its tail runs on zeros. */
typedef struct StandIns {
    double values, seeds, parts;
} StandIns;

static StandIns
find_stand_ins(const Step *step, const KlStep *of)
{
    StandIns found = {0};
    for (uint32_t r = 0; r < of->n_runs; r++) {
        const KlRun *run = &step->program->runs[of->run + r];
        for (uint32_t i = 0; i < run->exports.n; i++) {
            KlValueId value = export_of(step, run, i);
            const KlParts *parts = parts_of(step, value);
            if (step->values[value].is_inner) {
                continue;
            }
            if (parts != NULL) {
                found.parts += parts->left * result_of(step, value) * n_parts_of(step);
                continue;
            }
            bool is_read = step->values[value].is_read_by_tail;
            found.values += is_read ? whole(step, value) : 0;
            found.seeds += is_read && needs_gradient(step, value) ? whole(step, value) : 0;
        }
    }
    return found;
}

/* The tail runs on zeros when the first chunk, or the first piece of it, has gone forward through `last`. */
static KlStatus
meet_tail(Step *step, const KlStep *of, const KlRun *last)
{
    double tail = 0;
    KlStatus status = run_tail(step, &tail);
    StandIns stand_ins = find_stand_ins(step, of);
    status = status == KL_OK ? sweep_forward(step, last, true) : status;
    KlBytes live = kl_sweep_live(&step->sweep);
    step->held_per_chunk += stand_ins.parts;
    if (status == KL_OK) {
        KlNodeId node = step->program->nodes.ids[last->nodes.first + last->nodes.n - 1];
        double more = tail + stand_ins.values + stand_ins.seeds;
        status = note(step, (KlMoment){.fixed = live.fixed + more,
                                       .per_row = live.per_row,
                                       .node = node,
                                       .rows = (uint32_t)rows_of(step, last)});
    }
    step->held_per_chunk -= stand_ins.parts;
    hold_gradients(step, stand_ins.seeds);
    return status;
}

/* What is handed to the head is read by it in pieces, whose gradients go to their places in that of the chunk. */
static double
gradients_handed(const Step *step, const KlRun *body, const KlRun *head)
{
    double gradients = 0;
    for (uint32_t i = 0; i < head->imports.n; i++) {
        KlValueId value = import_of(step, head, i);
        for (uint32_t k = 0; k < body->exports.n; k++) {
            bool is_handed = export_of(step, body, k) == value && needs_gradient(step, value);
            gradients += is_handed ? step->sweep.sizes[value].per_row : 0;
        }
    }
    return gradients;
}

/* What goes across a second axis is a program of its own, whose gradients of what it reads whole are there beside
 * those of the chunks before. */
static double
gradients_beside(const Step *step, const KlRun *last)
{
    double gradients = 0;
    bool is_one = step->homes->n_across == 0 || rows_of(step, last) <= 1;
    for (uint32_t i = 0; i < last->imports.n && !is_one; i++) {
        const KlImport *import =
            &step->stages->imports[step->program->imports.ids[last->imports.first + i]];
        bool is_whole = !kl_place_is_rows(&import->place);
        gradients +=
            is_whole && needs_gradient(step, import->value) ? whole(step, import->value) : 0;
    }
    return gradients;
}

/* A chunk goes forward; its head goes forward and back in pieces; the rest goes back. */
static KlStatus
run_in_pieces(Step *step, const KlStep *of)
{
    const KlRun *body = &step->program->runs[of->run], *head = body + 1;
    double handed = gradients_handed(step, body, head);
    for (uint32_t i = 0; i < of->n_runs; i++) {
        (void)gather_gradients(step, &body[i], of->run + 1);
        for (uint32_t k = 0; k < body[i].exports.n; k++) {
            step->values[export_of(step, &body[i], k)].body = of->run + 1;
        }
    }
    KlStatus status = sweep_forward(step, body, true);
    const KlBytes live = kl_sweep_live(&step->sweep);
    double beside = gradients_beside(step, head);
    step->held += live.fixed;
    step->held_per_row += live.per_row;
    hold_gradients(step, beside);
    hold_gradients_by_row(step, handed);
    step->n_pieces = step->homes->n_pieces;
    status = status == KL_OK ? meet_tail(step, of, head) : status;
    status = status == KL_OK ? sweep_back(step) : status;
    step->n_pieces = 1;
    step->held -= live.fixed;
    step->held_per_row -= live.per_row;
    hold_gradients(step, -beside);
    if (status == KL_OK) {
        KlSpan span = kl_sweep_span(step->program, body, true);
        kl_sweep_open(&step->sweep, &span);
        status = kl_sweep_forward(&step->sweep, NULL, step->error); /* again: what it left */
    }
    status = status == KL_OK ? sweep_back(step) : status;
    drop_chunk(step);
    return status;
}

/* A chunk goes forward, meets the tail, and goes back at once. */
static KlStatus
run_fused(Step *step, const KlStep *of)
{
    const KlRun *last = &step->program->runs[of->run + of->n_runs - 1];
    step->held_per_row = find_handed(step, of);
    for (uint32_t r = 0; r < of->n_runs; r++) {
        double come = gather_gradients(step, &step->program->runs[of->run + r], of->run + 1);
        hold_gradients_by_row(step,
                              -come / (double)rows_of(step, last)); /* a sweep has a chunk's */
    }
    KlStatus status = run_others(step, of, false);
    bool is_across = step->homes->n_across > 0;
    double beside = gradients_beside(step, last);
    hold_gradients(step, beside);
    if (is_across) {
        come_to_handed(step, of, last);
    }
    step->n_pieces = is_across ? step->homes->n_pieces : 1;
    status = status == KL_OK ? meet_tail(step, of, last) : status;
    come_to_handed(step, of, last);
    status = status == KL_OK ? sweep_back(step) : status;
    step->n_pieces = 1;
    hold_gradients(step, -beside);
    status = status == KL_OK ? run_others(step, of, true) : status;
    drop_chunk(step);
    return status;
}

/* Hold what a body leaves for others, but for what is offloaded. */
static void
hold_left(Step *step, const KlStep *of)
{
    for (uint32_t k = 0; k < of->values.n; k++) {
        KlValueId value = step->schedule.values.ids[of->values.first + k];
        step->values[value].is_offloaded = true;
    }
    for (uint32_t k = 0; k < of->whole.n; k++) {
        KlValueId value = step->schedule.values.ids[of->whole.first + k];
        bool is_awaited = of->op == KL_STEP_FORWARD || step->values[value].is_read_by_tail;
        step->sweep.sizes[value].is_put_together = true;
        step->values[value].is_one_gradient =
            needs_gradient(step, value) && step->values[value].is_read_whole;
        step->sweep.sizes[value].is_let_go = !(needs_gradient(step, value) && is_awaited);
    }
    for (uint32_t r = 0; r < of->n_runs; r++) {
        const KlRun *run = &step->program->runs[of->run + r];
        for (uint32_t i = 0; i < run->exports.n; i++) {
            const KlMeasureValue *value = &step->values[export_of(step, run, i)];
            if (!value->is_inner && !value->is_offloaded) {
                hold(step, export_of(step, run, i));
            }
        }
    }
}

/* -- back --------------------------------------------------------------------------------------------- */

/* Fixed bytes of what leaves a joint and is not let go, and of what was put together for it: each storage once, the
 * last of its values. */
static double
bytes_left(Step *step, const KlRun *run)
{
    double left = 0;
    for (int is_counting = 0; is_counting < 2; is_counting++) {
        for (uint32_t i = 0; i < run->exports.n + run->combined.n; i++) {
            bool is_export = i < run->exports.n;
            uint32_t k = run->combined.first + i - run->exports.n;
            const KlNode *node =
                is_export ? NULL : &step->tape->nodes[step->program->combined.ids[k]];
            KlValueId value = is_export ? export_of(step, run, i) : node->first_out;
            uint32_t n_values = is_export ? !step->values[value].is_let_go : node->n_outs;
            for (uint32_t n = n_values; n-- > 0; value++) {
                KlValueId *met = &step->met[storage_of(step, value)];
                left += is_counting && *met == value ? whole(step, value) : 0;
                *met = is_counting ? *met : value;
            }
        }
    }
    return left;
}

static KlStatus
go_back_joint(Step *step, uint32_t i)
{
    const KlRun *run = &step->program->runs[i];
    double kept, seeds;
    (void)gather_gradients(step, run, UINT32_MAX);
    find_combined(step, run, &kept, &seeds);
    if (!(is_joint_after(step, run) && step->stages->is_tail_linear)) {
        step->held_per_chunk += seeds; /* else what comes is only looked at */
    }
    step->held -= step->live[i]; /* what is live at the start of its backward is counted there */
    KlSpan span = kl_sweep_span(step->program, run, true);
    kl_sweep_open(&step->sweep, &span);
    KlStatus status = kl_sweep_forward(&step->sweep, NULL, step->error); /* again: what it left */
    for (uint32_t k = 0; k < run->exports.n; k++) {
        KlValueId value = export_of(step, run, k);
        if (step->values[value].is_gathering) {
            kl_sweep_seed(&step->sweep, value);
        }
        if (step->values[value].is_let_go) {
            kl_sweep_let_go(&step->sweep, value);
        }
    }
    status = status == KL_OK ? sweep_back(step) : status;
    for (uint32_t k = 0; k < run->exports.n; k++) {
        KlValueId value = export_of(step, run, k);
        hold_gradients(step, step->values[value].is_gathering ? -gradient(step, value) : 0);
        step->values[value].is_gathering = false;
    }
    /* The graph is let go, and with it what was put together for it. */
    step->held += fmin(step->live[i] - step->sweep.freed, bytes_left(step, run));
    step->held_per_chunk -= kept;
    return status;
}

/* The gradients that came for what a body left: chunk by chunk, or for what others were given whole. */
static double
left_gradients(const Step *step, const KlStep *of, bool is_whole)
{
    double left = 0;
    for (uint32_t r = 0; r < of->n_runs; r++) {
        const KlRun *run = &step->program->runs[of->run + r];
        for (uint32_t i = 0; i < run->exports.n; i++) {
            KlValueId value = export_of(step, run, i);
            const KlMeasureValue *known = &step->values[value];
            bool is_left = is_whole ? known->is_gathering_whole && needs_gradient(step, value)
                                    : known->is_gathering && !known->is_one_gradient &&
                                          parts_of(step, value) == NULL;
            left += is_left ? gradient(step, value) : 0;
        }
    }
    return left;
}

/* What a body left and keeps until its graph has gone back goes with its chunks. Returns its bytes. */
static double
let_go_of_left(Step *step, const KlStep *of)
{
    double before = step->held;
    for (uint32_t k = 0; k < of->values.n; k++) {
        release_value(step, step->schedule.values.ids[of->values.first + k]);
    }
    double left = before - step->held;
    step->held = before;
    return left;
}

/* Whether a graph that waited has what its body left, or what was made again for it: no chunk makes that beside. */
static void
set_there(Step *step, const KlStep *of, bool is_there)
{
    const KlRun *run = &step->program->runs[of->run];
    for (uint32_t i = 0; i < run->exports.n && of->waits; i++) {
        step->sweep.sizes[export_of(step, run, i)].is_there = is_there;
    }
}

static void
empty(Step *step, const KlIds *ids, KlSlice values, uint8_t level)
{
    for (uint32_t i = 0; i < values.n; i++) {
        uint8_t *is_filled = &step->values[ids->ids[values.first + i]].is_filled;
        *is_filled = *is_filled == level ? 0 : *is_filled;
    }
}

/* A chunk of emptied values is made again and put where it was: before each what that is made of, which then goes,
 * unless it was there. */
static KlStatus
fill(Step *step, const KlIds *ids, KlSlice values, uint8_t level)
{
    const KlLights *lights = &step->schedule.lights;
    KlStatus status = KL_OK;
    for (uint32_t i = 0; i < values.n && status == KL_OK; i++) {
        KlValueId value = ids->ids[values.first + i];
        const KlLight *light = &lights->lights[lights->number[value] - 1];
        double there = step->held_per_row + step->sweep.sizes[value].per_row;
        if (step->values[value].is_filled == 0) {
            status = fill(step, &lights->ids, light->needs, level + 1);
            step->held_per_row += step->sweep.sizes[value].per_row;
            KlSpan span = kl_sweep_span_of_light(step->program, lights, light);
            status = status == KL_OK ? sweep_span(step, span) : status;
            empty(step, &lights->ids, light->needs, level + 1);
            step->values[value].is_filled = level;
            step->held_per_row = there;
        }
    }
    return status;
}

/* A body again, a chunk forward with its graph and back; the gradients for what it left go with that. Where the
 * graph waited, nothing that it left is made again. */
static KlStatus
go_back_body(Step *step, const KlStep *of)
{
    const KlRun *runs = &step->program->runs[of->run];
    double come = 0;
    double gradients = left_gradients(step, of, false);
    double left = gradients + let_go_of_left(step, of);
    step->held_per_row = find_handed(step, of);
    for (uint32_t r = 0; r < of->n_runs; r++) {
        come += gather_gradients(step, &runs[r], of->run + 1);
    }
    /* A chunk's come as a chunk's go: before the first, or after all but the last. */
    double less = fmin(come, left), of_gradients = fmin(come, gradients);
    step->held -= less - of_gradients;
    hold_gradients(step, -of_gradients);
    hold_gradients_by_row(step, fmin(left - come, 0) / (double)rows_of(step, runs));
    KlStatus status = fill(step, &step->schedule.values, of->needs, 1);
    status = status == KL_OK ? run_others(step, of, false) : status;
    come_to_handed(step, of, &runs[of->n_runs - 1]);
    set_there(step, of, true);
    status = status == KL_OK ? sweep_forward(step, &runs[of->n_runs - 1], true) : status;
    status = status == KL_OK ? sweep_back(step) : status;
    set_there(step, of, false);
    status = status == KL_OK ? run_others(step, of, true) : status;
    empty(step, &step->schedule.values, of->needs, 1);
    drop_chunk(step);
    step->held += less - of_gradients - (left - gradients);
    hold_gradients(step, of_gradients - gradients - left_gradients(step, of, true));
    return status;
}

/* -- the schedule ------------------------------------------------------------------------------------- */

static KlStatus
walk(Step *step)
{
    KlStatus status = KL_OK;
    for (size_t i = 0; i < step->schedule.n_steps && status == KL_OK; i++) {
        const KlStep *of = &step->schedule.steps[i];
        step->at = (uint32_t)i;
        const KlValueId *values = step->schedule.values.ids + of->values.first;
        switch ((KlStepOp)of->op) {
        case KL_STEP_JOINT:
            status = run_joint(step, of->run);
            break;
        case KL_STEP_FORWARD:
            hold_left(step, of);
            status = run_forward(step, of);
            break;
        case KL_STEP_AGAIN:
            for (uint32_t k = 0; k < of->values.n; k++) {
                hold(step, values[k]);
            }
            status = run_forward(step, of);
            break;
        case KL_STEP_FUSED:
            hold_left(step, of);
            status = run_fused(step, of);
            break;
        case KL_STEP_PIECES:
            hold_left(step, of);
            status = run_in_pieces(step, of);
            break;
        case KL_STEP_JOINT_BACK:
            status = go_back_joint(step, of->run);
            break;
        case KL_STEP_BACK:
            status = go_back_body(step, of);
            break;
        case KL_STEP_RELEASE:
        case KL_STEP_EMPTY:
            for (uint32_t k = 0; k < of->values.n; k++) {
                release_value(step, values[k]);
            }
            break;
        case KL_STEP_CHECK:
        case KL_STEP_SEED:
            break;
        }
    }
    return status;
}

/* -- what comes at the end ---------------------------------------------------------------------------- */

/* Gradients of half precision are cast. Then torch goes on through graphs that were there before. */
static KlStatus
deliver(Step *step)
{
    double more = step->outside->bytes_graphs;
    for (size_t v = 0; v < step->stages->n_values; v++) {
        KlValueId value = (KlValueId)v;
        bool is_leaf = step->values[v].is_gathering && step->stages->is_leaf[v];
        if (is_leaf && gradient(step, value) > whole(step, value)) {
            more += whole(step, value);
        }
    }
    return note_end(step, more);
}

/* The numbers of the user's lazies are put together from the chunks, one by one, but for those that are. */
static KlStatus
commit(Step *step)
{
    double more = 0, worst = 0;
    for (size_t i = 0; i < step->program->reached.n; i++) {
        KlValueId value = step->program->reached.ids[i];
        bool is_there = step->sweep.sizes[value].is_put_together;
        if (kl_place_is_rows(&step->tape->values[value].meta.place) && !is_there) {
            worst = fmax(worst, more + 2 * whole(step, value));
            more += whole(step, value) * (needs_gradient(step, value) ? 2 : 1);
        }
    }
    return note_end(step, fmax(more, worst));
}

/* -- the whole ---------------------------------------------------------------------------------------- */

static KlStatus
allocate(Step *step)
{
    step->live = kl_alloc_zeroed(step->program->n_staged, sizeof(double));
    step->values = kl_alloc_zeroed(step->stages->n_values, sizeof(KlMeasureValue));
    step->storages = kl_alloc_zeroed(step->tape->n_storages, sizeof(KlMeasureStorage));
    step->met = kl_alloc_zeroed(step->tape->n_storages, sizeof(KlValueId));
    return step->live != NULL && step->values != NULL && step->storages != NULL && step->met != NULL
               ? KL_OK
               : kl_error_set(step->error, KL_ERROR_MEMORY, "no memory to measure %zu nodes",
                              step->stages->n_nodes);
}

static void
release(Step *step)
{
    kl_sweep_fini(&step->sweep);
    kl_schedule_fini(&step->schedule);
    kl_alloc_free(step->live);
    kl_alloc_free(step->storages);
    kl_alloc_free(step->values);
    kl_alloc_free(step->met);
}

/* What is known of values before the walk; and the rows of the longest axis. */
static void
look_up(Step *step, KlMeasured *measured)
{
    for (size_t i = 0; i < step->program->roots.n; i++) {
        step->values[step->program->roots.ids[i]].is_read_by_tail = true;
    }
    for (size_t i = 0; i < step->program->n_staged; i++) {
        const KlRun *run = &step->program->runs[i];
        for (uint32_t k = 0; k < run->inner.n; k++) {
            step->values[step->program->inner.ids[run->inner.first + k]].is_inner = true;
        }
        for (uint32_t k = 0; k < run->imports.n; k++) {
            KlMeasureValue *value = &step->values[import_of(step, run, k)];
            value->is_read_by_tail |= is_joint_after(step, run);
            value->is_read_whole |= !kl_program_is_body(run) || is_gathered(step, run, k);
        }
        KlAxisId axis = kl_tape_axis_find(step->tape, run->axis);
        if (axis != KL_ID_NONE && step->tape->axis_rows[axis] > measured->rows) {
            measured->rows = step->tape->axis_rows[axis];
        }
    }
}

KlStatus
kl_measure_step(const KlTape *tape, const KlProgram *program, const KlOutside *outside,
                const KlHomes *homes, KlMeasured *measured, KlError *error)
{
    *measured = (KlMeasured){0};
    Step step = {.tape = tape,
                 .program = program,
                 .stages = &program->stages,
                 .outside = outside,
                 .homes = homes,
                 .error = error,
                 .n_pieces = 1,
                 .moments = &measured->moments};
    KlStatus status = kl_sweep_init(&step.sweep, tape, program, &outside->known, error);
    status = status == KL_OK ? allocate(&step) : status;
    status =
        status == KL_OK ? kl_schedule_build(tape, program, homes, &step.schedule, error) : status;
    if (status != KL_OK) {
        goto done;
    }
    look_up(&step, measured);
    hold_states(&step);
    status = homes->is_live ? KL_OK : walk(&step);
    step.at = (uint32_t)step.schedule.n_steps;
    if (homes->is_graph && !homes->is_live) {
        status = status == KL_OK ? deliver(&step) : status;
    }
    status = status == KL_OK && !homes->is_live ? commit(&step) : status;
    if (status == KL_OK) {
        KlMoments *moments = homes->is_live ? &measured->moments : NULL;
        status = kl_measure_whole(&step.sweep, homes->is_graph, outside->bytes_graphs, moments,
                                  &measured->whole, error);
    }
done:
    release(&step);
    if (status != KL_OK) {
        kl_measure_fini(measured);
    }
    return status;
}

void
kl_measure_fini(KlMeasured *measured)
{
    kl_alloc_free(measured->moments.moments);
    *measured = (KlMeasured){0};
}
