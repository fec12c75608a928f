# SPDX-License-Identifier: Apache-2.0
"""Wrap torch's random functions on plain tensors, so that pending recorded calls draw before them.

The wrappers are installed only while a recorded call has yet to draw, or while the launcher wants
to see the noise that plain calls make (`follow`). At other times torch is unchanged.
"""

from __future__ import annotations

import functools
import sys
import threading
import types
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
import torch.nn.functional
from torch._ops import OpOverloadPacket

from koila import _core
from koila.basics import table
from koila.basics.threads import Thread, this_thread

_OWNERS: tuple[Any, ...] = (torch, torch._VF, torch.Tensor, torch.nn.functional)
# Ops by name: functions that make a tensor of noise from its sizes; all but one have no row.
MAKERS = frozenset(("normal", "rand", "randint", "randn"))


def draws(name: str) -> bool:
    """Tell whether an operator of torch may draw from a generator."""
    packet = getattr(torch.ops.aten, name, None)
    if not isinstance(packet, OpOverloadPacket):
        return False
    overloads = [getattr(packet, overload) for overload in packet.overloads()]
    words = {word.name for overload in overloads for word in overload._schema.arguments}
    # Other operators with a leading underscore are kernels of one device.
    if "generator" in words or name.startswith("_"):
        return "generator" in words
    is_tagged = any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads)
    return is_tagged or (name in table.ROWS and bool(table.ROWS[name]["draws"]))


_lock = threading.Lock()
_waiting: WeakSet[Thread] = WeakSet()  # the threads with a recorded call that has yet to draw
_before: Callable[[], None] | None = None  # called before a plain draw
_after: Callable[[torch.Tensor], torch.Tensor] | None = None  # applied to the result of MAKERS
#: The functions of torch that are replaced at present: owner, name, and torch's own function.
_undo: list[tuple[Any, str, Any]] = []
_wrappers: list[tuple[Any, str, Any]] = []
#: Of the wrapped functions, those that the owner inherits: owner and name.
_inherited: list[tuple[Any, str]] = []


def _is_lazy(arguments: Any) -> bool:
    return any(type(argument) is _core.LazyTensor for argument in arguments)


def _wrap(original: Callable[..., Any]) -> Callable[..., Any]:
    is_maker = original.__name__ in MAKERS

    @functools.wraps(original)
    def draw(*args: Any, **kwargs: Any) -> Any:
        if _is_lazy(args) or _is_lazy(kwargs.values()) or _core.is_busy():
            return original(*args, **kwargs)
        if _before is not None and _waiting:
            _before()
        made = original(*args, **kwargs)
        # In a custom function torch's C++ may get it, and needs a tensor.
        is_seen = is_maker and "out" not in kwargs and not _core.set_in_function(None)
        return _after(made) if is_seen and _after is not None else made

    return draw


def wrappers() -> list[tuple[Any, str, Any]]:
    """Return all wrappers as (owner, name, wrapper). Only C functions are wrapped: torch's Python
    functions draw by calling them."""
    if not _wrappers:
        for owner in _OWNERS:
            for name in dir(torch._C._VariableFunctions if owner is torch._VF else owner):
                original: Any = getattr(owner, name, None)
                is_of_c = callable(original) and not hasattr(original, "__code__")
                if is_of_c and not isinstance(original, type) and draws(name):
                    _wrappers.append((owner, name, _wrap(original)))
                    if name not in vars(owner):
                        _inherited.append((owner, name))
        _wrappers.extend(_bound_within_torch([w for w in _wrappers if w[0] is torch]))
    return _wrappers


def _bound_within_torch(bound: list[tuple[Any, str, Any]]) -> list[tuple[Any, str, Any]]:
    """Return wrappers for names that torch's own modules imported from torch."""
    modules = [module for key, module in sys.modules.items() if key.startswith("torch.")]
    return [
        (module, name, wrapper)
        for module in modules
        for _, name, wrapper in bound
        if isinstance(module, types.ModuleType)
        and not any(module is owner for owner in _OWNERS)
        and not module.__name__.startswith("torch._C")
        and vars(module).get(name) is wrapper.__wrapped__
    ]


def watch(before: Callable[[], None]) -> None:
    """Note that a recorded call of this thread has yet to draw: plain draws call `before` first."""
    global _before
    with _lock:
        _before = before
        _waiting.add(this_thread())
        _put_in()


def is_followed() -> bool:
    """Return whether noise is made lazy, as by the launcher."""
    return _after is not None


def follow(after: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
    """Apply `after` to the result of each plain call of MAKERS from now on; None: stop that."""
    global _after
    with _lock:
        _after = after
        if after is not None:
            _put_in()
        else:
            _put_back()


def _put_in() -> None:
    if not _undo:
        _undo.extend((owner, name, getattr(owner, name)) for owner, name, _ in wrappers())
        for owner, name, wrapper in wrappers():
            setattr(owner, name, wrapper)


def unwatch() -> None:
    """Note that all recorded calls of this thread have drawn."""
    with _lock:
        _waiting.discard(this_thread())
        _put_back()


def unwatch_all() -> None:
    """Remove all wrappers, and all attributes that they left on torch's classes."""
    global _after
    with _lock:
        _waiting.clear()
        _after = None
        _put_back()
        for owner, name in _inherited:
            if name in vars(owner):
                delattr(owner, name)


def _put_back() -> None:
    """Remove the wrappers if no thread and no launcher needs them.

    Of an inherited name, the original is set on the owner itself: deleting the attribute each time
    would make the owner's dictionary grow again.
    """
    if not _waiting and _after is None:
        for owner, name, original in _undo:
            setattr(owner, name, original)
        _undo.clear()
