# SPDX-License-Identifier: Apache-2.0
"""Saved tensors of the retained graph of a chunk: replaced by references to values where these will
be available at the backward pass.

Autograd holds a *cell* in place of each saved tensor: a list, which gets the tensor, or is filled
with a value before the chunk's backward. Autograd drops the cell after its last read, and with it
the value. Both hooks are functions of C, since they run for each saved tensor of each chunk.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from koila import _core
from koila.basics.rows import Layout, is_alias, layout_of, with_layout
from koila.staged.facts import Run
from koila.staged.program import Program

Cell = list[torch.Tensor]
#: A cell, the value that it is to be filled with, and, if the saved tensor is another view of its
#: storage, both layouts.
Reference = tuple[Cell, int, tuple[Layout, Layout] | None]


def view_of(tensor: torch.Tensor, layout: Layout, of_view: Layout) -> torch.Tensor:
    """Return the view of a value that was saved, from the layouts that both had then."""
    size, strides, start = layout[:3]
    if tensor.stride() != strides:  # it was kept with other strides than it had when saved
        tensor = tensor.new_empty_strided(size, strides).copy_(tensor)
    start_of_view = of_view[2] + int(tensor.storage_offset()) - start
    return with_layout(tensor, (*of_view[:2], start_of_view, *of_view[3:]))


_get = operator.itemgetter(0)


def _get_filled(cell: Cell) -> torch.Tensor:
    (tensor,) = cell
    is_there = bool(tensor.untyped_storage().nbytes()) or not tensor.nbytes
    assert is_there, "a graph needs a storage that was freed"
    return tensor


def _touched_by(
    program: Program, run: Run, values: frozenset[int]
) -> dict[int, tuple[list[int], int | None]]:
    """Return, by call of a run, those of `values` that it makes or reads, and the value it writes.
    It is the same in each step, but would take as much to keep as all else that is known of it."""
    imports, touched = program.imports, dict[int, tuple[list[int], int | None]]()
    for i in run.nodes:
        node = program.node(i)
        found = sorted(values.intersection(node.outs))
        for import_id in node.imports:
            if import_id >= 0 and imports[import_id].value in values:
                found.append(imports[import_id].value)
        touched[i] = found, imports[node.imports[0]].value if node.writes else None
    return touched


class Look:
    """Sees the tensors that autograd saves while the chunks of a body go forward, one by one.

    Args:
        program: the program.
        run: the body.
        values: those that will be available at the chunk's backward: kept outputs, and recomputed.
        cheap: those of them that are recomputed.
        frees_storage: whether the step frees the storage of values that graphs hold.
    """

    def __init__(
        self,
        program: Program,
        run: Run,
        values: frozenset[int],
        cheap: frozenset[int],
        frees_storage: bool,
    ) -> None:
        self.cheap = cheap
        self.touched = _touched_by(program, run, values)
        self.references: list[Reference] = []  # of the chunk
        #: What autograd has saved since the last `settle`: tensors, each followed by its cell.
        self.saved: list[Any] = []
        self.hooks = torch.autograd.graph.saved_tensors_hooks(
            _core.pack_into(self.saved), _get_filled if frees_storage else _get
        )

    def settle(self, env: Sequence[Any], i: int) -> None:
        """After call `i`, make the cells of its saved tensors refer to values where these will be
        available, and fill the others."""
        pairs, references = iter(self.saved), self.references
        values, written = self.touched[i]
        others: list[tuple[torch.Tensor, Cell]] = []
        for tensor, cell in zip(pairs, pairs, strict=True):
            found: Reference | None = None
            for value in values:
                of = env[value]
                if of is tensor:
                    found = cell, value, None
                    break
                if not isinstance(of, torch.Tensor) or of.dtype is not tensor.dtype:
                    continue
                if not is_alias(of, tensor):
                    continue
                layout, of_view = layout_of(of), layout_of(tensor)
                if layout == of_view:
                    found = cell, value, None
                    break
                if found is None and value in self.cheap:
                    found = cell, value, (layout, of_view)
            if found is None:
                others.append((tensor, cell))
            else:
                references.append(found)
        if written in self.cheap and len(others) == 1:  # a copy of its input before the write
            references.append((others.pop()[1], written, None))
        for tensor, cell in others:
            cell.append(tensor.detach())  # the graph of an output would refer to itself
        self.saved.clear()
