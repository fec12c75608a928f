/* SPDX-License-Identifier: Apache-2.0 */
/* py_rows.c - records calls that have a row: binds the arguments, infers the results, appends the node. It knows no
 * op by name: the row says what a call means. */
#include "py_run.h"

#include <string.h>

#include "alloc.h"

/* -- callbacks of the binder (py_args.h) --------------------------------------------------------------- */

typedef struct MetaReader {
    Tape *tape;
    bool is_unknown; /* a tensor has no value on the tape yet */
    bool is_asked;   /* for numbers, which may be others at the next call */
} MetaReader;

static KlValueId
value_of(const Tape *tape, PyObject *tensor)
{
    if (kl_lazy_check(tensor)) {
        const Value *value = kl_lazy_value(tensor);
        return value->tape == tape
                   ? value->id
                   : KL_ID_NONE; /* another thread may have recorded with it meanwhile */
    }
    return kl_tape_find(tape, tensor);
}

/* The value whose meta this is; the meta must be a field of a value of the tape. */
static KlValueId
value_with(const Tape *tape, const KlMeta *meta)
{
    const KlValue *value =
        (const KlValue *)(const void *)((const char *)meta - offsetof(KlValue, meta));
    return (KlValueId)(value - tape->core.values);
}

static const KlMeta *
desk_meta_of(void *context, PyObject *object)
{
    MetaReader *reader = context;
    if (!kl_lazy_is_tensor(object)) {
        return NULL;
    }
    KlValueId id = value_of(reader->tape, object);
    if (id == KL_ID_NONE) {
        reader->is_unknown = true;
        return NULL;
    }
    KlMeta *meta = &reader->tape->core.values[id].meta;
    meta->place.axis = kl_tape_axis_find(&reader->tape->core, meta->place.axis);
    return meta;
}

/* Asked for each call, since the numbers of an index tensor may have changed since the last one. */
static bool
desk_is_row_range(void *context, PyObject *object, const KlMeta *Py_UNUSED(meta))
{
    MetaReader *reader = context;
    reader->is_asked = true;
    KlValueId id = value_of(reader->tape, object);
    PyObject *real = id != KL_ID_NONE ? reader->tape->values[id].real : NULL;
    if (real == NULL) {
        return false;
    }
    bool is_range = kl_py_truth(PyObject_CallOneArg(kl_py.is_row_range, real)) == 1;
    PyErr_Clear();
    return is_range;
}

/* -- recording ------------------------------------------------------------------------------------------- */

#define KL_ROW_INPUTS 64

#define KL_KNOWN_SLOTS 8
#define KL_KNOWN_INPUTS 4
#define KL_KNOWN_OUTS 2

/* All that the rules of a row may read of a call, besides constants among its arguments. */
typedef struct Seen {
    const KlRow *row;
    uint32_t context, n_slots, n_inputs;
    KlDtype default_dtype;
    struct {
        KlSlotKind kind;
        uint32_t n; /* of a container */
    } slots[KL_KNOWN_SLOTS];
    struct {
        KlMeta meta;
        int64_t n_rows;        /* of its axis */
    } inputs[KL_KNOWN_INPUTS]; /* of the VALUE slots, in their order, which is the row's too */
} Seen;

/* What was inferred for a call. The next one like it is neither bound nor inferred. */
typedef struct CachedCall {
    Seen seen;                               /* zero: there is none */
    PyObject *constants[KL_KNOWN_SLOTS + 1]; /* owned: of each slot, then the names of keywords */
    KlInferred inferred;                     /* its arrays are the next two */
    KlMeta outs[KL_KNOWN_OUTS];
    KlPlace places[KL_KNOWN_INPUTS];
    KlSaves saves;
} CachedCall;

/* A call that is about to become a node. */
typedef struct Recording {
    Tape *tape;
    const KlPyCall *given;
    const KlRow *row;
    KlPyBound bound;
    KlPyNode call;
    uint32_t context;
    bool is_grad_enabled;
    KlValueId *inputs; /* [bound.n_inputs] */
    KlValueId inputs_fixed[KL_ROW_INPUTS];
    KlSaves saves;
    Seen seen;
    CachedCall *cached; /* where the call is noted, or NULL */
} Recording;

static bool
is_order(const Recording *recording, KlAxisId axis)
{
    const KlTape *core = &recording->tape->core;
    return axis != KL_ID_NONE && core->orders[axis].of != KL_ID_NONE && core->axis_of[axis] == axis;
}

