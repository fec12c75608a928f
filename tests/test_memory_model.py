"""The bytes that the core tells of every program are those of the model in Python."""

from __future__ import annotations

import pytest

import random_writes
from memory_model import compared
from oracle import assert_same
from programs import PROGRAMS
from programs_kit import Program

N_ROWS = 11


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_programs(program: Program) -> None:
    with compared() as made:
        assert_same(program, program.rows(N_ROWS), chunks=3)
    assert max(made, default=0) > 2


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", range(0, 120, 20))
def test_random_programs(first: int) -> None:
    """Several batches, reads in the middle, writes, views, draws, failures."""
    with compared() as made:
        for seed in range(first, first + 20):
            program = random_writes.write(seed)
            if random_writes.wanted_of(program) is not None:
                assert random_writes.failure(program, 3) is None
    assert len(made) > 40 and max(made) > 10
