# SPDX-License-Identifier: Apache-2.0
"""Saved tensors of the retained graph of a chunk: replaced by references to values where these will
be available at the backward pass.

Autograd holds a *cell* in place of each saved tensor: a list, which gets the tensor, or is filled
with a value before the chunk's backward. Autograd drops the cell after its last read, and with it
the value. Both hooks are functions of C, since they run for each saved tensor of each chunk.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from koila.staged.program import Program

Cell = list[torch.Tensor]
_Layout = tuple[torch.Size, tuple[int, ...], int]  # size, strides, offset


class Reference(NamedTuple):
    """A value that a cell is to be filled with, and, if the saved tensor is another view of its
    storage, both layouts."""

    cell: Cell
    value: int
    layouts: tuple[_Layout, _Layout] | None


def _layout_of(tensor: torch.Tensor) -> _Layout:
    return tensor.shape, tensor.stride(), int(tensor.storage_offset())


def view_of(tensor: torch.Tensor, layout: _Layout, of_view: _Layout) -> torch.Tensor:
    """Return the view of a value that was saved, from the layouts that both had then."""
    (size, strides, start), (size_of_view, strides_of_view, start_of_view) = layout, of_view
    if tensor.stride() != strides:  # it was kept with other strides than it had when saved
        tensor = tensor.new_empty_strided(size, strides).copy_(tensor)
    start_of_view += int(tensor.storage_offset()) - start
    return tensor.as_strided(size_of_view, strides_of_view, start_of_view)


_get = operator.itemgetter(0)


def _get_filled(cell: Cell) -> torch.Tensor:
    (tensor,) = cell
    is_there = bool(tensor.untyped_storage().nbytes()) or not tensor.nbytes
    assert is_there, "a graph needs a storage that was freed"
    return tensor


#: A number of chunks for which no schedule retains graphs.
NEVER = 2**32 - 1


def are_hooks_allowed() -> bool:
    """Return whether saved-tensor hooks can be used: the user may have disabled them."""
    try:
        with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, torch.Tensor.detach):
            return True
    except RuntimeError:
        return False


class Look:
    """Sees the tensors that autograd saves while the chunks of a body go forward, one by one.

    Args:
        program: the program.
        values: those that will be available at the chunk's backward: kept outputs, and recomputed.
        cheap: those of them that are recomputed.
        frees_storage: whether the step frees the storage of values that graphs hold.
    """

    def __init__(
        self,
        program: Program,
        values: frozenset[int],
        cheap: frozenset[int],
        frees_storage: bool,
    ) -> None:
        self.program = program
        self.values = values
        self.cheap = cheap
        #: By call, once it ran: those of `values` that it makes or reads, and what it writes. It is
        #: the same in each step, but would take as much to keep as all else that is known of it.
        self.touched: dict[int, tuple[list[int], int | None]] = {}
        self.references: list[Reference] = []  # of the chunk
        #: What autograd has saved since the last `settle`, and the cell of each.
        self.cells: defaultdict[torch.Tensor, Cell] = defaultdict(list)
        self.hooks = torch.autograd.graph.saved_tensors_hooks(
            self.cells.__getitem__, _get_filled if frees_storage else _get
        )

    def settle(self, env: Sequence[Any], i: int) -> None:
        """After call `i`, make the cells of its saved tensors refer to values where these will be
        available, and fill the others."""
        cells, references = self.cells, self.references
        values, written = self.touched.get(i) or self._touched_by(i)
        made: dict[int, list[tuple[int, torch.Tensor]]] = {}  # values and tensors, by storage
        left = dict(zip(map(id, cells), cells.items(), strict=True))
        for value in values:
            of = env[value]
            if isinstance(of, torch.Tensor):
                made.setdefault(of.untyped_storage()._cdata, []).append((value, of))
                _, cell = left.pop(id(of), (None, None))
                if cell is not None:
                    references.append(Reference(cell, value, None))
        others: list[tuple[torch.Tensor, Cell]] = []
        for tensor, cell in left.values():
            same = made.get(tensor.untyped_storage()._cdata) if made else None
            reference = None if same is None else self._refer_to(same, tensor, cell)
            if reference is None:
                others.append((tensor, cell))
            else:
                references.append(reference)
        if written in self.cheap and len(others) == 1:  # a copy of its input before the write
            references.append(Reference(others.pop()[1], written, None))
        for tensor, cell in others:
            cell.append(tensor.detach())  # the graph of an output would refer to itself
        cells.clear()

    def _touched_by(self, i: int) -> tuple[list[int], int | None]:
        node, imports = self.program.node(i), self.program.imports
        values = sorted(self.values.intersection(node.outs))
        for import_id in node.imports:
            if import_id >= 0 and imports[import_id].value in self.values:
                values.append(imports[import_id].value)
        written = imports[node.imports[0]].value if node.writes else None
        found = self.touched[i] = values, written
        return found

    def _refer_to(
        self, same: Sequence[tuple[int, torch.Tensor]], tensor: torch.Tensor, cell: Cell
    ) -> Reference | None:
        """Return a reference to one of the values with the memory of a saved tensor."""
        found, layout = None, _layout_of(tensor)
        for value, of in same:
            of_value = _layout_of(of)
            if of_value == layout:
                return Reference(cell, value, None)
            if found is None and value in self.cheap:
                found = Reference(cell, value, (of_value, layout))
        return found
