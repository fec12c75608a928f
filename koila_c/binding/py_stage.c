/* py_stage.c - what koila.replay needs of the tape: the staged program as plain numbers, and running a
 * list of nodes on one chunk. It decides nothing: stages come from stage.c, the order from koila.replay. */
#include "py.h"

#include "alloc.h"
#include "stage.h"

/* -- describing the staged program -------------------------------------------------------------------- */

static PyObject *
place_object(const KlPlace *place)
{
    if (!kl_place_is_rows(place)) {
        return Py_NewRef(Py_None);
    }
    return Py_BuildValue("(IiLL)", place->axis, (int)place->dim, (long long)place->outer,
                         (long long)place->inner);
}

static PyObject *
stage_object(uint32_t stage)
{
    return stage == KL_STAGE_NONE ? Py_NewRef(Py_None) : PyLong_FromUnsignedLong(stage);
}

static int
append_stolen(PyObject *list, PyObject *item)
{
    int result = item == NULL ? -1 : PyList_Append(list, item);
    Py_XDECREF(item);
    return result;
}

static PyObject *
node_inputs(const KlTape *core, const KlStages *stages, const KlNode *node)
{
    PyObject *tuple = PyTuple_New(node->n_inputs);
    for (uint32_t k = 0; tuple != NULL && k < node->n_inputs; k++) {
        bool is_none = core->inputs[node->first_input + k].value == KL_ID_NONE;
        long import = is_none ? -1 : (long)stages->import_of[node->first_input + k];
        PyObject *item = PyLong_FromLong(import);
        if (item == NULL) {
            Py_CLEAR(tuple);
            break;
        }
        PyTuple_SET_ITEM(tuple, k, item);
    }
    return tuple;
}

/* (id, stage, late stage, mode, reduce, axis, first out, n outs, is random, writes, leaf writes, is data,
 * inputs as imports) */
static PyObject *
node_object(const Tape *tape, const KlStages *stages, KlNodeId id)
{
    const KlNode *node = &tape->core.nodes[id];
    KlAxisId axis = kl_tape_axis_find(&tape->core, node->axis);
    return Py_BuildValue("(INNiiiIIOIION)", id, stage_object(stages->node_stage[id]),
                         stage_object(stages->late_stage[id]), (int)node->mode, (int)node->reduce,
                         axis == KL_ID_NONE ? -1 : (int)axis, node->first_out, node->n_outs,
                         node->is_random ? Py_True : Py_False, node->writes, node->leaf_writes,
                         stages->is_data[id] ? Py_True : Py_False,
                         node_inputs(&tape->core, stages, node));
}

static PyObject *
describe_nodes(const Tape *tape, const KlStages *stages)
{
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < tape->core.n_nodes; i++) {
        if (stages->node_stage[i] != KL_STAGE_NONE &&
            append_stolen(list, node_object(tape, stages, (KlNodeId)i)) < 0) {
            Py_CLEAR(list);
        }
    }
    return list;
}

static PyObject *
describe_imports(const KlStages *stages)
{
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < stages->n_imports; i++) {
        const KlImport *import = &stages->imports[i];
        PyObject *item = Py_BuildValue("(INO)", import->value, place_object(&import->place),
                                       import->is_range ? Py_True : Py_False);
        if (append_stolen(list, item) < 0) {
            Py_CLEAR(list);
        }
    }
    return list;
}

/* (value stage, is leaf, needs gradient) of each value */
static PyObject *
describe_values(const KlStages *stages)
{
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < stages->n_values; i++) {
        PyObject *item = Py_BuildValue("(IOO)", stages->value_stage[i],
                                       stages->is_leaf[i] ? Py_True : Py_False,
                                       stages->needs_gradient[i] ? Py_True : Py_False);
        if (append_stolen(list, item) < 0) {
            Py_CLEAR(list);
        }
    }
    return list;
}

static int
add_id(KlValueId **ids, size_t *n, size_t *n_max, KlValueId id)
{
    KlError error;
    if (kl_alloc_reserve((void **)ids, n_max, *n + 1, sizeof(KlValueId), &error) != KL_OK) {
        (void)kl_py_raise(&error);
        return -1;
    }
    (*ids)[(*n)++] = id;
    return 0;
}

