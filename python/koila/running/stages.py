# SPDX-License-Identifier: Apache-2.0
"""Run one stage on one chunk: read its inputs, run its nodes, keep its outputs, and collect the
gradients of these outputs.

The order of these operations is not decided here: `interpret.py` executes a schedule.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.autograd.graph import GradientEdge

from koila import _core
from koila.basics.rows import Bounds, Place, chunk_shape, cut, grid, without_memory
from koila.messages.errors import NotInChunksError
from koila.planning import plans
from koila.random import draws
from koila.reductions import batch_softmax, calls, norms
from koila.reporting import progress
from koila.running import accrue, derived, saved, views
from koila.running.cross import Cross, Fresh, edge_of
from koila.running.tracked import Tracked
from koila.staged import aliases, hooks, leaves
from koila.staged.facts import ROWS, Job, Node, Run
from koila.staged.program import Program
from koila.staged.schedule import DATA, Schedule

_T = TypeVar("_T")


class Reads:
    """The inputs of a body that are leaves of the program, prepared once for all chunks of it."""

    def __init__(self, stages: Stages, run: Run, is_graph: bool) -> None:
        self.common: list[Any] = [None] * stages.program.n_imports
        self.pieces: list[tuple[int, Sequence[torch.Tensor]]] = []  # import, its views by chunk
        self.others: list[int] = []  # imports that are read anew for each chunk
        grid = stages.grid_of(run)
        for import_id in run.imports:
            value, place, is_range = stages.program.imports[import_id]
            cross = stages.cross_of(value)
            cut = None
            if stages.program.is_leaf(value) and not is_range:
                if place is None:
                    self.common[import_id] = cross.read_whole(is_graph)
                    continue
                cut = cross.cut_all(place, grid, is_graph)
            if cut is None:
                self.others.append(import_id)
            else:
                self.pieces.append((import_id, cut))


class Stages:
    """One step: a program, its chunks, and the values that one stage makes and others read
    (`Cross`)."""

    def __init__(
        self,
        program: Program,
        planned: plans.Plan,
        hooked: hooks.Seen,
    ) -> None:
        self.program = program
        self.planned = planned
        self.grids: dict[int, list[Bounds]] = draws.pinned_grids()
        for axis, rows in program.axes.items():
            self.grids.setdefault(axis, grid(rows, planned.n_chunks, planned.unit))
        self.pieces: dict[tuple[int, int, int], list[Bounds]] = {}  # by stage, axis, segment
        self.hooked = hooked
        self.is_forward = not program.roots  # without a backward pass
        self.gradients: list[torch.Tensor] = []  # one for each root, as the caller passed them
        self.roots: dict[int, torch.Tensor] = {}  # root value -> its gradient
        self.is_delivering = self.is_spent = False
        self.cross: dict[int, Cross] = {}  # by value
        self.fresh: Fresh = {}  # aliases that await their first gradient from the next backward
        self.watched: dict[int, Cross] = {}  # outputs of the last body, where its tail is linear
        #: By run, and whether it has a graph; emptied at the end of each loop.
        self.reads: dict[tuple[int, bool], Reads] = {}
        self.zeros_of: dict[tuple[int, int], torch.Tensor] = {}  # by import, and rows of a chunk
        self.scratch = self._copy_statistics()
        self.tracked = Tracked(program)
        self.memos: dict[tuple[int, int], dict[str, Any]] = {}  # of reductions, by node and chunk
        #: Value of a reduction that has one entry for each chunk -> the dim of these entries.
        self.by_chunk: dict[int, int] = {}
        self.draws = draws.Draws(program, self.grids, hooked.generators)
        self.kept: dict[int, aliases.Kept] = {}  # by value: what hooks must not write
        #: The leaves of autograd's graph behind the program, each with the first call through which
        #: it gets a gradient, and what stands for its `.grad`; once hooks are called.
        self.leaves: list[tuple[torch.Tensor, int, torch.Tensor]] | None = None
        self.bar: progress.Bar | None = None

    @functools.cached_property
    def schedule(self) -> Schedule:
        """The instructions of this step: the forward pass and, if it has roots, the backward."""
        n_chunks = max(map(len, self.grids.values()), default=1)
        if not self.is_forward and not saved.are_hooks_allowed():
            n_chunks = saved.NEVER
        schedule = self.program.schedule(not self.is_forward, self.planned.way, n_chunks)
        head = schedule.head()
        if head is not None and not self.planned.way.n_across:
            self._cut_in_pieces(head)
        return schedule

    def _cut_in_pieces(self, head: Run) -> None:
        """Split each chunk into pieces for the head of the last body.

        The stage that counts the labels (`DATA`) gets the same grid, since the head combines its
        counts with partials of the same pieces. No stage reads these counts by rows.
        """
        found = [
            (start + first, start + last)
            for start, stop in self.grids[head.axis]
            for first, last in grid(stop - start, self.planned.way.n_pieces)
        ]
        self.pieces[head.stage, head.axis, head.segment] = found
        self.pieces[DATA, head.axis, 0] = found

    def grid_of(self, run: Run) -> list[Bounds]:
        """Return the bounds of the chunks, or pieces, that a body or a segment of one runs on."""
        found = self.pieces.get((run.stage, run.axis, run.segment)) if self.pieces else None
        return found or self.grids[run.axis]

    def _copy_statistics(self) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Return, by value, the leaves that nodes write on the side, each with a copy to write."""
        copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for node in self.program.nodes.values() if self.program.has_effects else ():
            for value in self.program.moved_by(node):
                real = self.program.info(value).real
                assert real is not None
                copies.setdefault(value, (real, real.detach().clone()))
        return copies

    # -- what a stage reads ------------------------------------------------------------------------

    def cross_of(self, value: int) -> Cross:
        """Return the `Cross` of a value. Make it at the first use if the value is a leaf."""
        if value not in self.cross:
            info = self.program.info(value)
            tensor = info.real if info.real is not None else info.result
            assert tensor is not None, f"value {value} has neither a tensor nor a number"
            if value in self.scratch:
                tensor = self.scratch[value][1]
            self.cross[value] = Cross(info, self.program.needs_gradient(value), self.fresh, tensor)
        return self.cross[value]

    def _input_of(
        self,
        import_id: int,
        run: Run,
        chunk: int,
        is_graph: bool,
        stand_ins: dict[int, Cross] | None,
    ) -> torch.Tensor:
        entry = self.program.imports[import_id]
        cross = (stand_ins or {}).get(entry.value) or self.cross_of(entry.value)
        if not run.is_body:
            return cross.read_whole(is_graph)
        start, stop = self.grid_of(run)[chunk]
        if entry.is_range and entry.place is not None:
            _, _, outer, inner = entry.place
            return cross.read_whole(False).narrow(0, 0, outer * (stop - start) * inner)
        rows = self._rows_of(import_id, run)
        if rows is None:
            return cross.gather(is_graph)
        return cross.read_rows(*rows, chunk, is_graph)

    def _rows_of(self, import_id: int, run: Run) -> tuple[Place, Sequence[Bounds]] | None:
        """Return the place and the grid by which chunks read an import; None if each chunk reads
        all of it.

        A chunk reads its rows of the value. Of a reduction whose result has one entry for each
        chunk (`by_chunk`), it reads its entry.
        """
        value, place, _ = self.program.imports[import_id]
        if value in self.by_chunk:
            dim, n_chunks = self.by_chunk[value], len(self.grid_of(run))
            return (run.axis, dim, 1, 1), [(chunk, chunk + 1) for chunk in range(n_chunks)]
        return None if place is None else (place, self.grid_of(run))

    def _zeros_for(self, import_id: int, run: Run, chunk: int) -> torch.Tensor:
        """Return zeros in place of an import of which calls read the sizes alone."""
        value, place, _ = self.program.imports[import_id]
        shape, rows = self.program.info(value).shape, -1  # not split
        if place is not None:
            start, stop = self.grid_of(run)[chunk]
            rows = stop - start  # fewer in the last chunk
            shape = chunk_shape(shape, place, rows)
        if (import_id, rows) not in self.zeros_of:
            self.zeros_of[import_id, rows] = self.zeros(value, shape)
        return self.zeros_of[import_id, rows]

    def zeros(self, value: int, shape: tuple[int, ...]) -> torch.Tensor:
        """Return expanded zeros with the dtype and device of a value, which take no memory."""
        info = self.program.info(value)
        return without_memory(shape, info.dtype, info.device)

    def inputs_of(
        self, run: Run, chunk: int, is_graph: bool, stand_ins: dict[int, Cross] | None
    ) -> list[Any]:
        """Return the inputs of a run on one chunk, by import number; `stand_ins` replace values of
        other stages."""
        numbers = run.imports
        if run.is_body:
            key = run.index, is_graph
            if key not in self.reads:
                self.reads[key] = Reads(self, run, is_graph)
            reads = self.reads[key]
            imports, numbers = reads.common.copy(), reads.others
            for import_id, pieces in reads.pieces:
                imports[import_id] = pieces[chunk]
        else:
            imports = [None] * self.program.n_imports
        for import_id in numbers:
            imports[import_id] = self._input_of(import_id, run, chunk, is_graph, stand_ins)
        for import_id in run.shadows:
            imports[import_id] = self._zeros_for(import_id, run, chunk)
        return imports

    # -- running one stage ------------------------------------------------------------------------

    def run_nodes(
        self,
        run: Run,
        chunk: int,
        is_graph: bool,
        stand_ins: dict[int, Cross] | None = None,
        look: saved.Look | None = None,
        again: Mapping[int, torch.Tensor | None] | None = None,
    ) -> list[Any]:
        """Run the nodes of a stage on one chunk; a joint runs once, as chunk 0.

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
        env: list[Any] = [None] * self.program.n_values
        for value, tensor in (again or {}).items():
            env[value] = tensor
        imports = self.inputs_of(run, chunk, is_graph, stand_ins)
        if self.bar is not None and run.is_body:
            self.bar.tick()
        if not run.is_body:
            self._combine(run, env, is_graph, stand_ins)
        bounds = self.grid_of(run)[chunk] if run.is_body else None
        rows = bounds[1] - bounds[0] if bounds else -1

        def run_other(
            i: int, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> Any:
            node = self.program.node(i)
            if func is leaves.as_leaf and is_graph:
                return leaves.inside(args[0])
            if node.is_random:
                return self.draws.call(i, chunk if run.is_body else None, func, args, kwargs)
            if (made := accrue.run(self.program, node, func, args, kwargs)) is not None:
                return made
            if i in run.parts and self._is_plain(node, run):
                results = func(*args, **kwargs)
                return tuple(results) if isinstance(results, tuple | list) else (results,)
            if func is norms.batch_norm and isinstance(args[6], norms.Again):
                args = self.tracked.note_again(node, args)
            is_alone = run.is_body and self.is_forward and len(self.grid_of(run)) == 1
            if self.tracked.waits(node, func, is_alone):
                return self.tracked.norm(node, run.stage, chunk, func, args, kwargs)
            if node.mode == ROWS and func in batch_softmax.N_OWN:
                if is_alone:  # torch's own call can reduce over the only chunk itself
                    return batch_softmax.run_alone(func, args, kwargs)
                self.tracked.note(node, func, args)
                return func(*args, **kwargs)
            if i in run.parts:
                memo = self.memos.setdefault((i, chunk), {})
                words = self.program, node, func, args, kwargs, bounds[0] if bounds else 0, memo
                reduction, call = calls.parts_of(*words)
                return reduction.partials(run.parts[i], call)
            return self._settle_view(node, func(*args, **kwargs), args)

        def clone(value: int, storage: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            # The clone stays on the graph if the write itself was recorded under no_grad. It must
            # not be an inference tensor, which later calls could not save for backward.
            with outside_inference(), torch.set_grad_enabled(is_graph):
                storage = storage.clone()
                return views.take(self.program, value, storage, rows, is_graph), storage

        def cut_import(tensor: torch.Tensor, import_id: int) -> torch.Tensor:
            entry = self.program.imports[import_id]
            assert bounds is not None and entry.place is not None
            return cut(tensor, entry.place, self.grid_of(run)[-1][1], bounds)

        def settle(i: int) -> None:
            assert look is not None
            look.settle(self.program.node(i), env)

        with contextlib.ExitStack() as block:
            if self.program.is_derived:
                nodes = run.nodes if is_graph and again is None else ()
                block.enter_context(derived.beside(nodes))
            if look is not None:
                block.enter_context(look.hooks())
            _core.run(
                self.program.handle,
                run.index,
                env,
                imports,
                rows,
                Job(
                    is_grad_off=not is_graph,
                    run_other=run_other,
                    cut=cut_import,
                    cloned=self.program.cloned,
                    clone=clone,
                    saved=None if look is None else look.pending,
                    settle=settle,
                    again=None if again is None else tuple(again),
                ),
            )
        return env

    def _is_plain(self, node: Node, run: Run) -> bool:
        """Return whether a reduction runs as torch's own call: with one chunk and no gradient.
        Combined partials could differ from it in the last bit."""
        is_one = self.is_forward and len(self.grid_of(run)) == 1 and node.stage == run.stage
        return is_one and not calls.is_of_chunks(node)

    def _settle_view(self, node: Node, result: Any, args: tuple[Any, ...]) -> Any:
        """Make the result of a call a copy, if a copy was recorded, where a chunk gave a view.

        Raises:
            NotInChunksError: a view was recorded and a chunk gave a copy. A later write would not
                reach the viewed storage.
        """
        if not isinstance(result, torch.Tensor) or not args:
            return result
        source = self.program.info(self.program.imports[node.imports[0]].value)
        is_view = self.program.info(node.first_out).storage == source.storage
        is_shared = result.untyped_storage()._cdata == args[0].untyped_storage()._cdata
        if is_view and not is_shared:
            raise NotInChunksError(f"{_core.node(node.id)[3]}: a chunk is laid out otherwise")
        return result.clone() if is_shared and not is_view else result

    def _combine(
        self, run: Run, env: list[Any], is_graph: bool, stand_ins: dict[int, Cross] | None
    ) -> None:
        """Put the results of reductions into the `env` of a run on the whole batch, from partial
        results that chunks of earlier runs left, or that `stand_ins` have in place of them."""
        with torch.set_grad_enabled(is_graph):
            for node in run.combined:
                value = node.first_out
                cross = (stand_ins or {}).get(value) or self.cross[value]
                combined = cross.results
                if combined is None:
                    partials = cross.read_parts(is_graph)
                    combined = calls.combine(self.program, node, partials)
                dim = calls.dim_of_chunks(self.program, node)
                for out, tensor in zip(node.outs, combined, strict=True):
                    checked = tensor if dim is None else tensor.narrow(dim, 0, 1)  # of one chunk
                    _core.check_result(node.id, out, checked)
                    env[out] = tensor
                if dim is not None:
                    self.by_chunk[value] = dim

    # -- forward ----------------------------------------------------------------------------------

    def collect(
        self, run: Run, env: Mapping[int, Any] | Sequence[Any], chunk: int, values: Iterable[int]
    ) -> None:
        """Keep the outputs `values` of a run on a chunk, taken from `env`, for other stages. They
        are detached from its graph."""
        for value in values:
            node = self.program.node_of(value)
            assert node is not None
            cross = self.cross_of_output(value)
            if node.id in run.parts and self._is_plain(node, run):
                cross.results = env[value]
            elif node.id in run.parts:
                cross.add_parts(chunk, run.parts[node.id], env[value])
            else:
                cross.add_chunk(chunk, env[value], self.grid_of(run))

    def cross_of_output(self, value: int) -> Cross:
        """Return the `Cross` of an output of a body; make it at the first chunk."""
        if value not in self.cross:
            info = self.program.info(value)
            added = calls.added_by_maker(self.program, value)
            self.cross[value] = Cross(
                info, self.program.needs_gradient(value), self.fresh, added=added
            )
            self.cross[value].is_one_gradient = self.program.is_hooked(value)
        return self.cross[value]

    def run_joint(self, run: Run, is_graph: bool) -> dict[int, GradientEdge]:
        """Run a joint and keep its outputs.

        Return the edges at which a backward pass enters its graph, by value. Edges, unlike the
        outputs, do not keep memory that backward does not need.
        """
        env = self.run_nodes(run, 0, is_graph)
        graph: dict[int, GradientEdge] = {}
        combined = [out for node in run.combined for out in node.outs]
        for value in [*combined, *run.exports]:
            tensor = env[value]
            info = self.program.info(value)
            parts = self.cross.get(value)
            whole = Cross(info, self.program.needs_gradient(value), self.fresh, tensor.detach())
            if parts is not None:
                whole.parts, whole.aliases, whole.added = parts.parts, parts.aliases, parts.added
            self.cross[value] = whole
            if is_graph and (edge := edge_of(tensor)) is not None:
                graph[value] = edge
        return graph

    # -- backward ---------------------------------------------------------------------------------

    def settle_chunk(self, run: Run, chunk: int) -> None:
        """Free the offloaded inputs of a chunk after their last read; keep only the gradient."""
        if self.planned.way.offload_every == 0:
            return
        for import_id in run.imports:
            cross = self.cross.get(self.program.imports[import_id].value)
            if cross is not None and cross.is_offloaded:
                self.forget(cross.settle(chunk))

    def seeds(
        self, run: Run, left: Mapping[int, Any] | Sequence[Any], chunk: int
    ) -> list[tuple[Any, torch.Tensor]]:
        """Return pairs of an output of a run on a chunk and its gradient, where it has one.

        `left` has the outputs, or the edges of their graph, by value. Each partial of a reduction
        has a pair of its own.
        """
        pairs: list[tuple[Any, torch.Tensor | None]] = []
        for value in run.exports:
            node = self.program.node_of(value)
            assert node is not None
            if node.id in run.parts:
                pairs += self.cross[value].part_seeds(chunk, run.parts[node.id], left[value])
            else:
                pairs.append((left[value], self.cross[value].seed(self.grid_of(run), chunk)))
        return [(out, seed) for out, seed in pairs if out is not None and seed is not None]

    def take_rows_of(self, run: Run, chunk: int, stand_ins: Mapping[int, Cross]) -> None:
        """After a chunk's backward, add the gradients of the rows that it read to the gradients of
        the whole values."""
        for import_id in run.imports:
            value = self.program.imports[import_id].value
            cross = stand_ins.get(value) or self.cross.get(value)
            rows = self._rows_of(import_id, run) if cross is not None else None
            if cross is not None and rows is not None:
                self.forget(cross.take_rows(*rows, chunk))

    def forget(self, aliases: Iterable[torch.Tensor]) -> None:
        """Drop aliases that no graph sends a gradient to any more: `fresh` would keep their
        memory."""
        for alias in aliases:
            if alias.grad is None:
                self.fresh.pop(id(alias), None)

    def run_retained(self, run: Callable[[], _T]) -> tuple[_T, Fresh]:
        """Call `run`, whose graph is retained until a later backward.

        Return its result and the aliases it read that await a first gradient. `resume` takes these
        before the graph's backward.
        """
        before = self.fresh.copy()
        self.fresh.clear()
        try:
            return run(), self.fresh.copy()
        finally:
            self.fresh.clear()
            self.fresh.update(before)

    def resume(self, given: Fresh) -> None:
        """Before the backward of a retained graph, await gradients for its aliases again."""
        for i, (cross, key, alias) in given.items():
            cross.await_again(key, alias)
            if alias.grad is None:
                self.fresh[i] = cross, key, alias


@contextlib.contextmanager
def outside_inference() -> Iterator[None]:
    """Leave the inference mode in which the user may read a number: what was recorded outside of it
    must not become inference tensors. Each node enters the mode that it was recorded in."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch._C._InferenceMode(False), torch.set_grad_enabled(False):
        yield
