/* SPDX-License-Identifier: Apache-2.0 */
/* py_dispatch.c - the __torch_function__ that torch finds on a LazyTensor. torch looks it up twice for each call,
 * and its __self__ once, by C strings. The slot tp_getattr, which Python's own look-ups pass by, gets these as they
 * are, before torch makes Python strings of them. */
#include "py_run.h"

#include <structmember.h>

#include <string.h>

typedef struct TorchFunction {
    PyObject_HEAD vectorcallfunc call;
    const char *name;
    PyObject *bound; /* NULL, for None: torch warns if it is a method of the tensor itself */
} TorchFunction;

static PyObject *
TorchFunction_call(PyObject *Py_UNUSED(self), PyObject *const *args, size_t n_flagged,
                   PyObject *names)
{
    if (names != NULL && PyTuple_GET_SIZE(names) > 0) {
        return PyErr_Format(PyExc_TypeError, "__torch_function__ takes no keyword arguments");
    }
    return kl_record_torch_function(args, PyVectorcall_NARGS(n_flagged));
}

static PyObject *
get_other(PyObject *self, const char *name)
{
    PyObject *text = PyUnicode_FromString(name);
    PyObject *result = text != NULL ? PyObject_GetAttr(self, text) : NULL;
    Py_XDECREF(text);
    return result;
}

static PyObject *
TorchFunction_getattr(PyObject *self, char *name)
{
    return strcmp(name, "__self__") == 0 ? Py_NewRef(Py_None) : get_other(self, name);
}

static PyMemberDef members[] = {
    {"__name__", T_STRING, offsetof(TorchFunction, name), READONLY, NULL},
    {"__self__", T_OBJECT, offsetof(TorchFunction, bound), READONLY, NULL},
    {0},
};

static PyTypeObject type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "koila._core.TorchFunction",
    .tp_basicsize = sizeof(TorchFunction),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_vectorcall_offset = offsetof(TorchFunction, call),
    .tp_call = PyVectorcall_Call,
    .tp_getattr = TorchFunction_getattr,
    .tp_getattro = PyObject_GenericGetAttr,
    .tp_members = members,
};

/* LazyTensor's only one. */
static TorchFunction torch_function = {
    PyObject_HEAD_INIT(&type).call = TorchFunction_call,
    .name = "__torch_function__",
};

PyObject *
kl_dispatch_function(void)
{
    return PyType_Ready(&type) < 0 ? NULL : Py_NewRef((PyObject *)&torch_function);
}

static PyObject *
lazy_getattr(PyObject *self, char *name)
{
    return strcmp(name, "__torch_function__") == 0 ? Py_NewRef((PyObject *)&torch_function)
                                                   : get_other(self, name);
}

void
kl_dispatch_install(void)
{
    kl_py.lazy->tp_getattr = lazy_getattr;
}
