/* SPDX-License-Identifier: Apache-2.0 */
/* rules_norm.c - normalization over the features of a row (layer, rms, group, instance) and over the rows
 * (batch_norm in training). */
#include "rules.h"

/* Whether batch_norm is given the statistics of all rows, in words of koila's own that are the last inputs. */
static bool
has_batch_statistics(const KlCall *call)
{
    return call->n_args > 10 && kl_rules_is_given(call, 9) && kl_rules_is_given(call, 10);
}

/* Input 0 is real floating-point; weights and statistics have its dtype, or float32 with a half-precision input. */
KL_DTYPE(norm)
{
    KlDtype dtype = call->inputs[0]->dtype;
    bool is_half = dtype == KL_DTYPE_FLOAT16 || dtype == KL_DTYPE_BFLOAT16;
    uint32_t n = call->n_inputs - (has_batch_statistics(call) ? 2 : 0);
    for (uint32_t i = 0; i < n; i++) {
        KlDtype own = call->inputs[i]->dtype;
        bool is_wide = i > 0 && is_half && own == KL_DTYPE_FLOAT32;
        kl_rules_require(call, kl_meta_dtype_is_float(own) && (own == dtype || is_wide) &&
                                   (i <= 1 || own == call->inputs[1]->dtype));
    }
    return kl_rules_set_dtypes(result, dtype);
}

/* Return the dtype of saved statistics: that of the parameters, if these are wider than the input. */
static KlDtype
stats_dtype(const KlCall *call)
{
    return call->inputs[call->n_inputs > 1 ? 1 : 0]->dtype;
}

/* Whether args[arg] is absent, None or a vector of n entries. */
static bool
is_vector(const KlCall *call, uint32_t arg, int64_t n)
{
    const KlMeta *meta = kl_rules_input(call, arg);
    return !kl_rules_is_given(call, arg) ||
           (meta != NULL && meta->n_dims == 1 && meta->shape[0] == n);
}

/* --- layer_norm, rms_norm: input, normalized_shape, weight, [bias,] eps ----------------------- */

/* Check args[1], the sizes of the last dims, which are normalized; the weights must have their shape. */
static void
check_normalized(const KlCall *call, uint32_t n_weights)
{
    uint32_t n = 0;
    const int64_t *ints = kl_rules_ints(call, 1, &n);
    const KlMeta *input = kl_rules_tensor(call, 0, 1, KL_DIMS_MAX);
    const bool is_within = n <= (uint32_t)input->n_dims;
    kl_rules_require(call, call->args[1].kind == KL_ARG_INTS && n > 0 && is_within &&
                               kl_meta_n_elements(input) > 0);
    KlMeta normalized = {.n_dims = is_within ? (int32_t)n : 0};
    for (int32_t i = 0; i < normalized.n_dims; i++) {
        normalized.shape[i] = ints[i];
        kl_rules_check(call, input->shape[input->n_dims - normalized.n_dims + i] == ints[i]);
    }
    for (uint32_t arg = 2; arg < 2 + n_weights; arg++) {
        const KlMeta *weight = kl_rules_optional(call, arg, 1, KL_DIMS_MAX);
        kl_rules_require(call, weight == NULL || kl_rules_is_shape(weight, &normalized));
    }
}

KL_SHAPE(layer_norm)
{
    check_normalized(call, 2);
    return kl_rules_out_contiguous(result, call->inputs[0]);
}

KL_SHAPE(rms_norm)
{
    check_normalized(call, 1);
    return kl_rules_out_plain(call, result, call->inputs[0]);
}

KL_PLACE(layer_norm)
{
    int32_t n_alike = call->inputs[0]->n_dims - (int32_t)call->args[1].n;
    return kl_rules_wire_alike(call, result, kl_rules_letters(n_alike),
                               "normalised over the batch");
}

/* Return the number of groups that are normalized each by itself. */
static int64_t
count_groups(const KlCall *call)
{
    int64_t count = 1;
    const KlMeta *input = call->inputs[0];
    for (int32_t dim = 0; dim < input->n_dims - (int32_t)call->args[1].n; dim++) {
        count *= input->shape[dim];
    }
    return count;
}

