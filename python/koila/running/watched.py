# SPDX-License-Identifier: Apache-2.0
"""Gradients that were sent back before the values were there, and those that are found afterwards:
both are noted by value, and compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from koila.basics import engine
from koila.basics.rows import Bounds

Key = tuple[Any, ...]
GATHERED: Key = ("gathered",)  # what is read of all chunks together


class _Look(engine.Function):
    """Hand tensors on as they are, and note the gradients that come back, which end here."""

    @staticmethod
    def forward(ctx: Any, note: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.note = note
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, ...]:
        ctx.note(gradients)
        return (None, *(None for _ in gradients))


class Watch:
    """The gradients of one value that the last body left, whose seeds are sent back already."""

    def __init__(self, seeds: dict[Key, torch.Tensor | None], grid: Sequence[Bounds]) -> None:
        self.seeds = seeds
        self.grid = grid
        self.found: dict[Key, torch.Tensor] = {}

    def __call__(self, keys: list[Key], tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Stand-ins for tensors that are read, each of whose gradients is noted."""

        def note(gradients: Sequence[torch.Tensor | None]) -> None:
            for key, gradient in zip(keys, gradients, strict=True):
                if gradient is not None:
                    known = self.found.get(key)
                    self.found[key] = gradient if known is None else known + gradient

        with torch.enable_grad():
            leaves = [tensor.detach().requires_grad_() for tensor in tensors]
            watched: Sequence[torch.Tensor] = _Look.apply(note, *leaves)
        return watched

    def is_on(self, key: Key) -> bool:
        """Whether a gradient is sent to what is read: to no number of terms."""
        return key[0] != "part" or key in self.seeds
