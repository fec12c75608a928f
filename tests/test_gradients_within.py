# SPDX-License-Identifier: Apache-2.0
"""Gradients of values that were handed out where a program was cut, and that it has read itself."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import koila
from oracle import cut, eager

N_ROWS = 11
CHUNKS = [None, 1, 2, 3, 7, N_ROWS]
Lazy = Callable[..., Any]


grad = torch.autograd.grad
Made = tuple[list[Any], Any]  # gradients, and a loss to differentiate then


def within(net: Any, x: Tensor) -> Made:
    h = net[0](x).tanh()
    k = h.sin()
    z = cut(k)
    return [*grad(k.sum(), h, retain_graph=True)], z.sum()


def through_all(net: Any, x: Tensor) -> Made:
    h = net[0](x).tanh()
    k = h.sin()
    z = cut(k)
    loss = net[1](z).pow(2).mean() + k.mean() + h.exp().sum()
    return [*grad(loss, h, retain_graph=True)], loss


def several(net: Any, x: Tensor) -> Made:
    h = net[0](x).tanh()
    k = h.sin()
    m = k.cos()
    z = cut(m)
    loss = net[1](z).pow(2).mean() + k.mean() + h.exp().sum()
    return [*grad(loss, [h, m, k], retain_graph=True)], loss


def drawn(net: Any, x: Tensor) -> Made:
    h = net[0](x).tanh()
    k = F.dropout(net[2](h), 0.5)
    z = cut(k)
    loss = net[1](z).pow(2).mean()
    return [*grad(loss, h, retain_graph=True), torch.rand(3)], loss


def hooked_weights(net: Any, x: Tensor) -> Made:
    seen: list[Tensor] = []
    h = net[0](x).tanh()
    k = h.sin()
    z = cut(k)
    net[0].weight.register_hook(lambda g: seen.append(g.sum()))
    loss = net[1](z).pow(2).mean()
    found = grad(loss, h, retain_graph=True)
    assert not seen
    return [*found], loss


def two_cuts(net: Any, x: Tensor) -> Made:
    h = net[0](x).tanh()
    k = h.sin()
    m = net[1](cut(k)).tanh() * h
    q = m.exp()
    w = cut(q)
    loss = w.sum() + (q * h).sum() + k.mean()
    return [*grad(loss, h, retain_graph=True), *grad(loss, m, retain_graph=True)], loss


def written(net: Any, x: Tensor) -> Made:
    h = net[0](x) * 1
    h.add_(1)
    k = h.sin()
    z = cut(k)
    loss = net[1](z).pow(2).mean()
    return [*grad(loss, h, retain_graph=True)], loss


def in_front_of_a_write(net: Any, x: Tensor) -> Made:
    """The way from h to the weights needs what tanh has returned; the way to h does not."""
    h = net[0](x).tanh()
    h.mul_(0.5)
    k = h.sin()
    z = cut(k)
    return [*grad(z.sum() + k.sum(), h)], net[1](x[:, :4]).sum()


def behind_a_written_value(net: Any, x: Tensor) -> Made:
    a = net[0](x).exp()
    h = a * 2
    a.add_(1)
    k = h.sin()
    m = k * h
    z = cut(m)
    loss = z.pow(2).mean() + k.sum()
    return [*grad(loss, [h, k], retain_graph=True), *grad(loss, m)], net[1](x[:, :4]).sum()


def viewed(net: Any, x: Tensor) -> Made:
    h = net[0](x).tanh()
    part = h[:, :2]
    k = part.sin()
    z = cut(k)
    loss = z.pow(2).mean() + h.sum()
    return [*grad(loss, h, retain_graph=True)], loss


def in_a_checkpoint(net: Any, x: Tensor) -> Made:
    h = net[0](x).tanh()
    k = checkpoint(lambda a: net[1](a).sin(), h, use_reentrant=False)
    z = cut(k)
    loss = z.pow(2).mean() + h.sum()
    return [*grad(loss, h, retain_graph=True)], loss


def of_a_batch(net: Any, x: Tensor) -> Made:
    x.requires_grad_()
    h = net[0](x).tanh()
    k = h.sin()
    z = cut(k)
    loss = z.pow(2).mean() + h.sum()
    start = torch.tensor(0.3, dtype=torch.float64)
    return [*grad(loss, h, start, retain_graph=True), *grad(loss, x, retain_graph=True)], loss


def unused(net: Any, x: Tensor) -> Made:
    h = net[0](x).tanh()
    k = h.sin()
    z = cut(k)
    other = net[1](x[:, :4]).sum()
    assert grad(other, h, allow_unused=True, retain_graph=True) == (None,)
    with pytest.raises(RuntimeError, match="appears to not have been used"):
        grad(other, h, retain_graph=True)
    zeros = grad(other, h, allow_unused=True, materialize_grads=True, retain_graph=True)
    return [*zeros], z.sum()


def weights_changed_since(net: Any, x: Tensor) -> Made:
    """The calls up to the write run first, as a part: h can not be computed again."""
    h = net[0](x).tanh()
    k = h.sin()
    loss = net[1](k).pow(2).mean() + h.sum()
    with torch.no_grad():
        for p in net[0].parameters():
            p.mul_(0.5)
    once = grad(loss, h, retain_graph=True)
    return [*once, *grad(loss, [h, k], retain_graph=True)], net[1](x[:, :4]).sum()


def weights_changed_behind_a_cut(net: Any, x: Tensor) -> Made:
    h = net[0](x).tanh()
    k = h.sin()
    inner = net[1](k).pow(2).mean() + h.sum()
    loss = cut(inner)
    with torch.no_grad():
        net[0].bias.add_(0.5)
    once = grad(loss, h, retain_graph=True)
    return [*once, *grad(loss, [k, h], retain_graph=True)], net[1](x[:, :4]).sum()


PROGRAMS = [
    weights_changed_since,
    weights_changed_behind_a_cut,
    within,
    through_all,
    several,
    drawn,
    hooked_weights,
    two_cuts,
    written,
    in_front_of_a_write,
    behind_a_written_value,
    viewed,
    in_a_checkpoint,
    of_a_batch,
    unused,
]


def step(program: Any, lazy: Lazy) -> list[Any]:
    torch.manual_seed(0)
    net = nn.ModuleList([nn.Linear(6, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)]).double()
    found, loss = program(net, lazy(torch.randn(N_ROWS, 6, dtype=torch.float64)))
    loss.backward()
    gradients = [p.grad for p in net.parameters() if p.grad is not None]
    return [*found, *gradients, *net.buffers(), torch.rand(3)]


@pytest.mark.rotated("chunks")
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_same_as_eager(program: Any, chunks: int | None) -> None:
    want = step(program, eager)
    with koila.config(**({} if chunks is None else {"chunks": chunks})):  # type: ignore[arg-type]
        got = step(program, koila.lazy)
    for one, wanted in zip(got, want, strict=True):
        torch.testing.assert_close((one + 0).detach(), wanted, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("chunks", CHUNKS)
def test_a_later_backward_loses_no_gradient(chunks: int | None) -> None:
    """Of weights that were changed since: it gives eager's gradients, or raises."""

    def step(lazy: Lazy) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 4)).double()
        h = net[:2](lazy(torch.randn(N_ROWS, 6, dtype=torch.float64)))
        loss = net[2](h).pow(2).mean()
        with torch.no_grad():
            net[0].weight.mul_(0.5)
        grad(loss, h, retain_graph=True)
        loss.backward()
        return [p.grad for p in net.parameters() if p.grad is not None]

    want = step(eager)
    with koila.config(**({} if chunks is None else {"chunks": chunks})):  # type: ignore[arg-type]
        try:
            got = step(koila.lazy)
        except RuntimeError as error:
            assert "changed in place" in str(error)
            return
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-14)


