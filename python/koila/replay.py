# SPDX-License-Identifier: Apache-2.0
"""Run a staged program in chunks: forward through the stages, back through them, one commit at
the end.

Until the commit nothing that the user can see has changed: gradients are summed in detached
aliases, statistics are written on copies, the generator is put back if anything raises.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from koila import (
    _core,
    accrue,
    checkpoints,
    config,
    deliver,
    derived,
    draws,
    engine,
    explain,
    hooks,
    interpret,
    meets,
    memory,
    norms,
    overwritten,
    planner,
    progress,
    reductions,
    reports,
    spent,
    steps,
    surroundings,
    unsplit,
    unwritten,
    views,
    waiting,
)
from koila.attempt import attempt
from koila.cross import Cross, Fresh, has_way_back
from koila.errors import MemoryLimitError, NotInChunksError, StaleError
from koila.facts import ROWS, Node, Run
from koila.numbers import Numbers, settle_outdated
from koila.program import Program
from koila.reads import Reads
from koila.rows import Bounds, Place, chunk_shape, cut, grid, without_memory
from koila.schedule import DATA, Schedule
from koila.threads import in_turn
from koila.tracked import Tracked, without_version

_T = TypeVar("_T")


class Replay:
    """One step: a program, its grid, and what crosses from stage to stage."""

    def __init__(
        self,
        program: Program,
        planned: planner.Plan,
        hooked: hooks.Seen,
    ) -> None:
        self.program = program
        self.planned = planned
        self.grids: dict[int, list[Bounds]] = draws.pinned_grids()
        for axis, rows in program.axes.items():
            self.grids.setdefault(axis, grid(rows, planned.n_chunks, planned.unit))
        self.pieces: dict[tuple[int, int, int], list[Bounds]] = {}  # by stage, axis, segment
        self.hooked = hooked
        self.is_forward = not program.roots  # nothing is differentiated
        self.gradients: list[torch.Tensor] = []  # of the roots, as they were given
        self.roots: dict[int, torch.Tensor] = {}  # by value
        self.is_delivering = self.is_spent = False
        self.cross: dict[int, Cross] = {}
        self.fresh: Fresh = {}  # of the graphs that go back next
        self.watched: dict[int, Cross] = {}  # what a body left, where its tail is linear
        self.reads: dict[tuple[int, bool], Reads] = {}  # of the runs of one step of the schedule
        self.zeros_of: dict[tuple[int, int], torch.Tensor] = {}  # by import, and rows of a chunk
        self.scratch = self._copy_statistics()
        self.tracked = Tracked(program)
        self.memos: dict[tuple[int, int], dict[str, Any]] = {}  # by call and chunk
        self.by_chunk: dict[int, int] = {}  # values with an entry for each chunk, along this dim
        self.draws = draws.Draws(program, self.grids)
        self.bar: progress.Bar | None = None

    @functools.cached_property
    def schedule(self) -> Schedule:
        """What is done, forward and back."""
        n_chunks = max(map(len, self.grids.values()), default=1)
        if not self.is_forward and not waiting.are_hooks_allowed():
            n_chunks = waiting.NEVER
        schedule = self.program.schedule(not self.is_forward, self.planned.way, n_chunks)
        head = schedule.head()
        if head is not None and not self.planned.way.n_across:
            self._cut_in_pieces(head)
        return schedule

    def _cut_in_pieces(self, head: Run) -> None:
        """Chunks are cut again for the head of a body, and for what counts its labels before, which
        nobody reads by rows."""
        found = [
            (start + first, start + last)
            for start, stop in self.grids[head.axis]
            for first, last in grid(stop - start, self.planned.way.n_pieces)
        ]
        self.pieces[head.stage, head.axis, head.segment] = found
        self.pieces[DATA, head.axis, 0] = found

    def grid_of(self, run: Run) -> list[Bounds]:
        """The chunks that a body, or a segment of one, runs on."""
        found = self.pieces.get((run.stage, run.axis, run.segment)) if self.pieces else None
        return found or self.grids[run.axis]

    def _copy_statistics(self) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Leaves that a node writes on the side, each with the copy that it writes instead."""
        copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for node in self.program.nodes.values() if self.program.has_effects else ():
            for k, import_id in enumerate(node.imports):
                if node.leaf_writes >> k & 1 and import_id >= 0:
                    value = self.program.imports[import_id].value
                    real = self.program.info(value).real
                    assert real is not None
                    copies.setdefault(value, (real, real.detach().clone()))
        return copies

    # -- what a stage reads ------------------------------------------------------------------------

    def cross_of(self, value: int) -> Cross:
        """The value as other stages see it; leaves enter when first asked for."""
        if value not in self.cross:
            info = self.program.info(value)
            tensor = info.real if info.real is not None else info.result
            assert tensor is not None, f"value {value} has neither a tensor nor a number"
            if value in self.scratch:
                tensor = self.scratch[value][1]
            self.cross[value] = Cross(info, self.program.needs_gradient(value), self.fresh, tensor)
        return self.cross[value]

    def _given(
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
        place, grid = self._part_of(import_id, run)
        if place is None:
            return cross.gather(is_graph)
        return cross.read_rows(place, grid, chunk, is_graph)

    def _part_of(self, import_id: int, run: Run) -> tuple[Place | None, Sequence[Bounds]]:
        """Where that of an import is which a chunk is given: its rows, or the entry made for it."""
        value, place, _ = self.program.imports[import_id]
        if value in self.by_chunk:
            dim, n_chunks = self.by_chunk[value], len(self.grid_of(run))
            return (run.axis, dim, 1, 1), [(chunk, chunk + 1) for chunk in range(n_chunks)]
        return place, self.grid_of(run)

    def _shadow(self, import_id: int, run: Run, chunk: int) -> torch.Tensor:
        """A tensor with the sizes of a value that is not there yet."""
        value, place, _ = self.program.imports[import_id]
        shape, rows = self.program.info(value).shape, -1
        if place is not None:
            start, stop = self.grid_of(run)[chunk]
            rows = stop - start
        if (import_id, rows) not in self.zeros_of:
            shape = shape if place is None else chunk_shape(shape, place, rows)
            self.zeros_of[import_id, rows] = self.zeros(value, shape)
        return self.zeros_of[import_id, rows]

    def zeros(self, value: int, shape: tuple[int, ...]) -> torch.Tensor:
        """Stand in for a value, with no memory to speak of."""
        info = self.program.info(value)
        return without_memory(shape, info.dtype, info.device)

    def given_to(
        self, run: Run, chunk: int, is_graph: bool, stand_ins: dict[int, Cross] | None
    ) -> list[Any]:
        """All that a stage reads from outside on one chunk, by number."""
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
            imports[import_id] = self._given(import_id, run, chunk, is_graph, stand_ins)
        for import_id in run.shadows:
            imports[import_id] = self._shadow(import_id, run, chunk)
        return imports

    # -- running one stage ------------------------------------------------------------------------

    def run_nodes(
        self,
        run: Run,
        chunk: int,
        is_graph: bool,
        stand_ins: dict[int, Cross] | None = None,
        look: waiting.Look | None = None,
        again: Mapping[int, torch.Tensor | None] | None = None,
    ) -> list[Any]:
        """Run the nodes of a stage on one chunk (a joint: once); the values made, by number.

        Args:
            run: which nodes.
            chunk: on which rows.
            is_graph: whether gradients are to go back through it.
            stand_ins: what is given for values of other stages.
            look: who looks at what autograd saves of it.
            again: run only what makes these values, of those that are there.
        """
        env: list[Any] = [None] * self.program.n_values
        for value, tensor in (again or {}).items():
            env[value] = tensor
        imports = self.given_to(run, chunk, is_graph, stand_ins)
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
            is_given = node.mode == ROWS and func in meets.N_OWN
            if is_given and is_alone:  # one forward without a graph: torch's own call
                return meets.run_alone(func, args, kwargs)
            if is_given:
                self.tracked.note(node, func, args)
                return func(*args, **kwargs)
            if node.mode == ROWS and func is torch.instance_norm and not is_alone:
                return self.tracked.instance_norm(node, run.stage, chunk, args, kwargs)
            if i in run.parts:
                start = bounds[0] if bounds else 0
                memo = self.memos.setdefault((i, chunk), {})
                words = self.program, node, func, args, kwargs, start, memo
                reduction, call = reductions.parts_of(*words)
                return reduction.partials(run.parts[i], call)
            return self._settle_view(node, func(*args, **kwargs), args)

        def clone(value: int, storage: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            # A write keeps the graph also under no_grad; what is written is no inference tensor.
            with _outside_inference(), torch.set_grad_enabled(is_graph):
                storage = storage.clone()
                return views.take(self.program, value, storage, rows, is_graph), storage

        def cut_import(tensor: torch.Tensor, import_id: int) -> torch.Tensor:
            entry = self.program.imports[import_id]
            assert bounds is not None and entry.place is not None
            return cut(tensor, entry.place, self.grid_of(run)[-1][1], bounds)

        def settle(i: int) -> None:
            assert look is not None
            look.settle(self.program.node(i), env)

        beside: Any = contextlib.nullcontext()
        if self.program.is_derived:
            beside = derived.beside(run.nodes if is_graph and again is None else ())
        with beside, contextlib.nullcontext() if look is None else look.hooks():
            _core.run(
                self.program.handle,
                run.index,
                env,
                imports,
                rows,
                not is_graph,
                run_other,
                cut_import,
                self.program.cloned,
                clone,
                None if look is None else look.pending,
                settle,
                None if again is None else tuple(again),
                None,
            )
        return env

    def _is_plain(self, node: Node, run: Run) -> bool:
        """Whether a reduction runs as it was written, as there is one chunk and no gradient: put
        together from parts, its last bit could be another."""
        is_one = self.is_forward and len(self.grid_of(run)) == 1 and node.stage == run.stage
        return is_one and not reductions.is_of_chunks(node)

    def _settle_view(self, node: Node, result: Any, args: tuple[Any, ...]) -> Any:
        """What was recorded as a copy must be one, and what was recorded as a view too: a write
        tells them apart."""
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
        """Reductions that ended in the body before: their partials become values here."""
        with torch.set_grad_enabled(is_graph):
            for node in run.combined:
                value = node.first_out
                cross = (stand_ins or {}).get(value) or self.cross[value]
                combined = cross.results
                if combined is None:
                    parts = cross.read_parts(is_graph)
                    combined = reductions.combine(self.program, node, parts)
                dim = reductions.dim_of_chunks(self.program, node)
                for out, tensor in zip(node.outs, combined, strict=True):
                    first = tensor if dim is None else tensor.narrow(dim, 0, 1)
                    _core.check_result(node.id, out, first)
                    env[out] = tensor
                if dim is not None:
                    self.by_chunk[value] = dim

    # -- forward ----------------------------------------------------------------------------------

    def collect(
        self, run: Run, env: Mapping[int, Any] | Sequence[Any], chunk: int, values: Iterable[int]
    ) -> None:
        """Keep what leaves the stage, without its graph."""
        for value in values:
            node = self.program.node_of(value)
            assert node is not None
            cross = self.cross_left(value)
            if node.id in run.parts and self._is_plain(node, run):
                cross.results = env[value]
            elif node.id in run.parts:
                cross.add_parts(chunk, run.parts[node.id], env[value])
            else:
                cross.add_chunk(chunk, env[value], self.grid_of(run))

    def cross_left(self, value: int) -> Cross:
        """What a body leaves as other stages see it."""
        if value not in self.cross:
            info = self.program.info(value)
            self.cross[value] = Cross(info, self.program.needs_gradient(value), self.fresh)
        return self.cross[value]

    def run_joint(self, run: Run, is_graph: bool) -> dict[int, GradientEdge]:
        """Run a joint; returns where its graph is entered, by value: what is not kept for backward
        can be let go before it."""
        env = self.run_nodes(run, 0, is_graph)
        graph: dict[int, GradientEdge] = {}
        combined = [out for node in run.combined for out in node.outs]
        for value in [*combined, *run.exports]:
            tensor = env[value]
            info = self.program.info(value)
            parts = self.cross.get(value)
            whole = Cross(info, self.program.needs_gradient(value), self.fresh, tensor.detach())
            if parts is not None:
                whole.parts, whole.aliases = parts.parts, parts.aliases
            self.cross[value] = whole
            if is_graph and tensor.requires_grad and has_way_back(tensor):
                graph[value] = get_gradient_edge(tensor)
        return graph

    # -- backward ---------------------------------------------------------------------------------

    def settle_chunk(self, run: Run, chunk: int) -> None:
        """A chunk was read for the last time: of what is offloaded only the gradient stays here."""
        if self.planned.way.offload_every == 0:
            return
        for import_id in run.imports:
            cross = self.cross.get(self.program.imports[import_id].value)
            if cross is not None and cross.is_offloaded:
                self.forget(cross.settle(chunk))

    def seeds(
        self, run: Run, left: Mapping[int, Any] | Sequence[Any], chunk: int
    ) -> list[tuple[Any, torch.Tensor]]:
        """What a run on a chunk left, or where its graph is entered, and the gradient that came for
        it; parts of a reduction one by one."""
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
        """Gradients for rows of what is there whole go to their places."""
        for import_id in run.imports:
            value = self.program.imports[import_id].value
            place, grid = self._part_of(import_id, run)
            cross = stand_ins.get(value) or self.cross.get(value)
            if cross is not None and place is not None:
                self.forget(cross.take_rows(place, grid, chunk))

    def forget(self, aliases: Iterable[torch.Tensor]) -> None:
        """No gradient comes for them any more: those that got none must not keep their memory."""
        for alias in aliases:
            if alias.grad is None:
                self.fresh.pop(id(alias), None)

    def apart(self, run: Callable[[], _T]) -> tuple[_T, Fresh]:
        """Run what has a graph that waits; also the aliases that it was given: gradients that go
        back through it may be their first ones."""
        before = self.fresh.copy()
        self.fresh.clear()
        try:
            return run(), self.fresh.copy()
        finally:
            self.fresh.clear()
            self.fresh.update(before)

    def go_on(self, given: Fresh) -> None:
        """What was given to a graph that waited, which goes back now."""
        for i, (cross, key, alias) in given.items():
            cross.await_again(key, alias)
            if alias.grad is None:
                self.fresh[i] = cross, key, alias

    # -- the whole step ---------------------------------------------------------------------------

    def _go(self) -> None:
        self.draws.prepare()
        if config.get("progress"):
            n_chunks = max(map(len, self.grids.values()), default=1)
            self.bar = progress.Bar(progress.n_ticks(self.schedule.steps, n_chunks))
        try:
            interpret.Interpreter(self, self.schedule).go()
        finally:
            if self.bar is not None:
                self.bar.close()
            self.fresh.clear()  # whoever is in it has it too: they would keep each other

    def differentiate(
        self, gradients: list[torch.Tensor]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Run everything forward and back; the gradients of the real tensors that entered."""
        self.gradients = gradients
        for root, given in zip(self.program.roots, gradients, strict=True):
            self.roots[root] = self.roots[root] + given if root in self.roots else given
        self._go()
        if len(gradients) == 1:  # torch calls hooks of its only root wherever that leads
            hooks.apply(self.program.roots[0], gradients[0], self.hooked)
        found = []
        for value, cross in self.cross.items():
            info = cross.info
            if not self.program.is_leaf(value) or not self.program.needs_gradient(value):
                continue
            gradient = cross.take_total_gradient()
            if gradient is not None and info.real is not None:
                found.append((value, info.real, gradient.to(info.real.dtype)))
        if any(real._post_accumulate_grad_hooks or real._backward_hooks for _, real, _ in found):
            order = self._order_of_leaves()
            found.sort(key=lambda entry: order.get(entry[0], (0, 0)))
        return [(real, gradient) for _, real, gradient in found]

    def _order_of_leaves(self) -> dict[int, tuple[int, int]]:
        """Where leaves are read first. torch's backward comes to them from the last call on, and to
        those of one call in the order of its words; of a product with a bias to that first.
        What is delivered last has its hooks called first."""
        order: dict[int, tuple[int, int]] = {}
        for i, node in sorted(self.program.nodes.items()):
            step = 1 if _core.node(i)[1] == "linear" else -1
            for k, import_id in enumerate(node.imports):
                if import_id >= 0:
                    order.setdefault(self.program.imports[import_id].value, (i, step * k))
        return order

    def compute(self) -> None:
        """Run everything forward, without graphs."""
        self._go()

    # -- commit -----------------------------------------------------------------------------------

    def settle(self, is_spent: bool) -> None:
        """Find the numbers of the user's lazies; all else goes, before graphs outside go back."""
        self.tracked.settle()
        self.is_spent = is_spent
        self.numbers = Numbers(self.program, self.cross, is_spent)
        self.cross.clear()

    def commit(self) -> None:
        """Write statistics, leave the generator as eager would, give the user's lazies their
        numbers."""
        _core.set_busy(True)
        try:
            self._commit()
        finally:
            _core.set_busy(False)

    def write_statistics(self) -> None:
        """Write what the calls of the program write on the side; once."""
        done: set[int] = _core.memo().setdefault("effects", set())
        nodes = self.program.nodes.values() if self.program.has_effects else ()
        fresh = [n for n in nodes if n.leaf_writes and n.id not in done]
        written = {self.program.imports[i].value for n in fresh for i in n.imports if i >= 0}
        unwritten.note_written({n.id for n in fresh})
        self.tracked.write(done)
        for value, (real, copy) in self.scratch.items():
            if value in written:
                with torch.no_grad():
                    without_version(real).copy_(copy)
                _core.refresh_leaf(value)
        done.update(n.id for n in fresh)

    def _commit(self) -> None:
        self.write_statistics()
        if not self.is_forward:
            self.tracked.move_again()
        self.draws.commit()
        hooks.commit(self.hooked)
        if self.is_spent:
            _core.spend(self.program.handle, False)
        self.numbers.deliver()
        if self.is_forward and not self.program.is_known_only:
            _core.forget_left()  # all that can be read goes on from what is known now
        if not _core.close():
            self.numbers.leave()


@contextlib.contextmanager
def _outside_inference() -> Iterator[None]:
    """Whoever reads in inference mode, what was recorded outside of it is not of that kind; calls
    have their own mode."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch._C._InferenceMode(False), torch.set_grad_enabled(False):
        yield


@unwritten.reading()
def _attempt(
    program: Program, planned: planner.Plan, run: Callable[[Replay], Any]
) -> tuple[Any] | None:
    """Run a program and commit it, with twice the chunks where memory runs out.

    Returns:
        What `run` returned; None: the program has to run whole.
    """

    def go() -> tuple[Any] | None:
        done = attempt(program, planned, Replay, run)
        if done is None:
            return None
        replay, result, ran = done
        replay.commit()
        del replay, done  # what is left now is left for the next step
        ran.keep(program)
        return (result,)

    with _outside_inference():
        return _core.drawing(go) if program.is_drawing else go()


def _is_whole() -> bool:
    """Whether that is known without staging, and why."""
    if is_whole := planner.is_whole():
        reports.decide(explain.ASKED if config.get("chunks") is not None else explain.FITS)
    return is_whole


@unwritten.reading()
def _stage(
    roots: list[torch.Tensor],
    is_known_only: bool = False,
    gets: Callable[[torch.Tensor], bool] | None = None,
    unwanted: tuple[_core.LazyTensor, ...] = (),
) -> tuple[Program, planner.Plan] | None:
    """The program and its plan, of no chunks where nothing has to run; None: it runs whole."""
    program = Program(roots, is_known_only, gets=gets, unwanted=unwanted)
    if not program.n_nodes:
        return program, planner.Plan(0)
    if roots:
        checkpoints.check(program, gets is not None)
    explain.log_whole(program)
    is_whole = program.unstageable is not None or not program.has_body
    cause = explain.cause_of_whole(program) if is_whole else explain.FITS_LATER
    try:
        if is_whole:
            needed = memory.estimate(program, bool(roots)).whole
            unsplit.check_whole(program, cause, needed)
        is_live = program.unstageable is not None or (roots and is_whole)
        if is_live:
            steps.note_end(None)
        if is_live or not roots:
            planned = None if is_live else planner.plan_read(program, is_known_only)
            if planned is None:
                reports.decide(cause)
            return (program, planned) if planned is not None else None
        planned = planner.plan(program, True)
        steps.note_end(planned.whole or None)
    except MemoryLimitError:
        _core.abandon()  # as where memory ran out: it runs if it is asked for again, not by itself
        raise
    if not planned.is_whole:
        spent.check_program(program.handle)
        overwritten.check(program)
        return program.cut_for(planned.way), planned
    found = explain.layers_of(program) if planned.predicted is not None else ()
    decision = reports.Decision(
        planned.why,
        planned.predicted,
        planned.allowed,
        layers=found,
        least_limit=planned.least_limit,
    )
    reports.decide(decision)
    return None


def read(is_known_only: bool = False, caller: Callable[..., Any] | None = None) -> bool:
    """Give the pending values that the user can reach their numbers, in chunks.

    Known only: leave those with a gradient in their history. False: it has to run whole.
    """
    with reports.Asking("a read" if caller is None else reports.call_of(caller)):
        return read_all(is_known_only)


@in_turn
@surroundings.in_outside
def read_all(is_known_only: bool) -> bool:
    """As `read`, for who has said what asks."""
    settle_outdated()
    if _is_whole():
        return False
    _core.check_leaves()
    staged = _stage([], is_known_only)
    if staged is not None and staged[1].n_chunks == 0:
        return True

    def run(replay: Replay) -> None:
        replay.compute()
        replay.settle(False)

    done = _attempt(*staged, run) if staged is not None else None
    return done is not None


def differentiate(
    roots: list[torch.Tensor],
    gradients: list[torch.Tensor | None],
    is_retained: bool,
    inputs: Sequence[torch.Tensor] | None,
    finish: Callable[[list[torch.Tensor], list[torch.Tensor]], Any],
) -> Any:
    """Differentiate the roots in chunks and hand the gradients of the real tensors to `finish`,
    which wants those of `inputs`; None: of all.

    Returns:
        NotImplemented where the program has to run whole; else what `finish` returns.
    """

    def take(found: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        return deliver.deliver(found, finish)

    gets = engine.getters(inputs) if inputs else None
    return _held(roots, gradients, is_retained, gets, take)


def gradients_of(
    roots: list[torch.Tensor],
    gradients: list[torch.Tensor | None],
    is_retained: bool,
    unwanted: tuple[_core.LazyTensor, ...],
    gets: Callable[[torch.Tensor], bool] | None,
) -> Any:
    """Differentiate the roots in chunks.

    Args:
        roots: lazies of one tape.
        gradients: of the roots.
        is_retained: whether they can be differentiated again.
        unwanted: lazies of that tape whose numbers nobody is to get.
        gets: whether a real tensor is to get a gradient; None: all are.

    Returns:
        Pairs of a real tensor and its gradient; NotImplemented where the program has to run whole.
    """
    return _held(roots, gradients, is_retained, gets, list, unwanted)


@surroundings.in_outside
def _held(roots: list[torch.Tensor], *words: Any) -> Any:
    """Another thread's program, and one that was cut off, is run as it would be there."""
    return _core.held(roots[0] if roots else None, _differentiate, (roots, *words), {})


def _differentiate(
    roots: list[torch.Tensor],
    gradients: list[torch.Tensor | None],
    is_retained: bool,
    gets: Callable[[torch.Tensor], bool] | None,
    take: Callable[[list[tuple[torch.Tensor, torch.Tensor]]], Any],
    unwanted: tuple[_core.LazyTensor, ...] = (),
) -> Any:
    lazies = [root for root in roots if type(root) is _core.LazyTensor]
    if len(lazies) < len(roots):
        return NotImplemented
    if any(_core.real(root) is not None or not root.requires_grad for root in lazies):
        return NotImplemented
    settle_outdated()
    if any(_core.real(root) is not None for root in lazies):
        raise StaleError(
            "backward: a tensor was changed in place after the value that is differentiated was "
            "computed with it; change it after backward()"
        )
    if all(map(_core.is_pending_here, lazies)) and _is_whole():
        _core.forget_left()
        return NotImplemented
    filled = []
    for root, gradient in zip(roots, gradients, strict=True):
        if gradient is None:
            if root.numel() != 1:
                return NotImplemented  # torch's own words are raised by the whole run
            gradient = torch.ones(root.shape, dtype=root.dtype, device=root.device)
        elif type(gradient) is _core.LazyTensor:
            gradient = _core.read(gradient)
        if not isinstance(gradient, torch.Tensor):
            return NotImplemented  # likewise
        if gradient.shape != root.shape:
            return NotImplemented
        filled.append(gradient)
    if not all(_core.is_pending_here(root) for root in roots):
        return NotImplemented
    _core.check_leaves()
    for root in roots:
        _core.describe(root)  # what a tensor was changed for has no value: it says so
    _core.forget_left()
    staged = _stage(roots, False, gets, unwanted)
    if staged is None:
        return NotImplemented

    def run(replay: Replay) -> tuple[bool, Any]:
        found = replay.differentiate(filled)
        replay.settle(not is_retained)
        if deliver.goes_on(found):
            return True, found
        replay.is_delivering = True  # hooks of the user's are called: there is no other try
        replay.write_statistics()
        replay.draws.leave()
        return False, take(found)

    done = _attempt(*staged, run)
    if done is None:
        return NotImplemented
    goes_on, result = done[0]
    del done
    if goes_on:  # what was cut off runs now, and this part is over, with all that it held
        result = take(result)
    _core.note_backward()
    return result
