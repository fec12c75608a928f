# SPDX-License-Identifier: Apache-2.0
"""Deviations of rows that are all equal: exactly 0 as in torch, and so are their gradients.

A deviation that is only rounding would be divided by itself: a gradient as large as any.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import koila
from chunked import split
from oracle import assert_close

pytestmark = pytest.mark.sanitize

CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "std": lambda x: x.std(0),
    "std of the population, kept": lambda x: x.std(-2, correction=0, keepdim=True),
    "std_mean": lambda x: torch.cat(torch.std_mean(x, 0)),
    "var_mean": lambda x: torch.cat(torch.var_mean(x, 0)),
    "over two dims": lambda x: x.view(-1, 2, 2).std((0, 2)),
    "standardized": lambda x: (x - x.mean(0)) / (x.std(0) + 0.1),
}


@pytest.mark.parametrize("chunks", [1, 2, 3, 7])
@pytest.mark.parametrize("name", CALLS)
def test_gradient_of_equal_rows(name: str, chunks: int) -> None:
    torch.manual_seed(0)
    batch = torch.randn(7, 4, dtype=torch.float64)
    batch[:, 0] = batch[:, 1] = 0.1  # three times 0.1 is no multiple of it in float64
    batch[:, 2] = 0.7
    plain = batch.clone().requires_grad_()
    made = CALLS[name](plain * 1)
    weight = torch.randn_like(made)
    (made * weight).sum().backward()
    given = batch.clone().requires_grad_()
    with split(chunks):
        found = CALLS[name](koila.lazy(given) * 1)
        (found * weight).sum().backward()
    assert given.grad is not None and plain.grad is not None
    assert_close(given.grad, plain.grad, "gradient")
    assert_close(found.detach() * 1.0, made.detach(), "value")
