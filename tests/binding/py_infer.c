/* SPDX-License-Identifier: Apache-2.0 */
/* py_infer.c - infer(): the core's rules seen from Python. Only a build for tests has it (KL_TESTS). It reads real
 * tensors through their attributes, and keeps nothing between calls. */
#include "py_args.h"

#include <string.h>

#include "alloc.h"
#include "infer.h"
#include "py_inferred.h"
#include "py_run.h"

enum { METAS_MAX = 64, AXES_MAX = 16 };

/* Metas of the tensors met while binding; they stay until the call is inferred. */
typedef struct {
    KlMeta metas[METAS_MAX];
    uint32_t n_metas;
} MetaReader;

static bool
read_ints(PyObject *sequence, int64_t *ints, int32_t n)
{
    PyObject *tuple = PySequence_Tuple(sequence);
    bool is_read = tuple != NULL && PyTuple_GET_SIZE(tuple) == n;
    for (int32_t i = 0; is_read && i < n; i++) {
        ints[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, i));
    }
    Py_XDECREF(tuple);
    return is_read && PyErr_Occurred() == NULL;
}

static bool
read_true(PyObject *object, const char *name)
{
    PyObject *value = PyObject_GetAttrString(object, name);
    int is_true = value == NULL ? -1 : PyObject_IsTrue(value);
    Py_XDECREF(value);
    return is_true == 1;
}

/* A strided tensor: neither sparse nor packed. */
static bool
is_strided(PyObject *object)
{
    PyObject *layout = PyObject_GetAttrString(object, "layout");
    PyObject *text = layout == NULL ? NULL : PyObject_Str(layout);
    bool is_plain = text != NULL && PyUnicode_CompareWithASCIIString(text, "torch.strided") == 0;
    Py_XDECREF(text);
    Py_XDECREF(layout);
    PyErr_Clear();
    return is_plain;
}

static bool
read_meta(PyObject *object, KlMeta *meta)
{
    *meta = (KlMeta){.place = KL_PLACE_WHOLE, .dtype = KL_DTYPE_OTHER};
    PyObject *shape = PyObject_GetAttrString(object, "shape");
    PyObject *dtype = PyObject_GetAttrString(object, "dtype");
    PyObject *strides = PyObject_CallMethod(object, "stride", NULL);
    bool is_read = shape != NULL && dtype != NULL && strides != NULL && PyTuple_Check(shape) &&
                   PyTuple_GET_SIZE(shape) <= KL_DIMS_MAX;
    if (is_read) {
        meta->n_dims = (int32_t)PyTuple_GET_SIZE(shape);
        is_read = read_ints(shape, meta->shape, meta->n_dims) &&
                  read_ints(strides, meta->strides, meta->n_dims);
        meta->is_strided = true;
        meta->requires_grad = read_true(object, "requires_grad");
        is_read = is_read && kl_meta_read_device(object, meta) == 0;
    }
    meta->dtype = is_read ? kl_meta_dtype_from(dtype) : KL_DTYPE_OTHER;
    Py_XDECREF(shape);
    Py_XDECREF(dtype);
    Py_XDECREF(strides);
    PyErr_Clear();
    return is_read;
}

static const KlMeta *
desk_meta_of(void *context, PyObject *object)
{
    MetaReader *reader = context;
    if (PyObject_IsInstance(object, (PyObject *)kl_py.tensor) != 1 ||
        reader->n_metas == METAS_MAX) {
        PyErr_Clear();
        return NULL;
    }
    KlMeta *meta = &reader->metas[reader->n_metas];
    if (!is_strided(object) || !read_meta(object, meta)) {
        return NULL;
    }
    reader->n_metas++;
    return meta;
}

