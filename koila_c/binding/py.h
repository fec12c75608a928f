/* SPDX-License-Identifier: Apache-2.0 */
/* py.h - shared by the binding: the types, the one state struct, and KlError -> exception.
 *
 * LazyTensor ──▶ Value ──▶ Tape ──▶ the Python call of each node, the real tensor of each value.
 * References point one way. A tape knows of a Value only by a borrowed pointer that the Value clears
 * when it dies: that is how a tape learns that nobody wants a number any more. */
#ifndef KL_PY_H
#define KL_PY_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "program.h"
#include "py_args.h"

/* Whether memory is kept and used again here; not where a sanitizer is to see who still points to it. */
#ifdef __SANITIZE_ADDRESS__
#define KL_IS_REUSED false
#else
#define KL_IS_REUSED true
#endif

typedef struct Tape Tape;

/* What a LazyTensor holds. *Attached*: one value of one tape. *Detached* (tape NULL): a real tensor, and
 * where its rows are; inputs before their first use, and everything that ran. A detached value is
 * attached again as a leaf when a call is recorded with it. */
/* What torch's argument parser is shown of a lazy. Where a number is wanted it takes a tensor of no dims
 * that needs no gradient, by its placeholder, and then asks for the number, which is read. */
typedef enum {
    KL_PLACEHOLDER_EMPTY, /* no number: of size 0 */
    KL_PLACEHOLDER_INT,   /* the others have no dims, and no memory */
    KL_PLACEHOLDER_BOOL,
    KL_PLACEHOLDER_FLOAT, /* or complex */
    KL_N_PLACEHOLDERS
} KlPlaceholder;

typedef struct Value {
    PyObject_HEAD Tape *tape; /* owned, or NULL */
    KlValueId id;             /* attached: its value on the tape */
    PyObject *real;           /* detached: the real tensor; attached: NULL */
    PyObject *size;           /* torch.Size, kept once asked for; NULL */
    PyObject *error;          /* detached, real NULL: why (py_failure.c); else NULL */
    KlPlace place;            /* detached: where its rows are; axis is then 0 or KL_ID_NONE */
    uint64_t axis_key;        /* detached: the batch it belongs to, good for every tape */
    int64_t rows;             /* detached: rows of that batch */
    KlValueId retained; /* attached: the value whose gradient it keeps; KL_ID_NONE: it keeps none */
    uint64_t epoch;     /* backwards that had run when it became live */
    bool is_input;      /* made by lazy(): it stays lazy for ever */
    bool is_touched;    /* the dispatcher met its placeholder: the object is not used again */
    bool is_lost;       /* detached: what shares its memory is not known, as KlStorage says */
    KlPlaceholder placeholder;
} Value;

/* One argument of a recorded call, in preorder: a SEQUENCE or MAPPING is followed by its `n` entries. */
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
    uint32_t n; /* entries, or the KlValueId of a VALUE */
    PyObject
        *object; /* OBJECT: the argument; NAMED: the namedtuple type; DICT: its keys; else NULL */
} KlSlot;

/* The Python call of one node. */
typedef struct KlPyNode {
    PyObject *func;
    PyObject *kwnames; /* tuple of the last arguments' names, or NULL */
    PyObject *error;   /* why it has no number: (type, args, notes) of what it raised; else NULL */
    PyObject *code;    /* of the user's innermost frame, for the source line; NULL where unknown */
    int lasti;
    uint32_t first_slot; /* into tape->slots */
    uint32_t n_slots;
    uint32_t n_args; /* positional and keyword together */
} KlPyNode;

/* What the binding knows of one value. */
typedef struct KlPyValue {
    PyObject *real;     /* leaves, and what ran: the tensor; NULL while pending or dead */
    Value *handle;      /* borrowed: the Value attached to it, or NULL when the user dropped it */
    PyObject *pointer;  /* leaves: data_ptr() when it entered; NULL where it has none */
    int64_t version;    /* _version of a leaf when it entered, of a number when it was found; -1: it
                            has none (inference tensor) */
    PyObject *result;   /* known: its value, without a graph; else NULL */
    PyObject *recorded; /* leaves whose requires_grad changed since: an alias as it was, or NULL */
    uint64_t looked_at; /* leaves: kl_py.n_looks when it was seen to be what it was */
    bool is_told;       /* hooks.bind is given its tensor where it runs live */
} KlPyValue;

