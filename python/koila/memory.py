"""A byte model of a staged program: what a chunk of so many rows needs at its worst moment.

Each value is counted once for its storage. In a body, the bytes live at any moment are
fixed + per_row * rows: forward, what later calls and the backward still read; backward, what is
still
saved and the gradients on their way. What crosses to other stages is counted whole.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from koila import _core
from koila.program import REDUCE, Node, Program, Run


@dataclass(frozen=True)
class Need:
    """Bytes at one moment: fixed + per_row * rows; and the node that runs then."""

    fixed: float
    per_row: float
    node: int

    def bytes(self, rows: int) -> float:
        return self.fixed + self.per_row * rows


@dataclass(frozen=True)
class Estimate:
    """What a program needs: moments of its bodies, and what is held over all of them."""

    moments: tuple[Need, ...]
    held: float
    rows: int

    def peak(self, rows: int) -> tuple[float, int]:
        """Bytes with chunks of `rows` rows, and the node that needs them."""
        worst = max(self.moments, key=lambda need: need.bytes(rows), default=Need(0, 0, 0))
        return self.held + worst.bytes(rows), worst.node

    def largest_chunk(self, budget: float) -> int:
        """The most rows of a chunk that fits; 0 where not even one does."""
        best = self.rows
        for need in self.moments:
            left = budget - self.held - need.fixed
            if left < 0:
                return 0
            if need.per_row > 0:
                best = min(best, math.floor(left / need.per_row))
        return max(0, best)


class _Sizes:
    """Bytes of values, split into a fixed part and one for each row."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._known: dict[int, tuple[float, float]] = {}

    def whole(self, value: int) -> int:
        info = self.program.info(value)
        return math.prod(info.shape) * info.dtype.itemsize

    def of(self, value: int) -> tuple[float, float]:
        if value not in self._known:
            info = self.program.info(value)
            whole = self.whole(value)
            by_rows = info.place is not None and info.rows > 0
            self._known[value] = (0.0, whole / info.rows) if by_rows else (float(whole), 0.0)
        return self._known[value]


def _saved(
    program: Program, node: Node
) -> tuple[set[int], tuple[float, float], tuple[float, float]]:
    """Values that torch keeps for the backward of a node; further bytes; workspace."""
    detail = _core.node(node.id)
    rows, inputs = detail[4], detail[5]
    saved_inputs, saved_outputs, extra, is_rows, whole, workspace = detail[6]
    kept = {v for k, v in enumerate(inputs) if v >= 0 and (k >= 64 or saved_inputs >> k & 1)}
    kept |= {v for k, v in enumerate(node.outs) if saved_outputs >> k & 1}
    if detail[1] is None:
        kept |= {v for v in inputs if v >= 0} | set(node.outs)
    by_rows = is_rows and rows > 0
    further = (float(whole), extra / rows) if by_rows else (float(extra + whole), 0.0)
    scratch = (0.0, workspace / rows) if rows > 0 else (float(workspace), 0.0)
    return kept, further, scratch


class _Total:
    """Bytes of a changing set of things, added up as it changes."""

    def __init__(self) -> None:
        self.sizes: dict[int, tuple[float, float]] = {}
        self.fixed = 0.0
        self.per_row = 0.0

    def add(self, key: int, size: tuple[float, float]) -> None:
        if key not in self.sizes:
            self.sizes[key] = size
            self.fixed += size[0]
            self.per_row += size[1]

    def drop(self, key: int) -> None:
        fixed, per_row = self.sizes.pop(key, (0.0, 0.0))
        self.fixed -= fixed
        self.per_row -= per_row


class _Sweep:
    """Storages, further saved bytes and gradients that are live, and the moments seen so far."""

    def __init__(self, sizes: _Sizes) -> None:
        self.sizes = sizes
        self.storages = _Total()
        self.further = _Total()
        self.gradients = _Total()
        self.moments: list[Need] = []

    def hold(self, value: int) -> None:
        self.storages.add(self.sizes.program.info(value).storage, self.sizes.of(value))

    def note(self, node: int, more: tuple[float, float] = (0.0, 0.0)) -> None:
        totals = (self.storages, self.further, self.gradients)
        fixed = sum(total.fixed for total in totals) + more[0]
        per_row = sum(total.per_row for total in totals) + more[1]
        self.moments.append(Need(fixed, per_row, node))


