# SPDX-License-Identifier: Apache-2.0
"""Scripts that put functions of their own in the place of torch's, as libraries that quantize, log
or measure layers do.

Torch's function, which theirs calls, names itself by its name in its module when it passes a call
on: so it names theirs, and that must not run twice.
"""

from __future__ import annotations

import functools
import unittest.mock
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oracle import Lazy, assert_same_story, gradients
from stories import each_split_further, make, rows

Change = Callable[[Any], Any]

#: Where a function is, its name, and what a script does with its result.
REPLACED: dict[str, tuple[Any, str, Change]] = {
    "relu": (F, "relu", lambda out: out * 2),
    "softmax": (F, "softmax", lambda out: out * 0.5 + 0.1),
    "dropout": (F, "dropout", lambda out: out * 1.5),
    "layer_norm": (F, "layer_norm", lambda out: out + 1),
    "batch_norm": (F, "batch_norm", lambda out: out * 3),
    "max_pool1d": (F, "max_pool1d", lambda out: out * 2),
    "cross_entropy": (F, "cross_entropy", lambda out: out.sqrt()),
    "gelu": (F, "gelu", lambda out: out * 2),
    "linear": (F, "linear", lambda out: out * 2),
    "normalize": (F, "normalize", lambda out: out * 2),
    "einsum": (torch.functional, "einsum", lambda out: out * 2),
    "split": (Tensor, "split", lambda out: tuple(part * 2 for part in out)),
    "norm": (Tensor, "norm", lambda out: out * 2),
    "__rsub__": (Tensor, "__rsub__", lambda out: out * 2),
}


class Net(nn.Module):
    """A net that calls all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.norm = nn.Linear(6, 8), nn.Linear(4, 5), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        h = F.layer_norm(F.relu(self.norm(self.first(x))), (8,))
        h = F.dropout(F.softmax(h, -1) + F.gelu(h), 0.3)
        h = F.max_pool1d(h[:, None], 2)[:, 0]
        h = torch.functional.einsum("bi,ij->bj", h, torch.eye(4, dtype=h.dtype))
        first, second = h.split(2, 1)
        h = F.normalize(torch.cat([first, 1 - second], 1), dim=1)
        out: Tensor = self.last(h) / (h.norm(dim=1, keepdim=True) + 1)
        return out


def replacing(name: str, seen: list[str]) -> Any:
    """The script's function, in place of torch's in a block."""
    owner, attribute, change = REPLACED[name]
    own = getattr(owner, attribute)

    @functools.wraps(own)
    def mine(*args: Any, **kwargs: Any) -> Any:
        seen.append(name)
        return change(own(*args, **kwargs))

    return unittest.mock.patch.object(owner, attribute, mine)


@pytest.mark.rotated("chunks")
@each_split_further
@pytest.mark.parametrize("name", sorted(REPLACED))
def test_equals_eager(name: str, chunks: int | None) -> None:
    """Its result is changed once, and the call is counted once; it is torch's own again after the
    second step's forward."""

    def story(lazy: Lazy) -> Any:
        net, seen, losses = Net().double(), [], []
        for _ in range(2):
            x, y = lazy(rows(6), torch.randint(0, 5, (11,)))
            with replacing(name, seen):
                loss = F.cross_entropy(net(x), y)
            loss.backward()
            losses.append(loss.detach())
        return losses, seen, gradients(net)

    assert_same_story(story, chunks)


@each_split_further
def test_one_that_calls_another(chunks: int | None) -> None:
    """As where scores are computed by another kernel: torch's function is not called."""

    def story(lazy: Lazy) -> Any:
        model, x, y = make()
        x, y = lazy(x, y)
        with unittest.mock.patch.object(F, "relu", lambda a, inplace=False: F.silu(a) * 2):
            loss = F.cross_entropy(F.relu(model(x)), y)
        loss.backward()
        return loss.detach(), gradients(model)

    assert_same_story(story, chunks)


@each_split_further
def test_backward_that_is_watched(chunks: int | None) -> None:
    def story(lazy: Lazy) -> Any:
        model, x, y = make()
        x, y = lazy(x, y)
        calls: list[int] = []
        own = Tensor.backward

        def watched(self: Tensor, *args: Any, **kwargs: Any) -> None:
            calls.append(self.dim())
            own(self, *args, **kwargs)

        with unittest.mock.patch.object(Tensor, "backward", watched):
            F.cross_entropy(model(x), y).backward()
        return calls, gradients(model)

    assert_same_story(story, chunks)
