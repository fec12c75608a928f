# SPDX-License-Identifier: Apache-2.0
"""The bytes that all tensors on the CPU take, also those that no program and no optimizer holds.

torch's CPU allocator counts nothing, but the garbage collector knows every tensor that Python has
seen. A walk over all its objects finds those that are there; from then on new ones are noted while
they are young (py_storage.c), and a walk every now and then finds old tensors that were given other
memory, or a gradient. What was found is held by weak references, so that what is freed stops
counting at once.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from koila import _core

#: A walk took so much of the time since the one before it, at most.
SHARE = 1 / 200
#: The young are more only where garbage is seldom collected; then looking at them takes time.
_N_YOUNG = 20_000
_MAPS = Path("/proc/self/maps")
#: Mapped memory that is no file's.
_NO_FILES = ("/dev/shm/", "/dev/zero", "/memfd:", "/SYSV", "/anon_hugepage")

_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def _parts_of(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors of which those are made up that have no storage: their own, or their gradient's.

    Subclasses that answer for themselves hold tensors that are found by themselves.
    """
    found = []
    disabled = torch._C._disabled_torch_dispatch_impl
    with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes():
        for tensor in tensors:
            if type(tensor).__torch_dispatch__ is not disabled:
                continue
            for one in (tensor, tensor.grad if tensor.is_leaf else None):
                names = _PARTS.get(one.layout, ()) if one is not None else ()
                found += [getattr(torch.Tensor, name)(one) for name in names]
    return found


class Clock:
    """When something was done last, and how long that took."""

    def __init__(self) -> None:
        self.at = self.seconds = 0.0

    def is_due(self) -> bool:
        return time.monotonic() - self.at >= self.seconds / SHARE

    def __enter__(self) -> None:
        self.at = time.monotonic()

    def __exit__(self, *error: object) -> None:
        now = time.monotonic()
        self.at, self.seconds = now, now - self.at


_walked, _looked, _collected = Clock(), Clock(), Clock()
#: What a walk found, where this torch's storages cannot be read: bytes by storage.
_found: dict[int, int] = {}


def _is_listening() -> bool:
    return _core.collecting_garbage in gc.callbacks


def walk() -> None:
    """Look at all objects there are."""
    with _walked:
        if not _core.sees_storages():
            _found.clear()
            _found.update(_sizes(o for o in gc.get_objects() if _is_plain(o)))
            return
        if not _is_listening():
            gc.callbacks.append(_core.collecting_garbage)
        _core.follow_storages(_parts_of)
        _core.note_storages(gc.get_objects())


def _is_plain(found: object) -> bool:
    """Whether an object is a tensor with memory of its own."""
    kind = type(found)  # and not its __class__, which may be a property that does something
    return issubclass(kind, torch.Tensor) and kind is not _core.LazyTensor


def _sizes(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Bytes of storages on the CPU, by storage."""
    sizes = {}
    with torch._C.DisableTorchFunction():
        for tensor in tensors:
            try:
                storage = tensor.untyped_storage()
                if storage.device.type == "cpu" and storage.data_ptr() != 0:
                    sizes[storage._cdata] = storage.nbytes()
            except (RuntimeError, NotImplementedError):
                pass  # sparse, opaque, or fake: it has none
    return sizes


def _look() -> None:
    """Look at what may be new since the last time, or at all there is."""
    is_followed = _core.is_following_storages() and _is_listening()
    if _walked.is_due() or (not is_followed and _core.sees_storages()):
        walk()
    elif _core.sees_storages() and (gc.get_count()[0] < _N_YOUNG or _looked.is_due()):
        with _looked:
            _core.note_young_storages()


def n_bytes(held: list[torch.Tensor]) -> int:
    """Bytes that tensors on the CPU take; those of `held` are among them, wherever they are."""
    _look()
    if not _core.sees_storages():
        return sum((_found | _sizes(held)).values())
    _core.note_storages(held)
    _settle()
    return _core.storage_bytes()


def look_again(is_final: bool) -> bool:
    """Something is about to be refused: first let go of what is garbage, and look at all there is.

    Where the refusal is not final, only once in a while. Returns whether it was done.
    """
    if not is_final and not _collected.is_due():
        return False
    with _collected:
        gc.collect()
        walk()
    return True


def _settle() -> None:
    """Find out of large storages whether they are mapped files: what is read of these the system
    can drop again, so they do not count."""
    unsettled = _core.unsettled_storages()
    if not unsettled:
        return
    files = list(_mapped_files())
    for key, address in unsettled:
        _core.settle_storage(key, any(start <= address < end for start, end in files))


def _mapped_files() -> Iterable[tuple[int, int]]:
    """Where files are mapped: first and last address."""
    try:
        lines = _MAPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        bounds, _, _, _, _, *path = line.split(maxsplit=5)
        if path and path[0].startswith("/") and not path[0].startswith(_NO_FILES):
            start, _, end = bounds.partition("-")
            yield int(start, 16), int(end, 16)


@contextlib.contextmanager
def for_once() -> Iterator[None]:
    """A block that asks for a number of bytes where nobody else does: nothing is followed after."""
    was_listening = _is_listening()
    try:
        yield
    finally:
        if not was_listening:
            forget()


def forget() -> None:
    """Stop looking, and let go of all that was found."""
    if _is_listening():
        gc.callbacks.remove(_core.collecting_garbage)
    _core.follow_storages(None)


atexit.register(forget)
