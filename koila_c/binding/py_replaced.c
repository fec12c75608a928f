/* SPDX-License-Identifier: Apache-2.0 */
/* py_replaced.c - lets koila see what torch does not dispatch: an attribute of a tensor that is set to a LazyTensor
 * (`p.grad = lazy`), a class method (`Function.apply`), and a method of a plain tensor that writes it (`p.mul_(2)`).
 * The C function in the structure that CPython keeps for the descriptor is replaced. So the descriptor stays the
 * same object, also where a method was taken from it before, and reading an attribute costs no more. */
#include "py_run.h"

typedef struct Replaced {
    const void *definition; /* a PyGetSetDef or PyMethodDef; NULL: the entry is free */
    setter set;             /* torch's own function for the attribute */
    PyMethodDef own;        /* torch's own definition of the method */
    PyObject *by;           /* what is called; NULL: torch's own function is back */
    bool is_before;         /* `by` is called before the method, not in place of it */
} Replaced;

/* More than torch has methods that write a tensor, and attributes that take one. */
#define N_REPLACED 256
static Replaced replaced[N_REPLACED];

static int
set_attribute(PyObject *tensor, PyObject *value, void *closure)
{
    Replaced *entry = closure;
    return value == NULL || !kl_lazy_check(value)
               ? entry->set(tensor, value, NULL)
               : kl_py_done(PyObject_CallFunctionObjArgs(entry->by, tensor, value, NULL));
}

/* Call torch's own function. `args` is what CPython passes: a tuple, one object (METH_O), or NULL. */
static PyObject *
call_own(const PyMethodDef *own, PyObject *self, PyObject *args, PyObject *kwargs)
{
    if (own->ml_flags & METH_KEYWORDS) {
        return ((PyCFunctionWithKeywords)(void (*)(void))own->ml_meth)(self, args, kwargs);
    }
    return own->ml_meth(self, args);
}

/* Whether a write of plain torch may change what pending calls, or parts that were cut off, will read. torch
 * dispatches a call with a LazyTensor in it, and koila's own writes are in order. */
static bool
may_be_read(PyObject *self, PyObject *args, PyObject *kwargs)
{
    const Tape *tape = kl_tape_open_or_null();
    bool is_pending = tape != NULL && tape->core.n_done < tape->core.n_nodes;
    int64_t context = kl_context_now(NULL); /* autocast may keep a cast: kept_casts.py */
    return !kl_tape_is_busy(tape) && kl_py.n_transforms == 0 && context >= 0 &&
           (is_pending || kl_py.n_cut_off > 0 || kl_context_is_autocast((uint32_t)context)) &&
           !kl_lazy_check(self) && (args == NULL || !kl_call_holds(args, kl_lazy_check)) &&
           (kwargs == NULL || !kl_call_holds(kwargs, kl_lazy_check));
}

/* Call what by(tensor) has returned before the write, unless that is None. 0 or -1. */
static int
call_after(PyObject *after)
{
    return after != Py_None ? kl_py_done(PyObject_CallNoArgs(after)) : 0;
}

/* Call by(tensor), then the method, then what `by` has returned. */
static PyObject *
write_after(const Replaced *entry, PyObject *self, PyObject *args, PyObject *kwargs)
{
    PyObject *after = PyObject_CallOneArg(entry->by, self);
    PyObject *result = after != NULL ? call_own(&entry->own, self, args, kwargs) : NULL;
    if (result != NULL && call_after(after) < 0) {
        Py_CLEAR(result);
    }
    Py_XDECREF(after);
    return result;
}

static PyObject *
call_replaced(const Replaced *entry, PyObject *self, PyObject *args, PyObject *kwargs)
{
    if (!entry->is_before) {
        PyObject *words = kwargs != NULL ? kwargs : Py_None;
        return PyObject_CallFunctionObjArgs(entry->by, self, args, words, NULL);
    }
    bool is_own = kl_live_called != NULL && Py_IS_TYPE(kl_live_called, &PyMethodDescr_Type) &&
                  ((PyMethodDescrObject *)kl_live_called)->d_method == entry->definition;
    return !is_own && may_be_read(self, args, kwargs) ? write_after(entry, self, args, kwargs)
                                                      : call_own(&entry->own, self, args, kwargs);
}

