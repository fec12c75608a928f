/* SPDX-License-Identifier: Apache-2.0 */
/* py_failure.c - why a value has no number: stores the exception of the call that makes it, and raises it again for
 * whoever asks for the value later */
#include "py_tape.h"

void
kl_failure_keep(Tape *tape, KlNodeId id)
{
    PyObject *type = NULL, *value = NULL, *traceback = NULL, *error = NULL;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    /* An interrupt says nothing about the call. The exception itself is not stored: its frames hold tensors. */
    if (value != NULL && PyErr_GivenExceptionMatches(value, PyExc_Exception)) {
        PyObject *args = PyObject_GetAttrString(value, "args");
        PyObject *notes = args != NULL ? PyObject_GetAttrString(value, "__notes__") : NULL;
        PyErr_Clear();
        error = args != NULL ? PyTuple_Pack(3, type, args, notes != NULL ? notes : Py_None) : NULL;
        KL_DROP(notes, args);
    }
    PyErr_Clear();
    Py_XSETREF(tape->nodes[id].error, error);
    PyErr_Restore(type, value, traceback);
}

/* Add a note that says where the failing call was recorded, since its traceback starts at the replay. */
static void
add_note(Tape *tape, KlNodeId id)
{
    PyObject *type = NULL, *value = NULL, *traceback = NULL;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    PyObject *where = kl_source_where(tape, id);
    PyObject *note = where != NULL ? PyUnicode_FromFormat("koila: recorded at %U", where) : NULL;
    if (note != NULL && value != NULL) {
        (void)kl_py_done(PyObject_CallMethod(value, "add_note", "O", note));
    }
    KL_DROP(note, where);
    PyErr_Restore(type, value, traceback);
}

void
kl_failure_set(Tape *tape, KlNodeId id)
{
    add_note(tape, id);
    kl_failure_keep(tape, id);
    kl_tape_set_failed(&tape->core, id);
}

void
kl_failure_hide_frames(void)
{
    PyObject *type = NULL, *value = NULL, *traceback = NULL;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (traceback != NULL && PyException_SetTraceback(value, traceback) == 0) {
        (void)kl_py_done(PyObject_CallFunctionObjArgs(kl_py.hide_frames, value, NULL));
    }
    PyErr_SetObject(type, value);
    KL_DROP(type, value, traceback);
}

KL_DEFINE(failed, error)
{
    Tape *tape = kl_tape_open_or_null();
    KlNodeId id = tape != NULL ? tape->raised : KL_ID_NONE;
    if (id == KL_ID_NONE || id >= tape->core.n_nodes) {
        return Py_NewRef(Py_False);
    }
    tape->raised = KL_ID_NONE;
    PyErr_SetObject((PyObject *)Py_TYPE(error), error);
    kl_failure_set(tape, id);
    PyErr_Clear();
    kl_tape_abandon(&tape->core, id); /* in eager the error comes before them */
    (void)kl_tape_end(tape, true);
    return Py_NewRef(Py_True);
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
    if (value == NULL) { /* the __init__ of its class takes other arguments than args holds */
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
    bool is_failed = kl_tape_is_failed(&tape->core, value);
    const KlNode *node = is_failed ? &tape->core.nodes[tape->core.values[value].node] : NULL;
    return is_failed ? tape->nodes[node->failed_by].error : NULL;
}
