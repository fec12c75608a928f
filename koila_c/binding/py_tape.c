/* SPDX-License-Identifier: Apache-2.0 */
/* py_tape.c - Tape: a KlTape, with the Python call of each node and the real tensor of each value
 *
 * Each thread has one tape. It owns its leaves and what its nodes need. It knows the user's LazyTensors only by
 * borrowed pointers to their Values, which a Value clears when it dies: then nobody needs that number. */
#include "py_tape.h"

#include <string.h>

#include "alloc.h"

#define LOOK_BYTES (1 << 20) /* leaves that take less are not worth a look */

/* -- leaves, found by the identity of their tensor ---------------------------------------------------- */

static KlExternal *
find_external(const Tape *tape, PyObject *tensor)
{
    size_t mask = tape->n_externals_max - 1;
    size_t i = (size_t)(((uintptr_t)tensor >> 4) * UINT64_C(0x9E3779B97F4A7C15) >> 20) & mask;
    while (tape->externals[i].tensor != NULL && tape->externals[i].tensor != tensor) {
        i = (i + 1) & mask;
    }
    return &tape->externals[i];
}

/* Give the table `n_max` entries; drop those of values from `n_values` on. 0 or -1. */
static int
rebuild_externals(Tape *tape, size_t n_max, size_t n_values)
{
    size_t n_before = tape->n_externals_max;
    KlExternal *before = tape->externals;
    KlExternal *made = kl_alloc_zeroed(n_max, sizeof(*made));
    if (made == NULL) {
        (void)PyErr_NoMemory();
        return -1;
    }
    tape->externals = made;
    tape->n_externals_max = n_max;
    tape->n_externals = 0;
    for (size_t i = 0; i < n_before; i++) {
        if (before[i].tensor != NULL && before[i].value < n_values) {
            *find_external(tape, before[i].tensor) = before[i];
            tape->n_externals++;
        }
    }
    kl_alloc_free(before);
    return 0;
}

/* Make room for the binding's data of nodes and values that the core will append. The entries are zero. */
static int
reserve(Tape *tape, size_t n_nodes, size_t n_values)
{
    bool is_done = KL_RESERVE(tape, nodes, tape->core.n_nodes + n_nodes) == KL_OK &&
                   KL_RESERVE(tape, values, tape->core.n_values + n_values) == KL_OK;
    return is_done ? 0 : kl_py_done(PyErr_NoMemory());
}

/* Whether a tensor can have its rows at `place`: t_(), squeeze_() and the like change its dims. */
static bool
is_place_of(const Tape *tape, const KlPlace *place, const KlMeta *meta)
{
    return kl_place_is_rows(place) && place->dim < meta->n_dims &&
           meta->shape[place->dim] ==
               place->outer * tape->core.axis_rows[place->axis] * place->inner;
}

/* Add a leaf for `tensor`. It has rows at `place` if its sizes allow that; else it is whole. 0 or -1. */
static int
new_leaf(Tape *tape, PyObject *tensor, const KlPlace *place, KlValueId *value)
{
    KlMeta meta;
    int result = kl_meta_read(tensor, &meta);
    if (result < 0 || reserve(tape, 0, 1) < 0) {
        return -1;
    }
    if (result > 0) {
        meta.dtype = KL_DTYPE_OTHER; /* every row declines it */
    }
    if (place != NULL && is_place_of(tape, place, &meta)) {
        meta.place = *place;
    }
    if (kl_tape_leaf(&tape->core, &meta, value) != KL_OK) {
        return kl_py_done(PyErr_NoMemory());
    }
    KlPyValue *entry = &tape->values[*value];
    entry->real = Py_NewRef(tensor);
    entry->pointer = kl_stale_pointer(tensor);
    entry->version = kl_stale_version(tensor);
    entry->looked_at = kl_py.n_looks;
    tape->leaf_bytes += meta.requires_grad ? 0 : kl_meta_n_bytes(&meta);
    bool is_alone = !kl_storage_may_be_shared(tensor);
    return is_alone ? 0 : kl_py_done(PyObject_CallFunction(kl_py.note_leaf, "IO", *value, tensor));
}

