# SPDX-License-Identifier: Apache-2.0
"""Another home for what crosses from body to body: on the CPU a mapped file, whose pages the system
may write out and take back; for a GPU the host's memory."""

from __future__ import annotations

import os
import resource
import tempfile
from pathlib import Path

import torch

from koila.basics import rows

_MOUNTS = Path("/proc/self/mounts")
_IN_MEMORY = frozenset({"tmpfs", "ramfs"})


def is_worth_it() -> bool:
    """Whether files take none of the memory that is short: not in a file system that is in memory,
    nor under a limit of the address space, which counts them."""
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        return False
    try:
        folder = Path(tempfile.gettempdir()).resolve()
        mounts = [line.split()[1:3] for line in _MOUNTS.read_text().splitlines()]
    except OSError:
        return False
    around = [(len(at), kind) for at, kind in mounts if folder.is_relative_to(at)]
    return max(around, default=(0, ""))[1] not in _IN_MEMORY


def put(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to where it takes none of its device's memory.

    The file is in `tempfile.gettempdir()` (TMPDIR), has no name any more when this returns, and its
    room on the disk is taken before anything is written: a full disk must not end the process.

    Returns:
        A tensor of the same numbers, dtype and strides, on the CPU.

    Raises:
        MemoryError: the disk is full, or there is no folder for it.

    Example:
        >>> import torch
        >>> from koila.memory.offload import put
        >>> put(torch.ones(2, 3)).sum()
        tensor(6.)
    """
    tensor = tensor.detach()
    if tensor.device.type != "cpu":
        there = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
        # Nobody waits for the copy: whatever frees or reads either memory later comes after it, on
        # the same stream; and only `get` reads it.
        return there.copy_(tensor, non_blocking=True)
    strides = rows.strides_like(tensor.shape, tensor.stride())
    n_bytes = max(1, tensor.numel() * tensor.element_size())
    try:
        with tempfile.NamedTemporaryFile(prefix="koila-") as file:
            os.posix_fallocate(file.fileno(), 0, n_bytes)
            storage = torch.UntypedStorage.from_file(file.name, shared=True, nbytes=n_bytes)
    except (OSError, RuntimeError) as error:  # torch's own where it cannot be mapped
        raise MemoryError(
            f"offload: no file of {n_bytes} bytes in {tempfile.gettempdir()} ({error}); set TMPDIR "
            "to a folder on a disk with more room"
        ) from error
    kept: torch.Tensor = torch.empty(0, dtype=tensor.dtype)
    kept.set_(storage, 0, tensor.shape, strides)  # type: ignore[arg-type]  # it is an UntypedStorage
    return kept.copy_(tensor)


def get(kept: torch.Tensor, device: torch.device) -> torch.Tensor:
    """What was put there, on its device again."""
    return kept if device.type == "cpu" else kept.to(device, non_blocking=True)
