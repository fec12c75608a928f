# SPDX-License-Identifier: Apache-2.0
"""Predictions that a training loop keeps with their graphs, unread, while an optimizer goes on:
late steps cost what early ones do, and each prediction is differentiated with its weights."""

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
from koila.recording import parts
from oracle import Lazy, assert_same_story
from stories import N_ROWS, each_split_further

F64 = torch.float64
Write = Callable[[torch.optim.Optimizer, nn.Linear], None]


def by_optimizer(optimizer: torch.optim.Optimizer, model: nn.Linear) -> None:
    optimizer.step()


@torch.no_grad()
def by_hand(optimizer: torch.optim.Optimizer, model: nn.Linear) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter -= 0.1 * parameter.grad


def through_data(optimizer: torch.optim.Optimizer, model: nn.Linear) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.data.add_(parameter.grad, alpha=-0.1)


WRITES: list[Write] = [by_optimizer, by_hand, through_data]


def _steps(lazy: Lazy, write: Write) -> Iterator[tuple[list[Tensor], nn.Linear]]:
    """Train one layer, whose backward reads no weight. Yield after each step what was kept."""
    torch.manual_seed(0)
    model, kept = nn.Linear(6, 4, dtype=F64), list[Tensor]()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    while True:
        x, y = lazy(torch.randn(N_ROWS, 6, dtype=F64), torch.randint(0, 4, (N_ROWS,)))
        kept.append(model(x).tanh())
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        write(optimizer, model)
        yield kept, model


@pytest.mark.parametrize("write", WRITES)
def test_steps_do_not_grow(write: Write) -> None:
    """A part is looked at again only where what it reads is written."""
    with split(3):
        steps = _steps(koila.lazy, write)
        for _ in range(5):
            next(steps)
        n_early = frames_of(lambda: next(steps))
        for _ in range(15):
            next(steps)
        n_late = frames_of(lambda: next(steps))
    assert n_late <= n_early


@pytest.mark.parametrize("write", WRITES[:2])
@each_split_further
def test_gradients(write: Write, chunks: int | None) -> None:
    """Each prediction keeps the weights that it was made with, whatever was written since."""

    def story(lazy: Lazy) -> Any:
        steps = _steps(lazy, write)
        for _ in range(4):
            kept, model = next(steps)
        model.zero_grad()
        torch.stack([(one * (i + 1)).sum() for i, one in enumerate(kept)]).sum().backward()
        return [one.detach() for one in kept], list(model.parameters())

    assert_same_story(story, chunks)


@pytest.mark.parametrize("n_kept", [0, 3])
def test_parts_that_have_run_backward_depend_on_nothing(n_kept: int) -> None:
    """Also while the script holds what they handed out."""
    with split(3):
        steps = _steps(koila.lazy, by_optimizer)
        for _ in range(4):
            kept, model = next(steps)
        assert len(parts.that_depend_on([model.weight])) == 0  # each reads a copy
        assert len(parts.that_depend_on([_number(one) for one in kept])) == len(kept)
        torch.stack([one.sum() for one in kept[n_kept:]]).sum().backward()
        assert len(parts.that_depend_on([_number(one) for one in kept])) == n_kept


def _number(lazy: Tensor) -> Tensor:
    found = koila._core.real(lazy)  # type: ignore[arg-type]
    assert found is not None
    return found
