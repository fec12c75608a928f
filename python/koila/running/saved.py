# SPDX-License-Identifier: Apache-2.0
"""Saved tensors of the retained graph of a chunk: replaced by references to values where these will
be available at the backward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from koila.staged.program import Program

_Layout = tuple[torch.Size, tuple[int, ...], int]  # size, strides, offset


class Found:
    """The values that a graph reads in its backward, each until its last read.

    It must not refer to the graph: Python's garbage collector would not see such a cycle, since
    autograd refers to this object.
    """

    def __init__(self) -> None:
        self.tensors: dict[int, torch.Tensor] = {}
        self.n_reads: Counter[int] = Counter()


class _Saved:
    """What autograd holds in place of a saved tensor: the tensor, or a reference to a value."""

    tensor: torch.Tensor | None
    #: The reference: a value, and, if the tensor is another view of its storage, both layouts.
    found: tuple[Found, int, tuple[_Layout, _Layout] | None] | None = None

    def refer_to(
        self, found: Found, value: int, view: tuple[_Layout, _Layout] | None = None
    ) -> None:
        """Replace the tensor by a reference."""
        self.found = found, value, view
        self.tensor = None
        found.n_reads[value] += 1

    def get(self) -> torch.Tensor:
        view, tensor = None, self.tensor
        if self.found is not None:
            found, value, view = self.found
            found.n_reads[value] -= 1
            is_last = not found.n_reads[value]
            tensor = found.tensors.pop(value) if is_last else found.tensors[value]
        assert tensor is not None
        is_there = bool(tensor.untyped_storage().nbytes()) or not tensor.nbytes
        assert is_there, "a graph needs what was emptied"
        if view is None:
            return tensor
        (size, strides, start), (size_of_view, strides_of_view, start_of_view) = view
        if tensor.stride() != strides:  # it was kept with other strides than it had when saved
            tensor = tensor.new_empty_strided(size, strides).copy_(tensor)
        start_of_view += int(tensor.storage_offset()) - start
        return tensor.as_strided(size_of_view, strides_of_view, start_of_view)


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
    """Sees the tensors that autograd saves while a chunk goes forward.

    Args:
        program: the program.
        values: those that will be available at the chunk's backward: kept outputs, and recomputed.
        cheap: those of them that are recomputed.
    """

    def __init__(self, program: Program, values: frozenset[int], cheap: frozenset[int]) -> None:
        self.program = program
        self.values = values
        self.cheap = cheap
        self.found = Found()
        self.pending: list[_Saved] = []

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        pending = self.pending  # autograd keeps `pack` alive, which must not keep `self` alive

        def pack(tensor: torch.Tensor) -> _Saved:
            saved = _Saved()
            saved.tensor = tensor.detach()
            pending.append(saved)
            return saved

        return torch.autograd.graph.saved_tensors_hooks(pack, _Saved.get)

    def settle(self, env: Sequence[Any], i: int) -> None:
        """After call `i`, replace its saved tensors by references where they will be available."""
        if not self.pending:
            return
        node, imports = self.program.node(i), self.program.imports
        candidates = list(node.outs)
        for import_id in node.imports:
            if import_id >= 0:
                candidates.append(imports[import_id].value)
        made: list[tuple[int, int, _Layout]] = []  # value, its storage, its layout
        for value in candidates:
            of = env[value] if value in self.values else None
            if isinstance(of, torch.Tensor):
                layout = of.shape, of.stride(), int(of.storage_offset())
                made.append((value, of.untyped_storage()._cdata, layout))
        for saved in self.pending if made else ():
            tensor, other = saved.tensor, None
            assert tensor is not None
            storage = tensor.untyped_storage()._cdata
            of_saved: _Layout = tensor.shape, tensor.stride(), int(tensor.storage_offset())
            for value, its, layout in made:
                if its == storage and layout == of_saved:
                    saved.refer_to(self.found, value)
                    break
                if its == storage and other is None and value in self.cheap:
                    other = value, (layout, of_saved)
            else:
                if other is not None:
                    saved.refer_to(self.found, *other)
        written = imports[node.imports[0]].value if node.writes else None
        if written in self.cheap:
            copies = [saved for saved in self.pending if saved.found is None]
            if len(copies) == 1:  # a copy of its input before the write
                copies[0].refer_to(self.found, written)
        self.pending.clear()
