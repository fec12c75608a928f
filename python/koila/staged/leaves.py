# SPDX-License-Identifier: Apache-2.0
"""Leaves in mid-program: `h.detach().requires_grad_()` of a value that is still to be computed.

It is recorded as a call, `as_leaf`. While the user holds the leaf, its gradient may be asked for:
then it has its number before a backward, and is a leaf of the program. Nobody can ask for the
gradient of one that no Python object is left of: such a leaf is a value like others, which chunks
make for their rows, and the gradient that arrives there is dropped.
"""

from __future__ import annotations

from typing import Any

import torch

from koila import _core
from koila.basics import engine, surroundings
from koila.basics.enter import call_with_lazies

ROW = "as_leaf"


def as_leaf(x: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor, off its graph. Where the program runs as it was recorded, the
    binding makes this a leaf of the graph; for chunks, see `inside`."""
    return x.detach()


class _Inside(engine.Function):
    """Return a tensor that requires grad, and drop its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None]:
        return None, None


def inside(x: torch.Tensor) -> torch.Tensor:
    """Return the leaf for a chunk of rows."""
    if type(x) is _core.LazyTensor:
        return as_leaf(x)
    with torch.enable_grad():
        made: torch.Tensor = _Inside.apply(x, torch.zeros((), device="cpu", requires_grad=True))
    return made


def begin(lazy: Any) -> bool:
    """Record that a pending lazy becomes a leaf that requires grad. Return whether it did."""
    if lazy.dim() == 0 or not _core.is_pending_here(lazy) or surroundings.of_call():
        return False  # torch sees another placeholder; or the user's code sees the call
    if torch.is_inference_mode_enabled():
        return False
    leaf = call_with_lazies(as_leaf, (lazy,), lazy)
    is_recorded = type(leaf) is _core.LazyTensor and leaf.requires_grad
    if is_recorded:
        _core.swap(lazy, leaf)
        _core.notes()["has_leaves"] = True
    return is_recorded


def decline(*_: Any) -> bool:
    """Stand for the result of an `as_leaf` that cannot be recorded."""
    return False


def is_begun(value: int) -> bool:
    """Return whether a value of this thread's tape is such a leaf, still to be computed."""
    view = _core.value(value)[9]
    return view is not None and view[1] == value and _core.node(view[0])[1] == ROW


def is_leaf(lazy: Any) -> bool:
    """Return whether a pending lazy is such a leaf."""

    def is_here() -> bool:
        value = _core.id(lazy)
        return value is not None and is_begun(value)

    return _core.held(lazy, is_here, (), {})
