# SPDX-License-Identifier: Apache-2.0
"""examples/: each script trains in chunks to the loss that it has whole, and the notebooks run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import example_scripts
from example_scripts import FOLDER

PAGE = FOLDER.parent / "docs/examples.md"


def test_each_is_tested_and_listed() -> None:
    """The scripts that need more than torch are tested by tests/zoo/test_examples.py."""
    scripts = {path.stem for path in FOLDER.glob("*.py")}
    assert scripts == example_scripts.OF_TORCH.keys() | example_scripts.OF_THE_ZOO.keys()
    listed = re.findall(r"^\| `(\w+\.\w+)` \|", PAGE.read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in FOLDER.glob("*.*"))


@pytest.mark.parametrize("name", example_scripts.OF_TORCH)
def test_equals_plain_torch(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """And what it prints in the end says what was done."""
    example_scripts.assert_equals_plain_torch(name, example_scripts.OF_TORCH[name])
    assert "in 3 chunks of" in capsys.readouterr().out


def test_the_limits_that_they_have_make_chunks() -> None:
    """As their users run them: in float32, in a process that has no other tensors."""
    script = f"import sys; sys.path.insert(0, {str(FOLDER)!r})\n"
    for name in example_scripts.OF_TORCH:
        script += f"import {name}; print({name!r}); {name}.main(['--steps', '2'])\n"
    command = [sys.executable, "-c", script]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=900, check=True)
    said = re.split(rf"^({'|'.join(example_scripts.OF_TORCH)})$", ran.stdout, flags=re.MULTILINE)
    printed = dict(zip(said[1::2], said[2::2], strict=True))
    assert printed.keys() == example_scripts.OF_TORCH.keys()
    assert [name for name, text in printed.items() if "chunks of" not in text] == []


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebook(path: Path) -> None:
    """It runs, and is kept without outputs."""
    book = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    nbformat.validate(book)
    cells = [cell for cell in book.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in cells)
    NotebookClient(book, timeout=900, kernel_name="python3").execute()
    said = "".join(output.get("text", "") for cell in cells for output in cell.outputs)
    assert "chunks of" in said
