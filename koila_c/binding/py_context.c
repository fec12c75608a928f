/* SPDX-License-Identifier: Apache-2.0 */
/* py_context.c - what a call depends on besides its arguments.
 * Grad mode, inference mode, autocast and torch's switches are interned to a small id, kept with a node, and put
 * in force again at replay. Hooks and modes that run code of the user's at each call cannot be: such a call
 * runs where it stands, and what koila runs is run without them. */
#include "py_state.h"

#include <string.h>

#include "alloc.h"
#include "autocast.h"

typedef struct Context {
    bool is_grad_enabled;
    bool is_inference;
    bool is_autocast;  /* on for some device type */
    uint32_t switches; /* number of a setting in switches.py */
    KlCasting casting; /* zero if autocast is off */
} Context;

/* Every context seen so far. There are as many as the user has settings, however many calls there are. */
static struct {
    Context *contexts;
    size_t n, n_max;
    size_t last;       /* index of the context found last: mostly also the next one */
    uint32_t switches; /* the setting in force; torch's switches are per process */
} state;

static bool
has_saved_tensors_hooks(void)
{
    void *const *deque = kl_py.lib_saved_tensors();
    return deque[2] != deque[6]; /* iterators to its start and its end */
}

bool
kl_context_is_for_torch(void)
{
    return kl_py_is_in_function ||
           (kl_py.lib_is_excluded((uint16_t)PyLong_AsLong(kl_py.autograd_key)) &&
            !kl_py.lib_is_inference_enabled());
}

int
kl_context_runs_at_once(PyObject *func)
{
    bool is_plain = kl_py.n_dual_levels == 0 && !kl_py.lib_has_dispatch_modes(false) &&
                    !has_saved_tensors_hooks();
    return is_plain ? 0 : kl_py_truth(PyObject_CallOneArg(kl_py.runs_at_once, func));
}

PyObject *
kl_context_leave_user(void)
{
    bool is_nothing = kl_py.n_transforms == 0 && kl_py.lib_n_function_modes() == 0 &&
                      !kl_py.lib_has_dispatch_modes(false) && !has_saved_tensors_hooks() &&
                      !kl_context_is_for_torch();
    return is_nothing ? Py_NewRef(Py_None) : PyObject_CallNoArgs(kl_py.leave);
}

/* The index in kl_py.device_names of the type of a device, given by its number; -1: of another type. */
static int
type_of(Py_ssize_t device)
{
    PyObject *type = PyObject_GetAttrString(PyList_GET_ITEM(kl_py.devices, device), "type");
    int i = type != NULL ? KL_N_DEVICES - 1 : -1;
    while (i >= 0 && PyUnicode_Compare(type, kl_py.device_names[i]) != 0) {
        i--;
    }
    Py_XDECREF(type);
    PyErr_Clear();
    return i;
}

/* Whether autocast is on for some device type. libtorch tells of those that have been seen, if these are the CPU and
 * CUDA; else ask through Python. -1 on failure. */
static int
is_any_autocast(void)
{
    static Py_ssize_t n_looked_at; /* devices are only ever added */
    static bool are_known = true;
    Py_ssize_t n_devices = PyList_GET_SIZE(kl_py.devices);
    for (Py_ssize_t i = n_looked_at; i < n_devices; i++) {
        are_known = type_of(i) >= 0 && are_known;
        n_looked_at = i + 1; /* other threads may have looked meanwhile: no device is skipped */
    }
    if (!are_known) {
        return kl_py_truth(PyObject_CallNoArgs(kl_py.is_any_autocast));
    }
    return kl_py.lib_is_autocast_enabled(0) || (n_devices > 1 && kl_py.lib_is_autocast_enabled(1));
}

uint64_t
kl_context_clock(uint64_t n_skipped)
{
    for (; n_skipped > 0; n_skipped--) {
        (void)kl_py.lib_tick();
    }
    return kl_py.lib_clock();
}

