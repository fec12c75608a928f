"""The bytes of a staged program at each moment of a step, in Python: what measure.c is held to.

The step is gone through as replay.py runs it. In a body the bytes live at any moment are
fixed + per_row * rows: each storage once, what later calls read, what autograd keeps, gradients on
their way. What outlives a run is fixed: values that cross stages, gradients that gather, the graphs
of joints until they are differentiated. Each chunk leaves parts of reductions: per_chunk * chunks.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterable, Iterator

import pytest
import torch

import held
from held import Parts
from koila import draws, memory, outside
from koila.program import Program, Run
from model_kit import as_written, each_held, is_fused, kept_of, read_last, tail_runs
from sizes_model import Sizes
from sweep_model import Need, Sweep

# Bytes of the state of the CPU's generator.
_STATE = torch.Generator().get_state().nbytes


class _Step:
    """One step, run after run; `held` is what outlives the runs so far."""

    def __init__(self, program: Program, is_graph: bool) -> None:
        self.program = program
        self.is_graph = is_graph
        self.sizes = Sizes(program)
        self.kept = kept_of(program)
        self.held = 2.0 * _STATE * program.is_drawing  # the generator's, before and after
        self.held_per_chunk = 0.0
        self._hold_states()
        self.moments: list[Need] = []
        self.graphs: dict[int, tuple[Sweep, float]] = {}
        self.gathering: set[int] = set()  # values whose gradients gather
        self.cut = {entry.value for entry in program.imports if entry.place is not None}
        bodies = [run for run in program.runs if run.is_body]
        #: What bodies leave in parts.
        self.left_in_parts = {v for run in bodies for v in run.exports if self._is_parts(run, v)}
        self.left: dict[int, None] = {}  # what bodies left, of all chunks
        self.parts_left: dict[int, None] = {}

    def _hold_states(self) -> None:
        """The generator's state before each draw, and what is drawn whole, as draws.py keeps it."""
        self.held += draws.bytes_kept()
        for run in self.program.runs:
            nodes = [self.program.nodes[i] for i in run.nodes if self.program.nodes[i].is_random]
            if run.is_body:
                noises = [draws.bytes_whole(node.id, node.first_out) for node in nodes]
                self.held_per_chunk += _STATE * noises.count(-1)
                self.held += 2 * _STATE * noises.count(0) + sum(max(n, 0) for n in noises)
            self.held += _STATE * len(nodes)

    def _note(self, moments: list[Need]) -> None:
        more = self.held_per_chunk
        self.moments += [Need(m.fixed + self.held, m.per_row, m.node, more) for m in moments]

    def _note_end(self, more: float) -> None:
        if self.program.nodes:
            node = max(self.program.nodes)
            self.moments.append(Need(self.held + more, 0.0, node, self.held_per_chunk))

    def _change_left(self, values: Iterable[int], is_new: bool) -> None:
        """What bodies left of all chunks comes, or goes: each memory counts once, and a part of a
        memory is a copy."""
        self.held -= self._bytes_left()
        for value in values:
            is_held = value in self.left or value in self.parts_left
            lists = self.parts_left if value in self.left_in_parts else self.left
            if is_new != is_held and is_new:
                lists[value] = None
            elif is_new != is_held:
                del lists[value]
            if is_new != is_held and lists is self.parts_left:
                left = self._parts_of(value).left * self._result(value)
                self.held_per_chunk += left if is_new else -left
        self.held += self._bytes_left()

    def _bytes_left(self) -> float:
        memories: dict[tuple[int, int], float] = {}
        for value in self.left:
            root = value
            while (view := self.program.info(root).view) is not None:
                root = view[2]
            whole = self.sizes.whole(value)
            own = value if whole < self.sizes.whole(root) else -1
            memories.setdefault((self.program.info(value).storage, own), whole)
        return sum(memories.values())

    def _parts_of(self, value: int) -> Parts:
        node = self.program.node_of(value)
        assert node is not None
        return held.parts_of(node.reduce, node.is_for_chunks)

    def _result(self, value: int) -> int:
        """Bytes of a reduction's result; single numbers do not count."""
        return self.sizes.whole(value) if self.sizes.n_elements(value) > 1 else 0

    def _combined(self, run: Run) -> tuple[float, float]:
        """Bytes for each chunk of what a joint combines: what its graph keeps, and gradients."""
        kept, seeds = 0.0, 0.0
        for node in run.combined:
            if self.is_graph and self.program.needs_gradient(node.first_out):
                size = self._result(node.first_out)
                kept += self._parts_of(node.first_out).combined * size
                seeds += self._parts_of(node.first_out).seeds * size
        return kept, seeds

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
        self.held_per_chunk += self._combined(run)[0]
        self._note(sweep.forward())
        live = sweep.live().fixed
        self.graphs[run.stage] = sweep, live
        self.held += live

    def _tail(self) -> float:
        """What the tail needs when it is run on zeros, in the midst of the first chunk."""
        worst, held = 0.0, 0.0
        for run in tail_runs(self.program):
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
        parts = [v for v in run.exports if v not in gathered]
        zeros = sum(self._parts_of(v).left * self._result(v) for v in parts)
        self.held_per_chunk += zeros
        self._note([Need(live.fixed + self._tail() + stand_ins, live.per_row, live.node)])
        self.held_per_chunk -= zeros
        self.held += seeds
        self._note(sweep.back())

    def _is_parts(self, run: Run, value: int) -> bool:
        node = self.program.node_of(value)
        return node is not None and node.id in run.parts

    def forward(self) -> None:
        for run, values in zip(self.program.runs, read_last(self.program), strict=True):
            self._run(run)
            if not self.is_graph:
                self._forget(values)

    def _forget(self, values: set[int]) -> None:
        """In a run without a graph a value goes when it was read for the last time."""
        self._change_left(sorted(values - self.kept), False)

    def _run(self, run: Run) -> None:
        if not run.is_body:
            self._joint(run)
            return
        self._change_left(run.exports, True)
        if self.is_graph and run.has_gradient and is_fused(self.program, run):
            self._fused(run)
        else:
            self._note(Sweep(self.program, run, self.sizes, False).forward())

    # -- backward ----------------------------------------------------------------------------------

    def back(self) -> None:
        for run in reversed(self.program.runs):
            if not run.is_body:
                self._joint_back(run)
            elif run.has_gradient and not is_fused(self.program, run):
                self._let_go(run)
                self._gather_gradients(run)
                sweep = Sweep(self.program, run, self.sizes, True)
                self._note(sweep.forward())
                self._note(sweep.back())
                left = self.gathering.intersection(run.exports)
                self.held -= sum(self.sizes.gradient(v) for v in left if not self._is_parts(run, v))

    def _let_go(self, run: Run) -> None:
        """Before a body runs back, what it left for others goes, but for the gradients."""
        self._change_left([v for v in run.exports if v not in self.kept], False)

    def _joint_back(self, run: Run) -> None:
        sweep, live = self.graphs.pop(run.stage)
        is_after = self.program.last_body is not None and run.stage > self.program.last_body
        self._gather_gradients(run)
        kept, seeds = self._combined(run)
        if not (is_after and self.program.is_tail_linear):  # else what comes is only looked at
            self.held_per_chunk += seeds
        self.held -= live  # what is live at the start of its backward is counted there
        self._note(sweep.back(v for v in run.exports if v in self.gathering and v in self.cut))
        combined = (value for node in run.combined for value in node.outs)
        left = {self.program.info(v).storage: v for v in (*run.exports, *combined)}
        # The graph is let go, and with it what was put together for it.
        self.held += min(live - sweep.freed, sum(map(self.sizes.whole, left.values())))
        self.held_per_chunk -= kept

    def deliver(self) -> None:
        """Gradients of leaves that were cut are put together; those of half precision cast. Then
        torch goes on through graphs that were there before."""
        more = 0.0
        for value in self.gathering:
            if self.program.is_leaf(value):
                info = self.program.info(value)
                is_cut = info.place is not None
                is_narrow = self.sizes.gradient(value) > self.sizes.whole(value)
                more += self.sizes.whole(value) * (is_cut or is_narrow)
        self._note_end(more + outside.peak(_graphs_before(self.program)))

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


