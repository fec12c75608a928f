# SPDX-License-Identifier: Apache-2.0
"""What the zoo holds: for each name a training step of a library's own model, a whole loop, or a
script.

No library is imported before an entry of it is built.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

#: Rows of every batch: no multiple of the six chunks' usual sizes.
ROWS = 30


@dataclass(frozen=True)
class Step:
    """A model with its batch and its loss.

    `loss(**batch)` is one forward. Tensors of the batch have the samples in dim 0, unless `dims`
    names another dim for them; None there keeps a tensor plain.
    """

    modules: list[nn.Module]
    batch: Callable[[int], dict[str, Any]]
    loss: Callable[..., Tensor]
    dims: dict[str, int | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Mode:
    """How a training loop is run.

    `lazy` is given every batch; in a plain run it gives it back. `nudge` changes each parameter by
    about one unit in its last place before training: how far results then move is how far rounding
    alone may move them.
    """

    lazy: Callable[[Any], Any]
    is_double: bool
    is_nudged: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.is_double else torch.float32

    def prepare(self, module: Any) -> Any:
        """Give a new module its dtype, and nudge it where that is asked for."""
        module = module.to(self.dtype)
        if self.is_nudged:
            generator = torch.Generator().manual_seed(5)
            with torch.no_grad():
                for parameter in module.parameters():
                    noise = torch.randn(parameter.shape, generator=generator, dtype=self.dtype)
                    parameter.add_(parameter * noise * torch.finfo(self.dtype).eps)
        return module


#: Trains some steps and returns what must be equal, by name.
Loop = Callable[[Mode], dict[str, Tensor]]


@dataclass(frozen=True)
class Entry:
    """One name of the zoo."""

    name: str
    library: str
    build: Callable[[], Step] | None = None
    loop: Loop | None = None
    script: Path | None = None
    tolerance: float = 1e-9


def all_entries() -> dict[str, Entry]:
    """Every entry by its name."""
    from zoo import (
        diffusers_models,
        loops,
        metric_losses,
        scripts,
        timm_models,
        transformers_models,
    )

    made: dict[str, Entry] = {}
    kinds = (transformers_models, timm_models, diffusers_models, metric_losses, loops, scripts)
    for module in kinds:
        for entry in module.entries():
            assert entry.name not in made, entry.name
            made[entry.name] = entry
    return made
