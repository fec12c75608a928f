# SPDX-License-Identifier: Apache-2.0
"""What a module does when it is called, beside its parameters and buffers: its mode and hooks.

torch calls the modules of a checkpoint's function once more in backward, as they are by then. koila
repeats recorded calls instead, so it refuses a backward before which one of them changed.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import nn

from koila.basics import lines
from koila.messages.errors import KoilaError


def names_in(code: types.CodeType) -> set[str]:
    """Return the names of globals and attributes that a code object and its inner functions use."""
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return set(code.co_names).union(*map(names_in, inner))


class ModuleState(NamedTuple):
    """A module with its mode and its hooks at a moment."""

    module: nn.Module
    is_training: bool | None  # None: its forward does not read its mode
    hooks: tuple[int, ...]

    def change(self) -> str:
        """Return what changed since, for a message; empty: nothing."""
        module = self.module
        if self.is_training is not None and module.training != self.is_training:
            return f"was set to {'training' if module.training else 'evaluation'}"
        return "" if _hooks_of(module) == self.hooks else "got or lost a hook"


def of(modules: Iterable[nn.Module]) -> list[ModuleState]:
    """Return the state of modules, as it is now."""
    found: list[ModuleState] = []
    for module in modules:
        kind: Any = type(module)
        mode = module.training if _has_modes(kind) else None
        found.append(ModuleState(module, mode, _hooks_of(module)))
    return found


def check(states: Iterable[ModuleState]) -> None:
    """Raise if the state of a module of a checkpoint's function changed since it was taken."""
    for one in states:
        if change := one.change():
            raise KoilaError(
                f"checkpoint: {type(one.module).__name__} in its function {change} between forward "
                f"and backward ({lines.user_line()}), where torch runs that once more; koila runs "
                "it once. Do that after backward, or run it whole: koila.config(chunks=1)"
            )


@functools.cache
def _has_modes(kind: type) -> bool:
    """Return whether the forward of a module class reads `training`."""
    forward = getattr(kind, "forward", None)
    if not isinstance(forward, types.FunctionType):
        return False
    return "training" in names_in(forward.__code__)


def _hooks_of(module: nn.Module) -> tuple[int, ...]:
    """Return the ids of the hooks that a call of a module runs."""
    kinds: Any = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return tuple(key for hooks in kinds for key in hooks)
