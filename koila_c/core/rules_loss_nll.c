/* SPDX-License-Identifier: Apache-2.0 */
/* rules_loss_nll.c - cross-entropy and negative log-likelihood.
 *
 * NOTE [weighted mean]: the mean of these losses divides by the sum of the weights of all labels
 * except ignore_index, which depends on the data: the mean of the chunks' means is wrong even for
 * chunks of equal size. It is combined as sum(part 0) / sum(part 1): part 0 is the op itself with
 * reduction="sum", part 1 the weight of the chunk's labels, which reads only target and weight.
 * This also holds with label smoothing, because torch divides the smooth term by the same weight.
 * With class probabilities each row counts 1, whatever the weights. */
#include "rules.h"

enum { INPUT, TARGET, WEIGHT };

/* Whether the target has class numbers, (n, d1, ...), and not probabilities, in the input's shape. */
static bool
has_class_numbers(const KlCall *call)
{
    return kl_rules_tensor(call, TARGET, 0, KL_DIMS_MAX)->n_dims ==
           kl_rules_tensor(call, INPUT, 1, 5)->n_dims - 1;
}

/* Find the dims of the loss terms: those of the input without the class dim. */
static KlMeta
read_terms(const KlCall *call)
{
    const KlMeta *input = kl_rules_tensor(call, INPUT, 1, 5);
    const KlMeta *target = kl_rules_tensor(call, TARGET, 0, KL_DIMS_MAX);
    const KlMeta *weight = kl_rules_optional(call, WEIGHT, 1, 1);
    KlMeta terms = *input;
    int32_t dim_class = input->n_dims == 1 ? 0 : 1;
    terms.n_dims--;
    for (int32_t dim = dim_class; dim < terms.n_dims; dim++) {
        terms.shape[dim] = input->shape[dim + 1];
    }
    kl_rules_require(call, kl_meta_n_elements(input) > 0 && !kl_rules_needs_grad(call, WEIGHT) &&
                               (weight == NULL || (weight->shape[0] == input->shape[dim_class] &&
                                                   weight->dtype == input->dtype)));
    const bool is_number = has_class_numbers(call);
    const KlMeta *wanted = is_number ? &terms : input;
    kl_rules_require(call, kl_rules_is_shape(target, wanted));
    kl_rules_check(call, !is_number || target->dtype == KL_DTYPE_INT64 ||
                             target->dtype == KL_DTYPE_UINT8);
    kl_rules_require(call, is_number ? target->dtype == KL_DTYPE_INT64 && !target->requires_grad
                                     : target->dtype == input->dtype);
    return terms;
}

KL_SHAPE(cross_entropy)
{
    double smoothing = kl_rules_float(call, 5, 0.0);
    int64_t ignored = kl_rules_int(call, 4, -100);
    const KlMeta terms = read_terms(call);
    kl_rules_require(call, smoothing >= 0.0 && smoothing <= 1.0 &&
                               (ignored < 0 || has_class_numbers(call)));
    return kl_rules_make_loss(call, result, &terms);
}

/* nll_loss takes one or two dims, nll_loss2d four; nll_loss_nd reshapes others for one of them */
KL_SHAPE(nll)
{
    (void)kl_rules_tensor(call, INPUT, call->row->n_least, call->row->n_most);
    const KlMeta terms = read_terms(call);
    kl_rules_require(call, has_class_numbers(call));
    return kl_rules_make_loss(call, result, &terms);
}

/* Place a loss whose classes are the rows: the logit of each label is in one chunk, and the exponentials of a term's
 * logits are summed over all chunks. */
static KlStatus
place_classes(const KlCall *call, KlInferred *result)
{
    const KlMeta *weight = kl_rules_input(call, WEIGHT);
    const KlPlace *place = &call->inputs[INPUT]->place;
    double smoothing = call->n_args > 5 ? kl_rules_float(call, 5, 0.0) : 0.0;
    if (place->outer != 1 || place->inner != 1 || !has_class_numbers(call) ||
        (smoothing > 0.0 && weight != NULL)) {
        return kl_rules_once(result, "the batch is in classes");
    }
    for (uint32_t i = TARGET; i < call->n_inputs; i++) {
        if (kl_place_is_rows(&call->inputs[i]->place)) {
            return kl_rules_once(result, "the batch is in classes, and labels or weights");
        }
    }
    return kl_rules_reduce(result, KL_REDUCE_CLASSES);
}

