# SPDX-License-Identifier: Apache-2.0
"""What malloc keeps of freed memory, and when it is returned; `test_resident.py` runs programs."""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import math
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch

import koila
from koila.memory import budget, heap, resident

MIB = 2**20
GIB = 2**30
needs_glibc = pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc, Linux's /proc")


# Limits of the process ----------------------------------------------------------------------------


def test_blocks_that_go_back_are_a_small_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """A smaller limit makes smaller blocks go back, a larger one changes nothing."""
    sizes: list[tuple[int, int]] = []
    monkeypatch.setattr(heap, "_threshold", None)
    monkeypatch.setattr(heap, "_set_malloc", lambda *given: sizes.append(given))
    for left in (GIB * 8, GIB, GIB // 4, GIB, GIB // 1024, 0):
        heap.fix_malloc(left)
    assert sizes == [(size, size) for size in (4 * MIB, MIB, MIB // 16)]


def test_smaller_blocks_go_back_before_a_step_in_many_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A value that is kept for each chunk leaves that many holes. Without a limit of the process
    malloc is left alone, and no limit is smaller than one that was set before."""
    sizes: list[int] = []
    monkeypatch.setattr(heap, "_threshold", None)
    monkeypatch.setattr(heap, "_least_left", math.inf)
    monkeypatch.setattr(heap, "_set_malloc", lambda block, end: sizes.append(block))
    heap.fix_malloc_for(4096)
    assert not sizes
    heap.fix_malloc(64 * MIB)
    for n_chunks in (2, 8, 16, 4, 64, 4096):
        heap.fix_malloc_for(n_chunks)
    assert sizes == [MIB // 4, MIB // 8, MIB // 32, MIB // 64]


def test_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(heap, "_threshold", None)
    monkeypatch.setattr(heap, "_least_left", math.inf)
    monkeypatch.setattr(heap, "_set_malloc", lambda block, end: sizes.append(block))
    heap.fix_malloc(0)
    heap.fix_malloc_for(2)
    assert sizes == [MIB // 16, MIB // 64]


def test_a_step_says_in_how_many_chunks_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(heap, "fix_malloc_for", asked.append)
    with koila.config(chunks=3):
        koila.lazy(torch.ones(12, 4)).exp().sum().item()
    assert asked == [3]


@needs_glibc
def test_malloc_is_fixed_on_glibc() -> None:
    """Not so under sanitizers, which bring their own malloc."""
    assert heap._set_malloc(2**16, 2**16) is True


# Freed memory that is used again ------------------------------------------------------------------


#: Takes five training steps in chunks under a limit, while no thread returns free memory. For each
#: step but the first, prints the measured peak divided by the predicted one.
IN_CHUNKS = """
import torch
from torch import nn

import koila
from koila.memory import heap

torch.set_num_threads(1)
layers = [nn.Conv2d(3, 64, 3, padding=1)]
for _ in range(7):
    layers += [nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1)]
model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
x = torch.randn(48, 3, 16, 16)
heap._bound = lambda limit: 2**62
koila.config(memory_limit="37MiB")
for step in range(5):
    model(koila.lazy(x)).square().mean().backward()
    program = koila.report().programs[-1]
    assert program.n_chunks > 1
    if step > 0:
        print(program.bytes_measured / program.bytes_predicted)
"""


@needs_glibc
def test_a_step_takes_the_memory_of_its_tensors() -> None:
    """Twice that, if a freed tensor's memory does not serve for another one of its size."""
    words = [sys.executable, "-c", IN_CHUNKS]
    done = subprocess.run(words, check=True, timeout=300, capture_output=True, text=True)
    assert max(map(float, done.stdout.split())) <= 1.3


@needs_glibc
def test_tensors_are_aligned_as_before() -> None:
    """In threads too, and whatever lies between them; the numbers in them stay."""
    heap.reuse_freed()

    def fill(seed: int) -> None:
        kept: list[tuple[int, torch.Tensor]] = []
        sizes = torch.Generator().manual_seed(seed)
        for i in range(300):
            n = int(torch.randint(1, 2 ** (1 + i % 22), (), generator=sizes))
            kept.append((i, torch.full((n,), i, dtype=torch.int16)))
            if i % 3 == 2:
                del kept[i % len(kept)]
        for i, tensor in kept:
            assert tensor.data_ptr() % 64 == 0
            assert bool((tensor == i).all())

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(fill, range(8)))


@needs_glibc
def test_only_a_loaded_library_is_changed() -> None:
    assert heap._core.reuse_freed("libc10.so") is True
    assert heap._core.reuse_freed("libc10.so") is True, "it is so already"
    assert heap._core.reuse_freed("libc11.so") is False


def test_freed_memory_is_used_again_under_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """And where a step is planned without one. Not where large blocks are returned anyway."""
    asked: list[str] = []
    monkeypatch.setattr(heap._core, "reuse_freed", asked.append)
    monkeypatch.setattr(heap, "_threshold", MIB)
    heap._reuse_freed.cache_clear()
    budget.free_on_cpu()
    assert asked == []
    monkeypatch.setattr(heap, "_threshold", None)
    monkeypatch.setattr(budget, "_left_to_process", list)
    for _ in range(2):
        budget.free_on_cpu()
    assert asked == ["libc10.so", "libtorch_cpu.so"]
    heap._reuse_freed.cache_clear()
    with koila.config(memory_limit="1GiB"):
        budget.watch().stop()
    assert asked == ["libc10.so", "libtorch_cpu.so"] * 2
    heap._reuse_freed.cache_clear()


# The thread that returns free memory --------------------------------------------------------------


def pages() -> int:
    found = resident.n_bytes()
    assert found is not None
    return found


@contextlib.contextmanager
def blocks(n_bytes: int, *, are_free: bool) -> Iterator[None]:
    """Have that much memory in small blocks on glibc's heap, below one that is in use."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    size = 2**13  # malloc may have been told to return 2**14 and more at once
    held = [ctypes.c_void_p(libc.malloc(size)) for _ in range(n_bytes // size)]
    for block in held:
        ctypes.memset(block, 1, size)
    freed = held[:-1] if are_free else []
    for block in freed:
        libc.free(block)
    yield
    for block in held[len(freed) :]:
        libc.free(block)
    heap._core.return_free()


def come_down_to(n_bytes: int) -> bool:
    """Whether no more bytes are resident within ten seconds."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        if pages() <= n_bytes:
            return True
        time.sleep(0.001)
    return False


@needs_glibc
def test_free_pages_go_back_near_the_bound() -> None:
    heap._core.return_free()
    with blocks(64 * MIB, are_free=True):
        before = pages()
        peak = resident.Peak(bound=before)
        assert come_down_to(before - 48 * MIB)
        assert peak.stop() is not None
        assert peak.n_returns == 1


@needs_glibc
def test_free_pages_stay_far_from_the_bound() -> None:
    heap._core.return_free()
    with blocks(64 * MIB, are_free=True):
        before = pages()
        peak = resident.Peak(bound=before + 64 * MIB)
        time.sleep(0.05)
        assert peak.stop() is not None
        assert peak.n_returns == 0
        assert pages() >= before - 4 * MIB


@needs_glibc
def test_pages_in_use_are_not_returned_again_and_again() -> None:
    """If a return leaves more than is allowed, the next one waits until pages have come."""
    heap._core.return_free()
    with blocks(64 * MIB, are_free=False):
        peak = resident.Peak(bound=pages() - 32 * MIB)
        time.sleep(0.05)
        with blocks(32 * MIB, are_free=True):
            time.sleep(0.05)
        peak.stop()
        assert 2 <= peak.n_returns <= 18, "at first, and for each 2 MiB that came at the most"


# A memory limit -----------------------------------------------------------------------------------


class Process:
    """A process whose resident bytes are `now`, of which `free` are free pages of the heap."""

    def __init__(self) -> None:
        self.now, self.free, self.n_returns = 0, 0, 0
        self.bounds: list[int] = []
        self.fixed: list[tuple[int, int]] = []

    def return_free(self) -> None:
        self.now, self.free = self.now - self.free, 0
        self.n_returns += 1

    def bounded(self, limit: int, taken: int, n_returns: int = 0) -> int | None:
        """Run a step with so many returns; return its peak if nothing comes."""
        step = heap.Bounded(limit, taken, self.now)
        self.stopped = (self.now, n_returns)
        return step.stop()


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    made = Process()
    monkeypatch.setattr(heap.resident, "n_bytes", lambda: made.now)
    monkeypatch.setattr(heap._core, "return_free", made.return_free)
    monkeypatch.setattr(heap, "_set_malloc", lambda *given: made.fixed.append(given))
    monkeypatch.setattr(heap._core, "watch_resident", lambda n: made.bounds.append(n) or made)
    monkeypatch.setattr(heap._core, "stop_resident", lambda: made.stopped)
    monkeypatch.setattr(heap, "_threshold", None)
    monkeypatch.setattr(heap, "_beside", None)
    monkeypatch.setattr(heap, "_at_first", 0)
    monkeypatch.setattr(heap, "_n_to_measure", 1)
    return made


def test_malloc_keeps_large_blocks_under_a_memory_limit(process: Process) -> None:
    """Once; under a limit of the process it does not."""
    for _ in range(3):
        process.bounded(100 * MIB, 0)
    assert process.fixed == [(32 * MIB, 2**31 - 1)]


def test_a_limit_of_the_process_decides(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "_threshold", MIB)
    process.bounded(100 * MIB, 0)
    assert process.fixed == []


def test_the_bound_is_above_what_the_process_takes_beside_tensors(process: Process) -> None:
    process.now, process.free = 130 * MIB, 10 * MIB
    assert process.bounded(100 * MIB, 20 * MIB) == 0, "what was free before is no part of the peak"
    assert process.n_returns == 1
    assert process.bounds == [(100 + 100 + 3 + 10) * MIB]
    process.now, process.free = 150 * MIB, 30 * MIB
    assert process.bounded(100 * MIB, 20 * MIB) == 30 * MIB, "free pages stay, and they count"
    assert process.n_returns == 1


def test_what_the_process_takes_beside_tensors_is_measured_anew(process: Process) -> None:
    """If less is resident, and after a step in which pages went back often: it had libraries."""
    process.now = 120 * MIB
    process.bounded(100 * MIB, 20 * MIB)
    process.now, process.free = 150 * MIB, 10 * MIB
    process.bounded(100 * MIB, 20 * MIB, n_returns=8)
    assert process.n_returns == 1
    process.bounded(100 * MIB, 20 * MIB)
    assert process.n_returns == 2
    assert process.bounds[-1] == (120 + 100) * MIB, "libraries have taken the margin"
    process.now = 110 * MIB
    process.bounded(100 * MIB, 20 * MIB)
    assert process.bounds[-1] == (90 + 100 + 13) * MIB


def test_what_plain_steps_left_is_returned_first(process: Process) -> None:
    """Otherwise it would be the peak of a step that does not take it."""
    process.now = 120 * MIB
    process.bounded(100 * MIB, 20 * MIB)
    process.now, process.free = 400 * MIB, 280 * MIB
    assert process.bounded(100 * MIB, 20 * MIB) == 0
    assert process.n_returns == 2


def test_only_a_memory_limit_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "_n_to_measure", 1)
    found = budget.watch()
    assert not isinstance(found, heap.Bounded)
    found.stop()
    with koila.config(memory_limit="1GiB"):
        found = budget.watch()
        assert isinstance(found, heap.Bounded)
        found.stop()
        monkeypatch.setattr(heap.resident, "n_bytes", lambda: None)
        assert not isinstance(budget.watch(), heap.Bounded), "the kernel does not say"
