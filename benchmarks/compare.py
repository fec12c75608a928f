# SPDX-License-Identifier: Apache-2.0
"""Ways to take a step on a batch that does not fit, beside the plain step: gradients, peak, time.

    python -m benchmarks.compare

Three models: a language model, a network with batch normalization, a contrastive loss over pairs.
Four ways: accumulation by hand, torch.utils.checkpoint around each layer, the two passes of
GradCache (its algorithm, written here: the package does not import as it is installed), and koila
in as many chunks as accumulation has. "Gradient" is the largest difference from the plain step's
over the largest entry, "peak" what torch's allocator hands out at most, "time" a ratio within a
round.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import koila
from benchmarks.bench import interleave, parser, prepare, publish, ratio, seconds_of, table
from benchmarks.bench_limits import peak_of
from benchmarks.programs import Program, accumulate, make, two_passes

N_CHUNKS = 4
MODELS = ("GPT", "BatchNorm", "contrastive")


class Checkpointed(nn.Module):
    """A layer whose activations torch recomputes in backward."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = checkpoint(self.layer, x, use_reentrant=False)
        return made


def plain(program: Program) -> None:
    program.model.zero_grad(set_to_none=True)
    program.loss(program.model, program.x, program.y).backward()


def by_hand(program: Program, way: Callable[[Program, int], Tensor]) -> None:
    program.model.zero_grad(set_to_none=True)
    way(program, N_CHUNKS)


def checkpointed(program: Program) -> None:
    """Each block of a language model, or each run of three layers of another, in a checkpoint."""
    model = program.model
    program.model.zero_grad(set_to_none=True)
    if hasattr(model, "blocks"):
        kept, model.blocks = model.blocks, nn.ModuleList(map(Checkpointed, model.blocks))
        try:
            program.loss(model, program.x, program.y).backward()
        finally:
            model.blocks = kept
        return
    assert isinstance(model, nn.Sequential)
    parts = [Checkpointed(model[i : i + 3]) for i in range(0, len(model), 3)]
    program.loss(nn.Sequential(*parts), program.x, program.y).backward()


def lazily(program: Program) -> None:
    program.model.zero_grad(set_to_none=True)
    with koila.config(chunks=N_CHUNKS, memory_limit=None):
        x, y = koila.lazy(program.x, program.y)
        program.loss(program.model, x, y).backward()


def ways_of(program: Program) -> dict[str, Callable[[], None]]:
    ways: dict[str, Callable[[], None]] = {"plain": partial(plain, program)}
    ways["accumulation"] = partial(by_hand, program, accumulate)
    if program.name == "contrastive":
        ways["GradCache's two passes"] = partial(by_hand, program, two_passes)
    ways["checkpoint"] = partial(checkpointed, program)
    ways["koila"] = partial(lazily, program)
    return ways


def difference(program: Program, way: Callable[[], None]) -> float:
    """Of the gradients in float64, from the plain step's."""
    way()
    found = [gradient.clone() for gradient in program.gradients()]
    plain(program)
    most = max(float(want.abs().max()) for want in program.gradients())
    pairs = zip(found, program.gradients(), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs) / most


def rows(name: str, args: argparse.Namespace) -> list[list[str]]:
    exact = make(name, args.device, 1)
    exact.model.double()
    exact.x, exact.y = (t.double() if t.is_floating_point() else t for t in (exact.x, exact.y))
    errors = {way: difference(exact, work) for way, work in ways_of(exact).items()}
    program = make(name, args.device, 1)
    ways = ways_of(program)
    peaks = {}
    for way, work in ways.items():
        work()
        program.model.zero_grad(set_to_none=True)
        peaks[way] = peak_of(work)
    times = interleave(
        {way: partial(seconds_of, work, args) for way, work in ways.items()}, args.rounds
    )
    return [
        [
            f"{name}, {way}",
            f"{errors[way]:.0e}" if errors[way] else "0",
            f"{peaks[way] / 2**20:.0f} MiB",
            f"{peaks[way] / peaks['plain']:.2f}",
            f"{ratio(times, way, 'plain'):.2f}",
        ]
        for way in ways
    ]


def main() -> None:
    args = parser(__doc__).parse_args()
    prepare(args)
    heads = ["way", "gradient", "peak", "of plain", "time of plain"]
    made = [row for name in MODELS for row in rows(name, args)]
    publish(args, "Ways to take a step on a batch that does not fit", [table(heads, made)])


if __name__ == "__main__":
    main()
