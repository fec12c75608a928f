/* SPDX-License-Identifier: Apache-2.0 */
/* py_stale.c - finds leaves that were changed after they were recorded: by their version and address, and by a
 * checksum if their .data was handed out. A change is an error that names the call that reads the leaf. */
#include "py_tape.h"

#include "alloc.h"

int64_t
kl_stale_version(PyObject *tensor)
{
    kl_py.is_looking = true;
    PyObject *version = PyObject_GetAttr(tensor, kl_py.version);
    kl_py.is_looking = false;
    if (version == NULL) {
        PyErr_Clear(); /* inference tensors count no versions: only the address tells */
        return -1;
    }
    int64_t result = PyLong_AsLongLong(version);
    Py_DECREF(version);
    return result;
}

uint64_t
kl_stale_pointer(PyObject *tensor)
{
    kl_py.is_looking = true;
    PyObject *pointer = PyObject_CallMethodNoArgs(tensor, kl_py.data_ptr);
    kl_py.is_looking = false;
    uint64_t result = pointer != NULL ? PyLong_AsUnsignedLongLongMask(pointer) : 0;
    Py_XDECREF(pointer);
    PyErr_Clear(); /* a tensor without memory has none */
    return result;
}

int
kl_stale_is_flagged(PyObject *tensor, const KlMeta *meta)
{
    if (meta->dtype == KL_DTYPE_OTHER) {
        return 1; /* its flag was not recorded, and its readers run at once */
    }
    int requires_grad = kl_meta_requires_grad(tensor);
    return requires_grad < 0 ? -1 : (requires_grad != 0) == meta->requires_grad;
}

static int
is_changed(const KlPyValue *entry)
{
    if (kl_stale_version(entry->real) != entry->version) {
        return PyErr_Occurred() ? -1 : 1;
    }
    return kl_stale_pointer(entry->real) != entry->pointer;
}

static bool
is_read_by(const KlTape *core, const KlNode *node, KlValueId leaf)
{
    bool is_found = false;
    for (uint32_t k = 0; k < node->n_inputs && !is_found && !node->is_done; k++) {
        is_found = core->inputs[node->first_input + k].value == leaf;
    }
    return is_found;
}

/* A leaf was changed: fail the calls that read it, so that whoever asks for their values gets a StaleError. If one
 * of them is to write statistics, nobody may ever ask: then the error is raised at once (-1). */
static int
fail_changed(Tape *tape, KlValueId leaf)
{
    KlTape *core = &tape->core;
    size_t n_aside = core->n_aside;
    bool is_raised = false;
    kl_tape_draw_waiting();
    for (size_t i = core->n_done; i < core->n_nodes && !is_raised; i++) {
        if (is_read_by(core, &core->nodes[i], leaf)) {
            PyErr_Clear(); /* of the call before */
            kl_py_raise_made(PyObject_CallFunction(
                kl_py.changed_leaf, "OONN", tape->nodes[i].func, tape->values[leaf].real,
                kl_meta_size(&core->values[leaf].meta), kl_source_where(tape, (KlNodeId)i)));
            kl_failure_keep(tape, (KlNodeId)i);
            kl_tape_set_failed(core, (KlNodeId)i);
            is_raised = core->n_aside < n_aside && !core->nodes[i].is_abandoned;
        }
    }
    if (!is_raised) {
        PyErr_Clear();
    }
    return is_raised ? -1 : 0;
}

/* Whether a leaf, or a number that left the tape, was written since .data of its memory was taken while pending calls
 * read it. Writes through .data do not count as versions, so a checksum tells. 0 for others; -1 on failure. */
