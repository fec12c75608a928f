# SPDX-License-Identifier: Apache-2.0
"""One text, of which a model's scores take more than all else: plain, by hand, and with koila.

    python -m benchmarks.bench_head

By hand is what memory-efficient losses do: the body once, then scores and loss of some positions at
a time, forward and at once back, and the gradient of the body's output at the end. Koila is given a
limit that allows as much as that takes. Peaks are of tensors, beyond what was there; times are
medians, ratios are taken within a round. Gradients are compared first.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import koila
from benchmarks.bench import interleave, parser, prepare, publish, ratio, seconds_of, table
from benchmarks.bench_limits import peak_of
from demo.model import GPT
from koila.memory import budget

SIZES = ((256, 8192), (512, 16384), (1024, 32768))  # positions and words
N_PIECES = 8


def eager(model: GPT, x: Tensor, y: Tensor) -> None:
    model.zero_grad(set_to_none=True)
    model.loss(x, y).backward()


def by_hand(model: GPT, x: Tensor, y: Tensor) -> None:
    model.zero_grad(set_to_none=True)
    hidden = model.norm(body(model, x))
    leaf = hidden.detach().requires_grad_()
    for h, labels in zip(leaf.tensor_split(N_PIECES, 1), y.tensor_split(N_PIECES, 1), strict=True):
        scores = model.head(h).flatten(0, 1)
        (F.cross_entropy(scores, labels.flatten(), reduction="sum") / y.numel()).backward()
    hidden.backward(leaf.grad)


def body(model: GPT, x: Tensor) -> Tensor:
    h = model.chars(x) + model.places(torch.arange(x.shape[1], device=x.device))
    for block in model.blocks:
        h = block(h)
    return h


def limited(model: GPT, x: Tensor, y: Tensor, n_bytes: int) -> None:
    model.zero_grad(set_to_none=True)
    limit = budget.taken(x.device, model.parameters()) + n_bytes
    with koila.config(memory_limit=limit):
        x, y = koila.lazy(x, y)
        model.loss(x, y).backward()


def peak(model: GPT, step: Callable[[], None]) -> int:
    """Bytes beyond the weights."""
    model.zero_grad(set_to_none=True)
    return peak_of(step)


def check(model: GPT, step: Callable[[], None], wanted: list[Tensor]) -> None:
    step()
    for parameter, right in zip(model.parameters(), wanted, strict=True):
        assert parameter.grad is not None
        scale = float(right.abs().max())
        torch.testing.assert_close(parameter.grad, right, rtol=1e-4, atol=1e-4 * scale)


def main() -> None:
    made = parser(__doc__)
    args = made.parse_args()
    prepare(args)
    rows = []
    for length, n_words in SIZES:
        model = GPT(n_words, length=length, width=256, n_heads=4, n_blocks=4).to(args.device)
        x, y = torch.randint(n_words, (2, 1, length), device=args.device)
        eager(model, x, y)
        wanted = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        peaks = {"eager": peak(model, partial(eager, model, x, y))}
        peaks["by hand"] = peak(model, partial(by_hand, model, x, y))
        n_bytes = int(1.25 * peaks["by hand"])
        steps = {
            "eager": partial(eager, model, x, y),
            "by hand": partial(by_hand, model, x, y),
            "koila": partial(limited, model, x, y, n_bytes),
        }
        for step in steps.values():
            check(model, step, wanted)
        print(koila.report())
        peaks["koila"] = peak(model, steps["koila"])
        variants = {name: partial(seconds_of, step, args) for name, step in steps.items()}
        times = interleave(variants, args.rounds)
        for name in steps:
            rows.append(
                [
                    f"{length} x {n_words}",
                    name,
                    f"{statistics.median(times[name]) * 1e3:.0f}",
                    f"{ratio(times, name, 'eager'):.2f}",
                    f"{ratio(times, name, 'by hand'):.2f}",
                    f"{peaks[name] / 2**20:.0f}",
                    f"{peaks[name] / peaks['eager']:.2f}",
                ]
            )
    heads = ["positions x words", "", "ms", "of eager", "of by hand", "MiB", "of eager"]
    publish(args, "One text, and a head larger than all else", [table(heads, rows)])


if __name__ == "__main__":
    main()
