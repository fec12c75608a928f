"""A machine with less memory than this one has, and how much of it a run used at most.

On the CPU the limit is the operating system's (RLIMIT_DATA): memory for tensors beyond what the
interpreter and torch hold already. The peak is the kernel's own high-water mark of resident memory
(VmHWM) beyond the same point, so both count the same thing. On CUDA the limit is torch's
set_per_process_memory_fraction, and the peak the most bytes that tensors held at one time.
"""

from __future__ import annotations

import resource
from pathlib import Path

import torch

from model import GPT

_STATUS = Path("/proc/self/status")
_CLEAR_PEAK = Path("/proc/self/clear_refs"), "5"

# What a process needs besides tensors once it is warm: autograd's nodes, Python objects, buffers.
_BYTES_SPARE = 16 * 2**20


def _status(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{_STATUS} has no {field}")


def _warm_up(device: str) -> None:
    """One step of a small model: threads, libraries and their buffers are then there for good."""
    model = GPT(16, length=64, n_blocks=1).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    chars = torch.zeros(4, 64, dtype=torch.long, device=device)
    model.loss(chars, chars).backward()
    optimizer.step()


class Machine:
    """The memory of `device` from here on: `bytes_limit` for tensors, or all there is."""

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
        path, command = _CLEAR_PEAK
        path.write_text(command)
        self._bytes_before = _status("VmRSS")
        if bytes_limit is not None:
            limit = _status("VmData") + bytes_limit + _BYTES_SPARE
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    def bytes_peak(self) -> int:
        """The most bytes in use at one time since the machine was made."""
        if self._is_cuda:
            return torch.cuda.max_memory_allocated()
        return _status("VmHWM") - self._bytes_before
