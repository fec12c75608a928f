/* SPDX-License-Identifier: Apache-2.0 */
/* rules_dtype.c - the dtype rules: the dtypes of results, and torch's type promotion. A dtype that torch refuses for an op is declined, so that
 * torch raises its own error. */
#include "rules.h"

/* --- promotion: tensors have priority over 0-dim tensors, and these over numbers ------------------ */

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

/* Return torch.result_type of the first n arguments: tensors, 0-dim tensors and numbers. */
static KlDtype
result_type(const KlCall *call, uint32_t n)
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

/* --- the rules -------------------------------------------------------------------------------- */

/* Return the real dtype of a complex one; other dtypes are unchanged. */
static KlDtype
real_of(KlDtype dtype)
{
    return dtype == KL_DTYPE_COMPLEX64    ? KL_DTYPE_FLOAT32
           : dtype == KL_DTYPE_COMPLEX128 ? KL_DTYPE_FLOAT64
                                          : dtype;
}

static bool
is_among(KlDtype dtype, KlKinds kinds)
{
    KlKinds kind = dtype == KL_DTYPE_BOOL            ? KL_KINDS_BOOL
                   : kl_rules_is_integral(dtype)     ? KL_KINDS_INT
                   : kl_meta_dtype_is_complex(dtype) ? KL_KINDS_COMPLEX
                                                     : KL_KINDS_FLOAT;
    return kinds == KL_KINDS_ALL || (kinds & kind) != 0;
}

static KlStatus
set_float(const KlCall *call, KlInferred *result, KlDtype dtype)
{
    return kl_rules_set_dtypes(result, kl_rules_is_integral(dtype) ? call->default_dtype : dtype);
}

KL_DTYPE(same)
{
    kl_rules_set_dtypes(result, call->inputs[0]->dtype);
    return is_among(call->inputs[0]->dtype, call->row->kinds) ? KL_OK : KL_DECLINED;
}

/* That of the first input, or the one that is given. */
KL_DTYPE(like)
{
    KlDtype dtype = kl_rules_dtype(call, call->inputs[0]->dtype);
    kl_rules_require(call, is_among(dtype, call->row->kinds));
    return kl_rules_set_dtypes(result, dtype);
}

/* Complex gives real. */
KL_DTYPE(abs)
{
    return kl_rules_set_dtypes(result, real_of(call->inputs[0]->dtype));
}

KL_DTYPE(square)
{
    KlDtype dtype = call->inputs[0]->dtype;
    return kl_rules_set_dtypes(result, dtype == KL_DTYPE_BOOL ? KL_DTYPE_INT64 : dtype);
}

/* Ints become the default dtype. */
KL_DTYPE(to_float)
{
    KlDtype dtype = call->inputs[0]->dtype;
    return is_among(dtype, call->row->kinds) ? set_float(call, result, dtype) : KL_DECLINED;
}

static KlStatus
promote_among(const KlCall *call, KlInferred *result, KlKinds kinds)
{
    KlDtype dtype = result_type(call, 2);
    kl_rules_require(call, is_among(dtype, kinds));
    return kl_rules_set_dtypes(result, dtype);
}

/* torch's promotion of words 0 and 1. */
KL_DTYPE(promote)
{
    return promote_among(call, result, call->row->kinds);
}

/* sub refuses bools */
KL_DTYPE(promote_sub)
{
    for (uint32_t i = 0; i < 2; i++) {
        const KlMeta *input = kl_rules_input(call, i);
        kl_rules_require(call, call->args[i].kind != KL_ARG_BOOL &&
                                   (input == NULL || input->dtype != KL_DTYPE_BOOL));
    }
    return dtype_promote(call, result);
}

/* Likewise, and ints become the default dtype. */
KL_DTYPE(promote_float)
{
    return set_float(call, result, result_type(call, 2));
}

KL_DTYPE(div)
{
    return kl_rules_is_given(call, 2) ? promote_among(call, result, KL_KINDS_REAL)
                                      : dtype_promote_float(call, result);
}

