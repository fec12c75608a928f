# SPDX-License-Identifier: Apache-2.0
"""Make the memory plan of a program from the moments that the core measured (`measure.c`)."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from koila.basics.rows import largest
from koila.memory import budget, estimates, optimizers
from koila.messages.memory_plan import BACKWARD, FORWARD, OPTIMIZER, MemoryPlan, Moment, Value
from koila.staged import layers
from koila.staged.facts import name_of_call, where_of_node
from koila.staged.program import Program
from koila.staged.schedule import AS_IT_IS, Strategy

_N_LARGEST = 10


class Way(NamedTuple):
    """How a program is run."""

    strategy: Strategy = AS_IT_IS
    n_chunks: int = 1
    unit: int = 1  # the rows of a chunk are a multiple of it
    fits: bool = True  # in the bytes that the program may use
    costs: str = ""  # what saves memory beside chunks, in words
    estimate: estimates.Estimate | None = None  # None: it is yet to be measured


def _held_from(program: Program, course: Sequence[estimates.Course]) -> list[tuple[int, int]]:
    """Return, for each result that the script holds, the position in `course` from which its memory
    exists, and its bytes; sorted.

    A result that is computed in chunks is allocated for all rows when its loop begins.
    """
    made_at: dict[int, int] = {}  # by call
    starts: dict[int, int] = {}  # by instruction of the schedule
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
    course: Sequence[estimates.Course],
    is_backward: Sequence[bool],
) -> Iterator[Moment]:
    """Yield the moments of the plan, with the bytes of results split off from other kept bytes."""
    held = _held_from(program, course)
    positions = [position for position, _ in held]
    totals = [0, *itertools.accumulate(n_bytes for _, n_bytes in held)]
    calls: dict[int, tuple[str, str, str]] = {}
    for i, (at, is_back) in enumerate(zip(course, is_backward, strict=True)):
        if at.node not in calls:
            node = program.node(at.node)
            calls[at.node] = name_of_call(node.id), where_of_node(node), names.of_call(node.id)
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
    """Describe the largest saved tensors, with their bytes in a chunk of `rows` rows."""
    share = rows / max(1, layers.rows_of(program))
    found = []
    for i, n_bytes, is_rows in layers.largest_kept(program, _N_LARGEST):
        node = program.node(i)
        in_chunk = round(n_bytes * share) if is_rows else n_bytes
        found.append(
            Value(name_of_call(node.id), where_of_node(node), names.of_call(i), n_bytes, in_chunk)
        )
    return tuple(found)


def of(
    program: Program,
    is_graph: bool,
    way: Way,
    allowed: float,
    summary: Sequence[str],
    names: layers.Names | None = None,
) -> MemoryPlan:
    """Return the memory plan of a program that may use `allowed` bytes. `is_graph`: it is
    differentiated. `summary`: the first sentences of the plan. `names`: those of its layers, if
    they were found before: that searches all objects."""
    strategy, n_chunks, unit, fits, costs, estimate = way
    cut = program.cut_for(strategy)
    is_live = n_chunks == 1 and strategy == AS_IT_IS
    if estimate is None or is_live:  # a live run is always measured here
        estimate = estimates.estimate(cut, is_graph, strategy, is_live)
    rows = max(1, largest(estimate.rows, n_chunks, unit))
    course = estimate.course(rows)
    # Moments after the last instruction, when gradients and results are delivered, are backward.
    n_forward = math.inf if is_live or not is_graph else cut.schedule(True, strategy).n_forward
    is_backward = [at.is_back or at.step >= n_forward for at in course]
    names = layers.Names(program) if names is None else names
    moments = tuple(_moments(cut, names, course, is_backward))
    worst = max(moments, key=lambda moment: moment.n_bytes)
    phases = {
        phase: max((one.n_bytes for one in moments if one.phase == phase), default=0)
        for phase in (FORWARD, BACKWARD)
    }
    parameters = program.parameters
    if is_graph:
        phases[OPTIMIZER] = (
            optimizers.gradients_to_come(parameters)
            + optimizers.coming_state(parameters)
            + optimizers.temporaries(parameters)
        )
    else:
        del phases[BACKWARD]
    devices = sorted(program.devices, key=lambda device: device.type == "cpu")
    device = devices[0] if devices else torch.device("cpu")
    there = dict(budget.counted(device, parameters, program.entered))
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
