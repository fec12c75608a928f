# SPDX-License-Identifier: Apache-2.0
"""A value that one stage makes and others read.

A stage that reads it gets a detached alias, whose `.grad` accumulates the gradient. These gradients
are sent back when the stage that made the value runs backward.

A gathered gradient has the strides of its value, as torch gives them to the `.grad` of a leaf: some
of torch's backwards (batch_norm's on the CPU) are wrong where gradient and input differ in strides.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from koila.basics import rows
from koila.basics.rows import CONTINUOUS, OWN_WIDTH, Bounds, Place, widen_gradient
from koila.memory import offload
from koila.running.sparse_gradients import is_sparse
from koila.running.watched import GATHERED, Key
from koila.staged.facts import Info

if TYPE_CHECKING:
    from koila.running.watched import Watch


def add(left: torch.Tensor | None, right: torch.Tensor | None) -> torch.Tensor | None:
    """Return the sum of two gradients, of which None is zero."""
    if left is None or right is None:
        return right if left is None else left
    return right + left if is_sparse(left) else left + right


_TENSOR = operator.itemgetter(2)  # of what is read: (boundary value, key, tensor)


class BoundaryValue:
    """A value that crosses from the stage that made it to other stages, and its gradients.

    It is `whole` (a leaf, a result of a barrier), in `chunks` (of a body; they may be views of one
    tensor, `gathered`), or in `parts` (partials of a reduction, not yet combined). `aliases` and
    `seeds` have its gradients, by what was read: ("whole",), GATHERED, ("chunk", chunk), ("rows",
    place, bounds) or ("part", chunk, part). A partial in `added` is one sum, that of all chunks so
    far, in the place of the first chunk's.
    """

    # What few values have is set where it differs from these: each step makes one of these objects
    # for each parameter.
    results: tuple[torch.Tensor, ...] | None = None  # of a reduction over one chunk
    total: torch.Tensor | None = None  # gradient of all rows, added up from chunks' rows
    bounds: Bounds | None = None  # the rows that `whole` has, if not all
    gathered: torch.Tensor | None = None  # all chunks in one tensor
    is_put_together = False  # chunks are copied into `gathered` as they are made
    is_one_gradient = False  # chunks add theirs to the gradient of all rows
    is_offloaded = False  # chunks are kept off its device
    is_inference = False  # it was recorded in inference mode, and needs no gradient
    watch: Watch | None = None  # of a gradient that was sent back before it was known

    def __init__(
        self,
        info: Info,
        needs_gradient: bool,
        awaiting: Awaiting,
        whole: torch.Tensor | None = None,
        is_graph: bool = False,
        added: frozenset[int] = frozenset(),
    ) -> None:
        self.info = info
        self.needs_gradient = needs_gradient
        self.awaiting = awaiting
        self.whole = whole
        self.is_graph = is_graph
        self.chunks: dict[int, torch.Tensor] = {}
        self.parts: dict[int, dict[int, torch.Tensor]] = {}
        self.added = added
        self.n_added: dict[int, int] = {}  # the chunks that were added up, by partial
        self.aliases: dict[Key, torch.Tensor] = {}  # leaves that accumulate gradients
        self.seeds: dict[Key, torch.Tensor | None] = {}  # gradients without an alias
        self.freed: dict[int, int] = {}  # chunk -> bytes of its storage, which was freed

    @property
    def is_there(self) -> bool:
        """Whether the value, or a chunk of it, is available."""
        return self.whole is not None or self.gathered is not None or bool(self.chunks)

    @property
    def is_whole(self) -> bool:
        """Whether all rows are available on its device, where no chunk of it is being made."""
        return self.is_there and not self.is_offloaded and not self.freed

    def put_chunk(self, chunk: int, tensor: torch.Tensor, grid: Sequence[Bounds]) -> None:
        """Keep a chunk off its device, or copy it to its rows of `gathered`."""
        place = self.info.place
        assert place is not None
        if self.is_offloaded:
            self.chunks[chunk] = offload.put(tensor)
            return
        if self.gathered is None:
            info = self.info
            strides = info.strides or rows.strides_of_chunk(tensor, place)
            self.gathered = rows.empty(info.shape, strides, info.dtype, info.device)
        n_rows = grid[-1][1]
        rows.put(self.gathered, place, n_rows, grid[chunk], tensor.detach(), False)
        if rows.is_cut_in_place(self.gathered, place):
            self.chunks[chunk] = rows.cut(self.gathered, place, n_rows, grid[chunk])

    # -- recomputing chunks -----------------------------------------------------------------------

    def is_near(self, chunk: int) -> bool:
        """Return whether a chunk is in memory, on its device."""
        is_there = chunk in self.chunks or self.gathered is not None
        return is_there and not self.is_offloaded and chunk not in self.freed

    def free_storage(self, chunk: int) -> None:
        """Free the storage of a chunk, also if graphs refer to it: cheap calls recompute it."""
        storage = self.chunks[chunk].untyped_storage()
        self.freed[chunk] = storage.nbytes()
        storage.resize_(0)

    def rematerialize(self, chunk: int, tensor: torch.Tensor) -> None:
        """Allocate the freed storage of a chunk again and copy `tensor` to it."""
        of = self.chunks[chunk]
        storage = of.untyped_storage()
        storage.resize_(self.freed.pop(chunk))
        # Write through another tensor: a new version would make the graphs that saved it raise.
        again = rows.set_memory(torch.empty(0, dtype=of.dtype, device=of.device), storage)
        rows.with_layout(again, rows.layout_of(of)).copy_(tensor.detach())

    # -- inputs of the stages that read it --------------------------------------------------------

    @property
    def _all_rows(self) -> Key:
        """The key of all rows, read as one tensor."""
        return GATHERED if self.whole is None else ("whole",)

    def _watch_all(self, found: dict[Key, torch.Tensor], watch: Watch) -> dict[Key, torch.Tensor]:
        """Replace tensors of this value, whose gradient was sent back before it was known, by what
        compares that with the gradient that arrives."""
        device = self.info.device
        keys = [
            key
            for key, tensor in found.items()
            if self.needs_gradient and tensor.dtype in CONTINUOUS and tensor.device == device
            if watch.is_on(key)
        ]
        made = watch(keys, [found[key] for key in keys]) if keys else ()
        return {**found, **dict(zip(keys, made, strict=True))}

    def read_rows(
        self, place: Place, grid: Sequence[Bounds], chunk: int, is_graph: bool
    ) -> torch.Tensor:
        """Return the rows of a chunk."""
        whole = self.whole
        key: Key = ("chunk", chunk)
        if whole is not None:
            key = ("rows", place, grid[chunk])
        alias = self.aliases.get(key) if is_graph and self.needs_gradient else None
        if alias is not None:  # a graph read it before
            if alias.grad is None:
                self.awaiting[id(alias)] = self, key, alias
            return alias
        if whole is not None:
            tensor = rows.cut(whole.detach(), place, *self._within(grid, chunk))
        else:
            tensor = self.of_rows(grid, chunk)
            if self.is_offloaded:
                tensor = offload.get(tensor, self.info.device)
        return aliases_of([(self, key, tensor)])[0] if is_graph else tensor

    def of_rows(self, grid: Sequence[Bounds], chunk: int) -> torch.Tensor:
        """Return a chunk of a body's output: a copy, where it is cut of `gathered` and no view."""
        if chunk in self.chunks:
            return self.chunks[chunk]
        assert self.gathered is not None and self.info.place is not None
        return rows.cut(self.gathered, self.info.place, grid[-1][1], grid[chunk])

    def _within(self, grid: Sequence[Bounds], chunk: int) -> tuple[int, Bounds]:
        """Return the number of rows of `whole`, and which of them are the chunk's."""
        if self.bounds is None:
            return grid[-1][1], grid[chunk]
        first, last = self.bounds
        start, stop = grid[chunk]
        return last - first, (start - first, stop - first)

    def of_chunk(self, tensor: torch.Tensor, bounds: Bounds) -> BoundaryValue:
        """Return a chunk as a `BoundaryValue` that is whole, to cut it into pieces."""
        made = BoundaryValue(self.info, self.needs_gradient, self.awaiting, tensor.detach())
        made.bounds = bounds
        return made

    def cut_all(
        self, place: Place, grid: Sequence[Bounds], is_graph: bool
    ) -> Sequence[torch.Tensor] | None:
        """Return all chunks of a whole value, if they are views without a gradient; else None."""
        if self.whole is None:
            return None
        if self.needs_gradient and is_graph:
            return None
        if len(grid) == 1 or not rows.is_cut_in_place(self.whole, place):
            return None
        _, dim, _, inner = place
        sizes = []
        for start, stop in grid:
            sizes.append((stop - start) * inner)
        return self.whole.detach().split_with_sizes(sizes, dim)

    def read_parts(self, is_graph: bool) -> list[list[torch.Tensor]]:
        """Return aliases of the partials of a reduction, as parts[part][chunk]; of those that are
        added up, only their sum."""
        made, read = list[list[torch.Tensor]](), list[tuple[BoundaryValue, Key, torch.Tensor]]()
        for part in range(len(self.parts[0])):
            made.append([])
            for chunk in sorted(self.parts):
                if part in self.parts[chunk]:
                    read.append((self, ("part", chunk, part), self.parts[chunk][part]))
        found: Iterable[torch.Tensor] = map(_TENSOR, read)
        if is_graph and self.watch is not None:
            found = self._watch_all({key: one for _, key, one in read}, self.watch).values()
        elif is_graph:
            found = aliases_of(read)
        for (_, key, _), alias in zip(read, found, strict=True):
            made[key[2]].append(alias)
        return made

    # -- gradients --------------------------------------------------------------------------------

    def seed(
        self, grid: Sequence[Bounds], chunk: int, is_over: bool = False
    ) -> torch.Tensor | None:
        """Return the gradient of one chunk of a body's output: the sum over all that read it. If
        nothing reads the gradient any more (`is_over`), drop it; with the last chunk also that of
        all rows. So it takes no memory while an earlier stage runs backward."""
        aliases, seeds, key = self.aliases, self.seeds, ("chunk", chunk)
        grad, alias, gathered = seeds.get(key), aliases.get(key), seeds.get(GATHERED)
        if alias is not None and alias.grad is not None:
            grad = alias.grad if grad is None else add(grad, alias.grad)
        if GATHERED in aliases:
            gathered = add(gathered, aliases[GATHERED].grad)
        for whole in (seeds.get(("whole",)), gathered, self.total):
            if whole is not None and self.info.place is not None:
                part = rows.cut(whole, self.info.place, grid[-1][1], grid[chunk])
                grad = add(grad, part)
        if not is_over:
            return grad
        is_last = chunk + 1 == len(grid)
        for dropped in (key, GATHERED) if is_last else (key,):
            self.seeds.pop(dropped, None)
            alias = self.aliases.pop(dropped, None)  # of a value that is not freed
            if alias is not None:
                alias.grad = None
                self.awaiting.pop(id(alias), None)
        if is_last:
            self.total = None
        if is_last and self.is_one_gradient:  # else `tail.check` compares what the user gave
            self.seeds.pop(("whole",), None)
        return grad

    def take_rows(self, place: Place, grid: Sequence[Bounds], chunk: int) -> None:
        """After a chunk's backward, add the gradient of the rows that it read to the gradient of
        the whole value, and drop the alias of the rows."""
        key = ("rows", place, grid[chunk]) if self.whole is not None else ("chunk", chunk)
        alias = self.aliases.pop(key, None) if len(grid) > 1 else None
        if alias is None:
            return
        if alias.grad is not None:
            total = self._total_for(alias.grad)
            rows.put(total, place, *self._within(grid, chunk), alias.grad, True)
            alias.grad = None  # a retained graph may refer to the alias, and add to it later
        self.awaiting.pop(id(alias), None)

    def _total_for(self, part: torch.Tensor) -> torch.Tensor:
        """Return the gradient of all rows to which the gradient `part` of some is added: that of
        the alias of all rows, if there is one and its gradient is not sparse."""
        of_all = self.aliases.get(self._all_rows)
        grad = self.total if of_all is None else of_all.grad
        if grad is not None and is_sparse(grad):
            of_all, grad = None, self.total
        if grad is None:
            shape = self.info.shape if self.whole is None else self.whole.shape
            grad = rows.zeros(shape, self._strides(), part.dtype, part.device)
            if of_all is None:
                self.total = grad
            else:
                of_all.grad = grad
                self.awaiting.pop(id(of_all), None)
        return grad

    def settle(self, *keys: Key) -> None:
        """Move the gradients of the aliases under these keys, or of all aliases, into `seeds`, and
        drop the aliases. Call it when no graph sends them a gradient any more."""
        aliases, seeds = self.aliases, self.seeds
        for key in keys or list(aliases):
            alias = aliases.pop(key, None)
            if alias is None:
                continue
            gradient = alias.grad
            if gradient is None:
                self.awaiting.pop(id(alias), None)  # it would keep the memory
            else:
                seed = seeds.get(key)
                seeds[key] = gradient if seed is None else seed + gradient

    def free(self) -> None:
        """Free the value and keep only its gradients."""
        self.whole = None  # the result of a barrier, or of a reduction
        self.chunks.clear()
        self.parts.clear()
        self.gathered = None
        if self.aliases:
            self.settle()

    def gather_gradient(self, grid: Sequence[Bounds]) -> torch.Tensor | None:
        """Return the gradient of all rows of a body's output, put together from its chunks, and
        clear it there. None: the output got no gradient."""
        grads = [self.seed(grid, chunk) for chunk in range(len(grid))]
        for alias in self.aliases.values():
            alias.grad = None
        self.total = None
        if self.info.place is None or all(grad is None for grad in grads):
            return None
        filled = [
            torch.zeros_like(self.of_rows(grid, chunk)) if grad is None else grad
            for chunk, grad in enumerate(grads)
        ]
        return rows.gather(filled, self.info.place, self._strides())

    def _strides(self) -> Sequence[int] | None:
        """Return the strides of the whole value; None if they are not known."""
        whole = self.gathered if self.whole is None else self.whole
        if whole is not None or self.info.strides is not None or not self.chunks:
            return self.info.strides if whole is None else whole.stride()
        assert self.info.place is not None
        return rows.strides_of_chunk(next(iter(self.chunks.values())), self.info.place)

    # -- stand-ins for a linear tail --------------------------------------------------------------

    def zero_whole(self, is_read: bool) -> list[tuple[BoundaryValue, Key, torch.Tensor]]:
        """Make this the stand-in, all zeros, of a value that a body has not computed yet. Return
        the leaf whose gradient is the seed. Zeros that no call reads take no memory."""
        info = self.info
        if is_read:
            zeros = rows.zeros(info.shape, info.strides, info.dtype, info.device)
        else:
            zeros = rows.without_memory(info.shape, info.dtype, info.device)
        self.whole = zeros.requires_grad_() if self.needs_gradient else zeros
        self.is_graph = True
        return [(self, ("whole",), self.whole)]

    def zero_parts(
        self,
        part_ids: Sequence[int],
        tensors: Sequence[torch.Tensor],
        grid: Sequence[Bounds],
        early: dict[int, dict[int, torch.Tensor]],
    ) -> list[tuple[BoundaryValue, Key, torch.Tensor]]:
        """Make this the stand-in of a reduction's partials in all chunks, from the first chunk's.

        A partial without a gradient is a number of terms: it was computed before the body
        (`early`), or is proportional to the rows of the chunk.
        """
        leaves: list[tuple[BoundaryValue, Key, torch.Tensor]] = []
        first = grid[0][1] - grid[0][0]
        for chunk, (start, stop) in enumerate(grid):
            parts = self.parts.setdefault(chunk, {})
            parts.update(early.get(chunk, {}))
            for part, tensor in zip(part_ids, tensors, strict=True):
                is_sum = part in self.added
                if is_sum and chunk > 0:
                    continue
                n_rows = grid[-1][1] if is_sum else stop - start
                if tensor.requires_grad:
                    parts[part] = torch.zeros_like(tensor).requires_grad_()
                    leaves.append((self, ("part", chunk, part), parts[part]))
                else:
                    parts[part] = tensor if n_rows == first else tensor * (n_rows / first)
        self.aliases = {  # numbers of terms too: they are read as they are, and known by their ids
            ("part", c, p): t for c, parts in self.parts.items() for p, t in parts.items()
        }
        return leaves


