/* SPDX-License-Identifier: Apache-2.0 */
/* py_program.c - tells program.py of the tape, as plain numbers: the program, one value, one node. It
 * changes nothing and decides nothing: stages and runs come from the core's program.c. */
#include "py_run.h"

#include "alloc.h"
#include "program.h"

static PyObject *
stage_object(uint32_t stage)
{
    return stage == KL_STAGE_NONE ? Py_NewRef(Py_None) : PyLong_FromUnsignedLong(stage);
}

/* For each input of a node, the id of its value or, with `imports`, of its import; -1: the call has no such input. */
static PyObject *
node_inputs(const KlTape *core, const uint32_t *imports, const KlNode *node)
{
    PyObject *tuple = PyTuple_New(node->n_inputs);
    for (uint32_t k = 0; tuple != NULL && k < node->n_inputs; k++) {
        KlValueId value = core->inputs[node->first_input + k].value;
        uint32_t id = imports != NULL ? imports[node->first_input + k] : value;
        kl_py_put(&tuple, k, PyLong_FromLong(value == KL_ID_NONE ? -1 : (long)id));
    }
    return tuple;
}

/* (id, stage, late stage, mode, reduce, axis, first out, n outs, is random, writes, leaf writes, is data, is open, is
 * for chunks, its checkpoint's region, does its backward read what it saves, inputs as imports) */
static PyObject *
node_object(const Tape *tape, const KlStages *stages, KlNodeId id)
{
    const KlNode *node = &tape->core.nodes[id];
    KlAxisId axis = kl_tape_axis_find(&tape->core, node->axis);
    const KlSaves *saves = &node->saves;
    bool is_kept =
        node->row == NULL || saves->inputs != 0 || saves->outputs != 0 || saves->bytes_extra > 0;
    is_kept = is_kept && kl_stage_has_gradient(&tape->core, stages, node);
    return Py_BuildValue("(INNiiiIIOIIOOOION)", id, stage_object(stages->node_stage[id]),
                         stage_object(stages->late_stage[id]), (int)node->mode, (int)node->reduce,
                         axis == KL_ID_NONE ? -1 : (int)axis, node->first_out, node->n_outs,
                         kl_py_bool(node->is_random), node->writes, node->leaf_writes,
                         kl_py_bool(stages->is_data[id]), kl_py_bool(node->is_open),
                         kl_py_bool(node->is_for_chunks), node->region, kl_py_bool(is_kept),
                         node_inputs(&tape->core, stages->import_of, node));
}

/* (is a value a leaf, does it get a gradient, is it kept): arrays of bool as bytes */
static PyObject *
values_object(const KlTape *core, const KlProgram *program)
{
    const KlStages *stages = &program->stages;
    Py_ssize_t n = (Py_ssize_t)stages->n_values;
    PyObject *gets = PyBytes_FromStringAndSize(NULL, n);
    for (Py_ssize_t i = 0; gets != NULL && i < n; i++) {
        PyBytes_AS_STRING(gets)[i] =
            stages->needs_gradient[i] && core->values[i].meta.requires_grad;
    }
    return Py_BuildValue("(y#Ny#)", (const char *)stages->is_leaf, n, gets,
                         (const char *)program->is_kept, n);
}

PyObject *
kl_program_ids(const KlIds *ids, KlSlice slice)
{
    PyObject *list = PyList_New(slice.n);
    for (uint32_t i = 0; list != NULL && i < slice.n; i++) {
        PyObject *id = PyLong_FromUnsignedLong(ids->ids[slice.first + i]);
        PyList_SET_ITEM(list, i, id);
        if (id == NULL) {
            Py_CLEAR(list);
        }
    }
    return list;
}

/* (stage, axis or -1, segment, nodes, [(first output of a reduction, a bit p for each part p that it leaves)], imports,
 * exports, inner, combined, shadows, has gradient, bytes that its calls make) */
