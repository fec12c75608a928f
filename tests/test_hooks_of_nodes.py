# SPDX-License-Identifier: Apache-2.0
"""Hooks on the grad_fn of values where the program was cut: they see eager's gradients, or are
refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import koila
from oracle import cut, eager

N_ROWS = 11
CHUNKS = [None, 1, 2, 3, 7, N_ROWS]
Lazy = Callable[..., Any]


class Unchanged(TorchDispatchMode):
    """Sees each call, and changes none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def halved(seen: list[Any]) -> Any:
    return lambda go: (seen.append(go[0].sum()), (go[0] * 0.5,))[1]


def noted(seen: list[Any]) -> Any:
    return lambda gi, go: seen.append(go[0].sum())


def before(net: Any, x: Tensor, seen: list[Any]) -> Tensor:
    h = net[0](x).tanh()
    z = cut(h)
    h.grad_fn.register_prehook(halved(seen))
    return net[1](z).pow(2).mean() + net[1](h).mean()


def before_a_view(net: Any, x: Tensor, seen: list[Any]) -> Tensor:
    h = net[0](x).view(-1, 2, 2).flatten(1)
    z = cut(h)
    h.grad_fn.register_prehook(halved(seen))
    return net[1](z).pow(2).mean() + net[1](h).mean()


def before_a_value_that_is_written(net: Any, x: Tensor, seen: list[Any]) -> Tensor:
    """It is no view, and keeps its node."""
    h = net[0](x) * 1
    z = cut(h)
    h.grad_fn.register_prehook(halved(seen))
    h.detach().mul_(0.5)
    return net[1](z).mean() + h.abs().max()


def after(net: Any, x: Tensor, seen: list[Any]) -> Tensor:
    h = net[0](x).tanh()
    z = cut(h)
    h.grad_fn.register_hook(noted(seen))
    return net[1](z).pow(2).mean() + net[1](h).mean()


def beside_a_hook(net: Any, x: Tensor, seen: list[Any]) -> Tensor:
    h = net[0](x).tanh()
    z = cut(h)
    h.grad_fn.register_prehook(halved(seen))
    h.grad_fn.register_prehook(lambda go: pytest.fail("called")).remove()
    h.register_hook(lambda g: g.clamp(-0.01, 0.01))
    h.retain_grad()
    seen.append(h)
    return net[1](z).pow(2).mean() + net[1](h).mean()


def of_an_inner_value(net: Any, x: Tensor, seen: list[Any]) -> Tensor:
    h = net[0](x).tanh()
    z = cut(h * 2)
    h.grad_fn.register_prehook(halved(seen))
    return net[1](z).pow(2).mean() + net[1](h).mean()


def of_a_view(net: Any, x: Tensor, seen: list[Any]) -> Tensor:
    h = net[0](x).tanh()
    part = h[:, :2]
    z = cut(h)
    part.grad_fn.register_prehook(halved(seen))
    part.grad_fn.register_hook(lambda gi, go: seen.append(gi[0].sum()))
    return net[1](z).pow(2).mean() + part.sum()


def of_a_layer(net: Any, x: Tensor, seen: list[Any]) -> Tensor:
    h = F.layer_norm(net[0](x), (4,))
    z = cut(h)
    h.grad_fn.register_prehook(lambda go: seen.append(go[0].sum()))
    return net[1](z).pow(2).mean()


def after_a_write_through_data(net: Any, x: Tensor, seen: list[Any]) -> Tensor:
    """The write changes what the graph keeps, so all runs whole, and there is no part."""
    h = F.normalize(net[0](x), dim=-1)
    v = h.T.contiguous().T
    loss = F.cross_entropy(net[1](h) / (1 + torch.ones(4)), h.argmax(1))
    h.data.mul_(0.5)
    z = cut(v)
    loss.backward(retain_graph=True)
    v.grad_fn.register_prehook(halved(seen))
    v.grad_fn.register_hook(noted(seen))
    return v.exp().sum() + z.sum()


def after_a_second_derivative(net: Any, x: Tensor, seen: list[Any]) -> Tensor:
    """It makes the part run whole, and the calls on its tape are gone then."""
    h = net[0](x).tanh()
    z = cut(h)
    loss = net[1](z).pow(2).mean() + h.exp().sum()
    (slope,) = torch.autograd.grad(loss, net[0].weight, create_graph=True)
    slope.pow(2).sum().backward(retain_graph=True)
    h.grad_fn.register_prehook(halved(seen))
    h.grad_fn.register_hook(noted(seen))
    return loss


def of_an_inner_value_after_a_second_derivative(net: Any, x: Tensor, seen: list[Any]) -> Tensor:
    h = net[0](x).tanh()
    z = cut(h * 2)
    loss = net[1](z).pow(2).mean() + h.exp().sum()
    (slope,) = torch.autograd.grad(loss, net[0].weight, create_graph=True)
    slope.pow(2).sum().backward(retain_graph=True)
    h.grad_fn.register_prehook(halved(seen))
    return loss