def of_a_hooked_value(net: Any, x: Tensor) -> None:
    h = net[0](x).tanh()
    k = h.sin()
    z = cut(k)
    k.register_hook(lambda g: g * 2)
    grad(z.sum(), h)


def with_weights(net: Any, x: Tensor) -> None:
    h = net[0](x).tanh()
    k = h.sin()
    z = cut(k)
    grad(z.sum() + k.sum(), [h, net[0].weight])


def of_a_view(net: Any, x: Tensor) -> None:
    h = net[0](x).tanh()
    part = h[:, :2]
    k = part.sin()
    z = cut(k)
    grad(z.sum() + h.sum(), part)


def with_a_graph(net: Any, x: Tensor) -> None:
    h = net[0](x).tanh()
    k = h.sin()
    z = cut(k)
    grad(z.sum(), h, create_graph=True)


def behind_what_is_gone(net: Any, x: Tensor) -> None:
    h = net[0](x).tanh()
    z = cut(h.sin())
    grad(z.sum(), h)


def of_a_written_value(net: Any, x: Tensor) -> None:
    """Its number is not what was read."""
    h = net[0](x).tanh()
    z = cut(h.relu())
    with torch.no_grad():
        h.add_(1)
        h.sum().item()
    grad(z.sum(), h)


REFUSED = [
    of_a_written_value,
    of_a_hooked_value,
    with_weights,
    of_a_view,
    with_a_graph,
    behind_what_is_gone,
]


