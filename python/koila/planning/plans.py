# SPDX-License-Identifier: Apache-2.0
"""A plan: the number of chunks that a program runs in, and how it is scheduled."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from koila.basics import config
from koila.basics.rows import UNIT, largest
from koila.memory import budget
from koila.planning import limits, strategies
from koila.planning.least_limits import LeastLimit
from koila.planning.limits import Needs
from koila.staged.cache import remember
from koila.staged.program import Program
from koila.staged.schedule import AS_IT_IS, Strategy

#: What plans are remembered by: the rows of each axis, the number of calls, whether the program is
#: differentiated, the bytes that it needs whole.
Shape = tuple[tuple[int, ...], int, bool, float]


@dataclass(frozen=True)
class Plan:
    """The number of chunks that a program runs in, and the bytes on which that was decided."""

    n_chunks: int
    unit: int = 1  # the rows of a chunk are a multiple of it, but for the last chunk
    predicted: float | None = None  # peak bytes
    allowed: float | None = None  # bytes
    shape: Shape | None = None  # under a limit of the process, plans are kept by shape
    strategy: Strategy = AS_IT_IS
    why: str = "it fits"  # the reason if the program runs whole
    least_limit: LeastLimit | None = None  # if a memory_limit is set
    is_scheduled: bool = False  # by a schedule, in one chunk too

    @property
    def is_whole(self) -> bool:
        """Whether the program runs in one chunk, as it was written."""
        return self.n_chunks == 1 and self.strategy == AS_IT_IS and not self.is_scheduled

    def with_allowed(self, allowed: float) -> Plan:
        """Return the plan with other bytes that it may use; `dataclasses.replace` takes longer."""
        made = object.__new__(Plan)
        vars(made).update(vars(self), allowed=allowed)
        return made

    def limit_for_report(self) -> Callable[[], float] | None:
        """Return what finds the least limit for a report; None: no limit is set."""
        return self.least_limit.for_report() if self.least_limit is not None else None

    @property
    def whole(self) -> float:
        """The bytes that the program needs whole; 0 if they were not computed."""
        return self.shape[3] if self.shape is not None else 0.0

    def tighter(self, program: Program, is_fixed: bool) -> tuple[Program, Plan] | None:
        """Return what to try after memory ran out: the program, cut for a plan, and that plan.

        The first choice is twice the chunks, or more if they fit into what is free now. If chunks
        have one row already, or cannot be changed (`is_fixed`), shorter segments follow, then
        pieces of a second axis.

        Returns:
            None: nothing is left to try.
        """
        most = max(program.axes.values(), default=1)
        if self.n_chunks < most and not is_fixed:
            return program, self._halved(most).for_free(program, most)
        if self.strategy.second_size:
            return self._smaller_pieces(program)
        some = strategies.Strategies(program.cut_for(AS_IT_IS), True)
        n_segments = max(2, 2 * self.strategy.n_segments)
        while program.roots and n_segments <= strategies.SEGMENTS[-1]:
            cut = program.cut_for(Strategy(n_segments))
            if cut.n_cut > program.n_cut and cut.unstageable is None:
                strategy = some.offloading()._replace(n_segments=n_segments)
                return cut, dataclasses.replace(self, strategy=strategy)
            n_segments *= 2
        if not some.along():
            return None
        strategy = min(some.along(), key=lambda strategy: some.option(strategy).estimate.peak(1)[0])
        return program.cut_for(strategy), dataclasses.replace(self, strategy=strategy)

    def _smaller_pieces(self, program: Program) -> tuple[Program, Plan] | None:
        """Return the plan with twice the pieces of the second axis; None if each is one entry."""
        strategy = self.strategy._replace(
            n_pieces=min(2 * self.strategy.n_pieces, self.strategy.second_size)
        )
        is_smaller = strategy != self.strategy
        return (program, dataclasses.replace(self, strategy=strategy)) if is_smaller else None

    def _halved(self, most: int) -> Plan:
        """Return the plan with twice the chunks, at most `most`; under a limit of the process, with
        chunks of half the size."""
        if not is_measured():
            return dataclasses.replace(self, n_chunks=min(most, 2 * self.n_chunks))
        unit = max(1, self.unit // 2)
        return dataclasses.replace(self, n_chunks=-(-most // unit), unit=unit)

    def for_free(self, program: Program, most: int) -> Plan:
        """Return the plan with so many chunks that they fit into what is free now, if it has fewer:
        others may have taken memory since it was made. The largest axis has `most` rows."""
        if is_measured() or self.predicted is None:
            return self
        allowed = limits.allowed_for(program)
        some = strategies.Strategies(program.cut_for(AS_IT_IS), bool(program.roots))
        option = some.option(self.strategy)
        rows = option.rows(allowed)
        n_chunks = max(self.n_chunks, -(-most // rows)) if rows > 0 else self.n_chunks
        predicted, _ = option.estimate.peak(largest(most, n_chunks, self.unit))
        return dataclasses.replace(self, n_chunks=n_chunks, predicted=predicted, allowed=allowed)

    def keep(self, program: Program) -> None:
        """Remember, after a run that went well, its chunks for the next program of this shape."""
        if self.shape is not None and is_measured():
            last = Lasting(self.n_chunks, self.unit, limits.allowed_for(program), self.strategy)
            remember(lasting, self.shape, last)


class Lasting(NamedTuple):
    """The chunks that programs of one shape ran in last, under a limit of the process."""

    n_chunks: int
    unit: int
    left: float  # bytes that were left after the run
    strategy: Strategy

    def rows(self, n_rows: int) -> int:
        """Return the rows of the largest chunk."""
        return largest(n_rows, self.n_chunks, self.unit)


lasting: dict[Shape, Lasting] = {}


def is_measured() -> bool:
    """Tell whether only a limit of the process applies.

    The system counts all memory of the process against it, caches of libraries included, so the
    bytes left change from step to step. `memory_limit` counts tensors, to the byte.
    """
    return budget.is_bound() and config.get("memory_limit") is None


#: A step whose chunks would have few rows may use this share of the memory that is kept back for
#: libraries, so that its chunks are larger. Each chunk leaves small blocks on malloc's heap, and
#: the blocks of many small chunks can take more memory there than small chunks save.
_SPARED_SHARE = 0.125


def to_ask_for(made: Plan | Needs) -> float:
    """Return the bytes to plan with again, under a limit of the process, if a program does not fit,
    or only in chunks of few rows; otherwise 0."""
    if isinstance(made, Needs):
        return made.n_bytes / strategies.CHUNK_SHARE
    if made.n_chunks > 1 and made.unit < UNIT and made.shape not in lasting:
        return (made.predicted or 0.0) / strategies.CHUNK_SHARE + _SPARED_SHARE * budget.slack()
    return 0.0
