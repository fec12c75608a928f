/* SPDX-License-Identifier: Apache-2.0 */
/* py_recycle.c - keeps dead LazyTensors and uses them again: torch takes 350 ns to create one, this 8. Only if a
 * self-test at import finds that torch's objects have the expected layout. */
#include "py_tape.h"

#define KL_FREE_MAX 256

/* Since torch 2.10 the object owns its TensorImpl, and these fields follow the object's header. */
typedef struct TensorObject {
    PyObject_HEAD const KlImpl *impl;
    PyObject *backward_hooks;
    PyObject *post_accumulate_grad_hooks;
} TensorObject;

/* Dead objects whose placeholders are of one kind. */
typedef struct Dead {
    PyObject
        *objects[KL_FREE_MAX]; /* [n] untracked, without references to anything but their type */
    int n;
} Dead;

static struct {
    Dead dead[KL_N_PLACEHOLDERS];
    PyObject
        *options[KL_N_PLACEHOLDERS]; /* torch's arguments for one: {"dtype": ...}; EMPTY: NULL */
    bool works;
    destructor dealloc; /* tp_dealloc of the class before */
} state;

static uint32_t
n_strong(PyObject *tensor)
{
    return (uint32_t)((const TensorObject *)tensor)->impl->counts;
}

static void
clear_dict(PyObject *object)
{
#if PY_VERSION_HEX >= 0x030D0000
    PyObject_ClearManagedDict(object);
#elif PY_VERSION_HEX >= 0x030C0000
    _PyObject_ClearManagedDict(object); /* its name before it became public */
#else
    PyObject **dict = _PyObject_GetDictPtr(object);
    if (dict != NULL) {
        Py_CLEAR(*dict);
    }
#endif
}

static bool
can_keep(PyObject *object)
{
    const TensorObject *tensor = (const TensorObject *)object;
    const Value *value = kl_lazy_value(object);
    /* A weak reference of C++ would never expire if the tensor were used again. */
    bool has_weak = (tensor->impl->counts >> 32 & 0x7fffffff) != 1;
    return state.works && value != NULL && state.dead[value->placeholder].n < KL_FREE_MAX &&
           n_strong(object) == 1 && !has_weak && tensor->backward_hooks == NULL &&
           tensor->post_accumulate_grad_hooks == NULL && !value->is_touched;
}

static void
lazy_dealloc(PyObject *object)
{
    if (can_keep(object)) {
        Dead *dead = &state.dead[kl_lazy_value(object)->placeholder];
        PyObject_GC_UnTrack(object);
        PyObject_ClearWeakRefs(object);
        Py_CLEAR(*(PyObject **)((char *)object + kl_py.slot_offset));
        clear_dict(object);
        /* Clearing ran user code (weakref callbacks): look again. */
        if (dead->n < KL_FREE_MAX && Py_REFCNT(object) == 0) {
            dead->objects[dead->n++] = object;
            return;
        }
        PyObject_GC_Track(object);
    }
    /* subtype_dealloc looks for the first base with another dealloc, from the type itself on: with ours
     * in place it would find itself for ever. */
    kl_py.lazy->tp_dealloc = state.dealloc;
    state.dealloc(object);
    kl_py.lazy->tp_dealloc = lazy_dealloc;
}

static PyObject *
make_wrapper(KlPlaceholder kind)
{
    PyObject *make = PyObject_GetAttrString((PyObject *)kl_py.lazy, "_make_wrapper_subclass");
    PyObject *args = Py_BuildValue(kind == KL_PLACEHOLDER_EMPTY ? "O(i)" : "O()", kl_py.lazy, 0);
    bool is_there = make != NULL && args != NULL;
    PyObject *made = is_there ? PyObject_Call(make, args, state.options[kind]) : NULL;
    KL_DROP(args, make);
    return made;
}

/* A dispatch mode would see the placeholder being created, and could keep it. */
static PyObject *
make_empty(void)
{
    return kl_py.lib_has_dispatch_modes(false)
               ? make_wrapper(KL_PLACEHOLDER_EMPTY)
               : kl_py.lazy->tp_new(kl_py.lazy, kl_py.empty_tuple, NULL);
}

/* A placeholder created in inference mode would stay an inference tensor when it is used again. */
static PyObject *
make(KlPlaceholder kind)
{
    PyObject *guard = kl_context_leave_inference();
    PyObject *made = guard == NULL                  ? NULL
                     : kind == KL_PLACEHOLDER_EMPTY ? make_empty()
                                                    : make_wrapper(kind);
    kl_context_end_outside(guard);
    return made;
}

PyObject *
kl_recycle_take(KlPlaceholder kind)
{
    Dead *dead = &state.dead[kind];
    if (dead->n == 0) {
        return make(kind);
    }
    PyObject *object = dead->objects[--dead->n];
    _Py_NewReference(object);
    PyObject_GC_Track(object);
    return object;
}

/* The dtypes of placeholders that stand for numbers. */
static int
find_options(void)
{
    static const KlDtype dtypes[KL_N_PLACEHOLDERS] = {
        [KL_PLACEHOLDER_INT] = KL_DTYPE_INT64,
        [KL_PLACEHOLDER_BOOL] = KL_DTYPE_BOOL,
        [KL_PLACEHOLDER_FLOAT] = KL_DTYPE_FLOAT64,
    };
    for (int i = KL_PLACEHOLDER_INT; i < KL_N_PLACEHOLDERS; i++) {
        state.options[i] = Py_BuildValue("{sO}", "dtype", kl_py.dtypes[dtypes[i]]);
        if (state.options[i] == NULL) {
            return -1;
        }
    }
    return 0;
}

/* Whether the strong count rises when C++ takes a reference. */
static bool
count_test(void)
{
    PyObject *lazy = make_empty(), *aoti = PyImport_ImportModule("torch._C._aoti");
    PyObject *capsule = NULL, *back = NULL;
    bool is_counted = lazy != NULL && aoti != NULL && n_strong(lazy) == 1 &&
                      ((TensorObject *)lazy)->backward_hooks == NULL;
    if (is_counted) {
        capsule = PyObject_CallMethod(aoti, "unsafe_alloc_void_ptr_from_tensor", "O", lazy);
        is_counted = capsule != NULL && n_strong(lazy) == 2;
    }
    if (capsule != NULL) {
        back = PyObject_CallMethod(aoti, "alloc_tensor_by_stealing_from_void_ptr", "O", capsule);
    }
    is_counted = is_counted && back != NULL;
    KL_DROP(back, capsule, aoti, lazy);
    return is_counted;
}

int
kl_recycle_init(void)
{
    if (find_options() < 0) {
        return -1;
    }
    state.works = kl_py.slot_offset >= (Py_ssize_t)sizeof(TensorObject) && count_test();
    PyErr_Clear(); /* this torch is built otherwise: each LazyTensor is created anew */
    if (state.works) {
        state.dealloc = kl_py.lazy->tp_dealloc;
        kl_py.lazy->tp_dealloc = lazy_dealloc;
    }
    return 0;
}

KL_DEFINE(is_recycling, ignored)
{
    return PyBool_FromLong(state.works);
}
