# SPDX-License-Identifier: Apache-2.0
"""Whether this run is `make sanitize`, and how much of a test is left in it.

Sanitizers watch the C code, and every call is slow under them: a test that goes through many
samples, programs or numbers of chunks takes some of each kind. All run in the suite.
"""

from __future__ import annotations

import os
from collections import defaultdict
from typing import TypeVar

import pytest

T = TypeVar("T")

IS_SANITIZED = os.environ.get("KOILA_SANITIZED") == "1"


def fewer(all_of_them: T, under_sanitizers: T) -> T:
    """Return how many there are in this run."""
    return under_sanitizers if IS_SANITIZED else all_of_them


def without_further_counts(items: list[pytest.Item]) -> list[pytest.Item]:
    """Leave one number of chunks of those above one that a test asks for: the C code is the same.

    It is three, whose chunks are uneven, where the test has that. Random programs go through their
    numbers themselves, and so keep one row a chunk.
    """
    asked: defaultdict[str, set[int]] = defaultdict(set)
    for item in items:
        if (count := _count_of(item)) is not None:
            asked[_name(item)].add(count)
    return [
        item
        for item in items
        if (count := _count_of(item)) is None
        or count == (3 if 3 in asked[_name(item)] else min(asked[_name(item)]))
    ]


def _name(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def _count_of(item: pytest.Item) -> int | None:
    """Return how many chunks a test asks for; None if it does not, or asks for one."""
    spec = getattr(item, "callspec", None)
    count = spec.params.get("chunks") if spec else None
    return count if isinstance(count, int) and count > 1 else None
