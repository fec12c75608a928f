# SPDX-License-Identifier: Apache-2.0
"""Torch's own random calls on plain tensors, while recorded ones wait: they come after those.

Only then do wrappers stand in their places, which let what waits draw first; or while the launcher
asks for what plain calls make (`follow`). At other times torch is as it was, and a script that
draws nothing pays nothing.
"""

from __future__ import annotations

import functools
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional
from torch._ops import OpOverloadPacket

from koila import _core
from koila.basics import table

_OWNERS: tuple[Any, ...] = (torch, torch._VF, torch.Tensor, torch.nn.functional)
# Ops by name: they make a tensor of noise from its sizes, and all but one have no row.
MAKERS = frozenset(("normal", "rand", "randint", "randn"))


def draws(name: str) -> bool:
    """Whether an operator of torch may draw from a generator."""
    packet = getattr(torch.ops.aten, name, None)
    if not isinstance(packet, OpOverloadPacket):
        return False
    overloads = [getattr(packet, overload) for overload in packet.overloads()]
    words = {word.name for overload in overloads for word in overload._schema.arguments}
    if "generator" in words or name.startswith("_"):  # others by that sign are of one device
        return "generator" in words
    is_tagged = any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads)
    return is_tagged or (name in table.ROWS and bool(table.ROWS[name]["draws"]))


_lock = threading.Lock()
_waiting: set[int] = set()  # threads of which a recorded draw waits
_before: Callable[[], None] | None = None
_after: Callable[[torch.Tensor], torch.Tensor] | None = None
_undo: list[tuple[Any, str, Any]] = []
_wrappers: list[tuple[Any, str, Any]] = []
_inherited: list[tuple[Any, str]] = []  # what an owner has of its class, not of its own


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
        return _after(made) if is_maker and _after is not None and "out" not in kwargs else made

    return draw


def wrappers() -> list[tuple[Any, str, Any]]:
    """All of them: owner, name and wrapper. Python functions call those of C, which are enough."""
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


def _bound_within_torch(known: list[tuple[Any, str, Any]]) -> list[tuple[Any, str, Any]]:
    """What torch's own modules took from torch when they were imported."""
    modules = [module for key, module in sys.modules.items() if key.startswith("torch.")]
    return [
        (module, name, wrapper)
        for module in modules
        for _, name, wrapper in known
        if isinstance(module, types.ModuleType)
        and not any(module is owner for owner in _OWNERS)
        and not module.__name__.startswith("torch._C")
        and vars(module).get(name) is wrapper.__wrapped__
    ]


def watch(before: Callable[[], None]) -> None:
    """A draw of this thread waits: from now on a plain one calls `before` first."""
    global _before
    with _lock:
        _before = before
        _waiting.add(threading.get_ident())
        _put_in()


def follow(after: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
    """From now on what a plain call makes of noise is what `after` makes of it; None: no more."""
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
    """No draw of this thread waits."""
    with _lock:
        _waiting.discard(threading.get_ident())
        _waiting.intersection_update(thread.ident for thread in threading.enumerate())
        _put_back()


def unwatch_all() -> None:
    """No draw of any thread waits, and torch's classes are left without a trace."""
    global _after
    with _lock:
        _waiting.clear()
        _after = None
        _put_back()
        for owner, name in _inherited:
            if name in vars(owner):
                delattr(owner, name)


def _put_back() -> None:
    """What an owner only inherits it keeps: to take it away each time would grow its dict anew."""
    if not _waiting and _after is None:
        for owner, name, original in _undo:
            setattr(owner, name, original)
        _undo.clear()
