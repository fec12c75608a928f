/* SPDX-License-Identifier: Apache-2.0 */
/* py_call.c - calls as slots. A recorded call keeps no container of the user's: lists, tuples and dicts are
 * flattened when it is recorded, and built anew for each run. So a list that the user changes later, or a chunk's
 * slice in place of a whole tensor, changes nothing else. */
#include "py_tape.h"

#include "alloc.h"

static int
push(Tape *tape, KlSlotKind kind, uint32_t n, PyObject *object)
{
    if (KL_RESERVE(tape, slots, tape->n_slots + 1) != KL_OK) {
        return kl_py_done(PyErr_NoMemory());
    }
    tape->slots[tape->n_slots++] =
        (KlSlot){.kind = kind, .n = n, .object = object != NULL ? Py_NewRef(object) : NULL};
    return 0;
}

void
kl_call_truncate(Tape *tape, size_t first)
{
    while (tape->n_slots > first) {
        tape->n_slots--;
        Py_CLEAR(tape->slots[tape->n_slots].object);
    }
}

/* Build a subclass of tuple or list: by _make, since the __new__ of a namedtuple may take anything, or from a sequence. */
static PyObject *
rebuild(PyObject *type, PyObject *items)
{
    return PyObject_HasAttrString(type, "_make") ? PyObject_CallMethod(type, "_make", "(O)", items)
                                                 : PyObject_CallOneArg(type, items);
}

/* Whether a container must be taken apart: it holds a tensor, or can be changed later. */
static bool
must_open(PyObject *object)
{
    if (PyList_Check(object) || PyDict_Check(object)) {
        return true;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(object); i++) {
        PyObject *item = PyTuple_GET_ITEM(object, i);
        if (kl_lazy_is_tensor(item) ||
            ((PyTuple_Check(item) || PyList_Check(item) || PyDict_Check(item)) &&
             must_open(item))) {
            return true;
        }
    }
    return false;
}

static int encode(Tape *tape, PyObject *object, KlValueId n_before);

static int
encode_sequence(Tape *tape, PyObject *object, KlValueId n_before)
{
    Py_ssize_t n = PySequence_Fast_GET_SIZE(object);
    KlSlotKind kind = PyList_Check(object)         ? KL_SLOT_LIST
                      : PyTuple_CheckExact(object) ? KL_SLOT_TUPLE
                                                   : KL_SLOT_NAMED;
    PyObject *type = kind == KL_SLOT_NAMED ? (PyObject *)Py_TYPE(object) : NULL;
    int result = push(tape, kind, (uint32_t)n, type);
    for (Py_ssize_t i = 0; result == 0 && i < PySequence_Fast_GET_SIZE(object); i++) {
        result = encode(tape, PySequence_Fast_GET_ITEM(object, i), n_before);
    }
    return result;
}

/* The items of a dict under `keys`, a list or tuple. */
static int
encode_items(Tape *tape, PyObject *object, PyObject *keys, KlValueId n_before)
{
    int result = 0;
    for (Py_ssize_t i = 0; result == 0 && i < PySequence_Fast_GET_SIZE(keys); i++) {
        PyObject *item = PyDict_GetItemWithError(object, PySequence_Fast_GET_ITEM(keys, i));
        result = item != NULL ? encode(tape, item, n_before) : -1;
    }
    return result;
}

static int
encode_dict(Tape *tape, PyObject *object, KlValueId n_before)
{
    PyObject *keys = PyDict_Keys(object);
    bool is_pushed =
        keys != NULL && push(tape, KL_SLOT_DICT, (uint32_t)PyList_GET_SIZE(keys), keys) == 0;
    int result = is_pushed ? encode_items(tape, object, keys, n_before) : -1;
    Py_XDECREF(keys);
    return result;
}

/* Append a slot for no tensor and no container. Of a numpy array keep a copy, as the user can write it. 0 or -1. */
static int
encode_other(Tape *tape, PyObject *object)
{
    if (kl_py.ndarray != NULL && PyObject_TypeCheck(object, (PyTypeObject *)kl_py.ndarray)) {
        PyObject *copy = PyObject_CallMethod(object, "copy", NULL);
        int result = copy != NULL ? push(tape, KL_SLOT_OBJECT, 0, copy) : -1;
        Py_XDECREF(copy);
        return result;
    }
    return push(tape, KL_SLOT_OBJECT, 0, object);
}

