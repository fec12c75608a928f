/* SPDX-License-Identifier: Apache-2.0 */
/* py_core.c - the small functions of koila._core: each checks its arguments and asks one question of a LazyTensor,
 * of this thread's tape, or of kl_py. methods.def has their docstrings. */
#include "py_run.h"

static Value *
value_argument(PyObject *object)
{
    if (!kl_lazy_check(object)) {
        (void)PyErr_Format(PyExc_TypeError, "expected a LazyTensor, got %.100s",
                           Py_TYPE(object)->tp_name);
        return NULL;
    }
    return kl_lazy_checked(object);
}

/* The head of the definition of _core.<name>(lazy): `value` is the Value of the LazyTensor. */
#define KL_DEFINE_OF(name, value)                                                                  \
    static PyObject *name##_of(Value *value);                                                      \
    KL_DEFINE(name, object)                                                                        \
    {                                                                                              \
        Value *found = value_argument(object);                                                     \
        return found != NULL ? name##_of(found) : NULL;                                            \
    }                                                                                              \
    static PyObject *name##_of(Value *value)

KL_DEFINE(new_axis, ignored)
{
    return PyLong_FromUnsignedLongLong(++kl_py.n_axis_keys);
}

KL_DEFINE(input, args)
{
    PyObject *tensor = NULL;
    int dim = 0;
    unsigned long long key = 0;
    long long rows = 0;
    if (!PyArg_ParseTuple(args, "O!iKL:input", kl_py.tensor_base, &tensor, &dim, &key, &rows)) {
        return NULL;
    }
    KlPlace place = {
        .axis = dim < 0 ? KL_ID_NONE : 0, .dim = dim < 0 ? 0 : dim, .outer = 1, .inner = 1};
    return kl_lazy_new_detached(tensor, &place, key, rows, true);
}

KL_DEFINE(like, args)
{
    PyObject *tensor = NULL, *lazy = NULL;
    if (!PyArg_ParseTuple(args, "O!O:like", kl_py.tensor_base, &tensor, &lazy)) {
        return NULL;
    }
    const Value *value = value_argument(lazy);
    if (value == NULL) {
        return NULL;
    }
    KlPlace place = value->place;
    uint64_t key = value->axis_key;
    int64_t rows = value->rows;
    if (value->tape != NULL) {
        const KlTape *core = &value->tape->core;
        place = core->values[value->id].meta.place;
        bool is_sorted = kl_place_is_rows(&place) && core->orders[place.axis].of != KL_ID_NONE;
        place.axis = is_sorted ? KL_ID_NONE : kl_tape_axis_find(core, place.axis);
        key = kl_place_is_rows(&place) ? value->tape->axis_keys[place.axis] : 0;
        rows = kl_place_is_rows(&place) ? core->axis_rows[place.axis] : 0;
    }
    place.axis = kl_place_is_rows(&place) ? 0 : KL_ID_NONE;
    return kl_lazy_new_detached(tensor, &place, key, rows, true);
}

KL_DEFINE_OF(force, value)
{
    return kl_live_force(value);
}

KL_DEFINE_OF(real, value)
{
    PyObject *real = kl_lazy_real(value);
    return Py_NewRef(real != NULL ? real : Py_None);
}

KL_DEFINE_OF(is_input, value)
{
    return PyBool_FromLong(value->is_input);
}

KL_DEFINE_ON(is_held_by, tape, args)
{
    PyObject *object = NULL;
    Py_ssize_t n = 0;
    if (!PyArg_ParseTuple(args, "O!n", kl_py.tensor_base, &object, &n)) {
        return NULL;
    }
    const Value *value = kl_lazy_check(object) ? kl_lazy_checked(object) : NULL;
    if ((value == NULL && kl_lazy_check(object))) {
        return NULL;
    }
    PyObject *real = value != NULL ? kl_lazy_real(value) : object;
    n += value != NULL && value->tape == NULL;
    for (size_t i = 0; i < tape->core.n_values; i++) {
        const KlPyValue *entry = &tape->values[i];
        int n_here = (entry->real == real) + (entry->result == real) + (entry->recorded == real);
        n = n_here > 0 && tape->core.values[i].n_pending > 0 ? PY_SSIZE_T_MIN : n + n_here;
    }
    return PyBool_FromLong(real != NULL && Py_REFCNT(real) == n);
}

