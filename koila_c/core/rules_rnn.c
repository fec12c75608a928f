/* SPDX-License-Identifier: Apache-2.0 */
/* rules_rnn.c - recurrent layers and cells. Rows are independent in each time step: the batch is dim 1 (or 0,
 * batch_first) of the input and dim 1 of each state. A layer over packed sequences is recorded as a layer over
 * padded rows and their keys (packing.py); torch's own call with packed data is declined. */
#include "rules.h"

#include <string.h>

/* input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first; a packed layer has the keys
 * of its rows after its input, and at the end whether they are sorted, and its byte counts (KlUneven). */
enum { INPUT, STATE, PARAMS, BIASES, LAYERS, DROPOUT, TRAIN, BIDIRECTIONAL, BATCH_FIRST };
enum { IS_SORTED = BATCH_FIRST + 1, NEEDS };

enum { LSTM = 4 }; /* the number of gates of an LSTM, which alone has a second state */

typedef struct {
    const KlMeta *input;
    const KlMeta *states[2]; /* [n_states] hidden, and the cell's for lstm */
    uint32_t n_states;
    int64_t n_gates;
    int64_t n_layers;
    int64_t n_directions;
    int64_t n_params; /* of one layer in one direction */
    double dropout;
    bool is_training;
    bool is_batch_first;
    bool is_packed, has_sorted_lengths; /* the latter also if it is not packed */
} Layer;

/* Return the number, in this call, of a word of an unpacked layer. */
static uint32_t
word(const KlCall *call, uint32_t of_layer)
{
    return of_layer + (call->row->is_packed && of_layer > INPUT ? 1 : 0);
}

static void
read_options(const KlCall *call, Layer *layer)
{
    layer->is_packed = call->row->is_packed;
    layer->n_layers = kl_rules_int(call, word(call, LAYERS), 1);
    layer->dropout = kl_rules_float(call, word(call, DROPOUT), 0.0);
    layer->is_training = kl_rules_bool(call, word(call, TRAIN), false);
    layer->is_batch_first = kl_rules_bool(call, word(call, BATCH_FIRST), false);
    layer->n_directions = kl_rules_bool(call, word(call, BIDIRECTIONAL), false) ? 2 : 1;
    layer->n_params = kl_rules_bool(call, word(call, BIASES), false) ? 4 : 2;
    layer->has_sorted_lengths =
        !layer->is_packed || kl_rules_bool(call, word(call, IS_SORTED), true);
}

/* Whether an argument is `n` states: a tensor, or a list of two. */
static bool
are_states(const KlArg *arg, uint32_t n)
{
    return n == 2 ? arg->kind == KL_ARG_VALUES && arg->n == 2 : arg->kind == KL_ARG_VALUE;
}

static bool
is_shape(const KlMeta *meta, int32_t n_dims, int64_t first, int64_t second)
{
    return meta->n_dims == n_dims && meta->shape[0] == first &&
           (n_dims < 2 || meta->shape[1] == second);
}

/* Whether the weights of one layer in one direction have their shapes: w_ih, w_hh, biases, and the projection. */
static bool
are_weights(const KlMeta *const *params, const Layer *layer, int64_t n_inputs, bool is_projected)
{
    int64_t n_hidden = layer->states[0]->shape[2];
    int64_t n_cells = layer->states[layer->n_states - 1]->shape[2];
    int64_t n_rows = layer->n_gates * n_cells;
    int64_t n_biases = layer->n_params - 2 - (is_projected ? 1 : 0);
    bool is_fit =
        is_shape(params[0], 2, n_rows, n_inputs) && is_shape(params[1], 2, n_rows, n_hidden);
    for (int64_t i = 0; i < n_biases; i++) {
        is_fit = is_fit && is_shape(params[2 + i], 1, n_rows, 0);
    }
    return is_fit && (!is_projected || is_shape(params[2 + n_biases], 2, n_hidden, n_cells));
}

