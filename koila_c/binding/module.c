/* SPDX-License-Identifier: Apache-2.0 */
/* module.c - the module koila._core: its types and functions. Nothing else. */
#include "py_run.h"

#include <dlfcn.h>

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
    {#name, core_##name, METH_##kind, #name "($module" arguments ", /)\n--\n\n" does},
static PyMethodDef functions[] = {
#include "methods.def"
    {NULL, NULL, 0, NULL},
};
#undef KL_METHOD

/* New reference: an attribute of a module; without a module, the name itself as a str. */
static void *
find_object(const char *module, const char *name)
{
    PyObject *of = module != NULL ? PyImport_ImportModule(module) : NULL;
    PyObject *found = module == NULL ? PyUnicode_InternFromString(name)
                      : of != NULL   ? PyObject_GetAttrString(of, name)
                                     : NULL;
    Py_XDECREF(of);
    return found;
}

/* What to look up once. */
typedef struct Name {
    void *where; /* a pointer to an object or a function */
    const char *module, *name;
} Name;

static const Name objects[] = {
#define KL_OBJECT(type, name, module, attribute) {&kl_py.name, module, attribute},
#define KL_SYMBOL(type, name, parameters, symbol)
#include "torch.def"
#undef KL_OBJECT
#undef KL_SYMBOL
    {&kl_py.formats[KL_FORMAT_CONTIGUOUS], "torch", "contiguous_format"},
    {&kl_py.formats[KL_FORMAT_PRESERVE], "torch", "preserve_format"},
    {&kl_py.formats[KL_FORMAT_CHANNELS_LAST], "torch", "channels_last"},
    {&kl_py.formats[KL_FORMAT_CHANNELS_LAST_3D], "torch", "channels_last_3d"},
    {&kl_py.device_names[0], NULL, "cpu"},
    {&kl_py.device_names[1], NULL, "cuda"},
    {&kl_py.requires_grad, NULL, "requires_grad"},
    {&kl_py.out, NULL, "out"},
    {&kl_py.device, NULL, "device"},
    {&kl_py.layout, NULL, "layout"},
    {&kl_py.version, NULL, "_version"},
    {&kl_py.data_ptr, NULL, "data_ptr"},
};

static const Name symbols[] = {
#define KL_OBJECT(type, name, module, attribute)
#define KL_SYMBOL(type, name, parameters, symbol) {&kl_py.name, NULL, symbol},
#include "torch.def"
#undef KL_OBJECT
#undef KL_SYMBOL
};

static int
look_up(void)
{
    bool is_found = true;
    for (size_t i = 0; is_found && i < sizeof(objects) / sizeof(objects[0]); i++) {
        void *found = find_object(objects[i].module, objects[i].name);
        memcpy(objects[i].where, &found, sizeof(found));
        is_found = found != NULL;
    }
    void *library = is_found ? dlopen("libtorch_cpu.so", RTLD_NOLOAD | RTLD_LAZY) : NULL;
    for (size_t i = 0; is_found && i < sizeof(symbols) / sizeof(symbols[0]); i++) {
        void *found = library != NULL ? dlsym(library, symbols[i].name) : NULL;
        memcpy(symbols[i].where, &found, sizeof(found));
        is_found = found != NULL || kl_py_lacks(symbols[i].name) == 0;
    }
    return is_found ? 0 : -1; /* torch stays loaded, and the library open */
}

static int
import_torch(void)
{
    if (look_up() < 0) {
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
    if (import_torch() < 0 || kl_meta_init() < 0 || kl_context_init() < 0 ||
        kl_storage_init() < 0) {
        return -1;
    }
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
