# SPDX-License-Identifier: Apache-2.0
"""Measure the resident private memory of this process, as the kernel counts it.

Pages of mapped files do not count: libraries touch more of theirs in every first step, and the
system can drop them again. Without /proc (not on Linux), nothing is measured.
"""

from __future__ import annotations

from koila import _core

#: A bound that no process comes near.
_NO_BOUND = 2**62


def n_bytes() -> int | None:
    """Return the bytes of private memory that are resident now; None: the kernel does not say."""
    found = _core.resident()
    return found if found >= 0 else None


class Peak:
    """Measures the peak of resident private memory between its creation and `stop`.

    A thread samples every few milliseconds; a peak between two samples is missed. Peaks that are
    measured at the same time, by several threads, count from the first start.

    Args:
        start: the bytes from which the peak is measured; None: those that are resident now.
        bound: the resident bytes that the process should not exceed: near it, what malloc keeps of
            freed memory is returned to the system.
    """

    _is_watching = False

    def __init__(self, start: int | None = None, bound: int = _NO_BOUND) -> None:
        self._start = n_bytes() if start is None else start
        self.n_returns = 0  #: how often freed memory was returned
        self._is_watching = _core.watch_resident(bound)

    def stop(self) -> int | None:
        """Stop measuring, and return the peak bytes beyond those at the start; None: the kernel
        does not say."""
        is_watching, self._is_watching = self._is_watching, False
        if not is_watching:
            return None
        most, self.n_returns = _core.stop_resident()
        return None if self._start is None else most - self._start

    __del__ = stop  # an exception may come between