int
kl_tape_enter(Tape *tape, PyObject *tensor, KlValueId *value)
{
    size_t n_max = tape->n_externals_max;
    if (tape->n_externals * 2 >= n_max && /* at most half full */
        rebuild_externals(tape, n_max == 0 ? 64 : n_max * 2, SIZE_MAX) < 0) {
        return -1;
    }
    KlExternal *external = find_external(tape, tensor);
    if (external->tensor != NULL && tape->core.values[external->value].n_pending > 0) {
        int is_same = kl_stale_is_flagged(tensor, &tape->core.values[external->value].meta);
        *value = external->value;
        bool is_seen = tape->values[*value].looked_at == kl_py.n_looks && !tape->is_kept;
        if (is_same > 0 && !is_seen) {
            tape->values[*value].looked_at = kl_py.n_looks;
            int changed = kl_stale_is_changed(tape, *value);
            is_same = changed < 0 ? -1 : !changed;
        }
        if (is_same != 0) {
            return is_same < 0 ? -1 : 0;
        }
    }
    /* A new leaf is needed if the tensor has not entered; if all readers of its leaf are done, since it may have
     * changed; if its requires_grad was switched between two calls, each of which must see its own; or if an
     * optimizer changed it, and the readers of the old numbers have run. */
    bool is_new = external->tensor == NULL;
    if (new_leaf(tape, tensor, NULL, value) < 0) {
        return -1;
    }
    *external = (KlExternal){.tensor = tensor, .value = *value};
    tape->n_externals += is_new;
    return 0;
}

KlValueId
kl_tape_find(const Tape *tape, PyObject *tensor)
{
    if (tape->n_externals_max == 0) {
        return KL_ID_NONE;
    }
    const KlExternal *external = find_external(tape, tensor);
    bool is_found = external->tensor != NULL && tape->values[external->value].real == tensor;
    return is_found ? external->value : KL_ID_NONE; /* else that tensor died: this is a new one */
}

/* Add an axis for batch `key`, which `tape` does not have yet. 0 or -1. */
static int
add_axis(Tape *tape, uint64_t key, int64_t rows, KlAxisId *axis)
{
    if (KL_RESERVE(tape, axis_keys, tape->core.n_axes + 1) != KL_OK ||
        kl_tape_axis(&tape->core, rows, axis) != KL_OK) {
        return kl_py_done(PyErr_NoMemory());
    }
    tape->axis_keys[*axis] = key;
    return 0;
}

int
kl_tape_new_axis(Tape *tape, int64_t rows, KlAxisId *axis)
{
    return add_axis(tape, ++kl_py.n_axis_keys, rows, axis);
}

/* Find, or add, the axis of batch `key`. 0 or -1. */
static int
find_axis(Tape *tape, uint64_t key, int64_t rows, KlAxisId *axis)
{
    for (size_t i = 0; i < tape->core.n_axes; i++) {
        if (tape->axis_keys[i] == key) {
            *axis = (KlAxisId)i;
            return 0;
        }
    }
    return add_axis(tape, key, rows, axis);
}

