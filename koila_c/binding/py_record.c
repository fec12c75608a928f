/* SPDX-License-Identifier: Apache-2.0 */
/* py_record.c - decides what happens to a call with a LazyTensor in it: it is recorded, entered, run at once, or
 * given to a handler. A call that koila does not understand runs at once. */
#include "py_run.h"

#include <frameobject.h>

#include "alloc.h"

/* -- what the arguments of a call are --------------------------------------------------------------- */

typedef struct LazyArgs {
    Tape *tape;            /* this thread's, or NULL */
    bool is_any_lazy;      /* one at least is not settled: recording the call gains something */
    bool is_any_of_rows;   /* one at least is settled, and has rows */
    bool is_any_foreign;   /* a call of another thread's program makes one at least */
    bool is_any_lost;      /* one at least may share memory with another: see KlStorage.is_lost */
    bool is_any_own_class; /* torch asks the class of an operand what the call does */
} LazyArgs;

/* Whether a value has its number, and recording calls on it gains nothing: it needs no gradient, or a backward
 * since has freed its graph. */
static bool
is_settled(const Value *value)
{
    if (value->tape != NULL || value->is_input || value->is_lost || value->real == NULL) {
        return false;
    }
    bool is_plain = kl_meta_requires_grad(value->real) == 0;
    if (is_plain || value->epoch == kl_py.n_backwards) {
        return is_plain;
    }
    int is_leaf = kl_py_truth(PyObject_GetAttrString(value->real, "is_leaf"));
    PyErr_Clear(); /* torch raises for a view of several whose base was written; such a view is no leaf */
    return is_leaf != 1; /* a leaf has no graph that a backward could free */
}

static bool
is_lost(const Value *value)
{
    const KlTape *core = value->tape != NULL ? &value->tape->core : NULL;
    return core != NULL ? core->storages[core->values[value->id].storage].is_lost : value->is_lost;
}

/* Whether a call on another tape than `tape` makes a value. A leaf that no call there writes is real: any tape can
 * enter it. */
static bool
is_made_on_other(const Value *value, const Tape *tape)
{
    const KlTape *core = value->tape != NULL && value->tape != tape ? &value->tape->core : NULL;
    return core != NULL &&
           (core->values[value->id].node != KL_ID_NONE || kl_tape_is_stale(core, value->id));
}

static int
take_up_one(PyObject *lazy, void *Py_UNUSED(context))
{
    const Value *value = kl_lazy_checked(lazy);
    bool is_made = value != NULL && is_made_on_other(value, kl_tape_open_or_null());
    return value == NULL || (is_made && kl_tape_take_up(value->tape) < 0) ? -1 : 0;
}

/* A call reads a value that was abandoned: go on with its program, unless the thread is in another one. 0 or -1. */
static int
take_up(const KlPyCall *call)
{
    return kl_py.n_aside > 0 ? kl_call_visit_both(call->args, call->kwargs, take_up_one, NULL) : 0;
}

static int
inspect_lazy(PyObject *lazy, void *context)
{
    LazyArgs *found = context;
    const Value *value = kl_lazy_checked(lazy);
    if (value == NULL) {
        return -1;
    }
    found->is_any_foreign = found->is_any_foreign || is_made_on_other(value, found->tape);
    if (!is_settled(value)) {
        found->is_any_lazy = true;
    } else if (kl_place_is_rows(&value->place)) {
        found->is_any_of_rows = true;
    }
    found->is_any_lost = found->is_any_lost || is_lost(value);
    return 0;
}

/* Add what an argument holds to `found`. 0 or -1. The quick answers come first: most arguments are LazyTensors,
 * plain tensors and ints. */
static int
inspect_argument(PyObject *argument, LazyArgs *found)
{
    if (kl_lazy_check(argument)) {
        return inspect_lazy(argument, found);
    }
    if (Py_IS_TYPE(argument, kl_py.tensor) || Py_IS_TYPE(argument, kl_py.parameter) ||
        PyLong_CheckExact(argument)) {
        return 0;
    }
    found->is_any_own_class =
        found->is_any_own_class || kl_call_holds(argument, kl_meta_has_own_class);
    bool is_watched = kl_meta_is_watched((PyObject *)Py_TYPE(argument));
    if (is_watched && kl_py_done(PyObject_CallOneArg(kl_py.write_elsewhere, argument)) < 0) {
        return -1;
    }
    return kl_call_visit(argument, inspect_lazy, found);
}

