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

#include "alloc.h"

/* After so many collections without a query, stop looking at young objects. */
#define KL_IDLE_MAX 10000
/* From this size on, ask whether memory is a mapped file, which takes a millisecond. */
#define KL_FILE_BYTES (16 << 20)
#define KL_TYPES 1024

/* The first fields of a StorageImpl, since torch 2.10. The strong count is the low half of the counts. */
typedef struct Storage {
    void *vtable;
    uint64_t counts;
    const char *data;
    void *context, *deleter;
    int8_t device_type, device_index;
    int64_t n_bytes;
    bool is_symbolic;  /* then n_bytes is no number */
    bool is_resizable; /* torch's own memory: no other storage shares it */
} Storage;

/* The first fields of a TensorImpl. */
typedef struct Impl {
    void *vtable;
    uint64_t counts;
    const Storage *storage; /* NULL: sparse, opaque, or undefined */
} Impl;

/* A storage that was seen; koila owns the weak reference. */
typedef struct Known {
    const Storage *storage; /* NULL: a free entry */
    bool is_unsettled;      /* large and not torch's own: it may be a mapped file */
    bool is_apart;          /* a mapped file, which does not count */
} Known;

typedef struct Range {
    const char *start, *end;
} Range;

static struct {
    Known *known; /* [n_known_max] open addressing, by pointer; at most half full */
    size_t n_known, n_known_max;
    Range *ranges; /* [n_ranges_max] scratch */
    size_t n_ranges_max;
    const Impl *const *(*grad)(const Impl *tensor); /* c10::TensorImpl::grad */
    const Impl *undefined;                          /* what that returns if there is no gradient */
    PyObject *lock, *free_weak; /* UntypedStorage's _new_with_weak_ptr and _free_weak_ref */
    PyObject *get_objects;      /* gc's */
    PyObject *parts;   /* storages.py: the tensors that one without a storage consists of */
    int n_idle;        /* collections since the last query */
    bool works;        /* the self-test found that these layouts are right */
    bool is_following; /* young objects are looked at before each collection */
} state;

static inline const Impl *
impl_of(PyObject *tensor)
{
    return *(const Impl **)((char *)tensor + sizeof(PyObject));
}

static inline bool
is_dead(const Storage *storage)
{
    return (uint32_t)storage->counts == 0;
}

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
    const Impl *impl = state.works ? impl_of(tensor) : NULL;
    const Storage *storage = impl != NULL ? impl->storage : NULL;
    bool is_others = storage != NULL && !storage->is_resizable && bytes_of(storage) > 0;
    bool is_any = storage != NULL && kl_py.aliased != NULL && PyDict_GET_SIZE(kl_py.aliased) > 0;
    PyObject *key = is_any ? PyLong_FromVoidPtr((void *)(uintptr_t)storage) : NULL;
    bool is_noted = is_any && (key == NULL || PyDict_Contains(kl_py.aliased, key) != 0);
    PyErr_Clear();
    Py_XDECREF(key);
    return !state.works || is_others || is_noted;
}

/* -- the table ----------------------------------------------------------------------------------- */

static Known *
find(Known *table, size_t n_max, const Storage *storage)
{
    size_t i = (size_t)((uintptr_t)storage * UINT64_C(0x9E3779B97F4A7C15) >> 32) & (n_max - 1);
    while (table[i].storage != NULL && table[i].storage != storage) {
        i = (i + 1) & (n_max - 1);
    }
    return &table[i];
}

/* Release the weak reference to a storage. An exception stays set. */
static void
free_weak(const Storage *storage)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyObject *address = PyLong_FromVoidPtr((void *)(uintptr_t)storage);
    if (kl_py_done(address != NULL ? PyObject_CallOneArg(state.free_weak, address) : NULL) < 0) {
        PyErr_WriteUnraisable(state.free_weak);
    }
    Py_XDECREF(address);
    PyErr_Restore(type, value, traceback);
}

