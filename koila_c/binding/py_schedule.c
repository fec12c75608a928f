/* py_schedule.c - tells koila.replay what to run, step by step: the schedule comes from the core. */
#include "py.h"

#include "schedule.h"

static PyObject *
values_in(const KlSchedule *schedule, KlSlice slice)
{
    PyObject *values = PyTuple_New(slice.n);
    for (uint32_t i = 0; values != NULL && i < slice.n; i++) {
        PyObject *id = PyLong_FromUnsignedLong(schedule->values.ids[slice.first + i]);
        if (id == NULL) {
            Py_CLEAR(values);
            break;
        }
        PyTuple_SET_ITEM(values, i, id);
    }
    return values;
}

int
kl_schedule_homes(PyObject *object, void *homes)
{
    int is_graph = 0, is_offloaded = 0;
    KlHomes *found = homes;
    if (!PyTuple_Check(object) || !PyArg_ParseTuple(object, "pIpI", &is_graph, &found->keep_every,
                                                    &is_offloaded, &found->n_pieces)) {
        PyErr_SetString(PyExc_TypeError,
                        "homes must be (is_graph, keep_every, is_offloaded, n_pieces)");
        return 0;
    }
    found->is_graph = is_graph != 0;
    found->is_offloaded = is_offloaded != 0;
    return 1;
}

/* schedule(program, (is_graph, keep_every, is_offloaded, n_pieces)) -> [(op, first run, runs, values, whole, waits,
 * again)], see KlStep. */
PyObject *
kl_schedule_of(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *handle = NULL;
    KlHomes homes = {0};
    KlSchedule schedule;
    KlError error;
    const Tape *tape = kl_tape_open();
    if (tape == NULL ||
        !PyArg_ParseTuple(args, "OO&:schedule", &handle, kl_schedule_homes, &homes)) {
        return NULL;
    }
    const KlProgram *program = kl_program_of(handle, tape);
    if (program == NULL) {
        return NULL;
    }
    if (kl_schedule_build(&tape->core, program, &homes, &schedule, &error) != KL_OK) {
        return kl_py_raise(&error);
    }
    PyObject *list = PyList_New((Py_ssize_t)schedule.n_steps);
    for (size_t i = 0; list != NULL && i < schedule.n_steps; i++) {
        const KlStep *step = &schedule.steps[i];
        /* N takes a reference also where it fails, and NULL as an error. */
        PyObject *item =
            Py_BuildValue("(iIINNNN)", (int)step->op, step->run, step->n_runs,
                          values_in(&schedule, step->values), values_in(&schedule, step->whole),
                          PyBool_FromLong(step->waits), values_in(&schedule, step->again));
        if (item == NULL) {
            Py_CLEAR(list);
            break;
        }
        PyList_SET_ITEM(list, (Py_ssize_t)i, item);
    }
    kl_schedule_fini(&schedule);
    return list;
}
