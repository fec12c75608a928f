# SPDX-License-Identifier: Apache-2.0
"""Numbers without a gradient that a read gave to the user, and that recorded calls still read.

In eager, the backward of these calls reads what the user writes into such a tensor through .data,
and raises after another write. But a chunk computes the value again, as it was before the write. So
a backward that needs it is refused.
"""

from __future__ import annotations

import weakref

import torch

from koila import _core
from koila.running import overwritten
from koila.staged import aliases
from koila.staged.facts import Info
from koila.staged.program import Program


class _ReadNumber:
    """A number in the memory of a recorded value, in this storage: the user's tensor."""

    def __init__(self, storage: int, number: torch.Tensor) -> None:
        self.storage = storage
        self.memory = aliases.memory_of(number)
        self._number = weakref.ref(number)
        self._version = aliases.version_of(number)
        self._watched: aliases.Kept | None = None

    def watch(self) -> None:
        """Note that x.data was taken of the memory: a write through it changes no version."""
        number = self._number()
        if self._watched is None and number is not None:
            self._watched = aliases.Kept(number.detach(), True)

    def is_counted(self) -> bool:
        """Tell whether torch counted a write to the number."""
        number = self._number()
        return number is not None and aliases.version_of(number) != self._version

    def is_written(self) -> bool:
        """Tell whether there was any write to the number."""
        watched = self._watched
        return self.is_counted() or (watched is not None and watched.is_written())


def note(value: int, number: torch.Tensor) -> None:
    """Note that the user has the number of a value of this thread's tape."""
    if number.numel() and not number.is_inference():
        noted: list[_ReadNumber] = _core.notes().setdefault("read_numbers", [])
        noted.append(_ReadNumber(Info.of(value).storage, number))


def watch(tensor: torch.Tensor) -> None:
    """Note that x.data, or an array, was taken of a tensor: torch counts no write to it."""
    noted: list[_ReadNumber] = _core.notes().get("read_numbers", [])
    memory = aliases.memory_of(tensor) if noted else None
    for one in noted:
        if memory is not None and one.memory == memory:
            one.watch()


def check(program: Program) -> None:
    """Raise if the backward of a program needs a value whose number the user has written: torch's
    RuntimeError after a write that torch counted, a StaleError after a write through .data."""
    noted: list[_ReadNumber] = _core.notes().get("read_numbers", [])
    if written := list(filter(_ReadNumber.is_written, noted)):
        storages = {one.storage for one in written if not one.is_counted()} | program.uncounted
        uncounted = overwritten.values_in(program, storages)
        everything = overwritten.values_in(program, {one.storage for one in written})
        overwritten.check_leaves(program, everything, uncounted)
        read = {value for node in program.nodes.values() for value in program.reads(node)}
        for value in sorted(read & uncounted & everything):
            if Info.of(value).result is not None:  # the program starts from the written number
                overwritten.refuse_uncounted(program, value)