static PyObject *
run_object(const KlTape *core, const KlProgram *program, const KlRun *run)
{
    long long made = 0;
    PyObject *parts = PyList_New(0);
    for (uint32_t i = run->nodes.first; parts != NULL && i < run->nodes.first + run->nodes.n; i++) {
        KlNodeId node = program->nodes.ids[i];
        made += kl_tape_n_bytes(core, node);
        if (program->parts.ids[i] != 0) {
            kl_py_add(&parts,
                      Py_BuildValue("(II)", core->nodes[node].first_out, program->parts.ids[i]));
        }
    }
#define IDS(list) kl_program_ids(&program->list, run->list)
    return Py_BuildValue("(IiINNNNNNNOL)", run->stage,
                         run->axis == KL_ID_NONE ? -1 : (int)run->axis, run->segment, IDS(nodes),
                         parts, IDS(imports), IDS(exports), IDS(inner), IDS(combined), IDS(shadows),
                         kl_py_bool(run->has_gradient), made);
#undef IDS
}

static int
add_id(KlIds *ids, KlValueId id)
{
    KlStatus status = KL_OK;
    kl_program_push(ids, id, &status);
    return status == KL_OK ? 0 : kl_py_done(PyErr_NoMemory());
}

/* How many lazies the user holds of each storage; NULL: there is no memory. */
static uint32_t *
count_handles(const Tape *tape, KlScratch *scratch)
{
    uint32_t *n_handles = kl_alloc_scratch(scratch, tape->core.n_storages + 1, sizeof(uint32_t));
    for (size_t i = 0; n_handles != NULL && i < tape->core.n_values; i++) {
        n_handles[tape->core.values[i].storage] += tape->core.values[i].is_wanted;
    }
    return n_handles;
}

/* Lazies that share memory must share it when they have their numbers: their storage is wanted as a whole,
 * to take the others from it. `shared` gets (storage, how many lazies are of it) where there are several. */
static int
find_shared(const Tape *tape, KlIds *wanted, PyObject **shared, KlScratch *scratch)
{
    uint32_t *n_handles = count_handles(tape, scratch);
    if (n_handles == NULL) {
        return kl_py_done(PyErr_NoMemory());
    }
    for (size_t i = 0; i < tape->core.n_storages && *shared != NULL; i++) {
        if (n_handles[i] >= 2) {
            kl_py_add(shared, Py_BuildValue("(nI)", (Py_ssize_t)i, n_handles[i]));
        }
    }
    int result = *shared != NULL ? 0 : -1;
    for (size_t i = wanted->n; i-- > 0 && result == 0;) {
        KlStorageId storage = tape->core.values[wanted->ids[i]].storage;
        KlValueId base = tape->core.storages[storage].base;
        if (n_handles[storage] >= 2 && tape->core.values[base].state == KL_STATE_PENDING) {
            n_handles[storage] = 0; /* once */
            result = add_id(wanted, base);
        }
    }
    return result;
}

/* Whether computing `wanted` draws: then what was to draw before it must be set up too. */
static int
is_drawing(const KlTape *core, const KlValueId *wanted, size_t n)
{
    bool *is_needed = kl_alloc_zeroed(core->n_values, sizeof(*is_needed)); /* [n_values] */
    if (is_needed == NULL) {
        return kl_py_done(PyErr_NoMemory());
    }
    int result = 0;
    for (size_t i = 0; i < n; i++) {
        is_needed[wanted[i]] = true;
    }
    for (size_t i = core->n_nodes; i-- > 0 && result == 0;) {
        const KlNode *node = &core->nodes[i];
        bool is_run = false;
        for (uint32_t k = 0; k < node->n_outs && !node->is_done; k++) {
            is_run = is_run || is_needed[node->first_out + k];
        }
        result = is_run && kl_tape_waits_to_draw(node);
        for (uint32_t k = 0; k < node->n_inputs && is_run; k++) {
            KlValueId value = core->inputs[node->first_input + k].value;
            if (value != KL_ID_NONE) {
                is_needed[value] = true;
            }
        }
    }
    kl_alloc_free(is_needed);
    return result;
}

/* Pending values the user can reach, and outputs of nodes that must run though nobody looks. `is_no_grad_only`: only those
 * that have no gradient in their history, which later calls must not change; and what has to draw before them. */