/* The bit of the value that an assignment in an order of rows (KlOrder) writes, if it counts 0, 1, 2, ...; else 0. */
static uint64_t
ranges_of(Recording *recording)
{
    const KlPyBound *bound = &recording->bound;
    bool has_role = false;
    if (recording->row->tie != KL_TIE_PUT || bound->args[2].kind != KL_ARG_VALUE ||
        bound->args[2].input >= 64) {
        return 0;
    }
    for (uint32_t i = 0; i < bound->n_inputs; i++) {
        has_role = has_role || (bound->inputs[i] != NULL && bound->inputs[i]->role != KL_ROLE_NONE);
    }
    uint32_t input = bound->args[2].input;
    MetaReader reader = {.tape = recording->tape};
    bool is_range = has_role && desk_is_row_range(&reader, bound->input_origins[input].object,
                                                  bound->inputs[input]);
    return is_range ? UINT64_C(1) << input : 0;
}

static KlStatus
infer_once(Recording *recording)
{
    Tape *tape = recording->tape;
    const KlCall call = {.row = recording->row,
                         .args = recording->bound.args,
                         .n_args = recording->bound.n_args,
                         .inputs = recording->bound.inputs,
                         .n_inputs = recording->bound.n_inputs,
                         .default_dtype = kl_meta_default_dtype(),
                         .blocked_halves = kl_py.blocked_halves,
                         .tiled_halves = kl_py.tiled_halves,
                         .emulated_halves = kl_py.emulated_halves,
                         .block_width = kl_py.block_width,
                         .is_flash_allowed = kl_py.is_flash_allowed,
                         .is_grad_enabled = recording->is_grad_enabled,
                         .axis_rows = tape->core.axis_rows,
                         .orders = tape->core.orders,
                         .row_ranges = ranges_of(recording),
                         .n_axes = (uint32_t)tape->core.n_axes};
    return kl_context_infer(&call, recording->context, &tape->inferred, &recording->saves);
}

/* Infer a call; if it does not keep an order of rows that it reads, break the order and infer again. */
static KlStatus
infer(Recording *recording)
{
    const KlInferred *inferred = &recording->tape->inferred;
    KlTape *core = &recording->tape->core;
    KlStatus status = infer_once(recording);
    while (status == KL_DECLINED && inferred->breaks != KL_ID_NONE) {
        kl_tape_break_order(core, inferred->breaks);
        status = infer_once(recording);
    }
    /* Unsorted rows are written into a view of sorted ones: the memory would then be neither, so the order is broken. */
    if (status == KL_OK && inferred->is_ordered && recording->row->kind == KL_ROW_INPLACE &&
        core->values[recording->inputs[0]].view_of != KL_ID_NONE) {
        KlAxisId was = recording->bound.inputs[0]->place.axis;
        if (was != inferred->outs[0].place.axis && is_order(recording, was)) {
            kl_tape_break_order(core, was);
            status = infer(recording);
        }
    }
    return status;
}

/* Infer a call whose inputs have rows of several batches of equal size. If it then runs by rows, the row has found
 * them aligned, and they become one batch; else they stay apart. */
static KlStatus
infer_merging_axes(Recording *recording)
{
    KlTape *core = &recording->tape->core;
    KlAxisId kept = KL_ID_NONE, before[KL_ROW_INPUTS];
    uint32_t n = recording->bound.n_inputs;
    bool is_several = false, is_possible = n <= KL_ROW_INPUTS;
    for (uint32_t i = 0; is_possible && i < n; i++) {
        const KlMeta *meta = recording->bound.inputs[i];
        before[i] = meta != NULL ? meta->place.axis : KL_ID_NONE;
        if (before[i] == KL_ID_NONE || before[i] == kept) {
            continue;
        }
        is_several = kept != KL_ID_NONE;
        is_possible = !is_order(recording, before[i]) &&
                      (!is_several || core->axis_rows[before[i]] == core->axis_rows[kept]);
        kept = before[i] < kept ? before[i] : kept; /* KL_ID_NONE is larger than each */
    }
    if (!is_several || !is_possible) {
        return infer(recording);
    }
    for (uint32_t i = 0; i < n; i++) {
        if (before[i] != KL_ID_NONE) {
            core->values[recording->inputs[i]].meta.place.axis = kept;
        }
    }
    KlStatus status = infer(recording);
    bool is_merged = status == KL_OK && recording->tape->inferred.split.mode != KL_MODE_ONCE;
    for (uint32_t i = 0; i < n; i++) {
        if (before[i] != KL_ID_NONE && is_merged) {
            kl_tape_axis_merge(core, before[i], kept);
        } else if (before[i] != KL_ID_NONE) {
            core->values[recording->inputs[i]].meta.place.axis = before[i];
        }
    }
    return is_merged ? status : infer(recording);
}