def after_a_backward_in_a_mode(net: Any, x: Tensor, seen: list[Any]) -> Tensor:
    """The mode makes the part run whole."""
    h = net[0](x).tanh()
    z = cut(h)
    loss = net[1](z).pow(2).mean() + h.exp().sum()
    with Unchanged():
        loss.backward(retain_graph=True)
    h.grad_fn.register_prehook(halved(seen))
    h.grad_fn.register_hook(noted(seen))
    return loss


PROGRAMS = [before, after, beside_a_hook, of_an_inner_value, of_a_view, of_a_layer]
PROGRAMS += [after_a_write_through_data, before_a_view, before_a_value_that_is_written]
PROGRAMS += [after_a_second_derivative, of_an_inner_value_after_a_second_derivative]
PROGRAMS += [after_a_backward_in_a_mode]


def step(program: Any, lazy: Lazy, n_times: int) -> list[Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4)).double()
    x, seen = lazy(torch.randn(N_ROWS, 6, dtype=torch.float64)), list[Any]()
    loss = program(net, x, seen)
    for i in range(n_times):
        loss.backward(retain_graph=i + 1 < n_times)
    kept = [one.grad for one in seen if one.requires_grad]
    return [*[p.grad for p in net.parameters()], *seen, *kept]


@pytest.mark.rotated("chunks")
@pytest.mark.parametrize("n_times", [1, 2])
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_same_as_eager(program: Any, chunks: int | None, n_times: int) -> None:
    want = step(program, eager, n_times)
    with koila.config(**({} if chunks is None else {"chunks": chunks})):  # type: ignore[arg-type]
        got = step(program, koila.lazy, n_times)
        for one, wanted in zip(got, want, strict=True):
            torch.testing.assert_close((one + 0).detach(), wanted.detach(), rtol=1e-10, atol=1e-14)


def uses_grad_inputs(net: Any, x: Tensor) -> Tensor:
    h = net[0](x).tanh()
    z = cut(h)
    h.grad_fn.register_hook(lambda gi, go: [one.sum() for one in gi])
    return net[1](z).sum()


def unpacks_grad_inputs(net: Any, x: Tensor) -> Tensor:
    def hook(gi: Any, go: Any) -> None:
        (_,) = gi

    h = net[0](x).tanh()
    z = cut(h)
    h.grad_fn.register_hook(hook)
    return net[1](z).sum()


def changes_grad_inputs(net: Any, x: Tensor) -> Tensor:
    h = net[0](x).tanh()
    z = cut(h)
    h.grad_fn.register_hook(lambda gi, go: (go[0] * 3,))
    return net[1](z).sum()


def of_two_outputs(net: Any, x: Tensor) -> Tensor:
    h = net[0](x).tanh()
    most = h.max(1).values
    z = cut(h)
    most.grad_fn.register_prehook(lambda go: None)
    return net[1](z).sum() + most.sum()


def of_two_outputs_after_a_second_derivative(net: Any, x: Tensor) -> Tensor:
    """It makes the part run whole: torch's own node tells how many outputs the call has."""
    variance, mean = torch.var_mean(net[0](x), 1, keepdim=True)
    z = cut(variance)
    loss = z.pow(2).sum() + mean.sin().sum()
    (slope,) = torch.autograd.grad(loss, net[0].weight, create_graph=True)
    slope.pow(2).sum().backward(retain_graph=True)
    variance.grad_fn.register_prehook(lambda go: None)
    return loss


def of_views_together(net: Any, x: Tensor) -> Tensor:
    a, b, *_ = (net[0](x).tanh() * 1).unbind(1)
    z = cut(a)
    b.grad_fn.register_prehook(lambda go: None)
    return z.sum() + b.sum()


def before_an_inner_view(net: Any, x: Tensor) -> Tensor:
    h = net[0](x).tanh()
    part = h[:, :2]
    more = part * 2
    z = cut(h)
    part.grad_fn.register_prehook(lambda go: None)
    return net[1](z).sum() + more.sum() + part.sum()


def after_an_inner_view(net: Any, x: Tensor) -> Tensor:
    h = net[0](x).tanh()
    part = h[:, :2]
    more = part * 2
    z = cut(h)
    part.grad_fn.register_hook(lambda gi, go: None)
    return net[1](z).sum() + more.sum() + part.sum()


def before_a_view_that_is_written(net: Any, x: Tensor) -> Tensor:
    """In eager the write gives `h` another grad_fn. The gradient of the call after the write
    arrives there, and not at the node that has the hook."""
    h = net[0](x).view(-1, 2, 2).flatten(1)
    z = cut(h)
    h.grad_fn.register_prehook(lambda go: (go[0] * 0.5,))
    h.detach().mul_(0.5)
    return z.sum() + h.abs().max()


