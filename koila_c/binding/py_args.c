/* SPDX-License-Identifier: Apache-2.0 */
/* py_args.c - binds the arguments of a Python call to the words of a signature. It knows no op: it tells ints,
 * floats and tensors apart, and leaves their meaning to the rules. */
#include "py_args.h"

#include <string.h>

#include "py_state.h"

/* A call while it is bound. */
typedef struct {
    KlPyBound *bound;
    const KlPyReader *reader;
    PyObject *const *args; /* positional arguments, then the values of keywords */
} Binder;

static const KlMeta *
meta_of(const Binder *binder, PyObject *object)
{
    return binder->reader->meta_of(binder->reader->context, object);
}

int
kl_py_signature_read(KlPySignature *signature, PyObject *parse, const KlRow *row)
{
    PyObject *words = PyObject_CallFunction(parse, "s", row->call);
    Py_ssize_t n = words != NULL ? PyTuple_GET_SIZE(words) : -1;
    *signature = (KlPySignature){.parsed = words};
    if (n < 0) {
        return -1;
    }
    if (n > KL_PY_WORDS_MAX) {
        return kl_py_done(PyErr_Format(PyExc_SystemError, "too many words in a row's call"));
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        KlPyWord *word = &signature->words[i];
        int is_positional = 0, is_optional = 0, is_variadic = 0;
        const char *kind = NULL;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(words, i), "O!ppps", &PyTuple_Type, &word->names,
                              &is_positional, &is_optional, &is_variadic, &kind)) {
            return -1;
        }
        word->is_optional = is_optional;
        word->is_variadic = is_variadic;
        word->is_index = strcmp(kind, "index") == 0;
        word->is_device = strcmp(kind, "device") == 0;
        word->is_out = strcmp(kind, "out") == 0;
        signature->n_positional += is_positional != 0;
    }
    signature->n_words = (uint32_t)n;
    return 0;
}

void
kl_py_bound_init(KlPyBound *bound)
{
    bound->n_args = 0;
    bound->n_inputs = 0;
    bound->inputs = bound->inputs_fixed;
    bound->input_origins = bound->input_origins_fixed;
    bound->n_inputs_max = KL_PY_INPUTS_FIXED;
    bound->n_room_used = 0;
    bound->scratch = (KlScratch){0};
}

void
kl_py_bound_fini(KlPyBound *bound)
{
    kl_alloc_scratch_free(&bound->scratch);
}

static void *
block_new(KlPyBound *bound, size_t n, size_t size)
{
    void *block = kl_alloc_scratch(&bound->scratch, n, size);
    if (block == NULL) {
        (void)PyErr_NoMemory();
    }
    return block;
}

/* Room for `n` items, whose size is a multiple of 8: in the fixed one, or else in a block. */
static void *
reserve(KlPyBound *bound, Py_ssize_t n, size_t size)
{
    size_t n_words = (size_t)n * (size / sizeof(int64_t));
    if (n_words > KL_PY_ROOM - bound->n_room_used) {
        return block_new(bound, (size_t)n, size);
    }
    bound->n_room_used += (uint32_t)n_words;
    return &bound->room[bound->n_room_used - n_words];
}

static int
add_input(KlPyBound *bound, const KlMeta *meta, PyObject *object, uint32_t arg, uint32_t entry)
{
    if (bound->n_inputs == bound->n_inputs_max) {
        uint32_t n_grown = bound->n_inputs_max * 2;
        const KlMeta **inputs = block_new(bound, n_grown, sizeof(*inputs));
        KlPyInput *origins = inputs == NULL ? NULL : block_new(bound, n_grown, sizeof(*origins));
        if (origins == NULL) {
            return -1;
        }
        memcpy((void *)inputs, (const void *)bound->inputs, bound->n_inputs * sizeof(*inputs));
        memcpy(origins, bound->input_origins, bound->n_inputs * sizeof(*origins));
        bound->inputs = inputs;
        bound->input_origins = origins;
        bound->n_inputs_max = n_grown;
    }
    bound->inputs[bound->n_inputs] = meta;
    bound->input_origins[bound->n_inputs] =
        (KlPyInput){.object = object, .arg = arg, .entry = entry};
    bound->n_inputs++;
    return 0;
}

static bool
is_numpy_scalar(PyObject *object, const char *prefix)
{
    const char *name = Py_TYPE(object)->tp_name;
    return name[0] == prefix[0] && strncmp(name, prefix, strlen(prefix)) == 0;
}

/* A Python or numpy int that fits; bools are none. Tensors have an __index__ too, but it would read them, so only
 * numpy's is called. */
