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
from koila.recording import parts
from oracle import Lazy, assert_seen, eager, tell
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


@pytest.mark.parametrize("how", ["hook", "retain", "input"])
@pytest.mark.parametrize("chunks", [2, 3, 7])
def test_a_value_whose_gradient_comes_through_a_part_that_ran_whole(chunks: int, how: str) -> None:
    """A hook gets the whole gradient; where only a share of it would come, koila refuses. Calls
    recorded later, on another tape, are none of the part's."""

    def story(lazy: Lazy) -> Any:
        m, (x, _) = model(), batch(lazy)
        a = torch.tanh(m.a(x))
        loss = Square.apply(torch.tanh(m.b(a))).tanh().sum()
        (found,) = torch.autograd.grad(loss, [m.a.weight], create_graph=True)
        found.pow(2).sum().backward(retain_graph=True)
        told_hook: list[Tensor] = []
        later = m.a(x)
        assert lazy is eager or not parts.that_read(m.a.weight)
        if how == "hook":
            a.register_hook(lambda gradient: told_hook.append(gradient.sum()))
        elif how == "retain":
            a.retain_grad()
        else:
            torch.autograd.grad(loss, a, retain_graph=True)
        loss.backward()
        return told_hook, later.detach(), [p.grad for p in m.parameters()]

    want, _ = tell(story, eager)
    with koila.config(chunks=chunks):
        if how == "hook":
            got, _ = tell(story, koila.lazy)
            assert_seen(got, want, "hooks", exact_bits=False)
        else:
            with pytest.raises(koila.KoilaError, match="only a part of its gradient comes here"):
                story(koila.lazy)
