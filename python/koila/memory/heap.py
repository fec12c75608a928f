# SPDX-License-Identifier: Apache-2.0
"""Return to the system what malloc keeps of freed memory, if a limit counts it.

glibc keeps freed memory on a heap for later blocks. The heap fragments, so its pages can be several
times the bytes in use. Taking new pages for each block instead can cost half of a step's time.

- A limit of the process (RLIMIT_DATA, RLIMIT_AS) counts the heap whole. Under one, large blocks are
  returned as soon as they are freed (`fix_malloc`).
- `config(memory_limit=)` counts resident pages. Under it, the heap keeps what is freed until the
  process comes near the limit (`Ceiling`): later blocks then use the same pages again.
"""

from __future__ import annotations

import time

from koila import _core
from koila.memory import resident

#: Freed blocks of at least this size are returned to the system at once; None: malloc decides.
_threshold: int | None = None
#: Freed blocks below the threshold stay on the heap, where they leave holes of about their size.
#: The threshold is a share of the memory that the process may still take, between two bounds: at
#: the lower bound each call pays for new pages, at the upper one almost none does.
_BLOCK_SHARE, _LEAST_BLOCK, _MOST_BLOCK = 1 / 256, 2**16, 2**22


def fix_malloc(left: float = 0.0) -> None:
    """Make malloc return large freed blocks to the system at once, unless it returns smaller ones
    already.

    Args:
        left: the bytes that a limit leaves; the more, the larger the blocks that malloc may keep.
    """
    global _threshold
    size = int(min(max(_BLOCK_SHARE * left, _LEAST_BLOCK), _MOST_BLOCK))
    if _threshold is None or size < _threshold:
        _threshold = size
        _core.fix_malloc(size)


def return_free() -> None:
    """Return the free pages of malloc's heap to the system."""
    _core.fix_malloc(0)


#: A step may take this many bytes beyond its limit before free pages are returned, less what
#: libraries have taken since the first limit: a process may take 16 MiB for both.
_MARGIN = 8 * 2**20
#: Free pages are returned again once this many more bytes are resident: what was left is in use.
_MORE_RESIDENT = 2**21
#: Libraries take memory in a process's first steps, and when a step brings new calls. So what the
#: process takes beside tensors is measured anew at the start of this many steps, and after a step
#: in which pages were returned this often.
_FIRST_STEPS, _OFTEN = 3, 8
#: The longest time between two samples is shortened by this factor at each sample.
_REMEMBERED = 0.9

_beside: int | None = None  # the resident bytes of the process that are in no tensor
_at_first = 0  # what they were when they were first measured
_n_to_measure = _FIRST_STEPS  # how many of the next steps measure them anew


class Ceiling:
    """Keeps the resident memory of one step near `config(memory_limit=)`.

    `sampled` is called with samples of the resident memory, from any thread.

    Args:
        limit: the bytes of all tensors that the user allows.
        taken: the bytes that existing tensors take of these.
        now: the bytes that are resident now.
    """

    def __init__(self, limit: int, taken: int, now: int) -> None:
        global _beside, _at_first, _n_to_measure
        if _beside is None or _n_to_measure > 0:
            _n_to_measure -= 1
            return_free()
            now = resident.n_bytes() or now
            _at_first = _at_first if _beside is not None else now - taken
            _beside = now - taken
        _beside = min(_beside, now - taken)
        margin = max(0, _MARGIN - max(0, _beside - _at_first))
        self.start = _beside + taken  #: the bytes that were resident before, without free pages
        self._bound = _beside + limit + margin
        self._last = self._returned = now
        self._at, self._longest = time.monotonic(), 0.0
        self._n_returns = 0

    def sampled(self, now: int) -> bool:
        """Return free pages to the system if `now` bytes are resident and too many would be at the
        next sample, should that come as late as any lately, and pages as fast as since the last.

        Returns:
            Whether that is near, so that the next sample should come soon.
        """
        global _n_to_measure
        at, grown = time.monotonic(), max(0, now - self._last)
        passed = max(at - self._at, 1e-3)
        self._at, self._last = at, now
        self._longest = max(passed, _REMEMBERED * self._longest)
        coming = grown * self._longest / passed
        self._returned = min(self._returned, now)
        if now + coming <= self._bound or now <= self._returned + _MORE_RESIDENT:
            return now + 2 * coming > self._bound
        return_free()
        self._last = self._returned = resident.n_bytes() or now
        self._n_returns += 1
        if self._n_returns == _OFTEN:
            _n_to_measure = max(_n_to_measure, 1)
        return True
