/* SPDX-License-Identifier: Apache-2.0 */
/* infer.c - applies the rules of a row to a call: shape, dtype, then target of a write, device and requires_grad, then
 * place. It contains nothing about particular ops. */
#include "infer.h"

#include "alloc.h"
#include "rules.h"

void
kl_infer_fini(KlInferred *result)
{
    kl_alloc_free(result->outs);
    kl_alloc_free(result->split.places);
    *result = (KlInferred){0};
}

/* Find the outputs' device: that of the first input that is not a 0-dim value on the CPU. Decline a call whose other
 * inputs are on several devices. */
static KlStatus
find_device(const KlCall *call, KlInferred *result)
{
    const KlMeta *chosen = NULL;
    for (uint32_t i = 0; i < call->n_inputs; i++) {
        const KlMeta *input = call->inputs[i];
        if (input == NULL || input->dtype == KL_DTYPE_OTHER || input->n_dims > KL_DIMS_MAX) {
            return KL_DECLINED;
        }
        if (chosen == NULL ||
            (chosen->device != input->device && chosen->n_dims == 0 && chosen->device == 0)) {
            chosen = input;
        } else if (chosen->device != input->device && (input->n_dims > 0 || input->device != 0)) {
            return KL_DECLINED;
        }
    }
    result->device = chosen == NULL ? 0 : chosen->device;
    return KL_OK;
}

static KlStatus
prepare(const KlCall *call, KlInferred *result)
{
    if (KL_RESERVE(result, outs, KL_OUTS_FEW) != KL_OK ||
        kl_alloc_reserve((void **)&result->split.places, &result->n_places_max, call->n_inputs,
                         sizeof(KlPlace)) != KL_OK) {
        return KL_ERROR_MEMORY;
    }
    *result = (KlInferred){
        .outs = result->outs,
        .n_outs_max = result->n_outs_max,
        .n_places_max = result->n_places_max,
        .is_random = call->row->draws != NULL,
        .effects = call->row->effects,
        .split = {.mode = KL_MODE_ONCE, .axis = KL_ID_NONE, .places = result->split.places},
        .breaks = KL_ID_NONE,
    };
    for (uint32_t i = 0; i < call->n_inputs; i++) {
        result->split.places[i] = KL_PLACE_WHOLE;
    }
    for (int8_t dim = 0; dim < KL_DIMS_MAX; dim++) {
        result->dim_map[dim] = dim;
    }
    /* An argument that the binding could not read may contain a tensor, so no rule may ignore it. */
    for (uint32_t i = 0; i < call->n_args; i++) {
        if (call->args[i].kind == KL_ARG_OTHER) {
            return KL_DECLINED;
        }
    }
    return call->n_inputs == 0 ? KL_DECLINED : find_device(call, result);
}

/* Apply a rule. If it could not read an argument, that counts and not what the rule made of the others. */
static KlStatus
apply(KlRule *rule, const KlCall *call, KlInferred *result)
{
    KlStatus status = rule(call, result);
    return *call->unread == KL_OK ? status : *call->unread;
}

/* Make the first input the output of an in-place op. Its rules describe the out-of-place op, whose result must fit into
 * that input. */
static KlStatus
settle_inplace(const KlCall *call, KlInferred *result)
{
    const KlMeta *target = kl_rules_input(call, 0);
    if (target == NULL || result->n_outs != 1) {
        return KL_DECLINED;
    }
    KlMeta *out = &result->outs[0];
    if (!kl_rules_is_shape(out, target) || !kl_rules_can_cast(out->dtype, target->dtype)) {
        return KL_ILLEGAL;
    }
    *out = *target;
    out->place = KL_PLACE_WHOLE;
    result->alias = KL_ALIAS_SAME, result->alias_input = call->args[0].input;
    return KL_OK;
}

/* Whether torch's call would add a node to the autograd graph. */
static bool
has_gradient(const KlCall *call, const KlInferred *result)
{
    bool has_grad = false;
    for (uint32_t i = 0; i < call->n_inputs && !has_grad; i++) {
        bool is_blocked = i < 64 && (result->inputs_no_grad >> i & 1) != 0;
        has_grad = call->inputs[i]->requires_grad && !is_blocked;
    }
    return has_grad && call->is_grad_enabled && !call->row->keeps.has_no_gradient;
}

