"""Another home for what crosses from body to body: on the CPU a mapped file, whose pages the system
may write out and take back; for a GPU the host's memory."""

from __future__ import annotations

import os
import tempfile

import torch


def put(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to where it takes none of its device's memory.

    The file is in `tempfile.gettempdir()` (TMPDIR), has no name any more when this returns, and its
    room on the disk is taken before anything is written: a full disk must not end the process.

    Returns:
        A tensor of the same numbers, dtype and strides, on the CPU.

    Raises:
        MemoryError: the disk is full.

    Example:
        >>> import torch
        >>> from koila.offload import put
        >>> put(torch.ones(2, 3)).sum()
        tensor(6.)
    """
    tensor = tensor.detach()
    if tensor.device.type != "cpu":
        there = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
        return there.copy_(tensor)
    strides = torch.empty_like(tensor, device="meta").stride()
    n_bytes = max(1, tensor.numel() * tensor.element_size())
    with tempfile.NamedTemporaryFile(prefix="koila-") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, n_bytes)
        except OSError as error:
            raise MemoryError(
                f"offload: no room for {n_bytes} bytes in {tempfile.gettempdir()} "
                f"({error.strerror}); set TMPDIR to a folder on a larger disk"
            ) from error
        storage = torch.UntypedStorage.from_file(file.name, shared=True, nbytes=n_bytes)
    kept: torch.Tensor = torch.empty(0, dtype=tensor.dtype)
    kept.set_(storage, 0, tensor.shape, strides)  # type: ignore[arg-type]  # it is an UntypedStorage
    return kept.copy_(tensor)


def get(kept: torch.Tensor, device: torch.device) -> torch.Tensor:
    """What was put there, on its device again."""
    return kept if device.type == "cpu" else kept.to(device, non_blocking=True)
