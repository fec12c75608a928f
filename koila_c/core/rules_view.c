/* SPDX-License-Identifier: Apache-2.0 */
/* rules_view.c - views that keep the order of the elements and change the shape. kl_rules_factor finds the rows in the
 * new shape; if the call gives the size of their dim as a number, the number is rewritten for chunks. */
#include "rules.h"

/* Fill `out` with the requested sizes; -1 stands for the remaining factor. */
static KlStatus
resolve_sizes(const int64_t *sizes, uint32_t n, int64_t n_elements, KlMeta *out)
{
    int64_t known = 1;
    int32_t free_dim = -1;
    if (n > KL_DIMS_MAX) {
        return KL_DECLINED;
    }
    out->n_dims = (int32_t)n;
    for (int32_t dim = 0; dim < out->n_dims; dim++) {
        out->shape[dim] = sizes[dim];
        if (sizes[dim] == -1 && free_dim < 0) {
            free_dim = dim;
        } else if (sizes[dim] < 0 || __builtin_mul_overflow(known, sizes[dim], &known)) {
            return KL_ILLEGAL;
        }
    }
    bool is_filled = free_dim < 0 ? known == n_elements : known > 0 && n_elements % known == 0;
    if (is_filled && free_dim >= 0) {
        out->shape[free_dim] = n_elements / known;
    }
    return is_filled ? KL_OK : KL_ILLEGAL;
}

/* Set the strides of the first output, whose shape is known: a view of the first input; if that is impossible, a copy, or
 * an error if the op never copies. */
static KlStatus
settle_view(const KlCall *call, KlInferred *result, bool can_copy)
{
    const KlMeta *input = call->inputs[0];
    KlMeta *out = &result->outs[0];
    out->is_strided = false;
    bool is_unknown = !input->is_strided, is_view = is_unknown || kl_rules_view_strides(input, out);
    KlAlias alias = is_unknown && can_copy ? KL_ALIAS_MAYBE : KL_ALIAS_VIEW;
    kl_rules_alias(result, is_view ? alias : KL_ALIAS_NONE, 0);
    if (!is_view) {
        kl_meta_set_contiguous(out);
    }
    return is_view || can_copy ? KL_OK : KL_ILLEGAL;
}

KL_SHAPE(view)
{
    uint32_t n = 0;
    kl_rules_require(call, kl_rules_is_given(call, 1));
    const int64_t *sizes = kl_rules_ints(call, 1, &n);
    int64_t n_elements = kl_meta_n_elements(call->inputs[0]);
    KlStatus status = resolve_sizes(sizes, n, n_elements, kl_rules_outs(result, 1));
    return status == KL_OK ? settle_view(call, result, call->row->can_copy) : status;
}

KL_SHAPE(view_as)
{
    const KlMeta *other = kl_rules_tensor(call, 1, 0, KL_DIMS_MAX);
    int64_t n_elements = kl_meta_n_elements(call->inputs[0]), n_other = kl_meta_n_elements(other);
    kl_rules_lend(call, result, 1);
    kl_rules_check(call, n_elements == n_other);
    (void)kl_rules_out(result, other);
    return settle_view(call, result, call->row->can_copy);
}

KL_SHAPE(flatten)
{
    const KlMeta *input = call->inputs[0];
    int32_t first = kl_rules_dim(call, 1, 0, input->n_dims);
    int32_t last = kl_rules_dim(call, 2, -1, input->n_dims);
    kl_rules_check(call, first <= last);
    if (first == last && input->n_dims > 0) {
        return shape_itself(call, result);
    }
    KlMeta *out = kl_rules_outs(result, 1);
    int64_t merged = 1;
    for (int32_t dim = 0; dim < input->n_dims; dim++) {
        merged *= dim >= first && dim <= last ? input->shape[dim] : 1;
        if (dim < first || dim >= last) {
            out->shape[out->n_dims++] = dim == last ? merged : input->shape[dim];
        }
    }
    if (input->n_dims == 0) {
        out->n_dims = 1;
        out->shape[0] = 1;
    }
    return settle_view(call, result, true);
}

KL_SHAPE(ravel)
{
    const KlMeta *input = call->inputs[0];
    const KlMeta flat = {.n_dims = 1, .shape = {kl_meta_n_elements(input)}};
    if (input->is_strided && !kl_meta_is_contiguous(input)) {
        return kl_rules_out_contiguous(result, &flat); /* ravel is contiguous().view(-1) */
    }
    (void)kl_rules_out(result, &flat);
    return settle_view(call, result, true);
}

