# SPDX-License-Identifier: Apache-2.0
"""Random calls on values whose layout no rule knows: `layouts.py` finds it on two rows."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

import koila
import opcalls
from koila import _core
from koila.basics import rows
from koila.staged import layouts
from koila.staged.facts import Info
from oracle import Lazy, assert_close, assert_same_story, assert_seen, eager, tell
from sanitizers import fewer

F64 = torch.float64
ROWS = 12
CHUNKS = [1, 2, 3, 7, ROWS]

#: (rows, 4, 6) and a (6, 6) weight that needs a gradient, to what a model makes of it.
Make = Callable[[Tensor, Tensor], Tensor]


def turned(x: Tensor, w: Tensor) -> Tensor:
    return F.prelu((x @ w).transpose(0, 1), w[0, :1])


def columns(x: Tensor) -> Tensor:
    """(rows, 4, 6) -> (rows, 6), with the rows innermost in memory."""
    return x[:, 0].t().contiguous().t()


def gru_cell(x: Tensor, w: Tensor) -> Tensor:
    torch.manual_seed(4)
    return nn.GRUCell(6, 6, dtype=F64)(x[:, 0], columns(x @ w))


def lstm_cell(x: Tensor, w: Tensor) -> Tensor:
    torch.manual_seed(4)
    hidden = nn.LSTMCell(6, 6, dtype=F64)(columns(x @ w))[0]
    return hidden.unsqueeze(1) + x.transpose(0, 1).contiguous().transpose(0, 1)


def of_an_einsum(x: Tensor, w: Tensor) -> Tensor:
    return F.prelu(torch.einsum("btc,cd->tdb", x, w), w[0, :1])


def distances(x: Tensor, w: Tensor) -> Tensor:
    hidden = (x @ w).transpose(0, 1)
    return F.pairwise_distance(hidden, x.transpose(0, 1), keepdim=True) * hidden


MAKES: dict[str, Make] = {
    "prelu": turned,
    "views of prelu": lambda x, w: turned(x, w)[1:].transpose(1, 2),
    "prelu of prelu": lambda x, w: F.prelu(turned(x, w).transpose(1, 2), w[0, :1]),
    "gru_cell": gru_cell,
    "lstm_cell": lstm_cell,
    "einsum": of_an_einsum,
    "distances": distances,
}


def normal_of_a_part(h: Tensor) -> Tensor:
    """Draw for memory with gaps, which torch fills one by one and not in blocks."""
    noise = torch.zeros_like(h)
    dim = next(dim for dim, size in enumerate(h.shape) if 2 < size < ROWS)
    noise.narrow(dim, 1, 2).normal_()
    return h + noise


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda h: F.dropout(h, 0.5),
    "dropout_": lambda h: F.dropout(h * 1, 0.5, inplace=True),
    "alpha_dropout": lambda h: F.alpha_dropout(h, 0.5, training=True),
    "rand_like": lambda h: h * torch.rand_like(h),
    "randn_like": lambda h: h + torch.randn_like(h),
    "normal_ of a part": normal_of_a_part,
    "bernoulli": lambda h: h * torch.bernoulli(h.detach().sigmoid()),
}


def story_of(make: Make, draw: Callable[[Tensor], Tensor]) -> Callable[[Lazy], Any]:
    def story(lazy: Lazy) -> Any:
        torch.manual_seed(2)
        w = torch.randn(6, 6, dtype=F64, requires_grad=True)
        x = lazy(torch.randn(ROWS, 4, 6, dtype=F64))
        loss = draw(make(x, w)).square().mean()
        loss.backward()
        return loss, w.grad, torch.rand(2)

    return story


@pytest.mark.rotated("chunks")
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("make", MAKES)
def test_chunks_draw_what_eager_draws(make: str, draw: str, chunks: int) -> None:
    assert_same_story(story_of(MAKES[make], DRAWS[draw]), chunks)


DERIVED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "turned": lambda q, h: (q * h).sin().mean(),
    "turned back": lambda q, h: (q.t().tanh() * h.t()).pow(2).sum(),
    "alone": lambda q, h: q.sin().mean(),
    "turned back alone": lambda q, h: q.t().tanh().pow(2).mean(),
    "by a weight": lambda q, h: (q @ h[:4, :4].detach().sum(0)).exp().sum(),
}


@pytest.mark.rotated("chunks")
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("loss", DERIVED)
@pytest.mark.parametrize("is_read", [False, True])
@pytest.mark.parametrize("is_turned", [False, True])
def test_a_gradient_lies_as_in_eager(
    is_turned: bool, is_read: bool, loss: str, chunks: int
) -> None:
    """What is drawn for it afterwards lands where eager puts it."""

    def story(lazy: Lazy) -> Any:
        w = torch.randn(4, 4, dtype=F64, requires_grad=True)
        h = lazy(torch.randn(ROWS, 4, dtype=F64)) @ w
        q = (h.t().contiguous().t() if is_turned else h * 1).detach().requires_grad_()
        (slope,) = torch.autograd.grad(DERIVED[loss](q, h), q, create_graph=True)
        total = slope.sum().item() if is_read else 0.0
        strides = slope.detach().stride() if chunks < ROWS else None  # of one row: any
        return total, strides, torch.rand_like(slope.detach()), F.dropout(slope, 0.5)

    want, _ = tell(story, eager)
    with koila.config(chunks=chunks):
        got, _ = tell(story, koila.lazy)
    assert_seen(got, want, loss, exact_bits=False)


@pytest.mark.parametrize("draw", ["dropout", "dropout_", "rand_like"])
def test_what_is_not_found_runs_whole(draw: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the same draw then too, and the reason is said."""

    def refuse(*_: Any) -> Tensor:
        raise RuntimeError("a call does not take stand-ins")

    monkeypatch.setattr(layouts, "_found", refuse)
    story = story_of(turned, DRAWS[draw])
    with koila.config(chunks=3):
        lazies = story(lambda x: koila.lazy(x, batch=0))
    for got, want in zip(lazies, story(lambda x: x), strict=True):
        assert_close(got.detach(), want.detach(), draw)
    report = koila.report().programs[-1]
    assert report.n_chunks == 1
    assert "how the memory lies that it draws for" in report.why


