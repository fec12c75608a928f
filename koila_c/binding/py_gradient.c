/* SPDX-License-Identifier: Apache-2.0 */
/* py_gradient.c - which leaves get a gradient, and which calls cannot compute theirs */
#include "py_run.h"

KL_DEFINE_ON(writer_from, tape, args)
{
    unsigned int id = 0, value = 0;
    if (!PyArg_ParseTuple(args, "II:writer_from", &id, &value)) {
        return NULL;
    }
    const KlValue *values = tape->core.values;
    for (; value < tape->core.n_values && id < tape->core.n_nodes; id++) {
        const KlNode *node = &tape->core.nodes[id];
        if (node->writes != 0 && values[node->first_out].storage == values[value].storage) {
            return Py_BuildValue("(II)", id, node->region);
        }
    }
    return Py_NewRef(Py_None);
}

KL_DEFINE_ON(overwritten, tape, args)
{
    unsigned int before = 0;
    const KlProgram *program = NULL;
    if (!PyArg_ParseTuple(args, "O&O&:overwritten", kl_program_of, &program, kl_py_id, &before)) {
        return NULL;
    }
    const KlTape *core = &tape->core;
    KlNodeId id = kl_stage_find_overwritten(core, &program->stages, before);
    if (id == KL_ID_NONE) {
        return Py_NewRef(Py_None);
    }
    const KlNode *node = &core->nodes[id];
    PyObject *found = PyList_New(0);
    for (uint32_t i = 0; found != NULL && i < node->n_inputs + node->n_outs; i++) {
        bool is_output = i >= node->n_inputs;
        uint32_t k = is_output ? i - node->n_inputs : i;
        KlValueId value =
            is_output ? node->first_out + k : core->inputs[node->first_input + k].value;
        if (kl_stage_is_overwritten(core, node, k, is_output)) {
            kl_py_add(&found, PyLong_FromUnsignedLong(value));
        }
    }
    return Py_BuildValue("(IN)", id, found); /* NULL, too, if there is no list */
}