KL_DTYPE(to_bool)
{
    return kl_rules_set_dtypes(result, KL_DTYPE_BOOL);
}

/* A comparison needs a common dtype, although its result is a bool. */
KL_DTYPE(compare)
{
    (void)dtype_promote(call, result);
    return dtype_to_bool(call, result);
}

/* All tensors have the dtype of the first. Others are refused by torch, or mended by autocast. */
KL_DTYPE(all_same)
{
    for (uint32_t i = 1; i < call->n_inputs; i++) {
        kl_rules_require(call, call->inputs[i]->dtype == call->inputs[0]->dtype);
    }
    return dtype_same(call, result);
}

static KlStatus
promote_beside(const KlCall *call, KlInferred *result, uint32_t input)
{
    const KlMeta *condition = kl_rules_tensor(call, input, 0, KL_DIMS_MAX);
    KlArg args[2] = {call->args[input == 0 ? 1 : 0], call->args[2]};
    KlCall pair = *call;
    kl_rules_require(call, condition->dtype == KL_DTYPE_BOOL);
    pair.args = args;
    pair.n_args = 2;
    return kl_rules_set_dtypes(result, result_type(&pair, 2));
}

KL_DTYPE(where)
{
    return promote_beside(call, result, 0);
}

/* x.where(condition, y) */
KL_DTYPE(where_method)
{
    return promote_beside(call, result, 1);
}

/* clamp(x, min, max): the bounds take part in promotion */
KL_DTYPE(clamp)
{
    KlDtype dtype = result_type(call, 3);
    kl_rules_require(call, (kl_rules_is_given(call, 1) || kl_rules_is_given(call, 2)) &&
                               !kl_meta_dtype_is_complex(dtype));
    return kl_rules_set_dtypes(result, dtype);
}

/* Ints become int64; a dtype may be given. */
KL_DTYPE(to_sum)
{
    KlDtype dtype = call->inputs[0]->dtype;
    KlDtype sum = kl_rules_is_integral(dtype) ? KL_DTYPE_INT64 : dtype;
    return kl_rules_set_dtypes(result, kl_rules_dtype(call, sum));
}

KL_DTYPE(to_mean)
{
    KlDtype dtype = kl_rules_dtype(call, call->inputs[0]->dtype);
    kl_rules_check(call, !kl_rules_is_integral(dtype));
    return kl_rules_set_dtypes(result, dtype);
}

/* std, var: real for complex inputs, too; the mean, the second output, has the input's dtype. batch_norm names a dtype to
 * get the statistics of half-precision inputs in float32. */
KL_DTYPE(to_var)
{
    KlDtype dtype = kl_rules_dtype(call, call->inputs[0]->dtype);
    kl_rules_check(call, !kl_rules_is_integral(dtype));
    kl_rules_set_dtypes(result, dtype);
    result->outs[0].dtype = real_of(dtype);
    return KL_OK;
}

KL_DTYPE(vector_norm)
{
    KlDtype dtype = call->inputs[0]->dtype;
    bool is_other = kl_rules_is_integral(dtype) || kl_rules_dtype(call, dtype) != dtype;
    return is_other ? KL_DECLINED : dtype_abs(call, result);
}

/* all, any: a bool, but uint8 for uint8, for backward compatibility */
KL_DTYPE(to_all)
{
    bool is_byte = call->inputs[0]->dtype == KL_DTYPE_UINT8;
    return kl_rules_set_dtypes(result, is_byte ? KL_DTYPE_UINT8 : KL_DTYPE_BOOL);
}

KL_DTYPE(index)
{
    return kl_rules_set_dtypes(result, KL_DTYPE_INT64);
}

/* values, and their indices */
KL_DTYPE(value_index)
{
    kl_rules_require(call, !kl_meta_dtype_is_complex(call->inputs[0]->dtype));
    kl_rules_set_dtypes(result, call->inputs[0]->dtype);
    if (result->n_outs == 2) {
        result->outs[1].dtype = KL_DTYPE_INT64;
    }
    return KL_OK;
}
