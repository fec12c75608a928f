# SPDX-License-Identifier: Apache-2.0
"""Hooks and retained gradients of a value that the script writes without a graph.

A backward in chunks gives the lazy tensor its number. A later backward through that number calls
the same hooks, and adds to the same retained gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import koila
from oracle import Lazy, eager, plain


def under_no_grad(v: Tensor) -> None:
    with torch.no_grad():
        v.mul_(0.5)


def twice(v: Tensor) -> None:
    with torch.no_grad():
        v.mul_(0.5)
        v.add_(1)


def through_a_view(v: Tensor) -> None:
    with torch.no_grad():
        v[:, 0] = 0


def detached(v: Tensor) -> None:
    v.detach().mul_(0.5)


def by_data(v: Tensor) -> None:
    v.data.mul_(0.5)


def unwritten(v: Tensor) -> None:
    del v


WRITES: list[Callable[[Tensor], None]] = [
    under_no_grad,
    twice,
    through_a_view,
    detached,
    by_data,
    unwritten,
]


def outcome(
    lazy: Lazy, write: Callable[[Tensor], None], is_first: bool, keeps: bool, has_backward: bool
) -> list[Any]:
    torch.manual_seed(0)
    net, head = nn.Linear(6, 4).double(), nn.Linear(4, 4).double()
    x, y = lazy(torch.randn(7, 6).double(), torch.randint(0, 4, (7,)))
    called: list[int] = []

    def hook(gradient: Tensor) -> Tensor:
        called.append(len(called))
        return gradient * 2

    v = net(x)
    if is_first:
        v.register_hook(hook)
    if keeps:
        v.retain_grad()
    write(v)
    if not is_first:
        v.register_hook(hook)
    if has_backward:
        F.cross_entropy(v, y).backward(retain_graph=keeps)
    seen = [plain(torch.autograd.grad(head(v).tanh().sum(), v, create_graph=True)[0])]
    head(v).sin().sum().backward() if keeps else None
    seen += [plain(torch.autograd.grad(head(v).sin().sum(), v)[0])]
    kept = [plain(v.grad)] if keeps and v.grad is not None else []
    return [called, seen, kept, [p.grad for p in net.parameters() if p.grad is not None]]


@pytest.mark.rotated("chunks")
@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("is_first", [False, True], ids=["hook after", "hook before"])
@pytest.mark.parametrize("keeps", [False, True], ids=["", "retained"])
@pytest.mark.parametrize("has_backward", [False, True], ids=["", "after a backward"])
@pytest.mark.parametrize("chunks", [None, 1, 2, 3, 7])
def test_a_written_value(
    chunks: int | None,
    has_backward: bool,
    keeps: bool,
    is_first: bool,
    write: Callable[[Tensor], None],
) -> None:
    words = write, is_first, keeps, has_backward
    wanted = outcome(eager, *words)
    assert wanted[0], "the hook ran"
    with koila.config(**({} if chunks is None else {"chunks": chunks})):
        found = outcome(koila.lazy, *words)
    assert found[0] == wanted[0]
    torch.testing.assert_close(found[1:], wanted[1:], rtol=1e-10, atol=1e-12)