KL_SAVES(layer_norm)
{
    saves_all(call, result, saves);
    kl_rules_save_new(result, saves, 2 * count_groups(call), stats_dtype(call)); /* mean, rstd */
    if (!kl_meta_is_contiguous(call->inputs[0])) { /* works on a copy */
        saves->bytes_workspace = saves->bytes_backward = kl_meta_n_bytes(call->inputs[0]);
    }
}

/* torch composes it of smaller ops, which compute in float32 for half precision. Their temporary memory is measured. */
KL_SAVES(rms_norm)
{
    const KlMeta *input = call->inputs[0];
    const bool is_half = kl_meta_dtype_bytes(input->dtype) == 2;
    const bool is_wanted = kl_rules_needs_grad(call, 0), is_saved = result->outs[0].requires_grad;
    KlDtype dtype = is_half ? KL_DTYPE_FLOAT32 : input->dtype;
    int64_t n = kl_meta_n_elements(input), n_out = kl_meta_n_bytes(input);
    int64_t n_all = n * (int64_t)kl_meta_dtype_bytes(dtype);
    int64_t n_kept = kl_rules_needs_grad(call, 2) ? n_all : 0;
    if (is_wanted) {
        kl_rules_save(call, saves, 2);
        kl_rules_save_new(result, saves, count_groups(call) + is_half * n, dtype); /* rstd */
        saves->inputs |= !is_half;
    }
    kl_rules_save_new(result, saves, n_kept > 0 ? n : 0, dtype);
    saves->bytes_workspace = is_half ? n_all + !is_wanted * n_out : 0;
    if (!kl_meta_is_contiguous(input)) {
        saves->bytes_workspace += is_wanted ? n_out : n_all;
    } else if (!is_saved && kl_rules_input(call, 2) != NULL) {
        saves->bytes_workspace += n_all;
    }
    int64_t n_back = (3 + is_half) * n_all - n_kept; /* what was kept goes before */
    saves->bytes_backward = is_wanted ? n_back : n_all + is_half * n_out;
}

/* --- group_norm: input, num_groups, weight, bias, eps ----------------------------------------- */

/* Make an output in torch's memory format of the first input. Return KL_OK. */
static KlStatus
make_like(const KlCall *call, KlInferred *result)
{
    const KlMeta *input = call->inputs[0];
    return input->n_dims <= 3 ? kl_rules_out_contiguous(result, input)
                              : kl_rules_out_format(call, result, input);
}

KL_SHAPE(group_norm)
{
    const int64_t n_groups = kl_rules_int(call, 1, 0);
    const KlMeta *input = kl_rules_tensor(call, 0, 2, KL_DIMS_MAX);
    kl_rules_require(call, n_groups > 0 && kl_meta_n_elements(input) > 0 &&
                               is_vector(call, 2, input->shape[1]) &&
                               is_vector(call, 3, input->shape[1]));
    kl_rules_check(call, n_groups <= 0 || input->shape[1] % n_groups == 0);
    return make_like(call, result);
}

KL_PLACE(group_norm)
{
    return kl_rules_wire_alike(call, result, kl_rules_letters(1), "normalised over the batch");
}

/* Note that the input is saved, or the dense copy that torch makes of it. */
static void
save_dense(const KlCall *call, const KlInferred *result, KlSaves *saves)
{
    const KlMeta *input = call->inputs[0];
    bool is_dense = kl_meta_is_contiguous(input);
    if (!is_dense && input->is_strided && result->outs[0].is_strided && kl_rules_is_dense(input)) {
        /* channels_last, and the output is too */
        is_dense = true;
        for (int32_t dim = 0; dim < input->n_dims; dim++) {
            is_dense = is_dense && (input->shape[dim] == 1 ||
                                    result->outs[0].strides[dim] == input->strides[dim]);
        }
    }
    if (is_dense || !input->is_strided) {
        kl_rules_save(call, saves, 0);
    }
    if (!is_dense) {
        kl_rules_save_new(result, saves, kl_meta_n_elements(input), input->dtype);
    }
}

