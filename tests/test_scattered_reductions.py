# SPDX-License-Identifier: Apache-2.0
"""scatter_reduce and index_reduce, out of place and in place: the numbers, what the backward takes,
and that the calls around them run in chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import koila
from allocations import Allocations
from limits import there
from oracle import Lazy, eager
from predictions import predicted_and_taken

pytestmark = pytest.mark.filterwarnings("ignore:index_reduce.. is in beta")

N_ROWS, N_GROUPS = 11, 4
#: torch has no sum for index_reduce: index_add is that.
REDUCTIONS = [("scatter_reduce", name) for name in ("sum", "prod", "mean", "amax", "amin")]
REDUCTIONS += [("index_reduce", name) for name in ("prod", "mean", "amax", "amin")]

Pool = Callable[[Tensor, Tensor, Tensor], Tensor]


def pooled(op: str, name: str, begin: Tensor, groups: Tensor, h: Tensor, **options: Any) -> Tensor:
    """Reduce the rows of h by group, beginning with `begin`."""
    index = groups if op.startswith("index") else groups[:, None].expand_as(h)
    return getattr(begin, op)(0, index, h, name, **options)


@pytest.mark.rotated("chunks")
@pytest.mark.parametrize("chunks", [1, 2, 3, 7, N_ROWS])
@pytest.mark.parametrize("includes_begin", [True, False])
@pytest.mark.parametrize("begin", ["torch.ones", "h.new_ones", "a name"])
@pytest.mark.parametrize(("op", "name"), REDUCTIONS)
def test_same_as_eager(op: str, name: str, begin: str, includes_begin: bool, chunks: int) -> None:
    """As pooling in a graph network."""

    def run(lazy: Lazy) -> list[Any]:
        torch.manual_seed(3)
        net, head = nn.Linear(5, 6).double(), nn.Linear(6, 3).double()
        x = lazy(torch.randn(N_ROWS, 5, dtype=torch.float64))
        groups = lazy(torch.randint(0, N_GROUPS - 1, (N_ROWS,)))  # one has no row
        h = net(x).tanh()
        options = {"include_self": includes_begin}
        if begin == "h.new_ones":
            made = pooled(op, name, h.new_ones(N_GROUPS, 6), groups, h, **options)
        elif begin == "torch.ones":
            made = torch.ones(N_GROUPS, 6, dtype=torch.float64)
            made = pooled(f"{op}_", name, made, groups, h, **options)
        else:
            index = groups if op.startswith("index") else groups[:, None].expand_as(h)
            made = torch.ones(N_GROUPS, 6, dtype=torch.float64)
            if op == "index_reduce":
                made.index_reduce_(0, index, h, name, **options)
            else:
                made.scatter_reduce_(0, index, h, name, **options)
            assert lazy is eager or chunks == 1 or type(made) is koila.LazyTensor
        loss = (head(made)[groups] * x.mean(1, keepdim=True)).sin().sum() + h.exp().mean()
        loss.backward()
        return [loss.item(), *(p.grad for p in (*net.parameters(), *head.parameters()))]

    with koila.config(chunks=chunks):
        got = run(koila.lazy)
        is_left = begin == "torch.ones" and chunks > 1  # an argument of pooled() holds it too
        assert is_left or koila.report().n_chunks == chunks
    torch.testing.assert_close(got, run(eager), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize(("op", "name"), REDUCTIONS)
def test_what_the_backward_takes(op: str, name: str, is_wide: bool, dtype: torch.dtype) -> None:
    n_rows, n_groups = (500, 20_000) if is_wide else (20_000, 30)
    groups = torch.arange(n_rows) % n_groups

    def call(h: Tensor) -> Tensor:
        return pooled(op, name, h.new_ones(n_groups, 16), groups, h)

    predicted, taken = predicted_and_taken(call, n_rows, 16, dtype)
    assert 0.93 <= predicted / taken <= 1.05


@pytest.mark.parametrize(("op", "name"), REDUCTIONS)
@pytest.mark.parametrize("text", ["", "most", "sum "])
def test_an_unknown_reduction_is_an_error_at_the_call(op: str, name: str, text: str) -> None:
    def error_of(lazy: Lazy) -> str:
        h = lazy(torch.randn(N_ROWS, 3)) * 2
        with pytest.raises(RuntimeError) as caught:
            pooled(op, text, h.new_ones(2, 3), torch.arange(N_ROWS) % 2, h)
        return str(caught.value)

    with koila.config(chunks=2):
        assert error_of(koila.lazy).startswith(error_of(eager))


@pytest.mark.parametrize("is_in_place", [False, True])
def test_what_is_around_runs_in_chunks(is_in_place: bool) -> None:
    def run(lazy: Lazy) -> tuple[Allocations, list[Tensor | None]]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(16, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU())
        net, memory = net.append(nn.Linear(128, 4)), Allocations()
        x, groups = torch.randn(4000, 16), torch.arange(4000) % 50
        memory.count(list(net.parameters()), x, groups)
        with memory:
            x, groups = lazy(x, groups)
        with memory:
            h = net(x)
            op = "scatter_reduce_" if is_in_place else "scatter_reduce"
            pooled(op, "amax", h.new_zeros(50, 4), groups, h).square().sum().backward()
        return memory, [p.grad for p in net.parameters()]

    want, wanted = run(eager)
    taken = want.peak - want.left
    with koila.config(memory_limit=int(there() + want.left + 0.3 * taken)):
        got, gradients = run(koila.lazy)
    assert koila.report().n_chunks > 1
    assert got.peak - want.left <= 1.05 * 0.3 * taken
    torch.testing.assert_close(gradients, wanted, rtol=1e-4, atol=1e-5)
