# SPDX-License-Identifier: Apache-2.0
"""The `call` text of a row, read into words: the file compiled alone, and asked by ctypes."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from koila import _core

KOILA_C = Path(__file__).parents[2] / "koila_c"
SOURCES = "binding/py_signature.c core/alloc.c core/meta.c".split()
N_WORDS_MAX, N_NAMES_MAX = 24, 6
FLAGS = "is_optional is_variadic is_index is_device is_out".split()


class CWord(ctypes.Structure):
    """KlPyWord."""

    _fields_ = (
        ("names", ctypes.c_void_p * N_NAMES_MAX),
        ("n_names", ctypes.c_uint8),
        *((flag, ctypes.c_bool) for flag in FLAGS),
    )


class CSignature(ctypes.Structure):
    """KlPySignature."""

    _fields_ = (
        ("n_words", ctypes.c_uint32),
        ("n_positional", ctypes.c_uint32),
        ("words", CWord * N_WORDS_MAX),
    )


class Word(NamedTuple):
    """What is said of one word."""

    names: tuple[str, ...]
    flags: set[str]


Read = Callable[[str], tuple[int, list[Word]]]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.PyDLL:
    path = tmp_path_factory.mktemp("signature") / "signature.so"
    folders = [KOILA_C / "core", KOILA_C / "binding", sysconfig.get_path("include")]
    command = ["gcc", "-std=c11", "-O1", "-shared", "-fPIC", *(f"-I{folder}" for folder in folders)]
    sources = [str(KOILA_C / source) for source in SOURCES]
    subprocess.run([*command, *sources, "-o", str(path)], check=True)
    library = ctypes.PyDLL(str(path))
    library.kl_py_signature_new.restype = ctypes.POINTER(CSignature)
    library.kl_py_signature_free.argtypes = [ctypes.POINTER(CSignature)]
    library.kl_py_signature_free.restype = None
    library.kl_alloc_n_blocks.restype = ctypes.c_int64
    library.kl_alloc_fail_after.argtypes = [ctypes.c_int64]
    library.kl_alloc_fail_after.restype = None
    return library


@pytest.fixture
def read(library: ctypes.PyDLL) -> Any:
    """Return a function of a text: how many words are positional, and all of them."""

    def read(text: str) -> tuple[int, list[Word]]:
        signature = library.kl_py_signature_new(text.encode())
        try:
            said = signature.contents
            words = []
            for word in said.words[: said.n_words]:
                names = [
                    ctypes.cast(name, ctypes.py_object).value for name in word.names[: word.n_names]
                ]
                words.append(
                    Word(tuple(names), {flag[3:] for flag in FLAGS if getattr(word, flag)})
                )
            return said.n_positional, words
        finally:
            library.kl_py_signature_free(signature)

    n_blocks = library.kl_alloc_n_blocks()
    yield read
    assert library.kl_alloc_n_blocks() == n_blocks


def test_positional_words_and_those_by_keyword(read: Read) -> None:
    assert read("one, two=None, *, three, four=3") == (
        2,
        [
            Word(("one",), set()),
            Word(("two",), {"optional"}),
            Word(("three",), set()),
            Word(("four",), {"optional"}),
        ],
    )
    assert read("") == (0, [])
    assert read("*, out=None") == (0, [Word(("out",), {"optional"})])
    assert read("one,two") == read("one,   two")


def test_annotations(read: Read) -> None:
    _, words = read("a:size, b:rows=None, c:index, d:device, e:out=None")
    wanted: list[set[str]] = [set(), {"optional"}, {"index"}, {"device"}, {"out", "optional"}]
    assert [word.flags for word in words] == wanted


def test_a_spread_may_be_empty(read: Read) -> None:
    assert read("x1, *shape:size") == (
        2,
        [Word(("x1",), set()), Word(("shape",), {"variadic", "optional"})],
    )


def test_other_names(read: Read) -> None:
    """Those of the row, torch's first; and numpy's wherever torch takes them."""
    _, words = read("self|input, dims|dim=None, size|shape, other")
    assert [word.names for word in words] == [
        ("self", "input", "x", "a", "x1"),
        ("dims", "dim", "axis"),
        ("size", "shape"),
        ("other", "x2"),
    ]
    _, words = read("dimension, keepdim=False")
    assert [word.names for word in words] == [("dimension",), ("keepdim", "keepdims")]


def test_a_default_may_hold_anything_but_a_comma(read: Read) -> None:
    _, words = read("one='a:b|c', two=(1)")
    assert [word.names for word in words] == [("one",), ("two",)]
    assert all(word.flags == {"optional"} for word in words)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("one:sizes", "unknown annotation 'sizes'"),
        ("one:", "unknown annotation ''"),
        ("one, two:row=None", "unknown annotation 'row"),
        (":size", "word without a name"),
        ("one, =3", "word without a name"),
        ("*:size", "word without a name"),
        ("a|b|c|d|e|f|g", "too many names"),
        ("input|b|c|d", "too many names"),
        (", ".join(f"word{i}" for i in range(25)), "too many words"),
    ],
)
def test_a_misspelt_row_is_told(read: Read, text: str, message: str) -> None:
    with pytest.raises(SystemError, match=message):
        read(text)


def test_names_are_let_go(read: Read) -> None:
    """Those of a text that is read, and of one that is not, up to where it stopped."""
    name = sys.intern("a_name_of_this_test")
    before = sys.getrefcount(name)
    for _ in range(10):
        read(f"{name}, other")
        with pytest.raises(SystemError):
            read(f"one, {name}:nonsense")
    assert sys.getrefcount(name) == before


def test_as_many_words_and_names_as_there_is_room_for(read: Read) -> None:
    n_positional, words = read(", ".join(f"word{i}" for i in range(N_WORDS_MAX)))
    assert n_positional == len(words) == N_WORDS_MAX
    _, words = read("a|b|c|d|e|f")
    assert words[0].names == tuple("abcdef")


def test_memory_that_runs_out(library: ctypes.PyDLL, read: Read) -> None:
    library.kl_alloc_fail_after(0)
    try:
        with pytest.raises(MemoryError):
            read("input, dim=None")
    finally:
        library.kl_alloc_fail_after(-1)


def test_every_row_is_read_as_it_is_written(read: Read) -> None:
    """By another reader, of a few lines."""
    for row in _core.op_table():
        n_positional, words = read(row["call"])
        before, star, after = f" {row['call']}".partition(" *,")
        assert n_positional == (before.count(",") + (not star)) * bool(row["call"])
        texts = [text.strip() for text in f"{before}{after}".split(",")] if row["call"] else []
        for text, word in zip(texts, words, strict=True):
            names, equals, _ = text.lstrip("*").partition("=")
            names, _, annotation = names.partition(":")
            own = [name for name in word.names if name in names.split("|")]
            assert own == names.split("|"), row
            spread = {"variadic"} if text.startswith("*") else set()
            optional = {"optional"} if equals or spread else set()
            assert word.flags == spread | optional | ({annotation} & {"index", "device", "out"}), (
                row
            )
