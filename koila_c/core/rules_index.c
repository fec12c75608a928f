/* SPDX-License-Identifier: Apache-2.0 */
/* rules_index.c - x[...] and x[...] = v: shapes and places from the outline of the index. */
#include "rules_outline.h"

/* Set the strides of an indexed result. torch runs indexing as an elementwise op over the value, with stride 0 in the
 * indexed dims, and the index tensors. */
static void
index_strides(const KlCall *call, const KlOutline *outline, KlMeta *out)
{
    KlMeta source = *out; /* at this point its strides are the value's */
    const KlMeta *operands[KL_OUTLINE_TENSORS_MAX + 1] = {&source};
    KlMeta indices[KL_OUTLINE_TENSORS_MAX];
    source.is_strided = outline->basic.is_strided;
    for (int32_t i = 0; i < outline->n_tensors; i++) {
        const KlMeta *meta = &outline->tensors[i].meta;
        KlMeta *index = &indices[i];
        KlMeta block = {.is_strided = true};
        kl_rules_expand(call, meta, &block, outline->block.shape, outline->block.n_dims);
        *index = (KlMeta){.n_dims = out->n_dims};
        for (int32_t dim = 0; dim < out->n_dims; dim++) {
            int32_t own = dim - outline->block_start;
            index->shape[dim] = own >= 0 && own < block.n_dims ? block.shape[own] : 1;
        }
        bool is_view = kl_rules_view_strides(&block, index);
        /* other ints are converted first, which changes strides with holes */
        index->is_strided = is_view && meta->is_strided &&
                            (meta->dtype == KL_DTYPE_INT64 || kl_rules_is_dense(meta));
        operands[i + 1] = index;
    }
    kl_rules_iterate(out, operands, (uint32_t)outline->n_tensors + 1, false);
    out->is_strided = out->is_strided && kl_meta_n_elements(out) > 0;
}

KL_SHAPE(getitem)
{
    KlOutline outline;
    if (!kl_outline_read(call, &outline)) {
        return KL_DECLINED;
    }
    KlMeta *out = kl_rules_outs(result, 1);
    kl_outline_result_shape(&outline, out);
    if (outline.n_tensors > 0) {
        index_strides(call, &outline, out);
        return KL_OK;
    }
    out->is_strided = outline.basic.is_strided;
    kl_rules_alias(result, KL_ALIAS_VIEW, 0);
    return KL_OK;
}

/* --- places --------------------------------------------------------------------------------------------- */

/* Find the place of the rows after a slice of their dim. A slice that keeps whole repetitions of all rows has rows, and
 * its numbers are rewritten for chunks. Return NULL, or the reason why there are no rows. */
static const char *
slice_place(const KlCall *call, KlInferred *result, int32_t at, KlPlace *place)
{
    const KlIndex *item = &call->args[1].u.items[at];
    int64_t turn = kl_rules_rows(call, result) * place->inner;
    int64_t size = place->outer * turn;
    int64_t start = 0, stop = 0;
    kl_outline_slice_bounds(item, size, &start, &stop);
    if ((item->has_step && item->step != 1) || start % turn != 0 || stop % turn != 0 ||
        stop == start) {
        return "a part of the samples is taken";
    }
    place->outer = (stop - start) / turn;
    /* A bound past either end is cut off in every chunk too. */
    if (item->has_start && item->start != 0 && item->start >= -size && item->start <= size) {
        (void)kl_rules_rewrite(result, 1, (uint32_t)at, 0, item->start / turn * place->inner);
    }
    if (item->has_stop && item->stop >= -size && item->stop <= size) {
        (void)kl_rules_rewrite(result, 1, (uint32_t)at, 1, item->stop / turn * place->inner);
    }
    return NULL;
}

