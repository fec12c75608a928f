/* rules_saves.c - what torch keeps for backward, one function for each word of the column. torch keeps an
 * input only where the gradient that needs it is wanted (derivatives.yaml). */
#include "rules.h"

/* Keep the tensor of a word, if it is one. */
static void
keep(const KlCall *call, uint32_t arg, KlSaves *saves)
{
    if (arg < call->n_args && call->args[arg].kind == KL_ARG_VALUE && call->args[arg].input < 64) {
        saves->inputs |= UINT64_C(1) << call->args[arg].input;
    }
}

static bool
wants_grad(const KlCall *call, uint32_t arg)
{
    const KlMeta *input = kl_rules_input(call, arg);
    return input != NULL && input->requires_grad;
}

void
saves_nothing(const KlCall *call, const KlInferred *result, KlSaves *saves)
{
    (void)call;
    (void)result;
    (void)saves;
}

void
saves_no_grad(const KlCall *call, const KlInferred *result, KlSaves *saves)
{
    saves_nothing(call, result, saves);
}

void
saves_output(const KlCall *call, const KlInferred *result, KlSaves *saves)
{
    (void)call;
    (void)result;
    saves->outputs = 1;
}

void
saves_input(const KlCall *call, const KlInferred *result, KlSaves *saves)
{
    (void)result;
    keep(call, 0, saves);
}

/* Its kernel takes rows that lie together: of anything else it makes a copy. */
void
saves_softmax(const KlCall *call, const KlInferred *result, KlSaves *saves)
{
    saves_output(call, result, saves);
    if (!kl_meta_is_contiguous(call->inputs[0])) {
        saves->bytes_workspace = kl_meta_n_bytes(&result->outs[0]);
    }
}

void
saves_input_output(const KlCall *call, const KlInferred *result, KlSaves *saves)
{
    (void)result;
    keep(call, 0, saves);
    saves->outputs = 1;
}

/* mul: each operand's gradient needs the other */
void
saves_other(const KlCall *call, const KlInferred *result, KlSaves *saves)
{
    (void)result;
    for (uint32_t arg = 0; arg < 2; arg++) {
        if (wants_grad(call, arg)) {
            keep(call, 1 - arg, saves);
        }
    }
}

/* div: the divisor, and for its own gradient the dividend too */
void
saves_div(const KlCall *call, const KlInferred *result, KlSaves *saves)
{
    (void)result;
    keep(call, 1, saves);
    if (wants_grad(call, 1)) {
        keep(call, 0, saves);
    }
}

/* atan2, hypot, maximum: both, whichever gradient is wanted */
void
saves_both(const KlCall *call, const KlInferred *result, KlSaves *saves)
{
    (void)result;
    keep(call, 0, saves);
    keep(call, 1, saves);
}

/* max(x) keeps x and the value, max(x, dim) the indices, max(x, y) both */
void
saves_max(const KlCall *call, const KlInferred *result, KlSaves *saves)
{
    if (call->args[1].kind == KL_ARG_VALUE) {
        saves_both(call, result, saves);
    } else if (result->n_outs == 2) {
        saves->outputs = 2;
    } else {
        saves_input_output(call, result, saves);
    }
}

/* topk, sort: the indices */
void
saves_indices(const KlCall *call, const KlInferred *result, KlSaves *saves)
{
    (void)call;
    (void)result;
    saves->outputs = 2;
}

void
saves_pow(const KlCall *call, const KlInferred *result, KlSaves *saves)
{
    keep(call, 0, saves);
    keep(call, 1, saves);
    if (call->args[1].kind == KL_ARG_VALUE) {
        saves->outputs = 1;
        saves->bytes_backward = 2 * kl_meta_n_bytes(&result->outs[0]); /* where the exponent is 0 */
    }
}

/* The words 1 and 2, each for the other's gradient: addcmul. */
void
saves_addcmul(const KlCall *call, const KlInferred *result, KlSaves *saves)
{
    (void)result;
    if (wants_grad(call, 1)) {
        keep(call, 2, saves);
    }
    if (wants_grad(call, 2)) {
        keep(call, 1, saves);
    }
}

