/* SPDX-License-Identifier: Apache-2.0 */
/* py_dispatch.c - the __torch_function__ that torch finds on a LazyTensor. torch looks it up twice for each call,
 * and its __self__ once, by C strings. The slot tp_getattr, which Python's own look-ups pass by, gets these as they
 * are, before torch makes Python strings of them. */
#include "py_run.h"

#include <structmember.h>

#include <string.h>

typedef struct TorchFunction {
    PyObject_HEAD vectorcallfunc call;
    PyObject *bound; /* NULL, for None: torch warns if it is a method of the tensor itself */
} TorchFunction;

static PyObject *torch_function; /* LazyTensor's only one */

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

static PyObject *
get_name(PyObject *Py_UNUSED(self), void *Py_UNUSED(closure))
{
    return PyUnicode_FromString("__torch_function__");
}

static void
TorchFunction_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyGetSetDef getsets[] = {
    {"__name__", get_name, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(TorchFunction, call), READONLY, NULL},
    {"__self__", T_OBJECT, offsetof(TorchFunction, bound), READONLY, NULL},
    {0},
};

static PyType_Slot slots[] = {
    {Py_tp_call, PyVectorcall_Call},
    {Py_tp_getattr, TorchFunction_getattr},
    {Py_tp_getattro, PyObject_GenericGetAttr},
    {Py_tp_dealloc, TorchFunction_dealloc},
    {Py_tp_getset, getsets},
    {Py_tp_members, members},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "koila._core.TorchFunction",
    .basicsize = sizeof(TorchFunction),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = slots,
};

PyObject *
kl_dispatch_function(PyObject *module)
{
    if (torch_function == NULL) {
        PyTypeObject *type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &spec, NULL);
        TorchFunction *made = type != NULL ? (TorchFunction *)type->tp_alloc(type, 0) : NULL;
        Py_XDECREF(type);
        if (made == NULL) {
            return NULL;
        }
        made->call = TorchFunction_call;
        torch_function = (PyObject *)made;
    }
    return Py_NewRef(torch_function);
}

static PyObject *
lazy_getattr(PyObject *self, char *name)
{
    return strcmp(name, "__torch_function__") == 0 ? Py_NewRef(torch_function)
                                                   : get_other(self, name);
}

void
kl_dispatch_install(void)
{
    kl_py.lazy->tp_getattr = lazy_getattr;
}
