/* SPDX-License-Identifier: Apache-2.0 */
/* py_live.c - whole replay: runs the recorded calls in order with torch, as the user wrote them, on real tensors
 * with real autograd. Also runs the calls that cannot be recorded. */
#include "py_run.h"

/* -- replay ------------------------------------------------------------------------------------------ */

static PyObject *
real_of(void *env, KlValueId value)
{
    const Tape *tape = env;
    const KlPyValue *entry = &tape->values[value];
    KlNodeId maker = tape->core.values[value].node;
    bool is_for_chunks = maker != KL_ID_NONE && tape->core.nodes[maker].is_for_chunks;
    return is_for_chunks ? Py_None : entry->recorded != NULL ? entry->recorded : entry->real;
}

/* A recorded call must see the requires_grad that its leaves had when it was recorded. A leaf whose flag has
 * changed is replaced by an alias with the old flag. So a leaf that was frozen then gets no gradient. For one that
 * is frozen now torch drops the gradient, unless it was unfrozen by the time of backward. 0 or -1. */
static int
keep_flags(Tape *tape)
{
    for (size_t i = 0; i < tape->core.n_values; i++) {
        KlPyValue *entry = &tape->values[i];
        const KlMeta *meta = &tape->core.values[i].meta;
        bool is_read =
            tape->core.values[i].node == KL_ID_NONE && tape->core.values[i].n_pending > 0;
        int is_same = is_read ? kl_stale_is_flagged(entry->real, meta) : 1;
        if (is_same == 0 && entry->recorded == NULL) {
            entry->recorded = meta->requires_grad
                                  ? PyObject_CallOneArg(kl_py.thawed, entry->real)
                                  : PyObject_CallMethod(entry->real, "detach", NULL);
        }
        if (is_same < 0 || (is_same == 0 && entry->recorded == NULL)) {
            return -1;
        }
    }
    return 0;
}

/* Raise if torch's output differs from what inference promised when the call was recorded. 0 or -1. */
static int
check_output(Tape *tape, KlNodeId id, KlValueId value, PyObject *real)
{
    if (real == NULL) {
        PyErr_Format(PyExc_SystemError, "koila: value %u stands for one that has no tensor", value);
        return -1;
    }
    if (kl_promise_check(tape, id, value, real, -1) < 0) {
        return -1;
    }
    int requires_grad = kl_meta_requires_grad(real);
    bool is_same = requires_grad == tape->core.values[value].meta.requires_grad;
    return requires_grad < 0 ? -1 : is_same ? 0 : kl_promise_break(tape, id, value, real, -1);
}

/* Store the tensor of a value, and hand it to hooks.bind if somebody watches its gradient. 0 or -1. */
static int
bind(Tape *tape, KlNodeId id, KlValueId value, PyObject *real)
{
    if (tape->core.values[value].node != id) {
        return 0; /* it is a leaf by now, and keeps its number */
    }
    bool is_leaf = kl_tape_is_begun(&tape->core, value);
    if ((is_leaf && kl_py_done(PyObject_CallMethod(real, "requires_grad_", NULL)) < 0) ||
        check_output(tape, id, value, real) < 0) {
        return -1;
    }
    Py_XSETREF(tape->values[value].real, Py_NewRef(real)); /* left by an interrupted run */
    return kl_tape_is_looked_at(&tape->core, value) || tape->values[value].is_seen_live
               ? kl_py_done(PyObject_CallFunction(kl_py.bind_hooks, "IO", value, real))
               : 0;
}

static int
bind_outputs(Tape *tape, KlNodeId id, PyObject *result)
{
    const KlNode *node = &tape->core.nodes[id];
    if (node->writes != 0) {
        if (result == Py_None) { /* __setitem__ returns None */
            result = tape->values[tape->core.inputs[node->first_input].value].real;
        }
        if (bind(tape, id, node->first_out, result) < 0 || node->n_outs == 1) {
            return PyErr_Occurred() ? -1 : 0;
        }
        /* A view was written: the base, the last input, is still the same tensor. */
        KlValueId base = tape->core.inputs[node->first_input + node->n_inputs - 1].value;
        return bind(tape, id, node->first_out + 1, tape->values[base].real);
    }
    if (!PyTuple_Check(result) && !PyList_Check(result)) {
        return bind(tape, id, node->first_out, result);
    }
    if (PySequence_Fast_GET_SIZE(result) != (Py_ssize_t)node->n_outs) {
        return kl_promise_break(tape, id, node->first_out, result, -1);
    }
    for (uint32_t i = 0; i < node->n_outs; i++) {
        if (bind(tape, id, node->first_out + i, PySequence_Fast_GET_ITEM(result, i)) < 0) {
            return -1;
        }
    }
    return 0;
}