@pytest.mark.parametrize("chunks", CHUNKS[2:])
@pytest.mark.parametrize("program", REFUSED)
def test_what_cannot_be_told_apart_is_refused(program: Any, chunks: int) -> None:
    net = nn.ModuleList([nn.Linear(6, 4), nn.Linear(4, 4)]).double()
    file = re.escape(__file__)  # of the call that asks, and of the call that cut the program
    text = rf"\w+ \({file}:\d+\): the program was cut before Double\.apply \({file}:\d+\), after"
    with koila.config(chunks=chunks), pytest.raises(koila.KoilaError, match=text) as raised:
        program(net, koila.lazy(torch.randn(N_ROWS, 6, dtype=torch.float64)))
    assert "only a part of its gradient comes here" in str(raised.value)


def kept(v: Tensor, y: Tensor) -> Tensor:
    """Calls whose backward needs `v` as it was: all runs whole at the next cut."""
    return F.cross_entropy(v, y) + v.sin().sum() / 9


def not_kept(v: Tensor, y: Tensor) -> Tensor:
    """Calls whose backward does not need `v`: they become a part in spite of the write."""
    return v.cumsum(1).mean() + (v * 2).sum()


@pytest.mark.rotated("chunks")
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("is_written", [False, True])
@pytest.mark.parametrize("which", ["both", "before", "after"])
@pytest.mark.parametrize("read", [kept, not_kept])
@pytest.mark.parametrize("chunks", CHUNKS)
def test_a_value_that_was_written_after_it_was_read(
    chunks: int | None, read: Any, which: str, is_written: bool, create_graph: bool
) -> None:
    """Through `.data`, which torch does not count. The share of the gradient that comes through the
    calls before the write does not reach the tensor if they are in a part. It is refused, and not
    left out."""

    def run(lazy: Lazy) -> Tensor:
        torch.manual_seed(0)
        net = nn.Linear(6, 4).double()
        x, y = lazy(torch.randn(N_ROWS, 6).double(), torch.randint(0, 4, (N_ROWS,)))
        v = net(x)
        before = read(v, y)
        if is_written:
            v.data.clamp_(-1, 1)
        after = cut(v).sin().sum()
        loss = {"both": before + after, "before": before, "after": after}[which]
        (found,) = grad(loss, v, create_graph=create_graph)
        return found.detach() * 1

    wanted = run(eager)
    with koila.config(**({} if chunks is None else {"chunks": chunks})):
        try:
            found = run(koila.lazy)
        except koila.KoilaError as error:
            assert "only a part of its gradient comes here" in str(error)
            assert "koila.config(chunks=1)" in str(error)
            assert (chunks or 1) > 1 and (is_written or create_graph)
            return
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-13)


def through_data(v: Tensor) -> None:
    v.data.clamp_(-1, 1)


def without_a_graph(v: Tensor) -> None:
    with torch.no_grad():
        v.clamp_(-1, 1)


@pytest.mark.parametrize("write", [through_data, without_a_graph])
@pytest.mark.parametrize("is_read_between", [False, True])
@pytest.mark.parametrize("chunks", CHUNKS)
def test_a_hook_on_a_value_that_was_written_after_it_was_read(
    chunks: int | None, is_read_between: bool, write: Any
) -> None:
    """torch calls the hook with the sum of the gradients from the calls that read the value before
    the write and from those after it; the hook halves that sum."""

    def run(lazy: Lazy) -> list[Any]:
        torch.manual_seed(0)
        net, seen = nn.Linear(6, 4).double(), list[Any]()
        x, y = lazy(torch.randn(N_ROWS, 6).double(), torch.randint(0, 4, (N_ROWS,)))
        v = net(x)
        before = not_kept(v, y)
        write(v)
        if is_read_between:
            seen.append(v.sum().item())
        after = cut(v).sin().sum()
        v.register_hook(lambda g: (seen.append(g.detach().clone()), g * 0.5)[1])
        before.backward(retain_graph=True)
        (before * 2 + after).backward()
        return [*seen, net.weight.grad, net.bias.grad]

    wanted = run(eager)
    with koila.config(**({} if chunks is None else {"chunks": chunks})):
        found = run(koila.lazy)
    assert len(found) == len(wanted) == 4 + is_read_between
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-13)
