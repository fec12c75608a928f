/* SPDX-License-Identifier: Apache-2.0 */
/* py_state.c - what all of the binding shares: its state */
#include "py_state.h"

KlPyState kl_py;
_Thread_local uint32_t kl_py_region;
_Thread_local bool kl_py_is_in_function;

int
kl_py_id(PyObject *object, void *id)
{
    if (!PyLong_Check(object)) {
        PyErr_Format(PyExc_TypeError, "expected a number of a node or a value, got %R", object);
        return 0;
    }
    int overflow = 0;
    long long wide = PyLong_AsLongLongAndOverflow(object, &overflow);
    if (overflow != 0 || wide < 0 || wide >= KL_ID_NONE) {
        PyErr_Format(PyExc_IndexError, "no node and no value has the number %R", object);
        return 0;
    }
    *(unsigned int *)id = (unsigned int)wide;
    return 1;
}

int
kl_py_lacks(const char *what)
{
    PyObject *name = PyUnicode_FromString("torch._C"), *text = PyUnicode_FromString(what);
    if (name != NULL && text != NULL) {
        PyErr_SetImportError(text, name, NULL);
    }
    KL_DROP(name, text);
    return -1;
}

static void
clear_and_free(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    (void)type->tp_clear(object);
    type->tp_free(object);
    Py_DECREF(type);
}

PyTypeObject *
kl_py_new_type(PyObject *module, const char *name, size_t size, void *traverse, void *clear,
               void *dealloc)
{
    PyType_Slot slots[] = {
        {Py_tp_traverse, traverse},
        {Py_tp_clear, clear},
        {Py_tp_dealloc, dealloc != NULL ? dealloc : clear_and_free},
        {0, NULL},
    };
    PyType_Spec spec = {
        .name = name,
        .basicsize = (int)size,
        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
        .slots = slots,
    };
    return (PyTypeObject *)PyType_FromModuleAndSpec(module, &spec, NULL);
}
