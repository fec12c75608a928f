/* SPDX-License-Identifier: Apache-2.0 */
/* rules_matmul.c - products of vectors, matrices and batches of matrices, except einsum. */
#include "rules.h"

/* Letters: batch dims 1, 2, ... from the left of the output, then these. */
enum { LETTER_ROW = 20, LETTER_SUM = 21, LETTER_COLUMN = 22 };

static KlStatus
expect_dims(const KlMeta *meta, int32_t n_dims, KlError *error)
{
    if (meta->n_dims != n_dims) {
        return kl_error_set(error, KL_ERROR_SHAPE, "expected %d dims, got %d", (int)n_dims,
                            (int)meta->n_dims);
    }
    return KL_OK;
}

static KlStatus
expect_size(int64_t left, int64_t right, KlError *error)
{
    if (left != right) {
        return kl_error_set(error, KL_ERROR_SHAPE, "sizes %lld and %lld do not match",
                            (long long)left, (long long)right);
    }
    return KL_OK;
}

/* Get args[arg] and the next argument, both tensors. */
static KlStatus
get_pair(const KlCall *call, uint32_t arg, const KlMeta **left, const KlMeta **right)
{
    *left = kl_rules_input(call, arg);
    *right = kl_rules_input(call, arg + 1);
    return *left == NULL || *right == NULL ? KL_DECLINED : KL_OK;
}

static KlLabels
letters(uint8_t first, uint8_t second, uint8_t third)
{
    return (KlLabels){{first, second, third}};
}

/* Make the product of args[arg] and args[arg + 1], of `n_left` and `n_right` dims: it sums over the last dim of the
 * left and the last but one (or only) dim of the right. */
static KlStatus
shape_pair(const KlCall *call, uint32_t arg, int32_t n_left, int32_t n_right, KlInferred *result,
           KlError *error)
{
    const KlMeta *left = NULL, *right = NULL;
    KlStatus status = get_pair(call, arg, &left, &right);
    status = status == KL_OK ? expect_dims(left, n_left, error) : status;
    status = status == KL_OK ? expect_dims(right, n_right, error) : status;
    if (status == KL_OK) {
        int32_t dim = n_right >= 2 ? n_right - 2 : 0;
        status = expect_size(left->shape[n_left - 1], right->shape[dim], error);
    }
    if (status == KL_OK && n_left == 3) {
        status = expect_size(left->shape[0], right->shape[0], error);
    }
    if (status != KL_OK) {
        return status;
    }
    KlMeta out = *left;
    out.n_dims = n_left - 1;
    if (n_right >= 2) {
        out.shape[out.n_dims++] = right->shape[n_right - 1];
    }
    return kl_rules_out_contiguous(result, &out, error);
}

/* Check that the first argument, which is added to the product, broadcasts to it. */
static KlStatus
check_addend(const KlCall *call, const KlInferred *result, KlError *error)
{
    const KlMeta *addend = kl_rules_input(call, 0);
    if (addend == NULL) {
        return KL_DECLINED;
    }
    KlMeta grown = result->outs[0];
    KlStatus status = kl_rules_broadcast(&grown, addend, error);
    bool is_grown = grown.n_dims != result->outs[0].n_dims ||
                    !kl_rules_are_alike(&grown, &result->outs[0], grown.n_dims);
    return status != KL_OK || !is_grown
               ? status
               : kl_error_set(error, KL_ERROR_SHAPE,
                              "the first argument does not broadcast to the product");
}

/* The shape rule of a product of args[arg] and args[arg + 1], which have n_left and n_right dims. */
#define SHAPE_PRODUCT(word, arg, n_left, n_right)                                                  \
    KL_SHAPE(word)                                                                                 \
    {                                                                                              \
        return shape_pair(call, arg, n_left, n_right, result, error);                              \
    }
SHAPE_PRODUCT(mm, 0, 2, 2)
SHAPE_PRODUCT(bmm, 0, 3, 3)
SHAPE_PRODUCT(mv, 0, 2, 1)
SHAPE_PRODUCT(dot, 0, 1, 1)
#undef SHAPE_PRODUCT

