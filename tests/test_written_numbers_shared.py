# SPDX-License-Identifier: Apache-2.0
"""A number that calls still read is given to plain torch or NumPy, and written in ways that torch
does not count: the calls read it as it was when they were recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import koila

DOUBLE = torch.float64


def through_data(s: Any) -> Tensor:
    w = nn.Parameter(s.detach())
    w.data.add_(0.1)
    return w


def through_data_that_is_held(s: Any) -> Tensor:
    w = nn.Parameter(s.detach())
    data = w.data
    data.mul_(2)
    return w


def through_an_array(s: Any) -> Tensor:
    w = nn.Parameter(s.detach())
    w.detach().numpy()[:] += 0.1
    return w


def through_an_array_of_the_lazy(s: Any) -> Tensor:
    array = s.numpy()
    array += 0.1
    return torch.tensor(array)


def through_a_tensor_of_an_array(s: Any) -> Tensor:
    made = torch.from_numpy(s.detach().numpy())
    made += 0.1
    return made.clone()


def as_data(s: Any) -> Tensor:
    layer = nn.Linear(4, 6, dtype=DOUBLE)
    layer.weight.data = s.detach()
    layer.weight.data.add_(0.1)
    return layer.weight


def as_a_gradient(s: Any) -> Tensor:
    layer = nn.Linear(4, 6, dtype=DOUBLE)
    layer.weight.grad = s.detach()
    layer.weight.grad.data.add_(0.1)
    return layer.weight.grad


WRITES = (
    through_data,
    through_data_that_is_held,
    through_an_array,
    through_an_array_of_the_lazy,
    through_a_tensor_of_an_array,
    as_data,
    as_a_gradient,
)


def put_a_row(s: Any) -> None:
    s[0] = 0.5


def add(s: Any) -> None:
    s.add_(1)


def train(
    lazy: Callable[[Tensor], Any], before: Callable[[Any], None], write: Callable[[Any], Tensor]
) -> list[Tensor]:
    torch.manual_seed(0)
    head, net = nn.BatchNorm1d(4, dtype=DOUBLE), nn.Linear(4, 4, dtype=DOUBLE)
    x = lazy(torch.randn(6, 4, dtype=DOUBLE))
    with torch.no_grad():
        v = net(x)
    s = v * 1
    before(s)
    made = head(s) * 2
    written = write(s)
    numbers = [head.running_mean, head.running_var, made.sum(0).detach() * 1, written, s.sum(0) * 1]
    return [torch.as_tensor(one).detach().clone() for one in numbers]


@pytest.mark.parametrize("chunks", [1, 2, 3, 6])
@pytest.mark.parametrize("before", [put_a_row, add])
@pytest.mark.parametrize("write", WRITES)
def test_equals_eager(
    write: Callable[[Any], Tensor], before: Callable[[Any], None], chunks: int
) -> None:
    """The statistics too, though they are written when somebody asks for them."""
    want = train(lambda x: x, before, write)
    with koila.config(chunks=chunks):
        got = train(koila.lazy, before, write)
        assert chunks == 1 or koila.report().n_chunks > 1
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
