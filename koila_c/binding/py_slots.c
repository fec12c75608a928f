/* SPDX-License-Identifier: Apache-2.0 */
/* py_slots.c - methods and operators (+ - * / @ and unary minus) of LazyTensor, and torch's Python functions such as
 * F.relu, that go straight to the recorder. Most of the cost of recording a call would be torch's dispatch: parse the
 * arguments, find the class that overrides the call, call that back. koila bypasses it only where it would get here
 * anyway: no torch-function mode is pushed, overriding is not disabled, and a LazyTensor is the first operand to be
 * asked. */
#include "py_run.h"

static bool
is_direct(void)
{
    return kl_py.lib_n_function_modes() == 0 && kl_py.lib_disabled() == 0 &&
           kl_py.n_transforms == 0;
}

/* -- methods ---------------------------------------------------------------------------------------- */

typedef struct LazyMethod {
    PyObject_HEAD vectorcallfunc call;
    PyObject *func;     /* torch's method descriptor */
    Function *function; /* its entry in the table of callables */
} LazyMethod;

static PyObject *
tuple_of(PyObject *const *args, Py_ssize_t n)
{
    PyObject *tuple = PyTuple_New(n);
    for (Py_ssize_t i = 0; tuple != NULL && i < n; i++) {
        PyTuple_SET_ITEM(tuple, i, Py_NewRef(args[i]));
    }
    return tuple;
}

static PyObject *
record(const Function *function, PyObject *func, PyObject *const *args, Py_ssize_t n,
       PyObject *names)
{
    PyObject *result = NULL, *kwargs = NULL;
    PyObject *tuple = tuple_of(args, n);
    if (tuple == NULL) {
        return NULL;
    }
    if (names != NULL && PyTuple_GET_SIZE(names) > 0) {
        kwargs = kl_call_keywords(args + n, names);
    }
    if (kwargs != NULL || !PyErr_Occurred()) {
        const KlPyCall call = kl_function_call(function, func, tuple, kwargs);
        result = kl_record_op(&call);
    }
    Py_XDECREF(kwargs);
    Py_DECREF(tuple);
    return result;
}

static PyObject *
LazyMethod_call(PyObject *self, PyObject *const *args, size_t n_flagged, PyObject *names)
{
    LazyMethod *method = (LazyMethod *)self;
    Py_ssize_t n = PyVectorcall_NARGS(n_flagged);
    if (n == 0 || !kl_lazy_check(args[0]) || !is_direct()) {
        return PyObject_Vectorcall(method->func, args, n_flagged, names);
    }
    return record(method->function, method->func, args, n, names);
}

static PyObject *
LazyMethod_get(PyObject *self, PyObject *object, PyObject *Py_UNUSED(type))
{
    return object == NULL ? Py_NewRef(self) : PyMethod_New(self, object);
}

/* torch's own name, documentation and signature. */
static PyObject *
LazyMethod_getattro(PyObject *self, PyObject *name)
{
    return PyObject_GetAttr(((LazyMethod *)self)->func, name);
}

/* Its instances live as long as the class. */
static PyTypeObject method_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "koila._core.LazyMethod",
    .tp_basicsize = sizeof(LazyMethod),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR |
                Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_vectorcall_offset = offsetof(LazyMethod, call),
    .tp_call = PyVectorcall_Call,
    .tp_descr_get = LazyMethod_get,
    .tp_getattro = LazyMethod_getattro,
};

static int
install_method(PyObject *name, PyObject *func, Function *function)
{
    LazyMethod *method = PyObject_New(LazyMethod, &method_type);
    if (method == NULL) {
        return -1;
    }
    method->call = LazyMethod_call;
    method->func = Py_NewRef(func);
    method->function = (Function *)Py_NewRef(function);
    int result = PyObject_SetAttr((PyObject *)kl_py.lazy, name, (PyObject *)method);
    Py_DECREF(method);
    return result;
}

/* -- operators ---------------------------------------------------------------------------------------- */

typedef enum { ADD, SUBTRACT, MULTIPLY, DIVIDE, MATMUL, NEGATE, N_OPERATORS } Operator;

typedef struct {
    const char *name, *forward, *reflected;
} OperatorNames;

/* Ops by name: the name under which torch dispatches each operator, and its methods on either side. */
static const OperatorNames operator_names[N_OPERATORS] = {
    {"add", "__add__", "__radd__"},          {"sub", "__sub__", "__rsub__"},
    {"mul", "__mul__", "__rmul__"},          {"div", "__truediv__", "__rtruediv__"},
    {"matmul", "__matmul__", "__rmatmul__"}, {"neg", "__neg__", "__neg__"},
};

static struct {
    PyObject *func;
    Function *function;
} operators[N_OPERATORS];

/* A plain tensor, which overrides nothing; or a Parameter, which disables overriding for itself. */
static bool
is_plain(PyObject *object)
{
    return Py_IS_TYPE(object, kl_py.tensor) || Py_IS_TYPE(object, kl_py.parameter);
}

/* What the interpreter does for a class that has no slot of its own. */
static PyObject *
ask_torch(Operator which, PyObject *left, PyObject *right)
{
    return right == NULL ? PyObject_CallMethod(left, operator_names[which].forward, NULL)
           : PyObject_TypeCheck(left, kl_py.tensor_base)
               ? PyObject_CallMethod(left, operator_names[which].forward, "(O)", right)
               : PyObject_CallMethod(right, operator_names[which].reflected, "(O)", left);
}

