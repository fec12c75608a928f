# SPDX-License-Identifier: Apache-2.0
"""Count the bytes of the tensors that calls allocate, until they are freed: of real tensors, and of
meta tensors as if they had memory."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from koila.basics.surroundings import Mode


class Counter(Mode):
    """Counts, in a `with` block, the bytes of the tensors made in it: `now`, and `most` at any
    time. It raises a TooMuchError when they exceed `allowed`."""

    sees_koila = True  # it changes no number

    def __init__(self, allowed: float = math.inf) -> None:
        super().__init__()
        self.allowed = allowed
        self.now = self.most = 0
        self._alive: dict[int, Any] = {}  # weak references to the storages counted

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        results = made if isinstance(made, tuple | list) else (made,)
        tensors = [
            one for one in results if isinstance(one, Tensor) and one.layout == torch.strided
        ]
        for one in tensors:
            self._note(one.untyped_storage())
        operands = [one for one in args if isinstance(one, Tensor)]
        n_times = _WITH_BUFFERS.get(func.overloadpacket, 0)
        held = n_times * sum(map(_n_bytes, (*operands, *tensors)))
        self.most = max(self.most, self.now + held)
        if self.most > self.allowed:
            raise TooMuchError
        return made

    def _note(self, storage: Any) -> None:
        key, n_bytes = storage._cdata, storage.nbytes()
        if key in self._alive:
            return

        def freed(_: Any) -> None:
            del self._alive[key]
            self.now -= n_bytes

        self._alive[key] = weakref.ref(storage, freed)
        self.now += n_bytes


def _n_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


#: Ops whose kernels hold so many times the bytes of their operands and results in buffers of their
#: own: convolutions copy them into other layouts; a matrix exponential keeps terms of its series.
_WITH_BUFFERS = {
    torch.ops.aten.convolution: 2,
    torch.ops.aten.convolution_backward: 2,
    torch.ops.aten.linalg_matrix_exp: 5,
}


class TooMuchError(MemoryError):
    """Tensors exceed the bytes allowed."""


class Held(NamedTuple):
    """The bytes that a call holds beside its operands, results and their gradients."""

    run: int = 0  # while it runs
    kept: int = 0  # from then until its backward
    back: int = 0  # while its backward runs


def held(call: Callable[[], Any], operands: Sequence[Tensor]) -> tuple[Any, Held]:
    """Run a call on meta tensors, which reads `operands`, and its backward. Return the result of
    the call, and the bytes that it holds. Its backward counts 0 if torch cannot run it there."""
    with Counter() as forward:
        made = call()
    results = made if isinstance(made, tuple | list) else (made,)
    tensors = [one for one in results if isinstance(one, Tensor)]
    storages = {one.untyped_storage()._cdata: one.untyped_storage() for one in tensors}
    kept = max(0, forward.now - sum(storage.nbytes() for storage in storages.values()))
    outs = [one for one in tensors if one.requires_grad]
    inputs = [one for one in operands if one.requires_grad]
    back = 0
    if outs and inputs:
        seeds = [torch.empty_like(one) for one in outs]
        with contextlib.suppress(Exception), Counter() as backward:
            found = torch.autograd.grad(outs, inputs, seeds, allow_unused=True)
            back = max(0, backward.most - sum(_n_bytes(one) for one in found if one is not None))
    return made, Held(forward.most - forward.now, kept, back)
