/* SPDX-License-Identifier: Apache-2.0 */
/* py_stage.c - runs the nodes of a run on one chunk, and gives values their numbers. It decides nothing: program.c
 * chose the nodes, their order and when their values die; replay.py chooses the rows. */
#include "py_run.h"

#include "alloc.h"

/* -- running nodes -------------------------------------------------------------------------------------- */

/* One run on one chunk: env[value] holds what it computed, imports[i] what it was given. */
typedef struct Run {
    Tape *tape;
    const KlProgram *program; /* NULL: one node runs alone, and env holds all that it reads */
    PyObject *env;            /* list [n_values] */
    PyObject *imports;        /* list [n_imports] */
    PyObject *run_other; /* callable(node, function, args, kwargs) for nodes that call_node() cannot
                            run itself: reductions, random draws, views of written memory, ... */
    PyObject *functions; /* dict: by such a node, what is called in its place; or NULL */
    PyObject *cut;  /* callable(tensor, import): the chunk's rows of a whole value of this run */
    long long rows; /* of the chunk; -1: whole */
    const KlNode *node; /* the node that runs now */
    uint32_t next;      /* the input of that node to look at first for the next slot */
    PyObject *scratch;  /* list of tensors that must live until the call returns */
    PyObject *cloned;   /* set of the nodes that write a clone instead */
    PyObject *clone;    /* callable(value, its storage) -> both as copies in new memory */
    PyObject *forked;   /* what clone() returned for the node that runs, or NULL */
    PyObject *saved;    /* list that autograd's pack hook, pack_into(saved), fills; or NULL */
    PyObject *settle;   /* callable(node): decides what of `saved` is kept, and clears it */
    uint8_t *marks;     /* [n_values], marks: only nodes that make marked values run; NULL: all */
    Tape *aside;        /* borrowed, or NULL: the tape on which the calls are recorded instead */
} Run;

/* Marks of a value: a requested value depends on it; it is requested itself. */
enum { IS_WANTED = 1, IS_ASKED_FOR = 2 };

/* Borrowed: the tensor for a slot that holds `value`; NULL if there is none. How it is read (its rows, its import)
 * depends on the node's input. A value that is given twice has its inputs in the order of the slots, so the search
 * goes on after the last one found. */
static PyObject *
run_value(void *env, KlValueId value)
{
    Run *run = env;
    PyObject *made = PyList_GET_ITEM(run->env, value);
    const KlInput *inputs = &run->tape->core.inputs[run->node->first_input];
    if (run->forked != NULL && inputs[0].value == value) {
        return PyTuple_GET_ITEM(run->forked, 0);
    }
    uint32_t first = run->next;
    for (uint32_t i = 0; i < run->node->n_inputs; i++) {
        uint32_t k = (first + i) % run->node->n_inputs;
        if (inputs[k].value != value) {
            continue;
        }
        run->next = k + 1;
        if (run->program == NULL) {
            break;
        }
        const KlStages *stages = &run->program->stages;
        uint32_t integer = stages->import_of[run->node->first_input + k];
        /* A value that has its number is read as planned, also if its call runs again for another value. */
        if (made == Py_None || stages->is_leaf[value] ||
            kl_stage_is_gathered(&run->tape->core, stages, run->node, k)) {
            PyObject *given = PyList_GET_ITEM(run->imports, integer);
            return given != Py_None ? given : NULL;
        }
        bool is_cut = run->rows >= 0 && run->node->mode != KL_MODE_ONCE &&
                      kl_place_is_rows(&inputs[k].place) &&
                      !kl_place_is_rows(&run->tape->core.values[value].meta.place);
        if (is_cut) {
            PyObject *part = PyObject_CallFunction(run->cut, "OI", made, integer);
            if (part != NULL && PyList_Append(run->scratch, part) < 0) {
                Py_CLEAR(part);
            }
            Py_XDECREF(part); /* scratch holds it while the call runs */
            return part;
        }
        return made;
    }
    KlNodeId maker = run->tape->core.values[value].node;
    bool is_for_chunks = maker != KL_ID_NONE && run->tape->core.nodes[maker].is_for_chunks;
    return made != Py_None || (run->program == NULL && is_for_chunks) ? made : NULL;
}

