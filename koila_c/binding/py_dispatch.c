/* SPDX-License-Identifier: Apache-2.0 */
/* py_dispatch.c - the __torch_function__ that torch finds on a LazyTensor. torch looks it up twice for each call,
 * and its __self__ once, by strings that it creates anew and no cache knows, so that each dict of the class
 * hierarchy is searched. Here both are answered before any search. */
#include "py_run.h"

#include <structmember.h>

#include <string.h>

typedef struct TorchFunction {
    PyObject_HEAD vectorcallfunc call;
} TorchFunction;

static PyObject *torch_function; /* LazyTensor's only one */

static bool
is_named(PyObject *name, const char *text, Py_ssize_t n)
{
    return PyUnicode_GET_LENGTH(name) == n && PyUnicode_IS_ASCII(name) &&
           memcmp(PyUnicode_1BYTE_DATA(name), text, (size_t)n) == 0;
}

static PyObject *
TorchFunction_call(PyObject *Py_UNUSED(self), PyObject *const *args, size_t n_flagged,
                   PyObject *names)
{
    if (names != NULL && PyTuple_GET_SIZE(names) > 0) {
        return PyErr_Format(PyExc_TypeError, "__torch_function__ takes no keyword arguments");
    }
    return kl_record_torch_function(args, PyVectorcall_NARGS(n_flagged));
}

/* It is bound to nothing: torch warns if it is a method of the tensor itself. */
static PyObject *
TorchFunction_getattro(PyObject *self, PyObject *name)
{
    return is_named(name, "__self__", 8) ? Py_NewRef(Py_None) : PyObject_GenericGetAttr(self, name);
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
    {0},
};

static PyType_Slot slots[] = {
    {Py_tp_call, PyVectorcall_Call},
    {Py_tp_getattro, TorchFunction_getattro},
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
lazy_getattro(PyObject *self, PyObject *name)
{
    if (is_named(name, "__torch_function__", 18)) {
        return Py_NewRef(torch_function);
    }
    return PyObject_GenericGetAttr(self, name);
}

void
kl_dispatch_install(void)
{
    if (kl_py.lazy->tp_getattro == PyObject_GenericGetAttr) {
        kl_py.lazy->tp_getattro = lazy_getattro;
    }
}
