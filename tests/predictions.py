# SPDX-License-Identifier: Apache-2.0
"""What a step is predicted to take, beside what it takes in plain torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import koila
from allocations import Allocations
from koila import _core
from koila.memory.estimates import estimate
from koila.staged.program import Program
from oracle import Lazy, eager


def predicted_and_taken(
    call: Callable[[Tensor], Tensor], rows: int, width: int, dtype: torch.dtype
) -> tuple[float, int]:
    """Return the bytes of a step, predicted and measured: `call` on the activations, of shape
    (rows, width), of one layer."""
    net = nn.Linear(4, width).to(dtype)
    x = torch.randn(rows, 4, dtype=dtype)

    def loss_of(lazy: Lazy) -> Tensor:
        return call(net(lazy(x)).tanh()).sin().sum()

    return of_step(loss_of, net.zero_grad)


def of_step(loss_of: Callable[[Lazy], Tensor], clear: Callable[[], None]) -> tuple[float, int]:
    """Return the bytes of a step, predicted and measured.

    Args:
        loss_of: makes the loss, of inputs that it makes lazy with its argument.
        clear: removes the gradients that a step leaves.
    """
    loss_of(eager).backward()
    clear()
    memory = Allocations()
    with memory:
        pass
    with memory:
        loss_of(eager).backward()
    clear()
    with koila.config(memory_limit=2**40):
        loss = loss_of(koila.lazy)
        predicted = estimate(Program([loss]), True).whole
        _core.forget()
    return predicted, memory.peak