typedef struct KlExternal {
    PyObject *tensor; /* borrowed from py_values[value].real; NULL: empty */
    KlValueId value;
} KlExternal;

/* What one thread has at a time, as often as it takes it; others wait (py_turn.c). Under the GIL. */
typedef struct KlLock {
    uint64_t holder; /* id of a thread state; 0: nobody */
    uint32_t depth;
} KlLock;

struct Tape {
    PyObject_HEAD KlTape core;
    KlLock lock;     /* whose turn it is */
    KlPyNode *nodes; /* [core.n_nodes] */
    size_t n_nodes_max;
    KlPyValue *values; /* [core.n_values] */
    size_t n_values_max;
    KlSlot *slots; /* [n_slots] */
    size_t n_slots, n_slots_max;
    KlExternal *externals; /* [n_externals_max] open addressing, by pointer */
    size_t n_externals, n_externals_max;
    uint64_t *axis_keys; /* [core.n_axes] the batch each axis stands for */
    size_t n_axis_keys_max;
    KlInferred inferred; /* scratch of the recorder */
    bool is_running;     /* a replay is under way, or a call is being recorded */
    bool is_kept;        /* a run in chunks left it open: what its leaves were may be gone by now */
    bool is_cut_off;     /* nothing is recorded onto it any more, and its statistics are written */
    KlNodeId raised;     /* the call at which the last run in chunks stopped; KL_ID_NONE */
    PyObject *memo; /* dict for the replay in chunks: the random grid; NULL until it is asked for */
};

/* What is done with a torch callable that meets a lazy. */
typedef enum {
    KL_CALL_OP,      /* has a row, or is a function without effect: recorded; else live */
    KL_CALL_LIVE,    /* run now on real tensors, results are lazy again */
    KL_CALL_READ,    /* run now on real tensors, results are plain */
    KL_CALL_ENTER,   /* a Python function: entered, what it calls is recorded */
    KL_CALL_HANDLER, /* a Python handler of ours: handler(func, args, kwargs) */
} KlCallKind;

typedef struct Function {
    PyObject_HEAD KlCallKind kind;
    PyObject *func;    /* the callable: its key in the table */
    PyObject *name;    /* str, as torch spells it */
    PyObject *handler; /* HANDLER: callable; else NULL */
    bool has_meta; /* OP: its schema neither writes nor aliases: it may be asked of meta tensors */
    bool returns_list; /* its schema returns a list of tensors */
    bool is_random;
    bool
        is_draw_like; /* draws a tensor of the sizes of its argument, whose numbers it does not read */
    const KlRow *row;         /* OP: NULL where there is no row */
    KlPySignature *signature; /* of the row, or NULL */
    PyObject
        *container; /* the type torch returns several outputs in: tuple, or one of return_types */
} Function;

/* The one struct of Python objects this module needs everywhere, filled once at import. A module cannot
 * live twice in a process that has torch (torch itself forbids sub-interpreters), so it is one global. */
