# SPDX-License-Identifier: Apache-2.0
"""The bytes that torch's allocator hands out during a step, buffers inside kernels too."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.profiler import profile
from torch.profiler import record_function
from torch.utils._pytree import tree_leaves

from koila.memory import offload
from oracle import Lazy, Outcome, run
from profiled import noted
from programs_kit import Program

_MARK = "allocations: mark"
_LABEL = "allocations: label "
#: Before a file is mapped, which the profiler takes for memory; and when it is unmapped.
_MAPPED, _UNMAPPED = "allocations: mapped ", "allocations: unmapped "
#: Whether the profiler notes calls too: there are far more of them than of allocations.
_note_calls: Any = torch._C._autograd._enable_record_function


def _note(name: str) -> None:
    _note_calls(True)
    with record_function(name):
        pass
    _note_calls(False)


def _put(tensor: Tensor) -> Tensor:
    """What `offload.put` does, with a note of the file."""
    n_bytes = max(1, tensor.numel() * tensor.element_size())
    if tensor.device.type == "cpu":
        _note(f"{_MAPPED}{n_bytes}")
    kept = _put_unnoted(tensor)
    if tensor.device.type == "cpu":
        weakref.finalize(kept, _note, f"{_UNMAPPED}{n_bytes}")
    return kept


_put_unnoted = offload.put


class Allocations:
    """Bytes of all storages that are there before or made meanwhile: at marks, at most, at the end;
    and at most between a label and the next one.

    Files that koila maps are not among them.

    It is entered twice, for the two halves of a step; the numbers are there after the second.
    Meanwhile no garbage is collected: that of tests before would count as freed by this one.
    """

    def __init__(self) -> None:
        self.before: dict[int, int] = {}
        self.profile = profile(profile_memory=True)
        self.n_entered = 0
        self.at_marks: list[int] = []
        self.peaks: dict[str, int] = {}  # by label
        self.peak = 0
        self.left = 0

    def __enter__(self) -> Allocations:
        if self.n_entered == 0:
            gc.disable()
            offload.put = _put
            self.profile.__enter__()
            _note_calls(False)
        self.n_entered += 1
        return self

    def __exit__(self, *error: Any) -> None:
        if self.n_entered == 2 or error[0] is not None:
            _note_calls(True)
            offload.put = _put_unnoted
            self.profile.__exit__(None, None, None)
            gc.enable()
            self.add_up()

    def count(self, *objects: Any) -> None:
        """Take the storages of some tensors, made before."""
        for value in tree_leaves(objects):
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                self.before[storage._cdata] = storage.nbytes()

    def mark(self) -> None:
        """Remember how many bytes there are now."""
        _note(_MARK)

    def label(self, name: str) -> None:
        """From now on, take the peak for `name` too; "": for no label."""
        _note(_LABEL + name)

    def add_up(self) -> None:
        """Go through what was noted, in the order of time."""
        now = self.peak = sum(self.before.values())
        label = ""
        unmapped: list[int] = []  # files that are about to go
        for name, n_bytes in noted(self.profile):
            if name.startswith(_MAPPED):
                now -= int(name.removeprefix(_MAPPED))
            elif name.startswith(_UNMAPPED):
                unmapped.append(int(name.removeprefix(_UNMAPPED)))
            elif name == _MARK:
                self.at_marks.append(now)
            elif name.startswith(_LABEL):
                label = name.removeprefix(_LABEL)
            elif -n_bytes in unmapped:
                unmapped.remove(-n_bytes)
            else:
                now += n_bytes
                self.peak = max(self.peak, now)
            if label:
                self.peaks[label] = max(self.peaks.get(label, 0), now)
        self.left = now


def measure(
    program: Program, n_rows: int, lazy: Lazy, memory: Allocations | None = None, **options: Any
) -> tuple[Outcome, int]:
    """Run a step and return what can be seen, and the bytes it took at its peak."""
    memory = memory or Allocations()

    def count_model(model: nn.Module) -> None:
        memory.count(list(model.parameters()), list(model.buffers()))

    def count_batch(*batch: Any, **words: Any) -> Any:
        memory.count(batch)
        return lazy(*batch, **words)

    outcome = run(
        program, n_rows, count_batch, change=count_model, watch=(memory, memory), **options
    )
    return outcome, memory.peak
