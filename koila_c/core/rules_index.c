/* SPDX-License-Identifier: Apache-2.0 */
/* rules_index.c - x[...] and x[...] = v. The outline of an index is its effect on dims: the output dim of each input dim,
 * the sizes of slices, and the dims that index tensors index. It is read item by item, as torch does. */
#include "rules.h"

#include <string.h>

/* One index tensor, or Python list of ints. All of them are broadcast together to one block of output dims. */
typedef struct {
    KlMeta meta;
    int32_t dim;   /* of the outline */
    int32_t input; /* among the call's inputs, -1: a list */
    bool is_range; /* counts 0, 1, 2, ... */
} IndexTensor;

typedef struct {
    KlMeta basic;                     /* after ints, slices, None and Ellipsis */
    int32_t origin[KL_DIMS_MAX];      /* [basic.n_dims] dim of the input, -1: a None */
    int32_t item[KL_DIMS_MAX];        /* [basic.n_dims] the item that made this dim, -1: none did */
    int32_t basic_of[KL_DIMS_MAX];    /* [input dims] its dim in basic, -1: an int removed it */
    IndexTensor tensors[KL_DIMS_MAX]; /* [n_tensors] */
    int32_t n_tensors;
    KlMeta block;        /* the broadcast shape of the index tensors */
    int32_t block_start; /* first dim of the block in the result: that of the first index tensor if
                            these are adjacent, else 0 */
    int32_t n_dims;      /* of the result */
} Outline;

typedef struct {
    const KlCall *call;
    const KlMeta *input;
    Outline *outline;
    int32_t next; /* input dim */
} Reader;

static void
push(Reader *reader, int64_t size, int64_t stride, int32_t origin, int32_t item)
{
    Outline *outline = reader->outline;
    int32_t dim = outline->basic.n_dims++;
    outline->basic.shape[dim] = size;
    outline->basic.strides[dim] = stride;
    outline->origin[dim] = origin;
    outline->item[dim] = item;
    if (origin >= 0) {
        outline->basic_of[origin] = dim;
    }
}

static int64_t
clamp(int64_t value, int64_t size)
{
    value = value < 0 ? value + size : value;
    return value < 0 ? 0 : value > size ? size : value;
}

/* Find the entries start .. stop - 1 that a slice with step 1 keeps of a dim of `size`. */
static void
slice_bounds(const KlIndex *item, int64_t size, int64_t *start, int64_t *stop)
{
    *start = item->has_start ? clamp(item->start, size) : 0;
    *stop = item->has_stop ? clamp(item->stop, size) : size;
    *stop = *stop < *start ? *start : *stop;
}

static bool
read_slice(Reader *reader, const KlIndex *item, int32_t at)
{
    int64_t size = reader->input->shape[reader->next];
    int64_t step = item->has_step ? item->step : 1;
    int64_t start = 0, stop = 0;
    if (step <= 0) {
        kl_rules_check(reader->call, false);
        return false;
    }
    slice_bounds(item, size, &start, &stop);
    push(reader, (stop - start + step - 1) / step, reader->input->strides[reader->next] * step,
         reader->next, at);
    reader->next++;
    return true;
}

static bool
read_tensor(Reader *reader, const KlIndex *item, int32_t at)
{
    Outline *outline = reader->outline;
    IndexTensor tensor = {
        .dim = outline->basic.n_dims, .input = -1, .is_range = item->is_row_range};
    if (item->kind == KL_INDEX_INTS) {
        tensor.meta = (KlMeta){.dtype = KL_DTYPE_INT64, .n_dims = 1, .shape = {item->stop}};
        kl_meta_set_contiguous(&tensor.meta);
    } else {
        tensor.meta = *reader->call->inputs[item->input];
        tensor.input = (int32_t)item->input;
        if (tensor.meta.dtype != KL_DTYPE_INT64 && tensor.meta.dtype != KL_DTYPE_INT32) {
            return false; /* the shape depends on the mask's values */
        }
        if (tensor.meta.n_dims == 0) {
            outline->basic_of[reader->next++] = -1; /* x[t] selects one entry, as an int does */
            return true;
        }
    }
    if (outline->n_tensors == KL_DIMS_MAX) {
        return false;
    }
    push(reader, reader->input->shape[reader->next], reader->input->strides[reader->next],
         reader->next, at);
    reader->next++;
    outline->tensors[outline->n_tensors++] = tensor;
    return true;
}

