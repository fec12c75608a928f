/* SPDX-License-Identifier: Apache-2.0 */
/* py_tape.h - the state of a program: the tape, the LazyTensors that stand for its values, views after a write, leaves
 * that changed, calls that failed, arguments as slots. These files hold one another, and call each other. */
#pragma once

#include "py_state.h"

/* -- py_tape.c: Tape -------------------------------------------------------------------------- */

int kl_tape_type_init(PyObject *module);
/* Borrowed: this thread's tape, created on first use; NULL with an exception. */
Tape *kl_tape_open(void);
/* Borrowed: this thread's tape; NULL, without an exception, if it has none. */
Tape *kl_tape_open_or_null(void);
/* Converters for "O&": the id of a value, or of a node, of this thread's tape. IndexError if there is none. */
int kl_tape_value_id(PyObject *object, void *id);
int kl_tape_node_id(PyObject *object, void *id);
/* The heads of the definitions of _core.<name>(id), where `id` is that of a value, or a node, of this thread's tape. */
#define KL_DEFINE_AT_VALUE(name, tape, id) KL_DEFINE_AT(name, kl_tape_value_id, tape, id)
#define KL_DEFINE_AT_NODE(name, tape, id) KL_DEFINE_AT(name, kl_tape_node_id, tape, id)
#define KL_DEFINE_AT(name, converter, tape, id)                                                    \
    static PyObject *name##_at(Tape *tape, uint32_t id);                                           \
    KL_DEFINE(name, object)                                                                        \
    {                                                                                              \
        uint32_t at = KL_ID_NONE;                                                                  \
        return converter(object, &at) ? name##_at(kl_tape_open_or_null(), at) : NULL;              \
    }                                                                                              \
    static PyObject *name##_at(Tape *tape, uint32_t id)
/* Likewise of one that is given other arguments, or none, and works on this thread's tape. */
#define KL_DEFINE_ON(name, tape, given)                                                            \
    static PyObject *name##_on(Tape *tape, PyObject *given __attribute__((unused)));               \
    KL_DEFINE(name, object)                                                                        \
    {                                                                                              \
        Tape *open = kl_tape_open();                                                               \
        return open != NULL ? name##_on(open, object) : NULL;                                      \
    }                                                                                              \
    static PyObject *name##_on(Tape *tape, PyObject *given __attribute__((unused)))
/* Enter a real tensor as a WHOLE leaf; a tensor object that is a leaf already keeps its value. 0 or -1. */
int kl_tape_enter(Tape *tape, PyObject *tensor, KlValueId *value);
/* The leaf of a real tensor, or KL_ID_NONE if it has not entered. */
KlValueId kl_tape_find(const Tape *tape, PyObject *tensor);
/* Add an axis of `rows` rows for a batch that no LazyTensor belongs to yet. */
int kl_tape_new_axis(Tape *tape, int64_t rows, KlAxisId *axis);
/* Find the value of a Value on `tape`; attach it as a leaf if it is detached. */
int kl_tape_attach(Tape *tape, Value *lazy, KlValueId *value);
/* Append one node for `call`, and note the user's line. -1 on failure. */
int kl_tape_append_call(Tape *tape, const KlRecord *record, PyObject *func, KlPyNode *call,
                        KlNodeId *id);
/* The Value of value `id` died: the user can no longer reach it. */
void kl_tape_forget(Tape *tape, KlValueId id);
/* All nodes ran: detach the values that the user can reach, and clear the tape. */
void kl_tape_close(Tape *tape);

/* Drop the pending calls (or, after a run that raised, only the abandoned ones) that nobody can reach, and that have
 * nothing to draw and no statistics to write; clear the tape if none is left. Return whether it did. An exception that
 * is set stays set. */
bool kl_tape_end(Tape *tape, bool is_abandoned_only);
/* Likewise if no value is reached, where user code goes on: nothing happens while koila uses the tape. If all that is
 * left was abandoned, and can be reached, set the tape aside: the thread's next program gets a tape of its own, which
 * is cleared at its end. */
void kl_tape_let_go(Tape *tape);

/* Run the pending calls that need no graph if that frees half as much memory as it takes, or more. 0 or -1. */
int kl_tape_make_room(Tape *tape);
/* Whether node `id` already drew, or wrote its statistics, in chunks: a live run must not do so again. -1 on failure. */
int kl_tape_is_committed(const Tape *tape, KlNodeId id);
/* Whether a pending call has statistics to write, even if nobody can reach its results. */
bool kl_tape_has_effect(const Tape *tape);
/* After a failed run: advance the generators past its pending draws, so that later draws come after them as in
 * eager. The exception that is set stays. */
void kl_tape_draw_waiting(void);
/* Likewise, and abandon the pending calls: they run when one of their values is asked for. */
void kl_tape_abandon_pending(Tape *tape);

/* Make `tape` this thread's tape; NULL: the thread has none. 0 or -1. An exception that is set stays set. */
int kl_tape_use(Tape *tape);
/* Make a tape that was set aside this thread's, if no other program of the thread is pending. 0 or -1. */
int kl_tape_take_up(Tape *tape);
/* A new tape that belongs to no thread yet. */
Tape *kl_tape_new(void);