static void
release_if_dead(Tape *tape, KlValueId value)
{
    if (value != KL_ID_NONE && tape->core.values[value].node != KL_ID_NONE &&
        kl_tape_is_dead(&tape->core, value) &&
        !tape->core.storages[tape->core.values[value].storage].is_awaited) {
        Py_CLEAR(tape->values[value].real);
    }
}

/* A node is done, and so is the node before it that only chunks run: free the tensors that no one needs. */
static void
set_done(Tape *tape, KlNodeId id)
{
    const KlNode *node = &tape->core.nodes[id];
    if (id > 0 && node[-1].is_for_chunks && !node[-1].is_done) {
        set_done(tape, id - 1);
    }
    kl_tape_set_done(&tape->core, id);
    release_if_dead(tape, node->refresh_of);
    for (uint32_t i = 0; i < node->n_inputs; i++) {
        release_if_dead(tape, tape->core.inputs[node->first_input + i].value);
    }
    for (uint32_t i = 0; i < node->n_outs; i++) {
        release_if_dead(tape, node->first_out + i);
    }
}

static PyObject *
run_call(Tape *tape, KlNodeId id)
{
    int is_again = kl_tape_is_committed(tape, id);
    if (is_again != 0) {
        return is_again < 0 ? NULL : kl_program_run_again(tape, id);
    }
    return kl_call_run(tape, id, real_of, tape);
}

static int
run_node(Tape *tape, KlNodeId id, KlContextSwitch *context)
{
    if (kl_context_switch(context, tape->core.nodes[id].context) < 0) {
        return -1;
    }
    const KlNode *node = &tape->core.nodes[id];
    if (node->refresh_of != KL_ID_NONE) {
        /* The view from before the write exists, and shows the write. */
        if (bind(tape, id, node->first_out + node->refresh_out,
                 tape->values[node->refresh_of].real) < 0) {
            return -1;
        }
    } else {
        bool is_kept = node->region != 0 || (node->row != NULL && kl_ops_is_detached(node->row));
        PyObject *kept = is_kept ? kl_call_describe(tape, id, real_of, tape) : Py_NewRef(Py_None);
        if (is_kept && kept != NULL) {
            kept = PyObject_CallFunction(kl_py.keep, "IIIINiI", id, node->region, node->first_out,
                                         node->n_outs, kept, (int)node->is_random,
                                         node->writes | node->leaf_writes);
        }
        PyObject *result = kept != NULL ? run_call(tape, id) : NULL;
        int status = result != NULL ? bind_outputs(tape, id, result) : -1;
        kl_context_end_outside(kept);
        if (status == 0) {
            status = kl_stage_wait_for_copy(tape, node);
        }
        Py_XDECREF(result);
        if (status < 0) {
            return -1;
        }
    }
    for (uint32_t i = 0; node->leaf_writes >> i != 0; i++) {
        if ((node->leaf_writes >> i & 1) != 0) {
            kl_stale_refresh_leaf(tape, tape->core.inputs[node->first_input + i].value);
        }
    }
    set_done(tape, id);
    return 0;
}

/* Whether the exception tells something about the call: it is no interrupt, and memory has not run out. */
static bool
tells_of_call(void)
{
    if (!PyErr_ExceptionMatches(PyExc_Exception)) {
        return false;
    }
    PyObject *type = NULL, *value = NULL, *traceback = NULL;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    bool result =
        value == NULL || kl_py_truth(PyObject_CallOneArg(kl_py.is_out_of_memory, value)) != 1;
    PyErr_Restore(type, value, traceback);
    return result;
}

/* As in eager, the results of a call that raised do not exist, nor does what depends on them. */
static void
note_failed(Tape *tape, KlNodeId id)
{
    const KlNode *node = &tape->core.nodes[id];
    if (!tells_of_call() && node->writes == 0 && node->leaf_writes == 0 && !node->is_random) {
        return; /* a later run can make the call again */
    }
    kl_failure_set(tape, id);
}

