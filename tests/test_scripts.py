# SPDX-License-Identifier: Apache-2.0
"""Training scripts as their authors write them, run with python -m koila.

Those that need torch alone; `make zoo` runs the others too.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from zoo import known, run, scripts

NAMES = [entry.name for entry in scripts.entries() if entry.library == "torch"]


@pytest.fixture(scope="module")
def server() -> Iterator[run.Server]:
    server = run.Server()
    yield server
    server.close()


@pytest.mark.rotated
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_as_in_plain_torch(name: str, server: run.Server) -> None:
    """In one chunk, in four, and under half of the memory: what is printed, saved and trained."""
    result = server.run(name, 300)
    assert "error" not in result, result["error"]
    assert result["plain"]["peak"] > 2**24
    if name not in known.FAULTS:
        assert run.faults(result) == []
        assert result["chunks"]["n_chunks"] == 4
        assert result["limit"]["n_chunks"] > 1, result["limit"].get("error")


def test_no_script_knows_of_koila() -> None:
    assert all("koila" not in path.read_text() for path in scripts.FOLDER.glob("*.py"))
