# SPDX-License-Identifier: Apache-2.0
"""A program that is cut: its lazies get tensors, and what waits stays on a tape of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import koila
from binding_kit import batch, number_of
from koila import _core
from koila.running import replay

core: Any = _core

pytestmark = pytest.mark.sanitize


def known() -> tuple[Any, torch.Tensor]:
    """A lazy with a number and a gradient, and the weight that it is made of."""
    w = torch.ones(3, 2, dtype=torch.float64, requires_grad=True)
    h = koila.lazy(batch()) @ w
    with koila.config(chunks=2):
        assert replay.read(False)
    return h, w


def test_what_is_reached() -> None:
    h, w = known()
    assert core.can_cut()
    ((value, number),) = core.reached()
    (leaf,), held = core.behind(value)
    assert leaf is w and held == [] and value == core.id(h) and not core.is_graph_freed(h)
    assert core.behind(core.id(h * 2)) == ([w], [value])
    torch.testing.assert_close(number, batch() @ w.detach())


def test_what_cannot_be_cut() -> None:
    """A gradient that is looked at; a lazy that has no number."""
    h, w = known()
    more = h @ w.T
    assert core.can_cut() and core.reached() is None
    del more
    h.register_hook(lambda gradient: None)
    assert not core.can_cut() and core.reached() is None


def test_handed_out() -> None:
    h, w = known()
    ((value, number),) = core.reached()
    given = number.clone().requires_grad_() * 1
    (root,) = core.hand_out([(value, given)], [])
    assert core.real(h) is given and koila.is_lazy(root)
    assert core.real(root) is None and number_of(root) is None
    after = h * 2  # onto another tape
    assert core.is_pending_here(after) and not core.is_pending_here(root)
    core.set_wanted((root,), False)
    core.set_wanted((root,), True)
    made: list[torch.Tensor] = []

    def stand_in(leaf: torch.Tensor) -> torch.Tensor:
        made.append(leaf.detach().requires_grad_())
        return made[-1]

    core.replace_leaves(root, stand_in)
    real = core.force(root)
    (gradient,) = torch.autograd.grad(real.sum(), made)
    assert torch.equal(gradient, batch().sum(0)[:, None].expand(3, 2)) and w.grad is None


def test_another_leaf() -> None:
    h, w = known()
    ((value, number),) = core.reached()
    leaf = core.leaves_of(w)[0]
    (root,) = core.hand_out([(value, number)], [])
    with torch.no_grad():
        before = w.clone().requires_grad_()
        w.mul_(2)
    core.replace_leaf(root, leaf, before)
    torch.testing.assert_close(core.force(root).detach(), number)
    assert core.real(h) is number


@pytest.mark.parametrize(
    "args", [(), ([], None), ([(1, 2)], []), ([[0, 1]], []), ([("a", batch())], [])]
)
def test_wrong_arguments(args: tuple[Any, ...]) -> None:
    h, _ = known()
    with pytest.raises(TypeError):
        core.hand_out(*args)
    assert number_of(h) is not None


@pytest.mark.parametrize("value", [0, 10**6])
def test_what_no_call_makes(value: int) -> None:
    h, _ = known()
    with pytest.raises(IndexError):
        core.hand_out([(value, batch())], [])
    with pytest.raises(IndexError):
        core.replace_leaf(h, 10**6, batch())
    with pytest.raises(TypeError):
        core.set_wanted((1,), True)
    with pytest.raises(TypeError):
        core.replace_leaves(batch(), len)
    assert number_of(h) is not None
