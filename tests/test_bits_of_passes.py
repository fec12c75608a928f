# SPDX-License-Identifier: Apache-2.0
"""A value that runs in two programs, once for a read and once for a backward, has the same bits.

Some of torch's kernels depend on whether a weight requires a gradient: `matmul` of three dims by
two multiplies one matrix, or one for each batch entry. Where a program compares a value with a copy
of its own, a last bit decides: `cdist` has no gradient at distance 0, and a unit vector beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import koila

WIDTH, N_STEPS = 6, 9
Made = tuple[nn.Module, Callable[[Tensor], Tensor]]


def _gru() -> Made:
    net = nn.GRU(WIDTH, 4, batch_first=True, dtype=torch.float64)
    return net, lambda x: net(x)[0][:, -1]


def _matmul() -> Made:
    weight = nn.Parameter(torch.randn(WIDTH, 5, dtype=torch.float64))
    net = nn.ParameterList([weight])
    return net, lambda x: (x.transpose(0, 1) @ weight)[-1].tanh()


def _step(make: Callable[[], Made], n_rows: int, wrap: object) -> list[Tensor]:
    torch.manual_seed(n_rows)
    module, net = make()
    x = torch.randn(n_rows, N_STEPS, WIDTH, dtype=torch.float64)
    batch = wrap(x) if callable(wrap) else x
    hidden = net(batch)
    copy = (hidden * 1).detach()
    read = torch.tensor(net(batch).tolist(), dtype=torch.float64)
    # `copy` has run with the read; `hidden` runs again.
    loss = torch.cdist(hidden, copy).mean()
    loss.backward()
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    assert gradients
    return [read, torch.tensor(loss.item()), *gradients]


@pytest.mark.parametrize("n_chunks", [1, 2, 3, 7, 25])
@pytest.mark.parametrize("n_rows", [5, 7, 11, 25])
@pytest.mark.parametrize("make", [_gru, _matmul])
def test_distance_to_a_copy_that_was_read(
    make: Callable[[], Made], n_rows: int, n_chunks: int
) -> None:
    eager = _step(make, n_rows, None)
    with koila.config(chunks=n_chunks):
        found = _step(make, n_rows, lambda x: koila.lazy(x, batch=0))
    for wanted, got in zip(eager, found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("make", [_gru, _matmul])
def test_a_read_has_the_bits_that_torch_gives_on_the_rows_of_a_chunk(
    make: Callable[[], Made],
) -> None:
    torch.manual_seed(0)
    _, net = make()
    x = torch.randn(7, N_STEPS, WIDTH, dtype=torch.float64)
    wanted = torch.cat([net(part) for part in x.split(4)]).tolist()
    with koila.config(chunks=2):
        assert net(koila.lazy(x, batch=0)).tolist() == wanted


@pytest.mark.parametrize("chunks", [None, 1, 2, 3, 6])
@pytest.mark.parametrize("reads", [False, True])
def test_a_read_draws_as_backward_does(chunks: int | None, reads: bool) -> None:
    """Without a gradient max_pool1d has a kernel with another layout, and dropout draws in the
    order of memory: a text net's loss, read before its backward, is that of the backward."""

    def run(lazy: Any) -> list[Any]:
        torch.manual_seed(0)
        net = nn.Linear(6, 6).double()
        x = lazy(torch.randn(6, 8, 6, dtype=torch.float64))
        h = F.max_pool1d(net(x).transpose(1, 2).relu(), 2)
        loss = F.dropout(h, 0.5).pow(2).sum()
        seen = [loss.item()] if reads else []
        loss.backward()
        return [*seen, loss.detach().item(), net.bias.grad]

    wanted = run(lambda x: x)
    with koila.config(**({} if chunks is None else {"chunks": chunks})):
        found = run(koila.lazy)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