def _graphs_before(program: Program) -> Iterator[torch.Tensor]:
    """What entered with a graph of its own."""
    for value in {entry.value for entry in program.imports}:
        real = program.info(value).real
        if real is not None and real.grad_fn is not None and program.needs_gradient(value):
            yield real


def moments_of(program: Program, is_graph: bool) -> list[Need]:
    """What a program needs beyond what is there already (leaves, parameters)."""
    step = _Step(program, is_graph)
    step.forward()
    if is_graph:
        step.back()
        step.deliver()
    step.commit()
    return step.moments


def whole(program: Program, is_graph: bool) -> float:
    """What a live run of a program needs beyond what is there already, and its backward."""
    sizes = Sizes(program)
    sweep = Sweep(program, as_written(program), sizes, is_graph, is_live=True)
    moments = sweep.forward()
    if is_graph:
        moments = moments + sweep.back()
        end = sweep.live().fixed + sweep.gradients.fixed
        moments.append(Need(end + outside.peak(_graphs_before(program)), 0.0, 0))
    return max((need.fixed for need in moments), default=0.0)


def read_moments(estimate: memory.Estimate) -> list[Need]:
    """The moments of an estimate; KlMoment has the node last."""
    found = struct.iter_unpack("dddI4x", estimate.moments)
    return [Need(fixed, per_row, node, per_chunk) for fixed, per_row, per_chunk, node in found]


def write_moments(*moments: Need) -> bytes:
    return b"".join(struct.pack("dddI4x", *need[:2], need.per_chunk, need.node) for need in moments)


def assert_measured(program: Program, is_graph: bool) -> int:
    """Assert that the core measures a program as the model does; how many moments it has."""
    estimate, expected = memory.estimate(program, is_graph), moments_of(program, is_graph)
    found = read_moments(estimate)
    for need, right in zip(found, expected, strict=True):
        is_near = all(abs(a - b) <= 1e-9 * max(abs(b), 1) for a, b in zip(need, right, strict=True))
        assert is_near and need.node == right.node, f"{need}, the model has {right}"
    assert estimate.whole == pytest.approx(whole(program, is_graph), rel=1e-9)
    assert estimate.rows == max(program.axes.values(), default=0)
    return len(found)


def compared() -> contextlib.AbstractContextManager[list[int]]:
    """Hold what is said of each program that is made to the model; how many moments each had."""
    return each_held(
        lambda program: [assert_measured(program, is_graph) for is_graph in (False, True)]
    )
