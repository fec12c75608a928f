# SPDX-License-Identifier: Apache-2.0
"""What the stories of `test_step*.py` share: a small model, a batch, and the splits to try."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import koila
from oracle import Lazy
from programs_vision import Mlp

N_ROWS = 11

#: Left to koila, which runs what fits in one chunk; and in three uneven chunks.
each_split = pytest.mark.parametrize("chunks", [None, 1, 3])
#: One chunk for certain, two and three uneven ones, and one row a chunk.
each_split_further = pytest.mark.parametrize("chunks", [None, 1, 2, 3, N_ROWS])


def make(dtype: torch.dtype = torch.float64, n_rows: int = N_ROWS) -> tuple[Mlp, Tensor, Tensor]:
    """Return a model, its inputs and their labels, from the global generator."""
    model = Mlp().to(dtype)
    return model, torch.randn(n_rows, 6, dtype=dtype), torch.randint(0, 5, (n_rows,))


def rows(*shape: int) -> Tensor:
    """Return one row for each of a batch, from the global generator."""
    return torch.randn(N_ROWS, *shape, dtype=torch.float64)


def batches(n: int, n_rows: int = N_ROWS) -> list[tuple[Tensor, Tensor]]:
    """Return several batches, from the global generator."""
    return [
        (torch.randn(n_rows, 6, dtype=torch.float64), torch.randint(0, 5, (n_rows,)))
        for _ in range(n)
    ]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Any:
    """Take one step, and return the loss as it was left."""
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def assert_cut(lazy: Lazy, chunks: int | None) -> None:
    """Assert that the last program ran in as many chunks as it was told to."""
    report = koila.report()
    if lazy is koila.lazy and chunks is not None:
        assert report is not None
        assert report.n_chunks == chunks