/* A tensor that a call is given twice is one value: values from `n_before` on entered with the call. */
static int
encode_tensor(Tape *tape, PyObject *object, KlValueId n_before)
{
    KlValueId value = kl_lazy_check(object) ? KL_ID_NONE : kl_tape_find(tape, object);
    bool is_met = value != KL_ID_NONE && value >= n_before;
    int result = is_met                  ? 0
                 : kl_lazy_check(object) ? kl_tape_attach(tape, kl_lazy_value(object), &value)
                                         : kl_tape_enter(tape, object, &value);
    return result < 0 ? -1 : push(tape, KL_SLOT_VALUE, value, NULL);
}

static int
encode(Tape *tape, PyObject *object, KlValueId n_before)
{
    if (kl_lazy_is_tensor(object)) {
        return encode_tensor(tape, object, n_before);
    }
    if (PyList_Check(object) || PyTuple_Check(object)) {
        return must_open(object) ? encode_sequence(tape, object, n_before)
                                 : push(tape, KL_SLOT_OBJECT, 0, object);
    }
    return PyDict_Check(object) ? encode_dict(tape, object, n_before) : encode_other(tape, object);
}

static int
attach_one(PyObject *lazy, void *tape)
{
    KlValueId value = KL_ID_NONE;
    bool is_grad_enabled = false;
    if (kl_tape_attach(tape, kl_lazy_value(lazy), &value) < 0) {
        return -1;
    }
    if (kl_lazy_value(lazy)->retained == KL_ID_NONE) {
        return 0;
    }
    int64_t context = kl_context_now(&is_grad_enabled);
    if (context >= 0 && is_grad_enabled) {
        kl_lazy_retain(kl_lazy_value(lazy), false);
    }
    return context < 0 ? -1 : 0;
}

int
kl_call_encode(Tape *tape, PyObject *args, PyObject *kwargs, KlPyNode *node)
{
    /* Attaching a value may record a view again, whose slots must come before those of this call. */
    if (kl_call_visit_both(args, kwargs, attach_one, tape) < 0) {
        return -1;
    }
    size_t first = tape->n_slots;
    KlValueId n_before = (KlValueId)tape->core.n_values;
    Py_ssize_t n_args = PyTuple_GET_SIZE(args);
    bool has_kwargs = PyDict_GET_SIZE(kwargs) > 0;
    PyObject *names = has_kwargs ? PySequence_Tuple(kwargs) : NULL;
    int result = has_kwargs && names == NULL ? -1 : 0;
    for (Py_ssize_t i = 0; result == 0 && i < n_args; i++) {
        result = encode(tape, PyTuple_GET_ITEM(args, i), n_before);
    }
    if (result < 0 || (has_kwargs && encode_items(tape, kwargs, names, n_before) < 0)) {
        Py_XDECREF(names);
        kl_call_truncate(tape, first);
        return -1;
    }
    node->kwnames = names;
    node->first_slot = (uint32_t)first;
    node->n_slots = (uint32_t)(tape->n_slots - first);
    node->n_args = (uint32_t)(n_args + (has_kwargs ? PyTuple_GET_SIZE(names) : 0));
    return 0;
}

typedef struct Decoder {
    const KlSlot *slots; /* read position */
    PyObject *(*value_of)(void *, KlValueId);
    void *env;
} Decoder;

static PyObject *decode(Decoder *decoder);

static PyObject *
decode_list(Decoder *decoder, uint32_t n)
{
    PyObject *list = PyList_New(0);
    for (uint32_t i = 0; list != NULL && i < n; i++) {
        kl_py_add(&list, decode(decoder));
    }
    return list;
}

static PyObject *
decode_tuple(Decoder *decoder, uint32_t n)
{
    PyObject *list = decode_list(decoder, n);
    PyObject *tuple = list != NULL ? PyList_AsTuple(list) : NULL;
    Py_XDECREF(list);
    return tuple;
}

static PyObject *
decode_named(Decoder *decoder, uint32_t n, PyObject *type)
{
    PyObject *tuple = decode_tuple(decoder, n);
    PyObject *result = tuple != NULL ? rebuild(type, tuple) : NULL;
    Py_XDECREF(tuple);
    return result;
}

