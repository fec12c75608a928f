/* module.c - the module koila._core: its state, types and functions. Nothing else. */
#include "py.h"

#include <malloc.h>

#include "alloc.h"
#include "py_infer.h"

PyMODINIT_FUNC PyInit__core(void);

KlPyState kl_py;

PyObject *
kl_py_raise(const KlError *error)
{
    switch (error->status) {
    case KL_ERROR_MEMORY:
        PyErr_SetString(PyExc_MemoryError, error->text);
        break;
    case KL_ERROR_SHAPE:
    case KL_ERROR_ARGUMENT:
        PyErr_SetString(PyExc_RuntimeError, error->text);
        break;
    default:
        PyErr_SetString(PyExc_SystemError, error->text);
    }
    return NULL;
}

static Value *
value_argument(PyObject *object)
{
    if (!kl_lazy_check(object)) {
        (void)PyErr_Format(PyExc_TypeError, "expected a LazyTensor, got %.100s", Py_TYPE(object)->tp_name);
        return NULL;
    }
    return kl_lazy_checked(object);
}

static PyObject *
core_new_axis(PyObject *module, PyObject *ignored)
{
    (void)module;
    (void)ignored;
    return PyLong_FromUnsignedLongLong(++kl_py.n_axis_keys);
}

static PyObject *
core_input(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *tensor = NULL;
    int dim = 0;
    unsigned long long key = 0;
    long long rows = 0;
    if (!PyArg_ParseTuple(args, "O!iKL:input", kl_py.tensor_base, &tensor, &dim, &key, &rows)) {
        return NULL;
    }
    KlPlace place = {.axis = dim < 0 ? KL_ID_NONE : 0, .dim = dim < 0 ? 0 : dim, .outer = 1, .inner = 1};
    return kl_lazy_new_detached(tensor, &place, key, rows, true);
}

static PyObject *
core_like(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *tensor = NULL, *lazy = NULL;
    if (!PyArg_ParseTuple(args, "O!O:like", kl_py.tensor_base, &tensor, &lazy)) {
        return NULL;
    }
    const Value *value = value_argument(lazy);
    if (value == NULL) {
        return NULL;
    }
    KlPlace place = value->place;
    uint64_t key = value->axis_key;
    int64_t rows = value->rows;
    if (value->tape != NULL) {
        const KlTape *core = &value->tape->core;
        place = core->values[value->id].meta.place;
        place.axis = kl_tape_axis_find(core, place.axis);
        key = kl_place_is_rows(&place) ? value->tape->axis_keys[place.axis] : 0;
        rows = kl_place_is_rows(&place) ? core->axis_rows[place.axis] : 0;
    }
    place.axis = kl_place_is_rows(&place) ? 0 : KL_ID_NONE;
    return kl_lazy_new_detached(tensor, &place, key, rows, true);
}

static PyObject *
core_force(PyObject *module, PyObject *object)
{
    (void)module;
    Value *value = value_argument(object);
    return value == NULL ? NULL : kl_live_force(value);
}

static PyObject *
core_real(PyObject *module, PyObject *object)
{
    (void)module;
    Value *value = value_argument(object);
    PyObject *real = value == NULL ? NULL : kl_lazy_real(value);
    return value == NULL ? NULL : Py_NewRef(real != NULL ? real : Py_None);
}

static PyObject *
core_is_input(PyObject *module, PyObject *object)
{
    (void)module;
    Value *value = value_argument(object);
    return value == NULL ? NULL : PyBool_FromLong(value->is_input);
}

/* (dtype, shape, strides or None, requires_grad, device number), or None where there is no KlMeta. */
static PyObject *
describe(const KlMeta *meta)
{
    if (meta->dtype == KL_DTYPE_OTHER) {
        return Py_NewRef(Py_None);
    }
    PyObject *size = kl_meta_size(meta);
    PyObject *strides = NULL, *result = NULL;
    if (size != NULL) {
        strides = meta->is_strided ? kl_meta_strides(meta) : Py_NewRef(Py_None);
    }
    if (strides != NULL) {
        result = Py_BuildValue("(OOOOi)", kl_py.dtypes[meta->dtype], size, strides,
                               meta->requires_grad ? Py_True : Py_False, (int)meta->device);
    }
    Py_XDECREF(strides);
    Py_XDECREF(size);
    return result;
}

