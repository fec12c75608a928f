# SPDX-License-Identifier: Apache-2.0
"""Calls that write to `out=` come out as in eager, in any number of chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import koila
from chunked import split
from written import N_ROWS, Programs, each_count

pytestmark = pytest.mark.sanitize

PROGRAMS = Programs()


@PROGRAMS.add
def clamped_in_itself(x: Tensor, w: Tensor) -> Any:
    r = x @ w
    with torch.no_grad():
        torch.clamp(r, max=0.0, out=r)
    return r.mean(), r


@PROGRAMS.add
def read_before_it_is_written(x: Tensor, v: Tensor) -> Any:
    r = x * 2
    q = r + v
    torch.add(x, 1, out=r)
    return q.mean(), r


@PROGRAMS.add
def a_product(x: Tensor, w: Tensor) -> Any:
    with torch.no_grad():
        r = x * 2
        torch.matmul(x, w, out=r)
    return r.mean(), r * w[0]


@PROGRAMS.add
def joined(x: Tensor, z: Tensor, w: Tensor) -> Any:
    wide, both = x.new_empty(N_ROWS, 8), x.new_empty(2, N_ROWS, 4)
    torch.cat([x, z], 1, out=wide)
    torch.stack([x, z], 0, out=both)
    summed = torch.empty_like(x)
    torch.sum(both, 0, out=summed)
    return wide, both, summed @ w


@PROGRAMS.add
def normalised(x: Tensor, w: Tensor) -> Any:
    r = x * 1
    same = F.normalize(x, dim=1, out=r)
    return same is r, r @ w


@PROGRAMS.add
def into_a_detached_view(x: Tensor, w: Tensor) -> Any:
    r = x @ w
    torch.add(x, 1, out=r.detach())
    return r.mean(), r


@PROGRAMS.add
def two_results(x: Tensor, w: Tensor) -> Any:
    values, indices = x.new_empty(N_ROWS), x.argmin(1)
    out = torch.max(x, 1, out=(values, indices))
    assert out.values is values
    assert out[1] is indices
    return values * w[0, 0], indices


@PROGRAMS.add
def seen_by_views(x: Tensor, w: Tensor) -> Any:
    r = x * 2
    view = r[:, 0]
    torch.mul(x, 3, out=r)
    return view, r @ w


@PROGRAMS.add
def what_is_whole(x: Tensor, w: Tensor) -> Any:
    mean = x.mean(0)
    before = x - mean
    torch.mean(x * 3, 0, out=mean)
    return before @ w, mean


@PROGRAMS.add
def several(x: Tensor, z: Tensor, ids: Tensor, w: Tensor) -> Any:
    r, chosen, mask = x * 2, ids.clone(), x > 0
    torch.cumsum(x, 1, out=r)
    torch.exp(r, out=r)
    torch.gather(ids, 1, ids % 5, out=chosen)
    torch.gt(x, z, out=mask)
    same = torch.where(mask, x, z, out=torch.zeros_like(x))
    same.mul_(2)
    return r @ w, chosen, mask, same


@PROGRAMS.add
def other_memory(x: Tensor, z: Tensor, w: Tensor) -> Any:
    """Strided, of another dtype, to be resized, given twice, transposed: torch's own way."""
    r, half, none, summed = x * 2, torch.empty_like(x).float(), x.new_empty(0), x.mean(0)
    before, turned = r * w[0].detach(), x.T.contiguous().T
    torch.mul(x[:, 0], 3, out=r[:, 1])
    torch.mul(x, 3, out=half)
    torch.mul(x, 3, out=none)
    torch.sum(z, 0, dtype=torch.float64, out=summed)
    torch.addmm(z, x, w.detach(), out=turned)
    return before, r, half, none, summed, turned @ w


@PROGRAMS.add
def into_plain_tensors(x: Tensor, w: Tensor) -> Any:
    plain, values = torch.ones(N_ROWS, 4, dtype=x.dtype), torch.zeros(N_ROWS, dtype=x.dtype)
    indices = torch.zeros(N_ROWS, dtype=torch.long)
    q = x * plain
    torch.add(x, 1, out=plain)
    torch.max(x, 1, out=(values, indices))
    return q, plain, values, indices, x @ w


@PROGRAMS.add
def draws(x: Tensor, w: Tensor) -> Any:
    r = x * 2
    torch.randn(N_ROWS, 4, out=r)
    return r, torch.normal(x, 1.0, out=torch.empty_like(x)), x @ w


@pytest.mark.rotated("chunks")
@each_count
@pytest.mark.parametrize("is_read_first", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_equals_eager(name: str, is_read_first: bool, chunks: int) -> None:
    PROGRAMS.check(name, chunks, is_read_first)


@each_count
def test_what_needs_a_gradient_is_refused(chunks: int) -> None:
    """`out=` has no gradient: with one, torch's own error, and nothing is written."""
    x, w = torch.ones(N_ROWS, 4), torch.ones(4, 4, requires_grad=True)
    with split(chunks):
        lazy = koila.lazy(x)
        r = lazy * 2
        for given in (lazy @ w, lazy):
            target = r if given.requires_grad else lazy @ w
            with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
                torch.add(given, 1, out=target)
        assert r.tolist() == (x * 2).tolist()


def test_what_overlaps_is_torchs() -> None:
    """What reads the memory it writes elsewhere runs live: torch refuses it, or does it its way."""
    r = koila.lazy(torch.arange(12.0).view(3, 4)) * 1
    with pytest.raises(RuntimeError, match="written-to tensor"):
        torch.index_select(r, 1, torch.tensor([3, 2, 1, 0]), out=r)
    with pytest.raises(RuntimeError, match="written-to tensor"):
        torch.add(r[:2], 1, out=r[1:])
    assert r.tolist() == torch.arange(12.0).view(3, 4).tolist()
