# SPDX-License-Identifier: Apache-2.0
"""Batch normalization in training by rows: time and memory of a step in chunks.

    python -m benchmarks.bench_batch_norm

Eight times convolution, batch normalization and ReLU, beside the plain step. In chunks koila keeps
what each norm is given, for all rows, and runs each layer forward once more. The memory is what
torch's allocator hands out at most, less the gradients of the parameters.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import koila
from benchmarks.bench import interleave, parser, prepare, publish, ratio, seconds_of, table
from tests.profiled import bytes_over_time

N_LAYERS = 8
CHUNKS = (2, 4, 8)


def make(n_channels: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, n_channels, 3, padding=1)]
    for _ in range(N_LAYERS):
        layers += [nn.BatchNorm2d(n_channels), nn.ReLU()]
        layers.append(nn.Conv2d(n_channels, n_channels, 3, padding=1))
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(n_channels, 10)
    return nn.Sequential(*layers, *head)


def step(model: nn.Module, x: Tensor, y: Tensor, chunks: int | None) -> None:
    model.zero_grad(set_to_none=True)
    if chunks is None:
        F.cross_entropy(model(x), y).backward()
        return
    with koila.config(chunks=chunks):
        x, y = koila.lazy(x, y)
        F.cross_entropy(model(x), y).backward()


def peak(model: nn.Module, x: Tensor, y: Tensor, chunks: int | None) -> float:
    """MiB beyond what was there before, and the gradients."""
    model.zero_grad(set_to_none=True)
    most = max(bytes_over_time(lambda: step(model, x, y, chunks)))
    return (most - sum(p.nbytes for p in model.parameters())) / 2**20


def rows(n_channels: int, args: argparse.Namespace) -> list[list[str]]:
    model = make(n_channels).to(args.device)
    size = args.size
    x = torch.randn(args.batch, 3, size, size, device=args.device)
    y = torch.randint(0, 10, (args.batch,), device=args.device)
    counts = (None, 1, *CHUNKS)
    variants = {str(n): partial(seconds_of, partial(step, model, x, y, n), args) for n in counts}
    times = interleave(variants, args.rounds)
    peaks = {n: peak(model, x, y, n) for n in counts}
    return [
        [
            str(n_channels),
            "plain" if n is None else str(n),
            f"{1e3 * min(times[str(n)]):.0f}",
            f"{ratio(times, str(n), 'None'):.2f}",
            f"{peaks[n]:.1f}",
            f"{peaks[n] / peaks[None]:.2f}",
        ]
        for n in counts
    ]


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--batch", type=int, default=32)
    made.add_argument("--size", type=int, default=24, help="height and width of the pictures")
    args = made.parse_args()
    prepare(args)
    heads = ["channels", "chunks", "ms", "of plain", "MiB", "of plain"]
    found = [row for n_channels in (16, 64) for row in rows(n_channels, args)]
    publish(args, "Batch normalization by rows", [table(heads, found)])


if __name__ == "__main__":
    main()
