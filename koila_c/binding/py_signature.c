/* SPDX-License-Identifier: Apache-2.0 */
/* py_signature.c - parses the `call` text of a row into words, once */
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

static bool
is_text(const char *text, size_t length, const char *wanted)
{
    return strlen(wanted) == length && memcmp(text, wanted, length) == 0;
}

static int
add_names(KlPyWord *word, const char *text, size_t length)
{
    const char *end = text + length;
    for (size_t n = 0; text < end; text += n + 1) {
        n = strcspn(text, "|:=,");
        if (add_name(word, text, n) < 0) {
            return -1;
        }
        for (size_t i = 0; i < sizeof(numpy_names) / sizeof(numpy_names[0]); i++) {
            if (is_text(text, n, numpy_names[i].name) &&
                add_name(word, numpy_names[i].other, strlen(numpy_names[i].other)) < 0) {
                return -1;
            }
        }
    }
    return 0;
}

static int
set_annotation(KlPyWord *word, const char *text, size_t length)
{
    /* These two only say to readers of the signature what the rules of the op make of the argument. */
    bool is_for_rules = is_text(text, length, "size") || is_text(text, length, "rows");
    word->is_index = is_text(text, length, "index");
    word->is_device = is_text(text, length, "device");
    word->is_out = is_text(text, length, "out");
    if (!is_for_rules && !word->is_index && !word->is_device && !word->is_out) {
        PyErr_Format(PyExc_SystemError, "a row's call has the unknown annotation '%.20s'", text);
        return -1;
    }
    return 0;
}

/* Parse one word, such as "*shape|size:size=None". */
static int
parse_word(KlPyWord *word, const char *text)
{
    word->is_variadic = *text == '*';
    text += word->is_variadic ? 1 : 0;
    size_t n_names = strcspn(text, ":=,"), n = strcspn(text, "=,"); /* n: with the annotation */
    word->is_optional = word->is_variadic || text[n] == '=';
    if (n_names == 0) {
        PyErr_SetString(PyExc_SystemError, "a row's call has a word without a name");
        return -1;
    }
    if (add_names(word, text, n_names) < 0) {
        return -1;
    }
    return n_names == n ? 0 : set_annotation(word, text + n_names + 1, n - n_names - 1);
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
            if (parse_word(&signature->words[signature->n_words], text + start) < 0) {
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
