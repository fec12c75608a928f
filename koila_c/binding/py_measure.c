/* SPDX-License-Identifier: Apache-2.0 */
/* py_measure.c - asks the core for the bytes of a program, and torch for what only tensors can tell */
#include "py_run.h"

#include "alloc.h"
#include "measure.h"

/* What the core cannot know: the arrays of a KlOutside. */
typedef struct Found {
    bool *is_cut_in_place; /* [n_imports] */
    bool *has_grad;        /* [n_values] */
    PyObject *graphs;      /* list of the tensors that entered with a graph of their own */
} Found;

static int
find_cuts(const Tape *tape, const KlStages *stages, Found *found)
{
    for (size_t i = 0; i < stages->n_imports; i++) {
        const KlImport *import = &stages->imports[i];
        const KlPyValue *value = &tape->values[import->value];
        PyObject *tensor = value->real != NULL ? value->real : value->result;
        KlMeta meta = tape->core.values[import->value].meta;
        meta.is_strided = false; /* strides of a tensor that does not exist yet are not known */
        int result =
            kl_place_is_rows(&import->place) && tensor != NULL ? kl_meta_read(tensor, &meta) : 0;
        if (result < 0) {
            return -1;
        }
        found->is_cut_in_place[i] = !kl_place_is_rows(&import->place) ||
                                    (result == 0 && kl_meta_is_cut_in_place(&meta, &import->place));
    }
    return 0;
}

/* Whether an attribute of a tensor is neither False nor None. */
static int
has(PyObject *tensor, const char *name)
{
    PyObject *value = PyObject_GetAttrString(tensor, name);
    Py_XDECREF(value);
    return value == NULL ? -1 : value != Py_None && value != Py_False;
}

/* Find the gradients and graphs that the leaves to be differentiated have from before. */
static int
find_leaves(const Tape *tape, const KlStages *stages, Found *found)
{
    for (size_t i = 0; i < stages->n_imports; i++) {
        KlValueId id = stages->imports[i].value;
        PyObject *real = tape->values[id].real;
        if (real == NULL || !stages->needs_gradient[id] ||
            !tape->core.values[id].meta.requires_grad || found->has_grad[id]) {
            continue;
        }
        int is_leaf = has(real, "is_leaf");
        int is_there = is_leaf < 0 ? -1 : has(real, is_leaf ? "grad" : "grad_fn");
        if (is_there < 0 || (is_there && !is_leaf && PySet_Add(found->graphs, real) < 0)) {
            return -1;
        }
        found->has_grad[id] = is_there && is_leaf;
    }
    return 0;
}

/* Return an array that Python made, with one item for each node; NULL: it is empty, or not as long, which is raised. */
static const void *
items(PyObject *bytes, const KlStages *stages, size_t size)
{
    size_t n_bytes = (size_t)PyBytes_GET_SIZE(bytes);
    if (n_bytes != 0 && n_bytes != size * stages->n_nodes) {
        PyErr_Format(PyExc_ValueError, "measure: %zu bytes, and %zu nodes", n_bytes,
                     stages->n_nodes);
        return NULL;
    }
    return n_bytes > 0 ? PyBytes_AS_STRING(bytes) : NULL;
}

static double
bytes_of_graphs(PyObject *peak_of, PyObject *graphs)
{
    PyObject *bytes = PyObject_CallOneArg(peak_of, graphs);
    double result = bytes != NULL ? PyFloat_AsDouble(bytes) : -1;
    Py_XDECREF(bytes);
    return result;
}

static PyObject *
measured_object(const KlMeasured *measured)
{
    const KlMoments *moments = &measured->moments;
    return Py_BuildValue("(y#Ld)", moments->n > 0 ? (const char *)moments->moments : "",
                         (Py_ssize_t)(moments->n * sizeof(KlMoment)), (long long)measured->rows,
                         measured->whole);
}

/* measure(program, policy, (is_cloned, bytes_noise, region_of, outer: arrays of KlOutside as bytes), (bytes of a generator's
 * state, of those kept), peak_of, (steps and turns of KlKnown's chunks, of its pieces; are the bytes of a live run
 * known)) -> (moments: KlMoment[] as bytes, rows, bytes of a live run) */