static PyObject *
rewrite_entry(PyObject *object, Py_ssize_t entry, PyObject *item)
{
    PyObject *list = PySequence_List(object);
    if (list == NULL || entry >= PyList_GET_SIZE(list) ||
        PyList_SetItem(list, entry, Py_NewRef(item)) < 0) {
        Py_XDECREF(list);
        return NULL;
    }
    if (PyList_Check(object)) {
        return list;
    }
    PyObject *tuple = PyList_AsTuple(list);
    Py_DECREF(list);
    return tuple;
}

static PyObject *
rewrite_slice(PyObject *object, int part, PyObject *integer)
{
    if (!PySlice_Check(object)) {
        return Py_NewRef(integer);
    }
    const PySliceObject *slice = (const PySliceObject *)object;
    return PySlice_New(part == 0 ? integer : slice->start, part == 1 ? integer : slice->stop,
                       slice->step);
}

/* Where the call was given scale * rows of the batch, put scale * rows of the chunk. */
static int
apply_rewrites(const Run *run, PyObject *args)
{
    for (uint32_t i = 0; i < run->node->n_rewrites; i++) {
        const KlRewrite *rewrite = &run->tape->core.rewrites[run->node->first_rewrite + i];
        PyObject *before = PyList_GET_ITEM(args, rewrite->arg);
        PyObject *integer = PyLong_FromLongLong(rewrite->scale * run->rows), *after = NULL;
        if (integer == NULL) {
            return -1;
        }
        if (rewrite->entry == UINT16_MAX) {
            after = rewrite_slice(before, rewrite->part, integer);
        } else {
            PyObject *item = PySequence_GetItem(before, rewrite->entry);
            PyObject *changed = item != NULL ? rewrite_slice(item, rewrite->part, integer) : NULL;
            after = changed != NULL ? rewrite_entry(before, rewrite->entry, changed) : NULL;
            KL_DROP(item, changed);
        }
        Py_DECREF(integer);
        if (after == NULL || PyList_SetItem(args, rewrite->arg, after) < 0) {
            return -1;
        }
    }
    return 0;
}

/* Call the function of a node. With `aside`, that tape is this thread's meanwhile, and records the call. */
static PyObject *
call_function(const Run *run, const KlPyNode *call, PyObject *args)
{
    KlTurn turn;
    if (run->aside != NULL && kl_turn_begin(&turn, run->aside) < 0) {
        return NULL;
    }
    PyObject *result = kl_call_vector(call, args);
    if (run->aside != NULL) {
        kl_turn_end(&turn);
    }
    return result;
}

/* Whether the node makes a view (or a copy instead of one) of memory that some call of the program writes. Whether
 * reshape() gives a view depends on strides, which can differ between a chunk and the whole batch. */
static bool
is_view_of_written(const KlTape *tape, const KlNode *node)
{
    bool is_view = node->row != NULL && node->row->kind == KL_ROW_VIEW, is_written = false;
    for (uint32_t i = 0; is_view && i < node->n_inputs + node->n_outs; i++) {
        bool is_input = i < node->n_inputs;
        KlValueId value = is_input ? tape->inputs[node->first_input + i].value
                                   : node->first_out + i - node->n_inputs;
        const KlStorage *of =
            value != KL_ID_NONE ? &tape->storages[tape->values[value].storage] : &(KlStorage){0};
        is_written |= of->version > 0 || of->is_hidden || of->is_uncertain;
    }
    return is_written;
}

/* Whether run_other() runs the node. */
static bool
is_for_other(const Run *run)
{
    const KlTape *core = &run->tape->core;
    const KlNode *node = run->node;
    return node->mode == KL_MODE_REDUCE || node->is_random || node->leaf_writes != 0 ||
           kl_tape_is_begun(core, node->first_out) || is_view_of_written(core, node) ||
           (run->rows >= 0 && kl_stage_accruing(core, node) != KL_ID_NONE) ||
           kl_tape_reads_for_chunks(core, node);
}

