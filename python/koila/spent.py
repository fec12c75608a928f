"""The number of a value whose backward ran: it still says that it requires a gradient."""

from __future__ import annotations

import functools
from typing import Any

import torch

from koila import engine
from koila.errors import StaleError

_DATA: Any = vars(torch._C.TensorBase)["data"]


@functools.cache
def _anchor(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The one leaf that every spent number of a type hangs on."""
    with torch._C._InferenceMode(False):  # whoever asks first, it serves all
        return torch.ones((), dtype=dtype, device=device, requires_grad=True)


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


def spent(value: torch.Tensor) -> torch.Tensor:
    """`number`, in the same memory, with a graph behind it that was used up: torch refuses to go
    through it again. Whoever keeps that graph keeps none of the memory, as with eager's.

    Example:
        >>> import torch
        >>> from koila.spent import spent
        >>> spent(torch.ones(())).requires_grad
        True
    """
    with torch._C._InferenceMode(False), torch.enable_grad():
        refuse: Any = torch._C._functions.DelayedError(_second_time(), 1)
        anchor = _anchor(value.dtype, value.device)
        given: torch.Tensor = refuse(anchor.expand(value.shape))
        _DATA.__set__(given, value.detach())
    return given


class _Outdated(torch.autograd.Function):
    """A number whose graph read what has changed since."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise StaleError(
            "backward: a value was read, a tensor that it was computed with was changed in place "
            "after that, and only its number is left; call backward() before you change the tensor"
        )


def outdated(value: torch.Tensor) -> torch.Tensor:
    """`number` with a graph behind it that raises: what it was computed with is another now."""
    anchor = _anchor(value.dtype, value.device)
    with torch.enable_grad():
        result: torch.Tensor = _Outdated.apply(anchor, value)  # type: ignore[no-untyped-call]
    return result
