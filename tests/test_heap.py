# SPDX-License-Identifier: Apache-2.0
"""What malloc keeps of freed memory, and when it is returned; `test_resident.py` runs programs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import koila
from koila.memory import budget, heap

MIB = 2**20
GIB = 2**30


class Process:
    """A process whose resident bytes are `now`, of which `free` are free pages of the heap. It is
    sampled every 10 ms."""

    def __init__(self) -> None:
        self.now, self.free, self.n_returns, self.seconds = 0, 0, 0, 0.0

    def monotonic(self) -> float:
        self.seconds += 0.01
        return self.seconds

    def n_bytes(self) -> int:
        return self.now

    def fix_malloc(self, size: int) -> None:
        assert size == 0, "the threshold stays malloc's own"
        self.now, self.free = self.now - self.free, 0
        self.n_returns += 1


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    made = Process()
    monkeypatch.setattr(heap.resident, "n_bytes", made.n_bytes)
    monkeypatch.setattr(heap._core, "fix_malloc", made.fix_malloc)
    monkeypatch.setattr(heap, "time", SimpleNamespace(monotonic=made.monotonic))
    monkeypatch.setattr(heap, "_beside", None)
    monkeypatch.setattr(heap, "_at_first", 0)
    monkeypatch.setattr(heap, "_n_to_measure", 1)
    return made


# Limits of the process ----------------------------------------------------------------------------


def test_blocks_that_go_back_are_a_small_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """A smaller limit makes smaller blocks go back, a larger one changes nothing."""
    sizes: list[int] = []
    monkeypatch.setattr(heap, "_threshold", None)
    monkeypatch.setattr(heap._core, "fix_malloc", sizes.append)
    for left in (GIB * 8, GIB, GIB // 4, GIB, GIB // 1024, 0):
        heap.fix_malloc(left)
    assert sizes == [4 * MIB, MIB, MIB // 16]


# A memory limit -----------------------------------------------------------------------------------


def test_free_pages_stay_until_the_limit_is_near(process: Process) -> None:
    """Of 168 MiB that may be resident, 100 are the process's own, 60 are for tensors."""
    process.now, process.free = 130 * MIB, 10 * MIB
    ceiling = heap.Ceiling(60 * MIB, 20 * MIB, process.now)
    assert process.n_returns == 1, "what was free before the limit"
    assert ceiling.start == 120 * MIB
    assert not any(ceiling.sampled(now * MIB) for now in (130, 138, 146, 152, 156, 159))
    assert process.n_returns == 1


def test_free_pages_go_back_before_the_limit(process: Process) -> None:
    """As many pages as came since the last sample may come until the next."""
    process.now = 120 * MIB
    ceiling = heap.Ceiling(60 * MIB, 20 * MIB, process.now)
    assert [ceiling.sampled(now * MIB) for now in (130, 140, 150)] == [False, False, True]
    assert process.n_returns == 1, "the next sample comes soon"
    process.now, process.free = 160 * MIB, 30 * MIB
    assert ceiling.sampled(process.now)
    assert process.n_returns == 2
    assert process.now == 130 * MIB
    assert ceiling.sampled(166 * MIB)
    assert process.n_returns == 3


def test_a_sample_may_be_as_late_as_one_was(process: Process) -> None:
    """Beside other work the thread that samples waits for the processor."""
    process.now = 120 * MIB
    ceiling = heap.Ceiling(60 * MIB, 20 * MIB, process.now)
    process.seconds += 0.04
    assert not ceiling.sampled(120 * MIB)
    process.now = 130 * MIB
    assert ceiling.sampled(process.now), "10 MiB came in 10 ms: as many as 45 may come now"
    assert process.n_returns == 2


def test_pages_in_use_are_not_returned_again_and_again(process: Process) -> None:
    """If a return leaves more than is allowed, the next one waits until pages have come."""
    process.now = 120 * MIB
    ceiling = heap.Ceiling(60 * MIB, 20 * MIB, process.now)
    process.now = 178 * MIB
    for _ in range(5):
        ceiling.sampled(process.now)
    assert process.n_returns == 2
    for now in (181, 173, 176):
        process.now = now * MIB
        ceiling.sampled(process.now)
    assert process.n_returns == 4, "at 181, and at 176 after 173"


def test_what_the_process_takes_beside_tensors_is_measured_anew(process: Process) -> None:
    """If less is resident, and after a step in which pages went back often: it had libraries."""
    process.now = 120 * MIB
    assert heap.Ceiling(60 * MIB, 20 * MIB, process.now).start == 120 * MIB
    process.now, process.free = 150 * MIB, 10 * MIB
    ceiling = heap.Ceiling(60 * MIB, 20 * MIB, process.now)
    assert ceiling.start == 120 * MIB
    assert process.n_returns == 1, "free pages may stay"
    for i in range(8):
        process.now = (178 + 4 * i) * MIB
        ceiling.sampled(process.now)
    assert process.n_returns == 1 + 8
    process.now, process.free = 150 * MIB, 10 * MIB
    ceiling = heap.Ceiling(60 * MIB, 20 * MIB, process.now)
    assert ceiling.start == 140 * MIB
    assert ceiling._bound == 180 * MIB, "libraries have taken the margin"
    process.now = 110 * MIB
    assert heap.Ceiling(60 * MIB, 20 * MIB, process.now).start == 110 * MIB


def test_only_a_memory_limit_has_a_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    assert budget.ceiling() is None
    with koila.config(memory_limit="1GiB"):
        assert budget.ceiling() is not None
        monkeypatch.setattr(heap.resident, "n_bytes", lambda: None)
        assert budget.ceiling() is None, "the kernel does not say"
