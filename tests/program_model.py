# SPDX-License-Identifier: Apache-2.0
"""How the nodes of a program make runs, in Python: what the core's program.c is held to.

It looks everything up anew, and knows no arrays: slow, and short enough to be read in one go.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

from koila import _core
from koila.staged.facts import ONCE, REDUCE, REDUCTION_NAMES, ROWS, Node, Run
from koila.staged.program import Program
from opcalls import N_PARTS


class Model:
    """The runs of a program that is there."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.nodes, self.imports = program.nodes, program.imports
        self.info, self.node_of = program.info, program.node_of
        self.kept = self._find_kept()
        self.drops: dict[int, list[tuple[int, ...]]] = {}  # by the run, after each of its nodes
        self._readers: dict[int, list[Node]] = defaultdict(list)
        self._at: dict[int, list[Node]] = defaultdict(list)  # by stage
        for node in self.nodes.values():
            for stage in self._stages_of(node):
                self._at[stage].append(node)
            for number in node.imports:
                if number >= 0 and not node.is_open:
                    self._readers[self.imports[number].value].append(node)
        #: Where bodies are cut the core says; what that means for each segment is found here.
        self._segment = {
            i: run.segment
            for run in program.runs
            for i in run.nodes
            if self.nodes[i].stage == run.stage and not self.nodes[i].is_data
        }
        self.runs = [run for stage in range(program.n_stages) for run in self._build(stage)]

    def _find_kept(self) -> set[int]:
        """The values that must be there whole at the end, for the wanted ones to be had from them.

        Lazies that share memory get numbers that do: views are taken again of the whole storage.
        """
        kept = set()
        for value in self.program.wanted:
            info = self.info(value)
            base = self.info(info.base)
            is_there = base.result is not None or self.node_of(info.base) is not None
            if info.view is not None and base.real is not None:
                continue
            is_shared = info.view is not None and info.storage in self.program.n_sharing
            kept.add(info.base if is_shared and is_there else value)
        return kept

    def _stages_of(self, node: Node) -> set[int]:
        late = {node.late_stage} if node.late_stage is not None else set()
        return {node.stage, *late}

    def _build(self, stage: int) -> list[Run]:
        if stage % 2 == 0:
            return [self._build_barrier(stage)]
        axes = {n.axis for n in self._at[stage] if n.mode != ONCE}
        cut = [run.segment for run in self.program.runs if run.stage == stage]
        n_segments = 1 + max(cut, default=0)
        runs = [
            self._build_body(stage, axis, segment)
            for axis in sorted(axes)
            for segment in range(n_segments)
        ]
        return [run for run in runs if run.nodes]

    def _build_barrier(self, stage: int) -> Run:
        run = Run(-1, stage, -1)
        run.nodes = [n.id for n in self._at[stage] if n.mode == ONCE and n.stage == stage]
        self._finish(run)
        return run

    def _is_here(self, node: Node, run: Run, is_any_segment: bool) -> bool:
        if run.stage not in self._stages_of(node) or node.axis != run.axis:
            return False
        is_cut = node.stage == run.stage and not is_any_segment
        return not is_cut or self._segment.get(node.id, 0) == run.segment

    def _is_read_elsewhere(self, value: int, run: Run, is_beside_body: bool = False) -> bool:
        if value in self.kept or value in self.program.roots:
            return True
        for reader in self._readers[value]:
            if reader.mode == ONCE or self._gathers(reader, value):
                return True
            is_here = self._is_here(reader, run, is_beside_body)
            if not is_here and not (self._is_data_value(value) and reader.mode != ONCE):
                return True
        return False

    def _gathers(self, node: Node, value: int) -> bool:
        of_value = (n for n in node.imports if n >= 0 and self.imports[n].value == value)
        return any(is_gathered(self.program, node, number) for number in of_value)

    def _is_data_value(self, value: int) -> bool:
        node = self.node_of(value)
        return node is not None and node.is_data

    def _build_body(self, stage: int, axis: int, segment: int) -> Run:
        run = Run(-1, stage, axis, segment)
        chosen: dict[int, tuple[int, ...]] = {}
        stack: list[Node] = []
        for node in self._at[stage]:
            if node.mode == ONCE or not self._is_here(node, run, False):
                continue
            is_sink = not node.is_data or any(self._is_read_elsewhere(v, run) for v in node.outs)
            if is_sink:
                stack.append(node)
        while stack:
            node = stack.pop()
            if node.id in chosen:
                continue
            chosen[node.id] = self._parts_at(node, stage)
            for number in self._numbers(node, stage):
                maker = self.node_of(self.imports[number].value)
                is_here = not is_gathered(self.program, node, number)
                if maker is not None and maker.is_data and is_here:
                    stack.append(maker)
        run.nodes = sorted(chosen)
        reduced = ((self.nodes[i], parts) for i, parts in chosen.items())
        run.parts = {node.first_out: parts for node, parts in reduced if node.mode == REDUCE}
        self._finish(run)
        return run

    def _numbers(self, node: Node, stage: int) -> list[int]:
        """The imports a node reads at a stage: an early part of a reduction sees only the
        scores' sizes."""
        if node.is_open:
            return []
        numbers = [number for number in node.imports if number >= 0]
        return numbers[1:] if node.mode == REDUCE and node.stage != stage else numbers

    def _parts_at(self, node: Node, stage: int) -> tuple[int, ...]:
        if node.mode != REDUCE:
            return ()
        if node.late_stage is None:
            return tuple(range(N_PARTS[REDUCTION_NAMES[node.reduce]]))
        stages = (node.stage, node.late_stage)
        return tuple(part for part, at in enumerate(stages) if at == stage)

    def _finish(self, run: Run) -> None:
        """Find what the run reads from outside, what leaves it, and when its values die."""
        outs = [self.nodes[i].outs for i in run.nodes]
        inside = {v for of in outs if of.start not in run.parts for v in of}
        run.combined = [] if run.is_body else self._combined_at(run.stage)
        inside.update(v for i in run.combined for v in self.nodes[i].outs)
        last_reader: dict[int, int] = {}
        imports: dict[int, None] = {}
        for position, i in enumerate(run.nodes):
            for value in self.nodes[i].outs:
                last_reader.setdefault(value, position)
            for number in self._numbers(self.nodes[i], run.stage):
                value = self.imports[number].value
                is_here = not is_gathered(self.program, self.nodes[i], number)
                if value in inside and is_here:
                    last_reader[value] = position
                else:
                    imports[number] = None
        run.imports = list(imports)
        reduced = [self.nodes[i] for i in run.nodes if self.nodes[i].first_out in run.parts]
        run.shadows = [node.imports[0] for node in reduced if node.stage != run.stage]
        run.shadows += [self.nodes[i].imports[0] for i in run.nodes if self.nodes[i].is_open]
        run.shadows = [number for number in run.shadows if number not in imports]
        for i in run.nodes:
            node = self.nodes[i]
            is_home = node.stage == run.stage
            for value in node.outs:
                is_parts = value in run.parts
                if self.program.is_leaf(value):
                    continue  # it has its number; the node runs for another of its results
                is_whole = node.first_out not in run.parts and is_home
                if is_parts or (is_whole and self._leaves(value, run)):
                    run.exports.append(value)
                    if (
                        run.is_body
                        and not is_parts
                        and not self._is_read_elsewhere(value, run, True)
                    ):
                        run.inner.append(value)
                if is_home and self.program.needs_gradient(value):
                    run.has_gradient = True
        kept = set(run.exports) | written_in(self.program, run)
        kept.update(v for i in run.combined for v in self.nodes[i].outs)
        drops: dict[int, list[int]] = defaultdict(list)
        for value, position in last_reader.items():
            if value not in kept:
                drops[position].append(value)
        self.drops[id(run)] = [tuple(drops[position]) for position in range(len(run.nodes))]

    def _combined_at(self, stage: int) -> list[int]:
        """Reductions whose partials become values at this barrier."""
        return [n.id for n in self._at[stage - 1] if n.mode == REDUCE and n.stage + 1 == stage]

    def _leaves(self, value: int, run: Run) -> bool:
        if run.is_body:
            return self._is_read_elsewhere(value, run)
        if value in self.kept or value in self.program.roots or self.program.is_hooked(value):
            return True
        return any(node.mode != ONCE or node.stage != run.stage for node in self._readers[value])