static int
inspect_arguments(const KlPyCall *call, LazyArgs *found)
{
    int result = 0;
    for (Py_ssize_t i = 0; result == 0 && i < PyTuple_GET_SIZE(call->args); i++) {
        result = inspect_argument(PyTuple_GET_ITEM(call->args, i), found);
    }
    bool has_kwargs = PyDict_GET_SIZE(call->kwargs) > 0;
    return result == 0 && has_kwargs ? inspect_argument(call->kwargs, found) : result;
}

/* Return asked(func, args, kwargs). */
static PyObject *
ask(PyObject *asked, const KlPyCall *call)
{
    return PyObject_CallFunctionObjArgs(asked, call->func, call->args, call->kwargs, NULL);
}

/* -- inference by meta tensors ------------------------------------------------------------------------ */

/* Read one output of meta.infer. It gives no strides where meta kernels may return another layout than real ones. */
static int
read_out(PyObject *item, KlMeta *meta)
{
    PyObject *dtype = NULL, *shape = NULL, *strides = NULL;
    int requires_grad = 0, device = 0;
    if (!PyArg_ParseTuple(item, "OOOpi", &dtype, &shape, &strides, &requires_grad, &device)) {
        return -1;
    }
    *meta = (KlMeta){.dtype = kl_meta_dtype_from(dtype),
                     .n_dims = (int32_t)PyTuple_GET_SIZE(shape),
                     .requires_grad = requires_grad,
                     .is_strided = strides != Py_None,
                     .device = (uint8_t)device,
                     .place = KL_PLACE_WHOLE};
    for (int32_t i = 0; i < meta->n_dims; i++) {
        meta->shape[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(shape, i));
        meta->strides[i] = meta->is_strided ? PyLong_AsLongLong(PyTuple_GET_ITEM(strides, i)) : 0;
    }
    return PyErr_Occurred() ? -1 : 0;
}

/* Read what meta.infer() answers into tape->inferred. 1: done, and `*container` is borrowed from it; 0: torch cannot
 * tell, run the call live; -1. */
static int
read_answer(Tape *tape, PyObject *answer, PyObject **container, KlSaves *saves)
{
    KlInferred *inferred = &tape->inferred;
    PyObject *outs = NULL;
    if (answer == NULL || answer == Py_None) {
        return answer == NULL ? -1 : 0;
    }
    if (!PyArg_ParseTuple(answer, "OO!(LLL)", container, &PyTuple_Type, &outs,
                          &saves->bytes_workspace, &saves->bytes_extra, &saves->bytes_backward)) {
        return -1;
    }
    uint32_t n = (uint32_t)PyTuple_GET_SIZE(outs);
    if (kl_ops_reserve_outs(inferred, n) != KL_OK) {
        return kl_py_done(PyErr_NoMemory());
    }
    int result = 1;
    for (uint32_t i = 0; i < n && result > 0; i++) {
        result = read_out(PyTuple_GET_ITEM(outs, i), &inferred->outs[i]) < 0 ? -1 : 1;
    }
    inferred->alias = KL_ALIAS_NONE;
    inferred->is_ordered = false;
    inferred->split =
        (KlSplit){.mode = KL_MODE_ONCE, .axis = KL_ID_NONE, .places = inferred->split.places};
    return result;
}

/* -- recording ------------------------------------------------------------------------------------------ */