/* Note the Value that the user has of value `id`; NULL: none. */
static inline void
kl_tape_hold(Tape *tape, KlValueId id, Value *handle)
{
    tape->values[id].handle = handle;
    kl_tape_want(&tape->core, id, handle != NULL);
}
/* Whether koila itself reads tensors, or a run of the tape (or NULL) is going on. */
static inline bool
kl_tape_is_busy(const Tape *tape)
{
    return kl_py.is_looking || (tape != NULL && tape->is_running);
}
static inline bool
kl_tape_check(PyObject *object)
{
    return Py_IS_TYPE(object, kl_py.tape_type);
}

/* -- py_lazy.c: Value, which a LazyTensor holds ---------------------------------------------------------- */

int kl_lazy_init(PyObject *module);
static inline bool
kl_lazy_check(PyObject *object)
{
    return Py_TYPE(object) == kl_py.lazy;
}
/* Whether `object` is a LazyTensor, or a real tensor of any class. */
static inline bool
kl_lazy_is_tensor(PyObject *object)
{
    return Py_IS_TYPE(object, kl_py.tensor) || kl_lazy_check(object) ||
           PyObject_TypeCheck(object, kl_py.tensor_base);
}
/* Borrowed: the Value of a LazyTensor, or NULL. */
static inline Value *
kl_lazy_value(PyObject *lazy)
{
    return *(Value **)((char *)lazy + kl_py.slot_offset);
}
/* Borrowed: the Value of a LazyTensor. NULL with an exception if it has none, or its call failed. */
Value *kl_lazy_checked(PyObject *lazy);
/* A new LazyTensor for value `id`, which the user can reach from now on. */
PyObject *kl_lazy_new(Tape *tape, KlValueId id);
/* A LazyTensor for value `id`; it shares the Value of one that exists. */
PyObject *kl_lazy_of(Tape *tape, KlValueId id);
/* The outputs of a node as torch returns them: container None for one tensor, else the type of several. */
PyObject *kl_lazy_results(Tape *tape, KlNodeId id, PyObject *container);
/* A new detached LazyTensor for a real tensor. `place`: where its rows are, or NULL. */
PyObject *kl_lazy_new_detached(PyObject *real, const KlPlace *place, uint64_t axis_key,
                               int64_t rows, bool is_input);
/* Point a Value at another value of its tape, after an in-place call. */
void kl_lazy_move(Value *value, KlValueId id);
/* Keep the gradient of the value that `value` points at now. `is_new`: the user asked for it; else only if it kept
 * one before, since a write or a view taken again moved it to another graph. */
void kl_lazy_retain(Value *value, bool is_new);
/* Give a Value its real tensor (NULL: its call failed) and detach it from its tape. */
void kl_lazy_detach(Value *value, PyObject *real);
/* Detach the Value of value `id` with tensor `real`; the tape no longer has to compute that value. */
void kl_lazy_leave(Tape *tape, KlValueId id, PyObject *real);
/* Borrowed: the real tensor, or NULL if it is pending or was written since. */
PyObject *kl_lazy_real(const Value *value);

/* Borrowed: the real tensor, or the number (without a graph) of a computed value; NULL while pending. */
PyObject *kl_lazy_number(const Value *value);

/* -- py_recycle.c: LazyTensor objects ---------------------------------------------------------- */

int kl_recycle_init(void);
/* A LazyTensor without a Value, recycled or new. */
PyObject *kl_recycle_take(KlPlaceholder kind);

/* -- py_view.c: views after a write ---------------------------------------------------------------- */

/* Find the value that shows `value` after the last write to its storage; takes views again. 0 or -1. */
int kl_view_current(Tape *tape, KlValueId value, KlValueId *current);
/* Move each LazyTensor to the value that it shows after the writes recorded so far. 0 or -1. */
int kl_view_refresh(Tape *tape);
/* The value whose graph `value` has: a write without a graph keeps the graph there was. */
KlValueId kl_view_of_graph(const Tape *tape, KlValueId value);
/* Whether a value is a detached view, or a view of one: no part of the graph of its storage. */
bool kl_view_is_detached(const Tape *tape, KlValueId value);
/* The same, taken by x.data: writes through it do not count as versions of x. */
bool kl_view_is_data(const Tape *tape, KlValueId value);
/* Whether a value is a leaf that as_leaf makes, or a view of one. */
bool kl_view_has_leaf(const Tape *tape, KlValueId value);
/* Whether other LazyTensors share the memory of a value that the program made, or are views of it. */
bool kl_view_is_shared(const Tape *tape, KlValueId id);
/* The value whose call first took the view `value`, before any write made views be taken again. */
KlValueId kl_view_origin(const Tape *tape, KlValueId value);

/* -- py_stale.c: whether leaves and numbers are what was recorded ---------------------------------- */