static int
read_autocast(KlCasting *casting)
{
    int is_cache = kl_py_truth(PyObject_CallNoArgs(kl_py.is_cache_enabled));
    if (is_cache < 0) {
        return -1;
    }
    casting->is_cache_enabled = is_cache;
    for (int i = 0; i < KL_N_DEVICES; i++) {
        int is_enabled =
            kl_py_truth(PyObject_CallOneArg(kl_py.is_autocast_enabled, kl_py.device_names[i]));
        PyObject *dtype =
            is_enabled < 0 ? NULL
                           : PyObject_CallOneArg(kl_py.get_autocast_dtype, kl_py.device_names[i]);
        if (dtype == NULL) {
            return -1;
        }
        casting->is_enabled[i] = is_enabled;
        casting->dtype[i] = dtype;
        Py_DECREF(dtype);
    }
    return 0;
}

/* The id of a context, new or known, or -1. */
static int64_t
intern(const Context *context)
{
    if (state.last < state.n &&
        memcmp(&state.contexts[state.last], context, sizeof(*context)) == 0) {
        return (int64_t)state.last;
    }
    for (state.last = 0; state.last < state.n; state.last++) {
        if (memcmp(&state.contexts[state.last], context, sizeof(*context)) == 0) {
            return (int64_t)state.last;
        }
    }
    if (kl_alloc_reserve((void **)&state.contexts, &state.n_max, state.n + 1, sizeof(*context)) !=
        KL_OK) {
        return kl_py_done(PyErr_NoMemory());
    }
    state.contexts[state.n] = *context;
    return (int64_t)state.n++;
}

int64_t
kl_context_now(bool *is_grad_enabled)
{
    Context now;
    memset(&now, 0, sizeof(now)); /* with its padding, for memcmp */
    int is_autocast = is_any_autocast();
    if (is_autocast < 0) {
        return -1;
    }
    now.is_grad_enabled = kl_py.lib_is_grad_enabled();
    now.is_inference = kl_py.lib_is_inference_enabled();
    now.is_autocast = is_autocast;
    now.switches = state.switches;
    if (is_autocast && read_autocast(&now.casting) < 0) {
        return -1;
    }
    if (is_grad_enabled != NULL) {
        *is_grad_enabled = now.is_grad_enabled;
    }
    return intern(&now);
}

KL_DEFINE(note_switches, args)
{
    unsigned int index = 0;
    int is_flash_allowed = 0;
    if (!PyArg_ParseTuple(args, "Ip", &index, &is_flash_allowed)) {
        return NULL;
    }
    state.switches = index;
    kl_py.is_flash_allowed = is_flash_allowed;
    return Py_NewRef(Py_None);
}

bool
kl_context_is_autocast(uint32_t id)
{
    return state.contexts[id].is_autocast;
}

/* -- inference ----------------------------------------------------------------------------------- */

/* What autocast does to calls on a device. 1: described; 0: nothing; -1: koila does not know. */
static int
autocast_on(const Context *context, uint8_t device, KlAutocast *autocast)
{
    int type = type_of(device);
    if (type < 0) {
        return -1;
    }
    *autocast = (KlAutocast){.is_cuda = type == 1};
    if (context->casting.is_enabled[type]) {
        autocast->lower = kl_meta_dtype_from(context->casting.dtype[type]);
    }
    return context->casting.is_enabled[type];
}

#define KL_CAST_INPUTS 64

