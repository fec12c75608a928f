"""The bytes that the core tells of every program are those of the model in Python."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import koila
from koila.program import Program as StagedProgram
from memory_model import assert_measured, compared
from model_kit import run_random
from oracle import assert_same
from programs import PROGRAMS
from programs_kit import Program

N_ROWS = 11
held: list[Tensor] = []  # what the user holds of the program that is measured


def weight(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype, requires_grad=True)


def half(x: Tensor) -> Tensor:
    """Gradients of half precision are summed in float32."""
    return (x.bfloat16() * weight(4, dtype=torch.bfloat16)).exp().sum()


def two_that_are_broadcast(x: Tensor) -> Tensor:
    """Of two gradients that are summed one after the other, the second is the larger one."""
    return torch.where(x > 0, weight(1), weight(4)).exp().sum()


def joints_after_the_last_body(x: Tensor) -> Tensor:
    """The tail is two joints, and what the first one keeps is there in the second."""
    loss = (x * weight(4)).sum(0).mul(torch.ones(1000, 4)).sum()
    moved = (x * loss.detach()).sum(0)
    held.append(moved.mul(torch.ones(5000, 4)).logsumexp(0))
    return loss


RARE: list[Callable[[Tensor], Tensor]] = [half, two_that_are_broadcast, joints_after_the_last_body]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_programs(program: Program) -> None:
    with compared() as made:
        assert_same(program, program.rows(N_ROWS), chunks=3)
    assert max(made, default=0) > 2


@pytest.mark.sanitize
@pytest.mark.parametrize("program", RARE, ids=lambda program: program.__name__)
def test_rare_programs(program: Callable[[Tensor], Tensor]) -> None:
    held.clear()
    staged = StagedProgram([program(koila.lazy(torch.ones(N_ROWS, 4)))])
    for is_graph in (False, True):
        assert assert_measured(staged, is_graph) > 4


@pytest.mark.sanitize
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", range(0, 120, 20))
def test_random_programs(first: int) -> None:
    """Several batches, reads in the middle, writes, views, draws, failures."""
    with compared() as made:
        run_random(first)
    assert len(made) > 40 and max(made) > 10
