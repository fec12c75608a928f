# SPDX-License-Identifier: Apache-2.0
"""Accelerators: which one a call names, and waiting for its results."""

from __future__ import annotations

from collections.abc import Callable

import torch


def meant(name: torch.device | str) -> torch.device | None:
    """Return the device that an argument names; "cuda" names the current GPU. None: there is no
    such device, for which torch raises its own error."""
    try:
        device = torch.device(name)
    except RuntimeError:
        return None
    if device.type in ("cpu", "meta"):
        return torch.device(device.type)
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.device("cuda", index) if index < torch.cuda.device_count() else None


def is_capturing() -> bool:
    """Tell whether the current CUDA stream is captured into a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


_WAITS: dict[str, Callable[[torch.device], None]] = {
    "cuda": lambda device: torch.cuda.current_stream(device).synchronize()
}


def wait_for_copy(device: torch.device) -> None:
    """Wait for a copy from an accelerator to the CPU.

    After a non-blocking copy a script synchronizes before it reads the result. A recorded copy runs
    after that, so koila has to wait itself.
    """
    wait = _WAITS.get(device.type)
    if wait is not None:
        wait(device)