/* Record a call of an op without a row, which then runs on whole values. 1: recorded; 0: it cannot be; -1. */
static int
record_by_meta(Tape *tape, const KlPyCall *given, PyObject **results)
{
    bool is_grad_enabled = false;
    int64_t context = kl_context_now(&is_grad_enabled);
    PyObject *container = NULL;
    KlPyNode call = {0};
    KlNodeId id = KL_ID_NONE;
    uint32_t n = 0;
    if (context < 0) {
        return -1;
    }
    if (kl_context_is_autocast((uint32_t)context)) {
        return 0; /* inference on meta tensors does not see the casts of autocast */
    }
    KlSaves saves = {0};
    PyObject *answer = ask(kl_py.meta_infer, given);
    int result = read_answer(tape, answer, &container, &saves);
    if (result > 0) {
        result = kl_call_encode(tape, given->args, given->kwargs, &call) < 0 ? -1 : 1;
    }
    if (result <= 0) {
        Py_XDECREF(answer);
        return result;
    }
    KlValueId *inputs = kl_alloc_resize(NULL, call.n_slots, sizeof(*inputs));
    for (uint32_t i = 0; inputs != NULL && i < call.n_slots; i++) {
        const KlSlot *slot = &tape->slots[call.first_slot + i];
        inputs[n] = slot->n;
        n += slot->kind == KL_SLOT_VALUE;
    }
    KlPlace *places = tape->inferred.split.places;
    tape->inferred.split.places = NULL; /* a call without a row reads every input whole */
    const KlRecord record = {
        .node = {.n_inputs = n,
                 .saves = saves,
                 .context = (uint32_t)context,
                 .is_random = given->function->is_random,
                 .is_grad_enabled = is_grad_enabled,
                 .refresh_of = KL_ID_NONE},
        .inputs = inputs,
        .inferred = &tape->inferred,
    };
    bool is_mixed = kl_tape_mixes_aside(&tape->core, n, inputs, 0);
    result = inputs == NULL ? kl_py_done(PyErr_NoMemory())
             : is_mixed     ? 0
             : kl_tape_append_call(tape, &record, given->func, &call, &id) < 0 ? -1
                                                                               : 1;
    tape->inferred.split.places = places;
    if (result <= 0) {
        kl_call_truncate(tape, call.first_slot);
        Py_CLEAR(call.kwnames);
    } else {
        *results = kl_lazy_results(tape, id, container);
        result = *results == NULL ? -1 : 1;
    }
    kl_alloc_free(inputs);
    Py_DECREF(answer);
    return result;
}

/* randn_like(x) and the like read only sizes. With no other draw pending, they draw at once: the same numbers as in
 * eager. */
static PyObject *
draw_now(const KlPyCall *call)
{
    if (kl_turn_draw() < 0) {
        return NULL;
    }
    PyObject *drawn = ask(kl_py.draw_like, call);
    kl_turn_drawn();
    return drawn;
}

static int
has_gradient(PyObject *lazy, void *Py_UNUSED(context))
{
    const Value *value = kl_lazy_value(lazy);
    if (value->tape != NULL) {
        return value->tape->core.values[value->id].meta.requires_grad;
    }
    return value->real != NULL ? kl_meta_requires_grad(value->real) : 0; /* NULL: its call failed */
}

/* Whether a pending call reads the memory of a plain tensor, and so must run before that is written. */
static bool
is_read(const Tape *tape, PyObject *tensor)
{
    bool is_found = false;
    for (size_t i = 0; i < tape->core.n_values && !is_found; i++) {
        const KlValue *value = &tape->core.values[i];
        is_found = value->node == KL_ID_NONE && value->n_pending > 0 &&
                   kl_meta_may_alias(tensor, tape->values[i].real);
    }
    return is_found;
}

/* Whether a pending call reads the memory of a LazyTensor that has its real tensor. */
static bool
is_lazy_read(const Tape *tape, PyObject *lazy)
{
    const Value *value = kl_lazy_value(lazy);
    return tape != NULL && !tape->is_running && value->real != NULL && is_read(tape, value->real);
}

static int
is_attached(PyObject *lazy, void *tape)
{
    return kl_lazy_value(lazy)->tape == tape || is_lazy_read(tape, lazy);
}

/* What a call writes, as bits: plain tensors that pending calls read, plain tensors that they do not, others. */
enum { KL_READ = 1, KL_UNREAD = 2, KL_OTHER = 4 };

static unsigned
kinds_written(const Tape *tape, PyObject *target)
{
    unsigned kinds = 0;
    if (PyTuple_Check(target) || PyList_Check(target)) {
        for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(target); i++) {
            kinds |= kinds_written(tape, PySequence_Fast_GET_ITEM(target, i));
        }
        return kinds;
    }
    bool is_plain = PyObject_TypeCheck(target, kl_py.tensor_base) && !kl_lazy_check(target);
    return !is_plain ? KL_OTHER : is_read(tape, target) ? KL_READ : KL_UNREAD;
}

