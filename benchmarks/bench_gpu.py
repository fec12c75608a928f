# SPDX-License-Identifier: Apache-2.0
"""Steps that fill a GPU: plain, accumulated by hand, and with koila, in chunks and under a limit.

    python -m benchmarks.bench_gpu --device cuda

A language model of GPT-2's size under bfloat16 autocast, a convolutional network with batch
normalization, and a contrastive loss over pairs. "Peak" is what the allocator hands out at most
beyond what was there before, gradients included; "gradient" the largest difference from the plain
step's over the largest entry; of the plain step itself, from one run to the next. Under a limit
koila chooses the chunks. At the end batches that the plain step cannot hold: times are of one row.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

import koila
from benchmarks.bench import interleave, parser, prepare, publish, ratio, seconds_of, table
from benchmarks.programs import (
    Program,
    accumulate,
    classify,
    continue_text,
    contrast,
    encoder,
    two_passes,
)
from demo.model import GPT

N_CHUNKS = 4
SHARE = 0.35
GIB = 2**30


def under_autocast(loss: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    def autocast(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            return loss(model, x, y)

    return autocast


def gpt(rows: int, scale: float) -> Program:
    """124 million parameters, texts of 1,024 tokens."""
    words, length = int(50257 * scale), int(1024 * scale)
    model = GPT(words, length=length, width=768, n_heads=12, n_blocks=max(1, int(12 * scale)))
    x, y = torch.randint(words, (2, rows, length))
    return Program("GPT", model, x, y, under_autocast(continue_text), accumulate)


def batch_norm(rows: int, scale: float) -> Program:
    """Twelve convolutions with batch normalization, images of 64 x 64. By hand each chunk is
    normalized by itself: other gradients, but the least work that chunks can be."""
    width, layers = 128, list[nn.Module]()
    for i in range(max(1, int(12 * scale))):
        layers += [nn.Conv2d(width if i else 3, width, 3, padding=1, bias=False)]
        layers += [nn.BatchNorm2d(width), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))
    x, y = torch.randn(rows, 3, int(64 * scale), int(64 * scale)), torch.randint(10, (rows,))
    return Program("BatchNorm", model, x, y, classify, accumulate, is_exact=False)


def contrastive(rows: int, scale: float) -> Program:
    size = int(32 * scale)
    x = torch.randn(rows, 3, size, size)
    y = x + 0.1 * torch.randn_like(x)
    return Program("contrastive", encoder(64, 128), x, y, contrast, two_passes)


MAKERS = {"GPT": (gpt, 32), "BatchNorm": (batch_norm, 512), "contrastive": (contrastive, 8192)}


def made(name: str, rows: int, args: argparse.Namespace) -> Program:
    torch.manual_seed(0)
    maker, _ = MAKERS[name]
    program = maker(rows, args.scale)
    program.model.to(args.device)
    return dataclasses.replace(program, x=program.x.to(args.device), y=program.y.to(args.device))


def plain(program: Program) -> None:
    program.model.zero_grad(set_to_none=True)
    program.loss(program.model, program.x, program.y).backward()


def by_hand(program: Program) -> None:
    program.model.zero_grad(set_to_none=True)
    program.by_hand(program, N_CHUNKS)


def lazily(program: Program, chunks: int | None = None, limit: int | None = None) -> None:
    program.model.zero_grad(set_to_none=True)
    with koila.config(chunks=chunks, memory_limit=limit):
        x, y = koila.lazy(program.x, program.y)
        program.loss(program.model, x, y).backward()


def allocated(args: argparse.Namespace) -> int:
    return torch.cuda.memory_allocated() if args.device != "cpu" else 0


def peak_of(work: Callable[[], None], program: Program, args: argparse.Namespace) -> int:
    """Bytes beyond what was there before; 1 on the CPU, where this script is only tried out."""
    program.model.zero_grad(set_to_none=True)
    if args.device == "cpu":
        work()
        return 1
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def gradient_of(work: Callable[[], None], program: Program, want: list[Tensor]) -> float:
    work()
    most = max(float(one.abs().max()) for one in want)
    return max(
        float((a - b).abs().max()) for a, b in zip(program.gradients(), want, strict=True)
    ) / (most or 1.0)


def rows_of(name: str, args: argparse.Namespace) -> list[list[str]]:
    program = made(name, max(4, int(MAKERS[name][1] * args.scale)), args)
    for _ in range(2):  # libraries take their buffers, and choose their kernels
        plain(program)
    want = [gradient.clone() for gradient in program.gradients()]
    first = peak_of(partial(plain, program), program, args)
    program.model.zero_grad(set_to_none=True)
    limit = allocated(args) + int(SHARE * first) if args.device != "cpu" else None
    ways: dict[str, Callable[[], None]] = {
        "plain": partial(plain, program),
        f"by hand in {N_CHUNKS}": partial(by_hand, program),
        f"koila in {N_CHUNKS}": partial(lazily, program, N_CHUNKS),
        f"koila, {SHARE:.0%} of plain": partial(lazily, program, None, limit),
        "koila, nothing set": partial(lazily, program),
    }
    peaks, apart, chunks = {}, {}, {}
    for way, work in ways.items():
        work()
        report = koila.report() if way.startswith("koila") else None
        chunks[way] = str(report.n_chunks) if report is not None else ""
        peaks[way] = peak_of(work, program, args)
        apart[way] = gradient_of(work, program, want)
    del want
    times = interleave(
        {way: partial(seconds_of, work, args) for way, work in ways.items()}, args.rounds
    )
    return [
        [
            f"{name}, {way}",
            chunks[way],
            f"{apart[way]:.0e}" if apart[way] else "0",
            f"{peaks[way] / GIB:.2f} GiB",
            f"{peaks[way] / peaks['plain']:.2f}",
            f"{sorted(times[way])[len(times[way]) // 2] * 1e3:.0f} ms",
            f"{ratio(times, way, 'plain'):.2f}",
        ]
        for way in ways
    ]


def larger(name: str, factor: int, args: argparse.Namespace) -> list[str]:
    """A batch so many times as large, in the same memory of the device."""
    n_rows = max(4, int(MAKERS[name][1] * args.scale))
    small = made(name, n_rows, args)
    plain(small)
    seconds = sorted(seconds_of(partial(plain, small), args) for _ in range(args.rounds))
    of_row = seconds[len(seconds) // 2] / n_rows
    del small
    program = made(name, factor * n_rows, args)
    said = "fits"
    try:
        plain(program)
    except torch.OutOfMemoryError:
        said = "out of memory"
    program.model.zero_grad(set_to_none=True)
    peak = peak_of(partial(lazily, program), program, args)
    report = koila.report()
    seconds = sorted(seconds_of(partial(lazily, program), args) for _ in range(3))
    assert report is not None
    return [
        f"{name}, {factor * n_rows} rows",
        said,
        str(report.n_chunks),
        f"{peak / GIB:.1f} GiB",
        f"{seconds[1] / (factor * n_rows) / of_row:.2f}",
    ]


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--scale", type=float, default=1.0, help="of all sizes, to try it out")
    made.add_argument("--only", help="one of the programs")
    args = made.parse_args()
    prepare(args)
    names = [name for name in MAKERS if args.only in (None, name)]
    heads = ["way", "chunks", "gradient", "peak", "of plain", "time", "of plain"]
    first = [row for name in names for row in rows_of(name, args)]
    heads_of_larger = ["batch", "plain step", "koila's chunks", "peak", "time of a row"]
    second = [larger(name, 8, args) for name in names]
    publish(args, "Steps that fill a GPU", [table(heads, first), table(heads_of_larger, second)])


if __name__ == "__main__":
    main()
