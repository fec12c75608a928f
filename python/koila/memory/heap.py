# SPDX-License-Identifier: Apache-2.0
"""Use freed memory again, and return to the system what malloc keeps of it, if a limit counts it.

glibc keeps freed memory on a heap for later blocks. The heap fragments, so its pages can be several
times the bytes in use. Taking new pages for each block instead can cost half of a step's time.

- A limit of the process (RLIMIT_DATA, RLIMIT_AS) counts the heap whole. Under one, large blocks are
  returned as soon as they are freed (`fix_malloc`).
- Otherwise tensors take the memory of freed ones of the same size (`reuse_freed`): then the heap is
  not much larger than the tensors.
- `config(memory_limit=)` counts resident pages. Under it, the heap keeps what is freed until the
  process comes near the limit (`Bounded`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from koila import _core
from koila.memory import resident

#: Freed blocks of at least this size are returned to the system at once; None: malloc decides.
_threshold: int | None = None
#: Freed blocks below the threshold stay on the heap, where they leave holes of about their size.
#: The threshold is a share of the memory that the process may still take, between two bounds: at
#: the lower bound each call pays for new pages, at the upper one almost none does.
_BLOCK_SHARE, _LEAST_BLOCK, _MOST_BLOCK = 1 / 256, 2**16, 2**22
#: A value that is kept for each chunk may leave as many holes as there are chunks. The threshold is
#: lowered until the holes of one value take this share of the memory, but not below this size.
_HOLES_SHARE, _LEAST_HOLE = 1 / 32, 2**14
_least_left = math.inf  # the least that a limit left when the threshold was set


def _set_malloc(block: int, end: int) -> bool:
    """Let glibc return what is free now to the system, then freed blocks of `block` bytes and more,
    and the free end of its heap once it has `end` bytes. Return whether it does."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda option, value: 0)
    # M_MMAP_THRESHOLD and M_TRIM_THRESHOLD, which glibc raises when a large block is freed, and
    # M_MMAP_MAX: Linux allows a process some 65,000 mappings.
    options = ((-3, block), (-1, end), (-4, 2**14))
    is_set = all(mallopt(option, value) for option, value in options)
    _core.return_free()
    return is_set


def fix_malloc(left: float) -> None:
    """Make malloc return large freed blocks to the system at once. The more bytes a limit leaves
    (`left`), the larger the blocks that malloc may keep."""
    global _least_left
    _least_left = min(_least_left, left)
    _fix_threshold(int(min(max(_BLOCK_SHARE * left, _LEAST_BLOCK), _MOST_BLOCK)))


def fix_malloc_for(n_chunks: int) -> None:
    """Make malloc return smaller blocks too, before a step in many chunks under a limit of the
    process: its tensors are small, and many are kept between others that are freed."""
    if _threshold is not None:
        _fix_threshold(int(max(_HOLES_SHARE * _least_left / n_chunks, _LEAST_HOLE)))


def _fix_threshold(size: int) -> None:
    """Make malloc return freed blocks of `size` bytes, unless it returns smaller ones already."""
    global _threshold
    if _threshold is None or size < _threshold:
        _threshold = size
        _set_malloc(size, size)


@functools.cache
def _reuse_freed() -> None:
    for library in ("libc10.so", "libtorch_cpu.so"):  # tensors; what oneDNN takes for a call
        _core.reuse_freed(library)


def reuse_freed() -> None:
    """Let tensors take the memory of freed ones of the same size, unless large blocks are returned.

    Otherwise glibc leaves holes, and a step that allocates the same sizes for each chunk can take
    twice what its tensors take.
    """
    if _threshold is None:
        _reuse_freed()


#: A step may take this share of its limit and this many bytes beyond it before free pages are
#: returned, less what libraries have taken since the first limit: 16 MiB may go for both.
_SHARE, _MARGIN = 0.03, 10 * 2**20
#: Libraries take memory in a process's first steps, and when a step brings new calls. So what the
#: process takes beside tensors is measured anew at the start of this many steps, after a step in
#: which pages were returned this often, and if steps without a limit left more free pages than the
#: next one may take.
_FIRST_STEPS, _OFTEN = 3, 8
#: Blocks up to the largest size that glibc allows are kept, and the end of its heap however large.
_MOST_KEPT, _ANY_END = 2**25, 2**31 - 1

_beside: int | None = None  # the resident bytes of the process that are in no tensor
_at_first = 0  # what they were when they were first measured
_n_to_measure = _FIRST_STEPS  # how many of the next steps measure them anew


def _bound(limit: int) -> int:
    """Return the bytes that may be resident under a limit of all tensors."""
    assert _beside is not None
    margin = _SHARE * limit + _MARGIN - max(0, _beside - _at_first)
    return _beside + limit + max(0, int(margin))


class Bounded(resident.Peak):
    """Keeps the resident memory of a step near `config(memory_limit=)`, and measures its peak
    beyond what was there without free pages.

    Args:
        limit: the bytes of all tensors that the user allows.
        taken: the bytes that existing tensors take of these.
        now: the bytes that are resident now.
    """

    def __init__(self, limit: int, taken: int, now: int) -> None:
        global _beside, _at_first, _n_to_measure
        beside = now - taken
        reuse_freed()
        if _beside is None and _threshold is None:
            _set_malloc(_MOST_KEPT, _ANY_END)
        if _beside is None or _n_to_measure > 0 or now > _bound(limit):
            _n_to_measure = max(0, _n_to_measure - 1)
            _core.return_free()
            beside = (resident.n_bytes() or now) - taken
            _at_first = beside if _beside is None else _at_first
            _beside = beside
        _beside = min(_beside, beside)
        super().__init__(start=_beside + taken, bound=_bound(limit))

    def stop(self) -> int | None:
        global _n_to_measure
        found = super().stop()
        if self.n_returns >= _OFTEN:
            _n_to_measure = max(_n_to_measure, 1)
        return found


@functools.cache
def _freeing_mkl() -> Callable[[], Any]:
    """Return the function of MKL that frees its buffers, as torch's library has it."""
    path = Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"
    with contextlib.suppress(OSError, AttributeError):  # torch was built without MKL
        free: Callable[[], Any] = ctypes.CDLL(str(path)).mkl_serv_free_buffers
        return free
    return lambda: None


def free_of_mkl() -> None:
    """Free the buffers that MKL keeps for its next products. On some CPUs these are many MiB, which
    count against a limit of the process."""
    _freeing_mkl()()
