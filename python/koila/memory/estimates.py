# SPDX-License-Identifier: Apache-2.0
"""What a step of a program needs in bytes, as the core measures it, and the chunks that allows."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from koila import _core
from koila.memory import outside, uneven
from koila.random import draws
from koila.staged.program import Program
from koila.staged.schedule import AS_IT_IS, Way

# Bytes of the state of the CPU's generator.
_STATE = torch.Generator().get_state().nbytes


class Course(NamedTuple):
    """One moment of a step in chunks of some size, in bytes."""

    step: int  # of the schedule
    node: int
    is_back: bool  # autograd goes back through the node
    n_bytes: float
    gradients: float  # of these
    temporary: float  # of these, what is there only while the node runs


@dataclass(frozen=True)
class Estimate:
    """What a program needs beyond what is there already (leaves), at each of its moments."""

    moments: bytes  # KlMoment[], measure.h
    rows: int
    whole: float = math.inf  # run live: not cut, each gradient made once
    #: Rows of many lengths: moments for chunks of so many rows.
    again: Callable[[int], bytes] | None = None

    def _at(self, rows: int) -> tuple[bytes, int, int]:
        return (self.moments if self.again is None else self.again(rows)), self.rows, rows

    def peak(self, rows: int) -> tuple[float, int]:
        """Bytes with chunks of `rows` rows, and the node that needs them."""
        n_bytes, _, node = _core.peak(*self._at(rows))
        return n_bytes, node

    def fixed(self, rows: int) -> float:
        """Bytes at that moment that smaller chunks do not make less."""
        return _core.peak(*self._at(rows))[1]

    def least(self) -> tuple[int, float, int]:
        """The least bytes that chunks need: rows of a chunk, bytes, and the node.

        That is one row, but where each chunk leaves much: of sizes that double, the best.
        """
        sizes = [1 << i for i in range(self.rows.bit_length())] or [1]
        return min(((rows, *self.peak(rows)) for rows in sizes), key=lambda entry: entry[1])

    def course(self, rows: int) -> list[Course]:
        """All moments, in their order, with chunks of `rows` rows; of equal chunks those of one."""
        return [Course(*one) for one in _core.moments(*self._at(rows))]

    def largest_chunk(self, budget: float) -> int:
        """The most rows of a chunk that fits; 0 where none does.

        More chunks are not always less memory: each leaves something, and a row more may have less
        than its share of steps. What is found fits.
        """
        fits, more = self.rows, self.rows + 1
        while fits > 0 and self.peak(fits)[0] > budget:
            fits, more = fits // 2, fits
        while fits > 0 and more - fits > 1:
            middle = (fits + more) // 2
            fits, more = (middle, more) if self.peak(middle)[0] <= budget else (fits, middle)
        return fits


def estimate(
    program: Program, is_graph: bool, way: Way = AS_IT_IS, is_live: bool = False
) -> Estimate:
    """What a program needs that is run in a way, and its backward, beyond what is there already.
    Live: its moments are those of the whole batch, in the order of the calls."""
    states = _STATE * program.is_drawing, draws.bytes_kept()
    homes = way.homes(is_graph, is_live)
    noise_of, peak_of = draws.bytes_whole, outside.peak
    given = program.handle, homes, program.cloned, states, noise_of, peak_of
    moments, rows, whole = _core.measure(*given)
    lengths = list(_core.memo().get("lengths", {}).values())
    if not lengths or is_live:
        return Estimate(moments, rows, whole)

    @functools.cache
    def again(of_chunk: int) -> bytes:
        return _core.measure(*given, uneven.parts(lengths, rows, of_chunk))[0]

    return Estimate(moments, rows, whole, again)
