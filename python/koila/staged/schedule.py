# SPDX-License-Identifier: Apache-2.0
"""A schedule as Python has it: its instructions, and the ways to schedule a step."""

from __future__ import annotations

import enum
from typing import NamedTuple

from koila.staged.facts import Run


class Op(enum.IntEnum):
    """What an instruction of a schedule does: schedule.def, in whose order they are."""

    JOINT = 0
    HOME = 1
    REMAKE = 2
    LOOP = 3
    END = 4
    FILL = 5
    RUN = 6
    TAIL = 7
    BACK = 8
    TAKE = 9
    FREE = 10
    EMPTY = 11
    WATCH = 12
    CHECK = 13
    JOINT_BACK = 14
    SEED = 15


class Graph(enum.IntEnum):
    """The graph of what is run on a chunk: KlGraph, in whose order they are."""

    NONE = 0
    NOW = 1
    FIRST = 2
    WAIT = 3
    ACROSS = 4


Homes = tuple[bool, int, int, int, int, int, bool, int]


class Way(NamedTuple):
    """How a step is scheduled beside its chunks.

    Bodies are cut into `n_segments`, of which one at a time has its graph; where they have the
    user's checkpoints, there and into no fewer, but that 0 keeps what these would make again. Of
    what crosses from body to body every `keep_every`th is kept, and the rest is made again going
    back; or what every `offload_every`th body leaves is off its device meanwhile (1: all of it,
    0: none). Or the last body alone is cut, before its head (a model's scores and their loss),
    which runs in `n_pieces` of each chunk while the graph of the rest waits. Pieces are rows; or
    parts of a second axis, the dim `across` of what the head is handed, of `n_across` entries a
    row, and what is before the head may then be cut into segments too. Or what light calls make of
    what crosses is emptied, in chains of `n_light` such values.
    """

    n_segments: int = 1
    keep_every: int = 1
    offload_every: int = 0
    n_pieces: int = 1
    n_light: int = 0
    n_across: int = 0
    across: int = 0

    def homes(self, is_graph: bool, is_live: bool = False, n_chunks: int = 0) -> Homes:
        """As the core is told it: KlHomes."""
        kept = self.keep_every, self.offload_every
        return is_graph, *kept, self.n_pieces, self.n_light, self.n_across, is_live, n_chunks

    @property
    def cuts(self) -> tuple[int, bool]:
        """The segments of bodies, and whether the last is cut before its head."""
        return self.n_segments, self.n_pieces > 1


AS_IT_IS = Way()


WITHOUT_CHECKPOINTS = Way(n_segments=0)


#: The stage of light work on inputs alone.
DATA = 1


class Step(NamedTuple):
    """One instruction of a schedule. What `values` and `others` are, schedule.def says."""

    op: Op
    graph: Graph
    runs: list[Run]
    values: tuple[int, ...] = ()
    others: tuple[int, ...] = ()


class Light(NamedTuple):
    """How a value is made again, a chunk at a time, that crosses and is emptied."""

    run: int
    needs: tuple[int, ...]  # such values, which are made before


class Schedule(NamedTuple):
    """A step as data."""

    steps: list[Step]
    n_forward: int  # the steps from here on go back
    lights: dict[int, Light]  # how values are made again that are emptied meanwhile

    def values_of(self, *ops: Op) -> set[int]:
        """The values of all its instructions of some kinds."""
        return {value for step in self.steps if step.op in ops for value in step.values}

    def head(self) -> Run | None:
        """What runs in pieces of a chunk, in a loop inside of a loop."""
        depth = 0
        for step in self.steps:
            depth += (step.op == Op.LOOP) - (step.op == Op.END)
            if depth == 2:
                return step.runs[0]
        return None