static bool
get_int(PyObject *object, int64_t *value)
{
    if (PyBool_Check(object)) {
        return false;
    }
    if (PyLong_Check(object)) {
        int overflow = 0;
        *value = PyLong_AsLongLongAndOverflow(object, &overflow);
        return overflow == 0;
    }
    if (!is_numpy_scalar(object, "numpy.int") && !is_numpy_scalar(object, "numpy.uint")) {
        return false;
    }
    PyObject *index = PyNumber_Index(object);
    int overflow = 0;
    *value = index == NULL ? 0 : PyLong_AsLongLongAndOverflow(index, &overflow);
    bool is_int = index != NULL && overflow == 0;
    Py_XDECREF(index);
    PyErr_Clear();
    return is_int;
}

static void
set_torch_object(PyObject *object, bool is_device, KlArg *arg)
{
    if (is_device || Py_IS_TYPE(object, kl_py.device_type)) {
        int device = kl_meta_device_from(object);
        PyErr_Clear();
        arg->kind = device < 0 ? KL_ARG_OTHER : KL_ARG_DEVICE;
        arg->u.i = device;
    } else if (Py_IS_TYPE(object, kl_py.dtype_type)) {
        arg->kind = KL_ARG_DTYPE;
        arg->u.dtype = kl_meta_dtype_from(object);
    } else if (Py_IS_TYPE(object, kl_py.format_type)) {
        arg->kind = KL_ARG_OTHER;
        for (int i = 0; i < 4; i++) {
            if (object == kl_py.formats[i]) {
                arg->kind = KL_ARG_FORMAT;
                arg->u.i = i;
            }
        }
    }
}

/* A sequence of numbers, some of them floats. */
static int
convert_floats(const Binder *binder, PyObject *const *entries, Py_ssize_t n, KlArg *arg)
{
    double *floats = reserve(binder->bound, n, sizeof(*floats));
    if (floats == NULL) {
        return -1;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        int64_t slot = 0;
        if (PyFloat_Check(entries[i])) {
            floats[i] = PyFloat_AS_DOUBLE(entries[i]);
        } else if (get_int(entries[i], &slot)) {
            floats[i] = (double)slot;
        } else {
            arg->kind = KL_ARG_OTHER;
            return 0;
        }
    }
    arg->kind = KL_ARG_FLOATS;
    arg->u.floats = floats;
    return 0;
}

/* A sequence of ints, of numbers or of tensors; anything else, or a mixture, is OTHER. */
static int
convert_sequence(const Binder *binder, PyObject *const *entries, Py_ssize_t n, uint32_t slot,
                 KlArg *arg)
{
    KlPyBound *bound = binder->bound;
    arg->n = (uint32_t)n;
    int64_t first = 0;
    if (n == 0 || get_int(entries[0], &first)) {
        int64_t *ints = reserve(bound, n, sizeof(*ints));
        if (ints == NULL) {
            return -1;
        }
        for (Py_ssize_t i = 0; i < n; i++) {
            if (!get_int(entries[i], &ints[i])) {
                return convert_floats(binder, entries, n, arg);
            }
        }
        arg->kind = KL_ARG_INTS;
        arg->u.ints = ints;
        return 0;
    }
    if (PyFloat_Check(entries[0])) {
        return convert_floats(binder, entries, n, arg);
    }
    uint32_t n_before = bound->n_inputs;
    bool has_tensor = false;
    arg->input = n_before;
    for (Py_ssize_t i = 0; i < n; i++) {
        const KlMeta *meta = NULL;
        if (entries[i] != Py_None) {
            meta = meta_of(binder, entries[i]);
            if (meta == NULL) {
                arg->kind = KL_ARG_OTHER;
                bound->n_inputs = n_before;
                return 0;
            }
            has_tensor = true;
        }
        if (add_input(bound, meta, entries[i], slot, (uint32_t)i) < 0) {
            return -1;
        }
    }
    arg->kind = has_tensor ? KL_ARG_VALUES : KL_ARG_OTHER;
    bound->n_inputs = has_tensor ? bound->n_inputs : n_before;
    return 0;
}

