/* SPDX-License-Identifier: Apache-2.0 */
/* module.c - the module koila._core: its state, types and functions. Nothing else. */
#include "py.h"

#include "py_core.h"
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

int
kl_py_id(PyObject *object, void *id)
{
    if (!PyLong_Check(object)) {
        PyErr_Format(PyExc_TypeError, "expected a number of a node or a value, got %R", object);
        return 0;
    }
    int overflow = 0;
    long long wide = PyLong_AsLongLongAndOverflow(object, &overflow);
    if (overflow != 0 || wide < 0 || wide >= KL_ID_NONE) {
        PyErr_Format(PyExc_IndexError, "no node and no value has the number %R", object);
        return 0;
    }
    *(unsigned int *)id = (unsigned int)wide;
    return 1;
}

/* bind(folders, reductions, objects): each object of the dict by the name that it has here. */
static PyObject *
core_bind(PyObject *module, PyObject *args)
{
    (void)module;
    const struct {
        PyObject **where;
        const char *name;
    } names[] = {
        {&kl_py.koila_error, "koila_error"},
        {&kl_py.stale_error, "stale_error"},
        {&kl_py.meta_infer, "meta_infer"},
        {&kl_py.refuse, "refuse"},
        {&kl_py.is_row_range, "is_row_range"},
        {&kl_py.checksum, "checksum"},
        {&kl_py.draw_like, "draw_like"},
        {&kl_py.note_draw, "note_draw"},
        {&kl_py.check_draws, "check_draws"},
        {&kl_py.thawed, "thawed"},
        {&kl_py.move_on, "move_on"},
        {&kl_py.skip_one_hop, "skip_one_hop"},
        {&kl_py.read, "read"},
        {&kl_py.in_transform, "in_transform"},
        {&kl_py.run_again, "run_again"},
        {&kl_py.bind_hooks, "bind_hooks"},
        {&kl_py.bridge, "bridge"},
        {&kl_py.before_write, "before_write"},
        {&kl_py.after_write, "after_write"},
        {&kl_py.note_ran, "note_ran"},
        {&kl_py.device_of, "device_of"},
        {&kl_py.wait_for_copy, "wait_for_copy"},
        {&kl_py.choose_switches, "choose_switches"},
        {&kl_py.runs_at_once, "runs_at_once"},
        {&kl_py.leave, "leave"},
        {&kl_py.record_out, "record_out"},
        {&kl_py.settle, "settle"},
        {&kl_py.is_out_of_memory, "is_out_of_memory"},
        {&kl_py.note_write, "note_write"},
        {&kl_py.note_written, "note_written"},
        {&kl_py.note_left, "note_left"},
        {&kl_py.is_in_hook, "is_in_hook"},
        {&kl_py.name_of_file, "name_of_file"},
    };
    PyObject *folders = NULL, *objects = NULL;
    if (!PyArg_ParseTuple(args, "O!IO!:bind", &PyTuple_Type, &folders, &kl_py.reductions,
                          &PyDict_Type, &objects) ||
        kl_source_init(folders) < 0) {
        return NULL;
    }
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        PyObject *object = PyDict_GetItemString(objects, names[i].name);
        if (object == NULL) {
            return PyErr_Format(PyExc_TypeError, "bind: %s is not among the objects",
                                names[i].name);
        }
        Py_XSETREF(*names[i].where, Py_NewRef(object));
    }
    return Py_NewRef(Py_None);
}

/* set_blocks(width, dtypes): see KlCall. */
static PyObject *
core_set_blocks(PyObject *module, PyObject *args)
{
    (void)module;
    uint32_t bits = 0;
    long long width = 0;
    PyObject *dtypes = NULL;
    if (!PyArg_ParseTuple(args, "LO:set_blocks", &width, &dtypes)) {
        return NULL;
    }
    for (Py_ssize_t i = 0; PyTuple_Check(dtypes) && i < PyTuple_GET_SIZE(dtypes); i++) {
        bits |= UINT32_C(1) << kl_meta_dtype_from(PyTuple_GET_ITEM(dtypes, i));
    }
    kl_py.blocked_halves = bits;
    kl_py.block_width = width;
    return Py_NewRef(Py_None);
}