static bool
is_target_read(const Tape *tape, const KlPyCall *call)
{
    PyObject *first = PyTuple_GET_SIZE(call->args) > 0 ? PyTuple_GET_ITEM(call->args, 0) : NULL;
    return (call->out != NULL && (kinds_written(tape, call->out) & KL_READ) != 0) ||
           (first != NULL && (kinds_written(tape, first) & KL_READ) != 0);
}

/* Whether a call meets pending work of this thread's tape: it is given pending values, or writes or reads memory
 * that pending calls read. False during a replay. */
static bool
is_waiting(const KlPyCall *call)
{
    Tape *tape = kl_tape_open_or_null();
    return tape != NULL && !tape->is_running &&
           (is_target_read(tape, call) ||
            kl_call_visit_both(call->args, call->kwargs, is_attached, tape) != 0);
}

/* Run a call that needs real graphs. If it meets pending work, bridge.py cuts that off before the call, or runs it
 * whole and reports that. */
PyObject *
kl_record_live(const KlPyCall *call, KlLiveKind kind)
{
    if (!is_waiting(call)) {
        return kl_live_call(call, kind);
    }
    const Tape *tape = kl_tape_open_or_null();
    bool has_graph = false; /* pending calls without a graph are cheap: labels, masks */
    for (size_t i = 0; i < tape->core.n_nodes; i++) {
        const KlNode *node = &tape->core.nodes[i];
        has_graph =
            has_graph || (!node->is_done && tape->core.values[node->first_out].meta.requires_grad);
    }
    return PyObject_CallFunctionObjArgs(kl_py.bridge, call->func, call->args, call->kwargs,
                                        kl_py_bool(has_graph), kl_py_bool(kind == KL_LIVE_PLAIN),
                                        NULL);
}

/* A call may write this LazyTensor's real tensor: run the pending calls that read its memory before. */
static int
run_readers(PyObject *lazy, void *Py_UNUSED(context))
{
    Tape *tape = kl_tape_open_or_null();
    return is_lazy_read(tape, lazy) ? kl_live_run(tape) : 0;
}

static int
run_readers_of(const KlPyCall *call)
{
    return kl_call_visit_both(call->args, call->out, run_readers, NULL);
}

/* Whether a call, by its row, writes only plain tensors that no pending call reads. -1 on failure. */
static int
is_into_plain_only(const KlPyCall *call)
{
    const KlRow *row = call->function->row;
    bool is_known = call->out != NULL || (row != NULL && row->kind == KL_ROW_INPLACE);
    PyObject *written = is_known ? kl_function_written(call) : NULL;
    Tape *tape = kl_tape_open();
    if (tape == NULL || kl_lock_take(&tape->lock) < 0) {
        return -1;
    }
    bool result = written != NULL && (kinds_written(tape, written) & ~(unsigned)KL_UNREAD) == 0;
    kl_lock_give(&tape->lock);
    return result;
}

/* Before a random call that runs now: advance the generators past pending draws, which come first in eager. 0 or
 * -1. */
static int
draw_pending_first(const Function *function)
{
    const Tape *tape = kl_tape_open_or_null();
    if (!function->is_random || tape == NULL || tape->is_running ||
        !kl_tape_has_draw(&tape->core)) {
        return 0;
    }
    return kl_py_done(PyObject_CallNoArgs(kl_py.move_on));
}

/* Whether a call may write a tensor that it is given. */
static bool
may_write(const KlPyCall *call)
{
    const Function *function = call->function;
    bool is_known = function->has_meta || (function->row != NULL && function->row->effects == 0);
    return call->out != NULL || !is_known;
}

static bool
is_number(PyObject *object)
{
    return PyLong_Check(object) || PyFloat_Check(object) || PyComplex_Check(object);
}

