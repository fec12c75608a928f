/* SPDX-License-Identifier: Apache-2.0 */
/* autocast.c - casts metas as torch's autocast lists say; the lists are the CAST cells of the op table. An op on no list
 * gets its inputs as they are. A composite op has the casts of its parts. */
#include "autocast.h"

#include <string.h>

#include "rules.h"

/* Whether autocast may cast a value: not float64, and only floating-point. */
static bool
is_eligible(const KlMeta *meta)
{
    return meta != NULL && (meta->dtype == KL_DTYPE_FLOAT16 || meta->dtype == KL_DTYPE_BFLOAT16 ||
                            meta->dtype == KL_DTYPE_FLOAT32);
}

/* Whether two operands of an equation as "ab,bc->ac" share a letter that the result does not have. Without an arrow
 * the result has the letters that occur once. */
static bool
is_contracted(const char *equation)
{
    const char *comma = strchr(equation, ',');
    const char *arrow = strstr(equation, "->");
    for (const char *at = equation; comma != NULL && at < comma; at++) {
        bool is_letter = (*at >= 'a' && *at <= 'z') || (*at >= 'A' && *at <= 'Z');
        const char *again = is_letter ? strchr(comma, *at) : NULL;
        bool is_shared = again != NULL && (arrow == NULL || again < arrow);
        if (is_shared && (arrow == NULL || strchr(arrow, *at) == NULL)) {
            return true;
        }
    }
    return false;
}

/* The argument "mode" of pad is word 2. */
static KlCast
judge_padding(const KlCall *call)
{
    const KlArg *mode = &call->args[2];
    bool is_text = mode->kind == KL_ARG_TEXT;
    bool is_listed =
        is_text && (strcmp(mode->u.text, "reflect") == 0 || strcmp(mode->u.text, "replicate") == 0);
    return is_listed ? KL_CAST_FLOAT : KL_CAST_NONE;
}

/* The dtypes of a call's inputs that matter for autocast; `has_other`: a float besides float32 and the lower dtype. */
typedef struct {
    bool has_float32, has_lower, has_other, has_float64;
} Dtypes;

static Dtypes
find_dtypes(const KlAutocast *autocast, const KlCall *call)
{
    Dtypes dtypes = {0};
    for (uint32_t i = 0; i < call->n_inputs; i++) {
        const KlMeta *input = call->inputs[i];
        bool is_float32 = input != NULL && input->dtype == KL_DTYPE_FLOAT32;
        bool is_lower = input != NULL && input->dtype == autocast->lower;
        dtypes.has_float32 |= is_float32;
        dtypes.has_lower |= is_eligible(input) && !is_float32 && is_lower;
        dtypes.has_other |= is_eligible(input) && !is_float32 && !is_lower;
        dtypes.has_float64 |= input != NULL && input->dtype == KL_DTYPE_FLOAT64;
    }
    return dtypes;
}

static KlCast
judge(const KlAutocast *autocast, const KlCall *call, Dtypes dtypes)
{
    bool is_all_float32 = !dtypes.has_lower && !dtypes.has_other;
    bool is_inplace = call->row->kind == KL_ROW_INPLACE; /* torch casts none of these */
    KlCast cast = is_inplace ? KL_CAST_NONE : call->row->cast[autocast->is_cuda];
    switch (cast) {
    case KL_CAST_REDUCE:
        return kl_rules_find(call, KL_ARG_DTYPE) != NULL ? KL_CAST_NONE : KL_CAST_FLOAT;
    case KL_CAST_EINSUM: /* one that sums over no common letter runs no op that is on a list */
        return call->args[0].kind != KL_ARG_TEXT || call->n_inputs > 2 ? KL_CAST_UNKNOWN
               : is_contracted(call->args[0].u.text)                   ? KL_CAST_LOWER
                                                                       : KL_CAST_NONE;
    case KL_CAST_PADDING:
        return judge_padding(call);
    case KL_CAST_LAYER:
        return is_all_float32 ? KL_CAST_LOWER : KL_CAST_UNKNOWN;
    case KL_CAST_CELL:
        return is_all_float32 ? KL_CAST_NONE : KL_CAST_UNKNOWN;
    default:
        return cast;
    }
}

KlStatus
kl_autocast_inputs(const KlAutocast *autocast, const KlCall *call, KlMeta *cast,
                   const KlMeta **seen)
{
    const Dtypes dtypes = find_dtypes(autocast, call);
    bool is_any = dtypes.has_float32 || dtypes.has_lower || dtypes.has_other;
    KlCast how = is_any ? judge(autocast, call, dtypes) : KL_CAST_NONE;
    bool is_widest = how == KL_CAST_WIDEST;
    if (how == KL_CAST_ERROR || how == KL_CAST_UNKNOWN ||
        (is_widest && (dtypes.has_other || dtypes.has_float64))) {
        return KL_DECLINED;
    }
    bool is_wide = how == KL_CAST_FLOAT || (is_widest && dtypes.has_float32);
    KlDtype to = is_wide ? KL_DTYPE_FLOAT32 : autocast->lower;
    for (uint32_t i = 0; i < call->n_inputs; i++) {
        const KlMeta *input = call->inputs[i];
        seen[i] = input;
        if (how != KL_CAST_NONE && is_eligible(input) && input->dtype != to) {
            cast[i] = *input;
            cast[i].dtype = to;
            kl_rules_preserve(&cast[i], input);
            seen[i] = &cast[i];
        }
    }
    return KL_OK;
}

void
kl_autocast_saves(const KlCall *call, const KlMeta *const *seen, KlSaves *saves)
{
    for (uint32_t i = 0; i < call->n_inputs && i < 64; i++) {
        if (seen[i] == call->inputs[i] || (saves->inputs >> i & 1) == 0) {
            continue;
        }
        int64_t bytes = kl_meta_n_bytes(seen[i]);
        saves->inputs &= ~(UINT64_C(1) << i);
        if (kl_place_is_rows(&seen[i]->place)) {
            saves->is_extra_rows = saves->is_extra_rows || saves->bytes_extra == 0;
            saves->bytes_extra += bytes;
        } else {
            saves->bytes_fixed += bytes;
        }
    }
}