static PyObject *
operate(Operator which, PyObject *left, PyObject *right)
{
    bool is_number = PyFloat_CheckExact(right) || PyLong_CheckExact(right) || PyBool_Check(right);
    bool is_ours = kl_lazy_check(left) ? kl_lazy_check(right) || is_plain(right) || is_number
                                       : is_plain(left) && kl_lazy_check(right);
    if (!is_ours || !is_direct()) {
        return ask_torch(which, left, right);
    }
    PyObject *args[] = {left, right};
    return record(operators[which].function, operators[which].func, args, 2, NULL);
}

#define OPERATOR(name, which)                                                                      \
    static PyObject *name(PyObject *left, PyObject *right)                                         \
    {                                                                                              \
        return operate(which, left, right);                                                        \
    }
OPERATOR(add, ADD)
OPERATOR(subtract, SUBTRACT)
OPERATOR(multiply, MULTIPLY)
OPERATOR(divide, DIVIDE)
OPERATOR(matmul, MATMUL)
#undef OPERATOR

static PyObject *
negate(PyObject *self)
{
    return is_direct() ? record(operators[NEGATE].function, operators[NEGATE].func, &self, 1, NULL)
                       : ask_torch(NEGATE, self, NULL);
}

static void
install_operators(void)
{
    for (int i = 0; i < N_OPERATORS; i++) {
        PyObject *func = PyObject_GetAttrString((PyObject *)kl_py.tensor, operator_names[i].name);
        Function *function = func != NULL ? kl_function_find(func) : NULL;
        if (function == NULL || function->kind != KL_CALL_OP) {
            Py_XDECREF(func);
            PyErr_Clear();
            return; /* this torch is built otherwise: keep its way */
        }
        operators[i].func = func;
        operators[i].function = function;
    }
    PyNumberMethods *protocol = kl_py.lazy->tp_as_number;
    protocol->nb_add = add;
    protocol->nb_subtract = subtract;
    protocol->nb_multiply = multiply;
    protocol->nb_true_divide = divide;
    protocol->nb_matrix_multiply = matmul;
    protocol->nb_negative = negate;
}

/* -- torch's Python functions ------------------------------------------------------------------------- */

static struct {
    PyObject *own;   /* torch.overrides.handle_torch_function */
    PyObject *types; /* (LazyTensor,) */
} handler;

/* handle_torch_function(function, relevant_args, *args, **kwargs): what torch's Python functions call where a class
 * overrides them. torch's own searches for that class: where lazies are among plain tensors alone, it is theirs. */
static PyObject *
handle(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t n, PyObject *names)
{
    bool is_ours = n >= 2 && PyTuple_Check(args[1]) && is_direct() && kl_function_find(args[0]);
    for (Py_ssize_t i = 0; is_ours && i < PyTuple_GET_SIZE(args[1]); i++) {
        PyObject *one = PyTuple_GET_ITEM(args[1], i);
        is_ours = one == Py_None || is_plain(one) || kl_lazy_check(one);
    }
    if (!is_ours) {
        return PyObject_Vectorcall(handler.own, args, (size_t)n, names);
    }
    PyObject *given = tuple_of(args + 2, n - 2), *kwargs = kl_call_keywords(args + n, names);
    PyObject *const call[] = {args[0], handler.types, given, kwargs};
    PyObject *result = given != NULL && kwargs != NULL ? kl_record_torch_function(call, 4) : NULL;
    if (result == NULL) {
        kl_failure_hide_frames();
    }
    KL_DROP(kwargs, given);
    return result;
}

static PyMethodDef handle_method = {"handle_torch_function", (PyCFunction)(void *)handle,
                                    METH_FASTCALL | METH_KEYWORDS, NULL};

/* Make the function that replaces torch.overrides.handle_torch_function, which is `own`. */
KL_DEFINE(handler, own)
{
    Py_XSETREF(handler.own, Py_NewRef(own));
    Py_XSETREF(handler.types, PyTuple_Pack(1, kl_py.lazy));
    return handler.types != NULL ? PyCFunction_New(&handle_method, NULL) : NULL;
}

/* -- installing --------------------------------------------------------------------------------------- */

/* Install the methods of these names that the table has as ops. */
KL_DEFINE(install_slots, names)
{
    if (!PyTuple_Check(names)) {
        return PyErr_Format(PyExc_TypeError, "install_slots: names is not a tuple");
    }
    if (PyType_Ready(&method_type) < 0) {
        return NULL;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); i++) {
        PyObject *name = PyTuple_GET_ITEM(names, i);
        PyObject *func = PyObject_GetAttr((PyObject *)kl_py.tensor, name);
        Function *function = func != NULL ? kl_function_find(func) : NULL;
        bool is_op = function != NULL && function->kind == KL_CALL_OP &&
                     Py_IS_TYPE(func, &PyMethodDescr_Type);
        int result = is_op ? install_method(name, func, function) : 0;
        Py_XDECREF(func);
        if (func == NULL || result < 0) {
            return NULL;
        }
    }
    install_operators();
    return Py_NewRef(Py_None);
}
