# SPDX-License-Identifier: Apache-2.0
"""What a step costs beside torch's own work: the frames of koila's Python code that it enters.

Unlike a time, this number is the same on each machine. It may only fall.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch

import koila
from frames import frames_of, n_entered
from koila.basics import engine

#: By model and number of chunks. A machine with other limits of memory takes a few more: `SPARE`.
SPARE = 1.05
MOST = {"small-1": 51, "small-4": 331, "normalized-1": 205, "normalized-4": 1872}


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


class _Twice(engine.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * 2


def test_autograd_calls_backward_of_own_functions_itself() -> None:
    """Not through the `apply` of torch's node, nor through koila's patch of it."""
    x = torch.ones(2, requires_grad=True)
    made = _Twice.apply(x)
    names: list[str] = []

    def note(code: CodeType) -> bool:
        names.append(code.co_name)
        return True

    n_entered(lambda: engine.backward([made], [torch.ones(2)]), note)
    assert x.grad is not None and x.grad.tolist() == [2, 2]
    assert "backward" in names and not {"apply", "run"} & {*names}


def test_memory_that_is_shared_elsewhere_costs_nothing() -> None:
    """`other.data` shares memory without a version: only calls that read it have to watch it."""
    layer, other = torch.nn.Linear(2, 2), torch.ones(2)
    shared = other.data
    x = koila.lazy(torch.ones(4, 2))
    assert frames_of(lambda: layer(x), "note_leaf") == 0
    assert frames_of(lambda: x * other, "note_leaf") == 1
    assert frames_of(lambda: x * shared, "note_leaf") == 1