KL_DEFINE_OF(rows_dim, value)
{
    bool is_attached = value->tape != NULL;
    KlPlace place = is_attached ? value->tape->core.values[value->id].meta.place : value->place;
    bool is_alone = place.outer == 1 && place.inner == 1;
    return PyLong_FromLong(!kl_place_is_rows(&place) ? -1 : is_alone ? place.dim : -2);
}

/* Borrowed: this thread's tape, if the value is on it, or else NULL. */
static Tape *
tape_here(const Value *value)
{
    return value->tape == kl_tape_open_or_null() ? value->tape : NULL;
}

KL_DEFINE_OF(is_pending_here, value)
{
    return PyBool_FromLong(tape_here(value) != NULL && kl_lazy_real(value) == NULL);
}

/* (dtype, shape, strides or None, requires_grad, device number) */
static PyObject *
describe(const KlMeta *meta)
{
    if (meta->dtype == KL_DTYPE_OTHER) {
        return Py_NewRef(Py_None);
    }
    PyObject *strides = meta->is_strided ? kl_meta_strides(meta) : Py_NewRef(Py_None);
    return Py_BuildValue("(ONNOi)", kl_py.dtypes[meta->dtype], kl_meta_size(meta), strides,
                         kl_py_bool(meta->requires_grad), (int)meta->device);
}

KL_DEFINE(describe, object)
{
    KlMeta meta;
    PyObject *real = object;
    if (kl_lazy_check(object)) {
        Value *value = value_argument(object);
        if (value == NULL) {
            return NULL;
        }
        real = kl_lazy_real(value);
        if (real == NULL) {
            return describe(&value->tape->core.values[value->id].meta);
        }
    }
    int result = kl_meta_read(real, &meta);
    return result == 0 ? describe(&meta) : result < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *
live_by(PyObject *(*run)(const KlPyCall *, KlLiveKind), PyObject *args)
{
    PyObject *func = NULL, *words = NULL, *kwargs = NULL;
    int is_plain = 0;
    if (!PyArg_ParseTuple(args, "OO!Op:live", &func, &PyTuple_Type, &words, &kwargs, &is_plain)) {
        return NULL;
    }
    if (kwargs != Py_None && !PyDict_Check(kwargs)) {
        return PyErr_Format(PyExc_TypeError, "live: kwargs must be a dict or None, not %R", kwargs);
    }
    const KlPyCall call = kl_function_call(kl_function_find(func), func, words, kwargs);
    return run(&call, is_plain ? KL_LIVE_PLAIN : KL_LIVE_LAZY);
}

KL_DEFINE(live, args)
{
    return live_by(kl_live_call, args);
}

KL_DEFINE(live_with_all, args)
{
    return live_by(kl_record_live, args);
}

KL_DEFINE_ON(flush, tape, ignored)
{
    return kl_live_run(tape) < 0 ? NULL : Py_NewRef(Py_None);
}

KL_DEFINE_ON(has_no_grad, tape, ignored)
{
    kl_py.n_looks++;
    return PyBool_FromLong(kl_tape_find_no_grad(&tape->core));
}

KL_DEFINE_ON(has_stranded, tape, ignored)
{
    return PyBool_FromLong(kl_tape_has_stranded(&tape->core));
}

KL_DEFINE_ON(has_numbers, tape, ignored)
{
    for (size_t i = 0; i < tape->core.n_values; i++) {
        const KlValue *value = &tape->core.values[i];
        if (value->state == KL_STATE_COMPUTED && value->meta.requires_grad &&
            !tape->core.nodes[value->node].is_done) {
            return Py_NewRef(Py_True);
        }
    }
    return Py_NewRef(Py_False);
}

KL_DEFINE_OF(read, value)
{
    return kl_live_read(value) < 0 ? NULL : Py_XNewRef(kl_lazy_number(value));
}

/* A write to the tensor would show in other LazyTensors of its memory, while those still show a value on the tape.
 * So then the tensor is not handed out. A computed value is detached from the tape, whose own calls keep their tensor. */
KL_DEFINE_OF(leave, value)
{
    Tape *tape = value->tape;
    if (tape == NULL) {
        return Py_NewRef(value->real);
    }
    PyObject *number = kl_lazy_number(value), *real = kl_lazy_real(value);
    if (tape != kl_tape_open_or_null() || tape->is_running || number == NULL ||
        kl_view_is_shared(tape, value->id)) {
        return Py_NewRef(Py_None);
    }
    if (real != NULL || tape->core.values[value->id].meta.requires_grad) {
        return Py_NewRef(real != NULL ? real : Py_None);
    }
    real = PyObject_CallMethod(number, "detach", NULL);
    if (real != NULL) {
        kl_lazy_leave(tape, value->id, real);
    }
    return real;
}

KL_DEFINE_ON(release, tape, ignored)
{
    return !tape->is_running && kl_stale_release(tape) < 0 ? NULL : Py_NewRef(Py_None);
}

KL_DEFINE_AT_NODE(call, tape, id)
{
    return kl_call_describe(tape, id, NULL, NULL);
}

KL_DEFINE_AT_VALUE(refresh_leaf, tape, id)
{
    if (tape->values[id].real == NULL) {
        return PyErr_Format(PyExc_IndexError, "there is no leaf %u", id);
    }
    kl_stale_refresh_leaf(tape, id);
    return Py_NewRef(Py_None);
}

KL_DEFINE(note_backward, ignored)
{
    kl_py.n_backwards++;
    kl_py.n_looks++;
    return Py_NewRef(Py_None);
}

KL_DEFINE(is_busy, ignored)
{
    return PyBool_FromLong(kl_tape_is_busy(kl_tape_open_or_null()));
}

KL_DEFINE_ON(forget, tape, ignored)
{
    kl_tape_close(tape);
    return Py_NewRef(Py_None);
}

KL_DEFINE_ON(abandon, tape, ignored)
{
    kl_tape_abandon(&tape->core, 0);
    (void)kl_tape_end(tape, true);
    return Py_NewRef(Py_None);
}

/* Make leaves of the numbers that pending calls read, and that left the tape in the memory of a tensor. */
static void
settle_in_memory_of(Tape *tape, PyObject *tensor)
{
    for (size_t i = 0; i < tape->core.n_values; i++) {
        const KlPyValue *entry = &tape->values[i];
        if (entry->result != NULL && entry->handle == NULL && tape->core.values[i].n_pending > 0 &&
            kl_meta_may_alias(entry->result, tensor)) {
            (void)kl_live_settle(tape, (KlValueId)i);
        }
    }
}

KL_DEFINE_ON(reals, tape, ignored)
{
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < tape->core.n_values; i++) {
        if (tape->values[i].real != NULL) {
            kl_py_add(&list, Py_NewRef(tape->values[i].real));
        }
    }
    return list;
}

