/* SPDX-License-Identifier: Apache-2.0 */
/* rules_matmul.c - products of vectors, matrices and batches of matrices, except einsum. */
#include "rules.h"

#include <string.h>

/* Get a tensor argument; with another number of dims the call is refused. */
static const KlMeta *
expect_dims(const KlCall *call, uint32_t arg, int32_t n_dims)
{
    const KlMeta *meta = kl_rules_tensor(call, arg, 0, KL_DIMS_MAX);
    kl_rules_check(call, meta->n_dims == n_dims);
    return meta;
}

/* Read the equation of a product, as "rs,sc->rc", and check the dims of its two operands: equal letters have one size.
 * `terms` gets the letters of the operands and of the result, whose shape is `out`. */
static void
read_product(const KlCall *call, KlLabels *terms, KlMeta *out)
{
    int64_t sizes[128]; /* by letter; -1: not seen yet */
    int32_t n_dims[3] = {0};
    int term = 0;
    memset(sizes, 0xff, sizeof(sizes));
    for (const char *at = call->row->equation; *at != '\0'; at++) {
        if (*at == ',' || *at == '>') {
            term++;
        } else if (*at != '-') {
            terms[term].of[n_dims[term]++] = (uint8_t)*at;
        }
    }
    for (uint32_t i = 0; i < 2; i++) {
        const KlMeta *operand = expect_dims(call, call->row->has_addend + i, n_dims[i]);
        for (int32_t dim = 0; dim < operand->n_dims; dim++) {
            int64_t *size = &sizes[terms[i].of[dim]], own = operand->shape[dim];
            kl_rules_check(call, *size < 0 || *size == own);
            *size = own;
        }
    }
    *out = (KlMeta){.n_dims = n_dims[2]};
    for (int32_t dim = 0; dim < out->n_dims; dim++) {
        out->shape[dim] = sizes[terms[2].of[dim]];
    }
}

KL_SHAPE(product)
{
    KlLabels terms[3] = {0};
    KlMeta out;
    const KlMeta *first = kl_rules_tensor(call, 0, 0, KL_DIMS_MAX);
    read_product(call, terms, &out);
    kl_rules_check(call, !call->row->has_addend || kl_rules_fits(first, &out));
    return kl_rules_out_contiguous(result, &out);
}

KL_PLACE(product)
{
    KlLabels terms[3] = {0};
    KlMeta out = {.n_dims = 0};
    const uint32_t first = call->row->has_addend;
    read_product(call, terms, &out);
    KlWiring wiring = {.outs = {terms[2]}, .reduce = KL_REDUCE_SUM};
    wiring.inputs[first] = terms[0];
    wiring.inputs[first + 1] = terms[1];
    if (call->row->has_addend) {
        wiring.inputs[0] = kl_rules_letters_right(terms[2], out.n_dims, call->inputs[0]->n_dims);
        wiring.reduce = KL_REDUCE_NONE;
        wiring.reason = "a tensor is added to a product that sums over the batch";
    }
    return kl_rules_wire(call, result, &wiring);
}

/* A product of two vectors, which sums over nothing: torch computes it as an elementwise op on a column and a row. */
KL_SHAPE(outer)
{
    (void)shape_product(call, result);
    if (call->row->has_addend) {
        kl_rules_settle_plain(call, result);
        return KL_OK;
    }
    const KlMeta *left = call->inputs[0];
    KlMeta column = {.n_dims = 2, .shape = {left->shape[0], 1}};
    const KlMeta *operands[2] = {&column, kl_rules_tensor(call, 1, 1, 1)};
    (void)kl_rules_view_strides(left, &column);
    column.is_strided = left->is_strided;
    kl_rules_iterate(&result->outs[0], operands, 2, false);
    return KL_OK;
}

/* torch pads rows of the result to whole 16 bytes; sizes that need padding are declined. */
KL_SHAPE(grouped_mm)
{
    const KlMeta *left = kl_rules_tensor(call, 0, 2, 2), *right = kl_rules_tensor(call, 1, 3, 3);
    const KlMeta *offsets = kl_rules_tensor(call, 2, 1, 1);
    kl_rules_require(call, left->dtype == right->dtype && offsets->dtype == KL_DTYPE_INT32 &&
                               right->shape[0] == offsets->shape[0] &&
                               left->shape[1] == right->shape[1] && !kl_rules_is_given(call, 3) &&
                               !kl_rules_is_given(call, 4));
    kl_rules_require(call, right->shape[2] * (int64_t)kl_meta_dtype_bytes(left->dtype) % 16 == 0);
    const KlMeta out = {.n_dims = 2, .shape = {left->shape[0], right->shape[2]}};
    kl_rules_lend(call, result, 2);
    return kl_rules_out_contiguous(result, &out);
}

KL_SHAPE(linear)
{
    const KlMeta *input = kl_rules_tensor(call, 0, 1, KL_DIMS_MAX);
    const KlMeta *weight = kl_rules_tensor(call, 1, 2, 2), *bias = kl_rules_optional(call, 2, 1, 1);
    kl_rules_check(call, input->shape[input->n_dims - 1] == weight->shape[1]);
    if (bias != NULL && bias->shape[0] != 1) {
        kl_rules_check(call, bias->shape[0] == weight->shape[0]);
    }
    KlMeta out = *input;
    out.shape[input->n_dims - 1] = weight->shape[0];
    return kl_rules_out_contiguous(result, &out);
}

KL_SHAPE(bilinear)
{
    const KlMeta *left = kl_rules_tensor(call, 0, 1, KL_DIMS_MAX);
    const KlMeta *weight = kl_rules_tensor(call, 2, 3, 3), *bias = kl_rules_optional(call, 3, 1, 1);
    const KlMeta *right = expect_dims(call, 1, left->n_dims);
    kl_rules_require(call, bias == NULL || bias->shape[0] == weight->shape[0]);
    int32_t last = left->n_dims - 1;
    for (int32_t dim = 0; dim < last; dim++) {
        kl_rules_check(call, left->shape[dim] == right->shape[dim]);
    }
    kl_rules_check(call, left->shape[last] == weight->shape[1]);
    kl_rules_check(call, right->shape[last] == weight->shape[2]);
    KlMeta out = *left;
    out.shape[last] = weight->shape[0];
    return kl_rules_out_plain(call, result, &out);
}

KL_PLACE(linear)
{
    int32_t last = call->inputs[0]->n_dims - 1;
    bool has_bias = call->n_inputs > 2;
    KlWiring wiring = {.inputs = {kl_rules_letters(last),
                                  {{KL_LETTER_COLUMN, KL_LETTER_SUM}},
                                  {{KL_LETTER_COLUMN}}},
                       .outs = {kl_rules_letters(last)},
                       .reduce = has_bias ? KL_REDUCE_NONE : KL_REDUCE_SUM,
                       .reason = "a tensor is added to a product that sums over the batch"};
    wiring.inputs[0].of[last] = KL_LETTER_SUM;
    wiring.outs[0].of[last] = KL_LETTER_COLUMN;
    return kl_rules_wire(call, result, &wiring);
}

KL_PLACE(bilinear)
{
    KlLabels lead = kl_rules_letters(call->inputs[0]->n_dims - 1);
    const KlWiring wiring = {.inputs = {lead, lead},
                             .outs = {lead},
                             .reason = "the batch dim is one of the features or the weights"};
    return kl_rules_wire(call, result, &wiring);
}
