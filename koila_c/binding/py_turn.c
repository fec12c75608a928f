/* SPDX-License-Identifier: Apache-2.0 */
/* py_turn.c - turns: a tape is used by one thread at a time.
 *
 * All of this runs under the GIL, which every call of Python or torch may give up: a thread that is in the middle of
 * something has its turn at the tape, and others wait without the GIL until it is over. Whoever waits first is next.
 * Another thread's program is run as its own thread would: while a turn lasts, that tape is this thread's. */
#include "py_run.h"

/* A waiting thread. Each is on the stack of its own thread. */
typedef struct Waiter {
    KlLock *lock;
    uint64_t thread;
    PyThread_type_lock gate; /* released once the lock is this thread's */
    struct Waiter *next;
} Waiter;

static Waiter *waiters; /* in the order in which they came */

/* Held while a program draws: it resets the generator for each chunk, and others must not draw in between. */
static KlLock draws;

/* -- waiting ------------------------------------------------------------------------------------------ */

/* The lock that a thread waits for, or NULL. */
static const KlLock *
awaited_by(uint64_t thread)
{
    const Waiter *waiter = waiters;
    while (waiter != NULL && waiter->thread != thread) {
        waiter = waiter->next;
    }
    return waiter != NULL ? waiter->lock : NULL;
}

/* Whether the holder of `lock` waits, perhaps through other threads, for `thread`. */
static bool
is_circle(const KlLock *lock, uint64_t thread)
{
    while (lock != NULL && lock->holder != thread) {
        lock = awaited_by(lock->holder);
    }
    return lock != NULL;
}

/* Whether a thread with that id exists: after fork() only one does. */
static bool
is_alive(uint64_t thread)
{
    PyThreadState *state = PyInterpreterState_ThreadHead(PyInterpreterState_Get());
    while (state != NULL && state->id != thread) {
        state = PyThreadState_Next(state);
    }
    return state != NULL;
}

/* Whether waiting would never end: then raises, and returns 1. -1 on failure. */
static int
is_hopeless(const KlLock *lock, uint64_t thread)
{
    if (is_circle(lock, thread)) {
        PyErr_SetString(kl_py.koila_error,
                        "two threads wait for each other: a value of a program that is running was "
                        "read by a program that it waits for");
        return 1;
    }
    if (!is_alive(lock->holder)) {
        PyErr_SetString(
            kl_py.koila_error,
            "the program that makes this value was running when the process was forked: "
            "it never ends here");
        return 1;
    }
    /* While autograd's own threads run hooks, the thread that called backward waits for them. */
    int is_worker = kl_py_truth(PyObject_CallNoArgs(kl_py.is_worker));
    if (is_worker > 0) {
        PyErr_SetString(kl_py.koila_error,
                        "a value was read while the program that makes it is running; read it "
                        "before backward(), or run it whole: koila.config(chunks=1)");
    }
    return is_worker;
}

/* The link of the list that points to a waiter; the last one, if it is in none or NULL. */
static Waiter **
link_to(const Waiter *waiter)
{
    Waiter **link = &waiters;
    while (*link != NULL && *link != waiter) {
        link = &(*link)->next;
    }
    return link;
}

static void
leave(const Waiter *waiter)
{
    Waiter **link = link_to(waiter);
    *link = *link != NULL ? waiter->next : NULL;
}

#define KL_WAIT_MICROSECONDS 50000 /* the main thread must wake up to handle signals */

int
kl_lock_wait(KlLock *lock)
{
    const uint64_t me = PyThreadState_Get()->id;
    if (is_hopeless(lock, me) != 0) {
        return -1;
    }
    if (lock->holder == 0) { /* is_hopeless() may have given up the GIL */
        return kl_lock_take(lock);
    }
    Waiter waiter = {.lock = lock, .thread = me, .gate = PyThread_allocate_lock()};
    if (waiter.gate == NULL) {
        return kl_py_done(PyErr_NoMemory());
    }
    (void)PyThread_acquire_lock(waiter.gate, NOWAIT_LOCK);
    *link_to(NULL) = &waiter;
    int result = 0;
    while (result == 0 && lock->holder != me) {
        Py_BEGIN_ALLOW_THREADS;
        (void)PyThread_acquire_lock_timed(waiter.gate, KL_WAIT_MICROSECONDS, 1);
        Py_END_ALLOW_THREADS;
        result = PyErr_CheckSignals();
        if (result == 0 && lock->holder != me && !is_alive(lock->holder)) {
            result = is_hopeless(lock, me) != 0 ? -1 : 0;
        }
    }
    leave(&waiter);
    PyThread_free_lock(waiter.gate);
    if (result < 0 && lock->holder == me) { /* the lock came after the interrupt */
        kl_lock_give(lock);
    }
    return result;
}

