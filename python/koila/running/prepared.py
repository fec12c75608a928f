# SPDX-License-Identifier: Apache-2.0
"""Run the calls of a run on its chunks, one chunk after the other.

What is the same for all chunks is looked up once: where each input is read, and how each call runs
that the core leaves to Python.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from koila import _core
from koila.basics import engine
from koila.basics.rows import Bounds, Place, chunk_shape, cut, without_memory
from koila.messages.errors import NotInChunksError
from koila.reductions import batch_softmax, calls, norms
from koila.running import accrue, views
from koila.running.boundary import Awaiting, BoundaryValue, aliases_of, read_whole
from koila.running.store import Rows, Store
from koila.running.watched import Key
from koila.staged import leaves
from koila.staged.facts import ROWS, Node, Run

_Args = tuple[Any, ...]
_Kwargs = dict[str, Any]
#: Runs one call on a chunk: (run, call, chunk, function, its arguments) -> its results. It is a
#: plain function: a bound method here would refer back to what holds it.
_Runner = Callable[["Prepared", Node, int, Callable[..., Any], _Args, _Kwargs], Any]


class Prepared:
    """A run, prepared for all its chunks.

    Args:
        store: the step's values; there it is `ready`, if it is a body, until the loop ends.
        run: a body, a segment of one, or a barrier, which runs once, as chunk 0.
        is_graph: whether autograd records a graph.
    """

    def __init__(self, store: Store, run: Run, is_graph: bool) -> None:
        self.store, self.program = store, store.program
        self.run_, self.is_graph = run, is_graph
        self.grid: list[Bounds] = store.grid_by_run[run.index] if run.is_body else []
        self.is_alone = store.is_forward and len(self.grid) == 1  # the only chunk of all rows
        self.common: list[Any] = [None] * self.program.n_imports  # inputs that all chunks read
        self.common_awaiting: Awaiting = {}  # aliases among these that have no gradient so far
        self.pieces: list[tuple[int, Sequence[torch.Tensor]]] = []  # import, its views by chunk
        #: Inputs that are read for each chunk: import, value, and where the rows are (None: none).
        self.others: list[tuple[int, int, Rows | None]] = []
        self.ranges: list[tuple[int, int, Place]] = []  # those of which it reads first entries
        self.runners: dict[int, tuple[_Runner | None, Node]] = {}  # by call; None: `functions`
        self.functions: dict[int, Callable[..., Any]] = {}  # `Job.functions`
        if not run.is_body:
            for i in run.imports:
                self.others.append((i, self.program.imports[i].value, None))
            return
        reads, common = store.reads[run.index], self.common
        boundaries, awaiting = store.boundary, store.awaiting
        if not boundaries.keys() >= reads.leaves.keys():
            store.enter_all()
        once = read_whole(map(boundaries.__getitem__, reads.once.values()), is_graph)
        for import_id, tensor in zip(reads.once, once, strict=True):
            common[import_id] = tensor
            if id(tensor) in awaiting:
                self.common_awaiting[id(tensor)] = awaiting[id(tensor)]
        for import_id, value, place in reads.cut:
            views_of_chunks = boundaries[value].cut_all(place, self.grid, is_graph)
            if views_of_chunks is None:
                self.others.append((import_id, value, (place, self.grid)))
            else:
                self.pieces.append((import_id, views_of_chunks))
        for import_id, value, at in reads.others:
            rows: Rows | None = None if at is None else (at, self.grid)
            if value in store.by_chunk:
                rows = store.rows_of(import_id, self.run_)
            self.others.append((import_id, value, rows))
        self.ranges += reads.ranges
        store.ready[run.index, is_graph] = self

    # -- inputs -----------------------------------------------------------------------------------

    def _zeros_for(self, import_id: int, chunk: int) -> torch.Tensor:
        """Return zeros in place of an input of which calls read the sizes alone."""
        value, place, _ = self.program.imports[import_id]
        info, rows = self.program.info(value), -1  # not split
        shape = info.shape
        if place is not None:
            start, stop = self.grid[chunk]
            rows = stop - start  # fewer in the last chunk
            shape = chunk_shape(shape, place, rows)
        zeros = self.store.zeros_of
        if (import_id, rows) not in zeros:
            zeros[import_id, rows] = without_memory(shape, info.dtype, info.device)
        return zeros[import_id, rows]

    def inputs(self, chunk: int, stand_ins: Mapping[int, BoundaryValue]) -> list[Any]:
        """Return the inputs on one chunk, by import number; `stand_ins` replace values."""
        imports, boundaries, is_graph = self.common.copy(), self.store.boundary, self.is_graph
        numbers: list[int] = []  # of the imports that are chunks
        read: list[tuple[BoundaryValue, Key, torch.Tensor]] = []
        for import_id, pieces in self.pieces:
            imports[import_id] = pieces[chunk]
        for import_id, value, rows in self.others:
            boundary = (
                stand_ins.get(value) or boundaries.get(value) or self.store.boundary_of(value)
            )
            is_far = boundary.is_offloaded or boundary.watch is not None
            if rows is None:
                (imports[import_id],) = read_whole((boundary,), is_graph)
            elif boundary.whole is None and not is_far and chunk in boundary.chunks:
                imports[import_id] = tensor = boundary.chunks[chunk]
                if is_graph:
                    numbers.append(import_id)
                    read.append((boundary, ("chunk", chunk), tensor))
            else:
                imports[import_id] = boundary.read_rows(*rows, chunk, is_graph)
        for import_id, alias in zip(numbers, aliases_of(read) if read else (), strict=True):
            imports[import_id] = alias
        for import_id, value, place in self.ranges:
            boundary = stand_ins.get(value) or self.store.boundary_of(value)
            (_, _, outer, inner), (start, stop) = place, self.grid[chunk]
            (whole,) = read_whole((boundary,), False)
            imports[import_id] = whole.narrow(0, 0, outer * (stop - start) * inner)
        for import_id in self.run_.shadows:
            imports[import_id] = self._zeros_for(import_id, chunk)
        return imports

    def combine(self, env: list[Any], stand_ins: Mapping[int, BoundaryValue]) -> None:
        """Put the results of reductions into the `env` of a run on the whole batch, from partial
        results that chunks of earlier runs left, or that `stand_ins` have in place of them."""
        is_so = torch.is_grad_enabled() == self.is_graph
        with engine.AS_IT_IS if is_so else torch.set_grad_enabled(self.is_graph):
            for node in map(self.program.node, self.run_.combined):
                value = node.first_out
                boundary = stand_ins.get(value) or self.store.boundary[value]
                combined, split = boundary.results, calls.split_of(self.program, node)
                is_by_chunk = split.reduction.is_by_chunk
                dim = calls.dim_of_chunks(self.program, node) if is_by_chunk else None
                if combined is None:
                    partials = boundary.read_parts(self.is_graph)
                    combined = calls.combine(self.program, node, split, partials)
                for out, tensor in zip(node.outs, combined, strict=True):
                    checked = tensor if dim is None else tensor.narrow(dim, 0, 1)  # of one chunk
                    _core.check_result(node.id, out, checked)
                    env[out] = tensor
                if dim is not None:
                    self.store.by_chunk[value] = dim

    # -- what the core calls back ------------------------------------------------------------------

    def cut_import(
        self, bounds: Bounds | None, tensor: torch.Tensor, import_id: int
    ) -> torch.Tensor:
        """Return the chunk's rows of an input that has all."""
        place = self.program.imports[import_id].place
        assert bounds is not None and place is not None
        return cut(tensor, place, self.grid[-1][1], bounds)

    def clone(
        self, rows: int, value: int, storage: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Clone a storage that a call writes, and take the view there that `value` is of it."""
        # The clone stays on the graph if the write itself was recorded under no_grad. It must not
        # be an inference tensor, which later calls could not save for backward.
        with outside_inference(), torch.set_grad_enabled(self.is_graph):
            storage = storage.clone()
            return views.take(self.program, value, storage, rows, self.is_graph), storage

    # -- calls that the core leaves to Python -----------------------------------------------------

    def run_other(
        self, chunk: int, i: int, func: Callable[..., Any], args: _Args, kwargs: _Kwargs
    ) -> Any:
        found = self.runners.get(i)
        if found is None:
            node = self.program.node(i)
            found = self.runners[i] = self._runner_of(node, func, args), node
        runner, node = found
        if runner is None:
            return self.functions[i](*args, **kwargs)
        return runner(self, node, chunk, func, args, kwargs)

    def _runner_of(self, node: Node, func: Callable[..., Any], args: _Args) -> _Runner | None:
        """Return what runs a call on each chunk; None: it is in `functions` now."""
        if func is leaves.as_leaf and self.is_graph:
            return Prepared._begin
        if node.is_random:
            return Prepared._draw
        is_own = func in batch_softmax.N_OWN
        if node.mode == ROWS and not is_own and accrue.is_for(self.program, node):
            return Prepared._accrue
        value = node.first_out
        if self.is_alone and value in self.run_.parts and self.store.is_plain(value, self.run_):
            return Prepared._reduce_whole
        if func is norms.batch_norm and isinstance(args[6], norms.Again):
            return Prepared._run_again
        if node.leaf_writes and self.store.tracked.waits(node, func, self.is_alone):
            return Prepared._run_waiting
        if node.mode == ROWS and is_own:  # it gets statistics of all rows
            if self.is_alone:
                return Prepared._normalize_alone
            if node.id not in self.store.tracked.moves:
                self.store.tracked.note(node, func, args)
            self.functions[node.id] = norms.with_statistics() if func is norms.batch_norm else func
            return None
        if node.first_out not in self.run_.parts:
            return Prepared._take
        reduction, _, make = calls.split_of(self.program, node)
        parts, call = self.run_.parts[node.first_out], make(*_core.call(node.id))
        self.functions[node.id] = reduction.prepare(parts, call, self.store.chunk)
        return None

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

    def _run_again(
        self, node: Node, chunk: int, func: Callable[..., Any], args: _Args, kwargs: _Kwargs
    ) -> Any:
        """Run a norm in a checkpoint."""
        args = self.store.tracked.note_again(node, args)
        runner = self._runner_of(node, func, args)
        if runner is None:
            return self.functions[node.id](*args, **kwargs)
        return runner(self, node, chunk, func, args, kwargs)

    def _run_waiting(
        self, node: Node, chunk: int, func: Callable[..., Any], args: _Args, kwargs: _Kwargs
    ) -> Any:
        """Run a norm, and leave the update of its running statistics to the commit."""
        tracked, stage = self.store.tracked, self.run_.stage
        return tracked.norm(node, stage, chunk, func, args, kwargs)

    def _normalize_alone(
        self, _: Node, _chunk: int, func: Callable[..., Any], args: _Args, kwargs: _Kwargs
    ) -> Any:
        """Let torch's own call reduce over the only chunk itself."""
        return batch_softmax.run_alone(func, args, kwargs)

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
