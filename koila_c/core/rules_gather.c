/* SPDX-License-Identifier: Apache-2.0 */
/* rules_gather.c - ops that read or write the entries of a dim that an index tensor names. They do not broadcast: an
 * index that is shorter than the value is legal, but in a chunk it would name other rows. So an input that has the
 * rows' dim must have all rows. */
#include "rules.h"

#include <string.h>

KlRule shape_scatter;
KlSavesRule saves_scatter_reduce;
static const char index_couples[] = "an index reaches across the samples";

/* Return how many tensors of the source's size the backward of a reduction makes, as measured; -1: there is none such. */
static int64_t
count_made(const KlCall *call)
{
    bool is_scatter = call->row->shape == shape_scatter;
    const char *name = kl_rules_text(call, 4, "");
    bool is_extreme = strcmp(name, "amax") == 0 || strcmp(name, "amin") == 0;
    bool is_sum = is_scatter && strcmp(name, "sum") == 0; /* index_reduce has no sum */
    return is_extreme                  ? (is_scatter ? 4 : 3)
           : strcmp(name, "mean") == 0 ? 2
           : strcmp(name, "prod") == 0 ? 6
           : is_sum                    ? 0
                                       : -1;
}

/* Get the dim in args[1]. Return the index in args[2], of `least` to `most` dims. */
static const KlMeta *
get_index(const KlCall *call, int32_t least, int32_t most, int32_t *dim)
{
    *dim = kl_rules_dim(call, 1, 0, call->inputs[0]->n_dims);
    const KlMeta *index = kl_rules_tensor(call, 2, least, most);
    kl_rules_require(call, kl_rules_is_given(call, 1) && call->inputs[0]->n_dims > 0 &&
                               (index->dtype == KL_DTYPE_INT64 || index->dtype == KL_DTYPE_INT32) &&
                               (call->row->saves != saves_scatter_reduce || count_made(call) >= 0));
    return index;
}

/* Whether `small` is not larger than `large` in any dim except `free_dim` (-1: in any dim). */
static bool
fits(const KlMeta *small, const KlMeta *large, int32_t free_dim)
{
    if (small->n_dims != large->n_dims) {
        return false;
    }
    for (int32_t dim = 0; dim < small->n_dims; dim++) {
        if (dim != free_dim && small->shape[dim] > large->shape[dim]) {
            return false;
        }
    }
    return true;
}

KL_SHAPE(gather)
{
    int32_t dim = 0;
    const KlMeta *index = get_index(call, 1, KL_DIMS_MAX, &dim);
    kl_rules_require(call, !kl_rules_is_given(call, 3));
    kl_rules_check(call, kl_meta_n_elements(index) == 0 || fits(index, call->inputs[0], dim));
    return kl_rules_out_contiguous(result, index);
}

/* Place a call whose index may be along dim `dim`: with the rows of all inputs but `other`, and of the result, at one
 * place, if that is in another dim. Return KL_OK. */
static KlStatus
match_beside(const KlCall *call, KlInferred *result, int32_t dim, uint32_t other)
{
    const KlPlace *want = &call->inputs[kl_rules_first_rows(call)]->place;
    const char *reason = want->dim == dim ? index_couples : NULL;
    for (uint32_t i = 0; i < call->n_inputs && reason == NULL; i++) {
        reason = i != other ? kl_rules_match(call, result, i, want) : NULL;
    }
    result->outs[0].place = *want;
    return reason == NULL ? KL_OK : kl_rules_once(result, reason);
}

KL_PLACE(scatter)
{
    int32_t dim = kl_rules_dim(call, 1, 0, call->inputs[0]->n_dims);
    return match_beside(call, result, dim, KL_ID_NONE);
}

/* Whether each row of the index, input 1, reads all of the value along `dim`. */
static bool
is_read_whole(const KlCall *call, int32_t dim)
{
    const KlPlace *of_index = &call->inputs[1]->place;
    return kl_place_is_rows(of_index) && of_index->dim == dim &&
           !kl_place_is_rows(&call->inputs[0]->place);
}