/* Whether a result that requires grad has no rows in any output: each chunk would make the same value, and its gradient
 * would have to be summed over all chunks. */
static bool
has_whole_gradient(const KlInferred *result)
{
    bool has_gradient = false;
    for (uint32_t i = 0; i < result->n_outs; i++) {
        if (kl_place_is_rows(&result->outs[i].place)) {
            return false;
        }
        has_gradient = has_gradient || result->outs[i].requires_grad;
    }
    return has_gradient;
}

/* Set requires_grad of the outputs. As in torch, a view of a value that requires grad does so even in no_grad mode. */
static KlStatus
settle_grads(const KlCall *call, KlInferred *result)
{
    bool has_grad = has_gradient(call, result) || call->row->keeps.is_leaf;
    for (uint32_t i = 0; i < result->n_outs; i++) {
        KlMeta *out = &result->outs[i];
        bool is_blocked = i < 64 && (result->outs_no_grad >> i & 1) != 0;
        bool is_differentiable =
            kl_meta_dtype_is_float(out->dtype) || kl_meta_dtype_is_complex(out->dtype);
        out->device = result->device;
        if (result->alias == KL_ALIAS_NONE ||
            (result->alias == KL_ALIAS_VIEW && call->row->keeps.has_no_gradient)) {
            out->requires_grad = has_grad && is_differentiable && !is_blocked;
            continue;
        }
        bool is_kept = call->inputs[result->alias_input]->requires_grad;
        if (result->alias == KL_ALIAS_MAYBE && is_kept && !call->is_grad_enabled) {
            return KL_DECLINED; /* a view requires grad, a copy does not */
        }
        out->requires_grad = (is_kept || has_grad) && is_differentiable && !is_blocked;
    }
    return KL_OK;
}

/* Set the state from which a place rule starts: mode ROWS along `axis`, inputs at their places, outputs WHOLE. */
static void
begin_split(const KlCall *call, KlAxisId axis, KlInferred *result)
{
    result->split = (KlSplit){.mode = KL_MODE_ROWS, .axis = axis, .places = result->split.places};
    for (uint32_t i = 0; i < call->n_inputs; i++) {
        result->split.places[i] = call->inputs[i]->place;
    }
    for (uint32_t i = 0; i < result->n_outs; i++) {
        result->outs[i].place = KL_PLACE_WHOLE;
    }
}

enum { GATHERED_MAX = 8 }; /* a call with more inputs gathers none */

/* Try to place a call along the rows of input `kept` only: the rule sees all other inputs as plain tensors, which each
 * chunk reads whole (*gathered*). If the rule slices such an input, its rows must be at the same place, unless it
 * exists before the bodies. Return whether the call can be placed so. */
static bool
is_gathering(const KlCall *call, uint32_t kept, KlInferred *result)
{
    KlMeta whole[GATHERED_MAX];
    const KlMeta *inputs[GATHERED_MAX];
    KlCall seen = *call;
    for (uint32_t i = 0; i < call->n_inputs; i++) {
        inputs[i] = call->inputs[i];
        if (i != kept && kl_place_is_rows(&inputs[i]->place)) {
            whole[i] = *inputs[i];
            whole[i].place = KL_PLACE_WHOLE;
            inputs[i] = &whole[i];
        }
    }
    seen.inputs = inputs;
    begin_split(&seen, call->inputs[kept]->place.axis, result);
    const KlSplit *split = &result->split;
    if (apply(call->row->place, &seen, result) != KL_OK || split->mode == KL_MODE_ONCE ||
        split->is_open || split->row_ranges != 0) {
        return false;
    }
    for (uint32_t i = 0; i < call->n_inputs; i++) {
        if (kl_place_is_rows(&call->inputs[i]->place) && kl_place_is_rows(&split->places[i]) &&
            !call->inputs[i]->is_there &&
            !kl_place_is_equal(&call->inputs[i]->place, &split->places[i])) {
            return false;
        }
    }
    bool has_rows = true;
    for (uint32_t i = 0; i < result->n_outs && split->mode == KL_MODE_ROWS; i++) {
        has_rows = has_rows && kl_place_is_rows(&result->outs[i].place);
    }
    return has_rows;
}

