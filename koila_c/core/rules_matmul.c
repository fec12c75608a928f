/* SPDX-License-Identifier: Apache-2.0 */
/* rules_matmul.c - products of vectors, matrices and batches of matrices, except einsum. */
#include "rules.h"

#include <string.h>

/* Letters: batch dims 1, 2, ... from the left of the output, then these. */
enum { LETTER_ROW = 20, LETTER_SUM = 21, LETTER_COLUMN = 22 };

static bool
has_dims(const KlCall *call, const KlMeta *meta, int32_t n_dims)
{
    if (meta->n_dims != n_dims) {
        (void)kl_error_set(kl_rules_refusal(call), KL_ERROR_SHAPE, "expected %d dims, got %d",
                           (int)n_dims, (int)meta->n_dims);
    }
    return meta->n_dims == n_dims;
}

static void
expect_size(const KlCall *call, int64_t left, int64_t right)
{
    if (left != right) {
        (void)kl_error_set(kl_rules_refusal(call), KL_ERROR_SHAPE,
                           "sizes %lld and %lld do not match", (long long)left, (long long)right);
    }
}

static KlLabels
letters(uint8_t first, uint8_t second, uint8_t third)
{
    return (KlLabels){{first, second, third}};
}

/* Read the equation of a product, as "rs,sc->rc", and check the dims of its two operands: equal letters have one size.
 * `terms` gets the letters of the operands and of the result, whose shape is `out`. Return whether there are two operands. */
static bool
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
        const KlMeta *operand = kl_rules_input(call, call->row->has_addend + i);
        if (operand == NULL || !has_dims(call, operand, n_dims[i])) {
            return false;
        }
        for (int32_t dim = 0; dim < operand->n_dims; dim++) {
            int64_t *size = &sizes[terms[i].of[dim]], own = operand->shape[dim];
            expect_size(call, *size < 0 ? own : *size, own);
            *size = own;
        }
    }
    *out = (KlMeta){.n_dims = n_dims[2]};
    for (int32_t dim = 0; dim < out->n_dims; dim++) {
        out->shape[dim] = sizes[terms[2].of[dim]];
    }
    return true;
}

KL_SHAPE(product)
{
    KlLabels terms[3] = {0};
    KlMeta out;
    const KlMeta *first = kl_rules_input(call, 0);
    if (first == NULL || !read_product(call, terms, &out)) {
        return KL_DECLINED;
    }
    if (call->row->has_addend && !kl_rules_fits(first, &out)) {
        return kl_error_set(error, KL_ERROR_SHAPE,
                            "the first argument does not broadcast to the product");
    }
    return kl_rules_out_contiguous(result, &out);
}

KL_PLACE(product)
{
    KlLabels terms[3] = {0};
    KlMeta out = {.n_dims = 0};
    const uint32_t first = call->row->has_addend;
    (void)read_product(call, terms, &out);
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
    KlStatus status = shape_product(call, result, error);
    if (status != KL_OK) {
        return status;
    }
    if (call->row->has_addend) {
        kl_rules_settle_plain(call, result);
        return KL_OK;
    }
    const KlMeta *left = call->inputs[0];
    KlMeta column = {.n_dims = 2, .shape = {left->shape[0], 1}};
    const KlMeta *operands[2] = {&column, call->inputs[1]};
    (void)kl_rules_view_strides(left, &column);
    column.is_strided = left->is_strided;
    kl_rules_iterate(&result->outs[0], operands, 2, false);
    return KL_OK;
}

/* torch pads rows of the result to whole 16 bytes; sizes that need padding are declined. */
KL_SHAPE(grouped_mm)
{
    const KlMeta *left = kl_rules_input(call, 0), *right = kl_rules_input(call, 1);
    const KlMeta *offsets = kl_rules_input(call, 2);
    bool is_plain = left != NULL && right != NULL && offsets != NULL && left->n_dims == 2 &&
                    right->n_dims == 3 && offsets->n_dims == 1 && left->dtype == right->dtype &&
                    offsets->dtype == KL_DTYPE_INT32 && right->shape[0] == offsets->shape[0] &&
                    left->shape[1] == right->shape[1] && !kl_rules_is_given(call, 3) &&
                    !kl_rules_is_given(call, 4);
    if (!is_plain || right->shape[2] * (int64_t)kl_meta_dtype_bytes(left->dtype) % 16 != 0) {
        return KL_DECLINED;
    }
    const KlMeta out = {.n_dims = 2, .shape = {left->shape[0], right->shape[2]}};
    kl_rules_lend(call, result, 2);
    return kl_rules_out_contiguous(result, &out);
}

KL_SHAPE(linear)
{
    const KlMeta *input = kl_rules_input(call, 0), *weight = kl_rules_input(call, 1);
    const KlMeta *bias = kl_rules_input(call, 2);
    if (input == NULL || weight == NULL || weight->n_dims != 2 || input->n_dims == 0 ||
        (kl_rules_is_given(call, 2) && (bias == NULL || bias->n_dims != 1))) {
        return KL_DECLINED;
    }
    expect_size(call, input->shape[input->n_dims - 1], weight->shape[1]);
    if (bias != NULL && bias->shape[0] != 1) {
        expect_size(call, bias->shape[0], weight->shape[0]);
    }
    KlMeta out = *input;
    out.shape[input->n_dims - 1] = weight->shape[0];
    return kl_rules_out_contiguous(result, &out);
}

KL_SHAPE(bilinear)
{
    const KlMeta *left = kl_rules_input(call, 0), *right = kl_rules_input(call, 1);
    const KlMeta *weight = kl_rules_input(call, 2), *bias = kl_rules_input(call, 3);
    if (left == NULL || right == NULL || weight == NULL || weight->n_dims != 3 ||
        left->n_dims == 0 || !has_dims(call, right, left->n_dims) ||
        (bias != NULL && (bias->n_dims != 1 || bias->shape[0] != weight->shape[0]))) {
        return KL_DECLINED;
    }
    int32_t last = left->n_dims - 1;
    for (int32_t dim = 0; dim < last; dim++) {
        expect_size(call, left->shape[dim], right->shape[dim]);
    }
    expect_size(call, left->shape[last], weight->shape[1]);
    expect_size(call, right->shape[last], weight->shape[2]);
    KlMeta out = *left;
    out.shape[last] = weight->shape[0];
    return kl_rules_out_plain(call, result, &out);
}

KL_PLACE(linear)
{
    int32_t last = call->inputs[0]->n_dims - 1;
    bool has_bias = call->n_inputs > 2;
    KlWiring wiring = {.inputs = {kl_rules_letters(last), letters(LETTER_COLUMN, LETTER_SUM, 0),
                                  letters(LETTER_COLUMN, 0, 0)},
                       .outs = {kl_rules_letters(last)},
                       .reduce = has_bias ? KL_REDUCE_NONE : KL_REDUCE_SUM,
                       .reason = "a tensor is added to a product that sums over the batch"};
    wiring.inputs[0].of[last] = LETTER_SUM;
    wiring.outs[0].of[last] = LETTER_COLUMN;
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