static int
find_wanted(Tape *tape, bool is_no_grad_only, KlIds *wanted, KlIds *reached)
{
    (void)(is_no_grad_only && kl_tape_find_no_grad(&tape->core));
    for (size_t i = 0; i < tape->core.n_nodes; i++) {
        const KlNode *node = &tape->core.nodes[i];
        bool is_asked = is_no_grad_only ? node->must_run : !node->is_abandoned;
        bool has_effect = is_no_grad_only || node->leaf_writes != 0 || node->is_random;
        for (uint32_t k = 0; k < node->n_outs && is_asked; k++) {
            const KlValue *out = &tape->core.values[node->first_out + k];
            bool is_pending = out->state == KL_STATE_PENDING;
            bool is_effect = k == 0 && has_effect && (is_pending || is_no_grad_only) &&
                             kl_tape_is_committed(tape, (KlNodeId)i) == 0;
            bool is_reached = out->is_wanted &&
                              (is_pending || (out->state == KL_STATE_COMPUTED && !is_no_grad_only));
            if ((((is_reached && is_pending) || is_effect) &&
                 add_id(wanted, node->first_out + k) < 0) ||
                (is_reached && add_id(reached, node->first_out + k) < 0)) {
                return -1;
            }
        }
    }
    int draws = is_no_grad_only ? is_drawing(&tape->core, wanted->ids, wanted->n) : 0;
    for (size_t i = 0; i < tape->core.n_nodes && draws > 0; i++) {
        const KlNode *node = &tape->core.nodes[i];
        if (kl_tape_waits_to_draw(node) && add_id(wanted, node->first_out) < 0) {
            return -1;
        }
    }
    return draws < 0 ? -1 : 0;
}

/* The value that a root stands for: a lazy, or the number of a value. */
static int
read_root(Tape *tape, PyObject *root, KlValueId *id)
{
    if (PyLong_Check(root)) {
        return kl_tape_value_id(root, id) ? 0 : -1;
    }
    if (!kl_lazy_check(root) || kl_lazy_checked(root) == NULL) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_TypeError, "stage: a root is not lazy");
        }
        return -1;
    }
    if (kl_lazy_value(root)->tape == tape) {
        kl_tape_ask(&tape->core, kl_lazy_value(root)->id);
    }
    int result = kl_tape_attach(tape, kl_lazy_value(root), id);
    if (result == 0) {
        kl_lazy_retain(kl_lazy_value(root), false);
    }
    return result;
}

static int
find_roots(Tape *tape, PyObject *roots, KlIds *ids)
{
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(roots); i++) {
        KlValueId id = KL_ID_NONE;
        if (read_root(tape, PyList_GET_ITEM(roots, i), &id) < 0 || add_id(ids, id) < 0) {
            return -1;
        }
    }
    return 0;
}

static PyObject *
ids_object(KlIds ids)
{
    return kl_program_ids(&ids, (KlSlice){.n = (uint32_t)ids.n});
}

/* -- the handle --------------------------------------------------------------------------------------- */

static const char HANDLE[] = "koila.staged.program";

static void
release_program(PyObject *handle)
{
    KlProgram *program = PyCapsule_GetPointer(handle, HANDLE);
    kl_program_fini(program);
    kl_alloc_free(program);
    Py_XDECREF((PyObject *)PyCapsule_GetContext(handle));
}

int
kl_program_of(PyObject *handle, void *program)
{
    const Tape *tape = kl_tape_open();
    KlProgram *found = tape != NULL ? PyCapsule_GetPointer(handle, HANDLE) : NULL;
    if (found == NULL) {
        PyErr_SetString(PyExc_TypeError, "not a program that stage() gave");
    } else if (found->stages.n_nodes > tape->core.n_nodes ||
               found->stages.n_values > tape->core.n_values) {
        PyErr_SetString(PyExc_ValueError, "the program is not of this tape");
        found = NULL;
    }
    *(KlProgram **)program = found;
    return found != NULL;
}

/* What staging alone tells of the nodes of a program. */
typedef struct Traits {
    size_t n_nodes;
    KlNodeId hidden; /* a call whose memory is written behind autograd's back; KL_ID_NONE */
    bool has_writes, has_effects, is_drawing, has_checkpoints;
    bool has_aside;            /* a graph of a call leads to no root */
    bool is_all;               /* every call that waits is staged */
    bool is_on[UINT8_MAX + 1]; /* by device: a value is made there */
    long long made, entered;   /* bytes that calls make; of rows that enter */
    long long given;           /* bytes that enter whole */
    long long once, n_once;    /* bytes that calls make which run once; how many such calls */
} Traits;

