/* SPDX-License-Identifier: Apache-2.0 */
/* py_class.c - LazyTensor, the type that users hold
 *
 * It is created by torch's metaclass: a subclass of torch.Tensor with one slot. torch sees an empty placeholder;
 * LazyTensor's own getters answer from metadata, and compute nothing. */
#include "py_run.h"

#include <structmember.h>

/* -- getters: metadata without computing --------------------------------------------------------- */

/* What answers for a LazyTensor: its real tensor, or else its meta. */
typedef struct Answer {
    Value *value;
    PyObject *real;
    const KlMeta *meta;
} Answer;

static bool
look(PyObject *self, Answer *answer)
{
    *answer = (Answer){.value = kl_lazy_checked(self)};
    if (answer->value == NULL) {
        return false;
    }
    answer->real = kl_lazy_real(answer->value);
    if (answer->real == NULL) {
        answer->meta = &answer->value->tape->core.values[answer->value->id].meta;
    }
    return true;
}

/* The attributes that get() knows, as closures of the getters. */
static char SHAPE[] = "shape", DTYPE[] = "dtype", DEVICE[] = "device", NDIM[] = "ndim";

static PyObject *
get(PyObject *self, void *name)
{
    Answer answer;
    if (!look(self, &answer) || answer.real != NULL) {
        return answer.real != NULL ? PyObject_GetAttrString(answer.real, name) : NULL;
    }
    if (name == SHAPE && answer.value->size == NULL) {
        answer.value->size = kl_meta_size(answer.meta);
    }
    return name == SHAPE    ? Py_XNewRef(answer.value->size)
           : name == DTYPE  ? Py_NewRef(kl_py.dtypes[answer.meta->dtype])
           : name == DEVICE ? Py_NewRef(PyList_GET_ITEM(kl_py.devices, answer.meta->device))
                            : PyLong_FromLong(answer.meta->n_dims);
}

static PyObject *
get_requires_grad(PyObject *self, void *closure)
{
    Answer answer;
    if (!look(self, &answer) || answer.real != NULL) {
        return answer.real != NULL ? PyObject_GetAttr(answer.real, kl_py.requires_grad) : NULL;
    }
    /* A write to another view of the same memory may have given it a gradient. */
    KlValueId current = answer.value->id;
    KlTurn turn;
    if (kl_turn_begin(&turn, answer.value->tape) < 0) {
        return NULL;
    }
    bool is_here = answer.value->tape == turn.tape; /* else another thread has run it by now */
    int status = 0;
    if (is_here && !turn.tape->is_running) {
        status = kl_tape_attach(turn.tape, answer.value, &current);
    }
    bool result = is_here && status == 0 && turn.tape->core.values[current].meta.requires_grad;
    kl_turn_end(&turn);
    if (status == 0 && !is_here) {
        return get_requires_grad(self, closure);
    }
    return status < 0 ? NULL : PyBool_FromLong(result);
}

static int
set_requires_grad(PyObject *self, PyObject *flag, void *Py_UNUSED(closure))
{
    Value *value = kl_lazy_checked(self);
    if (value == NULL) {
        return -1;
    }
    if (PyBool_Check(flag)) {
        return kl_py_done(PyObject_CallMethod(self, "requires_grad_", "O", flag));
    }
    PyObject *real = kl_live_force(value); /* torch raises its own error */
    int result = real == NULL ? -1 : PyObject_SetAttrString(real, "requires_grad", flag);
    Py_XDECREF(real);
    return result;
}

static PyObject *
lazy_dim(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    return get(self, NDIM);
}

/* What torch's size(...) returns for a tensor of this shape; raises torch's errors. */
static PyObject *
ask_size(PyObject *shape, PyObject *const *args, Py_ssize_t n_args, PyObject *kwnames)
{
    PyObject *ask = PyObject_CallOneArg(kl_py.size_method, shape);
    PyObject *size = ask != NULL ? PyObject_Vectorcall(ask, args, (size_t)n_args, kwnames) : NULL;
    Py_XDECREF(ask);
    return size;
}