/* Read an item of the index. Return false if the call is declined or refused. */
static bool
read_item(Reader *reader, const KlIndex *item, int32_t at, int32_t n_skipped)
{
    const KlMeta *input = reader->input;
    if (item->kind == KL_INDEX_NONE) {
        bool is_last = reader->next == input->n_dims;
        int64_t stride = is_last ? 1 : input->shape[reader->next] * input->strides[reader->next];
        push(reader, 1, stride, -1, at);
        return true;
    }
    if (item->kind == KL_INDEX_ELLIPSIS) {
        for (int32_t i = 0; i < n_skipped; i++, reader->next++) {
            push(reader, input->shape[reader->next], input->strides[reader->next], reader->next,
                 -1);
        }
        return true;
    }
    if (item->kind == KL_INDEX_SLICE) {
        return read_slice(reader, item, at);
    }
    if (item->kind == KL_INDEX_INT) {
        int64_t size = input->shape[reader->next];
        kl_rules_check(reader->call, item->start < size && item->start >= -size);
        reader->outline->basic_of[reader->next++] = -1;
        return true;
    }
    return read_tensor(reader, item, at);
}

/* Find the broadcast shape of the index tensors, and where its dims are in the result. Return whether it has few dims. */
static bool
settle_block(const KlCall *call, Outline *outline)
{
    bool is_adjacent = outline->n_tensors > 0;
    for (int32_t i = 0; i < outline->n_tensors; i++) {
        kl_rules_broadcast(call, &outline->block, &outline->tensors[i].meta);
        if (i > 0 && outline->tensors[i].dim != outline->tensors[i - 1].dim + 1) {
            is_adjacent = false;
        }
    }
    outline->block_start = is_adjacent ? outline->tensors[0].dim : 0;
    outline->n_dims = outline->basic.n_dims - outline->n_tensors + outline->block.n_dims;
    return outline->n_dims <= KL_DIMS_MAX;
}

/* Read args[1], the index of args[0]. Return false if the call is refused, or if it is declined: a mask, or another index
 * whose result shape depends on values. */
static bool
read_outline(const KlCall *call, Outline *outline)
{
    const KlMeta *input = call->inputs[0];
    const KlArg *index = &call->args[1];
    int32_t n_taken = 0, n_none = 0, n_ellipsis = 0;
    memset(outline, 0, sizeof(*outline));
    if (index->kind != KL_ARG_INDEX || call->args[0].kind != KL_ARG_VALUE) {
        return false;
    }
    for (uint32_t i = 0; i < index->n; i++) {
        KlIndexKind kind = index->u.items[i].kind;
        n_none += kind == KL_INDEX_NONE;
        n_ellipsis += kind == KL_INDEX_ELLIPSIS;
        n_taken += kind != KL_INDEX_NONE && kind != KL_INDEX_ELLIPSIS;
        if (kind == KL_INDEX_OTHER || kind == KL_INDEX_BOOL) {
            return false;
        }
    }
    if (n_ellipsis > 1 || n_none + input->n_dims > KL_DIMS_MAX) {
        return false;
    }
    if (n_taken > input->n_dims) {
        kl_rules_check(call, false);
        return false;
    }
    Reader reader = {.call = call, .input = input, .outline = outline};
    outline->basic.is_strided = input->is_strided;
    for (uint32_t i = 0; i < index->n; i++) {
        if (!read_item(&reader, &index->u.items[i], (int32_t)i, input->n_dims - n_taken)) {
            return false;
        }
    }
    while (reader.next < input->n_dims) {
        push(&reader, input->shape[reader.next], input->strides[reader.next], reader.next, -1);
        reader.next++;
    }
    return settle_block(call, outline);
}

