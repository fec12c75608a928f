# SPDX-License-Identifier: Apache-2.0
"""Weights that are frozen between forward and backward, or need a gradient again: the graph is what
it was when calls were made, and torch asks a leaf whether it needs a gradient when that comes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import koila
from oracle import Lazy, assert_seen, eager, tell
from stories import each_split_further, rows
from test_bridge import Square

Between = Callable[[nn.Module, Tensor, Tensor, Tensor, bool], Tensor]
BETWEEN: dict[str, Between] = {}


def add(between: Between) -> Between:
    BETWEEN[between.__name__] = between
    return between


def cut(x: Tensor) -> Tensor:
    """A call that cannot be recorded."""
    made: Tensor = Square.apply(x)  # type: ignore[no-untyped-call]
    return made


@add
def nothing(of: nn.Module, x: Tensor, h: Tensor, g: Tensor, flag: bool) -> Tensor:
    of.requires_grad_(flag)
    return g


@add
def a_cut_before(of: nn.Module, x: Tensor, h: Tensor, g: Tensor, flag: bool) -> Tensor:
    made = cut(g)
    of.requires_grad_(flag)
    return made


@add
def a_cut_after(of: nn.Module, x: Tensor, h: Tensor, g: Tensor, flag: bool) -> Tensor:
    of.requires_grad_(flag)
    return cut(g)


@add
def a_cut_beside(of: nn.Module, x: Tensor, h: Tensor, g: Tensor, flag: bool) -> Tensor:
    of.requires_grad_(flag)
    cut(h)
    return g


@add
def a_read(of: nn.Module, x: Tensor, h: Tensor, g: Tensor, flag: bool) -> Tensor:
    h.sum().item()
    of.requires_grad_(flag)
    return g


@add
def another_call(of: nn.Module, x: Tensor, h: Tensor, g: Tensor, flag: bool) -> Tensor:
    of.requires_grad_(flag)
    return cut(g) * of(x)


@add
def there_and_back(of: nn.Module, x: Tensor, h: Tensor, g: Tensor, flag: bool) -> Tensor:
    of.requires_grad_(flag)
    of.requires_grad_(not flag)
    return g


@add
def there_and_back_beside_a_cut(
    of: nn.Module, x: Tensor, h: Tensor, g: Tensor, flag: bool
) -> Tensor:
    of.requires_grad_(flag)
    made = cut(g)
    of.requires_grad_(not flag)
    return made


@pytest.mark.rotated("chunks")
@pytest.mark.parametrize("is_watched", [False, True])
@pytest.mark.parametrize("is_alone", [False, True])
@pytest.mark.parametrize("is_part", [False, True])
@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("name", BETWEEN)
@each_split_further
def test_equals_eager(
    chunks: int | None, name: str, flag: bool, is_part: bool, is_alone: bool, is_watched: bool
) -> None:
    def story(lazy: Lazy) -> Any:
        net, last = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
        net.requires_grad_(not flag)
        if is_part:  # of its weights one stays as it is
            net.bias.requires_grad = not flag
            net.__dict__["requires_grad_"] = net.weight.requires_grad_
        told: list[Tensor] = []
        if is_watched and not flag:
            net.weight.register_hook(lambda gradient: told.append(gradient + 0))
        x = lazy(rows(4))
        h = net(x)
        g = h.sin()
        made = BETWEEN[name](net, x, h, g, flag)
        if is_watched and not flag:
            g.register_hook(lambda gradient: told.append(gradient + 0))
        if is_watched and made.requires_grad:
            made.retain_grad()
        loss = made.tanh().sum() if is_alone else last(made).tanh().sum()
        is_differentiated = loss.requires_grad
        if is_differentiated:
            loss.backward()
        kept = made.grad if is_watched and made.requires_grad else None
        found = [p.grad for p in (*net.parameters(), *last.parameters())]
        return h, made, loss, told, kept, found, is_differentiated, h.requires_grad

    want, want_state = tell(story, eager)
    with koila.config(chunks=chunks):
        got, got_state = tell(story, koila.lazy)
    assert_seen(got, want, name, exact_bits=False)
    assert torch.equal(got_state, want_state)


def test_memory_is_shared() -> None:
    """What stands for a frozen leaf is no copy, and the leaf is left as it was."""
    weight = torch.ones(3, requires_grad=True)
    weight.requires_grad_(False)
    alias = koila.basics.engine.thawed(weight)
    assert alias.data_ptr() == weight.data_ptr()
    assert alias.requires_grad
    assert not weight.requires_grad