KL_DEFINE(measure, args)
{
    const KlProgram *program = NULL;
    PyObject *cloned = NULL, *noise = NULL, *regions = NULL, *outer = NULL;
    PyObject *peak_of = NULL, *result = NULL;
    KlPolicy policy = {0};
    KlOutside outside = {.known = {.chunks = {1, 1}, .pieces = {1, 1}}};
    KlMeasured measured = {0};
    int is_whole_known = 0;
    KlError error;
    const Tape *tape = kl_tape_open();
    if (tape == NULL ||
        !PyArg_ParseTuple(
            args, "O&O&(SSSS)(LL)O|(ddddp):measure", kl_program_of, &program, kl_schedule_policy,
            &policy, &cloned, &noise, &regions, &outer, &outside.bytes_state, &outside.bytes_drawn,
            &peak_of, &outside.known.chunks.steps, &outside.known.chunks.turns,
            &outside.known.pieces.steps, &outside.known.pieces.turns, &is_whole_known)) {
        return NULL;
    }
    outside.is_whole_known = is_whole_known != 0;
    const KlStages *stages = &program->stages;
    Found found = {.is_cut_in_place = kl_alloc_zeroed(stages->n_imports, sizeof(bool)),
                   .has_grad = kl_alloc_zeroed(stages->n_values, sizeof(bool)),
                   .graphs = PySet_New(NULL)};
    outside.known.is_cut_in_place = found.is_cut_in_place;
    outside.known.has_grad = found.has_grad;
    outside.known.is_cloned = items(cloned, stages, sizeof(bool));
    outside.known.region_of = items(regions, stages, sizeof(uint32_t));
    outside.known.outer = (const void *)PyBytes_AS_STRING(outer);
    outside.known.n_regions = (size_t)PyBytes_GET_SIZE(outer) / sizeof(uint32_t);
    outside.bytes_noise = items(noise, stages, sizeof(int64_t));
    if (found.is_cut_in_place == NULL || found.has_grad == NULL || found.graphs == NULL) {
        (void)PyErr_NoMemory();
        goto error;
    }
    if (PyErr_Occurred() || find_cuts(tape, stages, &found) < 0 ||
        find_leaves(tape, stages, &found) < 0) {
        goto error;
    }
    outside.bytes_graphs = policy.is_graph ? bytes_of_graphs(peak_of, found.graphs) : 0;
    if (!PyErr_Occurred() &&
        kl_measure_step(&tape->core, program, &outside, &policy, &measured, &error) != KL_OK) {
        (void)kl_py_raise(&error);
    }
    result = PyErr_Occurred() ? NULL : measured_object(&measured);
error:
    kl_measure_fini(&measured);
    Py_XDECREF(found.graphs);
    kl_alloc_free(found.has_grad);
    kl_alloc_free(found.is_cut_in_place);
    return result;
}

/* Parse (moments, rows of the batch, rows of a chunk) by `format`: moments as measure() returned them. */
static int
read_measured(PyObject *args, const char *format, KlMeasured *measured, long long *more)
{
    PyObject *moments = NULL;
    long long rows = 0;
    if (!PyArg_ParseTuple(args, format, &moments, &rows, more)) {
        return -1;
    }
    Py_ssize_t n_bytes = PyBytes_GET_SIZE(moments);
    if (n_bytes % (Py_ssize_t)sizeof(KlMoment) != 0) {
        return kl_py_done(PyErr_Format(PyExc_ValueError, "not the moments that measure() gave"));
    }
    measured->moments.moments = (KlMoment *)(void *)PyBytes_AS_STRING(moments);
    measured->moments.n = (size_t)n_bytes / sizeof(KlMoment);
    measured->rows = rows;
    return 0;
}

KL_DEFINE(peak, args)
{
    long long rows = 0;
    KlMeasured measured = {0};
    if (read_measured(args, "SLL:peak", &measured, &rows) < 0) {
        return NULL;
    }
    KlMoment worst = {0};
    double bytes = kl_measure_peak(&measured, rows, &worst);
    return Py_BuildValue("(ddI)", bytes, worst.fixed, worst.node);
}

KL_DEFINE(moments, args)
{
    long long rows = 0;
    KlMeasured measured = {0};
    if (read_measured(args, "SLL:moments", &measured, &rows) < 0) {
        return NULL;
    }
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < measured.moments.n; i++) {
        const KlMoment *moment = &measured.moments.moments[i];
        double gradients, temporary;
        double bytes = kl_measure_at(&measured, moment, rows, &gradients, &temporary);
        PyObject *entry =
            Py_BuildValue("(IIOddd)", moment->step, moment->node,
                          moment->is_back ? Py_True : Py_False, bytes, gradients, temporary);
        kl_py_add(&list, entry);
    }
    return list;
}
