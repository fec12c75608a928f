# SPDX-License-Identifier: Apache-2.0
"""What a limit costs: resident memory is sampled, tensors are counted, freed pages are returned.

    python -m benchmarks.bench_watch

The first table is of a step that fits: it runs whole without a limit, under one that leaves room
for all of it, and under that limit with nobody sampling. The second is of steps that do not fit:
they run under the largest limit that needs four chunks, which they fill, and in as many chunks
without a limit. Of each kind four steps are taken in a row, and the last three are timed: the
first one finds what the others left on the heap. Ratios are taken within a round, from process time
with --cpu-time.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import koila
from benchmarks.bench import interleave, parser, prepare, publish, ratio, seconds_of, table
from benchmarks.bench_step import by_hand, lazy, limit_for
from benchmarks.programs import PROGRAMS, make
from koila.reporting import reports

LIMIT = 8 * 2**30
WIDTHS = (256, 440, 640, 1024, 2048)  # steps of some 15 to 900 ms


def step(model: nn.Module, x: Tensor, y: Tensor) -> None:
    model.zero_grad(set_to_none=True)
    x, y = koila.lazy(x, y)
    F.cross_entropy(model(x), y).backward()


def fitting_rows(args: argparse.Namespace) -> list[tuple[str, ...]]:
    rows = []
    for width in WIDTHS:
        layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(6)]
        model = nn.Sequential(*layers)
        x, y = torch.randn(512, width), torch.randint(width, (512,))

        def free(model: nn.Module = model, x: Tensor = x, y: Tensor = y) -> None:
            step(model, x, y)

        def limited(run: Callable[[], None] = free) -> None:
            with koila.config(memory_limit=LIMIT):
                run()

        def unwatched(run: Callable[[], None] = limited) -> None:
            with mock.patch.object(reports, "measure", lambda n_bytes: None):
                run()

        variants = {"no limit": free, "limit": limited, "not sampled": unwatched}
        works = {name: partial(after_the_first, work, args) for name, work in variants.items()}
        times = interleave(works, args.rounds)
        rows.append(
            (
                f"{width} wide",
                f"{1e3 * statistics.median(times['no limit']):.1f} ms",
                f"{ratio(times, 'limit', 'no limit'):.3f}",
                f"{ratio(times, 'limit', 'not sampled'):.3f}",
            )
        )
    return rows


N_TIMED = 3


def after_the_first(work: Callable[[], object], args: argparse.Namespace) -> float:
    work()
    return sum(seconds_of(work, args) for _ in range(N_TIMED)) / N_TIMED


def filling_rows(args: argparse.Namespace) -> list[tuple[str, ...]]:
    rows = []
    for name in PROGRAMS:
        program = make(name, args.device, 1)
        limit = limit_for(program, 4)
        lazy(program, memory_limit=limit)
        n_chunks = koila.report().n_chunks
        variants = {
            "by hand": partial(by_hand, program, n_chunks),
            "chunks": partial(lazy, program, chunks=n_chunks),
            "limit": partial(lazy, program, memory_limit=limit),
        }
        works = {name: partial(after_the_first, work, args) for name, work in variants.items()}
        times = interleave(works, args.rounds)
        rows.append(
            (
                f"{name} in {n_chunks}",
                f"{1e3 * statistics.median(times['by hand']):.1f} ms",
                f"{ratio(times, 'limit', 'chunks'):.3f}",
                f"{ratio(times, 'limit', 'by hand'):.3f}",
            )
        )
    return rows


def main() -> None:
    args = parser(__doc__).parse_args()
    prepare(args)
    fitting = ("six linear layers", "no limit", "limit / none", "limit / limit not sampled")
    filling = ("step, chunks", "by hand", "limit / no limit", "limit / by hand")
    parts = [table(fitting, fitting_rows(args)), table(filling, filling_rows(args))]
    publish(args, "What a limit costs", parts)


if __name__ == "__main__":
    main()
