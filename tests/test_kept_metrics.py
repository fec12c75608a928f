# SPDX-License-Identifier: Apache-2.0
"""Metrics that a training loop keeps, and reads at its end: late steps cost what early ones do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import koila
from chunked import split
from frames import frames_of
from koila import _core
from oracle import Lazy, assert_same_story
from stories import N_ROWS, each_split_further

F64 = torch.float64
Kept = list[Any]


def linear(n_in: int, n_out: int) -> nn.Linear:
    return nn.Linear(n_in, n_out, dtype=F64)


def accuracy(kept: Kept, out: Tensor, loss: Tensor, y: Tensor) -> None:
    kept.append((out.argmax(1) == y).to(F64).mean())


def with_a_graph(kept: Kept, out: Tensor, loss: Tensor, y: Tensor) -> None:
    kept.append(out.softmax(1).amax(1).mean())


def of_two_values(kept: Kept, out: Tensor, loss: Tensor, y: Tensor) -> None:
    kept.append({"loss": loss, "ratio": loss / out.norm()})


def outputs(kept: Kept, out: Tensor, loss: Tensor, y: Tensor) -> None:
    kept.append(out * 2)


def sum_of_losses(kept: Kept, out: Tensor, loss: Tensor, y: Tensor) -> None:
    kept[:] = [kept[0] + loss if kept else loss]


def moving_average(kept: Kept, out: Tensor, loss: Tensor, y: Tensor) -> None:
    kept[:] = [0.9 * kept[0] + 0.1 * loss if kept else loss]


METRICS = [accuracy, with_a_graph, of_two_values, outputs, sum_of_losses, moving_average]
LOOPS = ["optimizer", "by hand", "one batch"]
WHEN = ["before backward", "after backward", "after the step"]


def _steps(lazy: Lazy, metric: Callable[..., None], loop: str, when: str) -> Iterator[Any]:
    """Train. Yield after each step its prediction, how many values the tape had before it, and what
    was kept."""
    torch.manual_seed(0)
    model, kept = nn.Sequential(linear(6, 8), nn.Tanh(), linear(8, 4)), Kept()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batch = torch.randn(N_ROWS, 6, dtype=F64), torch.randint(0, 4, (N_ROWS,))
    given = lazy(*batch)
    while True:
        x, y = given if loop == "one batch" else lazy(*batch)
        out = model(x)
        n_before = _core.id(out) or 0 if lazy is koila.lazy else 0
        loss = F.cross_entropy(out, y)
        for moment in WHEN:
            if when == moment:
                metric(kept, out, loss, y)
            if moment == "before backward":
                model.zero_grad()
                loss.backward()
            elif moment == "after backward" and loop == "by hand":
                with torch.no_grad():
                    for parameter in model.parameters():
                        assert parameter.grad is not None
                        parameter -= 0.1 * parameter.grad
            elif moment == "after backward":
                optimizer.step()
        yield n_before, kept, list(model.parameters())


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("when", WHEN)
def test_steps_do_not_grow(metric: Callable[..., None], loop: str, when: str) -> None:
    """Neither the values on the tape nor the work in Python grow with what is kept."""
    with split(3):
        steps = _steps(koila.lazy, metric, loop, when)
        sizes = [next(steps)[0] for _ in range(6)]
        n_early = frames_of(lambda: next(steps))
        sizes += [next(steps)[0] for _ in range(12)]
        n_late = frames_of(lambda: next(steps))
    assert max(sizes[6:]) <= max(sizes[:6])
    assert n_late <= n_early


@pytest.mark.rotated("chunks")
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("loop", ["optimizer", "by hand"])
@pytest.mark.parametrize("when", WHEN)
@each_split_further
def test_numbers(metric: Callable[..., None], loop: str, when: str, chunks: int | None) -> None:
    def story(lazy: Lazy) -> Any:
        steps = _steps(lazy, metric, loop, when)
        for _ in range(4):
            _, kept, parameters = next(steps)
        return kept, parameters

    assert_same_story(story, chunks)


@each_split_further
def test_what_is_detached_keeps_its_graph(chunks: int | None) -> None:
    """A value that is computed from a number of a freed graph is differentiated steps later, where
    no gradient goes to that graph."""

    def story(lazy: Lazy) -> Any:
        model, first, second = linear(6, 8), linear(8, 4), linear(8, 4)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        x = lazy(torch.randn(N_ROWS, 6, dtype=F64))
        h = model(x)
        loss, other = h.pow(2).mean(), first(h.detach()).pow(2).mean()
        loss.backward()
        late = second(h.detach()).pow(2).mean()
        for _ in range(3):
            optimizer.step()
            lazy(torch.randn(N_ROWS, 6, dtype=F64))
        other.backward()
        late.backward()
        return model.weight.grad, first.weight.grad, second.weight.grad

    assert_same_story(story, chunks)


@each_split_further
def test_a_prediction_becomes_a_leaf(chunks: int | None) -> None:
    """`out.detach_().requires_grad_()` after its backward: nothing that reads it leads to a freed
    graph, however many steps end."""

    def story(lazy: Lazy) -> Any:
        model = linear(6, 4)
        weight = torch.randn(4, dtype=F64, requires_grad=True)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        x = lazy(torch.randn(N_ROWS, 6, dtype=F64))
        out = model(x)
        out.pow(2).mean().backward()
        out.detach_().requires_grad_()
        loss = (out.softmax(1) * weight).sum()
        for _ in range(3):
            optimizer.step()
            lazy(torch.randn(N_ROWS, 6, dtype=F64))
        loss.backward()
        return out.grad, weight.grad

    assert_same_story(story, chunks)


@pytest.mark.parametrize("when", WHEN)
def test_a_backward_of_what_is_kept_is_refused(when: str) -> None:
    """As in eager, which has freed the graph."""
    with split(3):
        steps = _steps(koila.lazy, with_a_graph, "optimizer", when)
        for _ in range(3):
            _, kept, _ = next(steps)
    for one in kept:
        assert one.requires_grad
        with pytest.raises(RuntimeError, match=r"second time|its step is over"):
            one.backward()