static PyObject *
lazy_size(PyObject *self, PyObject *const *args, Py_ssize_t n_args, PyObject *kwnames)
{
    PyObject *shape = get(self, SHAPE);
    if (shape == NULL || (n_args == 0 && kwnames == NULL)) {
        return shape;
    }
    Py_ssize_t n = PyTuple_GET_SIZE(shape);
    int is_too_large = 1;
    long i = 0;
    if (n_args == 1 && kwnames == NULL && PyLong_CheckExact(args[0])) {
        i = PyLong_AsLongAndOverflow(args[0], &is_too_large);
    }
    PyObject *result = is_too_large == 0 && i >= -n && i < n
                           ? Py_NewRef(PyTuple_GET_ITEM(shape, i < 0 ? i + n : i))
                           : ask_size(shape, args, n_args, kwnames);
    Py_DECREF(shape);
    return result;
}

static PyObject *
lazy_numel(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    Answer answer;
    return !look(self, &answer)  ? NULL
           : answer.real != NULL ? PyObject_CallMethod(answer.real, "numel", NULL)
                                 : PyLong_FromLongLong(kl_meta_n_elements(answer.meta));
}

static PyGetSetDef getsets[] = {
    {SHAPE, get, NULL, "Sizes, a torch.Size; never computes.", SHAPE},
    {DTYPE, get, NULL, "Never computes.", DTYPE},
    {DEVICE, get, NULL, "Never computes.", DEVICE},
    {NDIM, get, NULL, "Never computes.", NDIM},
    {"requires_grad", get_requires_grad, set_requires_grad, "Reading never computes.", NULL},
};

static PyMethodDef methods[] = {
    {"dim", lazy_dim, METH_NOARGS, "Number of dims; never computes."},
    {"ndimension", lazy_dim, METH_NOARGS, "Number of dims; never computes."},
    {"size", (PyCFunction)(void *)lazy_size, METH_FASTCALL | METH_KEYWORDS,
     "Sizes, or the size of one dim; never computes."},
    {"numel", lazy_numel, METH_NOARGS, "Number of elements; never computes."},
    {"nelement", lazy_numel, METH_NOARGS, "Number of elements; never computes."},
};

/* -- the class --------------------------------------------------------------------------------------- */

static PyMethodDef torch_dispatch_def = {
    "__torch_dispatch__", (PyCFunction)(void *)kl_record_torch_dispatch, METH_FASTCALL, NULL};

static int
add_member(PyObject *class, const char *name, PyObject *member)
{
    int result = member == NULL ? -1 : PyObject_SetAttrString(class, name, member);
    Py_XDECREF(member);
    return result;
}

static int
add_members(PyObject *class)
{
    int result = 0;
    for (size_t i = 0; result == 0 && i < sizeof(getsets) / sizeof(getsets[0]); i++) {
        PyObject *member = PyDescr_NewGetSet((PyTypeObject *)class, &getsets[i]);
        result = add_member(class, getsets[i].name, member);
    }
    for (size_t i = 0; result == 0 && i < sizeof(methods) / sizeof(methods[0]); i++) {
        PyObject *member = PyDescr_NewMethod((PyTypeObject *)class, &methods[i]);
        result = add_member(class, methods[i].ml_name, member);
    }
    return result;
}

int
kl_class_init(PyObject *module)
{
    int result = -1;
    /* The class must have both hooks before the metaclass runs, which disables __torch_function__ in a class with
     * __torch_dispatch__ alone. Neither is a descriptor, so that no bound method is created for each call. */
    PyObject *class = PyObject_CallFunction(
        (PyObject *)Py_TYPE(kl_py.tensor), "s(O){s:(s),s:s,s:N,s:N}", "LazyTensor", kl_py.tensor,
        "__slots__", "_node", "__module__", "koila", "__torch_function__", kl_dispatch_function(),
        "__torch_dispatch__", PyCFunction_New(&torch_dispatch_def, module));
    PyObject *member =
        class != NULL && add_members(class) == 0 ? PyObject_GetAttrString(class, "_node") : NULL;
    if (member == NULL) {
        goto error;
    }
    kl_py.slot_offset = ((PyMemberDescrObject *)member)->d_member->offset;
    kl_py.lazy = (PyTypeObject *)Py_NewRef(class);
    kl_dispatch_install();
    result = PyModule_AddObjectRef(module, "LazyTensor", class);
    result = result == 0 ? kl_recycle_init() : result;
error:
    KL_DROP(member, class);
    return result;
}