static PyMethodDef functions[] = {
    {"bind", core_bind, METH_VARARGS,
     "bind($module, folders, reductions, objects, /)\n--\n\n"
     "Give the module the Python objects it calls, by name."},
    {"register", kl_function_register, METH_VARARGS,
     "register($module, func, kind, name, handler, has_meta, returns_list, is_random, row, "
     "container, /)\n--\n\n"
     "Say what is done with a torch callable that meets a lazy."},
    {"note_switches", kl_context_note_switches, METH_VARARGS,
     "note_switches($module, setting, is_flash_allowed, /)\n--\n\n"
     "The number of the setting of torch's switches that is in force from now on."},
    {"new_axis", core_new_axis, METH_NOARGS, "new_axis($module, /)\n--\n\nA new batch's key."},
    {"input", core_input, METH_VARARGS,
     "input($module, tensor, dim, axis, rows, /)\n--\n\n"
     "A lazy for a tensor whose rows are in `dim` (negative: whole)."},
    {"like", core_like, METH_VARARGS,
     "like($module, tensor, lazy, /)\n--\n\nA lazy for a real tensor, its rows where those of "
     "`lazy` are."},
    {"force", core_force, METH_O,
     "force($module, lazy, /)\n--\n\nThe real tensor of a lazy; runs what is pending."},
    {"real", core_real, METH_O,
     "real($module, lazy, /)\n--\n\nThe real tensor of a lazy, or None while it is pending."},
    {"is_input", core_is_input, METH_O,
     "is_input($module, lazy, /)\n--\n\nWhether lazy() made it."},
    {"keep_lazy", core_keep_lazy, METH_O,
     "keep_lazy($module, lazy, /)\n--\n\n"
     "Whether nobody else holds its tensor; then what is done with it is recorded, as with an "
     "input."},
    {"rows_dim", core_rows_dim, METH_O,
     "rows_dim($module, lazy, /)\n--\n\nThe dim of its rows alone; -1: it has none, -2: a part of "
     "a dim."},
    {"describe", core_describe, METH_O,
     "describe($module, tensor, /)\n--\n\n"
     "(dtype, shape, strides or None, requires_grad, device number) of a lazy or a real tensor; "
     "None "
     "where the core cannot describe it."},
    {"live", core_live, METH_VARARGS,
     "live($module, func, args, kwargs, is_plain, /)\n--\n\nRun a call now on real tensors."},
    {"live_with_all", core_live_with_all, METH_VARARGS,
     "live_with_all($module, func, args, kwargs, is_plain, /)\n--\n\n"
     "live() for a call that needs the real graph: what memory that costs is said."},
    {"flush", core_flush, METH_NOARGS,
     "flush($module, /)\n--\n\nRun what is pending on this thread."},
    {"has_known", core_has_known, METH_NOARGS,
     "has_known($module, /)\n--\n\n"
     "Whether the user can reach a pending value without a gradient in its history."},
    {"has_numbers", core_has_numbers, METH_NOARGS,
     "has_numbers($module, /)\n--\n\n"
     "Whether a value has a number without its graph: it was read, and can be differentiated."},
    {"read", core_read, METH_O,
     "read($module, lazy, /)\n--\n\nThe number of a lazy; runs what is pending, in chunks or "
     "whole."},
    {"leave", core_leave, METH_O,
     "leave($module, lazy, /)\n--\n\n"
     "Its tensor, if it has one; one that has a number is that from now on. None: others show it."},
    {"release", core_release, METH_NOARGS,
     "release($module, /)\n--\n\nLet lazies go whose tensors are others than calls have read."},
    {"call", core_call, METH_VARARGS,
     "call($module, node, /)\n--\n\n(func, args, kwargs) of a node, None in place of tensors."},
    {"refresh_leaf", core_refresh_leaf, METH_VARARGS,
     "refresh_leaf($module, value, /)\n--\n\nA replay wrote this leaf: remember its version."},
    {"note_backward", core_note_backward, METH_NOARGS,
     "note_backward($module, /)\n--\n\nA backward ran: what is live counts as spent."},
    {"count_interpreters", core_count_interpreters, METH_O,
     "count_interpreters($module, n, /)\n--\n\nSo many more of torch's interpreters of "
     "calls are under way: transforms of torch.func, and tracers."},
    {"count_dual_levels", core_count_dual_levels, METH_O,
     "count_dual_levels($module, n, /)\n--\n\nSo many more levels of forward-mode AD are on."},
    {"set_region", core_set_region, METH_O,
     "set_region($module, region, /)\n--\n\nWhat this thread records now is of the body of that "
     "checkpoint; 0: of none. Returns the one before."},
    {"fast_ways", core_fast_ways, METH_NOARGS,
     "fast_ways($module, /)\n--\n\nWhether tensors are read by torch's C ABI (handles), modes are "
     "asked of libtorch (contexts), dead lazies are used again (recycling)."},
    {"stage", kl_program_stage, METH_VARARGS,
     "stage($module, roots, is_known_only, n_segments=1, is_headed=False, gets=None, /)\n--\n\n"
     "The staged program that makes every reachable value (or only those without a gradient in "
     "their history) and differentiates the roots (lazies, or numbers of values)."},
    {"told", kl_program_told, METH_VARARGS,
     "told($module, program, what, /)\n--\n\n"
     "A list of the \"nodes\", those that run \"once\", \"imports\", \"drops\" or \"runs\" of a "
     "program."},
    {"staged", kl_program_staged, METH_VARARGS,
     "staged($module, program, node, /)\n--\n\nOne of the nodes that told() has."},
    {"overwritten", kl_gradient_overwritten, METH_VARARGS,
     "overwritten($module, program, before, /)\n--\n\n"
     "The last node before that one which keeps for backward what was written since, and what of "
     "it "
     "was; or None."},
    {"maker", kl_program_maker, METH_VARARGS,
     "maker($module, program, value, /)\n--\n\n"
     "(the node that makes a value or None, is it a leaf, needs it a gradient, is it kept)."},
    {"run", kl_stage_run, METH_VARARGS,
     "run($module, program, run, env, imports, rows, is_grad_off, run_other, cut, cloned, clone, "
     "saved, settle, again, aside, /)\n--\n\n"
     "Run the nodes of a run of a staged program on one chunk (rows < 0: whole)."},
    {"run_alone", kl_stage_run_alone, METH_VARARGS,
     "run_alone($module, node, env, rows, is_grad_off, run_other, /)\n--\n\n"
     "Run one node; env has all that it reads."},
    {"schedule", kl_schedule_of, METH_VARARGS,
     "schedule($module, program, homes, /)\n--\n\n"
     "([(op, first run, runs, values, whole, waits, again, needs)], {value: (run, needs)}): what a "
     "step in chunks does, forward and back; and what it makes again by light calls."},
    {"gradient_part", kl_program_gradient_part, METH_VARARGS,
     "gradient_part($module, program, run, values, /)\n--\n\n"
     "Append the part of a joint that gradients go through, after those of its combined reductions "
     "whose first results are given: (number, nodes, imports, exports, combined)."},
    {"measure", kl_measure_program, METH_VARARGS,
     "measure($module, program, homes, cloned, states, noise_of, peak_of, /)\n--\n\n"
     "The bytes that a step needs: (moments, rows, bytes of a live run)."},
    {"peak", kl_measure_peak_of, METH_VARARGS,
     "peak($module, moments, n_rows, rows, /)\n--\n\n"
     "With chunks of some rows: (bytes at the worst moment, of these fixed, node)."},
    {"moments", kl_measure_moments_of, METH_VARARGS,
     "moments($module, moments, n_rows, rows, /)\n--\n\n"
     "With chunks of some rows, in the order of the step: [(step of the schedule, node, whether it "
     "goes back, bytes, of these gradients, of these only while the node runs), ...]."},
    {"largest_chunk", kl_measure_largest_of, METH_VARARGS,
     "largest_chunk($module, moments, n_rows, budget, /)\n--\n\n"
     "The most rows of a chunk that fits; 0 where none does."},
    {"skip_words", kl_twister_skip_words, METH_VARARGS,
     "skip_words($module, state, n, /)\n--\n\n"
     "The state of torch's generator on the CPU after n words more; each draw takes one or two."},
    {"check_result", kl_promise_check_result, METH_VARARGS,
     "check_result($module, node, value, tensor, /)\n--\n\n"
     "Raise where a value made outside of run() is not what inference promised."},
    {"deliver", kl_stage_deliver, METH_VARARGS,
     "deliver($module, value, tensor, is_final, /)\n--\n\nGive a value its number."},
    {"failed", kl_failure_failed, METH_O,
     "failed($module, error, /)\n--\n\nLet an error stand for the call at which a run stopped."},
    {"cut", kl_stage_cut, METH_VARARGS,
     "cut($module, value, tensor, /)\n--\n\nMake a value a leaf, of which only the number is "
     "left."},
    {"value", kl_program_value, METH_VARARGS,
     "value($module, id, /)\n--\n\n"
     "(dtype, shape, requires_grad, place, rows, real tensor or None, number or None) of a value."},
    {"node", kl_program_node, METH_VARARGS,
     "node($module, id, /)\n--\n\n(func, row, reason, where, rows, input values) of a node."},
    {"is_busy", core_is_busy, METH_NOARGS,
     "is_busy($module, /)\n--\n\nWhether a replay is under way on this thread."},
    {"forget", core_forget, METH_NOARGS,
     "forget($module, /)\n--\n\nForget the program of this thread; what was pending has no value."},
    {"abandon", core_abandon, METH_NOARGS,
     "abandon($module, /)\n--\n\nA run raised: what is pending waits until it is asked for by "
     "name."},
    {"swap", core_swap, METH_VARARGS,
     "swap($module, left, right, /)\n--\n\n"
     "Let two lazies stand for each other's values. A ValueError where torch would tell them "
     "apart: only one is a number."},
    {"set_for_chunks", core_set_for_chunks, METH_O,
     "set_for_chunks($module, lazy, /)\n--\n\n"
     "Let only chunks run the reduction that made it, for the next call. Whether it is one."},
    {"has_views", core_has_views, METH_O,
     "has_views($module, lazy, /)\n--\n\nWhether a lazy that is no view has views that need a "
     "gradient."},
    {"storage", core_storage, METH_O,
     "storage($module, lazy, /)\n--\n\n"
     "The number of the memory of a pending lazy; None where it is, or may be, memory of the "
     "user's."},
    {"spend", kl_program_spend, METH_VARARGS,
     "spend($module, program, is_asked, /)\n--\n\n"
     "A backward goes through a program for good, or the last call of it where one did."},
    {"behind", kl_bridge_behind, METH_VARARGS,
     "behind($module, value, /)\n--\n\n"
     "The tensors that need a gradient and that a value is made of, some twice."},
    {"is_spent", core_is_spent, METH_O,
     "is_spent($module, lazy, /)\n--\n\n"
     "Whether a backward that kept nothing for another went through the call that made a lazy."},
    {"leaves_of", core_leaves_of, METH_O,
     "leaves_of($module, tensor, /)\n--\n\n"
     "[value] of the real tensors that pending calls read and that share a tensor's memory."},
    {"has_draw", core_has_draw, METH_O,
     "has_draw($module, is_dead, /)\n--\n\nWhether a random call waits that has not drawn yet; "
     "dead: "
     "that nobody will look at, and that keeps what it reads."},
    {"waiting_draws", core_waiting_draws, METH_NOARGS,
     "waiting_draws($module, /)\n--\n\n"
     "[(node, first output, number of outputs)] of the random calls that have still to draw."},
    {"note_drawn", core_note_drawn, METH_O,
     "note_drawn($module, node, /)\n--\n\n"
     "The generator moved past a node's draws: every run of it draws the same."},
    {"set_type_attribute", core_set_type_attribute, METH_VARARGS,
     "set_type_attribute($module, type, name, value, /)\n--\n\n"
     "As setattr, also for types in C that are closed to it."},
    {"set_attribute_by", core_set_attribute_by, METH_VARARGS,
     "set_attribute_by($module, descriptor, put, /)\n--\n\n"
     "put(tensor, lazy) sets an attribute to a lazy, or None: torch does. False: this torch is "
     "otherwise."},
    {"set_busy", core_set_busy, METH_O,
     "set_busy($module, flag, /)\n--\n\nA replay begins, or is over."},
    {"outdated", kl_stale_outdated, METH_O,
     "outdated($module, is_over, /)\n--\n\n"
     "Values with a number that cannot be made again, or are of a step that is over: all, or "
     "some."},
    {"forget_left", kl_stale_forget_left, METH_NOARGS,
     "forget_left($module, /)\n--\n\n"
     "Drop the numbers of values with a gradient that no lazy stands for any more."},
    {"check_leaves", core_check_leaves, METH_NOARGS,
     "check_leaves($module, /)\n--\n\nRaise where a leaf was changed since it was recorded."},
    {"hook", core_hook, METH_VARARGS,
     "hook($module, lazy, is_retained=False, is_live=False, /)\n--\n\n"
     "The number of a value whose gradient is seen whole, kept, or given to live hooks, or None."},
    {"retained", core_retained, METH_VARARGS,
     "retained($module, value, is_of_lazy=False, /)\n--\n\n"
     "As what the gradient of a value is kept, or that which the lazy keeps that stands for it; or "
     "None."},
    {"id", core_id, METH_O,
     "id($module, lazy, /)\n--\n\nThe value that a lazy stands for on this thread's tape; or "
     "None."},
    {"install_slots", kl_slots_install, METH_O,
     "install_slots($module, names, /)\n--\n\n"
     "Let these methods of a lazy, and its operators, record without torch's dispatch; False where "
     "this torch does not allow it."},
    {"close", core_close, METH_NOARGS,
     "close($module, /)\n--\n\nForget the program where the user can reach nothing pending or "
     "known."},
    {"can_cut", kl_bridge_can_cut, METH_NOARGS,
     "can_cut($module, /)\n--\n\n"
     "Whether each lazy of this thread's tape can be given a tensor, once it has a number."},
    {"won_whole", kl_bridge_won_whole, METH_NOARGS,
     "won_whole($module, /)\n--\n\n"
     "Bytes less that the graph of what waits keeps than a part which reads its leaves again."},
    {"reached", kl_bridge_reached, METH_NOARGS,
     "reached($module, /)\n--\n\n"
     "The values with a number that the user can reach, as (value, number). None where one cannot "
     "be given a tensor."},
    {"hand_out", kl_bridge_hand_out, METH_VARARGS,
     "hand_out($module, roots, others, /)\n--\n\n"
     "Give the user's lazies of these values the tensors of pairs (value, tensor), and the thread "
     "a "
     "new tape; the lazies that stand for the roots from now on."},
    {"set_wanted", kl_bridge_set_wanted, METH_VARARGS,
     "set_wanted($module, lazies, is_wanted, /)\n--\n\n"
     "Whether anybody is to get the numbers of these lazies."},
    {"replace_leaves", kl_bridge_replace_leaves, METH_VARARGS,
     "replace_leaves($module, lazy, make, /)\n--\n\n"
     "Let a live run of the tape of a lazy have make(leaf) for each leaf that needs a gradient."},
    {"replace_leaf", kl_bridge_replace_leaf, METH_VARARGS,
     "replace_leaf($module, lazy, leaf, tensor, /)\n--\n\n"
     "Let the tape of a lazy, which was cut off, have a tensor for a leaf."},
    {"pending_bytes", core_pending_bytes, METH_NOARGS,
     "pending_bytes($module, /)\n--\n\nBytes that the pending calls would make, by a quick sum."},
    {"set_blocks", core_set_blocks, METH_VARARGS,
     "set_blocks($module, width, dtypes, /)\n--\n\nSay how many channels oneDNN lays side by side "
     "on this CPU, and which dtypes of 16 bits it convolves."},
    {"fix_malloc", core_fix_malloc, METH_O,
     "fix_malloc($module, size, /)\n--\n\nLet glibc give blocks of `size` bytes and more back to "
     "the "
     "system when they are freed, and now all that is free."},
    {"sees_storages", kl_storage_works, METH_NOARGS,
     "sees_storages($module, /)\n--\n\n"
     "Whether the memory of tensors can be read as this torch lays it out."},
    {"follow_storages", kl_storage_follow, METH_O,
     "follow_storages($module, parts, /)\n--\n\n"
     "Let collecting_garbage() note new tensors from now on; parts(tensors without storage) are "
     "those that they are made up of. None: no more, and forget all."},
    {"is_following_storages", kl_storage_is_following, METH_NOARGS,
     "is_following_storages($module, /)\n--\n\nWhether every new tensor has been noted."},
    {"collecting_garbage", kl_storage_collecting, METH_VARARGS,
     "collecting_garbage($module, phase, info, /)\n--\n\n"
     "For gc.callbacks: note the tensors among the youngest objects before they grow old."},
    {"note_storages", kl_storage_note, METH_O,
     "note_storages($module, objects, /)\n--\n\n"
     "Remember, weakly, what memory the tensors in a list hold on the CPU."},
    {"note_young_storages", kl_storage_note_young, METH_NOARGS,
     "note_young_storages($module, /)\n--\n\nThe same for the youngest objects."},
    {"storage_bytes", kl_storage_bytes, METH_NOARGS,
     "storage_bytes($module, /)\n--\n\nBytes of what was noted and is still there."},
    {"unsettled_storages", kl_storage_unsettled, METH_NOARGS,
     "unsettled_storages($module, /)\n--\n\n"
     "[(key, address)] of what was noted and may be a mapped file."},
    {"settle_storage", kl_storage_settle, METH_VARARGS,
     "settle_storage($module, key, is_file, /)\n--\n\nA file does not count."},
    {"memo", core_memo, METH_NOARGS,
     "memo($module, /)\n--\n\nA dict that lives as long as the program of this thread."},
    {"held", kl_turn_held, METH_VARARGS,
     "held($module, of, func, args, kwargs, /)\n--\n\n"
     "Call func while no other thread uses a tape, which is this thread's meanwhile: the one "
     "given, that which a lazy is on, or this thread's own (None)."},
    {"lazy_of", core_lazy_of, METH_O,
     "lazy_of($module, value, /)\n--\n\nA lazy that stands for a value of this thread's tape."},
    {"new_tape", kl_tape_make, METH_NOARGS,
     "new_tape($module, /)\n--\n\nA tape that is no thread's yet, for held() and run()."},
    {"drawing", kl_turn_drawing, METH_O,
     "drawing($module, func, /)\n--\n\n"
     "Call func while no other program draws random numbers."},
    {"is_pending_here", core_is_pending_here, METH_O,
     "is_pending_here($module, lazy, /)\n--\n\n"
     "Whether a lazy is a value of this thread's tape, without a tensor so far."},
    {"infer", core_infer, METH_VARARGS, CORE_INFER_DOC},
    {"op_table", core_op_table, METH_NOARGS, CORE_OP_TABLE_DOC},
    {"parts_table", core_parts_table, METH_NOARGS, CORE_PARTS_TABLE_DOC},
    {"fail_alloc_after", core_fail_alloc_after, METH_O,
     "fail_alloc_after($module, n, /)\n--\n\n"
     "Let n more allocations of the core succeed, then fail all; negative: never fail."},
    {"n_blocks", core_n_blocks, METH_NOARGS,
     "n_blocks($module, /)\n--\n\nBlocks of memory the core holds now."},
    {NULL, NULL, 0, NULL},
};

