# SPDX-License-Identifier: Apache-2.0
"""Which of the tests marked `rotated` run on a day; `make suite` runs all of them.

Each process of a run chooses by the order in which the tests are collected, so that all choose the
same, and so that each function has about as many tests on one day as on another.
"""

from __future__ import annotations

import collections
import zlib

import pytest

#: So many days go by until all tests of a function have run.
N_DAYS = 14


def not_of(day: int, tests: list[pytest.Item]) -> set[pytest.Item]:
    """Return those of a list of tests that are marked `rotated` and do not run on a day.

    Of the tests of a function one in fourteen runs, and so each once in two weeks; of fewer tests
    one runs every day, but a single one runs once in two weeks. Where the mark names a parameter of
    numbers, as `rotated("chunks")`, each case runs each day with one number of it, and with the
    next one on the next day.
    """
    functions = collections.defaultdict[str, list[pytest.Item]](list)
    for test in tests:
        if test.get_closest_marker("rotated") is not None:
            functions[test.nodeid.partition("[")[0]].append(test)
    others = set[pytest.Item]()
    for name, of_function in functions.items():
        turn = day + zlib.crc32(name.encode())  # not all functions begin on the same day
        mark = of_function[0].get_closest_marker("rotated")
        assert mark is not None
        if mark.args:
            for i, case in enumerate(cases_of(of_function, *mark.args)):
                others.update(case)
                others.discard(case[(i + turn) % len(case)])
        else:
            n = len(of_function)
            n_shares = N_DAYS if n == 1 else min(n, N_DAYS)
            others.update(test for i, test in enumerate(of_function) if (i + turn) % n_shares)
    return others


def cases_of(tests: list[pytest.Item], parameter: str) -> list[list[pytest.Item]]:
    """Return the tests of a function by all that they are given but one number.

    In one chunk, and in as many as koila chooses, which for a small program is one, is another case
    than in several: so each case runs in several every day.
    """
    cases = collections.defaultdict[tuple[int, ...], list[pytest.Item]](list)
    for test in tests:
        given: dict[str, object] = test.callspec.params  # type: ignore[attr-defined]
        is_whole = given[parameter] in (None, 1)
        same = (id(value) for name, value in given.items() if name != parameter)
        cases[is_whole, *same].append(test)
    return list(cases.values())
