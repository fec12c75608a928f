/* SPDX-License-Identifier: Apache-2.0 */
/* methods.h - the functions of koila._core; methods.def says what each does. */
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* The head of the definition of _core.<name>; `given`: its argument, or the tuple of its arguments. */
#define KL_DEFINE(name, given)                                                                     \
    PyObject *core_##name(PyObject *module __attribute__((unused)),                                \
                          PyObject *given __attribute__((unused)))

#define KL_METHOD(name, kind, arguments, does) PyObject *core_##name(PyObject *, PyObject *);
#include "methods.def"
#undef KL_METHOD
