# SPDX-License-Identifier: Apache-2.0
"""Replace attributes of torch, note how to undo it, and wrap functions in the usual ways."""

from __future__ import annotations

import functools
import types
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
from koila.staged import meta

undo: list[Callable[[], object]] = []  # undoes each patch, the newest last
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
    """Replace an attribute of torch; a function gets the name and the documentation of its own."""
    original = getattr(owner, name, None)
    if name in vars(owner):
        undo.append(functools.partial(assign, owner, name, vars(owner)[name]))
    else:  # it is inherited
        undo.append(functools.partial(delattr, owner, name))
    if isinstance(replacement, types.FunctionType) and not hasattr(replacement, "__wrapped__"):
        functools.update_wrapper(replacement, original)  # type: ignore[arg-type]
    # TorchScript looks up the operator of a Python function by the function's id().
    op = _builtins._find_builtin(original)
    if op is not None:
        operators.append(replacement)
        _builtins._register_builtin(replacement, op)
    assign(owner, name, replacement)


def replace_in_c(descriptor: Any, by: Callable[..., Any], is_before: bool = False) -> Any:
    """As `_core.replace`; raise RuntimeError where it is not possible."""
    own = _core.replace(descriptor, by, is_before)
    if own is None:
        raise RuntimeError(f"koila cannot replace {descriptor!r} of this torch")
    undo.append(functools.partial(_core.replace, descriptor, None))
    return own


def wrapper(call: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function that wraps functions: in place of one, `call` gets it, its arguments, those
    by name, and what else the wrapping function was given."""

    @functools.wraps(call)
    def wrapping(original: Callable[..., Any], *more: Any, **words: Any) -> Callable[..., Any]:
        def patched(*args: Any, **kwargs: Any) -> Any:
            return call(original, args, kwargs, *more, **words)

        # torch.jit.script compiles the source of `original`, with its names from `made`'s globals.
        names = getattr(original, "__globals__", globals())
        made = types.FunctionType(patched.__code__, names, closure=patched.__closure__)
        return functools.update_wrapper(made, original)

    return wrapping


@wrapper
def live_if_lazy(
    original: Any, args: Any, kwargs: Any, is_plain: bool, run: Callable[..., Any] = _core.live
) -> Any:
    """Run a function on real tensors if a lazy is among its arguments."""
    if holds_lazy(args) or holds_lazy(kwargs):
        return run(original, args, kwargs, is_plain)
    return original(*args, **kwargs)


@wrapper
def returning_tensors(original: Any, args: Any, kwargs: Any) -> Any:
    """Run a function such that calls on lazies in it run at once and return tensors."""
    return engine.call_for_torch(original, *args, **kwargs)


@wrapper
def read_if_lazy(original: Any, args: Any, kwargs: Any) -> Any:
    """Run a function, which copies its input, on the numbers of lazies."""
    if not (holds_lazy(args) or holds_lazy(kwargs)):
        return original(*args, **kwargs)
    what = f"{reports.name_of(original)}()"

    def number_of(lazy: _core.LazyTensor) -> torch.Tensor:
        number = _core.read(lazy)
        left_plain.note_read(what, lazy, number)
        return number

    with reports.Asking(what):
        args, kwargs = meta.map_nested((args, kwargs), _core.LazyTensor, number_of)
    return original(*args, **kwargs)


@wrapper
def same_if_lazy(original: Any, args: Any, kwargs: Any) -> Any:
    """Run a function that returns a tensor itself or converts it; of a lazy record `to()`."""
    is_lazy = len(args) == 1 and type(args[0]) is _core.LazyTensor
    if not is_lazy or not kwargs.keys() <= {"dtype", "device"}:
        return live_if_lazy(original, True)(*args, **kwargs)
    words = {word: value for word, value in kwargs.items() if value is not None}
    return args[0].to(**words) if words else args[0]


@wrapper
def flush_first(original: Any, args: Any, kwargs: Any) -> Any:
    with reports.Asking(f"{reports.name_of(original)}()"):
        _core.flush()  # nothing recorded before the call may run after it
    return original(*args, **kwargs)


@wrapper
def then(original: Any, args: Any, kwargs: Any, after: Callable[..., Any]) -> Any:
    """Run a function, then `after` with the same arguments."""
    result = original(*args, **kwargs)
    after(*args, **kwargs)
    return result


def wrap(
    owner: Any, names: Iterable[str], wrapper: Callable[[Any], Any], *, may_lack: bool = False
) -> None:
    """Replace functions by what `wrapper` makes of each; `may_lack`: those that this torch has."""
    for name in names:
        if not may_lack or hasattr(owner, name):
            replace(owner, name, wrapper(getattr(owner, name)))
