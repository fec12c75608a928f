/* SPDX-License-Identifier: Apache-2.0 */
/* py_args.h - binds a Python call to a row's signature: PyObjects in, KlArgs out.
 *
 *     KlPySignature *signature = kl_py_signature_new(row->call);            once per row
 *     KlPyBound bound;
 *     kl_py_bound_init(&bound);
 *     if (kl_py_args_bind_dict(&bound, signature, types, context, args, kwargs) == 1) {
 *         KlCall call = {.args = bound.args, .inputs = bound.inputs, ...};
 *     }
 *     kl_py_bound_fini(&bound);                                             always, after the call is read
 *
 * Binding reads no tensor data, runs no user code, and allocates nothing for calls of ordinary size. */
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "methods.h"
#include "ops.h"

#define KL_PY_WORDS_MAX 24
#define KL_PY_INPUTS_FIXED 16
#define KL_PY_INTS_FIXED 32
#define KL_PY_ITEMS_FIXED 10
#define KL_PY_FLOATS_FIXED 4
#define KL_PY_NAMES_MAX 6

/* One word of a signature, see the head of ops.def. */
typedef struct KlPyWord {
    PyObject *names[KL_PY_NAMES_MAX]; /* [n_names] interned; torch's name first */
    uint8_t n_names;
    bool is_optional;
    bool is_variadic; /* *word */
    bool is_index;
    bool is_device;
    bool is_out;
    bool
        is_size; /* :size, for readers of the signature: binding ignores it, the rules of the op use it */
    bool is_rows; /* :rows, likewise */
} KlPyWord;

typedef struct KlPySignature {
    uint32_t n_words;
    uint32_t n_positional; /* words before `*` */
    KlPyWord words[KL_PY_WORDS_MAX];
} KlPySignature;

/* What binding must know of torch's objects; the same for every call and thread. The callbacks get the `context`
 * that was given to kl_py_args_bind_dict, and set no exception. */
typedef struct KlPyTypes {
    PyTypeObject *dtype_type, *device_type, *format_type;
    PyObject *dtypes[KL_N_DTYPES];
    PyObject *formats[4]; /* by KlFormat */
    /* The meta of a tensor, valid until the call is inferred. NULL: no tensor, or one that no KlMeta describes. */
    const KlMeta *(*meta_of)(void *context, PyObject *object);
    /* Index of a torch.device or of its name (str); -1: not known. */
    int (*device_of)(void *context, PyObject *object);
    /* Whether the values of this index tensor are 0 .. rows - 1, in order. */
    bool (*is_row_range)(void *context, PyObject *object, const KlMeta *meta);
} KlPyTypes;

/* Where an argument came from. `position` counts as in a vectorcall: positional arguments, then the values of
 * keywords in their order; -1: the argument is absent. */
typedef struct KlPyOrigin {
    int32_t position;
    bool is_variadic; /* entry e of the word is the argument at position + e */
    bool is_sequence; /* entry e is item e of the argument; neither: the argument is entry 0 */
} KlPyOrigin;

/* Where a tensor input came from: it is entry `entry` of args[arg]. */
typedef struct KlPyInput {
    PyObject *object; /* borrowed from the call */
    uint32_t arg;
    uint32_t entry;
} KlPyInput;

typedef struct KlPyBlock KlPyBlock;

typedef struct KlPyBound {
    uint32_t n_args;
    uint32_t n_inputs;
    const KlMeta **inputs;    /* [n_inputs] */
    KlPyInput *input_origins; /* [n_inputs] */
    KlArg args[KL_PY_WORDS_MAX];
    KlPyOrigin origins[KL_PY_WORDS_MAX];
    uint32_t n_inputs_max;
    uint32_t n_ints_used;
    uint32_t n_items_used;
    uint32_t n_floats_used;
    KlPyBlock *blocks; /* memory for what exceeds the fixed arrays below */
    const KlMeta *inputs_fixed[KL_PY_INPUTS_FIXED];
    KlPyInput input_origins_fixed[KL_PY_INPUTS_FIXED];
    int64_t ints_fixed[KL_PY_INTS_FIXED];
    KlIndex items_fixed[KL_PY_ITEMS_FIXED];
    double floats_fixed[KL_PY_FLOATS_FIXED];
} KlPyBound;

/* Parse a row's `call`. Returns a new signature, or NULL with an exception if the text is misspelt. */
KlPySignature *kl_py_signature_new(const char *call);
void kl_py_signature_free(KlPySignature *signature);

/* Look up torch's dtypes and formats; the caller fills in the callbacks. 0, or -1 with an exception. */
int kl_py_types_init(KlPyTypes *types);
void kl_py_types_fini(KlPyTypes *types);

void kl_py_bound_init(KlPyBound *bound);
void kl_py_bound_fini(KlPyBound *bound);

/* Bind a call of a tuple and a dict (or NULL), whose values get positions in its order. 1: bound; 0: the call does
 * not fit the signature, so that the row declines it; -1: exception. */
int kl_py_args_bind_dict(KlPyBound *bound, const KlPySignature *signature, const KlPyTypes *types,
                         void *context, PyObject *args, PyObject *kwargs);
