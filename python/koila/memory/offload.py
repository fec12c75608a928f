# SPDX-License-Identifier: Apache-2.0
"""Offload activations that bodies leave for each other: from the CPU's memory to a mapped file,
whose pages the system may write to disk; from a GPU to the host's memory."""

from __future__ import annotations

import functools
import os
import resource
import tempfile
from pathlib import Path

import torch

from koila.basics import rows

_MOUNTS = Path("/proc/self/mounts")
_IN_MEMORY = frozenset({"tmpfs", "ramfs"})


def is_worth_it(device: torch.device) -> bool:
    """Tell whether offloading saves memory of a device: from the CPU to a file it does not if the
    file system is in memory, nor under a limit of the address space, which counts mapped files."""
    if device.type != "cpu":
        return True
    has_limit = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    return not has_limit and _is_on_disk(tempfile.gettempdir())


@functools.cache
def _is_on_disk(name: str) -> bool:
    """Tell whether the file system of a folder is known, and not in memory."""
    try:
        folder = Path(name).resolve()
        mounts = [line.split()[1:3] for line in _MOUNTS.read_text().splitlines()]
    except OSError:
        return False
    around = [(len(at), kind) for at, kind in mounts if folder.is_relative_to(at)]
    return max(around, default=(0, ""))[1] not in _IN_MEMORY


def put(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to where it takes no memory of its device.

    The file is in `tempfile.gettempdir()` (TMPDIR) and is unlinked before this returns. Its room on
    the disk is allocated before anything is written, since a write to a mapping on a full disk ends
    the process.

    Returns:
        A dense tensor of the same numbers and dtype on the CPU, with the strides of empty_like().
        The copy of a tensor on a GPU may still be under way: pass it to `get` and nothing else.

    Raises:
        MemoryError: the disk is full, or there is no folder for it.

    Examples:
        >>> import torch
        >>> from koila.memory.offload import put
        >>> put(torch.ones(2, 3)).sum()
        tensor(6.)
    """
    tensor = tensor.detach()
    if tensor.device.type != "cpu":
        there = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
        # The copy may be asynchronous: only `get` reads it, and whatever frees or reads either
        # memory is ordered after it on the same stream.
        return there.copy_(tensor, non_blocking=True)
    strides = rows.strides_like(tensor.shape, tensor.stride())
    n_bytes = max(1, tensor.numel() * tensor.element_size())
    try:
        with tempfile.NamedTemporaryFile(prefix="koila-") as file:
            os.posix_fallocate(file.fileno(), 0, n_bytes)
            storage = torch.UntypedStorage.from_file(file.name, shared=True, nbytes=n_bytes)
    except (OSError, RuntimeError) as error:  # the latter is torch's, if it cannot map the file
        raise MemoryError(
            f"offload: no file of {n_bytes} bytes in {tempfile.gettempdir()} ({error}); set TMPDIR "
            "to a folder on a disk with more room"
        ) from error
    kept: torch.Tensor = torch.empty(0, dtype=tensor.dtype)
    return rows.set_memory(kept, storage, 0, tensor.shape, strides).copy_(tensor)


def get(kept: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return an offloaded tensor on its device again."""
    return kept if device.type == "cpu" else kept.to(device, non_blocking=True)
