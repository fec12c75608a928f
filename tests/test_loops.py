# SPDX-License-Identifier: Apache-2.0
"""Loops with more than one loss, pass or optimizer to a batch: what is lazy stays lazy after a
backward, a read, a detach and an optimizer's step, though what came before fitted and ran whole."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import koila
from allocations import Allocations
from chunked import split
from limits import there
from loops import LOOPS, N_STEPS, Loop, seen_of
from oracle import Lazy, eager, plain

N_ROWS = 14
Make = Callable[[int, int], Loop]
each_loop = pytest.mark.parametrize("make", LOOPS, ids=lambda make: make.__name__)


@pytest.fixture
def double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def train(make: Make, lazy: Lazy) -> list[Tensor]:
    torch.manual_seed(0)
    loop = make(N_ROWS, 16)
    losses = [plain(loss) for number in range(N_STEPS) for loss in loop.step(lazy, number)]
    return losses + [seen.clone() for seen in seen_of(loop)]


@pytest.mark.rotated("chunks")
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("chunks", [None, 1, 2, 3, 7, N_ROWS])
@each_loop
def test_same_numbers(make: Make, chunks: int | None) -> None:
    """Parameters, losses and what optimizers keep, after some steps."""
    wanted = train(make, eager)
    with split(chunks):
        got = train(make, koila.lazy)
    is_exact = chunks in (None, 1)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(
            one, other, rtol=0 if is_exact else 1e-10, atol=0 if is_exact else 1e-12
        )


def peak(make: Make, lazy: Lazy) -> int:
    """The most bytes that a loop's steps take, beyond the model and what its optimizers keep."""
    torch.manual_seed(0)
    loop, most = make(8192, 128), 0
    for number in range(2):
        memory = Allocations()
        with memory:
            pass
        with memory:
            loop.step(lazy, number)
        most = max(most, memory.peak)
    return most


@each_loop
def test_half_of_eagers_memory(make: Make) -> None:
    """Some of what these loops run fits whole; what is made of that afterwards does not."""
    wanted = peak(make, eager)
    kept = sum(seen.nbytes for seen in seen_of(make(8192, 128)))
    gc.collect()
    with koila.config(memory_limit=wanted // 2 + kept + there()):  # of tests before, too
        took = peak(make, koila.lazy)
    assert took <= wanted // 2, f"{took / 2**20:.1f} MiB, for eager's {wanted / 2**20:.1f}"


def _after_backward(m: Any, h: Tensor, x: Tensor) -> Tensor:
    m["probe"](h.detach()).mean().backward()
    return h


def _after_retaining(m: Any, h: Tensor, x: Tensor) -> Tensor:
    m["probe"](h).mean().backward(retain_graph=True)
    return h


def _after_two_steps(m: Any, h: Tensor, x: Tensor) -> Tensor:
    for _ in range(2):
        loss = m["probe"](h.detach()).mean()
        loss.backward()
        torch.optim.SGD(m["probe"].parameters(), lr=0.1).step()
    return h.detach()


def _after_a_read(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h if h.mean().item() < 1e6 else h * 2


def _after_a_block(m: Any, h: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        made = m["probe"](h).mean(1, keepdim=True) + h
    m["probe"](x).mean().backward()
    with torch.no_grad():
        return made * 2


def _of_a_number(m: Any, h: Tensor, x: Tensor) -> Tensor:
    """What koila gave out, made lazy once more."""
    m["probe"](h).mean().backward()
    return koila.lazy(h.detach()) if koila.is_lazy(h) else h.detach()


GOES_ON: list[Callable[[Any, Tensor, Tensor], Tensor]] = [
    _after_backward,
    _after_retaining,
    _after_two_steps,
    _after_a_read,
    _after_a_block,
    _of_a_number,
]


@pytest.mark.parametrize("goes_on", GOES_ON)
def test_a_large_net_after_what_fitted(goes_on: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
    """What came before takes little; what is made of it takes most, and runs in chunks."""

    def step(lazy: Lazy) -> tuple[int, list[Tensor | None]]:
        torch.manual_seed(0)
        m = nn.ModuleDict({"body": nn.Linear(8, 8), "probe": nn.Linear(8, 8)})
        m["large"] = nn.Sequential(nn.Linear(8, 512), nn.Tanh(), nn.Linear(512, 1))
        data, memory = torch.randn(4096, 8), Allocations()
        with memory:
            x = lazy(data)
            h = goes_on(m, m["body"](x), x)
        with memory:
            m["large"](h).square().mean().backward()
        return memory.peak, [p.grad for p in m.parameters()]

    most, wanted = step(eager)
    with koila.config(memory_limit=there() + most // 2):
        took, got = step(koila.lazy)
    assert took <= most // 2, f"{took / 2**20:.1f} MiB, for eager's {most / 2**20:.1f}"
    assert koila.report().n_chunks > 1
    torch.testing.assert_close(got, wanted)


def test_hooks_are_given_and_give_plain_tensors() -> None:
    """What a hook makes of a lazy is a gradient for torch, and not recorded."""
    for chunks in (None, 1, 3):
        weight = torch.ones(4, requires_grad=True)
        x = koila.lazy(torch.ones(6, 4))
        with koila.config(chunks=chunks):
            before = x * 2
            before.sum().item()
            weight.register_hook(lambda gradient, before=before: gradient * before.mean())
            h = x * weight
            h.register_hook(lambda gradient, x=x: gradient * (x * 3).mean(0))
            h.sum().backward()
        assert weight.grad is not None
        assert weight.grad.tolist() == [36.0] * 4
