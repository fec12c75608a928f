/* SPDX-License-Identifier: Apache-2.0 */
/* py_state.h - what all of the binding shares: its types, its one global state struct, and the functions of the files
 * that run no call: those of torch's objects and settings
 *
 * LazyTensor ──▶ Value ──▶ Tape ──▶ the Python call of each node, the real tensor of each value. References point
 * one way. A tape knows a Value only by a borrowed pointer, which the Value clears when it dies: that is how a tape
 * learns that the user can no longer ask for a number. */
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "program.h"
#include "py_args.h"

/* Whether freed objects are recycled. A sanitizer must see them freed, to report who still points to them. */
#ifdef __SANITIZE_ADDRESS__
#define KL_IS_REUSED false
#else
#define KL_IS_REUSED true
#endif

typedef struct Tape Tape;

/* What torch's argument parser sees of a LazyTensor. Where it wants a number it accepts a tensor of no dims that
 * needs no gradient; koila gives it such a placeholder, torch then asks the tensor for the number, and koila
 * computes it. */
typedef enum {
    KL_PLACEHOLDER_EMPTY, /* no number is wanted: a tensor of size 0 */
    KL_PLACEHOLDER_INT,   /* this and those below have no dims, and no memory */
    KL_PLACEHOLDER_BOOL,
    KL_PLACEHOLDER_FLOAT, /* floating point or complex */
    KL_N_PLACEHOLDERS
} KlPlaceholder;

/* What a LazyTensor holds. *Attached*: one value of one tape. *Detached* (tape NULL): a real tensor and
 * where its rows are, as an input before its first use and everything that ran. Recording a call on a
 * detached Value attaches it again, as a leaf. */
typedef struct Value {
    PyObject_HEAD Tape *tape; /* owned, or NULL */
    KlValueId id;             /* attached: its value on the tape */
    PyObject *real;           /* detached: the real tensor; attached: NULL */
    PyObject *size;           /* torch.Size, cached on first use; else NULL */
    PyObject *error; /* detached without a tensor: what its call raised (py_failure.c); else NULL */
    KlPlace place;   /* detached: where its rows are; its axis is 0, or KL_ID_NONE for no rows */
    uint64_t axis_key;  /* detached: identifies the batch of its rows on every tape */
    int64_t rows;       /* detached: rows of that batch */
    KlValueId retained; /* attached: the value whose gradient .grad keeps, or KL_ID_NONE */
    uint64_t epoch;     /* kl_py.n_backwards when it got its real tensor */
    bool is_input;      /* made by lazy(): calls on it are always recorded */
    bool is_touched;    /* torch's dispatcher saw the placeholder: not recycled */
    bool is_lost;       /* detached: it may share memory with another, see KlStorage */
    bool is_freed;      /* detached: it left with a graph that is freed or outdated */
    KlPlaceholder placeholder;
} Value;

/* One argument of a recorded call, in preorder: a container is followed by its `n` entries. */
typedef enum {
    KL_SLOT_OBJECT,
    KL_SLOT_VALUE,
    KL_SLOT_LIST,
    KL_SLOT_TUPLE,
    KL_SLOT_NAMED,
    KL_SLOT_DICT
} KlSlotKind;

typedef struct KlSlot {
    KlSlotKind kind;
    uint32_t n;       /* number of entries; VALUE: its KlValueId */
    PyObject *object; /* OBJECT: argument; NAMED: namedtuple type; DICT: keys; else NULL */
} KlSlot;

/* The Python call of one node. */
typedef struct KlPyNode {
    PyObject *func;
    PyObject *kwnames; /* tuple of the last arguments' names, or NULL */
    PyObject *error;   /* its call failed: (type, args, notes) of the exception; else NULL */
    PyObject *code;    /* code object of the user's innermost frame, for the source line, or NULL */
    int lasti;
    uint64_t clock;      /* kl_context_clock(0) when it was recorded */
    uint32_t first_slot; /* into tape->slots */
    uint32_t n_slots;
    uint32_t n_args; /* positional and keyword arguments together */
} KlPyNode;