typedef struct KlPyState {
    PyTypeObject *tensor_base; /* torch._C.TensorBase */
    PyTypeObject *tensor;      /* torch.Tensor */
    PyTypeObject *parameter;   /* torch.nn.Parameter */
    PyTypeObject *lazy;        /* LazyTensor */
    PyTypeObject *value_type, *tape_type, *function_type, *method_wrapper;
    PyObject *len_dispatch_stack;
    PyObject *no_function,
        *no_dispatch;    /* what stands for them in a class that overrides nothing */
    PyObject *size_type; /* torch.Size */
    PyObject *functions; /* dict: torch callable or getset descriptor -> Function */
    PyObject *empty_tuple, *empty_dict, *zero;
    PyObject *requires_grad, *out; /* str */
    PyObject *koila_error, *stale_error;
    PyObject *meta_infer;              /* meta.infer */
    PyObject *refuse;                  /* meta.refuse */
    PyObject *is_row_range;            /* meta.is_row_range */
    PyObject *thawed;                  /* engine.py: a frozen leaf as it was recorded */
    PyObject *note_draw, *check_draws; /* generators.py: where it stands at record, before a run */
    PyObject *move_on;                 /* generators.move_on: calls that wait draw now */
    PyObject *run_again;               /* draws.run_again: run a call live that drew in chunks */
    PyObject *bind_hooks;              /* hooks.bind */
    PyObject *bridge;                  /* bridge.py: a call that cannot be recorded */
    PyObject *before_write, *after_write; /* bridge.py: what parts read stays what it was */
    PyObject *note_ran;                   /* reports.note_whole: what ran whole, and for whom */
    PyObject *keep;             /* recomputed.keep: what a live call of a checkpoint saves */
    PyObject *device_of;        /* devices.py: which device a name without index means */
    PyObject *wait_for_copy;    /* devices.py: wait for a copy to the CPU */
    PyObject *choose_switches;  /* switches.py: put a setting of torch's switches in force */
    PyObject *runs_at_once;     /* surroundings.py: a call there is not recorded */
    PyObject *leave;            /* surroundings.py: the user's hooks and modes are taken off */
    PyObject *checksum;         /* meta.checksum */
    PyObject *draw_like;        /* meta.draw_like */
    PyObject *record_out;       /* outs.record: a call that writes to out= */
    PyObject *settle;           /* numbers.settle_outdated */
    PyObject *is_out_of_memory; /* errors.py: says nothing of the call that raised it */
    PyObject *note_write, *note_written; /* unwritten.py: what a call is to write on the side */
    PyObject *note_left;                 /* explain.py: a large plain tensor was made, or written */
    PyObject *is_in_hook;                /* engine.py */
    PyObject *name_of_file;              /* lines.py: what the user knows a file by */
    PyObject *read;         /* replay.read: make known in chunks, or say that it must be live */
    PyObject *in_transform; /* handlers.in_transform: what a call does inside torch.func */
    PyObject *reenter;      /* torch.overrides.enable_reentrant_dispatch */
    PyObject *skip_one_hop; /* enters a Python function without dispatching it again */
    PyObject *get_default_dtype;
    PyObject *is_alias_of; /* torch._C._is_alias_of */
    PyObject *strided;     /* torch.strided */
    PyObject *ndarray;     /* numpy.ndarray, or NULL where numpy is not there */
    PyObject *devices;     /* list of torch.device; index = KlMeta.device */
    PyObject *dtypes[KL_N_DTYPES];
    Py_ssize_t slot_offset; /* of LazyTensor's one slot */
    uint64_t n_backwards;   /* backward passes seen: what was live before one counts as spent */
    uint64_t n_axis_keys;   /* batches made */
    uint64_t n_looks; /* ends of blocks, backwards, batches: leaves may have been written since */
    int64_t n_transforms;                  /* of torch.func, and tracers, under way on any thread */
    int64_t n_dual_levels;                 /* of forward-mode AD that are on */
    int64_t n_cut_off;                     /* tapes that were cut off, and are there */
    uint32_t reductions;                   /* bit i: KlReduce i can be split */
    uint32_t blocked_halves, tiled_halves; /* as KlCall's */
    int64_t block_width;                   /* as KlCall's */
    bool is_flash_allowed;                 /* likewise */
    bool is_looking; /* at a tensor's version or address: nobody reads its numbers */
} KlPyState;

extern KlPyState kl_py;

/* "O&" of PyArg_ParseTuple: a number of a node or a value; what cannot be one is an IndexError. */
int kl_py_id(PyObject *object, void *id);

/* Raise the exception for `error`; returns NULL. */
PyObject *kl_py_raise(const KlError *error);

/* What a call gave that was made for its effect: 0, or -1 where it raised. */
static inline int
kl_py_done(PyObject *result)
{
    Py_XDECREF(result);
    return result != NULL ? 0 : -1;
}

/* -- py_lazy.c: LazyTensor and Value ---------------------------------------------------------- */

