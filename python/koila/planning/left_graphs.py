# SPDX-License-Identifier: Apache-2.0
"""Count the graphs that a whole run makes beside the one that its backward goes through.

A whole run makes the graph that eager would: `head(h.detach()).mean().backward()` leaves the graph
of `h` while the script holds `h`, and else makes it and frees it. A run in chunks makes none.
"""

from __future__ import annotations

import dataclasses

from koila.memory import estimates
from koila.planning.strategies import Strategies
from koila.staged.program import Program
from koila.staged.schedule import AS_IT_IS


def estimate(program: Program, is_graph: bool) -> estimates.Estimate:
    """Predict the bytes that a program needs as it is, with the graphs that a whole run makes. A
    graph that is freed meanwhile is counted as if it was held."""
    found = Strategies(program, is_graph).option(AS_IT_IS).estimate
    if not is_graph:
        return found
    return dataclasses.replace(found, whole=found.whole + _further_of(program, found.whole))


def _further_of(program: Program, whole: float) -> float:
    """Return the further bytes of a program that needs `whole` bytes without these graphs."""
    further, key = program.cache.further, program.gets is None
    if key not in further:
        ends = ends_of(program if program.gets is None else Program(program.roots))
        more = 0.0
        if ends or program.gets is not None:
            peak, left, _ = _course_of(Program([*program.roots, *ends]))
            _, left_without, peak_back = _course_of(program)
            more = max(peak, peak_back + left - left_without) - whole
        further[key] = max(0.0, more)
    return further[key]


def _course_of(program: Program) -> tuple[float, float, float]:
    """Return the bytes of a whole run: the most before its backward, as that begins, and in it."""
    moments = estimates.estimate(program, True, is_live=True).course(1)
    before = [one.n_bytes for one in moments if not one.is_back] or [0.0]
    return max(before), before[-1], max(one.n_bytes for one in moments if one.is_back)


def ends_of(program: Program) -> list[int]:
    """Return values with a graph that lead to no root and to no other of them."""
    found: list[int] = []
    leading: set[int] = set()
    for node in reversed(program.aside() if program.has_aside else []):
        outs = [value for value in node.outs if program.info(value).requires_grad]
        if leading.isdisjoint(outs):
            found.append(outs[0])
        leading.update(program.reads(node))
    return found