/* CPython does not tell a C function which method it is called for. So each entry has functions of its own, by its
 * number in octal digits: one for methods that take no keyword arguments, and one for those that do. */
#define EACH_OF_8(macro, n)                                                                        \
    macro(n##0) macro(n##1) macro(n##2) macro(n##3) macro(n##4) macro(n##5) macro(n##6) macro(n##7)
#define EACH_OF_64(macro, n)                                                                       \
    EACH_OF_8(macro, n##0)                                                                         \
    EACH_OF_8(macro, n##1)                                                                         \
    EACH_OF_8(macro, n##2)                                                                         \
    EACH_OF_8(macro, n##3)                                                                         \
    EACH_OF_8(macro, n##4)                                                                         \
    EACH_OF_8(macro, n##5)                                                                         \
    EACH_OF_8(macro, n##6)                                                                         \
    EACH_OF_8(macro, n##7)
#define EACH(macro)                                                                                \
    EACH_OF_64(macro, 00)                                                                          \
    EACH_OF_64(macro, 01)                                                                          \
    EACH_OF_64(macro, 02)                                                                          \
    EACH_OF_64(macro, 03)
#define DEFINE(n)                                                                                  \
    static PyObject *call_##n(PyObject *self, PyObject *args)                                      \
    {                                                                                              \
        return call_replaced(&replaced[n], self, args, NULL);                                      \
    }                                                                                              \
    static PyObject *call_words_##n(PyObject *self, PyObject *args, PyObject *kwargs)              \
    {                                                                                              \
        return call_replaced(&replaced[n], self, args, kwargs);                                    \
    }
#define ENTRY(n) {call_##n, call_words_##n},

EACH(DEFINE)
static const struct {
    PyCFunction call;
    PyCFunctionWithKeywords call_words;
} functions[N_REPLACED] = {EACH(ENTRY)};

/* The entry of a definition, or a free one; NULL: the table is full. */
static Replaced *
find(const void *definition)
{
    for (size_t i = 0; i < N_REPLACED; i++) {
        const void *of = replaced[i].definition;
        if (of == NULL || of == definition) {
            return &replaced[i];
        }
    }
    return NULL;
}

static void
replace_attribute(Replaced *entry, PyGetSetDef *attribute, bool is_own)
{
    if (entry->definition == NULL) {
        *entry = (Replaced){.definition = attribute, .set = attribute->set};
    }
    attribute->set = is_own ? entry->set : set_attribute;
    attribute->closure = is_own ? NULL : entry;
}

static void
replace_method(Replaced *entry, PyMethodDef *method, bool is_own)
{
    if (entry->definition == NULL) {
        *entry = (Replaced){.definition = method, .own = *method};
    }
    size_t i = (size_t)(entry - replaced);
    PyCFunction instead = method->ml_flags & METH_KEYWORDS
                              ? (PyCFunction)(void (*)(void))functions[i].call_words
                              : functions[i].call;
    method->ml_meth = is_own ? entry->own.ml_meth : instead;
}

/* A new reference to a descriptor that calls torch's own function. */
static PyObject *
own_of(Replaced *entry, PyObject *descriptor)
{
    PyMethodDef *own = &entry->own;
    if (Py_IS_TYPE(descriptor, &PyMethodDescr_Type)) {
        return PyDescr_NewMethod(PyDescr_TYPE(descriptor), own);
    }
    return Py_IS_TYPE(descriptor, &PyClassMethodDescr_Type)
               ? PyDescr_NewClassMethod(PyDescr_TYPE(descriptor), own)
               : Py_NewRef(descriptor);
}

KL_DEFINE(replace, args)
{
    PyObject *descriptor = NULL, *by = NULL;
    int is_before = 0;
    if (!PyArg_ParseTuple(args, "OO|p:replace", &descriptor, &by, &is_before)) {
        return NULL;
    }
    PyGetSetDef *attribute = NULL;
    PyMethodDef *method = NULL;
    bool is_possible = false;
    if (Py_IS_TYPE(descriptor, &PyGetSetDescr_Type)) {
        attribute = ((PyGetSetDescrObject *)descriptor)->d_getset;
        is_possible = attribute->set == set_attribute ||
                      (attribute->set != NULL && attribute->closure == NULL);
    } else if (Py_IS_TYPE(descriptor, &PyMethodDescr_Type) ||
               Py_IS_TYPE(descriptor, &PyClassMethodDescr_Type)) {
        method = ((PyMethodDescrObject *)descriptor)->d_method;
        is_possible = (method->ml_flags & METH_FASTCALL) == 0;
    }
    Replaced *entry = find(attribute != NULL ? (const void *)attribute : (const void *)method);
    bool is_own = by == Py_None;
    if (!is_possible || entry == NULL || (is_own && entry->by == NULL)) {
        return Py_NewRef(Py_None);
    }
    if (attribute != NULL) {
        replace_attribute(entry, attribute, is_own);
    } else {
        replace_method(entry, method, is_own);
    }
    Py_XSETREF(entry->by, is_own ? NULL : Py_NewRef(by));
    entry->is_before = is_before != 0;
    return own_of(entry, descriptor);
}

/* -- tensor[index] = value ----------------------------------------------------------------------- */

static objobjargproc own_set_item; /* torch's own function */
static PyObject *before_set_item;  /* called before it with the tensor; NULL: never */

static int
set_item(PyObject *tensor, PyObject *index, PyObject *value)
{
    bool is_own = kl_live_called != NULL && Py_IS_TYPE(kl_live_called, &PyWrapperDescr_Type);
    if (before_set_item == NULL || value == NULL || is_own || kl_lazy_check(value) ||
        !may_be_read(tensor, index, NULL)) {
        return own_set_item(tensor, index, value);
    }
    PyObject *after = PyObject_CallOneArg(before_set_item, tensor);
    bool is_set = after != NULL && own_set_item(tensor, index, value) == 0;
    int result = is_set ? call_after(after) : -1;
    Py_XDECREF(after);
    return result;
}

/* Give set_item() to a type and those derived from it that have torch's own function. 0 or -1. */
static int
put_set_item(PyTypeObject *type)
{
    PyMappingMethods *methods = type->tp_as_mapping;
    if (methods == NULL || methods->mp_ass_subscript != own_set_item) {
        return 0; /* of a class with a method of its own */
    }
    methods->mp_ass_subscript = set_item;
    PyObject *derived = PyObject_CallMethod((PyObject *)type, "__subclasses__", NULL);
    int result = derived != NULL ? 0 : -1;
    for (Py_ssize_t i = 0; result == 0 && i < PyList_GET_SIZE(derived); i++) {
        result = put_set_item((PyTypeObject *)PyList_GET_ITEM(derived, i));
    }
    Py_XDECREF(derived);
    return result;
}

/* Let a method of tensors call set_item(), and with it types that are made later: CPython takes their function from
 * the method. Returns whether it called torch's own function. */
static bool
put_in_method(const char *name)
{
    PyObject *method = PyDict_GetItemString(kl_py.tensor_base->tp_dict, name);
    PyWrapperDescrObject *wrapper = (PyWrapperDescrObject *)method;
    bool is_own = method != NULL && Py_IS_TYPE(method, &PyWrapperDescr_Type) &&
                  wrapper->d_wrapped == (void *)own_set_item;
    if (is_own) {
        wrapper->d_wrapped = (void *)set_item;
    }
    return is_own;
}

KL_DEFINE(before_set_item, before)
{
    PyMappingMethods *methods = kl_py.tensor_base->tp_as_mapping;
    if (own_set_item == NULL) {
        own_set_item = methods != NULL ? methods->mp_ass_subscript : NULL;
        if (own_set_item == NULL || !put_in_method("__setitem__") ||
            !put_in_method("__delitem__")) {
            return Py_NewRef(Py_False);
        }
        if (put_set_item(kl_py.tensor_base) < 0) {
            return NULL;
        }
    }
    Py_XSETREF(before_set_item, before != Py_None ? Py_NewRef(before) : NULL);
    return Py_NewRef(Py_True);
}
