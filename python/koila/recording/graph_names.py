# SPDX-License-Identifier: Apache-2.0
"""The names of autograd's nodes that print() shows of a tensor, where koila keeps no graph."""

from __future__ import annotations

import functools
from typing import Any

import torch

from koila import _core
from koila.basics import engine, surroundings
from koila.basics.rows import chunk_shape
from koila.staged import leaves, one_call
from koila.staged.facts import Info
from koila.staged.program import Program


def as_in_eager(lazy: Any, number: torch.Tensor) -> torch.Tensor:
    """Return a tensor that torch prints as it prints in eager the value of a lazy. If the number of
    the lazy requires a gradient, it has its graph."""
    if number.requires_grad or not lazy.requires_grad:
        return number
    with torch._C._InferenceMode(False), torch.enable_grad():
        start = number.detach().requires_grad_()
        name = None if leaves.is_leaf(lazy) else _core.held(lazy, _name_of, (lazy,), {})
        shown: torch.Tensor = start if name is None else _named(name).apply(start)
    return shown


@surroundings.in_outside
def _name_of(lazy: Any) -> str | None:
    """Return the name of the node behind a pending value: its call is made on one row of ones, a
    view on all rows. None: that is not possible, or the call writes, draws or is koila's own."""
    value = _core.id(lazy)
    node = None if value is None else Program([value]).node_of(value)
    if value is None or node is None or node.writes or node.leaf_writes or node.is_random:
        return None
    func, _, _, _, _, inputs, _ = _core.node(node.id)
    if str(getattr(func, "__module__", "")).startswith("koila."):
        return None
    n_rows = 1 if Info.of(value).view is None else -1
    tensors = {one: _stand_in(Info.of(one), n_rows) for one in inputs if one >= 0}
    try:
        made = one_call.run(node.id, n_rows, tensors, node.outs.stop, False)[value]
    except Exception:  # of a call that cannot be made on ones, or on a single row
        return None
    return None if made is None or made.grad_fn is None else type(made.grad_fn).__name__


def _stand_in(info: Info, n_rows: int) -> torch.Tensor:
    """Return ones in place of a value, without memory; `n_rows`: -1 for all."""
    place = info.place if n_rows >= 0 else None
    shape = info.shape if place is None else chunk_shape(info.shape, place, n_rows)
    fill = torch.ones if info.dtype.is_floating_point else torch.zeros  # labels of the first class
    like = fill((), dtype=info.dtype, device=info.device).expand(shape)
    return like.requires_grad_().view_as(like) if info.requires_grad else like


@functools.cache
def _named(name: str) -> Any:
    """Return a function whose node has this name."""

    class Shown(engine.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.view_as(x)

    node: Any = Shown
    node._backward_cls.__name__ = name
    return node
