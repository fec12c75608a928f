# SPDX-License-Identifier: Apache-2.0
"""Gradients that cross from stage to stage are added up, in memory that nothing else reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import koila
from chunked import split
from koila.basics import holders
from koila.running.boundary import BoundaryValue
from oracle import Lazy, assert_seen, eager

N_ROWS = 6


def two_readers(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """A barrier's result is read by rows in two later bodies, one after another."""
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


def by_rows_of_two_dims(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """One body reads a barrier's result by the rows of its first dim and of its second."""
    h = x * a
    inverse = torch.linalg.inv(torch.eye(N_ROWS, dtype=x.dtype) + h @ h.T)
    wide = (x * b).repeat(1, 2).exp()
    return (inverse * wide).sum(1).sin().sum() + (inverse * wide.T).sum(0).cos().sum()


@pytest.mark.parametrize("chunks", [2, 3, 5, N_ROWS])
@pytest.mark.parametrize(
    "program",
    [two_readers, two_views, view_in_a_body, by_rows_of_two_dims],
)
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


@pytest.mark.parametrize("chunks", [2, 3, 5, N_ROWS])
def test_a_gradient_that_is_given_beside_those_of_chunks(chunks: int) -> None:
    """A body's output gets a gradient from the user, and one from the rows that a later body
    reads."""

    def run(lazy: Lazy) -> list[Tensor | None]:
        torch.manual_seed(1)
        wide = torch.randn(64, 3, dtype=torch.float64, requires_grad=True)
        point = (lazy(torch.rand(N_ROWS, 3, dtype=torch.float64)) @ wide.T).tanh() @ wide
        ranks = torch.sort(point.sum(1)).values
        given = torch.rand(N_ROWS, 3, dtype=torch.float64)
        torch.autograd.backward([point, (point.sin() * ranks[:, None]).sum()], [given, None])
        return [wide.grad]

    with split(chunks):
        got = run(koila.lazy)
    torch.testing.assert_close(got, run(eager), rtol=1e-10, atol=1e-13)


# Layouts ------------------------------------------------------------------------------------------

SIZES = [(6, 4, 5, 3), (6, 1, 5, 4), (6, 4, 1, 3), (6, 1, 1, 3), (6, 5, 4, 1)]


class Norm(nn.BatchNorm2d):
    """A batch norm, by torch's kernel or by formula."""

    is_by_formula = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_by_formula:
            return super().forward(x)
        over = (0, 2, 3)
        centred = x - x.mean(over, keepdim=True)
        result = centred / (x.var(over, correction=0, keepdim=True) + self.eps).sqrt()
        return result * self.weight[:, None, None] + self.bias[:, None, None]


LAYOUTS: dict[str, Callable[[Tensor, Tensor, nn.Module], Tensor]] = {
    "read by rows": lambda x, w, bn: (bn(x.transpose(1, 3)).transpose(1, 3) * w).pow(2),
    "read whole": lambda x, w, bn: bn(x.transpose(1, 3)).transpose(1, 3).flip(0) * w,
    "read by another": lambda x, w, bn: (
        F.normalize(bn(x.transpose(1, 3)), dim=0).transpose(1, 3).sin() * w
    ),
    "read by itself": lambda x, w, bn: bn(bn(x.transpose(1, 3)).exp()) * 2,
    "in a linear tail": lambda x, w, bn: bn((x * w).transpose(1, 3)),
    "of permuted rows": lambda x, w, bn: bn((x * w).transpose(1, 3).transpose(0, 2)).exp(),
    "of rows in a dim of more": lambda x, w, bn: (
        bn((x * w).flatten(0, 1)[:, None].transpose(1, 3)).transpose(1, 3).pow(2)
    ),
    "read twice": lambda x, w, bn: (y := bn(x.transpose(1, 3)).transpose(1, 3)).tanh() * w + y,
}


@pytest.mark.rotated("chunks")
@pytest.mark.parametrize("chunks", [2, 3, 6])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_lie_as_their_values_do(
    name: str, sizes: tuple[int, ...], chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's backward of batch_norm is wrong where input and gradient are laid out otherwise and a
    dim is one; for some of these programs eager's own is."""

    def step(lazy: Any) -> list[Tensor]:
        torch.manual_seed(0)
        x = torch.randn(sizes, dtype=torch.float64, requires_grad=True)
        w = torch.randn(sizes[-1], dtype=torch.float64, requires_grad=True)
        bn = Norm(sizes[-1], dtype=torch.float64)
        nn.init.normal_(bn.weight)
        LAYOUTS[name](lazy(x), w, bn).mean().backward()
        zero = torch.zeros_like(w)
        return [t if t is not None else zero for t in (x.grad, w.grad, bn.weight.grad)]

    with split(chunks):
        seen = step(koila.lazy)
    monkeypatch.setattr(Norm, "is_by_formula", True)
    for gradient, right in zip(seen, step(lambda x: x), strict=True):
        torch.testing.assert_close(gradient, right, rtol=1e-9, atol=1e-12)


def test_a_torch_that_counts_otherwise_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who holds the memory of a gradient is a private number of torch's."""
    assert holders.counts_holders()
    count = torch._C._storage_Use_Count
    for wrong in (lambda at: count(at) - 1, lambda at: count(at) + 1, lambda at: 2, lambda at: 3):
        monkeypatch.setattr(torch._C, "_storage_Use_Count", wrong)
        assert not holders.counts_holders.__wrapped__()


def test_gradients_where_nobody_counts_who_holds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then each first gradient is copied, and chunks add to what is theirs."""
    monkeypatch.setattr(torch._C, "_storage_Use_Count", lambda at: 1)
    monkeypatch.setattr(holders, "counts_holders", lambda: False)
    assert holders.is_shared(torch.ones(2))

    def story(lazy: Any) -> list[Tensor | None]:
        torch.manual_seed(1)
        x = lazy(torch.randn(7, 4, dtype=torch.float64))
        w = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
        b = torch.randn(3, dtype=torch.float64, requires_grad=True)
        h = x @ w + b
        (h.sum(0).exp() + (h + b).expand(7, 3).sum(0) + b).sum().backward()
        return [w.grad, b.grad]

    want = story(eager)
    for chunks in (2, 7):
        with split(chunks):
            assert_seen(story(koila.lazy), want, "copied", exact_bits=False)


@pytest.mark.parametrize("view", [torch.conj, lambda z: z.conj().imag, lambda z: z])
def test_a_view_that_conjugates_is_rematerialized_as_it_was(
    view: Callable[[Tensor], Tensor],
) -> None:
    """Its memory holds the numbers before they are conjugated, or negated."""
    numbers = torch.randn(4, 3, dtype=torch.complex128)
    boundary = BoundaryValue(Mock(), True, {})
    boundary.chunks[0] = kept = view(numbers.clone())
    wanted = kept * 1
    boundary.free_storage(0)
    boundary.rematerialize(0, view(numbers.clone()))
    assert torch.equal(kept * 1, wanted)
