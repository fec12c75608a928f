/* SPDX-License-Identifier: Apache-2.0 */
/* py_setter.c - lets koila see attributes of tensors that are set to a LazyTensor (`p.grad = lazy`), and calls of
 * custom functions (`Function.apply`). For these torch asks the class of the tensor, not that of the value, or no
 * class at all, and would take the placeholder. So the C function in the structure that CPython keeps for the
 * descriptor is replaced: reading the attribute costs no more, and the descriptor stays the same object, also where
 * a method was taken from it before. */
#include "py.h"

typedef struct Setter {
    PyGetSetDef *def;
    setter original;
    PyObject *put; /* put(tensor, lazy) */
} Setter;

/* More than the number of tensor attributes that take tensors. */
static Setter setters[8];

static int
set_attribute(PyObject *tensor, PyObject *value, void *closure)
{
    Setter *entry = closure;
    if (value == NULL || !kl_lazy_check(value)) {
        return entry->original(tensor, value, NULL);
    }
    return kl_py_done(PyObject_CallFunctionObjArgs(entry->put, tensor, value, NULL));
}

PyObject *
core_set_attribute_by(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *descriptor = NULL, *put = NULL;
    if (!PyArg_ParseTuple(args, "O!O:set_attribute_by", &PyGetSetDescr_Type, &descriptor, &put)) {
        return NULL;
    }
    PyGetSetDef *def = ((PyGetSetDescrObject *)descriptor)->d_getset;
    Setter *entry = def->set == set_attribute ? def->closure : NULL;
    if (entry == NULL && put != Py_None && def->set != NULL && def->closure == NULL) {
        for (size_t i = 0; entry == NULL && i < sizeof(setters) / sizeof(setters[0]); i++) {
            entry = setters[i].def == NULL ? &setters[i] : NULL;
        }
    }
    if (entry == NULL) {
        return Py_NewRef(Py_False);
    }
    if (entry->def == NULL) {
        *entry = (Setter){.def = def, .original = def->set};
    }
    Py_XSETREF(entry->put, put == Py_None ? NULL : Py_NewRef(put));
    def->set = put == Py_None ? entry->original : set_attribute;
    def->closure = put == Py_None ? NULL : entry;
    entry->def = put == Py_None ? NULL : def;
    return Py_NewRef(Py_True);
}

static PyMethodDef called;       /* torch's own class method */
static PyObject *called_instead; /* called_instead(class, args, kwargs) */

static PyObject *
call_with_words(PyObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *words = kwargs != NULL ? kwargs : Py_None;
    return PyObject_CallFunctionObjArgs(called_instead, type, args, words, NULL);
}

static PyObject *
call_without_words(PyObject *type, PyObject *args)
{
    return call_with_words(type, args, NULL);
}

/* There is one such class method. Returns a descriptor of torch's own method. */
PyObject *
core_call_class_method_by(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *descriptor = NULL, *instead = NULL;
    if (!PyArg_ParseTuple(args, "O!O:call_class_method_by", &PyClassMethodDescr_Type, &descriptor,
                          &instead)) {
        return NULL;
    }
    PyMethodDef *def = ((PyMethodDescrObject *)descriptor)->d_method;
    called = called.ml_meth == NULL ? *def : called;
    Py_XSETREF(called_instead, Py_NewRef(instead));
    PyCFunctionWithKeywords with_words = call_with_words;
    PyCFunction own = def->ml_flags & METH_KEYWORDS ? (PyCFunction)(void (*)(void))with_words
                                                    : call_without_words;
    def->ml_meth = instead == Py_None ? called.ml_meth : own;
    return PyDescr_NewClassMethod(PyDescr_TYPE(descriptor), &called);
}