static PyObject *
decode_dict(Decoder *decoder, PyObject *keys /* a list or tuple */)
{
    PyObject *dict = PyDict_New();
    for (Py_ssize_t i = 0; dict != NULL && i < PySequence_Fast_GET_SIZE(keys); i++) {
        PyObject *item = decode(decoder);
        if (item == NULL || PyDict_SetItem(dict, PySequence_Fast_GET_ITEM(keys, i), item) < 0) {
            Py_CLEAR(dict);
        }
        Py_XDECREF(item);
    }
    return dict;
}

static PyObject *
decode(Decoder *decoder)
{
    const KlSlot *slot = decoder->slots++;
    PyObject *value = NULL;
    switch (slot->kind) {
    case KL_SLOT_OBJECT:
        return Py_NewRef(slot->object);
    case KL_SLOT_VALUE:
        value = decoder->value_of != NULL ? decoder->value_of(decoder->env, slot->n) : Py_None;
        if (value == NULL && !PyErr_Occurred()) {
            PyErr_Format(PyExc_SystemError, "koila: value %u is needed but has no tensor", slot->n);
        }
        return Py_XNewRef(value);
    case KL_SLOT_LIST:
        return decode_list(decoder, slot->n);
    case KL_SLOT_TUPLE:
        return decode_tuple(decoder, slot->n);
    case KL_SLOT_NAMED:
        return decode_named(decoder, slot->n, slot->object);
    case KL_SLOT_DICT:
        return decode_dict(decoder, slot->object);
    }
    Py_UNREACHABLE();
}

PyObject *
kl_call_decode(Tape *tape, KlNodeId id, PyObject *(*value_of)(void *, KlValueId), void *env)
{
    const KlPyNode *node = &tape->nodes[id];
    Decoder decoder = {.slots = &tape->slots[node->first_slot], .value_of = value_of, .env = env};
    return decode_list(&decoder, node->n_args);
}

/* The number of positional arguments of a node, of which `args` holds all. */
static Py_ssize_t
count_positional(const KlPyNode *node, PyObject *args)
{
    return PyList_GET_SIZE(args) - (node->kwnames != NULL ? PyTuple_GET_SIZE(node->kwnames) : 0);
}

PyObject *
kl_call_split(const KlPyNode *node, PyObject *args)
{
    Py_ssize_t n = count_positional(node, args);
    PyObject *first = PyList_GetSlice(args, 0, n);
    PyObject *positional = first != NULL ? PyList_AsTuple(first) : NULL;
    PyObject *named = kl_call_keywords(PySequence_Fast_ITEMS(args) + n, node->kwnames);
    bool is_whole = positional != NULL && named != NULL;
    PyObject *result = is_whole ? PyTuple_Pack(3, node->func, positional, named) : NULL;
    KL_DROP(named, positional, first);
    return result;
}

PyObject *
kl_call_describe(Tape *tape, KlNodeId id, PyObject *(*value_of)(void *, KlValueId), void *env)
{
    PyObject *args = kl_call_decode(tape, id, value_of, env);
    PyObject *result = args != NULL ? kl_call_split(&tape->nodes[id], args) : NULL;
    Py_XDECREF(args);
    return result;
}

PyObject *
kl_call_keywords(PyObject *const *values, PyObject *names)
{
    PyObject *dict = PyDict_New();
    Py_ssize_t n = names != NULL ? PyTuple_GET_SIZE(names) : 0;
    for (Py_ssize_t i = 0; dict != NULL && i < n; i++) {
        if (PyDict_SetItem(dict, PyTuple_GET_ITEM(names, i), values[i]) < 0) {
            Py_CLEAR(dict);
        }
    }
    return dict;
}

PyObject *
kl_call_run(Tape *tape, KlNodeId id, PyObject *(*value_of)(void *, KlValueId), void *env)
{
    PyObject *args = kl_call_decode(tape, id, value_of, env);
    PyObject *result = args != NULL ? kl_call_vector(&tape->nodes[id], args) : NULL;
    Py_XDECREF(args);
    return result;
}

PyObject *
kl_call_vector(const KlPyNode *node, PyObject *args)
{
    return PyObject_Vectorcall(node->func, PySequence_Fast_ITEMS(args),
                               (size_t)count_positional(node, args), node->kwnames);
}

/* -- looking for LazyTensors in a call that is not recorded --------------------------------------------- */