static PyObject *
core_describe(PyObject *module, PyObject *object)
{
    (void)module;
    KlMeta meta;
    PyObject *real = object;
    if (kl_lazy_check(object)) {
        Value *value = value_argument(object);
        if (value == NULL) {
            return NULL;
        }
        real = kl_lazy_real(value);
        if (real == NULL) {
            return describe(&value->tape->core.values[value->id].meta);
        }
    }
    int result = kl_meta_read(real, &meta);
    return result == 0 ? describe(&meta) : result < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *
core_live(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *func = NULL, *call_args = NULL, *kwargs = NULL;
    int is_plain = 0;
    if (!PyArg_ParseTuple(args, "OO!Op:live", &func, &PyTuple_Type, &call_args, &kwargs, &is_plain)) {
        return NULL;
    }
    return kl_live_call(func, call_args, kwargs, is_plain ? KL_LIVE_PLAIN : KL_LIVE_LAZY);
}

static PyObject *
core_flush(PyObject *module, PyObject *ignored)
{
    (void)module;
    (void)ignored;
    Tape *tape = kl_tape_open_or_null();
    return tape != NULL && kl_live_run(tape) < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *
core_has_known(PyObject *module, PyObject *ignored)
{
    (void)module;
    (void)ignored;
    Tape *tape = kl_tape_open_or_null();
    bool has_any = false;
    KlError error;
    if (tape != NULL && kl_tape_find_known(&tape->core, &has_any, &error) != KL_OK) {
        return kl_py_raise(&error);
    }
    return PyBool_FromLong(has_any);
}

static PyObject *
core_read(PyObject *module, PyObject *object)
{
    (void)module;
    Value *value = value_argument(object);
    return value == NULL || kl_live_read(value) < 0 ? NULL : Py_XNewRef(kl_lazy_number(value));
}

static PyObject *
core_call(PyObject *module, PyObject *args)
{
    (void)module;
    unsigned int id = 0;
    Tape *tape = kl_tape_open();
    if (tape == NULL || !PyArg_ParseTuple(args, "I:call", &id)) {
        return NULL;
    }
    return id < tape->core.n_nodes ? kl_call_describe(tape, id)
                                   : PyErr_Format(PyExc_IndexError, "call: there is no node %u", id);
}

static PyObject *
core_refresh_leaf(PyObject *module, PyObject *args)
{
    (void)module;
    unsigned int id = 0;
    Tape *tape = kl_tape_open();
    if (tape == NULL || !PyArg_ParseTuple(args, "I:refresh_leaf", &id)) {
        return NULL;
    }
    if (id < tape->core.n_values) {
        kl_tape_refresh_leaf(tape, id);
    }
    return Py_NewRef(Py_None);
}

static PyObject *
core_note_backward(PyObject *module, PyObject *ignored)
{
    (void)module;
    (void)ignored;
    kl_py.n_backwards++;
    return Py_NewRef(Py_None);
}

static PyObject *
core_is_busy(PyObject *module, PyObject *ignored)
{
    (void)module;
    (void)ignored;
    const Tape *tape = kl_tape_open_or_null();
    return PyBool_FromLong(tape != NULL && tape->is_running);
}

static PyObject *
core_set_busy(PyObject *module, PyObject *flag)
{
    (void)module;
    Tape *tape = kl_tape_open();
    if (tape == NULL) {
        return NULL;
    }
    tape->is_running = flag == Py_True;
    return Py_NewRef(Py_None);
}

static PyObject *
core_check_leaves(PyObject *module, PyObject *ignored)
{
    (void)module;
    (void)ignored;
    Tape *tape = kl_tape_open();
    return tape == NULL || kl_tape_check_leaves(tape) < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *
core_close(PyObject *module, PyObject *ignored)
{
    (void)module;
    (void)ignored;
    Tape *tape = kl_tape_open();
    if (tape == NULL) {
        return NULL;
    }
    for (size_t i = 0; i < tape->core.n_values; i++) {
        if (tape->core.values[i].node != KL_ID_NONE && tape->values[i].handle != NULL) {
            KlError error;
            if (kl_tape_retire(&tape->core, &error) != KL_OK) {
                return kl_py_raise(&error);
            }
            return Py_NewRef(Py_False);
        }
    }
    kl_tape_close(tape);
    return Py_NewRef(Py_True);
}

static PyObject *
core_known(PyObject *module, PyObject *object)
{
    (void)module;
    Value *value = value_argument(object);
    if (value == NULL) {
        return NULL;
    }
    PyObject *number = kl_lazy_real(value);
    if (number == NULL) {
        number = value->tape->values[value->id].number;
    }
    return Py_NewRef(number != NULL ? number : Py_None);
}

/* Bytes that the pending calls would make and keep, by a quick sum. */
static PyObject *
core_pending_bytes(PyObject *module, PyObject *ignored)
{
    (void)module;
    (void)ignored;
    const Tape *tape = kl_tape_open_or_null();
    long long bytes = 0;
    for (size_t i = 0; tape != NULL && i < tape->core.n_nodes; i++) {
        const KlNode *node = &tape->core.nodes[i];
        for (uint32_t k = 0; k < node->n_outs && !node->is_done; k++) {
            const KlValue *value = &tape->core.values[node->first_out + k];
            bytes += value->view_of == KL_ID_NONE ? kl_meta_n_bytes(&value->meta) : 0;
        }
        bytes += node->saves.bytes_extra + node->saves.bytes_workspace;
    }
    return PyLong_FromLongLong(bytes);
}

static PyObject *
core_fix_malloc(PyObject *module, PyObject *ignored)
{
    (void)module;
    (void)ignored;
#ifdef __GLIBC__
    /* glibc raises its threshold when a large block is freed, sends later ones to the heap, and the heap
     * does not shrink: fixed, every large block goes back to the system when it is freed. */
    return PyBool_FromLong(mallopt(M_MMAP_THRESHOLD, 64 * 1024));
#else
    return Py_NewRef(Py_False);
#endif
}

static PyObject *
core_memo(PyObject *module, PyObject *ignored)
{
    (void)module;
    (void)ignored;
    Tape *tape = kl_tape_open();
    if (tape == NULL) {
        return NULL;
    }
    if (tape->memo == NULL) {
        tape->memo = PyDict_New();
    }
    return Py_XNewRef(tape->memo);
}

static PyObject *
core_configure(PyObject *module, PyObject *args)
{
    (void)module;
    long long chunks = 0, bytes = 0;
    if (!PyArg_ParseTuple(args, "LL:configure", &chunks, &bytes)) {
        return NULL;
    }
    kl_py.n_chunks = chunks;
    kl_py.bytes_limit = bytes;
    return Py_NewRef(Py_None);
}

static PyObject *
core_recycles(PyObject *module, PyObject *ignored)
{
    (void)module;
    (void)ignored;
    return PyBool_FromLong(kl_recycle_works());
}

static PyObject *
core_fail_alloc_after(PyObject *module, PyObject *n)
{
    (void)module;
    long long left = PyLong_AsLongLong(n);
    if (left == -1 && PyErr_Occurred()) {
        return NULL;
    }
    kl_alloc_fail_after(left);
    return Py_NewRef(Py_None);
}

static PyObject *
core_n_blocks(PyObject *module, PyObject *ignored)
{
    (void)module;
    (void)ignored;
    return PyLong_FromLongLong(kl_alloc_n_blocks());
}

static PyObject *
core_bind(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *koila_error = NULL, *stale_error = NULL, *meta_infer = NULL, *skip_one_hop = NULL;
    PyObject *is_row_range = NULL, *draw_like = NULL, *note_draw = NULL, *check_draws = NULL, *read = NULL;
    unsigned int reductions = 0;
    if (!PyArg_ParseTuple(args, "OOOOOOOOOI:bind", &koila_error, &stale_error, &meta_infer, &is_row_range,
                          &draw_like, &note_draw, &check_draws, &skip_one_hop, &read, &reductions)) {
        return NULL;
    }
    Py_XSETREF(kl_py.koila_error, Py_NewRef(koila_error));
    Py_XSETREF(kl_py.stale_error, Py_NewRef(stale_error));
    Py_XSETREF(kl_py.meta_infer, Py_NewRef(meta_infer));
    kl_py.reductions = reductions;
    Py_XSETREF(kl_py.note_draw, Py_NewRef(note_draw));
    Py_XSETREF(kl_py.check_draws, Py_NewRef(check_draws));
    Py_XSETREF(kl_py.draw_like, Py_NewRef(draw_like));
    Py_XSETREF(kl_py.read, Py_NewRef(read));
    Py_XSETREF(kl_py.is_row_range, Py_NewRef(is_row_range));
    Py_XSETREF(kl_py.skip_one_hop, Py_NewRef(skip_one_hop));
    return Py_NewRef(Py_None);
}

static PyMethodDef functions[] = {
    {"bind", core_bind, METH_VARARGS,
     "bind($module, koila_error, stale_error, meta_infer, is_row_range, draw_like, note_draw, "
     "check_draws, skip_one_hop, read, "
     "reductions, /)"
     "\n--\n\n"
     "Give the module the Python objects it calls."},
    {"register", kl_function_register, METH_VARARGS,
     "register($module, func, kind, name, handler, has_meta, returns_list, is_random, row, container, /)"
     "\n--\n\n"
     "Say what is done with a torch callable that meets a lazy."},
    {"new_axis", core_new_axis, METH_NOARGS, "new_axis($module, /)\n--\n\nA new batch's key."},
    {"input", core_input, METH_VARARGS,
     "input($module, tensor, dim, axis, rows, /)\n--\n\n"
     "A lazy for a tensor whose rows are in `dim` (negative: whole)."},
    {"like", core_like, METH_VARARGS,
     "like($module, tensor, lazy, /)\n--\n\nA lazy for a real tensor, its rows where those of `lazy` are."},
    {"force", core_force, METH_O,
     "force($module, lazy, /)\n--\n\nThe real tensor of a lazy; runs what is pending."},
    {"real", core_real, METH_O,
     "real($module, lazy, /)\n--\n\nThe real tensor of a lazy, or None while it is pending."},
    {"is_input", core_is_input, METH_O,
     "is_input($module, lazy, /)\n--\n\nWhether lazy() made it."},
    {"describe", core_describe, METH_O,
     "describe($module, tensor, /)\n--\n\n"
     "(dtype, shape, strides or None, requires_grad, device number) of a lazy or a real tensor; None "
     "where the core cannot describe it."},
    {"live", core_live, METH_VARARGS,
     "live($module, func, args, kwargs, is_plain, /)\n--\n\nRun a call now on real tensors."},
    {"flush", core_flush, METH_NOARGS,
     "flush($module, /)\n--\n\nRun what is pending on this thread."},
    {"has_known", core_has_known, METH_NOARGS,
     "has_known($module, /)\n--\n\n"
     "Whether the user can reach a pending value without a gradient in its history."},
    {"read", core_read, METH_O,
     "read($module, lazy, /)\n--\n\nThe number of a lazy; runs what is pending, in chunks or whole."},
    {"call", core_call, METH_VARARGS,
     "call($module, node, /)\n--\n\n(func, args, kwargs) of a node, None in place of tensors."},
    {"refresh_leaf", core_refresh_leaf, METH_VARARGS,
     "refresh_leaf($module, value, /)\n--\n\nA replay wrote this leaf: remember its version."},
    {"note_backward", core_note_backward, METH_NOARGS,
     "note_backward($module, /)\n--\n\nA backward ran: what is live counts as spent."},
    {"configure", core_configure, METH_VARARGS,
     "configure($module, chunks, memory_limit, /)\n--\n\n"
     "Set the number of chunks (0: as few as fit) and the bytes (0: what is free)."},
    {"recycles", core_recycles, METH_NOARGS,
     "recycles($module, /)\n--\n\nWhether dead lazies are used again on this torch."},
    {"stage", kl_stage_describe, METH_VARARGS,
     "stage($module, roots, /)\n--\n\n"
     "The staged program that makes every reachable value and differentiates the roots, as a dict."},
    {"run", kl_stage_run, METH_VARARGS,
     "run($module, nodes, drops, env, imports, import_of, rows, is_grad_off, run_other, cut, /)\n--\n\n"
     "Run nodes in order on one chunk (rows < 0: whole)."},
    {"deliver", kl_stage_deliver, METH_VARARGS,
     "deliver($module, value, tensor, is_final, /)\n--\n\nGive a value its number."},
    {"value", kl_stage_value, METH_VARARGS,
     "value($module, id, /)\n--\n\n"
     "(dtype, shape, requires_grad, place, rows, real tensor or None, number or None) of a value."},
    {"node", kl_stage_node, METH_VARARGS,
     "node($module, id, /)\n--\n\n(func, row, reason, where, rows, input values) of a node."},
    {"is_busy", core_is_busy, METH_NOARGS,
     "is_busy($module, /)\n--\n\nWhether a replay is under way on this thread."},
    {"set_busy", core_set_busy, METH_O,
     "set_busy($module, flag, /)\n--\n\nA replay begins, or is over."},
    {"check_leaves", core_check_leaves, METH_NOARGS,
     "check_leaves($module, /)\n--\n\nRaise where a leaf was changed since it was recorded."},
    {"close", core_close, METH_NOARGS,
     "close($module, /)\n--\n\nForget the program where the user can reach nothing pending or known."},
    {"known", core_known, METH_O,
     "known($module, lazy, /)\n--\n\nThe number of a lazy, or None while it is pending."},
    {"pending_bytes", core_pending_bytes, METH_NOARGS,
     "pending_bytes($module, /)\n--\n\nBytes that the pending calls would make, by a quick sum."},
    {"fix_malloc", core_fix_malloc, METH_NOARGS,
     "fix_malloc($module, /)\n--\n\nLet glibc give large blocks back to the system at once."},
    {"memo", core_memo, METH_NOARGS,
     "memo($module, /)\n--\n\nA dict that lives as long as the program of this thread."},
    {"infer", core_infer, METH_VARARGS, CORE_INFER_DOC},
    {"op_table", core_op_table, METH_NOARGS, CORE_OP_TABLE_DOC},
    {"fail_alloc_after", core_fail_alloc_after, METH_O,
     "fail_alloc_after($module, n, /)\n--\n\n"
     "Let n more allocations of the core succeed, then fail all; negative: never fail."},
    {"n_blocks", core_n_blocks, METH_NOARGS,
     "n_blocks($module, /)\n--\n\nBlocks of memory the core holds now."},
    {NULL, NULL, 0, NULL},
};

static int
import_torch(void)
{
    PyObject *torch = PyImport_ImportModule("torch");
    PyObject *c = torch != NULL ? PyObject_GetAttrString(torch, "_C") : NULL;
    int result = -1;
    if (c == NULL) {
        goto error;
    }
    kl_py.tensor_base = (PyTypeObject *)PyObject_GetAttrString(c, "TensorBase");
    kl_py.tensor = (PyTypeObject *)PyObject_GetAttrString(torch, "Tensor");
    kl_py.len_dispatch_stack = PyObject_GetAttrString(c, "_len_torch_dispatch_stack");
    kl_py.size_type = PyObject_GetAttrString(torch, "Size");
    kl_py.empty_tuple = PyTuple_New(0);
    kl_py.empty_dict = PyDict_New();
    kl_py.zero = PyLong_FromLong(0);
    if (kl_py.tensor_base == NULL || kl_py.tensor == NULL || kl_py.size_type == NULL ||
        kl_py.len_dispatch_stack == NULL ||
        kl_py.empty_tuple == NULL || kl_py.empty_dict == NULL || kl_py.zero == NULL) {
        goto error;
    }
    PyObject *numpy = PyImport_ImportModule("numpy");
    if (numpy != NULL) {
        kl_py.ndarray = PyObject_GetAttrString(numpy, "ndarray");
        Py_DECREF(numpy);
    }
    PyErr_Clear(); /* torch works without numpy, and so do we */
    result = 0;
error:
    Py_XDECREF(c);
    Py_XDECREF(torch);
    return result;
}

static int
module_exec(PyObject *module)
{
    if (import_torch() < 0 || kl_meta_init() < 0 || kl_context_init() < 0 ||
        kl_rows_init() < 0 || kl_tape_type_init(module) < 0 || kl_function_init(module) < 0 || kl_lazy_init(module) < 0) {
        return -1;
    }
    return 0;
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, module_exec},
    {0, NULL},
};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "koila._core",
    .m_doc = "The recorder, planner and replayer behind koila.",
    .m_methods = functions,
    .m_slots = slots,
};

PyMODINIT_FUNC
PyInit__core(void)
{
    return PyModuleDef_Init(&definition);
}
