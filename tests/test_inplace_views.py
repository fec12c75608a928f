# SPDX-License-Identifier: Apache-2.0
"""Calls that make a tensor another view of its memory, in place, come out as in eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import koila
from chunked import split
from oracle import Lazy, eager
from written import Programs, each_count

pytestmark = pytest.mark.sanitize

PROGRAMS = Programs()


@PROGRAMS.add
def unsqueezed(x: Tensor, w: Tensor) -> Any:
    r = x @ w
    same = r.unsqueeze_(1)
    assert same is r
    return r * 2, r.sin(), r.shape == (x.shape[0], 1, 4)


@PROGRAMS.add
def transposed(x: Tensor, w: Tensor, v: Tensor) -> Any:
    r, q, p, o = x @ w, x * v, x @ w, x * v
    r.t_()
    q.transpose_(0, 1)
    p.swapaxes_(0, 1)
    o.swapdims_(dim0=1, dim1=0)
    return r.t() * q.t(), (p * o).sum(0), r.sin()


@PROGRAMS.add
def squeezed(x: Tensor, w: Tensor) -> Any:
    r, q, p = (x @ w)[:, None].mul(2), (x @ w)[:, None, :, None] * 2, x @ w
    r.squeeze_(1)
    q.squeeze_()
    return r * q, p.squeeze_(0)


@PROGRAMS.add
def views_after(x: Tensor, w: Tensor, v: Tensor) -> Any:
    r = x @ w
    r.unsqueeze_(-1)
    after = r[:, 0]
    r.mul_(2)
    after.add_(v[:1])
    r[:, 2] = 3.0
    return r * x.unsqueeze(-1), after


@PROGRAMS.add
def views_before_and_after(x: Tensor, w: Tensor, v: Tensor) -> Any:
    r = x @ w
    before = r[:, 1:]
    r.unsqueeze_(-1)
    after = r[:, 0]
    r.mul_(2)
    before.add_(v[1:])
    after.add_(1)
    r.squeeze_(-1)
    r[:, 2] = 3.0
    return r * x, before, after


@PROGRAMS.add
def a_view_itself(x: Tensor, w: Tensor) -> Any:
    r = x @ w
    view, other = r[:, 1], r[:, 1]
    view.unsqueeze_(1)
    view.mul_(3)
    r.add_(1)
    return view.cos(), other, r


@PROGRAMS.add
def gradients_as_they_lie(x: Tensor, w: Tensor) -> Any:
    """The last bit of a product's gradient depends on how what comes back lies in memory."""
    r = x @ w
    r.swapdims_(0, 1)
    r.squeeze_()
    return r @ r.t(), (x @ w).t_()


@PROGRAMS.add
def read_as_it_was(x: Tensor, w: Tensor) -> Any:
    """What was made of it before keeps its sizes."""
    r = x @ w
    doubled, summed = r * 2, r.sum(1)
    r.t_()
    return doubled, summed, r.mul(0.5)


@PROGRAMS.add
def of_a_reduction(x: Tensor, w: Tensor) -> Any:
    m = (x @ w).mean(0)
    m.unsqueeze_(0)
    r = x - m
    m.add_(1)
    return r * m


@PROGRAMS.add
def without_gradients(x: Tensor, w: Tensor) -> Any:
    mask = x > 0
    with torch.no_grad():
        mask.unsqueeze_(1)
    r = (x @ w)[:, None] * mask
    step = x * 2
    with torch.no_grad():
        step.unsqueeze_(0)
    step.add_(r.mean(1) @ w)
    return step, r


@PROGRAMS.add_but(partly="what loses its graph is there, and so is the loss")
def without_its_gradient(x: Tensor, w: Tensor) -> Any:
    r = x @ w
    with torch.no_grad():
        r.unsqueeze_(0)
    return r * 2


@PROGRAMS.add
def to_and_from_a_number(x: Tensor, v: Tensor) -> Any:
    m, s = (x * v).mean(), (x.detach() * 1).sum()
    m.unsqueeze_(0)
    s.unsqueeze_(0)
    one = (x * v)[:1, :1] * 1
    one.squeeze_()
    return m * x, s * v, one * v


@PROGRAMS.add
def detached(x: Tensor, w: Tensor) -> Any:
    r = x @ w
    d = r.detach()
    d.unsqueeze_(1)
    d.add_(1)
    return r, d, d.squeeze_(1)


@pytest.mark.rotated("chunks")
@each_count
@pytest.mark.parametrize("is_read_first", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_equals_eager(name: str, is_read_first: bool, chunks: int) -> None:
    PROGRAMS.check(name, chunks, is_read_first)


def kept_before(x: Tensor, w: Tensor) -> Any:
    r = x @ w
    kept = r.sin()
    r.unsqueeze_(0)
    (kept.sum() + r.sum()).backward()


def leaf(x: Tensor, w: Tensor) -> Any:
    x.requires_grad_()
    x.unsqueeze_(0)


def no_such_dim(x: Tensor, w: Tensor) -> Any:
    (x @ w).unsqueeze_(4)


def no_matrix(x: Tensor, w: Tensor) -> Any:
    (x @ w)[None].mul(1).t_()


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("wrong", [kept_before, leaf, no_such_dim, no_matrix])
def test_errors_are_torchs(wrong: Callable[..., Any], chunks: int) -> None:
    def text(lazy: Lazy) -> tuple[type[BaseException], str]:
        w = torch.ones(4, 4).requires_grad_()
        with pytest.raises((RuntimeError, IndexError)) as caught:
            wrong(lazy(torch.ones(8, 4)), w)
        return caught.type, str(caught.value).split("[torch")[0]

    wanted = text(eager)
    with split(chunks, whole="it is refused before anything runs"):
        assert text(koila.lazy) == wanted


def test_counts_as_a_write() -> None:
    x = koila.lazy(torch.ones(8, 4))
    h = x * 2
    view = h[1:]
    with split(3, whole="nothing is asked for"):
        h.t_().unsqueeze_(0)
        assert koila._core.value(koila._core.id(h))[6] is None
    assert (h._version, view._version) == (2, 2)
    assert h.shape == (1, 4, 8)
    assert view.shape == (7, 4)
    with pytest.raises(ValueError, match="placeholder"):
        koila._core.swap(x, (x * 2).sum())
