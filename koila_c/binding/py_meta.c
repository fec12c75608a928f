/* SPDX-License-Identifier: Apache-2.0 */
/* py_meta.c - metadata of real tensors: dtype, sizes and strides, through torch's C ABI if a self-test at import
 * shows that it works, else through attributes */
#include "py_state.h"

#include <dlfcn.h>
#include <string.h>

/* A pointer to the pointer to a tensor's impl is what the C ABI calls a handle. */
typedef int32_t (*GetInt)(void *handle, int64_t *out);
typedef int32_t (*GetInts)(void *handle, int64_t **out);
typedef int32_t (*GetInt32)(void *handle, int32_t *out);

static struct {
    GetInt dim;
    GetInts sizes, strides;
    GetInt32 dtype;
    bool (*requires_grad)(const void *impl); /* c10::TensorImpl's; NULL: ask the attribute */
    int8_t (*default_dtype)(void);           /* c10's; NULL: ask torch.get_default_dtype */
    bool has_impl;              /* a self-test found that kl_meta_impl() returns the impl */
    bool handle_works;          /* and that the functions above can read it */
    int32_t codes[KL_N_DTYPES]; /* torch's number for each dtype */
} abi;

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
        if (abi.codes[i] == code) {
            return (KlDtype)i;
        }
    }
    return KL_DTYPE_OTHER;
}

KlDtype
kl_meta_default_dtype(void)
{
    if (abi.handle_works && abi.default_dtype != NULL) {
        return dtype_of_code(abi.default_dtype());
    }
    PyObject *dtype = PyObject_CallNoArgs(kl_py.get_default_dtype);
    KlDtype result = dtype != NULL ? kl_meta_dtype_from(dtype) : KL_DTYPE_FLOAT32;
    Py_XDECREF(dtype);
    return result;
}

bool
kl_meta_has_impl(void)
{
    return abi.has_impl;
}

bool
kl_meta_by_handle(void)
{
    return abi.handle_works;
}

int
kl_meta_requires_grad(PyObject *tensor)
{
    if (abi.handle_works && abi.requires_grad != NULL && Py_IS_TYPE(tensor, kl_py.tensor)) {
        return abi.requires_grad(kl_meta_impl(tensor));
    }
    return kl_py_truth(PyObject_GetAttr(tensor, kl_py.requires_grad));
}

static int
read_ints(PyObject *tuple, int64_t *out, int32_t n)
{
    if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) != n) {
        return kl_py_done(PyErr_Format(PyExc_RuntimeError,
                                       "koila: a tensor's sizes are not a tuple of its dims"));
    }
    for (int32_t i = 0; i < n; i++) {
        out[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, i));
        if (out[i] == -1 && PyErr_Occurred()) {
            return -1;
        }
    }
    return 0;
}

static int
read_by_attribute(PyObject *tensor, KlMeta *meta)
{
    PyObject *dtype = PyObject_GetAttrString(tensor, "dtype");
    PyObject *shape = dtype != NULL ? PyObject_GetAttrString(tensor, "shape") : NULL;
    PyObject *strides = NULL;
    int result = -1;
    if (shape == NULL) {
        goto error;
    }
    if (PyTuple_GET_SIZE(shape) > KL_DIMS_MAX) {
        result = 1;
        goto error;
    }
    meta->dtype = kl_meta_dtype_from(dtype);
    meta->n_dims = (int32_t)PyTuple_GET_SIZE(shape);
    strides = PyObject_CallMethod(tensor, "stride", NULL);
    if (strides == NULL || read_ints(shape, meta->shape, meta->n_dims) < 0 ||
        read_ints(strides, meta->strides, meta->n_dims) < 0) {
        goto error;
    }
    meta->is_strided = true;
    result = 0;
error:
    KL_DROP(strides, shape, dtype);
    return result;
}