#define SHAPE_ADDED(word, n_left, n_right)                                                         \
    KL_SHAPE(word)                                                                                 \
    {                                                                                              \
        KlStatus status = shape_pair(call, 1, n_left, n_right, result, error);                     \
        return status == KL_OK ? check_addend(call, result, error) : status;                       \
    }
SHAPE_ADDED(addmm, 2, 2)
SHAPE_ADDED(addmv, 2, 1)
SHAPE_ADDED(baddbmm, 3, 3)
#undef SHAPE_ADDED

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
    return kl_rules_out_contiguous(result, &out, error);
}

KL_PLACE(grouped)
{
    return kl_rules_once(result, "groups of samples begin where others end");
}

KL_SHAPE(addbmm)
{
    KlStatus status = shape_pair(call, 1, 3, 3, result, error);
    if (status != KL_OK) {
        return status;
    }
    const KlMeta *each = &result->outs[0],
                 out = {.n_dims = 2, .shape = {each->shape[1], each->shape[2]}};
    status = kl_rules_out_contiguous(result, &out, error);
    return status == KL_OK ? check_addend(call, result, error) : status;
}

/* Make the outer product of two vectors. */
static KlStatus
shape_pairs(const KlCall *call, uint32_t arg, KlInferred *result, KlError *error)
{
    const KlMeta *left = NULL, *right = NULL;
    KlStatus status = get_pair(call, arg, &left, &right);
    status = status == KL_OK ? expect_dims(left, 1, error) : status;
    status = status == KL_OK ? expect_dims(right, 1, error) : status;
    if (status != KL_OK) {
        return status;
    }
    int64_t shape[2] = {left->shape[0], right->shape[0]};
    status = kl_rules_out_shape(result, shape, 2, error);
    if (status == KL_OK) {
        KlMeta column = {.n_dims = 2, .shape = {left->shape[0], 1}};
        const KlMeta *operands[2] = {&column, right};
        (void)kl_rules_view_strides(left, &column);
        column.is_strided = left->is_strided;
        kl_rules_iterate(&result->outs[0], operands, 2, false);
    }
    return status;
}

KL_SHAPE(outer)
{
    return shape_pairs(call, 0, result, error);
}

KL_SHAPE(addr)
{
    KlStatus status = shape_pairs(call, 1, result, error);
    status = status == KL_OK ? check_addend(call, result, error) : status;
    if (status == KL_OK) {
        kl_rules_settle_plain(call, result);
    }
    return status;
}

KL_SHAPE(linear)
{
    const KlMeta *input = NULL, *weight = NULL, *bias = kl_rules_input(call, 2);
    KlStatus status = get_pair(call, 0, &input, &weight);
    if (status != KL_OK || weight->n_dims != 2 || input->n_dims == 0 ||
        (kl_rules_is_given(call, 2) && (bias == NULL || bias->n_dims != 1))) {
        return KL_DECLINED;
    }
    status = expect_size(input->shape[input->n_dims - 1], weight->shape[1], error);
    if (status == KL_OK && bias != NULL && bias->shape[0] != 1) {
        status = expect_size(bias->shape[0], weight->shape[0], error);
    }
    KlMeta out = *input;
    out.shape[input->n_dims - 1] = weight->shape[0];
    return status == KL_OK ? kl_rules_out_contiguous(result, &out, error) : status;
}

