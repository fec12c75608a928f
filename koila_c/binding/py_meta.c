/* SPDX-License-Identifier: Apache-2.0 */
/* py_meta.c - metadata of real tensors: dtype, sizes and strides, through torch's C ABI */
#include "py_state.h"

#include <string.h>

static int32_t codes[KL_N_DTYPES]; /* torch's number for each dtype */

static inline void *
handle_of(PyObject *tensor)
{
    return (char *)tensor + sizeof(PyObject);
}

KlDtype
kl_meta_dtype_from(PyObject *dtype)
{
    for (int i = 0; i < KL_N_DTYPES; i++) {
        if (kl_py.dtypes[i] == dtype) {
            return (KlDtype)i;
        }
    }
    return KL_DTYPE_OTHER;
}

static int
find_device(PyObject *device)
{
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(kl_py.devices); i++) {
        int is_equal = PyObject_RichCompareBool(PyList_GET_ITEM(kl_py.devices, i), device, Py_EQ);
        if (is_equal != 0) {
            return is_equal < 0 ? -1 : (int)i;
        }
    }
    return -1;
}

/* find_device(), which adds a device that is new; -1 without an exception: there are too many. */
static int
add_device(PyObject *device)
{
    int found = find_device(device);
    Py_ssize_t n = PyList_GET_SIZE(kl_py.devices);
    if (found < 0 && !PyErr_Occurred() && n < UINT8_MAX) {
        found = PyList_Append(kl_py.devices, device) < 0 ? -1 : (int)n;
    }
    return found;
}

int
kl_meta_device_from(PyObject *device)
{
    int found = PyUnicode_Check(device) ? -1 : find_device(device);
    if (found >= 0 || PyErr_Occurred()) {
        return found;
    }
    PyObject *meant = PyObject_CallOneArg(kl_py.device_of, device);
    found = meant != NULL && meant != Py_None ? add_device(meant) : -1;
    Py_XDECREF(meant);
    return found;
}

static KlDtype
dtype_of_code(int32_t code)
{
    for (int i = 0; i < KL_N_DTYPES; i++) {
        if (codes[i] == code) {
            return (KlDtype)i;
        }
    }
    return KL_DTYPE_OTHER;
}

KlDtype
kl_meta_default_dtype(void)
{
    return dtype_of_code(kl_py.lib_default_dtype());
}

int
kl_meta_requires_grad(PyObject *tensor)
{
    if (Py_IS_TYPE(tensor, kl_py.tensor)) {
        return kl_py.lib_requires_grad(kl_meta_impl(tensor));
    }
    return kl_py_truth(PyObject_GetAttr(tensor, kl_py.requires_grad));
}

/* Read dtype, shape and strides. 0; 1: too many dims. */
static int
read_layout(PyObject *tensor, KlMeta *meta)
{
    void *handle = handle_of(tensor);
    int64_t n_dims = 0, *sizes = NULL, *strides = NULL;
    int32_t code = -1;
    if (kl_py.lib_dim(handle, &n_dims) != 0 || kl_py.lib_dtype(handle, &code) != 0 ||
        n_dims > KL_DIMS_MAX) {
        return 1;
    }
    if (n_dims > 0) {
        if (kl_py.lib_sizes(handle, &sizes) != 0 || kl_py.lib_strides(handle, &strides) != 0) {
            return 1;
        }
        memcpy(meta->shape, sizes, (size_t)n_dims * sizeof(int64_t));
        memcpy(meta->strides, strides, (size_t)n_dims * sizeof(int64_t));
    }
    meta->n_dims = (int32_t)n_dims;
    meta->is_strided = true;
    meta->dtype = dtype_of_code(code);
    return 0;
}

int
kl_meta_read_device(PyObject *tensor, KlMeta *meta)
{
    PyObject *device = PyObject_GetAttr(tensor, kl_py.device);
    int found = device != NULL ? add_device(device) : -1;
    meta->device = (uint8_t)found;
    Py_XDECREF(device);
    return found >= 0 ? 0 : PyErr_Occurred() ? -1 : 1;
}

/* Whether a tensor is strided: not sparse, not nested, and no jagged subclass. */
static int
is_strided_layout(PyObject *tensor)
{
    PyObject *layout = PyObject_GetAttr(tensor, kl_py.layout);
    int result = layout == NULL ? -1 : layout == kl_py.strided;
    Py_XDECREF(layout);
    return result;
}

int
kl_meta_read(PyObject *tensor, KlMeta *meta)
{
    memset(meta, 0, sizeof(*meta));
    meta->place = KL_PLACE_WHOLE;
    int is_strided = is_strided_layout(tensor);
    if (is_strided <= 0) {
        return is_strided < 0 ? -1 : 1;
    }
    int result = read_layout(tensor, meta);
    if (result != 0) {
        return result;
    }
    int requires_grad = kl_meta_requires_grad(tensor);
    if (requires_grad < 0) {
        return -1;
    }
    meta->requires_grad = requires_grad != 0;
    return kl_meta_read_device(tensor, meta);
}

