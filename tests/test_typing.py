"""The types that users see: mypy --strict over the package, and stubtest of the C module's stub."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
STUB = ROOT / "python" / "koila" / "_core.pyi"

pytestmark = pytest.mark.slow


def run(*command: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_mypy_strict() -> None:
    run("mypy")


def test_code_of_users() -> None:
    run("mypy", "--strict", "tests/typed_user_code.py")


@pytest.mark.skipif(not STUB.is_file(), reason="there is no _core.pyi yet")
def test_stub_is_true() -> None:
    run("mypy.stubtest", "koila._core", "--mypy-config-file", "pyproject.toml")
