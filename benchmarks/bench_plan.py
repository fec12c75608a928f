# SPDX-License-Identifier: Apache-2.0
"""How long planning takes as programs grow: from a thousand calls to a million.

    python -m benchmarks.bench_plan

Programs are chains of small layers, recorded once for each measurement and planned under a limit
that makes koila cut them, never run while the clock is on. The exponent is that of
time = c * calls ** e, fitted to all sizes: 1 is linear.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

import koila
from benchmarks.bench import parser, prepare, publish, table
from koila import _core
from koila.planning import fitting, planner, plans
from koila.staged import program

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


def plan_only(loss: torch.Tensor) -> int:
    """Stage and plan as backward() does, and stop before anything runs; the number of chunks."""
    staged = program.Program([loss])
    return planner.plan(staged, True).n_chunks


def seconds(layer: Layer, n_calls: int, device: str) -> tuple[float, float, int]:
    """Of recording, of planning what was not seen before; and the number of chunks planned."""
    plans.lasting.clear()
    fitting._last_ways.clear()
    gc.collect()
    gc.disable()
    try:
        start = time.thread_time()
        loss = record(layer, n_calls, device)
        recorded = time.thread_time()
        n_chunks = plan_only(loss)
        planned = time.thread_time()
    finally:
        gc.enable()
    del loss
    _core.flush()
    return recorded - start, planned - recorded, n_chunks


def exponent(sizes: list[int], times: list[float]) -> float:
    """The slope of log(time) over log(size), by least squares."""
    xs = [math.log(size) for size in sizes]
    ys = [math.log(time) for time in times]
    return statistics.linear_regression(xs, ys).slope


def measure(name: str, sizes: list[int], args: argparse.Namespace) -> str:
    rows, record_times, plan_times = [], [], []
    for size in sizes:
        # A quarter of what one value of each call takes: the program has to be cut.
        with koila.config(memory_limit=ROWS * WIDTH * size):
            n_runs = args.rounds if size < 10**6 else 1
            runs = [seconds(LAYERS[name], size, args.device) for _ in range(n_runs)]
        record_times.append(statistics.median(run[0] for run in runs))
        plan_times.append(statistics.median(run[1] for run in runs))
        rows.append(
            [
                f"{size}",
                f"{record_times[-1] * 1e3:.1f}",
                f"{plan_times[-1] * 1e3:.1f}",
                f"{plan_times[-1] / size * 1e9:.0f}",
                f"{runs[-1][2]}",
            ]
        )
    fitted = [f"{exponent(sizes, times):.2f}" for times in (record_times, plan_times)]
    rows.append(["exponent", *fitted, "", ""])
    heads = [f"calls ({name})", "record ms", "plan ms", "plan ns per call", "chunks"]
    return table(heads, rows)


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--largest", type=int, default=10**6, help="calls of the longest program")
    made.set_defaults(rounds=3)
    args = made.parse_args()
    prepare(args)
    sizes = [10**power for power in range(3, 10) if 10**power <= args.largest]
    if len(sizes) < 2:
        made.error("--largest must be 10000 at least: an exponent needs two sizes")
    tables = [measure(name, sizes, args) for name in LAYERS]
    publish(args, "Planning", tables)


if __name__ == "__main__":
    main()