int kl_lazy_init(PyObject *module);
static inline bool
kl_lazy_check(PyObject *object)
{
    return Py_TYPE(object) == kl_py.lazy;
}
/* A lazy, or a real tensor of whatever class. */
static inline bool
kl_lazy_is_tensor(PyObject *object)
{
    return Py_IS_TYPE(object, kl_py.tensor) || kl_lazy_check(object) ||
           PyObject_TypeCheck(object, kl_py.tensor_base);
}
/* Borrowed: the Value of a LazyTensor. */
static inline Value *
kl_lazy_value(PyObject *lazy)
{
    return *(Value **)((char *)lazy + kl_py.slot_offset);
}
/* Let two LazyTensors of one kind of placeholder stand for each other's values. */
static inline void
kl_lazy_swap(PyObject *left, PyObject *right)
{
    Value *of_left = kl_lazy_value(left), *of_right = kl_lazy_value(right);
    bool is_touched = of_left->is_touched; /* of the object, not of its value */
    of_left->is_touched = of_right->is_touched;
    of_right->is_touched = is_touched;
    *(Value **)((char *)left + kl_py.slot_offset) = of_right;
    *(Value **)((char *)right + kl_py.slot_offset) = of_left;
}
/* Borrowed: the Value of a LazyTensor that stands for something, else NULL with an exception. */
Value *kl_lazy_checked(PyObject *lazy);
/* A new LazyTensor for value `id`, which becomes wanted. */
PyObject *kl_lazy_new(Tape *tape, KlValueId id);
/* The same, or one more for a value that has one. */
PyObject *kl_lazy_of(Tape *tape, KlValueId id);
/* A new LazyTensor that has a real tensor already. `rows`: where its rows are. */
PyObject *kl_lazy_new_detached(PyObject *real, const KlPlace *place, uint64_t axis_key,
                               int64_t rows, bool is_input);
/* Point a LazyTensor at another value (after an in-place call). */
void kl_lazy_move(Value *value, KlValueId id);
/* Keep the gradient of what a LazyTensor stands for; `is_new`: it asks for that. Else one that does follows
 * the tensor to another graph, which a write gave it, or a view that was taken again. */
void kl_lazy_retain(Value *value, bool is_new);
/* Give a value its real tensor and take it off its tape. */
void kl_lazy_detach(Value *value, PyObject *real);
/* The same for the lazy of value `id`, which nobody wants from the tape any more. */
void kl_lazy_leave(Tape *tape, KlValueId id, PyObject *real);
/* Borrowed: the real tensor, or NULL while pending. */
PyObject *kl_lazy_real(const Value *value);

/* Borrowed: the real tensor, or the number of a known value, or NULL while pending. */
PyObject *kl_lazy_number(const Value *value);

/* -- py_recycle.c: LazyTensor objects ----------------------------------------------------------- */

int kl_recycle_init(void);
/* A new LazyTensor that stands for nothing yet. */
PyObject *kl_recycle_take(KlPlaceholder kind);
bool kl_recycle_works(void);

/* -- py_tape.c: Tape -------------------------------------------------------------------------- */

int kl_tape_type_init(PyObject *module);
/* Borrowed: this thread's tape, made if there is none; NULL with an exception. */
Tape *kl_tape_open(void);
/* Borrowed: this thread's tape, or NULL without an exception. */
Tape *kl_tape_open_or_null(void);
/* The value that stands for a real tensor on the tape: a WHOLE leaf, one for each tensor object. */
int kl_tape_enter(Tape *tape, PyObject *tensor, KlValueId *value);
/* The leaf that stands for a real tensor, or KL_ID_NONE. */
KlValueId kl_tape_find(const Tape *tape, PyObject *tensor);
/* A batch of `rows` rows that no lazy has yet, as an axis. */
int kl_tape_new_axis(Tape *tape, int64_t rows, KlAxisId *axis);
/* The value of a lazy on `tape`, attaching it as a leaf where it is detached. */
int kl_tape_attach(Tape *tape, Value *lazy, KlValueId *value);
/* Make room on the binding's side for nodes and values that the core will append; they are empty. */
int kl_tape_reserve(Tape *tape, size_t n_nodes, size_t n_values);
/* The Value of value `id` died. */
void kl_tape_forget(Tape *tape, KlValueId id);
/* _version of a tensor; -1 where it keeps none. */
int64_t kl_stale_version(PyObject *tensor);
/* New reference: data_ptr() of a tensor, or NULL without an exception where it has none. */
PyObject *kl_stale_pointer(PyObject *tensor);
/* Whether `tensor` requires a gradient exactly if it did when `meta` was read; -1 on failure. */
int kl_stale_is_flagged(PyObject *tensor, const KlMeta *meta);
/* Check that no leaf was changed since it entered. */
int kl_tape_check_leaves(Tape *tape);
/* Numbers that left the tape with their lazies, and were written since: what waits, and reads the value as
 * it was, makes it again. */