KL_PLACE(gather)
{
    int32_t dim = kl_rules_dim(call, 1, 0, call->inputs[0]->n_dims);
    return is_read_whole(call, dim) ? kl_rules_at(result, call->inputs[1]->place)
                                    : place_scatter(call, result);
}

/* searchsorted(sequence, x): the sequence has one dim, or all dims of x but the last in common with it */
KL_SHAPE(searchsorted)
{
    const KlMeta *sequence = kl_rules_tensor(call, 0, 1, KL_DIMS_MAX);
    const KlMeta *input = kl_rules_tensor(call, 1, 0, KL_DIMS_MAX);
    bool is_fit = sequence->n_dims == 1 || sequence->n_dims == input->n_dims;
    is_fit = is_fit && kl_rules_are_alike(sequence, input, sequence->n_dims - 1);
    kl_rules_require(call,
                     is_fit && sequence->dtype == input->dtype && !kl_rules_is_given(call, 5));
    return kl_rules_out_contiguous(result, input);
}

KL_DTYPE(searchsorted)
{
    bool is_short = kl_rules_bool(call, 2, false);
    return kl_rules_set_dtypes(result, is_short ? KL_DTYPE_INT32 : KL_DTYPE_INT64);
}

KL_PLACE(searchsorted)
{
    const KlMeta *sequence = call->inputs[0], *input = call->inputs[1];
    if (sequence->n_dims == 1 && !kl_place_is_rows(&sequence->place)) {
        return kl_rules_at(result, input->place);
    }
    return match_beside(call, result, sequence->n_dims - 1, KL_ID_NONE);
}

/* scatter(x, dim, index, src or value), scatter_add: the result has x's shape */
KL_SHAPE(scatter)
{
    int32_t dim = 0;
    const KlMeta *input = call->inputs[0], *source = kl_rules_input(call, 3);
    const KlMeta *index = get_index(call, 1, KL_DIMS_MAX, &dim);
    kl_rules_require(call, kl_meta_n_elements(index) > 0 &&
                               (source == NULL ? kl_rules_is_number(&call->args[3])
                                               : source->dtype == input->dtype));
    kl_rules_check(call, fits(index, input, dim) && (source == NULL || fits(index, source, -1)));
    return kl_rules_out_contiguous(result, input);
}

KL_SHAPE(index_select)
{
    int32_t dim = 0;
    const KlMeta *index = get_index(call, 0, 1, &dim);
    KlMeta out = *call->inputs[0];
    out.shape[dim] = kl_meta_n_elements(index);
    return kl_rules_out_contiguous(result, &out);
}

KL_PLACE(index_select)
{
    const KlPlace *of_value = &call->inputs[0]->place, *of_index = &call->inputs[1]->place;
    int32_t dim = kl_rules_dim(call, 1, 0, call->inputs[0]->n_dims);
    if (kl_place_is_rows(of_value) && (kl_place_is_rows(of_index) || of_value->dim == dim)) {
        return kl_rules_once_again(result, index_couples, dim);
    }
    result->outs[0].place = *of_value;
    if (kl_place_is_rows(of_index)) {
        result->outs[0].place = *of_index;
        result->outs[0].place.dim = dim;
    }
    return KL_OK;
}

/* select_masked(x, mask, n_each): x[mask], if the mask selects n_each elements in each entry of dim 0 */
KL_SHAPE(select_masked)
{
    const KlMeta *input = call->inputs[0], *mask = kl_rules_tensor(call, 1, 1, input->n_dims);
    int64_t n_each = kl_rules_int(call, 2, 0);
    kl_rules_require(call, n_each > 0 && mask->dtype == KL_DTYPE_BOOL);
    KlMeta *out = kl_rules_outs(result, 1);
    out->n_dims = input->n_dims - mask->n_dims + 1;
    out->shape[0] = mask->shape[0] * n_each;
    kl_rules_check(call, kl_rules_are_alike(mask, input, mask->n_dims));
    for (int32_t dim = mask->n_dims; dim < input->n_dims; dim++) {
        out->shape[dim - mask->n_dims + 1] = input->shape[dim];
    }
    if (kl_meta_is_contiguous(input) || mask->n_dims == input->n_dims) {
        kl_meta_set_contiguous(out);
    }
    return KL_OK;
}