/* Borrowed: the call of this thread for which pending calls run, for the report. */
static _Thread_local PyObject *caller;

/* Report how many calls ran whole, and what they raised. An exception that is set stays. 0 or -1. */
static int
note_ran(unsigned long long n_calls, long long n_bytes)
{
    PyObject *type = NULL, *value = NULL, *traceback = NULL;
    PyErr_Fetch(&type, &value, &traceback);
    int result =
        kl_py_done(PyObject_CallFunction(kl_py.note_ran, "OKLO", caller != NULL ? caller : Py_None,
                                         n_calls, n_bytes, type != NULL ? type : Py_None));
    if (type != NULL) {
        PyErr_Restore(type, value, traceback);
    }
    return result;
}

/* A run stopped, and the tape stays open for the calls that it abandoned. Detach what ran, as from a tape that is
 * closed: later writes and views use its tensors, since the values between are gone. What abandoned calls still
 * read becomes a leaf, and is watched for changes from now on. */
static void
release_what_ran(Tape *tape)
{
    PyObject *type = NULL, *error = NULL, *traceback = NULL;
    PyErr_Fetch(&type, &error, &traceback);
    kl_tape_find_awaited(&tape->core);
    for (size_t i = 0; i < tape->core.n_values; i++) {
        const KlValue *value = &tape->core.values[i];
        const KlStorage *storage = &tape->core.storages[value->storage];
        bool is_made = value->node != KL_ID_NONE && tape->core.nodes[value->node].is_done &&
                       tape->values[i].real != NULL;
        if (is_made && tape->values[i].handle != NULL) {
            kl_lazy_leave(tape, (KlValueId)i, tape->values[i].real);
        }
        if (is_made && (value->n_pending > 0 || (storage->is_awaited && storage->base == i))) {
            kl_tape_cut(&tape->core, (KlValueId)i);
            kl_stale_refresh_leaf(tape, (KlValueId)i);
        }
    }
    PyErr_Restore(type, error, traceback);
}

/* Whether a live run can use the number of a value instead of its call: no gradient passes it, and no write or
 * other value of its storage depends on the call. */
static bool
is_settled(const Tape *tape, KlValueId id)
{
    const KlValue *value = &tape->core.values[id];
    const KlStorage *storage = &tape->core.storages[value->storage];
    return value->state == KL_STATE_COMPUTED && value->node != KL_ID_NONE &&
           !tape->core.nodes[value->node].is_done && !value->meta.requires_grad &&
           storage->version == 0 && storage->base == id && !storage->is_uncertain &&
           kl_stale_is_enough(tape, id);
}

bool
kl_live_settle(Tape *tape, KlValueId id)
{
    bool result = is_settled(tape, id);
    if (result) {
        Py_XSETREF(tape->values[id].real, tape->values[id].result);
        tape->values[id].result = NULL;
        kl_tape_cut(&tape->core, id);
        kl_stale_refresh_leaf(tape, id);
    }
    return result;
}

/* Make leaves of the values whose numbers are settled, and drop the calls that led only to them: a plan counts on
 * that. Calls whose statistics are still to be written must run, so while there are any nothing is dropped. 0 or
 * -1. */
static int
keep_numbers(Tape *tape)
{
    bool has_any = false;
    int is_moved = 1;
    for (size_t i = 0; i < tape->core.n_values; i++) {
        has_any = kl_live_settle(tape, (KlValueId)i) || has_any;
    }
    for (size_t i = tape->core.n_done; is_moved > 0 && i < tape->core.n_nodes; i++) {
        const KlNode *node = &tape->core.nodes[i];
        bool is_writing = !node->is_done && node->leaf_writes != 0;
        is_moved = is_writing ? kl_tape_is_committed(tape, (KlNodeId)i) : 1;
    }
    if (has_any && is_moved > 0) {
        kl_tape_retire(&tape->core, false);
    }
    return is_moved < 0 ? -1 : 0;
}

/* Whether a live run skips a node. Marks a node done that only chunks run, once nothing needs its outputs. */
static bool
is_passed_over(Tape *tape, KlNodeId id)
{
    const KlNode *node = &tape->core.nodes[id];
    bool is_dead = node->is_for_chunks;
    for (uint32_t k = 0; k < node->n_outs; k++) {
        is_dead = is_dead && kl_tape_is_dead(&tape->core, node->first_out + k);
    }
    if (is_dead && !node->is_done) {
        set_done(tape, id);
    }
    return node->is_done || node->is_abandoned || node->is_for_chunks;
}

