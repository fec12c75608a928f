/* SPDX-License-Identifier: Apache-2.0 */
/* py_storage.c - the memory that tensors hold on the CPU, where torch's allocator counts nothing: a weak reference
 * to each storage that was seen, and the bytes of those that still exist.
 *
 * Storages are found through the Python objects of their tensors, which the garbage collector knows. An object is
 * created in the youngest generation and leaves it only in a collection. So whoever looks at the young objects
 * before each collection, and when asked, sees every new tensor. A walk over all objects finds the tensors that
 * existed before, and old ones that were given other memory since. */
#include "py_state.h"

#include <stdlib.h>
#include <string.h>

#include "alloc.h"

/* After so many collections without a query, stop looking at young objects. */
#define KL_IDLE_MAX 10000
/* From this size on, ask whether memory is a mapped file, which takes a millisecond. */
#define KL_FILE_BYTES (16 << 20)
#define KL_N_RECENT 1024
#define KL_RECENT(storage) state.recent[((uintptr_t)(storage) >> 4) % KL_N_RECENT]

/* The first fields of torch's StorageImpl, since torch 2.10; the counts are as in KlImpl. */
typedef struct StorageImpl {
    void *vtable;
    uint64_t counts;
    const char *data;
    void *context, *deleter;
    int8_t device_type, device_index;
    int64_t n_bytes;
    bool is_symbolic;  /* then n_bytes is no number */
    bool is_resizable; /* torch's own memory: no other storage shares it */
} Storage;

typedef struct Range {
    const char *start, *end;
} Range;

static struct {
    PyObject *counted;        /* dict: address of a storage -> torch's weak reference to it */
    Py_ssize_t n_counted_max; /* above this number the dead ones are looked for */
    const Storage *recent[KL_N_RECENT]; /* some of `counted`, by a part of the address */
    PyObject *is_file;  /* dict: address -> whether this large storage is a mapped file */
    bool has_unsettled; /* a storage was noted since the last query that may be one */
    Range *ranges;      /* [n_ranges_max] scratch */
    size_t n_ranges_max;
    PyObject *parts;   /* storages.py: the tensors that one without a storage consists of */
    int n_idle;        /* collections since the last query */
    bool is_following; /* young objects are looked at before each collection */
} state;

/* The bytes of a storage on the CPU; 0 for FakeTensors, which claim bytes and have none. */
static size_t
bytes_of(const Storage *storage)
{
    bool is_there = storage->device_type == 0 && storage->data != NULL && !storage->is_symbolic;
    return is_there && storage->n_bytes > 0 ? (size_t)storage->n_bytes : 0;
}

bool
kl_storage_may_be_shared(PyObject *tensor)
{
    const KlImpl *impl = kl_meta_impl(tensor);
    const Storage *storage = impl != NULL ? impl->storage : NULL;
    bool is_others = storage != NULL && !storage->is_resizable && bytes_of(storage) > 0;
    bool is_any = storage != NULL && kl_py.aliased != NULL && PyDict_GET_SIZE(kl_py.aliased) > 0;
    PyObject *key = is_any ? PyLong_FromVoidPtr((void *)(uintptr_t)storage) : NULL;
    bool is_noted = is_any && (key == NULL || PyDict_Contains(kl_py.aliased, key) != 0);
    PyErr_Clear();
    Py_XDECREF(key);
    return is_others || is_noted;
}

static bool
may_be_file(const Storage *storage)
{
    return !storage->is_resizable && bytes_of(storage) >= KL_FILE_BYTES;
}

/* Forget the storages that are dead. 0 or -1. */
static int
forget_dead(void)
{
    PyObject *key = NULL, *weak = NULL;
    Py_ssize_t at = 0;
    PyObject *counted = PyDict_Copy(state.counted); /* keeps code of Python's out of the loop */
    while (counted != NULL && PyDict_Next(counted, &at, &key, &weak)) {
        const Storage *storage = PyLong_AsVoidPtr(key);
        if ((uint32_t)storage->counts == 0) {
            KL_RECENT(storage) = NULL;
            (void)PyDict_DelItem(state.is_file, key);
            PyErr_Clear(); /* few are there */
            (void)PyDict_DelItem(state.counted, key);
        }
    }
    state.n_counted_max = 2 * PyDict_GET_SIZE(state.counted) + 64;
    Py_XDECREF(counted);
    return counted == NULL ? -1 : 0;
}