/* Return the dim of an index tensor that counts all entries of the rows' dim (0, 1, 2, ...); -1: there is none. */
static int32_t
range_dim(const KlOutlineTensor *tensor, int64_t size)
{
    int32_t found = -1;
    for (int32_t dim = tensor->meta.n_dims - 1; dim >= 0; dim--) {
        if (tensor->meta.shape[dim] != 1 && tensor->meta.shape[dim] != size) {
            return -1;
        }
        if (tensor->meta.shape[dim] == size) {
            found = dim;
        }
    }
    return kl_meta_n_elements(&tensor->meta) == size ? found : -1;
}

/* Make each index tensor but `skipped` follow the rows at `want` of the block. */
static const char *
follow_block(const KlCall *call, KlInferred *result, const KlOutline *outline, const KlPlace *want,
             int32_t skipped)
{
    if (outline->block.shape[want->dim] != kl_rules_span(want, kl_rules_rows(call, result))) {
        return "a batch of one sample is broadcast";
    }
    for (int32_t i = 0; i < outline->n_tensors; i++) {
        const KlOutlineTensor *tensor = &outline->tensors[i];
        KlPlace own = *want;
        own.dim -= outline->block.n_dims - tensor->meta.n_dims;
        if (i == skipped) {
            continue;
        }
        if (tensor->input < 0) {
            if (own.dim >= 0 && tensor->meta.shape[own.dim] != 1) {
                return "a list of ints is as long as the batch";
            }
            continue;
        }
        const char *reason = kl_rules_follow(call, result, (uint32_t)tensor->input, &own);
        if (reason != NULL) {
            return reason;
        }
    }
    return NULL;
}

/* x[arange(size), index]: each entry of the rows' dim is read with its own index. */
static const char *
range_place(const KlCall *call, KlInferred *result, const KlOutline *outline, int32_t at,
            KlPlace *place)
{
    const KlOutlineTensor *tensor = &outline->tensors[at];
    int32_t dim = range_dim(tensor, kl_rules_span(place, kl_rules_rows(call, result)));
    if (!tensor->is_range || tensor->input < 0 || tensor->input >= 64 || dim < 0) {
        return "samples are chosen by an index";
    }
    KlPlace own = *place;
    own.dim = dim;
    KlPlace want = own;
    want.dim += outline->block.n_dims - tensor->meta.n_dims;
    const char *reason = follow_block(call, result, outline, &want, at);
    result->split.places[tensor->input] = own;
    result->split.row_ranges |= UINT64_C(1) << tensor->input;
    place->dim = outline->block_start + want.dim;
    return reason;
}

static int32_t
first_rows_tensor(const KlCall *call, const KlOutline *outline)
{
    for (int32_t i = 0; i < outline->n_tensors; i++) {
        int32_t input = outline->tensors[i].input;
        if (input >= 0 && kl_place_is_rows(&call->inputs[input]->place)) {
            return i;
        }
    }
    return -1;
}

/* Find where the rows of the indexed value are in the result. Return NULL, or the reason why it has none. */
static const char *
indexed_place(const KlCall *call, KlInferred *result, const KlOutline *outline, KlPlace *place)
{
    int32_t basic = outline->basic_of[place->dim];
    if (basic < 0) {
        return "a single sample is taken";
    }
    for (int32_t i = 0; i < outline->n_tensors; i++) {
        if (outline->tensors[i].dim == basic) {
            return range_place(call, result, outline, i, place);
        }
    }
    if (first_rows_tensor(call, outline) >= 0) {
        return "two inputs have their samples in different dims";
    }
    const KlIndex *items = call->args[1].u.items;
    int32_t item = outline->item[basic];
    place->dim = kl_outline_result_dim(outline, basic);
    return item >= 0 && items[item].kind == KL_INDEX_SLICE ? slice_place(call, result, item, place)
                                                           : NULL;
}