/* New reference: the result of such a node, of its function `part[0]`, arguments and keyword arguments. */
static PyObject *
call_other(const Run *run, KlNodeId id, PyObject **part)
{
    PyObject *key = PyLong_FromUnsignedLong(id), *result = NULL;
    bool is_known = key != NULL && run->functions != NULL;
    PyObject *function = is_known ? Py_XNewRef(PyDict_GetItemWithError(run->functions, key)) : NULL;
    if (function != NULL) {
        result = PyObject_Call(function, part[1], part[2]);
    } else if (!PyErr_Occurred()) {
        result = PyObject_CallFunction(run->run_other, "OOOO", key, part[0], part[1], part[2]);
    }
    KL_DROP(function, key);
    return result;
}

static PyObject *
call_node(Run *run, KlNodeId id)
{
    const KlPyNode *call = &run->tape->nodes[id];
    run->next = 0;
    PyObject *args = kl_call_decode(run->tape, id, run_value, run), *result = NULL;
    if (args == NULL || (run->rows >= 0 && apply_rewrites(run, args) < 0)) {
        goto error;
    }
    if (is_for_other(run)) {
        PyObject *parts = kl_call_split(call, args);
        if (parts != NULL) {
            result = call_other(run, id, PySequence_Fast_ITEMS(parts));
            Py_DECREF(parts);
        }
        goto error;
    }
    result = call_function(run, call, args);
    if (result == Py_None && run->node->writes != 0) { /* __setitem__ returns None */
        Py_SETREF(result, Py_NewRef(PyList_GET_ITEM(args, 0)));
    }
error:
    Py_XDECREF(args);
    return result;
}

/* New reference: `result` with the strides of the whole batch, if it is a view in a chunk of one row. A dim of size
 * 1 may have any stride, and torch's kernels derive the memory format of their outputs from it; dropout then fills
 * the output in that order. So the stride must be that of the whole. */
static PyObject *
lay_out(const Run *run, KlValueId value, PyObject *result)
{
    const KlNode *node = run->node;
    const KlMeta *whole = &run->tape->core.values[value].meta;
    const KlPlace *place = &whole->place;
    if (run->aside != NULL || run->rows != 1 || node->mode != KL_MODE_ROWS || node->row == NULL ||
        node->row->kind != KL_ROW_VIEW || whole->n_dims < 4 || !whole->is_strided ||
        !kl_place_is_rows(place) || place->outer != 1 || place->inner != 1) {
        return Py_NewRef(result);
    }
    return PyObject_CallFunction(kl_py.with_stride, "OiL", result, (int)place->dim,
                                 (long long)whole->strides[place->dim]);
}

/* Check a result against what inference promised, and store it. A part of a reduction is not checked: it is not
 * what the node returns as a whole. */
static int
keep(const Run *run, KlValueId value, PyObject *result)
{
    const KlNode *node = run->node;
    bool is_part = run->rows >= 0 && node->mode == KL_MODE_REDUCE;
    long long rows = node->mode == KL_MODE_ONCE ? -1 : run->rows;
    KlNodeId id = (KlNodeId)(node - run->tape->core.nodes);
    if (!is_part && kl_promise_check(run->tape, id, value, result, rows) < 0) {
        return -1;
    }
    PyObject *kept = is_part ? Py_NewRef(result) : lay_out(run, value, result);
    return kept == NULL ? -1 : PyList_SetItem(run->env, value, kept);
}