static void
run_once(KlSplit *split, const char *reason)
{
    split->mode = KL_MODE_ONCE;
    split->reason = reason;
    split->axis = KL_ID_NONE;
    split->n_rewrites = 0;
    split->is_open = false;
    split->again = 0;
}

/* If one value is given twice with different places, and once by name, a slot could not tell which place is meant
 * (only positional arguments come in the order of the signature): run the call once. */
static void
refuse_two_roles(Recording *recording)
{
    KlSplit *split = &recording->tape->inferred.split;
    for (uint32_t i = 0; split->mode != KL_MODE_ONCE && i < recording->bound.n_inputs; i++) {
        for (uint32_t k = 0; k < i; k++) {
            uint32_t arg = recording->bound.input_origins[k].arg;
            bool is_named =
                recording->bound.origins[arg].position >= PyTuple_GET_SIZE(recording->given->args);
            if (recording->inputs[i] == recording->inputs[k] && is_named &&
                recording->inputs[i] != KL_ID_NONE &&
                !kl_place_is_equal(&split->places[i], &split->places[k])) {
                run_once(split, "one tensor is given twice, once by samples and once whole");
            }
        }
    }
    for (uint32_t i = 0; split->mode == KL_MODE_ONCE && i < recording->bound.n_inputs; i++) {
        split->places[i] = KL_PLACE_WHOLE;
    }
}

/* Run a reduction once on the whole batch if Python cannot combine its parts. */
static void
refuse_unknown_reduction(Recording *recording)
{
    KlSplit *split = &recording->tape->inferred.split;
    if (split->mode == KL_MODE_REDUCE && (kl_py.reductions >> split->reduce & 1) == 0) {
        run_once(split, "a reduction over the batch that is not split");
    }
}

/* Give each output of a call that took some rows of a batch, or joined batches, a new batch of its own. */
static int
find_own_rows(Recording *recording)
{
    KlInferred *inferred = &recording->tape->inferred;
    int32_t dim = (int32_t)inferred->split.again - 1;
    for (uint32_t k = 0; dim >= 0 && k < inferred->n_outs; k++) {
        KlMeta *out = &inferred->outs[k];
        if (kl_place_is_rows(&out->place) || dim >= out->n_dims || out->shape[dim] == 0) {
            continue;
        }
        KlPlace place = {.dim = dim, .outer = 1, .inner = 1};
        if (kl_tape_new_axis(recording->tape, out->shape[dim], &place.axis) < 0) {
            return -1;
        }
        out->place = place;
    }
    return 0;
}

/* A call runs once, so that its outputs are whole. An output with a dim of the batch's size gets rows there again, so
 * that later calls can run in chunks. Outputs of part of a batch, or of joined batches, get a batch of their own. */
static int
find_rows_again(Recording *recording)
{
    KlInferred *inferred = &recording->tape->inferred;
    if (inferred->split.mode != KL_MODE_ONCE) {
        return 0;
    }
    for (uint32_t i = 0; i < recording->bound.n_inputs; i++) {
        const KlMeta *meta = recording->bound.inputs[i];
        if (meta == NULL || !kl_place_is_rows(&meta->place) || meta->place.outer != 1 ||
            meta->place.inner != 1) {
            continue;
        }
        for (uint32_t k = 0; k < inferred->n_outs; k++) {
            KlMeta *out = &inferred->outs[k];
            int32_t dim = meta->place.dim;
            if (!kl_place_is_rows(&out->place) && dim < out->n_dims &&
                out->shape[dim] == meta->shape[dim]) {
                out->place = meta->place;
            }
        }
    }
    return find_own_rows(recording);
}

/* Record a sort of indices of the batch's rows so that each chunk sorts its own rows: its outputs are in an order
 * of rows (KlOrder). The first call that reads them otherwise breaks the order. */
