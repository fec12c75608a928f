# SPDX-License-Identifier: Apache-2.0
"""Count the calls of koila's Python functions, for tests and benchmarks.

python tests/frames.py    frames of the steps below as JSON, in a process in which nothing else ran
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from types import CodeType, FrameType

import torch
from torch import nn
from torch.nn import functional as F

import koila

_FOLDER = os.path.dirname(koila.__file__) + os.sep
N_ROWS = 32
#: A step is counted once it has run so often: plans are kept by then.
N_BEFORE = 3


def frames_of(work: Callable[[], object], name: str = "") -> int:
    """Return how many frames of koila's Python code `work` enters on this thread; with a name,
    those of functions of this name."""

    def is_own(code: CodeType) -> bool:
        return code.co_filename.startswith(_FOLDER) and name in ("", code.co_name)

    return n_entered(work, is_own)


def n_entered(work: Callable[[], object], is_counted: Callable[[CodeType], bool]) -> int:
    """Return how many frames `work` enters on this thread whose code `is_counted`."""
    n_frames = 0

    def look(frame: FrameType, event: str, _: object) -> None:
        nonlocal n_frames
        n_frames += event == "call" and is_counted(frame.f_code)

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        work()
    finally:
        sys.setprofile(before)
    return n_frames


def small() -> nn.Module:
    """Six calls with the loss."""
    layers = [nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)]
    return nn.Sequential(*layers)


def normalized() -> nn.Module:
    """Eight batch normalizations: 34 calls with the loss, in 18 stages."""
    layers: list[nn.Module] = []
    for _ in range(8):
        layers += [nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(8, 8))


def of_a_step(make: Callable[[], nn.Module], chunks: int) -> int:
    """Return the frames of a training step in so many chunks."""
    model = make()
    x, y = torch.randn(N_ROWS, 8), torch.randint(8, (N_ROWS,))

    def step() -> None:
        model.zero_grad()
        with koila.config(chunks=chunks):
            lazy_x, lazy_y = koila.lazy(x, y, batch=0)
            F.cross_entropy(model(lazy_x), lazy_y).backward()

    for _ in range(N_BEFORE):
        step()
    n_frames = frames_of(step)
    assert koila.report().n_chunks == chunks
    return n_frames


if __name__ == "__main__":
    made = {
        f"{make.__name__}-{n}": of_a_step(make, n) for make in (small, normalized) for n in (1, 4)
    }
    print(json.dumps(made))