static int
keep_results(const Run *run, PyObject *result)
{
    const KlNode *node = run->node;
    if (node->writes != 0 && node->n_outs == 2) {
        KlValueId base = run->tape->core.inputs[node->first_input + node->n_inputs - 1].value;
        PyObject *made = run->forked != NULL ? PyTuple_GET_ITEM(run->forked, 1)
                                             : PyList_GET_ITEM(run->env, base);
        if (made == Py_None) {
            return kl_py_done(PyErr_Format(PyExc_SystemError,
                                           "koila: a view of a value of another part was written"));
        }
        return keep(run, node->first_out, result) < 0 || keep(run, node->first_out + 1, made) < 0
                   ? -1
                   : 0;
    }
    if (node->mode == KL_MODE_REDUCE || (!PyTuple_Check(result) && !PyList_Check(result))) {
        return keep(run, node->first_out, result);
    }
    if (PySequence_Fast_GET_SIZE(result) != (Py_ssize_t)node->n_outs) {
        KlNodeId id = (KlNodeId)(node - run->tape->core.nodes);
        return kl_promise_break(run->tape, id, node->first_out, result, run->rows);
    }
    for (uint32_t i = 0; i < node->n_outs; i++) {
        if (keep(run, node->first_out + i, PySequence_Fast_GET_ITEM(result, i)) < 0) {
            return -1;
        }
    }
    return 0;
}

int
kl_stage_wait_for_copy(const Tape *tape, const KlNode *node)
{
    const KlTape *core = &tape->core;
    if (PyList_GET_SIZE(kl_py.devices) == 1 || core->values[node->first_out].meta.device != 0) {
        return 0;
    }
    for (uint32_t k = 0; k < node->n_inputs; k++) {
        KlValueId value = core->inputs[node->first_input + k].value;
        uint8_t device = value == KL_ID_NONE ? 0 : core->values[value].meta.device;
        if (device != 0) {
            PyObject *from = PyList_GET_ITEM(kl_py.devices, device);
            return kl_py_done(PyObject_CallOneArg(kl_py.wait_for_copy, from));
        }
    }
    return 0;
}

/* Let `forked` be what a node that writes a clone gets instead: (value, its storage). 0 or -1. */
static int
fork_written(Run *run)
{
    const KlInput *inputs = &run->tape->core.inputs[run->node->first_input];
    bool is_view = run->node->n_outs == 2; /* a view; its storage is the last input */
    PyObject *storage = run_value(run, inputs[is_view ? run->node->n_inputs - 1 : 0].value);
    run->forked =
        storage != NULL ? PyObject_CallFunction(run->clone, "IO", inputs[0].value, storage) : NULL;
    if (run->forked != NULL &&
        (!PyTuple_Check(run->forked) || PyTuple_GET_SIZE(run->forked) != 2)) {
        PyErr_SetString(PyExc_TypeError, "run: clone must return a value and its storage");
        Py_CLEAR(run->forked);
    }
    return run->forked != NULL ? 0 : -1;
}

static int
is_cloned(const Run *run, KlNodeId id)
{
    if (run->cloned == NULL || run->node->writes == 0) {
        return 0;
    }
    PyObject *key = PyLong_FromUnsignedLong(id);
    int result = key != NULL ? PySet_Contains(run->cloned, key) : -1;
    Py_XDECREF(key);
    return result;
}

/* New reference: a copy of the value that the node is about to write, if the value before the write is requested;
 * else NULL. NULL with an exception on failure. */
static PyObject *
copy_written(const Run *run)
{
    KlValueId written =
        run->node->writes != 0 ? run->tape->core.inputs[run->node->first_input].value : KL_ID_NONE;
    bool is_asked_for =
        run->marks != NULL && written != KL_ID_NONE && (run->marks[written] & IS_ASKED_FOR) != 0;
    return is_asked_for ? PyObject_CallMethod(PyList_GET_ITEM(run->env, written), "clone", NULL)
                        : NULL;
}

