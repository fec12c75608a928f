/* SPDX-License-Identifier: Apache-2.0 */
/* py_source.c - where in the user's program a call was recorded. Only the code object and the instruction of a
 * frame are kept; they become a file and a line when a message needs them. */
#include "py_state.h"

/* A cache by the identity of a code object's file name: programs have few files. */
#define KL_N_FILES 256

static struct {
    PyObject *name;
    PyObject *shown; /* the file name that the user knows; NULL: not asked for yet */
    bool is_inside;  /* a file of torch's or koila's */
} files[KL_N_FILES];

static PyObject *folders; /* tuple of str: where torch and koila are installed */

int
kl_source_init(PyObject *given)
{
    Py_XSETREF(folders, Py_NewRef(given));
    return 0;
}

static bool
is_inside(PyObject *name)
{
    size_t slot = ((size_t)name >> 4) % KL_N_FILES;
    if (files[slot].name == name) {
        return files[slot].is_inside;
    }
    bool result = false;
    for (Py_ssize_t i = 0; folders != NULL && i < PyTuple_GET_SIZE(folders); i++) {
        PyObject *folder = PyTuple_GET_ITEM(folders, i);
        result =
            result || (PyUnicode_Check(folder) &&
                       PyUnicode_Tailmatch(name, folder, 0, PyUnicode_GET_LENGTH(name), -1) == 1);
    }
    PyErr_Clear();
    Py_XSETREF(files[slot].name, Py_NewRef(name));
    Py_CLEAR(files[slot].shown);
    files[slot].is_inside = result;
    return result;
}

void
kl_source_note(KlPyNode *call)
{
    PyFrameObject *frame = PyEval_GetFrame();
    if (frame == NULL) {
        return;
    }
    Py_INCREF(frame);
    PyCodeObject *code = PyFrame_GetCode(frame);
    while (is_inside(code->co_filename)) {
        PyFrameObject *back = PyFrame_GetBack(frame);
        if (back == NULL) {
            break;
        }
        Py_SETREF(frame, back);
        Py_SETREF(code, PyFrame_GetCode(frame));
    }
    Py_XSETREF(call->code, (PyObject *)code);
    call->lasti = PyFrame_GetLasti(frame);
    Py_DECREF(frame);
}

/* Borrowed: the file name that the user knows; the plain name if that fails. */
static PyObject *
shown(PyObject *name)
{
    (void)is_inside(name);
    size_t slot = ((size_t)name >> 4) % KL_N_FILES;
    if (files[slot].shown == NULL) {
        PyObject *path = PyObject_CallOneArg(kl_py.name_of_file, name);
        if (path == NULL || !PyUnicode_Check(path)) {
            PyErr_Clear();
            Py_XDECREF(path);
            return name;
        }
        files[slot].shown = path;
    }
    return files[slot].shown;
}

PyObject *
kl_source_where(const Tape *tape, KlNodeId id)
{
    const KlPyNode *node = &tape->nodes[id];
    if (node->code == NULL) {
        return PyUnicode_FromFormat("call %u", id);
    }
    PyCodeObject *code = (PyCodeObject *)node->code;
    int line = PyCode_Addr2Line(code, node->lasti);
    return PyUnicode_FromFormat("call %u, %U:%d", id, shown(code->co_filename), line);
}