void
saves_addcdiv(const KlCall *call, const KlInferred *result, KlSaves *saves)
{
    (void)result;
    keep(call, 2, saves);
    if (wants_grad(call, 2)) {
        keep(call, 1, saves);
    }
}

void
saves_lerp(const KlCall *call, const KlInferred *result, KlSaves *saves)
{
    (void)result;
    if (wants_grad(call, 2)) {
        keep(call, 0, saves);
        keep(call, 1, saves);
    }
    if (wants_grad(call, 0) || wants_grad(call, 1)) {
        keep(call, 2, saves);
    }
}

void
saves_word1(const KlCall *call, const KlInferred *result, KlSaves *saves)
{
    (void)result;
    keep(call, 1, saves);
}

void
saves_word2(const KlCall *call, const KlInferred *result, KlSaves *saves)
{
    (void)result;
    keep(call, 2, saves);
}

/* clamp: the value and its bounds */
void
saves_inputs(const KlCall *call, const KlInferred *result, KlSaves *saves)
{
    (void)result;
    for (uint32_t arg = 0; arg < call->n_args; arg++) {
        keep(call, arg, saves);
    }
}

/* gather keeps the value too, for its shape */
void
saves_gather(const KlCall *call, const KlInferred *result, KlSaves *saves)
{
    (void)result;
    keep(call, 0, saves);
    keep(call, 2, saves);
}

/* x[...]: the index tensors, those made of lists too */
void
saves_index(const KlCall *call, const KlInferred *result, KlSaves *saves)
{
    (void)result;
    const KlArg *index = &call->args[1];
    for (uint32_t i = 0; index->kind == KL_ARG_INDEX && i < index->n; i++) {
        const KlIndex *item = &index->u.items[i];
        if (item->kind == KL_INDEX_TENSOR && item->input < 64 &&
            call->inputs[item->input]->n_dims > 0) {
            saves->inputs |= UINT64_C(1) << item->input;
        } else if (item->kind == KL_INDEX_INTS) {
            saves->bytes_extra += item->stop * (int64_t)kl_meta_dtype_bytes(KL_DTYPE_INT64);
        }
    }
}

/* the value, for its shape, and a broadcast index */
void
saves_take_along_dim(const KlCall *call, const KlInferred *result, KlSaves *saves)
{
    keep(call, 0, saves);
    saves->bytes_extra =
        kl_meta_n_elements(&result->outs[0]) * (int64_t)kl_meta_dtype_bytes(KL_DTYPE_INT64);
    saves->is_extra_rows = kl_place_is_rows(&result->outs[0].place);
}

void
saves_copysign(const KlCall *call, const KlInferred *result, KlSaves *saves)
{
    (void)result;
    saves->outputs = 1;
    if (wants_grad(call, 0)) {
        keep(call, 0, saves);
    }
}

void
saves_copysign_copy(const KlCall *call, const KlInferred *result, KlSaves *saves)
{
    saves->outputs = 1;
    if (wants_grad(call, 0)) {
        saves_copy(call, result, saves);
    }
}

void
saves_hypot(const KlCall *call, const KlInferred *result, KlSaves *saves)
{
    (void)result;
    for (uint32_t arg = 0; arg < 2; arg++) {
        if (wants_grad(call, arg)) {
            keep(call, arg, saves);
        }
    }
    saves->outputs = 1;
}

void
saves_hypot_copy(const KlCall *call, const KlInferred *result, KlSaves *saves)
{
    if (wants_grad(call, 0)) {
        saves_copy(call, result, saves);
    }
    if (wants_grad(call, 1)) {
        keep(call, 1, saves);
    }
    saves->outputs = 1;
}

void
saves_output_copy(const KlCall *call, const KlInferred *result, KlSaves *saves)
{
    saves_copy(call, result, saves);
    saves->outputs = 1;
}

