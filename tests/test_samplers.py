# SPDX-License-Identifier: Apache-2.0
"""Loops without gradients that read no number: what pending calls alone hold must not pile up."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import koila
from allocations import Allocations
from chunked import split
from limits import there
from oracle import Lazy, assert_like, eager, plain

N_ROWS, N_WIDE = 8192, 32
BLOCKS: list[Any] = [torch.no_grad, torch.inference_mode]


def _plain_noise(net: nn.Module, x: Tensor, step: int) -> Tensor:
    return x - 0.1 * net(x) + 0.1 * torch.randn(x.shape)


def _lazy_noise(net: nn.Module, x: Tensor, step: int) -> Tensor:
    return x - 0.1 * net(x) + 0.1 * torch.randn_like(x)


def _time(net: nn.Module, x: Tensor, step: int) -> Tensor:
    return x - 0.1 * net(x + torch.full((len(x), 1), step / 40).expand(-1, x.shape[1]).sin())


SAMPLERS: list[Callable[[nn.Module, Tensor, int], Tensor]] = [_plain_noise, _lazy_noise, _time]
each_sampler = pytest.mark.parametrize("sampler", SAMPLERS)
each_block = pytest.mark.parametrize("block", BLOCKS)


def network(wide: int) -> nn.Module:
    return nn.Sequential(nn.Linear(wide, 2 * wide), nn.Tanh(), nn.Linear(2 * wide, wide)).double()


def sample(sampler: Any, block: Any, lazy: Lazy, n_rows: int, wide: int, steps: int) -> Tensor:
    torch.manual_seed(0)
    net = network(wide)
    with default_double(), block():
        x = lazy(torch.randn(n_rows, wide))
        for step in range(steps):
            x = sampler(net, x, step)
        return x


@contextlib.contextmanager
def default_double() -> Any:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def peak(sampler: Any, block: Any, lazy: Lazy) -> tuple[int, Tensor]:
    memory = Allocations()
    with memory:
        pass
    with memory:
        drawn = plain(sample(sampler, block, lazy, N_ROWS, N_WIDE, 40))
    return memory.peak, drawn


@each_sampler
@each_block
def test_a_sampler_keeps_no_noise_of_earlier_steps(sampler: Any, block: Any) -> None:
    """Its 40 steps were one program, with the noise of each: it needed 80 MiB; beside others that
    take most of the limit."""
    others = torch.ones(2**24)  # 64 MiB
    most, wanted = peak(sampler, block, eager)
    limit = most * 5 // 4
    with koila.config(memory_limit=there() + limit):
        took, got = peak(sampler, block, koila.lazy)
    assert took <= limit, f"{took / 2**20:.1f} MiB, for eager's {most / 2**20:.1f}"
    assert_like([got], [wanted])
    del others


@each_sampler
@pytest.mark.parametrize("chunks", [None, 1, 2, 3, 7, 14])
def test_same_numbers(sampler: Any, chunks: int | None) -> None:
    wanted = plain(sample(sampler, torch.no_grad, eager, 14, 8, 5))
    with split(chunks):
        got = sample(sampler, torch.no_grad, koila.lazy, 14, 8, 5)
    assert_like([plain(got)], [wanted])


def test_what_the_script_holds_runs_nothing() -> None:
    """Neither does what takes less than its results."""
    torch.manual_seed(0)
    x, held = torch.randn(N_ROWS, 128), [torch.randn(N_ROWS, 128) for _ in range(4)]
    with koila.config(memory_limit=there() + 2**26), torch.no_grad():
        h = koila.lazy(x)
        for noise in held:
            h = h + noise
        assert koila.is_lazy(h)
        assert koila._core.real(h) is None
        results = [h * torch.ones(N_ROWS, 128) for _ in range(2)]
        assert all(koila._core.real(one) is None for one in results)


def test_training_runs_nothing_early() -> None:
    """A loss of several passes is one program, whatever it drew."""
    x, net = torch.randn(N_ROWS, N_WIDE).double(), network(N_WIDE)
    with koila.config(memory_limit=there() + 7 * 2**22):
        h = koila.lazy(x)
        for _ in range(12):
            h = h + 0.1 * torch.randn(N_ROWS, N_WIDE).double()
        loss = net(h).square().mean()
        assert koila._core.real(loss) is None
        assert koila._core.real(h) is None
        loss.backward()
    assert koila.report().n_chunks > 1
