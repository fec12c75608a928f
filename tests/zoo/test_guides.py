# SPDX-License-Identifier: Apache-2.0
"""docs/guides: the code of each page, in chunks, gives what the framework gives without koila."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import koila
import pages
from koila.reporting import reports
from koila.summary import Summary
from zoo import libraries  # noqa: F401 - the libraries can be imported

pytestmark = pytest.mark.filterwarnings("ignore")
GUIDES = Path(__file__).parents[2] / "docs/guides"
#: What a page needs, by its name.
LIBRARIES = {
    "accelerate": "accelerate",
    "fabric": "lightning.fabric",
    "ignite": "ignite.engine",
    "lightning": "lightning.pytorch",
    "skorch": "skorch",
    "timm": "timm",
    "transformers": "transformers",
}


def run(text: str) -> nn.Module:
    """The model that the script of a page has trained, in float64."""
    # A Trainer writes what dataclasses of the script's module say.
    names: dict[str, Any] = {"__name__": "guide"}
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        pages.run(text, names)
    finally:
        torch.set_default_dtype(before)
        koila.config(chunks=None, memory_limit=None)
    model: nn.Module = names.get("trained", names["model"])
    return model


@pytest.mark.parametrize("name", LIBRARIES)
def test_equals_the_framework_without_koila(name: str) -> None:
    pytest.importorskip(LIBRARIES[name])
    text = (GUIDES / f"{name}.md").read_text()
    with koila.off():
        want = run(text).state_dict()
    summary = Summary()
    with reports.observed_by(summary):
        got = run(text).state_dict()
    assert summary.n_steps == 5
    assert summary.most_chunks == 3
    backwards = [ran for ran in summary.last if ran.what == "backward()"]
    assert [ran.n_chunks for ran in backwards] == [3] * 5
    for key, value in want.items():
        torch.testing.assert_close(got[key], value, rtol=1e-9, atol=1e-11, msg=key)
