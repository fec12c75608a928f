# SPDX-License-Identifier: Apache-2.0
"""How long planning takes as programs grow: from a thousand calls to a million.

    python -m benchmarks.bench_plan

Programs are chains of small layers, recorded once for each measurement and planned under a limit
that makes koila cut them, never run while the clock is on: once with nothing known, and once more
after that. The exponent is that of time = c * calls ** e, fitted to all sizes: 1 is linear.

The last table plans a network with batch normalizations under tight memory limits, which are given
as shares of the bytes of a whole run. It counts how often koila stages and measures the network in
the first step, and in the second.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import koila
from benchmarks.bench import parser, prepare, publish, table
from benchmarks.programs import make
from koila import _core
from koila.memory import budget
from koila.planning import fitting, planner, plans, strategies
from koila.staged import program
from koila.staged.cache import _caches as known_programs

ROWS = 64
WIDTH = 4

Layer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def elementwise(h: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Four calls, none of which saves more than its input."""
    return torch.tanh(torch.relu(h * bias + bias))


def linear(h: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Four calls, as in a residual network: a layer, what follows it, and what went round it."""
    return h + torch.relu(F.linear(h, weight, bias)) * 0.5


CALLS_PER_LAYER = 4
LAYERS: dict[str, Layer] = {"elementwise": elementwise, "linear": linear}


def record(layer: Layer, n_calls: int, device: str) -> torch.Tensor:
    """A loss that hangs on `n_calls` recorded calls."""
    weight = torch.randn(WIDTH, WIDTH, device=device, requires_grad=True)
    bias = torch.randn(WIDTH, device=device, requires_grad=True)
    h = koila.lazy(torch.randn(ROWS, WIDTH, device=device))
    for _ in range(n_calls // CALLS_PER_LAYER):
        h = layer(h, weight, bias)
    return h.mean()


def forget() -> None:
    """Forget all that was planned before."""
    for kept in (
        strategies._seen,
        fitting._last_strategies,
        planner._least_limits,
        known_programs,
    ):
        kept.clear()
    plans.lasting.clear()


def plan_only(loss: torch.Tensor) -> int:
    """Stage and plan as backward() does, and stop before anything runs; the number of chunks, 0
    where it is refused."""
    staged = program.Program([loss])
    try:
        return planner.plan(staged, True).n_chunks
    except koila.MemoryLimitError:
        return 0


class Times(NamedTuple):
    """Seconds of recording a program, of planning it first, and again; its number of chunks."""

    record: float
    first: float
    again: float
    n_chunks: int


def times(layer: Layer, n_calls: int, device: str) -> Times:
    forget()
    gc.collect()
    gc.disable()
    try:
        start = time.thread_time()
        loss = record(layer, n_calls, device)
        recorded = time.thread_time()
        n_chunks = plan_only(loss)
        planned = time.thread_time()
        plan_only(loss)
        again = time.thread_time()
    finally:
        gc.enable()
    del loss
    _core.flush()
    return Times(recorded - start, planned - recorded, again - planned, n_chunks)


def counted(loss: torch.Tensor) -> list[str]:
    """Plan a program; how often it is staged and measured, the ms, and the chunks."""
    found: Counter[str] = Counter()
    before = {name: getattr(_core, name) for name in ("stage", "measure")}

    def counting(name: str) -> Callable[..., Any]:
        def count(*args: Any) -> Any:
            found[name] += 1
            return before[name](*args)

        return count

    for name in before:
        setattr(_core, name, counting(name))
    try:
        start = time.thread_time()
        n_chunks = plan_only(loss)
        taken = time.thread_time() - start
    finally:
        for name, func in before.items():
            setattr(_core, name, func)
    return [f"{found['stage']}", f"{found['measure']}", f"{taken * 1e3:.1f}", f"{n_chunks or 'no'}"]


def tight(args: argparse.Namespace) -> str:
    """The table of a network under tight limits."""
    made = make("BatchNorm", args.device, 1)
    x, y = koila.lazy(made.x, made.y, batch=0)
    loss = made.loss(made.model, x, y)
    with koila.config(memory_limit=2**40):
        whole = planner.plan(program.Program([loss]), True).predicted or 0.0
    taken = budget.taken(made.x.device, made.model.parameters())
    rows = []
    for share in (0.7, 0.4, 0.2, 0.1, 0.03):
        forget()
        with koila.config(memory_limit=taken + int(share * whole)):
            for plan in ("first", "next"):
                rows.append([f"{share}", plan, *counted(loss)])
    _core.flush()
    return table(["share (BatchNorm)", "plan", "staged", "measured", "ms", "chunks"], rows)


def exponent(sizes: list[int], times: list[float]) -> float:
    """The slope of log(time) over log(size), by least squares."""
    xs = [math.log(size) for size in sizes]
    ys = [math.log(time) for time in times]
    return statistics.linear_regression(xs, ys).slope


def measure(name: str, sizes: list[int], args: argparse.Namespace) -> str:
    rows, all_times = [], []
    for size in sizes:
        # A quarter of what one value of each call takes: the program has to be cut.
        with koila.config(memory_limit=ROWS * WIDTH * size):
            n_runs = args.rounds if size < 10**6 else 1
            runs = [times(LAYERS[name], size, args.device) for _ in range(n_runs)]
        median = Times(*map(statistics.median, zip(*runs, strict=True)))
        all_times.append(median)
        rows.append(
            [
                f"{size}",
                *(f"{seconds * 1e3:.1f}" for seconds in median[:3]),
                f"{median.first / size * 1e9:.0f}",
                f"{median.n_chunks:.0f}",
            ]
        )
    fitted = [f"{exponent(sizes, list(of)):.2f}" for of in list(zip(*all_times, strict=True))[:3]]
    rows.append(["exponent", *fitted, "", ""])
    heads = ["record ms", "plan ms", "again ms", "plan ns per call", "chunks"]
    return table([f"calls ({name})", *heads], rows)


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--largest", type=int, default=10**6, help="calls of the longest program")
    made.set_defaults(rounds=3)
    args = made.parse_args()
    prepare(args)
    sizes = [10**power for power in range(3, 10) if 10**power <= args.largest]
    if len(sizes) < 2:
        made.error("--largest must be 10000 at least: an exponent needs two sizes")
    tables = [*(measure(name, sizes, args) for name in LAYERS), tight(args)]
    publish(args, "Planning", tables)


if __name__ == "__main__":
    main()
