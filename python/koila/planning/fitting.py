# SPDX-License-Identifier: Apache-2.0
"""Fit a program into the bytes that it may use: the strategy and the chunks in which it runs."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

from koila import _core
from koila.basics.rows import UNIT, Bounds, largest
from koila.memory import budget, estimates, optimizers
from koila.planning import left_graphs, limits, strategies
from koila.planning.limits import Needs
from koila.planning.plans import Lasting, Plan, Shape, is_measured, lasting
from koila.planning.strategies import Fitting, Option, Strategies
from koila.random import draws
from koila.staged.cache import remember
from koila.staged.program import Program
from koila.staged.schedule import AS_IT_IS, Strategy

# A prediction may be too high. So chunks that fitted in an earlier step are used again if the limit
# allows at least this share of the bytes that are predicted for them.
BOUND_SHARE = 0.75


class _Case(NamedTuple):
    """A program that is to be fitted into bytes."""

    program: Program
    is_graph: bool  # it is differentiated
    allowed: float  # the bytes that it may use
    shape: Shape | None  # by which strategies are remembered; None: none is used or remembered

    @property
    def strategies(self) -> Strategies:
        return Strategies(self.program, self.is_graph)


#: By shape: the strategy that a program ran in last, and the bytes that were allowed then.
_last_strategies: dict[Shape, tuple[Strategy, float]] = {}
_NEAR = 0.1


def _strategy_before(case: _Case) -> Strategy | None:
    """Return the strategy that a program of this shape ran in last, if about as many bytes were
    allowed then."""
    if case.shape is None or case.shape not in _last_strategies:
        return None
    strategy, allowed = _last_strategies[case.shape]
    return strategy if abs(case.allowed - allowed) <= _NEAR * allowed else None


def _remembered(case: _Case, found: Fitting) -> Fitting:
    """Return a fitting, whose strategy is remembered for later programs of this shape."""
    if case.shape is not None:
        remember(_last_strategies, case.shape, (found.option.strategy, case.allowed))
    return found


def _fitting_before(case: _Case) -> Fitting | None:
    """Return the strategy that a program of this shape ran in last, with its rows, if it fits
    again. As it is, a program is tried before this."""
    strategy = _strategy_before(case)
    if strategy is None or strategy == AS_IT_IS:
        return None
    if case.program.cut_for(strategy).unstageable is not None:
        return None
    option = case.strategies.option(strategy)
    rows = option.rows(case.allowed)
    return Fitting(option, rows) if rows > 0 else None


def _find_strategy(case: _Case) -> Fitting | Needs:
    """Return the cheapest strategy that fits, or if none does, what the one that needs least
    needs."""
    found, some = _fitting_before(case), case.strategies
    if found is not None:
        return found
    allowed = case.allowed
    found = some.cheapest(some.all(), allowed, some.enough(allowed))
    found = found or some.cheapest(some.along(allowed), allowed)
    if found is not None:
        return _remembered(case, found)
    option = some.least()
    needed = limits.least(option.estimate, allowed)
    if needed.n_bytes > allowed:
        return needed
    return Fitting(option, max(needed.rows, option.estimate.largest_chunk(allowed)))


def _larger_chunks(case: _Case, found: Fitting) -> Fitting:
    """Return a strategy with larger chunks for a program that fits in many small ones, if it is
    cheaper; else the fitting that was found."""
    if _strategy_before(case) == found.option.strategy:
        return found
    before, some = _fitting_before(case), case.strategies
    if before is not None:
        return before
    enough = some.enough(case.allowed, found)
    cheapest = some.cheapest(some.larger_chunks(), case.allowed, enough)
    return _remembered(case, cheapest or found)


def _fits_whole(needed: float, rows: int, allowed: float) -> bool:
    """Tell whether a whole run fits, for a program whose largest chunk that fits has `rows` rows:
    with room to spare, unless no chunk has that."""
    return needed <= (limits.whole_share() if rows > 0 else 1.0) * allowed


def fit(
    program: Program, estimate: estimates.Estimate, is_graph: bool, asked: float = 0.0
) -> Plan | Needs:
    """Return the plan for a program that needs `estimate` as it is; or what it needs, if that does
    not fit. It may use `asked` bytes even if they are kept back for libraries. No more than that,
    since some libraries end the process if they get no memory."""
    left, slack = limits.allowed_for(program, needed=estimate.whole), budget.slack()
    allowed = max(left, min(left + slack, asked))
    sizes, pinned = tuple(sorted(program.axes.values())), pinned_grids(program)
    shape = sizes, program.n_nodes, is_graph, estimate.whole
    if pinned:
        return _pinned(program, is_graph, shape, allowed, max(pinned, key=len))
    as_it_is = Option(AS_IT_IS, estimate, program.n_nodes)
    rows = as_it_is.rows(allowed)
    last = lasting.get(shape) if is_measured() else None
    was_whole = last is not None and last.n_chunks == 1 and last.strategy == AS_IT_IS
    # Without a graph one chunk runs stage by stage too, and each stage keeps what later ones read.
    # With a graph a whole run is live: it runs all other pending calls as well.
    besides = 0 if program.is_all else max(0, _core.pending_bytes(True) - program.amounts.made)
    staged = 0 if is_graph else estimate.peak(estimate.rows)[0]
    needed = max(estimate.whole + besides * is_graph, staged)
    if needed <= left + slack if was_whole else _fits_whole(needed, rows, allowed):
        planned = Plan(1, 1, needed, allowed, shape)
        planned.keep(program)
        return planned
    case = _Case(program, is_graph, allowed, shape)
    if last is not None and not was_whole:
        allowed = left + slack  # libraries have taken what they take in a first step
        cut = program.cut_for(last.strategy)
        strategy = last.strategy if cut.unstageable is None else AS_IT_IS
        size = last.rows(estimate.rows)
        option = case.strategies.option(strategy)
        rows = option.rows(allowed)
        if rows < 2 * size and _still_fits(last, option.estimate.peak(size)[0], allowed):
            needed = option.estimate.peak(size)[0]
            return Plan(last.n_chunks, last.unit, needed, allowed, shape, strategy)
        if 0 < rows < 2 * size:
            while size > rows:
                size //= 2
            rows = size
        return _in_chunks(case._replace(allowed=allowed), Fitting(option, rows))
    is_limited = last is None and is_graph and budget.is_limited()
    coming = optimizers.coming_state(program.parameters) if is_limited else 0
    if coming > 0:
        # Later steps have less, by the state that optimizers make. The first step already uses the
        # chunks that will fit then, so that all steps have the same ones.
        later = case._replace(allowed=allowed - coming)
        made = _in_chunks(later, Fitting(as_it_is, as_it_is.rows(later.allowed)))
        if isinstance(made, Plan):
            return dataclasses.replace(made, allowed=allowed)
    return _in_chunks(case, Fitting(as_it_is, rows))


def _in_chunks(case: _Case, found: Fitting) -> Plan | Needs:
    """Return the plan for a program that does not fit whole; or what it needs, if it does not fit.
    `found` is the strategy to begin with; if its chunks have no rows, it does not fit."""
    (strategy, estimate, _), rows = found
    if rows == 0:
        fitting = _find_strategy(case)
        if isinstance(fitting, Needs):
            return fitting
        (strategy, estimate, _), rows = fitting
    elif strategy == AS_IT_IS and not is_measured():
        # Not under a limit of the process: oneDNN would compile kernels for the size of pieces too,
        # and their memory counts against that limit.
        if case.strategies.cost(*found) > strategies.DEAR:
            found = _larger_chunks(case, found)
        (strategy, estimate, _), rows = found
    if case.is_graph and strategy == AS_IT_IS:
        rows = min(rows, -(-estimate.rows // 2))  # one chunk is a whole run, which does not fit
    n_chunks, unit = _chunks_of(estimate.rows, rows, strategy)
    predicted, _ = estimate.peak(largest(estimate.rows, n_chunks, unit))
    return Plan(n_chunks, unit, predicted, case.allowed, case.shape, strategy)


def pinned_grids(program: Program) -> list[list[Bounds]]:
    """Return the grids of chunks that a program must run in, since it drew random numbers in
    them."""
    grids = draws.pinned_grids()
    return [grids[axis] for axis in program.axes if axis in grids] if grids else []


def _pinned(
    program: Program, is_graph: bool, shape: Shape, allowed: float, bounds: list[Bounds]
) -> Plan | Needs:
    """Plan a program in the chunks `bounds` in which an earlier run of it drew random numbers; in
    other chunks it would draw others."""
    rows = max(stop - start for start, stop in bounds)
    best: Needs | None = None
    some = Strategies(program, is_graph)
    for strategy in filter(some.is_there, some.all()):
        estimate = some.option(strategy).estimate
        n_bytes, node = estimate.peak(rows)
        if n_bytes <= allowed:
            return Plan(len(bounds), rows, n_bytes, allowed, shape, strategy)
        if best is None or n_bytes < best.n_bytes:
            best = Needs(rows, n_bytes, node, estimate.fixed(rows), allowed)
    assert best is not None
    return best


def _chunks_of(n_rows: int, rows: int, strategy: Strategy) -> tuple[int, int]:
    """Return the number of chunks with at most `rows` rows, and the unit of rows that they have.

    A single chunk is returned only if the head runs in pieces of it. Under a limit of the process
    all chunks but the last have one size, a multiple of eight or a power of two, since oneDNN
    compiles kernels for each size and keeps them.
    """
    if rows >= n_rows and strategy.n_pieces > 1:
        return 1, 1
    if is_measured():
        rows = rows // UNIT * UNIT if rows >= UNIT else 1 << rows.bit_length() - 1
        rows = max(1, min(rows, -(-n_rows // 2)))
        return -(-n_rows // rows), rows
    n_chunks = max(2, -(-n_rows // rows))
    return n_chunks, UNIT if largest(n_rows, n_chunks, UNIT) <= rows else 1


def _still_fits(last: Lasting, needed: float, allowed: float) -> bool:
    """Tell whether a program shall run in the chunks that it ran in last.

    The kernels for these chunks are compiled, so the same chunks fit as long as no less memory is
    left than before. With less left they are tried if they may fit: other sizes would take memory
    for new kernels for good, while a run that fails is undone.
    """
    if allowed >= last.left + budget.slack() - max(2**20, 0.02 * last.left):
        return True
    return BOUND_SHARE * needed <= allowed


#: How often the range in which a limit is looked for is halved.
_N_HALVED = 6


class Trial:
    """A program that is fitted into other bytes than there are: nothing is remembered. The number
    of chunks is that of a step after the first one under a `memory_limit`."""

    def __init__(self, program: Program, is_graph: bool) -> None:
        self._program, self._is_graph = program, is_graph

    @functools.cached_property
    def _estimate(self) -> estimates.Estimate:
        return left_graphs.estimate(self._program, self._is_graph)

    @functools.cached_property
    def least(self) -> float:
        """The least bytes with which the program runs."""
        return Strategies(self._program, self._is_graph).least().least

    def fit(self, allowed: float) -> Plan | Needs:
        """Return the plan for `allowed` bytes; or what the program needs, if it does not fit."""
        program, estimate = self._program, self._estimate
        whole = estimate.whole
        if not program.axes or program.unstageable is not None:  # it runs whole or not at all
            is_enough = whole <= allowed
            return Plan(1, 1, whole, allowed) if is_enough else Needs(1, whole, 0, whole, allowed)
        option = Option(AS_IT_IS, estimate, program.n_nodes)
        found = Fitting(option, option.rows(allowed))
        if _fits_whole(whole, found.rows, allowed):
            return Plan(1, 1, whole, allowed)
        return _in_chunks(_Case(program, self._is_graph, allowed, None), found)

    def n_chunks(self, allowed: float) -> int:
        """Return the number of chunks for `allowed` bytes; of one sample each if it does not
        fit."""
        made = self.fit(allowed)
        return self._estimate.rows if isinstance(made, Needs) else made.n_chunks

    def least_for(self, most_chunks: int, before: float) -> float:
        """Return about the least bytes with which it runs in at most `most_chunks` chunks. A
        memory_limit, in tenths of a MiB, is for `before` beside these bytes."""
        rows = -(-self._estimate.rows // most_chunks)
        low, high = self.least, self._estimate.peak(rows)[0] / strategies.CHUNK_SHARE
        for _ in range(_N_HALVED if low < high else 0):
            middle = limits.in_tenths(before + (low + high) / 2) - before
            is_enough = self.n_chunks(middle) <= most_chunks
            low, high = (low, min(high, middle)) if is_enough else (middle, high)
        return high
