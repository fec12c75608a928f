/* SPDX-License-Identifier: Apache-2.0 */
/* stage_reads.c - finds inputs that are gathered from chunks, and saved tensors that a later call overwrites. */
#include "stage.h"

bool
kl_stage_is_gathered(const KlTape *tape, const KlStages *stages, const KlNode *node, uint32_t k)
{
    const KlInput *input = &kl_tape_inputs(tape, node)[k];
    if (input->value == KL_ID_NONE || node->mode == KL_MODE_ONCE || node->is_open ||
        kl_place_is_rows(&input->place) || stages->is_leaf[input->value]) {
        return false;
    }
    const KlValue *value = &tape->values[input->value];
    return kl_place_is_rows(&value->meta.place) && tape->nodes[value->node].mode == KL_MODE_ROWS;
}

uint32_t
kl_stage_accruing(const KlTape *tape, const KlNode *node)
{
    const int64_t least = 1 << 18; /* for fewer bytes, a second gradient is faster than our call */
    const KlRow *row = node->row;
    uint32_t k = row != NULL ? row->gathered : 0;
    if (node->mode != KL_MODE_ROWS || row == NULL || row->gathers == NULL || k >= node->n_inputs ||
        kl_tape_inputs(tape, node)[k].value == KL_ID_NONE) {
        return KL_ID_NONE;
    }
    const KlInput *input = &kl_tape_inputs(tape, node)[k];
    const KlMeta *meta = &tape->values[input->value].meta;
    bool is_whole = !kl_place_is_rows(&input->place) && !kl_place_is_rows(&meta->place);
    bool is_summed_as_it_is =
        (meta->dtype == KL_DTYPE_FLOAT32 || meta->dtype == KL_DTYPE_FLOAT64) &&
        tape->values[node->first_out].meta.dtype == meta->dtype; /* else it is cast */
    bool is_large = meta->n_dims == 2 && kl_meta_n_bytes(meta) >= least;
    return is_whole && is_summed_as_it_is && is_large ? k : KL_ID_NONE;
}

bool
kl_stage_is_overwritten(const KlTape *tape, const KlNode *node, uint32_t k, bool is_output)
{
    bool is_own = node->writes != 0 && (k == 0 || (node->n_outs == 2 && k + 1 == node->n_inputs));
    KlValueId value = is_output ? node->first_out + k : kl_tape_inputs(tape, node)[k].value;
    if (value == KL_ID_NONE || (is_own && !is_output)) {
        return false;
    }
    /* If the node wrote through a view, its last output is the new version of the whole storage. */
    KlValueId dated = is_output && node->writes != 0 ? node->first_out + node->n_outs - 1 : value;
    return tape->values[dated].version < tape->storages[tape->values[value].storage].version;
}

static bool
keeps_overwritten(const KlTape *tape, const KlNode *node)
{
    /* Without a row it may save any tensor; so may a call that in chunks replaces another one, since `saves` describes the
     * call in chunks. Torch is asked which. */
    bool is_any = node->row == NULL || kl_tape_reads_for_chunks(tape, node);
    for (int is_output = 0; is_output < 2; is_output++) {
        uint64_t saved = is_output ? node->saves.outputs : node->saves.inputs;
        for (uint32_t k = 0; k < (is_output ? node->n_outs : node->n_inputs); k++) {
            if ((is_any || (k < 64 && (saved >> k & 1) != 0)) &&
                kl_stage_is_overwritten(tape, node, k, is_output)) {
                return true;
            }
        }
    }
    return false;
}

KlNodeId
kl_stage_find_overwritten(const KlTape *tape, const KlStages *stages, KlNodeId before)
{
    for (size_t i = before < tape->n_nodes ? before : tape->n_nodes; i-- > 0;) {
        const KlNode *node = &tape->nodes[i];
        bool is_differentiated = stages->node_stage[i] != KL_STAGE_NONE && node->is_grad_enabled &&
                                 !node->is_for_chunks && node->refresh_of == KL_ID_NONE &&
                                 kl_stage_has_gradient(tape, stages, node);
        if (is_differentiated && keeps_overwritten(tape, node)) {
            return (KlNodeId)i;
        }
    }
    return KL_ID_NONE;
}
