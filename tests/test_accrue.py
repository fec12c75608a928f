# SPDX-License-Identifier: Apache-2.0
"""The gradient of a large weight is made in what gathers: no chunk makes one of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import koila
from allocations import Allocations
from chunked import split
from koila.running import accrue
from oracle import eager
from test_memory_limit import Prediction

N_ROWS = 11
WIDTH = 192  # of double precision it is large
SHAPE = WIDTH, WIDTH
Step = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def tied(x: Tensor, ids: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """A table of words that is also the head, as in most language models."""
    return F.cross_entropy(F.linear(F.embedding(ids, w).sin(), w).flatten(0, 1), ids.flatten())


def mixed(x: Tensor, ids: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Other calls have a gradient for it too, one before and one after."""
    return ((x @ w).tanh() @ (w * 2)).mul(w[0]).cos().mean() + w.sum() + w.square().mean()


def written(x: Tensor, ids: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """What a product gave is written in place, also where torch gives a view of it."""
    return F.linear(F.linear(x[:, None].expand(-1, 3, -1), w, b).relu_(), w).mul_(2).sin().mean()


def twice(x: Tensor, ids: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """The body goes forward twice, and back once."""
    return F.linear(x, w, b).sin().mean().exp().log1p().sqrt()


def largest(x: Tensor, ids: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """What is found going forward is looked for again with the graph, bit by bit."""
    return F.linear(x, w, b).sin().amax(0).square().sum() + (x @ w).amax().exp()


def shared(x: Tensor, ids: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Its other gradient comes first, and is memory that others have."""
    (first, second), v = (w + b.expand_as(w)).chunk(2), w + 0
    return (x @ w).sin().mean() + (x @ v).mean() + (first - second).sin().sum() * x.sin().mean()


STEPS: dict[str, Step] = {
    "linear": lambda x, ids, w, b: F.linear(x, w).sin().mean(),
    "linear, bias": lambda x, ids, w, b: F.linear(x, w, b).sin().mean(),
    "linear, three dims": lambda x, ids, w, b: F.linear(x[:, None] * ids[..., None], w, b).mean(),
    "linear, other strides": lambda x, ids, w, b: F.linear(
        (x[:, None] * ids[..., None]).transpose(0, 1).sin(), w, b
    ).mean(),
    "matmul": lambda x, ids, w, b: (x @ w).sin().sum(),
    "matmul, turned": lambda x, ids, w, b: (x @ w.T).sin().sum(),
    "matmul, four dims": lambda x, ids, w, b: (
        torch.matmul(x[:, None, None] * ids[:, None, :, None], other=w).sin().mean()
    ),
    "mm": lambda x, ids, w, b: x.mm(mat2=w).sin().sum(),
    "addmm": lambda x, ids, w, b: torch.addmm(b, x, w).sin().sum(),
    "addmm, scaled": lambda x, ids, w, b: torch.addmm(b, x, w, beta=0.5, alpha=3).sin().sum(),
    "addmm, of a method": lambda x, ids, w, b: (x * 2).addmm(x, w, alpha=2).sin().sum(),
    "embedding": lambda x, ids, w, b: F.embedding(ids, w).sin().mean(),
    "embedding, padded": lambda x, ids, w, b: F.embedding(ids, w, padding_idx=3).sin().mean(),
    "embedding, sparse": lambda x, ids, w, b: F.embedding(ids, w, sparse=True).sin().mean(),
    "tied": tied,
    "mixed": mixed,
    "written": written,
    "twice": twice,
    "largest": largest,
    "shared": shared,
}
#: What needs a whole pass, or a barrier beside it.
PARTLY: dict[str, str] = {}


def data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x, w = torch.randn(N_ROWS, WIDTH).double(), torch.randn(SHAPE).double() / 8
    ids = torch.randint(0, WIDTH, (N_ROWS, 5)) % 7
    return x, ids, w, torch.randn(WIDTH).double()


def run(step: Step, lazy: Any) -> list[Tensor]:
    x, ids, *weights = data()
    leaves = [weight.requires_grad_() for weight in weights]
    x, ids = lazy(x.requires_grad_(), ids)
    loss = step(x, ids, *leaves)
    loss.backward()
    return [loss.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def n_accrued(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The weights whose gradients are made in what gathers, as they are."""
    seen: list[Tensor] = []
    gathered = accrue._gathered

    def look(weight: Tensor) -> Tensor | None:
        seen.append(weight)
        return gathered(weight)

    monkeypatch.setattr(accrue, "_gathered", look)
    return seen


@pytest.mark.rotated("chunks")
@pytest.mark.parametrize("chunks", [1, 2, 3, 7, N_ROWS])
@pytest.mark.parametrize("step", STEPS)
def test_same_numbers(step: str, chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = n_accrued(monkeypatch)
    wanted = run(STEPS[step], eager)
    with split(chunks, partly=PARTLY.get(step, "")):
        got = run(STEPS[step], koila.lazy)
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted, strict=True):
        one, other = one.to_dense(), other.to_dense()
        assert one.stride() == other.stride()
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    is_accruing = chunks > 1 and "sparse" not in step
    assert len(seen) >= chunks * is_accruing and bool(seen) == is_accruing


def policy(lazy: Any, x: Tensor, w: list[Tensor]) -> Tensor:
    """More weights than rows: what a step takes are their gradients."""
    (x,) = (lazy(x),)
    for weight in w:
        x = F.linear(x, weight).sin()
    loss = x.mean()
    loss.backward()
    return loss


def peak_of(lazy: Any, n_rows: int, width: int, memory: Allocations) -> int:
    torch.manual_seed(0)
    x, w = torch.randn(n_rows, width), [torch.randn(width, width) / 8 for _ in range(3)]
    w = [weight.requires_grad_() for weight in w]
    memory.count(x, w)
    with memory:
        pass
    with memory:
        policy(lazy, x, w)
    return memory.peak


def test_no_gradient_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step in chunks holds each gradient once, as a whole one does, and is said to."""
    n_rows, width = 64, 1024
    peak_of(koila.lazy, 8, 8, Allocations())
    whole = peak_of(eager, n_rows, width, Allocations())
    memory = Allocations()
    said = Prediction(memory, monkeypatch, is_whole=False)
    with split(4):
        peak = peak_of(koila.lazy, n_rows, width, memory)
    assert peak <= 1.02 * whole, f"{peak} bytes, eager {whole}"
    assert abs(said.n_bytes - peak) <= 0.01 * peak, f"{said.n_bytes} were predicted, {peak} used"


def test_half_precision_gathers_in_single(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradient is made in its own precision, and added up in another."""
    seen = n_accrued(monkeypatch)
    _, ids, w, _ = data()
    w = w.repeat(2, 2).bfloat16().requires_grad_()
    with split(3):
        F.embedding(koila.lazy(ids), w).float().sin().sum().backward()
    got, w.grad = w.grad, None
    F.embedding(ids, w).float().sin().sum().backward()
    assert got is not None and w.grad is not None and not seen
    torch.testing.assert_close(got, w.grad, rtol=0.02, atol=0.02)
