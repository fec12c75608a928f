# SPDX-License-Identifier: Apache-2.0
"""What kernels hold beside operands and results: buffers that no tensor shows, and copies of
operands in another dtype."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import koila
from allocations import Allocations
from koila import _core
from koila.memory.estimates import estimate
from koila.staged.program import Program
from oracle import Lazy, eager
from predictions import predicted_and_taken

ROWS, STEPS, CLASSES, LABELS = 1024, 20, 12, 6
WIDTH = STEPS * CLASSES
INTS = torch.randint(0, CLASSES, (ROWS, WIDTH), dtype=torch.int64)
TARGETS = torch.randint(1, CLASSES, (ROWS, LABELS))
LENGTHS = torch.full((ROWS,), STEPS), torch.full((ROWS,), LABELS)


def _other(h: Tensor) -> torch.dtype:
    return torch.float32 if h.dtype == torch.float64 else torch.float64


def _ctc(h: Tensor, reduction: str, targets: Tensor = TARGETS) -> Tensor:
    log_probs = h.view(-1, STEPS, CLASSES).log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(log_probs, targets, *LENGTHS, reduction=reduction)


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "matrix_exp": lambda h: torch.matrix_exp(h[:, :144].reshape(-1, 12, 12)),
    "ctc_loss mean": lambda h: _ctc(h, "mean"),
    "ctc_loss none": lambda h: _ctc(h, "none"),
    "ctc_loss with targets in one line": lambda h: _ctc(h, "mean", TARGETS.flatten()),
    "multilabel_margin_loss": lambda h: F.multilabel_margin_loss(h, INTS),
    "add": lambda h: h.to(_other(h)) + h,
    "mul": lambda h: h.to(_other(h)).sin() * h,
    "mul by ints": lambda h: h * INTS,
    "add_": lambda h: h.to(_other(h)).clone().add_(h),
    "copy_": lambda h: torch.zeros_like(h, dtype=_other(h)).copy_(h),
}

#: Where it is not within 0.05: all results of calls without a row are taken to be kept; gradients
#: of narrow operands are made in the wide dtype, and cast.
APART = {"matrix_exp": (0.95, 1.06), "mul": (0.92, 1.05)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CALLS)
def test_it_takes_what_is_predicted(name: str, dtype: torch.dtype) -> None:
    predicted, taken = predicted_and_taken(CALLS[name], ROWS, WIDTH, dtype)
    share, (least, most) = predicted / taken, APART.get(name, (0.95, 1.05))
    assert least <= share <= most, f"{share:.3f} of {taken} bytes"


@pytest.mark.parametrize("name", ["add", "mul", "add_", "eq", "maximum"])
def test_operands_of_another_dtype_are_copied(name: str) -> None:
    """Also in a program without a graph, where nothing else is there."""
    x, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH, dtype=torch.float64)

    def result_of(lazy: Lazy) -> Tensor:
        one, other = lazy(x), lazy(y)
        result: Tensor = getattr(one * 1 if name == "add_" else one, name)(other)
        return result

    result_of(eager)
    memory = Allocations()
    with memory:
        pass
    with memory:
        made = result_of(eager)
    with koila.config(memory_limit=2**40):
        kept = result_of(koila.lazy)
        predicted = estimate(Program([]), False).whole
        _core.forget()
    del made, kept
    share = predicted / memory.peak
    assert 0.95 <= share <= 1.05, f"{share:.3f} of {memory.peak} bytes"
