/* SPDX-License-Identifier: Apache-2.0 */
/* py_failure.c - why a value has no number: stores the exception of the call that makes it, and raises it again for
 * whoever asks for the value later */
#include "py_tape.h"

/* Store the exception in flight for node `id`. `is_noted`: with a note that says where the call was recorded, since the
 * traceback starts at the replay. */
static void
keep(Tape *tape, KlNodeId id, bool is_noted)
{
    PyObject *type = NULL, *value = NULL, *traceback = NULL;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    PyObject *where = is_noted ? kl_source_where(tape, id) : Py_NewRef(Py_None);
    PyObject *kept = PyObject_CallFunction(kl_py.kept_error, "ON", value, where);
    bool is_kept = kept != NULL && kept != Py_None;
    Py_XSETREF(tape->nodes[id].error, is_kept ? Py_NewRef(kept) : NULL);
    Py_XDECREF(kept);
    PyErr_Restore(type, value, traceback);
}

void
kl_failure_keep(Tape *tape, KlNodeId id)
{
    keep(tape, id, false);
}

void
kl_failure_set(Tape *tape, KlNodeId id)
{
    keep(tape, id, true);
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
    kl_py_raise_made(PyObject_CallObject(kl_py.error_again, error));
}

PyObject *
kl_failure_find(const Tape *tape, KlValueId value)
{
    bool is_failed = kl_tape_is_failed(&tape->core, value);
    const KlNode *node = is_failed ? &tape->core.nodes[tape->core.values[value].node] : NULL;
    return is_failed ? tape->nodes[node->failed_by].error : NULL;
}
