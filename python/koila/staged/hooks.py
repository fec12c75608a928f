# SPDX-License-Identifier: Apache-2.0
"""Hooks on lazy tensors: each is called once a backward pass, with the gradient of the whole batch.

A hook belongs to the value, one version of a tensor, that it was registered on. `retain_grad`
belongs to the tensor, whose value changes with each write in place.
A value with a hook splits the backward pass: the calls that read it run in a later stage, so the
gradients of all chunks are put together before the hook is called. The gradient that the hook
returns is then cut into chunks again.
"""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from koila import _core
from koila.basics import surroundings
from koila.basics.table import Args, Func, Words
from koila.basics.threads import in_turn

Hook = Callable[[torch.Tensor], torch.Tensor | None]


class Seen:
    """What hooks of values have done in a backward pass. A step that is run again in smaller chunks
    takes it from here, so that no hook is called twice."""

    def __init__(self) -> None:
        #: By value: what its hooks returned, offloaded if only another try can read it.
        self.gradients: dict[int, torch.Tensor] = {}
        #: The states of generators after the hooks, which may draw.
        self.generators: dict[torch.device, torch.Tensor] = {}


def _of(value: int) -> OrderedDict[Any, Any] | None:
    """Return the hooks of a value, by the ids of their handles; None if it never had one."""
    return _core.notes().get("hooks", {}).get(value)


def hooked() -> list[int]:
    """Return the values of this thread's tape that have hooks."""
    hooks = _core.notes().get("hooks")
    return [value for value, of_value in hooks.items() if of_value] if hooks else []


def _on_tensor(func: Func, args: Args, kwargs: Words) -> Any:
    """Call a method that registers a hook on the real tensor of a lazy one.

    An input and a computed lazy have a real tensor, whose hooks autograd calls. If the lazy needs
    no gradient, torch raises its own error, and nothing runs for that. Otherwise the pending
    program runs whole, which is logged.
    """
    real = _core.real(args[0])
    if real is None and not args[0].requires_grad:
        real = torch.empty(0)
    if real is not None:
        _renew_node(real)
        return func(real, *args[1:], **kwargs)
    return _core.live_with_all(func, args, kwargs, True)


def _renew_node(real: torch.Tensor) -> None:
    """Read `grad_fn`, so that torch updates the node of a view whose base was written in place.
    With an outdated node, `register_hook` of torch 2.13 crashes the process."""
    _ = real.grad_fn


@in_turn
def register(func: Func, args: Args, kwargs: Words) -> Any:
    """Replace Tensor.register_hook for a lazy tensor."""
    value = _core.hook(args[0])
    if value is None or len(args) != 2 or kwargs:
        return _on_tensor(func, args, kwargs)
    hooks = _core.notes().setdefault("hooks", {}).setdefault(value, OrderedDict())
    handle = RemovableHandle(hooks)
    hooks[handle.id] = args[1]
    return handle


def register_live(lazy: Any, hook: Hook) -> None:
    """Register a hook that is called only if the value is computed by a live run, not in chunks."""
    value = _core.hook(lazy, False, True)
    if value is not None:
        _core.notes().setdefault("live_hooks", {}).setdefault(value, []).append(hook)
    elif lazy.requires_grad and (real := _core.real(lazy)) is not None:
        real.register_hook(hook)


@in_turn
def retain(func: Func, args: Args, kwargs: Words) -> None:
    """Replace Tensor.retain_grad for a lazy tensor."""
    value = _core.hook(args[0], True)
    if value is None:
        _on_tensor(func, args, kwargs)
    else:
        _core.notes().setdefault("hooks", {})


class PendingNode:
    """The `grad_fn` of a lazy tensor that is pending.

    Any attribute is read from the real node, for which the whole batch runs: hooks on the node must
    be called with what they are called with in eager mode.
    """

    def __init__(self, lazy: Any, node_of: Callable[[Any], Any]) -> None:
        self._lazy, self._node_of = lazy, node_of

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node_of(self._lazy), name)

    def __repr__(self) -> str:
        return f"<PendingNode of {self._lazy!r}>"


torch.autograd.graph.Node.register(PendingNode)


