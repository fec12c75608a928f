# SPDX-License-Identifier: Apache-2.0
"""Views of plain tensors in the sizes of a lazy show what plain torch writes into the memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import koila
from oracle import Lazy, assert_same_story
from stories import N_ROWS, each_split_further, rows

Story = Callable[[nn.Linear, Tensor], Any]
STORIES: dict[str, Story] = {}


def add(story: Story) -> Story:
    STORIES[story.__name__] = story
    return story


def ones(*shape: int) -> Tensor:
    return torch.ones(*shape, dtype=torch.float64)


@add
def written_by_a_lazy(model: nn.Linear, x: Tensor) -> Any:
    r = ones(N_ROWS, 4)
    s = r.view_as(x)
    r[3] += 1
    r.mul_(model(x))
    (s * 2).sum().backward()
    return s, r, model.weight.grad


@add
def flat_and_written_by_a_lazy(model: nn.Linear, x: Tensor) -> Any:
    r = ones(N_ROWS * 4)
    s = r.view_as(x)
    r[3] += 1
    r.mul_(model(x).reshape(-1))
    return s, r, s.sum()


@add
def written_before_it_is_read(model: nn.Linear, x: Tensor) -> Any:
    r = ones(1, 4)
    s = r.expand_as(x)
    r[0, 1] += 1
    (s * model(x)).sum().backward()
    return s, model.weight.grad


@add
def reshaped_and_written(model: nn.Linear, x: Tensor) -> Any:
    r = ones(N_ROWS * 4)
    s = r.reshape_as(x)
    r[5] = 3
    (s * model(x)).sum().backward()
    return s, model.weight.grad


@add
def broadcast_and_written(model: nn.Linear, x: Tensor) -> Any:
    r = ones(4)
    s, _ = torch.broadcast_tensors(r, x)
    r[2] = 3
    (s * model(x)).sum().backward()
    return s, model.weight.grad


@add
def a_view_that_is_written(model: nn.Linear, x: Tensor) -> Any:
    r = ones(N_ROWS * 4)
    s = r.view_as(x)
    s[2] = 7
    s += model(x)
    s.sum().backward()
    return s, r, model.weight.grad


@add
def of_what_needs_its_gradient(model: nn.Linear, x: Tensor) -> Any:
    scale = ones(N_ROWS * 4).requires_grad_()
    (scale.view_as(x) * model(x)).sum().backward()
    return scale.grad, model.weight.grad


@pytest.mark.parametrize("name", STORIES)
@each_split_further
def test_equals_eager(chunks: int | None, name: str) -> None:
    def story(lazy: Lazy) -> Any:
        return STORIES[name](nn.Linear(4, 4).double(), lazy(rows(4)))

    assert_same_story(story, chunks)


@pytest.mark.parametrize("chunks", [2, 3, N_ROWS])
def test_positions_have_the_rows_of_what_they_are_expanded_to(chunks: int) -> None:
    """What is looked up for positions that are the same for all is made by rows."""

    def story(lazy: Lazy) -> Any:
        embedding = nn.Embedding(9, 4).double()
        tokens = lazy(torch.randint(0, 9, (N_ROWS, 7)))
        positions = torch.arange(7).expand_as(tokens)
        found = embedding(positions)
        assert koila.is_lazy(found) == (lazy is koila.lazy)
        loss = (embedding(tokens) * found).sum(-1).pow(2).mean()
        loss.backward()
        return loss, embedding.weight.grad

    assert_same_story(story, chunks)
