# SPDX-License-Identifier: Apache-2.0
"""The schedule of a step: its instructions, and the options by which the core builds it."""

from __future__ import annotations

import enum
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from koila.staged.facts import Run

#: The kinds of instructions, in the order of schedule.def, which explains each.
Op = enum.IntEnum(
    "Op",
    "BARRIER STORE SUM RECOMPUTE LOOP END REMATERIALIZE RUN TAIL BACK TAKE FREE FREE_STORAGE WATCH "
    "CHECK BARRIER_BACK SEED",
    start=0,
)
#: How long the autograd graph of a chunk lives, in the order of KlGraph (schedule.h).
Graph = enum.IntEnum("Graph", "NONE NOW FIRST RETAIN SECOND_AXIS", start=0)


class Policy(enum.IntEnum):
    """How a boundary value, which a body leaves for others, is stored until its backward, in the
    order of KlValuePolicy (retained.h). A value that cannot be stored so is kept."""

    KEEP = 0
    REMATERIALIZE = 1  # its storage is freed, and cheap calls recompute it
    RECOMPUTE = 2  # it is freed, and its run recomputes it
    OFFLOAD = 3  # it is kept in another memory


Arguments = tuple[bool, bytes, int, int, bool, int]


class Strategy(NamedTuple):
    """What a step trades for memory, beside its number of chunks.

    Attributes:
        n_segments: the segments that each body is cut into; one segment of a chunk has its graph at
            a time, the others are recomputed in backward. If the script checkpoints parts of a
            body, the body is cut at least at these; 0 ignores the checkpoints and keeps what they
            cover.
        policies: the `Policy` of each value in `Program.boundary`, by position, so that they hold
            for the next program of the same shape; empty: all are kept. If there are not as many
            values, all are kept too.
        n_pieces: if above 1, the last body is cut before its head (a model's scores and their
            loss). The head then runs forward and backward in this many pieces of each chunk, while
            the graph of the calls before it is kept.
        second_size: pieces are parts of a second axis, with this many entries a row; the calls
            before the head may then be cut into segments too. 0: pieces are rows.
        second_dim: the dim of that axis, in the largest tensor that the head reads.
    """

    n_segments: int = 1
    policies: bytes = b""
    n_pieces: int = 1
    second_size: int = 0
    second_dim: int = 0

    def as_tuple(self, is_graph: bool, is_live: bool = False, n_chunks: int = 0) -> Arguments:
        """Return the fields of the core's KlPolicy. `is_graph`: the roots are differentiated.
        `is_live`: for measuring a run of the whole batch, in the order of the calls. `n_chunks`:
        how many chunks there will be; 0: not known."""
        return is_graph, self.policies, self.n_pieces, self.second_size, is_live, n_chunks

    @property
    def cuts(self) -> tuple[int, bool]:
        """The number of segments of each body, and whether the last body is cut before its head."""
        return self.n_segments, self.n_pieces > 1


AS_IT_IS = Strategy()

WITHOUT_CHECKPOINTS = Strategy(n_segments=0)

#: The number of the body that holds cheap calls on inputs alone, without gradients: masks, counts.
DATA = 1


class Step(NamedTuple):
    """One instruction; schedule.def says for each kind what `values` and `others` mean."""

    op: Op
    graph: Graph
    runs: list[Run]
    values: tuple[int, ...] = ()
    others: tuple[int, ...] = ()


class Cheap(NamedTuple):
    """How cheap calls recompute a value, chunk by chunk, after its storage was freed."""

    run: int  # the index of the run whose calls make it
    needs: tuple[int, ...]  # freed values that it is made of: they are recomputed first


@dataclass
class Schedule:
    """A step as a list of instructions."""

    steps: list[Step]
    n_forward: int  # how many of them are the forward pass; the others are the backward pass
    cheap_values: dict[int, Cheap]  # by value: how it is recomputed after FREE_STORAGE
    head: Run | None  # the segment that runs in pieces of a chunk

    def values_of(self, *ops: Op) -> set[int]:
        """Return the union of `values` over all instructions of these kinds."""
        return _values_of(self.steps, *ops)

    @functools.cached_property
    def executed(self) -> list[Step]:
        """The instructions that do something: not those of barriers without calls, nor RECOMPUTE,
        after which a loop recomputes chunks."""
        barriers = Op.BARRIER, Op.BARRIER_BACK
        found = []
        for step in self.steps:
            is_empty = not any(run.nodes or run.combined for run in step.runs)
            if step.op != Op.RECOMPUTE and not (step.op in barriers and is_empty):
                found.append(step)
        return found

    @functools.cached_property
    def leaving(self) -> set[int]:
        """The values that the forward pass frees, or that are offloaded: no graph that is retained
        until the backward pass may keep them."""
        return _values_of(self.steps[: self.n_forward], Op.STORE, Op.FREE)


def _values_of(steps: Sequence[Step], *ops: Op) -> set[int]:
    return {value for step in steps if step.op in ops for value in step.values}


def head_of(steps: Sequence[Step]) -> Run | None:
    """Return the segment that runs in pieces of a chunk: the run of the inner of two loops."""
    depth = 0
    for step in steps:
        depth += (step.op == Op.LOOP) - (step.op == Op.END)
        if depth == 2:
            return step.runs[0]
    return None
