/* SPDX-License-Identifier: Apache-2.0 */
/* rules_outline.c - reads an index expression, item by item, as torch does. */
#include "rules_outline.h"

#include <string.h>

typedef struct {
    const KlCall *call;
    const KlMeta *input;
    KlOutline *outline;
    int32_t next; /* input dim */
} Reader;

static void
push(Reader *reader, int64_t size, int64_t stride, int32_t origin, int32_t item)
{
    KlOutline *outline = reader->outline;
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

void
kl_outline_slice_bounds(const KlIndex *item, int64_t size, int64_t *start, int64_t *stop)
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
    kl_outline_slice_bounds(item, size, &start, &stop);
    push(reader, (stop - start + step - 1) / step, reader->input->strides[reader->next] * step,
         reader->next, at);
    reader->next++;
    return true;
}

static bool
read_tensor(Reader *reader, const KlIndex *item, int32_t at)
{
    KlOutline *outline = reader->outline;
    KlOutlineTensor tensor = {
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
    if (outline->n_tensors == KL_OUTLINE_TENSORS_MAX) {
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
settle_block(const KlCall *call, KlOutline *outline)
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

bool
kl_outline_read(const KlCall *call, KlOutline *outline)
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

bool
kl_outline_is_indexed(const KlOutline *outline, int32_t basic_dim)
{
    bool is_found = false;
    for (int32_t i = 0; i < outline->n_tensors && !is_found; i++) {
        is_found = outline->tensors[i].dim == basic_dim;
    }
    return is_found;
}

int32_t
kl_outline_result_dim(const KlOutline *outline, int32_t basic_dim)
{
    int32_t dim = 0;
    for (int32_t i = 0; i < basic_dim; i++) {
        dim += !kl_outline_is_indexed(outline, i);
    }
    bool is_after = outline->n_tensors > 0 && dim >= outline->block_start;
    return is_after ? dim + outline->block.n_dims : dim;
}

void
kl_outline_result_shape(const KlOutline *outline, KlMeta *out)
{
    out->n_dims = outline->n_dims;
    for (int32_t i = 0; i < outline->basic.n_dims; i++) {
        if (!kl_outline_is_indexed(outline, i)) {
            int32_t dim = kl_outline_result_dim(outline, i);
            out->shape[dim] = outline->basic.shape[i];
            out->strides[dim] = outline->basic.strides[i];
        }
    }
    for (int32_t i = 0; i < outline->block.n_dims; i++) {
        out->shape[outline->block_start + i] = outline->block.shape[i];
        out->strides[outline->block_start + i] = 0;
    }
}
