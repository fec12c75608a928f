"""A byte model of a staged program: what it needs at each moment of a step in chunks.

The step is gone through as replay.py runs it. In a body the bytes live at any moment are
fixed + per_row * rows: each storage once, what later calls read, what autograd keeps, gradients on
their way. What outlives a run is fixed: values that cross stages, gradients that gather, the graphs
of joints until they are differentiated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from koila.program import Program, Run
from koila.sizes import Sizes
from koila.sweep import Need, Sweep


@dataclass(frozen=True)
class Estimate:
    """What a program needs beyond what is there already (leaves), at each of its moments."""

    moments: tuple[Need, ...]
    rows: int

    def peak(self, rows: int) -> tuple[float, int]:
        """Bytes with chunks of `rows` rows, and the node that needs them."""
        worst = max(self.moments, key=lambda need: need.bytes(rows), default=Need(0, 0, 0))
        return worst.bytes(rows), worst.node

    def largest_chunk(self, budget: float) -> int:
        """The most rows of a chunk that fits; 0 where not even one does."""
        best = self.rows
        for need in self.moments:
            left = budget - need.fixed
            if left < 0:
                return 0
            if need.per_row > 0:
                best = min(best, math.floor(left / need.per_row))
        return max(0, best)


class _Step:
    """One step, run after run; `held` is what outlives the runs so far."""

    def __init__(self, program: Program, is_graph: bool) -> None:
        self.program = program
        self.is_graph = is_graph
        self.sizes = Sizes(program)
        self.held = 0.0
        self.moments: list[Need] = []
        self.graphs: dict[int, tuple[Sweep, float]] = {}
        self.gathering: set[int] = set()  # values whose gradients gather

    def _note(self, moments: list[Need]) -> None:
        self.moments += [Need(m.fixed + self.held, m.per_row, m.node) for m in moments]

    def _note_end(self, more: float) -> None:
        if self.program.nodes:
            self.moments.append(Need(self.held + more, 0.0, max(self.program.nodes)))

    def _keep(self, run: Run) -> None:
        """What leaves a body, of all chunks: memory of its own, even where it is a view."""
        kept: set[int] = set()
        for value in run.exports:
            storage = self.program.info(value).storage
            if not self._is_parts(run, value) and storage not in kept:
                kept.add(storage)
                self.held += self.sizes.whole(value)

    def _gather_gradients(self, run: Run) -> None:
        """The gradients that reach a run's inputs from other stages, and the leaves."""
        for number in run.imports:
            value = self.program.imports[number].value
            if value not in self.gathering and self.program.needs_gradient(value):
                self.gathering.add(value)
                self.held += self.sizes.gradient(value)

    # -- forward -----------------------------------------------------------------------------------

    def _joint(self, run: Run) -> None:
        sweep = Sweep(self.program, run, self.sizes, self.is_graph)
        self._note(sweep.forward())
        live = sweep.live().fixed
        self.graphs[run.stage] = sweep, live
        self.held += live

    def _tail(self) -> float:
        """What the tail needs when it is run on zeros, in the midst of the first chunk."""
        worst, held = 0.0, 0.0
        for run in self.program.tail_runs():
            sweep = Sweep(self.program, run, self.sizes, True)
            needs = [need.fixed for need in sweep.forward()]
            end = sweep.live().fixed
            needs += [need.fixed for need in sweep.back()]
            worst = max(worst, held + max(needs, default=0.0))
            held += end
        return max(worst, held)

    def _fused(self, run: Run) -> None:
        gathered = [v for v in run.exports if not self._is_parts(run, v)]
        seeds = sum(self.sizes.whole(v) for v in gathered if self.program.needs_gradient(v))
        self._gather_gradients(run)
        sweep = Sweep(self.program, run, self.sizes, True)
        self._note(sweep.forward())
        live = sweep.live()
        stand_ins = sum(self.sizes.whole(v) for v in gathered) + seeds
        self._note([Need(live.fixed + self._tail() + stand_ins, live.per_row, live.node)])
        self.held += seeds
        self._note(sweep.back())

    def _is_parts(self, run: Run, value: int) -> bool:
        node = self.program.node_of(value)
        return node is not None and node.id in run.parts

    def forward(self) -> None:
        for run in self.program.runs:
            if not run.is_body:
                self._joint(run)
                continue
            self._keep(run)
            if self.is_graph and run.has_gradient and self.program.is_fused(run):
                self._fused(run)
            else:
                self._note(Sweep(self.program, run, self.sizes, False).forward())

    # -- backward ----------------------------------------------------------------------------------

    def back(self) -> None:
        for run in reversed(self.program.runs):
            if not run.is_body:
                self._joint_back(run)
            elif run.has_gradient and not self.program.is_fused(run):
                self._gather_gradients(run)
                sweep = Sweep(self.program, run, self.sizes, True)
                self._note(sweep.forward())
                self._note(sweep.back())

    def _joint_back(self, run: Run) -> None:
        sweep, live = self.graphs.pop(run.stage)
        is_after = self.program.last_body is not None and run.stage > self.program.last_body
        if not (is_after and self.program.is_tail_linear):
            self._gather_gradients(run)
            self.held -= live  # what is live at the start of its backward is counted there
            cut = {entry.value for entry in self.program.imports if entry.place is not None}
            self._note(sweep.back(v for v in run.exports if v in self.gathering & cut))
            self.held += live - sweep.freed

    def deliver(self) -> None:
        """Gradients of leaves that were cut are put together; those of half precision cast."""
        more = 0.0
        for value in self.gathering:
            if self.program.is_leaf(value):
                info = self.program.info(value)
                is_cut = info.place is not None
                is_narrow = self.sizes.gradient(value) > self.sizes.whole(value)
                more += self.sizes.whole(value) * (is_cut or is_narrow)
        self._note_end(more)

    def commit(self) -> None:
        """The numbers of the user's lazies are put together from the chunks, one by one."""
        more, worst = 0.0, 0.0
        for value in self._cut_and_wanted():
            size = self.sizes.whole(value)
            worst = max(worst, more + 2 * size)
            more += size * (1 if not self.program.needs_gradient(value) else 2)
        self._note_end(max(more, worst))

    def _cut_and_wanted(self) -> Iterator[int]:
        for value in self.program.wanted:
            if self.program.info(value).place is not None:
                yield value


def estimate(program: Program, is_graph: bool) -> Estimate:
    """What a program needs beyond what is there already (leaves, parameters)."""
    step = _Step(program, is_graph)
    step.forward()
    if is_graph:
        step.back()
        step.deliver()
    step.commit()
    return Estimate(tuple(step.moments), max(program.axes.values(), default=0))