static Traits
traits_of(const KlTape *core, const KlStages *stages)
{
    Traits traits = {.hidden = KL_ID_NONE, .is_all = true};
    for (size_t i = 0; i < stages->n_nodes; i++) {
        const KlNode *node = &core->nodes[i];
        if (stages->node_stage[i] == KL_STAGE_NONE) {
            traits.is_all = traits.is_all && node->is_done;
            continue;
        }
        traits.n_nodes++;
        traits.has_writes = traits.has_writes || node->writes != 0;
        traits.has_effects = traits.has_effects || node->leaf_writes != 0;
        traits.is_drawing = traits.is_drawing || node->is_random;
        bool has_gradient = kl_stage_has_gradient(core, stages, node), has_graph = false;
        traits.has_checkpoints |= node->region != 0 && has_gradient;
        long long bytes = 0;
        for (uint32_t k = 0; k < node->n_outs; k++) {
            const KlValue *out = &core->values[node->first_out + k];
            traits.is_on[out->meta.device] = true;
            has_graph = has_graph || out->meta.requires_grad;
            traits.hidden = core->storages[out->storage].is_hidden ? (KlNodeId)i : traits.hidden;
            bytes += out->view_of == KL_ID_NONE ? kl_meta_n_bytes(&out->meta) : 0;
        }
        traits.has_aside |= has_graph && !has_gradient;
        traits.made += bytes;
        traits.once += node->mode == KL_MODE_ONCE ? bytes : 0;
        traits.n_once += node->mode == KL_MODE_ONCE;
    }
    for (size_t i = 0; i < stages->n_imports; i++) {
        const KlValue *value = &core->values[stages->imports[i].value];
        long long bytes = kl_meta_n_bytes(&value->meta);
        bool is_rows = kl_place_is_rows(&value->meta.place);
        traits.entered += is_rows ? bytes : 0;
        traits.given += !is_rows && value->node == KL_ID_NONE ? bytes : 0;
    }
    return traits;
}

/* {device} where values are made */
static PyObject *
devices_object(const Traits *traits)
{
    PyObject *devices = PySet_New(NULL);
    for (Py_ssize_t i = 0; devices != NULL && i <= UINT8_MAX; i++) {
        if (traits->is_on[i] && PySet_Add(devices, PyList_GET_ITEM(kl_py.devices, i)) < 0) {
            Py_CLEAR(devices);
        }
    }
    return devices;
}

/* [tensor] that enter a program: real ones, and numbers of values */
static PyObject *
entered_object(const Tape *tape, const KlStages *stages)
{
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < stages->n_imports; i++) {
        const KlPyValue *entry = &tape->values[stages->imports[i].value];
        if ((entry->real != NULL && PyList_Append(list, entry->real) < 0) ||
            (entry->result != NULL && PyList_Append(list, entry->result) < 0)) {
            Py_CLEAR(list);
        }
    }
    return list;
}

/* [(axis, rows)] of the axes that bodies run over, of each segment */
static PyObject *
axes_object(const KlTape *core, const KlProgram *program)
{
    PyObject *axes = PyList_New(0);
    for (size_t i = 0; axes != NULL && i < program->n_runs; i++) {
        KlAxisId axis = program->runs[i].axis; /* of a barrier: KL_ID_NONE */
        long long rows = axis != KL_ID_NONE ? core->axis_rows[kl_tape_axis_find(core, axis)] : 0;
        if (axis != KL_ID_NONE) {
            kl_py_add(&axes, Py_BuildValue("(IL)", axis, rows));
        }
    }
    return axes;
}

static PyObject *
describe(const Tape *tape, KlIds roots, KlIds reached, PyObject *shared, PyObject *handle)
{
    const KlProgram *program = PyCapsule_GetPointer(handle, HANDLE);
    const KlStages *stages = &program->stages;
    Traits traits = traits_of(&tape->core, stages);
    return Py_BuildValue(
        "(ONNONNNnnnINONOOOO(LLLLL)ONnO)", handle, ids_object(roots), ids_object(reached), shared,
        axes_object(&tape->core, program), entered_object(tape, stages), devices_object(&traits),
        (Py_ssize_t)traits.n_nodes, (Py_ssize_t)stages->n_values, (Py_ssize_t)stages->n_imports,
        stages->n_stages, stage_object(stages->last_body), kl_py_bool(stages->is_tail_linear),
        stage_object(stages->tail_node), kl_py_bool(traits.is_all), kl_py_bool(traits.has_writes),
        kl_py_bool(traits.has_effects), kl_py_bool(traits.is_drawing), traits.made, traits.once,
        traits.entered, traits.given, traits.n_once, kl_py_bool(traits.has_checkpoints),
        stage_object(traits.hidden), (Py_ssize_t)stages->n_nodes, kl_py_bool(traits.has_aside));
}

