/* SPDX-License-Identifier: Apache-2.0 */
/* py_measure.c - asks the core for the bytes of a program, and torch for what only tensors can tell */
#include "py.h"

#include "alloc.h"
#include "measure.h"

/* What the core cannot know: the arrays of a KlOutside. */
typedef struct Found {
    bool *is_cut_in_place; /* [n_imports] */
    bool *has_grad;        /* [n_values] */
    bool *is_cloned;       /* [n_nodes] */
    int64_t *bytes_noise;  /* [n_nodes] */
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

static int
find_noise(const Tape *tape, const KlStages *stages, PyObject *noise_of, Found *found)
{
    for (size_t i = 0; i < stages->n_nodes; i++) {
        const KlNode *node = &tape->core.nodes[i];
        bool is_staged = stages->node_stage[i] != KL_STAGE_NONE;
        if (!node->is_random || !is_staged || !kl_stage_is_body(stages->node_stage[i])) {
            continue;
        }
        PyObject *bytes = PyObject_CallFunction(noise_of, "nI", (Py_ssize_t)i, node->first_out);
        found->bytes_noise[i] = bytes != NULL ? PyLong_AsLongLong(bytes) : -1;
        Py_XDECREF(bytes);
        if (PyErr_Occurred()) {
            return -1;
        }
    }
    return 0;
}

static int
find_cloned(PyObject *cloned, const KlStages *stages, Found *found)
{
    PyObject *iterator = PyObject_GetIter(cloned), *item = NULL;
    while (iterator != NULL && (item = PyIter_Next(iterator)) != NULL) {
        unsigned int id = 0;
        int is_id = kl_py_id(item, &id);
        Py_DECREF(item);
        if (is_id && id < stages->n_nodes) {
            found->is_cloned[id] = true;
        } else if (is_id) {
            PyErr_Format(PyExc_IndexError, "measure: there is no node %u", id);
        }
        if (PyErr_Occurred()) {
            break;
        }
    }
    Py_XDECREF(iterator);
    return PyErr_Occurred() ? -1 : 0;
}

static double
bytes_of_graphs(PyObject *peak_of, PyObject *graphs)
{
    PyObject *bytes =
        PySet_GET_SIZE(graphs) > 0 ? PyObject_CallOneArg(peak_of, graphs) : PyFloat_FromDouble(0);
    double result = bytes != NULL ? PyFloat_AsDouble(bytes) : -1;
    Py_XDECREF(bytes);
    return result;
}

static PyObject *
told(const KlMeasured *measured)
{
    const KlMoments *moments = &measured->moments;
    return Py_BuildValue("(y#Ld)", moments->n > 0 ? (const char *)moments->moments : "",
                         (Py_ssize_t)(moments->n * sizeof(KlMoment)), (long long)measured->rows,
                         measured->whole);
}

/* measure(program, homes, cloned, (bytes of a generator's state, of those kept), noise_of, peak_of, (KlKnown's steps,
 * turns)) -> (moments: KlMoment[] as bytes, rows, bytes of a live run) */
PyObject *
kl_measure_program(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *handle = NULL, *cloned = NULL, *noise_of = NULL, *peak_of = NULL, *result = NULL;
    KlHomes homes = {0};
    long long bytes_state = 0, bytes_drawn = 0;
    double steps = 1, turns = 1;
    KlMeasured measured = {0};
    KlError error;
    const Tape *tape = kl_tape_open();
    if (tape == NULL || !PyArg_ParseTuple(args, "OO&O(LL)OO|(dd):measure", &handle,
                                          kl_schedule_homes, &homes, &cloned, &bytes_state,
                                          &bytes_drawn, &noise_of, &peak_of, &steps, &turns)) {
        return NULL;
    }
    const KlProgram *program = kl_program_of(handle, tape);
    if (program == NULL) {
        return NULL;
    }
    const KlStages *stages = &program->stages;
    Found found = {.is_cut_in_place = kl_alloc_zeroed(stages->n_imports, sizeof(bool)),
                   .has_grad = kl_alloc_zeroed(stages->n_values, sizeof(bool)),
                   .is_cloned = kl_alloc_zeroed(stages->n_nodes, sizeof(bool)),
                   .bytes_noise = kl_alloc_zeroed(stages->n_nodes, sizeof(int64_t)),
                   .graphs = PySet_New(NULL)};
    if (found.is_cut_in_place == NULL || found.has_grad == NULL || found.is_cloned == NULL ||
        found.bytes_noise == NULL || found.graphs == NULL) {
        (void)PyErr_NoMemory();
        goto error;
    }
    if (find_cuts(tape, stages, &found) < 0 || find_leaves(tape, stages, &found) < 0 ||
        find_noise(tape, stages, noise_of, &found) < 0 || find_cloned(cloned, stages, &found) < 0) {
        goto error;
    }
    double bytes_graphs = homes.is_graph ? bytes_of_graphs(peak_of, found.graphs) : 0;
    const KlOutside outside = {.known = {.is_cut_in_place = found.is_cut_in_place,
                                         .has_grad = found.has_grad,
                                         .is_cloned = found.is_cloned,
                                         .steps = steps,
                                         .turns = turns},
                               .bytes_state = bytes_state,
                               .bytes_drawn = bytes_drawn,
                               .bytes_noise = found.bytes_noise,
                               .bytes_graphs = bytes_graphs};
    if (!PyErr_Occurred() &&
        kl_measure_step(&tape->core, program, &outside, &homes, &measured, &error) != KL_OK) {
        (void)kl_py_raise(&error);
    }
    result = PyErr_Occurred() ? NULL : told(&measured);
error:
    kl_measure_fini(&measured);
    Py_XDECREF(found.graphs);
    kl_alloc_free(found.bytes_noise);
    kl_alloc_free(found.is_cloned);
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
        PyErr_SetString(PyExc_ValueError, "not the moments that measure() gave");
        return -1;
    }
    measured->moments.moments = (KlMoment *)(void *)PyBytes_AS_STRING(moments);
    measured->moments.n = (size_t)n_bytes / sizeof(KlMoment);
    measured->rows = rows;
    return 0;
}

PyObject *
kl_measure_peak_of(PyObject *Py_UNUSED(module), PyObject *args)
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

PyObject *
kl_measure_moments_of(PyObject *Py_UNUSED(module), PyObject *args)
{
    long long rows = 0;
    KlMeasured measured = {0};
    if (read_measured(args, "SLL:moments", &measured, &rows) < 0) {
        return NULL;
    }
    PyObject *list = PyList_New((Py_ssize_t)measured.moments.n);
    for (size_t i = 0; list != NULL && i < measured.moments.n; i++) {
        const KlMoment *moment = &measured.moments.moments[i];
        double gradients, temporary;
        double bytes = kl_measure_at(&measured, moment, rows, &gradients, &temporary);
        PyObject *entry =
            Py_BuildValue("(IIOddd)", moment->step, moment->node,
                          moment->is_back ? Py_True : Py_False, bytes, gradients, temporary);
        if (entry == NULL) {
            Py_CLEAR(list);
            break;
        }
        PyList_SET_ITEM(list, (Py_ssize_t)i, entry);
    }
    return list;
}
