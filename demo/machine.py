# SPDX-License-Identifier: Apache-2.0
"""A machine with less memory than this one has, and how much of it a run used at most.

On the CPU the limit is the operating system's (RLIMIT_DATA), for private memory beyond what the
interpreter and torch hold already, and the peak is the most that the kernel counted against it
(VmData) beyond the same point: one number, limited and measured. It is of this process alone. Pages
of libraries, which processes share and a first step touches, are in neither. A thread reads it
every other millisecond. On CUDA the limit is torch's set_per_process_memory_fraction, and the peak
the most bytes that tensors held at one time.
"""

from __future__ import annotations

import resource
import threading
import time
from pathlib import Path

import torch

from model import GPT

_STATUS = Path("/proc/self/status")
_SECONDS = 0.002
# A thread's stack counts as private memory; this one needs little.
_STACK = 2**18


def _bytes_private() -> int:
    """What the kernel holds RLIMIT_DATA against."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{_STATUS} has no VmData")


def _warm_up(device: str) -> None:
    """One step of a small model: threads, libraries and their buffers are then there for good."""
    model = GPT(16, length=64, n_blocks=1).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    chars = torch.zeros(4, 64, dtype=torch.long, device=device)
    model.loss(chars, chars).backward()
    optimizer.step()


class Machine:
    """The memory of `device` from here on: `bytes_limit` for all there is to come, or no limit."""

    def __init__(self, device: str, bytes_limit: int | None) -> None:
        _warm_up(device)
        self._is_cuda = torch.device(device).type == "cuda"
        if self._is_cuda:
            if torch.device(device).index is not None:
                torch.cuda.set_device(device)  # what is asked of torch.cuda below is asked of this
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            if bytes_limit is not None:
                total = torch.cuda.get_device_properties(device).total_memory
                torch.cuda.set_per_process_memory_fraction(bytes_limit / total)
            return
        self._bytes_most = 0
        threading.stack_size(_STACK)
        threading.Thread(target=self._watch, daemon=True).start()
        threading.stack_size(0)
        self._bytes_before = self._bytes_most = _bytes_private()
        if bytes_limit is not None:
            limit = self._bytes_before + bytes_limit
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    def _watch(self) -> None:
        while True:
            self._bytes_most = max(self._bytes_most, _bytes_private())
            time.sleep(_SECONDS)

    def bytes_peak(self) -> int:
        """The most bytes in use at one time since the machine was made."""
        if self._is_cuda:
            return torch.cuda.max_memory_allocated()
        return self._bytes_most - self._bytes_before