static int
convert(const Binder *binder, const KlPyWord *word, PyObject *object, uint32_t slot, KlArg *arg)
{
    arg->kind = KL_ARG_OTHER;
    if (object == Py_None) {
        arg->kind = KL_ARG_NONE;
        return 0;
    }
    if (PyBool_Check(object)) {
        arg->kind = KL_ARG_BOOL;
        arg->u.i = object == Py_True;
        return 0;
    }
    if (get_int(object, &arg->u.i)) {
        arg->kind = KL_ARG_INT;
        return 0;
    }
    if (PyFloat_Check(object)) {
        arg->kind = KL_ARG_FLOAT;
        arg->u.f = PyFloat_AS_DOUBLE(object);
        return 0;
    }
    if (PyTuple_Check(object) || PyList_Check(object)) {
        binder->bound->origins[slot].is_sequence = true;
        return convert_sequence(binder, PySequence_Fast_ITEMS(object),
                                PySequence_Fast_GET_SIZE(object), slot, arg);
    }
    const KlMeta *meta = meta_of(binder, object);
    if (meta != NULL) {
        arg->kind = KL_ARG_VALUE;
        arg->input = binder->bound->n_inputs;
        return add_input(binder->bound, meta, object, slot, 0);
    }
    bool is_text = PyUnicode_Check(object);
    if (is_text && !word->is_device) {
        arg->u.text = PyUnicode_AsUTF8(object);
        arg->kind = arg->u.text == NULL ? KL_ARG_OTHER : KL_ARG_TEXT;
        PyErr_Clear();
        return 0;
    }
    if (PyComplex_Check(object)) {
        arg->kind = KL_ARG_COMPLEX;
        return 0;
    }
    set_torch_object(object, is_text, arg);
    return 0;
}

/* One bound of a slice. False: it is not an int, so the slice is OTHER. */
static bool
get_bound(PyObject *object, bool *has, int64_t *value)
{
    *has = object != Py_None;
    return !*has || get_int(object, value);
}

/* torch reads the number of an int tensor of no dims, and selects by it; before it is read it is no int. */
static bool
is_selecting(const KlMeta *meta)
{
    return meta->n_dims == 0 && (meta->dtype == KL_DTYPE_INT8 || meta->dtype == KL_DTYPE_INT16 ||
                                 meta->dtype == KL_DTYPE_INT32 || meta->dtype == KL_DTYPE_INT64);
}

static int
convert_item(const Binder *binder, PyObject *object, uint32_t slot, uint32_t entry, KlIndex *item)
{
    *item = (KlIndex){.kind = KL_INDEX_OTHER};
    if (object == Py_None) {
        item->kind = KL_INDEX_NONE;
    } else if (object == Py_Ellipsis) {
        item->kind = KL_INDEX_ELLIPSIS;
    } else if (PyBool_Check(object)) {
        item->kind = KL_INDEX_BOOL;
    } else if (get_int(object, &item->start)) {
        item->kind = KL_INDEX_INT;
    } else if (PySlice_Check(object)) {
        const PySliceObject *slice = (const PySliceObject *)object;
        bool is_plain = get_bound(slice->start, &item->has_start, &item->start) &&
                        get_bound(slice->stop, &item->has_stop, &item->stop) &&
                        get_bound(slice->step, &item->has_step, &item->step);
        item->kind = is_plain ? KL_INDEX_SLICE : KL_INDEX_OTHER;
    } else if (PyList_Check(object)) {
        Py_ssize_t n = PyList_GET_SIZE(object);
        int64_t value = 0;
        bool is_plain = n > 0;
        for (Py_ssize_t i = 0; i < n && is_plain; i++) {
            is_plain = get_int(PyList_GET_ITEM(object, i), &value);
        }
        item->kind = is_plain ? KL_INDEX_INTS : KL_INDEX_OTHER;
        item->stop = n;
    } else {
        const KlMeta *meta = meta_of(binder, object);
        if (meta != NULL && !is_selecting(meta)) {
            item->kind = KL_INDEX_TENSOR;
            item->input = binder->bound->n_inputs;
            item->is_row_range =
                binder->reader->is_row_range(binder->reader->context, object, meta);
            return add_input(binder->bound, meta, object, slot, entry);
        }
    }
    return 0;
}

static int
convert_index(const Binder *binder, PyObject *object, uint32_t slot, KlArg *arg)
{
    bool is_tuple = PyTuple_Check(object);
    Py_ssize_t n = is_tuple ? PyTuple_GET_SIZE(object) : 1;
    KlIndex *items = reserve(binder->bound, n, sizeof(*items));
    if (items == NULL) {
        return -1;
    }
    arg->kind = KL_ARG_INDEX;
    arg->n = (uint32_t)n;
    arg->u.items = items;
    binder->bound->origins[slot].is_sequence = is_tuple;
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *item = is_tuple ? PyTuple_GET_ITEM(object, i) : object;
        if (convert_item(binder, item, slot, (uint32_t)i, &items[i]) < 0) {
            return -1;
        }
    }
    return 0;
}