int
kl_tape_attach(Tape *tape, Value *lazy, KlValueId *value)
{
    if (lazy->tape == tape) {
        if (kl_view_current(tape, lazy->id, value) < 0) {
            return -1;
        }
        if (*value != lazy->id) {
            kl_lazy_move(lazy, *value);
        }
        return 0;
    }
    if (lazy->tape != NULL && lazy->tape->core.values[lazy->id].node != KL_ID_NONE) {
        PyErr_SetString(PyExc_SystemError, "koila: a value of another tape was not run first");
        return -1;
    }
    if (lazy->tape != NULL) { /* a leaf of another thread's tape, which keeps the tensor */
        kl_lazy_leave(lazy->tape, lazy->id, lazy->tape->values[lazy->id].real);
    }
    KlPlace place = lazy->place;
    if (kl_place_is_rows(&place) && find_axis(tape, lazy->axis_key, lazy->rows, &place.axis) < 0) {
        return -1;
    }
    PyObject *real = Py_NewRef(lazy->real);
    int result = new_leaf(tape, real, &place, value);
    Py_DECREF(real);
    if (result < 0 || lazy->tape != NULL) { /* another thread attached it while Python code ran */
        return result < 0 ? -1 : kl_tape_attach(tape, lazy, value);
    }
    KlStorage *storage = &tape->core.storages[tape->core.values[*value].storage];
    storage->is_uncertain = storage->is_lost = lazy->is_lost;
    if (lazy->is_freed && kl_py_truth(PyObject_GetAttrString(lazy->real, "is_leaf")) == 0) {
        tape->core.values[*value].state = KL_STATE_FREED;
    }
    PyErr_Clear(); /* torch raises for a view of several whose base was written */
    kl_tape_hold(tape, *value, lazy);
    lazy->tape = (Tape *)Py_NewRef((PyObject *)tape);
    lazy->id = *value;
    Py_CLEAR(lazy->real);
    return 0;
}

/* Dropping a tensor can run user code that moves the entry, so the entry is emptied first. */
static void
clear_value(KlPyValue *entry)
{
    PyObject *dropped[] = {entry->real, entry->result, entry->recorded};
    entry->real = entry->result = entry->recorded = NULL;
    for (size_t i = 0; i < sizeof(dropped) / sizeof(*dropped); i++) {
        Py_XDECREF(dropped[i]);
    }
}

void
kl_tape_forget(Tape *tape, KlValueId id)
{
    if (id >= tape->core.n_values) {
        return; /* the garbage collector cleared the tape before the Value */
    }
    kl_tape_hold(tape, id, NULL);
    if (kl_tape_is_dead(&tape->core, id)) {
        clear_value(&tape->values[id]);
    }
}

/* -- the end of a program ------------------------------------------------------------------------ */

static void
clear_node(KlPyNode *node)
{
    Py_CLEAR(node->func);
    Py_CLEAR(node->kwnames);
    Py_CLEAR(node->code);
    Py_CLEAR(node->error);
}

/* Detach the Values of the values from `first` on. */
static void
detach_handles(Tape *tape, size_t first)
{
    for (size_t i = first; i < tape->core.n_values; i++) {
        Value *handle = tape->values[i].handle;
        if (handle != NULL) {
            kl_tape_hold(tape, (KlValueId)i, NULL);
            kl_lazy_detach(handle, tape->values[i].real);
        }
    }
}

/* Reuse the arrays of the emptied tape `before`, zeroed (slots are written before they are read): fresh pages would cost
 * more. Free them if most was unused, or if code that ran meanwhile has recorded into new ones. */
static void
reuse_arrays(Tape *tape, const Tape *before)
{
    bool is_filled = tape->nodes != NULL || tape->values != NULL || tape->slots != NULL;
    if (is_filled || !KL_IS_REUSED ||
        kl_tape_is_roomy(before->core.n_values, before->n_values_max)) {
        kl_alloc_free(before->nodes);
        kl_alloc_free(before->values);
        kl_alloc_free(before->slots);
        return;
    }
    if (before->core.n_nodes > 0) {
        memset(before->nodes, 0, before->core.n_nodes * sizeof(*before->nodes));
    }
    if (before->core.n_values > 0) {
        memset(before->values, 0, before->core.n_values * sizeof(*before->values));
    }
    tape->nodes = before->nodes;
    tape->values = before->values;
    tape->slots = before->slots;
    tape->n_nodes_max = before->n_nodes_max;
    tape->n_values_max = before->n_values_max;
    tape->n_slots_max = before->n_slots_max;
}