KL_SAVES(group_norm)
{
    const int64_t n_groups = kl_rules_int(call, 1, 0);
    save_dense(call, result, saves);
    kl_rules_save(call, saves, 2);
    kl_rules_save_new(result, saves, 2 * call->inputs[0]->shape[0] * n_groups, stats_dtype(call));
}

/* --- batch_norm, instance_norm: input, weight, bias, running_mean, running_var, training ------- */

static bool
is_training(const KlCall *call)
{
    return kl_rules_bool(call, 5, false);
}

static void
check_batch_norm(const KlCall *call)
{
    const KlMeta *input = kl_rules_tensor(call, 0, 2, KL_DIMS_MAX);
    const bool has_stats = kl_rules_is_given(call, 3);
    kl_rules_require(call, kl_meta_n_elements(input) > 0 && (is_training(call) || has_stats) &&
                               has_stats == kl_rules_is_given(call, 4));
    for (uint32_t arg = 1; arg < 5; arg++) {
        kl_rules_require(call, is_vector(call, arg, input->shape[1]) &&
                                   (arg <= 2 || !kl_rules_needs_grad(call, arg)));
    }
}

KL_SHAPE(batch_norm)
{
    check_batch_norm(call);
    if (!is_training(call) || !kl_rules_is_given(call, 3)) {
        result->effects = 0;
    }
    (void)make_like(call, result);
    if (kl_meta_is_contiguous(call->inputs[0])) {
        kl_meta_set_contiguous(&result->outs[0]); /* whatever its dims of size 1 suggest */
    }
    return KL_OK;
}

KL_PLACE(batch_norm)
{
    const KlMeta *input = call->inputs[0];
    if (is_training(call) && !has_batch_statistics(call)) {
        bool can_meet = kl_place_is_rows(&input->place) && input->place.dim != 1;
        return can_meet ? KL_DECLINED /* recorded again, with the statistics as a call before it */
                        : kl_rules_once(result, "batch_norm in training couples the samples");
    }
    KlLabels labels = kl_rules_letters(input->n_dims);
    labels.of[1] = 0;
    return kl_rules_wire_alike(call, result, labels,
                               "the batch is in channels or statistics of a batch_norm");
}

KL_SAVES(batch_norm)
{
    kl_rules_save(call, saves, 0);
    kl_rules_save(call, saves, 1);
    if (has_batch_statistics(call)) {
        kl_rules_save(call, saves, 9);
        kl_rules_save(call, saves, 10);
        return;
    }
    kl_rules_save(call, saves, 3);
    kl_rules_save(call, saves, 4);
    if (is_training(call)) {
        kl_rules_save_new(result, saves, 2 * call->inputs[0]->shape[1], stats_dtype(call));
    }
}

/* torch runs it as a batch_norm of (1, n * c, ...), so rows are independent. Running statistics are updated with the mean
 * over the rows' statistics, and written even if they are only read. */
KL_SHAPE(instance_norm)
{
    check_batch_norm(call);
    if (!kl_rules_is_given(call, 3)) {
        result->effects = 0;
    }
    result->reads_aside = !is_training(call);
    return kl_rules_out_contiguous(result, call->inputs[0]);
}

KL_SAVES(instance_norm)
{
    const KlMeta *input = call->inputs[0];
    int64_t n = input->shape[0] * input->shape[1];
    save_dense(call, result, saves);
    if (kl_rules_input(call, 1) != NULL) {
        kl_rules_save_new(result, saves, n, call->inputs[1]->dtype); /* the weight, repeated */
    }
    if (kl_rules_is_given(call, 3)) {
        kl_rules_save_new(result, saves, 2 * n, stats_dtype(call));
    }
    if (is_training(call)) {
        kl_rules_save_new(result, saves, 2 * n, stats_dtype(call));
    }
}