int
kl_call_visit_as(PyObject *object, bool (*is_met)(PyObject *), int (*visit)(PyObject *, void *),
                 void *context)
{
    int result = 0;
    if (is_met(object)) {
        return visit(object, context);
    }
    if (PyList_Check(object) || PyTuple_Check(object)) {
        for (Py_ssize_t i = 0; result == 0 && i < PySequence_Fast_GET_SIZE(object); i++) {
            PyObject *item = PySequence_Fast_GET_ITEM(object, i);
            result = kl_call_visit_as(item, is_met, visit, context);
        }
    } else if (PyDict_Check(object)) {
        PyObject *key = NULL, *item = NULL;
        Py_ssize_t position = 0;
        while (result == 0 && PyDict_Next(object, &position, &key, &item)) {
            result = kl_call_visit_as(item, is_met, visit, context);
        }
    } else if (PySlice_Check(object)) {
        const PySliceObject *slice = (const PySliceObject *)object;
        PyObject *parts[3] = {slice->start, slice->stop, slice->step};
        for (int i = 0; result == 0 && i < 3; i++) {
            result = kl_call_visit_as(parts[i], is_met, visit, context);
        }
    }
    return result;
}

int
kl_call_visit(PyObject *object, int (*visit)(PyObject *, void *), void *context)
{
    return kl_call_visit_as(object, kl_lazy_check, visit, context);
}

int
kl_call_visit_both(PyObject *args, PyObject *kwargs, int (*visit)(PyObject *, void *),
                   void *context)
{
    int result = kl_call_visit(args, visit, context);
    return result != 0 || kwargs == NULL ? result : kl_call_visit(kwargs, visit, context);
}

static int
stop(PyObject *Py_UNUSED(found), void *Py_UNUSED(context))
{
    return 1;
}

bool
kl_call_holds(PyObject *object, bool (*is_met)(PyObject *))
{
    return kl_call_visit_as(object, is_met, stop, NULL) != 0;
}

static PyObject *
real_dict(PyObject *object)
{
    PyObject *copy = PyDict_Copy(object);
    PyObject *key = NULL, *item = NULL;
    Py_ssize_t position = 0;
    while (copy != NULL && PyDict_Next(object, &position, &key, &item)) {
        PyObject *real = kl_call_real(item);
        if (real == NULL || PyDict_SetItem(copy, key, real) < 0) {
            Py_CLEAR(copy);
        }
        Py_XDECREF(real);
    }
    return copy;
}

PyObject *
kl_call_map(PyObject *object, PyObject *(*item)(void *, PyObject *), void *context)
{
    Py_ssize_t n = PySequence_Fast_GET_SIZE(object);
    PyObject *list = PyList_New(0);
    for (Py_ssize_t i = 0; list != NULL && i < n; i++) {
        kl_py_add(&list, item(context, PySequence_Fast_GET_ITEM(object, i)));
    }
    if (list != NULL && PyTuple_Check(object)) {
        Py_SETREF(list, PyList_AsTuple(list));
    }
    if (list != NULL && !PyList_CheckExact(object) && !PyTuple_CheckExact(object)) {
        Py_SETREF(list, rebuild((PyObject *)Py_TYPE(object), list));
    }
    return list;
}

static PyObject *
real_item(void *Py_UNUSED(context), PyObject *object)
{
    return kl_call_real(object);
}

static PyObject *
real_slice(const PySliceObject *slice)
{
    PyObject *start = kl_call_real(slice->start), *stop = kl_call_real(slice->stop);
    PyObject *step = kl_call_real(slice->step);
    bool is_whole = start != NULL && stop != NULL && step != NULL;
    PyObject *result = is_whole ? PySlice_New(start, stop, step) : NULL;
    KL_DROP(step, stop, start);
    return result;
}

PyObject *
kl_call_real(PyObject *object)
{
    if (!kl_call_holds(object, kl_lazy_check)) {
        return Py_NewRef(object); /* the user's own list, as eager would pass it */
    }
    if (kl_lazy_check(object)) {
        PyObject *real = kl_lazy_number(kl_lazy_value(object));
        if (real == NULL) {
            PyErr_SetString(PyExc_SystemError, "koila: a lazy was not run before it is needed");
        }
        return Py_XNewRef(real);
    }
    return PyDict_Check(object)    ? real_dict(object)
           : PySlice_Check(object) ? real_slice((PySliceObject *)object)
                                   : kl_call_map(object, real_item, NULL);
}