def _told(run: Run, drops: list[tuple[int, ...]]) -> tuple[Any, ...]:
    """A run, without the order of what has none: values that die after one node, sizes."""
    lists = (
        run.nodes,
        run.parts,
        run.imports,
        run.exports,
        run.inner,
        run.combined,
    )
    sets = [set(values) for values in drops], set(run.shadows)
    return run.stage, run.axis, run.segment, *lists, *sets, run.has_gradient


def is_gathered(program: Program, node: Node, number: int) -> bool:
    """Whether chunks of a node are given an import whole, which chunks make."""
    value, place, _ = program.imports[number]
    maker = program.node_of(value)
    is_by_rows = node.mode != ONCE and not node.is_open
    is_made_by_rows = maker is not None and maker.mode == ROWS
    has_rows = program.info(value).place is not None
    return is_by_rows and is_made_by_rows and has_rows and place is None


def written_in(program: Program, run: Run) -> set[int]:
    """Values whose memory a node of the run writes: they are kept to the end of the run."""
    storages = {
        program.info(program.nodes[i].first_out).storage
        for i in run.nodes
        if program.nodes[i].writes
    }
    if not storages:
        return set()
    return {
        v for i in run.nodes for v in program.nodes[i].outs if program.info(v).storage in storages
    }


@contextlib.contextmanager
def compared() -> Iterator[list[int]]:
    """Hold each program that is made to the model; how many nodes each had."""
    made: list[int] = []
    original = Program.__init__

    def init(program: Program, *args: Any, **kwargs: Any) -> None:
        original(program, *args, **kwargs)
        model = Model(program)
        kept = {value for value in range(program.n_values) if program.is_kept(value)}
        assert kept == model.kept
        ends, dropped = _core.facts_of(program.handle, "drops")
        drops = (tuple(dropped[i:end]) for i, end in zip([0, *ends], ends, strict=False))
        told = (_told(run, list(itertools.islice(drops, len(run.nodes)))) for run in program.runs)
        assert list(told) == [_told(run, model.drops[id(run)]) for run in model.runs]
        made.append(len(program.nodes))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Program, "__init__", init)
        yield made