static int
run_one(Run *run, KlNodeId id, KlContextSwitch *context)
{
    run->node = &run->tape->core.nodes[id];
    /* A graph that no gradient flows through would keep its saved tensors until the chunk's backward. A view saves none,
     * and torch refuses to write one that was made without a graph where the write has one. */
    bool is_view = run->node->writes == 0 &&
                   run->tape->core.values[run->node->first_out].view_of != KL_ID_NONE;
    bool is_aside = !context->is_grad_off && run->program != NULL && !is_view &&
                    !kl_stage_has_gradient(&run->tape->core, &run->program->stages, run->node);
    context->is_fresh = context->is_fresh || context->is_aside != is_aside;
    context->is_aside = is_aside;
    if (kl_context_switch(context, run->node->context) < 0) {
        return -1;
    }
    int status = is_cloned(run, id);
    if (status > 0) {
        status = fork_written(run);
    }
    PyObject *before = status == 0 ? copy_written(run) : NULL;
    PyObject *result = status == 0 && !PyErr_Occurred() ? call_node(run, id) : NULL;
    status = result == NULL ? -1 : keep_results(run, result);
    if (before != NULL && status == 0) {
        KlValueId written = run->tape->core.inputs[run->node->first_input].value;
        status = PyList_SetItem(run->env, written, Py_NewRef(before));
    }
    Py_XDECREF(before);
    Py_CLEAR(run->forked);
    status = status == 0 ? kl_stage_wait_for_copy(run->tape, run->node) : status;
    Py_XDECREF(result);
    return PyList_SetSlice(run->scratch, 0, PyList_GET_SIZE(run->scratch), NULL) < 0 ? -1 : status;
}

/* The pack hook of autograd, with the list `saved` as `self`. New reference to the cell that autograd holds in place of
 * the tensor: an empty list, which is added to `saved` after the tensor. A tensor that is saved twice has one cell. */
static PyObject *
pack(PyObject *saved, PyObject *tensor)
{
    for (Py_ssize_t i = 0; i + 1 < PyList_GET_SIZE(saved); i += 2) {
        if (PyList_GET_ITEM(saved, i) == tensor) {
            return Py_NewRef(PyList_GET_ITEM(saved, i + 1));
        }
    }
    PyObject *cell = PyList_New(0);
    if (cell == NULL || PyList_Append(saved, tensor) < 0 || PyList_Append(saved, cell) < 0) {
        Py_CLEAR(cell);
    }
    return cell;
}

KL_DEFINE(pack_into, saved)
{
    static PyMethodDef method = {"pack", pack, METH_O, NULL};
    bool is_list = PyList_Check(saved);
    return is_list ? PyCFunction_New(&method, saved)
                   : PyErr_Format(PyExc_TypeError, "pack_into: it needs a list");
}

/* Drop the values whose last reader in the run is the node at `at` of the program's list. 0 or -1. */
static int
drop_dead(const Run *run, uint32_t at)
{
    const KlProgram *program = run->program;
    uint32_t first = at > 0 ? program->drops.ids[at - 1] : 0;
    for (uint32_t i = first; i < program->drops.ids[at]; i++) {
        KlValueId value = program->dropped.ids[i];
        bool is_kept = run->marks != NULL && (run->marks[value] & IS_ASKED_FOR) != 0;
        if (!is_kept && PyList_SetItem(run->env, value, Py_NewRef(Py_None)) < 0) {
            return -1;
        }
    }
    return 0;
}

/* Whether a node computes a marked value that env does not hold. Without marks, each node is needed. */
static bool
is_needed(const Run *run, KlNodeId id)
{
    const KlNode *node = &run->tape->core.nodes[id];
    for (uint32_t k = 0; k < node->n_outs && run->marks != NULL; k++) {
        KlValueId out = node->first_out + k;
        if (run->marks[out] != 0 && PyList_GET_ITEM(run->env, out) == Py_None) {
            return true;
        }
    }
    return run->marks == NULL;
}

