# SPDX-License-Identifier: Apache-2.0
"""Run a Python function of torch, so that the C functions it calls are recorded."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.overrides

_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
_entered: dict[Callable[..., Any], Callable[..., Any]] = {}


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
    scope.update(dict.fromkeys(_CHECKS, lambda *_: False))
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

#: torch's Python functions, as they were when koila was imported, by their code; None: several have
#: it, as wrappers of one decorator do.
_by_code: dict[types.CodeType, types.FunctionType | None] = {}

#: The code of the function that these functions call where a class overrides them.
_handler: types.CodeType = torch.overrides.handle_torch_function.__code__


#: Makes a call with lazies among its arguments: (function, these lazies, its arguments). It is
#: torch's own function, without its types.
call_with_lazies: Any = torch.overrides.handle_torch_function


def note(func: types.FunctionType) -> None:
    """Note a Python function of torch, for `own_of`."""
    _by_code[func.__code__] = None if func.__code__ in _by_code else func


def own_of(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that has been called, where torch passes on one that koila does not know.

    After `F.relu = mine`, torch's own relu(), which `mine` calls, passes on `mine`: it names itself
    by its name in its module. `mine` must not run twice. Other functions are returned as they are.
    """
    frame = sys._getframe(1)  # the caller's: C has no frames
    if frame.f_code is _handler and frame.f_back is not None:
        return _by_code.get(frame.f_back.f_code) or func
    return func
