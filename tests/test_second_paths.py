# SPDX-License-Identifier: Apache-2.0
"""Two paths lead from a loss to a value, and a backward went through one of them before. Torch
raises if that path saved something; koila raises, or returns the whole gradient, never the share of
the other path alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import koila

F64 = torch.float64
ROWS = 6
CHUNKS = [None, 1, 2, 3, ROWS]


class Nets:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).to(F64)
        self.head = nn.Linear(4, 4).to(F64)
        self.x = torch.randn(ROWS, 4, dtype=F64)


def saves_nothing(nets: Nets, h: Tensor) -> Tensor:
    return torch.stack([h, h]).mean(0)


def saves(nets: Nets, h: Tensor) -> Tensor:
    return nets.head(h) * h


def written(nets: Nets, h: Tensor) -> Tensor:
    return torch.stack([h, h]).mean(0).add_(1.0)


MIDDLES = [saves_nothing, saves, written]


def rows(nets: Nets, v: Tensor) -> Tensor:
    return nets.head(v).pow(2).mean()


def across(nets: Nets, v: Tensor) -> Tensor:
    return (v @ v.t()).pow(2).mean() + nets.head(v).sum()


LOSSES = [rows, across]


def everything(nets: Nets, loss: Tensor, h: Tensor) -> None:
    loss.backward()


def head_alone(nets: Nets, loss: Tensor, h: Tensor) -> None:
    loss.backward(inputs=[nets.head.weight])


def grad_of_head(nets: Nets, loss: Tensor, h: Tensor) -> None:
    torch.autograd.grad(loss, nets.head.weight)


def grad_of_value(nets: Nets, loss: Tensor, h: Tensor) -> None:
    torch.autograd.grad(loss, h)


FIRSTS = [everything, head_alone, grad_of_head, grad_of_value]


def plain(nets: Nets, loss: Tensor, h: Tensor) -> Tensor:
    return torch.autograd.grad(loss, h)[0]


def with_graph(nets: Nets, loss: Tensor, h: Tensor) -> Tensor:
    made = torch.autograd.grad(loss, h, create_graph=True)[0]
    return made * h + made.pow(2)


def backward(nets: Nets, loss: Tensor, h: Tensor) -> Tensor:
    h.retain_grad()
    loss.backward(inputs=[h])
    assert h.grad is not None
    return h.grad


SECONDS = [plain, with_graph, backward]


def view(h: Tensor) -> Tensor:
    return h.t().t()[:, :4]


def itself(h: Tensor) -> Tensor:
    return h


def outcome(
    nets: Nets,
    x: Tensor,
    middle: Callable[[Nets, Tensor], Tensor],
    loss: Callable[[Nets, Tensor], Tensor],
    first: Callable[[Nets, Tensor, Tensor], None],
    second: Callable[[Nets, Tensor, Tensor], Tensor],
    taken: Callable[[Tensor], Tensor],
) -> Any:
    h = taken(nets.body(x))
    v = middle(nets, h)
    first(nets, loss(nets, v), h)
    return second(nets, v.sum() * 2 + h.pow(3).mean(), h).detach() + 0


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("taken", [itself, view])
@pytest.mark.parametrize("second", SECONDS)
@pytest.mark.parametrize("first", FIRSTS)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("middle", MIDDLES)
def test_no_share_is_lost(
    middle: Callable[[Nets, Tensor], Tensor],
    loss: Callable[[Nets, Tensor], Tensor],
    first: Callable[[Nets, Tensor, Tensor], None],
    second: Callable[[Nets, Tensor, Tensor], Tensor],
    taken: Callable[[Tensor], Tensor],
    chunks: int | None,
) -> None:
    wanted = None
    with contextlib.suppress(RuntimeError):
        wanted = outcome(nets := Nets(), nets.x, middle, loss, first, second, taken)
    nets = Nets()
    setting = {} if chunks is None else {"chunks": chunks}
    with koila.config(**setting):  # type: ignore[arg-type]
        x = koila.lazy(nets.x, batch=0)
        try:
            found = outcome(nets, x, middle, loss, first, second, taken)
        except (RuntimeError, koila.KoilaError) as error:
            assert "second time" in str(error), error
            assert wanted is None or (chunks or 1) > 1, "eager raises nothing"
        else:
            assert wanted is not None, "eager raises"
            assert torch.allclose(torch.as_tensor(found), wanted, rtol=1e-10, atol=1e-12)


def test_a_path_that_no_backward_went_is_whole() -> None:
    """A number whose graph is gone stands in the loss, and does not depend on the value."""

    def run(nets: Nets, x: Tensor) -> Tensor:
        h, k = nets.body(x), nets.head(x)
        torch.autograd.grad(h.pow(2).mean(), list(nets.body.parameters()))
        return torch.autograd.grad(h.sum() + k.pow(3).sum(), k)[0].detach() + 0

    wanted = run(nets := Nets(), nets.x)
    for chunks in (1, 2, 3, ROWS):
        with koila.config(chunks=chunks):
            found = run(nets := Nets(), koila.lazy(nets.x, batch=0))
        assert torch.allclose(torch.as_tensor(found), wanted, rtol=1e-10, atol=1e-12), chunks


def test_a_long_chain_of_held_values_has_few_edges() -> None:
    """Each number leads to the one before it alone."""
    nets = Nets()
    with koila.config(chunks=2):
        states = [koila.lazy(nets.x, batch=0)]
        for _ in range(100):
            states.append(torch.tanh(states[-1] + nets.head.bias))
        states[-1].pow(2).mean().backward()
    node = states[-1].grad_fn
    counts = []
    while node is not None and len(counts) < 100:
        edges = [one for one, _ in node.next_functions if one is not None]
        if hasattr(node, "pending"):
            counts.append(len(edges))
        node = max(edges, key=lambda one: "Accumulate" not in one.name(), default=None)
    assert len(counts) > 50
    assert max(counts) <= 2, counts
