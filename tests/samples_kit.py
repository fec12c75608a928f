# SPDX-License-Identifier: Apache-2.0
"""How samples are written: a call, and tensors in a few words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

nan, inf = float("nan"), float("inf")


class Sample(NamedTuple):
    """One call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def call(*args: Any, **kwargs: Any) -> Sample:
    return Sample(args, kwargs)


def f(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Numbers that need a gradient; not a leaf, so that they may be written."""
    return torch.randn(shape, dtype=dtype, requires_grad=True) * 1.0


def p(*shape: int) -> torch.Tensor:
    """Numbers within (0, 1)."""
    return torch.rand(shape, dtype=torch.float64, requires_grad=True) * 0.8 + 0.1


def i(*shape: int, high: int = 4) -> torch.Tensor:
    return torch.randint(0, high, shape)


def b(*shape: int) -> torch.Tensor:
    return torch.rand(shape) > 0.5


def each(names: str, make: Callable[[], list[Sample]]) -> dict[str, Callable[[], list[Sample]]]:
    return dict.fromkeys(names.split(), make)
