# SPDX-License-Identifier: Apache-2.0
"""The mistakes of `make mutants`, and which tests should see each."""

from __future__ import annotations

import dataclasses

#: Tests of whole steps that ask for a number of chunks.
STEPS = (
    "tests/test_step.py tests/test_step_gradients.py tests/test_step_inputs.py "
    "tests/test_counterexamples.py tests/test_counterexamples_rows.py "
    "tests/test_counterexamples_state.py tests/test_counterexamples_unseen.py "
    "tests/test_shared_memory.py tests/test_programs.py::test_same_as_eager "
    "tests/test_autocast.py tests/test_bad_input.py tests/test_cross.py tests/test_draws.py "
    "tests/test_draws_between.py tests/test_draws_order.py tests/test_factories.py "
    "tests/test_generator.py tests/test_held_outputs.py tests/test_hooks.py "
    "tests/test_masked_writes.py tests/test_one_call.py tests/test_out.py tests/test_precision.py "
    "tests/test_run_now.py tests/test_scalars.py tests/test_tail.py tests/test_inplace_views.py "
    "tests/test_views_again.py tests/test_written_after_read.py"
)
PROGRAMS = "tests/test_programs.py::test_same_as_eager"
MEASURE = "tests/binding/test_py_measure.py tests/test_bytes.py"
WAITING = "tests/test_waiting.py"
CROSS = "tests/test_cross.py tests/test_step_gradients.py tests/test_pairs.py"
FUSE = "tests/test_segments.py tests/test_across.py"
BRIDGE = "tests/test_bridge.py tests/binding/test_py_bridge.py tests/test_written_behind_a_cut.py"
NOISE = "tests/test_draws_order.py tests/test_draws.py"


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A mistake: a text of a file, once in it, and what stands in its place.

    `share` is how many of the tests must fail at least, None one test.
    """

    name: str
    path: str
    text: str
    instead: str
    tests: str
    share: float | None = None

    @property
    def is_chunked(self) -> bool:
        """Whether only tests that ask for chunks are run."""
        return self.share is not None


MUTANTS = [
    Mutant(
        "whole: everything is planned whole",
        "python/koila/planning/planner.py",
        "def is_whole() -> bool:\n",
        "def is_whole() -> bool:\n    return True\n\n\ndef is_whole_unless_mutated() -> bool:\n",
        STEPS,
        0.95,
    ),
    Mutant(
        "live: every call runs at once",
        "python/koila/recording/functions.py",
        "_core.register(func, OP, name, instead,",
        "_core.register(func, LIVE, name, None,",
        STEPS,
        0.95,
    ),
    Mutant(
        "grid: one chunk too few",
        "python/koila/running/stages.py",
        "grid(rows, planned.n_chunks, planned.unit))",
        "grid(rows, max(1, planned.n_chunks - 1), planned.unit))",
        "tests/test_step.py",
        0.9,
    ),
    Mutant(
        "saves: exp keeps nothing",
        "koila_c/core/ops.def",
        '(exp,                 "input",   LIGHT, same,        to_float,        rowwise, output, ',
        '(exp,                 "input",   LIGHT, same,        to_float,        rowwise, nothing,',
        "tests/test_ops.py tests/test_infer.py -k exp",
    ),
    Mutant(
        "place: a cumulative sum goes by rows",
        "koila_c/core/ops_move.def",
        "cumulate(1),       to_sum,       scan,              nothing, ",
        "cumulate(1),       to_sum,       rowwise,           nothing, ",
        "tests/test_ops.py tests/test_infer.py -k cumsum",
    ),
    Mutant(
        "divisor: a mean counts one term more",
        "python/koila/reductions/sums.py",
        "return count(n_reduced(x, dims(x, dim)))",
        "return count(n_reduced(x, dims(x, dim)) + 1)",
        "tests/test_partials.py -k mean",
    ),
    Mutant(
        "batch_norm: no gradient goes through the mean of the batch",
        "python/koila/reductions/norms.py",
        "of_mean = factor * of_bias",
        "of_mean = 0 * factor * of_bias",
        "tests/test_batch_norm.py -k test_models",
    ),
    Mutant(
        "drop: values are kept to the end of a chunk",
        "koila_c/core/program.c",
        "if (at != UINT32_MAX && !is_written) {",
        "if (at == 0 && !is_written) {",
        "tests/binding/test_py_stage.py",
    ),
    Mutant(
        "bytes: one result less in flight",
        "koila_c/core/ops_move.def",
        "BACK(7)",
        "BACK(6)",
        "tests/test_flight.py -k logcumsumexp",
    ),
    Mutant(
        "bytes: one result more in flight",
        "koila_c/core/ops.c",
        "#define BACK(n) HOLDS(.back_outs = EACH(n))",
        "#define BACK(n) HOLDS(.back_outs = EACH(n + 1))",
        "tests/test_flight.py -k sin",
    ),
    Mutant(
        "bytes: a gradient that meets another takes no sum",
        "koila_c/core/sweep.c",
        "return is_expanded || shared != KL_ID_NONE ? zero : size_of(sweep, value);",
        "return is_expanded || shared != KL_ID_NONE ? zero : zero;",
        "tests/test_bytes.py",
    ),
    Mutant(
        "bytes: what a body leaves is held for ever",
        "koila_c/core/measure.c",
        "step->held -= storage->bytes;",
        "step->held += 0;",
        "tests/test_bytes.py",
    ),
    Mutant(
        "draws: a chunk that runs again draws anew",
        "python/koila/random/draws.py",
        "        noise.set_state(generator, state)\n        self.spots[i] =",
        "        self.spots[i] = list() or",
        "tests/test_counterexamples.py -k two_dropouts",
    ),
    Mutant(
        "gradient: delivered twice",
        "python/koila/running/replay.py",
        "found.append((value, info.real, gradient.to(info.real.dtype)))",
        "found += [(value, info.real, gradient.to(info.real.dtype))] * 2",
        "tests/test_cross.py",
    ),
    Mutant(
        "gradient: what joints send back is lost",
        "python/koila/running/interpret.py",
        "seed = stages.cross[value].take_total_gradient()\n            if value in stages.roots:",
        "seed = None\n            if value in stages.roots:",
        f"{PROGRAMS} -k standardised",
    ),
    Mutant(
        "statistics: committed twice",
        "python/koila/running/visible.py",
        "as_new(real).copy_(copy)",
        "as_new(real).copy_(2 * copy - real)",
        f"{PROGRAMS} -k cnn_bn",
    ),
    Mutant(
        "hooks: see statistics as they were before the step",
        "python/koila/running/visible.py",
        "    write_statistics(stages)\n    stages.draws.leave()",
        "    pass\n    stages.draws.leave()",
        "tests/test_hooks_see.py",
    ),
    Mutant(
        "hooks: draw where a chunk has left the generator",
        "python/koila/running/visible.py",
        "    write_statistics(stages)\n    stages.draws.leave()",
        "    write_statistics(stages)\n    pass",
        "tests/test_hooks_see.py",
    ),
    Mutant(
        "hooks: what they draw is drawn again later",
        "python/koila/random/draws.py",
        "        self.after = self.hooked.copy()",
        "        pass",
        "tests/test_hooks_see.py",
    ),
    Mutant(
        "hooks: a step that is tried again forgets their draws",
        "python/koila/random/draws.py",
        "} | self.hooked",
        "} | {}",
        "tests/test_hooks_see.py",
    ),
    Mutant(
        "hooks: what they write is not looked for",
        "python/koila/running/visible.py",
        "<= stage and kept",
        "< 0 and kept",
        "tests/test_hooks_see.py",
    ),
    Mutant(
        "hooks: see gradients of an earlier step",
        "python/koila/running/visible.py",
        "if first > after]",
        "if first < 0]",
        "tests/test_hooks_see.py",
    ),
    Mutant(
        "hooks of nodes: see a share of the gradient of a view",
        "python/koila/recording/handed_out.py",
        "root is None or (is_alone and not root.is_inner(value))",
        "root is None or is_alone",
        "tests/test_hooks_of_nodes.py",
    ),
    Mutant(
        "hooks of nodes: miss what goes to other outputs",
        "python/koila/recording/handed_out.py",
        "root is None or (is_alone and not root.is_inner(value))",
        "root is None or not root.is_inner(value)",
        "tests/test_hooks_of_nodes.py",
    ),
    Mutant(
        "hooks of values: not called by a second derivative",
        "python/koila/recording/cut.py",
        "any(root.has_hook for root in self.alive())",
        "any(root is None for root in self.alive())",
        "tests/test_hooks_of_nodes.py",
    ),
    Mutant(
        "views: not taken again after a write",
        "python/koila/running/views.py",
        "if view is None:",
        "if view is None or view[2] >= 0:",
        "tests/test_counterexamples_state.py tests/test_writes.py -k view",
    ),
    Mutant(
        "cut: a chunk begins a row too early",
        "python/koila/basics/rows.py",
        "return tensor.narrow(dim, start * inner, (stop - start) * inner)",
        "return tensor.narrow(dim, max(0, start - 1) * inner, (stop - start) * inner)",
        "tests/test_batch_norm.py",
    ),
    Mutant(
        "counts: labels that a model makes are taken for known",
        "python/koila/reductions/losses.py",
        "counts = frozenset()  # labels",
        "counts = frozenset((1,))  # labels",
        "tests/test_tail.py",
    ),
    Mutant(
        "unwritten: plain torch waits for nothing",
        "python/koila/running/unwritten.py",
        "if not (_asks_no_number(func) or _is_own()):",
        "if _is_own():",
        "tests/test_unwritten.py",
    ),
    Mutant(
        "leaves: nobody looks whether they changed",
        "koila_c/binding/py_stale.c",
        "int changed = is_changed(&tape->values[leaf]);",
        "int changed = is_changed(&tape->values[leaf]) * 0;",
        "tests/binding/test_py_stale.py",
    ),
    Mutant(
        "measure: what the graph of a joint keeps is not held",
        "koila_c/core/measure.c",
        "step->held += step->live[i];",
        "step->held += 0 * step->live[i];",
        MEASURE,
    ),
    Mutant(
        "measure: parts of a reduction get no gradients",
        "koila_c/core/measure.c",
        "parts->seeds * seeds);",
        "0 * parts->seeds * seeds);",
        MEASURE,
    ),
    Mutant(
        "measure: a gradient of all rows is not held",
        "koila_c/core/measure.c",
        "hold_gradients(step, known->is_gathering ? 0 : gradient(step, value));",
        "hold_gradients(step, known->is_gathering ? 0 : 0 * gradient(step, value));",
        MEASURE,
    ),
    Mutant(
        "measure: gradients of all chunks come with the first",
        "koila_c/core/measure.c",
        ".in_sweep = fmin(freed - made, 0) / (double)rows}",
        ".in_sweep = 0 * fmin(freed - made, 0) / (double)rows}",
        MEASURE,
    ),
    Mutant(
        "measure: gradients that went back count as gradients on",
        "koila_c/core/measure.c",
        "hold_gradients(step, gradients - left_gradients(step, of, true));",
        "step->held += gradients - left_gradients(step, of, true);",
        "tests/test_memory_plan.py",
    ),
    Mutant(
        "measure: what is drawn whole takes nothing",
        "koila_c/core/measure.c",
        "2 * state + (double)step->outside->bytes_drawn;",
        "2 * state;",
        MEASURE,
    ),
    Mutant(
        "waiting: a product is light",
        "koila_c/core/waiting.c",
        "bool is_light = node->mode == KL_MODE_ROWS && !node->row->is_heavy;",
        "bool is_light = node->mode == KL_MODE_ROWS;",
        "tests/test_core_c.py -k test_waiting",
    ),
    Mutant(
        "waiting: chains of any length",
        "koila_c/core/waiting.c",
        "status == KL_OK && light.length <= longest",
        "status == KL_OK && light.length <= UINT32_MAX",
        "tests/test_core_c.py -k test_waiting",
    ),
    Mutant(
        "waiting: light bodies wait, too",
        "koila_c/core/waiting.c",
        "*can_wait &= has_heavy; /*",
        "*can_wait &= has_heavy || true; /*",
        "tests/test_core_c.py -k test_waiting",
    ),
    Mutant(
        "waiting: saved outputs may be written",
        "koila_c/core/waiting.c",
        "is_there(waiting, value) && !kl_stage_is_overwritten(waiting->tape, node, k, is_output);",
        "is_there(waiting, value);",
        "tests/test_core_c.py -k test_waiting",
    ),
    Mutant(
        "waiting: a body with a derivative waits",
        "koila_c/core/waiting.c",
        "node->row->is_derivative || node->is_random",
        "node->row->is_batch_norm || node->is_random",
        "tests/test_derived.py",
    ),
    Mutant(
        "bridge: a checkpoint moves statistics again before calls that wait",
        "python/koila/recording/cut.py",
        "        checkpoints.write_what_is_moved()\n",
        "        checkpoints.recording()\n",
        "tests/test_statistics_in_order.py",
    ),
    Mutant(
        "checkpoint: what a custom function returned is kept for the next part",
        "python/koila/recording/freed.py",
        "        get = custom_functions.way_to(real)",
        "        get = None",
        "tests/test_checkpoint_functions.py",
    ),
    Mutant(
        "checkpoint: one part is of two checkpoints with custom functions",
        "python/koila/recording/bridge.py",
        "if not checkpoints.outermost() and freed.is_read():",
        "if checkpoints.recording() and freed.is_read():",
        "tests/test_checkpoint_functions.py",
    ),
    Mutant(
        "checkpoint: a custom function draws other numbers in backward",
        "python/koila/running/custom_functions.py",
        "states = [(one, noise.get_state(one)) for one in own]",
        "states = []",
        "tests/test_checkpoint_functions.py",
    ),
    Mutant(
        "checkpoint: a custom function reads an input again as it was before a write",
        "python/koila/running/recomputed.py",
        "        self.tree.forget_if_written(tensor)",
        "        version_of(tensor)",
        "tests/test_checkpoint_functions.py",
    ),
    Mutant(
        "checkpoint: a part is cut between two updates of the same statistics",
        "python/koila/running/checkpoints.py",
        "group.moved_before |= group.moved",
        "group.moved_before |= set()",
        "tests/test_checkpoint_functions.py",
    ),
    Mutant(
        "checkpoint: hooks are not looked for in parts that were cut off",
        "python/koila/running/checkpoints.py",
        "steps += end.leaf_passes()",
        "steps += []",
        "tests/test_hooks_of_weights.py",
    ),
    Mutant(
        "waiting: what is made first comes last",
        "koila_c/core/waiting.c",
        "light_number(waiting, needs->ids[at - 1]) > number;",
        "light_number(waiting, needs->ids[at - 1]) < number;",
        "tests/test_core_c.py -k test_waiting",
    ),
    Mutant(
        "waiting: what is read once more is gone",
        "python/koila/running/saved.py",
        "return self.tensors[value] if self.n_reads[value] else self.tensors.pop(value)",
        "return self.tensors.pop(value)",
        WAITING,
    ),
    Mutant(
        "waiting: copies of what is written are kept",
        "python/koila/running/saved.py",
        "if written in self.light and len(copies) == 1:",
        "if written in self.light and len(copies) == 9:",
        WAITING,
    ),
    Mutant(
        "waiting: tiny chunks wait, too",
        "koila_c/core/schedule_units.c",
        "unit->waits = unit->waits && is_worth_waiting(build, run);",
        "unit->waits = unit->waits && (is_worth_waiting(build, run) || true);",
        WAITING,
    ),
    Mutant(
        "cross: the first gradient stays the memory of others",
        "python/koila/running/cross.py",
        "        alias.grad = owned(grad)",
        "        alias.grad = grad",
        "tests/test_random_writes.py::test_once_wrong",
    ),
    Mutant(
        "cross: gradients of half precision are summed in it",
        "python/koila/basics/rows.py",
        "alias.grad_dtype = torch.float32",
        "alias.grad_dtype = tensor.dtype",
        "tests/test_precision.py tests/test_cross.py",
    ),
    Mutant(
        "cross: of several gradients of a chunk one counts",
        "python/koila/running/cross.py",
        "                grad = add(grad, part)",
        "                grad = part",
        "tests/test_random_training.py",
    ),
    Mutant(
        "cross: a chunk's gradient takes the place of what was there",
        "python/koila/running/cross.py",
        "alias.grad, True)\n            alias.grad = None",
        "alias.grad, False)\n            alias.grad = None",
        CROSS,
    ),
    Mutant(
        "cross: gradients of rows are lost beside those of the whole",
        "python/koila/running/cross.py",
        "            total = add(total, of_rows)",
        "            total = add(of_rows, None) if total is None else total",
        "tests/test_random_training.py",
    ),
    Mutant(
        "cross: each chunk has as many terms as the first",
        "python/koila/running/cross.py",
        "else tensor * (n_rows / first)",
        "else tensor.clone()",
        CROSS,
    ),
    Mutant(
        "cross: a chunk that is settled twice has its last gradient",
        "python/koila/running/cross.py",
        'self.seeds["chunk", chunk] = add(self.seeds.get(("chunk", chunk)), alias.grad)',
        'self.seeds["chunk", chunk] = alias.grad',
        "tests/test_batch_norm.py",
    ),
    Mutant(
        "cross: what was emptied is filled with nothing",
        "python/koila/running/cross.py",
        "again.set_(storage, 0, of.shape, of.stride()).copy_(tensor.detach())",
        "again.set_(storage, 0, of.shape, of.stride()).zero_()",
        WAITING,
    ),
    Mutant(
        "light: nothing is emptied",
        "python/koila/running/interpret.py",
        "for chunk in cross.chunks:\n                cross.empty(chunk)",
        "for _ in cross.chunks:\n                pass",
        WAITING,
    ),
    Mutant(
        "light: what was filled stays",
        "python/koila/running/light.py",
        "            self.empty(chunk, before)\n",
        "            before.clear()\n",
        WAITING,
    ),
    Mutant(
        "interpret: every tail is certain",
        "python/koila/running/interpret.py",
        "                if self.is_certain:\n",
        "                if self.is_certain or run.exports:\n",
        "tests/test_tail.py",
    ),
    Mutant(
        "interpret: no segment tells which parts gradients go to",
        "python/koila/running/interpret.py",
        "is_first = step.graph == Graph.FIRST and chunk == 0",
        "is_first = step.graph == Graph.FIRST and chunk < 0",
        FUSE,
    ),
    Mutant(
        "measure: what a chunk keeps for its segments takes nothing",
        "koila_c/core/measure.c",
        "            known->is_handed = true;\n            step->held_per_row +=",
        "            known->is_handed = true;\n            step->held_per_row += 0 *",
        "tests/test_segments.py -k predicted",
    ),
    Mutant(
        "schedule: a chunk keeps what its segments have read",
        "koila_c/core/schedule.c",
        "        add_about(build, KL_STEP_FREE, made);\n",
        "        add_about(build, KL_STEP_FREE, NONE);\n",
        "tests/test_core_c.py tests/test_segments.py",
    ),
    Mutant(
        "attempt: what a failed try drew stays drawn",
        "python/koila/running/attempt.py",
        "            replay.draws.roll_back()\n            if is_of_layout(error):",
        "            n_tries += 0\n            if is_of_layout(error):",
        "tests/test_instructions.py -k Dropout",
    ),
    Mutant(
        "accrue: padding gets a gradient",
        "python/koila/running/accrue.py",
        "            total[ctx.padding] = aside  #",
        "            aside += 0  #",
        "tests/test_accrue.py",
    ),
    Mutant(
        "accrue: a later chunk's product is not scaled",
        "python/koila/running/accrue.py",
        "total.addmm_(left, right, alpha=alpha)",
        "total.addmm_(left, right)",
        "tests/test_accrue.py",
    ),
    Mutant(
        "accrue: the first chunk's product is not scaled",
        "python/koila/running/accrue.py",
        "weight.grad = made if alpha == 1 else made.mul_(alpha)",
        "weight.grad = made.mul_(1)",
        "tests/test_accrue.py",
    ),
    Mutant(
        "accrue: what is added is not scaled",
        "python/koila/running/accrue.py",
        "of_added = of_added if beta == 1 else of_added * beta",
        "of_added = of_added * 1",
        "tests/test_accrue.py",
    ),
    Mutant(
        "accrue: no gradient is made in its place",
        "python/koila/running/accrue.py",
        "is_such = node.mode == ROWS and not",
        "is_such = node.mode == REDUCE and not",
        "tests/test_accrue.py",
    ),
    Mutant(
        "bridge: what a call writes is read again as it is",
        "python/koila/recording/cut.py",
        "_core.replace_leaf(roots[0], leaf, numbers)",
        "self.early.pop(leaf, numbers)",
        BRIDGE,
    ),
    Mutant(
        "bridge: what was changed before a call writes it is kept for what was read before",
        "koila_c/binding/py_core.c",
        "(!is_lost && kl_py_append_new(",
        "(is_lost < 2 && kl_py_append_new(",
        "tests/test_written_behind_a_cut.py",
    ),
    Mutant(
        "bridge: eager's error about what was written is not raised",
        "python/koila/recording/cut.py",
        "        if self.written or any(root.how_written() for root in self.alive()):\n",
        "        if self.written is None:\n",
        BRIDGE,
    ),
    Mutant(
        "bridge: what has the memory of what was handed out is written unseen",
        "python/koila/recording/bridge.py",
        "if root.memory == memory:",
        "if root.memory is None:",
        "tests/test_overwritten.py",
    ),
    Mutant(
        "checkpoint: what its function was not given is not looked at",
        "python/koila/running/overwritten.py",
        "        for value in body.read:\n",
        "        for value in body.read.intersection(body.given):\n",
        "tests/test_overwritten.py",
    ),
    Mutant(
        "bridge: second derivatives go only to what the first were asked for",
        "python/koila/recording/cut.py",
        "return self._on_a_graph(roots, gradients, leaves, behind)",
        "return self._on_a_graph(roots, gradients, leaves, leaves)",
        "tests/test_bridge_twice.py",
    ),
    Mutant(
        "bridge: a gradient leads to all that a part reads",
        "python/koila/recording/cut.py",
        "gone = watched.difference(reached)",
        "gone = set()",
        "tests/test_bridge_twice.py",
    ),
    Mutant(
        "bridge: a hook is given a part of a gradient",
        "python/koila/recording/cut.py",
        "return frozenset(program.imports[k].value for k in reads if k >= 0)",
        "return frozenset(program.imports[k].value for k in reads if k > 10**6)",
        "tests/test_written_behind_a_cut.py",
    ),
    Mutant(
        "derived: a graph of other calls is differentiated",
        "python/koila/running/derived.py",
        "is_there = _state.beside is None or _state.beside.issuperset(self.nodes)",
        "is_there = bool(self.nodes)",
        "tests/test_derived.py",
    ),
    Mutant(
        "derived: samples that meet are differentiated one by one",
        "python/koila/running/derived.py",
        "is_other = node.mode != ROWS or node.axis != axis or node.is_random or node.region",
        "is_other = bool(node.is_random or node.region)",
        "tests/test_derived.py",
    ),
    Mutant(
        "bridge: nothing is cut",
        "python/koila/recording/bridge.py",
        "is_cut = not is_light and not planner.is_whole() and _cut(func)",
        "is_cut = is_light and not planner.is_whole() and _cut(func)",
        BRIDGE,
    ),
    Mutant(
        "bridge: small buffers are not copied",
        "python/koila/recording/bridge.py",
        "cut.early = cut.copy_what_it_reads([None], max(_SMALL, n_bytes // _SHARE))",
        "cut.early = cut.copy_what_it_reads([None], 0)",
        BRIDGE,
    ),
    Mutant(
        "bridge: a second gradient goes through the first's graph",
        "python/koila/recording/cut.py",
        "given = [gradient.detach().requires_grad_() for gradient in gradients]",
        "given = [gradient * 1 for gradient in gradients]",
        "tests/test_bridge_twice.py",
    ),
    Mutant(
        "bridge: every value that is handed out leads to all leaves",
        "python/koila/recording/bridge.py",
        "            made_of[leaf].append(value)\n",
        "            made_of[leaf] = list(roots)\n",
        BRIDGE,
    ),
    Mutant(
        "spent: a number that was used up refuses what is no gradient",
        "python/koila/running/spent.py",
        "        if any(gradient is not None for gradient in gradients):\n",
        "        if gradients:\n",
        "tests/test_bridge_twice.py",
    ),
    Mutant(
        "statistics: a norm needs what it moved itself",
        "python/koila/running/overwritten.py",
        "value in program.moved_by(node)",
        "value in ()",
        BRIDGE,
    ),
    Mutant(
        "bridge: what a part has computed stays with it",
        "koila_c/binding/py_bridge.c",
        "tape->core.values[i].state = KL_STATE_PENDING; /* the user's lazies have it */",
        "continue; /* the user's lazies have it */",
        BRIDGE,
    ),
    Mutant(
        "segments: a cut tears the order of sorted rows",
        "koila_c/core/segment.c",
        "if (off <= reach && is_better && body->crosses[i] < torn) {",
        "if (off <= reach && is_better) {",
        "tests/test_orders.py -k tears",
    ),
    Mutant(
        "noise: normal numbers are drawn in any chunks",
        "python/koila/staged/noise.py",
        "return not ends_within and sizes[-1] * per_row >= SIXTEEN",
        "return per_row > 0",
        NOISE,
    ),
    Mutant(
        "noise: what ends within a block is drawn by chunks",
        "python/koila/staged/noise.py",
        "any(size * per_row % SIXTEEN for size in sizes[:-1])",
        "any(size * per_row % 4 for size in sizes[:-1])",
        NOISE,
    ),
    Mutant(
        "noise: the last block is skipped, too",
        "python/koila/random/noise_drawn.py",
        "n_left = n_elements % SIXTEEN + SIXTEEN\n    _skip",
        "n_left = n_elements % SIXTEEN\n    _skip",
        "tests/binding/test_py_twister.py",
    ),
    Mutant(
        "noise: chances of double precision are compared with single",
        "python/koila/staged/noise.py",
        "dtype = torch.float64 if source.dtype == torch.float64 else torch.float32",
        "dtype = torch.float32",
        NOISE,
    ),
    Mutant(
        "noise: rows may lie anywhere",
        "python/koila/staged/noise.py",
        "    if not is_serial(noise) or not _is_outermost(noise):",
        "    if not is_serial(noise) or not noise.shape:",
        NOISE,
    ),
    Mutant(
        "noise: memory with gaps is filled in blocks",
        "python/koila/random/noise_drawn.py",
        "step = 2 if is_strided else 1",
        "step = 1",
        "tests/test_draws_order.py -k gaps",
    ),
    Mutant(
        "noise: every layer of a recurrent net draws",
        "python/koila/staged/noise.py",
        "return [noise] * (n_layers - 1)",
        "return [noise] * n_layers",
        NOISE,
    ),
    Mutant(
        "noise: attention draws for each batch of its values",
        "python/koila/staged/noise.py",
        "batch = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2])",
        "batch = out.shape[:-2]",
        "tests/test_random_writes.py::test_once_wrong -k attention",
    ),
    Mutant(
        "noise: feature dropout draws for each number",
        "python/koila/staged/noise.py",
        '"FEATURES": functools.partial(_dropout, follows=False)',
        '"FEATURES": functools.partial(_dropout, follows=True)',
        NOISE,
    ),
    Mutant(
        "checkpoint: what is recomputed draws other numbers",
        "python/koila/running/repeated.py",
        "            noise.set_state(generator, state)",
        "            pass",
        "tests/test_checkpoints_live.py",
    ),
    Mutant(
        "checkpoint: what is recomputed goes on to its end",
        "python/koila/running/recomputed.py",
        "            if not left and n_saved == len(self.saved):",
        "            if False:",
        "tests/test_checkpoints_live.py",
    ),
]
