# SPDX-License-Identifier: Apache-2.0
"""Record in-place view calls: `x.unsqueeze_(0)`, `x.t_()`.

torch counts them as writes; the tensor object and its memory stay the same. They are recorded as a
write that changes no number, followed by the view, which then becomes the value of the lazy.
"""

from __future__ import annotations

from typing import Any

import torch

from koila import _core
from koila.basics import table
from koila.basics.enter import call_with_lazies
from koila.basics.table import Args, Func, Words
from koila.planning import planner
from koila.staged import hooks

#: The in-place methods of torch for rows that are views; they have no row of their own.
NAMES = frozenset(
    f"{name}_"
    for name, row in table.ROWS.items()
    if row["kind"] == "VIEW" and f"{name}_" not in table.ROWS and hasattr(torch.Tensor, f"{name}_")
)


def touch(x: torch.Tensor) -> torch.Tensor:
    """Count a write that changes no number."""
    torch.autograd.graph.increment_version(x)
    return x


def record(func: Func, args: Args, kwargs: Words) -> Any:
    """Record such a call; NotImplemented where it has to run live."""
    x, rest = (args[0], args[1:]) if args else (None, ())
    if type(x) is not _core.LazyTensor or _core.storage(x) is None:
        return NotImplemented  # the user may have the memory under another name
    if planner.is_whole():
        return NotImplemented  # gradients of a view have other strides, so other last bits
    is_lost = x.requires_grad and not torch.is_grad_enabled()  # x keeps a graph of the old sizes
    if is_lost or torch.is_inference_mode_enabled():
        return NotImplemented
    if _core.has_views(x) or hooks.is_any():
        return NotImplemented  # gradients of its views go through it, and hooks can see that
    view = getattr(torch.Tensor, func.__name__[:-1])
    looked = func(torch.empty(()).expand(x.shape), *rest, **kwargs)  # torch's own errors
    if (x.dim() == 0) != (looked.dim() == 0):
        return NotImplemented  # type promotion treats tensors of no dims differently
    call_with_lazies(touch, (x,), x)
    with torch.enable_grad():  # to torch the result is x itself, not a view made under no_grad
        viewed = view(x, *rest, **kwargs)
    if viewed is not x:
        _core.swap(x, viewed)
    return x