/* Pending values the user can reach, and outputs of nodes that must run though nobody looks. */
static int
find_wanted(Tape *tape, KlValueId **wanted, size_t *n, size_t *n_max, PyObject *list)
{
    for (size_t i = 0; i < tape->core.n_nodes; i++) {
        const KlNode *node = &tape->core.nodes[i];
        for (uint32_t k = 0; k < node->n_outs; k++) {
            KlValueId out = node->first_out + k;
            bool is_pending = tape->core.values[out].state == KL_STATE_PENDING;
            bool is_reached = is_pending && tape->values[out].handle != NULL;
            bool has_effect = is_pending && (node->leaf_writes != 0 || node->is_random) && k == 0;
            if ((is_reached || has_effect) && add_id(wanted, n, n_max, out) < 0) {
                return -1;
            }
            if (is_reached && append_stolen(list, PyLong_FromUnsignedLong(out)) < 0) {
                return -1;
            }
        }
    }
    return 0;
}

static int
find_roots(Tape *tape, PyObject *roots, KlValueId **ids, size_t *n, size_t *n_max)
{
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(roots); i++) {
        PyObject *root = PyList_GET_ITEM(roots, i);
        KlValueId id = KL_ID_NONE;
        if (!kl_lazy_check(root) || kl_lazy_checked(root) == NULL) {
            if (!PyErr_Occurred()) {
                PyErr_SetString(PyExc_TypeError, "stage: a root is not lazy");
            }
            return -1;
        }
        if (kl_tape_attach(tape, kl_lazy_value(root), &id) < 0 || add_id(ids, n, n_max, id) < 0) {
            return -1;
        }
    }
    return 0;
}

static PyObject *
describe(const Tape *tape, const KlStages *stages, const KlGoal *goal, PyObject *wanted)
{
    PyObject *nodes = describe_nodes(tape, stages);
    PyObject *imports = describe_imports(stages);
    PyObject *values = describe_values(stages);
    PyObject *roots = PyList_New(0);
    for (size_t i = 0; roots != NULL && i < goal->n_roots; i++) {
        if (append_stolen(roots, PyLong_FromUnsignedLong(goal->roots[i])) < 0) {
            Py_CLEAR(roots);
        }
    }
    PyObject *result = NULL;
    if (nodes != NULL && imports != NULL && values != NULL && roots != NULL) {
        result = Py_BuildValue("{s:O,s:O,s:O,s:O,s:O,s:I,s:N,s:O,s:N}", "nodes", nodes, "imports", imports,
                               "values", values, "roots", roots, "wanted", wanted, "n_stages",
                               stages->n_stages, "last_body", stage_object(stages->last_body),
                               "is_tail_linear", stages->is_tail_linear ? Py_True : Py_False,
                               "tail_node", stage_object(stages->tail_node));
    }
    Py_XDECREF(roots);
    Py_XDECREF(values);
    Py_XDECREF(imports);
    Py_XDECREF(nodes);
    return result;
}

/* stage(roots) -> dict, or None where nothing is pending: the program that computes every value the user
 * can reach and differentiates the roots. */
PyObject *
kl_stage_describe(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *roots = NULL, *result = NULL;
    KlValueId *wanted = NULL, *root_ids = NULL;
    size_t n_wanted = 0, n_wanted_max = 0, n_roots = 0, n_roots_max = 0;
    KlStages stages = {0};
    KlError error;
    Tape *tape = kl_tape_open();
    PyObject *reached = PyList_New(0);
    if (tape == NULL || reached == NULL || !PyArg_ParseTuple(args, "O!:stage", &PyList_Type, &roots) ||
        find_roots(tape, roots, &root_ids, &n_roots, &n_roots_max) < 0 ||
        find_wanted(tape, &wanted, &n_wanted, &n_wanted_max, reached) < 0) {
        goto error;
    }
    const KlGoal goal = {.wanted = wanted, .n_wanted = n_wanted, .roots = root_ids, .n_roots = n_roots};
    if (kl_stage_build(&tape->core, &goal, &stages, &error) != KL_OK) {
        (void)kl_py_raise(&error);
        goto error;
    }
    result = describe(tape, &stages, &goal, reached);
    kl_stage_fini(&stages);
error:
    Py_XDECREF(reached);
    kl_alloc_free(root_ids);
    kl_alloc_free(wanted);
    return result;
}