/* Return the result dim that holds a selection of the indexed value's rows; -1: there is none. */
static int32_t
taken_dim(const KlCall *call, const KlInferred *result, const KlOutline *outline)
{
    const KlPlace *place = &call->inputs[0]->place;
    int32_t basic = kl_place_is_rows(place) ? outline->basic_of[place->dim] : -1;
    if (basic < 0) {
        return -1;
    }
    int32_t end = outline->block_start + outline->block.n_dims;
    return kl_outline_is_indexed(outline, basic)
               ? kl_rules_largest_dim(&result->outs[0], outline->block_start, end)
               : kl_outline_result_dim(outline, basic);
}

KL_PLACE(getitem)
{
    KlOutline outline;
    KlPlace place = call->inputs[0]->place;
    const char *reason = NULL;
    (void)kl_outline_read(call, &outline);
    if (kl_place_is_rows(&place)) {
        reason = indexed_place(call, result, &outline, &place);
    } else {
        int32_t at = first_rows_tensor(call, &outline);
        if (at < 0) {
            return kl_rules_once(result, "a single entry is chosen by a sample");
        }
        place = outline.tensors[at].meta.place;
        place.dim += outline.block.n_dims - outline.tensors[at].meta.n_dims;
        reason = follow_block(call, result, &outline, &place, -1);
        place.dim += outline.block_start;
    }
    if (reason != NULL) {
        return kl_rules_once_again(result, reason, taken_dim(call, result, &outline));
    }
    return kl_rules_at(result, place);
}

/* --- x[index] = value ------------------------------------------------------------------------------------ */

/* Whether the call is x[mask] = value with a single value: the only use of a mask in which no shape depends on the mask's
 * values. */
static bool
is_mask(const KlCall *call)
{
    const KlArg *index = &call->args[1];
    return index->kind == KL_ARG_INDEX && index->n == 1 &&
           index->u.items[0].kind == KL_INDEX_TENSOR &&
           call->inputs[index->u.items[0].input]->dtype == KL_DTYPE_BOOL;
}

static void
check_mask(const KlCall *call)
{
    const KlMeta *target = call->inputs[0];
    const KlMeta *mask = call->inputs[call->args[1].u.items[0].input];
    const KlMeta *value = kl_rules_input(call, 2);
    kl_rules_require(call, mask->n_dims > 0 &&
                               (value == NULL || value->n_dims == 0 ||
                                (target->n_dims - value->n_dims >= mask->n_dims &&
                                 value->dtype == target->dtype && kl_rules_fits(value, target))));
    kl_rules_check(call, kl_rules_are_alike(mask, target, mask->n_dims));
}

static void
check_value(const KlCall *call, const KlOutline *outline)
{
    const KlMeta *value = kl_rules_input(call, 2);
    KlMeta shape = {.n_dims = 0};
    kl_outline_result_shape(outline, &shape);
    /* torch drops leading dims of 1 */
    kl_rules_require(call, value == NULL ? kl_rules_is_number(&call->args[2])
                                         : value->n_dims <= shape.n_dims &&
                                               (outline->n_tensors == 0 ||
                                                value->dtype == call->inputs[0]->dtype));
    kl_rules_check(call, value == NULL || kl_rules_fits(value, &shape));
}

KL_SHAPE(setitem)
{
    KlOutline outline;
    const KlMeta *input = call->inputs[0], *basic = &outline.basic;
    (void)kl_rules_out(result, input);
    if (is_mask(call)) {
        check_mask(call);
        return KL_OK;
    }
    if (!kl_outline_read(call, &outline)) {
        return KL_DECLINED;
    }
    result->writes_view = !kl_rules_is_shape(basic, input);
    check_value(call, &outline);
    return KL_OK;
}

/* The call writes through a view: in backward torch copies the view's gradient and then fills it with zeros. */
KL_SAVES(setitem)
{
    KlOutline outline;
    saves_index(call, result, saves);
    if (!is_mask(call) && kl_rules_needs_grad(call, 0) && kl_outline_read(call, &outline) &&
        outline.n_tensors == 0) {
        outline.basic.dtype = call->inputs[0]->dtype;
        saves->bytes_backward = 2 * kl_meta_n_bytes(&outline.basic);
    }
}

