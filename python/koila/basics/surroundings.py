# SPDX-License-Identifier: Apache-2.0
"""What a user puts around calls that runs code at each of them: hooks on saved tensors, dispatch
modes, forward-mode AD.

Such code must see what it would see in eager, when it would see it, and nothing of koila's own
work. So a call inside is not recorded: it runs where it stands, on the whole batch. And whatever
koila runs that was recorded before, or elsewhere, runs outside: `outside` takes hooks and modes off
for that time, and `inside` puts them on again around the user's own hooks.

A mode with an attribute `sees_koila = True` observes koila itself: it changes no number, stays on
in koila's runs, and calls inside of it are recorded.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from koila import _core

P = ParamSpec("P")
R = TypeVar("R")

_C: Any = torch._C
_hooks: Any = torch._C._autograd


def _is_observer(mode: Any) -> bool:
    return getattr(mode, "sees_koila", False) is True


def _dispatch_modes() -> list[Any]:
    """Those that are on, but for observers of koila."""
    modes = [_C._get_dispatch_stack_at(i) for i in range(_C._len_torch_dispatch_stack())]
    return [mode for mode in modes if not _is_observer(mode)]


def of_backward() -> str:
    """What sees each call of a backward that runs here, in words; empty: nothing does."""
    if torch.autograd.forward_ad._current_level >= 0:
        return "forward-mode AD is on"
    modes = _dispatch_modes()
    return f"a dispatch mode is on ({type(modes[-1]).__name__})" if modes else ""


def of_call() -> str:
    """What sees a call that is made here, in words; empty: nothing does."""
    has_hooks = _hooks._top_saved_tensors_default_hooks(True) is not None
    return of_backward() or ("hooks on saved tensors are on" if has_hooks else "")


class NodeHooks(TorchDispatchMode):
    """koila enters this mode while a user's node_creation_hook is on (torch from 2.14 on). Under a
    dispatch mode koila records no call: each runs at once, so that autograd creates its nodes, and
    calls the user's hook with them, when eager torch would."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **kwargs or {})


class _Left:
    """The hooks and modes that were on, taken off until `__exit__`."""

    def __init__(self) -> None:
        self._hooks: list[tuple[Any, Any]] = []
        self._functions: list[Any] = []
        self._stack = contextlib.ExitStack()
        self._observers: list[Any] = []
        self._leave()

    def _leave(self) -> None:
        self._message = _hooks._saved_tensors_hooks_get_disabled_error_message()
        if self._message is not None:
            _hooks._saved_tensors_hooks_enable()
        while (top := _hooks._top_saved_tensors_default_hooks(True)) is not None:
            self._hooks.append(top)
            _hooks._pop_saved_tensors_default_hooks()
        for _ in _state.node_hooks:
            _pop_node_hook()
        while _C._len_torch_function_stack() > 0:
            self._functions.append(_C._pop_torch_function_stack())
        for mode in filter(_is_observer, reversed(self._functions)):
            _C._push_on_torch_function_stack(mode)
            self._stack.callback(_C._pop_torch_function_stack)
        if _dispatch_modes():
            modes = self._stack.enter_context(_disable_current_modes())
            for mode in filter(_is_observer, reversed(modes)):
                torch.utils._python_dispatch._push_mode(mode)
                self._stack.callback(torch.utils._python_dispatch._pop_mode)

    def _come_back(self) -> None:
        self._stack.close()
        for hook, _ in _state.node_hooks:
            _push_node_hook(hook)
        while self._functions:
            _C._push_on_torch_function_stack(self._functions.pop())
        while self._hooks:
            _hooks._push_saved_tensors_default_hooks(*self._hooks.pop())
        if self._message is not None:
            _hooks._saved_tensors_hooks_disable(self._message, False)

    def __exit__(self, *exc: Any) -> None:
        _state.left.remove(self)
        self._come_back()

    @contextlib.contextmanager
    def back(self) -> Iterator[None]:
        """A block with all of them on again."""
        self._come_back()
        try:
            yield
        finally:
            self._leave()


class _State(threading.local):
    def __init__(self) -> None:
        self.left: list[_Left] = []  # by this thread, the outermost first
        self.node_hooks: list[tuple[Any, Any]] = []  # likewise, with the mode that is on


_state = _State()


def _is_any() -> bool:
    return bool(
        _C._len_torch_function_stack()
        or _C._len_torch_dispatch_stack()
        or _hooks._top_saved_tensors_default_hooks(True) is not None
        or not _hooks._saved_tensors_hooks_is_enabled()
    )


def leave() -> Any:
    """Take off what is on, until `__exit__` of what this returns."""
    left = _Left()
    _state.left.append(left)
    return left


@contextlib.contextmanager
def outside() -> Iterator[None]:
    """A block of koila's own work, of which no hook and no mode of the user's sees anything."""
    left = leave() if _is_any() else None
    try:
        yield
    finally:
        if left is not None:
            left.__exit__()


@contextlib.contextmanager
def making_calls() -> Iterator[None]:
    """A block in which koila makes recorded calls for itself, with graphs: none of the user's hooks
    and modes sees them, and no random call that waits draws before them."""
    was_busy = _core.is_busy()
    _core.set_busy(True)
    try:
        with outside(), torch.enable_grad():
            yield
    finally:
        _core.set_busy(was_busy)


def in_outside(func: Callable[P, R]) -> Callable[P, R]:
    """`func`, run outside."""

    @functools.wraps(func)
    def left(*args: P.args, **kwargs: P.kwargs) -> R:
        with outside():
            return func(*args, **kwargs)

    return left


@contextlib.contextmanager
def inside() -> Iterator[None]:
    """A block of the user's code that koila's own work calls: a hook, a backward."""
    with contextlib.ExitStack() as stack:
        for left in _state.left:
            stack.enter_context(left.back())
        yield


def _none(*_: Any) -> None:
    """Torch before 2.14 has no hooks on nodes."""


_push_node_hook: Callable[[Any], None] = getattr(_hooks, "_push_node_creation_hook", _none)
_pop_node_hook: Callable[[], None] = getattr(_hooks, "_pop_node_creation_hook", _none)


def push_node_hook(hook: Any) -> None:
    """Replace torch's _push_node_creation_hook: enter a `NodeHooks`, then push the user's hook."""
    make_mode: Any = NodeHooks  # torch does not say what it takes
    mode = make_mode()
    mode.__enter__()
    _state.node_hooks.append((hook, mode))
    _push_node_hook(hook)


def pop_node_hook() -> None:
    """Replace torch's _pop_node_creation_hook: pop the user's hook, then leave its `NodeHooks`."""
    _pop_node_hook()
    _state.node_hooks.pop()[1].__exit__(None, None, None)


def count_duals(original: Callable[..., Any], step: int) -> Callable[..., Any]:
    """torch's function that enters, or leaves, a level of forward-mode AD; the recorder knows."""

    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        _core.count_dual_levels(step)
        return result

    return patched
