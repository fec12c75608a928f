# SPDX-License-Identifier: Apache-2.0
"""Values that some calls read whole and others by rows, with one gradient of all rows for both."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import koila
import test_memory_kernels as kernels
from allocations import Allocations, measure
from chunked import split
from koila.planning import steps
from oracle import Lazy, eager
from programs_kit import Program
from test_bytes import SLACK, Instructions

ROWS = 17


class Up(nn.Module):
    """A layer that makes wide activations."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 128)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x).tanh()


def pairs(h: Tensor, n: Tensor, others: Tensor) -> Tensor:
    """Rows meet all rows, in each group if the rows are in the second dim."""
    return ((h - n) @ others.mT).logsumexp(-1).mean()


def whole_then_rows(h: Tensor) -> Tensor:
    """The backward of the calls by rows comes before that of the pairs."""
    n = pairs(h, h.pow(2).mean().sqrt(), h)
    return (h - n).pow(2).mean() + n


def rows_then_whole(h: Tensor) -> Tensor:
    """The backward of the pairs comes before that of calls by rows."""
    n = h.pow(2).mean().sqrt()
    return pairs(h, (h - n).pow(2).mean().sqrt(), h)


def by_a_barrier(h: Tensor) -> Tensor:
    """A barrier reads it whole, and two bodies by rows."""
    n = h.sort(-2).values[..., :3].pow(2).mean().sqrt()
    return (h - (h - n).pow(2).mean().sqrt()).pow(2).mean() + n


def hooked(h: Tensor) -> Tensor:
    """A hook gets the gradient of all rows, which no call reads whole."""
    h = h * 2
    if h.requires_grad:
        h.register_hook(lambda grad: grad / (1 + grad.abs().sum()))
    n = h.pow(2).mean().sqrt()
    return (h - n).pow(2).mean() + n


STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    of.__name__: of for of in (whole_then_rows, rows_then_whole, by_a_barrier, hooked)
}


def gradients(lazy: Lazy, name: str, dim: int) -> list[Tensor]:
    """Return the loss of a step and its gradients."""
    torch.manual_seed(0)
    model = Up().double()
    x = torch.randn(*(3,) * dim, ROWS, 4, dtype=torch.float64, requires_grad=True)
    loss = STEPS[name](model(lazy(x, batch=dim)))
    loss.backward()
    found = [loss.detach(), x.grad, model.up.weight.grad, model.up.bias.grad]
    return [one for one in found if one is not None]


@pytest.mark.rotated("chunks")
@pytest.mark.parametrize("chunks", [1, 2, 3, 7, ROWS])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", STEPS)
def test_numbers(name: str, dim: int, chunks: int) -> None:
    want = gradients(eager, name, dim)
    with split(chunks):
        got = gradients(koila.lazy, name, dim)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


LEAVES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "whole, then rows": lambda x, w: (x * w - (x @ w.T).logsumexp(1).mean()).pow(2).mean(),
    "rows, then whole": lambda x, w: ((x - (x * w).mean()) @ w.T).logsumexp(1).mean(),
    "at once": lambda x, w: ((x * w) @ w.T).logsumexp(1).mean().sqrt(),
    "sparse": lambda x, w: (
        (x * w - F.embedding(x[:, 0].long() % ROWS, w, sparse=True).pow(2).mean()).pow(2).mean()
    ),
    "sparse last": lambda x, w: (
        (F.embedding(x[:, 0].long() % ROWS, w, sparse=True) - (x * w).pow(2).mean()).pow(2).mean()
    ),
}


@pytest.mark.parametrize("chunks", [1, 2, 3, 7, ROWS])
@pytest.mark.parametrize("name", LEAVES)
def test_leaves(name: str, chunks: int) -> None:
    """Of a weight with as many rows as the batch, chunks read their rows, and all of them."""
    found = []
    for lazy in (eager, koila.lazy):
        torch.manual_seed(0)
        x = torch.randn(ROWS, 6, dtype=torch.float64) * 5
        w = torch.randn(ROWS, 6, dtype=torch.float64, requires_grad=True)
        with split(chunks if lazy is koila.lazy else 1):
            LEAVES[name](lazy(x), w).backward()
        assert w.grad is not None
        found.append(w.grad.to_dense())
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)


@pytest.mark.rotated("chunks")
@pytest.mark.parametrize("chunks", [4, 13])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", STEPS)
def test_bytes(name: str, dim: int, chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No instruction takes more than is said: neither two tensors of all rows, nor two gradients,
    and of rows within other dims each chunk has a copy."""
    program = Program(
        name,
        Up,
        lambda n, g: (torch.randn(*(8,) * dim, n, 4, generator=g),),
        lambda model, x: STEPS[name](model(x)),
        dims=dim,
    )
    monkeypatch.setattr(steps, "_shares", {})
    measure(program, 8, koila.lazy, **kernels.single)
    memory = Allocations()
    found = Instructions(memory, monkeypatch)
    with split(chunks):
        _, peak = measure(program, 257 if dim else 1025, koila.lazy, memory, **kernels.single)
    off = found.off()
    assert "SUM" in found.names[-1]
    assert min(off.values()) >= -max(0.01 * peak, SLACK), off
    rows = [n for step, n in off.items() if step.startswith("RUN")]
    assert max(rows) <= max(0.03 * peak, SLACK), off
