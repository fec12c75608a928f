/* SPDX-License-Identifier: Apache-2.0 */
/* py_lazy.c - LazyTensor, the type that users hold, and Value, which it holds.
 *
 * LazyTensor is created by torch's metaclass: a subclass of torch.Tensor with one slot. torch sees an empty
 * placeholder; LazyTensor's own getters answer from metadata, and compute nothing. */
#include "py.h"

#include <structmember.h>

#include <string.h>

/* -- Value ---------------------------------------------------------------------------------------- */

/* Dead Values are recycled, as the LazyTensors that held them are (py_recycle.c). */
#define KL_FREE_MAX 256

static struct {
    Value *values[KL_FREE_MAX]; /* [n] untracked; each keeps its reference to the type */
    int n;
} dead;

static Value *
new_value(void)
{
    Value *value = NULL;
    if (dead.n > 0) {
        value = dead.values[--dead.n];
        const PyObject head = value->ob_base;
        *value = (Value){.ob_base = head};
        _Py_NewReference((PyObject *)value);
        PyObject_GC_Track(value);
    } else {
        value = (Value *)kl_py.value_type->tp_alloc(kl_py.value_type, 0);
    }
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

static void
Value_dealloc(Value *value)
{
    PyTypeObject *type = Py_TYPE(value);
    PyObject_GC_UnTrack(value);
    (void)Value_clear(value);
    if (KL_IS_REUSED && dead.n < KL_FREE_MAX) {
        dead.values[dead.n++] = value;
        return;
    }
    type->tp_free(value);
    Py_DECREF(type);
}

static PyType_Slot value_slots[] = {
    {Py_tp_traverse, Value_traverse},
    {Py_tp_clear, Value_clear},
    {Py_tp_dealloc, Value_dealloc},
    {0, NULL},
};

static PyType_Spec value_spec = {
    .name = "koila._core.Value",
    .basicsize = sizeof(Value),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = value_slots,
};

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

/* -- getters: metadata without computing --------------------------------------------------------- */

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

/* What answers for a LazyTensor: its real tensor, or else its meta. */
typedef struct Answer {
    Value *value;
    PyObject *real;
    const KlMeta *meta;
} Answer;

static bool
look(PyObject *self, Answer *answer)
{
    *answer = (Answer){.value = kl_lazy_checked(self)};
    if (answer->value == NULL) {
        return false;
    }
    answer->real = kl_lazy_real(answer->value);
    if (answer->real == NULL) {
        answer->meta = &answer->value->tape->core.values[answer->value->id].meta;
    }
    return true;
}

/* The attribute of the real tensor; NULL without an exception if `answer` has a meta instead. */
static PyObject *
attribute_of(PyObject *self, const char *name, Answer *answer)
{
    bool is_real = look(self, answer) && answer->real != NULL;
    return is_real ? PyObject_GetAttrString(answer->real, name) : NULL;
}

static PyObject *
get_shape(PyObject *self, void *Py_UNUSED(closure))
{
    Answer answer;
    PyObject *real = attribute_of(self, "shape", &answer);
    if (answer.meta != NULL && answer.value->size == NULL) {
        answer.value->size = kl_meta_size(answer.meta);
    }
    return answer.meta == NULL ? real : Py_XNewRef(answer.value->size);
}

static PyObject *
get_dtype(PyObject *self, void *Py_UNUSED(closure))
{
    Answer answer;
    PyObject *real = attribute_of(self, "dtype", &answer);
    return answer.meta == NULL ? real : Py_NewRef(kl_py.dtypes[answer.meta->dtype]);
}

static PyObject *
get_device(PyObject *self, void *Py_UNUSED(closure))
{
    Answer answer;
    PyObject *real = attribute_of(self, "device", &answer);
    return answer.meta == NULL ? real
                               : Py_NewRef(PyList_GET_ITEM(kl_py.devices, answer.meta->device));
}

static PyObject *
get_ndim(PyObject *self, void *Py_UNUSED(closure))
{
    Answer answer;
    PyObject *real = attribute_of(self, "ndim", &answer);
    return answer.meta == NULL ? real : PyLong_FromLong(answer.meta->n_dims);
}

static PyObject *
get_requires_grad(PyObject *self, void *closure)
{
    Answer answer;
    PyObject *real = attribute_of(self, "requires_grad", &answer);
    if (answer.meta == NULL) {
        return real;
    }
    /* A write to another view of the same memory may have given it a gradient. */
    KlValueId current = answer.value->id;
    KlTurn turn;
    if (kl_turn_begin(&turn, answer.value->tape) < 0) {
        return NULL;
    }
    bool is_here = answer.value->tape == turn.tape; /* else another thread has run it by now */
    int status = 0;
    if (is_here && !turn.tape->is_running) {
        status = kl_tape_attach(turn.tape, answer.value, &current);
    }
    bool result = is_here && status == 0 && turn.tape->core.values[current].meta.requires_grad;
    kl_turn_end(&turn);
    if (status == 0 && !is_here) {
        return get_requires_grad(self, closure);
    }
    return status < 0 ? NULL : PyBool_FromLong(result);
}

static int
set_requires_grad(PyObject *self, PyObject *flag, void *Py_UNUSED(closure))
{
    Value *value = kl_lazy_checked(self);
    if (value == NULL) {
        return -1;
    }
    if (PyBool_Check(flag)) {
        return kl_py_done(PyObject_CallMethod(self, "requires_grad_", "O", flag));
    }
    PyObject *real = kl_live_force(value); /* torch raises its own error */
    int result = real == NULL ? -1 : PyObject_SetAttrString(real, "requires_grad", flag);
    Py_XDECREF(real);
    return result;
}

static PyObject *
lazy_dim(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    return get_ndim(self, NULL);
}

/* What torch's size(...) returns for a tensor of this shape; raises torch's errors. */
static PyObject *
ask_size(PyObject *shape, PyObject *const *args, Py_ssize_t n_args, PyObject *kwnames)
{
    PyObject *torch = PyImport_ImportModule("torch");
    PyObject *empty = torch != NULL ? PyObject_GetAttrString(torch, "empty") : NULL;
    PyObject *given = Py_BuildValue("(O)", shape), *words = Py_BuildValue("{ss}", "device", "meta");
    PyObject *stand_in = NULL, *ask = NULL, *result = NULL;
    if (empty != NULL && given != NULL && words != NULL) {
        stand_in = PyObject_Call(empty, given, words);
    }
    ask = stand_in != NULL ? PyObject_GetAttrString(stand_in, "size") : NULL;
    if (ask != NULL) {
        result = PyObject_Vectorcall(ask, args, (size_t)n_args, kwnames);
    }
    Py_XDECREF(ask);
    Py_XDECREF(stand_in);
    Py_XDECREF(words);
    Py_XDECREF(given);
    Py_XDECREF(empty);
    Py_XDECREF(torch);
    return result;
}

static PyObject *
lazy_size(PyObject *self, PyObject *const *args, Py_ssize_t n_args, PyObject *kwnames)
{
    PyObject *shape = get_shape(self, NULL);
    if (shape == NULL || (n_args == 0 && kwnames == NULL)) {
        return shape;
    }
    Py_ssize_t n = PyTuple_GET_SIZE(shape);
    int is_too_large = 1;
    long i = 0;
    if (n_args == 1 && kwnames == NULL && PyLong_CheckExact(args[0])) {
        i = PyLong_AsLongAndOverflow(args[0], &is_too_large);
    }
    PyObject *result = is_too_large == 0 && i >= -n && i < n
                           ? Py_NewRef(PyTuple_GET_ITEM(shape, i < 0 ? i + n : i))
                           : ask_size(shape, args, n_args, kwnames);
    Py_DECREF(shape);
    return result;
}

static PyObject *
lazy_numel(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    Answer answer;
    if (!look(self, &answer)) {
        return NULL;
    }
    return answer.real != NULL ? PyObject_CallMethod(answer.real, "numel", NULL)
                               : PyLong_FromLongLong(kl_meta_n_elements(answer.meta));
}

static PyGetSetDef getsets[] = {
    {"shape", get_shape, NULL, "Sizes, a torch.Size; never computes.", NULL},
    {"dtype", get_dtype, NULL, "Never computes.", NULL},
    {"device", get_device, NULL, "Never computes.", NULL},
    {"ndim", get_ndim, NULL, "Never computes.", NULL},
    {"requires_grad", get_requires_grad, set_requires_grad, "Reading never computes.", NULL},
};

static PyMethodDef methods[] = {
    {"dim", lazy_dim, METH_NOARGS, "Number of dims; never computes."},
    {"ndimension", lazy_dim, METH_NOARGS, "Number of dims; never computes."},
    {"size", (PyCFunction)(void *)lazy_size, METH_FASTCALL | METH_KEYWORDS,
     "Sizes, or the size of one dim; never computes."},
    {"numel", lazy_numel, METH_NOARGS, "Number of elements; never computes."},
    {"nelement", lazy_numel, METH_NOARGS, "Number of elements; never computes."},
};

/* -- the class --------------------------------------------------------------------------------------- */

static PyMethodDef torch_dispatch_def = {
    "__torch_dispatch__", (PyCFunction)(void *)kl_record_torch_dispatch, METH_FASTCALL, NULL};

static int
set_item_stolen(PyObject *dict, const char *key, PyObject *item)
{
    int result = item == NULL ? -1 : PyDict_SetItemString(dict, key, item);
    Py_XDECREF(item);
    return result;
}

/* The class must have both hooks before the metaclass runs, which disables __torch_function__ in a class with
 * __torch_dispatch__ alone. Neither is a descriptor, so that no bound method is created for each call. */
static PyObject *
make_class_dict(PyObject *module)
{
    PyObject *dict = PyDict_New();
    if (dict == NULL || set_item_stolen(dict, "__slots__", Py_BuildValue("(s)", "_node")) < 0 ||
        set_item_stolen(dict, "__module__", PyUnicode_FromString("koila")) < 0 ||
        set_item_stolen(dict, "__torch_function__", kl_dispatch_function(module)) < 0 ||
        set_item_stolen(dict, "__torch_dispatch__", PyCFunction_New(&torch_dispatch_def, module)) <
            0) {
        Py_CLEAR(dict);
    }
    return dict;
}

static int
add_member(PyObject *class, const char *name, PyObject *member)
{
    int result = member == NULL ? -1 : PyObject_SetAttrString(class, name, member);
    Py_XDECREF(member);
    return result;
}

static int
add_members(PyObject *class)
{
    int result = 0;
    for (size_t i = 0; result == 0 && i < sizeof(getsets) / sizeof(getsets[0]); i++) {
        PyObject *member = PyDescr_NewGetSet((PyTypeObject *)class, &getsets[i]);
        result = add_member(class, getsets[i].name, member);
    }
    for (size_t i = 0; result == 0 && i < sizeof(methods) / sizeof(methods[0]); i++) {
        PyObject *member = PyDescr_NewMethod((PyTypeObject *)class, &methods[i]);
        result = add_member(class, methods[i].ml_name, member);
    }
    return result;
}

int
kl_lazy_init(PyObject *module)
{
    int result = -1;
    PyObject *class = NULL, *member = NULL;
    PyObject *dict = make_class_dict(module);
    kl_py.value_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &value_spec, NULL);
    if (dict == NULL || kl_py.value_type == NULL) {
        goto error;
    }
    class = PyObject_CallFunction((PyObject *)Py_TYPE(kl_py.tensor), "s(O)O", "LazyTensor",
                                  kl_py.tensor, dict);
    if (class == NULL || add_members(class) < 0) {
        goto error;
    }
    member = PyObject_GetAttrString(class, "_node");
    if (member == NULL) {
        goto error;
    }
    kl_py.slot_offset = ((PyMemberDescrObject *)member)->d_member->offset;
    kl_py.lazy = (PyTypeObject *)Py_NewRef(class);
    kl_dispatch_install();
    result = PyModule_AddObjectRef(module, "LazyTensor", class);
    if (result == 0) {
        result = kl_recycle_init();
    }
error:
    Py_XDECREF(member);
    Py_XDECREF(class);
    Py_XDECREF(dict);
    return result;
}
