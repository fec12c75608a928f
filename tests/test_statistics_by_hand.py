# SPDX-License-Identifier: Apache-2.0
"""Statistics that a model keeps itself in plain buffers, as normalizing flows and codebooks do.

The write needs the value alone, so what is before it runs in chunks and is not kept.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import koila
from allocations import Allocations
from limits import there
from oracle import eager

N_ROWS, WIDE = 1024, 64


class Flow(nn.Module):
    """Coupling layers. Each normalizes the output of the one before with a running mean and
    variance, which it updates itself."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDE, 256), nn.ReLU(), nn.Linear(256, 2 * WIDE))
            for _ in range(6)
        )
        for i in range(6):
            self.register_buffer(f"mean{i}", torch.zeros(WIDE))
            self.register_buffer(f"var{i}", torch.ones(WIDE))

    def forward(self, x: Tensor, is_detached: bool) -> Tensor:
        total: Any = 0
        for i, part in enumerate(self.parts):
            mean, var = self.get_buffer(f"mean{i}"), self.get_buffer(f"var{i}")
            seen = x.detach() if is_detached else x
            with torch.no_grad():
                mean.mul_(0.9).add_(seen.mean(0), alpha=0.1)
                var.mul_(0.9).add_(seen.var(0), alpha=0.1)
            x = (x - mean) / var.sqrt()
            shift, scale = part(x).chunk(2, 1)
            x, total = x * scale.tanh().exp() + shift, total + scale.tanh().sum(1)
        found: Tensor = (x.square().sum(1) - total).mean()
        return found


def step(lazy: Any, is_detached: bool) -> tuple[Allocations, list[Tensor]]:
    torch.manual_seed(1)
    model, x, memory = Flow(), torch.randn(N_ROWS, WIDE), Allocations()
    memory.count(list(model.parameters()), list(model.buffers()), x)
    with memory:
        batch = lazy(x)
    with memory:
        model(batch, is_detached).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return memory, [*gradients, *(b.clone() for b in model.buffers())]


@pytest.mark.parametrize("is_detached", [False, True])
@pytest.mark.parametrize(("chunks", "most"), [(1, 1.02), (2, 0.6), (7, 0.25)])
def test_chunks(chunks: int, most: float, is_detached: bool) -> None:
    """Peaks in parts of eager's, beside the model and the batch; gradients and buffers."""
    whole, wanted = step(eager, is_detached)
    with koila.config(chunks=chunks):
        cut, found = step(koila.lazy, is_detached)
    assert cut.peak - cut.left <= most * (whole.peak - whole.left)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("is_detached", [False, True])
@pytest.mark.parametrize("share", [0.5, 0.35])
def test_limit(share: float, is_detached: bool) -> None:
    whole, wanted = step(eager, is_detached)
    most = int(share * (whole.peak - whole.left))
    with koila.config(memory_limit=there() + whole.left + most):
        cut, found = step(koila.lazy, is_detached)
    assert cut.peak - cut.left <= most
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-5)
