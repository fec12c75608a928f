# SPDX-License-Identifier: Apache-2.0
"""Graphs of chunks that wait from a body's forward to its backward.

What autograd saves for it is seen as it is saved. What came into the body from outside is there
anyway; what leaves the body is in its home; what light calls make of those is made again before the
chunk goes back (KlStep.again). So nothing of a chunk is kept in between but its graph.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from koila.running import light
from koila.running.cross import Fresh, has_way_back, send_back
from koila.running.saved import Found, Look
from koila.staged.facts import Run

if TYPE_CHECKING:
    from koila.running.stages import Stages


Edges = GradientEdge | None | tuple[GradientEdge | None, ...]


class Chunk(NamedTuple):
    """A chunk that went forward: where its graph is entered, by value that it left, of a reduction
    by part; and what that needs."""

    edges: dict[int, Edges]
    given: Fresh  # the aliases that it was given
    found: Found


def _edge_of(tensor: torch.Tensor) -> GradientEdge | None:
    return get_gradient_edge(tensor) if tensor.requires_grad and has_way_back(tensor) else None


def _edges_of(left: Any) -> Edges:
    """Where the graph of what a chunk left is entered; None: it has none."""
    return tuple(map(_edge_of, left)) if isinstance(left, tuple) else _edge_of(left)


class Waiting:
    """The graphs of the chunks of a body.

    Args:
        stages: the step.
        run: the body, of one segment.
        again: what is made again for its graphs.
    """

    def __init__(self, stages: Stages, run: Run, again: Sequence[int]) -> None:
        self.stages, self.run_ = stages, run
        self.again = frozenset(again)
        self.homes = light.homes_of(stages.program, run)
        self.chunks: dict[int, Chunk] = {}

    def run(self, chunk: int) -> None:
        """Run a chunk with its graph, and keep what leaves it."""
        stages, run = self.stages, self.run_
        look = Look(stages.program, self.again.union(self.homes), self.again)
        try:
            go = functools.partial(stages.run_nodes, run, chunk, True, look=look)
            env, given = stages.apart(go)
        finally:
            look.pending.clear()
        stages.collect(run, env, chunk, run.exports)
        edges = {value: _edges_of(env[value]) for value in run.exports}
        self.chunks[chunk] = Chunk(edges, given, look.found)

    def send_back(self, chunk: int) -> None:
        """Send the gradients of what a chunk left back through its graph, which goes with that."""
        edges, given, found = self.chunks.pop(chunk)
        self.stages.go_on(given)
        del given
        self._find(chunk, found)
        pairs = self.stages.seeds(self.run_, edges, chunk)
        del edges
        send_back([edge for edge, _ in pairs], [seed for _, seed in pairs], self.stages.fresh)
        del pairs
        found.tensors.clear()

    def _find(self, chunk: int, found: Found) -> None:
        """What the graph of a chunk needs: from its home, or made again."""
        stages, run = self.stages, self.run_
        grid = stages.grid_of(run)
        known: dict[int, torch.Tensor | None]
        known = {value: stages.cross[value].of_rows(grid, chunk) for value in self.homes}
        again = [value for value in self.again if value in found.n_reads]
        env: Any = known
        if again:
            env = stages.run_nodes(run, chunk, False, again={**known, **dict.fromkeys(again)})
        found.tensors = {value: env[value] for value in found.n_reads}
