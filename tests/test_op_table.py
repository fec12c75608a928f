# SPDX-License-Identifier: Apache-2.0
"""What is known of an op stands in its row: a cell that has no default cannot be left out."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

CORE = Path(__file__).parents[1] / "koila_c" / "core"
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
    row = 'BOTH   (abs,                 "input",   LIGHT, same, '
    assert errors(tmp_path / "as it is", row, row) == ""
    assert "WEIGHT_same" in errors(tmp_path / "left out", row, row.replace("LIGHT, ", ""))
    assert "WEIGHT_DENSE" in errors(tmp_path / "unknown", row, row.replace("LIGHT", "DENSE"))