/* Dropping an object can run user code that records calls, so the tape is emptied first. */
static void
clear_tape(Tape *tape)
{
    const Tape before = *tape;
    tape->nodes = NULL;
    tape->values = NULL;
    tape->slots = NULL;
    tape->n_nodes_max = tape->n_values_max = tape->n_slots = tape->n_slots_max = 0;
    tape->notes = NULL; /* it may hold hooks, and they the last LazyTensors */
    tape->is_kept = false;
    kl_py.n_aside -= tape->is_aside ? 1 : 0;
    tape->is_aside = false;
    tape->n_externals = 0;
    tape->leaf_bytes = 0;
    tape->next_look = LOOK_BYTES;
    if (tape->externals != NULL) {
        memset(tape->externals, 0, tape->n_externals_max * sizeof(*tape->externals));
    }
    kl_tape_clear(&tape->core);
    Py_XDECREF(before.notes);
    for (size_t i = 0; i < before.core.n_nodes; i++) {
        clear_node(&before.nodes[i]);
    }
    for (size_t i = 0; i < before.core.n_values; i++) {
        clear_value(&before.values[i]);
    }
    for (size_t i = 0; i < before.n_slots; i++) {
        Py_CLEAR(before.slots[i].object);
    }
    reuse_arrays(tape, &before);
}

void
kl_tape_close(Tape *tape)
{
    Py_INCREF(tape); /* the last Value may hold the last reference */
    detach_handles(tape, 0);
    clear_tape(tape);
    Py_DECREF(tape);
}

/* Drop the calls that ran after the last pending one, with their values. Else a prediction that a script keeps and never
 * reads would keep the calls of all later steps. */
