"""A training step with koila, beside the same step without it.

    python -m benchmarks.bench_step

Whole: against the plain step, which is what koila runs when the batch fits. In chunks: against the
loop one would write by hand for the same number of chunks (for the contrastive loss, which couples
all rows, that loop runs the model twice). Times are medians; ratios are taken within a round, and a
plain step over another plain step is beside them: what differs less than that is noise. Gradients
are compared first.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial

import torch

import koila
from benchmarks.bench import interleave, parser, prepare, publish, ratio, seconds_of, table
from benchmarks.programs import PROGRAMS, Program, make


def clear(program: Program) -> None:
    program.model.zero_grad(set_to_none=True)


def eager(program: Program) -> None:
    clear(program)
    program.loss(program.model, program.x, program.y).backward()


def by_hand(program: Program, n_chunks: int) -> None:
    clear(program)
    program.by_hand(program, n_chunks)


def lazy(program: Program, n_chunks: int) -> None:
    clear(program)
    with koila.config(chunks=n_chunks):
        x, y = koila.lazy(program.x, program.y, batch=0)
        program.loss(program.model, x, y).backward()


def check(program: Program, step: Callable[[], None]) -> None:
    """Compare the gradients of a step with the plain step's."""
    eager(program)
    expected = [grad.clone() for grad in program.gradients()]
    step()
    for grad, right in zip(program.gradients(), expected, strict=True):
        scale = float(right.abs().max())
        torch.testing.assert_close(grad, right, rtol=1e-4, atol=1e-4 * scale)


def row(name: str, args: argparse.Namespace) -> list[str]:
    program = make(name, args.device, args.scale)
    k = args.chunks
    steps: dict[str, Callable[[], None]] = {
        "eager": partial(eager, program),
        "eager again": partial(eager, program),
        "koila": partial(lazy, program, 1),
        "hand": partial(by_hand, program, k),
        "koila in chunks": partial(lazy, program, k),
    }
    for side in ("koila", "hand", "koila in chunks"):
        check(program, steps[side])
    variants = {side: partial(seconds_of, step, args) for side, step in steps.items()}
    times = interleave(variants, args.rounds)
    return [
        name,
        f"{statistics.median(times['eager']) * 1e3:.0f}",
        f"{ratio(times, 'eager again', 'eager'):.3f}",
        f"{ratio(times, 'koila', 'eager'):.3f}",
        f"{statistics.median(times['hand']) * 1e3:.0f}",
        f"{ratio(times, 'koila in chunks', 'hand'):.3f}",
    ]


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--chunks", type=int, default=4)
    made.add_argument("--scale", type=int, default=1, help="times the usual rows")
    made.add_argument("--only", choices=list(PROGRAMS), help="one program alone")
    args = made.parse_args()
    prepare(args)
    rows = [row(name, args) for name in ([args.only] if args.only else PROGRAMS)]
    heads = ["step", "eager ms", "eager / eager", "koila / eager", f"by hand x{args.chunks} ms"]
    heads.append(f"koila x{args.chunks} / by hand")
    publish(args, "A training step", [table(heads, rows)])


if __name__ == "__main__":
    main()
