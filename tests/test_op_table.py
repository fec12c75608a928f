# SPDX-License-Identifier: Apache-2.0
"""What is known of an op stands in its row: a cell that has no default cannot be left out."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch

from koila import _core
from koila.basics.table import Word, names_of, parse
from koila.running import accrue
from koila.staged import noise

CORE = Path(__file__).parents[1] / "koila_c" / "core"
OPERATORS = torch._C._dispatch_get_all_op_names()
COMPILER = (sysconfig.get_config_var("CC") or "gcc").split()[0]


def errors(folder: Path, old: str, new: str) -> str:
    """What the compiler says of the table where a text of ops.def is another one."""
    table = (CORE / "ops.def").read_text()
    assert table.count(old) == 1
    copy = folder / "core"
    shutil.copytree(CORE, copy)
    (copy / "ops.def").write_text(table.replace(old, new))
    command = [COMPILER, "-std=c11", "-fsyntax-only", str(copy / "ops.c")]
    return subprocess.run(command, capture_output=True, text=True).stderr


@pytest.mark.skipif(shutil.which(COMPILER) is None, reason="there is no C compiler")
def test_a_row_says_what_its_op_weighs(tmp_path: Path) -> None:
    row = 'BOTH   (abs,              "input",                       CHEAP, same, '
    assert errors(tmp_path / "as it is", row, row) == ""
    assert "WEIGHT_same" in errors(tmp_path / "left out", row, row.replace("CHEAP, ", ""))
    assert "WEIGHT_DENSE" in errors(tmp_path / "unknown", row, row.replace("CHEAP", "DENSE"))


def is_cast_by_torch(name: str, key: str) -> bool:
    """Whether autocast has a kernel of its own for an op."""
    overloads = (full for full in OPERATORS if full.partition(".")[0] == f"aten::{name}")
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(full, key) for full in overloads)


@pytest.mark.parametrize("device", [0, 1], ids=["AutocastCPU", "AutocastCUDA"])
def test_rows_say_what_autocast_casts(device: int) -> None:
    """A row without the cell would promise another dtype than torch's."""
    key = ("AutocastCPU", "AutocastCUDA")[device]
    rows = [row for row in _core.op_table() if row["kind"] != "INPLACE"]
    cast = [row for row in rows if is_cast_by_torch(row["name"], key)]
    assert len(cast) > 30
    assert [row["name"] for row in cast if not row["is_cast"][device]] == []


def test_words_for_python_are_known() -> None:
    """Of draws and of gradients that gather only Python knows more than the word."""
    rows = _core.op_table()
    assert {row["draws"] for row in rows} == {None, *noise.OF_CELLS}
    assert {row["gathers"] for row in rows} == {None, *accrue.OF_CELLS}


# The signatures of rows -------------------------------------------------------------------------


def test_positional_words_and_those_by_keyword() -> None:
    assert parse("one, two=None, *, three, four='a:b|c'") == (
        Word(("one",), True, False, False, ""),
        Word(("two",), True, True, False, ""),
        Word(("three",), False, False, False, ""),
        Word(("four",), False, True, False, ""),
    )
    assert parse("") == ()
    assert parse("*, out=None") == (Word(("out",), False, True, False, ""),)
    assert parse("one,two") == parse("one,   two")


def test_what_follows_a_colon_and_a_star() -> None:
    words = parse("x1, a:size, b:rows=None, c:index, d:device, e:out=None, *shape:size")
    assert [word.kind for word in words] == ["", "size", "rows", "index", "device", "out", "size"]
    assert [word.is_variadic for word in words] == [False] * 6 + [True]
    assert words[-1].is_optional


def test_other_names() -> None:
    """Those of the row, torch's first; and numpy's wherever torch takes them."""
    signature = "self|input, dims|dim=None, size|shape, other"
    assert [word.names for word in parse(signature)] == [
        ("self", "input", "x", "a", "x1"),
        ("dims", "dim", "axis"),
        ("size", "shape"),
        ("other", "x2"),
    ]
    assert names_of(signature, 1, ("x2", "axis", "none")) == ["self", "other", "dims", "none"]
    assert names_of("x1, input", 0, ("x1", "x")) == ["x1", "input"]


@pytest.mark.parametrize("text", ["one:sizes", "one:", "one, two:row=None", ":size", "one, =3"])
def test_a_misspelt_signature_is_refused(text: str) -> None:
    with pytest.raises(AssertionError, match="in the row"):
        parse(text)


def test_all_signatures_are_parsed() -> None:
    for row in _core.op_table():
        words = parse(row["call"])
        assert len(words) <= 24, "KL_PY_WORDS_MAX"
        written = [text.split("=")[0].strip(" *") for text in row["call"].split(",")]
        own = [head.split(":")[0].split("|")[0] for head in written if head]
        assert [word.names[0] for word in words] == own
