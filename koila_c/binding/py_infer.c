/* py_infer.c - infer() and op_table(): the core's rules seen from Python. Made for tests: it reads real
 * tensors through their attributes and keeps nothing between calls. */
#include "py_infer.h"

#include <string.h>

#include "infer.h"

enum { METAS_MAX = 64, AXES_MAX = 16 };

/* Metas of the tensors met while binding; stable until the call is inferred. */
typedef struct {
    KlMeta metas[METAS_MAX];
    uint32_t n_metas;
    KlPyTypes *types;
    PyObject *tensor_type;
} Desk;

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

/* Plain memory and no names for dims. */
static bool
is_plain(PyObject *object)
{
    PyObject *layout = PyObject_GetAttrString(object, "layout");
    PyObject *text = layout == NULL ? NULL : PyObject_Str(layout);
    PyObject *has_names = PyObject_CallMethod(object, "has_names", NULL);
    bool is_strided = text != NULL && PyUnicode_CompareWithASCIIString(text, "torch.strided") == 0;
    bool is_unnamed = has_names == Py_False;
    Py_XDECREF(has_names);
    Py_XDECREF(text);
    Py_XDECREF(layout);
    PyErr_Clear();
    return is_strided && is_unnamed;
}

static bool
read_meta(const Desk *desk, PyObject *object, KlMeta *meta)
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
    }
    for (int i = 0; is_read && i < KL_N_DTYPES; i++) {
        if (dtype == desk->types->dtypes[i]) {
            meta->dtype = (KlDtype)i;
        }
    }
    Py_XDECREF(shape);
    Py_XDECREF(dtype);
    Py_XDECREF(strides);
    PyErr_Clear();
    return is_read;
}

static const KlMeta *
desk_meta_of(void *context, PyObject *object)
{
    Desk *desk = context;
    if (PyObject_IsInstance(object, desk->tensor_type) != 1 || desk->n_metas == METAS_MAX) {
        PyErr_Clear();
        return NULL;
    }
    KlMeta *meta = &desk->metas[desk->n_metas];
    if (!is_plain(object) || !read_meta(desk, object, meta)) {
        return NULL;
    }
    desk->n_metas++;
    return meta;
}

static int
desk_device_of(void *context, PyObject *object)
{
    (void)context;
    PyObject *text = PyObject_Str(object);
    const char *name = text == NULL ? NULL : PyUnicode_AsUTF8(text);
    int device = name != NULL && strcmp(name, "cpu") == 0 ? 0 : -1;
    Py_XDECREF(text);
    PyErr_Clear();
    return device;
}

