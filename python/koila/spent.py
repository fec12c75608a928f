"""The number of a value whose backward ran: it still says that it requires a gradient."""

from __future__ import annotations

import functools
from typing import Any

import torch

from koila import engine
from koila.errors import StaleError

_DATA: Any = vars(torch._C.TensorBase)["data"]


@functools.cache
def _second_time() -> str:
    """What torch says to who differentiates a second time."""
    with torch._C._InferenceMode(False), torch.enable_grad():
        leaf = torch.ones((), device="cpu", requires_grad=True)
        root = leaf.exp()
        try:
            for _ in range(2):
                engine.gradients_of([root], [leaf], [torch.ones_like(root)])
        except RuntimeError as error:
            return str(error)
    raise AssertionError("a graph that was used up can be used again")


class _Refusing(torch.autograd.Function):
    """A number through which no gradient goes back."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return leaf.clone()


class _Spent(_Refusing):
    """A number whose graph was used up. Where no gradient comes there is nothing to refuse: the
    engine goes on through all inputs of a node that stands for a part of a program."""

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> None:
        if any(gradient is not None for gradient in gradients):
            raise RuntimeError(_second_time())
        return None


def spent(value: torch.Tensor) -> torch.Tensor:
    """`number`, in the same memory, with a graph behind it that was used up: torch refuses to go
    through it again. Whoever keeps that graph keeps none of the memory, as with eager's.

    Example:
        >>> import torch
        >>> from koila.spent import spent
        >>> spent(torch.ones(())).requires_grad
        True
    """
    return _hung_on(_Spent, value)


@functools.cache
def _root(function: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The one result of a function that all numbers of a type hang on."""
    root: torch.Tensor = function.apply(torch.ones((), dtype=dtype, device=device).requires_grad_())
    return root


def _hung_on(function: Any, value: torch.Tensor) -> torch.Tensor:
    with torch._C._InferenceMode(False), torch.enable_grad():
        root = _root(function, value.dtype, value.device)
        hung: torch.Tensor = torch.ops.aten._unsafe_view.default(
            root.expand(value.shape), value.shape
        )
        _DATA.__set__(hung, value.detach())  # which is no view of the root to torch
    return hung


class _Outdated(_Refusing):
    """A number whose graph read what has changed since."""

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> None:
        if all(gradient is None for gradient in gradients):
            return None
        raise StaleError(
            "backward: a value was read, a tensor that it was computed with was changed in place "
            "after that, and only its number is left; call backward() before you change the tensor"
        )


def outdated(value: torch.Tensor) -> torch.Tensor:
    """`number` with a graph behind it that raises: what it was computed with is another now."""
    return _hung_on(_Outdated, value)
