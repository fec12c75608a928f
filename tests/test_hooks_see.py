# SPDX-License-Identifier: Apache-2.0
"""A hook that is called while a program runs backward in chunks sees what it sees in eager."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import koila
from chunked import split
from oracle import eager

N_ROWS = 11
CHUNKS = [1, 2, 3, 7, N_ROWS]
Lazy = Callable[..., Any]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 4), nn.Linear(4, 4)
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 4)


def began(lazy: Lazy) -> tuple[Any, Any]:
    torch.manual_seed(0)
    net = Net().double()
    return lazy(torch.randn(N_ROWS, 6, dtype=torch.float64)), net


def itself(x: Tensor, net: Any, seen: list[Any]) -> Tensor:
    h = net.first(x)
    h.register_hook(lambda g: g * h.detach())
    return net.head(h)


def other_values(x: Tensor, net: Any, seen: list[Any]) -> Tensor:
    h = net.first(x)
    view, part, means, m = h.t(), h[:, 1:], h.std(0), h.exp()
    aside = (h * 3).sigmoid()
    m.register_hook(lambda g: g * view.t() + part.sum() + means + aside.detach())
    return net.head(m)


def a_view_of_the_batch(x: Tensor, net: Any, seen: list[Any]) -> Tensor:
    part, m = x[:, :4], net.first(x).exp()
    m.register_hook(lambda g: g * part)
    return net.head(m)


def a_written_version(x: Tensor, net: Any, seen: list[Any]) -> Tensor:
    h = net.first(x) * 1
    k = h.tanh()
    h.add_(1)
    k.register_hook(lambda g: g * h.detach())
    return net.head(k)


def a_condition(x: Tensor, net: Any, seen: list[Any]) -> Tensor:
    h = net.first(x)
    k = h.tanh()
    k.register_hook(lambda g: g * 2 if h.mean() > 0 else g * 3)
    k.register_hook(lambda g: g * h[h > 0].sum())
    return net.head(k)


def two_hooks(x: Tensor, net: Any, seen: list[Any]) -> Tensor:
    h = net.first(x)
    k = h.softmax(0)
    ranks = torch.sort(k, 0).values
    h.register_hook(lambda g: g * k.detach() + ranks.mean())
    ranks.register_hook(lambda g: g * h.detach())
    return net.head(ranks)


def of_weights(x: Tensor, net: Any, seen: list[Any]) -> Tensor:
    h = net.first(x)
    net.first.weight.register_hook(lambda g: g * h.mean())
    net.head.weight.register_hook(lambda g: g * h.detach().mean().item())
    return net.head(h)


def statistics(x: Tensor, net: Any, seen: list[Any]) -> Tensor:
    norm = net.norm
    m = norm(net.first(x)).tanh()
    m.register_hook(lambda g: g * norm.running_mean * norm.num_batches_tracked)
    m.register_hook(lambda g: seen.append(norm.state_dict()["running_var"].clone()))
    return net.head(m)


def statistics_after_a_read(x: Tensor, net: Any, seen: list[Any]) -> Tensor:
    norm = net.norm
    before = net.first(x) * norm.running_var
    m = (norm(net.first(x)) * before).tanh()
    m.register_hook(lambda g: g * norm.running_var)
    return net.head(m)


def draws(x: Tensor, net: Any, seen: list[Any]) -> Tensor:
    d = F.dropout(net.first(x).tanh(), 0.5)
    m = F.dropout(net.second(d).tanh(), 0.3)
    m.register_hook(lambda g: g * torch.rand(4, dtype=torch.float64))
    d.register_hook(lambda g: F.dropout(g, 0.5) * d.detach())
    return net.head(m)


def seeds(x: Tensor, net: Any, seen: list[Any]) -> Tensor:
    d = F.dropout(net.first(x).tanh(), 0.5)
    m = net.second(d).tanh()
    m.register_hook(lambda g: torch.manual_seed(3) and F.dropout(g, 0.5))
    return net.head(m)


def retained(x: Tensor, net: Any, seen: list[Any]) -> Tensor:
    h = net.first(x)
    k = h.tanh()
    k.retain_grad()
    h.register_hook(lambda g: seen.append(k.grad.clone()))  # type: ignore[union-attr]
    return net.head(k)


def gradients_of_weights_before(x: Tensor, net: Any, seen: list[Any]) -> Tensor:
    net.first.weight.grad = torch.ones_like(net.first.weight)
    h = net.first(x).tanh()
    h.register_hook(lambda g: seen.append(net.first.weight.grad.clone()))
    return net.head(h)


def writes_what_is_done(x: Tensor, net: Any, seen: list[Any]) -> Tensor:
    h = net.first(x)

    def hook(g: Tensor) -> None:
        with torch.no_grad():
            net.head.weight.mul_(0.5)

    h.register_hook(hook)
    return net.head(h.tanh())


def returns_lazies(x: Tensor, net: Any, seen: list[Any]) -> Tensor:
    part = x[:, :4] * 2

    def with_gradients(g: Tensor) -> Tensor:
        with torch.enable_grad():
            return g * part

    h = net.first(x)
    k = h.tanh()
    k.register_hook(lambda g: part)
    k.register_hook(with_gradients)
    h.register_hook(lambda g: part)
    return net.head(k)


def keeps(x: Tensor, net: Any, seen: list[Any]) -> Tensor:
    m = net.first(x).exp()
    m.register_hook(lambda g: seen.append(m.detach()))
    seen.append(m)
    return net.head(m)


PROGRAMS = [
    itself,
    other_values,
    a_view_of_the_batch,
    a_written_version,
    a_condition,
    two_hooks,
    of_weights,
    statistics,
    statistics_after_a_read,
    draws,
    seeds,
    retained,
    gradients_of_weights_before,
    writes_what_is_done,
    returns_lazies,
    keeps,
]


def step(program: Any, lazy: Lazy, n_times: int = 1) -> list[Tensor]:
    x, net = began(lazy)
    seen: list[Any] = []
    loss = program(x, net, seen).pow(2).mean()
    for i in range(n_times):
        loss.backward(retain_graph=i + 1 < n_times)
    if program is keeps:
        seen[1].mul_(3)  # it is memory of seen[0]
    gradients = [p.grad for p in net.parameters() if p.grad is not None]
    return [*gradients, *net.buffers(), *net.parameters(), *seen, torch.rand(3)]


def check(got: list[Any], want: list[Any]) -> None:
    for one, wanted in zip(got, want, strict=True):
        torch.testing.assert_close(torch.add(one, 0).detach(), wanted, rtol=1e-10, atol=1e-14)


@pytest.mark.rotated("chunks")
@pytest.mark.parametrize("n_times", [1, 2])
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_hook_sees_what_it_sees_in_eager(program: Any, chunks: int, n_times: int) -> None:
    if n_times > 1 and program in (writes_what_is_done, keeps):
        pytest.skip("eager refuses what was written")
    want = [torch.add(one, 0).detach() for one in step(program, eager, n_times)]
    with koila.config(chunks=chunks):
        check([one + 0 for one in step(program, koila.lazy, n_times)], want)


def gradient_of_a_later_weight(x: Tensor, net: Any) -> Tensor:
    h = net.first(x)
    h.register_hook(lambda g: g / net.head.weight.grad.norm())
    return net.head(h)


def no_gradient_of_a_later_weight(x: Tensor, net: Any) -> Tensor:
    def hook(g: Tensor) -> None:
        net.head.weight.grad = None

    h = net.first(x)
    h.register_hook(hook)
    return net.head(h)


def backward_of_a_later_weight(x: Tensor, net: Any) -> Tensor:
    def hook(g: Tensor) -> None:
        with torch.enable_grad():
            net.head(torch.ones(2, 4, dtype=torch.float64)).sum().backward()

    h = net.first(x)
    h.register_hook(hook)
    return net.head(h)


def hooked(x: Tensor, net: Any, write: Callable[[Tensor], Any]) -> Tensor:
    k = net.second(net.first(x).tanh())
    m = k.tanh() * 2

    def hook(g: Tensor) -> None:
        with torch.no_grad():
            write(k)

    k.register_hook(lambda g: None)
    m.register_hook(hook)
    return net.head(m)


WRITES = {
    "a weight": lambda net, k: net.second.bias.mul_(3),
    "a weight's data": lambda net, k: net.second.bias.data.mul_(3),
    "a value": lambda net, k: k.detach().mul_(3),
    "a part of a value": lambda net, k: k.detach()[:2].zero_(),
    "a value's data": lambda net, k: k.data.mul_(3),
    "data of its number": lambda net, k: k.detach().data.mul_(3),
}


@pytest.mark.parametrize("chunks", CHUNKS[1:])
@pytest.mark.parametrize("what", WRITES)
def test_a_write_to_what_is_read_again_is_refused(what: str, chunks: int) -> None:
    with split(chunks):
        x, net = began(koila.lazy)
        loss = hooked(x, net, lambda k: WRITES[what](net, k)).sum()  # type: ignore[no-untyped-call]
        with pytest.raises(koila.KoilaError, match="a hook of a value has written"):
            loss.backward()
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize("chunks", CHUNKS[1:])
@pytest.mark.parametrize(
    "program",
    [gradient_of_a_later_weight, no_gradient_of_a_later_weight, backward_of_a_later_weight],
)
def test_a_gradient_that_is_not_delivered_yet_is_refused(program: Any, chunks: int) -> None:
    with split(chunks):
        x, net = began(koila.lazy)
        loss = program(x, net).pow(2).mean()
        with pytest.raises(koila.KoilaError, match=r"uses the \.grad of a tensor that only later"):
            loss.backward()
    assert all(p.grad is None for p in net.parameters())


def test_what_a_hook_cannot_read_says_what_to_do() -> None:
    with split(3):
        x, net = began(koila.lazy)
        h = net.first(x)
        text = re.escape("read it before backward(), or run it whole: koila.config(chunks=1)")

        def hook(g: Tensor) -> None:
            with torch.no_grad():
                h.mul_(2)

        h.register_hook(hook)
        loss = net.head(h).sum()
        with pytest.raises(koila.KoilaError, match=text):
            loss.backward()


@pytest.mark.parametrize("program", [statistics, statistics_after_a_read, draws, itself])
def test_a_step_that_is_tried_again_after_a_hook(
    program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory runs out in the backward after a hook was called, which drew and saw statistics."""
    want = step(program, eager)
    failed: list[int] = []
    calls: list[int] = []
    original, called = koila.basics.engine.run_backward, koila.staged.hooks.apply

    def apply(value: int, gradient: Tensor, seen: Any) -> Tensor:
        made = called(value, gradient, seen)
        calls.append(value)
        return made

    def fail_once(*args: Any, **kwargs: Any) -> None:
        if calls and not failed:
            failed.append(1)
            raise torch.OutOfMemoryError("injected")
        original(*args, **kwargs)

    monkeypatch.setattr(koila.staged.hooks, "apply", apply)
    monkeypatch.setattr(koila.basics.engine, "run_backward", fail_once)
    monkeypatch.setattr(koila.planning.planner, "why_whole", lambda: None)
    planned = koila.planning.planner.plan

    def in_two(program: Any, is_graph: bool) -> Any:
        return dataclasses.replace(planned(program, is_graph), n_chunks=2)

    monkeypatch.setattr(koila.planning.planner, "plan", in_two)
    check(step(program, koila.lazy), want)
    assert failed


@pytest.mark.parametrize("chunks", [None, 1, 2, 3, 7])
def test_a_hook_behind_a_checkpoint_that_moves_statistics(chunks: int | None) -> None:
    """They are written before the hook is called, and moved once more after backward."""

    def run(lazy: Any) -> list[Tensor]:
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(4).double()
        net = nn.Sequential(nn.Linear(6, 4).double(), norm, nn.Linear(4, 4).double())
        seen: list[Tensor] = []

        assert norm.running_mean is not None
        mean = norm.running_mean

        def look(_: Tensor) -> None:
            seen.append(mean.clone())

        h = checkpoint(net, lazy(torch.randn(7, 6).double()), use_reentrant=False)
        h.register_hook(look)
        h.sin().mean().backward()
        assert norm.running_var is not None
        assert len(seen) == 1
        grads = [p.grad for p in net.parameters() if p.grad is not None]
        return [*seen, mean.clone(), norm.running_var.clone(), *grads]

    want = run(lambda given: given)
    with koila.config(chunks=chunks):
        got = run(koila.lazy)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
