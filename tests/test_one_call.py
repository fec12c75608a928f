"""One call that was not recorded made a whole program run at once: each, between two layers, is.

A case is a function of a step `h` (12 rows) on the way from the batch to the loss. It gives eager's
loss and gradients in any number of chunks, and no product is computed before backward() is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import koila
from oracle import FlopCounter, assert_bits, assert_close, eager, plain, split
from outcome import weights

N_ROWS = 12

#: name: the call
CASES: dict[str, Callable[[Tensor], Any]] = {
    "a key cache that is empty": lambda h: torch.cat(
        [torch.tensor([]), h.unflatten(1, (2, 3))], -2
    ),
    "concat with an empty": lambda h: torch.concat([h, torch.tensor([], dtype=h.dtype), h], 1),
    "concatenate with an empty": lambda h: torch.concatenate((torch.tensor([]), h), dim=1),
    "cat with an empty along the rows": lambda h: torch.cat([torch.tensor([]), h]),
}


def step(call: Callable[[Tensor], Any], lazy: Callable[..., Any]) -> tuple[list[Tensor], int]:
    """Return the loss and the gradients of a step, and the flops before its backward()."""
    first = weights((5, 6), torch.float64).clone().requires_grad_()
    second = (weights((6,), torch.float64).cumsum(0) / 7).requires_grad_()
    counter = FlopCounter()
    with counter:
        h = (lazy(weights((N_ROWS, 5), torch.float64) - 1) @ first).tanh() * second
        result = call(h)
        parts = result if isinstance(result, tuple | list) else [result]
        loss = h.square().mean()
        for part in parts:
            part = torch.view_as_real(part) if part.is_complex() else part
            loss = loss + (part.double() + 0.3).square().mean()
        n_flops = counter.flops
    loss.backward()
    assert first.grad is not None and second.grad is not None
    return [loss.detach(), first.grad, second.grad], n_flops


@pytest.mark.parametrize("chunks", [1, 2, 3, 7, N_ROWS])
@pytest.mark.parametrize("name", CASES)
def test_is_recorded(name: str, chunks: int) -> None:
    """It has eager's numbers, and the program is cut."""
    wanted, _ = step(CASES[name], eager)
    with split(chunks):
        got, n_flops = step(CASES[name], koila.lazy)
    report = koila.report()
    assert n_flops == 0, "the layer before it ran at once"
    assert report is not None and report.n_chunks == chunks
    for number, (value, want) in enumerate(zip(got, wanted, strict=True)):
        compare = assert_bits if chunks == 1 else assert_close
        compare(plain(value), want, f"number {number}")