void kl_stale_drop_numbers(Tape *tape);
/* Whether a value's number can stand for it: it is no part of other memory, which a write might have to
 * reach, and is still what it was. */
bool kl_stale_is_enough(const Tape *tape, KlValueId value);

/* Remember the version a leaf has now, after a replay wrote it. */
void kl_tape_refresh_leaf(Tape *tape, KlValueId id);
/* Whether a leaf is no longer what was recorded; -1 on failure. */
int kl_stale_is_changed(const Tape *tape, KlValueId leaf);
/* Whether pending calls that read a leaf need what it no longer is; -1 on failure. */
int kl_stale_is_lost(const Tape *tape, KlValueId leaf);
/* After a call that ran at once: the lazies whose tensors it wrote, or gave a graph, leave the tape, and are
 * met anew where they are used next. -1 on failure. */
int kl_stale_release(Tape *tape);
/* Every node ran: take the wanted values off the tape and forget the rest. */
void kl_tape_close(Tape *tape);
/* Forget what a run that raised left pending and nobody can reach, and the program if that was all of it.
 * An exception stays. */
void kl_tape_give_up(Tape *tape);

/* Let `tape` be this thread's; NULL: it has none. */
int kl_tape_use(Tape *tape);
/* A new reference to a tape that is no thread's yet. */
Tape *kl_tape_new(void);

static inline bool
kl_tape_check(PyObject *object)
{
    return Py_IS_TYPE(object, kl_py.tape_type);
}

/* -- py_turn.c: a tape is used by one thread at a time ------------------------------------------- */

/* What kl_lock_take and kl_lock_give do where others want the lock too. */
int kl_lock_wait(KlLock *lock);
void kl_lock_pass(KlLock *lock);
/* -1 with an exception: an interrupt, or waiting would never end. */
static inline int
kl_lock_take(KlLock *lock)
{
    const uint64_t thread = PyThreadState_Get()->id;
    if (lock->holder != 0 && lock->holder != thread) {
        return kl_lock_wait(lock);
    }
    lock->holder = thread;
    lock->depth++;
    return 0;
}
static inline void
kl_lock_give(KlLock *lock)
{
    if (--lock->depth == 0) {
        lock->holder = 0;
        kl_lock_pass(lock);
    }
}

/* While it lasts no other thread uses the tape, which is this thread's own. */
typedef struct KlTurn {
    Tape *tape;       /* owned */
    Tape *own;        /* owned: this thread's before, or NULL */
    bool is_visit;    /* it is another thread's tape */
    bool was_running; /* the tape, when the turn began */
} KlTurn;

int kl_turn_begin(KlTurn *turn, Tape *tape);
void kl_turn_end(KlTurn *turn);
/* Draw from torch's generators with no other program in between. */
int kl_turn_draw(void);
void kl_turn_drawn(void);

/* -- py_meta.c: what real tensors say of themselves ------------------------------------------- */

int kl_meta_init(void);
/* What libtorch calls `name`, or NULL. */
void *kl_meta_symbol(const char *name);
/* Read dtype, shape, strides and requires_grad of a real tensor. 0, or 1 where it has no KlMeta (more
 * than KL_DIMS_MAX dims, not strided), or -1 with an exception. */
int kl_meta_read(PyObject *tensor, KlMeta *meta);
/* Whether a tensor has memory laid out by strides, and the dtype and sizes of `meta`, but `size` in dim
 * `dim` (-1: in none); -1 with an exception. */
int kl_meta_is_of(PyObject *tensor, const KlMeta *meta, int32_t dim, int64_t size);
/* New references. */
PyObject *kl_meta_size(const KlMeta *meta);
PyObject *kl_meta_strides(const KlMeta *meta);