/* All pending calls run now: unwritten.py need no longer watch the leaves that they write. 0 or -1. */
static int
note_written(const Tape *tape)
{
    return tape->core.n_aside > 0 ? kl_py_done(PyObject_CallNoArgs(kl_py.note_written)) : 0;
}

/* This thread's clock after its last live run: plain nodes that were made before are where they belong. */
static _Thread_local uint64_t settled_until;

/* Before a call runs that was recorded at `clock`, leave a gap for the nodes of plain calls since `*last`. 0 or -1. */
static int
leave_gap(uint64_t *last, uint64_t clock)
{
    uint64_t start = *last, moved = kl_context_clock(0);
    if (clock <= start) {
        return 0;
    }
    *last = clock;
    (void)kl_context_clock(clock - start);
    return kl_py_done(PyObject_CallFunction(kl_py.note_gap, "KKK", start, clock, moved));
}

/* After a run that left gaps, let order.py move the plain nodes behind the leaves. 0 or -1. */
static int
note_run(const Tape *tape, uint64_t first)
{
    PyObject *leaves = PyList_New(0);
    for (size_t i = 0; leaves != NULL && i < tape->core.n_values; i++) {
        const KlValue *value = &tape->core.values[i];
        PyObject *real = value->node == KL_ID_NONE ? tape->values[i].real : NULL;
        if (real != NULL && value->meta.requires_grad) {
            kl_py_add(&leaves, Py_NewRef(real));
        }
    }
    return kl_py_done(PyObject_CallFunction(kl_py.note_run, "KN", first, leaves));
}

static int
run_tape(Tape *tape, bool is_own)
{
    KlContextSwitch context;
    uint64_t first = kl_context_clock(0), begun = UINT64_MAX, last;
    int result = 0;
    unsigned long long n_calls = 0;
    long long n_bytes = 0;
    if (tape->is_running) {
        PyErr_SetString(kl_py.koila_error,
                        "a value was read while the program that makes it is running; read it "
                        "before backward(), or run it whole: koila.config(chunks=1)");
        return -1;
    }
    if (tape->core.n_done < tape->core.n_nodes) {
        PyObject *is_drawing = kl_tape_has_draw(&tape->core) ? Py_True : Py_False;
        if (kl_py_done(PyObject_CallOneArg(kl_py.check_run, is_drawing)) < 0 ||
            kl_stale_check_leaves(tape) < 0 || note_written(tape) < 0 || keep_flags(tape) < 0 ||
            kl_context_begin(&context) < 0) {
            return -1;
        }
        tape->is_running = true;
        begun = is_own ? tape->nodes[tape->core.n_done].clock : UINT64_MAX;
        last = begun = begun < settled_until ? settled_until : begun;
        result = keep_numbers(tape);
        kl_tape_find_awaited(&tape->core);
        for (size_t i = tape->core.n_done; result == 0 && i < tape->core.n_nodes; i++) {
            if (is_passed_over(tape, (KlNodeId)i)) {
                continue;
            }
            /* Ctrl-C is no failure of the call, which stays pending. */
            result = PyErr_CheckSignals();
            uint64_t clock = tape->nodes[i].clock; /* another thread's may be ahead */
            if (result == 0 && (result = leave_gap(&last, clock < first ? clock : first)) == 0) {
                n_calls++;
                n_bytes += kl_tape_n_bytes(&tape->core, (KlNodeId)i);
                result = run_node(tape, (KlNodeId)i, &context);
                if (result < 0) {
                    note_failed(tape, (KlNodeId)i);
                }
            }
        }
        tape->is_running = false;
        result = kl_context_end(&context);
        if (result == 0 && begun < first) {
            result = leave_gap(&last, first) < 0 ? -1 : note_run(tape, first);
        }
        settled_until = kl_context_clock(0);
        if (result < 0) {
            kl_tape_abandon_pending(tape);
        }
        if (tape->core.n_done < tape->core.n_nodes) {
            release_what_ran(tape);
        }
        result = note_ran(n_calls, n_bytes) < 0 ? -1 : result;
    }
    (void)kl_tape_end(tape, true);
    return result;
}

