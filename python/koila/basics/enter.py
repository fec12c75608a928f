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


def _without_check(func: types.FunctionType) -> Callable[..., Any]:
    """A copy of `func` that does not ask again whether to dispatch."""
    scope = dict(func.__globals__)
    scope.update(dict.fromkeys(_CHECKS, _never))
    twin = types.FunctionType(
        func.__code__, scope, func.__name__, func.__defaults__, func.__closure__
    )
    twin.__kwdefaults__ = func.__kwdefaults__
    return twin


def _enter_by_copy(
    func: Callable[..., Any], types_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if func not in _entered:
        _entered[func] = _without_check(func) if isinstance(func, types.FunctionType) else func
    return _entered[func](*args, **kwargs)


enter: Callable[..., Any] = getattr(torch._C, "_skip_one_hop_torch_function", _enter_by_copy)