static int
read_by_handle(PyObject *tensor, KlMeta *meta)
{
    void *handle = handle_of(tensor);
    int64_t n_dims = 0, *sizes = NULL, *strides = NULL;
    int32_t code = -1;
    if (abi.dim(handle, &n_dims) != 0 || abi.dtype(handle, &code) != 0 || n_dims > KL_DIMS_MAX) {
        return 1;
    }
    if (n_dims > 0) {
        if (abi.sizes(handle, &sizes) != 0 || abi.strides(handle, &strides) != 0) {
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

/* Read dtype, shape and strides. 0; 1: too many dims; -1: exception. */
static int
read_layout(PyObject *tensor, KlMeta *meta)
{
    return abi.handle_works ? read_by_handle(tensor, meta) : read_by_attribute(tensor, meta);
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
        return result < 0 ? -1 : 0;
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

/* Whether a handle and the attributes of one tensor agree. */
static int
handle_self_test(PyObject *torch)
{
    for (int i = 0; i < KL_N_DTYPES; i++) {
        PyObject *whole = PyObject_CallMethod(torch, "empty", "(ii)", 3, 5);
        PyObject *cast = whole ? PyObject_CallMethod(whole, "to", "O", kl_py.dtypes[i]) : NULL;
        PyObject *tensor = cast ? PyObject_CallMethod(cast, "t", NULL) : NULL;
        KL_DROP(whole, cast);
        if (tensor == NULL) {
            return -1;
        }
        int32_t code = -1;
        KlMeta by_handle = {0}, by_attribute = {0};
        bool is_same = abi.dtype(handle_of(tensor), &code) == 0;
        abi.codes[i] = code;
        is_same = is_same && read_by_handle(tensor, &by_handle) == 0 &&
                  read_by_attribute(tensor, &by_attribute) == 0 && by_handle.n_dims == 2 &&
                  memcmp(&by_handle, &by_attribute, sizeof(KlMeta)) == 0;
        Py_DECREF(tensor);
        if (PyErr_Occurred()) {
            return -1;
        }
        if (!is_same) {
            return 0;
        }
    }
    return 1;
}

/* If the impl and the attribute disagree about requires_grad, the attribute is used. */
static int
gradient_self_test(PyObject *tensor)
{
    for (int wanted = 0; wanted < 2 && abi.requires_grad != NULL; wanted++) {
        PyObject *flag = kl_py_bool(wanted);
        if (kl_py_done(PyObject_CallMethod(tensor, "requires_grad_", "O", flag)) < 0) {
            return -1;
        }
        if (abi.requires_grad(kl_meta_impl(tensor)) != wanted) {
            abi.requires_grad = NULL;
        }
    }
    return 0;
}

/* Whether the impl pointer behind the header is the tensor's _cdata. */
static int
layout_self_test(PyObject *torch)
{
    PyObject *tensor = PyObject_CallMethod(torch, "empty", "(i)", 1);
    PyObject *cdata = tensor ? PyObject_GetAttrString(tensor, "_cdata") : NULL;
    int result = -1;
    if (cdata != NULL) {
        result = PyLong_AsVoidPtr(cdata) == kl_meta_impl(tensor);
        if (result == 1 && gradient_self_test(tensor) < 0) {
            result = -1;
        }
    }
    KL_DROP(cdata, tensor);
    return result;
}

void *
kl_meta_symbol(const char *name)
{
    void *library = dlopen("libtorch_cpu.so", RTLD_NOLOAD | RTLD_LAZY);
    if (library == NULL) {
        return NULL;
    }
    void *symbol = dlsym(library, name);
    (void)dlclose(library); /* torch stays loaded, so the symbols stay valid */
    return symbol;
}

static int
load_abi(PyObject *torch)
{
    *(void **)&abi.dim = kl_meta_symbol("aoti_torch_get_dim");
    *(void **)&abi.sizes = kl_meta_symbol("aoti_torch_get_sizes");
    *(void **)&abi.strides = kl_meta_symbol("aoti_torch_get_strides");
    *(void **)&abi.dtype = kl_meta_symbol("aoti_torch_get_dtype");
    *(void **)&abi.requires_grad = kl_meta_symbol("_ZNK3c1010TensorImpl13requires_gradEv");
    *(void **)&abi.default_dtype = kl_meta_symbol("_ZN3c1031get_default_dtype_as_scalartypeEv");
    bool is_there =
        abi.dim != NULL && abi.sizes != NULL && abi.strides != NULL && abi.dtype != NULL;
    int works = layout_self_test(torch);
    abi.has_impl = works == 1;
    works = abi.has_impl && is_there ? handle_self_test(torch) : works;
    abi.handle_works = is_there && works == 1;
    return works < 0 ? -1 : 0;
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
    result = kl_py.devices != NULL ? load_abi(torch) : -1;
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
