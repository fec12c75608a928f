# SPDX-License-Identifier: Apache-2.0
"""A limit on the CPU holds as the kernel counts it, in a Trainer of transformers."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from test_resident import LIBRARIES, ROUNDING

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel is asked")
pytest.importorskip("accelerate")
SCRIPT = Path(__file__).with_name("resident_trainer.py")


@functools.cache
def run(*words: object) -> dict[str, Any]:
    """Train in a process of its own, without a variable of the environment for malloc."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith("MALLOC_")}
    env = kept | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT), *map(str, words)],
        check=False,
        timeout=900,
        capture_output=True,
        text=True,
        env=env,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("share", [0.5, 0.3])
def test_bert_in_a_trainer(share: float) -> None:
    eager = run("none")
    limit = int(share * eager["tensors"])
    found = run("memory_limit", limit)
    assert found["losses"] == pytest.approx(eager["losses"], rel=1e-4)
    assert min(found["chunks"]) > 1
    assert max(found["peaks"]) <= ROUNDING * limit + LIBRARIES
