/* SPDX-License-Identifier: Apache-2.0 */
/* py_run.h - what records calls and runs them, on the state of a program */
#pragma once

#include "py_tape.h"

/* -- py_turn.c: a tape is used by one thread at a time ------------------------------------------- */

/* The slow paths of kl_lock_take and kl_lock_give: another thread has, or wants, the lock. */
int kl_lock_wait(KlLock *lock);
void kl_lock_pass(KlLock *lock);
/* Take the lock. -1 with an exception if the wait was interrupted, or would never end. */
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

/* Until it ends, no other thread uses the tape, which is this thread's tape meanwhile. */
typedef struct KlTurn {
    Tape *tape;           /* owned */
    Tape *own;            /* owned: this thread's tape before, or NULL */
    bool is_visit;        /* it is another thread's tape */
    bool was_running;     /* tape->is_running when the turn began */
    bool was_in_function; /* kl_py_is_in_function then: what the turn runs is not in it */
} KlTurn;

int kl_turn_begin(KlTurn *turn, Tape *tape);
void kl_turn_end(KlTurn *turn);
/* Between these two, no other program draws from torch's generators. */
int kl_turn_draw(void);
void kl_turn_drawn(void);

/* -- py_promise.c: compares what was inferred with what torch returns ----------------------------- */

/* Check the sizes and dtype of `result`, which node `id` returned for `value`, on a chunk of `rows` rows (-1:
 * whole). 0, or -1 with an exception that names the call and its line. */
int kl_promise_check(const Tape *tape, KlNodeId id, KlValueId value, PyObject *result,
                     long long rows);
/* Raise that exception. Returns -1. */
int kl_promise_break(const Tape *tape, KlNodeId id, KlValueId value, PyObject *result,
                     long long rows);

/* -- py_rows.c: calls that have a row --------------------------------------------------------------- */

#define KL_ROWS_ILLEGAL 2

/* Record a call by its row. 1: recorded, `*results` is a new reference; 0: the row declines; -1: exception;
 * KL_ROWS_ILLEGAL: torch would refuse the call, so that the caller should run it for torch's own error. */
int kl_rows_record(Tape *tape, const KlPyCall *call, PyObject **results);

/* -- py_program.c: what the tape holds, as plain numbers -------------------------------------------- */

/* New reference: the ids in a slice of a program's array, as a list. */
PyObject *kl_program_ids(const KlIds *ids, KlSlice slice);
/* Converter for "O&": the tuple of a storage policy (see _core.pyi, _Policy) to a KlPolicy. */
int kl_schedule_policy(PyObject *object, void *policy);
/* Converter for "O&": a handle of stage() to the KlProgram * behind it. It raises if the tape changed since. */
int kl_program_of(PyObject *handle, void *program);
/* New reference: what a node that kl_tape_is_committed returns when it runs live. */
PyObject *kl_program_run_again(Tape *tape, KlNodeId id);

/* -- py_stage.c ---------------------------------------------------------------------------------- */

/* If a node copied from a device to the CPU, wait until the copy has arrived. 0 or -1. */
int kl_stage_wait_for_copy(const Tape *tape, const KlNode *node);

/* -- py_live.c: whole replay, and calls that run at once ------------------------------------------ */

/* Run every pending node of the tape on real tensors, in order, and close the tape. 0 or -1. */
int kl_live_run(Tape *tape);
/* Borrowed: the function that koila calls now on real tensors, in place of LazyTensors; NULL: none. */
extern _Thread_local PyObject *kl_live_called;
/* Make a value a leaf with its number, if the number is settled: its call need not run. Return whether it is. */
bool kl_live_settle(Tape *tape, KlValueId id);
/* Compute the number of a value, in chunks if replay.py can. 0 or -1. */
int kl_live_read(Value *value);
/* New reference: the real tensor of a value; runs the program if it is pending. */
PyObject *kl_live_force(Value *value);
/* What a call that runs at once reads of its LazyTensors, and whether its results are lazy. */
typedef enum {
    KL_LIVE_LAZY,    /* reads real tensors, with graphs; results are lazy */
    KL_LIVE_NUMBERS, /* reads numbers; results are lazy */
    KL_LIVE_SETTLED, /* reads real tensors; results are plain, except a written argument */
    KL_LIVE_PLAIN,   /* reads real tensors; results are plain */
    KL_LIVE_READ,    /* reads numbers; results are plain */
} KlLiveKind;

/* Run a call now on real tensors. */
PyObject *kl_live_call(const KlPyCall *call, KlLiveKind kind);
/* py_record.c: kl_live_call for a call that needs a real graph: pending calls are cut off, or run. */
PyObject *kl_record_live(const KlPyCall *call, KlLiveKind kind);

/* -- py_record.c: what happens when torch hands us a call --------------------------------------- */

/* Record a call of an op, or run it live: __torch_function__ for callables of kind OP. */
PyObject *kl_record_op(const KlPyCall *call);
/* LazyTensor.__torch_function__(func, types, args[, kwargs]), and __torch_dispatch__. */
PyObject *kl_record_torch_function(PyObject *const *args, Py_ssize_t n_args);
PyObject *kl_record_torch_dispatch(PyObject *module, PyObject *const *args, Py_ssize_t n_args);

/* -- py_dispatch.c: the __torch_function__ that torch finds on a LazyTensor ------------------------ */

/* New reference: LazyTensor's __torch_function__. */
PyObject *kl_dispatch_function(void);
/* Let LazyTensors answer the look-up of __torch_function__ without Python's attribute search. */
void kl_dispatch_install(void);

/* -- py_class.c: LazyTensor, the type ------------------------------------------------------------- */

int kl_class_init(PyObject *module);
