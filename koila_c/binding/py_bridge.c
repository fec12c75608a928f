/* SPDX-License-Identifier: Apache-2.0 */
/* py_bridge.c - cuts the program before a call that cannot be recorded: the pending calls stay on a tape of their
 * own, and the user's LazyTensors get real tensors instead (bridge.py makes them) */
#include "py_run.h"

#include "alloc.h"

/* -- which values can be handed out ----------------------------------------------------------------- */

/* Whether the LazyTensor of a value can be given a real tensor: nobody watches its gradient, its memory is known,
 * and a call of the program made that memory. Views of a leaf that needs no gradient may go too: their tensors are
 * views, as in eager. */
static bool
can_hand_out(const KlTape *core, KlValueId id)
{
    const KlStorage *storage = &core->storages[core->values[id].storage];
    const KlValue *base = &core->values[storage->base];
    bool is_plain_view = !base->meta.requires_grad && !core->values[id].meta.requires_grad;
    return !kl_tape_is_stale(core, id) && !kl_tape_is_looked_at(core, id) &&
           (base->node != KL_ID_NONE || is_plain_view) && storage->apart == KL_ID_NONE &&
           !storage->is_uncertain;
}

static bool
is_without_tensor(const Tape *tape, KlValueId id)
{
    return tape->values[id].handle != NULL && tape->values[id].real == NULL;
}

KL_DEFINE_ON(can_cut, tape, ignored)
{
    bool result = !tape->is_running;
    for (size_t i = 0; i < tape->core.n_values && result; i++) {
        KlValueId id = (KlValueId)i;
        result = !is_without_tensor(tape, id) || can_hand_out(&tape->core, id);
    }
    return PyBool_FromLong(result);
}

KL_DEFINE_AT_VALUE(behind, tape, id)
{
    const KlTape *core = &tape->core;
    PyObject *leaves = PyList_New(0), *held = PyList_New(0);
    bool *is_reached = kl_alloc_zeroed(core->n_values, sizeof(*is_reached));
    bool is_good = leaves != NULL && held != NULL && is_reached != NULL;
    if (is_good) {
        is_reached[id] = true;
    }
    for (size_t i = core->n_nodes; i-- > 0 && is_good;) {
        const KlNode *node = &core->nodes[i];
        bool is_on_the_way = false;
        for (uint32_t k = 0; k < node->n_outs && !node->is_done; k++) {
            KlValueId out = node->first_out + k;
            is_on_the_way |= is_reached[out] && core->values[out].meta.requires_grad;
        }
        for (uint32_t k = node->n_inputs; k-- > 0 && is_on_the_way && is_good;) {
            KlValueId input = core->inputs[node->first_input + k].value;
            if (input == KL_ID_NONE || !core->values[input].meta.requires_grad) {
                continue;
            }
            const KlPyValue *entry = &tape->values[input];
            if (entry->real != NULL) {
                kl_py_add(&leaves, Py_NewRef(entry->real));
            }
            if (entry->handle != NULL && !is_reached[input]) {
                kl_py_add(&held, PyLong_FromUnsignedLong(input));
            }
            is_good = leaves != NULL && held != NULL;
            is_reached[input] = true;
        }
    }
    PyObject *found = is_good              ? PyTuple_Pack(2, leaves, held)
                      : is_reached == NULL ? PyErr_NoMemory()
                                           : NULL;
    kl_alloc_free(is_reached);
    KL_DROP(leaves, held);
    return found;
}

KL_DEFINE_ON(reached, tape, ignored)
{
    const KlTape *core = &tape->core;
    bool is_possible = !kl_tape_has_draw(core);
    PyObject *handed = PyList_New(0);
    for (size_t i = 0; handed != NULL && i < core->n_values && is_possible; i++) {
        KlValueId id = (KlValueId)i;
        if (!is_without_tensor(tape, id)) {
            continue;
        }
        is_possible = core->values[i].state == KL_STATE_COMPUTED &&
                      tape->values[i].result != NULL && can_hand_out(core, id);
        if (is_possible) {
            kl_py_add(&handed, Py_BuildValue("(IO)", id, tape->values[i].result));
        }
    }
    if (handed != NULL && !is_possible) {
        Py_SETREF(handed, Py_NewRef(Py_None));
    }
    return handed;
}

