# SPDX-License-Identifier: Apache-2.0
"""Calls that change what view of its memory a tensor is, in place: `x.unsqueeze_(0)`, `x.t_()`.

torch counts them as writes, and the tensor keeps its memory and its name. Recorded they are a
write that changes no number, and the view; the lazy then stands for that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import handle_torch_function

from koila import _core
from koila.basics import table
from koila.planning import planner
from koila.staged import hooks

#: In place there is no row of a view: torch has such methods of a few.
NAMES = frozenset(
    f"{name}_"
    for name, row in table.ROWS.items()
    if row["kind"] == "VIEW" and f"{name}_" not in table.ROWS and hasattr(torch.Tensor, f"{name}_")
)


def touch(x: torch.Tensor) -> torch.Tensor:
    """A write, as autograd counts them, that leaves all numbers."""
    torch.autograd.graph.increment_version(x)
    return x


def record(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record such a call; NotImplemented where it has to run live."""
    x, rest = (args[0], args[1:]) if args else (None, ())
    if type(x) is not _core.LazyTensor or _core.storage(x) is None:
        return NotImplemented  # it is memory of the user's, who knows it by another name
    if planner.is_whole():
        return NotImplemented  # gradients of a view are laid out otherwise: not the same bits
    is_lost = x.requires_grad and not torch.is_grad_enabled()  # the graph of other sizes stays
    if is_lost or torch.is_inference_mode_enabled():
        return NotImplemented
    if _core.has_views(x) or hooks.is_any():
        return NotImplemented  # their gradients go through it, and hooks see which
    view = getattr(torch.Tensor, func.__name__[:-1])
    looked = func(torch.empty(()).expand(x.shape), *rest, **kwargs)  # torch's own errors
    if (x.dim() == 0) != (looked.dim() == 0):
        return NotImplemented  # only one of them is a number to torch
    handle_torch_function(touch, (x,), x)
    with torch.enable_grad():  # in torch it is no view made without gradients, but itself
        viewed = view(x, *rest, **kwargs)
    if viewed is not x:
        _core.swap(x, viewed)
    return x