/* Whether a call writes its first argument, a LazyTensor, and its other arguments are numbers: fill_diagonal_(0). */
static bool
writes_one_with_numbers(const KlPyCall *call)
{
    Py_ssize_t at = 0;
    PyObject *word = NULL, *given = NULL, *written = kl_function_written(call);
    bool result = call->out == NULL && written != NULL && kl_lazy_check(written);
    for (Py_ssize_t i = 1; result && i < PyTuple_GET_SIZE(call->args); i++) {
        result = is_number(PyTuple_GET_ITEM(call->args, i));
    }
    while (result && PyDict_Next(call->kwargs, &at, &word, &given)) {
        result = is_number(given);
    }
    return result;
}

/* Whether a call without a row writes one value whose number is known by now, and has left the tape. It can write
 * that number at once, and the pending calls can still be cut off. -1 on failure. */
static int
writes_computed_number(const KlPyCall *call)
{
    if (call->function->row != NULL || !writes_one_with_numbers(call)) {
        return 0;
    }
    Value *value = kl_lazy_value(PyTuple_GET_ITEM(call->args, 0));
    if (value->tape == NULL || value->tape != kl_tape_open_or_null() || value->tape->is_running) {
        return 0;
    }
    const KlValue *of = &value->tape->core.values[value->id];
    if (of->node == KL_ID_NONE || of->view_of != KL_ID_NONE || of->meta.requires_grad) {
        return 0;
    }
    return kl_live_read(value) < 0 ? -1 : value->tape == NULL;
}

static int
is_lost_lazy(PyObject *lazy, void *Py_UNUSED(context))
{
    return is_lost(kl_lazy_value(lazy));
}

/* Refuse a write to a LazyTensor that may share memory with another: nobody knows whether the other would change. 0
 * or -1. */
static int
refuse_lost(const KlPyCall *call)
{
    PyObject *written = kl_function_written(call);
    int result = written != NULL ? kl_call_visit(written, is_lost_lazy, NULL) : 0;
    if (result > 0) {
        PyErr_Format(kl_py.koila_error,
                     "%U: what is written ran in chunks, and may share its memory with another "
                     "tensor, or may not, for how it would lie in memory whole is not known; write "
                     "a clone of it",
                     call->function->name);
    }
    return result != 0 ? -1 : 0;
}

/* Run a call that is not recorded. If it takes no gradient and its results share no memory with its LazyTensors,
 * their numbers are enough, and pending calls need no graph yet. A call that user code watches (`is_of_user`) is
 * made only once: it gets real graphs at once, not numbers first. */
static PyObject *
run_now(const KlPyCall *call, bool is_of_user)
{
    bool is_grad_enabled = false;
    if (kl_context_now(&is_grad_enabled) < 0) {
        return NULL;
    }
    int is_number_known = is_of_user ? 0 : writes_computed_number(call);
    if (is_number_known != 0) {
        bool is_ready = is_number_known > 0 && draw_pending_first(call->function) >= 0 &&
                        kl_call_visit(call->args, run_readers, NULL) >= 0;
        return is_ready ? kl_live_call(call, KL_LIVE_SETTLED) : NULL;
    }
    bool is_pure = call->function->has_meta && call->out == NULL && !is_of_user;
    int is_plain = is_pure ? 1 : is_of_user ? 0 : is_into_plain_only(call);
    int needs_graph = is_plain < 0 ? -1 : !is_plain;
    if (needs_graph == 0 && is_grad_enabled) {
        needs_graph = kl_call_visit_both(call->args, call->kwargs, has_gradient, NULL);
    }
    bool is_bridge =
        needs_graph > 0 && is_waiting(call); /* bridge.py copies what the call writes */
    bool is_writing = !is_bridge && may_write(call);
    if (needs_graph < 0 || (is_writing && run_readers_of(call) < 0) ||
        draw_pending_first(call->function) < 0) {
        return NULL;
    }
    if (needs_graph == 0) {
        PyObject *result = kl_live_call(call, KL_LIVE_NUMBERS);
        if (result != Py_NotImplemented) {
            return result;
        }
        Py_DECREF(result);
    }
    return kl_record_live(call, KL_LIVE_LAZY);
}

/* Whether this thread is running the program of `tape`: calls made meanwhile are no part of it. */
static bool
is_in_a_run(const Tape *tape)
{
    uint64_t holder = tape->lock.holder;
    return tape->is_running && (holder == 0 || holder == PyThreadState_Get()->id);
}

