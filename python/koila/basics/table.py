# SPDX-License-Identifier: Apache-2.0
"""The op table: what the rows of koila_c/core/ops.def say, by every name that an op has."""

from __future__ import annotations

import functools
from typing import Any

from koila import _core

ROWS = {name: row for row in _core.op_table() for name in (row["name"], *row["aliases"])}

_HELD_STEPWISE = 7  # where KlHeld's flag of that stands in what a row holds

# Names numpy uses, which torch takes for its own.
_NUMPY_NAMES = {
    "axis": "dim",
    "keepdims": "keepdim",
    "x": "input",
    "a": "input",
    "x1": "input",
    "x2": "other",
}


@functools.cache
def parse(signature: str) -> tuple[list[str], int, dict[str, str]]:
    """Split a row's signature: its words, how many are positional, and words' other names."""
    words: list[str] = []
    n_positional = None
    others = {}
    for text in signature.split(", "):
        if text == "*":
            n_positional = len(words)
            continue
        first, *more = text.split("=")[0].split(":")[0].lstrip("*").split("|")
        words.append(first)
        others.update(dict.fromkeys(more, first))
    return words, len(words) if n_positional is None else n_positional, others


def bind(signature: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments that were given, by the signature's words."""
    names, _, others = parse(signature)
    words = dict(zip(names, args, strict=False))
    for name, value in kwargs.items():
        known = name if name in names else others.get(name, _NUMPY_NAMES.get(name, name))
        words[known] = value
    return words


def is_stepwise(name: str) -> bool:
    """Whether an op goes through its input step by step: a recurrent layer."""
    return name in ROWS and bool(ROWS[name]["held"][_HELD_STEPWISE])
