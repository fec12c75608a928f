# SPDX-License-Identifier: Apache-2.0
"""Running statistics that calls of several threads move: in the order of the calls, as in eager."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import koila
from koila.basics import config
from oracle import Lazy, assert_same_story, gradients
from stories import each_split_further, rows

Call = Callable[..., Any]


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()


def elsewhere(call: Call, *args: Any) -> Any:
    """Call a function in a thread of its own, which is gone when it returns."""
    chunks = config.get("chunks")

    def there() -> Any:
        with koila.config(chunks=chunks):
            return call(*args)

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(there).result()


def trained(net: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    return elsewhere(net, x), net(x * 2)


def trained_and_read(net: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """The call that came second is the first that runs."""
    first, second = trained(net, x)
    second.sum().item()
    return first, second


def evaluated(net: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    first = elsewhere(net, x)
    second = net.eval()(x * 2)
    second.sum().item()
    net.train()
    return first, second


def evaluated_elsewhere(net: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    first = net(x)
    second = elsewhere(net.eval(), x * 2)
    second.sum().item()
    net.train()
    return first, second


def in_turns(net: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    outs = [elsewhere(net, x * i) if i % 2 else net(x * i) for i in range(1, 5)]
    return outs[0] + outs[3], outs[1] + outs[2]


#: Why what another thread has made is not cut, where this thread's call came first.
PARTLY = "it enters with the graph behind it"


@each_split_further
@pytest.mark.parametrize(
    ("run", "partly"),
    [
        (trained, ""),
        (trained_and_read, ""),
        (evaluated, ""),
        (evaluated_elsewhere, PARTLY),
        (in_turns, PARTLY),
    ],
)
def test_equals_eager(run: Call, partly: str, chunks: int | None) -> None:
    def story(lazy: Lazy) -> Any:
        net, seen = make(), []
        for _ in range(2):
            x, y = lazy(rows(6), torch.randint(0, 3, (11,)))
            first, second = run(net, x)
            loss = F.cross_entropy(first, y) + second.pow(2).mean()
            loss.backward()
            seen.append(loss.detach())
        return seen, net, gradients(net)

    # Which graph is asked first decides in which order two gradients are added.
    assert_same_story(story, chunks, exact_bits=False, partly=partly)
