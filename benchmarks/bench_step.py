# SPDX-License-Identifier: Apache-2.0
"""A training step with koila, beside the same step without it.

    python -m benchmarks.bench_step

Whole: against the plain step, which is what koila runs when the batch fits. In chunks: against the
loop one would write by hand for the same number of chunks (for the contrastive loss, which couples
all rows, that loop runs the model twice). `deep` is given a limit instead, under which koila
chooses so many chunks. Beside them: whole under a limit that is wide enough, for which each step is
planned. Times are medians; ratios are taken within a round, and a
plain step over another plain step is beside them: what differs less than that is noise. Gradients
are compared first. The last columns count the frames of koila's Python code in one step.
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
from koila import _core
from koila.memory import budget
from koila.planning import planner
from koila.staged.program import Program as Recorded
from tests.frames import frames_of

WIDE = 2**40


def clear(program: Program) -> None:
    program.model.zero_grad(set_to_none=True)


def eager(program: Program) -> None:
    clear(program)
    program.loss(program.model, program.x, program.y).backward()


def by_hand(program: Program, n_chunks: int) -> None:
    clear(program)
    program.by_hand(program, n_chunks)


def lazy(program: Program, **settings: int) -> None:
    clear(program)
    with koila.config(**settings):
        x, y = koila.lazy(program.x, program.y, batch=0)
        program.loss(program.model, x, y).backward()


def limit_for(program: Program, n_chunks: int) -> int:
    """Bytes under which a step is run in so many chunks, or a few more."""
    device = program.x.device
    clear(program)
    for share in range(100, 0, -5):
        x, y = koila.lazy(program.x, program.y, batch=0)
        loss = program.loss(program.model, x, y)
        with koila.config(memory_limit=WIDE):
            whole = planner.plan(Recorded([loss]), True).predicted
        assert whole is not None
        limit = budget.taken(device, program.model.parameters()) + int(whole * share / 100)
        with koila.config(memory_limit=limit):
            n_planned = planner.plan(Recorded([loss]), True).n_chunks
        del loss, x, y
        _core.flush()
        if n_planned >= n_chunks:
            return limit
    raise ValueError(f"{program.name} is not run in {n_chunks} chunks under any limit")


def steps_of(program: Program, step: Callable[[], None]) -> Callable[[], None]:
    """As many steps as one measurement takes."""

    def work() -> None:
        for _ in range(program.n_steps):
            step()

    return work


def check(program: Program, step: Callable[[], None]) -> None:
    """Compare the gradients of a step with the plain step's. Normalization by batches makes
    rounding many times larger: it is compared in double."""
    if not program.is_exact:
        program.model.double()
        program.x = program.x.double()
    eager(program)
    expected = [grad.clone() for grad in program.gradients()]
    step()
    for grad, right in zip(program.gradients(), expected, strict=True):
        scale = float(right.abs().max())
        torch.testing.assert_close(grad, right, rtol=1e-4, atol=1e-4 * scale + 1e-12)
    if not program.is_exact:
        program.model.float()
        program.x = program.x.float()


def row(name: str, args: argparse.Namespace) -> list[str]:
    program = make(name, args.device, args.scale)
    k = args.chunks
    settings = {"chunks": k}
    if program.is_limited:
        settings = {"memory_limit": limit_for(program, k)}
        lazy(program, **settings)
        k = koila.report().n_chunks
    steps: dict[str, Callable[[], None]] = {
        "eager": partial(eager, program),
        "eager again": partial(eager, program),
        "koila": partial(lazy, program, chunks=1),
        "limited": partial(lazy, program, memory_limit=WIDE),
        "hand": partial(by_hand, program, k),
        "koila in chunks": partial(lazy, program, **settings),
    }
    for side in ("koila", "limited", "hand", "koila in chunks"):
        if side != "hand" or program.is_exact:
            check(program, steps[side])
    variants = {
        side: partial(seconds_of, steps_of(program, step), args) for side, step in steps.items()
    }
    times = interleave(variants, args.rounds)

    def milliseconds(side: str) -> str:
        ms = statistics.median(times[side]) / program.n_steps * 1e3
        return f"{ms:.0f}" if ms >= 10 else f"{ms:.2f}"

    return [
        name,
        milliseconds("eager"),
        f"{ratio(times, 'eager again', 'eager'):.3f}",
        f"{ratio(times, 'koila', 'eager'):.3f}",
        f"{ratio(times, 'limited', 'eager'):.3f}",
        f"{k}",
        milliseconds("hand"),
        f"{ratio(times, 'koila in chunks', 'hand'):.3f}",
        f"{frames_of(steps['koila'])}",
        f"{frames_of(steps['koila in chunks'])}",
    ]


HEADS = ["step", "eager ms", "eager / eager", "koila / eager", "koila, limited / eager", "chunks"]
HEADS += ["by hand ms", "koila in chunks / by hand", "frames whole", "frames in chunks"]


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--chunks", type=int, default=4)
    made.add_argument("--scale", type=int, default=1, help="times the usual rows")
    made.add_argument("--only", choices=list(PROGRAMS), help="one program alone")
    args = made.parse_args()
    prepare(args)
    rows = [row(name, args) for name in ([args.only] if args.only else PROGRAMS)]
    publish(args, "A training step", [table(HEADS, rows)])


if __name__ == "__main__":
    main()
