# SPDX-License-Identifier: Apache-2.0
"""The examples in docstrings run, and give what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

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
