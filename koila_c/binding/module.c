/* module.c - functions and init of koila._core: nothing else. */
#include "py_infer.h"

static PyMethodDef methods[] = {
    {"infer", core_infer, METH_VARARGS, CORE_INFER_DOC},
    {"op_table", core_op_table, METH_NOARGS, CORE_OP_TABLE_DOC},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "koila._core",
    .m_size = 0,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__core(void);

PyMODINIT_FUNC
PyInit__core(void)
{
    return PyModuleDef_Init(&definition);
}
