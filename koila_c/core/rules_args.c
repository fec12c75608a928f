/* SPDX-License-Identifier: Apache-2.0 */
/* rules_args.c - reads the arguments of a call. If an argument has a kind that the rule does not expect, the call is
 * declined: it may be legal, but the rule cannot describe it. */
#include "rules.h"

bool
kl_rules_is_given(const KlCall *call, uint32_t arg)
{
    return arg < call->n_args && call->args[arg].kind != KL_ARG_ABSENT &&
           call->args[arg].kind != KL_ARG_NONE;
}

void
kl_rules_check(const KlCall *call, bool is_legal)
{
    if (!is_legal && call->unread != NULL && *call->unread == KL_OK) {
        *call->unread = KL_ILLEGAL;
    }
}

void
kl_rules_require(const KlCall *call, bool is_met)
{
    if (!is_met && call->unread != NULL && *call->unread == KL_OK) {
        *call->unread = KL_DECLINED;
    }
}

const KlMeta *
kl_rules_tensor(const KlCall *call, uint32_t arg, int32_t least, int32_t most)
{
    static const KlMeta ones[] = {{.n_dims = 0},
                                  {.n_dims = 1, .shape = {1}},
                                  {.n_dims = 2, .shape = {1, 1}},
                                  {.n_dims = 3, .shape = {1, 1, 1}},
                                  {.n_dims = 4, .shape = {1, 1, 1, 1}},
                                  {.n_dims = 5, .shape = {1, 1, 1, 1, 1}}};
    const KlMeta *meta = kl_rules_input(call, arg);
    bool is_met = meta != NULL && meta->n_dims >= least && meta->n_dims <= most;
    kl_rules_require(call, is_met);
    return is_met ? meta : &ones[least];
}

const KlMeta *
kl_rules_optional(const KlCall *call, uint32_t arg, int32_t least, int32_t most)
{
    return kl_rules_is_given(call, arg) ? kl_rules_tensor(call, arg, least, most) : NULL;
}

/* Return an argument of one of these kinds, bits by KlArgKind; NULL if it is absent or None. Decline other kinds. */
static const KlArg *
read(const KlCall *call, uint32_t arg, uint32_t kinds)
{
    const KlArg *given = kl_rules_is_given(call, arg) ? &call->args[arg] : NULL;
    bool is_of_kind = given != NULL && (kinds >> given->kind & 1) != 0;
    kl_rules_require(call, given == NULL || is_of_kind);
    return is_of_kind ? given : NULL;
}

int64_t
kl_rules_int(const KlCall *call, uint32_t arg, int64_t fallback)
{
    const KlArg *given = read(call, arg, 1 << KL_ARG_INT | 1 << KL_ARG_BOOL);
    return given != NULL ? given->u.i : fallback;
}

bool
kl_rules_bool(const KlCall *call, uint32_t arg, bool fallback)
{
    return kl_rules_int(call, arg, fallback) != 0;
}

double
kl_rules_float(const KlCall *call, uint32_t arg, double fallback)
{
    const KlArg *given = read(call, arg, 1 << KL_ARG_INT | 1 << KL_ARG_BOOL | 1 << KL_ARG_FLOAT);
    return given == NULL ? fallback : given->kind == KL_ARG_FLOAT ? given->u.f : (double)given->u.i;
}

const char *
kl_rules_text(const KlCall *call, uint32_t arg, const char *fallback)
{
    const KlArg *given = read(call, arg, 1 << KL_ARG_TEXT);
    return given != NULL ? given->u.text : fallback;
}

const int64_t *
kl_rules_ints(const KlCall *call, uint32_t arg, uint32_t *n)
{
    static const int64_t absent = 0;
    const KlArg *given = read(call, arg, 1 << KL_ARG_INT | 1 << KL_ARG_INTS);
    bool is_one = given != NULL && given->kind == KL_ARG_INT;
    *n = is_one ? 1 : given != NULL ? given->n : 0;
    return is_one ? &given->u.i : given != NULL ? given->u.ints : &absent;
}

int32_t
kl_rules_wrap(const KlCall *call, int64_t dim, int32_t n_dims)
{
    int64_t n = n_dims == 0 ? 1 : n_dims;
    bool is_legal = dim >= -n && dim < n;
    kl_rules_check(call, is_legal);
    return is_legal ? (int32_t)(dim < 0 ? dim + n : dim) : 0;
}

int32_t
kl_rules_dim(const KlCall *call, uint32_t arg, int64_t fallback, int32_t n_dims)
{
    return kl_rules_wrap(call, kl_rules_int(call, arg, fallback), n_dims);
}

uint32_t
kl_rules_dims(const KlCall *call, uint32_t arg, int32_t n_dims)
{
    uint32_t n = 0;
    const int64_t *ints = kl_rules_ints(call, arg, &n);
    uint32_t found = n == 0 ? (UINT32_C(1) << n_dims) - 1 : 0;
    for (uint32_t i = 0; i < n; i++) {
        int32_t dim = kl_rules_wrap(call, ints[i], n_dims);
        kl_rules_check(call, (found >> dim & 1) == 0);
        found |= UINT32_C(1) << dim;
    }
    return found;
}

const KlArg *
kl_rules_find(const KlCall *call, KlArgKind kind)
{
    uint32_t i = 0;
    while (i < call->n_args && call->args[i].kind != kind) {
        i++;
    }
    return i < call->n_args ? &call->args[i] : NULL;
}

KlDtype
kl_rules_dtype(const KlCall *call, KlDtype fallback)
{
    const KlArg *found = kl_rules_find(call, KL_ARG_DTYPE);
    return found != NULL ? found->u.dtype : fallback;
}
