# SPDX-License-Identifier: Apache-2.0
"""The examples in docstrings run, and give what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import koila

MODULES = sorted(
    found.name.removeprefix("koila.")
    for found in pkgutil.walk_packages(koila.__path__, "koila.")
    if found.name not in ("koila._core", "koila.__main__")
    and not found.name.startswith("koila.integrations")
)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    assert doctest.testmod(importlib.import_module(f"koila.{name}")).failed == 0


def test_what_is_public_has_an_example() -> None:
    functions = [getattr(koila, name) for name in koila.__all__ if name[0].islower()]
    told = [one for one in functions if "ipython" not in one.__name__]
    assert [one.__name__ for one in told if ">>> " not in (one.__doc__ or "")] == []


def test_their_sections_are_those_that_the_docs_know() -> None:
    """docs/api.md shows another word as a quotation: an example on one line, without its code."""
    known = {"Args", "Attributes", "Examples", "Raises", "Returns", "Warns", "Yields"}
    for path in Path(koila.__file__).parent.rglob("*.py"):
        assert set(re.findall(r"^ +([A-Z]\w+):$", path.read_text(), re.MULTILINE)) <= known, path
