/* SPDX-License-Identifier: Apache-2.0 */
/* py_alloc.c - the core's counters of allocations seen from Python. Only a build for tests has them (KL_TESTS). */
#include "py_run.h"

#include "alloc.h"

PyObject *
core_fail_alloc_after(PyObject *Py_UNUSED(module), PyObject *n)
{
    long long left = PyLong_AsLongLong(n);
    if (left == -1 && PyErr_Occurred()) {
        return NULL;
    }
    kl_alloc_fail_after(left);
    return Py_NewRef(Py_None);
}

PyObject *
core_n_blocks(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    return PyLong_FromLongLong(kl_alloc_n_blocks());
}