KL_SHAPE(unflatten)
{
    const KlMeta *input = call->inputs[0];
    uint32_t n = 0;
    int32_t at = kl_rules_dim(call, 1, 0, input->n_dims);
    const int64_t *sizes = kl_rules_ints(call, 2, &n);
    KlMeta middle = {.n_dims = 0}, *out = kl_rules_outs(result, 1);
    if (n == 0 || input->n_dims == 0 || input->n_dims - 1 + (int64_t)n > KL_DIMS_MAX) {
        return KL_DECLINED;
    }
    KlStatus status = resolve_sizes(sizes, n, input->shape[at], &middle);
    if (status != KL_OK) {
        return status;
    }
    out->n_dims = input->n_dims - 1 + (int32_t)n;
    for (int32_t dim = 0; dim < out->n_dims; dim++) {
        bool is_middle = dim >= at && dim < at + (int32_t)n;
        out->shape[dim] = is_middle ? middle.shape[dim - at]
                                    : input->shape[dim < at ? dim : dim - (int32_t)n + 1];
    }
    return settle_view(call, result, false);
}

static const char cut_in_two[] = "the batch is cut in two";

/* Return the largest of the output's dims over which the first input's rows are split. */
static int32_t
dim_of_part(const KlCall *call, const KlInferred *result)
{
    const KlMeta *input = call->inputs[0], *out = &result->outs[0];
    int64_t low = input->place.inner, high = 0, after = 1;
    int32_t first = out->n_dims, last = 0;
    for (int32_t dim = input->place.dim + 1; dim < input->n_dims; dim++) {
        low *= input->shape[dim];
    }
    high = low * kl_rules_rows(call, result);
    for (int32_t dim = out->n_dims - 1; dim >= 0; dim--) {
        bool is_part = after < high && after * out->shape[dim] > low;
        first = is_part ? dim : first;
        last = is_part && last == 0 ? dim + 1 : last;
        after *= out->shape[dim];
    }
    return kl_rules_largest_dim(out, first, last);
}

/* Find the first input's rows in the only output. args[arg] holds the sizes that the call gives, from dim `first` on. */
static KlStatus
factor_sizes(const KlCall *call, KlInferred *result, uint32_t arg, int32_t first)
{
    const KlMeta *input = call->inputs[0];
    KlMeta *out = &result->outs[0];
    KlPlace found;
    if (!kl_rules_factor(input, &input->place, kl_rules_rows(call, result), out, &found)) {
        return kl_rules_once_again(result, cut_in_two, dim_of_part(call, result));
    }
    uint32_t n = 0;
    const int64_t *sizes = arg < call->n_args ? kl_rules_ints(call, arg, &n) : NULL;
    int32_t entry = found.dim - first;
    if (entry >= 0 && entry < (int32_t)n && sizes[entry] != -1) {
        (void)kl_rules_rewrite(result, arg, (uint32_t)entry, 0, found.outer * found.inner);
    }
    out->place = found;
    return KL_OK;
}

/* kl_rules_factor finds the rows in the output. */
KL_PLACE(factor)
{
    return factor_sizes(call, result, UINT32_MAX, 0);
}

/* Likewise, and in the sizes of word 1. */
KL_PLACE(factor_sizes)
{
    return factor_sizes(call, result, 1, 0);
}

KL_PLACE(unflatten)
{
    return factor_sizes(call, result, 2, kl_rules_dim(call, 1, 0, call->inputs[0]->n_dims));
}

/* x.view_as(other): in a chunk it is a view only if both have their rows at places that correspond. */
KL_PLACE(factor_other)
{
    const KlMeta *input = call->inputs[0], *other = call->inputs[1];
    const bool is_of_input = kl_place_is_rows(&input->place);
    const KlMeta *from = is_of_input ? input : other, *to = is_of_input ? other : input;
    KlPlace found;
    if (!kl_rules_factor(from, &from->place, kl_rules_rows(call, result), to, &found)) {
        return kl_rules_once(result, cut_in_two);
    }
    const char *reason = is_of_input ? kl_rules_follow(call, result, 1, &found) : NULL;
    if (reason != NULL) {
        return kl_rules_once(result, reason);
    }
    result->split.places[0] = is_of_input ? input->place : found;
    return kl_rules_at(result, is_of_input ? found : other->place);
}
