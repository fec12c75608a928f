/* SPDX-License-Identifier: Apache-2.0 */
/* py_function.c - the table of torch's callables: a dict from the callable itself to a Function, filled at import */
#include "py_state.h"

static int
Function_traverse(Function *function, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(function));
    Py_VISIT(function->func);
    Py_VISIT(function->handler);
    return 0;
}

static int
Function_clear(Function *function)
{
    Py_CLEAR(function->func);
    Py_CLEAR(function->handler);
    Py_CLEAR(function->name);
    Py_CLEAR(function->container);
    Py_CLEAR(function->signature.parsed);
    return 0;
}

int
kl_function_init(PyObject *module)
{
    kl_py.function_type = kl_py_new_type(module, "koila._core.Function", sizeof(Function),
                                         Function_traverse, Function_clear, NULL);
    kl_py.functions = PyDict_New();
    return kl_py.function_type == NULL || kl_py.functions == NULL ? -1 : 0;
}

/* Attribute access arrives as a method-wrapper that is created for each call; only the descriptor to which it is
 * bound stays the same. The key of a write is a tuple, so that it differs from the key of a read. */
static Function *
find_accessor(PyObject *func)
{
    PyObject *descriptor = PyObject_GetAttrString(func, "__self__");
    PyObject *name = descriptor != NULL ? PyObject_GetAttrString(func, "__name__") : NULL;
    PyObject *found = NULL;
    if (name != NULL && PyUnicode_CompareWithASCIIString(name, "__get__") == 0) {
        found = PyDict_GetItemWithError(kl_py.functions, descriptor);
    } else if (name != NULL) {
        PyObject *key = PyTuple_Pack(2, descriptor, name);
        found = key != NULL ? PyDict_GetItemWithError(kl_py.functions, key) : NULL;
        Py_XDECREF(key);
    }
    Py_XDECREF(name);
    Py_XDECREF(descriptor);
    return (Function *)found;
}

/* Whether a call writes its first argument, by its row or by its name. */
static bool
is_in_place(const Function *function)
{
    Py_ssize_t n = 0;
    const char *name = PyUnicode_AsUTF8AndSize(function->name, &n);
    PyErr_Clear();
    return (function->row != NULL && function->row->kind == KL_ROW_INPLACE) ||
           (name != NULL && n > 1 && name[n - 1] == '_' && name[n - 2] != '_');
}

KlPyCall
kl_function_call(const Function *function, PyObject *func, PyObject *args, PyObject *kwargs)
{
    bool has_kwargs = kwargs != NULL && kwargs != Py_None;
    PyObject *out = has_kwargs ? PyDict_GetItemWithError(kwargs, kl_py.out) : NULL;
    return (KlPyCall){.function = function,
                      .func = func,
                      .args = args,
                      .kwargs = has_kwargs ? kwargs : kl_py.empty_dict,
                      .out = out != Py_None ? out : NULL};
}

PyObject *
kl_function_written(const KlPyCall *call)
{
    bool is_first = call->out == NULL && PyTuple_GET_SIZE(call->args) > 0 &&
                    call->function != NULL && is_in_place(call->function);
    return is_first ? PyTuple_GET_ITEM(call->args, 0) : call->out;
}

Function *
kl_function_find(PyObject *func)
{
    PyObject *found = PyDict_GetItemWithError(kl_py.functions, func);
    if (found == NULL && !PyErr_Occurred() && Py_IS_TYPE(func, kl_py.method_wrapper)) {
        found = (PyObject *)find_accessor(func);
    }
    PyErr_Clear(); /* an unhashable callable has no entry */
    return (Function *)found;
}

KL_DEFINE(register, args)
{
    PyObject *func = NULL, *entry = NULL, *name = NULL, *handler = NULL, *container = NULL;
    const char *row_name = NULL;
    int kind = 0, has_meta = 0, returns_list = 0, is_random = 0;
    if (!PyArg_ParseTuple(args, "OO!:register", &func, &PyTuple_Type, &entry) ||
        !PyArg_ParseTuple(entry, "iUOpppzO:register", &kind, &name, &handler, &has_meta,
                          &returns_list, &is_random, &row_name, &container)) {
        return NULL;
    }
    if (kind < KL_CALL_OP || kind > KL_CALL_HANDLER) {
        return PyErr_Format(PyExc_ValueError, "register: no kind %d of callable", kind);
    }
    const KlRow *row = row_name != NULL ? kl_ops_find(row_name) : NULL;
    if (row_name != NULL && row == NULL) {
        return PyErr_Format(PyExc_KeyError, "register: there is no row %s", row_name);
    }
    Function *function = (Function *)kl_py.function_type->tp_alloc(kl_py.function_type, 0);
    if (function == NULL) {
        return NULL;
    }
    function->kind = (KlCallKind)kind;
    function->func = Py_NewRef(func);
    function->name = Py_NewRef(name);
    function->handler = handler != Py_None ? Py_NewRef(handler) : NULL;
    function->has_meta = has_meta;
    function->returns_list = returns_list;
    function->is_random = is_random;
    function->is_draw_like = PyUnicode_CompareWithASCIIString(name, "rand_like") == 0 ||
                             PyUnicode_CompareWithASCIIString(name, "randn_like") == 0 ||
                             PyUnicode_CompareWithASCIIString(name, "randint_like") == 0;
    function->container = Py_NewRef(container);
    function->row = row;
    int result = row != NULL ? kl_py_signature_read(&function->signature, kl_py.parse, row) : 0;
    PyObject *before = NULL; /* the old entry must live until nothing points to it */
    if (result == 0) {
        before = Py_XNewRef(PyDict_GetItemWithError(kl_py.functions, func));
        result =
            PyErr_Occurred() ? -1 : PyDict_SetItem(kl_py.functions, func, (PyObject *)function);
    }
    Py_XDECREF(before);
    Py_DECREF(function);
    return result < 0 ? NULL : Py_NewRef(Py_None);
}
