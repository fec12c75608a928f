# SPDX-License-Identifier: Apache-2.0
"""Softmax over the batch by rows: all rows meet in their largest, and in the logarithm of a sum of
exponentials of what lies below it; each chunk goes on with those.

Recorded are two calls, as for batch normalization (norms.py): what rows meet in, a reduction that
only chunks need, and the softmax, which whole is torch's own call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from koila import _core
from koila.basics import engine
from koila.reductions import norms, scans
from koila.reductions.norms import wide


class _Sums(engine.Function):
    """Sums of exponentials of what lies below `most`: only the input is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, most: Tensor, dim: list[int]) -> Tensor:
        ctx.save_for_backward(x, most)
        return torch.sub(x.to(most.dtype), most).exp_().sum(dim, keepdim=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        x, most = ctx.saved_tensors
        made = torch.sub(x.to(most.dtype), most).exp_().mul_(gradients[0])
        return made.to(x.dtype), None, None


def sums(x: Tensor, most: Tensor, dim: list[int]) -> Tensor:
    made: Tensor = _Sums.apply(x, most, dim)
    return made


def shares(
    x: Tensor, dim: list[int], *, correction: int, keepdim: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """What rows meet in: the logarithm, and the largest. In chunks, be it one, its parts are made
    by `sums`; its results are laid out as those of torch.var_mean. Nothing meets in what could not
    be recorded (integers): torch's own call says why."""
    return x, x


def _below(x: Tensor, logs: Tensor, most: Tensor) -> Tensor:
    """The logarithms of shares. Beside inf nothing is a number, nor its gradient."""
    return x - most.detach() - logs * torch.where(logs == torch.inf, torch.nan, 1.0)


def softmax(
    x: Tensor,
    dim: int,
    dtype: None = None,
    logs: Tensor | None = None,
    most: Tensor | None = None,
) -> Tensor:
    """Whole, where nobody summed up, torch's own call."""
    if logs is None or most is None:
        return torch.softmax(x, dim)
    return torch.exp(_below(x, logs, most)).to(x.dtype)


def log_softmax(
    x: Tensor,
    dim: int,
    dtype: None = None,
    logs: Tensor | None = None,
    most: Tensor | None = None,
) -> Tensor:
    """Likewise."""
    if logs is None or most is None:
        return torch.log_softmax(x, dim)
    return _below(x, logs, most).to(x.dtype)


#: What is given what all rows have met in, and how many words torch's own call has.
N_OWN: dict[Callable[..., Any], int] = {
    softmax: 3,
    log_softmax: 3,
    norms.batch_norm: 9,
    **dict.fromkeys(scans.CALLS, 2),
}
CALLS = {call.__name__: call for call in (softmax, log_softmax)}


def run_alone(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch's own call, without what all rows have met in."""
    own = {name: value for name, value in kwargs.items() if name != "starts"}
    return func(*args[: N_OWN[func]], **own)


def record(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record a softmax over the batch as two calls."""
    x = kwargs.get("input", args[0] if args else None)
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if type(x) is not _core.LazyTensor or dim is None:
        return NotImplemented
    dtype = kwargs.get("dtype", args[2] if len(args) > 2 else None)
    if dtype is None and x.is_cuda and torch.is_autocast_enabled("cuda"):
        dtype = wide(x.dtype)  # as its list says
    x = x if dtype is None else x.to(dtype)
    call: Any = handle_torch_function
    words = {"correction": 0, "keepdim": True, "dtype": wide(x.dtype)}
    logs, most = call(shares, (x,), x, [dim], **words)
    if not _core.set_for_chunks(most):
        return NotImplemented
    return call(CALLS[func.__name__], (x,), x, dim, None, logs, most)


def run_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What cannot be recorded after all is torch's own call, and runs at once."""
    del kwargs
    return _core.live(func, args[:3], {}, False)
