/* SPDX-License-Identifier: Apache-2.0 */
/* measure_whole.c - predicts the bytes of a live run: the calls in recorded order, on the whole batch. */
#include "measure.h"

#include <math.h>
#include <string.h>

#include "alloc.h"

/* Return the whole program as one span, in call order. */
static KlSpan
written(const KlSweep *sweep, const KlProgram *program, bool is_graph,
        uint32_t *lists /* [n_nodes + n_imports + n_values] */, bool *is_made)
{
    const KlStages *stages = &program->stages;
    uint32_t *nodes = lists, *imports = nodes + stages->n_nodes;
    KlValueId *exports = imports + stages->n_imports;
    KlSpan span = {.nodes = nodes,
                   .imports = imports,
                   .exports = exports,
                   .stage = KL_STAGE_NONE,
                   .is_live = true};
    span.has_graph = is_graph;
    for (size_t i = 0; i < stages->n_nodes; i++) {
        const KlSweepNode *node = &sweep->nodes[i];
        if (stages->node_stage[i] == KL_STAGE_NONE || node->is_for_chunks) {
            continue;
        }
        nodes[span.n_nodes++] = (KlNodeId)i;
        memset(&is_made[node->first_out], true, node->n_outs);
    }
    for (size_t i = 0; i < stages->n_imports; i++) {
        imports[span.n_imports] = (uint32_t)i;
        span.n_imports += !is_made[stages->imports[i].value];
    }
    for (size_t i = 0; i < program->reached.n + program->roots.n; i++) {
        size_t n = program->reached.n;
        KlValueId value = i < n ? program->reached.ids[i] : program->roots.ids[i - n];
        exports[span.n_exports] = value;
        span.n_exports += is_made[value];
    }
    return span;
}

KlStatus
kl_measure_whole(KlSweep *sweep, bool is_graph, double bytes_graphs, KlMoments *moments,
                 double *most)
{
    const KlProgram *program = sweep->program;
    const KlStages *stages = &program->stages;
    size_t n_asked = program->reached.n + program->roots.n;
    KlScratch scratch = {0};
    size_t n_lists = stages->n_nodes + stages->n_imports + n_asked;
    uint32_t *lists = kl_alloc_scratch(&scratch, n_lists, sizeof(uint32_t));
    bool *is_made = kl_alloc_scratch(&scratch, stages->n_values, sizeof(bool)); /* [n_values] */
    KlStatus status = KL_OK;
    if (scratch.is_short) {
        status = KL_ERROR_MEMORY;
        goto done;
    }
    KlSpan span = written(sweep, program, is_graph, lists, is_made);
    kl_sweep_open(sweep, &span);
    kl_sweep_forward(sweep, moments);
    double end = 0;
    if (is_graph) {
        size_t first = moments != NULL ? moments->n : 0;
        kl_sweep_back(sweep, moments);
        for (size_t i = first; moments != NULL && i < moments->n; i++) {
            moments->moments[i].is_back = true;
        }
        end = kl_sweep_live(sweep).fixed + sweep->gradients.fixed + bytes_graphs;
    }
    *most = fmax(sweep->most, end);
done:
    kl_alloc_scratch_free(&scratch);
    return status;
}