KL_DEFINE_ON(leaves_of, tape, tensor)
{
    if (tensor != Py_None && !tape->is_running) {
        settle_in_memory_of(tape, tensor);
    }
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < tape->core.n_values; i++) {
        PyObject *real = tape->values[i].real;
        const KlValue *value = &tape->core.values[i];
        /* n_aside: the calls that read a running statistic also write it */
        bool is_plain = !kl_place_is_rows(&value->meta.place) && !value->meta.requires_grad &&
                        value->n_aside == 0;
        bool is_asked =
            real != NULL && value->n_pending > 0 &&
            (tensor == Py_None ? is_plain : real == tensor || kl_meta_may_alias(real, tensor));
        int is_lost = is_asked ? kl_stale_is_lost(tape, (KlValueId)i) : 1; /* readers raise then */
        if (is_lost <= 0) {
            kl_py_add(&list, is_lost < 0 ? NULL : PyLong_FromSize_t(i));
        }
    }
    return list;
}

KL_DEFINE(swap, args)
{
    PyObject *left = NULL, *right = NULL;
    if (!PyArg_ParseTuple(args, "OO:swap", &left, &right)) {
        return NULL;
    }
    Value *of_left = value_argument(left);
    Value *of_right = of_left != NULL ? value_argument(right) : NULL;
    if (of_right == NULL) {
        return NULL;
    }
    if (of_left->placeholder != of_right->placeholder) {
        return PyErr_Format(PyExc_ValueError, "swap: torch would see another kind of placeholder");
    }
    bool is_touched = of_left->is_touched; /* describes the object, not its Value */
    of_left->is_touched = of_right->is_touched;
    of_right->is_touched = is_touched;
    *(Value **)((char *)left + kl_py.slot_offset) = of_right;
    *(Value **)((char *)right + kl_py.slot_offset) = of_left;
    return Py_NewRef(Py_None);
}

