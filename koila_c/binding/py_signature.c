/* SPDX-License-Identifier: Apache-2.0 */
/* py_signature.c - parses the `call` text of a row into words, and looks up the torch objects that the binder must
 * recognise; both once */
#include "py_args.h"

#include <string.h>

#include "alloc.h"

/* numpy's names for arguments, which torch accepts too (torch/csrc/utils/python_arg_parser.cpp). */
static const struct {
    const char *name;
    const char *other;
} numpy_names[] = {
    {"dim", "axis"}, {"keepdim", "keepdims"}, {"input", "x"},
    {"input", "a"},  {"input", "x1"},         {"other", "x2"},
};

static int
add_name(KlPyWord *word, const char *text, size_t length)
{
    if (word->n_names == KL_PY_NAMES_MAX) {
        PyErr_SetString(PyExc_SystemError, "too many names for a word in a row's call");
        return -1;
    }
    PyObject *name = PyUnicode_FromStringAndSize(text, (Py_ssize_t)length);
    if (name == NULL) {
        return -1;
    }
    PyUnicode_InternInPlace(&name);
    word->names[word->n_names++] = name;
    return 0;
}

static int
add_names(KlPyWord *word, const char *text, size_t length)
{
    const char *end = text + length;
    while (text < end) {
        const char *bar = memchr(text, '|', (size_t)(end - text));
        const char *stop = bar == NULL ? end : bar;
        size_t n = (size_t)(stop - text);
        if (add_name(word, text, n) < 0) {
            return -1;
        }
        for (size_t i = 0; i < sizeof(numpy_names) / sizeof(numpy_names[0]); i++) {
            if (strlen(numpy_names[i].name) == n && memcmp(numpy_names[i].name, text, n) == 0 &&
                add_name(word, numpy_names[i].other, strlen(numpy_names[i].other)) < 0) {
                return -1;
            }
        }
        text = bar == NULL ? end : bar + 1;
    }
    return 0;
}

static bool
is_text(const char *text, size_t length, const char *wanted)
{
    return strlen(wanted) == length && memcmp(text, wanted, length) == 0;
}

static int
set_annotation(KlPyWord *word, const char *text, size_t length)
{
    word->is_size = is_text(text, length, "size");
    word->is_rows = is_text(text, length, "rows");
    word->is_index = is_text(text, length, "index");
    word->is_device = is_text(text, length, "device");
    word->is_out = is_text(text, length, "out");
    if (!word->is_size && !word->is_rows && !word->is_index && !word->is_device && !word->is_out) {
        PyErr_Format(PyExc_SystemError, "a row's call has the unknown annotation '%.20s'", text);
        return -1;
    }
    return 0;
}

/* Parse one word, such as "*shape|size:size=None". */
static int
parse_word(KlPyWord *word, const char *text, size_t length)
{
    const char *end = text + length;
    const char *equals = memchr(text, '=', length);
    word->is_optional = equals != NULL;
    end = equals == NULL ? end : equals;
    if (*text == '*') {
        word->is_variadic = true;
        word->is_optional = true;
        text++;
    }
    const char *colon = memchr(text, ':', (size_t)(end - text));
    const char *names_end = colon == NULL ? end : colon;
    if (names_end == text) {
        PyErr_SetString(PyExc_SystemError, "a row's call has a word without a name");
        return -1;
    }
    if (add_names(word, text, (size_t)(names_end - text)) < 0) {
        return -1;
    }
    return colon == NULL ? 0 : set_annotation(word, colon + 1, (size_t)(end - colon - 1));
}

KlPySignature *
kl_py_signature_new(const char *call)
{
    KlPySignature *signature = kl_alloc_zeroed(1, sizeof(*signature));
    if (signature == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    bool has_star = false;
    const char *text = call;
    while (*text != '\0') {
        size_t length = strcspn(text, ",");
        size_t start = strspn(text, " ");
        if (length - start == 1 && text[start] == '*') {
            has_star = true;
        } else {
            if (signature->n_words == KL_PY_WORDS_MAX) {
                PyErr_Format(PyExc_SystemError, "too many words in a row's call: %s", call);
                goto error;
            }
            if (parse_word(&signature->words[signature->n_words], text + start, length - start) <
                0) {
                goto error;
            }
            signature->n_words++;
            signature->n_positional += !has_star;
        }
        text += length;
        text += *text == ',' ? 1 : 0;
    }
    return signature;
error:
    if (signature->n_words < KL_PY_WORDS_MAX) {
        signature->n_words++; /* the word that failed may hold names to free */
    }
    kl_py_signature_free(signature);
    return NULL;
}

void
kl_py_signature_free(KlPySignature *signature)
{
    if (signature == NULL) {
        return;
    }
    for (uint32_t i = 0; i < signature->n_words; i++) {
        for (uint8_t k = 0; k < signature->words[i].n_names; k++) {
            Py_DECREF(signature->words[i].names[k]);
        }
    }
    kl_alloc_free(signature);
}

int
kl_py_types_init(KlPyTypes *types)
{
    static const char *const format_names[] = {
        [KL_FORMAT_CONTIGUOUS] = "contiguous_format",
        [KL_FORMAT_PRESERVE] = "preserve_format",
        [KL_FORMAT_CHANNELS_LAST] = "channels_last",
        [KL_FORMAT_CHANNELS_LAST_3D] = "channels_last_3d",
    };
    PyObject *torch = PyImport_ImportModule("torch");
    if (torch == NULL) {
        return -1;
    }
    types->dtype_type = (PyTypeObject *)PyObject_GetAttrString(torch, "dtype");
    types->device_type = (PyTypeObject *)PyObject_GetAttrString(torch, "device");
    types->format_type = (PyTypeObject *)PyObject_GetAttrString(torch, "memory_format");
    bool is_found =
        types->dtype_type != NULL && types->device_type != NULL && types->format_type != NULL;
    for (int i = 0; i < KL_N_DTYPES && is_found; i++) {
        types->dtypes[i] = PyObject_GetAttrString(torch, kl_meta_dtype_name((KlDtype)i));
        is_found = types->dtypes[i] != NULL;
    }
    for (int i = 0; i < 4 && is_found; i++) {
        types->formats[i] = PyObject_GetAttrString(torch, format_names[i]);
        is_found = types->formats[i] != NULL;
    }
    Py_DECREF(torch);
    if (!is_found) {
        kl_py_types_fini(types);
        return -1;
    }
    return 0;
}

void
kl_py_types_fini(KlPyTypes *types)
{
    Py_CLEAR(types->dtype_type);
    Py_CLEAR(types->device_type);
    Py_CLEAR(types->format_type);
    for (int i = 0; i < KL_N_DTYPES; i++) {
        Py_CLEAR(types->dtypes[i]);
    }
    for (int i = 0; i < 4; i++) {
        Py_CLEAR(types->formats[i]);
    }
}
