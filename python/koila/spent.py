"""The number of a value whose backward ran: it still says that it requires a gradient."""

from __future__ import annotations

from typing import Any

import torch

_SECOND_TIME = (
    "Trying to backward through the graph a second time (or directly access saved tensors after "
    "they have already been freed). Saved intermediate values of the graph are freed when you "
    "call .backward() or autograd.grad(). Specify retain_graph=True if you need to backward "
    "through the graph a second time or if you need to access saved tensors after calling "
    "backward."
)


class _Spent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        return number.view_as(number)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise RuntimeError(_SECOND_TIME)


def spent(number: torch.Tensor) -> torch.Tensor:
    """`number` with a graph behind it that was used up.

    Example:
        >>> import torch
        >>> from koila.spent import spent
        >>> spent(torch.ones(())).requires_grad
        True
    """
    anchor = torch.empty((), dtype=number.dtype, device=number.device, requires_grad=True)
    with torch.enable_grad():
        result: torch.Tensor = _Spent.apply(anchor, number)  # type: ignore[no-untyped-call]
    return result