/* Build a table without the dead storages, or an empty one; `before` is emptied into it. */
static int
rebuild(bool is_empty)
{
    Known *before = state.known;
    size_t n_before = state.n_known_max, n_alive = 0, n_max = 64;
    for (size_t i = 0; i < n_before; i++) {
        n_alive += before[i].storage != NULL && !is_empty && !is_dead(before[i].storage);
    }
    while (n_max < 4 * n_alive) {
        n_max *= 2;
    }
    Known *after = kl_alloc_zeroed(n_max, sizeof(*after));
    if (after == NULL) {
        return kl_py_done(PyErr_NoMemory());
    }
    /* Install the new table before releasing anything, since that may run code that comes here. */
    size_t n_dead = 0;
    state.n_known = 0;
    for (size_t i = 0; i < n_before; i++) {
        if (before[i].storage == NULL) {
            continue;
        }
        if (is_empty || is_dead(before[i].storage)) {
            before[n_dead++] = before[i];
        } else {
            *find(after, n_max, before[i].storage) = before[i];
            state.n_known++;
        }
    }
    state.known = after;
    state.n_known_max = n_max;
    for (size_t i = 0; i < n_dead; i++) {
        free_weak(before[i].storage);
    }
    kl_alloc_free(before);
    return 0;
}

/* Take a weak reference to a storage that somebody holds, through torch. 1: taken; 0: it died meanwhile; -1 on
 * failure. */
static int
take_weak(const Storage *storage)
{
    PyObject *address = PyLong_FromVoidPtr((void *)(uintptr_t)storage);
    PyObject *object = address != NULL ? PyObject_CallOneArg(state.lock, address) : NULL;
    PyObject *weak = NULL;
    if (object != NULL && object != Py_None) {
        weak = PyObject_CallMethod(object, "_weak_ref", NULL);
    }
    int result = weak != NULL ? 1 : object == Py_None ? 0 : -1;
    KL_DROP(weak, object, address);
    return result;
}

/* Remember a storage that somebody holds. Asking torch may run a collection, which comes here too: so look into the
 * table again after it. */
static int
keep(const Storage *storage)
{
    bool is_any = state.n_known_max > 0;
    bool is_known = is_any && find(state.known, state.n_known_max, storage)->storage != NULL;
    if (bytes_of(storage) == 0 || is_known) {
        return 0;
    }
    int taken = take_weak(storage);
    if (taken <= 0) {
        return taken;
    }
    if (2 * (state.n_known + 1) > state.n_known_max && rebuild(false) < 0) {
        free_weak(storage);
        return -1;
    }
    Known *place = find(state.known, state.n_known_max, storage);
    if (place->storage != NULL) {
        free_weak(storage);
        return 0;
    }
    bool may_be_file = !storage->is_resizable && bytes_of(storage) >= KL_FILE_BYTES;
    *place = (Known){.storage = storage, .is_unsettled = may_be_file};
    state.n_known++;
    return 0;
}

/* -- tensors ------------------------------------------------------------------------------------- */

/* Whether a type is a tensor class; for a list, each type is asked once. */
typedef struct Types {
    PyTypeObject *types[KL_TYPES];
    bool are_tensors[KL_TYPES];
} Types;

static bool
is_tensor(Types *seen, PyTypeObject *type)
{
    size_t i = (size_t)((uintptr_t)type * UINT64_C(0x9E3779B97F4A7C15) >> 54);
    if (seen->types[i] != type) {
        seen->types[i] = type;
        seen->are_tensors[i] = type != kl_py.lazy && PyType_IsSubtype(type, kl_py.tensor_base);
    }
    return seen->are_tensors[i];
}

/* Remember the storage of a tensor, and of its gradient, which may have no Python object yet. 1: one of them
 * consists of other tensors; -1 on failure. */
