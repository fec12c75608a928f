# SPDX-License-Identifier: Apache-2.0
"""What a limit costs a step that fits in it: resident memory is sampled, and tensors are counted.

    python -m benchmarks.bench_watch

A step runs whole in all variants: without a limit, under one that leaves room for all of it, and
under that limit with nobody sampling. Ratios are taken within a round, from process time with
--cpu-time.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import koila
from benchmarks.bench import interleave, parser, prepare, publish, ratio, seconds_of, table
from koila.reporting import reports

LIMIT = 8 * 2**30
WIDTHS = (256, 440, 640, 1024, 2048)  # steps of some 15 to 900 ms


def step(model: nn.Module, x: Tensor, y: Tensor) -> None:
    model.zero_grad(set_to_none=True)
    x, y = koila.lazy(x, y)
    F.cross_entropy(model(x), y).backward()


def main() -> None:
    args = parser(__doc__).parse_args()
    prepare(args)
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
        works = {
            name: (lambda work=work: seconds_of(work, args)) for name, work in variants.items()
        }
        times = interleave(works, args.rounds)
        rows.append(
            (
                f"{width} wide",
                f"{1e3 * statistics.median(times['no limit']):.1f} ms",
                f"{ratio(times, 'limit', 'no limit'):.3f}",
                f"{ratio(times, 'limit', 'not sampled'):.3f}",
            )
        )
    heads = ("six linear layers", "no limit", "limit / none", "limit / limit not sampled")
    publish(args, "What a limit costs", [table(heads, rows)])


if __name__ == "__main__":
    main()