/* The positional arguments from `first` on, which *word gathers. */
static int
convert_variadic(const Binder *binder, const KlPyWord *word, Py_ssize_t first, Py_ssize_t n,
                 uint32_t slot, KlArg *arg)
{
    PyObject *const *entries = binder->args + first;
    KlPyOrigin *origin = &binder->bound->origins[slot];
    origin->position = n == 0 ? -1 : (int32_t)first;
    int64_t value = 0;
    bool is_single = n == 1 && !get_int(entries[0], &value) && meta_of(binder, entries[0]) == NULL;
    if (is_single) {
        return convert(binder, word, entries[0], slot, arg);
    }
    origin->is_variadic = true;
    return convert_sequence(binder, entries, n, slot, arg);
}

/* The word that a keyword names: by torch's own names first, then by the others. */
static int
find_word(const KlPySignature *signature, PyObject *name, PyObject *const *found)
{
    for (int pass = 0; pass < 2; pass++) {
        for (uint32_t i = 0; i < signature->n_words; i++) {
            PyObject *names = signature->words[i].names;
            bool is_it = pass == 0 ? PyUnicode_Compare(PyTuple_GET_ITEM(names, 0), name) == 0
                                   : PySequence_Contains(names, name) == 1;
            if (is_it && found[i] == NULL) {
                return (int)i;
            }
        }
    }
    return -1;
}

static int
bind(KlPyBound *bound, const KlPySignature *signature, const Binder *binder, Py_ssize_t n_args,
     PyObject *const *names, Py_ssize_t n_names)
{
    PyObject *found[KL_PY_WORDS_MAX] = {NULL};
    Py_ssize_t n_variadic =
        -1; /* positional arguments that *word gathers, the last positional word */
    uint32_t n_positional = signature->n_positional;
    for (uint32_t i = 0; i < signature->n_words; i++) {
        bound->origins[i] = (KlPyOrigin){.position = -1};
    }
    for (Py_ssize_t i = 0; i < n_args && n_variadic < 0; i++) {
        if (i >= (Py_ssize_t)n_positional) {
            return 0;
        }
        found[i] = binder->args[i];
        bound->origins[i].position = (int32_t)i;
        n_variadic = signature->words[i].is_variadic ? n_args - i : -1;
    }
    for (Py_ssize_t k = 0; k < n_names; k++) {
        int i = find_word(signature, names[k], found);
        if (i < 0) {
            return 0;
        }
        found[i] = binder->args[n_args + k];
        bound->origins[i].position = (int32_t)(n_args + k);
    }
    bound->n_args = signature->n_words;
    for (uint32_t i = 0; i < signature->n_words; i++) {
        const KlPyWord *word = &signature->words[i];
        bound->args[i] = (KlArg){.kind = KL_ARG_ABSENT};
        if (found[i] == NULL) {
            if (!word->is_optional) {
                return 0;
            }
            continue;
        }
        if (word->is_out && found[i] != Py_None) {
            return 0;
        }
        int status = 0;
        if (word->is_index) {
            status = convert_index(binder, found[i], i, &bound->args[i]);
        } else if (word->is_variadic && bound->origins[i].position < n_args) {
            status = convert_variadic(binder, word, bound->origins[i].position, n_variadic, i,
                                      &bound->args[i]);
        } else {
            status = convert(binder, word, found[i], i, &bound->args[i]);
        }
        if (status < 0) {
            return -1;
        }
    }
    return 1;
}

int
kl_py_args_bind_dict(KlPyBound *bound, const KlPySignature *signature, const KlPyReader *reader,
                     PyObject *args, PyObject *kwargs)
{
    PyObject *flat[KL_PY_INPUTS_FIXED + KL_PY_WORDS_MAX];
    PyObject *names[KL_PY_WORDS_MAX];
    Py_ssize_t n_args = PyTuple_GET_SIZE(args);
    Py_ssize_t n_names = kwargs == NULL ? 0 : PyDict_GET_SIZE(kwargs);
    Binder binder = {.bound = bound,
                     .reader = reader,
                     .args = n_names == 0 ? PySequence_Fast_ITEMS(args) : flat};
    if (n_names > 0 && (n_args > KL_PY_INPUTS_FIXED || n_names > KL_PY_WORDS_MAX)) {
        return 0;
    }
    for (Py_ssize_t i = 0; n_names > 0 && i < n_args; i++) {
        flat[i] = PyTuple_GET_ITEM(args, i);
    }
    PyObject *name = NULL, *value = NULL;
    Py_ssize_t cursor = 0;
    for (Py_ssize_t k = 0; n_names > 0 && PyDict_Next(kwargs, &cursor, &name, &value); k++) {
        names[k] = name;
        flat[n_args + k] = value;
    }
    return bind(bound, signature, &binder, n_args, names, n_names);
}
