# SPDX-License-Identifier: Apache-2.0
"""A limit on the CPU holds as the kernel counts it: what plain scripts have resident under one.

Each runs in a process of its own, without a variable of the environment for malloc or oneDNN.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import koila
from koila.memory import resident
from koila.reporting import reports
from limits import there
from resident_programs import N_STEPS, PROGRAMS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel is asked")

SCRIPT = Path(__file__).with_name("resident_programs.py")
MIB = 2**20
#: Of a limit, and beside it: what an allocator rounds up, and what libraries take.
ROUNDING, LIBRARIES = 1.05, 16 * MIB


def run(*words: object, ulimit: int | None = None, **environment: str) -> dict[str, Any]:
    """Run a program in a process of its own.

    Args:
        words: the command line.
        ulimit: the bytes of data that the process may have, from its start; None: any number.
        environment: more variables.
    """
    unwanted = "MALLOC_", "ONEDNN_PRIMITIVE_CACHE", "DNNL_PRIMITIVE_CACHE"
    kept = {name: text for name, text in os.environ.items() if not name.startswith(unwanted)}
    shell = ["sh", "-c", f'ulimit -d {ulimit // 1024}; exec "$@"', "sh"] if ulimit else []
    done = subprocess.run(
        [*shell, sys.executable, "-W", "ignore", str(SCRIPT), *map(str, words)],
        check=False,
        timeout=900,
        capture_output=True,
        text=True,
        env=kept | environment,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@functools.cache
def eager(name: str) -> dict[str, Any]:
    """What a process has of data before the program ("there"), the bytes of eager's tensors at
    their peak ("tensors"), and its losses."""
    return run(name, "none")


CASES = [(name, share) for name in PROGRAMS for share in (0.5, 0.3)]
LEAST = [("mixed_up", 0.215)]  # the least that it runs in, in many chunks
#: On some CPUs the buffers that MKL keeps take what the script's own calls need.
MKL = {("packed_lstm", 0.5), ("vae", 0.3)}
#: On some CPUs libraries take all that the share leaves beside tensors: it is refused then, or
#: torch has no memory for the next batch.
REFUSED = {("packed_lstm", 0.3)}
#: Losses are float32, and their sums are taken in another order.
ROUNDED = 1e-5


@pytest.mark.rotated
@pytest.mark.slow
@pytest.mark.parametrize(("name", "share"), CASES + LEAST)
def test_memory_limit_holds(name: str, share: float) -> None:
    limit = int(share * eager(name)["tensors"])
    found = run(name, "memory_limit", limit)
    assert "error" not in found, found["error"]
    assert len(found["losses"]) == N_STEPS
    assert found["losses"] == pytest.approx(eager(name)["losses"], rel=ROUNDED)
    assert max(found["peaks"]) <= ROUNDING * limit + LIBRARIES
    assert not any(" took " in text for text in found["warnings"])
    if share < 1:
        assert all(max(chunks) > 1 for chunks in found["chunks"])
        main = max(found["reports"], key=lambda report: report[1] or 0.0)
        assert main[3] is not None, "what it took is measured"
        assert main[3] <= ROUNDING * main[2] + LIBRARIES


@pytest.mark.rotated
@pytest.mark.slow
@pytest.mark.parametrize(("name", "share"), CASES)
def test_a_limit_of_the_process_holds(name: str, share: float) -> None:
    """As with `ulimit -d`: it is there before anything is imported, and counts all that Python, the
    libraries and oneDNN's kernels take beside tensors. What it takes to import and start them comes
    on top of the share. The kernel sees to it that no more is taken: the steps have to come
    through, with eager's numbers."""
    wanted = eager(name)
    limit = int(share * wanted["tensors"])
    found = run(name, "process", ulimit=wanted["there"] + limit)
    if (name, share) in MKL and "error" in found:
        found = run(name, "process", ulimit=wanted["there"] + limit, MKL_DISABLE_FAST_MM="1")
    if (name, share) in REFUSED and "error" in found:
        of_koila, of_the_batch = "MemoryLimitError: memory ran out", "RuntimeError: [enforce fail"
        assert found["error"].startswith((of_koila, of_the_batch)), found["error"]
        return
    assert "error" not in found, found["error"]
    assert len(found["losses"]) == N_STEPS
    assert found["losses"] == pytest.approx(wanted["losses"], rel=ROUNDED)
    assert max(found["peaks"]) <= limit
    assert all(max(chunks) > 1 for chunks in found["chunks"])
    # Libraries take more in the first step than is kept back for them on some CPUs (with AMX): then
    # the second has less, which it keeps to.
    assert len({str(chunks) for chunks in found["chunks"][1:]}) == 1, "equal steps in equal chunks"


