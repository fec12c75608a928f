/* SPDX-License-Identifier: Apache-2.0 */
/* rules_labels.c - finds the rows of ops that are described like einsum, and functions that layer rules share.
 *
 * NOTE [labels]: describe an op as einsum does, with a letter for each dim along which it works entry by
 * entry: conv2d is "n..., ... -> n...", scaled_dot_product_attention "bld, bsd, bsd -> bld". The letter of
 * the rows' dim then determines the split: inputs that have it are sliced, inputs that lack it are read
 * whole, outputs that have it have rows. A dim whose entries the op mixes (the channels of a convolution,
 * the dim of a softmax) has no letter. If no output has the letter, the op sums over the rows. */
#include "rules.h"

#include <string.h>

static int32_t
find_letter(const KlLabels *labels, int32_t n_dims, uint8_t letter, bool *is_twice)
{
    int32_t found = -1;
    *is_twice = false;
    for (int32_t dim = 0; dim < n_dims; dim++) {
        if (labels->of[dim] == letter) {
            *is_twice = found >= 0;
            found = dim;
        }
    }
    return found;
}

/* Slice every input that has the letter. Return NULL, or the reason why that is impossible. */
static const char *
follow_letter(const KlCall *call, KlInferred *result, const KlWiring *wiring, uint8_t letter,
              KlPlace want)
{
    static const KlLabels none = {{0}};
    for (uint32_t i = 0; i < call->n_inputs; i++) {
        const KlLabels *labels = i < KL_LABELS_MAX ? &wiring->inputs[i] : &none;
        bool is_twice = false;
        want.dim = find_letter(labels, call->inputs[i]->n_dims, letter, &is_twice);
        if (is_twice) {
            return "a diagonal of the samples is taken";
        }
        const KlPlace *own = &call->inputs[i]->place;
        if (want.dim < 0 && kl_place_is_rows(own)) {
            return labels->of[own->dim] == 0 ? wiring->reason : "all samples are combined";
        }
        const char *reason = kl_rules_follow(call, result, i, &want);
        if (reason != NULL) {
            return reason;
        }
    }
    return NULL;
}

KlStatus
kl_rules_wire(const KlCall *call, KlInferred *result, const KlWiring *wiring)
{
    uint32_t first = kl_rules_first_rows(call);
    KlPlace want = call->inputs[first]->place;
    uint8_t letter = first < KL_LABELS_MAX ? wiring->inputs[first].of[want.dim] : 0;
    if (letter == 0) {
        return kl_rules_once(result, wiring->reason);
    }
    const char *reason = follow_letter(call, result, wiring, letter, want);
    if (reason != NULL) {
        return kl_rules_once(result, reason);
    }
    uint32_t n_found = 0;
    for (uint32_t i = 0; i < result->n_outs; i++) {
        KlMeta *out = &result->outs[i];
        bool is_twice = false;
        want.dim = find_letter(&wiring->outs[i], out->n_dims, letter, &is_twice);
        if (want.dim >= 0) {
            if (out->shape[want.dim] != kl_rules_span(&want, kl_rules_rows(call, result))) {
                return kl_rules_once(result, "a batch of one sample is broadcast");
            }
            out->place = want;
            n_found++;
        }
    }
    if (n_found == result->n_outs) {
        return KL_OK;
    }
    if (n_found > 0 || wiring->reduce == KL_REDUCE_NONE) {
        return kl_rules_once(result, wiring->reason);
    }
    return kl_rules_reduce(result, wiring->reduce);
}

KlStatus
kl_rules_wire_alike(const KlCall *call, KlInferred *result, KlLabels labels, const char *reason)
{
    const KlWiring wiring = {
        .inputs = {labels}, .outs = {labels, labels, labels, labels}, .reason = reason};
    return kl_rules_wire(call, result, &wiring);
}