static int
begin_order(Recording *recording)
{
    Tape *tape = recording->tape;
    KlInferred *inferred = &tape->inferred;
    KlTie tie = recording->row->tie;
    const KlMeta *keys = recording->bound.inputs[0];
    const KlArg *descending = &recording->bound.args[2];
    if ((tie != KL_TIE_SORT && tie != KL_TIE_ARGSORT) || inferred->split.mode != KL_MODE_ONCE ||
        recording->bound.n_inputs != 1 || !kl_place_is_rows(&keys->place) || keys->n_dims != 1 ||
        keys->place.outer != 1 || keys->requires_grad || keys->role != KL_ROLE_NONE ||
        is_order(recording, keys->place.axis) ||
        !kl_tape_is_index(&tape->core, recording->inputs[0])) {
        return 0;
    }
    KlPlace place = keys->place, own = place; /* copies, since the tape's arrays may move */
    if (kl_tape_new_axis(tape, tape->core.axis_rows[own.axis], &place.axis) < 0) {
        return -1;
    }
    tape->core.orders[place.axis] =
        (KlOrder){.of = own.axis,
                  .is_ascending = descending->kind == KL_ARG_ABSENT ||
                                  (descending->kind == KL_ARG_BOOL && descending->u.i == 0)};
    inferred->split.mode = KL_MODE_ROWS;
    inferred->split.axis = own.axis;
    inferred->split.reason = NULL;
    inferred->split.again = 0;
    inferred->split.places[0] = own;
    inferred->is_ordered = true;
    for (uint32_t i = 0; i < inferred->n_outs; i++) {
        KlMeta *out = &inferred->outs[i];
        out->place = place;
        out->order = place.axis;
        out->role = i + 1 < inferred->n_outs ? KL_ROLE_KEYS : KL_ROLE_SOURCES;
        out->n_of_row = own.inner;
    }
    return 0;
}

/* Rows written into a view of memory without rows, or with others: each chunk would write it all, so run once. */
static void
refuse_rows_into_whole(const Recording *recording, uint32_t writes)
{
    const KlTape *core = &recording->tape->core;
    KlInferred *inferred = &recording->tape->inferred;
    if (writes == 0 || inferred->split.mode == KL_MODE_ONCE ||
        core->values[recording->inputs[0]].view_of == KL_ID_NONE) {
        return;
    }
    KlStorageId storage = core->values[recording->inputs[0]].storage;
    const KlValue *base = &core->values[core->storages[storage].base];
    KlAxisId own = kl_tape_axis_find(core, inferred->outs[0].place.axis);
    if (own != KL_ID_NONE && own != kl_tape_axis_find(core, base->meta.place.axis)) {
        run_once(&inferred->split, "samples are written into memory that has none, or others");
        inferred->outs[0].place = KL_PLACE_WHOLE;
    }
}

/* Drop the order of the outputs of a call that must run once for another reason. */
static void
refuse_order(const Recording *recording)
{
    KlInferred *inferred = &recording->tape->inferred;
    if (!inferred->is_ordered || inferred->split.mode != KL_MODE_ONCE) {
        return;
    }
    inferred->is_ordered = false;
    for (uint32_t i = 0; i < inferred->n_outs; i++) {
        KlMeta *out = &inferred->outs[i];
        out->role = KL_ROLE_NONE;
        out->place = is_order(recording, out->place.axis) ? KL_PLACE_WHOLE : out->place;
    }
}

/* A value that was made from sizes alone has no rows yet: it gets them where this call reads it by rows. */
static void
settle_open(const Recording *recording, const KlSplit *split)
{
    for (uint32_t i = 0; split->mode != KL_MODE_ONCE && i < recording->bound.n_inputs; i++) {
        const KlMeta *meta = recording->bound.inputs[i];
        if (meta != NULL && kl_place_is_rows(&split->places[i]) &&
            !kl_place_is_rows(&meta->place)) {
            kl_tape_settle_open(&recording->tape->core, recording->inputs[i], &split->places[i]);
        }
    }
}

/* Translate rewrites from words of the signature to positions in the call. */
static void
place_rewrites(Recording *recording)
{
    KlSplit *split = &recording->tape->inferred.split;
    for (uint32_t i = 0; i < split->n_rewrites; i++) {
        KlRewrite *rewrite = &split->rewrites[i];
        const KlPyOrigin *origin = &recording->bound.origins[rewrite->arg];
        uint16_t position = (uint16_t)origin->position;
        if (origin->is_variadic) {
            position = (uint16_t)(position + rewrite->entry);
        }
        rewrite->arg = position;
        rewrite->entry = origin->is_sequence ? rewrite->entry : UINT16_MAX;
    }
}

/* A write that gives a detached view a graph of its own leaves the storage with two. It is recorded only on what
 * the detaching call returned; after it, only that view may be written. Return whether a write must run live. */
static bool
must_run_live(Recording *recording, KlValueId value)
{
    KlTape *core = &recording->tape->core;
    KlStorage *storage = &core->storages[core->values[value].storage];
    if (storage->apart == value) {
        return false;
    }
    KlValueId origin = kl_view_origin(recording->tape, value);
    const KlNode *maker = &core->nodes[core->values[origin].node];
    bool is_view_of_it = maker->row == NULL || !kl_ops_is_detached(maker->row);
    bool is_begun = recording->tape->inferred.outs[0].requires_grad && is_view_of_it &&
                    kl_view_is_detached(recording->tape, value);
    bool result = storage->apart != KL_ID_NONE || is_begun;
    storage->is_uncertain = storage->is_uncertain || result;
    return result;
}

