# SPDX-License-Identifier: Apache-2.0
"""Record the gradients of values whose gradients were sent back already, to compare both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from koila.basics import engine
from koila.basics.rows import Bounds

Key = tuple[Any, ...]
GATHERED: Key = ("gathered",)  # all chunks, read as one tensor


class _Look(engine.Function):
    """Return tensors unchanged; in backward, record their gradients and send none on."""

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
    """The gradients that the tail finds for one output of the last body, whose seeds were sent back
    already."""

    def __init__(self, seeds: dict[Key, torch.Tensor | None], grid: Sequence[Bounds]) -> None:
        self.seeds = seeds
        self.grid = grid
        self.found: dict[Key, torch.Tensor] = {}

    def __call__(self, keys: list[Key], tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return tensors with the same numbers whose gradients are recorded, by key."""

        def note(gradients: Sequence[torch.Tensor | None]) -> None:
            for key, gradient in zip(keys, gradients, strict=True):
                if gradient is not None:
                    before = self.found.get(key)
                    self.found[key] = gradient if before is None else before + gradient

        with torch.enable_grad():
            leaves = [tensor.detach().requires_grad_() for tensor in tensors]
            watched: Sequence[torch.Tensor] = _Look.apply(note, *leaves)
        return watched

    def is_on(self, key: Key) -> bool:
        """Return whether a gradient was sent for this key. None is sent for a number of terms."""
        return key[0] != "part" or key in self.seeds