/* Whether a pending call draws, or sets the generator back to draw again what it drew before. */
static bool
has_random(const KlTape *core)
{
    for (size_t i = core->n_done; i < core->n_nodes; i++) {
        if (core->nodes[i].is_random && !core->nodes[i].is_done && !core->nodes[i].is_abandoned) {
            return true;
        }
    }
    return false;
}

int
kl_live_run(Tape *tape)
{
    KlTurn turn;
    if (kl_turn_begin(&turn, tape) < 0) {
        return -1;
    }
    bool is_waiting = tape->core.n_done < tape->core.n_nodes;
    PyObject *guard = is_waiting ? kl_context_leave_user() : Py_NewRef(Py_None);
    bool is_drawing = has_random(&tape->core);
    int result = guard == NULL ? -1 : is_drawing ? kl_turn_draw() : 0;
    if (result == 0) {
        result = run_tape(tape, !turn.is_visit && !tape->is_cut_off);
        if (is_drawing) {
            kl_turn_drawn();
        }
    }
    kl_context_end_outside(guard);
    kl_turn_end(&turn);
    return result;
}

/* Let replay.py compute a value of this thread's tape in chunks. 1: it has its number; 0: it must run live; -1. */
static int
read_in_chunks(Value *value)
{
    if (value->tape != kl_tape_open_or_null() || value->tape->is_running) {
        return 0;
    }
    kl_tape_ask(&value->tape->core, value->id);
    /* A value without a gradient may depend on labels alone: try to compute it without the model. */
    const KlTape *core = &value->tape->core;
    bool is_plain =
        !core->values[value->id].meta.requires_grad || kl_tape_is_begun(core, value->id);
    for (int is_no_grad_only = is_plain; is_no_grad_only >= 0; is_no_grad_only--) {
        int is_known = kl_py_truth(PyObject_CallFunctionObjArgs(
            kl_py.read, kl_py_bool(is_no_grad_only), caller != NULL ? caller : Py_None, NULL));
        if (is_known < 0 || (is_known > 0 && kl_lazy_number(value) != NULL)) {
            return is_known;
        }
    }
    return 0;
}

/* A number is enough, so the program runs in chunks if it can, and keeps the graph of its values. */
int
kl_live_read(Value *value)
{
    KlTurn turn;
    if (kl_lazy_number(value) != NULL) {
        return 0;
    }
    int is_read = 0;
    if (value->tape != NULL) {
        if (kl_turn_begin(&turn, value->tape) < 0) {
            return -1;
        }
        /* another thread may have run it while this one waited */
        is_read = kl_lazy_number(value) != NULL ? 1 : read_in_chunks(value);
        kl_turn_end(&turn);
    }
    return is_read == 0 ? kl_py_done(kl_live_force(value)) : is_read > 0 ? 0 : -1;
}

/* Let numbers.py make leaves of the computed values that no run can compute again. 0 or -1. */
static int
settle(const Tape *tape)
{
    bool is_idle = tape->is_kept && !tape->is_running && tape == kl_tape_open_or_null();
    return is_idle ? kl_py_done(PyObject_CallNoArgs(kl_py.settle)) : 0;
}

PyObject *
kl_live_force(Value *value)
{
    KlTurn turn;
    if (value->tape != NULL) {
        if (kl_turn_begin(&turn, value->tape) < 0) {
            return NULL;
        }
        int result = settle(turn.tape);
        if (result == 0 &&
            value->tape == turn.tape) { /* else another thread ran it while this one waited */
            KlValueId current = KL_ID_NONE;
            kl_tape_ask(&turn.tape->core, value->id);
            result = kl_tape_attach(turn.tape, value, &current);
            result = result < 0 ? result : kl_live_run(turn.tape);
        }
        kl_turn_end(&turn);
        if (result < 0) {
            return NULL;
        }
    }
    PyObject *real = kl_lazy_real(value);
    if (real == NULL) {
        kl_failure_raise(value->error);
    }
    return Py_XNewRef(real);
}

/* -- calls that run at once --------------------------------------------------------------------------- */

#define KL_LAZY_ARGS_MAX 64

