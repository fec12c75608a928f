/* SPDX-License-Identifier: Apache-2.0 */
/* py_inferred.h - results of inference as Python objects */
#pragma once

#include "py_args.h"

#include "infer.h"

/* Add `value`, and drop the caller's reference to it. NULL: an exception is set already. 0 or -1. */
int kl_py_set_new(PyObject *dict, const char *key, PyObject *value);
/* Add the results of inference for a call to `dict`: outs, mode, reason, reduce, random, effects, alias, saves,
 * inputs, in_places, rewrites. 0, or -1 with an exception. */
int kl_py_describe(PyObject *dict, const KlInferred *result, const KlSaves *saves,
                   const KlPyBound *bound, Py_ssize_t n_args, PyObject *kwargs);
