# SPDX-License-Identifier: Apache-2.0
"""A lazy that is given as the gradient of a plain tensor, and lazies that backward functions of
plain tensors read while a graph of the gradients is made."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F

import koila
from oracle import Programs, assert_same_in_chunks

N_ROWS = 7

Net = nn.Module
PROGRAMS = program = Programs()


def weight() -> Tensor:
    return torch.linspace(0.1, 1, 28, dtype=torch.float64).view(N_ROWS, 4).requires_grad_()


@program
def grad(x: Tensor, w: Tensor, net: Net) -> Any:
    return torch.autograd.grad(w.sin(), w, x[:, :4])


@program
def grad_of_two(x: Tensor, w: Tensor, net: Net) -> Any:
    given = [x[:, :4], x[:, 1:5] * 2]
    return torch.autograd.grad((w.sin(), w.cos()), [w], grad_outputs=given, retain_graph=True)


@program
def grad_of_a_number(x: Tensor, w: Tensor, net: Net) -> Any:
    return torch.autograd.grad(w.sin().sum(), w, x.mean())


@program
def batched(x: Tensor, w: Tensor, net: Net) -> Any:
    given = torch.stack([x[:, :4], x[:, :4] * 2])
    return torch.autograd.grad(w.sin(), w, given, is_grads_batched=True)


@program
def with_a_graph(x: Tensor, w: Tensor, net: Net) -> Any:
    h = net(x)
    (g,) = torch.autograd.grad(w.sin(), w, h, create_graph=True)
    (g * h).sum().backward()
    return g, w.grad


@program
def without_a_graph(x: Tensor, w: Tensor, net: Net) -> Any:
    h = net(x)
    (g,) = torch.autograd.grad(w.sin(), w, h)
    (g * h).sum().backward()
    return g


@program
def backward(x: Tensor, w: Tensor, net: Net) -> Any:
    w.sin().backward(x[:, :4])
    return w.grad


@program
def backward_by_name(x: Tensor, w: Tensor, net: Net) -> Any:
    w.sin().backward(gradient=net(x).detach())
    return w.grad


@program
def backward_in_the_middle(x: Tensor, w: Tensor, net: Net) -> Any:
    h = net(x)
    w.sin().backward(h)
    (h * w.grad).sum().backward()
    return w.grad


@program
def backward_with_a_graph(x: Tensor, w: Tensor, net: Net) -> Any:
    w.sin().backward(net(x), create_graph=True)
    assert w.grad is not None
    total = w.grad.sum() * 1
    w.grad = None
    total.backward()
    return w.grad


@program
def backward_of_several(x: Tensor, w: Tensor, net: Net) -> Any:
    torch.autograd.backward([w.sin(), w.cos()], [x[:, :4], torch.ones_like(w)])
    h = net(x)
    torch.autograd.backward([w.sin(), h.sin()], [x[:, :4], h.detach()])
    return w.grad


@program
def of_an_edge(x: Tensor, w: Tensor, net: Net) -> Any:
    edge: Any = torch.autograd.graph.get_gradient_edge(w.sin())
    torch.autograd.backward([edge], [x[:, :4]])
    return w.grad


@program
def of_transforms(x: Tensor, w: Tensor, net: Net) -> Any:
    a, k = w.detach(), x[:, :4] * 2
    pull: Any = torch.func.vjp(torch.sin, a)[1]
    push = torch.func.jvp(torch.sin, (a,), (k,))
    return *pull(k), *push, *torch.func.vmap(pull)(torch.stack([k, k.sin()]))


@program
def of_functional(x: Tensor, w: Tensor, net: Net) -> Any:
    a, k, f = w.detach(), x[:, :4] * 2, torch.autograd.functional
    total = lambda a: a.sin().sum()  # noqa: E731
    found = f.vjp(torch.sin, a, k), f.jvp(torch.sin, a, k), f.hvp(total, a, k), f.vhp(total, a, k)
    return [one for pair in found for one in pair]


@program
def of_a_dual_level(x: Tensor, w: Tensor, net: Net) -> Any:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(w, x[:, :4])
        return forward_ad.unpack_dual(dual.sin())[1]


def cube(k: Tensor) -> Any:
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Tensor) -> Tensor:
            ctx.save_for_backward(a)
            return a**3 * k

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            (a,) = ctx.saved_tensors
            return g * 3 * a**2 * k

    return Cube.apply


def with_backward(run: Callable[[Tensor], Tensor]) -> Any:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Tensor) -> Tensor:
            return a * 2

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return run(g)

    return Double.apply


def twice(function: Any, w: Tensor) -> Any:
    """Differentiate a function twice."""
    (g,) = torch.autograd.grad((function(w) * w).sum(), w, create_graph=True)
    g.sin().sum().backward()
    return g, w.grad


@program
def second_backward_with_rows(x: Tensor, w: Tensor, net: Net) -> Any:
    return twice(cube(x[:, :4] * 2), w)


@program
def second_backward_with_numbers(x: Tensor, w: Tensor, net: Net) -> Any:
    return *twice(cube(x.mean()), w), *twice(cube(x.mean(0)[:1]), w)


@program
def second_backward_with_a_gradient(x: Tensor, w: Tensor, net: Net) -> Any:
    return *twice(cube(net(x)), w), *twice(cube(net(x).mean()), w)


@program
def second_backward_of_a_lazy(x: Tensor, w: Tensor, net: Net) -> Any:
    h = net(x)
    (g,) = torch.autograd.grad(cube(x[:, :4])(h).sum(), h, create_graph=True)
    g.sin().sum().backward()
    return g


@program
def a_backward_of_other_calls(x: Tensor, w: Tensor, net: Net) -> Any:
    layer: Any = net

    def run(g: Tensor) -> Tensor:
        return torch.einsum("ij,ij->ij", g, x[:, :4]) + F.linear(x, layer.weight)

    return twice(with_backward(run), w)


@program
def a_backward_that_returns_a_lazy(x: Tensor, w: Tensor, net: Net) -> Any:
    k = x[:, :4] * 2
    function = with_backward(lambda g: k)
    (function(w) * w).sum().backward()
    first = [w.grad]
    w.grad = None
    return first + list(twice(function, w))


@program
def a_backward_that_enables_gradients(x: Tensor, w: Tensor, net: Net) -> Any:
    k = x[:, :4] * 2

    def run(g: Tensor) -> Tensor:
        with torch.enable_grad():
            return (g * k).detach()

    with_backward(run)(w).sin().sum().backward()
    return w.grad


def run(made: Any, lazy: Any, chunks: int | None) -> list[Tensor]:
    torch.manual_seed(0)
    net = nn.Linear(6, 4).double()
    x = lazy(torch.randn(N_ROWS, 6).double())
    with koila.config(chunks=chunks):
        outs = made(x, weight(), net)
    outs = outs if isinstance(outs, tuple | list) else (outs,)
    grads = [p.grad for p in net.parameters() if p.grad is not None]
    return [torch.as_tensor(out.detach() * 1) for out in (*outs, *grads)]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("name", PROGRAMS)
def test_equals_eager(name: str) -> None:
    assert_same_in_chunks(functools.partial(run, PROGRAMS[name]), N_ROWS)


def test_gradients_of_other_shapes_are_refused_as_in_torch() -> None:
    w, x = weight(), koila.lazy(torch.ones(N_ROWS, 6).double())
    with pytest.raises(RuntimeError, match="Mismatch in shape"):
        torch.autograd.grad(w.sin(), w, x)
