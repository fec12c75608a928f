# SPDX-License-Identifier: Apache-2.0
"""Gradients that have a graph, through a program that was cut for a call that cannot be recorded:
the second derivatives go to what the first were made of, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import koila
from koila.planning import unsplit
from test_bridge import Model, Square, batch, each_split, model, told


@each_split
def test_gradients_of_gradients(chunks: int) -> None:
    """A penalty on gradients: what was cut off runs whole then."""

    def ask(m: Model, x: Tensor, y: Tensor) -> Any:
        loss = F.cross_entropy(m.c(Square.apply(torch.tanh(m.b(torch.tanh(m.a(x)))))), y)
        found = torch.autograd.grad(loss, [m.a.weight, m.c.weight], create_graph=True)
        penalty = sum(gradient.pow(2).sum() for gradient in found)
        (loss + penalty).backward()
        return loss.detach(), penalty

    told(ask, chunks, partly="create_graph")


@pytest.mark.parametrize("chunks", [1, 3])
def test_gradients_of_weights_that_two_parts_share(chunks: int) -> None:
    """Differentiated twice, each part adds its own share of them, once."""

    def ask(m: Model, x: Tensor, y: Tensor) -> Any:
        h = torch.tanh(m.b(torch.tanh(m.a(x))))
        h = Square.apply(torch.tanh(m.b(Square.apply(h))))
        loss = F.cross_entropy(m.c(h), y)
        found = torch.autograd.grad(loss, [m.b.weight], create_graph=True)
        (loss + found[0].pow(2).sum()).backward()
        return loss.detach()

    told(ask, chunks, partly="create_graph")


@each_split
def test_gradients_of_gradients_by_some_of_what_they_are_made_of(chunks: int) -> None:
    """The first are asked for by weights of one branch and by what both begin with: the second go
    to the weights of the other branch as well."""

    def ask(m: Model, x: Tensor, y: Tensor) -> Any:
        h = Square.apply(torch.tanh(m.a(x)))
        one, other = m.b(h), h.sin() @ m.w
        loss = one.sum() + other.pow(2).sum() + Square.apply(one.tanh()).sum()
        found = torch.autograd.grad(loss, [h, m.b.weight], create_graph=True)
        sum(gradient.sin().sum() for gradient in found).backward()
        return loss.detach(), found

    told(ask, chunks, partly="create_graph")


@each_split
def test_no_gradient_comes_to_what_a_gradient_is_not_made_of(chunks: int) -> None:
    """The gradient of a linear layer's input is made of its weight alone. A function before the
    layer, which makes zeros of no gradient, is not called; nor is a hook of the bias."""

    def ask(m: Model, x: Tensor, y: Tensor) -> Any:
        seen: list[Any] = []
        m.c.bias.register_hook(seen.append)
        h = Square.apply(torch.tanh(m.a(x)))
        score = m.c(h) * 3
        kept = Square.apply(x.detach()).sum()
        found = torch.autograd.grad(score.sum() + kept, h, create_graph=True)[0]
        found.pow(2).sum().backward()
        return found, kept, seen, [p.grad is None for p in m.parameters()]

    told(ask, chunks, partly="create_graph")


def test_a_gradient_that_was_thought_to_be_made_of_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unsplit, "reached_by_gradients", lambda *_: {})
    m, (x, _) = model(), batch(koila.lazy)
    with koila.config(chunks=2):
        h = Square.apply(torch.tanh(m.a(x)))
        loss = m.c(h).pow(2).sum() + Square.apply(x.detach()).sum()
        (found,) = torch.autograd.grad(loss, h, create_graph=True)
        with pytest.raises(koila.KoilaError, match="that the first was not made of"):
            found.sum().backward()


def test_three_times() -> None:
    """What cannot be kept is said."""
    m, (x, y) = model(), batch(koila.lazy)
    with koila.config(chunks=3):
        loss = F.cross_entropy(m.c(Square.apply(torch.tanh(m.a(x)))), y)
        (first,) = torch.autograd.grad(loss, [m.a.weight], create_graph=True)
        with pytest.raises(koila.KoilaError, match="differentiated a third time"):
            torch.autograd.grad(first.pow(2).sum(), [m.a.weight], create_graph=True)


class First(torch.autograd.Function):
    """Reads two values, and has a gradient for the first alone."""

    @staticmethod
    def forward(ctx: Any, one: Tensor, other: Tensor) -> Tensor:
        return 2 * one + 0 * other

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return 2 * gradient, None


@each_split
def test_no_gradient_comes_to_what_a_backward_went_through(chunks: int) -> None:
    """torch's engine goes on through the graph of an input that gets no gradient: of a value whose
    backward ran that is no second backward."""

    def ask(m: Model, x: Tensor, y: Tensor) -> Any:
        h = x + m.a.weight.sum()
        h.sum().backward()
        First.apply(m.c.weight.sum() * 3, h).sum().backward()
        return h.detach()

    told(ask, chunks)
