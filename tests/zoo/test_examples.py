# SPDX-License-Identifier: Apache-2.0
"""examples/: scripts with a framework's trainer give in chunks what they give without koila."""

from __future__ import annotations

import pytest

import example_scripts
from zoo import libraries  # noqa: F401 - the libraries can be imported

pytestmark = pytest.mark.filterwarnings("ignore")
LIBRARIES = {"finetune_transformers": "transformers", "lightning_classifier": "lightning.pytorch"}


@pytest.mark.parametrize("name", example_scripts.OF_THE_ZOO)
def test_equals_plain_torch(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """And what it prints in the end says what was done."""
    pytest.importorskip(LIBRARIES[name])
    example_scripts.assert_equals_plain_torch(name, example_scripts.OF_THE_ZOO[name])
    assert "in 3 chunks at most" in capsys.readouterr().out
