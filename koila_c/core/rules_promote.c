/* SPDX-License-Identifier: Apache-2.0 */
/* rules_promote.c - torch's type promotion: tensors have priority over 0-dim tensors, and these over numbers. */
#include "rules.h"

bool
kl_rules_is_integral(KlDtype dtype)
{
    return dtype <= KL_DTYPE_INT64;
}

KlDtype
kl_rules_promote(KlDtype left, KlDtype right)
{
    KlDtype low = left < right ? left : right;
    KlDtype high = left < right ? right : left;
    return low == KL_DTYPE_UINT8 && high == KL_DTYPE_INT8          ? KL_DTYPE_INT16
           : low == KL_DTYPE_FLOAT16 && high == KL_DTYPE_BFLOAT16  ? KL_DTYPE_FLOAT32
           : low == KL_DTYPE_FLOAT64 && high == KL_DTYPE_COMPLEX64 ? KL_DTYPE_COMPLEX128
                                                                   : high;
}

bool
kl_rules_can_cast(KlDtype from, KlDtype to)
{
    bool is_part_lost = kl_meta_dtype_is_complex(from) && !kl_meta_dtype_is_complex(to);
    bool is_fraction_lost = kl_meta_dtype_is_float(from) && kl_rules_is_integral(to);
    return !is_part_lost && !is_fraction_lost && (from == KL_DTYPE_BOOL || to != KL_DTYPE_BOOL);
}

/* Find the dtype of a number for promotion; false: it has none. */
static bool
number_dtype(const KlCall *call, const KlArg *arg, KlDtype *dtype)
{
    KlDtype real = call->default_dtype;
    *dtype = arg->kind == KL_ARG_BOOL    ? KL_DTYPE_BOOL
             : arg->kind == KL_ARG_INT   ? KL_DTYPE_INT64
             : arg->kind == KL_ARG_FLOAT ? real
             : real == KL_DTYPE_FLOAT64  ? KL_DTYPE_COMPLEX128
                                         : KL_DTYPE_COMPLEX64;
    return arg->kind != KL_ARG_COMPLEX || real == KL_DTYPE_FLOAT32 || real == KL_DTYPE_FLOAT64;
}

/* Combine the dtypes of two priorities: the weaker one can change only the kind (int, float, complex) of the stronger
 * one, not its width. KL_DTYPE_OTHER means that there is no operand of that priority. */
static KlDtype
combine(KlDtype strong, KlDtype weak)
{
    if (strong == KL_DTYPE_OTHER || kl_meta_dtype_is_complex(strong)) {
        return strong == KL_DTYPE_OTHER ? weak : strong;
    }
    if (weak == KL_DTYPE_OTHER) {
        return strong;
    }
    if (kl_meta_dtype_is_float(strong)) {
        KlDtype as_complex = strong == KL_DTYPE_FLOAT64 ? KL_DTYPE_COMPLEX128 : KL_DTYPE_COMPLEX64;
        return kl_meta_dtype_is_complex(weak) ? as_complex : strong;
    }
    return strong == KL_DTYPE_BOOL || !kl_rules_is_integral(weak) ? kl_rules_promote(strong, weak)
                                                                  : strong;
}

KlDtype
kl_rules_result_type(const KlCall *call, uint32_t n)
{
    KlDtype by_rank[3] = {KL_DTYPE_OTHER, KL_DTYPE_OTHER,
                          KL_DTYPE_OTHER}; /* tensors, 0-dim, numbers */
    for (uint32_t i = 0; i < n && i < call->n_args; i++) {
        const KlArg *arg = &call->args[i];
        KlDtype found = KL_DTYPE_OTHER;
        int rank = 2;
        if (arg->kind == KL_ARG_VALUE) {
            found = call->inputs[arg->input]->dtype;
            rank = call->inputs[arg->input]->n_dims == 0 ? 1 : 0;
        } else if (kl_rules_is_given(call, i)) {
            kl_rules_require(call, kl_rules_is_number(arg) && number_dtype(call, arg, &found));
        } else {
            continue;
        }
        by_rank[rank] =
            by_rank[rank] == KL_DTYPE_OTHER ? found : kl_rules_promote(by_rank[rank], found);
    }
    KlDtype weak = combine(by_rank[1], by_rank[2]);
    bool is_half = by_rank[0] == KL_DTYPE_FLOAT16 || by_rank[0] == KL_DTYPE_BFLOAT16;
    KlDtype type = combine(by_rank[0], weak);
    /* Half precision: complex32, or torch's own rule for complex bfloat16. */
    kl_rules_require(call, type != KL_DTYPE_OTHER && !(is_half && kl_meta_dtype_is_complex(weak)));
    return type;
}

KlStatus
kl_rules_set_dtypes(KlInferred *result, KlDtype dtype)
{
    for (uint32_t i = 0; i < result->n_outs; i++) {
        result->outs[i].dtype = dtype;
    }
    return KL_OK;
}
