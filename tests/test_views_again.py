# SPDX-License-Identifier: Apache-2.0
"""Views of what is written later, or through them: each sees what it sees in eager."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import koila
from frames import frames_of
from written import Programs, each_count

pytestmark = pytest.mark.sanitize

PROGRAMS = Programs()


@PROGRAMS.add
def sizes_of_another(x: Tensor, w: Tensor) -> Any:
    """What lends its sizes only is there too when the view is taken again."""
    r = x @ w
    same, wide, folded = r.view_as(x), r[:, :1].expand_as(x), r.reshape_as(x.view(-1, 2, 2))
    r.relu_()
    return same.mean(), wide, folded


@PROGRAMS.add
def sizes_of_what_is_written_too(x: Tensor, w: Tensor) -> Any:
    r = x @ w
    q = r * 2
    same, own = r.view_as(q), r.view_as(r)
    q.add_(2)
    r.add_(1)
    same.mul_(2)
    return same.mean(), own, q, r


@PROGRAMS.add
def broadcast_together(x: Tensor, z: Tensor, w: Tensor) -> Any:
    """Each output is a view of its own input."""
    r, q = x @ w, z * 2
    wide, high = torch.broadcast_tensors(r[:, :1], q[:, None, 0])
    r.relu_()
    q.mul_(3)
    return wide, high, q


@PROGRAMS.add_but(partly="a graph that comes by a write to a detached view runs at once")
def detached_and_written(x: Tensor, w: Tensor, v: Tensor) -> Any:
    """A write brings a graph to the detached view, and none to what it is a view of."""
    r, q, p = x @ w, x @ w, x * 2
    d, e, f = r.detach(), q.detach(), p.detach()
    d.add_(v)
    d[:, 0] += 1
    e.add_(v)
    e[0] += 1
    f.mul_(v)
    f.add_(1)
    assert [t.requires_grad for t in (r, d, q, e, p, f)] == [True] * 4 + [False, True]
    return d.mean(), r, e, q.mean(), f, p


@PROGRAMS.add_but(partly="a graph that comes by a write to a detached view runs at once")
def views_of_what_is_detached(x: Tensor, w: Tensor, v: Tensor) -> Any:
    r, q = x @ w, x * 2
    d, e = r.detach(), q.detach()[:, 1:]
    column = d[:, 1]
    d.add_(v)
    e.add_(v[1:])
    e[:, 0] += 1
    return d.mean(), column, r, e, q


@PROGRAMS.add
def detached_twice(x: Tensor, w: Tensor, v: Tensor) -> Any:
    q = (x * 2).detach()
    d = q.detach()
    q.mul_(v)
    d.add_(w[0])
    q.add_(1)
    d.add_(1)
    return q.mean(), d.mean()


@PROGRAMS.add
def written_beside_what_is_detached(x: Tensor, w: Tensor, v: Tensor) -> Any:
    """The other way round: the detached view shows the numbers, and has no graph."""
    r, q = x * 2, x @ w
    d, e = r.detach(), q.detach()
    r.mul_(v)
    with torch.no_grad():
        e.mul_(2)
    assert not d.requires_grad
    return (d + 1).mean(), r, d * v, e * v


@PROGRAMS.add
def views_of_a_plain_tensor(x: Tensor, labels: Tensor, w: Tensor) -> Any:
    """Their numbers may be there early: they are views of the plain tensor all the same."""
    r, q, p = (torch.ones(x.shape, dtype=x.dtype) for _ in range(3))
    same, wide, cast = r.view_as(x), q.expand_as(x), p.to(x)
    before = same + 1
    r[labels == 1] += 1
    r.mul_(x @ w)
    wide.mul_(x @ w)
    p.mul_(x @ w)
    return same.mean(), before, wide, q.mean(), cast


@each_count
@pytest.mark.parametrize("is_read_first", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_equals_eager(name: str, is_read_first: bool, chunks: int) -> None:
    PROGRAMS.check(name, chunks, is_read_first)


#: What may give its input back, or a view of it; torch's schemas do not always say so.
GIVERS: dict[str, Callable[[Tensor], Any]] = {
    "atleast_1d": torch.atleast_1d,
    "atleast_2d": torch.atleast_2d,
    "atleast_3d": torch.atleast_3d,
    "block_diag": torch.block_diag,
    "broadcast_tensors": lambda h: torch.broadcast_tensors(h[:, :1], h)[1],
    "broadcast_tensors, all": lambda h: torch.broadcast_tensors(h, h[:1], torch.zeros(1))[0],
    "broadcast_to": lambda h: torch.broadcast_to(h, h.shape),
    "conj": torch.conj,
    "contiguous": lambda h: h.contiguous(),
    "detach": lambda h: h.detach(),
    "dropout": lambda h: F.dropout(h, 0.5, training=False),
    "einsum": lambda h: torch.einsum("ij->ji", h),
    "expand_as": lambda h: h.expand_as(h),
    "flatten": lambda h: h.flatten(0, 0),
    "pad": lambda h: F.pad(h, (0, 0)),
    "positive": torch.positive,
    "real": torch.real,
    "reshape": lambda h: h.reshape(-1),
    "resolve_conj": torch.resolve_conj,
    "squeeze": torch.squeeze,
    "sum_to_size": lambda h: h.sum_to_size(h.shape),
    "tensor_split": lambda h: torch.tensor_split(h, 2, 1)[1],
    "to": lambda h: h.to(h),
    "to_dense": lambda h: h.to_dense(),
    "type_as": lambda h: h.type_as(h),
    "view_as": lambda h: h.view_as(h),
}


def _given_without_gradients(give: Callable[[Tensor], Any]) -> Any:
    def run(x: Tensor, w: Tensor) -> Any:
        h = x @ w
        with torch.no_grad():
            given = give(h)
        return given * 1, given.requires_grad, h

    return run


def _given_before_a_write(give: Callable[[Tensor], Any]) -> Any:
    def run(x: Tensor, w: Tensor) -> Any:
        h = x @ w
        given = give(h)
        h.mul_(2)
        return given * 1, h

    return run


def _given_and_written(give: Callable[[Tensor], Any]) -> Any:
    def run(x: Tensor, w: Tensor, v: Tensor) -> Any:
        h = x @ w.detach()
        given = give(h)
        given.mul_(v[0])
        return given * 1, h

    return run


def _read_between(is_given_read: bool, is_given_written: bool) -> Callable[..., Any]:
    """One of the two has its number when one of them is written."""

    def of(give: Callable[[Tensor], Any]) -> Any:
        def run(x: Tensor, w: Tensor, v: Tensor) -> Any:
            h = x @ w.detach()
            given = give(h)
            _ = (given if is_given_read else h).sum().item()
            (given if is_given_written else h)[:1].mul_(v[0])
            return given * 1, h

        return run

    return of


def _given_what_was_read(give: Callable[[Tensor], Any]) -> Any:
    def run(x: Tensor, w: Tensor, v: Tensor) -> Any:
        h = x @ w.detach()
        _ = h.sum().item()
        given = give(h)
        h.mul_(v[0])
        return given * 1, h

    return run


def _given_with_gradients(give: Callable[[Tensor], Any]) -> Any:
    def run(x: Tensor, w: Tensor) -> Any:
        h = x @ w
        given = give(h)
        _ = h.sum().item()
        h.mul_(2)
        return given * 1, h

    return run


READ_AND_WRITTEN = [
    _read_between(*flags) for flags in itertools.product((False, True), (False, True))
]
USES = [
    _given_without_gradients,
    _given_before_a_write,
    _given_and_written,
    _given_what_was_read,
    _given_with_gradients,
    *READ_AND_WRITTEN,
]


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", GIVERS)
def test_what_gives_its_input_back(name: str, use: Callable[..., Any], chunks: int) -> None:
    why = {}
    if name == "squeeze" and use is _given_and_written:
        why["whole"] = "it would drop a batch of one row, and what it shares is written"
    elif name == "block_diag" and use in (READ_AND_WRITTEN[1], READ_AND_WRITTEN[3]):
        why["partly"] = "it has no rows, and its number is what is written"
    elif name == "block_diag" and use is _given_what_was_read:
        why["partly"] = "it has no rows, and is made of what is there"
    programs = Programs()
    programs.add_but(**why)(use(GIVERS[name]))
    programs.check("run", chunks, False)


def test_views_of_what_is_not_written_stay_in_c() -> None:
    """One call that writes in place elsewhere makes no view of other memory dearer."""

    def step(is_written: bool, of_written: bool) -> torch.Tensor:
        w = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(4, 6).requires_grad_()
        h = koila.lazy(torch.ones(6, 4, dtype=torch.float64)) @ w
        k = h * 2
        k = k.relu_() if is_written else k.relu()
        viewed = k if of_written else h.exp()
        for _ in range(8):
            viewed = viewed.view(-1, 2, 3).flatten(1)
        with koila.config(chunks=2):
            (viewed.sin().sum() + k.sum()).backward()
        assert w.grad is not None
        return w.grad

    plain = frames_of(lambda: step(False, False), "run_other")
    assert frames_of(lambda: step(True, False), "run_other") == plain
    assert frames_of(lambda: step(True, True), "run_other") >= plain + 2 * 16
    assert torch.equal(step(True, False), step(False, False))
    assert torch.equal(step(True, True), step(False, True))
