# SPDX-License-Identifier: Apache-2.0
"""The bytes of a step at each of its moments, before it runs: by phase, by category, by value.

All of it is read off the moments that the core measured, which are those that the number of chunks
was chosen by (`measure.c`).
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from koila import budget, layers, memory, plan_files
from koila.program import Program, Way, name_of_node, where_of_node
from koila.rows import largest
from koila.words import size

#: In the order of a step.
FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer's step"
_N_LARGEST = 10


@dataclass(frozen=True)
class Moment:
    """One call of a step, forward or back, and the bytes that are there beside what was there
    before the step.

    Attributes:
        phase: "forward" or "backward".
        call: the call, as "conv2d".
        where: its line, as "model.py:40".
        layer: the path of its module; empty: it is in none.
        activations: bytes of results that later calls or the backward read.
        outputs: bytes of results that the script holds.
        gradients: bytes of gradients, those of parameters among them.
        temporaries: bytes that are there only while the call runs.
    """

    phase: str
    call: str
    where: str
    layer: str
    activations: int
    outputs: int
    gradients: int
    temporaries: int

    @property
    def n_bytes(self) -> int:
        """All of them."""
        return self.activations + self.outputs + self.gradients + self.temporaries

    def __str__(self) -> str:
        layer = f" of layer {self.layer!r}" if self.layer else ""
        return f"the {self.phase} of {self.call}{layer} ({self.where})"


@dataclass(frozen=True)
class Value:
    """What autograd keeps of one call for its backward.

    Attributes:
        call: the call, as "relu".
        where: its line, as "model.py:40".
        layer: the path of its module; empty: it is in none.
        n_bytes: bytes of the whole batch.
        in_chunk: of these, what is there at one time.
    """

    call: str
    where: str
    layer: str
    n_bytes: int
    in_chunk: int


@dataclass(frozen=True)
class MemoryPlan:
    """What a step will take, before it runs. It prints as a text, and as a card in a notebook.

    Attributes:
        fits: whether it fits; if not, all numbers are those of the chunks that need least.
        n_chunks: in how many chunks it runs.
        n_samples: samples of a chunk.
        n_bytes: bytes that it takes at its worst moment, beside what is there.
        whole: bytes that it takes on the whole batch at once.
        allowed: bytes that it may take.
        there: bytes by kind that are there already: parameters, gradients, optimizer state, ...
        phases: bytes at the worst moment of each phase: forward, backward, optimizer's step. The
            last is what gradients and new optimizer state take, without the step's temporaries.
        worst: the moment that takes most.
        largest: the ten values that take most of what is kept for backward.
        moments: all moments, in the order of the step; of equal chunks those of one.
        costs: what is recomputed or offloaded for it, and what that costs; empty: nothing is.
        summary: the numbers as sentences.
    """

    fits: bool
    n_chunks: int
    n_samples: int
    n_bytes: int
    whole: int
    allowed: int
    there: Mapping[str, int]
    phases: Mapping[str, int]
    worst: Moment
    largest: tuple[Value, ...]
    moments: tuple[Moment, ...] = dataclasses.field(repr=False)
    costs: str = ""
    summary: tuple[str, ...] = ()

    def categories(self) -> dict[str, int]:
        """Bytes at the worst moment by category, what was there before among them.

        Returns:
            Bytes by name, the largest first, without those that have none.
        """
        own = {
            "activations": self.worst.activations,
            "outputs that the script holds": self.worst.outputs,
            "gradients": self.worst.gradients,
            "temporaries": self.worst.temporaries,
        }
        for name, n_bytes in self.there.items():
            own[name] = own.get(name, 0) + n_bytes
        found = sorted(own.items(), key=lambda entry: -entry[1])
        return {name: n_bytes for name, n_bytes in found if n_bytes > 0}

    def lines(self) -> list[str]:
        """What it prints, but for the table of values."""
        phases = ", ".join(f"{name} {size(n)}" for name, n in self.phases.items())
        categories = ", ".join(f"{name} {size(n)}" for name, n in self.categories().items())
        found = [*self.summary, f"by phase: {phases}"]
        found.append(f"worst moment: {self.worst}: {size(self.n_bytes)} beside what is there")
        return [*found, f"all that is there then: {categories}"]

    def table(self) -> list[tuple[str, ...]]:
        """The largest values: call, layer, line, bytes of the whole batch, bytes at one time."""
        rows = [
            (one.call, one.layer, one.where, size(one.n_bytes), size(one.in_chunk))
            for one in self.largest
        ]
        return [("kept for backward", "layer", "line", "whole batch", "at one time"), *rows]

    def __str__(self) -> str:
        rows = self.table() if self.largest else []
        widths = [max(len(row[i]) for row in rows) for i in range(5)] if rows else []
        listed = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
        return "\n".join((*self.lines(), *listed))

    def __repr__(self) -> str:
        return str(self)

    def _repr_pretty_(self, printer: Any, is_cycle: bool) -> None:
        printer.text(str(self))

    def _repr_html_(self) -> str:
        return plan_files.html(self)

    def svg(self) -> str:
        """A picture of the bytes over the step, as SVG: categories, phases, and what is allowed."""
        return plan_files.svg(self)

    def as_dict(self) -> dict[str, Any]:
        """All numbers, as what JSON knows."""
        return {**dataclasses.asdict(self), "categories": self.categories()}

    def save(self, path: str | Path) -> None:
        """Write a file, of the kind that its name ends with.

        Args:
            path: `.svg` is the picture, `.html` the card, `.json` the numbers; `.trace.json` opens
                in Chrome's trace viewer and in Perfetto, with a counter of memory, `.pickle` in
                torch's memory viewer; any other name gets the text.
        """
        plan_files.save(self, Path(path))

    def plot(self, axes: Any = None) -> Any:
        """Draw the bytes over the step with matplotlib, which has to be installed.

        Args:
            axes: where to; None: new ones.

        Returns:
            The axes.
        """
        return plan_files.plot(self, axes)


def _held_from(program: Program, course: Sequence[memory.Course]) -> list[tuple[int, int]]:
    """From which moment on results are there that the script holds: its position in the course,
    and their bytes; in order. What runs in chunks has room for all of a result from its start."""
    made_at: dict[int, int] = {}
    starts: dict[int, int] = {}  # of the steps of the schedule
    for i, at in enumerate(course):
        starts.setdefault(at.step, i)
        made_at.setdefault(at.node, i if at.step == 0 and len(starts) == 1 else starts[at.step])
    found = []
    for value in program.wanted:
        node = program.node_of(value)
        if node is not None and node.id in made_at:
            found.append((made_at[node.id], program.bytes_of(value)))
    return sorted(found)


def _moments(
    program: Program,
    names: layers.Names,
    course: Sequence[memory.Course],
    is_backward: Sequence[bool],
) -> Iterator[Moment]:
    held = _held_from(program, course)
    positions = [position for position, _ in held]
    totals = [0, *itertools.accumulate(n_bytes for _, n_bytes in held)]
    calls: dict[int, tuple[str, str, str]] = {}
    for i, (at, is_back) in enumerate(zip(course, is_backward, strict=True)):
        if at.node not in calls:
            node = program.node(at.node)
            calls[at.node] = name_of_node(node), where_of_node(node), names.of_call(node.id)
        kept = max(0.0, at.n_bytes - at.gradients - at.temporary)
        outputs = min(kept, totals[bisect.bisect_right(positions, i)])
        yield Moment(
            BACKWARD if is_back else FORWARD,
            *calls[at.node],
            round(kept - outputs),
            round(outputs),
            round(at.gradients),
            round(at.temporary),
        )


def _largest(program: Program, names: layers.Names, rows: int) -> tuple[Value, ...]:
    share = rows / max(1, layers.rows_of(program))
    found = []
    for i, n_bytes, is_rows in layers.largest_kept(program, _N_LARGEST):
        node = program.node(i)
        in_chunk = round(n_bytes * share) if is_rows else n_bytes
        found.append(
            Value(name_of_node(node), where_of_node(node), names.of_call(i), n_bytes, in_chunk)
        )
    return tuple(found)


def of(
    program: Program,
    is_graph: bool,
    way: Way,
    n_chunks: int,
    unit: int,
    allowed: float,
    *,
    fits: bool = True,
    costs: str = "",
    summary: Sequence[str] = (),
) -> MemoryPlan:
    """What a program takes that is run in some chunks.

    Args:
        program: what was recorded.
        is_graph: whether it is differentiated.
        way: how it is scheduled.
        n_chunks: in so many chunks.
        unit: samples of a chunk are a multiple of it.
        allowed: bytes it may take.
        fits: whether it does.
        costs: what is done beside chunks.
        summary: sentences to begin with.
    """
    cut = program.cut_for(way)
    is_live = n_chunks == 1 and way == Way()
    estimate = memory.estimate(cut, is_graph, way, is_live)
    rows = max(1, largest(estimate.rows, n_chunks, unit))
    course = estimate.course(rows)
    # After the last step gradients, and the numbers of what the script holds, are delivered.
    n_forward = math.inf if is_live or not is_graph else cut.schedule(True, way).n_forward
    is_backward = [at.is_back or at.step >= n_forward for at in course]
    names = layers.Names(program)  # it looks for modules among all objects
    moments = tuple(_moments(cut, names, course, is_backward))
    worst = max(moments, key=lambda moment: moment.n_bytes)
    phases = {
        phase: max((one.n_bytes for one in moments if one.phase == phase), default=0)
        for phase in (FORWARD, BACKWARD)
    }
    parameters = [t for t in program.entered if t.is_leaf and t.requires_grad]
    if is_graph:
        coming = budget.coming_state(parameters, is_sure=True)
        phases[OPTIMIZER] = sum(p.nbytes for p in parameters if p.grad is None) + coming
    else:
        del phases[BACKWARD]
    devices = sorted(program.devices, key=lambda device: device.type == "cpu")
    there = dict(budget.counted(devices[0] if devices else torch.device("cpu"), program.entered))
    return MemoryPlan(
        fits,
        max(1, -(-estimate.rows // rows)),
        rows,
        worst.n_bytes,
        round(estimate.whole),
        round(max(0.0, allowed)),
        there,
        phases,
        worst,
        _largest(program, names, rows),
        moments,
        costs,
        tuple(summary),
    )