/* _version of a tensor; -1 if it counts none. */
int64_t kl_stale_version(PyObject *tensor);
/* data_ptr() of a tensor; 0 if it has none. */
uint64_t kl_stale_pointer(PyObject *tensor);
/* Whether `tensor` has the requires_grad flag that `meta` recorded; -1 on failure. */
int kl_stale_is_flagged(PyObject *tensor, const KlMeta *meta);
/* Raise StaleError if a leaf that pending calls need was changed since it entered. 0 or -1. */
int kl_stale_check_leaves(Tape *tape);
/* Drop the numbers whose tensors left the tape with their LazyTensors and were written since: pending calls that
 * read the value as it was compute it again. */
void kl_stale_drop_numbers(Tape *tape);
/* Whether pending calls can read a value's number instead of computing it: the number is unchanged, and no write
 * can reach it through other memory. */
bool kl_stale_is_enough(const Tape *tape, KlValueId value);
/* Record the current version of a leaf, after a replay wrote it. */
void kl_stale_refresh_leaf(Tape *tape, KlValueId id);
/* Whether a leaf differs from what was recorded; -1 on failure. */
int kl_stale_is_changed(const Tape *tape, KlValueId leaf);
/* Whether pending calls need what a leaf held before it was changed; -1 on failure. */
int kl_stale_is_lost(const Tape *tape, KlValueId leaf);
/* After a call that ran at once: detach the LazyTensors whose tensors it wrote or gave a graph; their next use
 * enters them anew. -1 on failure. */
int kl_stale_release(Tape *tape);

/* -- py_failure.c: why a value has no number ----------------------------------------------------- */

/* Store the exception in flight as the reason why node `id` and its readers have no number. It stays set. */
void kl_failure_keep(Tape *tape, KlNodeId id);
/* Node `id` raised the exception that is set: add a note with the call's line, and fail the node and all nodes that
 * depend on it. */
void kl_failure_set(Tape *tape, KlNodeId id);
/* Remove koila's frames from the traceback of the exception that is set (`hide_frames` in errors.py). */
void kl_failure_hide_frames(void);
/* Raise a stored exception; NULL: a KoilaError that says no more than that the call failed. */
void kl_failure_raise(PyObject *error);
/* Borrowed: the stored exception of a value whose call failed, or NULL. */
PyObject *kl_failure_find(const Tape *tape, KlValueId value);
/* -1 with the stored exception if the call that makes `value` failed, else 0. */
static inline int
kl_failure_check(const Tape *tape, KlValueId value)
{
    bool is_failed = kl_tape_is_failed(&tape->core, value);
    if (is_failed) {
        kl_failure_raise(kl_failure_find(tape, value));
    }
    return -(int)is_failed;
}

/* -- py_call.c: calls as slots ----------------------------------------------------------------- */

/* Append the arguments of a call to the tape's slots. On failure returns -1 and appends nothing. */
int kl_call_encode(Tape *tape, PyObject *args, PyObject *kwargs, KlPyNode *node);
/* New reference: the dict of the keyword arguments of a vectorcall; `names`: a tuple, or NULL. */
PyObject *kl_call_keywords(PyObject *const *values, PyObject *names);
/* Drop the slots from `first` on. */
void kl_call_truncate(Tape *tape, size_t first);
/* A list of the arguments of node `id`, positional ones first, as kl_call_run would pass them. */
PyObject *kl_call_decode(Tape *tape, KlNodeId id, PyObject *(*value_of)(void *, KlValueId),
                         void *env);
/* (func, args, kwargs) of node `id`; without a `value_of`, tensors are None. */
PyObject *kl_call_describe(Tape *tape, KlNodeId id, PyObject *(*value_of)(void *, KlValueId),
                           void *env);
/* Call node `id` with the tensors that value_of(env, value) returns (borrowed). */
PyObject *kl_call_run(Tape *tape, KlNodeId id, PyObject *(*value_of)(void *, KlValueId), void *env);
/* Call the function of a node with the list that kl_call_decode() made. */
PyObject *kl_call_vector(const KlPyNode *node, PyObject *args);
/* New reference: (func, args, kwargs) of a node, from that list. */
PyObject *kl_call_split(const KlPyNode *node, PyObject *args);
/* A copy of an argument, in which each LazyTensor is replaced by its real tensor, or its number. */
PyObject *kl_call_real(PyObject *object);
/* A list or tuple of the type of `object`, with item(context, entry) in place of each entry. */
PyObject *kl_call_map(PyObject *object, PyObject *(*item)(void *, PyObject *), void *context);
/* Call `visit` for each object in `object` for which `is_met` holds, nested ones too. Stops at, and returns, a non-zero
 * result. */
int kl_call_visit_as(PyObject *object, bool (*is_met)(PyObject *),
                     int (*visit)(PyObject *found, void *), void *context);
/* Likewise for each LazyTensor. */
int kl_call_visit(PyObject *object, int (*visit)(PyObject *lazy, void *), void *context);
/* kl_call_visit() for two objects, such as the arguments of a call; the second may be NULL. */
int kl_call_visit_both(PyObject *args, PyObject *kwargs, int (*visit)(PyObject *lazy, void *),
                       void *context);
/* Whether an argument, or the arguments of a call, hold an object for which `is_met` holds. */
bool kl_call_holds(PyObject *object, bool (*is_met)(PyObject *));
