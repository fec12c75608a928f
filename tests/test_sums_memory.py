# SPDX-License-Identifier: Apache-2.0
"""Sums over the batch with a large result: what the chunks give is added up as they finish, so that
many chunks take no more than few."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import koila
from chunked import split
from koila.running import boundary, store
from oracle import Lazy, eager, plain
from profiled import bytes_over_time

WIDE = 96


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 512), nn.Tanh(), nn.Linear(512, 24), nn.Tanh())
        self.head = nn.Linear(24, WIDE)
        self.register_buffer("center", torch.zeros(WIDE, WIDE))

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.head(self.body(x))
        return h


def correlation(net: Any, h: Tensor) -> Tensor:
    """Barlow Twins: the matrix of all features with all, whose loss keeps it."""
    c = h.T @ h / len(h)
    return (c - torch.eye(WIDE)).pow(2).sum() + torch.diagonal(c).sub(1).pow(2).sum()


def linear(net: Any, h: Tensor) -> Tensor:
    """A tail that keeps nothing of the sum, and sends its gradient before the last body runs."""
    return (torch.einsum("bi,bj->ij", h, h.sin()) * net.body[0].weight.detach().sum()).sum()


def dispatched(net: Any, h: Tensor) -> Tensor:
    """Experts that rows are gathered for by a product, and given back by another."""
    gates = h.softmax(1)
    slots = torch.einsum("be,bm->em", gates, h)
    return (gates @ (slots @ slots.T).tanh()).pow(2).mean()


def mean_of_rows(net: Any, h: Tensor) -> Tensor:
    """A mean over the batch that is as large as many rows."""
    pairs = h.unsqueeze(1) * h.sin().unsqueeze(2)
    return (pairs.mean(0) - pairs.detach().nansum(0) / len(h)).pow(2).sum()


def centered(net: Any, h: Tensor) -> Tensor:
    """A buffer that follows a sum without a gradient, and a loss that reads it."""
    with torch.no_grad():
        net.center = net.center * 0.9 + 0.1 * (h.T @ h)
    return (h @ net.center).tanh().mean()


LOSSES = [correlation, linear, dispatched, mean_of_rows, centered]
each_loss = pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)


def step(loss: Callable[[Any, Tensor], Tensor], lazy: Lazy, n_rows: int) -> list[Tensor]:
    torch.manual_seed(0)
    net = Net().double()
    (x,) = lazy((torch.randn(n_rows, 16, dtype=torch.float64),))
    found = loss(net, net(x))
    found.backward()
    return [
        plain(found),
        plain(net.center),
        *(p.grad for p in net.parameters() if p.grad is not None),
    ]


@pytest.mark.parametrize("chunks", [1, 2, 3, 7, 11])
@each_loss
def test_same_numbers(loss: Any, chunks: int) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        wanted = step(loss, eager, 11)
        with split(chunks):
            got = step(loss, koila.lazy, 11)
    finally:
        torch.set_default_dtype(torch.float32)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@each_loss
def test_many_chunks_take_no_more_than_few(loss: Any) -> None:
    def peak(chunks: int) -> int:
        with koila.config(chunks=chunks, memory_limit=None):
            return max(bytes_over_time(lambda: step(loss, koila.lazy, 1024)))

    peak(2)
    few, many = peak(8), peak(64)
    assert many < 1.02 * few, f"{many / few:.2f} of {few} bytes"


def test_a_partial_is_not_written_where_another_tensor_has_its_memory() -> None:
    """The sum over one row can be a view of that row, and a chunk that runs again adds nothing."""
    added = boundary.BoundaryValue(cast(Any, None), True, {}, added=frozenset({0}))
    of: Any = SimpleNamespace(boundary={0: added}, grid_by_run={0: []}, is_forward=False)
    run: Any = SimpleNamespace(index=0, exported={0}, parts={0: (0,)})
    seen = torch.ones(3)
    for chunk in (0, 1, 2, 1):
        store.Store.collect(of, run, {0: (seen.view(3),)}, chunk, [0])
    assert torch.equal(seen, torch.ones(3))
    ((total,),) = added.read_parts(False)
    assert torch.equal(total, torch.full((3,), 3.0))