KL_DEFINE_ON(left_numbers, tape, is_any)
{
    PyObject *found = PyList_New(0);
    for (size_t i = 0; found != NULL && i < tape->core.n_values; i++) {
        const KlPyValue *entry = &tape->values[i];
        bool is_known = entry->result != NULL && tape->core.values[i].n_pending > 0;
        if (is_known && (is_any == Py_True || entry->handle == NULL)) {
            kl_py_add(&found, Py_BuildValue("(nO)", i, entry->result));
        }
    }
    return found;
}

/* Mark the storages that autograd would save if the pending calls ran whole. Returns the bytes that it would save
 * besides them; -1 if a node has no row, writes or draws, so that they are not known. */
static int64_t
mark_saved(const KlTape *core, bool *is_saved /* [n_storages] */)
{
    int64_t further = 0;
    for (size_t i = core->n_done; i < core->n_nodes; i++) {
        const KlNode *node = &core->nodes[i];
        if (node->is_done || node->is_for_chunks) {
            continue;
        }
        if (node->row == NULL || node->writes != 0 || node->is_random) {
            return -1;
        }
        further += node->saves.bytes_extra + node->saves.bytes_fixed;
        for (uint32_t k = 0; k < node->n_inputs && k < 64; k++) {
            KlValueId value = core->inputs[node->first_input + k].value;
            if (value != KL_ID_NONE && (node->saves.inputs >> k & 1) != 0) {
                is_saved[core->values[value].storage] = true;
            }
        }
        for (uint32_t k = 0; k < node->n_outs && k < 64; k++) {
            if ((node->saves.outputs >> k & 1) != 0) {
                is_saved[core->values[node->first_out + k].storage] = true;
            }
        }
    }
    return further;
}

/* Bytes that a whole run of the pending calls saves over cutting them off; less than 0: none, or not known. A part
 * that is cut off keeps its inputs, to run again. A graph keeps what autograd saves, and computes the other values
 * on the way. What the user holds takes its memory either way. */
static int64_t
bytes_won_whole(const Tape *tape, bool *is_saved, bool *is_held /* [n_storages] */)
{
    const KlTape *core = &tape->core;
    int64_t further = mark_saved(core, is_saved), won = -further;
    if (further < 0) {
        return -1;
    }
    for (size_t i = 0; i < core->n_values; i++) {
        is_held[core->values[i].storage] |= tape->values[i].handle != NULL;
    }
    for (size_t i = 0; i < core->n_values; i++) {
        const KlValue *value = &core->values[i];
        bool is_read = value->node == KL_ID_NONE && value->n_pending > 0 &&
                       kl_place_is_rows(&value->meta.place);
        bool is_made = value->node != KL_ID_NONE && !core->nodes[value->node].is_done;
        if (is_held[value->storage] || value->view_of != KL_ID_NONE || (!is_read && !is_made)) {
            continue;
        }
        bool is_kept = is_made || is_saved[value->storage];
        won += (is_read - is_kept) * kl_meta_n_bytes(&value->meta);
        is_held[value->storage] = true;
    }
    return won;
}
KL_DEFINE_ON(won_whole, tape, ignored)
{
    KlScratch scratch = {0};
    bool *is_saved = kl_alloc_scratch(&scratch, tape->core.n_storages, sizeof(bool));
    bool *is_held = kl_alloc_scratch(&scratch, tape->core.n_storages, sizeof(bool));
    int64_t won = scratch.is_short ? -1 : bytes_won_whole(tape, is_saved, is_held);
    kl_alloc_scratch_free(&scratch);
    return scratch.is_short ? PyErr_NoMemory() : PyLong_FromLongLong(won);
}