/* Record a call by its row, or by meta tensors, while no other thread uses the tape. Returns as kl_rows_record. */
static int
record_on(Tape *tape, const KlPyCall *call, PyObject **results)
{
    int recorded = 0;
    if (kl_lock_take(&tape->lock) < 0) {
        return -1;
    }
    tape->is_running = true; /* calls of a finalizer that runs meanwhile are not recorded */
    recorded = call->function->row != NULL ? kl_rows_record(tape, call, results)
                                           : record_by_meta(tape, call, results);
    tape->is_running = false;
    kl_lock_give(&tape->lock);
    if (recorded > 0 && tape->leaf_bytes >= tape->next_look && kl_tape_make_room(tape) < 0) {
        Py_CLEAR(*results);
        return -1;
    }
    return recorded;
}

/* Call a handler. NULL with its exception, whose traceback leads from the user's line to torch's. */
static PyObject *
call_handler(PyObject *handler, const KlPyCall *call)
{
    PyObject *result = ask(handler, call);
    if (result == NULL) {
        kl_failure_hide_frames();
    }
    return result;
}

/* Offer a call to a handler. 1: it took the call, `*results` is a new reference; 0: it declined; -1. */
static int
offer(PyObject *handler, const KlPyCall *call, PyObject **results)
{
    if (handler == NULL) {
        return 0;
    }
    *results = call_handler(handler, call);
    if (*results == Py_NotImplemented) {
        Py_CLEAR(*results);
        return 0;
    }
    return *results == NULL ? -1 : 1;
}

/* Record a call. 1: recorded, `*results` is a new reference; 0: run it now; -1; KL_ROWS_ILLEGAL. The row comes
 * before meta tensors: what they infer runs on the whole batch. */
static int
record(Tape *tape, const KlPyCall *call, PyObject **results)
{
    const Function *function = call->function;
    if (call->out != NULL) {
        return offer(function->is_random ? NULL : kl_py.record_out, call, results);
    }
    int recorded = function->row != NULL ? record_on(tape, call, results) : 0;
    if (recorded == 0) {
        recorded = offer(function->handler, call, results);
    }
    if (recorded == 0 && function->row == NULL && function->has_meta) {
        recorded = record_on(tape, call, results);
    }
    return recorded;
}

/* Whether torch's engine, or a replay, calls a hook or a custom backward, which must get tensors, and this call does
 * not write; -1: failure. */
static int
is_in_hook(const Tape *tape, const KlPyCall *call)
{
    bool is_running = is_in_a_run(tape), is_grad_enabled = true;
    if (may_write(call) || (!is_running && kl_py.lib_graph_task() < 0)) {
        return 0;
    }
    return !is_running ? kl_py_truth(PyObject_CallNoArgs(kl_py.is_in_hook))
           : kl_context_now(&is_grad_enabled) < 0 ? -1
                                                  : !is_grad_enabled;
}

/* A call is not recorded: raise what torch raises for illegal sizes and dtypes, before pending calls run for it. 0
 * or -1. */
static int
raise_if_illegal(const KlPyCall *call, bool is_illegal)
{
    bool can_ask = call->function->row != NULL || call->function->has_meta;
    if (!can_ask || call->function->is_random || may_write(call)) {
        return 0;
    }
    PyObject *error = PyObject_CallFunctionObjArgs(kl_py.refusal, call->func, call->args,
                                                   call->kwargs, kl_py_bool(is_illegal), NULL);
    if (error != NULL && error != Py_None) {
        kl_failure_raise(error); /* here, for its traceback to have the user's frames alone */
    }
    Py_XDECREF(error);
    return PyErr_Occurred() != NULL ? -1 : 0;
}

/* Run a call whose results torch's C++ gets. With gradients off, numbers of its LazyTensors are enough. */
static PyObject *
call_for_tensors(const KlPyCall *call)
{
    bool is_grad_enabled = false;
    if (draw_pending_first(call->function) < 0 || kl_context_now(&is_grad_enabled) < 0) {
        return NULL;
    }
    return is_grad_enabled || may_write(call) ? kl_record_live(call, KL_LIVE_PLAIN)
                                              : kl_live_call(call, KL_LIVE_READ);
}

