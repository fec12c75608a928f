# SPDX-License-Identifier: Apache-2.0
"""Run a Python function of torch, so that the C functions it calls are recorded."""

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
    """Return a copy of a function that does not check whether to call __torch_function__.

    The functions in its closure and the private functions of its module that it calls are copied so
    too: F.max_pool2d calls one of two functions in its closure, and torch.unique calls
    `_unique_impl`, which checks again.
    """
    if func in _entered:
        return _entered[func]  # type: ignore[return-value]
    scope = dict(func.__globals__)
    cells = [types.CellType() for _ in func.__closure__ or ()]
    twin = types.FunctionType(
        func.__code__, scope, func.__name__, func.__defaults__, tuple(cells) or None
    )
    twin.__kwdefaults__ = func.__kwdefaults__
    _entered[func] = twin  # before its closure is copied, which may contain the function itself
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
    """Do what `torch._C._skip_one_hop_torch_function` does, for torch before 2.13."""
    if isinstance(func, types.FunctionType):
        func = _without_check(func)
    return func(*args, **kwargs)


enter: Callable[..., Any] = getattr(torch._C, "_skip_one_hop_torch_function", _enter_by_copy)
