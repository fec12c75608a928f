# SPDX-License-Identifier: Apache-2.0
"""What the user puts around calls: hooks on saved tensors, dispatch modes and forward-mode AD,
which run code at each call; transforms of torch.func and torch.jit.trace, which record each.

Such code must be called as in eager mode, and not for koila's own work. So a call made under it is
not recorded, but runs at once on the whole batch. When koila runs calls that were recorded earlier
or elsewhere, `outside` disables all this for that time, and `inside` enables it again while a hook
of the user runs.

A mode with the attribute `sees_koila = True` observes koila itself: it changes no number, stays on
while koila runs calls, and calls made under it are recorded.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from koila import _core

P = ParamSpec("P")
R = TypeVar("R")

_C: Any = torch._C
_hooks: Any = torch._C._autograd
_functorch: Any = torch._C._functorch


class Mode(TorchDispatchMode):
    """A dispatch mode of koila's whose first call does not import torch._dynamo.

    torch imports it there to keep dynamo from compiling the mode, which takes more than a second
    and 70 MiB. koila tells dynamo itself, once a script has imported it (`patches/tracers.py`).
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def _is_observer(mode: Any) -> bool:
    return getattr(mode, "sees_koila", False) is True


def _dispatch_modes() -> list[Any]:
    """Return the dispatch modes that are on, without observers of koila."""
    modes = [_C._get_dispatch_stack_at(i) for i in range(_C._len_torch_dispatch_stack())]
    return [mode for mode in modes if not _is_observer(mode)]


def of_backward() -> str:
    """Describe what would see each call of a backward that runs now; empty: nothing would."""
    if torch.autograd.forward_ad._current_level >= 0:
        return "forward-mode AD is on"
    modes = _dispatch_modes() if _C._len_torch_dispatch_stack() else ()
    return f"a dispatch mode is on ({type(modes[-1]).__name__})" if modes else ""


def of_call() -> str:
    """Describe what would see a call that is made now; empty: nothing would."""
    has_hooks = _hooks._top_saved_tensors_default_hooks(True) is not None
    return of_backward() or ("hooks on saved tensors are on" if has_hooks else "")


class NodeHooks(Mode):
    """koila enters this mode while a user's node_creation_hook is on (torch from 2.14 on). Under a
    dispatch mode koila records no call: each runs at once, so that autograd creates its nodes, and
    calls the user's hook with them, when eager torch would."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **kwargs or {})


class _Disabled:
    """The hooks, modes, transforms and the trace that were on, disabled until `__exit__`."""

    def __init__(self) -> None:
        self._hooks: list[tuple[Any, Any]] = []
        self._functions: list[Any] = []
        self._stack = contextlib.ExitStack()
        self._disable()

    def _disable(self) -> None:
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
        if _is_below_autograd():
            included = _C._dispatch_tls_local_include_set()
            self._stack.enter_context(_C._ForceDispatchKeyGuard(included, _EXCLUDED))
        if _functorch.peek_interpreter_stack() is not None:
            self._stack.enter_context(temporarily_clear_interpreter_stack())
        if (trace := _C._get_tracing_state()) is not None:
            _C._set_tracing_state(None)
            self._stack.callback(_C._set_tracing_state, trace)

    def _enable(self) -> None:
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
        _state.disabled.remove(self)
        self._enable()

    @contextlib.contextmanager
    def back(self) -> Iterator[None]:
        """Enable all of them for a block."""
        self._enable()
        try:
            yield
        finally:
            self._disable()


class _State(threading.local):
    def __init__(self) -> None:
        self.disabled: list[_Disabled] = []  # by this thread, the outermost first
        self.node_hooks: list[tuple[Any, Any]] = []  # (hook, its NodeHooks), the outermost first


_state = _State()


#: torch's dispatch key of autograd that no tensor has on a CPU or GPU: excluded with all others.
AUTOGRAD: Any = _C.DispatchKey.AutogradOther
_EXCLUDED: Any = _C._dispatch_tls_local_exclude_set()  # where nothing special is going on


def _is_below_autograd() -> bool:
    """Return whether torch's dispatcher has called this code with autograd excluded: the code of a
    dispatch mode, of a wrapper subclass or of a custom operator."""
    is_excluded = _C._dispatch_tls_is_dispatch_key_excluded(AUTOGRAD)
    return is_excluded and not torch.is_inference_mode_enabled()


def is_transforming() -> bool:
    """Return whether torch.jit.trace or a transform of torch.func sees this thread's calls."""
    trace, transform = _C._get_tracing_state(), _functorch.peek_interpreter_stack()
    return trace is not None or transform is not None


def _is_any() -> bool:
    return bool(
        _C._get_tracing_state() is not None
        or _functorch.peek_interpreter_stack() is not None
        or (_C._dispatch_tls_is_dispatch_key_excluded(AUTOGRAD) and _is_below_autograd())
        or _C._len_torch_function_stack()
        or _C._len_torch_dispatch_stack()
        or _hooks._top_saved_tensors_default_hooks(True) is not None
        or not _hooks._saved_tensors_hooks_is_enabled()
    )


def leave() -> Any:
    """Disable all that is on, until `__exit__` of the result is called."""
    disabled = _Disabled()
    _state.disabled.append(disabled)
    return disabled


@contextlib.contextmanager
def outside() -> Iterator[None]:
    """Wrap a block of koila's own work, so that nothing of the user's sees its calls."""
    disabled = leave() if _is_any() else None
    try:
        yield
    finally:
        if disabled is not None:
            disabled.__exit__()


@contextlib.contextmanager
def making_calls() -> Iterator[None]:
    """Wrap a block in which koila runs recorded calls for its own purposes, with graphs. Nothing of
    the user's sees them, and waiting random calls do not draw before them."""
    was_busy = _core.is_busy()
    _core.set_busy(True)
    try:
        with outside(), torch.enable_grad():
            yield
    finally:
        _core.set_busy(was_busy)


def in_outside(func: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function so that it runs in `outside`."""

    @functools.wraps(func)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        if not _is_any():
            return func(*args, **kwargs)
        with outside():
            return func(*args, **kwargs)

    return wrapped


def inside() -> contextlib.AbstractContextManager[Any]:
    """Wrap a call of the user's code, such as a hook, from koila's own work: all is on again."""
    if not _state.disabled:
        return contextlib.nullcontext()
    with contextlib.ExitStack() as stack:
        for disabled in _state.disabled:
            stack.enter_context(disabled.back())
        return stack.pop_all()


# torch before 2.14 does not have them, nor calls what replaces them.
_push_node_hook: Any = getattr(_hooks, "_push_node_creation_hook", None)
_pop_node_hook: Any = getattr(_hooks, "_pop_node_creation_hook", None)


def push_node_hook(hook: Any) -> None:
    """Replace torch's _push_node_creation_hook: enter a `NodeHooks`, then push the user's hook."""
    mode: Any = NodeHooks()  # torch's __enter__ is untyped
    mode.__enter__()
    _state.node_hooks.append((hook, mode))
    _push_node_hook(hook)


def pop_node_hook() -> None:
    """Replace torch's _pop_node_creation_hook: pop the user's hook, then leave its `NodeHooks`."""
    _pop_node_hook()
    _state.node_hooks.pop()[1].__exit__(None, None, None)