def test_each_call_is_run_alone_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a long chain each layout follows from that of the call before, without recursion."""
    calls, found = [], layouts._found

    def counted(value: int, known: Any) -> Any:
        calls.append(value)
        return found(value, known)

    monkeypatch.setattr(layouts, "_found", counted)

    def story(lazy: Lazy) -> Any:
        calls.clear()
        w = torch.full((1,), 0.5, dtype=F64, requires_grad=True)
        h = lazy(torch.linspace(-1, 1, ROWS * 6, dtype=F64).view(ROWS, 6)).t()
        for i in range(600):
            h = F.prelu(h, w)
            h = F.dropout(h, 0.01) if i % 100 == 99 else h
        h.sum().backward()
        return w.grad

    assert_same_story(story, 3)
    assert len(calls) == len(set(calls)) and 600 <= len(calls) <= 606


def test_the_generator_stays_where_it_was() -> None:
    """A call that draws is run alone too, to find its layout."""
    with koila.config(chunks=3):
        x = koila.lazy(torch.randn(ROWS, 4, 6, dtype=F64), batch=0)
        drawn = torch.rand_like(F.prelu(x.transpose(0, 1), torch.ones(1, dtype=F64)))
        before = torch.default_generator.get_state()
        value = _core.id(drawn)
        assert value is not None
        assert layouts.settled(value).strides == (6, 24, 1)
        assert torch.equal(torch.default_generator.get_state(), before)


def found_and_given(op: Any, n_samples: int) -> list[str]:
    """Return a text for each result of an op whose layout is found out, and is not torch's."""
    wrong, samples = [], op.sample_inputs_func(op, "cpu", F64, requires_grad=False)
    variants = opcalls.VARIANTS.values()
    for sample, (first, others) in itertools.product(
        itertools.islice(samples, n_samples), variants
    ):
        if not isinstance(sample.input, Tensor):
            continue
        given = opcalls.changed(sample.input, first)
        args = opcalls.changed((sample.args, sample.kwargs), others)
        for dim in (dim for dim, size in enumerate(given.shape) if size >= 3):
            with contextlib.suppress(RuntimeError, TypeError, ValueError, IndexError):
                want = op.op(given, *args[0], **args[1])
                got = op.op(koila.lazy(given, batch=dim), *args[0], **args[1])
                wrong += differing(want, got)
            _core.abandon()
    return wrong


def differing(want: Any, got: Any) -> list[str]:
    wrong = []
    leaves = map(pytree.tree_leaves, (want, got))
    for whole, lazy in zip(*leaves, strict=True):
        value = _core.id(lazy) if isinstance(lazy, koila.LazyTensor) else None
        if value is None or Info.of(value).strides is not None or Info.of(value).place is None:
            continue
        found = layouts.settled(value).strides
        dense = rows.dense_strides(whole.shape, whole.stride())
        step = 1 if dense == whole.stride() else 2
        strides = zip(found or (), dense, whole.shape, strict=False)
        if found is None or any(one != step * other and size > 1 for one, other, size in strides):
            wrong.append(f"{found}, and is {whole.stride()}, {tuple(whole.shape)}")
    return wrong


@pytest.mark.rotated
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op", op_db, ids=lambda op: op.formatted_name)
def test_op(op: Any) -> None:
    if F64 in op.dtypes and "jiterator" not in op.name:
        assert not found_and_given(op, fewer(20, 2))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["nn.functional.prelu", "nn.functional.rrelu", "dist", "einsum"])
def test_op_each_day(name: str) -> None:
    (op, *_) = (op for op in op_db if op.name == name)
    assert not found_and_given(op, 10)