/* value(id) -> (dtype, shape, requires_grad, place, rows of its axis, real, number, storage) */
PyObject *
kl_stage_value(PyObject *module, PyObject *args)
{
    (void)module;
    unsigned int id = 0;
    Tape *tape = kl_tape_open();
    if (tape == NULL || !PyArg_ParseTuple(args, "I:value", &id)) {
        return NULL;
    }
    if (id >= tape->core.n_values) {
        return PyErr_Format(PyExc_IndexError, "value: there is no value %u", id);
    }
    const KlValue *value = &tape->core.values[id];
    const KlPyValue *entry = &tape->values[id];
    KlPlace place = value->meta.place;
    place.axis = kl_tape_axis_find(&tape->core, place.axis);
    long long rows = kl_place_is_rows(&place) ? tape->core.axis_rows[place.axis] : 0;
    PyObject *dtype = value->meta.dtype == KL_DTYPE_OTHER ? Py_None : kl_py.dtypes[value->meta.dtype];
    PyObject *size = kl_meta_size(&value->meta);
    return Py_BuildValue("(ONONLOOI)", dtype, size, value->meta.requires_grad ? Py_True : Py_False,
                         place_object(&place), rows, entry->real != NULL ? entry->real : Py_None,
                         entry->number != NULL ? entry->number : Py_None, value->storage);
}

/* node(id) -> (func, row name or None, reason or None, where, axis rows or 0, (input ids),
 * (inputs saved for backward, outputs saved, further bytes saved, do those grow with the rows,
 *  bytes of workspace)) */
PyObject *
kl_stage_node(PyObject *module, PyObject *args)
{
    (void)module;
    unsigned int id = 0;
    Tape *tape = kl_tape_open();
    if (tape == NULL || !PyArg_ParseTuple(args, "I:node", &id)) {
        return NULL;
    }
    if (id >= tape->core.n_nodes) {
        return PyErr_Format(PyExc_IndexError, "node: there is no node %u", id);
    }
    const KlNode *node = &tape->core.nodes[id];
    KlAxisId axis = kl_tape_axis_find(&tape->core, node->axis);
    PyObject *where = kl_tape_where(tape, id);
    PyObject *inputs = PyTuple_New(node->n_inputs);
    if (where == NULL || inputs == NULL) {
        Py_XDECREF(where);
        Py_XDECREF(inputs);
        return NULL;
    }
    for (uint32_t k = 0; k < node->n_inputs; k++) {
        KlValueId value = tape->core.inputs[node->first_input + k].value;
        PyTuple_SET_ITEM(inputs, k, PyLong_FromLong(value == KL_ID_NONE ? -1 : (long)value));
    }
    const KlSaves *saves = &node->saves;
    return Py_BuildValue("(OzzNLN(KKLOL))", tape->nodes[id].func,
                         node->row != NULL ? node->row->name : NULL, node->reason, where,
                         (long long)(axis == KL_ID_NONE ? 0 : tape->core.axis_rows[axis]), inputs,
                         (unsigned long long)saves->inputs, (unsigned long long)saves->outputs,
                         (long long)saves->bytes_extra, saves->is_extra_rows ? Py_True : Py_False,
                         (long long)saves->bytes_workspace);
}

/* -- running nodes -------------------------------------------------------------------------------------- */

/* One run: env[value] is what was made in it, imports[i] what was given to it. */
typedef struct Run {
    Tape *tape;
    PyObject *env;       /* list [n_values] */
    PyObject *imports;   /* list [n_imports] */
    PyObject *import_of; /* dict: node -> tuple of import numbers */
    PyObject *run_other; /* callable(node, args, kwargs): reductions, random draws */
    PyObject *cut;       /* callable(tensor, import number): rows of a value made in this run */
    long long rows;      /* of the chunk; -1: whole */
    const KlNode *node;  /* the one that runs */
    PyObject *node_imports;
    PyObject *scratch; /* list: what must live while a call runs */
} Run;

/* A call's slot says which value; the node's input with that value says how it is read. */
static PyObject *
run_value(void *env, KlValueId value)
{
    Run *run = env;
    PyObject *made = PyList_GET_ITEM(run->env, value);
    const KlInput *inputs = &run->tape->core.inputs[run->node->first_input];
    for (uint32_t k = 0; k < run->node->n_inputs; k++) {
        if (inputs[k].value != value) {
            continue;
        }
        PyObject *number = PyTuple_GET_ITEM(run->node_imports, k);
        if (made == Py_None) {
            PyObject *given = PyList_GET_ITEM(run->imports, PyLong_AsSsize_t(number));
            return given != Py_None ? given : NULL;
        }
        bool is_cut = run->rows >= 0 && run->node->mode != KL_MODE_ONCE &&
                      kl_place_is_rows(&inputs[k].place) &&
                      !kl_place_is_rows(&run->tape->core.values[value].meta.place);
        if (is_cut) {
            PyObject *part = PyObject_CallFunctionObjArgs(run->cut, made, number, NULL);
            if (part != NULL && PyList_Append(run->scratch, part) < 0) {
                Py_CLEAR(part);
            }
            Py_XDECREF(part); /* scratch holds it while the call runs */
            return part;
        }
        return made;
    }
    return made != Py_None ? made : NULL;
}