/* Infer a call on its inputs as autocast casts them. */
static KlStatus
infer_cast(const KlCall *call, const Context *context, KlInferred *inferred, KlSaves *saves)
{
    KlMeta cast[KL_CAST_INPUTS];
    const KlMeta *seen[KL_CAST_INPUTS];
    KlAutocast autocast;
    uint8_t device = 0;
    for (uint32_t i = 0; i < call->n_inputs; i++) {
        if (call->inputs[i] != NULL && call->inputs[i]->device != 0) {
            device = call->inputs[i]->device;
        }
    }
    int is_on = autocast_on(context, device, &autocast);
    if (is_on < 0 || call->n_inputs > KL_CAST_INPUTS) {
        return KL_DECLINED;
    }
    KlCall as_cast = *call;
    if (is_on > 0) {
        KlStatus status = kl_autocast_inputs(&autocast, call, cast, seen);
        if (status != KL_OK) {
            return status;
        }
        as_cast.inputs = seen;
    }
    KlStatus status = kl_infer_call(&as_cast, inferred);
    if (status == KL_OK) {
        kl_infer_saves(&as_cast, inferred, saves);
        if (is_on > 0) {
            kl_autocast_saves(call, seen, saves);
        }
    }
    return status;
}

PyObject *
kl_context_enter(PyObject *guard)
{
    if (guard != NULL && kl_py_done(PyObject_CallMethod(guard, "__enter__", NULL)) < 0) {
        Py_CLEAR(guard);
    }
    return guard;
}

PyObject *
kl_context_leave_inference(void)
{
    return kl_py.lib_is_inference_enabled()
               ? kl_context_enter(PyObject_CallOneArg(kl_py.inference_mode, Py_False))
               : Py_NewRef(Py_None);
}

void
kl_context_end_outside(PyObject *guard)
{
    if (guard != NULL && guard != Py_None) {
        PyObject *type = NULL, *value = NULL, *traceback = NULL;
        PyErr_Fetch(&type, &value, &traceback);
        (void)kl_py_done(PyObject_CallMethod(guard, "__exit__", "OOO", Py_None, Py_None, Py_None));
        PyErr_Restore(type, value, traceback);
    }
    Py_XDECREF(guard);
}

KlStatus
kl_context_infer(const KlCall *call, uint32_t id, KlInferred *inferred, KlSaves *saves)
{
    if (state.contexts[id].is_autocast) {
        return infer_cast(call, &state.contexts[id], inferred, saves);
    }
    KlStatus status = kl_infer_call(call, inferred);
    if (status == KL_OK) {
        kl_infer_saves(call, inferred, saves);
    }
    return status;
}

/* -- replay -------------------------------------------------------------------------------------- */

static int
call_ignoring(PyObject *callable, PyObject *first, PyObject *second)
{
    return kl_py_done(PyObject_CallFunctionObjArgs(callable, first, second, NULL));
}

static int
set_inference(KlContextSwitch *context, bool is_inference)
{
    PyObject *guard = context->guard, *none = Py_None;
    context->guard = NULL;
    int result = guard == NULL
                     ? 0
                     : kl_py_done(PyObject_CallMethod(guard, "__exit__", "OOO", none, none, none));
    Py_XDECREF(guard);
    if (result == 0 && is_inference != state.contexts[context->before].is_inference) {
        context->guard =
            kl_context_enter(PyObject_CallOneArg(kl_py.inference_mode, kl_py_bool(is_inference)));
        result = context->guard != NULL ? 0 : -1;
    }
    return result;
}

/* Set autocast's settings. A dtype that is NULL stays as it is. */
static int
set_autocast(const KlCasting *to, bool is_cache_enabled)
{
    for (int i = 0; i < KL_N_DEVICES; i++) {
        PyObject *is_enabled = kl_py_bool(to->is_enabled[i]);
        if (call_ignoring(kl_py.set_autocast_enabled, kl_py.device_names[i], is_enabled) < 0 ||
            (to->dtype[i] != NULL &&
             call_ignoring(kl_py.set_autocast_dtype, kl_py.device_names[i], to->dtype[i]) < 0)) {
            return -1;
        }
    }
    return call_ignoring(kl_py.set_cache_enabled, kl_py_bool(is_cache_enabled), NULL);
}

