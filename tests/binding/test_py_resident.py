# SPDX-License-Identifier: Apache-2.0
"""What is resident is measured between two calls, and a handle serves once."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from koila import _core as core
from koila.memory import resident

pytestmark = pytest.mark.sanitize


def test_what_is_resident() -> None:
    assert core.resident() == -1 or core.resident() > 2**20


def test_a_peak_is_at_least_what_is_resident() -> None:
    if core.watch_resident(2**62):
        most, n_returns = core.stop_resident()
        assert most > 2**20
        assert n_returns == 0


def n_threads() -> int:
    """How many threads of this process sample."""
    names = (task / "comm" for task in Path("/proc/self/task").iterdir())
    return sum(name.read_text() == "koila\n" for name in names if name.exists())


@pytest.fixture(autouse=True)
def none_is_left() -> Iterator[None]:
    yield
    gc.collect()
    end = time.monotonic() + 10
    while sys.platform == "linux" and n_threads() > 0:
        assert time.monotonic() < end, "the thread ends when nothing is watched for long"
        time.sleep(0.01)


def touch() -> int:
    """Take 64 MiB for a while; return the half of that."""
    held = bytes(2**26).replace(b"\0", b"a")
    time.sleep(0.2)
    return len(held) // 2


@pytest.mark.skipif(sys.platform != "linux", reason="lists threads")
def test_one_thread_serves_all() -> None:
    for _ in range(50):
        core.watch_resident(2**62)
        core.watch_resident(0)
        assert n_threads() == 1
        core.stop_resident()
        core.stop_resident()
    core.watch_resident(2**62)
    assert core.resident() + touch() <= core.stop_resident()[0]


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
@pytest.mark.parametrize("is_watching", [False, True])
def test_a_fork_has_a_thread_of_its_own(is_watching: bool) -> None:
    core.watch_resident(2**62)
    if not is_watching:
        core.stop_resident()
    child = os.fork()
    if child == 0:
        if is_watching:
            core.stop_resident()  # of its parent's watch
        core.watch_resident(2**62)
        n_started = n_threads()
        is_seen = core.resident() + touch() <= core.stop_resident()[0]
        os._exit(0 if n_started == 1 and is_seen else 1)
    assert os.waitpid(child, 0)[1] == 0
    if is_watching:
        assert n_threads() == 1, "that of the parent goes on"
        core.stop_resident()


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_a_fork_while_the_thread_is_at_work() -> None:
    """Then the lock may be the thread's, and no one unlocks it in the fork."""
    for _ in range(50):
        core.watch_resident(0)
        child = os.fork()
        if child == 0:
            core.watch_resident(2**62)
            core.stop_resident()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        core.stop_resident()


@pytest.mark.skipif(sys.platform != "linux", reason="lists threads")
def test_a_peak_that_is_dropped_ends() -> None:
    peak = resident.Peak()
    assert n_threads() == 1
    del peak


def test_wrong_arguments() -> None:
    with pytest.raises(TypeError):
        core.watch_resident("1 GiB")
    with pytest.raises(TypeError):
        core.reuse_freed(None)