/* Whether two real tensors may share memory: so torch says, or it cannot tell. */
bool kl_meta_may_alias(PyObject *left, PyObject *right);
/* Whether the self-test found that tensors can be read through torch's C ABI. */
bool kl_meta_by_handle(void);
/* Whether a real tensor requires a gradient, or -1. */
int kl_meta_requires_grad(PyObject *tensor);
PyObject *kl_meta_ints(const int64_t *ints, int32_t n); /* a tuple */
/* Index of a torch.device or its name, or -1 for one that is not there. */
int kl_meta_device_from(PyObject *device);
/* 0: the CPU. Other devices get the next number the first time they are met. 0, or -1. */
int kl_meta_read_device(PyObject *tensor, KlMeta *meta);
/* torch.get_default_dtype() */
KlDtype kl_meta_default_dtype(void);
/* Index of a torch.dtype; KL_DTYPE_OTHER for one without a name here. */
KlDtype kl_meta_dtype_from(PyObject *dtype);

/* -- py_storage.c: the memory that tensors hold on the CPU --------------------------------------- */

int kl_storage_init(void);

/* -- py_call.c: calls as slots ----------------------------------------------------------------- */

/* Flatten a call onto the tape's slots. -1 and nothing added on failure. `inputs` receives the values
 * met, in order; NULL: not wanted. */
int kl_call_encode(Tape *tape, PyObject *args, PyObject *kwargs, KlPyNode *node, KlValueId **inputs,
                   size_t *n_inputs, size_t *n_inputs_max);
/* Give back what the slots from `first` on hold. */
void kl_call_truncate(Tape *tape, size_t first);
/* The arguments of node `id` as kl_call_run would pass them: a list of all, positional ones first. */
PyObject *kl_call_decode(Tape *tape, KlNodeId id, PyObject *(*value_of)(void *, KlValueId),
                         void *env);
/* (func, args, kwargs) of node `id`; value_of NULL: with None in place of tensors. */
PyObject *kl_call_describe(Tape *tape, KlNodeId id, PyObject *(*value_of)(void *, KlValueId),
                           void *env);
/* Call node `id` with the tensors of `env` ([n_values], borrowed or NULL). */
PyObject *kl_call_run(Tape *tape, KlNodeId id, PyObject *(*value_of)(void *, KlValueId), void *env);
/* A copy of an argument with every lazy replaced by its real tensor, or its number. */
PyObject *kl_call_real(PyObject *object);
/* A list or tuple like `object`, of its type, with item(context, entry) in place of each entry. */
PyObject *kl_call_map(PyObject *object, PyObject *(*item)(void *, PyObject *), void *context);
/* Call `visit` for each lazy that stands anywhere in `object`; stops at a non-zero return. */
int kl_call_visit(PyObject *object, int (*visit)(PyObject *lazy, void *), void *context);

/* -- py_failure.c: why a value has no number ----------------------------------------------------- */

/* The exception in flight, which stays, is why node `id` and what reads it have no number. */
void kl_failure_keep(Tape *tape, KlNodeId id);
/* Node `id` raised the exception that is set: it is told where the call was recorded, and all that depends
 * on the call has no number. */
void kl_failure_set(Tape *tape, KlNodeId id);
/* Raise what was kept; NULL: in words of our own. */
void kl_failure_raise(PyObject *error);
/* Borrowed: what was kept for a value whose call failed, or NULL. */
PyObject *kl_failure_find(const Tape *tape, KlValueId value);
/* Raise what was kept for a value whose call failed; -1. */
int kl_failure_tell(const Tape *tape, KlValueId value);
/* -1 with the exception where the call that makes `value` failed. */
static inline int
kl_failure_check(const Tape *tape, KlValueId value)
{
    return kl_tape_is_failed(&tape->core, value) ? kl_failure_tell(tape, value) : 0;
}

/* -- py_context.c: what a call depends on besides its arguments -------------------------------- */

int kl_context_init(void);
/* Whether libtorch itself says which context is in force. */
bool kl_context_is_direct(void);
/* The id of the context in force now, or -1. */
int64_t kl_context_now(bool *is_grad_enabled);
#define KL_N_DEVICES 2 /* device types whose autocast state is tracked */

/* Settings of autocast; they are there though it is off. */
typedef struct KlCasting {
    bool is_cache_enabled;
    bool is_enabled[KL_N_DEVICES];
    PyObject *dtype[KL_N_DEVICES]; /* borrowed: torch.dtype objects live for ever */
} KlCasting;

