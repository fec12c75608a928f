/* SPDX-License-Identifier: Apache-2.0 */
/* py_table.c - op_table() and parts_table(): the core's tables of ops and reductions as Python objects */
#include "py_state.h"

#include "ops.h"

static PyObject *
amount_object(const KlAmount *amount)
{
    return amount != NULL ? Py_BuildValue("(ddd)", amount->outs, amount->ins, amount->masks)
                          : Py_NewRef(Py_None);
}

/* (while it runs, and for the gradients of operand 0, 1, and any further one: (results, first operands,
 * masks); results where it is laid out otherwise; bits of operands handed on; flags as in KlHeld) */
static PyObject *
held_object(const KlHeld *held)
{
    if (held == NULL) {
        return Py_NewRef(Py_None);
    }
    const double *outs = held->back_outs, *ins = held->back_ins;
    return Py_BuildValue("(N(ddd)(ddd)ddiNNNNN)", amount_object(&held->run), outs[0], outs[1],
                         outs[2], ins[0], ins[1], ins[2], held->back_masks, held->relaid,
                         held->handed_on, PyBool_FromLong(held->is_wide),
                         PyBool_FromLong(held->is_stepwise), PyBool_FromLong(held->is_composed),
                         PyBool_FromLong(held->is_of_terms), PyBool_FromLong(held->turns));
}

KL_DEFINE(parts_table, unused)
{
    PyObject *table = PyList_New(0);
    for (int reduce = KL_REDUCE_NONE; table != NULL && reduce <= KL_N_REDUCES; reduce++) {
        bool is_last = reduce == KL_N_REDUCES;
        const KlReduction *of = is_last ? NULL : &kl_ops_reductions[reduce];
        const KlParts *parts =
            kl_ops_parts(is_last ? KL_REDUCE_NONE : (KlReduce)reduce, is_last, true);
        PyObject *entry = Py_BuildValue(
            "(sIdddNNNI)", is_last ? "" : of->name, is_last ? 0 : of->n_parts, parts->left,
            parts->combined[0], parts->seeds, amount_object(parts->keeps), held_object(parts->held),
            PyBool_FromLong(parts->of_row), parts->added);
        kl_py_add(&table, entry);
    }
    return table;
}

static PyObject *
row_object(const KlRow *row)
{
    static const char *const kinds[] = {"OP", "VIEW", "INPLACE"};
    PyObject *names = PyList_New(0);
    const char *alias = NULL;
    const KlRow *target = NULL;
    for (uint32_t i = 0; names != NULL && kl_ops_alias(i, &alias, &target); i++) {
        if (target == row) {
            kl_py_add(&names, PyUnicode_FromString(alias));
        }
    }
    if (names == NULL) {
        return NULL;
    }
    return Py_BuildValue(
        "{s:s,s:s,s:s,s:N,s:N,s:i,s:z,s:z,s:(NN),s:N}", "name", row->name, "call", row->call,
        "kind", kinds[row->kind], "aliases", names, "is_heavy", PyBool_FromLong(row->is_heavy),
        "n_gates", row->n_gates, "draws", row->draws, "gathers", row->gathers, "is_cast",
        PyBool_FromLong(row->cast[0] != KL_CAST_NONE),
        PyBool_FromLong(row->cast[1] != KL_CAST_NONE), "held", held_object(kl_ops_held(row)));
}

KL_DEFINE(op_table, unused)
{
    PyObject *table = PyList_New(0);
    for (uint32_t i = 0; table != NULL && i < kl_ops_n_rows; i++) {
        kl_py_add(&table, row_object(&kl_ops_rows[i]));
    }
    return table;
}