KlLabels
kl_rules_letters(int32_t n_dims)
{
    KlLabels labels = {{0}};
    for (int32_t dim = 0; dim < n_dims; dim++) {
        labels.of[dim] = (uint8_t)(dim + 1);
    }
    return labels;
}

KlLabels
kl_rules_letters_right(KlLabels full, int32_t n_dims_full, int32_t n_dims)
{
    KlLabels labels = {{0}};
    for (int32_t dim = 0; dim < n_dims && n_dims <= n_dims_full; dim++) {
        labels.of[dim] = full.of[dim + n_dims_full - n_dims];
    }
    return labels;
}

bool
kl_rules_is_plain(const KlMeta *meta)
{
    KlMeta plain = *meta;
    kl_meta_set_contiguous(&plain);
    return meta->is_strided && memcmp(plain.strides, meta->strides,
                                      (size_t)meta->n_dims * sizeof(meta->strides[0])) == 0;
}

void
kl_rules_settle_plain(const KlCall *call, KlInferred *result)
{
    bool is_plain = true;
    for (uint32_t i = 0; i < call->n_inputs; i++) {
        is_plain = is_plain && kl_rules_is_plain(call->inputs[i]);
    }
    kl_rules_set_contiguous(result);
    for (uint32_t i = 0; i < result->n_outs; i++) {
        result->outs[i].is_strided = is_plain;
    }
}

KlStatus
kl_rules_out_plain(const KlCall *call, KlInferred *result, const KlMeta *like)
{
    (void)kl_rules_out(result, like);
    kl_rules_settle_plain(call, result);
    return KL_OK;
}

KlStatus
kl_rules_out_format(const KlCall *call, KlInferred *result, const KlMeta *like)
{
    (void)kl_rules_out(result, like);
    kl_rules_settle_format(call, result, 1);
    return KL_OK;
}

void
kl_rules_settle_format(const KlCall *call, KlInferred *result, uint32_t n_deciders)
{
    bool is_last = false;
    for (uint32_t i = 0; i < n_deciders && i < call->n_inputs; i++) {
        const KlMeta *input = call->inputs[i];
        if (!input->is_strided || input->n_dims != 4) {
            kl_rules_settle_plain(call, result);
            return;
        }
        is_last = is_last || kl_rules_is_like_channels_last(input);
    }
    kl_rules_set_contiguous(result);
    for (uint32_t i = 0; i < result->n_outs && is_last; i++) {
        kl_rules_set_channels_last(&result->outs[i]);
    }
}

void
kl_rules_save(const KlCall *call, KlSaves *saves, uint32_t arg)
{
    if (kl_rules_input(call, arg) != NULL && call->args[arg].input < 64) {
        saves->inputs |= UINT64_C(1) << call->args[arg].input;
    }
}

bool
kl_rules_needs_grad(const KlCall *call, uint32_t arg)
{
    const KlMeta *meta = kl_rules_input(call, arg);
    return meta != NULL && meta->requires_grad;
}

void
kl_rules_save_new(const KlInferred *result, KlSaves *saves, int64_t n, KlDtype dtype)
{
    saves->bytes_extra += n * (int64_t)kl_meta_dtype_bytes(dtype);
    saves->is_extra_rows = result->split.mode != KL_MODE_ONCE;
}

bool
kl_rules_merges(const KlMeta *meta, int32_t n_last)
{
    KlMeta merged = {.n_dims = 1, .shape = {1}};
    for (int32_t dim = 0; dim < meta->n_dims; dim++) {
        if (dim < meta->n_dims - n_last) {
            merged.shape[0] *= meta->shape[dim];
        } else {
            merged.shape[merged.n_dims++] = meta->shape[dim];
        }
    }
    return meta->is_strided && kl_rules_view_strides(meta, &merged);
}

/* Every tensor argument, whichever needs the gradient. */
KL_SAVES(all)
{
    for (uint32_t i = 0; i < call->n_inputs && i < 64; i++) {
        saves->inputs |= UINT64_C(1) << i;
    }
}