/* Look up the Python objects that all files use; the error names the first that is missing. */
static int
find_names(void)
{
    const struct {
        PyObject **where;
        const char *module, *name;
    } names[] = {
        {(PyObject **)&kl_py.tensor_base, "torch._C", "TensorBase"},
        {(PyObject **)&kl_py.tensor, "torch", "Tensor"},
        {&kl_py.len_dispatch_stack, "torch._C", "_len_torch_dispatch_stack"},
        {(PyObject **)&kl_py.parameter, "torch.nn", "Parameter"},
        {&kl_py.no_function, "torch._C", "_disabled_torch_function_impl"},
        {&kl_py.no_dispatch, "torch._C", "_disabled_torch_dispatch_impl"},
        {&kl_py.size_type, "torch", "Size"},
        {(PyObject **)&kl_py.method_wrapper, "types", "MethodWrapperType"},
        {&kl_py.reenter, "torch.overrides", "enable_reentrant_dispatch"},
        {&kl_py.strided, "torch", "strided"},
        {&kl_py.get_default_dtype, "torch", "get_default_dtype"},
        {&kl_py.is_alias_of, "torch._C", "_is_alias_of"},
    };
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        PyObject *module = PyImport_ImportModule(names[i].module);
        *names[i].where = module != NULL ? PyObject_GetAttrString(module, names[i].name) : NULL;
        Py_XDECREF(module);
        if (*names[i].where == NULL) {
            return -1;
        }
    }
    return 0;
}