static int
is_rewritten(const Tape *tape, KlValueId leaf)
{
    PyObject *watched = tape->notes != NULL ? PyDict_GetItemString(tape->notes, "watched") : NULL;
    if (watched == NULL) {
        return 0;
    }
    PyObject *key = PyLong_FromUnsignedLong(leaf);
    PyObject *before = key != NULL ? PyDict_GetItemWithError(watched, key) : NULL;
    Py_XDECREF(key);
    if (before == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    const KlPyValue *entry = &tape->values[leaf];
    PyObject *tensor = entry->real != NULL ? entry->real : entry->result;
    PyObject *sum = tensor != NULL ? PyObject_CallOneArg(kl_py.checksum, tensor) : NULL;
    int is_same = sum != NULL ? PyObject_RichCompareBool(sum, before, Py_EQ) : -1;
    Py_XDECREF(sum);
    return is_same < 0 ? -1 : !is_same;
}

int
kl_stale_is_changed(const Tape *tape, KlValueId leaf)
{
    int changed = is_changed(&tape->values[leaf]);
    return changed != 0 ? changed : is_rewritten(tape, leaf);
}

/* Whether all pending readers of a leaf only write it on the side, and did so in chunks: then others may write it. */
static bool
is_written_for_good(const Tape *tape, KlValueId leaf)
{
    const KlTape *core = &tape->core;
    bool result = core->values[leaf].n_pending == core->values[leaf].n_aside;
    for (size_t i = core->n_done; result && i < core->n_nodes; i++) {
        const KlNode *node = &core->nodes[i];
        for (uint32_t k = 0; result && !node->is_done && k < node->n_inputs; k++) {
            result = core->inputs[node->first_input + k].value != leaf ||
                     (!node->reads_aside && kl_tape_is_committed(tape, (KlNodeId)i) > 0);
        }
    }
    return result;
}

int
kl_stale_is_lost(const Tape *tape, KlValueId leaf)
{
    const KlValue *value = &tape->core.values[leaf];
    if (value->node != KL_ID_NONE || value->n_pending == 0) {
        return 0;
    }
    int changed = kl_stale_is_changed(tape, leaf);
    return changed > 0 ? !is_written_for_good(tape, leaf) : changed;
}

int
kl_stale_check_leaves(Tape *tape)
{
    for (size_t i = 0; i < tape->core.n_values; i++) {
        int changed = kl_stale_is_lost(tape, (KlValueId)i);
        if (changed < 0 || (changed && fail_changed(tape, (KlValueId)i) < 0)) {
            return -1;
        }
    }
    return 0;
}

void
kl_stale_refresh_leaf(Tape *tape, KlValueId id)
{
    KlPyValue *entry = &tape->values[id];
    entry->version = kl_stale_version(entry->real);
    entry->pointer = kl_stale_pointer(entry->real);
}

/* Whether the tensor of a value no longer has the recorded flag, version or address; -1 on failure. */
static int
is_another(const Tape *tape, KlValueId id)
{
    const KlMeta *meta = &tape->core.values[id].meta;
    const KlPyValue *entry = &tape->values[id];
    int is_same = kl_stale_is_flagged(entry->real, meta);
    if (is_same <= 0) {
        return is_same < 0 ? -1 : 1;
    }
    return tape->core.values[id].node == KL_ID_NONE ? is_changed(entry) : 0;
}

int
kl_stale_release(Tape *tape)
{
    for (size_t i = 0; i < tape->core.n_values; i++) {
        if (tape->values[i].handle == NULL || tape->values[i].real == NULL) {
            continue;
        }
        int result = is_another(tape, (KlValueId)i);
        if (result < 0) {
            return -1;
        }
        if (result > 0) {
            kl_lazy_leave(tape, (KlValueId)i, tape->values[i].real);
        }
    }
    return 0;
}

void
kl_stale_drop_numbers(Tape *tape)
{
    for (size_t i = 0; i < tape->core.n_values; i++) {
        KlPyValue *entry = &tape->values[i];
        bool is_left = entry->result != NULL && entry->handle == NULL;
        bool is_counted = is_left && kl_stale_version(entry->result) != entry->version;
        if (is_counted || (entry->result != NULL && is_rewritten(tape, (KlValueId)i) != 0)) {
            PyErr_Clear();               /* of the checksum */
            if (entry->handle != NULL) { /* the user's LazyTensor shows what was written */
                kl_lazy_leave(tape, (KlValueId)i, entry->result);
            }
            tape->core.values[i].state = KL_STATE_PENDING;
            Py_CLEAR(entry->result);
        }
    }
}

KL_DEFINE_ON(forget_left, tape, ignored)
{
    size_t n_values = tape->core.n_values;
    enum { REACHED = 1, DIFFERENTIATED = 2 };
    uint8_t *storages = kl_alloc_zeroed(tape->core.n_storages, 1); /* [n_storages] */
    if (storages == NULL) {
        return PyErr_NoMemory();
    }
    for (size_t i = 0; i < n_values; i++) {
        const KlValue *value = &tape->core.values[i];
        storages[value->storage] |= value->is_wanted ? REACHED : 0;
        storages[value->storage] |= value->meta.requires_grad ? DIFFERENTIATED : 0;
    }
    for (size_t i = 0; i < n_values; i++) {
        KlValue *value = &tape->core.values[i];
        bool is_old = kl_tape_is_stale(&tape->core, (KlValueId)i) && !value->is_wanted;
        bool is_reached = !is_old && (storages[value->storage] & REACHED) != 0;
        bool is_left = value->state == KL_STATE_COMPUTED && value->node != KL_ID_NONE &&
                       !is_reached && (storages[value->storage] & DIFFERENTIATED) != 0;
        if (is_left && !tape->core.nodes[value->node].is_done) {
            value->state = KL_STATE_PENDING;
            Py_CLEAR(tape->values[i].result);
        }
    }
    kl_alloc_free(storages);
    Py_RETURN_NONE;
}

/* What a value needs and has lost: a leaf, which was changed; a graph, which a backward has freed. */
enum { LEAF = 1, GRAPH = 2 };

static uint8_t
find_lost(const KlTape *core, const KlNode *node, const uint8_t *lost)
{
    uint8_t result = 0;
    for (uint32_t k = 0; k < node->n_inputs && !node->is_done; k++) {
        KlValueId value = core->inputs[node->first_input + k].value;
        result |= value != KL_ID_NONE ? lost[value] : 0;
    }
    return result;
}

bool
kl_stale_is_enough(const Tape *tape, KlValueId value)
{
    const KlPyValue *entry = &tape->values[value];
    return entry->result != NULL && tape->core.values[value].view_of == KL_ID_NONE &&
           kl_stale_version(entry->result) == entry->version && is_rewritten(tape, value) == 0;
}

/* List the values that no run can compute again since a leaf of theirs was changed, or (is_over) whose graph leads to a
 * freed one. Without `is_cutting`: those that LazyTensors point at; returns 0 if one of them has no number. With it: those
 * whose number is enough for their readers. 1: done; -1 on failure. `lost`: scratch, [n_values]. */
static int
find_outdated(const Tape *tape, bool is_over, uint8_t *lost, PyObject **list, bool is_cutting)
{
    const KlTape *core = &tape->core;
    for (size_t i = 0; i < core->n_values; i++) {
        int result = kl_stale_is_lost(tape, (KlValueId)i);
        if (result < 0) {
            return -1;
        }
        bool is_freed = is_over && core->values[i].state == KL_STATE_FREED;
        lost[i] = result > 0 ? LEAF : is_freed ? GRAPH : 0;
    }
    for (size_t i = core->n_done; i < core->n_nodes; i++) {
        const KlNode *node = &core->nodes[i];
        uint8_t by = find_lost(core, node, lost);
        for (uint32_t k = 0; k < node->n_outs && by != 0; k++) {
            KlValueId out = node->first_out + k;
            uint8_t lost_here = core->values[out].meta.requires_grad ? by : by & LEAF;
            if (core->values[out].node != i || lost_here == 0) {
                continue; /* it is a leaf by now, or has no graph */
            }
            bool is_known =
                is_cutting ? kl_stale_is_enough(tape, out) : tape->values[out].result != NULL;
            lost[out] = is_cutting && is_known ? 0 : lost_here;
            if (tape->values[out].handle == NULL && !is_cutting) {
                continue;
            }
            if (!is_known && !is_cutting) {
                return *list != NULL ? 0 : -1;
            }
            if (is_known) {
                kl_py_add(list, PyLong_FromUnsignedLong(out));
            }
        }
    }
    return *list != NULL ? 1 : -1;
}

KL_DEFINE_ON(outdated, tape, is_over)
{
    PyObject *list = PyList_New(0), *cuts = PyList_New(0);
    int status = list != NULL && cuts != NULL ? 1 : -1;
    if (!kl_tape_has_draw(&tape->core) && !kl_tape_has_effect(tape)) {
        kl_tape_retire(&tape->core, false);
    }
    /* Only a run in chunks gives a number to a value that stays on the tape. */
    bool may_be_any = tape->is_kept && tape->core.n_done < tape->core.n_nodes && status > 0;
    uint8_t *lost = may_be_any ? kl_alloc_zeroed(tape->core.n_values, sizeof(*lost)) : NULL;
    if (lost != NULL) {
        status = find_outdated(tape, is_over == Py_True, lost, &list, false);
    }
    if (status == 0) { /* a pending call needs one of them: make leaves where numbers are enough */
        status = PyList_SetSlice(list, 0, PyList_GET_SIZE(list), NULL);
        status = status == 0 ? find_outdated(tape, is_over == Py_True, lost, &cuts, true) : status;
    }
    kl_alloc_free(lost);
    PyObject *result = status < 0 ? NULL : PyTuple_Pack(2, list, cuts);
    KL_DROP(cuts, list);
    return result;
}
