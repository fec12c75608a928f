# SPDX-License-Identifier: Apache-2.0
"""What a step costs beside torch's own work: the frames of koila's Python code that it enters.

Unlike a time, this number is the same on each machine. It may only fall.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import koila
from frames import frames_of

N_ROWS = 32
#: A step is counted once it has run so often: plans are kept by then.
N_BEFORE = 3


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


@pytest.mark.parametrize(
    ("make", "chunks", "most"),
    [(small, 1, 150), (small, 4, 1107), (normalized, 1, 655), (normalized, 4, 12003)],
)
def test_of_a_step(make: Callable[[], nn.Module], chunks: int, most: int) -> None:
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
    assert n_frames <= most


def test_it_counts() -> None:
    x = koila.lazy(torch.ones(4, 2))
    assert frames_of(lambda: torch.ones(2)) == 0
    assert frames_of(lambda: koila.lazy(torch.ones(4, 2))) > 1
    assert frames_of(x.sum().item) > 1