/* A replay goes from context to context and ends in the one it began in. */
typedef struct KlContextSwitch {
    uint32_t before, now;
    PyObject *guard;  /* of inference mode, where it differs from what was in force before */
    KlCasting outer;  /* what was in force before */
    bool is_cast;     /* something else is now */
    bool is_fresh;    /* grad mode has not been set yet */
    bool is_grad_off; /* no node records a graph, whatever its context says */
} KlContextSwitch;

int kl_context_begin(KlContextSwitch *context);
int kl_context_switch(KlContextSwitch *context, uint32_t id);
/* Restores what was in force; keeps an exception that is already set, and then returns -1. */
int kl_context_end(KlContextSwitch *context);
bool kl_context_is_autocast(uint32_t id);
/* Leave inference mode, if it is on, until kl_context_end_outside gets what this returns; NULL on failure.
 * An exception that is set by then stays. */
PyObject *kl_context_leave_inference(void);
void kl_context_end_outside(PyObject *guard);
/* Whether a call runs where it stands, for code of the user's sees each call there: hooks on saved tensors,
 * dispatch modes, forward-mode AD; -1. If so that is told. */
int kl_context_runs_at_once(PyObject *func);
/* Take the user's hooks and modes off, until kl_context_end_outside gets what this returns; NULL on failure. */
PyObject *kl_context_leave_user(void);
/* kl_infer_call and kl_infer_saves for a call in that context: autocast casts its inputs first. */
KlStatus kl_context_infer(const KlCall *call, uint32_t id, KlInferred *inferred, KlSaves *saves,
                          KlError *error);

/* -- py_promise.c: what was inferred, held against what torch gives ------------------------------- */

/* Check sizes and dtype of what node `id` gave for `value`, on a chunk of `rows` rows (-1: whole). 0, or
 * -1 with an exception that names the call and its line. */
int kl_promise_check(const Tape *tape, KlNodeId id, KlValueId value, PyObject *result,
                     long long rows);
/* Raise that exception; -1. */
int kl_promise_break(const Tape *tape, KlNodeId id, KlValueId value, PyObject *result,
                     long long rows);

/* -- py_stage.c ---------------------------------------------------------------------------------- */

/* Wait where a node copied something to the CPU, so that its numbers are there. */
int kl_stage_wait_for_copy(const Tape *tape, const KlNode *node);

/* -- py_record.c: what happens when torch hands us a call --------------------------------------- */

/* Record a call of an op, or run it live: what __torch_function__ does with it. */
PyObject *kl_record_op(const Function *function, PyObject *func, PyObject *args, PyObject *kwargs);
/* What LazyTensor.__torch_function__(func, types, args[, kwargs]) does. */
PyObject *kl_record_torch_function(PyObject *const *args, Py_ssize_t n_args);
PyObject *kl_record_torch_dispatch(PyObject *module, PyObject *const *args, Py_ssize_t n_args);

/* The body of a checkpoint that this thread is recording; 0: none. */
extern _Thread_local uint32_t kl_record_region;
/* Record one node for `call`; what torch's frame says is noted. -1 on failure. */
int kl_record_append(Tape *tape, const KlRecord *record, PyObject *func, KlPyNode *call,
                     KlNodeId *id);
/* The outputs of a node as torch returns them: `container` None for a single tensor, else its type. */
PyObject *kl_record_results(Tape *tape, KlNodeId id, PyObject *container);

/* -- py_dispatch.c: what torch's dispatch finds on a lazy ----------------------------------------- */

/* New reference: LazyTensor's __torch_function__. */
PyObject *kl_dispatch_function(PyObject *module);
/* Let lazies answer for it at once. */
void kl_dispatch_install(void);

/* -- py_rows.c: calls that have a row --------------------------------------------------------------- */

int kl_rows_init(void);
#define KL_ROWS_ILLEGAL 2

/* Record a call by its row. 1: recorded, `*results` is a new reference; 0: the row declines; -1;
 * KL_ROWS_ILLEGAL: torch refuses such a call, and its own words are wanted. */
int kl_rows_record(Tape *tape, const Function *function, PyObject *func, PyObject *args,
                   PyObject *kwargs, PyObject **results);

/* -- py_source.c: where a call was recorded ------------------------------------------------------- */