def aliases_of(read: Iterable[tuple[BoundaryValue, Key, torch.Tensor]]) -> list[torch.Tensor]:
    """Return aliases for tensors that a graph reads, or the tensors of values without a gradient.

    Without a graph they are read as they are: some of torch's kernels depend on `requires_grad`,
    and a value that is computed in two programs must have the same bits in both.
    """
    found = []
    for of, key, tensor in read:
        if of.is_graph and tensor is of.whole:
            found.append(tensor)
            continue
        if of.watch is not None:
            found.append(of._watch_all({key: tensor}, of.watch)[key])
            continue
        alias = of.aliases.get(key) if of.needs_gradient else None
        if alias is None:
            # A partial on the CPU of a value on a GPU is a number of terms: it gets none.
            is_on_device = tensor.device == of.info.device
            if not (of.needs_gradient and tensor.dtype in CONTINUOUS and is_on_device):
                found.append(tensor.detach() if tensor.requires_grad else tensor)
                continue
            alias = of.aliases[key] = tensor.detach().requires_grad_()
            if tensor.dtype not in OWN_WIDTH:
                widen_gradient(alias)
            if of.total is not None and key == of._all_rows:
                alias.grad, of.total = of.total, None
        if alias.grad is None:
            of.awaiting[id(alias)] = of, key, alias
        found.append(alias)
    return found


