# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest (`-p only_chunks --only-chunks`): what of the suite asks for chunks.

It leaves the tests that ask for more than one, and notes which of them say that nothing of what
they run can be cut: those ask in vain.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

#: What a test is noted with that says that it is whole.
WHOLE = "said to be whole"


def pytest_addoption(parser: Any) -> None:
    """Add the option that leaves the tests that ask for chunks."""
    parser.addoption("--only-chunks", action="store_true")


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Leave out what does not ask for more than one chunk."""
    if config.getoption("--only-chunks"):
        items[:] = [item for item in items if _n_chunks(item) > 1]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: Any) -> Iterator[None]:
    """Note what a test said to `chunked.split`."""
    said = getattr(sys.modules.get("chunked"), "SAID_WHOLE", set())
    said.clear()
    try:
        return (yield)
    finally:
        if said:
            item.user_properties.append((WHOLE, ""))


def _n_chunks(item: Any) -> int:
    return getattr(getattr(item, "callspec", None), "params", {}).get("chunks") or 0