def after_a_view_that_is_written(net: Any, x: Tensor) -> Tensor:
    h = net[0](x).view(-1, 2, 2).flatten(1)
    z = cut(h)
    h.grad_fn.register_hook(lambda gi, go: None)
    h.detach().mul_(0.5)
    return z.sum() + h.abs().max()


def on_a_view_that_is_written(net: Any, x: Tensor) -> Tensor:
    """The same for a hook of the tensor, which stands on its node."""
    h = net[0](x).view(-1, 2, 2).flatten(1)
    z = cut(h)
    h.register_hook(lambda gradient: gradient * 0.5)
    h.detach().mul_(0.5)
    return z.sum() + h.abs().max()


REFUSED = [
    uses_grad_inputs,
    unpacks_grad_inputs,
    changes_grad_inputs,
    of_two_outputs,
    of_two_outputs_after_a_second_derivative,
    of_views_together,
    before_an_inner_view,
    after_an_inner_view,
    before_a_view_that_is_written,
    after_a_view_that_is_written,
    on_a_view_that_is_written,
]


@pytest.mark.parametrize("chunks", CHUNKS[2:])
@pytest.mark.parametrize("program", REFUSED)
def test_what_only_eager_has_is_refused(program: Any, chunks: int) -> None:
    net = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4)).double()
    text = "cannot be registered on this grad_fn|is on a view that was written since"
    with koila.config(chunks=chunks), pytest.raises(koila.KoilaError, match=text):
        program(net, koila.lazy(torch.randn(N_ROWS, 6, dtype=torch.float64))).backward()


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("is_view", [False, True])
def test_a_hook_on_what_is_written_or_not(is_view: bool, chunks: int | None) -> None:
    """A write to a tensor that is no view leaves its hook; a view that nobody writes keeps its."""

    def run(x: Tensor) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4)).double()
        h = net[0](x).view(-1, 2, 2).flatten(1) if is_view else net[0](x)
        z = cut(h)
        seen: list[Tensor] = []
        h.register_hook(lambda g: (seen.append(torch.tensor(g.tolist())), g * 0.5)[1])
        if not is_view:
            h.detach().mul_(0.5)
        (z.sum() + h.abs().max()).backward()
        assert net[0].weight.grad is not None
        return [*seen, net[0].weight.grad]

    x = torch.randn(N_ROWS, 6, dtype=torch.float64)
    wanted = run(x)
    with koila.config(**({} if chunks is None else {"chunks": chunks})):  # type: ignore[arg-type]
        found = run(koila.lazy(x))
    assert len(found) == len(wanted) == 2
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-14)


def hooked(h: Any, k: Any) -> None:
    h.register_hook(lambda g: g * 0.5)


def inner(h: Any, k: Any) -> None:
    k.register_hook(lambda g: None)


def retained(h: Any, k: Any) -> None:
    h.retain_grad()


def on_its_node(h: Any, k: Any) -> None:
    h.grad_fn.register_prehook(lambda go: None)


@pytest.mark.parametrize("chunks", CHUNKS[2:])
@pytest.mark.parametrize("see", [hooked, inner, retained, on_its_node])
def test_a_second_derivative_behind_a_hook_is_refused(see: Any, chunks: int) -> None:
    """Eager's graph of the gradients leads through the value once more."""
    net = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4)).double()
    with koila.config(chunks=chunks):
        k = net[0](koila.lazy(torch.randn(N_ROWS, 6, dtype=torch.float64)))
        h = k.tanh()
        z = cut(h)
        see(h, k)
        loss = net[1](z).pow(2).mean()
        (slope,) = torch.autograd.grad(loss, net[0].weight, create_graph=True)
        with pytest.raises(koila.KoilaError, match="has a hook or retains its gradient"):
            slope.pow(2).sum().backward()


@pytest.mark.parametrize("chunks", CHUNKS)
def test_hooks_of_the_tensor_come_first(chunks: int | None) -> None:
    """A hook of a tensor is called before a prehook of its node that was registered earlier."""

    def gradient(lazy: Lazy) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        layer, seen = nn.Linear(6, 4).double(), list[Tensor]()
        h = layer(lazy(torch.randn(N_ROWS, 6, dtype=torch.float64)))
        z = cut(h.sin())
        h.grad_fn.register_prehook(lambda go: (go[0] * 0.5,))
        h.register_hook(lambda g: (seen.append(g.sum()), g + 1)[1])
        (h.pow(2).mean() + z.mean()).backward()
        assert layer.weight.grad is not None
        return layer.weight.grad, seen[0]

    with koila.config(chunks=chunks):
        got = gradient(koila.lazy)
    torch.testing.assert_close(got, gradient(eager), rtol=1e-10, atol=1e-12)