static KlStatus
check_layer(const KlCall *call, Layer *layer)
{
    const KlArg *params = &call->args[word(call, PARAMS)];
    if (params->kind != KL_ARG_VALUES || kl_meta_n_elements(layer->input) == 0) {
        return KL_DECLINED;
    }
    const KlMeta *hidden = layer->states[0];
    const KlMeta *last = layer->states[layer->n_states - 1];
    int64_t n_rows = layer->input->shape[layer->is_batch_first ? 0 : 1];
    int64_t n_cells = layer->n_layers * layer->n_directions;
    const KlMeta *keys = layer->is_packed ? kl_rules_input(call, 1) : NULL;
    kl_rules_require(call, !layer->is_packed || (keys != NULL && is_shape(keys, 1, n_rows, 0)));
    for (uint32_t i = 0; i < layer->n_states; i++) {
        const KlMeta *state = layer->states[i];
        kl_rules_require(call, state->n_dims == 3 && state->shape[0] == n_cells &&
                                   state->shape[1] == n_rows);
    }
    bool is_projected = layer->n_states == 2 && hidden->shape[2] != last->shape[2];
    layer->n_params += is_projected ? 1 : 0;
    bool is_fit = params->n == n_cells * layer->n_params;
    for (int64_t cell = 0; cell < n_cells && is_fit; cell++) {
        int64_t n_inputs = cell < layer->n_directions ? layer->input->shape[2]
                                                      : layer->n_directions * hidden->shape[2];
        is_fit = are_weights(&call->inputs[params->input + cell * layer->n_params], layer, n_inputs,
                             is_projected);
    }
    return is_fit ? KL_OK : KL_DECLINED;
}

static KlStatus
read_layer(const KlCall *call, Layer *layer)
{
    const KlArg *state = &call->args[word(call, STATE)];
    *layer = (Layer){.input = kl_rules_tensor(call, INPUT, 3, 3),
                     .n_gates = call->row->n_gates,
                     .n_states = call->row->n_gates == LSTM ? 2 : 1};
    read_options(call, layer);
    if (layer->n_layers <= 0 || !are_states(state, layer->n_states)) {
        return KL_DECLINED;
    }
    for (uint32_t i = 0; i < layer->n_states; i++) {
        layer->states[i] = call->inputs[state->input + i];
    }
    return check_layer(call, layer);
}

/* All tensors except the keys have one real floating-point dtype, the result's; keys are int64. */
KL_DTYPE(rnn)
{
    const KlMeta *keys = call->row->is_packed ? kl_rules_input(call, 1) : NULL;
    KlDtype dtype = call->inputs[0]->dtype;
    bool is_fit = kl_meta_dtype_is_float(dtype) && (keys == NULL || keys->dtype == KL_DTYPE_INT64);
    for (uint32_t i = 0; i < call->n_inputs; i++) {
        is_fit = is_fit && (call->inputs[i] == keys || call->inputs[i]->dtype == dtype);
    }
    kl_rules_set_dtypes(result, dtype);
    return is_fit ? KL_OK : KL_DECLINED;
}

/* output (t, n, directions * h), then the last states. batch_first exchanges the first two dims by a view; rows that
 * packing has sorted by their lengths are copied back instead. */
KL_SHAPE(rnn)
{
    Layer layer;
    if (read_layer(call, &layer) != KL_OK) {
        return KL_DECLINED;
    }
    KlMeta *outs = kl_rules_outs_like(result, 1 + layer.n_states, layer.input);
    outs[0].shape[2] = layer.n_directions * layer.states[0]->shape[2];
    for (uint32_t i = 0; i < layer.n_states; i++) {
        memcpy(outs[1 + i].shape, layer.states[i]->shape, sizeof(outs[0].shape));
    }
    kl_rules_set_contiguous(result);
    if (layer.is_batch_first && layer.has_sorted_lengths) {
        outs[0].strides[0] = outs[0].strides[1];
        outs[0].strides[1] *= kl_larger(outs[0].shape[0], 1);
    }
    bool is_drawn = layer.dropout > 0.0 && layer.dropout < 1.0; /* with 0 and 1 torch draws none */
    result->is_random = is_drawn && layer.is_training && layer.n_layers > 1;
    return KL_OK;
}

