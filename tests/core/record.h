/* SPDX-License-Identifier: Apache-2.0 */
/* record.h - record a program as the binding does: infer a call, find what it saves, append it.
 *
 * Every request for memory may be refused once (kl_alloc_fail_after): then nothing of the tape may have
 * changed, and the same request must be granted the second time. */
#pragma once

#include <string.h>

#include "alloc.h"
#include "check.h"
#include "stage.h"

#define ARGS_MAX 16

typedef struct Program {
    KlTape tape;
    KlInferred inferred;
    KlNodeId node;    /* the last one */
    bool is_grad_off; /* as under torch.no_grad() */
    bool was_refused; /* a request for memory */
} Program;

static inline void
program_fini(Program *program)
{
    kl_tape_fini(&program->tape);
    kl_infer_fini(&program->inferred);
}

/* -- metas ------------------------------------------------------------------------------------------- */

static inline KlMeta
tensor(KlDtype dtype, int32_t n_dims, const int64_t *shape)
{
    KlMeta meta = {.dtype = dtype, .n_dims = n_dims, .place = KL_PLACE_WHOLE};
    memcpy(meta.shape, shape, (size_t)n_dims * sizeof(*shape));
    kl_meta_set_contiguous(&meta);
    return meta;
}

/* TENSOR(FLOAT32, 8, 4) */
#define SIZES(...) ((const int64_t[]){__VA_ARGS__})
#define TENSOR(name, ...)                                                                          \
    tensor(KL_DTYPE_##name, (int32_t)(sizeof(SIZES(__VA_ARGS__)) / sizeof(int64_t)),               \
           SIZES(__VA_ARGS__))

static inline KlMeta
by_rows(KlAxisId axis, KlMeta meta)
{
    meta.place = (KlPlace){.axis = axis, .dim = 0, .outer = 1, .inner = 1};
    return meta;
}

static inline KlMeta
with_grad(KlMeta meta)
{
    meta.requires_grad = true;
    return meta;
}

/* -- calls ------------------------------------------------------------------------------------------- */

#define VALUE(number) ((KlArg){.kind = KL_ARG_VALUE, .input = (number)})
#define VALUES(number, length) ((KlArg){.kind = KL_ARG_VALUES, .input = (number), .n = (length)})
#define INT(number) ((KlArg){.kind = KL_ARG_INT, .u.i = (number)})
#define INTS(...)                                                                                  \
    ((KlArg){.kind = KL_ARG_INTS,                                                                  \
             .n = sizeof(SIZES(__VA_ARGS__)) / sizeof(int64_t),                                    \
             .u.ints = SIZES(__VA_ARGS__)})
#define TEXT(words) ((KlArg){.kind = KL_ARG_TEXT, .u.text = (words)})
#define NONE ((KlArg){.kind = KL_ARG_NONE})

/* A call by the row of that name, with what it holds: `bind` fills it. */
typedef struct Bound {
    KlCall call;
    KlArg args[ARGS_MAX];
    const KlMeta *inputs[ARGS_MAX];
} Bound;

static inline uint32_t
n_words(const char *signature)
{
    uint32_t n = 1;
    for (const char *at = signature; *at != '\0'; at++) {
        n += *at == ',';
        n -= *at == '*' && at[1] == ',';
    }
    return n;
}

/* The words of the call are `args`, the rest is absent. */
static inline void
bind(Bound *bound, const char *name, uint32_t n_args, const KlArg *args, uint32_t n_inputs,
     const KlMeta *const *inputs)
{
    *bound = (Bound){.call = {.row = kl_ops_find(name), .n_inputs = n_inputs}};
    CHECK(bound->call.row != NULL);
    memcpy(bound->args, args, n_args * sizeof(*args));
    memcpy(bound->inputs, inputs, n_inputs * sizeof(*inputs));
    bound->call.args = bound->args;
    bound->call.inputs = bound->inputs;
    bound->call.n_args = n_words(bound->call.row->call);
    bound->call.default_dtype = KL_DTYPE_FLOAT32;
    bound->call.is_grad_enabled = true;
}

/* Whether memory was refused for the first time; then all is as it was in `before`, and no more is
 * refused from now on. */
static inline bool
is_refused(Program *program, KlStatus status, const KlTape *before)
{
    const KlTape *tape = &program->tape;
    if (status == KL_OK || program->was_refused) {
        CHECK(status == KL_OK);
        return false;
    }
    CHECK(status == KL_ERROR_MEMORY);
    CHECK(tape->n_nodes == before->n_nodes && tape->n_values == before->n_values);
    CHECK(tape->n_inputs == before->n_inputs && tape->n_rewrites == before->n_rewrites);
    CHECK(tape->n_storages == before->n_storages && tape->n_axes == before->n_axes);
    CHECK(tape->n_done == before->n_done);
    kl_alloc_fail_after(-1);
    program->was_refused = true;
    return true;
}

static inline KlAxisId
axis(Program *program, int64_t rows)
{
    const KlTape before = program->tape;
    KlAxisId id = KL_ID_NONE;
    KlStatus status = kl_tape_axis(&program->tape, rows, &id);
    if (is_refused(program, status, &before)) {
        CHECK(id == KL_ID_NONE);
        (void)is_refused(program, kl_tape_axis(&program->tape, rows, &id), NULL);
    }
    return id;
}

static inline KlValueId
leaf(Program *program, KlMeta meta)
{
    const KlTape before = program->tape;
    KlValueId id = KL_ID_NONE;
    KlStatus status = kl_tape_leaf(&program->tape, &meta, &id);
    if (is_refused(program, status, &before)) {
        CHECK(id == KL_ID_NONE);
        (void)is_refused(program, kl_tape_leaf(&program->tape, &meta, &id), NULL);
    }
    return id;
}

