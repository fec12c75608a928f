# SPDX-License-Identifier: Apache-2.0
"""Describe a schedule in words: what is recomputed, offloaded or kept, and what runs twice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from koila.messages.words import count, size
from koila.planning import whole_calls
from koila.random import draws
from koila.staged import hooks
from koila.staged.facts import ONCE, Node, Run, call_in_words, name_of_call, where_of_node
from koila.staged.program import Program
from koila.staged.schedule import Op, Schedule, Strategy

_MODES = ("chunks", "reduce", "whole")


def describe(program: Program, value: int) -> str:
    """Describe a value: its shape, dtype, and the dim of its samples."""
    info = program.info(value)
    dtype = str(info.dtype).removeprefix("torch.")
    if info.place is None:
        return f"{list(info.shape)} {dtype}"
    _, dim, outer, inner = info.place
    digits = "" if outer == inner == 1 else f" of {outer} x samples x {inner}"
    return f"{list(info.shape)} {dtype} samples in dim {dim}{digits}"


def line_of(program: Program, node: Node) -> str:
    """Return the line of explain(full=True) for a call."""
    why = whole_calls.why_once(node) if program.joins_rows(node) else ""
    why = f"; {why}" if why else ""
    others = draws.why_others(node.id, node.first_out) if node.is_random else ""
    why += f"; {others}" if others and node.mode != ONCE else ""
    mode = f"{_MODES[node.mode]:6s} {describe(program, node.first_out)}{why}"
    return f"    {node.id:4d} {name_of_call(node.id):24s} {mode}  ({where_of_node(node)})"


def runs_of(program: Program) -> list[Run]:
    """Return the runs of a program that have calls or combine reductions, in order."""
    return [run for run in program.runs if run.nodes or run.combined]


class Passes(NamedTuple):
    """How often a schedule runs each chunk of a run forward and backward."""

    forward: int = 0
    back: int = 0
    n_segments: int = 1  # the segments of its body

    def __str__(self) -> str:
        return count(self.forward, "forward") + (
            f", {count(self.back, 'backward')}" if self.back else ""
        )


def passes_of(schedule: Schedule) -> dict[int, Passes]:
    """Return the passes of each run, by its index."""
    found: dict[int, Passes] = {}
    for step in schedule.steps:
        for run in step.runs if step.op in (Op.LOOP, Op.RUN, Op.BACK) else ():
            forward, back, n_segments = found.get(run.index, Passes())
            forward += step.op == Op.RUN
            back += step.op == Op.BACK
            n_segments = max(n_segments, len(step.runs))
            found[run.index] = Passes(forward, back, n_segments)
    return found


def _waits_for(program: Program, run: Run) -> Node | None:
    """Return the call that a body's backward needs, of all its chunks; None: it is not known."""
    if run.stage == program.last_body:
        return program.node(program.tail_node) if program.tail_node is not None else None
    made, imports = set(run.exports), program.imports
    by_bodies = {imports[k].value for later in program.runs if later.is_body for k in later.imports}
    for later in (one for one in program.runs if one.stage > run.stage):
        if not later.is_body and by_bodies.isdisjoint(later.exports):
            continue  # a mean or a metric: no chunk waits for it
        for node in map(program.node, later.combined):
            if node.id in run.nodes and not by_bodies.isdisjoint(node.outs):
                return node
        read = {k for k in later.imports if imports[k].value in made and k not in later.shadows}
        if later.is_body:
            read = {k for k in read if imports[k].place is None}
        readers = (program.node(i) for i in later.nodes)
        found = next((node for node in readers if not read.isdisjoint(node.imports)), None)
        if found is not None:
            return found
    return None


def hook_in_words(program: Program, run: Run) -> str:
    """Describe a hook on a result of a body, for which its backward waits; may be empty."""
    hooked = next(filter(hooks.is_on, run.exports), None)
    made = program.node_of(hooked) if hooked is not None else None
    if made is None:
        return ""
    return f"a hook on the result of {call_in_words(made)} gets the gradient of the whole batch"


