# SPDX-License-Identifier: Apache-2.0
"""What `make demo` concludes from its three runs."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

_DEMO = Path(__file__).parent.parent / "demo" / "demo.py"
_spec = importlib.util.spec_from_file_location("demo_of_koila", _DEMO)
assert _spec is not None
assert _spec.loader is not None
demo: Any = importlib.util.module_from_spec(_spec)
sys.modules["demo_of_koila"] = demo  # dataclasses look it up
_spec.loader.exec_module(demo)

MIB = demo.MIB


def ran(
    peak: int,
    limit: int | None = None,
    chunks: tuple[int, ...] = (1, 1),
    loss: float = 4.0,
    error: str | None = None,
) -> Any:
    steps = [
        {"loss": loss, "bytes_peak": peak * MIB, "seconds": 1.0, "chunks": count}
        for count in chunks
    ]
    parameters = {"weight": torch.ones(2)}
    limit = None if limit is None else limit * MIB
    return demo.Run("a run", limit, 2.0, error, steps, parameters)


PLAIN, DIED = ran(700), ran(300, 384, (1,), error="out of memory")


def test_all_is_shown() -> None:
    broken, missing, shown = demo.verdict(PLAIN, DIED, ran(320, 384, (3, 3)))
    assert not broken
    assert not missing
    assert "under 384 MiB" in shown
    assert "trains in 320 MiB" in shown
    assert "takes 700 MiB" in shown


@pytest.mark.parametrize(
    ("lazy", "said"),
    [
        (ran(320, 384, (3, 4)), "equal steps ran in 3 to 4 chunks"),
        (ran(390, 384, (3, 3)), "used more than the limit"),
        (ran(320, 384, (3, 3), loss=4.1), "a loss differs by 1.0e-01"),
        (ran(320, 384, (3,), error="killed"), "the koila run died: killed"),
    ],
)
def test_a_broken_promise_is_reported(lazy: Any, said: str) -> None:
    broken, missing, _ = demo.verdict(PLAIN, DIED, lazy)
    assert len(broken) == 1
    assert said in broken[0]
    assert not missing


def test_what_this_machine_cannot_show_is_no_broken_promise() -> None:
    broken, missing, _ = demo.verdict(ran(700, error="killed"), DIED, ran(320, 384, (3, 3)))
    assert not broken
    assert missing == ["the plain run, without a limit, failed: killed"]
    broken, missing, _ = demo.verdict(PLAIN, ran(300, 384), ran(320, 384, (3, 3)))
    assert not broken
    assert missing == ["the plain run fits into the limit; choose a lower --memory-limit"]


def test_the_table_has_a_line_for_each_run() -> None:
    lines = demo.table([PLAIN, DIED, ran(320, 384, (3, 3))], 2).splitlines()
    assert lines[1].split()[:6] == ["a", "run", "none", "700", "2.0", "1"]
    assert "died in step 2" in lines[2]
    assert lines[4].split()[2:6] == ["384", "320", "2.0", "3"]


@pytest.mark.rotated
def test_a_small_demo_shows_it(tmp_path: Path) -> None:
    """As a user runs it: without variables for the allocator, in as many chunks in each step."""
    unset = {key: text for key, text in os.environ.items() if not key.startswith("MALLOC_")}
    words = "--rows", "32", "--steps", "3", "--memory-limit", "320MiB"
    done = subprocess.run(
        [sys.executable, str(_DEMO), *words],
        env={**unset, "PYTHONPATH": str(_DEMO.parent.parent / "python")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Shown: under 320 MiB, where the plain script dies" in done.stdout
    _, _, limit, peak, _, chunks, *_ = re.search(r"koila, limited +\d.*", done.stdout)[0].split()  # type: ignore[index]
    assert int(peak) <= int(limit) == 320
    assert chunks.isdecimal() and int(chunks) > 1, "the same chunks in equal steps"
    source = "".join(path.read_text() for path in _DEMO.parent.glob("*.py"))
    assert "environ" not in source and "MALLOC" not in source
