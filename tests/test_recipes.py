# SPDX-License-Identifier: Apache-2.0
"""docs/recipes: each page's script trains in chunks to the weights that it has without koila."""

from __future__ import annotations

import gc
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import koila
import pages
from koila import _core
from koila.reporting import reports
from koila.summary import Summary

FOLDER = Path(__file__).parent.parent / "docs/recipes"
#: Those that train; tests/test_docs.py runs the Python of the others, test_notebook.py the cells.
RECIPES = [
    path.stem for path in sorted(FOLDER.glob("*.md")) if "def train_step(" in path.read_text()
]


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
    koila.config(chunks=None, memory_limit=None)


def trained(name: str) -> dict[str, Tensor]:
    """What a page's script has trained: the parameters and buffers of its modules.

    Its limit is twice as high, for numbers that are twice as large; and by what tests before left,
    which counts as the script's own.
    """
    gc.collect()
    left = math.ceil(_core.storage_bytes() / 2**20)
    names: dict[str, Any] = {}
    first = pages.blocks((FOLDER / f"{name}.md").read_text())[0]
    code = re.sub(r"(\d+)MiB", lambda match: f"{left + 2 * int(match[1])}MiB", first.code)
    pages.run(f"```python\n{code}```\n", names)
    modules = {key: value for key, value in names.items() if isinstance(value, nn.Module)}
    return {
        f"{key}.{inner}": tensor.detach()
        for key, module in modules.items()
        for inner, tensor in module.state_dict().items()
    }


def test_there_are_some() -> None:
    assert len(RECIPES) >= 6


@pytest.mark.parametrize("name", RECIPES)
def test_equals_plain_torch(name: str) -> None:
    """After all its steps, in which Adam divides by small gradients."""
    with koila.off():
        want = trained(name)
    summary = Summary()
    with reports.observed_by(summary):
        got = trained(name)
    assert summary.most_chunks > 1
    assert summary.n_failed == 0
    assert got.keys() == want.keys()
    for key, value in want.items():
        torch.testing.assert_close(got[key], value, rtol=1e-9, atol=1e-9, msg=key)
