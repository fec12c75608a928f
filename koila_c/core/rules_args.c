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

KlStatus
kl_rules_int(const KlCall *call, uint32_t arg, int64_t fallback, int64_t *value)
{
    if (!kl_rules_is_given(call, arg)) {
        *value = fallback;
        return KL_OK;
    }
    const KlArg *given = &call->args[arg];
    if (given->kind != KL_ARG_INT && given->kind != KL_ARG_BOOL) {
        return KL_DECLINED;
    }
    *value = given->u.i;
    return KL_OK;
}

KlStatus
kl_rules_bool(const KlCall *call, uint32_t arg, bool fallback, bool *value)
{
    int64_t entry = 0;
    KlStatus status = kl_rules_int(call, arg, fallback, &entry);
    *value = status == KL_OK ? entry != 0 : *value;
    return status;
}

KlStatus
kl_rules_float(const KlCall *call, uint32_t arg, double fallback, double *value)
{
    if (kl_rules_is_given(call, arg) && call->args[arg].kind == KL_ARG_FLOAT) {
        *value = call->args[arg].u.f;
        return KL_OK;
    }
    int64_t entry = 0;
    if (!kl_rules_is_given(call, arg)) {
        *value = fallback;
        return KL_OK;
    }
    KlStatus status = kl_rules_int(call, arg, 0, &entry);
    if (status == KL_OK) {
        *value = (double)entry;
    }
    return status;
}

KlStatus
kl_rules_text(const KlCall *call, uint32_t arg, const char *fallback, const char **value)
{
    if (!kl_rules_is_given(call, arg)) {
        *value = fallback;
        return KL_OK;
    }
    if (call->args[arg].kind != KL_ARG_TEXT) {
        return KL_DECLINED;
    }
    *value = call->args[arg].u.text;
    return KL_OK;
}

KlStatus
kl_rules_ints(const KlCall *call, uint32_t arg, const int64_t **ints, uint32_t *n)
{
    static const int64_t absent = 0;
    const KlArg *given = kl_rules_is_given(call, arg) ? &call->args[arg] : NULL;
    bool is_one = given != NULL && given->kind == KL_ARG_INT;
    bool is_tuple = given != NULL && given->kind == KL_ARG_INTS;
    *ints = is_one ? &given->u.i : is_tuple ? given->u.ints : &absent;
    *n = is_one ? 1 : is_tuple ? given->n : 0;
    return given == NULL || is_one || is_tuple ? KL_OK : KL_DECLINED;
}

KlStatus
kl_rules_wrap(int64_t dim, int32_t n_dims, int32_t *wrapped, KlError *error)
{
    int64_t n = n_dims == 0 ? 1 : n_dims;
    if (dim < -n || dim >= n) {
        return kl_error_set(error, KL_ERROR_ARGUMENT, "dim %lld is not in the range [%lld, %lld]",
                            (long long)dim, (long long)-n, (long long)(n - 1));
    }
    *wrapped = (int32_t)(dim < 0 ? dim + n : dim);
    return KL_OK;
}

KlStatus
kl_rules_dim(const KlCall *call, uint32_t arg, int64_t fallback, int32_t n_dims, int32_t *dim,
             KlError *error)
{
    int64_t given = 0;
    KlStatus status = kl_rules_int(call, arg, fallback, &given);
    return status != KL_OK ? status : kl_rules_wrap(given, n_dims, dim, error);
}

int32_t
kl_rules_legal_dim(const KlCall *call, uint32_t arg, int64_t fallback, int32_t n_dims)
{
    int32_t dim = 0;
    KlError error;
    (void)kl_rules_dim(call, arg, fallback, n_dims, &dim, &error);
    return dim;
}

KlStatus
kl_rules_dims(const KlCall *call, uint32_t arg, int32_t n_dims, uint32_t *dims, KlError *error)
{
    const int64_t *ints = NULL;
    uint32_t n = 0;
    KlStatus status = kl_rules_ints(call, arg, &ints, &n);
    if (status != KL_OK) {
        return status;
    }
    uint32_t found = n == 0 ? (UINT32_C(1) << n_dims) - 1 : 0;
    for (uint32_t i = 0; i < n; i++) {
        int32_t dim = 0;
        status = kl_rules_wrap(ints[i], n_dims, &dim, error);
        if (status != KL_OK) {
            return status;
        }
        if ((found >> dim & 1) != 0) {
            return kl_error_set(error, KL_ERROR_ARGUMENT, "dim %d appears twice", (int)dim);
        }
        found |= UINT32_C(1) << dim;
    }
    *dims = found;
    return KL_OK;
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
