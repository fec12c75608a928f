/* SPDX-License-Identifier: Apache-2.0 */
/* rules_random.c - ops that draw random numbers: dropouts and fills. A call that draws none (dropout in
 * evaluation) clears is_random. infer.c declines a call with a generator of the user's (KL_ARG_OTHER):
 * a rerun would have to restore that generator, too. */
#include "rules.h"

enum { INPUT, PROBABILITY, TRAIN };

/* Read p. Return whether a dropout draws. */
static bool
read_dropout(const KlCall *call, double *p)
{
    const KlMeta *input = kl_rules_input(call, INPUT);
    *p = kl_rules_float(call, PROBABILITY, 0.0);
    kl_rules_require(call, input != NULL && *p >= 0.0 && *p <= 1.0);
    return kl_rules_bool(call, TRAIN, true) && *p > 0.0 && input != NULL &&
           kl_meta_n_elements(input) > 0;
}

/* Return the shape of a dropout's noise: the input's shape, or (n, c, 1, ...) for feature dropouts. */
static KlMeta
shape_noise(const KlCall *call, const KlMeta *input)
{
    KlMeta noise = *input;
    if (!call->row->is_feature) {
        kl_rules_preserve(&noise, input);
        return noise;
    }
    for (int32_t dim = 2; dim < noise.n_dims; dim++) {
        noise.shape[dim] = 1;
    }
    kl_meta_set_contiguous(&noise);
    return noise;
}

KL_SHAPE(dropout)
{
    double p = 0.0;
    const bool is_drawn = read_dropout(call, &p);
    const KlMeta *input = call->inputs[0];
    KlMeta *out = kl_rules_out(result, input);
    kl_rules_require(call, !call->row->is_feature || input->n_dims >= 2);
    result->is_random = is_drawn && p < 1.0;
    if (!is_drawn) {
        result->effects = 0;
        return shape_itself(call, result);
    }
    const KlMeta zero = {.n_dims = 0, .is_strided = true}; /* p = 1: torch multiplies by it */
    const KlMeta noise = p < 1.0 ? shape_noise(call, input) : zero;
    const KlMeta *operands[2] = {input, &noise};
    kl_rules_iterate(out, operands, 2, false);
    return KL_OK;
}

/* input, p, train -> output, mask */
KL_SHAPE(native_dropout)
{
    double p = 0.0;
    (void)read_dropout(call, &p);
    const KlMeta *input = call->inputs[0];
    /* For an empty input torch returns another mask. */
    kl_rules_require(call, kl_meta_n_elements(input) > 0);
    KlMeta *outs = kl_rules_outs_like(result, 2, input);
    kl_rules_preserve(&outs[0], input);
    kl_rules_preserve(&outs[1], input);
    result->is_random = kl_rules_bool(call, TRAIN, true);
    if (result->is_random) {
        const KlMeta *operands[2] = {input, &outs[1]};
        kl_rules_iterate(&outs[0], operands, 2, false);
    }
    return KL_OK;
}

KL_DTYPE(native_dropout)
{
    KlStatus status = dtype_same(call, result);
    result->outs[1].dtype = KL_DTYPE_BOOL;
    return status;
}

KL_PLACE(feature_dropout)
{
    int32_t n_alike = result->is_random ? 2 : call->inputs[0]->n_dims;
    return kl_rules_wire_alike(call, result, kl_rules_letters(n_alike),
                               "one draw serves all the samples");
}

KL_SAVES(dropout)
{
    double p = 0.0;
    if (read_dropout(call, &p)) {
        const KlMeta *input = call->inputs[0];
        KlMeta noise = shape_noise(call, input);
        kl_rules_save_new(result, saves, p < 1.0 ? kl_meta_n_elements(&noise) : 1, input->dtype);
    }
}

/* --- draws whose parameters are tensors ------------------------------------------------------- */

/* bernoulli, normal, and in place uniform_ and others: a row-major value of the shape the tensors broadcast to */
KL_SHAPE(draw)
{
    KlMeta out = {.n_dims = 0};
    kl_rules_broadcast_all(call, &out);
    return kl_rules_out_contiguous(result, &out);
}

/* input, num_samples, replacement: (n, c) -> (n, num_samples) */
KL_SHAPE(multinomial)
{
    const KlMeta *input = kl_rules_tensor(call, INPUT, 1, 2);
    int64_t n = kl_rules_int(call, 1, 0);
    bool is_replaced = kl_rules_bool(call, 2, false);
    kl_rules_require(call, n >= 1 && kl_meta_dtype_is_float(input->dtype) &&
                               (is_replaced || n <= input->shape[input->n_dims - 1]));
    KlMeta out = *input;
    out.shape[input->n_dims - 1] = n;
    return kl_rules_out_contiguous(result, &out);
}

/* rrelu: input, lower, upper, training. In training it is declined, since the number of draws depends on how many values
 * are negative. The slopes are saved even if none is drawn. */
KL_SHAPE(rrelu)
{
    bool is_known = kl_rules_input(call, INPUT) != NULL && !kl_rules_bool(call, 3, false);
    return is_known ? kl_rules_out_plain(call, result, call->inputs[0]) : KL_DECLINED;
}

KL_SAVES(rrelu)
{
    kl_rules_save(call, saves, INPUT);
    kl_rules_save_new(result, saves, kl_meta_n_elements(call->inputs[0]), call->inputs[0]->dtype);
}
