/* SPDX-License-Identifier: Apache-2.0 */
/* py_state.c - what all of the binding shares: its state, and the exceptions of the core's errors */
#include "py_state.h"

KlPyState kl_py;
_Thread_local uint32_t kl_py_region;
_Thread_local bool kl_py_is_in_function;

PyObject *
kl_py_raise(const KlError *error)
{
    switch (error->status) {
    case KL_ERROR_MEMORY:
        PyErr_SetString(PyExc_MemoryError, error->text);
        break;
    case KL_ERROR_SHAPE:
    case KL_ERROR_ARGUMENT:
        PyErr_SetString(PyExc_RuntimeError, error->text);
        break;
    default:
        PyErr_SetString(PyExc_SystemError, error->text);
    }
    return NULL;
}

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
kl_py_look_up(const KlName *names, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        bool is_text = names[i].module == NULL;
        PyObject *module = is_text ? NULL : PyImport_ImportModule(names[i].module);
        *names[i].where = is_text          ? PyUnicode_InternFromString(names[i].name)
                          : module != NULL ? PyObject_GetAttrString(module, names[i].name)
                                           : NULL;
        Py_XDECREF(module);
        if (*names[i].where == NULL) {
            return -1;
        }
    }
    return 0;
}