/* Remember a storage that somebody holds. At times, forget those that are dead: nobody may ask for bytes. 0 or -1. */
static int
keep(const Storage *storage)
{
    if (KL_RECENT(storage) == storage || bytes_of(storage) == 0) {
        return 0;
    }
    PyObject *object = NULL, *weak = NULL, *key = PyLong_FromVoidPtr((void *)(uintptr_t)storage);
    int is_kept = key == NULL ? -1 : PyDict_Contains(state.counted, key);
    if (is_kept == 0) {
        object = PyObject_CallMethod(kl_py.untyped_storage, "_new_with_weak_ptr", "O", key);
        /* None: it died meanwhile */
        bool is_alive = object != NULL && object != Py_None;
        weak = is_alive ? PyObject_CallOneArg(kl_py.storage_weak_ref, object) : NULL;
        bool is_noted = weak != NULL && PyDict_SetDefault(state.counted, key, weak) != NULL;
        is_kept = is_noted ? 1 : object == Py_None ? 0 : -1;
        state.has_unsettled |= is_noted && may_be_file(storage);
    }
    KL_RECENT(storage) = is_kept > 0 ? storage : NULL;
    KL_DROP(weak, object, key);
    return is_kept < 0                                            ? -1
           : PyDict_GET_SIZE(state.counted) > state.n_counted_max ? forget_dead()
                                                                  : 0;
}

static void
forget_all(void)
{
    PyDict_Clear(state.is_file);
    memset(state.recent, 0, sizeof(state.recent));
    PyDict_Clear(state.counted);
}

/* -- tensors ------------------------------------------------------------------------------------- */

/* Remember the storage of a tensor, and of its gradient, which may have no Python object yet. 1: one of them
 * consists of other tensors; -1 on failure. */
static int
note_tensor(PyObject *tensor)
{
    const KlImpl *impl = kl_meta_impl(tensor);
    if (impl == NULL) {
        return 0; /* it is being created */
    }
    const KlImpl *both[] = {impl, *kl_py.lib_grad(impl)};
    bool is_made_up = false;
    for (int i = 0; i < 2; i++) {
        const Storage *storage = both[i]->storage;
        is_made_up = is_made_up || (storage == NULL && both[i] != kl_py.no_gradient);
        if (storage != NULL && keep(storage) < 0) {
            return -1;
        }
    }
    return is_made_up;
}

/* Remember the storages of the tensors in a list. Those that consist of other tensors are appended to `others`, or
 * skipped if that is NULL. */
static int
note_list(PyObject *objects, PyObject *others)
{
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(objects); i++) {
        PyObject *object = PyList_GET_ITEM(objects, i);
        bool is_plain =
            PyObject_TypeCheck(object, kl_py.tensor_base) && !Py_IS_TYPE(object, kl_py.lazy);
        int made_up = is_plain ? note_tensor(object) : 0;
        if (made_up < 0 || (made_up > 0 && others != NULL && PyList_Append(others, object) < 0)) {
            return -1;
        }
    }
    return 0;
}

static int
note_all(PyObject *objects)
{
    PyObject *others = PyList_New(0), *parts = NULL;
    int result = others == NULL ? -1 : note_list(objects, others);
    if (result == 0 && PyList_GET_SIZE(others) > 0 && state.parts != NULL) {
        parts = PyObject_CallOneArg(state.parts, others);
        result = parts == NULL ? -1 : note_list(parts, NULL);
    }
    KL_DROP(parts, others);
    return result;
}

/* -- what Python calls ----------------------------------------------------------------------------- */

KL_DEFINE(note_storages, objects)
{
    if (!PyList_Check(objects)) {
        return PyErr_Format(PyExc_TypeError, "note_storages: a list of objects is wanted");
    }
    state.n_idle = 0;
    return note_all(objects) < 0 ? NULL : Py_NewRef(Py_None);
}

/* The collector loses what its callbacks raise. Ctrl-C in Python code that this calls is raised again after it. */
KL_DEFINE(collecting_garbage, args)
{
    const char *phase = NULL;
    PyObject *info = NULL;
    if (!PyArg_ParseTuple(args, "sO:collecting", &phase, &info)) {
        return NULL;
    }
    bool is_start = state.is_following && phase[0] == 's' && phase[2] == 'a'; /* and not "stop" */
    if (is_start && ++state.n_idle > KL_IDLE_MAX) {
        state.is_following = false;
        forget_all();
    } else if (is_start) {
        PyObject *young = PyObject_CallFunction(kl_py.get_objects, "i", 0);
        /* If one was missed, the next query walks over all objects. */
        state.is_following = young != NULL && note_all(young) == 0;
        Py_XDECREF(young);
    }
    if (PyErr_ExceptionMatches(PyExc_KeyboardInterrupt)) {
        PyErr_Clear();
        PyErr_SetInterrupt();
    }
    return PyErr_Occurred() == NULL ? Py_NewRef(Py_None) : NULL;
}