/* Mark the values that `asked` requests, and those that they are computed from. 0 or -1. */
static int
mark_wanted(Run *run, KlSlice nodes, PyObject *asked)
{
    run->marks = kl_alloc_zeroed(run->tape->core.n_values, sizeof(uint8_t));
    if (run->marks == NULL) {
        return kl_py_done(PyErr_NoMemory());
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(asked); i++) {
        KlValueId value = KL_ID_NONE;
        if (!kl_tape_value_id(PyTuple_GET_ITEM(asked, i), &value)) {
            return -1;
        }
        run->marks[value] = IS_WANTED | IS_ASKED_FOR;
    }
    for (uint32_t i = nodes.n; i-- > 0;) {
        KlNodeId id = run->program->nodes.ids[nodes.first + i];
        const KlNode *node = &run->tape->core.nodes[id];
        for (uint32_t k = 0; k < node->n_inputs && is_needed(run, id); k++) {
            KlValueId value = run->tape->core.inputs[node->first_input + k].value;
            if (value != KL_ID_NONE) {
                run->marks[value] |= IS_WANTED;
            }
        }
    }
    return 0;
}

/* Run nodes in order; without a program, the node `alone`. New reference to None, or NULL. */
static PyObject *
run_nodes(Run *run, KlSlice nodes, KlNodeId alone, bool is_grad_off)
{
    KlContextSwitch context;
    run->scratch = PyList_New(0);
    if (run->scratch == NULL || kl_context_begin(&context) < 0) {
        Py_XDECREF(run->scratch);
        return NULL;
    }
    context.is_grad_off = is_grad_off;
    run->tape->raised = KL_ID_NONE;
    int status = 0;
    for (uint32_t i = nodes.first; status == 0 && i < nodes.first + nodes.n; i++) {
        KlNodeId id = run->program != NULL ? run->program->nodes.ids[i] : alone;
        status = PyErr_CheckSignals();
        if (status == 0 && is_needed(run, id)) {
            status = run_one(run, id, &context);
            run->tape->raised = status < 0 ? id : KL_ID_NONE;
        }
        if (status == 0 && run->saved != NULL && PyList_GET_SIZE(run->saved) > 0) {
            status = kl_py_done(PyObject_CallFunction(run->settle, "I", id));
        }
        if (status == 0 && run->program != NULL) {
            status = drop_dead(run, i);
        }
    }
    status = kl_context_end(&context);
    Py_DECREF(run->scratch);
    return status < 0 ? NULL : Py_NewRef(Py_None);
}

static bool
has_room(const Run *run)
{
    size_t n_imports = run->program != NULL ? run->program->stages.n_imports : 0;
    if (PyList_GET_SIZE(run->env) >= (Py_ssize_t)run->tape->core.n_values &&
        PyList_GET_SIZE(run->imports) >= (Py_ssize_t)n_imports) {
        return true;
    }
    PyErr_Format(PyExc_ValueError, "run: env must have room for %zu values, and imports for %zu",
                 run->tape->core.n_values, n_imports);
    return false;
}

KL_DEFINE(run, args)
{
    unsigned int integer = 0;
    int is_grad_off = 0;
    PyObject *job = NULL, *saved = NULL, *again = NULL, *aside = NULL;
    Run run = {.tape = kl_tape_open()};
    if (run.tape == NULL ||
        !PyArg_ParseTuple(args, "O&O&O!O!LO!:run", kl_program_of, &run.program, kl_py_id, &integer,
                          &PyList_Type, &run.env, &PyList_Type, &run.imports, &run.rows,
                          &PyTuple_Type, &job) ||
        !PyArg_ParseTuple(job, "pOOO!OOOOOO!:run", &is_grad_off, &run.run_other, &run.cut,
                          &PySet_Type, &run.cloned, &run.clone, &saved, &run.settle, &again, &aside,
                          &PyDict_Type, &run.functions)) {
        return NULL;
    }
    if ((saved != Py_None && !PyList_Check(saved)) || (again != Py_None && !PyTuple_Check(again))) {
        return PyErr_Format(PyExc_TypeError,
                            "run: saved must be a list, and again a tuple, or None");
    }
    if (aside != Py_None && !kl_tape_check(aside)) {
        return PyErr_Format(PyExc_TypeError, "run: aside must be a tape or None");
    }
    run.aside = aside != Py_None ? (Tape *)aside : NULL;
    run.saved = saved != Py_None ? saved : NULL;
    if (!has_room(&run)) {
        return NULL;
    }
    if (integer >= run.program->n_runs) {
        return PyErr_Format(PyExc_IndexError, "run: there is no run %u", integer);
    }
    KlSlice nodes = run.program->runs[integer].nodes;
    PyObject *result = again == Py_None || mark_wanted(&run, nodes, again) == 0
                           ? run_nodes(&run, nodes, KL_ID_NONE, is_grad_off)
                           : NULL;
    kl_alloc_free(run.marks);
    return result;
}

