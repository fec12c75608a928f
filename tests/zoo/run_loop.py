# SPDX-License-Identifier: Apache-2.0
"""Run a training loop of the zoo: plain, in one chunk, in six chunks, and under half of the memory
that the plain loop takes.
"""

from __future__ import annotations

import random
import time
from typing import Any

import torch
from torch import Tensor

import koila
from allocations import Allocations
from koila.memory import budget, storages
from zoo.entries import Entry, Mode
from zoo.run_one import CHUNKS, attempt, is_equal, whole

SHARE = 0.5
#: How much further than a nudge of the last place rounding in another order may move a number.
NUDGES = 100


def _lazy(batch: Any) -> Any:
    return koila.lazy(batch, batch=0)


def _same(batch: Any) -> Any:
    return batch


def _run(entry: Entry, mode: Mode) -> tuple[dict[str, Tensor], float]:
    assert entry.loop is not None
    random.seed(0)
    torch.manual_seed(0)
    start = time.perf_counter()
    numbers = entry.loop(mode)
    return numbers, time.perf_counter() - start


def _measure(entry: Entry, mode: Mode) -> tuple[dict[str, Tensor], Allocations]:
    memory = Allocations()
    with memory:
        numbers, _ = _run(entry, mode)
    with memory:
        pass
    return numbers, memory


def _gap(one: Tensor, other: Tensor) -> float:
    if not one.numel() or torch.equal(one, other):
        return 0.0
    gap = (one.double() - other.double()).abs().max().item()
    return gap if gap == gap else float("inf")


def difference(
    wanted: dict[str, Tensor], nudged: dict[str, Tensor], got: dict[str, Tensor]
) -> float:
    """The largest difference relative to all numbers of a kind, beyond what rounding explains.

    An optimizer that divides by the size of a gradient (Adam) makes a step of full length of a
    gradient that is zero but for rounding: of such a parameter plain torch has no digit either.
    """
    if wanted.keys() != got.keys():
        return float("inf")
    largest = max(value.double().abs().max().item() for value in wanted.values() if value.numel())
    worst = 0.0
    for name, value in wanted.items():
        gap = _gap(value, got[name])
        worst = max(worst, max(0.0, gap - NUDGES * _gap(value, nudged[name])) / largest)
    return worst


def run_loop(entry: Entry, result: dict[str, Any]) -> None:
    """Add to `result` what came of each run."""
    plain, _ = _run(entry, Mode(_same, False))
    again, _ = _run(entry, Mode(_same, False))
    line: dict[str, Any] = {}
    result["one chunk"] = line
    if is_equal(plain, again):
        got, _ = _run(entry, Mode(_lazy, False))
        line["is_equal"] = is_equal(plain, got)
        if not line["is_equal"]:
            line["difference"] = difference(plain, plain, got)
    else:
        line["skipped"] = "plain torch is not equal to itself"

    is_double = entry.tolerance < 1e-3
    result["dtype"], result["tolerance"] = "float64" if is_double else "float32", entry.tolerance
    wanted, memory = _measure(entry, Mode(_same, is_double))
    nudged, seconds = _run(entry, Mode(_same, is_double, is_nudged=True))
    result["plain"] = {"peak": memory.peak, "seconds": seconds}
    for name in ("chunks", "limit"):
        _run_in_chunks(entry, name, result, (wanted, nudged))


def _run_in_chunks(
    entry: Entry,
    name: str,
    result: dict[str, Any],
    numbers: tuple[dict[str, Tensor], dict[str, Tensor]],
) -> None:
    line: dict[str, Any] = {}
    result[name] = line
    settings: dict[str, Any] = {"chunks": CHUNKS}
    if name == "limit":
        line["allowed"] = int(SHARE * result["plain"]["peak"])
        storages.look_again(True)
        there = budget.taken(torch.device("cpu"), [])
        settings = {"memory_limit": there + line["allowed"]}
    mode = Mode(_lazy, result["dtype"] == "float64")

    def run() -> None:
        with koila.config(**settings):
            _, line["seconds"] = _run(entry, mode)
            got, memory = _measure(entry, mode)
        line["difference"] = difference(*numbers, got)
        line["peak"] = memory.peak
        line["n_chunks"], line["whole"] = koila.report().n_chunks, whole(koila.report())

    attempt(line, run)
