# SPDX-License-Identifier: Apache-2.0
"""Where torch takes a tensor of no dims for a number, it takes a lazy for one: it is read.

torch's argument parser never asks the class of such a tensor. The program goes on waiting.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import koila
from koila import _core
from oracle import assert_bits, assert_close, eager, plain, split
from outcome import weights

N_ROWS = 12

Call = Callable[[Tensor, Tensor, Tensor, Tensor], Any]


def assigned(h: Tensor, index: Any) -> Tensor:
    """Return a copy with zeros at an index."""
    copy = h.clone()
    copy[index] = 0.0
    return copy


#: name: what is made of a step `h` (12 x 6), of 2 (`n`) and 0.5 (`p`) as lazies, and of labels
CASES: dict[str, Call] = {
    "arange": lambda h, n, p, y: torch.arange(n),
    "arange of a float": lambda h, n, p, y: torch.arange(p, 3, n),
    "empty": lambda h, n, p, y: torch.empty(n, n).fill_(1),
    "eye": lambda h, n, p, y: torch.eye(n),
    "full": lambda h, n, p, y: torch.full((2,), n),
    "full of a float": lambda h, n, p, y: torch.full((n, 3), p),
    "full of a bool": lambda h, n, p, y: torch.full((2,), n > 1),
    "linspace": lambda h, n, p, y: torch.linspace(0, p, n),
    "ones": lambda h, n, p, y: torch.ones(n, 3),
    "ones of a list": lambda h, n, p, y: torch.ones([3, n]),
    "zeros": lambda h, n, p, y: torch.zeros(n),
    "tensor": lambda h, n, p, y: torch.tensor([n, 4]),
    "tensor of floats": lambda h, n, p, y: torch.tensor([[p, 4.0], [0.0, n]]),
    "scalar_tensor": lambda h, n, p, y: torch.scalar_tensor(p),
    "range": lambda h, n, p, y: torch.tensor(list(range(n))),
    "tril_indices": lambda h, n, p, y: torch.tril_indices(n, n),
    "randint": lambda h, n, p, y: torch.randint(n, (3,)),
    "randn": lambda h, n, p, y: torch.randn(n, 2),
    "randperm": lambda h, n, p, y: torch.randperm(n),
    "one_hot": lambda h, n, p, y: F.one_hot(y, n + 2),
    "chunk": lambda h, n, p, y: torch.chunk(h, n, 1),
    "chunk, a method": lambda h, n, p, y: h.chunk(n, 1),
    "clamp": lambda h, n, p, y: h.clamp(max=p),
    "cumsum": lambda h, n, p, y: h.cumsum(n - 1),
    "dropout": lambda h, n, p, y: F.dropout(h, p),
    "expand": lambda h, n, p, y: h[:, :, None].expand(-1, -1, n),
    "full_like": lambda h, n, p, y: torch.full_like(h, p),
    "getitem": lambda h, n, p, y: h[:, n],
    "getitem of a plain one": lambda h, n, p, y: h[:, torch.tensor(2)],
    "interpolate": lambda h, n, p, y: F.interpolate(h[:, None], size=n),
    "leaky_relu": lambda h, n, p, y: F.leaky_relu(h, p),
    "masked_fill": lambda h, n, p, y: h.masked_fill(h > 0, p),
    "narrow": lambda h, n, p, y: h.narrow(1, n, n),
    "new_full": lambda h, n, p, y: h.new_full((12, n), p),
    "new_zeros": lambda h, n, p, y: h.new_zeros(12, n),
    "pad": lambda h, n, p, y: F.pad(h, (0, n)),
    "plain getitem": lambda h, n, p, y: torch.ones(12, 4)[:, :n],
    "plain view": lambda h, n, p, y: torch.ones(12, 4).view(-1, n),
    "pow": lambda h, n, p, y: h.pow(n),
    "repeat": lambda h, n, p, y: h.repeat(1, n),
    "repeat_interleave": lambda h, n, p, y: h.repeat_interleave(n, 1),
    "reshape": lambda h, n, p, y: torch.reshape(h, (12, n, -1)),
    "roll": lambda h, n, p, y: torch.roll(h, n, 1),
    "roll, a method": lambda h, n, p, y: h.roll(n, 1),
    "select": lambda h, n, p, y: h.select(1, n),
    "setitem": lambda h, n, p, y: assigned(h, (slice(None), slice(None, n))),
    "setitem of an int": lambda h, n, p, y: assigned(h, (slice(None), n)),
    "slice": lambda h, n, p, y: h[:, :n],
    "softmax": lambda h, n, p, y: F.softmax(h, n - 1),
    "split": lambda h, n, p, y: h.split(n, 1),
    "sum": lambda h, n, p, y: h.sum(n - 1),
    "sum of scaled": lambda h, n, p, y: torch.add(h, h, alpha=p) + n,
    "topk": lambda h, n, p, y: h.topk(n, 1)[0],
    "transpose": lambda h, n, p, y: h[:, None].transpose(1, n),
    "tril": lambda h, n, p, y: h.tril(n),
    "unflatten": lambda h, n, p, y: h.unflatten(1, (n, -1)),
    "view": lambda h, n, p, y: h.view(12, n, -1),
}


def step(call: Call, lazy: Callable[..., Any]) -> tuple[list[Tensor], bool]:
    """Return the loss, the gradient and the results of a step; whether its layer ran at once."""
    torch.manual_seed(0)
    weight = weights((5, 6), torch.float64).clone().requires_grad_()
    x, y = lazy(weights((N_ROWS, 5), torch.float64) - 1, torch.arange(N_ROWS) % 3)
    h = (x @ weight).tanh()
    n, p = y.max(), (y * 0 + 0.5).mean()
    result = call(h, n, p, y)
    is_run = koila.is_lazy(h) and _core.real(h) is not None
    parts = list(result) if isinstance(result, tuple | list) else [result]
    loss = h.square().mean()
    for part in parts:
        loss = loss + (part.double() + 0.1).square().mean()
    loss.backward()
    assert weight.grad is not None
    return [plain(value) for value in (loss, weight.grad, *parts)], is_run


@pytest.mark.rotated("chunks")
@pytest.mark.parametrize("chunks", [1, 2, 3, 7, N_ROWS])
@pytest.mark.parametrize("name", CASES)
def test_is_read(name: str, chunks: int) -> None:
    """It has eager's numbers, and the layer before it waits for backward()."""
    wanted, _ = step(CASES[name], eager)
    with split(chunks):
        got, is_run = step(CASES[name], koila.lazy)
    assert not is_run or chunks == 1  # where all fits a read runs it
    assert len(got) == len(wanted)
    for number, (value, want) in enumerate(zip(got, wanted, strict=True)):
        compare = assert_bits if chunks == 1 else assert_close
        compare(value, want, f"number {number}")


#: what torch refuses
REFUSED: dict[str, Call] = {
    "a float as an int": lambda h, n, p, y: h.chunk(p, 1),
    "a float as a size": lambda h, n, p, y: torch.zeros(p, 2),
    "one with a gradient": lambda h, n, p, y: torch.full((2,), h.sum()),
    "one with dims": lambda h, n, p, y: torch.full((2,), y),
    "one with dims as a size": lambda h, n, p, y: torch.zeros(y, 2),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_refuses_is_refused(name: str) -> None:
    """A tensor that is no number to torch raises its error."""
    with pytest.raises(TypeError):
        step(REFUSED[name], eager)
    with pytest.raises(TypeError):
        step(REFUSED[name], koila.lazy)
