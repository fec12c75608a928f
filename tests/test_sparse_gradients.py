# SPDX-License-Identifier: Apache-2.0
"""Sparse gradients of tables: eager's numbers in chunks, and no more memory than a limit allows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import koila
from allocations import Allocations
from limits import there
from oracle import eager

N_ROWS, LENGTH = 23, 5
CHUNKS = [1, 2, 3, 7, N_ROWS]


def step(lazy: Any, n_entries: int, n_steps: int = 1, **options: Any) -> tuple[Tensor, Tensor]:
    """Return the table after some steps, and its gradient."""
    torch.manual_seed(0)
    table = nn.Embedding(n_entries, 6, sparse=True, dtype=torch.float64, **options)
    optimizer = torch.optim.SparseAdam(table.parameters(), 0.1)
    for _ in range(n_steps):
        ids = lazy(torch.randint(0, n_entries, (N_ROWS, LENGTH)))
        optimizer.zero_grad()
        (table(ids).sin().mean(1).pow(2).mean() + table(ids[:, 0]).sum()).backward()
        optimizer.step()
    assert table.weight.grad is not None and table.weight.grad.is_sparse
    return table.weight.detach(), table.weight.grad


@pytest.mark.rotated("chunks")
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("n_entries", [3, 20, 1000])
@pytest.mark.parametrize("options", [{}, {"padding_idx": 1}, {"max_norm": 1.0}], ids=str)
def test_same_as_eager(n_entries: int, chunks: int, options: dict[str, Any]) -> None:
    """After several steps of an optimizer that updates only rows with an entry, too."""
    for n_steps in (1, 3):
        want = step(eager, n_entries, n_steps, **options)
        with koila.config(chunks=chunks):
            got = step(koila.lazy, n_entries, n_steps, **options)
        for one, wanted in zip(got, want, strict=True):
            torch.testing.assert_close(one.to_dense(), wanted.to_dense(), rtol=1e-10, atol=1e-13)
        torch.testing.assert_close(
            got[1].coalesce().indices(), want[1].coalesce().indices(), rtol=0, atol=0
        )


@pytest.mark.parametrize("chunks", [2, 7])
def test_entries(chunks: int) -> None:
    """Few entries are left as they are; of many, those of one row are added up."""
    with koila.config(chunks=chunks):
        few, many = (step(koila.lazy, n)[1] for n in (1000, 3))
    assert few._nnz() == step(eager, 1000)[1]._nnz()
    assert many._nnz() == 3


def test_is_added_to_a_gradient_that_is_there() -> None:
    table = nn.Embedding(4, 6, sparse=True, dtype=torch.float64)
    ids = torch.randint(0, 4, (N_ROWS, LENGTH))
    for _ in range(2):
        table(ids).sin().sum().backward()
    want, table.weight.grad = table.weight.grad, None
    with koila.config(chunks=3):
        for _ in range(2):
            table(koila.lazy(ids)).sin().sum().backward()
    assert want is not None and table.weight.grad is not None
    torch.testing.assert_close(
        table.weight.grad.to_dense(), want.to_dense(), rtol=1e-10, atol=1e-13
    )


@pytest.mark.parametrize("share", [0.5, 0.3])
def test_a_limit_is_kept(share: float) -> None:
    """Where the entries of a batch repeat often: what chunks leave does not grow with them."""
    table, ids = nn.Embedding(20, 6, sparse=True), torch.randint(0, 20, (60_000, 5))

    def peak(lazy: Any) -> int:
        table.weight.grad = None
        memory = Allocations()
        with memory:
            pass
        with memory:
            table(lazy(ids)).mean(1).pow(2).mean().backward()
        return memory.peak

    peak(koila.lazy)
    limit = int(share * peak(eager))
    table.weight.grad = None
    with koila.config(memory_limit=there() + limit):
        assert peak(koila.lazy) <= 1.05 * limit
        assert koila.report().n_chunks > 1


BAGS: dict[str, dict[str, Any]] = {
    "mean": {"mode": "mean"},
    "sum": {"mode": "sum"},
    "sum without an entry": {"mode": "sum", "padding_idx": 1},
    "mean without an entry": {"mode": "mean", "padding_idx": 1},
}


def bags(lazy: Any, n_entries: int, has_weights: bool, options: dict[str, Any]) -> list[Tensor]:
    """Return the table after two steps, its last gradient, and the gradient of the weights."""
    torch.manual_seed(0)
    table = nn.EmbeddingBag(n_entries, 6, sparse=True, dtype=torch.float64, **options)
    optimizer = torch.optim.SparseAdam(table.parameters(), 0.1)
    scale = torch.ones(LENGTH, dtype=torch.float64, requires_grad=True)
    for _ in range(2):
        ids, of_each = torch.randint(0, n_entries, (N_ROWS, LENGTH)), torch.rand(N_ROWS, LENGTH)
        ids, of_each = lazy(ids, of_each.double())
        optimizer.zero_grad()
        each = {"per_sample_weights": of_each * scale} if has_weights else {}
        table(ids, **each).sin().pow(2).mean().backward()
        optimizer.step()
    assert table.weight.grad is not None and table.weight.grad.is_sparse
    found = [table.weight.detach(), table.weight.grad.to_dense()]
    return found if scale.grad is None else [*found, scale.grad]


@pytest.mark.rotated("chunks")
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("n_entries", [3, 1000])
@pytest.mark.parametrize("has_weights", [False, True])
@pytest.mark.parametrize("options", BAGS)
def test_bags(options: str, has_weights: bool, n_entries: int, chunks: int) -> None:
    if has_weights and "sum" not in options:
        pytest.skip("torch weighs the entries of sums alone")
    want = bags(eager, n_entries, has_weights, BAGS[options])
    with koila.config(chunks=chunks):
        got = bags(koila.lazy, n_entries, has_weights, BAGS[options])
        assert koila.report().n_chunks == chunks
    for one, wanted in zip(got, want, strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("share", [0.7, 0.5, 0.3])
@pytest.mark.parametrize("options", BAGS)
def test_bags_under_a_limit(options: str, share: float) -> None:
    """A bag's gradient has a row for each index: many times the result."""
    table = nn.EmbeddingBag(300, 64, sparse=True, **BAGS[options])
    head, ids = nn.Linear(64, 10), torch.randint(0, 300, (3000, 40))

    def peak(lazy: Any) -> int:
        table.weight.grad = head.weight.grad = None
        memory = Allocations()
        with memory:
            pass
        with memory:
            head(table(lazy(ids))).pow(2).mean().backward()
        return memory.peak

    peak(koila.lazy)
    limit = int(share * peak(eager))
    table.weight.grad = head.weight.grad = None
    with koila.config(memory_limit=there() + limit):
        assert peak(koila.lazy) <= limit
        assert koila.report().n_chunks > 1