KL_SHAPE(bilinear)
{
    const KlMeta *left = NULL, *right = NULL, *weight = kl_rules_input(call, 2);
    KlStatus status = get_pair(call, 0, &left, &right);
    const KlMeta *bias = kl_rules_input(call, 3);
    if (status != KL_OK || weight == NULL || weight->n_dims != 3 || left->n_dims == 0 ||
        (bias != NULL && (bias->n_dims != 1 || bias->shape[0] != weight->shape[0]))) {
        return KL_DECLINED;
    }
    status = expect_dims(right, left->n_dims, error);
    int32_t last = left->n_dims - 1;
    for (int32_t dim = 0; status == KL_OK && dim < last; dim++) {
        status = expect_size(left->shape[dim], right->shape[dim], error);
    }
    status = status == KL_OK ? expect_size(left->shape[last], weight->shape[1], error) : status;
    status = status == KL_OK ? expect_size(right->shape[last], weight->shape[2], error) : status;
    status = status == KL_OK ? kl_rules_out(result, left, error) : status;
    if (status == KL_OK) {
        result->outs[0].shape[last] = weight->shape[0];
        kl_rules_settle_plain(call, result);
    }
    return status;
}

#define PLACE_PRODUCT(word, left, right, out, reduction)                                           \
    KL_PLACE(word)                                                                                 \
    {                                                                                              \
        const KlWiring wiring = {.inputs = {left, right}, .outs = {out}, .reduce = reduction};     \
        return kl_rules_wire(call, result, &wiring);                                               \
    }
PLACE_PRODUCT(mm, letters(LETTER_ROW, LETTER_SUM, 0), letters(LETTER_SUM, LETTER_COLUMN, 0),
              letters(LETTER_ROW, LETTER_COLUMN, 0), KL_REDUCE_SUM)
PLACE_PRODUCT(bmm, letters(1, LETTER_ROW, LETTER_SUM), letters(1, LETTER_SUM, LETTER_COLUMN),
              letters(1, LETTER_ROW, LETTER_COLUMN), KL_REDUCE_SUM)
PLACE_PRODUCT(mv, letters(LETTER_ROW, LETTER_SUM, 0), letters(LETTER_SUM, 0, 0),
              letters(LETTER_ROW, 0, 0), KL_REDUCE_SUM)
PLACE_PRODUCT(dot, letters(LETTER_SUM, 0, 0), letters(LETTER_SUM, 0, 0), letters(0, 0, 0),
              KL_REDUCE_SUM)
PLACE_PRODUCT(outer, letters(LETTER_ROW, 0, 0), letters(LETTER_COLUMN, 0, 0),
              letters(LETTER_ROW, LETTER_COLUMN, 0), KL_REDUCE_NONE)
#undef PLACE_PRODUCT

/* input + left * right */
static KlStatus
wire_added(const KlCall *call, KlInferred *result, KlLabels left, KlLabels right, KlLabels out)
{
    const KlMeta *meta = &result->outs[0];
    const KlWiring wiring = {
        .inputs = {kl_rules_letters_right(out, meta->n_dims, call->inputs[0]->n_dims), left, right},
        .outs = {out},
        .reason = "a tensor is added to a product that sums over the batch"};
    return kl_rules_wire(call, result, &wiring);
}

#define PLACE_ADDED(word, left, right, out)                                                        \
    KL_PLACE(word)                                                                                 \
    {                                                                                              \
        return wire_added(call, result, left, right, out);                                         \
    }
PLACE_ADDED(addmm, letters(LETTER_ROW, LETTER_SUM, 0), letters(LETTER_SUM, LETTER_COLUMN, 0),
            letters(LETTER_ROW, LETTER_COLUMN, 0))
PLACE_ADDED(addmv, letters(LETTER_ROW, LETTER_SUM, 0), letters(LETTER_SUM, 0, 0),
            letters(LETTER_ROW, 0, 0))
PLACE_ADDED(addr, letters(LETTER_ROW, 0, 0), letters(LETTER_COLUMN, 0, 0),
            letters(LETTER_ROW, LETTER_COLUMN, 0))
PLACE_ADDED(baddbmm, letters(1, LETTER_ROW, LETTER_SUM), letters(1, LETTER_SUM, LETTER_COLUMN),
            letters(1, LETTER_ROW, LETTER_COLUMN))
PLACE_ADDED(addbmm, letters(1, LETTER_ROW, LETTER_SUM), letters(1, LETTER_SUM, LETTER_COLUMN),
            letters(LETTER_ROW, LETTER_COLUMN, 0))
#undef PLACE_ADDED

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
