# SPDX-License-Identifier: Apache-2.0
"""Softmax over the batch, by chunks: from the maximum over all rows, and the logarithm of the sum
of exp(x - maximum), each chunk computes the softmax of its rows.

It is recorded as two calls, like batch normalization (norms.py): a reduction (`shares`) that only
chunks run, and the softmax, which is torch's own call if the program runs whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from koila import _core
from koila.basics import engine
from koila.basics.enter import call_with_lazies
from koila.basics.rows import WIDENED
from koila.reductions import norms, scans


class Sums(engine.Function):
    """sum(exp(x - most)) over dims, which are kept with size 1. It saves only its inputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, most: Tensor, dim: list[int]) -> Tensor:
        ctx.save_for_backward(x, most)
        return torch.sub(x.to(most.dtype), most).exp_().sum(dim, keepdim=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        x, most = ctx.saved_tensors
        made = torch.sub(x.to(most.dtype), most).exp_().mul_(gradients[0])
        return made.to(x.dtype), None, None


def shares(
    x: Tensor, dim: list[int], *, correction: int, keepdim: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The recorded reduction: the logarithm of the sum of exponentials, and the maximum.

    This function only stands for the reduction on the tape, with the words and the layout of
    torch.var_mean: chunks compute its parts by `partials.Shares`. Its body runs only for inputs
    that are not recorded, such as integers; then torch's softmax raises the error.
    """
    return x, x


def _from_shares(
    own: Callable[..., Tensor], change: Callable[[Tensor], Tensor]
) -> Callable[..., Tensor]:
    """Return what is recorded for a softmax: it changes the log-softmax that the results of
    `shares` give; without them, in a whole run, it makes torch's own call."""

    def call(
        x: Tensor,
        dim: int,
        dtype: None = None,
        logs: Tensor | None = None,
        most: Tensor | None = None,
    ) -> Tensor:
        if logs is None or most is None:
            return own(x, dim)
        # If the logarithm is inf, all results and gradients are nan, as in torch.
        logs = logs * torch.where(logs == torch.inf, torch.nan, 1.0)
        return change(x - most.detach() - logs).to(x.dtype)

    call.__name__ = own.__name__
    return call


softmax = _from_shares(torch.softmax, torch.exp)
log_softmax = _from_shares(torch.log_softmax, lambda logs: logs)
#: The functions that read the result of a reduction which only chunks run, each with the number of
#: positional arguments of torch's own function.
N_OWN: dict[Callable[..., Any], int] = {
    softmax: 3,
    log_softmax: 3,
    norms.batch_norm: 9,
    **dict.fromkeys(scans.CALLS, 2),
}
CALLS = {call.__name__: call for call in (softmax, log_softmax)}


def run_alone(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function of N_OWN without the results of its reduction, as torch's own call."""
    return func(*args[: N_OWN[func]], **_own_words(kwargs))


def _own_words(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name != "starts"}


def record(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record a softmax over the batch as two calls; NotImplemented: as a single one."""
    x = kwargs.get("input", args[0] if args else None)
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if type(x) is not _core.LazyTensor or dim is None:
        return NotImplemented
    dtype = kwargs.get("dtype", args[2] if len(args) > 2 else None)
    if dtype is None and x.is_cuda and torch.is_autocast_enabled("cuda"):
        dtype = WIDENED[x.dtype]  # autocast on CUDA runs softmax in float32
    x = x if dtype is None else x.to(dtype)
    words = {"correction": 0, "keepdim": True, "dtype": WIDENED[x.dtype]}
    logs, most = call_with_lazies(shares, (x,), x, [dim], **words)
    if not _core.set_for_chunks(most):
        return NotImplemented
    return call_with_lazies(CALLS[func.__name__], (x,), x, dim, None, logs, most)


def run_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run torch's own call at once, if the second call cannot be recorded after all."""
    return _core.live(func, args[: N_OWN[func]], _own_words(kwargs), False)
