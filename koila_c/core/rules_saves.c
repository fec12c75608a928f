/* SPDX-License-Identifier: Apache-2.0 */
/* rules_saves.c - the tensors that autograd saves: the arguments that a row lists, and saves rules that are functions.
 * torch saves an input only if a gradient that needs it is required (derivatives.yaml). */
#include "rules.h"

/* Note that the tensor of a word is saved, if it is one. Of the input that an in-place op writes, a copy is saved. */
static void
keep(const KlCall *call, uint32_t arg, KlSaves *saves)
{
    if (arg == 0 && call->row->kind == KL_ROW_INPLACE) {
        saves->bytes_extra = kl_meta_n_bytes(call->inputs[0]);
        saves->is_extra_rows = true;
    } else {
        kl_rules_save(call, saves, arg);
    }
}

void
kl_rules_keep(const KlCall *call, const KlInferred *KL_UNUSED(result), KlSaves *saves)
{
    const KlKeeps *keeps = &call->row->keeps;
    uint32_t words = keeps->words;
    for (uint32_t arg = 0; arg < 4; arg++) {
        words |= kl_rules_needs_grad(call, arg) ? keeps->for_grad[arg] : 0;
    }
    for (uint32_t arg = 0; words >> arg != 0; arg++) {
        if ((words >> arg & 1) != 0) {
            keep(call, arg, saves);
        }
    }
    saves->outputs = keeps->outputs;
}

/* The kernel needs a contiguous dim; of other inputs it makes a copy. */
KL_SAVES(softmax)
{
    saves->outputs = 1;
    if (!kl_meta_is_contiguous(call->inputs[0])) {
        saves->bytes_workspace = kl_meta_n_bytes(&result->outs[0]);
    }
}

/* max(x) saves x and the result, max(x, dim) the indices, max(x, y) both inputs; median likewise */
KL_SAVES(max)
{
    if (result->n_outs == 2) {
        saves->outputs = 2;
        return;
    }
    keep(call, 0, saves);
    keep(call, 1, saves);
    saves->outputs = kl_rules_input(call, 1) == NULL ? 1 : 0;
}

KL_SAVES(pow)
{
    keep(call, 0, saves);
    keep(call, 1, saves);
    if (kl_rules_input(call, 1) != NULL) {
        bool is_new = call->row->kind != KL_ROW_INPLACE;
        saves->outputs = 1; /* masks, and results, where the exponent is 0 */
        saves->bytes_backward = 2 * (kl_meta_n_elements(&result->outs[0]) +
                                     (is_new ? kl_meta_n_bytes(&result->outs[0]) : 0));
    }
}

/* Nothing; numbers of another dtype than the sum's are cast first. */
KL_SAVES(sum)
{
    KlMeta cast = *call->inputs[0];
    cast.dtype = result->outs[0].dtype;
    saves->bytes_workspace = cast.dtype != call->inputs[0]->dtype ? kl_meta_n_bytes(&cast) : 0;
}

/* x[...]: the index tensors, including those made from lists */
KL_SAVES(index)
{
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

/* its input, and on the CPU a buffer as large */
KL_SAVES(log_sigmoid)
{
    keep(call, 0, saves);
    if (result->outs[0].device == 0) {
        saves->bytes_extra = kl_meta_n_bytes(call->inputs[0]);
        saves->is_extra_rows = true;
    }
}

/* One dim after the other, each into a new tensor. */
KL_SAVES(roll)
{
    const KlArg *shifts = &call->args[1];
    if (shifts->kind == KL_ARG_INTS && shifts->n > 1) {
        saves->bytes_workspace = saves->bytes_backward = kl_meta_n_bytes(&result->outs[0]);
    }
}
