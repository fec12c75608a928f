# SPDX-License-Identifier: Apache-2.0
"""How attributes of torch are replaced and put back, and what most are replaced by."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.fx.experimental.proxy_tensor
import torch.utils._device
import torch.utils.checkpoint
from torch.jit import _builtins

from koila import _core
from koila.reporting import reports

undo: list[tuple[Any, str, Any, bool]] = []
hooks: list[Any] = []
descriptors: list[Any] = []
operators: list[Any] = []  # what TorchScript knows by its id: another object must not get that


def holds_lazy(obj: Any) -> bool:
    if type(obj) is _core.LazyTensor:
        return True
    if isinstance(obj, tuple | list):
        return any(holds_lazy(item) for item in obj)
    if isinstance(obj, dict):
        return any(holds_lazy(item) for item in obj.values())
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


def live_if_lazy(
    original: Callable[..., Any], is_plain: bool, run: Callable[..., Any] = _core.live
) -> Callable[..., Any]:
    """`original`, run on real tensors where a lazy is among its arguments."""

    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        if holds_lazy(args) or holds_lazy(kwargs):
            return run(original, args, kwargs, is_plain)
        return original(*args, **kwargs)

    return patched


def cut_if_lazy(original: Callable[..., Any]) -> Callable[..., Any]:
    """The same; what waits is cut off before it, where it runs in chunks."""
    return live_if_lazy(original, False, _core.live_with_all)


def _numbers(obj: Any) -> Any:
    """The object with the numbers of lazies in their place."""
    if type(obj) is _core.LazyTensor:
        return _core.read(obj)
    if isinstance(obj, tuple | list) and holds_lazy(obj):
        return [_numbers(item) for item in obj]
    return obj


def read_if_lazy(original: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, which copies the numbers that it is given."""

    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        if holds_lazy(args) or holds_lazy(kwargs):
            with reports.Asking(f"{reports.name_of(original)}()"):
                args = tuple(map(_numbers, args))
                kwargs = {word: _numbers(arg) for word, arg in kwargs.items()}
        return original(*args, **kwargs)

    return patched


def same_if_lazy(original: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, which gives back a tensor as it is, or as its method `to` makes it."""
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
            _core.flush()  # live: nothing recorded before may run after
        return original(*args, **kwargs)

    return patched


def counting(original: Callable[..., Any], step: int) -> Callable[..., Any]:
    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        _core.count_interpreters(step)
        return result

    return patched