int
kl_context_begin(KlContextSwitch *context)
{
    int64_t now = kl_context_now(NULL);
    if (now < 0) {
        return -1;
    }
    memset(context, 0, sizeof(*context));
    context->before = context->now = (uint32_t)now;
    context->is_fresh = true;
    return 0;
}

/* Before the first switch that may change autocast: read what is in force. One nesting level over the rest of the
 * replay keeps autocast's cache of cast weights from node to node. */
static int
begin_casts(KlContextSwitch *context)
{
    context->is_nested =
        context->is_nested || (read_autocast(&context->outer) == 0 &&
                               call_ignoring(kl_py.increment_nesting, NULL, NULL) == 0);
    return context->is_nested ? 0 : -1;
}

int
kl_context_switch(KlContextSwitch *context, uint32_t id)
{
    if (context->now == id && !context->is_fresh) {
        return 0;
    }
    context->is_fresh = false;
    const Context from[] = {state.contexts[context->now]}, to[] = {state.contexts[id]};
    context->now = id; /* the calls below may intern a context and move the table */
    bool is_back = context->guard != NULL; /* leaving inference mode restores autocast */
    bool is_casting = from->is_autocast || to->is_autocast;
    if ((is_casting || from->is_inference != to->is_inference) && begin_casts(context) < 0) {
        return -1;
    }
    bool is_grad = to->is_grad_enabled && !context->is_grad_off && !context->is_aside;
    if ((from->is_inference != to->is_inference && set_inference(context, to->is_inference) < 0) ||
        (from->switches != to->switches &&
         kl_py_done(PyObject_CallFunction(kl_py.choose_switches, "I", to->switches)) < 0) ||
        call_ignoring(kl_py.set_grad_enabled, kl_py_bool(is_grad), NULL) < 0) {
        return -1;
    }
    /* A cast made aside may have no graph (torch 2.10): later nodes must not find it in the cache. */
    bool is_cache_enabled = to->casting.is_cache_enabled && !context->is_aside;
    return is_casting || is_back ? set_autocast(&to->casting, is_cache_enabled) : 0;
}

int
kl_context_end(KlContextSwitch *context)
{
    PyObject *type = NULL, *value = NULL, *traceback = NULL;
    PyErr_Fetch(&type, &value, &traceback);
    context->is_grad_off = context->is_aside = false;
    context->is_fresh = true;
    int result = kl_context_switch(context, context->before);
    if (context->is_nested) {
        result = set_autocast(&context->outer, context->outer.is_cache_enabled) < 0 ? -1 : result;
        PyObject *nesting = PyObject_CallNoArgs(kl_py.decrement_nesting);
        bool is_last = nesting != NULL && PyLong_AsLong(nesting) == 0;
        if (nesting == NULL || (is_last && call_ignoring(kl_py.clear_cache, NULL, NULL) < 0)) {
            result = -1;
        }
        Py_XDECREF(nesting);
    }
    if (type != NULL) {
        PyErr_Restore(type, value, traceback); /* the first failure is the one to report */
        return -1;
    }
    return result;
}

/* Test has_saved_tensors_hooks(): it sees hooks that are entered here, which move the end of the deque. 0 or -1. */
int
kl_context_init(void)
{
    PyObject *graph = PyImport_ImportModule("torch.autograd.graph");
    PyObject *hooks = graph == NULL ? NULL
                                    : PyObject_CallMethod(graph, "saved_tensors_hooks", "OO",
                                                          &PyTuple_Type, &PyTuple_Type);
    void *const *deque = kl_py.lib_saved_tensors();
    const void *end = deque[6];
    hooks = kl_context_enter(hooks);
    bool is_right = hooks == NULL || (has_saved_tensors_hooks() && deque[6] != end);
    PyErr_Clear(); /* saved-tensor hooks may be disabled at this moment */
    kl_context_end_outside(hooks);
    Py_XDECREF(graph);
    return is_right ? 0 : kl_py_lacks("saved-tensor hooks where koila looks for them");
}