KL_DEFINE(run_alone, args)
{
    unsigned int id = 0;
    int is_grad_off = 0;
    Run run = {.tape = kl_tape_open()};
    if (run.tape == NULL ||
        !PyArg_ParseTuple(args, "O&O!LpO:run_alone", kl_tape_node_id, &id, &PyList_Type, &run.env,
                          &run.rows, &is_grad_off, &run.run_other)) {
        return NULL;
    }
    run.imports = run.env; /* not read, since env holds all inputs */
    const KlNode *node = &run.tape->core.nodes[id];
    if (PyList_GET_SIZE(run.env) < (Py_ssize_t)(node->first_out + node->n_outs)) {
        return PyErr_Format(PyExc_IndexError, "run_alone: no room for node %u", id);
    }
    return run_nodes(&run, (KlSlice){.n = 1}, id, is_grad_off);
}

/* -- results ---------------------------------------------------------------------------------------------- */

KL_DEFINE_ON(deliver, tape, args)
{
    unsigned int id = 0;
    PyObject *tensor = NULL;
    int is_final = 0;
    if (!PyArg_ParseTuple(args, "O&O!p:deliver", kl_tape_value_id, &id, kl_py.tensor_base, &tensor,
                          &is_final)) {
        return NULL;
    }
    tape->core.values[id].state = KL_STATE_COMPUTED;
    if (tape->core.values[id].node != KL_ID_NONE) {
        tape->values[id].version = kl_stale_version(tensor);
    }
    if (is_final && tape->values[id].handle != NULL) {
        const KlStorage *storage = &tape->core.storages[tape->core.values[id].storage];
        tape->values[id].handle->is_lost = storage->is_uncertain;
        tape->values[id].handle->is_freed = !kl_tape_is_begun(&tape->core, id);
        kl_lazy_leave(tape, id, tensor);
    }
    bool is_dead = kl_tape_is_dead(&tape->core, id); /* only the LazyTensor needs it now */
    bool is_left = !is_dead && is_final;             /* pending calls do not see the user's hooks */
    PyObject *result = is_dead   ? NULL
                       : is_left ? PyObject_CallMethod(tensor, "detach", NULL)
                                 : Py_NewRef(tensor);
    Py_XSETREF(tape->values[id].result, result);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

KL_DEFINE_ON(cut, tape, args)
{
    unsigned int id = 0;
    PyObject *tensor = NULL;
    if (!PyArg_ParseTuple(args, "O&O!:cut", kl_tape_value_id, &id, kl_py.tensor_base, &tensor)) {
        return NULL;
    }
    if (tape->core.values[id].n_pending == 0 && tape->values[id].handle == NULL) {
        Py_RETURN_NONE;
    }
    Py_XSETREF(tape->values[id].real, Py_NewRef(tensor));
    Py_CLEAR(tape->values[id].result);
    KlNodeId maker = tape->core.values[id].node;
    bool is_leaf = kl_tape_is_begun(&tape->core, id);
    kl_tape_cut(&tape->core, id);
    if (is_leaf) { /* only this value and its views are left of its memory */
        KlStorage *storage = &tape->core.storages[tape->core.values[id].storage];
        bool is_made = tape->core.values[storage->base].node != KL_ID_NONE;
        storage->base = is_made ? id : storage->base;
        tape->core.values[id].view_of = is_made ? KL_ID_NONE : tape->core.values[id].view_of;
        kl_tape_set_done(&tape->core, maker);
    } else {
        tape->core.values[id].state = KL_STATE_FREED;
    }
    kl_stale_refresh_leaf(tape, id);
    Py_RETURN_NONE;
}