KL_DEFINE_ON(trim, tape, ignored)
{
    KlTape *core = &tape->core, part;
    bool can_drop = !tape->is_running && !tape->is_cut_off && kl_tape_find_part(core, &part);
    for (size_t i = can_drop ? part.n_values : core->n_values; i < core->n_values; i++) {
        can_drop &= tape->values[i].handle == NULL || tape->values[i].real != NULL;
    }
    if (!can_drop || rebuild_externals(tape, tape->n_externals_max, part.n_values) < 0) {
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    size_t first_slot = tape->nodes[part.n_nodes].first_slot;
    detach_handles(tape, part.n_values);
    tape->is_running = true; /* what finalizers of dropped objects call is not recorded */
    for (size_t i = part.n_nodes; i < core->n_nodes; i++) {
        clear_node(&tape->nodes[i]);
    }
    for (size_t i = part.n_values; i < core->n_values; i++) {
        clear_value(&tape->values[i]);
        tape->values[i] = (KlPyValue){0};
    }
    kl_call_truncate(tape, first_slot);
    part.n_wanted = core->n_wanted;
    *core = part;
    tape->raised = KL_ID_NONE;
    tape->is_running = false;
    return Py_BuildValue("nn", (Py_ssize_t)part.n_nodes, (Py_ssize_t)part.n_values);
}

/* Leaves that only the tape holds are those that eager would have freed. */
int
kl_tape_make_room(Tape *tape)
{
    int64_t held = 0, wanted = 0;
    tape->next_look = tape->leaf_bytes + tape->leaf_bytes / 8 + LOOK_BYTES;
    for (size_t i = 0; i < tape->core.n_values; i++) {
        const KlPyValue *value = &tape->values[i];
        bool is_dead = value->handle == NULL && value->real != NULL && Py_REFCNT(value->real) == 1;
        bool is_pending = value->handle != NULL && value->real == NULL && value->result == NULL;
        int64_t bytes = is_dead || is_pending ? kl_meta_n_bytes(&tape->core.values[i].meta) : 0;
        *(is_dead ? &held : &wanted) += bytes;
    }
    return 2 * held < wanted
               ? 0
               : kl_py_done(PyObject_CallFunction(kl_py.make_room, "L", (long long)held));
}

int
kl_tape_is_committed(const Tape *tape, KlNodeId id)
{
    const KlNode *node = &tape->core.nodes[id];
    PyObject *effects = node->leaf_writes != 0 && tape->notes != NULL
                            ? PyDict_GetItemString(tape->notes, "effects")
                            : NULL;
    PyObject *key = effects != NULL ? PyLong_FromUnsignedLong(id) : NULL;
    int result = key != NULL ? PySet_Contains(effects, key) : node->is_drawn;
    Py_XDECREF(key);
    return result;
}

bool
kl_tape_has_effect(const Tape *tape)
{
    bool has_effect = false;
    for (size_t i = tape->core.n_done; i < tape->core.n_nodes && !has_effect; i++) {
        const KlNode *node = &tape->core.nodes[i];
        bool is_writing = !node->is_done && !node->is_abandoned && node->leaf_writes != 0;
        has_effect = is_writing && kl_tape_is_committed(tape, (KlNodeId)i) == 0;
    }
    return has_effect;
}

bool
kl_tape_end(Tape *tape, bool is_abandoned_only)
{
    PyObject *type = NULL, *value = NULL, *traceback = NULL;
    PyErr_Fetch(&type, &value, &traceback);
    if (is_abandoned_only || !kl_tape_has_effect(tape)) {
        kl_tape_retire(&tape->core, is_abandoned_only);
    }
    bool is_over = tape->core.n_done == tape->core.n_nodes;
    if (is_over) {
        kl_tape_close(tape);
    }
    /* Free the leaves that only calls that have run read. */
    for (size_t i = 0; i < tape->core.n_values; i++) {
        if (kl_tape_is_dead(&tape->core, (KlValueId)i)) {
            clear_value(&tape->values[i]);
        }
    }
    PyErr_Restore(type, value, traceback);
    return is_over;
}

/* The tape of a second axis (second_axis.py) belongs to no thread, and its values need no LazyTensors. */
void
kl_tape_let_go(Tape *tape)
{
    bool is_used = kl_tape_is_busy(tape) || tape->lock.depth > 0 || kl_py_region != 0;
    bool is_reached = tape->core.n_wanted > 0 || kl_tape_has_draw(&tape->core);
    bool is_open = !is_used && tape == kl_tape_open_or_null();
    if (!is_used && !is_reached && (tape->is_cut_off || tape->is_aside || is_open)) {
        (void)kl_tape_end(tape, false);
    } else if (is_open && kl_tape_is_abandoned(&tape->core)) {
        tape->is_aside = true;
        kl_py.n_aside++;
        (void)kl_tape_use(NULL); /* cannot fail: the thread has one */
    }
}

int
kl_tape_take_up(Tape *tape)
{
    const Tape *own = kl_tape_open_or_null();
    if (!tape->is_aside || (own != NULL && (own->core.n_nodes > 0 || own->lock.depth > 0))) {
        return 0;
    }
    kl_py.n_aside--;
    tape->is_aside = false;
    return kl_tape_use(tape);
}

/* -- the type ------------------------------------------------------------------------------------ */

static int
Tape_traverse(Tape *tape, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(tape));
    Py_VISIT(tape->notes);
    for (size_t i = 0; i < tape->n_nodes_max && i < tape->core.n_nodes; i++) {
        Py_VISIT(tape->nodes[i].func);
        Py_VISIT(tape->nodes[i].error);
    }
    for (size_t i = 0; i < tape->n_values_max && i < tape->core.n_values; i++) {
        Py_VISIT(tape->values[i].real);
        Py_VISIT(tape->values[i].result);
        Py_VISIT(tape->values[i].recorded);
    }
    for (size_t i = 0; i < tape->n_slots; i++) {
        Py_VISIT(tape->slots[i].object);
    }
    return 0;
}

static int
Tape_clear(Tape *tape)
{
    clear_tape(tape);
    return 0;
}

static void
Tape_dealloc(Tape *tape)
{
    PyTypeObject *type = Py_TYPE(tape);
    PyObject_GC_UnTrack(tape);
    kl_py.n_cut_off -= tape->is_cut_off ? 1 : 0;
    clear_tape(tape);
    kl_tape_fini(&tape->core);
    kl_alloc_free(tape->nodes);
    kl_alloc_free(tape->values);
    kl_alloc_free(tape->slots);
    kl_alloc_free(tape->externals);
    kl_alloc_free(tape->axis_keys);
    kl_infer_fini(&tape->inferred);
    type->tp_free(tape);
    Py_DECREF(type);
}