/* Whether autograd keeps something of a call for its backward. */
static bool
is_saving(const KlNode *node)
{
    const KlSaves *saves = &node->saves;
    return node->row == NULL || saves->inputs != 0 || saves->outputs != 0 ||
           saves->bytes_extra != 0 || saves->bytes_fixed != 0;
}

KL_DEFINE_ON(spend, tape, args)
{
    const KlProgram *program = NULL;
    int is_asked = 0;
    if (!PyArg_ParseTuple(args, "O&p:spend", kl_program_of, &program, &is_asked)) {
        return NULL;
    }
    KlNodeId found = KL_ID_NONE;
    for (size_t i = 0; i < program->stages.n_nodes; i++) {
        KlNode *node = &tape->core.nodes[i];
        if (program->stages.node_stage[i] == KL_STAGE_NONE || node->is_for_chunks ||
            !kl_stage_has_gradient(&tape->core, &program->stages, node)) {
            continue;
        }
        found = node->is_graph_freed && is_saving(node) ? (KlNodeId)i : found;
        node->is_graph_freed = node->is_graph_freed || !is_asked;
    }
    return stage_object(found);
}

KL_DEFINE_ON(facts_of, tape, args)
{
    const KlProgram *program = NULL;
    const char *what = NULL;
    if (!PyArg_ParseTuple(args, "O&s:facts_of", kl_program_of, &program, &what)) {
        return NULL;
    }
    if (what[0] == 'd') {
        return Py_BuildValue("[NN]", ids_object(program->drops), ids_object(program->dropped));
    }
    if (what[0] == 'v') {
        return values_object(&tape->core, program);
    }
    const KlStages *stages = &program->stages;
    bool is_runs = what[0] == 'r', is_nodes = what[0] == 'n';
    size_t n = is_nodes ? stages->n_nodes : is_runs ? program->n_staged : stages->n_imports;
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < n; i++) {
        if (is_nodes && stages->node_stage[i] == KL_STAGE_NONE) {
            continue;
        }
        const KlImport *import = is_nodes || is_runs ? NULL : &stages->imports[i];
        PyObject *item = is_nodes ? node_object(tape, stages, (KlNodeId)i)
                         : is_runs
                             ? run_object(&tape->core, program, &program->runs[i])
                             : Py_BuildValue("(INO)", import->value, kl_py_place(&import->place),
                                             kl_py_bool(import->is_range));
        kl_py_add(&list, item);
    }
    return list;
}

/* All that decides how a program is staged, cut and scheduled. No tensor, call or line is in it. */
KL_DEFINE_ON(print_of, tape, args)
{
    const KlProgram *program = NULL;
    if (!PyArg_ParseTuple(args, "O&:print_of", kl_program_of, &program)) {
        return NULL;
    }
    const KlTape *core = &tape->core;
    const KlStages *stages = &program->stages;
    size_t n_nodes = stages->n_nodes, n_values = stages->n_values; /* when it was staged */
    const KlNode *last = n_nodes > 0 ? &core->nodes[n_nodes - 1] : &(const KlNode){0};
    size_t n_inputs = last->first_input + last->n_inputs;
#define OF(array, n) (const char *)(array), (Py_ssize_t)((n) * sizeof(*(array)))
#define IDS(list) OF(program->list.ids, program->list.n)
    return Py_BuildValue(
        "(IIiin[y#y#y#y#y#y#y#y#y#y#y#y#y#y#y#y#y#y#y#y#y#y#y#y#y#y#y#y#])", stages->last_body,
        stages->tail_node, stages->is_tail_linear, program->is_checkpointed,
        (Py_ssize_t)program->n_staged, OF(core->nodes, n_nodes), OF(core->values, n_values),
        OF(core->inputs, n_inputs), OF(core->storages, core->n_storages),
        OF(core->axis_rows, core->n_axes), OF(core->axis_of, core->n_axes),
        OF(core->orders, core->n_axes), OF(stages->node_stage, n_nodes),
        OF(stages->late_stage, n_nodes), OF(stages->is_data, n_nodes), OF(stages->segment, n_nodes),
        OF(stages->value_stage, n_values), OF(stages->is_leaf, n_values),
        OF(stages->needs_gradient, n_values), OF(stages->imports, stages->n_imports),
        OF(stages->import_of, n_inputs), OF(program->runs, program->n_runs), IDS(nodes), IDS(parts),
        IDS(imports), IDS(exports), IDS(inner), IDS(combined), IDS(shadows), IDS(reached),
        IDS(roots), OF(program->is_kept, n_values), OF(program->is_unread, n_values));
}
#undef IDS
#undef OF

