# SPDX-License-Identifier: Apache-2.0
"""In a notebook: %load_ext koila, %%koila and %koila, run by a kernel as a browser would."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

PYTHON = Path(__file__).parent.parent / "python"
RECIPE = PYTHON.parent / "docs/recipes/notebooks.md"

SETUP = """
import sys; sys.path.insert(0, {path!r})
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
%load_ext koila
"""
MODEL = """
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3)).double()
data = TensorDataset(torch.randn(40, 8).double(), torch.randint(3, (40,)))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
"""
TRAIN = """
for x, y in DataLoader(data, batch_size=20):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
print(f"{loss.item():.9f}")
"""


def run(*cells: str) -> list[str]:
    """What stands below each cell."""
    book = nbformat.v4.new_notebook()  # type: ignore[no-untyped-call]
    book.cells = [nbformat.v4.new_code_cell(cell) for cell in cells]  # type: ignore[no-untyped-call]
    NotebookClient(book, timeout=900, allow_errors=True, kernel_name="python3").execute()
    return [_text(cell) for cell in book.cells]


def _text(cell: Any) -> str:
    return "".join(
        output.get("text", "") + "\n".join(output.get("traceback", ())) for output in cell.outputs
    )


def plain(text: str) -> str:
    """A text without colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_a_bar_below_a_cell() -> None:
    """tqdm's, without a warning that ipywidgets, which draws a nicer one, is not installed."""
    *_, shown = run(
        SETUP.format(path=str(PYTHON)),
        MODEL,
        """
        import koila
        from koila.reporting import progress
        progress.AFTER_SECONDS = 0.0
        x, y = koila.lazy(*data.tensors)
        with koila.config(chunks=4, progress=True):
            nn.functional.cross_entropy(model(x), y).backward()
        """,
    )
    assert shown.startswith("\rkoila:   0%|")
    assert "chunk/s]" in shown and "Warning" not in shown


def test_cells() -> None:
    """One cell is lazy, then all; a cell that fails leaves nothing behind; lines name cells."""
    texts = run(
        SETUP.format(path=str(PYTHON)),
        MODEL + TRAIN,
        "%%koila --chunks 3\n" + MODEL + TRAIN,
        "next(iter(DataLoader(data)))[0].__class__.__name__, koila.config()",
        "%%koila --chunks 3\n" + MODEL + "for x, y in DataLoader(data, batch_size=20):\n    1 / 0",
        "import koila\nprint(type(next(iter(DataLoader(data)))[0]).__name__, koila.config())",
        "%koila --memory-limit 1G\n" + MODEL,
        TRAIN,
        "x, y = koila.lazy(*data.tensors)\nprint(koila.explain(model(x).sum(1), full=True))",
        "%koila off",
        "import koila\nprint(type(next(iter(DataLoader(data)))[0]).__name__, koila.config())",
        "%%koila --rows 3\n1",
        "%koila --memory-limit foo",
        "%%koila --chunks 0\n1",
        "%koila --report 'x",
        "print(type(next(iter(DataLoader(data)))[0]).__name__, koila.config())",
    )
    loss = texts[1].strip()
    assert re.fullmatch(r"\d\.\d{9}", loss)
    assert texts[2].splitlines()[0] == loss
    assert "koila: 2 batches of data loaders, 2 optimizer steps" in texts[2]
    assert "in 3 chunks at most" in texts[2]
    assert "ZeroDivisionError" in texts[4] and "In[5], line 8" in plain(texts[4])
    assert "nothing was computed with a lazy batch before the error" in texts[4]
    assert texts[5] == "Tensor koila.config()\n"
    assert texts[7].strip() == loss
    assert re.search(r"Cell In\[\d+\]:\d", texts[8])
    assert "koila: 2 batches of data loaders" in texts[9]
    assert texts[10] == "Tensor koila.config()\n"
    wrong = [plain(text).strip() for text in texts[11:15]]
    assert wrong[0] == "UsageError: %%koila: unrecognized arguments: --rows 3"
    assert wrong[1].startswith("UsageError: --memory-limit='foo': it is no size; write for example")
    assert wrong[2] == "UsageError: chunks must be at least 1, not 0"
    assert wrong[3].startswith("UsageError: No closing quotation")
    assert texts[15] == "Tensor koila.config()\n"


def test_an_error_names_the_cell_that_recorded_the_call() -> None:
    """Which is not the one that asks for the number."""
    texts = run(
        SETUP.format(path=str(PYTHON)),
        "import koila\n\nids = koila.lazy(torch.tensor([2, 9]))\n"
        "found = nn.functional.embedding(ids, torch.ones(3, 4))",
        "found.sum().item()",
    )
    assert "index out of range" in texts[2]
    assert "Cell In[2]:4" in plain(texts[2]).splitlines()[-1]


def cards(cell: Any) -> list[str]:
    """What of a cell's results a notebook shows as HTML."""
    shown = [output.data.get("text/html") for output in cell.outputs if "data" in output]
    return [html for html in shown if html is not None]


def test_the_cells_of_the_recipe_show_cards(tmp_path: Path) -> None:
    """docs/recipes/notebooks.md: the cards have no script, and stay in an exported notebook."""
    cells = re.findall(r"^```ipython\n(.*?)^```$", RECIPE.read_text(), re.DOTALL | re.MULTILINE)
    book = nbformat.v4.new_notebook()  # type: ignore[no-untyped-call]
    cells = [f"import sys; sys.path.insert(0, {str(PYTHON)!r})", *cells]
    book.cells = [nbformat.v4.new_code_cell(cell) for cell in cells]  # type: ignore[no-untyped-call]
    NotebookClient(book, timeout=900, kernel_name="python3").execute()
    assert "chunks at most" in _text(book.cells[2])
    (report,), (explained,) = cards(book.cells[-2]), cards(book.cells[-1])
    assert "BatchNorm1d" in report and "backward() at Cell In[3]:5: 6 calls" in report
    assert "least limit that works" in explained and "BatchNorm1d" in explained
    for card in (report, explained):
        assert len(card.encode()) <= 50 * 1024
        assert not re.search(r"<script|\bon\w+=|javascript:|https?:", card, re.IGNORECASE)
