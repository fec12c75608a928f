# SPDX-License-Identifier: Apache-2.0
"""Predictions of one model that a script keeps and does not read while it trains another model.
Their calls stay pending; those of the steps after them must not stay with them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import koila
from chunked import split
from koila import _core
from oracle import Lazy, assert_same_story
from stories import N_ROWS, each_split_further

F64 = torch.float64
KINDS = "plain", "normalized", "dropout", "array", "written", "clipped"
WHEN = "before", "between", "after"
each_kind = pytest.mark.parametrize("kind", KINDS)
each_time = pytest.mark.parametrize("when", WHEN)


def _n_values() -> int:
    """Return the number of values on this thread's tape."""
    n = 0
    with contextlib.suppress(IndexError):
        while True:
            _core.value(n)
            n += 1
    return n


def _model(kind: str) -> nn.Sequential:
    first, last = nn.Linear(6, 8), nn.Linear(8, 4)
    more = {"normalized": [nn.BatchNorm1d(8)], "dropout": [nn.Dropout(0.5)]}.get(kind, [])
    return nn.Sequential(first, *more, nn.Tanh(), last).to(F64)


def _batch(kind: str) -> tuple[Tensor, Tensor]:
    x, y = torch.randn(N_ROWS, 6, dtype=F64), torch.randint(0, 4, (N_ROWS,))
    return (torch.from_numpy(x.numpy().copy()), y) if kind == "array" else (x, y)


def _steps(lazy: Lazy, kind: str, when: str, n_kept: int) -> Iterator[tuple[Any, ...]]:
    """Train a model, and keep `n_kept` predictions of another one. Yield after each step what a
    script can hold then."""
    torch.manual_seed(0)
    model, other, kept = _model(kind), _model(kind), list[Tensor]()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    while True:
        x, y = lazy(*_batch(kind))

        def keep(moment: str, x: Tensor = x) -> None:
            if moment == when and len(kept) < n_kept:
                kept.append(other(x))

        keep("before")
        out = model(x)
        if kind == "written":
            out = out * 2
            out[:, 0] += 1
        keep("between")
        loss = F.cross_entropy(out, y)
        optimizer.zero_grad()
        loss.backward()
        if kind == "clipped":
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        keep("after")
        yield kept, model, other, x, out, loss


@each_kind
@each_time
def test_steps_do_not_grow(kind: str, when: str) -> None:
    """The calls of later steps leave the tape, although those of a prediction before them wait."""
    with split(3):
        steps, sizes = _steps(koila.lazy, kind, when, 1), []
        for _ in range(12):
            next(steps)
            sizes.append(_n_values())
    assert sizes[0] > 0
    assert sizes[2:] == [sizes[2]] * 10


@each_time
def test_a_step_adds_only_its_prediction(when: str) -> None:
    with split(3):
        steps, sizes = _steps(koila.lazy, "plain", when, 100), []
        for _ in range(8):
            held = next(steps)
            sizes.append(_n_values())
        del held
    grown = {after - before for before, after in itertools.pairwise(sizes[2:])}
    assert grown == {11 if when == "between" else 4}  # "between", calls of the model are before it


@pytest.mark.rotated("chunks")
@each_kind
@each_time
@each_split_further
def test_numbers(kind: str, when: str, chunks: int | None) -> None:
    """The numbers of the predictions, the values that the steps leave, and the gradients of a loss
    over both are those of eager."""

    def story(lazy: Lazy) -> Any:
        steps = _steps(lazy, kind, when, 2)
        for _ in range(4):
            kept, model, other, x, out, loss = next(steps)
        seen = [out.detach() * 2, loss.detach(), x[:, 1:] + 1]
        together = (kept[0].sum(1) + out.detach().sum(1)).square().mean() + kept[1].sum()
        other.zero_grad()
        together.backward()
        kept_numbers = [one.detach() for one in kept]
        return (
            seen,
            kept_numbers,
            together.detach(),
            list(other.parameters()),
            list(model.parameters()),
            [*other.buffers(), *model.buffers()],
        )

    assert_same_story(story, chunks)


@each_split_further
def test_writes_to_what_the_last_step_left(chunks: int | None) -> None:
    """A value whose call has left the tape is written while a prediction waits."""

    def story(lazy: Lazy) -> Any:
        steps = _steps(lazy, "plain", "before", 1)
        for _ in range(3):
            kept, _, other, x, out, _ = next(steps)
        number = out.detach()
        view = number[:, 0]
        number.mul_(2)
        view.add_(1)
        x[:, 0] = 0  # the prediction of the first step read another batch
        loss_of_kept = (kept[0] + number).square().mean()
        loss_of_kept.backward()
        return number, view, x + 0, loss_of_kept.detach(), list(other.parameters())

    assert_same_story(story, chunks)


@pytest.mark.parametrize("is_written", [False, True])
@each_split_further
def test_one_batch_for_all_steps(chunks: int | None, is_written: bool) -> None:
    """The prediction and the steps read, view and write the same tensors."""

    def story(lazy: Lazy) -> Any:
        model, other = _model("plain"), _model("plain")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        batch, y = _batch("plain")
        x, y = lazy(batch, y)
        held = x.sum(1, keepdim=True) * other[0].weight[0]  # its backward reads no x
        for _ in range(3):
            optimizer.zero_grad()
            if is_written:
                x[:, 0] *= 2
            columns = x[:, :6]
            out = model(columns) + F.linear(columns, other[0].weight)[:, :4].detach()
            F.cross_entropy(out, y).backward()
            optimizer.step()
        (held.sum(1) * out.detach().sum(1) + columns.sum(1)).mean().backward()
        return held.detach(), columns + 0, list(other.parameters()), list(model.parameters())

    assert_same_story(story, chunks)


@each_split_further
def test_a_graph_that_is_retained_waits_too(chunks: int | None) -> None:
    """A second backward finds the calls that the first one left pending."""

    def story(lazy: Lazy) -> Any:
        model, other = _model("plain"), _model("plain")
        found = []
        for _ in range(3):
            x, y = lazy(*_batch("plain"))
            held = other(x)
            loss = F.cross_entropy(model(x), y)
            loss.backward(retain_graph=True)
            (loss * 2).backward()
            found.append(loss.detach())
        held.mean().backward()
        return found, list(other.parameters()), list(model.parameters())

    assert_same_story(story, chunks)
