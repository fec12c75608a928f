/* SPDX-License-Identifier: Apache-2.0 */
/* py_twister.c - advances states of torch's CPU generator, a Mersenne Twister, past draws. Their layout is torch's
 * own: bytes that do not look like a state are refused, and callers compare with torch once. */
#include "py_state.h"

#include "twister.h"

/* The first fields of the state that torch.Generator.get_state() returns. */
typedef struct State {
    uint64_t seed;
    int32_t n_left; /* words until the next KL_TWISTER_N are made, counting the first of those */
    int32_t is_seeded;
    uint64_t n_used;
    uint64_t words[KL_TWISTER_N];
} State;

/* Whether the fields are those of a state. A fresh state has made no words, so it has used none. */
static bool
is_legal(const State *state)
{
    return state->n_left >= 1 && state->n_left <= KL_TWISTER_N && state->n_used <= KL_TWISTER_N &&
           ((uint64_t)state->n_left + state->n_used == KL_TWISTER_N + 1 ||
            (state->n_left == 1 && state->n_used == 0));
}

KL_DEFINE(skip_words, args)
{
    PyObject *before = NULL;
    unsigned long long n = 0;
    State state;
    if (!PyArg_ParseTuple(args, "SK:skip_words", &before, &n)) {
        return NULL;
    }
    Py_ssize_t n_bytes = PyBytes_GET_SIZE(before);
    bool is_long = n_bytes >= (Py_ssize_t)sizeof(state);
    if (is_long) {
        memcpy(&state, PyBytes_AS_STRING(before), sizeof(state));
    }
    if (!is_long || !is_legal(&state)) {
        return PyErr_Format(PyExc_ValueError,
                            "skip_words: not a state of torch's generator on the CPU");
    }
    PyObject *after =
        n > 0 ? PyBytes_FromStringAndSize(PyBytes_AS_STRING(before), n_bytes) : Py_NewRef(before);
    if (after == NULL || n == 0) {
        return after;
    }
    KlTwister twister = {.n_used = KL_TWISTER_N - (uint32_t)(state.n_left - 1)};
    for (int i = 0; i < KL_TWISTER_N; i++) {
        twister.words[i] = (uint32_t)state.words[i];
    }
    kl_twister_skip(&twister, n);
    for (int i = 0; i < KL_TWISTER_N; i++) {
        state.words[i] = twister.words[i];
    }
    state.n_used = twister.n_used;
    state.n_left = KL_TWISTER_N + 1 - (int32_t)twister.n_used;
    memcpy(PyBytes_AS_STRING(after), &state, sizeof(state));
    return after;
}