/* The LazyTensors of one call: results that are their real tensors become these LazyTensors again. */
typedef struct LazyArgs {
    PyObject *lazies[KL_LAZY_ARGS_MAX]; /* borrowed from the call's arguments */
    int n;
    KlLiveKind kind;
    PyObject *args, *kwargs; /* with real tensors in place of LazyTensors */
} LazyArgs;

static int
force_one(PyObject *lazy, void *context)
{
    LazyArgs *lazy_args = context;
    Value *value = kl_lazy_checked(lazy);
    if (value == NULL) {
        return -1;
    }
    bool is_read = lazy_args->kind == KL_LIVE_READ || lazy_args->kind == KL_LIVE_NUMBERS;
    if ((is_read ? kl_live_read(value) : kl_py_done(kl_live_force(value))) < 0) {
        return -1;
    }
    if (lazy_args->n < KL_LAZY_ARGS_MAX) {
        lazy_args->lazies[lazy_args->n++] = lazy;
    }
    return 0;
}

/* Guess where a result has rows: where an argument has them, if the sizes agree. Any place is right for a value that
 * is whole in memory, since it can be cut along any dim; a poor guess costs memory. Returns the argument, or NULL. */
static const Value *
find_rows(const LazyArgs *lazy_args, PyObject *real)
{
    KlMeta meta;
    if (kl_meta_read(real, &meta) != 0) {
        PyErr_Clear();
        return NULL;
    }
    for (int i = 0; i < lazy_args->n; i++) {
        const Value *value = kl_lazy_value(lazy_args->lazies[i]);
        int64_t n = value->place.outer * value->rows * value->place.inner;
        if (kl_place_is_rows(&value->place) && value->place.dim < meta.n_dims &&
            meta.shape[value->place.dim] == n) {
            return value;
        }
    }
    return NULL;
}

static bool
is_tensor(PyObject *object)
{
    return PyObject_TypeCheck(object, kl_py.tensor_base);
}

/* Call `visit` with the tensors in an object until it returns another number than 0; return that. */
static int
visit_tensors(PyObject *object, int (*visit)(PyObject *, void *), void *context)
{
    return kl_call_visit_as(object, is_tensor, visit, context);
}

static int
is_same(PyObject *tensor, void *other)
{
    return tensor == other;
}

/* Torch may return an argument itself (written in place, or unchanged): return the LazyTensor of that argument. */
static PyObject *
wrap_tensor(const LazyArgs *lazy_args, PyObject *real)
{
    for (int i = 0; i < lazy_args->n; i++) {
        if (kl_lazy_real(kl_lazy_value(lazy_args->lazies[i])) == real) {
            return Py_NewRef(lazy_args->lazies[i]);
        }
    }
    if (lazy_args->kind == KL_LIVE_SETTLED || visit_tensors(lazy_args->args, is_same, real) ||
        visit_tensors(lazy_args->kwargs, is_same, real) || kl_meta_has_own_class(real)) {
        return Py_NewRef(real);
    }
    const Value *source = find_rows(lazy_args, real);
    return source == NULL
               ? kl_lazy_new_detached(real, NULL, 0, 0, false)
               : kl_lazy_new_detached(real, &source->place, source->axis_key, source->rows, false);
}

static PyObject *
wrap(void *lazy_args, PyObject *object)
{
    if (PyDict_Check(object) || !kl_call_holds(object, is_tensor)) {
        return Py_NewRef(object); /* torch.Size and the like keep their type */
    }
    if (is_tensor(object)) {
        return kl_lazy_check(object) ? Py_NewRef(object) : wrap_tensor(lazy_args, object);
    }
    return kl_call_map(object, wrap, lazy_args);
}

/* Whether a result is, or is a view of, the number of a LazyTensor whose graph is still on the tape. torch returns
 * many inputs unchanged, and its schemas do not say which. */
static int
is_number(PyObject *result, void *context)
{
    const LazyArgs *lazy_args = context;
    for (int i = 0; i < lazy_args->n; i++) {
        const Value *value = kl_lazy_value(lazy_args->lazies[i]);
        PyObject *number = kl_lazy_real(value) == NULL ? kl_lazy_number(value) : NULL;
        if (number != NULL && kl_meta_may_alias(result, number)) {
            return 1;
        }
    }
    return 0;
}

_Thread_local PyObject *kl_live_called;

static PyObject *
call_now(PyObject *func, PyObject *args, PyObject *kwargs)
{
    PyObject *before = kl_live_called;
    kl_live_called = func;
    PyObject *result = PyObject_Call(func, args, kwargs);
    kl_live_called = before;
    return result;
}

