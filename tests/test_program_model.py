# SPDX-License-Identifier: Apache-2.0
"""The core's runs of every program are those of the model in Python."""

from __future__ import annotations

import pytest

import random_writes
from oracle import assert_same
from program_model import compared
from programs import PROGRAMS
from programs_kit import Program

N_ROWS = 11
#: Programs of which one call, or none, is left to be cut when they ask for a graph of the gradient.
RUN_LIVE = ("slope", "time_major_scan")


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_whole_programs(program: Program) -> None:
    with compared() as made:
        assert_same(program, program.rows(N_ROWS), chunks=3)
    assert max(made, default=0) > 1 or program.name in RUN_LIVE


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", range(0, 120, 20))
def test_random_programs(first: int) -> None:
    """Several batches, reads in the middle, writes, views, draws, failures."""
    with compared() as made:
        for program in map(random_writes.write, range(first, first + 20)):
            if random_writes.wanted_of(program) is not None:
                assert random_writes.failure(program, 3) is None
    assert len(made) > 20 and max(made) > 3
