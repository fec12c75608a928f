/* SPDX-License-Identifier: Apache-2.0 */
/* py_setter.c - attributes of tensors that are set to a lazy (`p.grad = lazy`). torch asks the class of the
 * tensor, never that of the value, and would take the placeholder. So the function that sets the attribute is
 * replaced, in the structure that CPython keeps for it: to get the attribute costs what it did, and for all
 * who ask the descriptor is the same. */
#include "py.h"

typedef struct Setter {
    PyGetSetDef *def;
    setter original;
    PyObject *put; /* put(tensor, lazy) */
} Setter;

/* As many as there are attributes of a tensor that take tensors, and some. */
static Setter setters[8];

static int
set_attribute(PyObject *tensor, PyObject *value, void *closure)
{
    Setter *entry = closure;
    if (value == NULL || !kl_lazy_check(value)) {
        return entry->original(tensor, value, NULL);
    }
    PyObject *done = PyObject_CallFunctionObjArgs(entry->put, tensor, value, NULL);
    return kl_py_done(done);
}

/* set_attribute_by(descriptor, put): from now on put(tensor, lazy) sets the attribute to a lazy; None gives
 * torch its own way back. False where the descriptor is not as this needs it. */
PyObject *
core_set_attribute_by(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *descriptor = NULL, *put = NULL;
    if (!PyArg_ParseTuple(args, "O!O:set_attribute_by", &PyGetSetDescr_Type, &descriptor, &put)) {
        return NULL;
    }
    PyGetSetDef *def = ((PyGetSetDescrObject *)descriptor)->d_getset;
    Setter *entry = def->set == set_attribute ? def->closure : NULL;
    if (entry == NULL && put != Py_None && def->set != NULL && def->closure == NULL) {
        for (size_t i = 0; entry == NULL && i < sizeof(setters) / sizeof(setters[0]); i++) {
            entry = setters[i].def == NULL ? &setters[i] : NULL;
        }
    }
    if (entry == NULL) {
        return Py_NewRef(Py_False);
    }
    if (entry->def == NULL) {
        *entry = (Setter){.def = def, .original = def->set};
    }
    Py_XSETREF(entry->put, put == Py_None ? NULL : Py_NewRef(put));
    def->set = put == Py_None ? entry->original : set_attribute;
    def->closure = put == Py_None ? NULL : entry;
    if (put == Py_None) {
        entry->def = NULL;
    }
    return Py_NewRef(Py_True);
}
