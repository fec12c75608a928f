# SPDX-License-Identifier: Apache-2.0
"""torch's modules whose weights get their shapes in the first call, such as nn.LazyLinear.

Until then their parameters raise in most of their torch functions.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import koila
from oracle import Lazy, assert_close, eager

pytestmark = pytest.mark.sanitize


def step(lazy: Lazy, has_read: bool, has_checkpoint: bool) -> list[Tensor]:
    """Return the gradients and buffers after a step that initializes the model."""
    torch.manual_seed(0)
    first = nn.Linear(7, 7, dtype=torch.float64)
    layers = (nn.LazyConv2d(8, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(5))
    model = nn.Sequential(*layers).double()
    x = first(lazy(torch.randn(6, 3, 8, 7, dtype=torch.float64)))
    if has_read:
        x.data.sum().item()
    if has_checkpoint:
        x = checkpoint(lambda t: first(t).tanh(), x, use_reentrant=False)
    model(x).pow(2).mean().backward()
    gradients = [weight.grad for weight in model.parameters()]
    return [one for one in (*gradients, *model.buffers()) if one is not None]


@pytest.mark.rotated("chunks")
@pytest.mark.parametrize("has_checkpoint", [False, True])
@pytest.mark.parametrize("has_read", [False, True])
@pytest.mark.parametrize("chunks", [1, 2, 3, 6, None])
def test_weights_get_their_shapes(chunks: int | None, has_read: bool, has_checkpoint: bool) -> None:
    expected = step(eager, has_read, has_checkpoint)
    with koila.config(chunks=chunks):
        found = step(koila.lazy, has_read, has_checkpoint)
        assert koila.report().n_chunks == (chunks or 1)
    for got, want in zip(found, expected, strict=True):
        assert_close(got, want, "a gradient or a buffer", largest=1.0)


def test_plain_torch_is_left_alone() -> None:
    model = nn.Sequential(nn.LazyLinear(5), nn.LazyBatchNorm1d())
    assert model(torch.ones(3, 4)).shape == (3, 5)
