# SPDX-License-Identifier: Apache-2.0
"""The values that the stages of a step read from each other, and the gradients of these values."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from koila.basics.holders import owned
from koila.basics.rows import Bounds, Place, grid
from koila.planning import plans
from koila.random import draws
from koila.reductions import calls
from koila.reductions.reduction import Chunk
from koila.reporting import progress
from koila.running.boundary import Awaiting, BoundaryValue, add
from koila.running.tracked import Tracked
from koila.staged import aliases, hooks
from koila.staged.cache import ProgramCache
from koila.staged.facts import Run
from koila.staged.program import Program

#: Where the rows of a value are that chunks read, and which they are.
Rows = tuple[Place, Sequence[Bounds]]


class Reads(NamedTuple):
    """How the chunks of a body read its inputs, as import and value; it is the same in each step.

    Attributes:
        once: all chunks read the same tensor, which exists before the loop over them.
        cut: leaves whose rows the chunks read, and where these are.
        ranges: chunks read their first entries, as many as they have rows, and these are there.
        others: they are read for each chunk, and where their rows are.
        taken: those of which chunks read rows and that get a gradient.
        leaves: the values of `once` and `cut` that are leaves.
    """

    once: dict[int, int]
    cut: list[tuple[int, int, Place]]
    ranges: list[tuple[int, int, Place]]
    others: list[tuple[int, int, Place | None]]
    taken: list[tuple[int, int]]
    leaves: dict[int, None]


def _reads_of(program: Program, run: Run) -> Reads:
    """Return how the chunks of a body read its inputs."""
    reads = Reads({}, [], [], [], [], {})
    for import_id in run.imports:
        value, place, is_range = program.imports[import_id]
        node, is_by_chunk = program.node_of(value), calls.is_by_chunk(program, value)
        is_made_before = node is None or node.stage != run.stage
        if is_range and place is not None:
            reads.ranges.append((import_id, value, place))
        elif place is None and is_made_before and not is_by_chunk and not is_range:
            reads.once[import_id] = value
        elif program.is_leaf(value) and place is not None:
            reads.cut.append((import_id, value, place))
        else:
            reads.others.append((import_id, value, place))
        if node is None and not is_range:
            reads.leaves[value] = None
        if program.needs_gradient(value) and (place is not None or is_by_chunk):
            reads.taken.append((import_id, value))
    return reads


def _describe_reads(program: Program) -> ProgramCache:
    """Return the cache of a program, with all that this module finds out of it."""
    cache = program.cache
    if cache.reads is None:
        reads = dict[int, Reads]()
        values = {value: None for value, *_ in program.imports}
        for run in program.runs:
            values |= dict.fromkeys(run.exports)
            for i in run.combined:
                values |= dict.fromkeys(program.node(i).outs)
            for value in run.exports if run.is_body else ():
                cache.added[value] = calls.added_by_maker(program, value)
            if run.is_body:
                reads[run.index] = _reads_of(program, run)
        cache.boundary = list(values)
        cache.reads = reads  # last: other threads may look
    return cache


#: A value, the place of its rows, and the bounds of those that a chunk or piece read.
RowsRead = tuple[int, Place, Bounds]


class Store:
    """What a step keeps while it runs: the chunks of each axis, and the `BoundaryValue` of each
    value that one stage makes and others read."""

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
        self.find_grids()
        cache = _describe_reads(program)
        self.reads: dict[int, Reads] = cache.reads or {}
        self.added = cache.added
        program.infos.ask(cache.boundary)
        self.hooked = hooked
        self.is_forward = not program.roots  # without a backward pass
        self.gradients: list[torch.Tensor] = []  # one for each root, as the caller passed them
        self.roots: dict[int, torch.Tensor] = {}  # root value -> its gradient
        self.is_delivering = self.is_graph_freed = False
        #: By run, and whether it has a graph: what `prepared.py` made; emptied after each loop.
        self.ready: dict[tuple[int, bool], Any] = {}
        self.boundary: dict[int, BoundaryValue] = {}  # by value
        self.awaiting: Awaiting = {}  # aliases that the next backward gives a first gradient
        #: Outputs of the last body, where its tail is linear.
        self.watched: dict[int, BoundaryValue] = {}
        self.zeros_of: dict[tuple[int, int], torch.Tensor] = {}  # by import, and rows of a chunk
        #: By run: the values that chunks read rows of and that get a gradient, with these rows.
        self.taken: dict[int, list[tuple[int, Place, Sequence[Bounds]]]] = {}
        self.scratch = self._copy_statistics()
        self.tracked = Tracked(program)
        self.chunk = Chunk()
        #: Value of a reduction that has one entry for each chunk -> the dim of these entries.
        self.by_chunk: dict[int, int] = {}
        self.draws = draws.Draws(program, self.grids, hooked.generators)
        self.kept: dict[int, aliases.Kept] = {}  # by value: what hooks must not write
        #: The leaves of autograd's graph behind the program, each with the first call through which
        #: it gets a gradient, and what stands for its `.grad`; once hooks are called.
        self.leaves: list[tuple[torch.Tensor, int, torch.Tensor]] | None = None
        self.bar: progress.Bar | None = None

    # -- the chunks of a run ----------------------------------------------------------------------

    def find_grids(self) -> None:
        """Look up, by run, the bounds of its chunks, or of its pieces."""
        self.grid_by_run: dict[int, list[Bounds]] = {}
        for run in self.program.runs:
            pieces = self.pieces.get((run.stage, run.axis, run.segment))
            self.grid_by_run[run.index] = pieces or self.grids.get(run.axis, [])

    def grid_of(self, run: Run) -> list[Bounds]:
        """Return the bounds of the chunks, or pieces, that a body or a segment of one runs on."""
        return self.grid_by_run[run.index]

    def is_plain(self, value: int, run: Run) -> bool:
        """Return whether the reduction that makes a value runs as torch's own call: with one chunk
        and no gradient. Combined partials could differ from it in the last bit."""
        if not (self.is_forward and run.is_body and len(self.grid_by_run[run.index]) == 1):
            return False
        node = self.program.node_of(value)
        if node is None or node.stage != run.stage:
            return False
        return not calls.split_of(self.program, node).is_of_chunks

    # -- what a stage reads ------------------------------------------------------------------------

    def _copy_statistics(self) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Return, by value, the leaves that nodes write on the side, each with a copy to write."""
        copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        moved = list(dict.fromkeys(itertools.chain(*self.program.moved.values())))
        with torch._C.DisableTorchFunctionSubclass():  # they are watched (`unwritten.py`)
            for value in moved:
                info = self.program.infos[value]
                assert info.real is not None
                copies[value] = info.real, info.real.detach().clone()
        return copies

    def boundary_of(self, value: int) -> BoundaryValue:
        """Return the `BoundaryValue` of a value; make it at the first use if it is a leaf."""
        if value not in self.boundary:
            self.enter((value,))
        return self.boundary[value]

    def enter(self, values: Iterable[int]) -> None:
        """Make the `BoundaryValue`s of leaves that have none yet."""
        program, boundaries = self.program, self.boundary
        for value in values:
            if value in boundaries:
                continue
            info = program.infos[value]
            tensor = info.real if info.real is not None else info.result
            assert tensor is not None, f"value {value} has neither a tensor nor a number"
            if value in self.scratch:
                tensor = self.scratch[value][1]
            needs_gradient = program.needs_gradient(value)
            boundaries[value] = BoundaryValue(info, needs_gradient, self.awaiting, tensor)

    def enter_all(self) -> None:
        """Do so for all leaves that the chunks of bodies read, in the order of their first runs."""
        self.enter(itertools.chain(*[reads.leaves for reads in self.reads.values()]))

    def rows_of(self, import_id: int, run: Run) -> Rows | None:
        """Return the place and the grid by which chunks read an import; None if each chunk reads
        all of it.

        A chunk reads its rows of the value. Of a reduction whose result has one entry for each
        chunk (`by_chunk`), it reads its entry.
        """
        value, place, _ = self.program.imports[import_id]
        if value in self.by_chunk:
            dim, n_chunks = self.by_chunk[value], len(self.grid_of(run))
            return (run.axis, dim, 1, 1), [(chunk, chunk + 1) for chunk in range(n_chunks)]
        return None if place is None else (place, self.grid_by_run[run.index])

    # -- what a stage leaves -----------------------------------------------------------------------

    def begin_outputs(self, values: Iterable[int]) -> None:
        """Make the `BoundaryValue`s of outputs of a body that have none yet."""
        program, boundaries = self.program, self.boundary
        for value in values:
            if value not in boundaries:
                info, needs_gradient = program.infos[value], program.needs_gradient(value)
                added = self.added[value]
                boundaries[value] = BoundaryValue(info, needs_gradient, self.awaiting, added=added)

    def collect(
        self, run: Run, env: Mapping[int, Any] | Sequence[Any], chunk: int, values: Iterable[int]
    ) -> None:
        """Keep the outputs `values` of a run on a chunk, taken from `env`, for other stages.

        They are detached from its graph, and copied if they are part of a larger storage. Even a
        result can be that: torch's mse_loss returns one number in the storage of all its terms.
        Partials in `added` are added up, chunk after chunk.
        """
        if not self.boundary.keys() >= run.exported:
            self.begin_outputs(run.exports)  # `seeds` looks there, also for what no stage reads
        grid = self.grid_by_run[run.index]
        for value in values:
            boundary, parts, made = self.boundary[value], run.parts.get(value), env[value]
            if parts is None:
                place, boundary.is_inference = boundary.info.place, made.is_inference()
                is_gathered = boundary.is_put_together and len(grid) > 1
                if place is not None and (boundary.is_offloaded or is_gathered):
                    boundary.put_chunk(chunk, made, grid)
                    continue
            elif self.is_forward and self.is_plain(value, run):
                boundary.results = made
                continue
            kept = []
            for tensor in (made,) if parts is None else made:
                one = tensor.detach()
                is_part = one.untyped_storage().nbytes() > one.nbytes
                kept.append(one.clone() if is_part else one)
            if parts is None and place is None:
                (boundary.whole,) = kept  # without rows: every chunk computes the same
            elif parts is None:
                (boundary.chunks[chunk],) = kept
            else:
                sums = boundary.parts.setdefault(0, {})
                of_chunk, n_added = boundary.parts.setdefault(chunk, {}), boundary.n_added
                for part, tensor in zip(parts, kept, strict=True):
                    if part not in boundary.added:
                        of_chunk[part] = tensor
                    elif n_added.get(part, 0) == chunk:  # else the chunk runs again
                        n_added[part] = chunk + 1
                        if part in sums:  # in place, if nothing else has the memory of the sum
                            tensor = owned((sums[part],))[0].add_(tensor)
                        sums[part] = tensor

    # -- gradients --------------------------------------------------------------------------------

    def seeds(
        self, run: Run, left: Mapping[int, Any] | Sequence[Any], chunk: int
    ) -> list[tuple[Any, torch.Tensor]]:
        """Return pairs of an output of a run on a chunk and its gradient, where it has one. The
        chunk's backward is next, and nothing else reads these gradients.

        `left` has the outputs, or the edges of their graph, by value. Each partial of a reduction
        has a pair of its own.
        """
        pairs: list[tuple[Any, torch.Tensor]] = []
        grid = self.grid_by_run[run.index]
        for value in run.exports:
            boundary, parts, made = self.boundary[value], run.parts.get(value), left[value]
            if parts is None:
                seed = boundary.seed(grid, chunk, True)
                if made is not None and seed is not None:
                    pairs.append((made, seed))
                continue
            added, aliases, seeds = boundary.added, boundary.aliases, boundary.seeds
            for part, of_part in zip(parts, made, strict=True):
                key = "part", 0 if part in added else chunk, part
                alias, seed = aliases.get(key), seeds.get(key)
                if alias is not None and alias.grad is not None:
                    seed = alias.grad if seed is None else add(seed, alias.grad)
                if of_part is not None and seed is not None:
                    pairs.append((of_part, seed))
        return pairs

    def rows_read_by(self, run: Run) -> list[tuple[int, Place, Sequence[Bounds]]]:
        """Return the values that get a gradient and of which a run reads rows, each with the place
        of its rows and their bounds by chunk."""
        if run.index not in self.taken:
            taken = self.taken[run.index] = []
            for import_id, value in self.reads[run.index].taken:
                of, rows = self.boundary.get(value), self.rows_of(import_id, run)
                has_own = of is not None and of.whole is None and not of.is_one_gradient
                if rows is not None and not (has_own and self.planned.strategy.n_pieces == 1):
                    taken.append((value, *rows))
        return self.taken[run.index]

    def take_rows_of(
        self,
        run: Run,
        chunk: int,
        stand_ins: Mapping[int, BoundaryValue],
        still_read: set[RowsRead],
    ) -> None:
        """After a chunk's backward, add the gradients of the rows that it read to the gradients of
        the whole values. Leave those of `still_read`: a run whose graph is still open read the same
        aliases, to which its backward adds."""
        for value, place, bounds in self.taken.get(run.index) or self.rows_read_by(run):
            boundary = stand_ins.get(value) or self.boundary.get(value)
            if boundary is None or not boundary.aliases:
                continue
            if boundary.whole is None and not boundary.is_one_gradient:
                continue  # its chunks have gradients of their own
            if (value, place, bounds[chunk]) not in still_read:
                boundary.take_rows(place, bounds, chunk)