PyObject *
kl_record_op(const KlPyCall *call)
{
    const Function *function = call->function;
    LazyArgs found = {.tape = take_up(call) < 0 ? NULL : kl_tape_open()};
    if (found.tape == NULL || inspect_arguments(call, &found) < 0 ||
        (found.is_any_lost && refuse_lost(call) < 0)) {
        return NULL;
    }
    int is_plain = kl_context_is_for_torch() ? 1 : is_in_hook(found.tape, call);
    if (is_plain != 0) {
        return is_plain < 0 ? NULL : call_for_tensors(call);
    }
    /* In a checkpoint's body a normalization is recorded: backward updates its statistics once more. */
    bool is_again = kl_py_region != 0 && function->row != NULL && function->row->is_batch_norm;
    bool is_writing = !found.is_any_lazy && !is_again && may_write(call);
    bool is_detach = function->row != NULL && kl_ops_is_detached(function->row);
    /* A settled value with rows is recorded with, as the batch is: what reads it can then run in chunks. */
    if (!found.is_any_lazy && (is_writing || is_detach || !found.is_any_of_rows)) {
        Tape *tape = found.tape;
        if (is_writing && !is_in_a_run(tape) && is_target_read(tape, call)) {
            return kl_record_live(call, KL_LIVE_LAZY);
        }
        if (draw_pending_first(function) < 0 || (is_writing && run_readers_of(call) < 0)) {
            return NULL;
        }
        /* While calls are pending, the results stay lazy, so that koila sees writes with them. */
        bool is_waited_for = tape->core.n_done < tape->core.n_nodes || kl_py.n_cut_off > 0;
        bool is_lazy = is_waited_for || found.is_any_of_rows;
        return kl_live_call(call, is_lazy ? KL_LIVE_LAZY : KL_LIVE_SETTLED);
    }
    bool is_ours = !found.is_any_foreign && !is_in_a_run(found.tape);
    int is_of_user = !is_ours                 ? 0
                     : found.is_any_own_class ? 1
                                              : kl_context_runs_at_once(call->func);
    if (is_of_user < 0) {
        return NULL;
    }
    if (is_ours && is_of_user == 0) {
        PyObject *results = NULL;
        if (function->is_draw_like && !kl_tape_has_draw(&found.tape->core)) {
            PyObject *drawn = draw_now(call);
            if (drawn != Py_NotImplemented) {
                return drawn;
            }
            Py_DECREF(drawn);
        }
        int recorded = record(found.tape, call, &results);
        bool is_illegal = recorded == KL_ROWS_ILLEGAL;
        if (recorded != 0 && !is_illegal) {
            return recorded < 0 ? NULL : results;
        }
        int refused = raise_if_illegal(call, is_illegal);
        if (refused < 0 || is_illegal) {
            return refused < 0 ? NULL : kl_live_call(call, KL_LIVE_LAZY);
        }
    }
    return run_now(call, is_of_user > 0);
}

/* Read what torch gives to the hook of that name: func, types, args and perhaps kwargs. 0 or -1. */
static int
read_call(const char *hook, PyObject *const *args, Py_ssize_t n_args, KlPyCall *call)
{
    if (n_args != 3 && n_args != 4) {
        return kl_py_done(
            PyErr_Format(PyExc_TypeError, "%s takes func, types, args, kwargs", hook));
    }
    *call =
        kl_function_call(kl_function_find(args[0]), args[0], args[2], n_args == 4 ? args[3] : NULL);
    return 0;
}