KL_PLACE(rnn)
{
    Layer layer;
    (void)read_layer(call, &layer);
    KlWiring wiring = {.reason = "the batch is in a layer's steps or features: is batch= right?"};
    int32_t batch = layer.is_batch_first ? 0 : 1;
    wiring.inputs[0].of[batch] = 1;
    wiring.outs[0].of[batch] = 1;
    uint32_t first = layer.is_packed ? 2 : 1;
    wiring.inputs[1].of[0] = 1; /* keys; the first state of an unpacked layer has its own below */
    for (uint32_t i = 0; i < layer.n_states; i++) {
        wiring.inputs[first + i] = (KlLabels){.of = {0, 1}};
        wiring.outs[1 + i].of[1] = 1;
    }
    return kl_rules_wire(call, result, &wiring);
}

/* Count the workspace that oneDNN's fused kernel (LSTM in float32) saves for backward, with the weights in its own
 * layout, and its temporary memory. The formulas are measured. */
static void
save_fused(const Layer *layer, int64_t n_rows, int64_t n_steps, KlSaves *saves)
{
    int64_t n_hidden = layer->states[layer->n_states - 1]->shape[2];
    int64_t n_input = layer->input->shape[2];
    for (int64_t i = 0; i < layer->n_layers; i++) {
        int64_t n_widest = ((n_input > n_hidden ? n_input : n_hidden) + 15) / 16 * 16;
        int64_t n_kept = (n_steps + 1) * n_rows * (8 * n_hidden + 7 * n_widest);
        int64_t n_weights = 4 * n_hidden * (n_input + n_hidden);
        saves->bytes_extra += 4 * layer->n_directions * n_kept;
        saves->bytes_fixed += 4 * layer->n_directions * n_weights;
        n_input = n_hidden * layer->n_directions;
    }
    saves->bytes_workspace = 4 * 5 * n_steps * n_rows * n_hidden;
    saves->bytes_backward = 4 * 6 * n_steps * n_rows * n_hidden;
}

/* Saved: gates and states of each step, the results between layers (with dropout twice), and a copy of a transposed input
 * for each direction. Temporary: the input's contribution to the gates, for all steps of a layer; with two directions,
 * also the results of both. Without a graph: the results of the steps, and of the layer before. */
