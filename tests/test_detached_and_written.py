# SPDX-License-Identifier: Apache-2.0
"""A detached tensor whose part is written with a graph: it gets that graph, as in eager.

What it was detached from does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import koila
from oracle import Lazy, eager, plain

N_ROWS = 11

SOURCES: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "batch": lambda layer, z: z,
    "copy": lambda layer, z: z.clone(),
    "made": lambda layer, z: z * 2,
    "layer": lambda layer, z: layer(z),
}
ALIASES: dict[str, Callable[[Tensor], Tensor]] = {
    "detach": lambda z: z.detach(),
    "data": lambda z: z.data,
    "view of detached": lambda z: z.detach()[:, :],
    "detached twice": lambda z: z.detach().detach(),
}


def add_to_rows(s: Tensor, w: Tensor) -> None:
    s[1:6].add_(w)


def set_rows(s: Tensor, w: Tensor) -> None:
    s[1:6] = w


def copy_to_a_row(s: Tensor, w: Tensor) -> None:
    v = s[3]
    v.copy_(w[0])


def add_to_columns(s: Tensor, w: Tensor) -> None:
    s[:, 1:4].add_(w[0, :3])


def multiply_entries(s: Tensor, w: Tensor) -> None:
    s.view(-1)[:25].mul_(w.view(-1))


def add_to_all(s: Tensor, w: Tensor) -> None:
    s.add_(w[0])


def add_to_rows_of_columns(s: Tensor, w: Tensor) -> None:
    s[:, :3][2:7].add_(w[:, :3])


WRITES = [
    add_to_rows,
    set_rows,
    copy_to_a_row,
    add_to_columns,
    multiply_entries,
    add_to_all,
    add_to_rows_of_columns,
]


def outcome(
    lazy: Lazy, source: str, alias: str, write: Callable[[Tensor, Tensor], None], is_read: bool
) -> list[Any]:
    torch.manual_seed(0)
    w = torch.randn(5, 5, dtype=torch.float64, requires_grad=True)
    layer = nn.Linear(5, 5).double()
    z = SOURCES[source](layer, lazy(torch.randn(N_ROWS, 5, dtype=torch.float64)))
    if is_read:
        float(z.detach().sum())
    s = ALIASES[alias](z)
    write(s, w)
    graphs = [s.requires_grad, z.requires_grad]
    (s.pow(2).sum() + w.sum() + z.sum()).backward()
    return [graphs, w.grad, plain(s), plain(z), [p.grad for p in layer.parameters()]]


@pytest.mark.rotated("chunks")
@pytest.mark.parametrize("is_read", [False, True], ids=["", "read"])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("alias", ALIASES)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("chunks", [None, 1, 2, 3, N_ROWS])
def test_same_as_eager(
    chunks: int | None,
    source: str,
    alias: str,
    write: Callable[[Tensor, Tensor], None],
    is_read: bool,
) -> None:
    wanted = outcome(eager, source, alias, write, is_read)
    assert wanted[0][0], "the detached tensor has got a graph"
    with koila.config(**({} if chunks is None else {"chunks": chunks})):
        found = outcome(koila.lazy, source, alias, write, is_read)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("source", ["batch", "layer"])
@pytest.mark.parametrize("chunks", [None, 1, 2, 3, N_ROWS])
def test_a_gradient_is_written(chunks: int | None, source: str) -> None:
    """What autograd.grad gives is an ordinary tensor, which can be written with a graph."""

    def run(lazy: Lazy) -> list[Any]:
        torch.manual_seed(0)
        w = torch.randn(5, 5, dtype=torch.float64, requires_grad=True)
        layer, last = nn.Linear(5, 5).double(), nn.Linear(5, 5).double()
        x = lazy(torch.randn(N_ROWS, 5, dtype=torch.float64)).requires_grad_()
        h = SOURCES[source](layer, x)
        (g,) = torch.autograd.grad(last(h).pow(3).sum(), h)
        g[-5:] = w
        g.pow(2).sum().backward()
        return [plain(g), w.grad]

    with koila.config(**({} if chunks is None else {"chunks": chunks})):
        found = run(koila.lazy)
    torch.testing.assert_close(found, run(eager), rtol=1e-10, atol=1e-12)
