"""A torch that koila was not tried with is told of once, when koila is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from koila import versions


def test_this_torch_is_a_tested_one(caplog: pytest.LogCaptureFixture) -> None:
    versions.note_untested(torch.__version__)
    versions.note_untested("2.13.1+cu128")
    assert caplog.messages == []


@pytest.mark.parametrize("version", ["2.10.0", "2.14.0a0+git0123456", "3.0"])
def test_another_is_told(version: str, caplog: pytest.LogCaptureFixture) -> None:
    versions.note_untested(version)
    assert len(caplog.messages) == 1
    assert version in caplog.text and "2.13" in caplog.text


def test_it_is_told_at_import() -> None:
    code = "import torch; torch.__version__ = '2.99.0'; import koila; import koila.versions"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stderr.count("2.99.0") == 1