/* What the binding knows of one value. */
typedef struct KlPyValue {
    PyObject *real;     /* the tensor of a leaf, or of a value that ran; else NULL */
    Value *handle;      /* borrowed: the attached Value, or NULL once the user dropped it */
    uint64_t pointer;   /* leaf: its data_ptr() when it entered, or 0 if it has none */
    int64_t version;    /* _version of a leaf when it entered, or of `result` when it was computed;
                           -1: the tensor counts none (inference mode) */
    PyObject *result;   /* computed: its number, without a graph; else NULL */
    PyObject *recorded; /* leaf whose requires_grad changed: an alias as recorded; else NULL */
    uint64_t looked_at; /* leaf: kl_py.n_looks when it was last found unchanged */
    bool is_seen_live;  /* a live run hands its tensor to hooks.bind */
} KlPyValue;

typedef struct KlExternal {
    PyObject *tensor; /* it entered as `value`; dead if that has no tensor now; NULL: empty */
    KlValueId value;
} KlExternal;

/* A lock that one thread takes, as often as it likes; others wait (py_turn.c). The GIL guards its fields. */
typedef struct KlLock {
    uint64_t holder; /* id of a thread state; 0: free */
    uint32_t depth;
} KlLock;

struct Tape {
    PyObject_HEAD KlTape core;
    KlLock lock;     /* held by the thread that uses the tape */
    KlPyNode *nodes; /* [core.n_nodes] */
    size_t n_nodes_max;
    KlPyValue *values; /* [core.n_values] */
    size_t n_values_max;
    KlSlot *slots; /* [n_slots] */
    size_t n_slots, n_slots_max;
    KlExternal *externals; /* [n_externals_max] open addressing, by pointer */
    size_t n_externals, n_externals_max;
    uint64_t *axis_keys; /* [core.n_axes] identifies the batch of each axis */
    size_t n_axis_keys_max;
    KlInferred inferred; /* scratch of the recorder */
    bool is_running;     /* a replay is running, or a call is being recorded */
    bool is_kept;        /* open after a run in chunks: its leaves may have changed since */
    bool is_cut_off;     /* the bridge cut it off: no more calls, statistics already written */
    bool is_aside;       /* a run abandoned its calls, and the thread has left it */
    KlNodeId raised;     /* the call at which the last run in chunks raised, or KL_ID_NONE */
    int64_t leaf_bytes;  /* of the leaves that need no gradient */
    int64_t next_look;   /* leaf_bytes at which kl_tape_make_room() is called */
    PyObject *notes;     /* the dict that _core.notes() returns; NULL until Python asks for it */
};

/* How koila treats a torch callable that meets a LazyTensor. */
typedef enum {
    KL_CALL_OP,      /* recorded, if it has a row or no side effects; else live */
    KL_CALL_LIVE,    /* run now on real tensors; the results are lazy again */
    KL_CALL_READ,    /* run now on real tensors; the results are plain tensors */
    KL_CALL_ENTER,   /* a Python function of torch: it runs, and the calls inside are recorded */
    KL_CALL_HANDLER, /* a Python function of koila's replaces it: handler(func, args, kwargs) */
} KlCallKind;

typedef struct Function {
    PyObject_HEAD KlCallKind kind;
    PyObject *func;    /* the callable, by which it is looked up */
    PyObject *name;    /* str, torch's name for it */
    PyObject *handler; /* HANDLER: its replacement; an OP may have one too; else NULL */
    bool has_meta;     /* OP: its schema neither writes nor aliases, so meta tensors can infer it */
    bool returns_list; /* its schema returns a list of tensors */
    bool is_random;
    bool is_draw_like; /* draws a tensor like its argument, of which it reads only the sizes */
    const KlRow *row;  /* OP: its row of the op table, or NULL */
    KlPySignature signature; /* of the row */
    PyObject *container;     /* type of several outputs: tuple, or one of torch.return_types */
} Function;

