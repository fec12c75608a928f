# SPDX-License-Identifier: Apache-2.0
"""The types that users see: mypy --strict over the package, stubtest of the C module's stub, and
what mypy and pyright infer in a user's script."""

import json
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


def test_code_of_users_by_pyright(tmp_path: Path) -> None:
    """In its strict mode, as editors show it; basedpyright brings the Node.js that it needs."""
    settings = {
        "include": [str(ROOT / "tests/typed_user_code.py")],
        "extraPaths": [str(ROOT / "python")],
        "typeCheckingMode": "strict",
        # Torch's own functions leave some types open.
        "reportUnknownMemberType": False,
        "reportUnknownArgumentType": False,
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    run("basedpyright", "--project", str(tmp_path), "--pythonpath", sys.executable)


@pytest.mark.skipif(not STUB.is_file(), reason="there is no _core.pyi yet")
def test_stub_is_true() -> None:
    run("mypy.stubtest", "koila._core", "--mypy-config-file", "pyproject.toml")


def test_benchmarks_use_what_is_there() -> None:
    """No test runs all of them: names and arguments that are gone would be found by hand."""
    command = [sys.executable, "-m", "mypy", "--explicit-package-bases", "benchmarks"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    assert "checked" in told, told
    gone = ("[attr-defined]", "[call-arg]", "[name-defined]", "[import-not-found]")
    assert not [line for line in told.splitlines() if line.endswith(gone)], told