PyObject *
kl_record_torch_function(PyObject *const *args, Py_ssize_t n_args)
{
    KlPyCall call;
    if (read_call("__torch_function__", args, n_args, &call) < 0) {
        return NULL;
    }
    PyObject *types = args[1];
    if (kl_py.n_transforms > 0) {
        PyObject *result = ask(kl_py.in_transform, &call);
        if (result != Py_NotImplemented) {
            return result;
        }
        Py_DECREF(result);
    }
    if (call.function == NULL) {
        call.func = PyObject_CallOneArg(kl_py.own_of, call.func);
        call.function = call.func != NULL ? kl_function_find(call.func) : NULL;
        if (kl_py_done(call.func) < 0) { /* its caller holds it */
            return NULL;
        }
    }
    bool is_asked = false; /* by a class that may have its own plan for a Python function */
    for (Py_ssize_t i = 0; PyTuple_Check(types) && i < PyTuple_GET_SIZE(types) && !is_asked; i++) {
        PyObject *type = PyTuple_GET_ITEM(types, i);
        bool is_own = type != (PyObject *)kl_py.lazy && type != (PyObject *)kl_py.tensor;
        is_asked = is_own && !kl_meta_is_watched(type);
    }
    bool is_live = call.function == NULL || (is_asked && call.function->kind == KL_CALL_ENTER);
    switch (is_live ? KL_CALL_LIVE : call.function->kind) {
    case KL_CALL_OP:
        return kl_record_op(&call);
    case KL_CALL_LIVE:
        return kl_record_live(&call, kl_context_is_for_torch() ? KL_LIVE_PLAIN : KL_LIVE_LAZY);
    case KL_CALL_READ:
        return kl_live_call(&call, KL_LIVE_READ);
    case KL_CALL_ENTER:
        return PyObject_CallFunctionObjArgs(kl_py.skip_one_hop, call.func, types, call.args,
                                            call.kwargs, NULL);
    case KL_CALL_HANDLER:
        return take_up(&call) < 0 ? NULL : call_handler(call.function->handler, &call);
    }
    Py_UNREACHABLE();
}

/* -- __torch_dispatch__: calls that went past __torch_function__ --------------------------------------- */

static int
is_tracked(PyObject *lazy, void *Py_UNUSED(context))
{
    Value *value = kl_lazy_value(lazy);
    if (value != NULL) {
        value->is_touched = true;
    }
    bool result = value != NULL && kl_py_truth(PyObject_GetAttrString(lazy, "requires_grad")) == 1;
    PyErr_Clear();
    return result;
}

static int
is_pending(PyObject *lazy, void *Py_UNUSED(context))
{
    const Value *value = kl_lazy_value(lazy);
    return value != NULL && value->tape != NULL; /* also a leaf, at which the whole tape runs */
}

static int
compute_one(PyObject *lazy, void *is_read)
{
    Value *value = kl_lazy_checked(lazy);
    return value == NULL            ? -1
           : *(const bool *)is_read ? kl_live_read(value)
                                    : kl_py_done(kl_live_force(value));
}

/* Compute the LazyTensors among the arguments. Below autograd gradients are off; re-entering torch's dispatcher
 * turns them on, so that the program that runs keeps its graph. 0 or -1. */
static int
force_with_graph(const KlPyCall *call, bool is_read)
{
    if (kl_call_visit_both(call->args, call->kwargs, is_pending, NULL) == 0) {
        return 0;
    }
    PyObject *guard = kl_context_enter(PyObject_CallNoArgs(kl_py.reenter));
    int result =
        guard != NULL ? kl_call_visit_both(call->args, call->kwargs, compute_one, &is_read) : -1;
    kl_context_end_outside(guard);
    return result;
}

/* The call went past __torch_function__, and runs on real tensors. But autograd has looked at the placeholder
 * already, so that a gradient would be lost: then the call is refused. */
PyObject *
kl_record_torch_dispatch(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t n_args)
{
    KlPyCall call;
    bool is_grad_enabled = false;
    if (read_call("__torch_dispatch__", args, n_args, &call) < 0 ||
        kl_context_now(&is_grad_enabled) < 0) {
        return NULL;
    }
    int tracked = kl_call_visit_both(call.args, call.kwargs, is_tracked, NULL);
    if (is_grad_enabled && tracked != 0) {
        return PyErr_Format(
            kl_py.koila_error,
            "%S was called where koila cannot see it, on a lazy tensor that needs a "
            "gradient, and the gradient would be lost; wrap that code in koila.off(), or "
            "give it x.detach()",
            call.func);
    }
    /* torch's argument parser calls item() on a placeholder where it wants a number: that is a read. */
    bool is_read = call.function != NULL && call.function->kind == KL_CALL_READ;
    return force_with_graph(&call, is_read) < 0
               ? NULL
               : kl_live_call(&call, is_read ? KL_LIVE_READ : KL_LIVE_PLAIN);
}