KL_DEFINE(follow_storages, parts)
{
    state.n_idle = 0;
    state.is_following = parts != Py_None;
    Py_XSETREF(state.parts, state.is_following ? Py_NewRef(parts) : NULL);
    if (!state.is_following) {
        forget_all();
    }
    return Py_NewRef(Py_None);
}

KL_DEFINE(is_following_storages, ignored)
{
    return PyBool_FromLong(state.is_following);
}

static int
compare_ranges(const void *left, const void *right)
{
    const char *l = ((const Range *)left)->start, *r = ((const Range *)right)->start;
    return (l > r) - (l < r);
}

/* The size in bytes of the union of ranges, which are sorted for that. */
static size_t
bytes_in(Range *ranges, size_t n)
{
    size_t total = 0;
    const char *end = NULL;
    qsort(ranges, n, sizeof(*ranges), compare_ranges);
    for (size_t i = 0; i < n; i++) {
        const char *start = ranges[i].start > end ? ranges[i].start : end;
        if (ranges[i].end > start) {
            total += (size_t)(ranges[i].end - start);
            end = ranges[i].end;
        }
    }
    return total;
}

KL_DEFINE(storage_bytes, ignored)
{
    PyObject *key = NULL, *weak = NULL;
    Py_ssize_t at = 0;
    size_t n = 0, total = 0;
    if (forget_dead() < 0 ||
        KL_RESERVE(&state, ranges, (size_t)PyDict_GET_SIZE(state.counted)) != KL_OK) {
        return PyErr_NoMemory();
    }
    while (PyDict_Next(state.counted, &at, &key, &weak)) {
        const Storage *storage = PyLong_AsVoidPtr(key);
        size_t n_bytes = bytes_of(storage);
        if (storage->is_resizable) {
            total += n_bytes;
        } else if (!may_be_file(storage) || PyDict_GetItem(state.is_file, key) != Py_True) {
            state.ranges[n++] = (Range){storage->data, storage->data + n_bytes};
        }
    }
    total += bytes_in(state.ranges, n); /* several may lie in one numpy array */
    return PyLong_FromSize_t(total);
}

KL_DEFINE(settle_storages, ask)
{
    PyObject *key = NULL, *weak = NULL;
    PyObject *counted = state.has_unsettled ? PyDict_Copy(state.counted) : PyDict_New();
    Py_ssize_t at = 0;
    bool is_done = counted != NULL;
    while (is_done && PyDict_Next(counted, &at, &key, &weak)) {
        const Storage *storage = PyLong_AsVoidPtr(key);
        bool is_there = (uint32_t)storage->counts > 0 && may_be_file(storage);
        if (is_there && PyDict_Contains(state.is_file, key) == 0) {
            PyObject *is_file = PyObject_CallFunction(
                ask, "N", PyLong_FromVoidPtr((void *)(uintptr_t)storage->data));
            is_done = is_file != NULL && (PyDict_Contains(state.counted, key) == 0 ||
                                          PyDict_SetItem(state.is_file, key, is_file) == 0);
            Py_XDECREF(is_file);
        }
    }
    state.has_unsettled = !is_done;
    Py_XDECREF(counted);
    return is_done ? Py_NewRef(Py_None) : NULL;
}

/* What storages.py compares with torch's own answers, as the structs above read it. */
KL_DEFINE(storage_fields, tensor)
{
    static const Storage none;
    if (!PyObject_TypeCheck(tensor, kl_py.tensor_base)) {
        return PyErr_Format(PyExc_TypeError, "storage_fields: a tensor is wanted");
    }
    const KlImpl *impl = kl_meta_impl(tensor), *grad = *kl_py.lib_grad(impl);
    const Storage *storage = impl->storage != NULL ? impl->storage : &none;
    return Py_BuildValue("(KKKIOK)", (unsigned long long)(uintptr_t)impl->storage,
                         (unsigned long long)(uintptr_t)storage->data,
                         (unsigned long long)bytes_of(storage), (unsigned int)storage->counts,
                         kl_py_bool(storage->is_resizable),
                         grad != kl_py.no_gradient ? (unsigned long long)(uintptr_t)grad : 0);
}

int
kl_storage_init(void)
{
    state.counted = PyDict_New();
    state.is_file = PyDict_New();
    return state.counted != NULL && state.is_file != NULL ? 0 : -1;
}