/* Make a call that may write memory which parts that were cut off will read again: bridge.py keeps a copy for them. */
static PyObject *
call_keeping(PyObject *func, PyObject *args, PyObject *kwargs)
{
    PyObject *given = PyTuple_Pack(2, args, kwargs);
    PyObject *kept =
        given != NULL ? PyObject_CallFunctionObjArgs(kl_py.before_write, func, given, NULL) : NULL;
    PyObject *result = kept != NULL ? call_now(func, args, kwargs) : NULL;
    PyObject *type = NULL, *value = NULL, *traceback = NULL;
    PyErr_Fetch(&type, &value, &traceback);
    PyObject *settled = kept != NULL ? PyObject_CallOneArg(kl_py.after_write, kept) : NULL;
    if (type != NULL) {
        PyErr_Restore(type, value, traceback);
    } else if (settled == NULL) {
        Py_CLEAR(result);
    }
    Py_XDECREF(settled);
    Py_XDECREF(kept);
    Py_XDECREF(given);
    return result;
}

/* Whether a call may write a tensor that a part which was cut off reads. */
static bool
may_write_kept(const KlPyCall *call, KlLiveKind kind)
{
    const Function *function = call->function;
    return kl_py.n_cut_off > 0 && kind != KL_LIVE_READ &&
           (function == NULL || function->kind == KL_CALL_LIVE ||
            (function->row != NULL && function->row->effects != 0) ||
            kl_function_written(call) != NULL);
}

#define KL_BYTES_REPORTED ((int64_t)1 << 20)

/* Report a large plain tensor of a call on LazyTensors: calls on it are not recorded. The context is the call, and
 * whether it made (False), wrote (True) or read (None) the tensor. 0 or -1. */
static int
report_plain(PyObject *tensor, void *context)
{
    PyObject *const *left = context;
    KlMeta meta;
    if (!kl_lazy_check(tensor) && kl_meta_read(tensor, &meta) == 0 &&
        kl_meta_n_bytes(&meta) >= KL_BYTES_REPORTED) {
        return kl_py_done(
            PyObject_CallFunctionObjArgs(kl_py.note_left, left[0], tensor, left[1], NULL));
    }
    PyErr_Clear();
    return 0;
}

PyObject *
kl_live_call(const KlPyCall *call, KlLiveKind kind)
{
    LazyArgs lazy_args = {.kind = kind};
    PyObject *result = NULL, *before = caller;
    caller = call->func;
    int status = kl_call_visit_both(call->args, call->kwargs, force_one, &lazy_args);
    caller = before;
    if (status < 0) {
        return NULL;
    }
    PyObject *args = lazy_args.args = kl_call_real(call->args);
    PyObject *kwargs = lazy_args.kwargs = args != NULL ? kl_call_real(call->kwargs) : NULL;
    if (kwargs == NULL) {
        goto error;
    }
    result = may_write_kept(call, kind) ? call_keeping(call->func, args, kwargs)
                                        : call_now(call->func, args, kwargs);
    Tape *tape = result != NULL ? kl_tape_open_or_null() : NULL;
    if (tape != NULL && kl_stale_release(tape) < 0) {
        Py_CLEAR(result);
    }
    if (result != NULL && kind == KL_LIVE_NUMBERS && visit_tensors(result, is_number, &lazy_args)) {
        Py_SETREF(result, Py_NewRef(Py_NotImplemented));
        goto error;
    }
    bool is_plain = kind == KL_LIVE_PLAIN || kind == KL_LIVE_READ;
    if (result != NULL && !is_plain) {
        Py_SETREF(result, wrap(&lazy_args, result));
    }
    if (result != NULL) {
        PyObject *written = is_plain ? NULL : kl_function_written(call);
        PyObject *left[] = {call->func, written != NULL ? Py_True : is_plain ? Py_None : Py_False};
        PyObject *made = kind == KL_LIVE_SETTLED ? result : NULL;
        PyObject *tensors = written != NULL ? written : is_plain ? args : made;
        if (tensors != NULL && visit_tensors(tensors, report_plain, left) < 0) {
            Py_CLEAR(result);
        }
    }
error:
    KL_DROP(kwargs, args);
    return result;
}
