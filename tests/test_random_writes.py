"""Random programs of factories, writes, views, masks and reads in the middle are eager's."""

from __future__ import annotations

import pytest

import random_writes
from random_writes import Program

pytestmark = pytest.mark.sanitize

#: Programs that were wrong once, in their smallest form.
ONCE_WRONG = {
    "a write of a number beside a view that waits": Program(
        (
            "v0 = o[:, 1:]",
            "r1 = float((t > 0).sum()) / 5",
            "v2 = o.split(2, 0)[0]",
            "with torch.no_grad(): v0[:, torch.tensor([0, 2])] *= 0.5",
        ),
        n_rows=8,
        n_others=5,
        data=846,
    ),
    "a number that is written when what reads it waits": Program(
        (
            "h = z * v",
            "c0 = z * 0.5",
            "with torch.no_grad(): h.index_copy_(0, torch.tensor([1, 0]), c0[:2].clone())",
            "v5 = c0.swapaxes(0, -1)",
            "v5.copy_(v5.mean(0))",
        ),
        n_rows=7,
        n_others=5,
        data=629,
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("chunks", random_writes.COUNTS)
@pytest.mark.parametrize("name", ONCE_WRONG)
def test_once_wrong(name: str, chunks: int) -> None:
    assert random_writes.failure(ONCE_WRONG[name], chunks) is None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", range(0, 300, 20))
def test_programs(first: int) -> None:
    """More of them: python tests/random_writes.py --count 20000"""
    for seed in range(first, first + 20):
        program = random_writes.write(seed)
        found = next(random_writes.failures(program), None)
        assert found is None, f"seed {seed}, {found[0]} chunks: {found[1]}\n{program}"
