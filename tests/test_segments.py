"""A body in segments, and what crosses from body to body made again, give eager's numbers too."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from koila import plan, replay
from koila.program import Op, Program, Way
from oracle import assert_same
from program_model import compared
from programs import PROGRAMS
from programs_kit import Program as Written

N_ROWS = 11


@dataclasses.dataclass
class Seen:
    """What ran: the most segments of a body, and how often something was made again."""

    n_segments: int = 0
    n_again: int = 0
    n_offloaded: int = 0


Force = Callable[[Way], Seen]


@pytest.fixture
def force(monkeypatch: pytest.MonkeyPatch) -> Iterator[Force]:
    """Run every program in so many segments, and keep every so manieth of what crosses."""
    seen = Seen()

    def force(way: Way) -> Seen:
        original, schedule = plan.plan, Program.schedule

        def changed(*args: Any, **kwargs: Any) -> plan.Plan:
            planned = original(*args, **kwargs)
            return dataclasses.replace(planned, way=way)

        def noted(*args: Any) -> Any:
            steps = schedule(*args)
            for step in steps:
                seen.n_segments = max(seen.n_segments, len(step.runs))
                seen.n_again += step.op == Op.AGAIN
                seen.n_offloaded += len(step.values) * (step.op == Op.FORWARD)
            return steps

        monkeypatch.setattr(plan, "plan", changed)
        monkeypatch.setattr(Program, "schedule", noted)
        return seen

    yield force
    assert replay.plan is plan


#: A recurrent layer and its loss are two calls; a graph of the gradient, and pairs, run whole.
UNCUT = ("lstm", "gru", "bag_of_words", "slope")


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_segments(program: Written, force: Force) -> None:
    """The loss, gradients, buffers and generator are eager's, and what each segment reads and
    leaves is what the model in Python says."""
    seen = force(Way(4))
    with compared():
        assert_same(program, program.rows(N_ROWS), chunks=3)
    assert seen.n_segments > 1 or program.name.startswith(UNCUT)


#: Some of what several bodies hand to each other.
CROSSING = "cnn_bn residual_bn barlow reused resnet norm_root mlp-correlation".split()


@pytest.mark.parametrize("n_segments", [1, 3])
@pytest.mark.parametrize("keep_every", [2, 3])
@pytest.mark.parametrize(
    "program",
    [p for p in PROGRAMS if p.name.startswith(tuple(CROSSING))],
    ids=lambda program: program.name,
)
def test_made_again(program: Written, keep_every: int, n_segments: int, force: Force) -> None:
    """What crosses from body to body may be let go and made again."""
    seen = force(Way(n_segments, keep_every))
    assert_same(program, program.rows(N_ROWS), chunks=3)
    assert seen.n_again > 0


@pytest.mark.parametrize("n_segments", [1, 3])
@pytest.mark.parametrize(
    "program",
    [p for p in PROGRAMS if p.name.startswith(tuple(CROSSING))],
    ids=lambda program: program.name,
)
def test_offloaded(program: Written, n_segments: int, force: Force) -> None:
    """What crosses from body to body may be kept in files meanwhile."""
    seen = force(Way(n_segments, 1, True))
    assert_same(program, program.rows(N_ROWS), chunks=3)
    assert seen.n_offloaded > 0
