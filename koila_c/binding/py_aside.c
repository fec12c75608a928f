/* py_aside.c - a whole run of a call whose statistics a run in chunks has committed: it updates copies, so
 * that they are updated once. */
#include "py.h"

/* A node that writes leaves on the side, and copies of those, to be written in their place. */
typedef struct Aside {
    Tape *tape;
    const KlNode *node;
    PyObject *(*value_of)(void *, KlValueId);
    PyObject *copies; /* dict: value -> its copy */
} Aside;

static PyObject *
aside_of(void *env, KlValueId value)
{
    Aside *aside = env;
    const KlNode *node = aside->node;
    PyObject *real = aside->value_of(aside->tape, value);
    for (uint32_t i = 0; node->leaf_writes >> i != 0; i++) {
        if ((node->leaf_writes >> i & 1) == 0 ||
            aside->tape->core.inputs[node->first_input + i].value != value) {
            continue;
        }
        PyObject *key = PyLong_FromUnsignedLong(value);
        PyObject *copy = key != NULL ? PyObject_CallMethod(real, "clone", NULL) : NULL;
        if (copy == NULL || PyDict_SetItem(aside->copies, key, copy) < 0) {
            Py_CLEAR(copy);
        }
        Py_XDECREF(key);
        Py_XDECREF(copy); /* the dict holds it while the call runs */
        return copy;
    }
    return real;
}

int
kl_aside_is_due(const Tape *tape, KlNodeId id)
{
    PyObject *effects = tape->core.nodes[id].leaf_writes != 0 && tape->memo != NULL
                            ? PyDict_GetItemString(tape->memo, "effects")
                            : NULL;
    PyObject *key = effects != NULL ? PyLong_FromUnsignedLong(id) : NULL;
    int result = key != NULL ? PySet_Contains(effects, key) : 0;
    Py_XDECREF(key);
    return result;
}

PyObject *
kl_aside_run(Tape *tape, KlNodeId id, PyObject *(*value_of)(void *, KlValueId))
{
    Aside aside = {
        .tape = tape, .node = &tape->core.nodes[id], .value_of = value_of, .copies = PyDict_New()};
    PyObject *result = aside.copies != NULL ? kl_call_run(tape, id, aside_of, &aside) : NULL;
    Py_XDECREF(aside.copies);
    return result;
}