int
kl_meta_is_of(PyObject *tensor, const KlMeta *meta, int32_t dim, int64_t size)
{
    KlMeta read;
    int is_strided = is_strided_layout(tensor);
    if (is_strided <= 0) {
        return is_strided;
    }
    int result = read_layout(tensor, &read);
    if (result != 0 || read.n_dims != meta->n_dims) {
        return 0;
    }
    bool is_same = read.dtype == meta->dtype;
    for (int32_t i = 0; is_same && i < meta->n_dims; i++) {
        is_same = read.shape[i] == (i == dim ? size : meta->shape[i]);
    }
    return is_same;
}

PyObject *
kl_meta_ints(const int64_t *ints, int32_t n)
{
    PyObject *tuple = PyTuple_New(n);
    for (int32_t i = 0; tuple != NULL && i < n; i++) {
        kl_py_put(&tuple, i, PyLong_FromLongLong(ints[i]));
    }
    return tuple;
}

bool
kl_meta_may_alias(PyObject *left, PyObject *right)
{
    int may_alias = kl_py_truth(PyObject_CallFunctionObjArgs(kl_py.is_alias_of, left, right, NULL));
    PyErr_Clear();
    return may_alias != 0;
}

PyObject *
kl_meta_size(const KlMeta *meta)
{
    PyObject *tuple = kl_meta_ints(meta->shape, meta->n_dims);
    PyObject *size = tuple != NULL ? PyObject_CallOneArg(kl_py.size_type, tuple) : NULL;
    Py_XDECREF(tuple);
    return size;
}

PyObject *
kl_meta_strides(const KlMeta *meta)
{
    return kl_meta_ints(meta->strides, meta->n_dims);
}

/* Ask torch for its number of each dtype; before that, whether the pointer behind the header of a tensor is its impl. */
static int
read_codes(PyObject *torch)
{
    PyObject *tensor = PyObject_CallMethod(torch, "empty", "(i)", 0);
    PyObject *cdata = tensor != NULL ? PyObject_GetAttrString(tensor, "_cdata") : NULL;
    bool is_read = cdata != NULL && PyLong_AsVoidPtr(cdata) == kl_meta_impl(tensor);
    for (int i = 0; is_read && i < KL_N_DTYPES; i++) {
        PyObject *cast = PyObject_CallMethod(tensor, "to", "O", kl_py.dtypes[i]);
        is_read = cast != NULL && kl_py.lib_dtype(handle_of(cast), &codes[i]) == 0;
        Py_XDECREF(cast);
    }
    kl_py.no_gradient = is_read ? *kl_py.lib_grad(kl_meta_impl(tensor)) : NULL;
    KL_DROP(cdata, tensor);
    return is_read ? 0 : PyErr_Occurred() ? -1 : kl_py_lacks("tensors as koila reads them");
}

int
kl_meta_init(void)
{
    PyObject *torch = PyImport_ImportModule("torch");
    int result = -1;
    if (torch == NULL) {
        return -1;
    }
    for (int i = 0; i < KL_N_DTYPES; i++) {
        kl_py.dtypes[i] = PyObject_GetAttrString(torch, kl_meta_dtype_name((KlDtype)i));
        if (kl_py.dtypes[i] == NULL) {
            goto error;
        }
    }
    kl_py.devices = Py_BuildValue("[N]", PyObject_CallMethod(torch, "device", "s", "cpu"));
    result = kl_py.devices != NULL ? read_codes(torch) : -1;
error:
    Py_DECREF(torch);
    return result;
}

PyObject *
kl_py_place(const KlPlace *place)
{
    if (!kl_place_is_rows(place)) {
        Py_RETURN_NONE;
    }
    return Py_BuildValue("(IiLL)", place->axis, (int)place->dim, (long long)place->outer,
                         (long long)place->inner);
}

void
kl_py_add(PyObject **list, PyObject *item)
{
    if (*list != NULL && (item == NULL || PyList_Append(*list, item) < 0)) {
        Py_CLEAR(*list);
    }
    Py_XDECREF(item);
}

void
kl_py_put(PyObject **tuple, Py_ssize_t i, PyObject *item)
{
    if (item == NULL) {
        Py_CLEAR(*tuple);
    } else {
        PyTuple_SET_ITEM(*tuple, i, item);
    }
}

bool
kl_meta_is_watched(PyObject *type)
{
    bool is_heap = (((PyTypeObject *)type)->tp_flags & Py_TPFLAGS_HEAPTYPE) != 0;
    return is_heap && PyObject_HasAttrString(type, "_koila_own_class");
}

bool
kl_meta_has_own_class(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    if (type == kl_py.tensor || type == kl_py.parameter || type == kl_py.lazy ||
        (type->tp_flags & Py_TPFLAGS_HEAPTYPE) == 0 || kl_meta_is_watched((PyObject *)type)) {
        return false;
    }
    PyObject *function = PyObject_GetAttrString((PyObject *)type, "__torch_function__");
    bool result = function != NULL && function != kl_py.no_function;
    if (!result && PyObject_TypeCheck(object, kl_py.tensor_base)) {
        PyObject *dispatch = PyObject_GetAttrString((PyObject *)type, "__torch_dispatch__");
        result = dispatch != NULL && dispatch != kl_py.no_dispatch;
        Py_XDECREF(dispatch);
    }
    PyErr_Clear();
    Py_XDECREF(function);
    return result;
}
