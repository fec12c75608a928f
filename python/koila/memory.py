# SPDX-License-Identifier: Apache-2.0
"""What a step of a program needs in bytes, as the core measures it, and the chunks that allows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from koila import _core, draws, outside
from koila.program import AS_IT_IS, Program, Way

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

    def peak(self, rows: int) -> tuple[float, int]:
        """Bytes with chunks of `rows` rows, and the node that needs them."""
        n_bytes, _, node = _core.peak(self.moments, self.rows, rows)
        return n_bytes, node

    def fixed(self, rows: int) -> float:
        """Bytes at that moment that smaller chunks do not make less."""
        return _core.peak(self.moments, self.rows, rows)[1]

    def least(self) -> tuple[int, float, int]:
        """The least bytes that chunks need: rows of a chunk, bytes, and the node.

        That is one row, but where each chunk leaves much: of sizes that double, the best.
        """
        sizes = [1 << i for i in range(self.rows.bit_length())] or [1]
        return min(((rows, *self.peak(rows)) for rows in sizes), key=lambda entry: entry[1])

    def course(self, rows: int) -> list[Course]:
        """All moments, in their order, with chunks of `rows` rows; of equal chunks those of one."""
        return [Course(*one) for one in _core.moments(self.moments, self.rows, rows)]

    def largest_chunk(self, budget: float) -> int:
        """The most rows of a chunk that fits; 0 where none does."""
        return _core.largest_chunk(self.moments, self.rows, budget)


def estimate(
    program: Program, is_graph: bool, way: Way = AS_IT_IS, is_live: bool = False
) -> Estimate:
    """What a program needs that is run in a way, and its backward, beyond what is there already.
    Live: its moments are those of the whole batch, in the order of the calls."""
    states = _STATE * program.is_drawing, draws.bytes_kept()
    homes = way.homes(is_graph, is_live)
    noise_of, peak_of = draws.bytes_whole, outside.peak
    return Estimate(
        *_core.measure(program.handle, homes, program.cloned, states, noise_of, peak_of)
    )
