# SPDX-License-Identifier: Apache-2.0
"""What README.md shows runs: its Python in one script, and its commands."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import koila

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()


def test_snippets() -> None:
    """Each after those before it, as a reader would paste them into a script."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(40, 6), torch.randint(3, (40,)))
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    names = {
        "F": F,
        "device": torch.device("cpu"),
        "loader": DataLoader(data, batch_size=20),
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), 0.1),
        "x": data.tensors[0],
        "y": data.tensors[1],
        "koila": koila,
        "batch": data.tensors,
    }
    snippets = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    snippets = [snippet for snippet in snippets if "koila.integrations" not in snippet]  # the zoo's
    assert len(snippets) >= 4
    try:
        for snippet in snippets:
            exec(snippet, names)
    finally:
        koila.config(chunks=None, memory_limit=None)
    assert koila.is_lazy(names["x"])
    assert model[0].weight.grad is not None


def test_files_that_it_names_exist() -> None:
    for name in re.findall(r"\]\(([^):#]+)\)", TEXT):
        assert (ROOT / name).exists(), name


def test_commands_of_the_makefile_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^\$ make (\w+)", TEXT, re.MULTILINE):
        assert f"\n{target}:" in makefile


def test_the_launcher_prints_what_it_shows() -> None:
    """On any machine: the limit, not the free memory, says how many chunks there are."""
    (command, *shown) = re.findall(r"^(?:\$ python -m koila|koila: ).*$", TEXT, re.MULTILINE)
    ran = subprocess.run(
        [sys.executable, *command.split()[2:]],
        cwd=ROOT,
        env={"PYTHONPATH": "python", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=True,
    )
    lines = [line for line in ran.stderr.splitlines() if line.startswith("koila: ")]
    assert len(shown) == 3
    for line, wanted in zip(lines[:3], shown, strict=True):
        assert line.startswith(wanted.removesuffix("..."))


def test_the_picture_can_be_drawn(tmp_path: Path) -> None:
    """By its script, elsewhere: as an SVG in which koila stays below its limit."""
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs/picture.py", tmp_path / "docs")
    path = f"{ROOT / 'python'}:{ROOT}"
    ran = subprocess.run(
        [sys.executable, "docs/picture.py"],
        cwd=tmp_path,
        env={"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=True,
    )
    found = re.search(r"(\d+) MiB (\d+) MiB$", ran.stdout, re.MULTILINE)
    assert found is not None
    assert 3 * int(found[2]) <= int(found[1])
    assert (tmp_path / "docs/memory.svg").read_text().startswith("<svg ")


def test_the_line_of_an_op_is_that_of_the_table() -> None:
    (line,) = re.findall(r"^(?:BOTH|OP) .*$", TEXT, re.MULTILINE)
    table = (ROOT / "koila_c" / "core" / "ops.def").read_text()
    assert "".join(line.split()) in {"".join(row.split()) for row in table.splitlines()}