KL_SAVES(rnn)
{
    Layer layer;
    (void)read_layer(call, &layer);
    KlDtype dtype = layer.input->dtype;
    bool is_lstm = layer.n_states == 2;
    int64_t n_rows = layer.input->shape[layer.is_batch_first ? 0 : 1];
    int64_t n_steps = layer.input->shape[layer.is_batch_first ? 1 : 0];
    int64_t n_cell = n_rows * layer.states[layer.n_states - 1]->shape[2]; /* of one step */
    bool is_copied = layer.is_batch_first || layer.is_packed;
    int64_t n_copied = is_copied ? kl_meta_n_elements(layer.input) : 0;
    int64_t n_kept = n_copied; /* for each direction */
    n_kept += (layer.n_layers - 1) * n_steps * n_cell * (result->is_random ? 2 : 1);
    saves_all(call, result, saves);
    saves->inputs &= ~(uint64_t)(is_copied); /* the copy, not the input */
    bool is_fused = is_lstm && dtype == KL_DTYPE_FLOAT32;
    bool saves_result = (is_fused && layer.n_directions == 1) || layer.input->device != 0;
    saves->outputs = saves_result; /* else only its steps, or the result of each direction */
    if (layer.is_packed) {
        const KlArg *needs = &call->args[word(call, NEEDS)];
        for (uint32_t i = 0; needs->kind == KL_ARG_INTS && i < needs->n && i < KL_N_UNEVEN; i++) {
            saves->uneven[i] = (float)needs->u.ints[i];
        }
        const float *uneven = saves->uneven;
        float kept = uneven[KL_UNEVEN_KEPT] * uneven[KL_UNEVEN_STEPS] +
                     uneven[KL_UNEVEN_KEPT + 1] * uneven[KL_UNEVEN_TURNS];
        saves->bytes_extra = result->outs[0].requires_grad ? (int64_t)kept : 0;
        saves->outputs = 0;
        saves->is_extra_rows = true;
        return;
    }
    if (is_fused) {
        save_fused(&layer, n_rows, n_steps, saves);
    } else {
        int64_t of_cell = n_cell * (int64_t)kl_meta_dtype_bytes(dtype), n_bytes = n_steps * of_cell;
        bool is_both = layer.n_directions > 1, has_gates = layer.n_gates > 1;
        /* The first step saves less: its states are inputs. */
        int64_t n_of_layer = has_gates ? 7 * n_steps - (is_lstm ? 2 : 1) : n_steps;
        n_kept += layer.n_layers * n_cell * n_of_layer;
        /* The gates of all steps of a layer; later the last states of all layers, before they are joined. */
        saves->bytes_workspace =
            kl_larger((layer.n_gates + (is_both ? 2 : 0)) * n_bytes,
                      layer.n_layers * layer.n_directions * layer.n_states * of_cell);
        saves->bytes_backward = is_both && !has_gates ? 2 * n_bytes : 0;
        saves->bytes_steps = (layer.n_layers > 1 ? 2 : 1) * layer.n_directions * n_bytes;
    }
    bool is_kept = result->outs[0].requires_grad; /* otherwise torch frees it step by step */
    kl_rules_save_new(result, saves, layer.n_directions * (is_kept ? n_kept : n_copied), dtype);
}

/* --- cells: input (n, i), hx (n, h), w_ih, w_hh, b_ih, b_hh ----------------------------------- */

KL_SHAPE(rnn_cell)
{
    const KlMeta *input = kl_rules_input(call, 0);
    const KlArg *state = &call->args[1];
    uint32_t n_states = call->row->n_gates == LSTM ? 2 : 1;
    if (input == NULL || input->n_dims != 2 || !are_states(state, n_states) ||
        kl_meta_n_elements(input) == 0) {
        return KL_DECLINED;
    }
    int64_t n_hidden =
        call->inputs[state->input]->n_dims == 2 ? call->inputs[state->input]->shape[1] : 0;
    for (uint32_t arg = 2; arg < 6; arg++) {
        const KlMeta *meta = kl_rules_input(call, arg);
        int64_t n_columns = arg == 2 ? input->shape[1] : n_hidden;
        int64_t n_rows = call->row->n_gates * n_hidden;
        kl_rules_require(call, meta == NULL ? arg >= 4
                                            : is_shape(meta, arg < 4 ? 2 : 1, n_rows, n_columns));
    }
    for (uint32_t i = 0; i < n_states; i++) {
        const KlMeta *meta = call->inputs[state->input + i];
        kl_rules_require(call, is_shape(meta, 2, input->shape[0], n_hidden));
    }
    (void)kl_rules_outs_like(result, n_states, call->inputs[state->input]);
    kl_rules_settle_plain(call, result);
    return KL_OK;
}

KL_PLACE(rnn_cell)
{
    KlWiring wiring = {.inputs = {{{1}}},
                       .reason = "the batch is in features or weights of a cell"};
    for (uint32_t i = 0; i < result->n_outs; i++) {
        wiring.inputs[1 + i].of[0] = 1;
        wiring.outs[i].of[0] = 1;
    }
    return kl_rules_wire(call, result, &wiring);
}

KL_SAVES(rnn_cell)
{
    int64_t n = kl_meta_n_elements(&result->outs[0]);
    saves_all(call, result, saves);
    if (call->row->n_gates > 1) {
        kl_rules_save_new(result, saves, (call->row->n_gates == LSTM ? 5 : 6) * n,
                          result->outs[0].dtype);
    } else {
        saves->outputs = 1;
    }
}