/* The inputs that the call writes in place, as bits; -1: it must run live. */
static int
find_writes(Recording *recording, uint32_t *writes, uint32_t *leaf_writes)
{
    const KlTape *core = &recording->tape->core;
    const KlRow *row = recording->row;
    KlEffects effects = recording->tape->inferred.effects;
    *writes = *leaf_writes = 0;
    for (uint32_t i = 0; i < recording->bound.n_args; i++) {
        const KlArg *arg = &recording->bound.args[i];
        if ((effects >> i & 1) == 0 || arg->kind != KL_ARG_VALUE) {
            continue;
        }
        KlValueId value = recording->inputs[arg->input];
        const KlValue *written = &core->values[value];
        bool is_own = row->kind == KL_ROW_INPLACE && arg->input == 0;
        KlValueId base = core->storages[written->storage].base;
        if (row->kind != KL_ROW_INPLACE && written->node == KL_ID_NONE && !written->is_wanted) {
            *leaf_writes |=
                1u << arg->input; /* statistics: chunks write a copy, the commit writes the leaf */
            continue;
        }
        if (!is_own || core->values[base].node == KL_ID_NONE ||
            core->storages[written->storage].is_uncertain) {
            return -1; /* it may be memory of the user's */
        }
        if (kl_view_has_leaf(recording->tape, value) || must_run_live(recording, value)) {
            return -1;
        }
        *writes |= 1u << arg->input;
    }
    return 0;
}

/* Move the LazyTensor that a call wrote to the new version of its value, and with it the gradient that it retains. If
 * `v` is a view, `v[0] = 1` leaves that gradient to the old version until a call uses `v`: attach_one() moves it then. */
static void
move_written(const Recording *recording, Value *written, KlValueId now)
{
    const KlTape *core = &recording->tape->core;
    if (written == NULL) {
        return;
    }
    bool is_later =
        recording->tape->inferred.writes_view && core->values[now].view_of != KL_ID_NONE;
    kl_lazy_move(written, now);
    if (recording->is_grad_enabled && !is_later) {
        kl_lazy_retain(written, false);
    }
}

/* After a write was recorded as node `id`. New reference: the LazyTensor that was written. */
static PyObject *
settle_write(const Recording *recording, KlNodeId id, bool is_detached)
{
    Tape *tape = recording->tape;
    PyObject *written = recording->bound.input_origins[0].object;
    const KlNode *node = &tape->core.nodes[id];
    KlValueId last = tape->core.inputs[node->first_input + node->n_inputs - 1].value;
    KlStorage *storage = &tape->core.storages[tape->core.values[node->first_out].storage];
    storage->is_hidden |= is_detached && kl_view_is_data(tape, recording->inputs[0]);
    move_written(recording, kl_lazy_value(written), node->first_out);
    if (node->n_outs == 2) { /* the LazyTensor of the whole memory has a new graph too */
        move_written(recording, tape->values[last].handle, node->first_out + 1);
    }
    return Py_NewRef(written);
}

/* Whether the call is a view of a plain tensor that needs no gradient (`plain.view_as(lazy)`). It runs at once: plain
 * code may write that memory, and the view must show the write. */
static bool
is_view_of_plain(const Recording *recording, const KlInferred *inferred)
{
    if (inferred->alias != KL_ALIAS_VIEW && inferred->alias != KL_ALIAS_MAYBE) {
        return false;
    }
    const KlValue *of = &recording->tape->core.values[recording->inputs[inferred->alias_input]];
    bool needs_gradient = of->meta.requires_grad && recording->is_grad_enabled;
    return of->node == KL_ID_NONE && !of->is_wanted && !needs_gradient;
}

/* Whether other calls or LazyTensors use memory of the program that as_leaf would make a leaf of. */
static bool
is_read_or_shared(const Tape *tape, KlValueId value)
{
    KlStorageId storage = tape->core.values[value].storage;
    bool is_own = tape->core.values[tape->core.storages[storage].base].node != KL_ID_NONE;
    bool result = kl_view_is_shared(tape, value);
    for (uint32_t n = 0; is_own && !result && value != KL_ID_NONE; n = 1) {
        result = tape->core.values[value].n_pending > n; /* n: the call that took the view */
        value = tape->core.values[value].view_of;
    }
    return result;
}

/* -- calls that were inferred before ------------------------------------------------------------------ */