/* -- handing them out ----------------------------------------------------------------------------- */

/* Check that a list holds pairs of (pending value, tensor). False with an exception. */
static bool
are_pairs(const Tape *tape, PyObject *pairs)
{
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(pairs); i++) {
        unsigned int id = 0;
        PyObject *real = NULL, *pair = PyList_GET_ITEM(pairs, i);
        if (!PyTuple_Check(pair)) {
            PyErr_SetString(PyExc_TypeError, "hand_out: expected pairs of a value and a tensor");
            return false;
        }
        if (!PyArg_ParseTuple(pair, "O&O!:hand_out", kl_tape_value_id, &id, kl_py.tensor_base,
                              &real)) {
            return false;
        }
        if (tape->core.values[id].node == KL_ID_NONE) {
            (void)PyErr_Format(PyExc_IndexError, "hand_out: no call makes value %u", id);
            return false;
        }
    }
    return true;
}

/* The value of entry `i` of a list that are_pairs() has checked. */
static KlValueId
value_of(PyObject *pairs, Py_ssize_t i)
{
    return (KlValueId)PyLong_AsUnsignedLong(PyTuple_GET_ITEM(PyList_GET_ITEM(pairs, i), 0));
}

/* Make new LazyTensors for the values of `pairs`. `before` gets the user's Values, which they replace on the tape,
 * or NULL. On failure returns NULL and restores the tape. */
static PyObject *
stand_ins_for(Tape *tape, PyObject *pairs, Value **before /* [n_pairs] */)
{
    Py_ssize_t n = PyList_GET_SIZE(pairs), n_made = 0;
    PyObject *lazies = PyTuple_New(n), *lazy = lazies;
    for (; lazy != NULL && n_made < n; n_made++) {
        KlValueId id = value_of(pairs, n_made);
        before[n_made] = tape->values[id].handle;
        lazy = kl_lazy_new(tape, id);
        PyTuple_SET_ITEM(lazies, n_made, lazy);
    }
    if (lazy != NULL || lazies == NULL) {
        return lazies;
    }
    PyObject *type = NULL, *error = NULL, *traceback = NULL;
    PyErr_Fetch(&type, &error, &traceback);
    Py_DECREF(lazies);
    for (Py_ssize_t i = 0; i < n_made; i++) {
        kl_tape_hold(tape, value_of(pairs, i), before[i]);
    }
    PyErr_Restore(type, error, traceback);
    return NULL;
}

/* Give one of the user's Values its tensor. */
static void
settle(Value *lazy, PyObject *pair)
{
    if (lazy != NULL) {
        PyObject *tensor = PyTuple_GET_ITEM(pair, 1);
        kl_lazy_detach(lazy, tensor);
        /* Calls on it are recorded, as calls on the batch are, also after a backward. */
        lazy->is_input = kl_meta_requires_grad(tensor) > 0;
    }
}