static PyObject *
rewrite_entry(PyObject *object, Py_ssize_t entry, PyObject *item)
{
    PyObject *list = PySequence_List(object);
    if (list == NULL || entry >= PyList_GET_SIZE(list) || PyList_SetItem(list, entry, Py_NewRef(item)) < 0) {
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
rewrite_slice(PyObject *object, int part, PyObject *number)
{
    if (!PySlice_Check(object)) {
        return Py_NewRef(number);
    }
    const PySliceObject *slice = (const PySliceObject *)object;
    return PySlice_New(part == 0 ? number : slice->start, part == 1 ? number : slice->stop, slice->step);
}

/* Put scale * rows of the chunk where the call said scale * rows of the batch. */
static int
apply_rewrites(const Run *run, PyObject *args)
{
    for (uint32_t i = 0; i < run->node->n_rewrites; i++) {
        const KlRewrite *rewrite = &run->tape->core.rewrites[run->node->first_rewrite + i];
        PyObject *before = PyList_GET_ITEM(args, rewrite->arg);
        PyObject *number = PyLong_FromLongLong(rewrite->scale * run->rows);
        PyObject *after = NULL;
        if (number == NULL) {
            return -1;
        }
        if (rewrite->entry == UINT16_MAX) {
            after = rewrite_slice(before, rewrite->part, number);
        } else {
            PyObject *item = PySequence_GetItem(before, rewrite->entry);
            PyObject *changed = item != NULL ? rewrite_slice(item, rewrite->part, number) : NULL;
            after = changed != NULL ? rewrite_entry(before, rewrite->entry, changed) : NULL;
            Py_XDECREF(item);
            Py_XDECREF(changed);
        }
        Py_DECREF(number);
        if (after == NULL || PyList_SetItem(args, rewrite->arg, after) < 0) {
            return -1;
        }
    }
    return 0;
}

static PyObject *
call_node(Run *run, KlNodeId id)
{
    const KlPyNode *call = &run->tape->nodes[id];
    PyObject *args = kl_call_decode(run->tape, id, run_value, run);
    PyObject *result = NULL;
    if (args == NULL || (run->rows >= 0 && apply_rewrites(run, args) < 0)) {
        goto error;
    }
    Py_ssize_t n_named = call->kwnames != NULL ? PyTuple_GET_SIZE(call->kwnames) : 0;
    Py_ssize_t n_positional = PyList_GET_SIZE(args) - n_named;
    if (run->node->mode != KL_MODE_REDUCE && !run->node->is_random) {
        result = PyObject_Vectorcall(call->func, ((PyListObject *)args)->ob_item, (size_t)n_positional,
                                     call->kwnames);
        goto error;
    }
    PyObject *positional = PyList_GetSlice(args, 0, n_positional);
    PyObject *tuple = positional != NULL ? PyList_AsTuple(positional) : NULL;
    PyObject *named = PyDict_New();
    Py_XDECREF(positional);
    for (Py_ssize_t i = 0; named != NULL && i < n_named; i++) {
        if (PyDict_SetItem(named, PyTuple_GET_ITEM(call->kwnames, i),
                           PyList_GET_ITEM(args, n_positional + i)) < 0) {
            Py_CLEAR(named);
        }
    }
    PyObject *number = PyLong_FromUnsignedLong(id);
    if (tuple != NULL && named != NULL && number != NULL) {
        result = PyObject_CallFunctionObjArgs(run->run_other, number, call->func, tuple, named, NULL);
    }
    Py_XDECREF(number);
    Py_XDECREF(named);
    Py_XDECREF(tuple);
error:
    Py_XDECREF(args);
    return result;
}

static int
keep(const Run *run, KlValueId value, PyObject *result)
{
    return PyList_SetItem(run->env, value, Py_NewRef(result));
}

static int
keep_results(const Run *run, PyObject *result)
{
    const KlNode *node = run->node;
    if (result == Py_None) { /* __setitem__ gives nothing back */
        result = PyList_GET_ITEM(run->env, run->tape->core.inputs[node->first_input].value);
    }
    if (node->writes != 0 && node->n_outs == 2) {
        KlValueId base = run->tape->core.inputs[node->first_input + node->n_inputs - 1].value;
        PyObject *made = PyList_GET_ITEM(run->env, base);
        if (made == Py_None) {
            PyErr_SetString(PyExc_SystemError, "koila: a view of a value of another stage was written");
            return -1;
        }
        return keep(run, node->first_out, result) < 0 || keep(run, node->first_out + 1, made) < 0 ? -1 : 0;
    }
    if (node->mode == KL_MODE_REDUCE || (!PyTuple_Check(result) && !PyList_Check(result))) {
        return keep(run, node->first_out, result);
    }
    if (PySequence_Fast_GET_SIZE(result) != (Py_ssize_t)node->n_outs) {
        PyErr_Format(kl_py.koila_error, "a call gave %zd results by rows where it gives %u whole",
                     PySequence_Fast_GET_SIZE(result), node->n_outs);
        return -1;
    }
    for (uint32_t i = 0; i < node->n_outs; i++) {
        if (keep(run, node->first_out + i, PySequence_Fast_GET_ITEM(result, i)) < 0) {
            return -1;
        }
    }
    return 0;
}

static int
run_one(Run *run, KlNodeId id, KlContextSwitch *context, PyObject *key)
{
    run->node = &run->tape->core.nodes[id];
    run->node_imports = PyDict_GetItemWithError(run->import_of, key);
    if (run->node_imports == NULL || kl_context_switch(context, run->node->context) < 0) {
        return -1;
    }
    PyObject *result = call_node(run, id);
    int status = result == NULL ? -1 : keep_results(run, result);
    Py_XDECREF(result);
    if (PyList_SetSlice(run->scratch, 0, PyList_GET_SIZE(run->scratch), NULL) < 0) {
        return -1;
    }
    return status;
}

static int
drop_dead(const Run *run, PyObject *values)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(values); i++) {
        Py_ssize_t value = PyLong_AsSsize_t(PyTuple_GET_ITEM(values, i));
        if (PyList_SetItem(run->env, value, Py_NewRef(Py_None)) < 0) {
            return -1;
        }
    }
    return 0;
}

