"""The number of a value whose backward ran: it still says that it requires a gradient."""

from __future__ import annotations

import functools
from typing import Any

import torch

from koila import engine
from koila.errors import StaleError


@functools.cache
def _anchor(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The one leaf that every spent number of a type hangs on."""
    with torch._C._InferenceMode(False):  # whoever asks first, it serves all
        return torch.ones((), dtype=dtype, device=device, requires_grad=True)


def spent(number: torch.Tensor) -> torch.Tensor:
    """`number` with a graph behind it that was used up: torch refuses to go through it again.

    It is multiplied by a leaf of value one, which changes no bit, and that product is
    differentiated,
    which frees what it saved.

    Example:
        >>> import torch
        >>> from koila.spent import spent
        >>> spent(torch.ones(())).requires_grad
        True
    """
    anchor = _anchor(number.dtype, number.device)
    single = number.detach()
    for dim, (size, stride) in enumerate(zip(number.shape, number.stride(), strict=True)):
        if stride == 0 and size > 1:  # an expanded dim takes no memory, and shall take none here
            single = single.narrow(dim, 0, 1)
    with torch.enable_grad():
        product = single * anchor
        spread = product.expand(number.shape) if product.shape != number.shape else product
    zero = torch.zeros((), dtype=number.dtype, device=number.device).expand_as(product)
    engine.gradients_of([product], [anchor], [zero])
    return spread


class _Outdated(torch.autograd.Function):
    """A number whose graph read what has changed since."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        return number.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise StaleError(
            "backward: a value was read, a tensor that it was computed with was changed in place "
            "after that, and only its number is left; call backward() before you change the tensor"
        )


def outdated(number: torch.Tensor) -> torch.Tensor:
    """`number` with a graph behind it that raises: what it was computed with is another now."""
    anchor = _anchor(number.dtype, number.device)
    with torch.enable_grad():
        result: torch.Tensor = _Outdated.apply(anchor, number)  # type: ignore[no-untyped-call]
    return result