static int
note_tensor(PyObject *tensor)
{
    const Impl *impl = impl_of(tensor);
    if (impl == NULL) {
        return 0; /* it is being created */
    }
    const Impl *grad = *state.grad(impl);
    const Impl *both[] = {impl, grad};
    bool is_made_up = false;
    for (int i = 0; i < 2; i++) {
        const Storage *storage = both[i]->storage;
        is_made_up = is_made_up || (storage == NULL && both[i] != state.undefined);
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
    Types seen = {0};
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(objects); i++) {
        PyObject *object = PyList_GET_ITEM(objects, i);
        if (!is_tensor(&seen, Py_TYPE(object))) {
            continue;
        }
        int made_up = note_tensor(object);
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

static int
note_young(void)
{
    PyObject *young = PyObject_CallFunction(state.get_objects, "i", 0);
    int result = young == NULL ? -1 : note_all(young);
    Py_XDECREF(young);
    return result;
}

/* -- what Python calls ----------------------------------------------------------------------------- */

KL_DEFINE(note_storages, objects)
{
    if (!PyList_Check(objects)) {
        return PyErr_Format(PyExc_TypeError, "note_storages: a list of objects is wanted");
    }
    return note_all(objects) < 0 ? NULL : Py_NewRef(Py_None);
}

KL_DEFINE(note_young_storages, ignored)
{
    state.n_idle = 0;
    return note_young() < 0 ? NULL : Py_NewRef(Py_None);
}

/* In C, since an exception of Ctrl-C in a Python callback of the collector would be lost. */
KL_DEFINE(collecting_garbage, args)
{
    const char *phase = NULL;
    PyObject *info = NULL;
    if (!PyArg_ParseTuple(args, "sO:collecting", &phase, &info)) {
        return NULL;
    }
    if (!state.is_following || phase[0] != 's' || phase[2] != 'a') { /* "start", not "stop" */
        return Py_NewRef(Py_None);
    }
    bool is_idle = ++state.n_idle > KL_IDLE_MAX;
    state.is_following = !is_idle;
    if ((is_idle ? rebuild(true) : note_young()) < 0) {
        state.is_following = false; /* one was missed: the next query walks over all objects */
        return NULL;
    }
    return Py_NewRef(Py_None);
}

KL_DEFINE(follow_storages, parts)
{
    state.n_idle = 0;
    state.is_following = parts != Py_None;
    Py_XSETREF(state.parts, state.is_following ? Py_NewRef(parts) : NULL);
    return !state.is_following && rebuild(true) < 0 ? NULL : Py_NewRef(Py_None);
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
    size_t n = 0, n_dead = 0, total = 0;
    KlError error;
    if (KL_RESERVE(&state, ranges, state.n_known, &error) != KL_OK) {
        return kl_py_raise(&error);
    }
    for (size_t i = 0; i < state.n_known_max; i++) {
        const Known *known = &state.known[i];
        if (known->storage == NULL || is_dead(known->storage)) {
            n_dead += known->storage != NULL;
            continue;
        }
        size_t n_bytes = known->is_apart ? 0 : bytes_of(known->storage);
        if (known->storage->is_resizable) {
            total += n_bytes;
        } else if (n_bytes > 0) {
            const char *start = known->storage->data;
            state.ranges[n++] = (Range){start, start + n_bytes};
        }
    }
    total += bytes_in(state.ranges, n); /* several may lie in one numpy array */
    return n_dead > 0 && rebuild(false) < 0 ? NULL : PyLong_FromSize_t(total);
}

KL_DEFINE(unsettled_storages, ignored)
{
    PyObject *result = PyList_New(0);
    for (size_t i = 0; result != NULL && i < state.n_known_max; i++) {
        const Known *known = &state.known[i];
        if (known->storage == NULL || !known->is_unsettled || is_dead(known->storage)) {
            continue;
        }
        PyObject *entry =
            Py_BuildValue("(NN)", PyLong_FromVoidPtr((void *)(uintptr_t)known->storage),
                          PyLong_FromVoidPtr((void *)(uintptr_t)known->storage->data));
        kl_py_add(&result, entry);
    }
    return result;
}

KL_DEFINE(settle_storage, args)
{
    unsigned long long key = 0;
    int is_apart = 0;
    if (!PyArg_ParseTuple(args, "Kp:settle_storage", &key, &is_apart)) {
        return NULL;
    }
    const Storage *storage = (const Storage *)(uintptr_t)key;
    Known *known = state.n_known_max > 0 ? find(state.known, state.n_known_max, storage) : NULL;
    if (known != NULL && known->storage != NULL) {
        known->is_unsettled = false;
        known->is_apart = is_apart;
    }
    return Py_NewRef(Py_None);
}

/* -- self-test: are the fields where the structs above have them? ---------------------------------------- */

/* New reference: the value of an expression in torch's namespace. */
static PyObject *
evaluate(const char *text, PyObject *locals)
{
    PyObject *builtins = PyEval_GetBuiltins();
    PyObject *globals = builtins != NULL ? Py_BuildValue("{sO}", "__builtins__", builtins) : NULL;
    PyObject *result = globals != NULL ? PyRun_String(text, Py_eval_input, globals, locals) : NULL;
    Py_XDECREF(globals);
    return result;
}

/* 1 if torch's own answer for the address of a tensor's storage, and the fields read there, fit a tensor of 60
 * bytes, and the strong count rises when a view is taken; else 0, or -1 on failure. */
static int
test_storage(PyObject *locals)
{
    PyObject *tensor = evaluate("torch.empty(3, 5, dtype=torch.float32, device='cpu')", locals);
    int result = tensor == NULL || PyDict_SetItemString(locals, "x", tensor) < 0 ? -1 : 0;
    const char *text = "(x._cdata, x.untyped_storage()._cdata, x.data_ptr())";
    PyObject *words = result == 0 ? evaluate(text, locals) : NULL;
    PyObject *view = NULL;
    unsigned long long impl = 0, key = 0, data = 0;
    if (words == NULL || !PyArg_ParseTuple(words, "KKK", &impl, &key, &data)) {
        goto error;
    }
    const Storage *storage = (const Storage *)(uintptr_t)key;
    if ((uintptr_t)impl_of(tensor) != impl || impl_of(tensor)->storage != storage ||
        (uintptr_t)storage->data != data || bytes_of(storage) != 60) {
        goto error;
    }
    uint32_t n_before = (uint32_t)storage->counts;
    view = evaluate("x.view(-1)", locals);
    result = view == NULL ? -1 : (uint32_t)storage->counts == n_before + 1;
error:
    KL_DROP(view, words, tensor);
    return result;
}

/* The same for a gradient, for a missing one, and for tensors without such memory. */
static int
test_others(PyObject *locals)
{
    PyObject *leaf, *grad, *meta, *buffer, *sparse;
    PyObject *all =
        evaluate("(torch.ones(2, dtype=torch.float32, device='cpu', requires_grad=True), "
                 "torch.ones(2, dtype=torch.float32, device='cpu'), "
                 "torch.empty(2, dtype=torch.float32, device='meta'), "
                 "torch.frombuffer(bytearray(8), dtype=torch.uint8), "
                 "torch.empty((2, 2), dtype=torch.float32, device='cpu', layout=torch.sparse_coo))",
                 locals);
    if (all == NULL || !PyArg_ParseTuple(all, "OOOOO", &leaf, &grad, &meta, &buffer, &sparse)) {
        return -1;
    }
    state.undefined = *state.grad(impl_of(leaf));
    bool is_met = PyObject_SetAttrString(leaf, "grad", grad) == 0 &&
                  state.undefined->storage == NULL && *state.grad(impl_of(leaf)) == impl_of(grad) &&
                  impl_of(sparse)->storage == NULL && impl_of(meta)->storage != NULL &&
                  bytes_of(impl_of(meta)->storage) == 0 && impl_of(grad)->storage->is_resizable &&
                  !impl_of(buffer)->storage->is_resizable;
    Py_DECREF(all);
    return is_met;
}

static int
self_test(void)
{
    const KlName names[] = {{&state.get_objects, "gc", "get_objects"}};
    PyObject *torch = PyImport_ImportModule("torch");
    PyObject *locals = torch != NULL ? Py_BuildValue("{sO}", "torch", torch) : NULL;
    int result = -1;
    *(void **)&state.grad = kl_meta_symbol("_ZNK3c1010TensorImpl4gradEv");
    if (locals != NULL && kl_py_look_up(names, 1) == 0) {
        state.lock = evaluate("torch.UntypedStorage._new_with_weak_ptr", locals);
        state.free_weak = evaluate("torch.UntypedStorage._free_weak_ref", locals);
        bool is_there = state.lock != NULL && state.free_weak != NULL;
        result = is_there && state.grad != NULL ? test_storage(locals) : 0;
        result = result == 1 ? test_others(locals) : result;
    }
    KL_DROP(locals, torch);
    return result;
}

int
kl_storage_init(void)
{
    state.works = self_test() == 1;
    PyErr_Clear(); /* where the test failed: this torch is built otherwise */
    return 0;
}

KL_DEFINE(sees_storages, ignored)
{
    return PyBool_FromLong(state.works);
}
