# SPDX-License-Identifier: Apache-2.0
"""What is resident is measured between two calls, and a handle serves once."""

from __future__ import annotations

import gc
import os
import sys
import time

import pytest

from koila import _core as core

pytestmark = pytest.mark.sanitize


def test_what_is_resident() -> None:
    assert core.resident() == -1 or core.resident() > 2**20


def test_a_peak_is_at_least_what_is_resident() -> None:
    handle = core.watch_resident(2**62)
    if handle is not None:
        most, n_returns = core.stop_resident(handle)
        assert most > 2**20
        assert n_returns == 0


def test_a_handle_is_of_no_use_once_it_is_stopped() -> None:
    handle = core.watch_resident(2**62)
    if handle is not None:
        core.stop_resident(handle)
        with pytest.raises(ValueError, match="PyCapsule"):
            core.stop_resident(handle)


def test_a_forgotten_handle_stops() -> None:
    for _ in range(20):
        core.watch_resident(0)
    gc.collect()


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_a_fork_does_not_stop_the_thread() -> None:
    """It does not have the thread, but shares the file that ends it."""
    handle = core.watch_resident(2**62)
    n_threads = len(os.listdir("/proc/self/task"))
    child = os.fork()
    if child == 0:
        core.stop_resident(handle)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    time.sleep(0.05)
    assert len(os.listdir("/proc/self/task")) == n_threads
    core.stop_resident(handle)
    end = time.monotonic() + 10
    while len(os.listdir("/proc/self/task")) != n_threads - 1:  # a joined thread is listed a while
        assert time.monotonic() < end
        time.sleep(0.01)


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="PyCapsule"):
        core.stop_resident(None)
    with pytest.raises(TypeError):
        core.watch_resident("1 GiB")
    with pytest.raises(TypeError):
        core.fix_malloc("64 KiB", 2**16)
    with pytest.raises(TypeError):
        core.reuse_freed(None)