/* clamp_: the old value as a copy, and the bounds */
void
saves_inputs_copy(const KlCall *call, const KlInferred *result, KlSaves *saves)
{
    saves_copy(call, result, saves);
    keep(call, 1, saves);
    keep(call, 2, saves);
}

void
saves_remainder_copy(const KlCall *call, const KlInferred *result, KlSaves *saves)
{
    if (wants_grad(call, 1)) {
        saves_both_copy(call, result, saves);
    }
}

/* an in-place op that needs the old value for backward keeps a copy of it */
void
saves_copy(const KlCall *call, const KlInferred *result, KlSaves *saves)
{
    (void)result;
    saves->bytes_extra = kl_meta_n_bytes(call->inputs[0]);
    saves->is_extra_rows = true;
}

/* mul_: what mul keeps, the first operand as a copy */
void
saves_other_copy(const KlCall *call, const KlInferred *result, KlSaves *saves)
{
    if (wants_grad(call, 1)) {
        saves_copy(call, result, saves);
    }
    if (wants_grad(call, 0)) {
        keep(call, 1, saves);
    }
}

void
saves_div_copy(const KlCall *call, const KlInferred *result, KlSaves *saves)
{
    if (wants_grad(call, 1)) {
        saves_copy(call, result, saves);
    }
    keep(call, 1, saves);
}

/* remainder, fmod: the divisor's gradient needs both */
void
saves_remainder(const KlCall *call, const KlInferred *result, KlSaves *saves)
{
    if (wants_grad(call, 1)) {
        saves_both(call, result, saves);
    }
}

void
saves_both_copy(const KlCall *call, const KlInferred *result, KlSaves *saves)
{
    saves_copy(call, result, saves);
    keep(call, 1, saves);
}

void
saves_pow_copy(const KlCall *call, const KlInferred *result, KlSaves *saves)
{
    saves_both_copy(call, result, saves);
    saves->outputs = call->args[1].kind == KL_ARG_VALUE ? 1 : 0;
}

void
saves_lerp_copy(const KlCall *call, const KlInferred *result, KlSaves *saves)
{
    if (wants_grad(call, 2)) {
        saves_copy(call, result, saves);
        keep(call, 1, saves);
    }
    keep(call, 2, saves);
}

void
saves_where(const KlCall *call, const KlInferred *result, KlSaves *saves)
{
    saves_input(call, result, saves);
}

/* cummax: the value, for its shape, and the indices */
void
saves_cummax(const KlCall *call, const KlInferred *result, KlSaves *saves)
{
    saves_input(call, result, saves);
    saves->outputs = 2;
}

/* median(x) as max(x), median(x, dim) as max(x, dim) */
void
saves_median(const KlCall *call, const KlInferred *result, KlSaves *saves)
{
    if (result->n_outs == 2) {
        saves_indices(call, result, saves);
    } else {
        saves_input_output(call, result, saves);
    }
}

/* for the source's gradient the index, and the source for its shape */
void
saves_index_add(const KlCall *call, const KlInferred *result, KlSaves *saves)
{
    (void)result;
    if (wants_grad(call, 3)) {
        keep(call, 2, saves);
        keep(call, 3, saves);
    }
}

/* the index, and for the source's gradient the source */
void
saves_index_copy(const KlCall *call, const KlInferred *result, KlSaves *saves)
{
    (void)result;
    keep(call, 2, saves);
    if (wants_grad(call, 3)) {
        keep(call, 3, saves);
    }
}

/* scatter_add: the index, for the source's gradient */
void
saves_scatter_add(const KlCall *call, const KlInferred *result, KlSaves *saves)
{
    (void)result;
    if (wants_grad(call, 3)) {
        keep(call, 2, saves);
    }
}

/* its input, and on the CPU a buffer as large */
void
saves_log_sigmoid(const KlCall *call, const KlInferred *result, KlSaves *saves)
{
    saves_input(call, result, saves);
    if (result->outs[0].device == 0) {
        saves_copy(call, result, saves);
    }
}