/* Return the number of the index tensor that indexes this dim of the outline; -1: none does. */
static int32_t
tensor_at(const Outline *outline, int32_t basic_dim)
{
    int32_t i = outline->n_tensors - 1;
    while (i >= 0 && outline->tensors[i].dim != basic_dim) {
        i--;
    }
    return i;
}

/* Return the result dim of a dim of the outline that no index tensor indexes. */
static int32_t
result_dim(const Outline *outline, int32_t basic_dim)
{
    int32_t dim = 0;
    for (int32_t i = 0; i < basic_dim; i++) {
        dim += tensor_at(outline, i) < 0;
    }
    bool is_after = outline->n_tensors > 0 && dim >= outline->block_start;
    return is_after ? dim + outline->block.n_dims : dim;
}

/* Set the shape of the result, with the strides of the input's dims, and 0 in the block of the index tensors. */
static void
result_shape(const Outline *outline, KlMeta *out)
{
    out->n_dims = outline->n_dims;
    for (int32_t i = 0; i < outline->basic.n_dims; i++) {
        if (tensor_at(outline, i) < 0) {
            int32_t dim = result_dim(outline, i);
            out->shape[dim] = outline->basic.shape[i];
            out->strides[dim] = outline->basic.strides[i];
        }
    }
    for (int32_t i = 0; i < outline->block.n_dims; i++) {
        out->shape[outline->block_start + i] = outline->block.shape[i];
        out->strides[outline->block_start + i] = 0;
    }
}

/* --- shapes ---------------------------------------------------------------------------------------------- */

/* Set the strides of an indexed result. torch runs indexing as an elementwise op over the value, with stride 0 in the
 * indexed dims, and the index tensors. */
