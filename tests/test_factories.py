# SPDX-License-Identifier: Apache-2.0
"""New values that take their sizes from the batch, and rows that are written into them.

A factory makes the same for every chunk until rows are written into it, and has rows from then on.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from written import N_ROWS, Programs, each_count

pytestmark = pytest.mark.sanitize

PROGRAMS = Programs()


@PROGRAMS.add
def shifted_labels(ids: Tensor) -> Any:
    shifted = ids.new_zeros(ids.shape)
    shifted[..., 1:] = ids[..., :-1].clone()
    shifted[..., 0] = 7
    shifted.masked_fill_(shifted == 3, 1)
    return shifted, shifted.double().mean()


@PROGRAMS.add
def sizes_from_a_shape(x: Tensor, w: Tensor) -> Any:
    h = x @ w
    s = h.new_zeros(h.shape)
    s[:, 1:] = h[:, :-1].clone()
    return s.mean(), s @ w


@PROGRAMS.add
def sizes_as_literals(x: Tensor, w: Tensor) -> Any:
    h = x @ w
    one, two, three = h.new_ones(11, 1, 4), h.new_full((11, 4), 2.0), h.new_empty((2, 11, 4))
    one[:, 0] = h
    two[:, 1:] = h[:, 1:]
    three[0] = h
    three[1] = x
    return one.mean(), two @ w, three.sum(0) @ w


@PROGRAMS.add
def rows_in_the_second_dim(x: Tensor, w: Tensor) -> Any:
    h = x @ w
    s = h.new_zeros(4, N_ROWS)
    s[1] = h[:, 0]
    return s.mean(), s.T @ w


@PROGRAMS.add
def several_rows_an_entry(x: Tensor) -> Any:
    h = x * 2
    flat, folded = h.new_zeros(4 * N_ROWS), h.new_zeros(2 * N_ROWS, 2)
    flat += h.flatten()
    folded += h.view(2 * N_ROWS, 2)
    return flat, folded, folded.mean()


@PROGRAMS.add
def methods(x: Tensor, w: Tensor) -> Any:
    h = x @ w
    copied, added, filled = (h.new_zeros(N_ROWS, 4) for _ in range(3))
    copied.copy_(h)
    same = added.add_(h)
    filled.masked_fill_(x > 0, 2.0)
    return copied @ w, same @ w, added.mean(), filled @ w


@PROGRAMS.add
def masks(x: Tensor, w: Tensor) -> Any:
    h = x @ w
    one, two = h.new_zeros(N_ROWS, 4), h.new_zeros(N_ROWS, 4)
    one[x > 0] = 2.0
    two[(x > 0).any(1)] = 3.0
    return one @ w, two.mean(), torch.where(x > 0, h.new_zeros(N_ROWS, 4), h)


@PROGRAMS.add
def scattered(x: Tensor, labels: Tensor, w: Tensor) -> Any:
    h = x @ w
    one, two = h.new_zeros(N_ROWS, 4), h.new_zeros(N_ROWS, 4)
    one.scatter_(1, labels[:, None], 1.0)
    two[torch.arange(N_ROWS), labels] = h[:, 0]
    return one @ w, two.mean(), h


@PROGRAMS.add
def written_twice(x: Tensor, z: Tensor, w: Tensor) -> Any:
    h = x @ w
    s = h.new_zeros(N_ROWS, 4)
    s[:, 0] = h[:, 0]
    s[:, 1] = z[:, 1]
    s += h
    return s.mean(), s @ w


@PROGRAMS.add
def read_before(x: Tensor, w: Tensor) -> Any:
    h = x @ w
    s = h.new_zeros(N_ROWS, 4)
    before, view = s + 1, s[:, :2]
    seen = view.exp()
    s[:, 0] = h[:, 0]
    return s.mean(), before, view, seen, s @ w


@PROGRAMS.add
def a_view_written_after(x: Tensor, w: Tensor) -> Any:
    h = x @ w
    s = h.new_zeros(N_ROWS, 4)
    s[:, 0] = h[:, 0]
    view = s[:, :2]
    view.mul_(2)
    return s.mean(), view, s @ w


@PROGRAMS.add
def a_view_written_first(x: Tensor, w: Tensor) -> Any:
    h = x @ w
    s, t = h.new_zeros(N_ROWS, 4), h.new_ones(4, N_ROWS)
    view = s[:, 1:]
    view.add_(h[:, 1:])
    t.T.mul_(h)
    return s.mean(), s @ w, view, t.T @ w, h.sin()


@PROGRAMS.add
def filled_first(x: Tensor, w: Tensor) -> Any:
    """What is written before any rows are makes it a value of every chunk."""
    h = x @ w
    s = h.new_empty(N_ROWS, 4)
    s.fill_(2.0)
    s[:, 1] = h[:, 1]
    return s.mean(), s @ w


@PROGRAMS.add
def the_batch_is_also_a_length(x: Tensor, w: Tensor) -> Any:
    h = x @ w
    s, mask = h.new_ones(N_ROWS, N_ROWS), h.new_ones(N_ROWS, N_ROWS).tril()
    s[:, 0] = h[:, 0]
    return (s @ h).mean(), mask @ h, s


@PROGRAMS.add
def a_cast_to_the_batch(x: Tensor, w: Tensor) -> Any:
    """Its dtype is all that the batch lends."""
    h = x @ w
    one, two = torch.zeros(N_ROWS, 4).to(h), torch.arange(N_ROWS).type_as(h)
    one[:, 0] = h[:, 0]
    two += h[:, 0]
    return one, one.mean(), two, torch.arange(N_ROWS).type_as(h)[:, None] * h


@PROGRAMS.add
def states_of_a_layer(x: Tensor) -> Any:
    torch.manual_seed(0)
    layer = nn.LSTM(4, 3, batch_first=True).double()
    h = x[:, None]
    return layer(h, (h.new_zeros(1, N_ROWS, 3), h.new_ones(1, N_ROWS, 3)))[0]


@PROGRAMS.add
def without_gradients(x: Tensor, w: Tensor) -> Any:
    h = x @ w
    s = h.new_zeros(N_ROWS, 4)
    with torch.no_grad():
        s[:, 0] = h[:, 0]
    return s.mean() * h.mean(), s @ w


@PROGRAMS.add
def others(x: Tensor, labels: Tensor, w: Tensor) -> Any:
    """Factories that were right: what has a plain tensor's sizes, or the batch's own rows."""
    h = x @ w
    like, full = torch.zeros_like(h), torch.full_like(h, 3.0)
    like[:, 0] = h[:, 0]
    full[:, 1] += h[:, 1]
    one_hot = F.one_hot(labels, 4).double()
    one_hot[:, 0] = h[:, 0]
    eye = torch.eye(N_ROWS, dtype=h.dtype)
    return like @ w, full.mean(), one_hot, eye + h[:, :1], (eye * h[:, :1]).sum()


@PROGRAMS.add
def read_in_the_middle(x: Tensor, z: Tensor, w: Tensor) -> Any:
    h = x @ w
    s = h.new_zeros(N_ROWS, 4)
    s[:, 0] = h[:, 0]
    n = s.sum().item()
    s[:, 1] = z[:, 1]
    return s.mean() * n, s @ w


@pytest.mark.rotated("chunks")
@each_count
@pytest.mark.parametrize("is_read_first", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_equals_eager(name: str, is_read_first: bool, chunks: int) -> None:
    PROGRAMS.check(name, chunks, is_read_first)