KL_DEFINE_OF(storage, value)
{
    const Tape *tape = tape_here(value);
    if (tape == NULL) {
        return Py_NewRef(Py_None);
    }
    KlStorageId id = tape->core.values[value->id].storage;
    const KlStorage *storage = &tape->core.storages[id];
    bool is_own = tape->core.values[storage->base].node != KL_ID_NONE && !storage->is_uncertain;
    return is_own ? PyLong_FromUnsignedLong(id) : Py_NewRef(Py_None);
}

KL_DEFINE_OF(has_views, value)
{
    const Tape *tape = tape_here(value);
    const KlValue *own = tape != NULL ? &tape->core.values[value->id] : NULL;
    bool has_views = false;
    for (size_t i = 0; own != NULL && own->view_of == KL_ID_NONE && i < tape->core.n_values; i++) {
        const KlValue *other = &tape->core.values[i];
        bool is_view = other->storage == own->storage && other->view_of != KL_ID_NONE;
        has_views = has_views || (is_view && other->meta.requires_grad);
    }
    return PyBool_FromLong(has_views);
}

KL_DEFINE_OF(set_for_chunks, value)
{
    Tape *tape = tape_here(value);
    KlNodeId id = tape != NULL ? tape->core.values[value->id].node : KL_ID_NONE;
    bool is_reduction = id != KL_ID_NONE && tape->core.nodes[id].mode == KL_MODE_REDUCE &&
                        id + 1 == tape->core.n_nodes;
    if (is_reduction) {
        tape->core.nodes[id].is_for_chunks = true;
    }
    return PyBool_FromLong(is_reduction);
}

KL_DEFINE_ON(has_draw, tape, is_dead)
{
    return PyBool_FromLong(is_dead == Py_True ? kl_tape_has_dead_draw(&tape->core)
                                              : kl_tape_has_draw(&tape->core));
}

KL_DEFINE_ON(waiting_draws, tape, ignored)
{
    PyObject *list = PyList_New(0);
    KlNodeId id = kl_tape_next_draw(&tape->core, 0);
    while (list != NULL && id != KL_ID_NONE) {
        const KlNode *node = &tape->core.nodes[id];
        kl_py_add(&list, Py_BuildValue("(III)", id, node->first_out, node->n_outs));
        id = kl_tape_next_draw(&tape->core, id + 1);
    }
    return list;
}

KL_DEFINE(hook, args)
{
    PyObject *object = NULL;
    int is_retained = 0, is_live = 0;
    if (!PyArg_ParseTuple(args, "O|pp:hook", &object, &is_retained, &is_live)) {
        return NULL;
    }
    Value *value = value_argument(object);
    Tape *tape = value != NULL ? kl_tape_open() : NULL;
    KlValueId id = KL_ID_NONE;
    if (tape == NULL) {
        return NULL;
    }
    if (kl_lazy_real(value) != NULL || value->tape != tape) {
        return Py_NewRef(Py_None);
    }
    if (kl_tape_attach(tape, value, &id) < 0) {
        return NULL;
    }
    id = kl_view_of_graph(tape, id);
    KlValue *core = &tape->core.values[id];
    if (core->node == KL_ID_NONE || !core->meta.requires_grad) {
        return Py_NewRef(Py_None);
    }
    tape->values[id].is_seen_live |= is_live;
    core->is_hooked |= !is_live && !is_retained;
    if (is_retained) {
        kl_lazy_retain(value, true);
    }
    return PyLong_FromUnsignedLong(id);
}

KL_DEFINE_ON(retained, tape, args)
{
    KlValueId id = KL_ID_NONE;
    int is_of_lazy = 0;
    if (!PyArg_ParseTuple(args, "O&|p:retained", kl_py_id, &id, &is_of_lazy)) {
        return NULL;
    }
    size_t n_values = tape->core.n_values;
    if (is_of_lazy && id < n_values) {
        const Value *handle = tape->values[id].handle;
        id = handle != NULL ? handle->retained : KL_ID_NONE;
    }
    KlValueId as = id < n_values ? tape->core.values[id].retained_as : KL_ID_NONE;
    return as != KL_ID_NONE ? PyLong_FromUnsignedLong(as) : Py_NewRef(Py_None);
}