static int
import_torch(void)
{
    if (find_names() < 0) {
        return -1;
    }
    kl_py.empty_tuple = PyTuple_New(0);
    kl_py.empty_dict = PyDict_New();
    kl_py.zero = PyLong_FromLong(0);
    kl_py.requires_grad = PyUnicode_InternFromString("requires_grad");
    kl_py.out = PyUnicode_InternFromString("out");
    if (kl_py.empty_tuple == NULL || kl_py.empty_dict == NULL || kl_py.zero == NULL ||
        kl_py.requires_grad == NULL || kl_py.out == NULL) {
        return -1;
    }
    PyObject *numpy = PyImport_ImportModule("numpy");
    if (numpy != NULL) {
        kl_py.ndarray = PyObject_GetAttrString(numpy, "ndarray");
        Py_DECREF(numpy);
    }
    PyErr_Clear(); /* torch works without numpy, and so do we */
    return 0;
}

static int
module_exec(PyObject *module)
{
    if (kl_py.lazy != NULL) { /* its lazies would be of a class that nothing here knows any more */
        PyErr_SetString(PyExc_ImportError,
                        "koila._core is loaded already, and cannot live twice in a process");
        return -1;
    }
    if (import_torch() < 0 || kl_meta_init() < 0 || kl_context_init() < 0 || kl_rows_init() < 0 ||
        kl_storage_init() < 0 || kl_tape_type_init(module) < 0 || kl_function_init(module) < 0 ||
        kl_lazy_init(module) < 0) {
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
