# SPDX-License-Identifier: Apache-2.0
"""Retain the graphs of a body's chunks from forward to backward, without their saved tensors.

Saved-tensor hooks see what autograd saves. The inputs of the body are kept anyway; its outputs are
kept where the schedule puts them (STORE); what cheap calls make of these is recomputed before the
backward of the chunk, and so are outputs that are freed or offloaded meanwhile. So nothing but the
graph of a chunk is kept for it.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from koila.running import cheap
from koila.running.boundary import Awaiting
from koila.running.saved import Look, Reference, view_of
from koila.running.sending import Edges, edges_of, send_back
from koila.staged.facts import Run

if TYPE_CHECKING:
    from koila.running.stages import Stages


_VALUE = operator.itemgetter(1)  # of a `Reference`


class Chunk(NamedTuple):
    """A chunk that went forward: by output the edge (of a reduction: the edges) at which backward
    enters its graph, and what the graph needs."""

    edges: dict[int, Edges]
    given: Awaiting  # the aliases that it read
    references: list[Reference]  # the values that its saved tensors are


class Retained:
    """The retained graphs of a body's chunks.

    Args:
        stages: the step.
        run: the body, which has one segment.
        again: the values to recompute before the backward of a chunk.
        leaving: values that are not in memory then.
    """

    def __init__(
        self, stages: Stages, run: Run, again: Sequence[int], leaving: Container[int]
    ) -> None:
        self.stages, self.run_ = stages, run
        self.again = frozenset(again)
        stored = cheap.stored_of(stages.program, run)
        self.stored = list(itertools.filterfalse(leaving.__contains__, stored))
        frees_storage = bool(stages.schedule.cheap_values)
        there = self.again.union(self.stored)
        self.look = Look(stages.program, run, there, self.again, frees_storage)  # at each chunk
        self.chunks: dict[int, Chunk] = {}

    def run(self, chunk: int) -> None:
        """Run a chunk forward with a graph; keep its outputs and the graph."""
        stages, run, look = self.stages, self.run_, self.look
        references = look.references = []
        try:
            env, given = stages.run_apart(run, chunk, True, look)
        finally:
            look.saved.clear()
            look.references = []  # `send_back` drops them before the graph's backward
        stages.collect(run, env, chunk, run.exports)
        edges = edges_of(env, run.exports)
        self.chunks[chunk] = Chunk(edges, given, references)

    def send_back(self, chunk: int) -> None:
        """Send the gradients of a chunk's outputs back through its graph, and free the graph."""
        edges, given, references = self.chunks.pop(chunk)
        stages, run = self.stages, self.run_
        # Fill the cells of the graph: with outputs, and with recomputed values.
        read = set(map(_VALUE, references))
        again = self.again & read
        stored_rows: dict[int, torch.Tensor | None] = {}
        for value in self.stored:
            if again or value in read:
                boundary = stages.boundary[value]
                stored_rows[value] = boundary.chunks.get(chunk)
                if stored_rows[value] is None:
                    stored_rows[value] = boundary.of_rows(stages.grid_by_run[run.index], chunk)
        env: Any = stored_rows
        if again:
            env = stages.run_nodes(run, chunk, False, again={**stored_rows, **dict.fromkeys(again)})
        for cell, value, layouts in references:
            tensor = env[value]
            cell.append(tensor if layouts is None else view_of(tensor, *layouts))
            del cell, tensor
        del env, stored_rows, references  # the graph alone holds the cells from here
        pairs = stages.seeds(run, edges, chunk)
        del edges
        send_back(pairs, stages.awaiting, given)
