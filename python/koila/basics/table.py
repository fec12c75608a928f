# SPDX-License-Identifier: Apache-2.0
"""The op table: the rows of koila_c/core/ops.def, by every name that an op has; and the names of
arguments."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch

from koila import _core

#: What is called, its positional arguments, and those by name.
Func = Callable[..., Any]
Args = tuple[Any, ...]
Words = dict[str, Any]
#: Makes a call in its own way; NotImplemented: it does not.
Handler = Callable[[Func, Args, Words], Any]

ROWS = {name: row for row in _core.op_table() for name in (row["name"], *row["aliases"])}

# The indices of KlHeld's handed_on and is_stepwise in the entry "held" of a row.
_HELD_HANDED_ON: Final = 5
_HELD_STEPWISE: Final = 7

# numpy's names of arguments, which torch accepts too (torch/csrc/utils/python_arg_parser.cpp).
_NUMPY = {
    "dim": ("axis",),
    "keepdim": ("keepdims",),
    "input": ("x", "a", "x1"),
    "other": ("x2",),
}


# What the rules of an op, or the binder, make of an argument.
_KINDS = ("size", "rows", "index", "device", "out")


@functools.cache
def schemas(name: str) -> list[Any]:
    """Return torch's schemas of a C-level callable, without those that have out=."""
    return [
        schema
        for schema in torch._C._jit_get_schemas_for_operator(f"aten::{name}")
        if not any(argument.is_out for argument in schema.arguments)
    ]


class Word(NamedTuple):
    """An argument in the signature of a row; the head of `ops.def` explains it."""

    names: tuple[str, ...]  # torch's first
    is_positional: bool
    is_optional: bool
    is_variadic: bool
    kind: str  # what follows its colon, or ""


@functools.cache
def parse(signature: str) -> tuple[Word, ...]:
    """Split the signature of a row into words."""
    words = []
    is_positional = True
    for text in filter(None, map(str.strip, signature.split(","))):
        if text == "*":
            is_positional = False
            continue
        head, equals, _ = text.partition("=")
        own, colon, kind = head.lstrip("*").partition(":")
        assert own and (not colon or kind in _KINDS), f"{text} in the row {signature}"
        # interned, as the keywords of calls are, which are compared with them
        names = [sys.intern(name) for one in own.split("|") for name in (one, *_NUMPY.get(one, ()))]
        is_variadic = text[0] == "*"
        is_optional = bool(equals) or is_variadic
        words.append(Word(tuple(names), is_positional, is_optional, is_variadic, kind))
    return tuple(words)


@functools.cache
def names_of(signature: str, n_positional: int, keywords: tuple[str, ...]) -> list[str]:
    """Return the names that a signature has for the arguments of a call: so many positional ones,
    and these keywords. Without keywords, there may be more arguments than names."""
    words = parse(signature)
    assert n_positional <= len(words) or not keywords, signature
    names = [word.names[0] for word in words]
    others = {name: word.names[0] for word in words for name in word.names}
    known = others | dict(zip(names, names, strict=True))
    return names[:n_positional] + [known.get(name, name) for name in keywords]


def words_of(names: Sequence[str], args: Args, kwargs: Words) -> Words:
    """Return the arguments of a call by their names, given those of positional ones."""
    return {**dict(zip(names, args, strict=False)), **kwargs}


def bind(signature: str, args: Args, kwargs: Words) -> Words:
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