static CachedCall cached_calls[1 << 8]; /* by 8 bits of a hash */

/* Whether two arguments are equal constants, or both NULL: nothing that rules read of them differs, or can change. */
static bool
is_same(PyObject *left, PyObject *right)
{
    if (left == NULL || right == NULL || Py_TYPE(left) != Py_TYPE(right)) {
        return left == NULL && right == NULL;
    }
    PyTypeObject *type = Py_TYPE(left);
    if (type == &PyTuple_Type) {
        bool result = PyTuple_GET_SIZE(left) == PyTuple_GET_SIZE(right);
        for (Py_ssize_t i = 0; result && i < PyTuple_GET_SIZE(left); i++) {
            result = is_same(PyTuple_GET_ITEM(left, i), PyTuple_GET_ITEM(right, i));
        }
        return result;
    }
    if (type == &PySlice_Type) {
        const PySliceObject *one = (PySliceObject *)left, *other = (PySliceObject *)right;
        return is_same(one->start, other->start) && is_same(one->stop, other->stop) &&
               is_same(one->step, other->step);
    }
    if (left != right) {
        return type == &PyLong_Type && PyObject_RichCompareBool(left, right, Py_EQ) == 1;
    }
    return left == Py_None || type == &PyLong_Type || type == &PyBool_Type ||
           type == &PyFloat_Type || type == &PyUnicode_Type || type == kl_py.dtype_type ||
           type == kl_py.format_type;
}

/* Borrowed: the constant in a slot of the call; of the slot after the last, the names of its keywords; or NULL. */
static PyObject *
constant_of(const Recording *recording, uint32_t slot)
{
    const KlPyNode *call = &recording->call;
    return slot < call->n_slots ? recording->tape->slots[call->first_slot + slot].object
                                : call->kwnames;
}

/* Where a call is noted: found by its row, sizes and ints. Fills `seen` and finds the inputs. NULL: it is not noted. */
static CachedCall *
find_cached(Recording *recording)
{
    const KlTape *core = &recording->tape->core;
    const uint64_t factor = UINT64_C(0x9E3779B97F4A7C15);
    Seen *seen = &recording->seen;
    if (recording->call.n_slots > KL_KNOWN_SLOTS) {
        return NULL;
    }
    memset(seen, 0, offsetof(Seen, inputs)); /* with its padding, for memcmp */
    seen->row = recording->row;
    seen->context = recording->context;
    seen->n_slots = recording->call.n_slots;
    seen->default_dtype = kl_meta_default_dtype();
    uint64_t hash = (uint64_t)(uintptr_t)seen->row;
    for (uint32_t i = 0; i < seen->n_slots; i++) {
        const KlSlot *slot = &recording->tape->slots[recording->call.first_slot + i];
        int overflow = 0;
        hash *= factor;
        seen->slots[i].kind = slot->kind;
        if (slot->kind != KL_SLOT_VALUE) {
            bool is_int = slot->object != NULL && PyLong_CheckExact(slot->object);
            hash += is_int ? (uint64_t)PyLong_AsLongAndOverflow(slot->object, &overflow) : 0;
            seen->slots[i].n = slot->n;
            continue;
        }
        KlMeta *meta = &core->values[slot->n].meta;
        meta->place.axis = kl_tape_axis_find(core, meta->place.axis);
        if (seen->n_inputs == KL_KNOWN_INPUTS || meta->role != KL_ROLE_NONE ||
            is_order(recording, meta->place.axis)) {
            return NULL;
        }
        for (int32_t dim = 0; dim < meta->n_dims; dim++) {
            hash = (hash ^ (uint64_t)meta->shape[dim]) * factor;
        }
        recording->bound.inputs[seen->n_inputs] = meta;
        recording->inputs_fixed[seen->n_inputs] = slot->n;
        seen->inputs[seen->n_inputs].meta = *meta;
        seen->inputs[seen->n_inputs++].n_rows =
            kl_place_is_rows(&meta->place) ? core->axis_rows[meta->place.axis] : 0;
    }
    return &cached_calls[hash >> 56];
}

/* Whether what was inferred for `cached` holds for this call. */
static bool
is_like(const Recording *recording, const CachedCall *cached)
{
    const Seen *seen = &recording->seen;
    size_t n_bytes = offsetof(Seen, inputs) + seen->n_inputs * sizeof(seen->inputs[0]);
    bool result = memcmp(seen, &cached->seen, n_bytes) == 0;
    for (uint32_t i = 0; result && i <= seen->n_slots; i++) {
        result = is_same(cached->constants[i], constant_of(recording, i));
    }
    return result;
}

