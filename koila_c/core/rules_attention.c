/* SPDX-License-Identifier: Apache-2.0 */
/* rules_attention.c - scaled_dot_product_attention: (*, l, e), (*, s, e), (*, s, v) -> (*, l, v).
 *
 * torch chooses one of several kernels by shape, dtype, device and the user's settings. If the choice is not known (on
 * a GPU), the rules state what holds for each: unknown strides, and the most bytes that any kernel saves. */
#include "rules.h"

/* The first three words are the first three inputs. */
enum { QUERY, KEY, VALUE, MASK, DROPOUT, CAUSAL, SCALE, GROUPED };
enum { LETTER_QUERY = 20, LETTER_KEY = 21, LETTER_VALUE = 22 };

/* The options of a call. */
typedef struct {
    double dropout;
    bool is_causal, is_grouped;
} Options;

static Options
read_options(const KlCall *call)
{
    const Options options = {.dropout = kl_rules_float(call, DROPOUT, 0.0),
                             .is_causal = kl_rules_bool(call, CAUSAL, false),
                             .is_grouped = kl_rules_bool(call, GROUPED, false)};
    kl_rules_require(call,
                     kl_rules_optional(call, MASK, 0, KL_DIMS_MAX) == NULL || !options.is_causal);
    return options;
}

/* Find the shape of the attention weights without the last two dims: query, key and value broadcast. Return whether they
 * fit together. */
static bool
broadcast_lead(const KlCall *call, bool is_grouped, KlMeta *lead)
{
    const KlMeta *query = kl_rules_input(call, QUERY);
    *lead = (KlMeta){.n_dims = 0};
    for (uint32_t arg = QUERY; arg <= VALUE; arg++) {
        const KlMeta *meta = kl_rules_input(call, arg);
        if (meta == NULL || meta->n_dims < 2 || kl_meta_n_elements(meta) == 0) {
            return false;
        }
        KlMeta own = *meta;
        own.n_dims -= 2;
        if (is_grouped && arg != QUERY) {
            if (meta->n_dims != query->n_dims || own.n_dims < 1 ||
                query->shape[own.n_dims - 1] % own.shape[own.n_dims - 1] != 0) {
                return false;
            }
            own.shape[own.n_dims - 1] = query->shape[own.n_dims - 1];
        }
        kl_rules_broadcast(call, lead, &own);
    }
    return lead->n_dims + 2 <= KL_DIMS_MAX;
}

/* Whether the mask, if there is one, broadcasts to the attention weights. */
static bool
is_mask_fitting(const KlCall *call, const KlMeta *lead)
{
    const KlMeta *mask = kl_rules_input(call, MASK), *query = call->inputs[QUERY];
    const KlMeta *key = call->inputs[KEY];
    KlMeta weights = *lead;
    weights.shape[weights.n_dims++] = query->shape[query->n_dims - 2];
    weights.shape[weights.n_dims++] = key->shape[key->n_dims - 2];
    return mask == NULL || ((mask->dtype == KL_DTYPE_BOOL || mask->dtype == query->dtype) &&
                            kl_rules_fits(mask, &weights));
}

/* Whether torch may use a fused kernel: four dims, equal batch and feature sizes, contiguous features, a mask of two or
 * four dims that requires no grad, and no dropout. On other devices than the CPU not for float64. */
static bool
is_fused(const KlCall *call, const Options *options)
{
    const KlMeta *query = call->inputs[QUERY], *mask = kl_rules_input(call, MASK);
    bool is_fit = query->device == 0 ? call->is_flash_allowed : query->dtype != KL_DTYPE_FLOAT64;
    is_fit = is_fit && query->n_dims == 4 && options->dropout == 0.0 &&
             (mask == NULL || (!mask->requires_grad && mask->n_dims % 2 == 0));
    for (uint32_t arg = QUERY; arg <= VALUE && is_fit; arg++) {
        const KlMeta *meta = call->inputs[arg];
        is_fit = meta->n_dims == 4 && meta->shape[0] == query->shape[0] &&
                 meta->shape[3] == query->shape[3] &&
                 (options->is_grouped || meta->shape[1] == query->shape[1]) &&
                 (!meta->is_strided || meta->strides[3] == 1);
    }
    return is_fit;
}

KL_SHAPE(attention)
{
    const Options options = read_options(call);
    KlMeta out;
    if (!broadcast_lead(call, options.is_grouped, &out) || !is_mask_fitting(call, &out)) {
        return KL_DECLINED;
    }
    const KlMeta *query = call->inputs[QUERY], *key = call->inputs[KEY];
    const KlMeta *value = call->inputs[VALUE];
    kl_rules_require(call, query->shape[query->n_dims - 1] == key->shape[key->n_dims - 1] &&
                               key->shape[key->n_dims - 2] == value->shape[value->n_dims - 2]);
    out.shape[out.n_dims++] = query->shape[query->n_dims - 2];
    out.shape[out.n_dims++] = value->shape[value->n_dims - 1];
    (void)kl_rules_out(result, &out);
    result->is_random = options.dropout > 0.0 && options.dropout < 1.0; /* else torch draws none */
    bool may_be_fused = is_fused(call, &options);
    if (may_be_fused && query->device == 0) {
        kl_rules_preserve(&result->outs[0], query); /* laid out as the query */
    } else if (!may_be_fused && kl_rules_is_plain(query)) {
        kl_meta_set_contiguous(&result->outs[0]);
    }
    return KL_OK;
}

