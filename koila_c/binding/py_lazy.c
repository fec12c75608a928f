/* SPDX-License-Identifier: Apache-2.0 */
/* py_lazy.c - Value, which a LazyTensor holds: a value of a tape, or a real tensor */
#include "py_tape.h"

/* -- Value ---------------------------------------------------------------------------------------- */

static Value *
new_value(void)
{
    Value *value = (Value *)kl_py.value_type->tp_alloc(kl_py.value_type, 0); /* zeroed */
    if (value != NULL) {
        value->id = value->retained = KL_ID_NONE;
        value->place = KL_PLACE_WHOLE;
    }
    return value;
}

static int
Value_traverse(Value *value, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(value));
    Py_VISIT(value->tape);
    Py_VISIT(value->real);
    Py_VISIT(value->error);
    return 0;
}

/* Keep the gradient of value `id` from now on, instead of the one kept so far; KL_ID_NONE: of none. */
static void
retain(Value *value, KlValueId id)
{
    KlTape *core = &value->tape->core;
    KlValueId as = id;
    if (value->retained < core->n_values) { /* else it kept none, or the tape was cleared */
        as = core->values[value->retained].retained_as;
        core->values[value->retained].retained_as = KL_ID_NONE;
    }
    value->retained = id;
    if (id != KL_ID_NONE) {
        core->values[id].retained_as = as;
    }
}

void
kl_lazy_retain(Value *value, bool is_new)
{
    if (is_new || value->retained != KL_ID_NONE) {
        retain(value, kl_view_of_graph(value->tape, value->id));
    }
}

static void
leave_tape(Value *value)
{
    Tape *tape = value->tape;
    if (tape != NULL) {
        retain(value, KL_ID_NONE);
        value->tape = NULL;
        kl_tape_forget(tape, value->id);
        kl_tape_let_go(tape);
        Py_DECREF(tape);
    }
}

static int
Value_clear(Value *value)
{
    leave_tape(value);
    Py_CLEAR(value->real);
    Py_CLEAR(value->size);
    Py_CLEAR(value->error);
    return 0;
}

void
kl_lazy_move(Value *value, KlValueId id)
{
    Tape *tape = value->tape;
    kl_tape_forget(tape, value->id);
    value->id = id;
    kl_tape_hold(tape, id, value);
    Py_CLEAR(value->size);
}

void
kl_lazy_detach(Value *value, PyObject *real)
{
    Tape *tape = value->tape;
    const KlValue *core = &tape->core.values[value->id];
    value->place = core->meta.place;
    if (kl_place_is_rows(&value->place) && tape->core.orders[value->place.axis].of != KL_ID_NONE) {
        value->place = KL_PLACE_WHOLE; /* rows in an order of their own are not the batch's rows */
    }
    if (kl_place_is_rows(&value->place)) {
        KlAxisId axis = kl_tape_axis_find(&tape->core, value->place.axis);
        value->axis_key = tape->axis_keys[axis];
        value->rows = tape->core.axis_rows[axis];
        value->place.axis = 0;
    }
    value->real = Py_XNewRef(real); /* NULL: its call failed */
    value->error = Py_XNewRef(kl_failure_find(tape, value->id));
    if (core->node != KL_ID_NONE) {
        value->epoch = kl_py.n_backwards;
    }
    retain(value, KL_ID_NONE);
    value->tape = NULL;
    Py_CLEAR(value->size);
    Py_DECREF(tape);
}

void
kl_lazy_leave(Tape *tape, KlValueId id, PyObject *real)
{
    Value *value = tape->values[id].handle;
    kl_tape_hold(tape, id, NULL);
    kl_lazy_detach(value, real);
}

PyObject *
kl_lazy_real(const Value *value)
{
    if (value->tape == NULL) {
        return value->real;
    }
    const Tape *tape = value->tape;
    if (value->id >= tape->core.n_values || kl_tape_is_stale(&tape->core, value->id)) {
        return NULL; /* the value before a write is not what the LazyTensor shows */
    }
    return tape->values[value->id].real;
}

PyObject *
kl_lazy_number(const Value *value)
{
    PyObject *real = kl_lazy_real(value);
    if (real != NULL || value->tape == NULL || value->id >= value->tape->core.n_values) {
        return real;
    }
    bool is_stale = kl_tape_is_stale(&value->tape->core, value->id);
    return is_stale ? NULL : value->tape->values[value->id].result;
}

