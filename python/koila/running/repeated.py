# SPDX-License-Identifier: Apache-2.0
"""Calls of a checkpoint's function that run once more in backward (`recomputed.py`), and their
arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from koila.basics import generator_state, switches
from koila.basics.rows import layout_of, with_layout
from koila.reductions import norms
from koila.staged.meta import map_nested


class Ref(NamedTuple):
    """The key of a tensor, in its place among the arguments of a call."""

    key: int


class Call(NamedTuple):
    """A call of a body, with references (`Ref`) in place of tensors."""

    region: int
    func: Callable[..., Any]
    args: Any
    kwargs: Any
    context: switches.Context
    outs: list[int | None]  # keys
    again: norms.Again | None
    #: The generators that it may draw from, each with its state before the call.
    states: list[tuple[torch.Generator, Any]]

    def make(self, env: dict[int, Tensor]) -> None:
        """Run the call on the tensors in `env`, and add its results to `env`."""

        args, kwargs = map_nested((self.args, self.kwargs), Ref, lambda ref: env[ref.key])
        if self.again is not None:  # torch's second run updates the statistics too
            args = (*args[:3], *self.again.running, args[5], self.again.next(), *args[7:])
        for generator, state in self.states:
            generator_state.set_to(generator, state)
        with self.context.on():
            made = self.func(*args, **kwargs)
        if made is None:  # the call was __setitem__
            made = args[0]
        results = made if isinstance(made, tuple | list) else (made,)
        for key, one in zip(self.outs, results, strict=False):
            if key is not None:
                env[key] = one


class Layout:
    """Where a tensor is in its memory, which is not kept."""

    __slots__ = ("dtype", "ref", "where")

    def __init__(self, tensor: Tensor) -> None:
        self.ref = StorageWeakRef(tensor.untyped_storage())
        self.where = layout_of(tensor)
        self.dtype = tensor.dtype

    def is_of(self, tensor: Tensor) -> bool:
        """Return whether the memory is that of `tensor`."""
        is_same = self.ref == StorageWeakRef(tensor.untyped_storage()) and not self.ref.expired()
        return is_same and self.dtype == tensor.dtype

    def taken_of(self, tensor: Tensor) -> Tensor:
        """Return the tensor, as a view of another one in its memory, without a graph."""
        with torch.set_grad_enabled(False):
            return with_layout(tensor.detach(), self.where)


class Memory:
    """The memory of a tensor that a part (`cut.py`) made in a body, and handed out."""

    __slots__ = ("add_reader", "dtype", "layout", "ref")

    def __init__(self, whole: Tensor, add_reader: Callable[[], Callable[[], Tensor]]) -> None:
        self.ref = StorageWeakRef(whole.untyped_storage())
        self.layout = whole.shape, whole.stride()
        self.dtype = whole.dtype
        self.add_reader = add_reader


class OfPart:
    """A tensor from outside of the live calls of a body: a part makes its memory, and makes it once
    more when it is needed."""

    __slots__ = ("__weakref__", "compute", "layout", "memory", "needs_gradient", "tensor")

    def __init__(self, tensor: Tensor, memory: Memory) -> None:
        self.memory = memory
        self.compute = memory.add_reader()
        self.layout = layout_of(tensor)
        self.needs_gradient = tensor.requires_grad
        self.tensor: None = None  # nothing is kept

    def get(self) -> Tensor:
        """Return the tensor, computed again."""
        whole = self.compute()
        if (whole.shape, whole.stride()) != self.memory.layout or whole.storage_offset():
            shape, strides = self.memory.layout
            like = torch.empty_strided(shape, strides, dtype=whole.dtype, device=whole.device)
            whole = like.copy_(whole)
        with torch.set_grad_enabled(False):
            tensor = with_layout(whole, self.layout)
        return tensor.detach().requires_grad_(self.needs_gradient)
