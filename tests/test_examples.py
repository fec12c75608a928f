"""examples/: each script trains in chunks to the loss that it has whole, and the notebooks run."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import nbformat
import pytest
import torch
from nbclient import NotebookClient

import koila
from koila import reports
from koila.summary import Summary

FOLDER = Path(__file__).parent.parent / "examples"
PAGE = FOLDER.parent / "docs/examples.md"
#: How each script is made small.
SMALL = {
    "contrastive": "--batch-size 14",
    "distillation": "--batch-size 14",
    "gan": "--batch-size 14",
    "image_classifier": "--batch-size 14",
    "language_model": "--batch-size 7 --length 12",
    "lstm": "--batch-size 10 --words 50",
}


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    """With no limit that a script sets left behind."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
    koila.config(chunks=None, memory_limit=None)


def imported(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_script_is_tested() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == SMALL.keys()


def test_the_page_lists_them() -> None:
    listed = re.findall(r"^\| `(\w+\.\w+)` \|", PAGE.read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in FOLDER.glob("*.*"))


@pytest.mark.parametrize("name", SMALL)
def test_equals_plain_torch(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The last loss of three steps, on which the gradients of all before it tell."""
    main = imported(name).main
    argv = ["--steps", "3", "--memory-limit", "", *SMALL[name].split()]
    with koila.off():
        want = main(argv)
    capsys.readouterr()
    summary = Summary()
    with reports.observed_by(summary), koila.config(chunks=3):
        got = main(argv)
    assert summary.most_chunks == 3
    assert summary.n_failed == 0
    assert got == pytest.approx(want, rel=1e-9, abs=0)
    assert "in 3 chunks of" in capsys.readouterr().out


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebook(path: Path) -> None:
    """It runs, and is kept without outputs."""
    book = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    nbformat.validate(book)
    cells = [cell for cell in book.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in cells)
    NotebookClient(book, timeout=120, kernel_name="python3").execute()
    said = "".join(output.get("text", "") for cell in cells for output in cell.outputs)
    assert "chunks of" in said
