/* SPDX-License-Identifier: Apache-2.0 */
/* py_inferred.c - results of inference as Python objects, for infer() and its tests */
#include "py_inferred.h"

#include "py_run.h"

static PyObject *
out_object(const KlMeta *out)
{
    PyObject *strides =
        out->is_strided ? kl_meta_ints(out->strides, out->n_dims) : Py_NewRef(Py_None);
    return Py_BuildValue("(sNNNN)", kl_meta_dtype_name(out->dtype),
                         kl_meta_ints(out->shape, out->n_dims), strides,
                         PyBool_FromLong(out->requires_grad), kl_py_place(&out->place));
}

/* Where entry `entry` of an argument is in the Python call: the position of an argument or the name of a keyword. */
static PyObject *
where_object(const KlPyBound *bound, uint32_t arg, uint32_t entry, Py_ssize_t n_args,
             PyObject *kwargs)
{
    const KlPyOrigin *origin = &bound->origins[arg];
    int32_t position = origin->position + (origin->is_variadic ? (int32_t)entry : 0);
    if (position < n_args) {
        return PyLong_FromLong(position);
    }
    PyObject *names = PySequence_List(kwargs);
    PyObject *where = names == NULL ? NULL : Py_NewRef(PyList_GET_ITEM(names, position - n_args));
    Py_XDECREF(names);
    return where;
}

/* The index within the sequence there, or None. */
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

static int
describe_lists(PyObject *dict, const KlInferred *result, const KlPyBound *bound, Py_ssize_t n_args,
               PyObject *kwargs)
{
    PyObject *outs = PyList_New(0);
    PyObject *places = PyList_New(0);
    PyObject *rewrites = PyList_New(0);
    PyObject *inputs = PyList_New(0);
    for (uint32_t i = 0; outs != NULL && i < result->n_outs; i++) {
        kl_py_add(&outs, out_object(&result->outs[i]));
    }
    for (uint32_t i = 0; places != NULL && inputs != NULL && i < bound->n_inputs; i++) {
        kl_py_add(&places, kl_py_place(&result->split.places[i]));
        kl_py_add(&inputs, input_object(bound, i, &result->split, n_args, kwargs));
    }
    uint32_t n_rewrites = result->split.is_open ? 0 : result->split.n_rewrites;
    for (uint32_t i = 0; rewrites != NULL && i < n_rewrites; i++) {
        kl_py_add(&rewrites, rewrite_object(bound, &result->split.rewrites[i], n_args, kwargs));
    }
    bool is_new = outs != NULL && places != NULL && rewrites != NULL && inputs != NULL;
    bool is_set = is_new && PyDict_SetItemString(dict, "outs", outs) == 0 &&
                  PyDict_SetItemString(dict, "in_places", places) == 0 &&
                  PyDict_SetItemString(dict, "inputs", inputs) == 0 &&
                  PyDict_SetItemString(dict, "rewrites", rewrites) == 0;
    Py_XDECREF(inputs);
    Py_XDECREF(outs);
    Py_XDECREF(places);
    Py_XDECREF(rewrites);
    return is_set ? 0 : -1;
}

int
kl_py_set_new(PyObject *dict, const char *key, PyObject *value)
{
    int status = value == NULL ? -1 : PyDict_SetItemString(dict, key, value);
    Py_XDECREF(value);
    return status;
}

static int
describe_call(PyObject *dict, const KlInferred *result, const KlSaves *saves)
{
    static const char *const modes[] = {"ROWS", "REDUCE", "ONCE"};
    static const char *const aliases[] = {"NONE", "VIEW", "SAME", "MAYBE"};
    KlReduce reduce = result->split.reduce;
    const char *reduced = reduce != KL_REDUCE_NONE ? kl_ops_reductions[reduce].name : NULL;
    PyObject *alias_input = result->alias_input == KL_ID_NONE
                                ? Py_NewRef(Py_None)
                                : PyLong_FromUnsignedLong(result->alias_input);
    if (kl_py_set_new(dict, "mode", PyUnicode_FromString(modes[result->split.mode])) < 0 ||
        kl_py_set_new(dict, "reason", Py_BuildValue("z", result->split.reason)) < 0 ||
        kl_py_set_new(dict, "reduce", Py_BuildValue("z", reduced)) < 0 ||
        kl_py_set_new(dict, "random", PyBool_FromLong(result->is_random)) < 0 ||
        kl_py_set_new(dict, "effects", PyLong_FromUnsignedLong(result->effects)) < 0 ||
        kl_py_set_new(dict, "alias", Py_BuildValue("(sN)", aliases[result->alias], alias_input)) <
            0) {
        return -1;
    }
    return kl_py_set_new(
        dict, "saves",
        Py_BuildValue(
            "{s:K,s:K,s:L,s:N,s:L,s:L,s:L,s:L,s:L}", "inputs", (unsigned long long)saves->inputs,
            "outputs", (unsigned long long)saves->outputs, "bytes_extra",
            (long long)saves->bytes_extra, "is_extra_rows", PyBool_FromLong(saves->is_extra_rows),
            "bytes_fixed", (long long)saves->bytes_fixed, "bytes_workspace",
            (long long)saves->bytes_workspace, "bytes_backward", (long long)saves->bytes_backward,
            "bytes_row", (long long)saves->bytes_row, "bytes_steps",
            (long long)saves->bytes_steps));
}

int
kl_py_describe(PyObject *dict, const KlInferred *result, const KlSaves *saves,
               const KlPyBound *bound, Py_ssize_t n_args, PyObject *kwargs)
{
    if (describe_call(dict, result, saves) < 0) {
        return -1;
    }
    return describe_lists(dict, result, bound, n_args, kwargs);
}