KL_DTYPE(attention)
{
    KlDtype dtype = call->inputs[0]->dtype;
    bool is_uniform = call->inputs[KEY]->dtype == dtype && call->inputs[VALUE]->dtype == dtype;
    kl_rules_set_dtypes(result, dtype);
    return is_uniform && kl_meta_dtype_is_float(dtype) ? KL_OK : KL_DECLINED;
}

KL_PLACE(attention)
{
    const Options options = read_options(call);
    int32_t n = result->outs[0].n_dims;
    KlLabels full = kl_rules_letters(n - 2);
    if (options.is_grouped) {
        full.of[n - 3] = 0; /* one head of the keys is used by several heads of the queries */
    }
    full.of[n - 2] = options.is_causal ? 0 : LETTER_QUERY;
    full.of[n - 1] = LETTER_VALUE;
    KlWiring wiring = {.outs = {full},
                       .reason = "the batch is in positions or features of attention"};
    static const uint8_t last[] = {0, 0, LETTER_VALUE, LETTER_KEY};
    for (uint32_t arg = QUERY; arg <= MASK; arg++) {
        const KlMeta *meta = kl_rules_input(call, arg);
        if (meta == NULL) {
            continue;
        }
        KlLabels *labels = &wiring.inputs[call->args[arg].input];
        *labels = kl_rules_letters_right(full, n, meta->n_dims);
        labels->of[meta->n_dims - 1] = meta->n_dims > 0 ? last[arg] : 0;
        if (arg == KEY || arg == VALUE) {
            labels->of[meta->n_dims - 2] = LETTER_KEY;
        }
    }
    return kl_rules_wire(call, result, &wiring);
}

KL_SAVES(attention)
{
    const Options options = read_options(call);
    const bool has_dropout = options.dropout > 0.0, is_grouped = options.is_grouped;
    const KlMeta *query = call->inputs[QUERY], *key = call->inputs[KEY];
    const KlMeta *mask = kl_rules_input(call, MASK), *out = &result->outs[0];
    int64_t n_queries = kl_meta_n_elements(out) / out->shape[out->n_dims - 1];
    int64_t own = (int64_t)kl_meta_dtype_bytes(query->dtype);
    bool is_half = own == 2;
    KlDtype wide = is_half ? KL_DTYPE_FLOAT32 : query->dtype;
    if (is_fused(call, &options)) {
        kl_rules_save(call, saves, QUERY);
        kl_rules_save(call, saves, KEY);
        kl_rules_save(call, saves, VALUE);
        saves->outputs = 1;
        kl_rules_save_new(result, saves, n_queries, wide); /* log of the sums */
        if (mask != NULL && mask->dtype == KL_DTYPE_BOOL) {
            kl_rules_save_new(result, saves, kl_meta_n_elements(mask), query->dtype);
        } else {
            kl_rules_save(call, saves, MASK);
        }
        return;
    }
    /* The other kernel saves the weights, scaled copies of query and key, and the value, or a copy of it. `there`: tensors
     * that are widened, repeated for grouped heads, or made of a mask, which live until the call ends. */
    const KlMeta *value = call->inputs[VALUE];
    bool is_batch = kl_rules_merges(value, 2), is_made = is_half || is_grouped;
    if (!is_made && (is_batch || !value->is_strided)) {
        kl_rules_save(call, saves, VALUE);
    }
    int64_t size = (int64_t)kl_meta_dtype_bytes(wide), given = kl_meta_n_bytes(out);
    int64_t n_weights = n_queries * key->shape[key->n_dims - 2], weights = size * n_weights;
    int64_t feature = weights / out->shape[out->n_dims - 2];
    int64_t keys = feature * key->shape[key->n_dims - 1];
    int64_t values = feature * out->shape[out->n_dims - 1];
    int64_t further = is_made || !is_batch ? values : 0;
    int64_t pair = keys + size * n_queries * query->shape[query->n_dims - 1];
    int64_t kept = pair + further + (has_dropout ? 3 : 1) * weights;
    kl_rules_save_new(result, saves, kept / size, wide);
    int64_t there = is_grouped ? keys : 0;
    there += is_half ? size * (kl_meta_n_elements(query) + kl_meta_n_elements(key)) : 0;
    there += is_half && (is_grouped || !is_batch) ? size * kl_meta_n_elements(value) : 0;
    there += kl_rules_merges(query, 2) ? 0 : size * kl_meta_n_elements(query);
    there += options.is_causal ? weights / n_queries * out->shape[out->n_dims - 2] : 0;
    there += mask != NULL && mask->dtype == KL_DTYPE_BOOL ? own * kl_meta_n_elements(mask) : 0;
    /* During softmax the scores exist besides the weights, and a bool for each that tells whether it is -inf. At the end
     * weights and result in half precision exist besides those in float32. */
    int64_t early = is_grouped || (is_half && is_batch) ? values : 0, wider = given / own * size;
    int64_t scores = pair + early + 2 * weights + n_weights + n_queries - kept - given;
    saves->bytes_workspace = there + kl_larger(scores, is_half ? wider + own * n_weights : 0);
    /* The backward's peak: the gradient of the weights besides all saved tensors; or the gradient of the scores, when the
     * value and the incoming gradient are freed; or those of query and key. The inputs' gradients are not counted here. */
    int64_t first = kl_larger(has_dropout ? 0 : 2 * weights, pair) - further - given;
    first = kl_larger(weights + (is_half ? wider - given : 0), first);
    for (uint32_t arg = QUERY; arg <= MASK; arg++) {
        first -= kl_rules_needs_grad(call, arg) ? kl_meta_n_bytes(kl_rules_input(call, arg)) : 0;
    }
    saves->bytes_backward = first + (value->requires_grad ? values : 0);
}
