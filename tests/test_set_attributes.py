# SPDX-License-Identifier: Apache-2.0
"""Attributes of plain tensors that are set to a lazy: torch asks the class of the tensor alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import koila
from oracle import Lazy, assert_same_story
from stories import each_split_further, rows

Story = Callable[[nn.Linear, Tensor], Any]
STORIES: dict[str, Story] = {}


def add(story: Story) -> Story:
    STORIES[story.__name__] = story
    return story


@add
def gradients_by_hand(model: nn.Linear, x: Tensor) -> Any:
    error = (model(x) - 1).detach()
    model.weight.grad, model.bias.grad = error.T @ x, error.sum(0)
    assert type(model.weight.grad) is Tensor
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return list(model.parameters())


@add
def gradients_without_a_graph(model: nn.Linear, x: Tensor) -> Any:
    model.bias.grad = model(x).detach().sum(0)
    model.weight._grad = (x.T @ x)[:3].clone()  # type: ignore[attr-defined]
    return [p.grad for p in model.parameters()]


@add
def gradients_with_a_graph(model: nn.Linear, x: Tensor) -> Any:
    model.weight.grad = model(x).T @ x
    loss = model.weight.grad.pow(2).sum()
    return torch.autograd.grad(loss, [model.weight, model.bias]), model.weight.grad


@add
def the_gradient_of_the_batch(model: nn.Linear, x: Tensor) -> Any:
    x.requires_grad_()
    x.grad = x.detach() * 2
    model(x).pow(2).sum().backward()
    return x.grad


@add
def weights_by_data(model: nn.Linear, x: Tensor) -> Any:
    model.weight.data = model.weight.detach() * x.mean()
    model.bias.data = model(x).sum(0)
    model(x).pow(2).mean().backward()
    return list(model.parameters()), [p.grad for p in model.parameters()]


@add
def data_of_what_is_no_parameter(model: nn.Linear, x: Tensor) -> Any:
    mean, hidden = torch.zeros(2), model(x).detach()
    mean.data = hidden.mean(0)
    mean.mul_(3)
    return mean, model(x).sum()


@add
def parts_of_complex_numbers(model: nn.Linear, x: Tensor) -> Any:
    z = torch.zeros(len(x), 4, dtype=torch.complex128)
    z.real = x
    z.imag = x * 2
    (model(x) * z.abs()[:, :3]).sum().backward()
    return z, model.weight.grad


@pytest.mark.parametrize("name", STORIES)
@each_split_further
def test_equals_eager(chunks: int | None, name: str) -> None:
    def story(lazy: Lazy) -> Any:
        model = nn.Linear(4, 3).double()
        return STORIES[name](model, lazy(rows(4)))

    assert_same_story(story, chunks)


@pytest.mark.parametrize("name", ["grad", "real"])
def test_torchs_errors_are_torchs(name: str) -> None:
    """What does not fit is refused in torch's words, of the number's size and dtype."""
    x = torch.ones(5, 4, dtype=torch.float64)
    said = []
    for sums in (x.sum(0), koila.lazy(x).sum(0)):
        with pytest.raises((RuntimeError, TypeError)) as raised:
            setattr(torch.zeros(3, dtype=torch.float64), name, sums)
        said.append(str(raised.value))
    assert said[0] == said[1]
