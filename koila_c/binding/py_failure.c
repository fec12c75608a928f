/* py_failure.c - why a value has no number: what the call that makes it raised. Whoever asks for the value
 * later is told the same again. */
#include "py.h"

void
kl_failure_keep(Tape *tape, KlNodeId id)
{
    PyObject *type = NULL, *value = NULL, *traceback = NULL, *error = NULL;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    /* An interrupt says nothing of the call. The exception itself is not kept: its frames hold tensors. */
    if (value != NULL && PyErr_GivenExceptionMatches(value, PyExc_Exception)) {
        PyObject *args = PyObject_GetAttrString(value, "args");
        PyObject *notes = args != NULL ? PyObject_GetAttrString(value, "__notes__") : NULL;
        PyErr_Clear();
        error = args != NULL ? PyTuple_Pack(3, type, args, notes != NULL ? notes : Py_None) : NULL;
        Py_XDECREF(notes);
        Py_XDECREF(args);
    }
    PyErr_Clear();
    Py_XSETREF(tape->nodes[id].error, error);
    PyErr_Restore(type, value, traceback);
}

void
kl_failure_raise(PyObject *error)
{
    if (error == NULL) {
        PyErr_SetString(kl_py.koila_error,
                        "this tensor has no value: the call that makes it, or one before that, "
                        "raised an exception when it ran");
        return;
    }
    PyObject *type = PyTuple_GET_ITEM(error, 0), *notes = PyTuple_GET_ITEM(error, 2);
    PyObject *args = PyTuple_GET_ITEM(error, 1);
    PyObject *value = PyObject_Call(type, args, NULL);
    if (value == NULL) { /* a class whose __init__ takes something else than it keeps as args */
        PyErr_Clear();
        value = ((PyTypeObject *)type)->tp_new((PyTypeObject *)type, args, NULL);
    }
    if (value != NULL &&
        (notes == Py_None || PyObject_SetAttrString(value, "__notes__", notes) == 0)) {
        PyErr_SetObject((PyObject *)Py_TYPE(value), value);
    }
    Py_XDECREF(value);
}

PyObject *
kl_failure_find(const Tape *tape, KlValueId value)
{
    if (!kl_tape_is_failed(&tape->core, value)) {
        return NULL;
    }
    KlNodeId node = tape->core.values[value].node;
    return tape->nodes[tape->core.nodes[node].failed_by].error;
}

int
kl_failure_tell(const Tape *tape, KlValueId value)
{
    kl_failure_raise(kl_failure_find(tape, value));
    return -1;
}
