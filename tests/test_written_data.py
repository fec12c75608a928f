# SPDX-License-Identifier: Apache-2.0
"""Writes through x.data to what calls keep for their backward: torch's backward reads what was
written. koila gives the same gradient, where the program is cut or read before it, too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import koila
from oracle import Lazy, eager
from test_bridge import Square

ROWS = 11


def clamp(data: Tensor) -> None:
    data.clamp_(-1, 1)


def view(data: Tensor) -> None:
    data.view(-1)[3:9].mul_(0.1)


def entry(data: Tensor) -> None:
    data[0] = 0.5


KEEPS: dict[str, Callable[[Tensor, nn.Linear], Tensor]] = {
    "linear": lambda c, head: head(c),
    "product": lambda c, head: c * c * head.weight.sum(),
    "exp": lambda c, head: c.exp() * head.weight.sum(),
}
BETWEEN: dict[str, Callable[[Tensor, Tensor, Tensor, Lazy], Tensor]] = {
    "nothing": lambda z, data, y, lazy: z,
    "a mask": lambda z, data, y, lazy: z[y > 0],
    "a read": lambda z, data, y, lazy: z * (1 + 0 * z.sum().item()),
    "a read of the written tensor": lambda z, data, y, lazy: z * (1 + 0 * data.sum().item()),
    "a batch": lambda z, data, y, lazy: (lazy(torch.ones(ROWS, 6)), z)[1],
    "a custom function": lambda z, data, y, lazy: Square.apply(z),  # type: ignore[no-untyped-call]
}


def step(
    keeps: str,
    between: str,
    write: Callable[[Tensor], None],
    is_grad: bool,
    is_read: bool,
    lazy: Lazy,
) -> list[Tensor]:
    torch.manual_seed(0)
    net, head = nn.Linear(6, 4).double(), nn.Linear(4, 4).double()
    x, y = lazy(torch.randn(ROWS, 6).double() * 3), lazy(torch.arange(ROWS) % 3)
    with torch.set_grad_enabled(is_grad):
        h = net(x)
    c = h * 2
    if is_read:
        h.sum().item()
    z = KEEPS[keeps](c, head)
    data = c.data
    write(data)
    loss = BETWEEN[between](z, data, y, lazy).pow(2).sum()
    loss.backward()
    weights = [net.weight, head.weight]
    return [loss.detach() * 1, c.detach() * 1, *(w.grad for w in weights if w.grad is not None)]


@pytest.mark.parametrize("keeps", KEEPS)
@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("write", [clamp, view, entry])
@pytest.mark.parametrize("is_grad", [False, True])
@pytest.mark.parametrize("is_read", [False, True])
def test_gradients(
    keeps: str, between: str, write: Callable[[Tensor], None], is_grad: bool, is_read: bool
) -> None:
    want = step(keeps, between, write, is_grad, is_read, eager)
    # A number that was read without a graph is kept as it is, and a write to it is refused.
    is_refused = is_read and not is_grad and keeps == "linear"
    for chunks in (2, 3, ROWS):
        with koila.config(chunks=chunks):
            if is_refused:
                with pytest.raises(koila.StaleError, match=r"written through \.data"):
                    step(keeps, between, write, is_grad, is_read, koila.lazy)
                continue
            got = step(keeps, between, write, is_grad, is_read, koila.lazy)
        for one, wanted in zip(got, want, strict=True):
            torch.testing.assert_close(one * 1, wanted, rtol=1e-10, atol=1e-12)