/* -- making lazies ----------------------------------------------------------------------------- */

static KlPlaceholder
placeholder_of(const KlMeta *meta)
{
    if (meta->n_dims != 0 || meta->requires_grad || meta->dtype == KL_DTYPE_OTHER) {
        return KL_PLACEHOLDER_EMPTY;
    }
    if (meta->dtype == KL_DTYPE_BOOL) {
        return KL_PLACEHOLDER_BOOL;
    }
    return kl_meta_dtype_is_float(meta->dtype) || kl_meta_dtype_is_complex(meta->dtype)
               ? KL_PLACEHOLDER_FLOAT
               : KL_PLACEHOLDER_INT;
}

static PyObject *
wrap(Value *value, KlPlaceholder placeholder)
{
    value->placeholder = placeholder;
    PyObject *lazy = kl_recycle_take(placeholder);
    if (lazy == NULL) {
        Py_DECREF(value);
        return NULL;
    }
    *(Value **)((char *)lazy + kl_py.slot_offset) = value;
    return lazy;
}

PyObject *
kl_lazy_new(Tape *tape, KlValueId id)
{
    Value *value = new_value();
    if (value == NULL) {
        return NULL;
    }
    value->tape = (Tape *)Py_NewRef((PyObject *)tape);
    value->id = id;
    kl_tape_hold(tape, id, value);
    return wrap(value, placeholder_of(&tape->core.values[id].meta));
}

PyObject *
kl_lazy_of(Tape *tape, KlValueId id)
{
    Value *value = tape->values[id].handle;
    return value == NULL ? kl_lazy_new(tape, id)
                         : wrap((Value *)Py_NewRef((PyObject *)value), value->placeholder);
}

PyObject *
kl_lazy_results(Tape *tape, KlNodeId id, PyObject *container)
{
    KlValueId first = tape->core.nodes[id].first_out;
    uint32_t n = tape->core.nodes[id].n_outs;
    if (container == Py_None) {
        return kl_lazy_new(tape, first);
    }
    PyObject *tuple = PyTuple_New(n);
    for (uint32_t i = 0; tuple != NULL && i < n; i++) {
        kl_py_put(&tuple, i, kl_lazy_new(tape, first + i));
    }
    if (tuple == NULL || container == (PyObject *)&PyTuple_Type) {
        return tuple;
    }
    PyObject *result = PyObject_CallOneArg(container, tuple);
    Py_DECREF(tuple);
    return result;
}

PyObject *
kl_lazy_new_detached(PyObject *real, const KlPlace *place, uint64_t axis_key, int64_t rows,
                     bool is_input)
{
    Value *value = new_value();
    if (value == NULL) {
        return NULL;
    }
    value->real = Py_NewRef(real);
    if (place != NULL) {
        value->place = *place;
    }
    value->axis_key = axis_key;
    value->rows = rows;
    value->is_input = is_input;
    value->epoch = kl_py.n_backwards;
    KlMeta meta;
    bool is_known = kl_meta_read(real, &meta) == 0;
    PyErr_Clear();
    return wrap(value, is_known ? placeholder_of(&meta) : KL_PLACEHOLDER_EMPTY);
}

/* NULL with an exception for a LazyTensor that torch made by itself (a copy of the placeholder), and for one whose
 * call failed. */
Value *
kl_lazy_checked(PyObject *self)
{
    Value *value = kl_lazy_value(self);
    if (value == NULL) {
        PyErr_SetString(
            kl_py.koila_error,
            "this LazyTensor stands for nothing: it was made from a placeholder by code that "
            "koila cannot see");
    } else if (value->tape == NULL && value->real == NULL) {
        kl_failure_raise(value->error);
        value = NULL;
    } else if (value->tape != NULL && value->id < value->tape->core.n_values &&
               kl_failure_check(value->tape, value->id) < 0) {
        value = NULL;
    }
    return value;
}

int
kl_lazy_init(PyObject *module)
{
    kl_py.value_type = kl_py_new_type(module, "koila._core.Value", sizeof(Value), Value_traverse,
                                      Value_clear, NULL);
    return kl_py.value_type != NULL ? 0 : -1;
}
