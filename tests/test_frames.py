# SPDX-License-Identifier: Apache-2.0
"""What a step costs beside torch's own work: the frames of koila's Python code that it enters.

Unlike a time, this number is the same on each machine. It may only fall.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import koila
from frames import frames_of

#: By model and number of chunks. A machine with other limits of memory takes a few more: `SPARE`.
SPARE = 1.05
MOST = {"small-1": 66, "small-4": 474, "normalized-1": 344, "normalized-4": 6039}


@pytest.fixture(scope="module")
def counted() -> dict[str, int]:
    """The frames of the steps, in a process of their own: what ran before may add some."""
    script = Path(__file__).with_name("frames.py")
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=True, timeout=120
    )
    found: dict[str, int] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("step", MOST)
def test_of_a_step(step: str, counted: dict[str, int]) -> None:
    assert counted[step] <= SPARE * MOST[step]


def test_it_counts() -> None:
    x = koila.lazy(torch.ones(4, 2))
    assert frames_of(lambda: torch.ones(2)) == 0
    assert frames_of(lambda: koila.lazy(torch.ones(4, 2))) > 1
    assert frames_of(x.sum().item) > 1


def test_memory_that_is_shared_elsewhere_costs_nothing() -> None:
    """`other.data` shares memory without a version: only calls that read it have to watch it."""
    layer, other = torch.nn.Linear(2, 2), torch.ones(2)
    shared = other.data
    x = koila.lazy(torch.ones(4, 2))
    assert frames_of(lambda: layer(x), "note_leaf") == 0
    assert frames_of(lambda: x * other, "note_leaf") == 1
    assert frames_of(lambda: x * shared, "note_leaf") == 1
