# SPDX-License-Identifier: Apache-2.0
"""Views after a write: each read sees the memory as it then was, in chunks too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import koila
from binding_kit import batch, is_pending
from chunked import split
from koila import _core

core: Any = _core
Program = Callable[[Tensor, Tensor], Any]


def read_after(x: Tensor, w: Tensor) -> Any:
    base = x * w
    view = base[:, 1:]
    base.mul_(2)
    return view * 1, base * 1


def read_before_and_after(x: Tensor, w: Tensor) -> Any:
    base = x * w
    view = base.t()
    before = view * 1
    base.add_(1)
    return before, view * 1


def view_of_a_view(x: Tensor, w: Tensor) -> Any:
    base = x * w
    first = base.view(4, 3, 1)
    second = first[:, :2]
    third = second.squeeze(2)
    base.mul_(3)
    return third * 1, first * 1


def written_through_a_view(x: Tensor, w: Tensor) -> Any:
    base = x * w
    left, right = base[:, :2], base[:, 1:]
    left.mul_(2)
    right.add_(1)
    left.sub_(3)
    return base * 1, left * 1, right * 1


def several_outputs(x: Tensor, w: Tensor) -> Any:
    """Without a gradient: autograd refuses to read them again."""
    base = x * w.detach()
    one, two, three = base.unbind(1)
    base.mul_(2)
    return three * 1, one * 1, two * 1, w * 1


def by_parts(x: Tensor, w: Tensor) -> Any:
    base = x * w.detach()
    parts = base.split([1, 2], dim=1)
    base.exp_()
    return [*(part * 1 for part in parts), w * 1]


def with_sizes_of_the_batch(x: Tensor, w: Tensor) -> Any:
    """The view is taken again with the chunk's own sizes."""
    base = x * w
    view = base.view(4, 3, 1)
    other = base.expand(2, 4, 3)
    base.mul_(2)
    return view * 1, other[1] * 1


def by_keyword(x: Tensor, w: Tensor) -> Any:
    base = x * w
    view = base.unsqueeze(dim=1)
    narrow = base.narrow(dim=1, start=1, length=2)
    base.sin_()
    return view * 1, narrow * 1


def written_twice(x: Tensor, w: Tensor) -> Any:
    base = x * w
    view = base[:, 0]
    base.mul_(2)
    once = view * 1
    base.mul_(2)
    twice = view * 1
    view.zero_()
    return once, twice, view * 1, base * 1


def never_read_again(x: Tensor, w: Tensor) -> Any:
    base = x * w
    base[:, 0].mul_(5)
    base[:, 1].fill_(1)
    return base * 1


def by_assignment(x: Tensor, w: Tensor) -> Any:
    base = x * w
    view = base[:, 1]
    base[:, 1] = base[:, 0] * 2
    base[:, 2:] += 1
    return view * 1, base * 1


def a_gradient_comes_in(x: Tensor, w: Tensor) -> Any:
    base = x * 2
    view = base[:, :2]
    base.mul_(w)
    return view * 1, base * 1


def across_a_barrier(x: Tensor, w: Tensor) -> Any:
    """What a reduction gives is written into what it was made of."""
    base = x * w
    view = base[:, 0]
    total = base.sum()
    base.add_(total)
    return view * 1, (base * view[:, None]) * 1


def written_in_a_barrier(x: Tensor, w: Tensor) -> Any:
    ordered = (x * w).sort(0).values
    view = ordered[:, 1]
    ordered.mul_(2)
    return view * 1, ordered + x


PROGRAMS: list[Program] = [
    read_after,
    read_before_and_after,
    view_of_a_view,
    written_through_a_view,
    several_outputs,
    by_parts,
    with_sizes_of_the_batch,
    by_keyword,
    written_twice,
    never_read_again,
    by_assignment,
    a_gradient_comes_in,
    across_a_barrier,
    written_in_a_barrier,
]


def run(program: Program, x: Tensor) -> tuple[list[Any], Any]:
    """All results, and the gradient of their sum, differently weighted."""
    w = torch.arange(1.0, 4.0, dtype=torch.float64).requires_grad_()
    made = program(x, w)
    results = [made] if isinstance(made, Tensor) else list(made)
    loss = sum(((r * (i + 1)).sin().sum() for i, r in enumerate(results)), torch.zeros(()))
    loss.backward()
    return [r.tolist() for r in results], w.grad


@pytest.mark.parametrize("chunks", [None, 1, 2, 3, 4])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_every_read_is_of_the_right_version(program: Program, chunks: int | None) -> None:
    wanted, wanted_grad = run(program, batch())
    with split(chunks):
        found, grad = run(program, koila.lazy(batch()))
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(grad, wanted_grad, rtol=1e-10, atol=1e-12)


def n_nodes() -> int:
    n = 0
    while True:
        try:
            core.node(n)
        except IndexError:
            return n
        n += 1


def test_a_view_is_taken_again_once_for_each_write() -> None:
    base = koila.lazy(batch()) * torch.ones(3, dtype=torch.float64, requires_grad=True)
    view = base[:, 0]
    assert n_nodes() == 2
    assert view.shape == (4,)
    base.mul_(2)
    assert n_nodes() == 3
    for n in (5, 6, 7):
        _ = view * 1
        assert n_nodes() == n
    base.mul_(2)
    assert view.requires_grad
    assert n_nodes() == 9, "asked for its flag it was looked for, and found again"
    _ = view * 1
    assert n_nodes() == 10


def test_views_without_a_write_are_taken_once() -> None:
    base = koila.lazy(batch()) * torch.ones(3, dtype=torch.float64, requires_grad=True)
    view = base[:, 0]
    for _ in range(3):
        _ = view * 1, base * 1
    assert n_nodes() == 8


def test_a_lazy_goes_along_with_its_view() -> None:
    base = koila.lazy(batch()) * 2
    view = base[:, 0]
    number = id(view)
    base.mul_(2)
    _ = view * 1
    assert id(view) == number and is_pending(view)
    assert view.shape == (4,)
    assert view.tolist() == (batch() * 4)[:, 0].tolist()
