/* SPDX-License-Identifier: Apache-2.0 */
/* py_resident.c - what koila._core tells of resident memory and of freed memory; see resident.h and reuse.h. */
#include "py_state.h"

#include "resident.h"
#include "reuse.h"

KL_DEFINE(resident, ignored)
{
    return PyLong_FromLongLong(kl_resident_bytes());
}

KL_DEFINE(watch_resident, bound)
{
    long long n_bytes = PyLong_AsLongLong(bound);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(kl_resident_watch(n_bytes));
}

KL_DEFINE(stop_resident, ignored)
{
    int64_t n_returns = 0;
    long long most = kl_resident_stop(&n_returns);
    return Py_BuildValue("LL", most, (long long)n_returns);
}

KL_DEFINE(return_free, ignored)
{
    kl_resident_return_free();
    Py_RETURN_NONE;
}

KL_DEFINE(reuse_freed, library)
{
    const char *name = PyUnicode_AsUTF8(library);
    return name == NULL ? NULL : PyBool_FromLong(kl_reuse_freed(name));
}
