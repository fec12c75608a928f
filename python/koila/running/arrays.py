# SPDX-License-Identifier: Apache-2.0
"""Numbers of recorded values that the user has as NumPy arrays.

Torch does not count a write to such an array. In eager, later calls read what was written, and so
does the backward of earlier calls that saved the value. But a chunk computes the value again, as it
was before the write. So a program that reads a value whose array was written is refused.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from koila import _core
from koila.basics import lines
from koila.messages.errors import StaleError
from koila.running import read_numbers
from koila.staged import meta
from koila.staged.facts import Info, name_of_call, where_of_node
from koila.staged.program import Program


class _Array:
    """The memory of a value that an array shares: its number, and the tensor that the array and its
    views hold."""

    def __init__(self, number: torch.Tensor, shared: torch.Tensor) -> None:
        self._number: torch.Tensor | None = number  # until it is compared after the array is gone
        self._checksum = meta.checksum(number)
        self._is_written = False
        self._shared = weakref.ref(shared)
        self.where = lines.user_line()
        _not_compared.add(self)

    def is_written(self) -> bool:
        """Tell whether the array was written. Once it is gone, nobody can write it any more."""
        is_gone = self.is_gone()
        if self._number is not None and not self._is_written:
            self._is_written = meta.checksum(self._number) != self._checksum
        if is_gone:
            self._number = None
            _not_compared.discard(self)
        return self._is_written

    def is_gone(self) -> bool:
        return self._shared() is None

    def is_over(self) -> bool:
        """Tell whether the array is gone and was never written."""
        return not self.is_written() and self._number is None


#: Arrays that may be written, or that are gone and were not compared since.
_not_compared: weakref.WeakSet[_Array] = weakref.WeakSet()


def compare_gone() -> None:
    """Find which arrays that are gone were written, before torch writes tensors of their memory."""
    for one in list(_not_compared):
        if one.is_gone():
            _not_compared.discard(one)  # comparing it makes calls that lead here
            one.is_written()


def note(lazy: Any, number: torch.Tensor, shared: torch.Tensor) -> None:
    """Note that an array has the memory of a lazy's number, as the tensor `shared`: from now on a
    write to it is noticed, if a gradient flows through the value."""
    value = _core.id(lazy)
    read_numbers.watch(number)
    if value is None or not number.numel():
        return
    info = Info.of(value)
    if Info.of(info.base).requires_grad or info.requires_grad:
        noted = _core.notes().setdefault("arrays", {}).setdefault(info.storage, [])
        noted[:] = [one for one in noted if not one.is_over()]
        noted.append(_Array(number, shared))


def note_index(index: torch.Tensor, shared: torch.Tensor) -> None:
    """Note that eager's autograd would save an array itself, whose memory `shared` has, and of
    which a recorded call has a copy, `index`."""
    _core.notes().setdefault("indices", {})[id(index)] = index, _Array(shared, shared)


def note_made_of(index: torch.Tensor, made: tuple[torch.Tensor, ...]) -> None:
    """Note that a recorded call has `made` for an index of `note_index`, a mask."""
    indices = _core.notes().get("indices", {})
    if id(index) in indices:
        array = indices[id(index)][1]
        indices.update((id(one), (one, array)) for one in made)


def _written() -> tuple[dict[int, str], dict[int, str]]:
    """Return the lines that made the arrays which were written since: by the storage of a value,
    and by the id of the copy of an index."""
    arrays = _core.notes().get("arrays", {}).items()
    indices = _core.notes().get("indices", {}).items()
    return (
        {key: one.where for key, noted in arrays for one in noted if one.is_written()},
        {key: one.where for key, (_, one) in indices if one.is_written()},
    )


def check(program: Program) -> None:
    """Raise a StaleError if a call of a program reads a value whose array was written."""
    written, indices = _written()
    for node in program.nodes.values() if written or indices else ():
        for value in (value for value in _core.node(node.id)[5] if value >= 0):
            info = program.info(value)
            where = indices.get(id(info.real)) or written.get(info.storage)
            if where is not None:
                raise StaleError(
                    f"{name_of_call(node.id)}: a tensor of shape {list(program.info(value).shape)} "
                    f"that the call reads ({where_of_node(node)}) was written through a NumPy "
                    f"array of its memory ({where}); write to a copy, numpy().copy(), or with "
                    "torch under no_grad()"
                )


def check_live() -> None:
    """As `check`, for all pending calls."""
    if not _core.notes().keys().isdisjoint(("arrays", "indices")) and any(_written()):
        check(Program([]))