def read_whole(values: Iterable[BoundaryValue], is_graph: bool) -> list[torch.Tensor]:
    """Return all rows of values; on a graph as aliases, which accumulate the gradients of all that
    read them."""
    found: list[torch.Tensor] = []
    read: list[tuple[BoundaryValue, Key, torch.Tensor]] = []
    for of in values:
        if of.whole is not None:
            read.append((of, ("whole",), of.whole))
        elif of.gathered is not None:
            read.append((of, GATHERED, of.gathered))
        else:
            (chunk,) = of.chunks.values()
            read.append((of, ("chunk", 0), chunk))
        found.append(read[-1][2])
    return aliases_of(read) if is_graph else found


def take_total_gradients(boundaries: Iterable[BoundaryValue]) -> list[torch.Tensor | None]:
    """Return the gradients of whole values, which may be freed: each the sum over all readers."""
    totals = []
    for of in boundaries:
        total, of_whole = of.seeds.get(("whole",)), of.aliases.get(("whole",))
        if of_whole is not None and of_whole.grad is not None:
            total = of_whole.grad if total is None else add(total, of_whole.grad)
        for key, alias in of.aliases.items():
            if key[0] == "rows":  # there is one chunk: `take_rows` leaves its alias
                total = add(total, alias.grad)
        for key, seed in of.seeds.items():
            total = add(total, seed) if key[0] == "rows" else total
        of_rows, of.total = of.total, None
        totals.append(total if of_rows is None else add(total, of_rows))
    return totals


#: Aliases that a graph read and that have no gradient so far, by id, each with its
#: `BoundaryValue` and key.
Awaiting = dict[int, tuple[BoundaryValue, Key, torch.Tensor]]
