# SPDX-License-Identifier: Apache-2.0
"""Labels that are written before the loss: how many of them count is known before the model runs,
which then runs once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import koila
from oracle import FlopCounter, Lazy, assert_same_story
from stories import N_ROWS

N_WORDS, LENGTH = 11, 9
Write = Callable[[Tensor, Tensor], Tensor]
WRITES: dict[str, Write] = {}


def add(write: Write) -> Write:
    WRITES[write.__name__] = write
    return write


@add
def a_prompt_is_ignored(x: Tensor, y: Tensor) -> Tensor:
    y[:, :5] = -100
    return y


@add
def padding_is_ignored(x: Tensor, y: Tensor) -> Tensor:
    y[y == 3] = -100
    return y


@add
def by_a_mask_of_the_inputs(x: Tensor, y: Tensor) -> Tensor:
    y[x == 3] = -100
    return y


@add
def through_a_view(x: Tensor, y: Tensor) -> Tensor:
    first = y[:, 0]
    first.fill_(-100)
    return y


@add
def a_view_from_before(x: Tensor, y: Tensor) -> Tensor:
    flat = y.view(-1)
    y.masked_fill_(y == 2, -100)
    return flat


@add
def shifted_in_place(x: Tensor, y: Tensor) -> Tensor:
    y[:, :-1] = y[:, 1:].clone()
    y[:, -1] = -100
    return y


@add
def scattered(x: Tensor, y: Tensor) -> Tensor:
    return y.scatter_(1, torch.zeros(len(y), 1, dtype=torch.long), -100)


@add
def into_new_labels(x: Tensor, y: Tensor) -> Tensor:
    labels = torch.full_like(x, -100)
    labels[:, 5:] = y[:, 5:]
    return labels


@add
def written_after_it_was_read(x: Tensor, y: Tensor) -> Tensor:
    z = y + 0
    y[:, :5] = -100
    return torch.where(z == 1, y, z)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.hidden = nn.Embedding(N_WORDS, 8), nn.Linear(8, 8)
        self.scores = nn.Linear(8, N_WORDS)

    def forward(self, tokens: Tensor) -> Any:
        return self.scores(self.hidden(self.table(tokens)).tanh())


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("chunks", [1, 2, 3, 7, N_ROWS])
def test_the_model_runs_once(chunks: int, name: str) -> None:
    passes = []

    def story(lazy: Lazy) -> Any:
        model = Model().double()
        x, y = lazy(*torch.randint(0, N_WORDS, (2, N_ROWS, LENGTH)).unbind())
        y = WRITES[name](x, y.clone())
        with FlopCounter() as counter:
            loss = F.cross_entropy(model(x).view(-1, N_WORDS), y.view(-1), ignore_index=-100)
            loss.backward()
        passes.append(counter.flops)
        if lazy is koila.lazy:
            report = koila.report()
            assert report is not None
            assert report.n_chunks == chunks
        return loss, y, [p.grad for p in model.parameters()]

    assert_same_story(story, chunks)
    assert passes[0] == passes[1]
