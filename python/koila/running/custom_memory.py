# SPDX-License-Identifier: Apache-2.0
"""Keep custom autograd functions within a memory limit: they run on the whole batch, and koila does
not know what their forward and backward allocate.

So koila counts that when a class first runs on tensors of some sizes, and stops the call once it
exceeds what is left. From then on it knows the bytes, and refuses a call that does not fit before
it runs.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

from koila.basics import config, engine
from koila.memory import budget
from koila.planning import planner, unsplit
from koila.staged import meta
from koila.staged.cache import remember

_WHY = "koila cannot cut a custom autograd function"
#: By a class, whether its backward runs, and the sizes of its arguments and of their gradients: the
#: bytes that a call allocates.
_peaks: dict[tuple[Any, ...], int] = {}


def counted(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Return `apply` of a custom function, such that its forward and backward are counted against
    the user's limit, if there is one."""
    if config.get("memory_limit") is None or planner.is_whole() or config.get("chunks") is not None:
        return apply
    cls: Any = apply.__self__  # type: ignore[attr-defined]

    def run(_: Any, *args: Any, **kwargs: Any) -> Any:
        key = cls, *_sizes((args, kwargs))
        made = _count((*key, "forward"), apply, apply, args, kwargs)
        for node in {one.grad_fn for one in meta.tensors(made)}:
            if getattr(node, "_forward_cls", None) is cls:
                _count_backward(node, cls, (*key, "backward"))
        return made

    return engine.bound(run, apply)


def _sizes(given: Any) -> list[Any]:
    return [(tuple(one.shape), one.dtype, one.requires_grad) for one in meta.tensors(given)]


def _count_backward(node: Any, cls: Any, key: tuple[Any, ...]) -> None:
    """Count the backward of a node when autograd's engine calls it: it looks up `apply`."""
    of = weakref.ref(node)  # a strong reference would keep what the node saved
    name = types.MethodType(cls.backward, cls)

    def apply(*gradients: Any) -> Any:
        node: Any = of()
        original = types.MethodType(type(node).apply, node)
        return _count((*key, *_sizes(gradients)), name, original, gradients, {})

    node.apply = apply


def _count(
    key: tuple[Any, ...],
    name: Callable[..., Any],
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run a call within what the limit leaves, and remember the bytes that it allocates under
    `key`. Raise a MemoryLimitError if it needs more than is left, or needed more when it ran
    before; the user calls it `name`."""
    device = next((one.device for one in meta.tensors(args)), torch.device("cpu"))
    needed = _peaks.get(key)
    left = budget.free_bytes(device, ())
    if needed is not None and needed > left:
        raise unsplit.too_much(name, _WHY, needed, left)
    if needed is not None:
        return func(*args, **kwargs)
    with unsplit.counting(unsplit.Left(name, _WHY, left)) as counter:
        made = func(*args, **kwargs)
    remember(_peaks, key, counter.most)
    return made
