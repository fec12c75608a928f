# SPDX-License-Identifier: Apache-2.0
"""Hooks on lazy values: each is called once a backward, with the gradient of all rows.

A hook belongs to the value that it was registered on, and to its graph; a gradient that is to be
kept to the tensor, which has another graph after a write in place.
A value with a hook is a joint of the backward: what reads it runs in a later stage, its gradient is
put together from all chunks before the hook sees it, and what the hook makes of it is cut again.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from koila import _core
from koila.basics import surroundings
from koila.basics.threads import in_turn

Hook = Callable[[torch.Tensor], torch.Tensor | None]
#: What the hooks of each value made of its gradient, in this backward.
Seen = dict[int, torch.Tensor]


def _of(value: int) -> OrderedDict[Any, Any] | None:
    hooks: OrderedDict[Any, Any] | None = _core.memo().get("hooks", {}).get(value)
    return hooks


def _made_for(value: int) -> OrderedDict[Any, Any]:
    made: OrderedDict[Any, Any] = (
        _core.memo().setdefault("hooks", {}).setdefault(value, OrderedDict())
    )
    return made


def _on_tensor(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of an input, and of what has run, autograd calls the hooks itself; what needs no gradient is
    refused, in torch's own words, and nothing runs for that. For what else there is all that waits
    runs whole, and is logged."""
    real = _core.real(args[0])
    if real is None and not args[0].requires_grad:
        real = torch.empty(0)
    if real is not None:
        _renew_node(real)
        return func(real, *args[1:], **kwargs)
    return _core.live_with_all(func, args, kwargs, True)


def _renew_node(real: torch.Tensor) -> None:
    """Let torch renew the node of a view whose memory was written, as reading `grad_fn` does: where
    the node is out of date, `register_hook` of torch 2.13 crashes the process."""
    _ = real.grad_fn


@in_turn
def register(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Tensor.register_hook."""
    value = _core.hook(args[0])
    if value is None or len(args) != 2 or kwargs:
        return _on_tensor(func, args, kwargs)
    hooks = _made_for(value)
    handle = RemovableHandle(hooks)
    hooks[handle.id] = args[1]
    return handle


def register_live(lazy: Any, hook: Hook) -> None:
    """Register a hook that is called only where the value runs live, as it does in a whole run."""
    value = _core.hook(lazy, False, True)
    if value is not None:
        _core.memo().setdefault("live hooks", {}).setdefault(value, []).append(hook)
    elif lazy.requires_grad and (real := _core.real(lazy)) is not None:
        real.register_hook(hook)


@in_turn
def retain(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Tensor.retain_grad."""
    value = _core.hook(args[0], True)
    if value is None:
        _on_tensor(func, args, kwargs)
    else:
        _core.memo().setdefault("hooks", {})


class PendingNode:
    """The `grad_fn` of a lazy that has still to run: whoever asks for more than whether it is there
    is answered by the node of the whole batch, since its hooks are to see what eager's see."""

    def __init__(self, lazy: Any, node_of: Callable[[Any], Any]) -> None:
        self._lazy, self._node_of = lazy, node_of

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node_of(self._lazy), name)

    def __repr__(self) -> str:
        return f"<PendingNode of {self._lazy!r}>"


torch.autograd.graph.Node.register(PendingNode)


def bind(value: int, real: torch.Tensor, is_of_lazy: bool = False) -> None:
    """Hand over to the tensor that stands for a value from now on its hooks, and the gradient that
    is kept of it, or by the lazy that stands for it."""
    hooks = _of(value)
    if hooks is not None:
        _renew_node(real)
        real.register_hook(functools.partial(_call, hooks))
    for hook in _core.memo().get("live hooks", {}).get(value, ()):
        real.register_hook(hook)
    if _core.retained(value, is_of_lazy) is not None:
        real.retain_grad()
        gradient = _retained_as(_core.retained(value, is_of_lazy))
        if gradient is not None:
            real.grad = gradient


def _call(hooks: OrderedDict[Any, Any], gradient: torch.Tensor) -> torch.Tensor:
    for hook in list(hooks.values()):
        with surroundings.inside():
            made = hook(gradient)
        gradient = gradient if made is None else made
    return gradient


def apply(value: int, gradient: torch.Tensor, seen: Seen) -> torch.Tensor:
    """What the hooks of a value make of its whole gradient.

    Args:
        value: number of the value.
        gradient: its gradient, of all rows.
        seen: what was made before; a step that is run again in smaller chunks calls no hook twice.
    """
    if not is_on(value):
        return gradient
    if value not in seen:
        with torch.set_grad_enabled(False):  # as torch's engine calls it
            made = _call(_of(value) or OrderedDict(), gradient)
        if made.shape != gradient.shape:
            raise RuntimeError(
                f"hook: cannot put a gradient of shape {list(made.shape)} in place of one of "
                f"shape {list(gradient.shape)}"
            )
        seen[value] = made
    return seen[value]


def is_on(value: int) -> bool:
    """Whether a value has hooks, or is to keep its gradient."""
    return bool(_of(value)) or _core.retained(value) is not None


def is_any() -> bool:
    """Whether any value has or had a hook, or is to keep its gradient."""
    return "hooks" in _core.memo()


def commit(seen: Seen) -> None:
    """Keep the gradients that were asked for: retained ones add up from backward to backward."""
    kept: dict[int, torch.Tensor] = _core.memo().setdefault("retained", {})
    for value, gradient in seen.items():
        name = _core.retained(value)
        if name is not None:
            kept[name] = kept[name] + gradient if name in kept else gradient.detach()


def _retained_as(name: int | None) -> torch.Tensor | None:
    kept: dict[int | None, torch.Tensor] = _core.memo().get("retained", {})
    return kept.get(name)


def give(value: int, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with which a lazy that stands for a value leaves the tape."""
    if is_any():
        bind(value, tensor, True)
    return tensor


@in_turn
def retained(lazy: Any) -> torch.Tensor | None:
    """The gradient that a lazy retained, while it has no tensor of its own."""
    value = _core.id(lazy)
    return _retained_as(_core.retained(value, True)) if value is not None else None
