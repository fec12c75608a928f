# SPDX-License-Identifier: Apache-2.0
"""What is marked `rotated` runs within two weeks; where a number rotates, each case every day."""

from __future__ import annotations

import dataclasses
import itertools
import types
from typing import Any

import pytest

import rotation

CHUNKS = [None, 1, 2, 3, 7]
DAYS = range(739_000, 739_000 + rotation.N_DAYS)


@dataclasses.dataclass(eq=False)
class Collected:
    """What rotation asks of a pytest.Item."""

    callspec: types.SimpleNamespace
    mark: pytest.Mark | None

    @property
    def nodeid(self) -> str:
        return f"test_of.py::test_it[{self.callspec.params}]"

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self.mark

    @property
    def given(self) -> tuple[Any, ...]:
        return tuple(self.callspec.params.values())


def runs(mark: pytest.MarkDecorator | None, **parameters: list[Any]) -> list[set[tuple[Any, ...]]]:
    """Return with which parameters a function runs, by day."""
    tests: list[Any] = [
        Collected(
            types.SimpleNamespace(params=dict(zip(parameters, values, strict=True))),
            None if mark is None else mark.mark,
        )
        for values in itertools.product(*parameters.values())
    ]
    return [{test.given for test in set(tests) - rotation.not_of(day, tests)} for day in DAYS]


def test_what_is_not_marked_runs_every_day() -> None:
    assert {len(of_day) for of_day in runs(None, seed=[*range(20)])} == {20}


def test_each_runs_once_in_two_weeks() -> None:
    by_day = runs(pytest.mark.rotated, seed=[*range(20)])
    assert {len(of_day) for of_day in by_day} == {1, 2}
    assert sum(map(len, by_day)) == len(set[Any]().union(*by_day)) == 20


def test_of_a_few_one_runs_every_day_and_one_alone_once_in_two_weeks() -> None:
    by_day = runs(pytest.mark.rotated, seed=[1, 2, 3])
    assert {len(of_day) for of_day in by_day} == {1}
    assert set[Any]().union(*by_day) == {(1,), (2,), (3,)}
    assert sum(map(len, runs(pytest.mark.rotated, seed=[1]))) == 1


def test_each_case_runs_every_day_whole_and_in_several_chunks() -> None:
    names = ["mean", "sum", "write"]
    by_day = runs(pytest.mark.rotated("chunks"), name=names, chunks=CHUNKS)
    for of_day in by_day:
        assert len(of_day) == 2 * len(names)
        assert {name for name, chunks in of_day if chunks in (None, 1)} == set(names)
        assert {name for name, chunks in of_day if chunks not in (None, 1)} == set(names)
    assert len({frozenset(of_day) for of_day in by_day}) > 1
    assert set[Any]().union(*by_day) == set(itertools.product(names, CHUNKS))


def test_numbers_rotate_from_case_to_case() -> None:
    """Of equal cases some run in each number on one day."""
    of_day, *_ = runs(pytest.mark.rotated("chunks"), seed=[*range(3)], chunks=[2, 3, 7])
    assert {chunks for _, chunks in of_day} == {2, 3, 7}
