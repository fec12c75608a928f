# SPDX-License-Identifier: Apache-2.0
"""Execute the instructions of a schedule in their order; schedule.def says what each one means.

The loops over chunks are instructions too. So nothing here decides what a chunk keeps or when it is
freed: the schedule whose memory was measured is the schedule that runs.
"""

from __future__ import annotations

import bisect
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from torch.autograd.graph import GradientEdge

from koila.planning import second_axis
from koila.running import cheap, retained, tail, visible, watched
from koila.running.boundary import Awaiting, BoundaryValue, add, take_total_gradients
from koila.running.prepared import Prepared
from koila.running.sending import edges_of, send_back
from koila.staged import hooks
from koila.staged.facts import Run
from koila.staged.schedule import Graph, Op, Policy, Schedule, Step

if TYPE_CHECKING:
    from koila.running.stages import Stages
    from koila.running.store import RowsRead


#: Executes an instruction on a later chunk of its loop, given the chunk.
_Later = Callable[[int], object]
#: It does nothing there.
IDLE: _Later = int
_INDEX = operator.attrgetter("index")  # of a run


class _Loop(NamedTuple):
    """An open loop: its first instruction, and the chunk at which it stops."""

    begin: int
    stop: int


class Interpreter:
    """Executes a schedule once."""

    #: By instruction: the method of its name. Where it returns a function, that executes the
    #: instruction on the later chunks of the loop.
    _DO: ClassVar[dict[Op, Callable[[Interpreter, Step], _Later | None]]]

    def __init__(self, stages: Stages, schedule: Schedule) -> None:
        self.stages = stages
        self.schedule = schedule
        self.loops: list[_Loop] = []
        self.chunks: list[int] = []  # of each open loop: the current chunk, or piece of a chunk
        self.chunk = 0  # of the innermost loop: the current chunk, or piece of a chunk
        self.open: dict[int, Any] = {}  # by run: the chunk's values, with their graph
        self.barriers: dict[int, tuple[dict[int, GradientEdge], Awaiting]] = {}  # graphs, by stage
        self.pieces: dict[int, BoundaryValue] = {}  # by value: the chunk that the inner loop cuts
        self.parts: dict[int, Any] = {}  # by value: outputs of the first chunk, for `tail.seed`
        self.retained: dict[int, retained.Retained] = {}  # retained graphs of chunks, by run
        self.is_certain = False  # the tail's gradients are known not to depend on values
        self.rematerialized = cheap.Rematerialized(stages, schedule.cheap_values)
        self.leaving = schedule.leaving
        self.is_offloading = Policy.OFFLOAD in stages.planned.strategy.policies

    def go(self) -> None:
        """Execute all instructions."""
        steps, at, later = self.schedule.executed, 0, dict[int, _Later]()
        while at < len(steps):
            step = steps[at]
            do = later.get(at)
            if do is not None:
                if do is not IDLE:
                    do(self.chunk)
            elif step.op == Op.LOOP:
                self._open_loop(step, at + 1)
            elif step.op != Op.END:
                do = self._DO[step.op](self, step)
                if do is not None:
                    later[at] = do
            else:
                loop = self.loops[-1]
                self.chunk += 1
                if self.chunk < loop.stop:
                    self.chunks[-1], at = self.chunk, loop.begin
                    continue
                self._close_loop(step)
            at += 1
            if not self.loops:
                later.clear()
                self.stages.ready.clear()

    # -- loops ------------------------------------------------------------------------------------

    def _open_loop(self, step: Step, begin: int) -> None:
        stages, grid = self.stages, self.stages.grid_by_run[step.runs[0].index]
        first, stop = 0, len(grid)
        if self.loops:
            (body,) = (run for run in stages.program.runs if run.index in self.open)
            bounds = stages.grid_of(body)[self.chunk]
            first, stop = (bisect.bisect_left(grid, (row, 0)) for row in bounds)
            for value in step.values:
                made = self.open[body.index][value]
                self.pieces[value] = stages.boundary[value].of_chunk(made, bounds)
        elif step.graph == Graph.RETAIN:
            for value in step.values:
                boundary = stages.boundary[value]
                if boundary.aliases:
                    boundary.settle()
        self.loops.append(_Loop(begin, stop))
        self.chunks.append(first)
        self.chunk = first

    def _close_loop(self, step: Step) -> None:
        """Go on after the last chunk of the innermost loop."""
        self.loops.pop()
        self.chunks.pop()
        if self.loops:
            self.chunk = self.chunks[-1]
            self._give_back_pieces()
        elif step.graph == Graph.RETAIN:
            del self.retained[step.runs[0].index]

    def _give_back_pieces(self) -> None:
        """Add the gradients of the pieces to the gradient of the chunk that was cut into them."""
        key = "chunk", self.chunk
        while self.pieces:
            value, boundary = self.pieces.popitem()
            seeds = self.stages.boundary[value].seeds
            seeds[key] = add(seeds.get(key), *take_total_gradients([boundary]))
            boundary.settle()
            del boundary

    # -- a chunk goes forward ---------------------------------------------------------------------

    def _store(self, step: Step) -> None:
        stages = self.stages
        for value in (*step.values, *step.others):
            info = stages.program.info(value)
            boundary = BoundaryValue(info, stages.program.needs_gradient(value), stages.awaiting)
            boundary.is_offloaded = value in step.values
            boundary.is_put_together = not boundary.is_offloaded
            stages.boundary[value] = boundary

    def _sum(self, step: Step) -> None:
        self.stages.begin_outputs(step.values)
        for value in step.values:
            self.stages.boundary[value].is_one_gradient = True

    def _run(self, step: Step) -> _Later | None:
        stages, (run,), chunk = self.stages, step.runs, self.chunk
        if step.graph == Graph.RETAIN:
            of = retained.Retained(stages, run, step.others, self.leaving)
            self.retained[run.index] = of
            of.run(chunk)
            return of.run
        if step.graph == Graph.SECOND_AXIS:
            self.open[run.index] = self._record(run)
            return None
        is_first = step.graph == Graph.FIRST and chunk == 0
        env = stages.run_nodes(run, chunk, is_first or step.graph == Graph.NOW, self.pieces)
        stages.collect(run, env, chunk, step.values)
        if is_first:
            self.parts.update(tail.parts_of(run, env))
        elif step.graph == Graph.NOW:
            self.open[run.index] = env
        return None

    def _record(self, run: Run) -> second_axis.Recorded:
        """Record the last segment on this chunk again, to run it in pieces of a second axis."""
        stages = self.stages
        start, stop = stages.grid_of(run)[self.chunk]
        ready = stages.ready.get((run.index, True)) or Prepared(stages, run, True)
        imports = ready.inputs(self.chunk, self.pieces)
        stages.begin_outputs(run.exports)  # `seeds` looks up their gradients there
        dim = stages.planned.strategy.second_dim
        return second_axis.record(stages.program, run, imports, stop - start, start, dim)

    def _tail(self, step: Step) -> _Later:
        if any(self.chunks):  # not the first chunk, or piece of one
            return IDLE
        *others, last = step.runs
        for run in others:
            if run.index in self.open:
                self.parts.update(tail.parts_of(run, self.open[run.index]))
        made = self.open[last.index]
        left = made.shapes() if isinstance(made, second_axis.Recorded) else made
        for value in last.exports:
            self.parts[value] = left[value]
        self.is_certain = tail.seed(self.stages, step, self.parts, self.stages.gradients)
        self.parts.clear()
        return IDLE

    # -- and back ---------------------------------------------------------------------------------

    def _back(self, step: Step) -> _Later | None:
        stages, (run,), chunk = self.stages, step.runs, self.chunk
        later = None
        if step.graph == Graph.RETAIN:
            go_back = self.retained[run.index].send_back
            go_back(chunk)
            later = go_back if not self.is_offloading and not step.values else None
        elif step.graph == Graph.SECOND_AXIS:
            recorded = self.open.pop(run.index)
            pairs = stages.seeds(run, recorded.left, chunk)
            n_pieces = stages.planned.strategy.n_pieces
            second_axis.send_back(
                [(out, seed) for out, seed in pairs if out.requires_grad], n_pieces
            )
            send_back((), stages.awaiting)
            stages.collect(run, recorded.numbers(), chunk, run.exports)
        else:
            env = self.open.pop(run.index)
            edges = edges_of(env, run.exports)
            env.clear()  # free before backward what autograd does not keep
            pairs = stages.seeds(run, edges, chunk)
            del edges  # and the graphs of outputs that get no gradient
            send_back(pairs, stages.awaiting)
            del pairs
        if self.is_offloading:  # free the chunk's inputs after their last read
            for value in (stages.program.imports[i].value for i in run.imports):
                if value in stages.boundary and stages.boundary[value].is_offloaded:
                    stages.boundary[value].settle(("chunk", chunk))
        for value in step.values:
            stages.boundary[value].seeds.pop(("chunk", chunk), None)
        return later

    def _take(self, step: Step) -> _Later | None:
        stages, chunk = self.stages, self.chunk
        for value in step.values:
            alias = stages.boundary[value].aliases.pop(("chunk", chunk), None)
            if alias is not None and alias.grad is None:
                stages.awaiting.pop(id(alias), None)
        still_read = self._still_read() if len(self.loops) > 1 else set()
        for run in step.runs:
            if stages.taken.get(run.index) != []:  # where gradients of rows may be
                stages.take_rows_of(run, chunk, self.pieces, still_read)
        for value in step.values:
            stages.boundary[value].seeds.pop(("chunk", chunk), None)
        is_any = step.values or any(map(stages.taken.__getitem__, map(_INDEX, step.runs)))
        return None if is_any else IDLE

    def _still_read(self) -> set[RowsRead]:
        """In an inner loop, return the rows that the body of the outer one read, whose backward
        comes after it. A piece reads the same rows if it is the whole chunk: one of a single row,
        or one that is cut along a second axis."""
        stages, chunk = self.stages, self.chunks[0]
        bodies = (run for run in stages.program.runs if run.index in self.open)
        reads = (read for body in bodies for read in stages.rows_read_by(body))
        return {(value, place, bounds[chunk]) for value, place, bounds in reads}

    # -- what is freed and rematerialized ---------------------------------------------------------

    def _free(self, step: Step) -> None:
        stages = self.stages
        for value in step.values:
            boundary = stages.boundary[value]
            if self.loops:
                boundary.chunks.pop(self.chunk, None)
                key = "chunk", self.chunk
                if key in boundary.aliases:
                    boundary.settle(key)
            elif stages.is_forward:
                del stages.boundary[value]
            else:
                boundary.free()

    def _rematerialize(self, step: Step) -> None:
        self.rematerialized.add(step.values, self.chunk)

    def _free_storage(self, step: Step) -> None:
        if self.loops:
            self.rematerialized.free(self.chunk)
            return
        for value in step.values:
            boundary = self.stages.boundary[value]
            for chunk in boundary.chunks:
                boundary.free_storage(chunk)

    # -- barriers ---------------------------------------------------------------------------------

    def _barrier(self, step: Step) -> None:
        (run,) = step.runs
        self.barriers[run.stage] = self.stages.run_barrier(run, not self.stages.is_forward)

    def _barrier_back(self, step: Step) -> None:
        stages, (run,) = self.stages, step.runs
        graph, given = self.barriers.pop(run.stage)
        pairs, is_any = [], hooks.is_any()
        seeds = take_total_gradients(map(stages.boundary.__getitem__, graph))
        for (value, edge), seed in zip(graph.items(), seeds, strict=True):
            if value in stages.roots:
                root = stages.roots[value]
                seed = root if seed is None else add(seed, root)
            if seed is not None and is_any and stages.program.is_hooked(value):
                seed = visible.call_hooks(stages, value, seed)
            if seed is not None:
                pairs.append((edge, seed))
        del seeds  # and those that hooks have replaced
        send_back(pairs, stages.awaiting, given)

    def _watch(self, step: Step) -> None:
        stages = self.stages
        for run in step.runs:
            for value in set(run.exports).difference(run.inner):
                boundary = stages.boundary[value]
                if self.is_certain:
                    boundary.needs_gradient = False  # its gradient was sent back already
                else:
                    boundary.watch = watched.Watch(boundary.seeds, stages.grid_of(run))
                    stages.watched[value] = boundary

    def _check(self, step: Step) -> None:
        tail.check(self.stages, self.stages.roots)

    def _seed(self, step: Step) -> None:
        stages, is_any = self.stages, hooks.is_any()
        for run in step.runs:
            for value in run.exports:
                boundary = stages.boundary.get(value)
                if value in stages.roots and boundary is not None:
                    boundary.seeds["whole",] = stages.roots[value]
                if not is_any or not stages.program.is_hooked(value) or value in run.parts:
                    continue
                assert boundary is not None
                gradient = boundary.gather_gradient(stages.grid_of(run))
                if gradient is not None:
                    boundary.seeds["whole",] = visible.call_hooks(stages, value, gradient)


Interpreter._DO = {
    op: method for op in Op if (method := vars(Interpreter).get(f"_{op.name.lower()}"))
}