/* Mark the leaves that are to get no gradient, since gets(tensor) is False, and the values with a number that are to
 * get one, since gets(number) is True: there the way ends. Both arrays: [n_values]. 0 or -1. */
static int
ask_for_gradients(const Tape *tape, PyObject *gets, bool *is_unwanted, bool *is_end)
{
    for (size_t i = 0; i < tape->core.n_values; i++) {
        const KlPyValue *entry = &tape->values[i];
        PyObject *tensor = entry->real != NULL ? entry->real : entry->result;
        if (tensor == NULL || !tape->core.values[i].meta.requires_grad) {
            continue;
        }
        int is_asked = kl_py_truth(PyObject_CallOneArg(gets, tensor));
        if (is_asked < 0) {
            return -1;
        }
        is_unwanted[i] = entry->real != NULL && is_asked == 0;
        is_end[i] = entry->real == NULL && is_asked > 0;
    }
    return 0;
}

/* What of a program only the binding knows. */
static int
ask(Tape *tape, PyObject *gets, KlAsked *asked, KlScratch *scratch)
{
    size_t n = tape->core.n_values;
    kl_stale_drop_numbers(tape);
    bool *flags = kl_alloc_scratch(scratch, 4 * n, sizeof(bool)); /* [n_values] each, as below */
    asked->n_handles = count_handles(tape, scratch);
    if (scratch->is_short) {
        return kl_py_done(PyErr_NoMemory());
    }
    for (size_t i = 0; i < n; i++) {
        flags[i] = tape->values[i].real != NULL;
        flags[n + i] = tape->values[i].result != NULL;
    }
    asked->has_real = flags;
    asked->has_number = flags + n;
    asked->goal.is_unwanted = gets != Py_None ? flags + 2 * n : NULL;
    asked->goal.is_end = gets != Py_None ? flags + 3 * n : NULL;
    return gets != Py_None ? ask_for_gradients(tape, gets, flags + 2 * n, flags + 3 * n) : 0;
}

static int
refresh(Tape *tape)
{
    kl_stale_drop_numbers(tape);
    int status = kl_view_refresh(tape);
    kl_tape_close_orders(&tape->core);
    return status;
}

/* An order of which a chunk's own counts would leave their run; KL_ID_NONE: there is none. */
static KlAxisId
find_torn_order(const KlTape *core, const KlProgram *program)
{
    for (size_t i = 0; i < program->exports.n; i++) {
        const KlMeta *meta = &core->values[program->exports.ids[i]].meta;
        if (meta->role == KL_ROLE_COUNTS || meta->role == KL_ROLE_OFFSETS) {
            return meta->order;
        }
    }
    return KL_ID_NONE;
}

/* Return a new reference to the handle of the program that is built. `staged`: the handle of the one that is cut anew, or
 * NULL. An order that a stage would tear is broken; a segment tears none. */
static PyObject *
build(Tape *tape, const KlAsked *asked, PyObject *staged)
{
    KlAxisId torn = KL_ID_NONE;
    KlProgram *program = kl_alloc_zeroed(1, sizeof(*program));
    PyObject *handle = program != NULL ? PyCapsule_New(program, HANDLE, release_program) : NULL;
    if (handle == NULL) {
        kl_alloc_free(program);
        return PyErr_NoMemory();
    }
    (void)PyCapsule_SetContext(handle, Py_XNewRef(staged));
    KlStatus status = staged == NULL ? kl_stage_keep_tail(&tape->core) : KL_OK;
    status = status == KL_OK ? kl_program_build(&tape->core, asked, program) : status;
    while (status == KL_OK && staged == NULL &&
           (torn = find_torn_order(&tape->core, program)) != KL_ID_NONE) {
        kl_program_fini(program);
        kl_tape_break_order(&tape->core, torn);
        status = kl_program_build(&tape->core, asked, program);
    }
    if (status != KL_OK) {
        Py_DECREF(handle);
        return PyErr_NoMemory();
    }
    return handle;
}