/* Whether input `n` of the row is in this slot, is no keyword, and was not given another place for the call. */
static bool
is_in_order(const Recording *recording, uint32_t slot, uint32_t n)
{
    const KlPyBound *bound = &recording->bound;
    const KlSlot *slots = &recording->tape->slots[recording->call.first_slot];
    return n < bound->n_inputs && recording->inputs[n] == slots[slot].n &&
           bound->origins[bound->input_origins[n].arg].position <
               PyTuple_GET_SIZE(recording->given->args) &&
           memcmp(bound->inputs[n], &recording->seen.inputs[n].meta, sizeof(KlMeta)) == 0;
}

/* Whether all that was inferred for a call follows from what is_like() compares. */
static bool
can_keep(const Recording *recording)
{
    const KlPyBound *bound = &recording->bound;
    const KlInferred *inferred = &recording->tape->inferred;
    const Seen *seen = &recording->seen;
    bool result = inferred->effects == 0 && inferred->alias != KL_ALIAS_SAME &&
                  inferred->split.again == 0 && inferred->n_outs <= KL_KNOWN_OUTS &&
                  seen->row->tie != KL_TIE_SORT && seen->row->tie != KL_TIE_ARGSORT &&
                  !seen->row->keeps.is_leaf;
    for (uint32_t i = 0; result && i < bound->n_args; i++) {
        result = bound->args[i].kind != KL_ARG_DEVICE; /* "cuda" is the current one */
    }
    uint32_t n = 0;
    for (uint32_t i = 0; result && i <= seen->n_slots; i++) {
        PyObject *constant = constant_of(recording, i);
        KlSlotKind kind = i < seen->n_slots ? seen->slots[i].kind : KL_SLOT_OBJECT;
        result = kind == KL_SLOT_VALUE ? is_in_order(recording, i, n++)
                                       : kind <= KL_SLOT_TUPLE && is_same(constant, constant);
    }
    return result && n == bound->n_inputs;
}

static void
keep(const Recording *recording)
{
    CachedCall *cached = recording->cached;
    const KlInferred *inferred = &recording->tape->inferred;
    if (cached == NULL || !can_keep(recording)) {
        return;
    }
    cached->seen = recording->seen;
    for (uint32_t i = 0; i <= cached->seen.n_slots; i++) {
        Py_XSETREF(cached->constants[i], Py_XNewRef(constant_of(recording, i)));
    }
    cached->inferred = *inferred;
    cached->inferred.outs = cached->outs;
    cached->inferred.split.places = cached->places;
    memcpy(cached->outs, inferred->outs, inferred->n_outs * sizeof(*cached->outs));
    memcpy(cached->places, inferred->split.places, cached->seen.n_inputs * sizeof(*cached->places));
    cached->saves = recording->saves;
}

static int
append_node(Recording *recording, const KlInferred *inferred, const KlSaves *saves, uint32_t writes,
            uint32_t leaf_writes, PyObject **results)
{
    Tape *tape = recording->tape;
    const Function *function = recording->given->function;
    KlNodeId id = KL_ID_NONE;
    settle_open(recording, &inferred->split);
    const KlRecord record = {
        .node = {.row = function->row,
                 .n_inputs = recording->bound.n_inputs,
                 .saves = *saves,
                 .context = recording->context,
                 .writes = writes,
                 .leaf_writes = leaf_writes,
                 .is_random = inferred->is_random,
                 .is_grad_enabled = recording->is_grad_enabled,
                 .refresh_of = KL_ID_NONE},
        .inputs = recording->inputs,
        .inferred = inferred,
        .is_detached = writes != 0 && kl_view_is_detached(tape, recording->inputs[0]),
    };
    if (kl_tape_append_call(tape, &record, recording->given->func, &recording->call, &id) < 0) {
        return -1;
    }
    if (writes != 0) {
        *results = settle_write(recording, id, record.is_detached);
        return 1;
    }
    bool is_many = tape->core.nodes[id].n_outs > 1 || function->returns_list;
    *results = kl_lazy_results(tape, id, is_many ? function->container : Py_None);
    return *results == NULL ? -1 : 1;
}