/* A call that torch hands to koila. All of it is borrowed. */
typedef struct KlPyCall {
    const Function *function; /* its entry in the table; NULL: it has none */
    PyObject *func;
    PyObject *args;   /* tuple */
    PyObject *kwargs; /* dict, which may be empty and must not be changed */
    PyObject *out;    /* its `out=`, or NULL */
} KlPyCall;

#define KL_N_DEVICES 2

/* The first fields of torch's TensorImpl. The low half of the counts is that of strong references; the high half, below
 * one bit, is the weak count, of which all strong references together hold one. */
typedef struct KlImpl {
    void *vtable;
    uint64_t counts;
    const struct StorageImpl *storage; /* NULL: sparse, opaque, or undefined */
} KlImpl;

/* Everything that the whole module shares, filled once at import. It is a global, since koila._core cannot exist
 * twice in a process: torch forbids sub-interpreters. */
typedef struct KlPyState {
    PyTypeObject *lazy; /* LazyTensor */
    PyTypeObject *value_type, *tape_type, *function_type;
    PyObject *formats[4]; /* torch.memory_format, by KlFormat */
    PyObject *functions;  /* dict: torch callable or getset descriptor -> Function */
    PyObject *empty_tuple, *empty_dict;
    PyObject *requires_grad, *out, *device, *layout, *version, *data_ptr; /* str */
#define KL_BOUND(name) PyObject *name;
#include "bound.def"
#undef KL_BOUND
#define KL_OBJECT(type, name, module, attribute) type *name;
#define KL_SYMBOL(type, name, parameters, symbol) type(*name) parameters;
#include "torch.def"
#undef KL_OBJECT
#undef KL_SYMBOL
    PyObject *ndarray;                    /* numpy.ndarray, or NULL without numpy */
    PyObject *devices;                    /* list of torch.device; index = KlMeta.device */
    PyObject *device_names[KL_N_DEVICES]; /* str: device types whose autocast state is tracked */
    PyObject *dtypes[KL_N_DTYPES];
    const KlImpl *no_gradient; /* the impl that a tensor without a gradient has for one */
    Py_ssize_t slot_offset;    /* of LazyTensor's one slot, which holds its Value */
    uint64_t n_backwards;      /* backward passes so far: graphs older than one may be freed */
    uint64_t n_axis_keys;      /* batches so far */
    uint64_t n_looks;      /* ends of blocks, backwards, batches: leaves may have changed since */
    int64_t n_transforms;  /* torch.func transforms and tracers running on any thread */
    int64_t n_dual_levels; /* levels of forward-mode AD that are on */
    int64_t n_cut_off;     /* tapes that were cut off and still exist */
    int64_t n_aside;       /* tapes that are set aside */
    uint32_t reductions;   /* bit i: KlReduce i can be split */
    uint32_t blocked_halves, tiled_halves, emulated_halves; /* as KlCall's */
    int64_t block_width;                                    /* as KlCall's */
    bool is_flash_allowed;                                  /* as KlCall's */
    bool is_looking; /* koila reads a tensor's version or address: not its numbers */
} KlPyState;

/* -- py_state.c ---------------------------------------------------------------------------------- */

extern KlPyState kl_py;
/* The id of the checkpoint whose function this thread is recording; 0: none. */
extern _Thread_local uint32_t kl_py_region;
/* This thread is in the forward or backward of a custom function: torch's C++ gets what it returns: tensors. */
extern _Thread_local bool kl_py_is_in_function;

/* Converter for "O&" of PyArg_ParseTuple: the id of a node or value. IndexError if it is out of range. */
int kl_py_id(PyObject *object, void *id);

/* Raise that this torch lacks something, for versions.explained(). Returns -1. */
int kl_py_lacks(const char *what);

/* A type of the module, for objects that the garbage collector knows; `dealloc` NULL: they are cleared and freed. */
PyTypeObject *kl_py_new_type(PyObject *module, const char *name, size_t size, void *traverse,
                             void *clear, void *dealloc);

/* Drop the answer of a call that asks something. Returns 1 if it is True, else 0, or -1 if the call raised. */
static inline int
kl_py_truth(PyObject *answer)
{
    Py_XDECREF(answer);
    return answer == NULL ? -1 : answer == Py_True;
}