def bind(value: int, real: torch.Tensor, is_of_lazy: bool = False) -> None:
    """Move the hooks and the retained gradient of a value to the real tensor that replaces it.

    If the lazy tensor of the value leaves the tape (`is_of_lazy`), take the gradient that the lazy
    retains, and the hooks of the value that has its graph. A write without a graph, such as
    `h.detach().mul_(2)`, gives the lazy a new value and leaves it the graph and the hooks.
    """
    made_as = _core.graph_of(value) if is_of_lazy else value
    hooks = _of(made_as)
    if hooks is not None:
        _renew_node(real)
        real.register_hook(functools.partial(_call, hooks))
    for hook in _core.notes().get("live_hooks", {}).get(made_as, ()):
        real.register_hook(hook)
    if _core.retained(value, is_of_lazy) is not None:
        real.retain_grad()
        gradient = _retained_as(_core.retained(value, is_of_lazy))
        if gradient is not None:
            real.grad = gradient


class OfNode(functools.partial[Any]):
    """A prehook of a value's node, as a hook of the value. As in torch, it is called after all
    hooks of the tensor, also those that were registered later."""


def _call(hooks: OrderedDict[Any, Any], gradient: torch.Tensor) -> torch.Tensor:
    """Call hooks in order, each with the gradient that the one before returned."""
    for hook in sorted(hooks.values(), key=lambda hook: isinstance(hook, OfNode)):
        with surroundings.inside():
            made = hook(gradient)
        if type(made) is _core.LazyTensor:  # torch's engine, in C++, would see its placeholder
            made = _core.force(made) if torch.is_grad_enabled() else _core.read(made)
        gradient = gradient if made is None else made
    return gradient


def apply(value: int, gradient: torch.Tensor, seen: Seen) -> torch.Tensor:
    """Call the hooks of a value, unless they were `seen` already, with its gradient of all rows,
    and return the gradient that they make of it."""
    if not is_on(value):
        return gradient
    if value not in seen.gradients:
        with torch.set_grad_enabled(False):  # as torch's engine calls it
            made = _call(_of(value) or OrderedDict(), gradient)
        if made.shape != gradient.shape:
            raise RuntimeError(
                f"hook: cannot put a gradient of shape {list(made.shape)} in place of one of "
                f"shape {list(gradient.shape)}"
            )
        seen.gradients[value] = made
    return seen.gradients[value]


def is_called(value: int, seen: Seen) -> bool:
    """Tell whether hooks of a value are still to be called in this backward pass."""
    return bool(_of(value)) and value not in seen.gradients


def is_on(value: int) -> bool:
    """Tell whether a value has hooks or retains its gradient."""
    return bool(_of(value)) or _core.retained(value) is not None


def is_any() -> bool:
    """Tell whether any value has or had a hook, or retains its gradient."""
    return "hooks" in _core.notes()


def commit(seen: Seen) -> None:
    """Add the gradients of this backward pass to those that values retain."""
    kept: dict[int, torch.Tensor] = _core.notes().setdefault("retained", {})
    for value, gradient in seen.gradients.items():
        name = _core.retained(value)
        if name is not None:
            kept[name] = kept[name] + gradient if name in kept else gradient.detach()


def _retained_as(name: int | None) -> torch.Tensor | None:
    """Return the gradient retained under a number of `_core.retained`; None: none so far."""
    return None if name is None else _core.notes().get("retained", {}).get(name)


def give(value: int, tensor: torch.Tensor) -> torch.Tensor:
    """Return the real tensor of a lazy that leaves the tape, with the hooks of its value."""
    if is_any():
        bind(value, tensor, True)
    return tensor


@in_turn
def retained(lazy: Any) -> torch.Tensor | None:
    """Return the gradient that a pending lazy tensor retained; None: none so far."""
    value = _core.id(lazy)
    if value is None:
        return None
    name = _core.retained(value, True)
    kept, seen = _retained_as(name), _core.notes().get("seen")
    for other, gradient in seen.gradients.items() if seen is not None and name is not None else ():
        if _core.retained(other) == name:  # a hook of an earlier value asks, before the commit
            kept = gradient.detach() if kept is None else kept + gradient
    return kept


@contextlib.contextmanager
def visible(seen: Seen) -> Iterator[None]:
    """Show the gradients of this backward pass that values retain, in a block that calls hooks."""
    before = _core.notes().get("seen")
    _core.notes()["seen"] = seen
    try:
        yield
    finally:
        _core.notes()["seen"] = before