KL_DEFINE_ON(cut_program, tape, args)
{
    KlAsked asked = {0};
    int is_headed = 0;
    if (!PyArg_ParseTuple(args, "O&Ip:cut_program", kl_program_of, &asked.staged, &asked.n_segments,
                          &is_headed)) {
        return NULL;
    }
    asked.is_headed = is_headed != 0;
    PyObject *cut = build(tape, &asked, PyTuple_GET_ITEM(args, 0));
    const KlProgram *program = cut != NULL ? PyCapsule_GetPointer(cut, HANDLE) : NULL;
    return cut != NULL ? Py_BuildValue("(NN)", cut, axes_object(&tape->core, program)) : NULL;
}

KL_DEFINE(stage, args)
{
    PyObject *roots = NULL, *gets = Py_None, *result = NULL, *handle = NULL;
    PyObject *shared = PyList_New(0);
    int is_no_grad_only = 0;
    KlIds wanted = {0}, reached = {0}, root_ids = {0};
    KlScratch scratch = {0};
    Tape *tape = kl_tape_open();
    if (tape == NULL || shared == NULL ||
        !PyArg_ParseTuple(args, "O!p|O:stage", &PyList_Type, &roots, &is_no_grad_only, &gets) ||
        refresh(tape) < 0 || find_roots(tape, roots, &root_ids) < 0 ||
        find_wanted(tape, is_no_grad_only != 0, &wanted, &reached) < 0 ||
        find_shared(tape, &wanted, &shared, &scratch) < 0) {
        goto error;
    }
    KlAsked asked = {.goal = {.wanted = wanted.ids,
                              .n_wanted = wanted.n,
                              .roots = root_ids.ids,
                              .n_roots = root_ids.n},
                     .n_segments = 1,
                     .reached = reached.ids,
                     .n_reached = reached.n};
    if (ask(tape, gets, &asked, &scratch) < 0) {
        goto error;
    }
    handle = build(tape, &asked, NULL);
    if (handle != NULL) {
        result = describe(tape, root_ids, reached, shared, handle);
    }
error:
    KL_DROP(handle, shared);
    kl_alloc_scratch_free(&scratch);
    kl_alloc_free(root_ids.ids);
    kl_alloc_free(reached.ids);
    kl_alloc_free(wanted.ids);
    return result;
}

KL_DEFINE_ON(gradient_part, tape, args)
{
    KlProgram *program = NULL;
    PyObject *values = NULL, *result = NULL;
    unsigned int index = 0;
    uint32_t added = 0;
    if (!PyArg_ParseTuple(args, "O&O&O!:gradient_part", kl_program_of, &program, kl_py_id, &index,
                          &PyList_Type, &values)) {
        return NULL;
    }
    if (index >= program->n_runs || kl_program_is_body(&program->runs[index])) {
        return PyErr_Format(PyExc_IndexError, "gradient_part: there is no barrier %u", index);
    }
    bool *is_made = kl_alloc_zeroed(tape->core.n_values, sizeof(bool)); /* [n_values] */
    if (is_made == NULL) {
        return PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(values); i++) {
        KlValueId value = KL_ID_NONE;
        if (!kl_tape_value_id(PyList_GET_ITEM(values, i), &value)) {
            goto error;
        }
        is_made[value] = true;
    }
    if (kl_program_add_gradient_part(&tape->core, program, index, is_made, &added) != KL_OK) {
        (void)PyErr_NoMemory();
        goto error;
    }
    const KlRun *part = &program->runs[added];
    result = Py_BuildValue("(INNNN)", added, kl_program_ids(&program->nodes, part->nodes),
                           kl_program_ids(&program->imports, part->imports),
                           kl_program_ids(&program->exports, part->exports),
                           kl_program_ids(&program->combined, part->combined));
error:
    kl_alloc_free(is_made);
    return result;
}

/* (the node that took a view first, its output, what it was given to view); None for no view. */
static PyObject *
view_object(const Tape *tape, KlValueId value)
{
    const KlValue *core = &tape->core.values[value];
    if (core->view_of == KL_ID_NONE || core->node == KL_ID_NONE) {
        return Py_NewRef(Py_None);
    }
    KlValueId origin = kl_view_origin(tape, value);
    const KlValue *first = &tape->core.values[origin];
    return Py_BuildValue("(III)", first->node, origin, first->view_of);
}