KL_DEFINE(hand_out, args)
{
    PyObject *roots = NULL, *others = NULL, *lazies = NULL;
    Tape *tape = kl_tape_open(), *fresh = NULL;
    if (tape == NULL ||
        !PyArg_ParseTuple(args, "O!O!:hand_out", &PyList_Type, &roots, &PyList_Type, &others) ||
        !are_pairs(tape, roots) || !are_pairs(tape, others)) {
        return NULL;
    }
    Value **before = kl_alloc_zeroed((size_t)PyList_GET_SIZE(roots) + 1, sizeof(Value *));
    if (before == NULL) {
        return PyErr_NoMemory();
    }
    Py_INCREF(tape);
    fresh = kl_tape_new();
    lazies = fresh != NULL ? stand_ins_for(tape, roots, before) : NULL;
    if (lazies == NULL || kl_tape_use(fresh) < 0) {
        Py_CLEAR(lazies);
        goto error;
    }
    kl_py.n_cut_off += tape->is_cut_off ? 0 : 1;
    tape->is_cut_off = true;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(roots); i++) {
        settle(before[i], PyList_GET_ITEM(roots, i));
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(others); i++) {
        KlValueId id = value_of(others, i);
        Value *lazy = tape->values[id].handle;
        kl_tape_hold(tape, id, NULL);
        settle(lazy, PyList_GET_ITEM(others, i));
    }
    for (size_t i = 0; i < tape->core.n_values; i++) {
        if (tape->values[i].real != NULL && tape->values[i].handle != NULL) {
            kl_lazy_leave(tape, (KlValueId)i, tape->values[i].real);
        }
        if (tape->core.values[i].node == KL_ID_NONE && tape->core.values[i].n_pending == 0) {
            Py_CLEAR(tape->values[i].real); /* else the part would copy it before the next write */
        }
        if (tape->core.values[i].state == KL_STATE_COMPUTED && tape->values[i].result != NULL) {
            tape->core.values[i].state = KL_STATE_PENDING; /* the user's lazies have it */
            Py_CLEAR(tape->values[i].result);
        }
    }
error:
    kl_alloc_free(before);
    Py_XDECREF((PyObject *)fresh);
    Py_DECREF((PyObject *)tape);
    return lazies;
}

KL_DEFINE(set_wanted, args)
{
    PyObject *lazies = NULL;
    int flag = 0;
    if (!PyArg_ParseTuple(args, "O!p:set_wanted", &PyTuple_Type, &lazies, &flag)) {
        return NULL;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(lazies); i++) {
        PyObject *lazy = PyTuple_GET_ITEM(lazies, i);
        if (!kl_lazy_check(lazy)) {
            return PyErr_Format(PyExc_TypeError, "set_wanted: expected lazies, got %R", lazies);
        }
        const Value *value = kl_lazy_value(lazy);
        if (value->tape != NULL && value->id < value->tape->core.n_values) {
            value->tape->core.values[value->id].is_wanted = flag; /* n_wanted counts it still */
        }
    }
    return Py_NewRef(Py_None);
}

KL_DEFINE(replace_leaves, args)
{
    PyObject *lazy = NULL, *make = NULL;
    if (!PyArg_ParseTuple(args, "O!O:replace_leaves", kl_py.lazy, &lazy, &make)) {
        return NULL;
    }
    const Value *value = kl_lazy_value(lazy);
    Tape *tape = value != NULL ? value->tape : NULL;
    for (size_t i = 0; tape != NULL && i < tape->core.n_values; i++) {
        const KlValue *leaf = &tape->core.values[i];
        if (leaf->node != KL_ID_NONE || leaf->n_pending == 0 || !leaf->meta.requires_grad) {
            continue;
        }
        PyObject *made = PyObject_CallOneArg(make, tape->values[i].real);
        if (made == NULL) {
            return NULL;
        }
        Py_XSETREF(tape->values[i].recorded, made);
    }
    return Py_NewRef(Py_None);
}

KL_DEFINE(replace_leaf, args)
{
    PyObject *lazy = NULL, *tensor = NULL;
    unsigned int id = 0;
    if (!PyArg_ParseTuple(args, "O!O&O!:replace_leaf", kl_py.lazy, &lazy, kl_py_id, &id,
                          kl_py.tensor_base, &tensor)) {
        return NULL;
    }
    const Value *value = kl_lazy_value(lazy);
    Tape *tape = value != NULL ? value->tape : NULL;
    if (tape == NULL || id >= tape->core.n_values || tape->values[id].real == NULL) {
        return PyErr_Format(PyExc_IndexError, "replace_leaf: there is no leaf %u", id);
    }
    /* Nothing is recorded onto this tape any more, so no look-up by tensor will miss this one. */
    Py_SETREF(tape->values[id].real, Py_NewRef(tensor));
    kl_stale_refresh_leaf(tape, id);
    return Py_NewRef(Py_None);
}
