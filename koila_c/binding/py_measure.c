/* SPDX-License-Identifier: Apache-2.0 */
/* py_measure.c - asks the core for the bytes of a program, and torch for what only tensors can tell */
#include "py_run.h"

#include "alloc.h"
#include "measure.h"

/* Whether an attribute of a tensor is neither False nor None. */
static int
has(PyObject *tensor, const char *name)
{
    PyObject *value = PyObject_GetAttrString(tensor, name);
    Py_XDECREF(value);
    return value == NULL ? -1 : value != Py_None && value != Py_False;
}

/* Find which imports are cut in place, and the gradients and graphs that the leaves to be differentiated have from
 * before. A tape of a print has no tensors: its leaves lie in memory as they were recorded, and have neither. */
static int
find(const Tape *tape, const KlStages *stages, bool *is_cut_in_place /* [n_imports] */,
     bool *has_grad /* [n_values] */, PyObject *graphs)
{
    for (size_t i = 0; i < stages->n_imports; i++) {
        const KlImport *import = &stages->imports[i];
        const KlPyValue *entry = &tape->values[import->value];
        PyObject *real = entry->real, *tensor = real != NULL ? real : entry->result;
        KlMeta meta = tape->core.values[import->value].meta;
        bool is_rows = kl_place_is_rows(&import->place);
        bool is_wanted = real != NULL && stages->needs_gradient[import->value] &&
                         meta.requires_grad && !has_grad[import->value];
        /* strides of a tensor that does not exist yet are not known */
        meta.is_strided &= tape->core.values[import->value].node == KL_ID_NONE;
        int result = is_rows && tensor != NULL ? kl_meta_read(tensor, &meta) : 0;
        int is_leaf = is_wanted && result >= 0 ? has(real, "is_leaf") : 0;
        int is_there = is_wanted && is_leaf >= 0 ? has(real, is_leaf ? "grad" : "grad_fn") : 0;
        if (result < 0 || is_leaf < 0 || is_there < 0 ||
            (is_there && !is_leaf && PySet_Add(graphs, real) < 0)) {
            return -1;
        }
        is_cut_in_place[i] =
            !is_rows || (result == 0 && kl_meta_is_cut_in_place(&meta, &import->place));
        has_grad[import->value] |= is_there && is_leaf;
    }
    return 0;
}

/* Return an array that Python made, with one item for each node; NULL: it is empty, or not as long, which is raised. */
static const void *
items(PyObject *bytes, const KlStages *stages, size_t size)
{
    size_t n_bytes = (size_t)PyBytes_GET_SIZE(bytes);
    if (n_bytes != 0 && n_bytes != size * stages->n_nodes) {
        PyErr_Format(PyExc_ValueError, "measure: %zu bytes for %zu", n_bytes, stages->n_nodes);
        return NULL;
    }
    return n_bytes > 0 ? PyBytes_AS_STRING(bytes) : NULL;
}

static PyObject *
moments_object(const KlMoments *moments)
{
    const char *bytes = moments->n > 0 ? (const char *)moments->moments : "";
    return PyBytes_FromStringAndSize(bytes, (Py_ssize_t)(moments->n * sizeof(KlMoment)));
}

/* measure(program, policy, (is_cloned, bytes_noise, region_of, outer: arrays of KlOutside as bytes), (bytes of a generator's
 * state, of those kept), peak_of, (steps and turns of KlFacts's chunks, of its pieces; are the bytes of a live run
 * a known whole)) -> (moments: KlMoment[] as bytes, rows, bytes of a live run, the moments that peaks need) */
KL_DEFINE_ON(measure, tape, args)
{
    const KlProgram *program = NULL;
    PyObject *cloned = NULL, *noise = NULL, *regions = NULL, *outer = NULL;
    PyObject *peak_of = NULL, *peak = NULL, *result = NULL;
    KlPolicy policy = {0};
    KlOutside outside = {.facts = {.chunks = {1, 1}, .pieces = {1, 1}}};
    KlMeasured measured = {0};
    int is_whole_known = 0;
    if (!PyArg_ParseTuple(
            args, "O&O&(SSSS)(LL)O|(ddddp):measure", kl_program_of, &program, kl_schedule_policy,
            &policy, &cloned, &noise, &regions, &outer, &outside.bytes_state, &outside.bytes_drawn,
            &peak_of, &outside.facts.chunks.steps, &outside.facts.chunks.turns,
            &outside.facts.pieces.steps, &outside.facts.pieces.turns, &is_whole_known)) {
        return NULL;
    }
    outside.is_whole_known = is_whole_known != 0;
    const KlStages *stages = &program->stages;
    bool *is_cut_in_place = kl_alloc_zeroed(stages->n_imports, sizeof(bool));
    bool *has_grad = kl_alloc_zeroed(stages->n_values, sizeof(bool));
    PyObject *graphs = PySet_New(NULL);
    outside.facts.is_cut_in_place = is_cut_in_place;
    outside.facts.has_grad = has_grad;
    outside.facts.is_cloned = items(cloned, stages, sizeof(bool));
    outside.facts.region_of = items(regions, stages, sizeof(uint32_t));
    outside.facts.outer = (const void *)PyBytes_AS_STRING(outer);
    outside.facts.n_regions = (size_t)PyBytes_GET_SIZE(outer) / sizeof(uint32_t);
    outside.bytes_noise = items(noise, stages, sizeof(int64_t));
    if (is_cut_in_place == NULL || has_grad == NULL || graphs == NULL) {
        (void)PyErr_NoMemory();
    }
    if (PyErr_Occurred() || find(tape, stages, is_cut_in_place, has_grad, graphs) < 0) {
        goto error;
    }
    peak = policy.is_graph ? PyObject_CallOneArg(peak_of, graphs) : PyFloat_FromDouble(0);
    outside.bytes_graphs = peak != NULL ? PyFloat_AsDouble(peak) : -1;
    if (!PyErr_Occurred() &&
        kl_measure_step(&tape->core, program, &outside, &policy, &measured) != KL_OK) {
        (void)PyErr_NoMemory();
    }
    if (!PyErr_Occurred()) {
        PyObject *moments = moments_object(&measured.moments);
        kl_measure_front(&measured);
        result = Py_BuildValue("(NLdN)", moments, (long long)measured.rows, measured.whole,
                               moments_object(&measured.moments));
    }
error:
    kl_measure_fini(&measured);
    KL_DROP(graphs, peak);
    kl_alloc_free(has_grad);
    kl_alloc_free(is_cut_in_place);
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
    return Py_BuildValue("(ddI)", bytes, worst.bytes.fixed, worst.node);
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
        PyObject *entry = Py_BuildValue("(IIOddd)", moment->step, moment->node,
                                        kl_py_bool(moment->is_back), bytes, gradients, temporary);
        kl_py_add(&list, entry);
    }
    return list;
}