/* Whether an int64 index of one dim (or with further dims of size 1) counts 0, 1, 2, ... */
static bool
desk_is_row_range(void *Py_UNUSED(context), PyObject *object, const KlMeta *meta)
{
    if (meta->dtype != KL_DTYPE_INT64 || meta->n_dims == 0 ||
        meta->shape[0] != kl_meta_n_elements(meta)) {
        return false;
    }
    PyObject *flat = PyObject_CallMethod(object, "flatten", NULL);
    PyObject *list = flat == NULL ? NULL : PyObject_CallMethod(flat, "tolist", NULL);
    bool is_range = list != NULL && PyList_Check(list);
    for (Py_ssize_t i = 0; is_range && i < PyList_GET_SIZE(list); i++) {
        is_range = PyLong_AsLongLong(PyList_GET_ITEM(list, i)) == i;
    }
    Py_XDECREF(flat);
    Py_XDECREF(list);
    PyErr_Clear();
    return is_range;
}

/* Read the places of the inputs, and derive the rows of the axes that `rows` does not give. */
static int
set_places(const KlPyBound *bound, MetaReader *reader, PyObject *places, int64_t *rows,
           uint32_t *n_axes)
{
    if (places == Py_None || places == NULL) {
        return 0;
    }
    PyObject *list = PySequence_Tuple(places);
    if (list == NULL) {
        return -1;
    }
    for (uint32_t i = 0; i < bound->n_inputs && i < (uint32_t)PyTuple_GET_SIZE(list); i++) {
        int64_t place[4] = {0};
        PyObject *given = PyTuple_GET_ITEM(list, (Py_ssize_t)i);
        if (given == Py_None || bound->inputs[i] == NULL) {
            continue;
        }
        KlMeta *meta = &reader->metas[bound->inputs[i] - reader->metas];
        if (!read_ints(given, place, 4) || place[0] < 0 || place[0] >= AXES_MAX || place[1] < 0 ||
            place[1] >= meta->n_dims || place[2] < 1 || place[3] < 1) {
            Py_DECREF(list);
            PyErr_SetString(PyExc_ValueError, "a place is (axis, dim, outer, inner)");
            return -1;
        }
        meta->place = (KlPlace){.axis = (KlAxisId)place[0],
                                .dim = (int32_t)place[1],
                                .outer = place[2],
                                .inner = place[3]};
        if (*n_axes <= (uint32_t)place[0]) {
            *n_axes = (uint32_t)place[0] + 1;
        }
        if (rows[place[0]] < 0) {
            rows[place[0]] = meta->shape[place[1]] / (place[2] * place[3]);
        }
    }
    Py_DECREF(list);
    return 0;
}

static const char *
status_name(KlStatus status)
{
    switch (status) {
    case KL_OK:
        return "OK";
    case KL_DECLINED:
        return "DECLINED";
    case KL_ILLEGAL:
        return "ILLEGAL";
    case KL_ERROR_MEMORY:
        return "ERROR_MEMORY";
    case KL_ERROR_INTERNAL:
        break;
    }
    return "ERROR_INTERNAL";
}

/* torch's default dtype and grad mode at the time of the call. */
static int
set_context(KlCall *call)
{
    PyObject *torch = PyImport_ImportModule("torch");
    PyObject *dtype = torch == NULL ? NULL : PyObject_CallMethod(torch, "get_default_dtype", NULL);
    PyObject *grad = dtype == NULL ? NULL : PyObject_CallMethod(torch, "is_grad_enabled", NULL);
    call->default_dtype = kl_meta_dtype_from(dtype);
    call->blocked_halves = kl_py.blocked_halves, call->tiled_halves = kl_py.tiled_halves;
    call->emulated_halves = kl_py.emulated_halves, call->block_width = kl_py.block_width;
    call->is_flash_allowed = kl_py.is_flash_allowed;
    call->is_grad_enabled = grad == Py_True;
    int status = grad == NULL ? -1 : 0;
    Py_XDECREF(grad);
    Py_XDECREF(dtype);
    Py_XDECREF(torch);
    return status;
}

