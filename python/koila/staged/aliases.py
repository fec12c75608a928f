# SPDX-License-Identifier: Apache-2.0
"""Note which tensors share memory but no version counter: `x` and `x.data`, `x` and `other` after
`x.data = other`, and `x` and an array of NumPy.

A write to one of them does not change the version of the other. So a leaf whose memory such a
tensor shares is watched by a checksum from the moment a recorded call reads it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from koila import _core
from koila.staged import meta

#: By storage, the living tensors that share it without a version counter in common, by id: equal
#: weak references would compare the numbers of their tensors.
by_storage: dict[int, dict[int, weakref.ref[torch.Tensor]]] = {}

#: The storages among them that another library has too, which may write them at any time.
_foreign: set[int] = set()

#: How often a storage is held if one tensor has it: by that, and by the object that Python sees.
_ALONE = 2
_count: Any = torch._C._storage_Use_Count


def noted(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor; note, while it lives, that others of another version share its memory."""
    if tensor.layout is torch.strided and not torch.nn.parameter.is_lazy(tensor):
        key = tensor.untyped_storage()._cdata
        forget = functools.partial(_forget, key, id(tensor))
        by_storage.setdefault(key, {})[id(tensor)] = weakref.ref(tensor, forget)
    return tensor


def _forget(key: int, tensor: int, ref: weakref.ref[torch.Tensor]) -> None:
    left = by_storage.get(key, {})
    if left.get(tensor) is ref:
        del left[tensor]
        if not left:
            del by_storage[key]
            _foreign.discard(key)


def note_others(tensor: torch.Tensor) -> None:
    """Note whether a tensor that becomes lazy, or that a call reads, shares its memory with another
    library: a script may fill an array of NumPy again for the next batch. torch marks the storage
    of such a tensor, and of one that processes share, as one that cannot be resized.

    Parameters are left out: whole models are in memory of the library that loaded them, and to read
    all of it twice in each step would take too long."""
    is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    if is_plain and tensor.is_cpu and not tensor.is_nested:
        storage = tensor.untyped_storage()
        if not storage.resizable() and not storage.is_shared() and storage.nbytes():
            noted(tensor)
            _foreign.add(storage._cdata)


def memory_of(tensor: torch.Tensor) -> StorageWeakRef | None:
    """Return a weak reference to the memory of a tensor; None if it has none, as a sparse one."""
    # The parameters of modules such as nn.LazyLinear raise in their torch functions.
    with torch._C.DisableTorchFunctionSubclass():
        is_strided = tensor.layout is torch.strided
        try:
            return StorageWeakRef(tensor.untyped_storage()) if is_strided else None
        except (RuntimeError, NotImplementedError):
            return None  # an opaque or fake tensor has no storage


def is_shared(tensor: torch.Tensor) -> bool:
    """Return whether a write that does not change a tensor's version may change its numbers."""
    if not by_storage or tensor.layout is not torch.strided or tensor.device.type == "meta":
        return False
    key = tensor.untyped_storage()._cdata
    return key in by_storage and (key in _foreign or _count(key) > _ALONE)


def version_of(tensor: torch.Tensor) -> int | None:
    """Return the version counter of a tensor; None for an inference tensor."""
    with torch._C.DisableTorchFunctionSubclass():
        return None if tensor.is_inference() else tensor._version


class Kept:
    """A tensor that will be read again, and what tells whether it was written meanwhile. A write
    may leave the version of one that `is_watched` as it is."""

    __slots__ = ("__weakref__", "checksum", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, is_watched: bool) -> None:
        self.tensor = tensor
        self.version = version_of(tensor)
        self.checksum = meta.checksum(tensor) if is_watched else None

    def watch(self) -> None:
        """Note that x.data was taken of its memory: a write through it changes no version."""
        self.checksum = self.checksum or meta.checksum(self.tensor)

    def is_written(self) -> bool:
        """Return whether the tensor was written since."""
        is_same = version_of(self.tensor) == self.version
        is_watched = self.checksum is not None
        return not is_same or (is_watched and meta.checksum(self.tensor) != self.checksum)


def lose(leaves: Iterable[int]) -> None:
    """Note that leaves of this thread's tape no longer have the numbers that pending calls are to
    read: a backward through these raises."""
    _core.notes().setdefault("watched", {}).update(dict.fromkeys(leaves))


def note_leaf(value: int, tensor: torch.Tensor) -> None:
    """Watch a tensor that has just become leaf number `value` of this thread's tape, if its memory
    is shared. If it no longer is, forget that it was: `model.to(device)` replaces the `.data` of
    each parameter by that of a tensor that dies."""
    note_others(tensor)
    if is_shared(tensor):
        _core.notes().setdefault("watched", {}).setdefault(value, meta.checksum(tensor))
    elif tensor.layout is torch.strided and tensor.device.type != "meta":
        by_storage.pop(tensor.untyped_storage()._cdata, None)
