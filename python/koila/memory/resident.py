# SPDX-License-Identifier: Apache-2.0
"""Measure the resident private memory of this process, as the kernel counts it.

Pages of mapped files do not count: libraries touch more of theirs in every first step, and the
system can drop them again. Without /proc (not on Linux), nothing is measured.
"""

from __future__ import annotations

import os
import threading

_PAGE = os.sysconf("SC_PAGE_SIZE")
#: Seconds between two samples, at first and at most. Each sample holds the interpreter's lock for
#: some 100 microseconds, so the interval grows during long steps.
INTERVAL, LONGEST_INTERVAL = 0.004, 0.016
#: The stack of the sampling thread in bytes: the usual 8 MiB would count against a limit.
_STACK = 2**18
_starting = threading.Lock()


def _open(name: str) -> int | None:
    try:
        return os.open(f"/proc/self/{name}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


def _anonymous(statm: int) -> int:
    """Return the bytes of resident private memory: all but file-backed and shared pages."""
    _, resident, shared, *_ = os.pread(statm, 128, 0).split()
    return (int(resident) - int(shared)) * _PAGE


def n_bytes() -> int | None:
    """Return the bytes of private memory that are resident now; None: the kernel does not say."""
    statm = _open("statm")
    if statm is None:
        return None
    try:
        return _anonymous(statm)
    finally:
        os.close(statm)


class Peak:
    """Measures the peak of resident private memory between its creation and `stop`.

    A thread samples every few milliseconds; a peak between two samples is missed.
    """

    def __init__(self) -> None:
        self._running = threading.Lock()  # held until stop(); waiting for it is the thread's sleep
        self._statm = _open("statm")
        self.at_end = 0  # bytes that were resident when it ended
        self._thread: threading.Thread | None = None
        if self._statm is None:
            return
        self._before = self._most = _anonymous(self._statm)
        self._running.acquire()
        thread = threading.Thread(target=self._look, name="koila: resident memory", daemon=True)
        with _starting:
            size = threading.stack_size(_STACK)
            try:
                thread.start()
                self._thread = thread
            except RuntimeError:
                pass  # no thread could be started: only the start and the end are measured
            finally:
                threading.stack_size(size)

    def _look(self) -> None:
        assert self._statm is not None
        interval = INTERVAL
        while not self._running.acquire(timeout=interval):
            self._most = max(self._most, _anonymous(self._statm))
            interval = min(1.25 * interval, LONGEST_INTERVAL)

    def stop(self) -> int | None:
        """Stop measuring, and return the peak bytes beyond those at the start; None: the kernel
        does not say."""
        if self._statm is None:
            return None
        self._running.release()
        if self._thread is not None:
            self._thread.join()
        self.at_end = _anonymous(self._statm)
        os.close(self._statm)
        self._statm = None
        return max(self._most, self.at_end) - self._before
