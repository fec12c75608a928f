"""Hooks on lazy values: each is called once a backward, with the gradient of all rows.

A value with a hook is a joint of the backward: what reads it runs in a later stage, its gradient is
put together from all chunks before the hook sees it, and what the hook makes of it is cut again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from koila import _core
from koila.threads import in_turn

Hook = Callable[[torch.Tensor], torch.Tensor | None]
#: What the hooks of each value made of its gradient, in this backward.
Seen = dict[int, torch.Tensor]

_RETAIN = "retain"  # the key that retain_grad() leaves among the hooks: it has no handle


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
        return func(real, *args[1:], **kwargs)
    return _core.live_with_all(func, args, kwargs, True)


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


@in_turn
def retain(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Tensor.retain_grad."""
    value = _core.hook(args[0])
    if value is None:
        _on_tensor(func, args, kwargs)
    else:
        _made_for(value)[_RETAIN] = None


def bind(value: int, real: torch.Tensor) -> None:
    """Hand the hooks of a value over to the tensor that a live run made for it."""
    hooks = _of(value)
    if hooks is None:
        return

    def call(gradient: torch.Tensor) -> torch.Tensor:
        return _call(hooks, gradient)

    real.register_hook(call)
    if _RETAIN in hooks:
        real.retain_grad()


def _call(hooks: OrderedDict[Any, Any], gradient: torch.Tensor) -> torch.Tensor:
    for key, hook in list(hooks.items()):
        made = hook(gradient) if key != _RETAIN else None
        gradient = gradient if made is None else made
    return gradient


def apply(value: int, gradient: torch.Tensor, seen: Seen) -> torch.Tensor:
    """What the hooks of a value make of its whole gradient.

    Args:
        value: number of the value.
        gradient: its gradient, of all rows.
        seen: what was made before; a step that is run again in smaller chunks calls no hook twice.
    """
    hooks = _of(value)
    if hooks is None:
        return gradient
    if value not in seen:
        made = _call(hooks, gradient)
        if made.shape != gradient.shape:
            raise RuntimeError(
                f"hook: cannot put a gradient of shape {list(made.shape)} in place of one of "
                f"shape {list(gradient.shape)}"
            )
        seen[value] = made
    return seen[value]


def is_on(value: int) -> bool:
    """Whether a value has hooks, or is to keep its gradient."""
    return bool(_of(value))


def commit(seen: Seen) -> None:
    """Keep the gradients that were asked for: retained ones add up from backward to backward."""
    kept: dict[int, torch.Tensor] = _core.memo().setdefault("retained", {})
    for value, gradient in seen.items():
        if _RETAIN in (_of(value) or ()):
            kept[value] = kept[value] + gradient if value in kept else gradient.detach()


def give(value: int, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that stands for a value from now on, with the gradient that it retained."""
    kept = _core.memo().get("retained", {})
    if value in kept:
        tensor.retain_grad()
        tensor.grad = kept[value]
    return tensor


@in_turn
def retained(lazy: Any) -> torch.Tensor | None:
    """The gradient that a lazy retained, while it has no tensor of its own."""
    value = _core.hook(lazy, False)
    kept: torch.Tensor | None = _core.memo().get("retained", {}).get(value)
    return kept