static void
index_strides(const KlCall *call, const Outline *outline, KlMeta *out)
{
    KlMeta source = *out; /* at this point its strides are the value's */
    const KlMeta *operands[KL_DIMS_MAX + 1] = {&source};
    KlMeta indices[KL_DIMS_MAX];
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
    Outline outline;
    if (!read_outline(call, &outline)) {
        return KL_DECLINED;
    }
    KlMeta *out = kl_rules_outs(result, 1);
    result_shape(&outline, out);
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
    slice_bounds(item, size, &start, &stop);
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
range_dim(const IndexTensor *tensor, int64_t size)
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
follow_block(const KlCall *call, KlInferred *result, const Outline *outline, const KlPlace *want,
             int32_t skipped)
{
    if (outline->block.shape[want->dim] != kl_rules_span(want, kl_rules_rows(call, result))) {
        return "a batch of one sample is broadcast";
    }
    for (int32_t i = 0; i < outline->n_tensors; i++) {
        const IndexTensor *tensor = &outline->tensors[i];
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
range_place(const KlCall *call, KlInferred *result, const Outline *outline, int32_t at,
            KlPlace *place)
{
    const IndexTensor *tensor = &outline->tensors[at];
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
first_rows_tensor(const KlCall *call, const Outline *outline)
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
indexed_place(const KlCall *call, KlInferred *result, const Outline *outline, KlPlace *place)
{
    int32_t basic = outline->basic_of[place->dim];
    if (basic < 0) {
        return "a single sample is taken";
    }
    int32_t at = tensor_at(outline, basic);
    if (at >= 0) {
        return range_place(call, result, outline, at, place);
    }
    if (first_rows_tensor(call, outline) >= 0) {
        return "two inputs have their samples in different dims";
    }
    const KlIndex *items = call->args[1].u.items;
    int32_t item = outline->item[basic];
    place->dim = result_dim(outline, basic);
    return item >= 0 && items[item].kind == KL_INDEX_SLICE ? slice_place(call, result, item, place)
                                                           : NULL;
}

/* Return the result dim that holds a selection of the indexed value's rows; -1: there is none. */
static int32_t
taken_dim(const KlCall *call, const KlInferred *result, const Outline *outline)
{
    const KlPlace *place = &call->inputs[0]->place;
    int32_t basic = kl_place_is_rows(place) ? outline->basic_of[place->dim] : -1;
    if (basic < 0) {
        return -1;
    }
    int32_t end = outline->block_start + outline->block.n_dims;
    return tensor_at(outline, basic) >= 0
               ? kl_rules_largest_dim(&result->outs[0], outline->block_start, end)
               : result_dim(outline, basic);
}

KL_PLACE(getitem)
{
    Outline outline;
    KlPlace place = call->inputs[0]->place;
    const char *reason = NULL;
    (void)read_outline(call, &outline);
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
check_value(const KlCall *call, const Outline *outline)
{
    const KlMeta *value = kl_rules_input(call, 2);
    KlMeta shape = {.n_dims = 0};
    result_shape(outline, &shape);
    /* torch drops leading dims of 1 */
    kl_rules_require(call, value == NULL ? kl_rules_is_number(&call->args[2])
                                         : value->n_dims <= shape.n_dims &&
                                               (outline->n_tensors == 0 ||
                                                value->dtype == call->inputs[0]->dtype));
    kl_rules_check(call, value == NULL || kl_rules_fits(value, &shape));
}

KL_SHAPE(setitem)
{
    Outline outline;
    const KlMeta *input = call->inputs[0], *basic = &outline.basic;
    (void)kl_rules_out(result, input);
    if (is_mask(call)) {
        check_mask(call);
        return KL_OK;
    }
    if (!read_outline(call, &outline)) {
        return KL_DECLINED;
    }
    result->writes_view = !kl_rules_is_shape(basic, input);
    check_value(call, &outline);
    return KL_OK;
}

/* The call writes through a view: in backward torch copies the view's gradient and then fills it with zeros. */
KL_SAVES(setitem)
{
    Outline outline;
    saves_index(call, result, saves);
    if (!is_mask(call) && kl_rules_needs_grad(call, 0) && read_outline(call, &outline) &&
        outline.n_tensors == 0) {
        outline.basic.dtype = call->inputs[0]->dtype;
        saves->bytes_backward = 2 * kl_meta_n_bytes(&outline.basic);
    }
}

/* Make the written value follow the rows at `place` of the indexed part, which has `n_dims` dims. */
static const char *
follow_value(const KlCall *call, KlInferred *result, int32_t n_dims, const KlPlace *place)
{
    const KlMeta *value = kl_rules_input(call, 2);
    KlPlace own = *place;
    if (value == NULL) {
        return NULL;
    }
    own.dim -= n_dims - value->n_dims;
    return kl_rules_follow(call, result, call->args[2].input, &own);
}

/* Find the place at which a WHOLE target of written rows is sliced: it must have the size of the batch there, and all of
 * the dim is written: by a slice, or by an index tensor that counts its entries. */
static const char *
target_place(const KlCall *call, const KlInferred *result, const Outline *outline, KlPlace *place)
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
        int32_t tensor = tensor_at(outline, i);
        if (origin < 0 || target->shape[origin] != span) {
            continue;
        }
        if (tensor >= 0 ? outline->tensors[tensor].is_range
                        : outline->basic.shape[i] == span && result_dim(outline, i) == wanted) {
            place->dim = origin;
            return NULL;
        }
    }
    return at >= 0 ? "samples are written where an index says"
                   : "samples are written into a part of a value";
}

KL_PLACE(setitem)
{
    Outline outline;
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
        reason =
            reason == NULL ? follow_value(call, result, call->inputs[0]->n_dims, &place) : reason;
        result->outs[0].place = place;
        return reason == NULL ? KL_OK : kl_rules_once(result, reason);
    }
    (void)read_outline(call, &outline);
    if (!kl_place_is_rows(&place)) {
        reason = target_place(call, result, &outline, &place);
        result->split.places[0] = place;
    }
    KlPlace written = place;
    /* The place is needed for a WHOLE target, too: a slice in the index may have a number to rewrite. */
    reason = reason == NULL ? indexed_place(call, result, &outline, &written) : reason;
    reason = reason == NULL ? follow_value(call, result, outline.n_dims, &written) : reason;
    return reason != NULL ? kl_rules_once(result, reason) : kl_rules_at(result, place);
}
