# SPDX-License-Identifier: Apache-2.0
"""Run the calls of a run on its chunks, one chunk after the other.

What is the same for all chunks is looked up once: where each input is read, and how each call runs
that the core leaves to Python.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from koila import _core
from koila.basics.rows import Bounds, Place, chunk_shape, cut
from koila.messages.errors import NotInChunksError
from koila.reductions import batch_softmax, calls, norms
from koila.running import accrue, derived, saved, views
from koila.running.cross import Awaiting, Cross
from koila.running.store import Store
from koila.staged import leaves
from koila.staged.facts import ROWS, Job, Node, Run
from koila.staged.program import Program

_Args = tuple[Any, ...]
_Kwargs = dict[str, Any]
#: Runs one call on a chunk: (run, call, chunk, function, its arguments) -> its results. It is a
#: plain function: a bound method here would refer back to what holds it.
_Runner = Callable[["Prepared", Node, int, Callable[..., Any], _Args, _Kwargs], Any]
#: Reads an input on a chunk, from the value or what stands in for it.
_Reader = Callable[[Cross, int], torch.Tensor]


def _first_entries(place: Place, grid: Sequence[Bounds], cross: Cross, chunk: int) -> torch.Tensor:
    """Return the first entries of a value, as many as the chunk has rows."""
    (_, _, outer, inner), (start, stop) = place, grid[chunk]
    return cross.read_whole(False).narrow(0, 0, outer * (stop - start) * inner)


class _Reads(NamedTuple):
    """How the chunks of a body read its inputs, as import and value; it is the same in each step.

    Attributes:
        once: all chunks read the same tensor, which exists before the loop over them.
        cut: leaves whose rows the chunks read, and where these are.
        others: they are read for each chunk.
    """

    once: list[tuple[int, int]]
    cut: list[tuple[int, int, Place]]
    others: list[tuple[int, int]]


def _reads_of(program: Program, run: Run) -> _Reads:
    known: dict[int, _Reads] = program.known.reads
    if run.index in known:
        return known[run.index]
    reads = _Reads([], [], [])
    for import_id in run.imports:
        value, place, is_range = program.imports[import_id]
        node, is_leaf = program.node_of(value), program.is_leaf(value)
        is_made_before = node is None or node.stage != run.stage
        is_once = place is None and is_made_before and not calls.is_by_chunk(program, value)
        if is_once and not is_range:
            reads.once.append((import_id, value))
        elif is_leaf and place is not None and not is_range:
            reads.cut.append((import_id, value, place))
        else:
            reads.others.append((import_id, value))
    known[run.index] = reads  # once it is complete: other threads may run this program
    return reads


class Prepared:
    """A run, prepared for all its chunks. It is of use until the loop over them ends.

    Args:
        store: the step's values.
        run: a body, a segment of one, or a barrier, which runs once, as chunk 0.
        is_graph: whether autograd records a graph.
    """

    def __init__(self, store: Store, run: Run, is_graph: bool) -> None:
        self.store, self.program = store, store.program
        self.run_, self.is_graph = run, is_graph
        self.grid: list[Bounds] = store.grid_of(run) if run.is_body else []
        self.is_alone = store.is_alone(run)
        self.cloned = self.program.cloned
        self.common: list[Any] = [None] * self.program.n_imports  # inputs that all chunks read
        self.common_awaiting: Awaiting = {}  # aliases among these that have no gradient so far
        self.pieces: list[tuple[int, Sequence[torch.Tensor]]] = []  # import, its views by chunk
        self.others: list[tuple[int, int, _Reader]] = []  # import, value: read for each chunk
        self.runners: dict[int, tuple[_Runner, Node]] = {}  # by call
        if run.is_body:
            self._prepare_inputs(_reads_of(self.program, run))
        else:
            for i in run.imports:
                self.others.append((i, self.program.imports[i].value, self._reader(i)))

    # -- inputs -----------------------------------------------------------------------------------

    def _prepare_inputs(self, reads: _Reads) -> None:
        store, is_graph = self.store, self.is_graph
        for import_id, value in reads.once:
            tensor = self.common[import_id] = store.cross_of(value).read_whole(is_graph)
            if id(tensor) in store.awaiting:
                self.common_awaiting[id(tensor)] = store.awaiting[id(tensor)]
        for import_id, value, place in reads.cut:
            views_of_chunks = store.cross_of(value).cut_all(place, self.grid, is_graph)
            if views_of_chunks is None:
                self.others.append((import_id, value, self._reader(import_id)))
            else:
                self.pieces.append((import_id, views_of_chunks))
        for import_id, value in reads.others:
            self.others.append((import_id, value, self._reader(import_id)))

    def _reader(self, import_id: int) -> _Reader:
        """Return what reads an input for one chunk."""
        is_graph, (_, place, is_range) = self.is_graph, self.program.imports[import_id]
        if self.run_.is_body and is_range and place is not None:
            return functools.partial(_first_entries, place, self.grid)
        rows = self.store.rows_of(import_id, self.run_) if self.run_.is_body else None
        if rows is None:
            return lambda cross, _: cross.read_whole(is_graph)
        place, grid = rows
        return lambda cross, chunk: cross.read_rows(place, grid, chunk, is_graph)

    def _zeros_for(self, import_id: int, chunk: int) -> torch.Tensor:
        """Return zeros in place of an input of which calls read the sizes alone."""
        value, place, _ = self.program.imports[import_id]
        shape, rows = self.program.info(value).shape, -1  # not split
        if place is not None:
            start, stop = self.grid[chunk]
            rows = stop - start  # fewer in the last chunk
            shape = chunk_shape(shape, place, rows)
        known = self.store.zeros_of
        if (import_id, rows) not in known:
            known[import_id, rows] = self.store.zeros(value, shape)
        return known[import_id, rows]

    def inputs(self, chunk: int, stand_ins: Mapping[int, Cross]) -> list[Any]:
        """Return the inputs on one chunk, by import number; `stand_ins` replace values."""
        imports, known = self.common.copy(), self.store.cross
        for import_id, pieces in self.pieces:
            imports[import_id] = pieces[chunk]
        for import_id, value, read in self.others:
            cross = stand_ins.get(value) or known.get(value) or self.store.cross_of(value)
            imports[import_id] = read(cross, chunk)
        for import_id in self.run_.shadows:
            imports[import_id] = self._zeros_for(import_id, chunk)
        return imports

    def _combine(self, env: list[Any], stand_ins: Mapping[int, Cross]) -> None:
        """Put the results of reductions into the `env` of a run on the whole batch, from partial
        results that chunks of earlier runs left, or that `stand_ins` have in place of them."""
        with torch.set_grad_enabled(self.is_graph):
            for node in map(self.program.node, self.run_.combined):
                value = node.first_out
                cross = stand_ins.get(value) or self.store.cross[value]
                combined = cross.results
                if combined is None:
                    partials = cross.read_parts(self.is_graph)
                    combined = calls.combine(self.program, node, partials)
                dim = calls.dim_of_chunks(self.program, node)
                for out, tensor in zip(node.outs, combined, strict=True):
                    checked = tensor if dim is None else tensor.narrow(dim, 0, 1)  # of one chunk
                    _core.check_result(node.id, out, checked)
                    env[out] = tensor
                if dim is not None:
                    self.store.by_chunk[value] = dim

    # -- running a chunk --------------------------------------------------------------------------

    def run(
        self,
        chunk: int,
        stand_ins: Mapping[int, Cross] | None = None,
        look: saved.Look | None = None,
        again: Mapping[int, torch.Tensor | None] | None = None,
    ) -> list[Any]:
        """Run the calls on one chunk; see `Stages.run_nodes`."""
        run, stand_ins = self.run_, stand_ins or {}
        env: list[Any] = [None] * self.program.n_values
        for value, tensor in (again or {}).items():
            env[value] = tensor
        imports = self.inputs(chunk, stand_ins)
        if look is not None:  # the graph of each chunk is retained with what awaits its gradient
            for i, entry in self.common_awaiting.items():
                if entry[2].grad is None:
                    self.store.awaiting[i] = entry
        rows, bounds = -1, None
        if run.is_body:
            if self.store.bar is not None:
                self.store.bar.tick()
            bounds = start, stop = self.grid[chunk]
            rows = stop - start
        else:
            self._combine(env, stand_ins)
            if not run.nodes:
                return env
        job = Job(
            is_grad_off=not self.is_graph,
            run_other=functools.partial(self._run_other, chunk),
            cut=functools.partial(self._cut_import, bounds),
            cloned=self.cloned,
            clone=functools.partial(self._clone, rows),
            saved=None if look is None else look.pending,
            settle=None if look is None else functools.partial(look.settle, env),
            again=None if again is None else tuple(again),
        )
        arguments = self.program.handle, run.index, env, imports, rows, job
        if look is None and not self.program.is_derived:
            _core.run(*arguments)
            return env
        with self._around(look, again is None):
            _core.run(*arguments)
        return env

    @contextlib.contextmanager
    def _around(self, look: saved.Look | None, is_first: bool) -> Iterator[None]:
        """Wrap the calls of a chunk: `look` at what they save, and tell derivatives among them
        which calls have their graph here."""
        with contextlib.ExitStack() as block:
            if self.program.is_derived:
                nodes = self.run_.nodes if self.is_graph and is_first else ()
                block.enter_context(derived.beside(nodes))
            if look is not None:
                block.enter_context(look.hooks())
            yield

    def _cut_import(
        self, bounds: Bounds | None, tensor: torch.Tensor, import_id: int
    ) -> torch.Tensor:
        """Return the chunk's rows of an input that has all."""
        place = self.program.imports[import_id].place
        assert bounds is not None and place is not None
        return cut(tensor, place, self.grid[-1][1], bounds)

    def _clone(
        self, rows: int, value: int, storage: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Clone a storage that a call writes, and take the view there that `value` is of it."""
        # The clone stays on the graph if the write itself was recorded under no_grad. It must not
        # be an inference tensor, which later calls could not save for backward.
        with outside_inference(), torch.set_grad_enabled(self.is_graph):
            storage = storage.clone()
            return views.take(self.program, value, storage, rows, self.is_graph), storage

    # -- calls that the core leaves to Python -----------------------------------------------------

    def _run_other(
        self, chunk: int, i: int, func: Callable[..., Any], args: _Args, kwargs: _Kwargs
    ) -> Any:
        known = self.runners.get(i)
        if known is None:
            node = self.program.node(i)
            known = self.runners[i] = self._runner_of(node, func), node
        runner, node = known
        return runner(self, node, chunk, func, args, kwargs)

    def _runner_of(self, node: Node, func: Callable[..., Any]) -> _Runner:
        """Return what runs a call on each chunk."""
        if func is leaves.as_leaf and self.is_graph:
            return Prepared._begin
        if node.is_random:
            return Prepared._draw
        if accrue.is_for(self.program, node):
            return Prepared._accrue
        value = node.first_out
        if value in self.run_.parts and self.store.is_plain(value, self.run_):
            return Prepared._reduce_whole
        if func is norms.batch_norm or node.leaf_writes:
            return Prepared._run_tracked
        return self._untracked(node, func)

    def _untracked(self, node: Node, func: Callable[..., Any]) -> _Runner:
        """Return the same for a call that leaves running statistics as they are."""
        if node.mode == ROWS and func in batch_softmax.N_OWN:
            return Prepared._normalize
        return self._reducer(node) if node.first_out in self.run_.parts else Prepared._take

    def _begin(
        self, _: Node, _chunk: int, _func: Callable[..., Any], args: _Args, _kwargs: _Kwargs
    ) -> torch.Tensor:
        """Make a leaf in mid-program, whose gradient goes no further back."""
        return leaves.inside(args[0])

    def _draw(
        self, node: Node, chunk: int, func: Callable[..., Any], args: _Args, kwargs: _Kwargs
    ) -> Any:
        where = chunk if self.run_.is_body else None
        return self.store.draws.call(node.id, where, func, args, kwargs)

    def _accrue(
        self, node: Node, _: int, func: Callable[..., Any], args: _Args, kwargs: _Kwargs
    ) -> torch.Tensor:
        return accrue.run(self.program, node, func, args, kwargs)

    def _reduce_whole(
        self, _: Node, _chunk: int, func: Callable[..., Any], args: _Args, kwargs: _Kwargs
    ) -> tuple[Any, ...]:
        """Run a reduction as torch's own call."""
        results = func(*args, **kwargs)
        return tuple(results) if isinstance(results, tuple | list) else (results,)

    def _run_tracked(
        self, node: Node, chunk: int, func: Callable[..., Any], args: _Args, kwargs: _Kwargs
    ) -> Any:
        """Run a norm that may have running statistics, and leave their update to the commit if it
        has to wait."""
        tracked = self.store.tracked
        if func is norms.batch_norm and isinstance(args[6], norms.Again):
            args = tracked.note_again(node, args)
        if tracked.waits(node, func, self.is_alone):
            return tracked.norm(node, self.run_.stage, chunk, func, args, kwargs)
        return self._untracked(node, func)(self, node, chunk, func, args, kwargs)

    def _normalize(
        self, node: Node, _: int, func: Callable[..., Any], args: _Args, kwargs: _Kwargs
    ) -> Any:
        """Run a call that gets statistics of all rows."""
        if self.is_alone:  # torch's own call can reduce over the only chunk itself
            return batch_softmax.run_alone(func, args, kwargs)
        self.store.tracked.note(node, func, args)
        return func(*args, **kwargs)

    def _reducer(self, node: Node) -> _Runner:
        """Return what computes the partial results of a reduction."""
        reduction, _, make = calls.split_of(self.program, node)
        parts = self.run_.parts[node.first_out]

        def reduce(
            of: Prepared,
            node: Node,
            chunk: int,
            func: Callable[..., Any],
            args: _Args,
            kwargs: _Kwargs,
        ) -> tuple[torch.Tensor, ...]:
            shared = of.store.shared.setdefault((node.id, chunk), {})
            start = of.grid[chunk][0] if of.grid else 0
            return reduction.partials(parts, make(func, args, kwargs, start=start, shared=shared))

        return reduce

    def _take(
        self, node: Node, _: int, func: Callable[..., Any], args: _Args, kwargs: _Kwargs
    ) -> Any:
        """Run a call; make its result a copy, if a copy was recorded, where a chunk gave a view.

        Raises:
            NotInChunksError: a view was recorded and a chunk gave a copy. A later write would not
                reach the viewed storage.
        """
        result = func(*args, **kwargs)
        if not isinstance(result, torch.Tensor) or not args:
            return result
        source = self.program.info(self.program.imports[node.imports[0]].value)
        is_view = self.program.info(node.first_out).storage == source.storage
        is_shared = result.untyped_storage()._cdata == args[0].untyped_storage()._cdata
        if is_view and not is_shared:
            raise NotInChunksError(f"{_core.node(node.id)[3]}: a chunk is laid out otherwise")
        return result.clone() if is_shared and not is_view else result


@contextlib.contextmanager
def outside_inference() -> Iterator[None]:
    """Leave the inference mode in which the user may read a number: what was recorded outside of it
    must not become inference tensors. Each node enters the mode that it was recorded in."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch._C._InferenceMode(False), torch.set_grad_enabled(False):
        yield