/* Borrowed: True or False. */
static inline PyObject *
kl_py_bool(bool flag)
{
    return flag ? Py_True : Py_False;
}

/* Drop references, of which each may be NULL, in that order. */
#define KL_DROP(...)                                                                               \
    kl_py_drop((PyObject *[]){__VA_ARGS__},                                                        \
               sizeof((PyObject *[]){__VA_ARGS__}) / sizeof(PyObject *))
static inline void
kl_py_drop(PyObject *const *objects, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        Py_XDECREF(objects[i]);
    }
}

/* Raise an exception that Python made, and drop it; NULL: making it raised. */
static inline void
kl_py_raise_made(PyObject *error)
{
    if (error != NULL) {
        PyErr_SetObject((PyObject *)Py_TYPE(error), error);
        Py_DECREF(error);
    }
}

/* Drop the result of a call made for its side effect, or to raise (PyErr_Format). Returns 0, or -1 if the call raised. */
static inline int
kl_py_done(PyObject *result)
{
    Py_XDECREF(result);
    return result != NULL ? 0 : -1;
}

/* -- py_meta.c: metadata of real tensors ------------------------------------------------------ */

int kl_meta_init(void);
/* Read dtype, shape, strides and requires_grad of a real tensor. Returns 0; 1 if a KlMeta cannot describe it (more
 * than KL_DIMS_MAX dims, not strided); -1 with an exception. */
int kl_meta_read(PyObject *tensor, KlMeta *meta);
/* Whether a tensor is strided and has the dtype and sizes of `meta`, except `size` in dim `dim` (-1: no exception);
 * -1 with an exception. */
int kl_meta_is_of(PyObject *tensor, const KlMeta *meta, int32_t dim, int64_t size);
/* New references: the shape as torch.Size, the strides as a tuple. */
PyObject *kl_meta_size(const KlMeta *meta);
PyObject *kl_meta_strides(const KlMeta *meta);

/* Whether two real tensors share memory, or torch cannot tell. */
bool kl_meta_may_alias(PyObject *left, PyObject *right);
/* Since torch 2.10 a tensor object holds a pointer to its TensorImpl right behind the object header. */
static inline const KlImpl *
kl_meta_impl(PyObject *tensor)
{
    return *(const KlImpl **)((char *)tensor + sizeof(PyObject));
}
/* Whether a real tensor requires a gradient; -1 on failure. */
int kl_meta_requires_grad(PyObject *tensor);
PyObject *kl_meta_ints(const int64_t *ints, int32_t n); /* a tuple */
/* (axis, dim, outer, inner) of a place of rows; None: there are none. */
PyObject *kl_py_place(const KlPlace *place);
/* Append an item, and drop the caller's reference to it. If the item is NULL, or on failure, drop the list instead, and
 * set `*list` to NULL; an exception is set then. */
void kl_py_add(PyObject **list, PyObject *item);
/* Set an item of a new tuple, which takes the caller's reference. If the item is NULL, drop the tuple, as above. */
void kl_py_put(PyObject **tuple, Py_ssize_t i, PyObject *item);
/* Index in kl_py.devices of a torch.device or its name; -1 if it is not known. */
int kl_meta_device_from(PyObject *device);
/* Set meta->device: 0 is the CPU, other devices are numbered as they are first met. 0 or -1. */
int kl_meta_read_device(PyObject *tensor, KlMeta *meta);
/* Whether torch asks the class of `object`, the user's own, what a call does. */
bool kl_meta_has_own_class(PyObject *object);
/* Whether a class is unwritten.py's, which tells koila of calls on a tensor. */
bool kl_meta_is_watched(PyObject *type);
/* torch.get_default_dtype() */
KlDtype kl_meta_default_dtype(void);
/* Index of a torch.dtype; KL_DTYPE_OTHER if koila has no name for it. */
KlDtype kl_meta_dtype_from(PyObject *dtype);