/* The folders, a tuple of str, whose files are not the user's. */
int kl_source_init(PyObject *folders);
/* Keep the innermost frame that is the user's; the outermost where none is. */
void kl_source_note(KlPyNode *call);
/* A new reference to a text that says where node `id` was recorded: "call 12, model.py:40". */
PyObject *kl_source_where(const Tape *tape, KlNodeId id);

/* -- py_view.c: views after a write ---------------------------------------------------------------- */

/* The value that stands for `value` after the last write to its storage, taking views again. */
int kl_view_current(Tape *tape, KlValueId value, KlValueId *current);
/* Let every lazy stand for what it shows after the writes recorded so far. */
int kl_view_refresh(Tape *tape);
/* The value whose graph is that of `value`: a write without a graph leaves the one there was. */
KlValueId kl_view_of_graph(const Tape *tape, KlValueId value);
/* Whether a value is, or is a view of, a detached view: no part of the graph of its storage. */
bool kl_view_is_detached(const Tape *tape, KlValueId value);
/* Likewise, one taken by x.data: a write through it leaves no version behind. */
bool kl_view_is_data(const Tape *tape, KlValueId value);
/* The value whose call took the view `value` first, before that was itself written. */
KlValueId kl_view_origin(const Tape *tape, KlValueId value);

/* -- py_function.c: what is known of torch's callables ------------------------------------------- */

int kl_function_init(PyObject *module);
/* Borrowed: what is known of `func`, or NULL (without an exception) for one never heard of. */
Function *kl_function_find(PyObject *func);
/* Whether a call writes its first argument, by its row or its name. */
bool kl_function_is_in_place(const Function *function);

/* -- py_program.c: what the tape holds, as plain numbers -------------------------------------------- */

/* [ids] of a part of an array of a program */
PyObject *kl_program_ids(const KlIds *ids, KlSlice slice);
/* A converter: (is_graph, keep_every, offload_every, n_pieces, n_light, n_across) to a KlHomes. */
int kl_schedule_homes(PyObject *object, void *homes);
/* The program that a handle of stage() stands for; NULL, and an error, where it is none, or not of this
 * tape as it is now. */
const KlProgram *kl_program_of(PyObject *handle, const Tape *tape);
/* Whether node `id` has drawn, or its statistics are committed, in chunks: a live run must not do it anew. */
int kl_program_is_committed(const Tape *tape, KlNodeId id);
/* Whether a call has statistics to write yet, though nothing else may ask for it. */
bool kl_program_has_effect(const Tape *tape);
/* New reference: what such a node returns when it runs live. */
PyObject *kl_program_run_again(Tape *tape, KlNodeId id);

/* -- py_gradient.c ------------------------------------------------------------------------------ */

/* Mark the values, of n_values, that get no gradient, as `gets` says of each tensor that could. */
int kl_gradient_find_unwanted(const Tape *tape, PyObject *gets, bool *is_unwanted);

/* -- py_live.c: one-chunk replay, and calls that run at once -------------------------------------- */

/* Run every pending node of the tape, in order, on real tensors, and close the tape. */
int kl_live_run(Tape *tape);
/* A run failed: what is drawn next comes after its draws, as in eager. The error that is set stays. */
void kl_live_draw_waiting(void);
/* Give a value its number, in chunks where replay.py says so. */
int kl_live_read(Value *value);
/* New reference: the real tensor of a value, run if need be. */
PyObject *kl_live_force(Value *value);
/* What a call that runs at once needs, and what becomes of its results. */
typedef enum {
    KL_LIVE_LAZY,    /* real graphs; results are lazy again */
    KL_LIVE_NUMBERS, /* numbers are enough; results are lazy again */
    KL_LIVE_SETTLED, /* real graphs; results stay plain, but for an argument itself, written */
    KL_LIVE_PLAIN,   /* real graphs; results stay plain */
    KL_LIVE_READ,    /* numbers are enough; results stay plain */
} KlLiveKind;

/* Run `func` now on real tensors. */
PyObject *kl_live_call(PyObject *func, PyObject *args, PyObject *kwargs, KlLiveKind kind);
/* py_record.c: the same for a call that needs the real graph: all that waits runs, and that is said. */
/* Whether torch asks the class of an operand what a call is. */
bool kl_record_has_own_class(PyObject *object);
PyObject *kl_record_live(PyObject *func, PyObject *args, PyObject *kwargs, KlLiveKind kind);

#endif