# What is measured ---------------------------------------------------------------------------------


def give_back() -> None:
    """Give the memory that earlier tests have freed back to the kernel: a tensor that takes it
    would not be seen."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def test_a_peak_is_seen() -> None:
    """Also where it is over when the measuring ends."""
    give_back()
    before = resident.n_bytes()
    peak = resident.Peak()
    for _ in range(60):  # so often that a sample is taken while all pages are there
        torch.ones(16 * MIB).sum()  # 64 MiB, for some milliseconds
    found = peak.stop()
    assert found is not None and before is not None
    assert 60 * MIB <= found <= 80 * MIB
    assert abs(resident.n_bytes() - before) <= 8 * MIB  # type: ignore[operator]


def test_pages_of_files_do_not_count(tmp_path: Path) -> None:
    file = tmp_path / "numbers"
    file.write_bytes(bytes(64 * MIB))
    peak = resident.Peak()
    mapped = torch.from_file(str(file), size=16 * MIB, dtype=torch.float32)
    mapped.sum()
    found = peak.stop()
    assert found is not None and found <= 16 * MIB


def test_nothing_is_left_running() -> None:
    n_threads, n_files = (len(os.listdir(f"/proc/self/{name}")) for name in ("task", "fd"))
    for i in range(50):
        peak = resident.Peak()
        if i % 2:
            peak.stop()
        del peak
    assert len(os.listdir("/proc/self/task")) == n_threads
    assert len(os.listdir("/proc/self/fd")) == n_files


WITHOUT_THREADS = """
import resource
from koila.basics import machine
from koila.memory import resident

held = bytearray(2**16)
size = machine.status()["VmSize"]
resource.setrlimit(resource.RLIMIT_AS, (size + 2**17, resource.RLIM_INFINITY))
peak = resident.Peak()
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
passing = bytearray(2**27)
del passing
held = bytearray(2**26)
print(len(__import__("os").listdir("/proc/self/task")), peak.stop())
"""


def test_no_thread_can_be_had() -> None:
    """A process that may start none is measured at its ends."""
    kept = {**os.environ, "OMP_NUM_THREADS": "1"}
    n_threads, found = subprocess.run(
        [sys.executable, "-c", WITHOUT_THREADS],
        check=True,
        capture_output=True,
        text=True,
        env=kept,
        timeout=120,
    ).stdout.split()
    assert int(n_threads) == 1
    assert 60 * MIB <= int(found) <= 80 * MIB


def test_no_kernel_that_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident._core, "resident", lambda: -1)
    monkeypatch.setattr(resident._core, "watch_resident", lambda bound: None)
    assert resident.n_bytes() is None
    assert resident.Peak().stop() is None


# What is told -------------------------------------------------------------------------------------


def step() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(256, 2048), torch.nn.GELU())
    x = torch.ones(2048, 256)
    limit = there() + 24 * MIB
    with koila.config(memory_limit=limit):
        model(koila.lazy(x)).pow(2).mean().backward()


def test_report_says_what_was_measured() -> None:
    step()
    report = koila.report()
    assert report.n_chunks > 1
    assert report.bytes_measured is not None
    assert "not measured" not in str(report)


def test_free_pages_are_watched_for_while_a_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds: list[int] = []
    monkeypatch.setattr(resident._core, "watch_resident", bounds.append)
    step()
    limit = there() + 24 * MIB
    assert bounds
    assert limit < bounds[0] < limit + 2 * 16 * MIB + (resident.n_bytes() or 0)


def test_nothing_is_measured_without_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident, "Peak", None)  # to call it would fail
    with koila.config(chunks=3):
        koila.lazy(torch.ones(2**20)).exp().sum().item()
    koila.lazy(torch.ones(2**20)).exp().sum().item()
    assert koila.report().bytes_measured is None


def test_more_than_allowed_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What kernels and others take beside tensors is in no plan."""
    monkeypatch.setattr(reports, "_over", set())
    monkeypatch.setattr(resident.Peak, "stop", lambda self: 200 * MIB)
    with caplog.at_level(logging.WARNING, "koila"):
        for _ in range(3):
            step()
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1
    assert "took 200.0 MiB" in told[0]
    assert "test_resident.py" in told[0]