KL_DEFINE_AT_VALUE(value, tape, id)
{
    const KlValue *value = &tape->core.values[id];
    const KlPyValue *entry = &tape->values[id];
    KlPlace place = value->meta.place;
    place.axis = kl_tape_axis_find(&tape->core, place.axis);
    long long rows = kl_place_is_rows(&place) ? tape->core.axis_rows[place.axis] : 0;
    PyObject *dtype =
        value->meta.dtype == KL_DTYPE_OTHER ? Py_None : kl_py.dtypes[value->meta.dtype];
    PyObject *size = kl_meta_size(&value->meta);
    PyObject *strides = value->meta.is_strided ? kl_meta_strides(&value->meta) : Py_NewRef(Py_None);
    bool is_uncertain = tape->core.storages[value->storage].is_uncertain;
    return Py_BuildValue("(ONONLOOIINONO)", dtype, size, kl_py_bool(value->meta.requires_grad),
                         kl_py_place(&place), rows, entry->real != NULL ? entry->real : Py_None,
                         entry->result != NULL ? entry->result : Py_None, value->storage,
                         kl_tape_base(&tape->core, id), view_object(tape, id),
                         PyList_GET_ITEM(kl_py.devices, value->meta.device), strides,
                         kl_py_bool(is_uncertain));
}

KL_DEFINE_AT_NODE(node, tape, id)
{
    const KlNode *node = &tape->core.nodes[id];
    KlAxisId axis = kl_tape_axis_find(&tape->core, node->axis);
    const KlSaves *saves = &node->saves;
    PyObject *func = tape->nodes[id].func != NULL ? tape->nodes[id].func : Py_None;
    return Py_BuildValue("(OzzNLN(KKLOLLL))", func, node->row != NULL ? node->row->name : NULL,
                         node->reason, kl_source_where(tape, id),
                         (long long)(axis == KL_ID_NONE ? 0 : tape->core.axis_rows[axis]),
                         node_inputs(&tape->core, NULL, node), (unsigned long long)saves->inputs,
                         (unsigned long long)saves->outputs, (long long)saves->bytes_extra,
                         kl_py_bool(saves->is_extra_rows), (long long)saves->bytes_fixed,
                         (long long)saves->bytes_workspace, (long long)saves->bytes_backward);
}

/* [(value, place it is read at or None, tensor or None)] of a node's inputs; of a leaf that it writes, a copy.
 * `is_real`: only of those that have a tensor. */
static PyObject *
describe_inputs(const Tape *tape, const KlNode *node, bool is_real)
{
    PyObject *list = PyList_New(0);
    for (uint32_t k = 0; list != NULL && k < node->n_inputs; k++) {
        const KlInput *input = &tape->core.inputs[node->first_input + k];
        const KlPyValue *entry = input->value != KL_ID_NONE ? &tape->values[input->value] : NULL;
        PyObject *real = entry == NULL             ? NULL
                         : entry->recorded != NULL ? entry->recorded
                         : entry->real != NULL     ? entry->real
                         : is_real                 ? NULL
                                                   : Py_None;
        if (real == NULL) {
            continue;
        }
        bool is_aside = is_real && k < 32 && (node->leaf_writes >> k & 1) != 0;
        real = is_aside ? PyObject_CallMethod(real, "clone", NULL) : Py_NewRef(real);
        kl_py_add(&list, Py_BuildValue("(INN)", input->value, kl_py_place(&input->place), real));
    }
    return list;
}

KL_DEFINE_AT_VALUE(maker_of, tape, id)
{
    KlNodeId maker = tape->core.values[id].node;
    if (maker == KL_ID_NONE) {
        return Py_NewRef(Py_None);
    }
    const KlNode *node = &tape->core.nodes[maker];
    return Py_BuildValue("(IIN)", maker, node->first_out + node->n_outs,
                         describe_inputs(tape, node, false));
}

PyObject *
kl_program_run_again(Tape *tape, KlNodeId id)
{
    const KlNode *node = &tape->core.nodes[id];
    KlAxisId axis = kl_tape_axis_find(&tape->core, node->axis);
    PyObject *inputs = describe_inputs(tape, node, true);
    return PyObject_CallFunction(kl_py.run_again, "IiNIIOn", id,
                                 axis == KL_ID_NONE ? -1 : (int)axis, inputs, node->first_out,
                                 node->n_outs, kl_py_bool(node->writes != 0),
                                 (Py_ssize_t)tape->core.n_values);
}
