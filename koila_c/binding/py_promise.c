/* SPDX-License-Identifier: Apache-2.0 */
/* py_promise.c - compares what inference promised when a call was recorded with what torch returns when it runs:
 * sizes and dtype of every output in every run, and strides that a meta kernel inferred. A difference is a mistake
 * of koila's and raises, since wrong sizes would lead to wrong numbers. */
#include "py_run.h"

/* The sizes of the value on a chunk of `rows` rows; -1: whole. */
static KlMeta
promised_to(const Tape *tape, KlValueId value, long long rows)
{
    KlMeta meta = tape->core.values[value].meta;
    if (rows >= 0 && kl_place_is_rows(&meta.place)) {
        meta.shape[meta.place.dim] = meta.place.outer * rows * meta.place.inner;
    }
    return meta;
}

int
kl_promise_break(const Tape *tape, KlNodeId id, KlValueId value, PyObject *result, long long rows)
{
    KlMeta promised = promised_to(tape, value, rows);
    kl_py_raise_made(PyObject_CallFunction(
        kl_py.broken_promise, "OONOsON", tape->nodes[id].func, result, kl_meta_size(&promised),
        kl_py_bool(promised.requires_grad), kl_meta_dtype_name(promised.dtype),
        kl_py_bool(rows >= 0), kl_source_where(tape, id)));
    return -1;
}

/* Check that the result of a call without a row has the strides that its meta kernel inferred, since later views
 * and copies were recorded with them. 0, or -1 with an exception if it has others. */
static int
check_strides(const Tape *tape, KlNodeId id, const KlMeta *promised, PyObject *result)
{
    KlMeta read;
    if (tape->core.nodes[id].row != NULL || !promised->is_strided) {
        return 0;
    }
    if (kl_meta_read(result, &read) != 0) {
        return PyErr_Occurred() ? -1 : 0;
    }
    bool is_same = true;
    for (int32_t i = 0; i < read.n_dims; i++) {
        is_same = is_same && (read.shape[i] == 1 || read.strides[i] == promised->strides[i]);
    }
    if (is_same || kl_meta_n_elements(&read) == 0) {
        return 0;
    }
    PyObject *where = kl_source_where(tape, id);
    if (where != NULL) {
        PyErr_Format(
            kl_py.koila_error,
            "%R gave a tensor that lies in memory otherwise than its meta kernel says "
            "(%U): please report it; koila.config(chunks=1) does not help, koila.off() does",
            tape->nodes[id].func, where);
        Py_DECREF(where);
    }
    return -1;
}

int
kl_promise_check(const Tape *tape, KlNodeId id, KlValueId value, PyObject *result, long long rows)
{
    if (!PyObject_TypeCheck(result, kl_py.tensor_base)) {
        return kl_promise_break(tape, id, value, result, rows);
    }
    const KlMeta *promised = &tape->core.values[value].meta;
    if (kl_lazy_check(
            result)) { /* its call is recorded on another tape, and checked when that runs */
        return 0;
    }
    int32_t dim = rows >= 0 && kl_place_is_rows(&promised->place) ? promised->place.dim : -1;
    int64_t size = dim >= 0 ? promised->place.outer * rows * promised->place.inner : 0;
    int is_kept = kl_meta_is_of(result, promised, dim, size);
    return is_kept < 0    ? -1
           : is_kept == 0 ? kl_promise_break(tape, id, value, result, rows)
                          : check_strides(tape, id, promised, result);
}

KL_DEFINE_ON(check_result, tape, args)
{
    unsigned int id = 0, value = 0;
    PyObject *tensor = NULL;
    if (!PyArg_ParseTuple(args, "O&O&O:check_result", kl_tape_node_id, &id, kl_tape_value_id,
                          &value, &tensor) ||
        kl_promise_check(tape, id, value, tensor, -1) < 0) {
        return NULL;
    }
    return Py_NewRef(Py_None);
}