void
kl_lock_pass(KlLock *lock)
{
    for (Waiter *waiter = waiters; waiter != NULL; waiter = waiter->next) {
        if (waiter->lock == lock) {
            lock->holder = waiter->thread;
            lock->depth = 1;
            PyThread_release_lock(waiter->gate);
            leave(waiter);
            return;
        }
    }
}

/* -- turns -------------------------------------------------------------------------------------------------- */

int
kl_turn_begin(KlTurn *turn, Tape *tape)
{
    *turn = (KlTurn){.tape = (Tape *)Py_NewRef((PyObject *)tape)};
    if (kl_lock_take(&tape->lock) < 0) {
        Py_CLEAR(turn->tape);
        return -1;
    }
    turn->was_running = tape->is_running;
    turn->was_in_function = kl_py_is_in_function;
    kl_py_is_in_function = false;
    int taken = kl_tape_take_up(tape);
    Tape *own = kl_tape_open_or_null();
    if (taken == 0 && own == tape) {
        return 0;
    }
    turn->is_visit = true;
    turn->own = (Tape *)Py_XNewRef((PyObject *)own);
    if (taken < 0 || kl_tape_use(tape) < 0) {
        turn->is_visit = false;
        kl_turn_end(turn);
        return -1;
    }
    return 0;
}

void
kl_turn_end(KlTurn *turn)
{
    if (turn->is_visit) {
        if (turn->tape->is_aside) {
            kl_tape_abandon(&turn->tape->core, 0); /* the thread goes on with its own program */
        }
        (void)kl_tape_use(turn->own); /* cannot fail: the key is in the dict */
    }
    turn->tape->is_running =
        turn->was_running; /* an interrupt may have come before Python's `finally` */
    kl_py_is_in_function = turn->was_in_function;
    kl_lock_give(&turn->tape->lock);
    if (turn->tape->core.n_nodes > 0) {
        kl_tape_let_go(turn->tape);
    }
    Py_CLEAR(turn->own);
    Py_CLEAR(turn->tape);
}

/* -- for Python ---------------------------------------------------------------------------------------------- */

/* After Ctrl-C: advance the generators past the program's draws, and abandon its calls until one is asked for. */
static void
stop(Tape *tape)
{
    if (PyErr_Occurred() != NULL && !PyErr_ExceptionMatches(PyExc_Exception)) {
        kl_tape_abandon_pending(tape);
        (void)(!tape->is_running && kl_tape_end(tape, true));
    }
}

KL_DEFINE(held, args)
{
    PyObject *of = NULL, *func = NULL, *func_args = NULL, *kwargs = NULL;
    Tape *tape = NULL;
    if (!PyArg_ParseTuple(args, "OOO!O!:held", &of, &func, &PyTuple_Type, &func_args, &PyDict_Type,
                          &kwargs)) {
        return NULL;
    }
    if (kl_tape_check(of)) {
        tape = (Tape *)of;
    } else if (kl_lazy_check(of) && kl_lazy_value(of) != NULL) {
        tape = kl_lazy_value(of)->tape;
    }
    tape = tape != NULL ? tape : kl_tape_open();
    KlTurn turn;
    if (tape == NULL || kl_turn_begin(&turn, tape) < 0) {
        return NULL;
    }
    PyObject *result = PyObject_Call(func, func_args, kwargs);
    if (result == NULL) {
        stop(turn.tape);
    }
    kl_turn_end(&turn);
    return result;
}

int
kl_turn_draw(void)
{
    return kl_lock_take(&draws);
}

void
kl_turn_drawn(void)
{
    kl_lock_give(&draws);
}

KL_DEFINE(drawing, func)
{
    if (kl_turn_draw() < 0) {
        return NULL;
    }
    PyObject *result = PyObject_CallNoArgs(func);
    kl_turn_drawn();
    return result;
}
