# SPDX-License-Identifier: Apache-2.0
"""Every program, in one chunk and in several, gives eager's loss, gradients, buffers and draws."""

from __future__ import annotations

import pytest

from oracle import (
    assert_gradient_of_loss,
    assert_passes,
    assert_reproducible,
    assert_same,
    is_whole,
)
from programs import BARRIER, ONE_PASS, PROGRAMS, VARIED
from programs_kit import Program

N_ROWS = 11
#: None of 2, 3 and 7 divides the batch; the last leaves one row a chunk.
CHUNKS = [1, 2, 3, 7, N_ROWS]

each_program = pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
each_split = pytest.mark.parametrize("chunks", CHUNKS)


#: Its penalty is plain, so torch makes that graph while the model is only recorded. torch adds up
#: gradients in the order the graphs were made, and a recurrent weight has more than two to add.
OTHER_ORDER = "lstm_time-several"


def has_bits(program: Program, chunks: int | None) -> bool:
    """Tell whether every bit must be eager's: in one chunk, where the graph is made in one go."""
    return is_whole(chunks) and program.name != OTHER_ORDER


@pytest.mark.rotated("chunks")
@each_split
@each_program
def test_same_as_eager(program: Program, chunks: int) -> None:
    """The loss, gradients, buffers and generator are eager's, whatever is drawn."""
    exact_bits = has_bits(program, chunks)
    assert_same(program, program.rows(N_ROWS), chunks=chunks, exact_bits=exact_bits)


@each_program
def test_same_as_eager_without_being_told(program: Program) -> None:
    """A program that fits is run in one chunk, bit for bit."""
    assert_same(program, program.rows(N_ROWS), chunks=None, exact_bits=has_bits(program, None))


# Three rows, not two: the statistics of two rows have gradients that are nothing but rounding.
@pytest.mark.rotated("n_rows")
@pytest.mark.parametrize("n_rows", [3, 23])
@each_program
def test_same_as_eager_at_other_sizes(program: Program, n_rows: int) -> None:
    """A batch of fewer rows than the chunks asked for, and a larger one."""
    if not program.baked:
        assert_same(program, n_rows, chunks=5)


@each_program
def test_input_gradients(program: Program) -> None:
    """A batch that asks for gradients gets them, on the tensors the user has."""
    assert_same(program, program.rows(N_ROWS), chunks=3, input_gradients=True)


@pytest.mark.rotated("chunks")
@pytest.mark.parametrize(
    ("program", "chunks"),
    [
        pytest.param(program, chunks, id=f"{program.name}-{chunks}")
        for program in ONE_PASS
        for chunks in ([1, 3, N_ROWS] if program in VARIED else [3])
    ],
)
def test_one_pass(program: Program, chunks: int) -> None:
    """Where the loss is linear in its reductions the rows go forward once and backward once; of a
    model's other losses in three chunks."""
    assert_passes(program, program.rows(N_ROWS), chunks=chunks)


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("program", BARRIER, ids=lambda program: program.name)
def test_two_forwards_at_most(program: Program, chunks: int) -> None:
    """A barrier costs one more forward, however many there are; in one chunk it costs nothing."""
    assert_passes(program, program.rows(N_ROWS), chunks=chunks)


@pytest.mark.rotated("chunks")
@pytest.mark.parametrize("chunks", [2, 3, N_ROWS])
@pytest.mark.parametrize(
    "program", [p for p in PROGRAMS if p.draws], ids=lambda program: program.name
)
def test_draws_are_of_one_loss(program: Program, chunks: int) -> None:
    """The same seed draws the same numbers, and the gradient is that of the loss they gave."""
    assert_reproducible(program, N_ROWS, chunks=chunks)
    assert_gradient_of_loss(program, N_ROWS, chunks=chunks)
