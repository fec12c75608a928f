# SPDX-License-Identifier: Apache-2.0
"""Calls over the batch in which all rows meet, and after which each goes on by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import koila
from allocations import Allocations
from chunked import split
from oracle import eager
from test_pairs import N_ROWS, Loss, assert_by_rows, assert_near, barriers, step

assert barriers  # a fixture


def softmax(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return (torch.softmax(a, 0) * b).square().sum()


def log_softmax(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return (F.log_softmax(a, dim=0) * b).tanh().mean()


def of_pairs(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """Both ways of one matrix."""
    scores = a @ b.T
    return -(scores.log_softmax(0) * scores.softmax(1)).sum() / len(a)


def turned_over(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """The rows are the last dim."""
    return -(a @ b.T).T.log_softmax(-1).exp().mul(y).sum(1).log().mean()


def pooled(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """Attention pools the batch."""
    return (a[:, :1].softmax(0) * b).sum(0).square().sum()


def twice(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """One meeting after another."""
    return a.softmax(0).mul(3).softmax(0).square().mean() + b.log_softmax(0).mean()


def in_blocks(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """The batch is one digit of the dim."""
    return (torch.stack([a, b], 1).flatten(0, 1).softmax(0) ** 2).sum()


def spread(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return ((a - a.mean(0)) / (a.std(0) + 0.1)).tanh().mean() + b.var(0).log().sum()


def normalized(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return (F.normalize(a, dim=0) @ F.normalize(b, dim=0).T).exp().mean()


def partition(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    scores = a @ b.T
    return (scores - scores.logsumexp(0)).square().mean()


def deviations(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    spread, mean = torch.std_mean(a, 0, correction=0)
    return ((a - mean) / spread).tanh().mean() + torch.var_mean(b, 0)[0].log().sum()


def norms(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return (a / a.norm(dim=0)).pow(3).sum() + (b / b.norm(3, 0, keepdim=True)).pow(2).mean()


def running_sum(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """Of a survival model."""
    return (a - torch.log(torch.cumsum(torch.exp(a), dim=0))).mean() + b.cumsum(0).tanh().sum()


def running_product(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """With zeros in it."""
    return (a + 0.5).cumprod(0).tanh().sum() + b.relu().cumprod(0).square().sum()


def running_logarithm(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return a.logcumsumexp(0).square().mean() + (9 * b).logcumsumexp(0).sin().mean()


def running_turned(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """The rows are the last dim, or the outer digit of one."""
    return a.T.cumsum(-1).tanh().mean() + b.reshape(-1).cumsum(0).sin().mean()


def running_twice(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """One after the other, and of whole numbers."""
    ranks = (b > 0).cumsum(0)
    return a.cumsum(0).cumsum(0).tanh().mean() + (ranks * b).sum() + (1 + y).cumsum(0).sum() / 9


def running_mean(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """In a tail that is linear, with a sum beside it."""
    return (a.cumsum(0) + a.sum(0)).mean() + b.cumsum(0).sum()


MEETING: list[Loss] = [
    deviations,
    norms,
    running_sum,
    running_product,
    running_logarithm,
    running_turned,
    running_twice,
    running_mean,
    softmax,
    log_softmax,
    of_pairs,
    turned_over,
    pooled,
    twice,
    in_blocks,
    spread,
    normalized,
    partition,
]


@pytest.mark.rotated("chunks")
@pytest.mark.parametrize("chunks", [1, 2, 3, 7, N_ROWS])
@pytest.mark.parametrize("loss", MEETING, ids=lambda loss: loss.__name__)
def test_by_rows(loss: Loss, chunks: int, barriers: list[str]) -> None:
    assert_by_rows(loss, chunks, barriers)


@pytest.mark.parametrize("loss", MEETING, ids=lambda loss: loss.__name__)
def test_of_several_batches(loss: Loss) -> None:
    with split(3):
        got = step(loss, koila.lazy, is_one=False)
    assert_near(got, step(loss, eager))


Over = Callable[..., Tensor]


@pytest.mark.parametrize("over", [torch.softmax, torch.log_softmax, Tensor.softmax])
@pytest.mark.parametrize("filled", [float("-inf"), float("inf"), float("nan"), 1e12])
@pytest.mark.parametrize("n_filled", [1, 2, N_ROWS])
def test_no_numbers(over: Over, filled: float, n_filled: int, barriers: list[str]) -> None:
    """A column of which some entries, or all, are no numbers, forward and back."""

    def found(lazy: Any) -> list[Tensor]:
        torch.manual_seed(0)
        x = torch.randn(N_ROWS, 3, dtype=torch.float64)
        x[:n_filled, 1] = filled
        weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
        shares = over(lazy(x) * weight, dim=0)
        loss = (shares * torch.arange(3)).sum()
        loss.backward()
        assert weight.grad is not None
        return [torch.tensor(shares.tolist()), torch.tensor(loss.item()), weight.grad]

    want = found(eager)
    noise = 1e-14 * filled if abs(filled) < float("inf") else 1e-12  # a gradient adds up to nothing
    for chunks in (3, N_ROWS):
        with split(chunks):
            got = found(koila.lazy)
        for left, right, atol in zip(got, want, (1e-12, 1e-12, noise), strict=True):
            torch.testing.assert_close(left, right, rtol=1e-10, atol=atol, equal_nan=True)
    assert not barriers


@pytest.mark.parametrize(
    "over", [torch.softmax, torch.log_softmax, torch.cumsum, torch.logcumsumexp]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_cast", [False, True])
def test_of_other_types(over: Over, dtype: torch.dtype, is_cast: bool, barriers: list[str]) -> None:
    """In one chunk torch's own bits, in several nearly; under autocast too."""

    def found(lazy: Any) -> Tensor:
        torch.manual_seed(0)
        x = torch.randn(N_ROWS, 8, dtype=dtype)
        weight = torch.randn(8, 8, dtype=dtype, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
            made = over(lazy(x) @ weight, 0)
            assert made.dtype == (torch.bfloat16 if is_cast else dtype)
        (made.float() ** 2).mean().backward()
        assert weight.grad is not None
        return weight.grad

    want = found(eager)
    with koila.config(chunks=1):
        assert torch.equal(found(koila.lazy), want)
    is_half = dtype != torch.float32 or is_cast
    with split(3):
        got = found(koila.lazy)
    assert not barriers
    largest = float(want.abs().max())
    torch.testing.assert_close(got, want, rtol=0, atol=largest * (0.1 if is_half else 1e-5))


@pytest.mark.parametrize("over", [torch.softmax, torch.log_softmax, torch.cumsum, torch.cumprod])
def test_in_a_type_that_is_named(over: Over, barriers: list[str]) -> None:
    """What goes in is cast, as torch does."""

    def found(lazy: Any) -> Tensor:
        torch.manual_seed(0)
        weight = torch.randn(3, 4, requires_grad=True)
        made = over(lazy(torch.randn(N_ROWS, 3)) @ weight, 0, dtype=torch.float64)
        made.tanh().mean().backward()
        assert weight.grad is not None and made.dtype == torch.float64
        return weight.grad

    for chunks in (1, 3):
        with split(chunks):
            torch.testing.assert_close(found(koila.lazy), found(eager))
    assert not barriers


@pytest.mark.parametrize("filled", [float("-inf"), float("inf"), float("nan"), 1e12])
@pytest.mark.parametrize("rows", [slice(1), slice(4, 5), slice(9, None), slice(None)])
def test_running_over_no_numbers(filled: float, rows: slice, barriers: list[str]) -> None:
    """Of a column some entries, or all, are no numbers."""

    def found(lazy: Any) -> list[Tensor]:
        torch.manual_seed(0)
        x = torch.randn(N_ROWS, 3, dtype=torch.float64)
        x[rows, 1] = filled
        x = lazy(x)
        made = [x.logcumsumexp(0), x.cumsum(0), x.cumprod(0)]
        return [torch.tensor(one.tolist(), dtype=torch.float64) for one in made]

    want = found(eager)
    for chunks in (3, N_ROWS):
        with split(chunks):
            got = found(koila.lazy)
        torch.testing.assert_close(got, want, equal_nan=True)
    assert not barriers


ALONG: dict[str, Callable[[Tensor], Tensor]] = {
    "std": lambda h: h.std(0).log().mean(),
    "var_mean": lambda h: (h - torch.var_mean(h, 0)[1]).tanh().mean(),
    "normalize": lambda h: F.normalize(h, dim=0).sin().mean(),
    "standardised": lambda h: ((h - h.mean(0)) / h.std(0)).tanh().mean(),
    "logsumexp": lambda h: (h - h.logsumexp(0)).tanh().mean(),
    "softmax": lambda h: h.softmax(0).sin().mean(),
    "cumsum": lambda h: h.cumsum(0).tanh().mean(),
    "cumprod": lambda h: h.cos().cumprod(0).tanh().mean(),
    "logcumsumexp": lambda h: h.logcumsumexp(0).tanh().mean(),
}


@pytest.mark.parametrize("name", ALONG)
def test_memory(name: str) -> None:
    """What crosses is kept for all rows, and its gradient; all else is a chunk's."""
    torch.manual_seed(0)
    x = torch.randn(1600, 8, dtype=torch.float64)
    weight = torch.randn(8, 128, dtype=torch.float64, requires_grad=True)

    def peak_of(lazy: Any) -> int:
        weight.grad = None
        memory = Allocations()
        with memory:
            pass
        with memory:
            ALONG[name]((lazy(x) @ weight).sin()).backward()
        return memory.peak

    crossing = 1600 * 128 * 8
    peak_of(eager)
    plain = peak_of(eager)
    with split(16):
        peak_of(koila.lazy)
        peak = peak_of(koila.lazy)
    assert peak < min(2.7 * crossing, 0.6 * plain), (peak / crossing, plain / crossing)


@pytest.mark.parametrize("chunks", [1, 3])
def test_without_gradients(chunks: int, barriers: list[str]) -> None:
    """Read in one chunk it is torch's own call, bit for bit."""
    torch.manual_seed(0)
    x = torch.randn(N_ROWS, 4, dtype=torch.float64)
    with torch.no_grad(), split(chunks if chunks > 1 else None):
        got = torch.tensor((koila.lazy(x) * 2).softmax(0).tolist())
    want = (x * 2).softmax(0)
    assert torch.equal(got, want.float()) if chunks == 1 else not barriers
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("over", [torch.softmax, torch.log_softmax])
def test_all_by_name(over: Over) -> None:
    """Its input is a word too."""
    x = torch.randn(N_ROWS, 4, dtype=torch.float64)
    for chunks in (1, 3):
        with split(chunks):
            got = over(input=koila.lazy(x), dim=0).tolist()
        torch.testing.assert_close(torch.tensor(got), over(x, 0).float(), rtol=1e-6, atol=1e-7)


def test_a_batch_of_one_row() -> None:
    """There is one chunk however many are asked for, and a number is read before backward."""

    def found(lazy: Any) -> list[Tensor]:
        numbers: list[float] = []

        def loss(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
            shares = a.softmax(0)
            numbers.append(shares.sum().item())
            return (shares * b).sum() + (a @ b.T).log_softmax(0).sum()

        return [*step(loss, lazy, 1), torch.tensor(numbers)]

    want = found(eager)
    with koila.config(chunks=2):
        assert_near(found(koila.lazy), want)


@pytest.mark.parametrize("over", [torch.softmax, torch.log_softmax, F.softmin])
def test_of_integers(over: Over) -> None:
    """torch's own call refuses them, in its words."""
    x = torch.arange(12).reshape(4, 3)
    with pytest.raises(NotImplementedError) as plain:
        over(x, 0)
    with koila.config(chunks=2), pytest.raises(NotImplementedError, match=str(plain.value)):
        over(koila.lazy(x, batch=0), 0)
