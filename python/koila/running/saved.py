# SPDX-License-Identifier: Apache-2.0
"""What autograd saves of a chunk whose graph waits: seen as it is saved, and found again when the
graph goes back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from koila.staged.facts import Node
from koila.staged.program import Program

_Layout = tuple[torch.Size, tuple[int, ...], int]  # size, strides, offset


class Found:
    """Values that a graph needs when it goes back, each until it was read for the last time.

    It holds no graph: autograd's references to it are none that Python's collector sees.
    """

    def __init__(self) -> None:
        self.tensors: dict[int, torch.Tensor] = {}
        self.n_reads: Counter[int] = Counter()

    def read(self, value: int) -> torch.Tensor:
        self.n_reads[value] -= 1
        return self.tensors[value] if self.n_reads[value] else self.tensors.pop(value)


def _there(tensor: torch.Tensor) -> torch.Tensor:
    """What a graph needs; what was emptied has to be filled again before: its memory is gone."""
    assert tensor.untyped_storage().nbytes() or not tensor.nbytes, "a graph needs what was emptied"
    return tensor


class _Saved:
    """What autograd saved: a tensor, or a value that will be found, and how it was seen."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor.detach()
        #: Where it will be found: a value; and if it is a view of that, how both lay in memory.
        self.found: tuple[Found, int, tuple[_Layout, _Layout] | None] | None = None

    def let_go(self, found: Found, value: int, view: tuple[_Layout, _Layout] | None = None) -> None:
        """Keep only where it will be found."""
        self.found = found, value, view
        self.tensor = None
        found.n_reads[value] += 1

    def get(self) -> torch.Tensor:
        if self.found is None:
            assert self.tensor is not None
            return _there(self.tensor)
        found, value, view = self.found
        tensor = _there(found.read(value))
        if view is None:
            return tensor
        (size, strides, start), (size_of_view, strides_of_view, start_of_view) = view
        if tensor.stride() != strides:  # in its home it lies otherwise
            tensor = tensor.new_empty_strided(size, strides).copy_(tensor)
        start_of_view += int(tensor.storage_offset()) - start
        return tensor.as_strided(size_of_view, strides_of_view, start_of_view)


#: In so many chunks no graph waits.
NEVER = 2**32 - 1


def are_hooks_allowed() -> bool:
    """Whether what autograd saves may be looked at: somebody may have told torch otherwise."""
    try:
        with torch.autograd.graph.saved_tensors_hooks(_Saved, _Saved.get):
            return True
    except RuntimeError:
        return False


def _layout(tensor: torch.Tensor) -> _Layout:
    return tensor.shape, tensor.stride(), int(tensor.storage_offset())


class Look:
    """Looks at what autograd saves while a chunk goes forward.

    Args:
        program: the program.
        values: those that are there when the chunk goes back: in their homes, or made again.
        light: of these, those that are made again.
    """

    def __init__(self, program: Program, values: frozenset[int], light: frozenset[int]) -> None:
        self.program = program
        self.values = values
        self.light = light
        self.found = Found()
        self.pending: list[_Saved] = []

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        pending = self.pending  # autograd keeps what packs, too: it must not hold more than this

        def pack(tensor: torch.Tensor) -> _Saved:
            pending.append(_Saved(tensor))
            return pending[-1]

        return torch.autograd.graph.saved_tensors_hooks(pack, _Saved.get)

    def settle(self, node: Node, env: Sequence[Any]) -> None:
        """Of what was saved of a call, let go what will be found when it is needed."""
        imports = self.program.imports
        read = (imports[import_id].value for import_id in node.imports if import_id >= 0)
        made = [
            (value, env[value])
            for value in (*node.outs, *read)
            if value in self.values and isinstance(env[value], torch.Tensor)
        ]
        for saved in self.pending:
            self._settle(saved, made)
        written = imports[node.imports[0]].value if node.writes else None
        copies = [saved for saved in self.pending if saved.found is None]
        if written in self.light and len(copies) == 1:  # it saves what it writes, as it was
            copies[0].let_go(self.found, written)
        self.pending.clear()

    def _settle(self, saved: _Saved, made: list[tuple[int, torch.Tensor]]) -> None:
        tensor = saved.tensor
        assert tensor is not None
        storage, layout = tensor.untyped_storage()._cdata, _layout(tensor)
        of_it = [(v, _layout(of)) for v, of in made if of.untyped_storage()._cdata == storage]
        same = [(value, None) for value, of in of_it if of == layout]
        views = [(value, (of, layout)) for value, of in of_it if value in self.light]
        for value, view in (*same, *views)[:1]:
            saved.let_go(self.found, value, view)
