# SPDX-License-Identifier: Apache-2.0
"""The private memory that this process has resident, as the kernel counts it.

Pages of files do not count: libraries touch more of theirs in every first step, and the system can
drop them again. Where the kernel does not say (it is not Linux), nothing is measured.
"""

from __future__ import annotations

import os
import threading

_PAGE = os.sysconf("SC_PAGE_SIZE")
#: Seconds between two looks, at first and at most. Each takes the interpreter's lock from what it
#: looks at, some 100 microseconds: of a long step they are fewer.
INTERVAL, LONGEST_INTERVAL = 0.004, 0.016
#: What the sampling thread needs of a stack: the usual 8 MiB would count against a limit.
_STACK = 2**18
_starting = threading.Lock()


def _open(name: str) -> int | None:
    try:
        return os.open(f"/proc/self/{name}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


def _anonymous(statm: int) -> int:
    """Bytes of private memory that are resident: all but those of files and shared ones."""
    _, resident, shared, *_ = os.pread(statm, 128, 0).split()
    return (int(resident) - int(shared)) * _PAGE


def n_bytes() -> int | None:
    """Bytes of private memory that are resident now."""
    statm = _open("statm")
    if statm is None:
        return None
    try:
        return _anonymous(statm)
    finally:
        os.close(statm)


class Peak:
    """The most bytes of private memory that are resident while it runs, beyond those at its start.

    A thread looks every few milliseconds; what comes and goes between two looks is not seen.
    """

    def __init__(self) -> None:
        self._running = threading.Lock()  # to wait for it with a time limit is cheap
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
                pass  # no thread can be had: the ends are looked at
            finally:
                threading.stack_size(size)

    def _look(self) -> None:
        assert self._statm is not None
        interval = INTERVAL
        while not self._running.acquire(timeout=interval):
            self._most = max(self._most, _anonymous(self._statm))
            interval = min(1.25 * interval, LONGEST_INTERVAL)

    def stop(self) -> int | None:
        """End it: the bytes; None where the kernel does not say."""
        if self._statm is None:
            return None
        self._running.release()
        if self._thread is not None:
            self._thread.join()
        self.at_end = _anonymous(self._statm)
        os.close(self._statm)
        self._statm = None
        return max(self._most, self.at_end) - self._before