static int
append(Recording *recording, PyObject **results)
{
    Tape *tape = recording->tape;
    const KlInferred *inferred = &tape->inferred;
    uint32_t writes = 0, leaf_writes = 0;
    if (find_writes(recording, &writes, &leaf_writes) < 0 ||
        kl_tape_mixes_aside(&tape->core, recording->bound.n_inputs, recording->inputs,
                            leaf_writes) ||
        (writes == 0 && is_view_of_plain(recording, inferred))) {
        return 0;
    }
    if (recording->row->keeps.is_leaf && is_read_or_shared(tape, recording->inputs[0])) {
        return 0;
    }
    if (inferred->alias == KL_ALIAS_SAME && writes == 0) { /* the call returns its input: no node */
        *results = Py_NewRef(recording->bound.input_origins[inferred->alias_input].object);
        return 1;
    }
    if (begin_order(recording) < 0) {
        return -1;
    }
    refuse_unknown_reduction(recording);
    refuse_rows_into_whole(recording, writes);
    refuse_two_roles(recording);
    refuse_order(recording);
    if (find_rows_again(recording) < 0) {
        return -1;
    }
    place_rewrites(recording);
    keep(recording);
    return append_node(recording, inferred, &recording->saves, writes, leaf_writes, results);
}

static int
find_inputs(Recording *recording)
{
    uint32_t n = recording->bound.n_inputs;
    recording->inputs = recording->inputs_fixed;
    if (n > KL_ROW_INPUTS) {
        recording->inputs = kl_alloc_resize(NULL, n, sizeof(KlValueId));
        if (recording->inputs == NULL) {
            return kl_py_done(PyErr_NoMemory());
        }
    }
    for (uint32_t i = 0; i < n; i++) {
        const KlMeta *meta = recording->bound.inputs[i];
        recording->inputs[i] = meta == NULL ? KL_ID_NONE : value_with(recording->tape, meta);
    }
    return 0;
}

/* Append a call that was inferred before. Returns as kl_rows_record. */
static int
append_again(Recording *recording, PyObject **results)
{
    const KlInferred *inferred = &recording->cached->inferred;
    recording->inputs = recording->inputs_fixed;
    recording->bound.n_inputs = recording->seen.n_inputs;
    if (kl_tape_mixes_aside(&recording->tape->core, recording->bound.n_inputs, recording->inputs,
                            0) ||
        is_view_of_plain(recording, inferred)) {
        return 0;
    }
    return append_node(recording, inferred, &recording->cached->saves, 0, 0, results);
}

/* Bind, infer and append a call. Returns as kl_rows_record. */
static int
bind_and_append(Recording *recording, PyObject **results)
{
    MetaReader tensors = {.tape = recording->tape};
    const KlPyReader reader = {desk_meta_of, desk_is_row_range, &tensors};
    const KlPyCall *given = recording->given;
    int bound = kl_py_args_bind_dict(&recording->bound, &given->function->signature, &reader,
                                     given->args, given->kwargs);
    if (bound <= 0 || tensors.is_unknown) {
        return bound < 0 ? -1 : 0;
    }
    if (find_inputs(recording) < 0) {
        return -1;
    }
    recording->cached = tensors.is_asked ? NULL : recording->cached;
    int result = 0;
    KlStatus status = infer_merging_axes(recording);
    if (status == KL_OK) {
        result = append(recording, results);
    } else if (status == KL_ILLEGAL) {
        result = KL_ROWS_ILLEGAL;
    } else if (status == KL_ERROR_MEMORY) {
        result = kl_py_done(PyErr_NoMemory());
    } else if (status == KL_ERROR_INTERNAL) {
        PyErr_Format(PyExc_SystemError, "%s: the place of an input does not fit its shape",
                     recording->row->name);
        result = -1;
    }
    if (recording->inputs != recording->inputs_fixed) {
        kl_alloc_free(recording->inputs);
    }
    return result;
}

int
kl_rows_record(Tape *tape, const KlPyCall *call, PyObject **results)
{
    Recording recording; /* not zeroed: its buffers are two kilobytes */
    recording.tape = tape;
    recording.given = call;
    recording.row = call->function->row;
    recording.call = (KlPyNode){0};
    recording.saves = (KlSaves){0};
    int64_t context = kl_context_now(&recording.is_grad_enabled);
    if (context < 0) {
        return -1;
    }
    recording.context = (uint32_t)context;
    if (kl_call_encode(tape, call->args, call->kwargs, &recording.call) < 0) {
        return -1;
    }
    kl_py_bound_init(&recording.bound);
    size_t n_nodes = tape->core.n_nodes;
    recording.cached = find_cached(&recording);
    int result = recording.cached != NULL && is_like(&recording, recording.cached)
                     ? append_again(&recording, results)
                     : bind_and_append(&recording, results);
    kl_py_bound_fini(&recording.bound);
    if (tape->core.n_nodes == n_nodes) {
        Py_CLEAR(recording.call.kwnames);
        kl_call_truncate(tape, recording.call.first_slot);
    }
    return result;
}