static int
infer_into(PyObject *dict, KlCall *call, const KlPyBound *bound, PyObject *args, PyObject *kwargs)
{
    KlInferred result = {0};
    KlSaves saves = {0};
    int64_t context = kl_context_now(NULL);
    call->args = bound->args;
    call->n_args = bound->n_args;
    call->inputs = (const KlMeta *const *)bound->inputs;
    call->n_inputs = bound->n_inputs;
    int failed = context < 0 ? -1 : set_context(call);
    if (failed == 0) {
        KlStatus status = kl_context_infer(call, (uint32_t)context, &result, &saves);
        failed = kl_py_set_new(dict, "status", PyUnicode_FromString(status_name(status)));
        if (failed == 0 && status == KL_OK) {
            failed = kl_py_describe(dict, &result, &saves, bound, PyTuple_GET_SIZE(args), kwargs);
        }
    }
    kl_infer_fini(&result);
    return failed;
}

/* Read the words of a row as table.py parses them. 0 or -1. */
static int
read_signature(const KlRow *row, KlPySignature *signature)
{
    PyObject *table = PyImport_ImportModule("koila.basics.table");
    PyObject *parse = table != NULL ? PyObject_GetAttrString(table, "parse") : NULL;
    int result = parse != NULL ? kl_py_signature_read(signature, parse, row) : -1;
    Py_XDECREF(parse);
    Py_XDECREF(table);
    return result;
}

static PyObject *
infer_bound(const KlRow *row, PyObject *args, PyObject *kwargs, PyObject *places,
            PyObject *rows_given, MetaReader *tensors)
{
    const KlPyReader reader = {desk_meta_of, desk_is_row_range, tensors};
    int64_t rows[AXES_MAX];
    uint32_t n_axes = 0;
    KlPyBound bound;
    PyObject *dict = PyDict_New();
    KlPySignature signature = {0};
    kl_py_bound_init(&bound);
    for (int i = 0; i < AXES_MAX; i++) {
        rows[i] = -1;
    }
    if (dict == NULL || read_signature(row, &signature) < 0) {
        goto error;
    }
    if (rows_given != Py_None) {
        Py_ssize_t n = PySequence_Size(rows_given);
        if (n < 0 || n > AXES_MAX || !read_ints(rows_given, rows, (int32_t)n)) {
            goto error;
        }
        n_axes = (uint32_t)n;
    }
    int status = kl_py_args_bind_dict(&bound, &signature, &reader, args, kwargs);
    if (status < 0) {
        goto error;
    }
    if (status == 0) {
        if (kl_py_set_new(dict, "status", PyUnicode_FromString("DECLINED")) < 0 ||
            kl_py_set_new(dict, "text", PyUnicode_FromString("does not bind")) < 0) {
            goto error;
        }
    } else {
        KlCall call = {.row = row, .axis_rows = rows};
        if (set_places(&bound, tensors, places, rows, &n_axes) < 0) {
            goto error;
        }
        call.n_axes = n_axes;
        if (infer_into(dict, &call, &bound, args, kwargs) < 0) {
            goto error;
        }
    }
    kl_py_bound_fini(&bound);
    Py_XDECREF(signature.parsed);
    return dict;
error:
    kl_py_bound_fini(&bound);
    Py_XDECREF(signature.parsed);
    Py_XDECREF(dict);
    return NULL;
}

PyObject *
core_infer(PyObject *Py_UNUSED(module), PyObject *args)
{
    const char *name = NULL;
    PyObject *call_args = NULL;
    PyObject *call_kwargs = Py_None;
    PyObject *places = Py_None;
    PyObject *rows = Py_None;
    if (!PyArg_ParseTuple(args, "sO!|OOO", &name, &PyTuple_Type, &call_args, &call_kwargs, &places,
                          &rows)) {
        return NULL;
    }
    const KlRow *row = kl_ops_find(name);
    if (row == NULL) {
        return PyErr_Format(PyExc_KeyError, "no row for %s", name);
    }
    MetaReader *tensors = kl_alloc_zeroed(1, sizeof(*tensors));
    if (tensors == NULL) {
        return PyErr_NoMemory();
    }
    PyObject *dict = infer_bound(row, call_args, call_kwargs == Py_None ? NULL : call_kwargs,
                                 places, rows, tensors);
    kl_alloc_free(tensors);
    return dict;
}