KL_PLACE(nll)
{
    const KlMeta *input = call->inputs[INPUT];
    const bool is_reduced = kl_rules_reduction(call);
    if (kl_place_is_rows(&input->place) && input->place.dim == 1) {
        return place_classes(call, result);
    }
    KlWiring wiring = {.reduce = is_reduced ? KL_REDUCE_CROSS_ENTROPY : KL_REDUCE_NONE,
                       .reason = "the batch is in classes, or their weights"};
    bool is_numbers = has_class_numbers(call);
    int32_t n = 0;
    for (int32_t dim = 0; dim < input->n_dims && input->n_dims > 1; dim++) {
        uint8_t letter = dim == 1 ? 0 : (uint8_t)(dim + 1);
        wiring.inputs[INPUT].of[dim] = letter;
        if (!is_numbers) {
            wiring.inputs[TARGET].of[dim] = letter;
        } else if (dim != 1) {
            wiring.inputs[TARGET].of[n] = letter;
        }
        if (dim != 1) {
            wiring.outs[0].of[n++] = is_reduced ? 0 : letter;
        }
    }
    return kl_rules_wire(call, result, &wiring);
}

/* Note that an argument is saved, or the dense copy of it if it is not dense; both, if its strides are unknown. */
static void
save_dense(const KlCall *call, const KlInferred *result, KlSaves *saves, uint32_t arg)
{
    const KlMeta *meta = call->inputs[arg]; /* the first two arguments are the first two inputs */
    kl_rules_save(call, saves, arg);
    if (meta->n_dims > 1 && !kl_meta_is_contiguous(meta)) {
        kl_rules_save_new(result, saves, kl_meta_n_elements(meta), meta->dtype);
    }
}

KL_SAVES(nll)
{
    save_dense(call, result, saves, INPUT);
    save_dense(call, result, saves, TARGET);
    kl_rules_save(call, saves, WEIGHT);
    kl_rules_save_new(result, saves, 1, call->inputs[INPUT]->dtype); /* the sum of the weights */
}

KL_SAVES(cross_entropy)
{
    const KlMeta *input = call->inputs[INPUT], *target = call->inputs[TARGET];
    const bool is_smooth = kl_rules_float(call, 5, 0.0) > 0.0;
    kl_rules_save_new(result, saves, kl_meta_n_elements(input), input->dtype); /* log_softmax */
    kl_rules_save(call, saves, WEIGHT);
    if (!has_class_numbers(call)) {
        if (input->requires_grad && is_smooth) {
            kl_rules_save_new(result, saves, kl_meta_n_elements(target), target->dtype);
        } else if (input->requires_grad) {
            kl_rules_save(call, saves, TARGET);
        }
        return;
    }
    save_dense(call, result, saves, TARGET);
    kl_rules_save_new(result, saves, 1, input->dtype);
    if (is_smooth) {
        kl_rules_save_new(result, saves, kl_meta_n_elements(target), KL_DTYPE_BOOL);
        if (kl_rules_int(call, 3, 0) == 1) { /* what the smooth part is divided by */
            kl_rules_save_new(result, saves, 1,
                              kl_rules_input(call, WEIGHT) == NULL ? KL_DTYPE_INT64 : input->dtype);
        }
    }
}

/* --- ctc_loss: log_probs (t, n, c), targets, input_lengths, target_lengths, ... ---------------- */

KL_SHAPE(ctc)
{
    const KlMeta *log_probs = kl_rules_tensor(call, 0, 3, 3);
    kl_rules_tensor(call, 1, log_probs->device == 0 ? 2 : 1, 2); /* in one line: see composed.py */
    kl_rules_require(call, kl_meta_n_elements(log_probs) > 0);
    return kl_rules_make_loss(call, result, &(KlMeta){.n_dims = 1, .shape = {log_probs->shape[1]}});
}

/* The forward variables of each path are saved, (n, t, 2 * longest target + 1), and backward allocates as many beside
 * them. The length of the longest target depends on the data; it is at most the targets' last size. */
KL_SAVES(ctc)
{
    const KlMeta *log_probs = call->inputs[0], *targets = call->inputs[1];
    int64_t longest = targets->shape[targets->n_dims - 1];
    saves_all(call, result, saves);
    saves->outputs = 1;
    kl_rules_save_new(result, saves,
                      log_probs->shape[1] * (log_probs->shape[0] * (2 * longest + 1) + 4),
                      log_probs->dtype);
    saves->bytes_backward = saves->bytes_extra;
    kl_rules_save_new(result, saves, kl_meta_n_elements(targets) + 4 * log_probs->shape[1],
                      KL_DTYPE_INT64);
}
