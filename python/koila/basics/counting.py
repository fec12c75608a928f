# SPDX-License-Identifier: Apache-2.0
"""Counts the bytes of tensors that calls make, from when each is made until it is freed: of real
tensors, and of meta tensors as if they had memory."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Counter(TorchDispatchMode):
    """A block that counts the bytes of the tensors made in it, now and at most."""

    sees_koila = True  # it changes no number

    def __init__(self, allowed: float = math.inf) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.allowed = allowed  # bytes, from which on it raises
        self.now = self.most = 0
        self._there: dict[int, Any] = {}  # weak references to storages

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
        given = [one for one in args if isinstance(one, Tensor)]
        n_times = _WITH_BUFFERS.get(func.overloadpacket, 0)
        held = n_times * sum(map(_n_bytes, (*given, *tensors)))
        self._reach(self.now + held)
        return made

    def _note(self, storage: Any) -> None:
        key, n_bytes = storage._cdata, storage.nbytes()
        if key in self._there:
            return

        def go(_: Any) -> None:
            del self._there[key]
            self.now -= n_bytes

        self._there[key] = weakref.ref(storage, go)
        self.now += n_bytes

    def _reach(self, n_bytes: int) -> None:
        self.most = max(self.most, n_bytes)
        if self.most > self.allowed:
            raise TooMuchError


def _n_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


#: How many times all that they are given and make lies in buffers of kernels: convolutions lay it
#: out anew, and a power series has ten terms and sums of them for its one operand and result.
_WITH_BUFFERS = {
    torch.ops.aten.convolution: 2,
    torch.ops.aten.convolution_backward: 2,
    torch.ops.aten.linalg_matrix_exp: 5,
}


class TooMuchError(MemoryError):
    """More was made than is left."""


class Held(NamedTuple):
    """Bytes of one call beside its operands, results and their gradients."""

    run: int = 0  # while it runs
    kept: int = 0  # for its backward
    back: int = 0  # while that runs


def held(call: Callable[[], Any], operands: Sequence[Tensor]) -> tuple[Any, Held]:
    """Make a call on meta tensors, and differentiate what it makes.

    Returns:
        What it returns, and what that takes. Where torch cannot differentiate it on meta tensors,
        nothing is known of its backward.
    """
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