KL_PLACE(select_masked)
{
    KlPlace want = call->inputs[kl_rules_first_rows(call)]->place;
    int32_t n_masked = call->inputs[1]->n_dims;
    if (want.dim >= n_masked && !kl_place_is_rows(&call->inputs[1]->place)) {
        want.dim -= n_masked - 1;
        return kl_rules_at(result, want);
    }
    if (want.dim != 0) {
        return kl_rules_once(result, "a mask chooses among the samples");
    }
    result->outs[0].place = want;
    result->outs[0].place.inner *= call->args[2].u.i; /* n_each: the shape rule has checked it */
    const char *reason = kl_rules_match(call, result, 0, &want);
    reason = reason == NULL ? kl_rules_match(call, result, 1, &want) : reason;
    return reason == NULL ? KL_OK : kl_rules_once(result, reason);
}

/* Backward needs the mask. Forward and backward each allocate the indices of the selected elements. */
KL_SAVES(select_masked)
{
    int64_t n_indices = result->outs[0].shape[0] * call->inputs[1]->n_dims;
    saves->inputs |= kl_rules_needs_grad(call, 0) ? UINT64_C(1) << 1 : 0;
    saves->bytes_workspace = saves->bytes_backward =
        n_indices * (int64_t)kl_meta_dtype_bytes(KL_DTYPE_INT64);
}

/* index_add(x, dim, index, source), index_copy: slices of source are written at the indices */
KL_SHAPE(index_add)
{
    int32_t dim = 0;
    const KlMeta *input = call->inputs[0], *index = get_index(call, 0, 1, &dim);
    const KlMeta *source = kl_rules_tensor(call, 3, 0, KL_DIMS_MAX);
    KlMeta wanted = *input;
    wanted.shape[dim] = kl_meta_n_elements(index);
    kl_rules_require(call, source->dtype == input->dtype && source->n_dims == input->n_dims);
    kl_rules_check(call, kl_rules_is_shape(source, &wanted));
    KlMeta *out = kl_rules_out(result, input);
    if (kl_meta_is_contiguous(input)) {
        kl_meta_set_contiguous(out);
    }
    return KL_OK;
}

KL_PLACE(index_add)
{
    int32_t dim = kl_rules_dim(call, 1, 0, call->inputs[0]->n_dims);
    return kl_place_is_rows(&call->inputs[1]->place) ? kl_rules_once(result, index_couples)
                                                     : match_beside(call, result, dim, 1);
}

KL_SHAPE(index_fill)
{
    int32_t dim = 0;
    const KlMeta *value = kl_rules_input(call, 3);
    (void)get_index(call, 0, 1, &dim);
    kl_rules_require(call, value != NULL ? value->n_dims == 0 : kl_rules_is_number(&call->args[3]));
    kl_rules_preserve(kl_rules_out(result, call->inputs[0]), call->inputs[0]);
    return KL_OK;
}

KL_PLACE(index_fill)
{
    int32_t dim = kl_rules_dim(call, 1, 0, call->inputs[0]->n_dims);
    const KlPlace *place = &call->inputs[0]->place;
    bool is_coupled =
        !kl_place_is_rows(place) || kl_place_is_rows(&call->inputs[1]->place) || place->dim == dim;
    return is_coupled ? kl_rules_once(result, index_couples) : kl_rules_at(result, *place);
}

KL_SAVES(scatter_reduce)
{
    kl_rules_keep(call, result, saves);
    int64_t n = count_made(call), n_of_result = n == 3 || n == 4 ? n + 1 : n; /* amax, amin */
    int64_t n_out = kl_meta_n_bytes(&result->outs[0]), n_src = kl_meta_n_bytes(call->inputs[2]);
    saves->bytes_workspace = n == 2 ? n_out + n_src + kl_meta_n_elements(&result->outs[0]) : 0;
    saves->bytes_backward = n_of_result * n_out + n * n_src;
}
