# SPDX-License-Identifier: Apache-2.0
"""Run one stage on one chunk, without a graph, with one, or with one that is retained.

The order of these operations is not decided here: `interpret.py` executes a schedule.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from koila import _core
from koila.basics import engine
from koila.basics.rows import grid
from koila.reductions import calls
from koila.running import derived, saved
from koila.running.boundary import Awaiting, BoundaryValue
from koila.running.prepared import Prepared
from koila.running.sending import edges_of
from koila.running.store import Store
from koila.staged.facts import Run, make_job
from koila.staged.program import Program
from koila.staged.schedule import DATA, Schedule

#: A call takes at most so many times the bytes that it reads and makes.
_MOST_HELD = 8
_FEW_BYTES = 2**12


def _counted_at_once(program: Program) -> list[int]:
    """Return the axes over which the first stage (`DATA`) runs on all rows at once.

    It leaves only parts of reductions, such as numbers of labels, and takes fewer bytes than the
    gradients that are there at the end of the step. So chunks of it would not lower the peak.
    """
    cache = program.cache
    if cache.at_once is None:
        leaves = {value for value, *_ in program.imports if program.is_leaf(value)}
        gradients = sum(map(program.bytes_of, filter(program.needs_gradient, leaves)))
        found = []
        for run in (run for run in program.runs if run.stage == DATA):
            read = sum(program.bytes_of(program.imports[i].value) for i in run.imports)
            made = run.made
            is_small = _MOST_HELD * (read + made) <= max(gradients, _FEW_BYTES)
            if is_small and all(calls.is_of_parts(program, v) for v in run.exports):
                found.append(run.axis)
        cache.at_once = found
    return cache.at_once


class Stages(Store):
    """One step: it runs stages, on the values that others left in the store."""

    @functools.cached_property
    def schedule(self) -> Schedule:
        """The instructions of this step: the forward pass and, if it has roots, the backward."""
        n_chunks = max(map(len, self.grids.values()), default=1)
        schedule = self.program.schedule(not self.is_forward, self.planned.strategy, n_chunks)
        if schedule.head is not None and not self.planned.strategy.second_size:
            self._cut_in_pieces(schedule.head)
        if not self.is_forward and n_chunks > 1:
            for axis in _counted_at_once(self.program):
                self.pieces[DATA, axis, 0] = [(0, self.program.axes[axis])]
        if self.pieces:
            self.find_grids()  # they have changed the bounds
        return schedule

    def _cut_in_pieces(self, head: Run) -> None:
        """Split each chunk into pieces for the head of the last body.

        The stage that counts the labels (`DATA`) gets the same grid, since it may leave results for
        them.
        """
        found = [
            (start + first, start + last)
            for start, stop in self.grids[head.axis]
            for first, last in grid(stop - start, self.planned.strategy.n_pieces)
        ]
        self.pieces[head.stage, head.axis, head.segment] = found
        self.pieces[DATA, head.axis, 0] = found

    def run_nodes(
        self,
        run: Run,
        chunk: int,
        is_graph: bool,
        stand_ins: Mapping[int, BoundaryValue] | None = None,
        look: saved.Look | None = None,
        again: Mapping[int, torch.Tensor | None] | None = None,
    ) -> list[Any]:
        """Run the nodes of a stage on one chunk; a barrier runs once, as chunk 0.

        Args:
            run: the nodes to run.
            chunk: the index of the chunk.
            is_graph: whether autograd records a graph.
            stand_ins: replacements for values of other stages, by value.
            look: collects the tensors that autograd saves.
            again: to recompute values: those to compute (None) and those that are available (a
                tensor). Only the nodes between them run.

        Returns:
            The values that the nodes computed, by value number.
        """
        prepared = self.ready.get((run.index, is_graph)) or Prepared(self, run, is_graph)
        stand_ins = stand_ins or {}
        env: list[Any] = [None] * self.program.n_values
        for value, tensor in () if again is None else again.items():
            env[value] = tensor
        is_reading = run.imports or run.shadows
        imports = prepared.inputs(chunk, stand_ins) if is_reading else prepared.common
        if look is not None:  # the graph of each chunk is retained with what awaits its gradient
            for i, entry in prepared.common_awaiting.items():
                if entry[2].grad is None:
                    self.awaiting[i] = entry
        rows, bounds, self.chunk.index, self.chunk.start = -1, None, chunk, 0
        if run.is_body:
            if self.bar is not None:
                self.bar.tick()
            bounds = start, stop = prepared.grid[chunk]
            rows, self.chunk.start = stop - start, start
        else:
            prepared.combine(env, stand_ins)
            if not run.nodes:
                return env
        job = make_job(
            (
                not is_graph,
                functools.partial(prepared.run_other, chunk),
                functools.partial(prepared.cut_import, bounds),
                self.program.cloned,
                functools.partial(prepared.clone, rows),
                None if look is None else look.saved,
                None if look is None else functools.partial(look.settle, env),
                None if again is None else tuple(again),
                None,
                prepared.functions,
            )
        )
        arguments = self.program.handle, run.index, env, imports, rows, job
        if self.program.is_derived:  # tell derivatives which calls have their graph here
            nodes = run.nodes if is_graph and again is None else ()
            with derived.beside(nodes), look.hooks if look is not None else engine.AS_IT_IS:
                _core.run(*arguments)
        elif look is not None:
            with look.hooks:
                _core.run(*arguments)
        else:
            _core.run(*arguments)
        return env

    def run_apart(
        self, run: Run, chunk: int, is_graph: bool, look: saved.Look | None = None
    ) -> tuple[list[Any], Awaiting]:
        """Run nodes as `run_nodes` does. Return their values, and the aliases that they read and
        that await a first gradient: the backward of this graph gives it, and not the next one."""
        before = self.awaiting.copy()
        self.awaiting.clear()
        try:
            return self.run_nodes(run, chunk, is_graph, None, look), self.awaiting.copy()
        finally:
            self.awaiting.clear()
            self.awaiting.update(before)

    def run_barrier(self, run: Run, is_graph: bool) -> tuple[dict[int, GradientEdge], Awaiting]:
        """Run a barrier and keep its outputs. Return, for `send_back`, the edges of its graph by
        value, which do not keep the outputs' memory, and the aliases of `run_apart`."""
        env, given = self.run_apart(run, 0, is_graph)
        values, program = dict[int, None](), self.program
        for i in run.combined:
            values |= dict.fromkeys(program.node(i).outs)
        values |= dict.fromkeys(run.exports)
        edges: dict[int, Any] = edges_of(env, values) if is_graph else {}
        for value in values:
            info, needs_gradient = program.infos[value], program.needs_gradient(value)
            whole = BoundaryValue(info, needs_gradient, self.awaiting, env[value].detach())
            parts = self.boundary.get(value)
            if parts is not None:
                whole.parts, whole.aliases, whole.added = parts.parts, parts.aliases, parts.added
            self.boundary[value] = whole
            if is_graph and edges[value] is None:
                del edges[value]
        return edges, given
