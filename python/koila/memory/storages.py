# SPDX-License-Identifier: Apache-2.0
"""Count the bytes of all tensors on the CPU, whoever holds them.

torch's CPU allocator keeps no count, but the garbage collector knows every tensor that has a Python
object. A walk over all its objects finds the existing tensors. From then on new ones are noted
while they are in its youngest generation (py_storage.c), and occasional walks find old tensors
whose storage or gradient was replaced. Storages are held by weak references, so a freed one stops
counting at once.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import time
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from koila import _core

#: The most of the time that walks may take.
SHARE = 1 / 200
#: With more young objects than this (garbage is collected seldom), they are looked at less often.
_N_YOUNG = 20_000
_MAPS = Path("/proc/self/maps")
#: Paths of mappings that are memory and no file on a disk.
_NO_FILES = ("/dev/shm/", "/dev/zero", "/memfd:", "/SYSV", "/anon_hugepage")

_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def _parts_of(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that make up sparse tensors, and sparse gradients of tensors. Subclasses
    with a __torch_dispatch__ are skipped: the tensors that they hold are found anyway."""
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


def check_layout() -> None:
    """Raise an ImportError if the core does not find the storages of tensors, and their gradients,
    where this torch has them."""
    read = _core.storage_fields
    with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes():
        kind: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
        x, grad = torch.empty(3, 5, **kind), torch.ones(2, **kind)
        leaf = torch.ones(2, requires_grad=True, **kind)
        leaf.grad = grad
        key = x.untyped_storage()._cdata
        n_before = read(x)[3]
        view = x.view(-1)
        is_right = (
            read(view) == (key, x.data_ptr(), 60, n_before + 1, True, 0)
            and read(leaf)[5] == grad._cdata
            and read(torch.empty(2, device="meta"))[2] == 0
            and not read(torch.frombuffer(bytearray(8), dtype=torch.uint8))[4]
            and read(torch.empty((2, 2), layout=torch.sparse_coo, **kind))[0] == 0
        )
    if not is_right:
        raise ImportError("storages as koila reads them", name="torch._C")


class Clock:
    """Limits the share of the time that something repeated takes; used as a context around it."""

    def __init__(self) -> None:
        self.at = self.seconds = 0.0

    def is_due(self) -> bool:
        """Tell whether it may be done again within SHARE of the time."""
        return time.monotonic() - self.at >= self.seconds / SHARE

    def __enter__(self) -> None:
        self.at = time.monotonic()

    def __exit__(self, *error: object) -> None:
        now = time.monotonic()
        self.at, self.seconds = now, now - self.at


_walked, _looked, _collected = Clock(), Clock(), Clock()
#: By id, the leaves of programs that were planned.
_leaves: dict[int, weakref.ref[torch.Tensor]] = {}
#: By DistributedDataParallel module, the bytes of the buckets into which torch copies gradients:
#: no Python object holds them.
_buckets: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def _is_listening() -> bool:
    return _core.collecting_garbage in gc.callbacks


def walk() -> None:
    """Find all tensors among all objects of the garbage collector."""
    with _walked:
        if not _is_listening():
            gc.callbacks.append(_core.collecting_garbage)
        _core.follow_storages(_parts_of)
        _core.note_storages(gc.get_objects())


def _is_plain(found: object) -> bool:
    """Tell whether an object is a tensor with memory of its own."""
    kind = type(found)  # not its __class__, which may be a property with side effects
    return issubclass(kind, torch.Tensor) and kind is not _core.LazyTensor


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return the storage of a tensor; None: it has no memory of its own."""
    try:
        storage = tensor.untyped_storage()
        return storage if storage.data_ptr() != 0 else None
    except (RuntimeError, NotImplementedError):  # a sparse, opaque or fake tensor
        return None


def largest_beside(held: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor | None:
    """Return the tensor with most memory on a device that shares none with `held`; None: there is
    none. It looks through all objects."""
    best, most = None, 0
    with torch._C.DisableTorchFunction():
        held_storages = {
            storage._cdata for storage in map(_storage_of, held) if storage is not None
        }
        for found in filter(_is_plain, gc.get_objects()):
            storage = _storage_of(found) if found.device == device else None
            is_other = storage is not None and storage._cdata not in held_storages
            if storage is not None and is_other and storage.nbytes() > most:
                best, most = found, storage.nbytes()
    return best


def _look() -> None:
    """Note the tensors that are new since the last time, or walk over all if that is due."""
    is_followed = _core.is_following_storages() and _is_listening()
    if _walked.is_due() or not is_followed:
        walk()
    elif gc.get_count()[0] < _N_YOUNG or _looked.is_due():
        with _looked:
            _core.note_storages(gc.get_objects(generation=0))


def n_bytes(held: list[torch.Tensor]) -> int:
    """Return the bytes of all tensors on the CPU, `held` included."""
    _look()
    _core.note_storages(held + [ref() for ref in list(_leaves.values())])
    _core.settle_storages(_is_in_file)
    return _core.storage_bytes() + (_in_buckets() if len(_buckets) else 0)


def note_buckets(module: Any) -> None:
    """From now on, count the buckets of a DistributedDataParallel module while it exists."""
    parameters = (one for one in module._module_parameters if one.device.type == "cpu")
    _buckets[module] = sum(one.nbytes for one in parameters)


def _in_buckets() -> int:
    """Return the bytes of buckets, without those of which gradients are views."""
    return sum(
        n_bytes
        for module, n_bytes in list(_buckets.items())
        if not module.gradient_as_bucket_view
        or all(one.grad is None for one in module._module_parameters)
    )


def note_leaves(leaves: Iterable[torch.Tensor]) -> None:
    """From now on, count the gradients of leaves while these exist: nobody may have made Python
    objects of them."""
    for leaf in leaves:
        if id(leaf) not in _leaves:
            key = id(leaf)
            _leaves[key] = weakref.ref(leaf, functools.partial(_leaves.pop, key))


def look_again(is_final: bool) -> bool:
    """Collect garbage and walk over all objects, before a program is refused for lack of memory; if
    that is not final, only once in a while. Return whether it was done."""
    if not is_final and not _collected.is_due():
        return False
    with _collected:
        gc.collect()
        walk()
    return True


def _is_in_file(address: int) -> bool:
    """Tell whether an address is in a mapped file: the system can drop its pages."""
    return any(start <= address < end for start, end in _mapped_files())


def _mapped_files() -> Iterable[tuple[int, int]]:
    """Yield the address ranges at which files are mapped."""
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
    """Wrap a block that needs the bytes once: new tensors are not noted after it, unless they were
    before it."""
    was_listening = _is_listening()
    try:
        yield
    finally:
        if not was_listening:
            forget()


def forget() -> None:
    """Stop noting new tensors, and forget all."""
    if _is_listening():
        gc.callbacks.remove(_core.collecting_garbage)
    _core.follow_storages(None)
    _leaves.clear()


atexit.register(forget)