/* A 1-dim int64 index, or one with further dims of 1, that counts 0, 1, 2, ... */
static bool
desk_is_row_range(void *context, PyObject *object, const KlMeta *meta)
{
    (void)context;
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

/* The places of the inputs, and from them the rows of the axes that `rows` does not give. */
static int
set_places(const KlPyBound *bound, Desk *desk, PyObject *places, int64_t *rows, uint32_t *n_axes)
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
        KlMeta *meta = &desk->metas[bound->inputs[i] - desk->metas];
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

static PyObject *
place_object(const KlPlace *place)
{
    if (!kl_place_is_rows(place)) {
        Py_RETURN_NONE;
    }
    return Py_BuildValue("(IiLL)", place->axis, (int)place->dim, (long long)place->outer,
                         (long long)place->inner);
}

static PyObject *
ints_object(const int64_t *ints, int32_t n)
{
    PyObject *tuple = PyTuple_New(n);
    for (int32_t i = 0; tuple != NULL && i < n; i++) {
        PyObject *item = PyLong_FromLongLong(ints[i]);
        if (item == NULL) {
            Py_CLEAR(tuple);
            break;
        }
        PyTuple_SET_ITEM(tuple, i, item);
    }
    return tuple;
}

static PyObject *
out_object(const KlMeta *out)
{
    PyObject *strides =
        out->is_strided ? ints_object(out->strides, out->n_dims) : Py_NewRef(Py_None);
    return Py_BuildValue("(sNNNN)", kl_meta_dtype_name(out->dtype),
                         ints_object(out->shape, out->n_dims), strides,
                         PyBool_FromLong(out->requires_grad), place_object(&out->place));
}

/* Where entry `entry` of an argument is in the Python call: the number of a positional argument or the
 * name of a keyword. */
static PyObject *
where_object(const KlPyBound *bound, uint32_t arg, uint32_t entry, Py_ssize_t n_args,
             PyObject *kwargs)
{
    const KlPyOrigin *origin = &bound->origins[arg];
    int32_t position = origin->position + (origin->is_spread ? (int32_t)entry : 0);
    if (position < n_args) {
        return PyLong_FromLong(position);
    }
    PyObject *names = PySequence_List(kwargs);
    PyObject *where = names == NULL ? NULL : Py_NewRef(PyList_GET_ITEM(names, position - n_args));
    Py_XDECREF(names);
    return where;
}

/* The item of the sequence there, or None. */
static PyObject *
entry_object(const KlPyBound *bound, uint32_t arg, uint32_t entry)
{
    return bound->origins[arg].is_sequence ? PyLong_FromUnsignedLong(entry) : Py_NewRef(Py_None);
}

/* (where, entry, part, scale); part is None, "start" or "stop" of a slice. */
static PyObject *
rewrite_object(const KlPyBound *bound, const KlRewrite *rewrite, Py_ssize_t n_args,
               PyObject *kwargs)
{
    bool is_index = bound->args[rewrite->arg].kind == KL_ARG_INDEX;
    const char *part = !is_index ? NULL : rewrite->part ? "stop" : "start";
    return Py_BuildValue(
        "(NNzL)", where_object(bound, rewrite->arg, rewrite->entry, n_args, kwargs),
        entry_object(bound, rewrite->arg, rewrite->entry), part, (long long)rewrite->scale);
}

/* (where, entry, whether it counts the rows) */
static PyObject *
input_object(const KlPyBound *bound, uint32_t i, const KlSplit *split, Py_ssize_t n_args,
             PyObject *kwargs)
{
    const KlPyInput *input = &bound->input_origins[i];
    bool is_range = i < 64 && (split->row_ranges >> i & 1) != 0;
    return Py_BuildValue("(NNN)", where_object(bound, input->arg, input->entry, n_args, kwargs),
                         entry_object(bound, input->arg, input->entry), PyBool_FromLong(is_range));
}

/* Build a list of `n` items by calling a maker for each; the maker's NULL is passed on. */
static int
append_new(PyObject *list, PyObject *item)
{
    int status = item == NULL ? -1 : PyList_Append(list, item);
    Py_XDECREF(item);
    return status;
}

static int
set_new(PyObject *dict, const char *key, PyObject *value)
{
    int status = value == NULL ? -1 : PyDict_SetItemString(dict, key, value);
    Py_XDECREF(value);
    return status;
}

static int
describe_lists(PyObject *dict, const KlInferred *result, const KlPyBound *bound, Py_ssize_t n_args,
               PyObject *kwargs)
{
    PyObject *outs = PyList_New(0);
    PyObject *places = PyList_New(0);
    PyObject *rewrites = PyList_New(0);
    PyObject *inputs = PyList_New(0);
    bool is_new = outs != NULL && places != NULL && rewrites != NULL && inputs != NULL;
    int status = is_new ? 0 : -1;
    for (uint32_t i = 0; status == 0 && i < result->n_outs; i++) {
        status = append_new(outs, out_object(&result->outs[i]));
    }
    for (uint32_t i = 0; status == 0 && i < bound->n_inputs; i++) {
        status = append_new(places, place_object(&result->split.places[i]));
    }
    for (uint32_t i = 0; status == 0 && i < bound->n_inputs; i++) {
        status = append_new(inputs, input_object(bound, i, &result->split, n_args, kwargs));
    }
    for (uint32_t i = 0; status == 0 && i < result->split.n_rewrites; i++) {
        status =
            append_new(rewrites, rewrite_object(bound, &result->split.rewrites[i], n_args, kwargs));
    }
    bool is_set = status == 0 && PyDict_SetItemString(dict, "outs", outs) == 0 &&
                  PyDict_SetItemString(dict, "in_places", places) == 0 &&
                  PyDict_SetItemString(dict, "inputs", inputs) == 0 &&
                  PyDict_SetItemString(dict, "rewrites", rewrites) == 0;
    Py_XDECREF(inputs);
    Py_XDECREF(outs);
    Py_XDECREF(places);
    Py_XDECREF(rewrites);
    return is_set ? 0 : -1;
}

static int
describe(PyObject *dict, const KlCall *call, const KlInferred *result)
{
    static const char *const modes[] = {"ROWS", "REDUCE", "ONCE"};
    static const char *const aliases[] = {"NONE", "VIEW", "SAME", "MAYBE"};
    static const char *const reduces[] = {
        [KL_REDUCE_NONE] = NULL,
        [KL_REDUCE_SUM] = "SUM",
        [KL_REDUCE_MEAN] = "MEAN",
        [KL_REDUCE_VAR] = "VAR",
        [KL_REDUCE_AMAX] = "AMAX",
        [KL_REDUCE_LOGSUMEXP] = "LOGSUMEXP",
        [KL_REDUCE_NORM] = "NORM",
        [KL_REDUCE_PROD] = "PROD",
        [KL_REDUCE_ALL] = "ALL",
        [KL_REDUCE_ANY] = "ANY",
        [KL_REDUCE_CROSS_ENTROPY] = "CROSS_ENTROPY",
        [KL_REDUCE_LOSS] = "LOSS",
        [KL_REDUCE_COUNT] = "COUNT",
    };
    KlSaves saves;
    kl_infer_saves(call, result, &saves);
    PyObject *alias_input = result->alias_input == KL_ID_NONE
                                ? Py_NewRef(Py_None)
                                : PyLong_FromUnsignedLong(result->alias_input);
    if (set_new(dict, "mode", PyUnicode_FromString(modes[result->split.mode])) < 0 ||
        set_new(dict, "reason", Py_BuildValue("z", result->split.reason)) < 0 ||
        set_new(dict, "reduce", Py_BuildValue("z", reduces[result->split.reduce])) < 0 ||
        set_new(dict, "random", PyBool_FromLong(result->is_random)) < 0 ||
        set_new(dict, "effects", PyLong_FromUnsignedLong(result->effects)) < 0 ||
        set_new(dict, "alias", Py_BuildValue("(sN)", aliases[result->alias], alias_input)) < 0) {
        return -1;
    }
    return set_new(dict, "saves",
                   Py_BuildValue("{s:K,s:K,s:L,s:N,s:L}", "inputs",
                                 (unsigned long long)saves.inputs, "outputs",
                                 (unsigned long long)saves.outputs, "bytes_extra",
                                 (long long)saves.bytes_extra, "is_extra_rows",
                                 PyBool_FromLong(saves.is_extra_rows), "bytes_workspace",
                                 (long long)saves.bytes_workspace));
}

static const char *
status_name(KlStatus status)
{
    switch (status) {
    case KL_OK:
        return "OK";
    case KL_DECLINED:
        return "DECLINED";
    case KL_ERROR_SHAPE:
        return "ERROR_SHAPE";
    case KL_ERROR_ARGUMENT:
        return "ERROR_ARGUMENT";
    case KL_ERROR_MEMORY:
        return "ERROR_MEMORY";
    case KL_ERROR_INTERNAL:
        break;
    }
    return "ERROR_INTERNAL";
}

/* torch's default dtype and grad mode, as the call finds them. */
static int
set_context(KlCall *call, const Desk *desk)
{
    PyObject *torch = PyImport_ImportModule("torch");
    PyObject *dtype = torch == NULL ? NULL : PyObject_CallMethod(torch, "get_default_dtype", NULL);
    PyObject *grad = dtype == NULL ? NULL : PyObject_CallMethod(torch, "is_grad_enabled", NULL);
    for (int i = 0; i < KL_N_DTYPES; i++) {
        if (dtype == desk->types->dtypes[i]) {
            call->default_dtype = (KlDtype)i;
        }
    }
    call->is_grad_enabled = grad == Py_True;
    int status = grad == NULL ? -1 : 0;
    Py_XDECREF(grad);
    Py_XDECREF(dtype);
    Py_XDECREF(torch);
    return status;
}

static int
infer_into(PyObject *dict, KlCall *call, const KlPyBound *bound, const Desk *desk, PyObject *args,
           PyObject *kwargs)
{
    KlInferred result = {0};
    KlError error = {.text = ""};
    call->args = bound->args;
    call->n_args = bound->n_args;
    call->inputs = (const KlMeta *const *)bound->inputs;
    call->n_inputs = bound->n_inputs;
    int failed = set_context(call, desk);
    if (failed == 0) {
        KlStatus status = kl_infer_call(call, &result, &error);
        failed = set_new(dict, "status", PyUnicode_FromString(status_name(status))) < 0 ||
                         set_new(dict, "text", PyUnicode_FromString(error.text)) < 0
                     ? -1
                     : 0;
        if (failed == 0 && status == KL_OK) {
            failed = describe(dict, call, &result);
        }
        if (failed == 0 && status == KL_OK) {
            failed = describe_lists(dict, &result, bound, PyTuple_GET_SIZE(args), kwargs);
        }
    }
    kl_infer_fini(&result);
    return failed;
}

static PyObject *
infer_bound(const KlRow *row, PyObject *args, PyObject *kwargs, PyObject *places,
            PyObject *rows_given, Desk *desk)
{
    int64_t rows[AXES_MAX];
    uint32_t n_axes = 0;
    KlPyBound bound;
    PyObject *dict = PyDict_New();
    KlPySignature *signature = kl_py_signature_new(row->call);
    kl_py_bound_init(&bound);
    for (int i = 0; i < AXES_MAX; i++) {
        rows[i] = -1;
    }
    if (dict == NULL || signature == NULL) {
        goto error;
    }
    if (rows_given != Py_None) {
        Py_ssize_t n = PySequence_Size(rows_given);
        if (n < 0 || n > AXES_MAX || !read_ints(rows_given, rows, (int32_t)n)) {
            goto error;
        }
        n_axes = (uint32_t)n;
    }
    int status = kl_py_args_bind_dict(&bound, signature, desk->types, args, kwargs);
    if (status < 0) {
        goto error;
    }
    if (status == 0) {
        if (set_new(dict, "status", PyUnicode_FromString("DECLINED")) < 0 ||
            set_new(dict, "text", PyUnicode_FromString("does not bind")) < 0) {
            goto error;
        }
    } else {
        KlCall call = {.row = row, .axis_rows = rows};
        if (set_places(&bound, desk, places, rows, &n_axes) < 0) {
            goto error;
        }
        call.n_axes = n_axes;
        if (infer_into(dict, &call, &bound, desk, args, kwargs) < 0) {
            goto error;
        }
    }
    kl_py_bound_fini(&bound);
    kl_py_signature_free(signature);
    return dict;
error:
    kl_py_bound_fini(&bound);
    kl_py_signature_free(signature);
    Py_XDECREF(dict);
    return NULL;
}

PyObject *
core_infer(PyObject *module, PyObject *args)
{
    const char *name = NULL;
    PyObject *call_args = NULL;
    PyObject *call_kwargs = Py_None;
    PyObject *places = Py_None;
    PyObject *rows = Py_None;
    (void)module;
    if (!PyArg_ParseTuple(args, "sO!|OOO", &name, &PyTuple_Type, &call_args, &call_kwargs, &places,
                          &rows)) {
        return NULL;
    }
    const KlRow *row = kl_ops_find(name);
    if (row == NULL) {
        return PyErr_Format(PyExc_KeyError, "no row for %s", name);
    }
    KlPyTypes types = {0};
    PyObject *torch = PyImport_ImportModule("torch");
    PyObject *tensor_type = torch == NULL ? NULL : PyObject_GetAttrString(torch, "Tensor");
    Py_XDECREF(torch);
    if (tensor_type == NULL || kl_py_types_init(&types) < 0) {
        Py_XDECREF(tensor_type);
        return NULL;
    }
    PyObject *dict = NULL;
    Desk *desk = PyMem_Calloc(1, sizeof(*desk));
    if (desk == NULL) {
        PyErr_NoMemory();
    } else {
        desk->types = &types;
        desk->tensor_type = tensor_type;
        types.context = desk;
        types.meta_of = desk_meta_of;
        types.device_of = desk_device_of;
        types.is_row_range = desk_is_row_range;
        dict = infer_bound(row, call_args, call_kwargs == Py_None ? NULL : call_kwargs, places,
                           rows, desk);
    }
    PyMem_Free(desk);
    kl_py_types_fini(&types);
    Py_DECREF(tensor_type);
    return dict;
}

static PyObject *
row_object(const KlRow *row)
{
    static const char *const kinds[] = {"OP", "VIEW", "INPLACE", "RANDOM"};
    PyObject *names = PyList_New(0);
    const char *alias = NULL;
    const KlRow *target = NULL;
    for (uint32_t i = 0; names != NULL && kl_ops_alias(i, &alias, &target); i++) {
        if (target == row && append_new(names, PyUnicode_FromString(alias)) < 0) {
            Py_CLEAR(names);
        }
    }
    if (names == NULL) {
        return NULL;
    }
    return Py_BuildValue("{s:s,s:s,s:s,s:N,s:N}", "name", row->name, "call", row->call, "kind",
                         kinds[row->kind], "aliases", names, "light",
                         PyBool_FromLong(kl_ops_is_light(row)));
}

PyObject *
core_op_table(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    PyObject *table = PyList_New(0);
    for (uint32_t i = 0; table != NULL && i < kl_ops_n_rows; i++) {
        if (append_new(table, row_object(&kl_ops_rows[i])) < 0) {
            Py_CLEAR(table);
        }
    }
    return table;
}