KL_DEFINE_AT_VALUE(graph_of, tape, id)
{
    return PyLong_FromUnsignedLong(kl_view_of_graph(tape, id));
}

KL_DEFINE_OF(id, value)
{
    bool is_here = tape_here(value) != NULL;
    return is_here ? PyLong_FromUnsignedLong(value->id) : Py_NewRef(Py_None);
}

KL_DEFINE_AT_VALUE(lazy_of, tape, id)
{
    return kl_lazy_of(tape, id);
}

KL_DEFINE(is_graph_freed, object)
{
    const Value *value = kl_lazy_check(object) ? kl_lazy_value(object) : NULL;
    const KlTape *core = value != NULL && value->tape != NULL ? &value->tape->core : NULL;
    KlNodeId node = core != NULL ? core->values[value->id].node : KL_ID_NONE;
    return PyBool_FromLong(node != KL_ID_NONE && core->nodes[node].is_graph_freed);
}

KL_DEFINE_AT_NODE(note_drawn, tape, id)
{
    tape->core.nodes[id].is_drawn = true;
    return Py_NewRef(Py_None);
}

KL_DEFINE(set_type_attribute, args)
{
    PyTypeObject *type = NULL;
    PyObject *name = NULL, *value = NULL;
    if (!PyArg_ParseTuple(args, "O!UO:set_type_attribute", &PyType_Type, &type, &name, &value) ||
        PyDict_SetItem(type->tp_dict, name, value) < 0) {
        return NULL;
    }
    PyType_Modified(type);
    return Py_NewRef(Py_None);
}

KL_DEFINE_ON(set_busy, tape, flag)
{
    tape->is_running = flag == Py_True;
    return Py_NewRef(Py_None);
}

KL_DEFINE_ON(check_leaves, tape, ignored)
{
    return kl_stale_check_leaves(tape) < 0 ? NULL : Py_NewRef(Py_None);
}

KL_DEFINE_ON(close, tape, ignored)
{
    bool is_over = kl_tape_end(tape, false);
    tape->is_kept = tape->is_kept || !is_over;
    return PyBool_FromLong(is_over);
}

KL_DEFINE_ON(is_empty, tape, ignored)
{
    return PyBool_FromLong(tape->core.n_values == 0);
}

KL_DEFINE_ON(pending_bytes, tape, is_graph)
{
    long long bytes = 0;
    for (size_t i = 0; i < tape->core.n_nodes; i++) {
        const KlNode *node = &tape->core.nodes[i];
        const KlMeta *out = &tape->core.values[node->first_out].meta;
        if (!node->is_done && (is_graph == Py_False || out->requires_grad)) {
            const KlSaves *saves = &node->saves;
            bytes += kl_tape_n_bytes(&tape->core, (KlNodeId)i);
            bytes += saves->bytes_extra + saves->bytes_fixed + saves->bytes_workspace;
        }
    }
    return PyLong_FromLongLong(bytes);
}

KL_DEFINE_ON(notes, tape, ignored)
{
    if (tape->notes == NULL) {
        tape->notes = PyDict_New();
    }
    return Py_XNewRef(tape->notes);
}

static PyObject *
count(int64_t *where, PyObject *n)
{
    long long more = PyLong_AsLongLong(n);
    if (more == -1 && PyErr_Occurred()) {
        return NULL;
    }
    *where += more;
    return Py_NewRef(Py_None);
}

KL_DEFINE(count_interpreters, n)
{
    return count(&kl_py.n_transforms, n);
}

KL_DEFINE(count_dual_levels, n)
{
    return count(&kl_py.n_dual_levels, n);
}

KL_DEFINE(set_region, region)
{
    uint32_t before = kl_py_region;
    unsigned long now = PyLong_AsUnsignedLong(region);
    if (PyErr_Occurred()) {
        return NULL;
    }
    kl_py_region = (uint32_t)now;
    return PyLong_FromUnsignedLong(before);
}

KL_DEFINE(set_in_function, flag)
{
    bool before = kl_py_is_in_function;
    kl_py_is_in_function = flag == Py_None ? before : flag == Py_True;
    return PyBool_FromLong(before);
}
