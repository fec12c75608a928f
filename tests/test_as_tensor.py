# SPDX-License-Identifier: Apache-2.0
"""torch.as_tensor and torch.asarray of a lazy: the lazy itself, or what its method `to` makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import koila

MAKES: list[Callable[..., Tensor]] = [torch.as_tensor, torch.asarray]


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("words", [{}, {"device": "cpu"}, {"dtype": torch.float64}])
def test_it_is_the_lazy(make: Callable[..., Tensor], words: dict[str, Any]) -> None:
    x = koila.lazy(torch.randn(6, 3, dtype=torch.float64))
    assert make(x, **words) is x


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.filterwarnings("ignore:torch.asarray")
@pytest.mark.parametrize("chunks", [1, 2, 3, 7])
def test_what_is_made_of_it_stays_lazy(make: Callable[..., Tensor], chunks: int) -> None:
    torch.manual_seed(0)
    net, x, y = nn.Linear(3, 4).double(), torch.randn(7, 3).double(), torch.randint(4, (7,))

    def step(x: Tensor, y: Tensor) -> Tensor:
        net.zero_grad()
        hidden = make(net(make(x, device="cpu")), dtype=torch.float64)
        weights = make(y, dtype=torch.float64) + 1
        loss = (hidden.square().sum(1) * weights).mean()
        loss.backward()
        return loss.detach()

    wanted, gradients = step(x, y), [p.grad for p in net.parameters()]
    with koila.config(chunks=chunks):
        got = step(*koila.lazy(x, y))
        report = koila.report()
    assert len(report.programs) == 1 and report.n_chunks == chunks
    assert_close(got + 0, wanted, rtol=1e-10, atol=0)
    for parameter, gradient in zip(net.parameters(), gradients, strict=True):
        assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-12)


def test_a_copy_of_it_is_plain() -> None:
    x = koila.lazy(torch.ones(4, 2))
    copied = torch.asarray(x, copy=True)
    assert type(copied) is Tensor
    assert_close(copied, torch.ones(4, 2))


class Picture(Tensor):
    """As torchvision's tv_tensors are."""


@pytest.mark.parametrize("kind", [Tensor, Picture])
@pytest.mark.parametrize("chunks", [1, 2, 3, 7])
def test_as_subclass_keeps_the_graph(kind: type[Tensor], chunks: int) -> None:
    """As a plain tensor it stays lazy; as another class it runs, and has its graph."""
    torch.manual_seed(0)
    net, x = nn.Linear(3, 4).double(), torch.randn(7, 3, dtype=torch.float64)

    def step(x: Tensor) -> Tensor:
        net.zero_grad()
        image = net(x).as_subclass(kind)
        assert type(image) is kind or (kind is Tensor and koila.is_lazy(image))
        loss = image.as_subclass(cls=Tensor).square().sum()
        loss.backward()
        return loss.detach()

    wanted, gradients = step(x), [p.grad for p in net.parameters()]
    with koila.config(chunks=chunks):
        got = step(koila.lazy(x))
        assert koila.report().n_chunks == (chunks if kind is Tensor else 1)
    assert_close(got + 0, wanted, rtol=1e-10, atol=0)
    for parameter, gradient in zip(net.parameters(), gradients, strict=True):
        assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-12)