/* run(nodes, drops, env, imports, import_of, rows, no_grad, run_other, cut): run nodes in order;
 * drops[i] are the values of which nodes[i] is the last reader. rows < 0: whole. */
PyObject *
kl_stage_run(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *nodes = NULL, *drops = NULL;
    int is_grad_off = 0;
    Run run = {.tape = kl_tape_open()};
    KlContextSwitch context;
    if (run.tape == NULL ||
        !PyArg_ParseTuple(args, "O!O!O!O!O!LpOO:run", &PyList_Type, &nodes, &PyList_Type, &drops,
                          &PyList_Type, &run.env, &PyList_Type, &run.imports, &PyDict_Type,
                          &run.import_of, &run.rows, &is_grad_off, &run.run_other, &run.cut)) {
        return NULL;
    }
    run.scratch = PyList_New(0);
    if (run.scratch == NULL || kl_context_begin(&context) < 0) {
        Py_XDECREF(run.scratch);
        return NULL;
    }
    context.is_grad_off = is_grad_off;
    int status = 0;
    for (Py_ssize_t i = 0; status == 0 && i < PyList_GET_SIZE(nodes); i++) {
        PyObject *key = PyList_GET_ITEM(nodes, i);
        status = run_one(&run, (KlNodeId)PyLong_AsUnsignedLong(key), &context, key);
        if (status == 0) {
            status = drop_dead(&run, PyList_GET_ITEM(drops, i));
        }
    }
    status = kl_context_end(&context);
    Py_DECREF(run.scratch);
    return status < 0 ? NULL : Py_NewRef(Py_None);
}

/* -- results ---------------------------------------------------------------------------------------------- */

/* deliver(value, tensor, is_final): the number of a value the user can reach. Final: it leaves the tape,
 * with that tensor; else it is known, and its node stays. */
PyObject *
kl_stage_deliver(PyObject *module, PyObject *args)
{
    (void)module;
    unsigned int id = 0;
    PyObject *tensor = NULL;
    int is_final = 0;
    Tape *tape = kl_tape_open();
    if (tape == NULL || !PyArg_ParseTuple(args, "IOp:deliver", &id, &tensor, &is_final)) {
        return NULL;
    }
    if (id >= tape->core.n_values) {
        return PyErr_Format(PyExc_IndexError, "deliver: there is no value %u", id);
    }
    tape->core.values[id].state = KL_STATE_KNOWN;
    Py_XSETREF(tape->values[id].number, Py_NewRef(tensor));
    Value *handle = tape->values[id].handle;
    if (is_final && handle != NULL) {
        tape->values[id].handle = NULL;
        tape->core.values[id].is_wanted = false;
        kl_lazy_detach(handle, tensor);
        handle->is_number = true;
    }
    return Py_NewRef(Py_None);
}
