# SPDX-License-Identifier: Apache-2.0
"""op_table(): the rows of ops.def as dicts."""

from __future__ import annotations

from typing import Any

from koila import _core
from samples_kit import f

core: Any = _core


def test_op_table() -> None:
    table = {row["name"]: row for row in core.op_table()}
    assert len(table) == len(core.op_table()) > 400
    words = {
        "name",
        "call",
        "kind",
        "aliases",
        "is_heavy",
        "n_gates",
        "draws",
        "gathers",
        "is_cast",
        "held",
    }
    assert all(set(row) == words for row in table.values())
    assert {row["kind"] for row in table.values()} == {"OP", "VIEW", "INPLACE"}
    kinds = {"add": "OP", "view": "VIEW", "add_": "INPLACE", "dropout": "OP"}
    assert {name: table[name]["kind"] for name in kinds} == kinds
    assert table["mul"]["aliases"] == ["__mul__", "__rmul__", "multiply"]
    assert table["relu"]["call"] == "input"
    assert table["relu"]["is_heavy"] is False
    assert table["matmul"]["is_heavy"] is True
    assert table["div"]["held"][1] == (0, 2, 2)  # for each operand, and any further one
    assert table["div_"]["held"] == table["div"]["held"] != table["relu"]["held"]


def test_aliases_are_rows_of_another_name() -> None:
    names = [row["name"] for row in core.op_table()]
    aliases = [alias for row in core.op_table() for alias in row["aliases"]]
    assert len(set(names + aliases)) == len(names) + len(aliases)
    x = f(4, 3)
    assert core.infer("multiply", (x, 2)) == core.infer("mul", (x, 2))