/* -- py_storage.c: the memory that tensors hold on the CPU --------------------------------------- */

int kl_storage_init(void);
/* Whether a write may leave a tensor's version as it is: its memory is not torch's own, or noted by aliases.py. */
bool kl_storage_may_be_shared(PyObject *tensor);

/* -- py_source.c: where a call was recorded ------------------------------------------------------- */

/* Set the folders (a tuple of str) whose files are not the user's. 0 or -1. */
int kl_source_init(PyObject *folders);
/* Note the innermost frame of the user's; the outermost of all, if none is the user's. */
void kl_source_note(KlPyNode *call);
/* New reference: text that says where node `id` was recorded, as "call 12, model.py:40". */
PyObject *kl_source_where(const Tape *tape, KlNodeId id);

/* -- py_context.c: what a call depends on besides its arguments -------------------------------- */

int kl_context_init(void);
/* Skip numbers of autograd's nodes. Returns the one that torch gives this thread's next node. */
uint64_t kl_context_clock(uint64_t n_skipped);
/* The id of the context in force, or -1 with an exception. Also sets *is_grad_enabled, if that is not NULL. */
int64_t kl_context_now(bool *is_grad_enabled);

/* The settings of autocast, which torch keeps while it is off too. */
typedef struct KlCasting {
    bool is_cache_enabled;
    bool is_enabled[KL_N_DEVICES];
    PyObject *dtype[KL_N_DEVICES]; /* borrowed: torch.dtype objects are immortal */
} KlCasting;

/* A replay switches from context to context, and ends in the one in which it began. */
typedef struct KlContextSwitch {
    uint32_t before, now;
    PyObject *guard;  /* of inference mode, if it differs from what was in force before */
    KlCasting outer;  /* what was in force before */
    bool is_nested;   /* `outer` was read: autocast may differ from it now */
    bool is_fresh;    /* grad mode has not been set yet */
    bool is_grad_off; /* no node records a graph, whatever its context says */
    bool is_aside;    /* nor does this one, among others that do */
} KlContextSwitch;

int kl_context_begin(KlContextSwitch *context);
int kl_context_switch(KlContextSwitch *context, uint32_t id);
/* Restore what was in force. -1 if that fails, or if an exception is set, which stays. */
int kl_context_end(KlContextSwitch *context);
bool kl_context_is_autocast(uint32_t id);
/* Enter a context manager until kl_context_end_outside() gets it. Returns `guard`; NULL on failure, or if it is NULL. */
PyObject *kl_context_enter(PyObject *guard);
/* Leave inference mode until kl_context_end_outside() gets the guard that this returns; NULL on failure. An
 * exception that is set by then stays. */
PyObject *kl_context_leave_inference(void);
void kl_context_end_outside(PyObject *guard);
/* Whether a call must run at once, since user code watches each call: hooks on saved tensors, dispatch modes,
 * forward-mode AD. If so, that is reported. -1 on failure. */
int kl_context_runs_at_once(PyObject *func);
/* Take the user's hooks and modes off until kl_context_end_outside() gets the guard; NULL on failure. */
PyObject *kl_context_leave_user(void);
/* Whether torch's C++ gets what this code returns: in a custom function, or below autograd. */
bool kl_context_is_for_torch(void);
/* kl_infer_call and kl_infer_saves in context `id`: under autocast, for inputs as torch would cast them. */
KlStatus kl_context_infer(const KlCall *call, uint32_t id, KlInferred *inferred, KlSaves *saves);

/* -- py_function.c: the table of torch's callables ----------------------------------------------- */

int kl_function_init(PyObject *module);
/* Borrowed: the entry of `func` in the table; NULL, without an exception, if it has none. */
Function *kl_function_find(PyObject *func);
/* kwargs: a dict; NULL or None: there are none. */
KlPyCall kl_function_call(const Function *function, PyObject *func, PyObject *args,
                          PyObject *kwargs);
/* Borrowed: the tensor, or tensors, that a call writes: `out=`, or its first argument; or NULL. */
PyObject *kl_function_written(const KlPyCall *call);
