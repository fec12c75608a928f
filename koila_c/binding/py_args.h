/* SPDX-License-Identifier: Apache-2.0 */
/* py_args.h - binds a Python call to a row's signature: PyObjects in, KlArgs out.
 *
 *     KlPyBound bound;
 *     kl_py_bound_init(&bound);
 *     if (kl_py_args_bind_dict(&bound, signature, reader, args, kwargs) == 1) {
 *         KlCall call = {.args = bound.args, .inputs = bound.inputs, ...};
 *     }
 *     kl_py_bound_fini(&bound);                                             always, after the call is read
 *
 * Binding reads no tensor data, runs no user code, and allocates nothing for calls of ordinary size. */
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "alloc.h"
#include "methods.h"
#include "ops.h"

#define KL_PY_WORDS_MAX 24
#define KL_PY_INPUTS_FIXED 16
#define KL_PY_ROOM 96

/* One word of a signature, see the head of ops.def. */
typedef struct KlPyWord {
    PyObject *names; /* tuple of str; torch's name first */
    bool is_optional;
    bool is_variadic; /* *word */
    bool is_index;
    bool is_device;
    bool is_out;
} KlPyWord;

typedef struct KlPySignature {
    PyObject *parsed; /* what parse() returned, which holds the names */
    uint32_t n_words;
    uint32_t n_positional; /* words before `*` */
    KlPyWord words[KL_PY_WORDS_MAX];
} KlPySignature;

/* Reads the tensors among the arguments. The callbacks set no exception. */
typedef struct KlPyReader {
    /* The meta of a tensor, valid until the call is inferred. NULL: no tensor, or one that no KlMeta describes. */
    const KlMeta *(*meta_of)(void *context, PyObject *object);
    /* Whether the values of this index tensor are 0 .. rows - 1, in order. */
    bool (*is_row_range)(void *context, PyObject *object, const KlMeta *meta);
    void *context;
} KlPyReader;

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

typedef struct KlPyBound {
    uint32_t n_args;
    uint32_t n_inputs;
    const KlMeta **inputs;    /* [n_inputs] */
    KlPyInput *input_origins; /* [n_inputs] */
    KlArg args[KL_PY_WORDS_MAX];
    KlPyOrigin origins[KL_PY_WORDS_MAX];
    uint32_t n_inputs_max;
    uint32_t n_room_used;
    KlScratch scratch; /* memory for what exceeds the fixed arrays below */
    const KlMeta *inputs_fixed[KL_PY_INPUTS_FIXED];
    KlPyInput input_origins_fixed[KL_PY_INPUTS_FIXED];
    int64_t room[KL_PY_ROOM]; /* elements of sequences and indices: int64_t, double, KlIndex */
} KlPyBound;

/* Read the words of a row, which parse (of table.py) makes of its `call`. 0 or -1. */
int kl_py_signature_read(KlPySignature *signature, PyObject *parse, const KlRow *row);

void kl_py_bound_init(KlPyBound *bound);
void kl_py_bound_fini(KlPyBound *bound);

/* Bind a call of a tuple and a dict (or NULL), whose values get positions in its order. 1: bound; 0: the call does
 * not fit the signature, so that the row declines it; -1: exception. */
int kl_py_args_bind_dict(KlPyBound *bound, const KlPySignature *signature, const KlPyReader *reader,
                         PyObject *args, PyObject *kwargs);