int
kl_tape_type_init(PyObject *module)
{
    kl_py.tape_type = kl_py_new_type(module, "koila._core.Tape", sizeof(Tape), Tape_traverse,
                                     Tape_clear, Tape_dealloc);
    return kl_py.tape_type == NULL ? -1 : 0;
}

/* Cache of the last look-up by kl_tape_open_or_null(). It stays valid: the dict of a thread state keeps the tape
 * alive as long as it exists, and ids of thread states are not reused. */
static struct {
    uint64_t thread; /* 0: none */
    PyObject *dict;
    Tape *tape; /* borrowed from the dict */
} last;

Tape *
kl_tape_open_or_null(void)
{
    PyThreadState *state = PyThreadState_Get();
    if (last.thread == state->id && last.dict == state->dict) {
        return last.tape;
    }
    PyObject *thread = PyThreadState_GetDict();
    PyObject *tape = thread == NULL ? NULL : PyDict_GetItem(thread, (PyObject *)kl_py.tape_type);
    if (tape != NULL) {
        last.thread = state->id;
        last.dict = thread;
        last.tape = (Tape *)tape;
    }
    return (Tape *)tape;
}

Tape *
kl_tape_new(void)
{
    Tape *tape = (Tape *)kl_py.tape_type->tp_alloc(kl_py.tape_type, 0); /* zeroed */
    if (tape != NULL) {
        kl_tape_init(&tape->core);
        tape->raised = KL_ID_NONE;
    }
    return tape;
}

/* Copy what a program was staged from out of the arrays of its print. 0 or -1. */
static int
fill(Tape *tape, PyObject *arrays)
{
    KlTape *core = &tape->core;
#define PART(name, n) (void **)&core->name, &core->n, &core->n_##name##_max, sizeof(*core->name)
    const struct {
        void **array;
        size_t *n, *n_max, size;
    } parts[] = {
        {PART(nodes, n_nodes)},       {PART(values, n_values)},  {PART(inputs, n_inputs)},
        {PART(storages, n_storages)}, {PART(axis_rows, n_axes)}, {PART(axis_of, n_axes)},
        {PART(orders, n_axes)},
    };
#undef PART
    for (size_t i = 0; i < sizeof(parts) / sizeof(*parts); i++) {
        PyObject *bytes = PyList_GetItem(arrays, (Py_ssize_t)i);
        char *from = NULL;
        Py_ssize_t n_bytes = 0;
        if (bytes == NULL || PyBytes_AsStringAndSize(bytes, &from, &n_bytes) < 0) {
            return -1;
        }
        size_t n = (size_t)n_bytes / parts[i].size;
        if (kl_alloc_reserve(parts[i].array, parts[i].n_max, n, parts[i].size) != KL_OK) {
            return kl_py_done(PyErr_NoMemory());
        }
        memcpy(*parts[i].array, from, (size_t)n_bytes);
        *parts[i].n = n;
    }
    for (size_t i = 0; i < core->n_nodes; i++) {
        core->nodes[i].is_abandoned = true; /* it never runs or draws */
        core->has_regions |= core->nodes[i].region != 0;
    }
    return reserve(tape, 0, 0);
}

KL_DEFINE(new_tape, args)
{
    PyObject *arrays = NULL;
    Tape *tape =
        PyArg_ParseTuple(args, "|O!:new_tape", &PyList_Type, &arrays) ? kl_tape_new() : NULL;
    if (tape != NULL && arrays != NULL && fill(tape, arrays) < 0) {
        kl_tape_clear(&tape->core);
        Py_CLEAR(tape);
    }
    return (PyObject *)tape;
}

Tape *
kl_tape_open(void)
{
    Tape *tape = kl_tape_open_or_null();
    PyObject *thread = tape != NULL ? NULL : PyThreadState_GetDict();
    if (thread == NULL) {
        return tape;
    }
    tape = kl_tape_new();
    if (tape == NULL) {
        return NULL;
    }
    /* a finalizer that ran meanwhile may have created one */
    PyObject *kept = PyDict_SetDefault(thread, (PyObject *)kl_py.tape_type, (PyObject *)tape);
    Py_DECREF(tape);
    return (Tape *)kept;
}

