# SPDX-License-Identifier: Apache-2.0
"""The op table: the rows of koila_c/core/ops.def, by every name that an op has."""

from __future__ import annotations

import functools
from typing import Any, Final

from koila import _core

ROWS = {name: row for row in _core.op_table() for name in (row["name"], *row["aliases"])}

# The indices of KlHeld's handed_on and is_stepwise in the entry "held" of a row.
_HELD_HANDED_ON: Final = 5
_HELD_STEPWISE: Final = 7

# numpy's names of arguments, which torch accepts instead of its own.
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
    """Split the signature of a row: return the names of arguments, how many of them may be
    positional, and other names of arguments, each with the first."""
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


@functools.cache
def names_of(signature: str, n_positional: int, keywords: tuple[str, ...]) -> list[str]:
    """Return the names that a signature has for the arguments of a call: so many positional ones,
    and these keywords. Without keywords, there may be more arguments than names."""
    names, _, others = parse(signature)
    assert n_positional <= len(names) or not keywords, signature
    found = names[:n_positional]
    for name in keywords:
        is_known = name in names
        found.append(name if is_known else others.get(name, _NUMPY_NAMES.get(name, name)))
    return found


def bind(signature: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by their names in the signature."""
    names = names_of(signature, len(args), tuple(kwargs))
    return dict(zip(names, (*args, *kwargs.values()), strict=False))


def is_stepwise(name: str) -> bool:
    """Tell whether an op is a recurrent layer, which runs over its input step by step."""
    return name in ROWS and bool(ROWS[name]["held"][_HELD_STEPWISE])


def hands_on(name: str, operand: int) -> bool:
    """Tell whether the gradient of an op's operand is that of its result, if they have one size."""
    return name in ROWS and bool(ROWS[name]["held"][_HELD_HANDED_ON] >> operand & 1)


def is_cast(name: str, device_type: str) -> bool:
    """Tell whether autocast may cast what an op reads; False for what is no op of the table."""
    return name in ROWS and bool(ROWS[name]["is_cast"][device_type == "cuda"])
