"""Gradients that cross from stage to stage are added up in memory that nothing else reads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import koila
from chunked import split

N_ROWS = 6


def two_readers(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """A joint's result is read by rows in two later bodies, one after another."""
    risk = torch.sort((x * a).sum(1)).values
    return (risk - torch.log(torch.cumsum(torch.exp(risk), dim=0))).mean() + b.sum()


def two_views(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Views of two parameters get one and the same gradient, and both are read again."""
    both = a.view(3, 1) + b.view(3, 1)
    norm = torch.sqrt((x @ both).mean())
    return norm * (x @ a).sum() * (x @ b).mean() + (x * both.view(3)).sum()


def view_in_a_body(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Each chunk's seed reaches the parameters through nothing but views."""
    whole = (x.expand(N_ROWS, 3) * 0 + 1) * a.view(1, 3)
    return torch.sqrt((whole.view(N_ROWS, 3) + b.view(1, 3)).pow(2).mean()) + whole.sum()


@pytest.mark.parametrize("chunks", [2, 3, 5, N_ROWS])
@pytest.mark.parametrize("program", [two_readers, two_views, view_in_a_body])
def test_gradients_are_not_shared(program: object, chunks: int) -> None:
    x = torch.rand(N_ROWS, 3, dtype=torch.float64) + 0.5
    a, b = (torch.rand(3, dtype=torch.float64).requires_grad_() for _ in range(2))
    assert callable(program)
    wanted = torch.autograd.grad(program(x, a, b), [a, b])
    with split(chunks):
        program(koila.lazy(x), a, b).backward()
    for parameter, gradient in zip([a, b], wanted, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-13)
