/* SPDX-License-Identifier: Apache-2.0 */
/* py_infer.h - the rules as Python functions, for tests and for whoever wants to look at them. */
#ifndef KL_PY_INFER_H
#define KL_PY_INFER_H

#include "py_args.h"

/* infer(name, args, kwargs=None, places=None, rows=None) -> dict: what the row of that name says of a call
 * with real tensors. `places`: for each tensor of the call, in the signature's order, None or
 * (axis, dim, outer, inner). `rows`: rows of each axis; without it they follow from the places. */
PyObject *core_infer(PyObject *module, PyObject *args);

/* op_table() -> list of dicts: name, call, kind, aliases, light, held. */
PyObject *core_op_table(PyObject *module, PyObject *unused);
/* parts_table() -> the name of each KlReduce, its parts, what it leaves and holds in chunks; and last the statistics of batch_norm. */
PyObject *core_parts_table(PyObject *module, PyObject *unused);

#define CORE_INFER_DOC                                                                             \
    "infer($module, name, args, kwargs=None, places=None, rows=None, /)\n--\n\n"                   \
    "Say what the row of that name infers for a call with real tensors."
#define CORE_PARTS_TABLE_DOC                                                                       \
    "parts_table($module, /)\n--\n\nList what reductions leave and hold in chunks."
#define CORE_OP_TABLE_DOC "op_table($module, /)\n--\n\nList the rows of the op table as dicts."

#endif
