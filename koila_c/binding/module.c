/* SPDX-License-Identifier: Apache-2.0 */
/* module.c - the module koila._core: its types and functions. Nothing else. */
#include "py_run.h"

PyMODINIT_FUNC PyInit__core(void);

static const struct {
    PyObject **where;
    const char *name;
} bound[] = {
#define KL_BOUND(name) {&kl_py.name, #name},
#include "bound.def"
#undef KL_BOUND
};

/* Set kl_py's Python objects from a dict, by name; also the folders whose files are not the user's, and the reductions that
 * Python can split. */
KL_DEFINE(bind, args)
{
    PyObject *folders = NULL, *objects = NULL;
    if (!PyArg_ParseTuple(args, "O!IO!:bind", &PyTuple_Type, &folders, &kl_py.reductions,
                          &PyDict_Type, &objects) ||
        kl_source_init(folders) < 0) {
        return NULL;
    }
    for (size_t i = 0; i < sizeof(bound) / sizeof(bound[0]); i++) {
        PyObject *object = PyDict_GetItemString(objects, bound[i].name);
        if (object == NULL) {
            return PyErr_Format(PyExc_TypeError, "bind: %s is not among the objects",
                                bound[i].name);
        }
        Py_XSETREF(*bound[i].where, Py_NewRef(object));
    }
    return Py_NewRef(Py_None);
}

static uint32_t
bits_of(PyObject *dtypes)
{
    uint32_t bits = 0;
    for (Py_ssize_t i = 0; PyTuple_Check(dtypes) && i < PyTuple_GET_SIZE(dtypes); i++) {
        bits |= UINT32_C(1) << kl_meta_dtype_from(PyTuple_GET_ITEM(dtypes, i));
    }
    return bits;
}

/* How oneDNN lays out convolutions on this CPU, see KlCall. */
KL_DEFINE(set_blocks, args)
{
    long long width = 0;
    PyObject *dtypes = NULL, *tiled = NULL, *emulated = NULL;
    if (!PyArg_ParseTuple(args, "LOOO:set_blocks", &width, &dtypes, &tiled, &emulated)) {
        return NULL;
    }
    kl_py.blocked_halves = bits_of(dtypes), kl_py.tiled_halves = bits_of(tiled);
    kl_py.emulated_halves = bits_of(emulated), kl_py.block_width = width;
    return Py_NewRef(Py_None);
}

#define KL_METHOD(name, kind, arguments, does)                                                     \
    KL_METHOD_OF(name, core_##name, kind, arguments, does)
#define KL_METHOD_OF(name, function, kind, arguments, does)                                        \
    {#name, function, METH_##kind, #name "($module" arguments ", /)\n--\n\n" does},
static PyMethodDef functions[] = {
#include "methods.def"
    {NULL, NULL, 0, NULL},
};
#undef KL_METHOD
#undef KL_METHOD_OF

static int
import_torch(void)
{
    const KlName names[] = {
        {(PyObject **)&kl_py.tensor_base, "torch._C", "TensorBase"},
        {(PyObject **)&kl_py.tensor, "torch", "Tensor"},
        {&kl_py.len_dispatch_stack, "torch._C", "_len_torch_dispatch_stack"},
        {(PyObject **)&kl_py.parameter, "torch.nn", "Parameter"},
        {&kl_py.no_function, "torch._C", "_disabled_torch_function_impl"},
        {&kl_py.no_dispatch, "torch._C", "_disabled_torch_dispatch_impl"},
        {&kl_py.size_type, "torch", "Size"},
        {(PyObject **)&kl_py.dtype_type, "torch", "dtype"},
        {(PyObject **)&kl_py.device_type, "torch", "device"},
        {(PyObject **)&kl_py.format_type, "torch", "memory_format"},
        {&kl_py.formats[KL_FORMAT_CONTIGUOUS], "torch", "contiguous_format"},
        {&kl_py.formats[KL_FORMAT_PRESERVE], "torch", "preserve_format"},
        {&kl_py.formats[KL_FORMAT_CHANNELS_LAST], "torch", "channels_last"},
        {&kl_py.formats[KL_FORMAT_CHANNELS_LAST_3D], "torch", "channels_last_3d"},
        {(PyObject **)&kl_py.method_wrapper, "types", "MethodWrapperType"},
        {&kl_py.reenter, "torch.overrides", "enable_reentrant_dispatch"},
        {&kl_py.strided, "torch", "strided"},
        {&kl_py.get_default_dtype, "torch", "get_default_dtype"},
        {&kl_py.is_alias_of, "torch._C", "_is_alias_of"},
        {&kl_py.requires_grad, NULL, "requires_grad"},
        {&kl_py.out, NULL, "out"},
        {&kl_py.device, NULL, "device"},
        {&kl_py.layout, NULL, "layout"},
        {&kl_py.version, NULL, "_version"},
        {&kl_py.data_ptr, NULL, "data_ptr"},
    };
    if (kl_py_look_up(names, sizeof(names) / sizeof(names[0])) < 0) {
        return -1;
    }
    kl_py.empty_tuple = PyTuple_New(0);
    kl_py.empty_dict = PyDict_New();
    if (kl_py.empty_tuple == NULL || kl_py.empty_dict == NULL) {
        return -1;
    }
    PyObject *numpy = PyImport_ImportModule("numpy");
    if (numpy != NULL) {
        kl_py.ndarray = PyObject_GetAttrString(numpy, "ndarray");
        Py_DECREF(numpy);
    }
    PyErr_Clear(); /* torch works without numpy, and so does koila */
    return 0;
}

static int
module_exec(PyObject *module)
{
    if (kl_py.lazy != NULL) { /* this copy would not recognise the first one's LazyTensors */
        return kl_py_done(
            PyErr_Format(PyExc_ImportError,
                         "koila._core is loaded already, and cannot live twice in a process"));
    }
    if (import_torch() < 0 || kl_meta_init() < 0 || kl_context_init() < 0) {
        return -1;
    }
    kl_storage_init();
    bool is_made = kl_tape_type_init(module) == 0 && kl_function_init(module) == 0 &&
                   kl_lazy_init(module) == 0 && kl_class_init(module) == 0;
    return is_made ? 0 : -1;
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, module_exec},
    {0, NULL},
};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "koila._core",
    .m_doc = "The recorder, planner and replayer behind koila.",
    .m_methods = functions,
    .m_slots = slots,
};

PyMODINIT_FUNC
PyInit__core(void)
{
    return PyModuleDef_Init(&definition);
}