/* Make the written value follow the rows at `place` of the indexed part. */
static const char *
follow_value(const KlCall *call, KlInferred *result, const KlOutline *outline, const KlPlace *place)
{
    const KlMeta *value = kl_rules_input(call, 2);
    KlPlace own = *place;
    if (value == NULL) {
        return NULL;
    }
    own.dim -= outline->n_dims - value->n_dims;
    return kl_rules_follow(call, result, call->args[2].input, &own);
}

/* Whether a dim of the outline is indexed by 0, 1, 2, ... */
static bool
is_range_at(const KlOutline *outline, int32_t basic_dim)
{
    bool is_range = false;
    for (int32_t i = 0; i < outline->n_tensors; i++) {
        is_range =
            is_range || (outline->tensors[i].dim == basic_dim && outline->tensors[i].is_range);
    }
    return is_range;
}

/* Find the place at which a WHOLE target of written rows is sliced: it must have the size of the batch there, and all of
 * the dim is written: by a slice, or by an index tensor that counts its entries. */
static const char *
target_place(const KlCall *call, const KlInferred *result, const KlOutline *outline, KlPlace *place)
{
    const KlMeta *target = call->inputs[0], *value = kl_rules_input(call, 2);
    int32_t at = first_rows_tensor(call, outline), wanted = -1;
    if (at >= 0) {
        *place = outline->tensors[at].meta.place;
    } else if (value != NULL && kl_place_is_rows(&value->place)) {
        *place = value->place;
        wanted = place->dim + outline->n_dims - value->n_dims;
    } else {
        return "samples are written where an index says";
    }
    int64_t span = kl_rules_span(place, kl_rules_rows(call, result));
    for (int32_t i = 0; i < outline->basic.n_dims; i++) {
        int32_t origin = outline->origin[i];
        bool is_indexed = kl_outline_is_indexed(outline, i);
        if (origin < 0 || target->shape[origin] != span) {
            continue;
        }
        if (is_indexed
                ? is_range_at(outline, i)
                : outline->basic.shape[i] == span && kl_outline_result_dim(outline, i) == wanted) {
            place->dim = origin;
            return NULL;
        }
    }
    return at >= 0 ? "samples are written where an index says"
                   : "samples are written into a part of a value";
}

KL_PLACE(setitem)
{
    KlOutline outline;
    KlPlace place = call->inputs[0]->place;
    const char *reason = NULL;
    if (is_mask(call)) {
        uint32_t mask = call->args[1].u.items[0].input;
        place = kl_place_is_rows(&place) ? place : call->inputs[mask]->place;
        reason = kl_rules_match(call, result, 0, &place);
        /* A mask that ends before the rows' dim is read whole, so it must not have rows. */
        bool is_met =
            place.dim < call->inputs[mask]->n_dims || kl_place_is_rows(&call->inputs[mask]->place);
        if (reason == NULL && is_met) {
            reason = kl_rules_match(call, result, mask, &place);
        }
        const KlMeta *value = kl_rules_input(call, 2);
        if (reason == NULL && value != NULL) {
            KlPlace own = place;
            own.dim -= call->inputs[0]->n_dims - value->n_dims;
            reason = kl_rules_follow(call, result, call->args[2].input, &own);
        }
        result->outs[0].place = place;
        return reason == NULL ? KL_OK : kl_rules_once(result, reason);
    }
    (void)kl_outline_read(call, &outline);
    if (!kl_place_is_rows(&place)) {
        reason = target_place(call, result, &outline, &place);
        result->split.places[0] = place;
    }
    KlPlace written = place;
    /* The place is needed for a WHOLE target, too: a slice in the index may have a number to rewrite. */
    reason = reason == NULL ? indexed_place(call, result, &outline, &written) : reason;
    reason = reason == NULL ? follow_value(call, result, &outline, &written) : reason;
    return reason != NULL ? kl_rules_once(result, reason) : kl_rules_at(result, place);
}
