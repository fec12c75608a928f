# SPDX-License-Identifier: Apache-2.0
"""What was read, and is written then: the numbers of a run in chunks are tensors as eager's are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import koila
from chunked import split
from oracle import Lazy, assert_like, eager
from written import N_ROWS, Programs, each_count

pytestmark = pytest.mark.sanitize

PROGRAMS = Programs()


@PROGRAMS.add
def added_to(x: Tensor, w: Tensor) -> Any:
    h = x @ w
    out, other = torch.zeros_like(h), torch.zeros_like(h)
    n = h.sum().item()
    out.add_(h)
    other[:, 0] = h[:, 1]
    return out.mean() * n, out, other


@PROGRAMS.add
def experts(x: Tensor, labels: Tensor, w: Tensor) -> Any:
    """Each expert takes its rows and adds what it makes of them to the results."""
    h = x @ w
    added, assigned, masked = torch.zeros_like(h), torch.zeros_like(h), h.new_zeros(N_ROWS, 4)
    for expert in range(5):
        mask = labels == expert
        rows = mask.nonzero()[:, 0]
        if rows.numel():
            added.index_add_(0, rows, h[rows] * (expert + 1))
        assigned[torch.where(mask)] = h[rows] * (expert + 1)
        if mask.any():
            masked[mask] = h[mask] * (expert + 1)
    return added, assigned, masked


@PROGRAMS.add
def through_a_view(x: Tensor, w: Tensor) -> Any:
    """The graph that comes with a write shows in all that share the memory."""
    h, g = x @ w.detach(), x @ w.detach()
    view, whole = h[:, 0], g[:, 1]
    part = view[1:]
    n = h.sum().item() + g.sum().item() + view.sum().item()
    part.mul_(w[0, 0])
    g.mul_(w[0])
    return h * n, view, part, g, whole


@PROGRAMS.add
def of_a_graph(x: Tensor, w: Tensor) -> Any:
    h = x @ w
    view = h[:, 0]
    seen = [view.tolist()]
    h.mul_(2)
    seen.append(view.tolist())
    view.add_(h[:, 1])
    return torch.tensor(seen), h, view


@PROGRAMS.add
def made_without_gradients(x: Tensor, w: Tensor, v: Tensor) -> Any:
    with torch.no_grad():
        h = x @ w
        mean, row = h.mean(0), h[:, 0].clone()
    h.mul_(v)
    mean.add_(v)
    row.mul_(v[0])
    return h, mean, row


@PROGRAMS.add
def detached_and_exported(x: Tensor, w: Tensor, v: Tensor) -> Any:
    h, g, s = x @ w.detach(), x @ w.detach(), (x @ w.detach()).sum()
    array, n = g.numpy(), s.item()
    h.tolist()
    h.detach_()
    h.mul_(w[0])
    g.mul_(v)
    s.add_((x @ w).sum())
    return h, torch.tensor(array), g, s * n


@each_count
@pytest.mark.parametrize("is_read_first", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_equals_eager(name: str, is_read_first: bool, chunks: int) -> None:
    PROGRAMS.check(name, chunks, is_read_first)


@each_count
def test_a_view_of_no_grad_is_refused_as_in_eager(chunks: int) -> None:
    def run(x: Tensor, is_read: bool) -> None:
        v = torch.ones((), requires_grad=True)
        with torch.no_grad():
            h = x * 2
            view = h[:, 0]
        if is_read:
            h.tolist()
        view.mul_(v)

    with split(chunks):
        for is_read in (False, True):
            for given in (torch.ones(N_ROWS, 4), koila.lazy(torch.ones(N_ROWS, 4))):
                with pytest.raises(RuntimeError, match="A view was created in no_grad mode"):
                    run(given, is_read)


def _resize(x: Tensor) -> None:
    x.resize_(2, 4)


#: Writes of the batch that run at once.
LIVE_WRITES: dict[str, Callable[[Tensor], Any]] = {
    "apply_": lambda x: x.apply_(lambda number: number + 1),  # torch counts no write
    "fill_diagonal_": lambda x: x.fill_diagonal_(0.25),
    "put_": lambda x: x.put_(torch.tensor([0]), torch.tensor([5.0], dtype=x.dtype)),
    "renorm_": lambda x: x.renorm_(2, 0, 0.1),
    "resize_": _resize,
    "_foreach_mul_": lambda x: torch._foreach_mul_([x], 2.0),
}


@pytest.mark.parametrize("chunks", [None, 1, 2, 3, N_ROWS])
@pytest.mark.parametrize("name", LIVE_WRITES)
def test_calls_read_a_view_of_the_batch_before_it_is_written(name: str, chunks: int | None) -> None:
    """The view has its number, and is a tensor of its own for the calls that read it now."""

    def run(lazy: Lazy) -> list[Tensor]:
        x = lazy(torch.arange(4.0 * N_ROWS, dtype=torch.float64).view(N_ROWS, 4))
        view = x[:3]
        numbers = [view.sum().item()]
        doubled, turned = view * 2, view.t()
        LIVE_WRITES[name](x)
        return [torch.tensor(numbers), *(t * 1.0 for t in (x, view, doubled, turned))]

    with koila.config(chunks=chunks):
        assert_like([torch.as_tensor(one) * 1 for one in run(koila.lazy)], run(eager))


def _fail(x: Tensor, w: Tensor) -> Any:
    """Leave a program that raised in backward, and what holds it."""
    made = (x @ w).exp()
    made.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        made.sum().backward()
    return made


@each_count
@pytest.mark.parametrize("name", ["of_a_graph", "through_a_view", "added_to"])
def test_beside_a_program_that_failed(name: str, chunks: int) -> None:
    """What a failed program left on the tape is no reason to show an old number."""
    w = torch.ones(4, 4, dtype=torch.float64, requires_grad=True)
    kept = _fail(koila.lazy(torch.ones(N_ROWS, 4, dtype=torch.float64)), w)
    PROGRAMS.check(name, chunks, False)
    del kept