/* Infer and append a bound call once. */
static inline KlStatus
append_call(Program *program, const KlCall *call, KlRecord *record)
{
    KlStatus status = kl_infer_call(call, &program->inferred);
    if (status != KL_OK) {
        return status;
    }
    const KlEffects effects = program->inferred.effects;
    record->inferred = &program->inferred;
    record->node.is_random = program->inferred.is_random;
    record->node.writes = call->row->kind == KL_ROW_INPLACE ? effects : 0;
    record->node.leaf_writes = call->row->kind == KL_ROW_INPLACE ? 0 : effects;
    kl_infer_saves(call, &program->inferred, &record->node.saves);
    return kl_tape_append(&program->tape, record, &program->node);
}

/* Record a call; its first output. */
static inline KlValueId
record(Program *program, const char *name, uint32_t n_args, const KlArg *args, uint32_t n_inputs,
       const KlValueId *ids)
{
    const KlMeta *inputs[ARGS_MAX] = {NULL};
    for (uint32_t i = 0; i < n_inputs; i++) {
        inputs[i] = &program->tape.values[ids[i]].meta;
    }
    Bound bound;
    bind(&bound, name, n_args, args, n_inputs, inputs);
    bound.call.is_grad_enabled = !program->is_grad_off;
    bound.call.axis_rows = program->tape.axis_rows;
    bound.call.n_axes = (uint32_t)program->tape.n_axes;
    KlRecord wanted = {.node = {.row = bound.call.row,
                                .n_inputs = n_inputs,
                                .is_grad_enabled = !program->is_grad_off,
                                .refresh_of = KL_ID_NONE},
                       .inputs = ids};
    const KlTape before = program->tape;
    if (is_refused(program, append_call(program, &bound.call, &wanted), &before)) {
        for (uint32_t i = 0; i < n_inputs; i++) { /* the values may have moved */
            bound.inputs[i] = &program->tape.values[ids[i]].meta;
        }
        (void)is_refused(program, append_call(program, &bound.call, &wanted), NULL);
    }
    return program->tape.nodes[program->node].first_out;
}

#define IDS(...) ((const KlValueId[]){__VA_ARGS__})
#define ARGS(...) ((const KlArg[]){__VA_ARGS__})
#define N_ARGS(...) (sizeof(ARGS(__VA_ARGS__)) / sizeof(KlArg))

/* One tensor, and what else the call is given: CALL1(p, "sum", x, NONE, INT(1)). */
#define CALL1(program, name, x, ...)                                                               \
    record(program, name, N_ARGS(VALUE(0), __VA_ARGS__), ARGS(VALUE(0), __VA_ARGS__), 1, IDS(x))
#define CALL2(program, name, x, y, ...)                                                            \
    record(program, name, N_ARGS(VALUE(0), VALUE(1), __VA_ARGS__),                                 \
           ARGS(VALUE(0), VALUE(1), __VA_ARGS__), 2, IDS(x, y))

static inline KlValueId
call1(Program *program, const char *name, KlValueId x)
{
    return record(program, name, 1, ARGS(VALUE(0)), 1, IDS(x));
}

static inline KlValueId
call2(Program *program, const char *name, KlValueId x, KlValueId y)
{
    return record(program, name, 2, ARGS(VALUE(0), VALUE(1)), 2, IDS(x, y));
}

/* A call without a row: it runs once. `ids` may hold KL_ID_NONE. */
static inline KlValueId
unknown(Program *program, KlMeta meta, uint32_t n_inputs, const KlValueId *ids)
{
    KlInferred inferred = {.outs = &meta, .n_outs = 1};
    inferred.split = (KlSplit){.mode = KL_MODE_ONCE, .axis = KL_ID_NONE};
    KlRecord wanted = {.node = {.n_inputs = n_inputs, .refresh_of = KL_ID_NONE},
                       .inputs = ids,
                       .inferred = &inferred};
    CHECK(kl_tape_append(&program->tape, &wanted, &program->node) == KL_OK);
    return program->tape.nodes[program->node].first_out;
}

/* -- what most programs start with ------------------------------------------------------------------- */

static inline KlNodeId
node_of(const Program *program, KlValueId value)
{
    return program->tape.values[value].node;
}

/* A batch of 8 rows, a layer, its output. */
typedef struct Start {
    KlAxisId batch;
    KlValueId x, labels, w, h;
} Start;

static inline Start
start(Program *p)
{
    Start s = {.batch = axis(p, 8)};
    s.x = leaf(p, by_rows(s.batch, TENSOR(FLOAT32, 8, 4)));
    s.labels = leaf(p, by_rows(s.batch, TENSOR(INT64, 8)));
    s.w = leaf(p, with_grad(TENSOR(FLOAT32, 3, 4)));
    s.h = call2(p, "linear", s.x, s.w);
    return s;
}

/* -- staging ----------------------------------------------------------------------------------------- */

/* Stage for `wanted`, and for its gradient if it is a root. The caller owns `stages`. */
static inline void
stage(Program *program, KlValueId wanted, bool is_root, KlStages *stages)
{
    const KlGoal goal = {
        .wanted = &wanted, .n_wanted = 1, .roots = &wanted, .n_roots = is_root ? 1 : 0};
    const KlTape before = program->tape;
    KlStatus status = kl_stage_build(&program->tape, &goal, stages);
    if (is_refused(program, status, &before)) {
        CHECK(stages->node_stage == NULL && stages->imports == NULL && stages->n_nodes == 0);
        status = kl_stage_build(&program->tape, &goal, stages);
        (void)is_refused(program, status, NULL);
    }
}
