/* SPDX-License-Identifier: Apache-2.0 */
/* py_gradient.c - who gets a gradient, and which calls cannot give theirs. */
#include "py.h"

int
kl_gradient_find_unwanted(const Tape *tape, PyObject *gets, bool *is_unwanted)
{
    for (size_t i = 0; i < tape->core.n_values; i++) {
        PyObject *real = tape->values[i].real;
        if (real == NULL || !tape->core.values[i].meta.requires_grad) {
            continue;
        }
        PyObject *answer = PyObject_CallOneArg(gets, real);
        is_unwanted[i] = answer == Py_False;
        Py_XDECREF(answer);
        if (answer == NULL) {
            return -1;
        }
    }
    return 0;
}

/* The first node after `id` that writes the memory of a value. */
static KlNodeId
writer_after(const KlTape *core, KlNodeId id, KlValueId value)
{
    KlNodeId writer = id + 1;
    while (writer < core->n_nodes &&
           (core->nodes[writer].writes == 0 ||
            core->values[core->nodes[writer].first_out].storage != core->values[value].storage)) {
        writer++;
    }
    return writer < core->n_nodes ? writer : id;
}

/* overwritten(program, before) -> (node, [(value, the node that wrote it)]) or None: the last node before `before`
 * whose backward needs what is not there any more. */
PyObject *
kl_gradient_overwritten(PyObject *module, PyObject *args)
{
    (void)module;
    unsigned int before = 0;
    PyObject *handle = NULL;
    const Tape *tape = kl_tape_open();
    if (tape == NULL || !PyArg_ParseTuple(args, "OO&:overwritten", &handle, kl_py_id, &before)) {
        return NULL;
    }
    const KlProgram *program = kl_program_of(handle, tape);
    if (program == NULL) {
        return NULL;
    }
    const KlTape *core = &tape->core;
    KlNodeId id = kl_stage_find_overwritten(core, &program->stages, before);
    if (id == KL_ID_NONE) {
        return Py_NewRef(Py_None);
    }
    const KlNode *node = &core->nodes[id];
    PyObject *found = PyList_New(0);
    int status = found != NULL ? 0 : -1;
    for (uint32_t i = 0; i < node->n_inputs + node->n_outs && status == 0; i++) {
        bool is_output = i >= node->n_inputs;
        uint32_t k = is_output ? i - node->n_inputs : i;
        KlValueId value =
            is_output ? node->first_out + k : core->inputs[node->first_input + k].value;
        if (kl_stage_is_overwritten(core, node, k, is_output)) {
            PyObject *pair = Py_BuildValue("(II)", value, writer_after(core, id, value));
            status = pair != NULL ? PyList_Append(found, pair) : -1;
            Py_XDECREF(pair);
        }
    }
    return status == 0 ? Py_BuildValue("(IN)", id, found) : (Py_XDECREF(found), NULL);
}