def why_twice(program: Program, run: Run, passes: Passes) -> tuple[str, Node | None]:
    """Return why the chunks of a body run forward before their backward is possible, and the call
    for which; empty if they do not, or in segments, which `strategy_in_words` describes."""
    if not run.is_body or passes.back == 0 or passes.forward < 2 or passes.n_segments > 1:
        return "", None
    if hooked := hook_in_words(program, run):
        return hooked, None
    node = _waits_for(program, run)
    if node is None:
        return "its backward needs values of the whole batch", None
    call = call_in_words(node)
    return f"its backward needs the result of {call}, which depends on the whole batch", node


def head_of(program: Program, passes: Mapping[int, Passes], run: Run, position: int) -> str:
    """Return the line of explain(full=True) above the calls of a run."""
    if not run.is_body:
        return f"part {position}, on the whole batch: once"
    rows, of = program.axes[run.axis], passes[run.index]
    part = f", segment {run.segment + 1} of {of.n_segments}" if of.n_segments > 1 else ""
    return f"part {position}, in chunks over {rows} samples{part}: {of}"


def checkpoints_in_words(program: Program, strategy: Strategy) -> str:
    """Describe what becomes of activations in the script's checkpoints; empty if it has none."""
    if not program.has_checkpoints:
        return ""
    how = "recomputed before their backward" if strategy.n_segments > 0 else "kept"
    return f"the activations that the script's checkpoints cover {how}"


def strategy_in_words(program: Program, strategy: Strategy, schedule: Schedule) -> str:
    """Describe what saves memory beside chunks, and what it costs; empty if nothing does. The
    program's bodies are cut into the segments of the strategy."""
    checkpoints = checkpoints_in_words(program, strategy)
    words = [checkpoints] if checkpoints else []
    if strategy.n_segments > 1:
        loops = (step for step in schedule.steps if step.op == Op.LOOP)
        n_segments = max((len(step.runs) for step in loops), default=1)
        words.append(
            f"activations recomputed in up to {n_segments} segments (a second forward of all but "
            "the last)"
        )
    if strategy.second_size:
        words.append(
            f"the last layers in {strategy.n_pieces} pieces along dim {strategy.second_dim}"
        )
    elif schedule.head is not None:
        words.append(f"the last layers in {strategy.n_pieces} pieces of each chunk")
    again, offloaded, freed = map(schedule.values_of, (Op.RECOMPUTE, Op.STORE, Op.FREE_STORAGE))
    fates = []
    if again or offloaded or freed:
        kept = _kept(program, schedule)
        fates += [f"{kept} kept"] if kept else []
    if again:
        fates.append(f"{_n_bytes(program, again)} recomputed (one more forward)")
    if freed:
        fates.append(f"{_n_bytes(program, freed)} recomputed by cheap calls")
    if offloaded:
        fates.append(f"{_n_bytes(program, offloaded)} offloaded (a copy each way)")
    if fates:
        words.append(f"{_ACTIVATIONS}{', '.join(fates)}")
    return ", ".join(words)


_ACTIVATIONS = "activations between parts: "


def _n_bytes(program: Program, values: Iterable[int]) -> str:
    """Return the bytes of values in words; empty if there are none."""
    total = sum(map(program.bytes_of, values))
    return size(total) if total else ""


def kept_in_words(program: Program, schedule: Schedule) -> str:
    """Describe the activations that a pass over the chunks keeps for a later one; may be empty."""
    kept = _kept(program, schedule)
    return f"{_ACTIVATIONS}{kept} kept" if kept else ""


def _kept(program: Program, schedule: Schedule) -> str:
    is_graph = any(step.op == Op.BACK for step in schedule.steps[schedule.n_forward :])
    moved = schedule.values_of(Op.RECOMPUTE, Op.FREE_STORAGE, Op.STORE)
    return _n_bytes(program, program.crossing(is_graph) - moved)