static int
read_id(PyObject *object, uint32_t *id, bool is_node)
{
    const Tape *tape = kl_tape_open();
    int is_there = tape != NULL && kl_py_id(object, id);
    if (is_there && *id >= (is_node ? tape->core.n_nodes : tape->core.n_values)) {
        PyErr_Format(PyExc_IndexError, "there is no %s %u", is_node ? "node" : "value", *id);
        is_there = 0;
    }
    return is_there;
}

int
kl_tape_value_id(PyObject *object, void *id)
{
    return read_id(object, id, false);
}

int
kl_tape_node_id(PyObject *object, void *id)
{
    return read_id(object, id, true);
}

int
kl_tape_use(Tape *tape)
{
    PyObject *thread = PyThreadState_GetDict(), *key = (PyObject *)kl_py.tape_type;
    PyObject *type = NULL, *value = NULL, *traceback = NULL;
    last.thread = 0;
    if (thread == NULL) {
        PyErr_SetString(PyExc_SystemError, "koila: there is no thread to use a tape");
        return -1;
    }
    PyErr_Fetch(&type, &value, &traceback);
    int result =
        tape != NULL ? PyDict_SetItem(thread, key, (PyObject *)tape) : PyDict_DelItem(thread, key);
    if (type != NULL) {
        PyErr_Restore(type, value, traceback);
    }
    return result;
}

void
kl_tape_draw_waiting(void)
{
    PyObject *type = NULL, *value = NULL, *traceback = NULL;
    PyErr_Fetch(&type, &value, &traceback);
    (void)kl_py_done(PyObject_CallNoArgs(kl_py.move_on));
    PyErr_Restore(type, value, traceback); /* replaces an exception of move_on */
}

void
kl_tape_abandon_pending(Tape *tape)
{
    kl_tape_draw_waiting();
    kl_tape_abandon(&tape->core, 0);
}

/* Tell unwritten.py which leaves node n_nodes, about to be recorded, will write on the side (batch_norm's
 * statistics): plain code that looks at them must run the node first. */
static int
note_write(Tape *tape, const KlRecord *record)
{
    PyObject *leaves = PyList_New(0);
    for (uint32_t i = 0; leaves != NULL && record->node.leaf_writes >> i != 0; i++) {
        if ((record->node.leaf_writes >> i & 1) != 0) {
            kl_py_add(&leaves, Py_NewRef(tape->values[record->inputs[i]].real));
        }
    }
    return kl_py_done(PyObject_CallFunction(kl_py.note_write, "OnN", tape,
                                            (Py_ssize_t)tape->core.n_nodes, leaves));
}

int
kl_tape_append_call(Tape *tape, const KlRecord *record, PyObject *func, KlPyNode *call,
                    KlNodeId *id)
{
    for (uint32_t i = 0; i < record->node.n_inputs; i++) {
        if (kl_failure_check(tape, record->inputs[i]) < 0) {
            return -1;
        }
    }
    if (record->node.is_random && !kl_tape_has_draw(&tape->core) &&
        kl_py_done(PyObject_CallNoArgs(kl_py.note_draw)) < 0) {
        return -1;
    }
    if (reserve(tape, 1, record->inferred->n_outs + 1) < 0 ||
        (record->node.leaf_writes != 0 && note_write(tape, record) < 0)) {
        return -1;
    }
    if (kl_tape_append(&tape->core, record, id) != KL_OK) {
        return kl_py_done(PyErr_NoMemory());
    }
    tape->core.nodes[*id].region = kl_py_region;
    tape->core.has_regions |= kl_py_region != 0;
    call->func = Py_NewRef(func);
    call->clock = kl_context_clock(0);
    kl_source_note(call);
    tape->nodes[*id] = *call;
    return 0;
}
