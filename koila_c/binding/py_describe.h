/* SPDX-License-Identifier: Apache-2.0 */
/* py_describe.h - results of inference as Python objects */
#ifndef KL_PY_DESCRIBE_H
#define KL_PY_DESCRIBE_H

#include "py_args.h"

#include "infer.h"

/* Add the results of inference for a call to `dict`: outs, mode, reason, reduce, random, effects, alias, saves,
 * inputs, in_places, rewrites. 0, or -1 with an exception. */
int kl_py_describe(PyObject *dict, const KlInferred *result, const KlSaves *saves,
                   const KlPyBound *bound, Py_ssize_t n_args, PyObject *kwargs);

/* (axis, dim, outer, inner) of a place of rows; None: there are none. */
PyObject *kl_py_place(const KlPlace *place);

/* Add `value` or `item`, and drop the caller's reference to it. NULL: it could not be created, an exception is set.
 * 0 or -1. */
int kl_py_set_new(PyObject *dict, const char *key, PyObject *value);
int kl_py_append_new(PyObject *list, PyObject *item);

#endif
