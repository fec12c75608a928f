/* SPDX-License-Identifier: Apache-2.0 */
/* py_schedule.c - hands the core's schedule to replay.py as Python objects */
#include "py_run.h"

#include "schedule.h"

static PyObject *
ids_in(const KlIds *ids, KlSlice slice)
{
    PyObject *list = kl_program_ids(ids, slice);
    PyObject *values = list != NULL ? PyList_AsTuple(list) : NULL;
    Py_XDECREF(list);
    return values;
}

int
kl_schedule_policy(PyObject *object, void *policy)
{
    int is_graph = 0, is_live = 0;
    Py_ssize_t n_values = 0;
    const char *values = NULL;
    KlPolicy *found = policy;
    if (!PyTuple_Check(object) ||
        !PyArg_ParseTuple(object, "py#II|pI", &is_graph, &values, &n_values, &found->n_pieces,
                          &found->second_size, &is_live, &found->n_chunks)) {
        PyErr_SetString(PyExc_TypeError, "policy must be (is_graph, values, n_pieces, ...)");
        return 0;
    }
    found->values = (const uint8_t *)values;
    found->n_values = (size_t)n_values;
    found->is_graph = is_graph != 0;
    found->is_live = is_live != 0;
    return 1;
}

/* {value: (run, needs)}: the values that cheap calls recompute. */
static PyObject *
cheap_values_of(const KlSchedule *schedule)
{
    PyObject *cheap_set = PyDict_New();
    for (size_t i = 0; cheap_set != NULL && i < schedule->cheap_set.n; i++) {
        const KlCheap *cheap = &schedule->cheap_set.values[i];
        PyObject *value = PyLong_FromUnsignedLong(cheap->value);
        PyObject *item =
            Py_BuildValue("(IN)", cheap->run, ids_in(&schedule->cheap_set.ids, cheap->needs));
        if (value == NULL || item == NULL || PyDict_SetItem(cheap_set, value, item) < 0) {
            Py_CLEAR(cheap_set);
        }
        KL_DROP(item, value);
    }
    return cheap_set;
}

KL_DEFINE_ON(schedule, tape, args)
{
    const KlProgram *program = NULL;
    KlPolicy policy = {0};
    KlSchedule schedule;
    if (!PyArg_ParseTuple(args, "O&O&:schedule", kl_program_of, &program, kl_schedule_policy,
                          &policy)) {
        return NULL;
    }
    if (kl_schedule_build(&tape->core, program, &policy, &schedule) != KL_OK) {
        return PyErr_NoMemory();
    }
    const KlIds *values = &schedule.values;
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < schedule.n_steps; i++) {
        const KlStep *step = &schedule.steps[i];
        PyObject *item =
            Py_BuildValue("(iiIINN)", (int)step->op, (int)step->graph, step->run, step->n_runs,
                          ids_in(values, step->values), ids_in(values, step->others));
        kl_py_add(&list, item);
    }
    /* "N" steals its references also on failure, and treats NULL as an error. */
    PyObject *result = list != NULL ? Py_BuildValue("(NnN)", list, (Py_ssize_t)schedule.n_forward,
                                                    cheap_values_of(&schedule))
                                    : NULL;
    kl_schedule_fini(&schedule);
    return result;
}
