/* SPDX-License-Identifier: Apache-2.0 */
/* py_resident.c - what koila._core tells of resident memory, and what glibc keeps of freed memory; see resident.h. */
#include "py_state.h"

#ifdef __GLIBC__
#include <malloc.h>
#endif

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

KL_DEFINE(fix_malloc, args)
{
    int block = 0, end = 0;
    if (!PyArg_ParseTuple(args, "ii", &block, &end)) {
        return NULL;
    }
#ifdef __GLIBC__
    /* By default glibc raises these thresholds when a large block is freed. */
    bool is_fixed = mallopt(M_MMAP_THRESHOLD, block) && mallopt(M_TRIM_THRESHOLD, end) &&
                    mallopt(M_MMAP_MAX, 1 << 14); /* Linux allows a process some 65,000 mappings */
    kl_resident_return_free();
    return PyBool_FromLong(is_fixed);
#else
    return Py_NewRef(Py_False);
#endif
}
