# SPDX-License-Identifier: Apache-2.0
"""What the parts of a program that was cut take when they go back, beside what eager takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import koila
from oracle import Lazy, eager
from profiled import bytes_over_time

ROWS = 2048


class Copied(torch.autograd.Function):
    """What cannot be recorded: a program is cut before it."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Any:
        return tuple(one.clone() for one in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return tuple(one.clone() for one in gradients)


class Once(nn.Module):
    """A cut whose two values are not read any more; one of them the other was made of."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom, self.top = nn.Linear(8, 64), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.bottom(x).chunk(2, -1)
        s = b.tanh()
        p, q = Copied.apply(a * s + a, s)
        return self.top(p * q).pow(2).mean()


class Blocks(nn.Module):
    """Several cuts: the last part is over when those before it go back."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = x.repeat_interleave(3, dim=1)
        for layer in self.layers:
            (h,) = Copied.apply(layer(h).tanh())
        return h.pow(2).mean()


class Ffts(nn.Module):
    """Calls that need the whole batch, at the cuts: their backward is where most is there."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = x.repeat_interleave(8, dim=1)
        for layer in self.layers:
            (low,) = Copied.apply(torch.fft.rfft(h)[:, :8])
            h = torch.nn.functional.gelu(torch.fft.irfft(low, n=64) + layer(h))
        return h.pow(2).mean()


#: Each with the share of eager's peak that it may take. What a body makes for a call on the whole
#: batch is there until that has gone back, though it keeps none of it: that is the last 0.06.
PROGRAMS = {"once": (Once, 0.8), "blocks": (Blocks, 1.0), "ffts": (Ffts, 1.06)}


@pytest.mark.parametrize("name", PROGRAMS)
def test_parts_take_no_more_than_eager(name: str) -> None:
    kind, share = PROGRAMS[name]
    torch.manual_seed(0)
    net = kind().double()
    x = torch.randn(ROWS, 8, dtype=torch.float64)

    def step(lazy: Lazy) -> list[Tensor]:
        net.zero_grad()
        net(lazy(x)).backward()
        return [p.grad for p in net.parameters() if p.grad is not None]

    wanted = [gradient.clone() for gradient in step(eager)]
    with koila.config(chunks=7):
        found = step(koila.lazy)
        for one, other in zip(found, wanted, strict=True):
            assert torch.allclose(one, other, rtol=1e-10, atol=1e-12)
        taken = max(bytes_over_time(lambda: step(koila.lazy)))
    most = max(bytes_over_time(lambda: step(eager)))
    assert taken <= share * most, f"{taken / most:.2f} of {most} bytes"
