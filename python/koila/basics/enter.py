# SPDX-License-Identifier: Apache-2.0
"""Enter a Python-level torch function: it runs, and the C-level calls it makes are recorded."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
_entered: dict[Callable[..., Any], Callable[..., Any]] = {}


def _never(*_: Any) -> bool:
    return False


def _without_check(func: types.FunctionType) -> types.FunctionType:
    """A copy of `func` that does not ask whether to dispatch.

    Nor do the functions that it closes over, and the private functions of its module that it
    calls: F.max_pool2d closes over the two functions of which it calls one, and torch.unique's ask
    once more in `_unique_impl`.
    """
    if func in _entered:
        return _entered[func]  # type: ignore[return-value]
    scope = dict(func.__globals__)
    cells = [types.CellType() for _ in func.__closure__ or ()]
    twin = types.FunctionType(
        func.__code__, scope, func.__name__, func.__defaults__, tuple(cells) or None
    )
    twin.__kwdefaults__ = func.__kwdefaults__
    _entered[func] = twin  # before its cells: a function may close over itself
    scope.update(dict.fromkeys(_CHECKS, _never))
    for name in func.__code__.co_names:
        called = scope.get(name)
        if name.startswith("_") and isinstance(called, types.FunctionType):
            scope[name] = _without_check(called)
    for cell, own in zip(cells, func.__closure__ or (), strict=True):
        held = own.cell_contents
        is_plain = isinstance(held, types.FunctionType)
        cell.cell_contents = _without_check(held) if is_plain else held
    return twin


def _enter_by_copy(
    func: Callable[..., Any], types_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """What `torch._C._skip_one_hop_torch_function` does, for torch before 2.13."""
    if isinstance(func, types.FunctionType):
        func = _without_check(func)
    return func(*args, **kwargs)


enter: Callable[..., Any] = getattr(torch._C, "_skip_one_hop_torch_function", _enter_by_copy)
