# SPDX-License-Identifier: Apache-2.0
"""Random small programs: whatever is written, in any number of chunks, gives eager's numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import koila
from chunked import Watched
from oracle import Lazy, assert_seen, eager, plain
from sanitizers import fewer

pytestmark = pytest.mark.sanitize

WIDTH = 4
TOO_MANY = 4096

#: How an operator may fail in eager; then the lazy one must fail at the same call.
FAILURES = (RuntimeError, IndexError, ValueError, TypeError)


@dataclasses.dataclass
class State:
    """The values of a program so far, its parameters, and three numbers to choose by."""

    values: list[Tensor]
    weights: dict[str, Tensor]
    numbers: tuple[int, int, int]

    def value(self, which: int = 0) -> Tensor:
        """Choose a value, the newest by 0."""
        return self.values[-1 - self.numbers[which] % len(self.values)]

    def dim(self, x: Tensor, which: int = 2) -> int:
        """Choose a dim of a value."""
        return self.numbers[which] % max(1, x.dim())


def linear(s: State) -> Tensor:
    """A matrix product with a parameter."""
    x = s.value()
    return torch.tanh(x @ s.weights["matrix"][: x.shape[-1]])


def affine(s: State) -> Tensor:
    """A parameter broadcast over the rows, from either side."""
    x = s.value()
    weight = s.weights["vector"][: x.shape[-1]]
    return weight * x + weight if s.numbers[1] % 2 else x * 0.5 - weight.exp()


def reduce_mean(s: State) -> Tensor:
    """A mean or a sum along a dim."""
    x = s.value()
    dim, keepdim = s.dim(x), bool(s.numbers[1] % 2)
    return x.mean(dim, keepdim) if s.numbers[1] % 3 else x.sum(dim=dim, keepdim=keepdim) / 3


def reduce_other(s: State) -> Tensor:
    """A reduction along a dim that is no sum."""
    x = s.value()
    dim = s.dim(x)
    ways: list[Callable[[], Tensor]] = [
        lambda: x.logsumexp(dim),
        lambda: torch.tanh(x).prod(dim, keepdim=True),
        lambda: x.var(dim, correction=0),
        lambda: (x.pow(2).mean(dim) + 0.1).sqrt(),
        lambda: torch.linalg.vector_norm(x + 0.1, dim=dim),
        lambda: x.softmax(dim),
        lambda: x.cumsum(dim) / 3,
    ]
    return ways[s.numbers[1] % len(ways)]()


def pool(s: State) -> Tensor:
    """A number for the whole tensor, beside its entries."""
    x = s.value()
    return x * x.mean() + x.sum() / x.numel() if s.numbers[1] % 2 else x / (1 + x.pow(2).sum())


def reshape(s: State) -> Tensor:
    """A view with other sizes, one of them baked in or inferred."""
    x = s.value()
    ways: list[Callable[[], Tensor]] = [
        lambda: x.reshape(x.shape[0], -1),
        lambda: x.reshape(-1, x.shape[-1]),
        lambda: x.flatten(),
        lambda: x.view(-1, 2),
        lambda: x.reshape(x.shape[0], 2, -1),
        lambda: x.unsqueeze(s.dim(x)),
        lambda: x.squeeze(),
        lambda: x.reshape(2, -1),
    ]
    return ways[s.numbers[1] % len(ways)]()


def permute(s: State) -> Tensor:
    """The dims in another order."""
    x = s.value()
    order = list(range(x.dim()))
    a, b = s.dim(x, 1), s.dim(x, 2)
    order[a], order[b] = order[b], order[a]
    return x.permute(order) if s.numbers[1] % 2 else x.transpose(a, b).contiguous()


def cut(s: State) -> Tensor:
    """A slice, an index, a flip or a roll along a dim."""
    x = s.value()
    dim = s.dim(x)
    ways: list[Callable[[], Tensor]] = [
        lambda: x.narrow(dim, 0, max(1, x.shape[dim] // 2)),
        lambda: x.select(dim, x.shape[dim] - 1),
        lambda: x[:, :2],
        lambda: x[1:] * 2,
        lambda: x.flip(dim),
        lambda: x.roll(1, dims=dim),
        lambda: x.chunk(2, dim=dim)[0],
        lambda: x[torch.arange(x.shape[0]), 0],
        lambda: x.index_select(dim, torch.tensor([0, x.shape[dim] - 1])),
    ]
    return ways[s.numbers[1] % len(ways)]()


def part(s: State) -> Tensor:
    """A part of a dim, by steps, from the end; parts that meet, or are joined again."""
    x = s.value()
    dim, n = s.dim(x), x.shape[s.dim(x)]
    half = max(1, n // 2)
    ways: list[Callable[[], Tensor]] = [
        lambda: x.narrow(dim, n - half, half),
        lambda: x[:half],
        lambda: x[::2],
        lambda: x[-half:] - x[:half],
        lambda: torch.cat([y.tanh() for y in x.split(2, dim)], dim),
        lambda: torch.cat([x[1:], x[:1]]),
        lambda: torch.cat([x, x[:half] * 2]),
        lambda: x[:half] @ x[-half:].transpose(-1, -2),
        lambda: x - x[:1],
    ]
    return ways[s.numbers[1] % len(ways)]()


def grow(s: State) -> Tensor:
    """An expansion or a repetition along a dim."""
    x = s.value()
    ways: list[Callable[[], Tensor]] = [
        lambda: x.unsqueeze(1).expand(x.shape[0], 2, *x.shape[1:]),
        lambda: x.repeat(2, *(1,) * (x.dim() - 1)),
        lambda: x.repeat_interleave(2, dim=s.dim(x)),
        lambda: x[:, None] - x[None, :],
        lambda: F.pad(x, (1, 0)),
    ]
    return ways[s.numbers[1] % len(ways)]()


def elementwise(s: State) -> Tensor:
    """A function of each entry."""
    x = s.value()
    ways: list[Callable[[], Tensor]] = [
        lambda: x.tanh(),
        lambda: torch.sigmoid(x) * 2,
        lambda: F.softplus(x),
        lambda: torch.exp(-x.pow(2)),
        lambda: 1 - x,
        lambda: x.detach() * 0.5 + x,
        lambda: F.gelu(x),
        lambda: torch.where(x > 0.3, x, 0.1 * x),
        lambda: (x + 3).clamp(min=0.1).log(),
    ]
    return ways[s.numbers[1] % len(ways)]()


def combine(s: State) -> Tensor:
    """Two values, broadcast, multiplied or side by side."""
    x, y = s.value(0), s.value(1)
    ways: list[Callable[[], Tensor]] = [
        lambda: x + y,
        lambda: x * y,
        lambda: x - 2 * y,
        lambda: torch.cat([x, y], dim=s.dim(x)),
        lambda: torch.stack([x, y], dim=s.dim(x)),
        lambda: x @ y,
        lambda: x @ y.transpose(-1, -2) / 2,
        lambda: torch.cat([x, y, x], 0).tanh(),
    ]
    return ways[s.numbers[2] % len(ways)]()


def write(s: State) -> Tensor:
    """A write into a fresh value, directly or by a view of it, another view read after it."""
    x = s.value().tanh() * 1.0
    view, other = x[:1] if s.numbers[1] % 2 else x[..., 0], x.reshape(-1)
    ways: list[Callable[[], Any]] = [
        lambda: view.mul_(2.0),
        lambda: x.add_(s.value(1).detach().mean()),
        lambda: x.__setitem__((slice(None), 0), 0.5),
        lambda: x.masked_fill_(x > 0.5, 0.5),
        lambda: view.add_(x.mean()),
        lambda: x.__setitem__(0, x[-1] * 2),
        lambda: x.copy_(x.flip(0)),
        lambda: x[: len(x) // 2].mul_(3.0),
        lambda: x.__setitem__(slice(0, 1), x[-1:] * 2),
        lambda: x[1:].add_(x[:-1].detach().clone()),
    ]
    ways[s.numbers[2] % len(ways)]()
    return x + other.reshape(x.shape) * 0.5


OPERATORS = [
    linear,
    affine,
    reduce_mean,
    reduce_other,
    pool,
    reshape,
    permute,
    cut,
    part,
    grow,
    elementwise,
    combine,
    write,
]

NUMBERS = st.tuples(st.integers(0, 3), st.integers(0, 8), st.integers(0, 9))
CALLS = st.lists(st.tuples(st.sampled_from(OPERATORS), NUMBERS), min_size=1, max_size=9)


def run(calls: list[Any], n_rows: int, seed: int, lazy: Lazy) -> list[Any]:
    """Write a program call by call, run it backward, and return all that can be seen."""
    koila._core.forget()  # an example that failed must not run again in the next
    torch.manual_seed(seed)
    weights = {
        "matrix": torch.randn(8, WIDTH, dtype=torch.float64, requires_grad=True),
        "vector": torch.randn(8, dtype=torch.float64, requires_grad=True),
    }
    x = torch.randn(n_rows, WIDTH, dtype=torch.float64, requires_grad=True)
    rows = lazy(x)
    values, failed = [rows, torch.tanh(rows @ weights["matrix"][:WIDTH])], []
    for i, (operator, numbers) in enumerate(calls):
        try:
            value = operator(State(values, weights, numbers))
        except FAILURES:
            failed.append(i)
            continue
        if value.numel() <= TOO_MANY:
            values.append(value)
    total = torch.zeros((), dtype=torch.float64)
    for value in values[-3:]:
        scale = torch.linspace(0.5, 1.5, value.numel(), dtype=torch.float64).view(value.shape)
        total = total + (value * scale).mean()
    total.backward()
    return [
        failed,
        [list(value.shape) for value in values],
        [
            plain(total),
            *(plain(value) for value in values),
            *(None if leaf.grad is None else plain(leaf.grad) for leaf in (*weights.values(), x)),
        ],
    ]


#: Programs that were wrong once, in their smallest form.
A_VIEW_TAKEN_AGAIN = [(reduce_mean, (0, 0, 0)), (write, (1, 0, 0)), *[(linear, (0, 0, 0))] * 2]
A_WRITE_OF_ANOTHER_STAGE = [(write, (0, 0, 5))]
A_TAIL_WITH_OTHERS = [(pool, (0, 0, 0)), (reduce_mean, (0, 0, 0)), (linear, (2, 0, 0))]
A_TAIL_WITH_OTHERS += [(linear, (0, 0, 0))] * 2
A_COPY_THAT_IS_A_VIEW = [(permute, (0, 1, 0)), *[(linear, (0, 0, 0))] * 2, (write, (2, 0, 3))]

#: The batch gets a gradient from a body whose graphs wait and from the one after it.
A_BATCH_WITH_A_GRADIENT = [(pool, (1, 0, 0))]
A_CHUNK_OF_ONE_ROW = [(permute, (1, 2, 1)), *[(linear, (0, 0, 0))] * 2, (reshape, (2, 3, 0))]


def test_random_programs() -> None:
    """The values, the gradients, and the calls that fail are eager's; and nearly all are cut."""
    was_cut: list[bool] = []

    @example(calls=A_BATCH_WITH_A_GRADIENT, n_rows=2, chunks=2, seed=0)
    @example(calls=A_CHUNK_OF_ONE_ROW, n_rows=3, chunks=3, seed=0)
    @example(calls=A_VIEW_TAKEN_AGAIN, n_rows=1, chunks=2, seed=0)
    @example(calls=A_WRITE_OF_ANOTHER_STAGE, n_rows=1, chunks=2, seed=0)
    @example(calls=A_TAIL_WITH_OTHERS, n_rows=1, chunks=2, seed=0)
    @example(calls=A_COPY_THAT_IS_A_VIEW, n_rows=2, chunks=2, seed=0)
    @settings(max_examples=fewer(300, 60), derandomize=True, deadline=None, database=None)
    @given(calls=CALLS, n_rows=st.integers(1, 9), chunks=st.integers(1, 10), seed=st.integers(0, 9))
    def check(calls: list[Any], n_rows: int, chunks: int, seed: int) -> None:
        try:
            want = run(calls, n_rows, seed, eager)
        except RuntimeError as error:
            assume("modified by an inplace" not in str(error))
            raise
        assume(all(bool(seen.isfinite().all()) for seen in want[2] if seen is not None))
        assume(float(want[2][0].abs()) < 1e6)
        with koila.config(chunks=chunks), Watched(chunks).on() as watched:
            got = run(calls, n_rows, seed, koila.lazy)
        assert_seen(got, want, "seen", exact_bits=chunks == 1, tolerance=1e-8)
        assert not watched.wrong
        was_cut.extend([watched.n_cut > 0] * (chunks > 1))

    check()
    assert sum(was_cut) >= 0.9 * len(was_cut) > fewer(100, 20), f"{sum(was_cut)} of {len(was_cut)}"


@settings(max_examples=fewer(60, 15), derandomize=True, deadline=None, database=None)
@given(calls=CALLS, n_rows=st.integers(1, 9), seed=st.integers(0, 9))
def test_random_programs_left_to_koila(calls: list[Any], n_rows: int, seed: int) -> None:
    """A program that fits is run in one chunk, bit for bit."""
    try:
        want = run(calls, n_rows, seed, eager)
    except RuntimeError as error:
        assume("modified by an inplace" not in str(error))
        raise
    assert_seen(run(calls, n_rows, seed, koila.lazy), want, "seen", exact_bits=True)