def _body_moments(program: Program, run: Run, sizes: _Sizes, is_graph: bool) -> list[Need]:
    """Forward, and where there is a gradient backward, over one chunk."""
    last_use: dict[int, int] = {}
    saved: dict[int, int] = {}  # storage -> the first node that saves it: the last to need it
    freed_by: dict[int, list[int]] = defaultdict(list)
    further: dict[int, tuple[float, float]] = {}
    scratch: dict[int, tuple[float, float]] = {}
    exported = {program.info(v).storage for v in run.exports}
    for position, i in enumerate(run.nodes):
        node = program.nodes[i]
        kept, further[i], scratch[i] = _saved(program, node)
        has_gradient = is_graph and any(program.needs_gradient(v) for v in node.outs)
        for value in kept if has_gradient else ():
            saved.setdefault(program.info(value).storage, i)
        if not has_gradient:
            further[i] = (0.0, 0.0)
        reads = [program.imports[n].value for n in node.imports if n >= 0]
        for value in [*node.outs, *reads]:
            last_use[program.info(value).storage] = position
    for storage, i in saved.items():
        if storage not in exported:
            freed_by[i].append(storage)
    sweep = _Sweep(sizes)
    for number in run.imports:
        entry = program.imports[number]
        if entry.place is not None:
            sweep.hold(entry.value)
    drops: dict[int, list[int]] = defaultdict(list)
    for storage, position in last_use.items():
        if storage not in saved and storage not in exported:
            drops[position].append(storage)
    for position, i in enumerate(run.nodes):
        for value in program.nodes[i].outs:
            if i not in run.parts:
                sweep.hold(value)
        sweep.further.add(i, further[i])
        sweep.note(i, scratch[i])
        for storage in drops[position]:
            sweep.storages.drop(storage)
    if is_graph:
        _go_back(program, run, sweep, freed_by)
    return sweep.moments


def _go_back(program: Program, run: Run, sweep: _Sweep, freed_by: dict[int, list[int]]) -> None:
    inside = {v for i in run.nodes for v in program.nodes[i].outs}
    for i in reversed(run.nodes):
        node = program.nodes[i]
        if not any(program.needs_gradient(v) for v in node.outs):
            continue
        reads = [program.imports[n].value for n in node.imports if n >= 0]
        new = [v for v in reads if v in inside and program.needs_gradient(v)]
        for value in [*(() if node.mode == REDUCE else node.outs), *new]:
            sweep.gradients.add(value, sweep.sizes.of(value))
        sweep.note(i)
        for value in node.outs:
            sweep.gradients.drop(value)
        sweep.further.drop(i)
        for storage in freed_by[i]:
            sweep.storages.drop(storage)


def estimate(program: Program, is_graph: bool) -> Estimate:
    """What a program needs beyond what is there already (leaves, parameters)."""
    sizes = _Sizes(program)
    moments: list[Need] = []
    held = 0.0
    counted: set[int] = set()
    rows = max(program.axes.values(), default=0)
    for run in program.runs:
        for value in run.exports:
            info = program.info(value)
            node = program.node_of(value)
            if info.storage in counted or (node is not None and node.id in run.parts):
                continue
            counted.add(info.storage)
            held += sizes.whole(value) * (2 if is_graph and program.needs_gradient(value) else 1)
        if run.is_body:
            moments += _body_moments(program, run, sizes, is_graph and run.has_gradient)
    if is_graph:
        held += sum(
            sizes.whole(entry.value)
            for entry in {e.value: e for e in program.imports}.values()
            if program.is_leaf(entry.value) and program.needs_gradient(entry.value)
        )
    return Estimate(tuple(moments), held, rows)
