# SPDX-License-Identifier: Apache-2.0
"""A plan: in how many chunks a program runs, and which way."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from koila.basics import config
from koila.basics.rows import largest
from koila.memory import budget
from koila.planning import limits, ways
from koila.staged.program import Program
from koila.staged.schedule import AS_IT_IS, Way

#: Rows of the axes, number of calls, whether it is differentiated, bytes it takes whole.
Shape = tuple[tuple[int, ...], int, bool, float]


_N_REMEMBERED = 64


_T = TypeVar("_T")
_Key = TypeVar("_Key", bound=tuple[object, ...])


def remember(known: dict[_Key, _T], shape: _Key, value: _T) -> None:
    known[shape] = value
    while len(known) > _N_REMEMBERED:
        known.pop(next(iter(known)))


@dataclass(frozen=True)
class Plan:
    """A number of chunks, and why: bytes predicted at the worst moment, bytes allowed.

    Chunks are of whole `unit`s of rows, the last may be short. Under a limit of the
    process, programs of one `shape` are run in chunks of one size for as long as that fits.
    """

    n_chunks: int
    unit: int = 1
    predicted: float | None = None
    allowed: float | None = None
    shape: Shape | None = None
    way: Way = AS_IT_IS
    why: str = "it fits"  # where it is whole
    least_limit: float | None = None  # the least memory_limit that works, where one is set

    @property
    def is_whole(self) -> bool:
        """Whether it runs as it was written."""
        return self.n_chunks == 1 and self.way == AS_IT_IS

    @property
    def whole(self) -> float:
        """Bytes that the program takes whole."""
        return self.shape[3] if self.shape is not None else 0.0

    def tighter(self, program: Program, is_fixed: bool) -> tuple[Program, Plan] | None:
        """What is tried where memory ran out: twice the chunks; where each has one row, or its rows
        are fixed, shorter segments, or pieces of a second axis. None: there is nothing left to
        try."""
        most = max(program.axes.values(), default=1)
        if self.n_chunks < most and not is_fixed:
            return program, self._halved(most)
        if self.way.n_across:
            return self._smaller_pieces(program)
        n_segments = max(2, 2 * self.way.n_segments)
        while program.roots and n_segments <= ways.SEGMENTS[-1]:
            cut = program.cut_for(Way(n_segments))
            if cut.n_cut > program.n_cut and cut.unstageable is None:
                return cut, dataclasses.replace(
                    self, way=Way(n_segments, 1, int(ways.can_offload(program)))
                )
            n_segments *= 2
        options = list(ways.along_second_axis(program.cut_for(AS_IT_IS), True))
        if not options:
            return None
        way = min(options, key=lambda one: one.estimate.peak(1)[0]).way
        return program.cut_for(way), dataclasses.replace(self, way=way)

    def _smaller_pieces(self, program: Program) -> tuple[Program, Plan] | None:
        way = self.way._replace(n_pieces=min(2 * self.way.n_pieces, self.way.n_across))
        return None if way == self.way else (program, dataclasses.replace(self, way=way))

    def _halved(self, most: int) -> Plan:
        """Twice the chunks, `most` at most; of half the size, where all are of one."""
        if not is_measured():
            return dataclasses.replace(self, n_chunks=min(most, 2 * self.n_chunks))
        unit = max(1, self.unit // 2)
        return dataclasses.replace(self, n_chunks=-(-most // unit), unit=unit)

    def keep(self, program: Program) -> None:
        """It went well: the next program of this shape is run in the same chunks."""
        if self.shape is not None and is_measured():
            last = Lasting(self.n_chunks, self.unit, limits.allowed_for(program), self.way)
            remember(lasting, self.shape, last)


class Lasting(NamedTuple):
    """The chunks that programs of one shape ran in last, and what was left when that was done."""

    n_chunks: int
    unit: int
    left: float
    way: Way

    def rows(self, n_rows: int) -> int:
        return largest(n_rows, self.n_chunks, self.unit)


lasting: dict[Shape, Lasting] = {}


def is_measured() -> bool:
    """Whether what is left is what the system says of this process, caches of libraries and all:
    then it changes from step to step. A limit on tensors is kept to the byte."""
    return budget.is_bound() and config.get("memory_limit") is None
