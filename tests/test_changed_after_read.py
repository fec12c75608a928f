# SPDX-License-Identifier: Apache-2.0
"""A value that was read keeps its number where the weights it came from are changed by hand later,
and new calls go on from that number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import koila
from chunked import split
from oracle import Lazy, assert_same_story
from stories import N_ROWS, each_split_further, rows

Story = Callable[[Tensor, Tensor, Tensor], Any]
STORIES: dict[str, Story] = {}


def add(story: Story) -> Story:
    STORIES[story.__name__] = story
    return story


def _weights() -> tuple[Tensor, Tensor]:
    w, other = (torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    return w, other


def change(*weights: Tensor) -> None:
    with torch.no_grad():
        for weight in weights:
            weight -= 0.1 * (weight if weight.grad is None else weight.grad)


@add
def read_twice(x: Tensor, w: Tensor, other: Tensor) -> Any:
    h = x @ w
    before = h.sum().item()
    change(w)
    return before, h.sum().item()


@add
def beside_a_backward(x: Tensor, w: Tensor, other: Tensor) -> Any:
    h = x @ w
    loss = (x @ other).pow(2).mean()
    seen = [loss.item(), h.sum().item()]
    loss.backward()
    change(w, other)
    return seen, h.sum().item(), other.grad


@add
def with_its_graph_retained(x: Tensor, w: Tensor, other: Tensor) -> Any:
    h = x @ w
    loss = (h @ other).pow(2).mean()
    seen = [loss.item(), h.sum().item()]
    loss.backward(retain_graph=True)
    change(w, other)
    return seen, h.sum().item(), (h * 2).mean().item(), w.grad


@add
def recorded_before_the_change(x: Tensor, w: Tensor, other: Tensor) -> Any:
    h = x @ w
    seen = h.sum().item()
    twice, part = h * 2, h[:, :2]
    change(w)
    return seen, h.sum().item(), twice.sum().item(), part.tolist()


@add
def its_graph_cut_off(x: Tensor, w: Tensor, other: Tensor) -> Any:
    h = x @ w
    _ = h.sum().item()
    change(w)
    loss = (h.detach() @ other).pow(2).sum()
    loss.backward()
    return loss.item(), other.grad


@add
def written_later(x: Tensor, w: Tensor, other: Tensor) -> Any:
    h = x @ w
    part = h[:, 0]
    _ = h.sum().item()
    change(w)
    with torch.no_grad():
        h.add_(1)
        h[0] = 2.0
    return h.sum().item(), part.sum().item()


@add
def by_a_call_that_is_not_recorded(x: Tensor, w: Tensor, other: Tensor) -> Any:
    h = x @ w
    _ = h.sum().item()
    change(w)
    return torch.linalg.cond(h.detach()[:4]).tolist(), h.tolist()


@pytest.mark.parametrize("name", STORIES)
@each_split_further
def test_numbers_stay(chunks: int | None, name: str) -> None:
    def story(lazy: Lazy) -> Any:
        w, other = _weights()
        return STORIES[name](lazy(rows(4)), w, other)

    assert_same_story(story, chunks)


@pytest.mark.parametrize("chunks", [2, N_ROWS])
def test_a_gradient_through_what_is_gone_is_refused(chunks: int) -> None:
    """Eager has the old weight's graph still; what ran in chunks has only the number."""
    w, other = _weights()
    with koila.config(chunks=chunks):
        h = koila.lazy(rows(4)) @ w
        _ = h.sum().item()
        torch.ops.aten.mul_(w.detach(), 0.9)
        loss = (h @ other).pow(2).sum()
        with pytest.raises(koila.StaleError, match=r"was changed in place after it was read"):
            loss.backward()
    assert w.grad is None


class Count(nn.Module):
    """Counts its calls in a buffer."""

    n: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("n", torch.zeros(4))

    def forward(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            torch.ops.aten.add_(self.n, 1)
        return h.sin()


@pytest.mark.parametrize("is_checkpoint", [False, True])
@pytest.mark.parametrize("chunks", [2, N_ROWS])
def test_a_second_backward_names_the_call_that_reads_what_was_changed(
    chunks: int, is_checkpoint: bool
) -> None:
    """Eager's calls have run; koila would run them again. A checkpoint that counts its runs in a
    buffer, and is left to torch, changes that buffer in its backward."""
    w, count = torch.ones(4, 4, dtype=torch.float64, requires_grad=True), Count()
    with koila.config(chunks=chunks):
        h = koila.lazy(rows(4)) @ w
        if is_checkpoint:
            h = checkpoint(count, h, use_reentrant=True)
        loss = (h - count.n).pow(2).sum()
        loss.backward(retain_graph=True)
        if not is_checkpoint:
            torch.ops.aten.add_(count.n, 1)
        words = r"^sub \(.*\): a tensor of shape \[4\] was changed in place after the value that is"
        with pytest.raises(koila.StaleError, match=words):
            loss.backward()


@pytest.mark.parametrize("chunks", [1, 3])
def test_weights_changed_through_the_data_of_a_view_of_them(chunks: int) -> None:
    """torch counts no write for that, and the view is another tensor than the one that waits."""
    weight = torch.ones(4, 4, requires_grad=True)
    part = weight[0]
    with split(chunks, whole="it is refused"):
        loss = (koila.lazy(torch.ones(6, 4)) @ weight).sum()
        _ = part.data  # looking at it is no change
        torch.ops.aten.mul_(part.data, 2)
        with pytest.raises(koila.StaleError, match="changed in place"):
            loss.backward()


@pytest.mark.parametrize("chunks", [1, 3])
def test_weights_that_wait_since_another_was_read(chunks: int) -> None:
    """What waits is looked up each time, however many there are."""
    first, second = (torch.ones(4, 4, requires_grad=True) for _ in range(2))
    scale, part, other = torch.ones(4), second[0], torch.ones(4)[1:]
    with split(chunks):
        x = koila.lazy(torch.ones(6, 4))
        hidden, scaled = x @ first, (x * scale).abs()
        _ = other.data
        assert scaled.tolist() == torch.ones(6, 4).tolist()
        loss = (hidden @ second).sum()
        torch.ops.aten.mul_(part.data, 3)
        with pytest.raises(koila.StaleError, match="changed in place"):
            loss.backward()
