# SPDX-License-Identifier: Apache-2.0
"""Two paths lead from a loss to a value, and a backward went through one of them before. Torch
raises if that path saved something; koila raises, or returns the gradient that torch returns where
the graph was retained, never the share of the other path alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import koila
from koila.running import freed_graphs

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


def everything(nets: Nets, loss: Tensor, h: Tensor, retain: bool) -> None:
    loss.backward(retain_graph=retain)


def head_alone(nets: Nets, loss: Tensor, h: Tensor, retain: bool) -> None:
    loss.backward(inputs=[nets.head.weight], retain_graph=retain)


def grad_of_head(nets: Nets, loss: Tensor, h: Tensor, retain: bool) -> None:
    torch.autograd.grad(loss, nets.head.weight, retain_graph=retain)


def grad_of_value(nets: Nets, loss: Tensor, h: Tensor, retain: bool) -> None:
    torch.autograd.grad(loss, h, retain_graph=retain)


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
    first: Callable[[Nets, Tensor, Tensor, bool], None],
    second: Callable[[Nets, Tensor, Tensor], Tensor],
    taken: Callable[[Tensor], Tensor],
    retain: bool,
) -> Any:
    h = taken(nets.body(x))
    v = middle(nets, h)
    first(nets, loss(nets, v), h, retain)
    return second(nets, v.sum() * 2 + h.pow(3).mean(), h).detach() + 0


@pytest.mark.rotated("chunks")
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("taken", [itself, view])
@pytest.mark.parametrize("second", SECONDS)
@pytest.mark.parametrize("first", FIRSTS)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("middle", MIDDLES)
def test_no_share_is_lost(
    middle: Callable[[Nets, Tensor], Tensor],
    loss: Callable[[Nets, Tensor], Tensor],
    first: Callable[[Nets, Tensor, Tensor, bool], None],
    second: Callable[[Nets, Tensor, Tensor], Tensor],
    taken: Callable[[Tensor], Tensor],
    chunks: int | None,
) -> None:
    parts = middle, loss, first, second, taken
    is_freed = False
    try:
        outcome(nets := Nets(), nets.x, *parts, retain=False)
    except RuntimeError:
        is_freed = True
    wanted = outcome(nets := Nets(), nets.x, *parts, retain=True)
    nets = Nets()
    setting = {} if chunks is None else {"chunks": chunks}
    with koila.config(**setting):  # type: ignore[arg-type]
        x = koila.lazy(nets.x, batch=0)
        try:
            found = outcome(nets, x, *parts, retain=False)
        except (RuntimeError, koila.KoilaError) as error:
            assert "second time" in str(error), error
            assert is_freed or (chunks or 1) > 1, "eager raises nothing"
        else:
            assert torch.allclose(torch.as_tensor(found), wanted, rtol=1e-10, atol=1e-12)


def read(h: Tensor) -> None:
    h.sum().item()


def with_its_own_graph(h: Tensor) -> None:
    made = torch.autograd.grad(h.sum(), h, create_graph=True)[0]
    assert made.shape == h.shape


def in_one_chunk(h: Tensor) -> None:
    with koila.config(chunks=1):
        h.sum().backward(retain_graph=True)


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize("between", [read, with_its_own_graph, in_one_chunk])
@pytest.mark.parametrize("middle", MIDDLES)
def test_what_happens_to_the_value_meanwhile(
    middle: Callable[[Nets, Tensor], Tensor], between: Callable[[Tensor], None], chunks: int
) -> None:
    """A backward for a weight alone leaves the value pending; then it gets a number, or a graph."""

    def run(nets: Nets, x: Tensor, retain: bool) -> Tensor:
        h = nets.body(x)
        v = middle(nets, h)
        head_alone(nets, rows(nets, v), h, retain)
        between(h)
        return plain(nets, v.sum() * 2 + h.pow(3).mean(), h) + 0

    wanted = run(nets := Nets(), nets.x, True)
    with koila.config(chunks=chunks):
        try:
            found = run(nets := Nets(), koila.lazy(nets.x, batch=0), False)
        except RuntimeError as error:
            assert "second time" in str(error), error
        else:
            assert torch.allclose(torch.as_tensor(found), wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_a_value_that_the_loss_does_not_depend_on_has_no_gradient(chunks: int) -> None:
    nets = Nets()
    with koila.config(chunks=chunks):
        h = nets.body(koila.lazy(nets.x, batch=0))
        loss, after = h.pow(2).mean(), h * 2
        loss.backward()
        assert torch.autograd.grad(loss, after, allow_unused=True) == (None,)
        with pytest.raises(RuntimeError, match="appears to not have been used"):
            torch.autograd.grad(loss, after)
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(loss, h)


def test_no_hook_sees_the_call_that_koila_learns_the_text_of_the_error_from() -> None:
    freed_graphs._second_time.cache_clear()
    seen = list[Tensor]()

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        assert "second time" in freed_graphs._second_time()
        assert not seen
        torch.ones(2, requires_grad=True).exp()
        assert seen


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
        if getattr(node, "_forward_cls", None) is freed_graphs.OfFreedGraph:
            counts.append(len(edges))
        node = max(edges, key=lambda one: "Accumulate" not in one.name(), default=None)
    assert len(counts) > 50
    assert max(counts) <= 2, counts


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("is_unused_allowed", [False, True])
def test_values_of_a_step_that_is_over(chunks: int | None, is_unused_allowed: bool) -> None:
    """Their graphs are gone; a gradient of one for the other is refused, and never None."""

    def gradient(lazy: Any) -> Tensor:
        nets = Nets()
        optimizer = torch.optim.SGD(nets.body.parameters(), 0.1)
        h = nets.body(lazy(nets.x))
        copied = h.clone()
        h.pow(2).mean().backward()
        v = (copied * 2).tanh()
        u = torch.where(h > 0, h, v * 0.1)
        optimizer.step()
        lazy(nets.x)
        return torch.autograd.grad(u.sum(), v, allow_unused=is_unused_allowed)[0]

    with koila.config(chunks=chunks):
        try:
            found = gradient(koila.lazy)
        except koila.StaleError:
            assert chunks not in (None, 1)
            return
    torch.testing.assert_close(found, gradient(lambda x: x), rtol=1e-10, atol=1e-12)