/* Whether a call may gather all inputs but `kept`. Any call may gather values that exist before the bodies, since these
 * are like plain tensors; other values only calls that write in place, or that make new tensors and write nothing. */
static bool
can_gather_others(const KlCall *call, uint32_t kept, const KlInferred *result)
{
    KlRowKind kind = call->row->kind;
    bool is_any = kind == KL_ROW_INPLACE ||
                  (kind == KL_ROW_OP && result->effects == 0 && result->alias == KL_ALIAS_NONE);
    for (uint32_t i = 0; i < call->n_inputs && !is_any; i++) {
        const KlMeta *input = call->inputs[i];
        if (i != kept && kl_place_is_rows(&input->place) && !input->is_there) {
            return false;
        }
    }
    return true;
}

/* Place a call whose inputs have rows that it cannot all follow: follow one input, and gather the others. Of the possible
 * inputs, choose the one whose rows are outermost in the result. Return whether there is one. */
static bool
gather_others(const KlCall *call, KlInferred *result)
{
    bool is_write = call->row->kind == KL_ROW_INPLACE;
    if (call->n_inputs > GATHERED_MAX) {
        return false;
    }
    uint32_t best = KL_ID_NONE, n_rows = 0;
    int32_t best_dim = 0;
    for (uint32_t i = 0; i < call->n_inputs; i++) {
        n_rows += kl_place_is_rows(&call->inputs[i]->place);
    }
    for (uint32_t i = 0; i < (is_write ? 1 : call->n_inputs) && n_rows > 1; i++) {
        const KlPlace *place = &call->inputs[i]->place;
        if (kl_place_is_rows(place) && call->axis_rows[place->axis] > 0 &&
            can_gather_others(call, i, result) && is_gathering(call, i, result)) {
            const KlPlace *out = &result->outs[0].place;
            int32_t dim = kl_place_is_rows(out) ? out->dim : KL_DIMS_MAX;
            best = best == KL_ID_NONE || dim < best_dim ? i : best;
            best_dim = best == i ? dim : best_dim;
        }
    }
    return best != KL_ID_NONE && is_gathering(call, best, result);
}

static KlStatus
place_all_rows(const KlCall *call, KlAxisId axis, bool is_mixed, KlInferred *result)
{
    begin_split(call, axis, result);
    if (is_mixed && !call->row->is_joining) {
        return kl_rules_once(result, "two different batches are combined");
    }
    if (call->axis_rows[axis] <= 0) {
        return kl_rules_once(result, "the batch has no samples");
    }
    KlStatus status = apply(call->row->place, call, result);
    if (status == KL_OK && result->split.mode == KL_MODE_ROWS && !result->split.is_open &&
        has_whole_gradient(result)) {
        status = kl_rules_once(result, "its result has no samples, and gets one gradient");
    }
    return status;
}

static KlStatus
settle_rows(const KlCall *call, KlInferred *result)
{
    KlSplit *split = &result->split;
    KlAxisId axis = KL_ID_NONE;
    bool is_mixed = false;
    for (uint32_t i = 0; i < call->n_inputs; i++) {
        const KlMeta *input = call->inputs[i];
        if (!kl_place_is_rows(&input->place)) {
            continue;
        }
        const KlPlace *place = &input->place;
        if (place->axis >= call->n_axes || place->dim < 0 || place->dim >= input->n_dims ||
            input->shape[place->dim] != kl_rules_span(place, call->axis_rows[place->axis])) {
            return KL_ERROR_INTERNAL;
        }
        is_mixed = is_mixed || (axis != KL_ID_NONE && axis != place->axis);
        axis = place->axis;
    }
    if (axis == KL_ID_NONE) {
        return KL_OK;
    }
    KlStatus status = place_all_rows(call, axis, is_mixed, result);
    if (status == KL_OK && split->mode == KL_MODE_ONCE && !gather_others(call, result)) {
        status = place_all_rows(call, axis, is_mixed, result);
    }
    if (status == KL_OK && split->mode == KL_MODE_ONCE) {
        *split = (KlSplit){.mode = KL_MODE_ONCE,
                           .axis = KL_ID_NONE,
                           .reason = split->reason,
                           .again = split->again,
                           .places = split->places};
        for (uint32_t i = 0; i < call->n_inputs; i++) {
            split->places[i] = KL_PLACE_WHOLE;
        }
    }
    for (uint32_t i = 0; i < result->n_outs && split->mode != KL_MODE_ROWS; i++) {
        result->outs[i].place = KL_PLACE_WHOLE;
    }
    return status;
}

