# SPDX-License-Identifier: Apache-2.0
"""Replace attributes of torch, note how to undo it, and wrap functions in the usual ways."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.fx.experimental.proxy_tensor
import torch.utils._device
import torch.utils.checkpoint
from torch.jit import _builtins

from koila import _core
from koila.basics import engine
from koila.planning import left_plain
from koila.reporting import reports

undo: list[tuple[Any, str, Any, bool]] = []
hooks: list[Any] = []
in_c: list[Any] = []  # descriptors whose C functions are replaced
operators: list[Any] = []  # kept alive: TorchScript knows them by id(), which must stay unique


_CONTAINERS = tuple, list, dict
_LAZY = _core.LazyTensor


def holds_lazy(obj: Any) -> bool:
    """Return whether nested arguments hold a lazy. Each call of a compiled function asks."""
    if type(obj) is _LAZY:
        return True
    if isinstance(obj, _CONTAINERS):
        for item in obj.values() if isinstance(obj, dict) else obj:
            if type(item) is _LAZY or (isinstance(item, _CONTAINERS) and holds_lazy(item)):
                return True
    return False


def assign(owner: Any, name: str, value: Any) -> None:
    if owner is torch._C.Generator:
        _core.set_type_attribute(owner, name, value)
    else:
        setattr(owner, name, value)


def replace(owner: Any, name: str, replacement: Any) -> None:
    is_own = name in vars(owner)
    undo.append((owner, name, vars(owner).get(name), is_own))
    # TorchScript looks up the operator of a Python function by the function's id().
    op = _builtins._find_builtin(getattr(owner, name, None))
    if op is not None:
        operators.append(replacement)
        _builtins._register_builtin(replacement, op)
    assign(owner, name, replacement)


def replace_in_c(descriptor: Any, by: Callable[..., Any], is_before: bool = False) -> Any:
    """As `_core.replace`; raise RuntimeError where it is not possible."""
    own = _core.replace(descriptor, by, is_before)
    if own is None:
        raise RuntimeError(f"koila cannot replace {descriptor!r} of this torch")
    in_c.append(descriptor)
    return own


def live_if_lazy(
    original: Callable[..., Any], is_plain: bool, run: Callable[..., Any] = _core.live
) -> Callable[..., Any]:
    """Return `original`, wrapped to run on real tensors if a lazy is among its arguments."""

    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        if holds_lazy(args) or holds_lazy(kwargs):
            return run(original, args, kwargs, is_plain)
        return original(*args, **kwargs)

    return patched


def returning_tensors(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `original`, wrapped so that calls on lazies in it run at once and return tensors."""

    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return engine.call_for_torch(original, *args, **kwargs)

    return patched


def _numbers(obj: Any, what: str) -> Any:
    """Return the object with lazies replaced by their numbers, which a call reads."""
    if type(obj) is _core.LazyTensor:
        number = _core.read(obj)
        left_plain.note_read(what, obj, number)
        return number
    if isinstance(obj, tuple | list) and holds_lazy(obj):
        return [_numbers(item, what) for item in obj]
    return obj


def read_if_lazy(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `original`, which copies its input, wrapped to read lazies."""

    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        if holds_lazy(args) or holds_lazy(kwargs):
            what = f"{reports.name_of(original)}()"
            with reports.Asking(what):
                args = tuple(_numbers(arg, what) for arg in args)
                kwargs = {word: _numbers(arg, what) for word, arg in kwargs.items()}
        return original(*args, **kwargs)

    return patched


def same_if_lazy(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `original`, which returns a tensor itself or converts it, wrapped to record a lazy's
    `to()` instead."""
    live = live_if_lazy(original, True)

    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        is_lazy = len(args) == 1 and type(args[0]) is _core.LazyTensor
        if not is_lazy or not kwargs.keys() <= {"dtype", "device"}:
            return live(*args, **kwargs)
        words = {word: value for word, value in kwargs.items() if value is not None}
        return args[0].to(**words) if words else args[0]

    return patched


def flush_first(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        with reports.Asking(f"{reports.name_of(original)}()"):
            _core.flush()  # nothing recorded before the call may run after it
        return original(*args, **kwargs)

    return patched


def then(original: Callable[..., Any], after: Callable[..., Any]) -> Callable[..., Any]:
    """Return `original`, wrapped to call `after` with the same arguments once it has returned."""

    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        after(*args, **kwargs)
        return result

    return patched


def wrap(
    owner: Any, names: Iterable[str], wrapper: Callable[[Any], Any], *, may_lack: bool = False
) -> None:
    """Replace functions by what `wrapper` makes of each; `may_lack`: those that this torch has."""
    for name in names:
        if not may_lack or hasattr(owner, name):
            replace(owner, name, wrapper(getattr(owner, name)))