/* Place a call. If it reads an order, it must be right in each chunk; else decline it: the order must be broken first. */
static KlStatus
settle_places(const KlCall *call, KlInferred *result)
{
    KlAxisId order = kl_rules_order(call);
    for (uint32_t i = 0; i < result->n_outs; i++) {
        result->outs[i].role = KL_ROLE_NONE; /* it may be a copy of an input's meta */
    }
    if (order == KL_ID_NONE) {
        return settle_rows(call, result);
    }
    KlStatus status = KL_OK;
    begin_split(call, order, result);
    result->is_ordered = kl_rules_goes_in_order(call, order, result);
    if (!result->is_ordered) {
        status = settle_rows(call, result);
        result->is_ordered = status == KL_OK && kl_rules_keeps_order(call, order, result);
    }
    if (result->is_ordered) {
        kl_rules_pass_role(call, order, result);
        return KL_OK;
    }
    result->breaks = order;
    return KL_DECLINED;
}

KlStatus
kl_infer_call(const KlCall *call, KlInferred *result)
{
    KlStatus unread = KL_OK;
    KlCall read = *call;
    read.unread = &unread;
    KlStatus status = prepare(&read, result);
    status = status == KL_OK ? apply(call->row->shape, &read, result) : status;
    status = status == KL_OK ? apply(call->row->dtype, &read, result) : status;
    if (status == KL_OK && call->row->kind == KL_ROW_INPLACE) {
        status = settle_inplace(&read, result);
    }
    if (status == KL_OK) {
        status = settle_grads(&read, result);
        kl_rules_settle_layout(&read, result);
    }
    return status == KL_OK ? settle_places(&read, result) : status;
}

/* An elementwise kernel is given operands of one dtype: others are copied first, and so is what is written. */
static int64_t
bytes_cast(const KlCall *call, const KlInferred *result)
{
    const KlRow *row = call->row;
    bool is_pair = row->shape == shape_broadcast || row->shape == shape_tensor_pair;
    KlDtype common = KL_DTYPE_BOOL;
    int64_t n = 0;
    for (uint32_t i = 0; i < 2 * call->n_inputs && is_pair && row->dtype != dtype_same; i++) {
        const KlMeta *one = call->inputs[i % call->n_inputs]; /* gone through twice */
        if (one != NULL && one->n_dims > 0) {
            common = kl_rules_promote(common, one->dtype);
            n += i >= call->n_inputs && one->dtype != common ? kl_meta_n_elements(one) : 0;
        }
    }
    bool is_other = n > 0 && row->kind == KL_ROW_INPLACE && call->inputs[0]->dtype != common;
    n += is_other ? kl_meta_n_elements(&result->outs[0]) : 0;
    return n * (int64_t)kl_meta_dtype_bytes(common);
}

void
kl_infer_saves(const KlCall *call, const KlInferred *result, KlSaves *saves)
{
    *saves = (KlSaves){0};
    bool is_saved = false;
    for (uint32_t i = 0; i < result->n_outs && has_gradient(call, result); i++) {
        is_saved = is_saved || result->outs[i].requires_grad;
    }
    call->row->saves(call, result, saves);
    const int64_t cast = bytes_cast(call, result);
    saves->bytes_workspace += cast;
    saves->bytes_backward += saves->inputs != 0 ? cast : 0;
    if (!is_saved) { /* the call computes these tensors in any case: scores, statistics, indices */
        saves->bytes_workspace += saves->bytes_extra;
        saves->inputs = saves->outputs = 0;
        saves->bytes_extra = saves->bytes_fixed = saves->bytes_backward = 0;
        saves->is_extra_rows = saves->gives_view = false;
    }
}
