# SPDX-License-Identifier: Apache-2.0
"""Batch normalization in training by rows: the statistics of the batch are put together from
chunks, and each chunk is normalized with them.

Recorded are two calls: the statistics, which only chunks need, and the normalization, which whole
is torch's own call. The gradient of the normalization goes to the statistics too: with x^ the
normalized input, g the gradient of the result, and sums over all but the channels,

    d loss / d mean = -w / std * sum(g)        d loss / d var = -w / (2 std^2) * sum(g x^)

with std^2 = var + eps; sum(g) and sum(g x^) are the gradients of bias and weight, which torch's own
backward gives (Ioffe and Szegedy, 2015, section 3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from koila import _core
from koila.basics import engine

Pair = tuple[Tensor, Tensor]
_batch_norm: Callable[..., Tensor] = torch.batch_norm  # while a body is recorded that is ours
_backward = torch.ops.aten.native_batch_norm_backward.default


def _over(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def wide(dtype: torch.dtype) -> torch.dtype:
    """In what statistics are found."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


class _Moments(engine.Function):
    """Mean, and sum of squared distances from it, for each channel: only the input is kept.

    Found by the kernel of torch's own batch_norm, which adds up halves in float32; or `known`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, known: Pair | None) -> Pair:
        ctx.n = x.numel() // x.shape[1]
        if known is None:
            unread = x.new_zeros(x.shape[1], dtype=wide(x.dtype))  # running statistics
            mean, var = torch.batch_norm_update_stats(x, unread, unread, 0.0)
            squares = var * ctx.n
        else:
            mean, squares = (part.detach() for part in known)
        ctx.save_for_backward(x, mean)
        return mean, squares

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        x, mean = ctx.saved_tensors
        of_mean, of_squares = gradients
        # 2 (x - mean) of_squares + of_mean / n: a batch_norm of variance 1, or a product and a sum,
        # which are faster where channels come last
        scale, shift = 2 * of_squares, of_mean / ctx.n
        if x.is_contiguous():
            ones = torch.ones_like(mean)
            return torch.native_batch_norm(x, scale, shift, mean, ones, False, 0.0, 0.0)[0], None
        shape = [1, -1] + [1] * (x.dim() - 2)
        shift = (shift - scale * mean).view(shape)
        return torch.addcmul(shift, x, scale.view(shape)).to(x.dtype), None


#: A chunk with so many terms a channel is not gone through twice for their sake.
_MANY = 256


def moments(x: Tensor, memo: dict[str, Any]) -> Pair:
    """The number of a chunk's terms is known; what is added up of it.

    Args:
        x: the input on a chunk.
        memo: what earlier runs of that chunk have found.
    """
    made: Pair = _Moments.apply(x, memo.get("moments"))
    if x.numel() >= _MANY * x.shape[1]:
        memo["moments"] = made[0].detach(), made[1].detach()
    return made


class _Normalized(engine.Function):
    """batch_norm with statistics that are given, and get gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        var: Tensor,
        eps: float,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, var)
        ctx.eps = eps
        weight, bias = (None if w is None else w.to(mean.dtype) for w in (weight, bias))
        return torch.native_batch_norm(x, weight, bias, mean, var, False, 0.0, eps)[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, var = ctx.saved_tensors
        scale = torch.ones_like(mean) if weight is None else weight.to(mean.dtype)
        needs = ctx.needs_input_grad
        if gradient.stride() != x.stride():  # torch's kernels for the CPU take them to be alike
            gradient = torch.empty_like(x).copy_(gradient)
        unsaved = mean.new_empty(0)  # of no batch's own statistics; CUDA's kernels ask for a tensor
        of_x, of_weight, of_bias = _backward(
            gradient, x, scale, mean, var, unsaved, unsaved, False, ctx.eps, [needs[0], True, True]
        )
        factor = -scale * torch.rsqrt(var + ctx.eps)
        of_mean = factor * of_bias
        of_var = factor * of_weight * torch.rsqrt(var + ctx.eps) / 2
        return (
            of_x if needs[0] else None,
            of_weight if needs[1] else None,
            of_bias if needs[2] else None,
            of_mean,
            of_var,
            None,
        )


def batch_moments(
    x: Tensor, dim: list[int], *, correction: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """torch.var_mean, by a name of its own: in chunks, be it one, its parts are made by `moments`.
    It is called where it could not be recorded: of no rows."""
    return torch.var_mean(x.to(dtype), dim, correction=correction)


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
    var: Tensor | None = None,
    mean: Tensor | None = None,
) -> Tensor:
    """Whole, where nobody made the statistics, torch's own call."""
    if var is None or mean is None:
        words = weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled
        made: Tensor = _batch_norm(x, *words)
        return made
    normalized: Tensor = _Normalized.apply(x, weight, bias, mean, var, eps)
    return normalized


def record(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record batch_norm in training as two calls."""
    if len(args) > 9:
        # It cannot be recorded after all, as calls that wait read the statistics that it moves.
        # Torch's graphs of those keep the memory that is written here: they run with it, whole.
        return _core.live(func, args[:9], {}, False)
    if kwargs or len(args) != 9 or not args[5] or type(args[0]) is not _core.LazyTensor:
        return NotImplemented
    x = args[0]
    call: Any = handle_torch_function
    var, mean = call(batch_moments, (x,), x, _over(x), correction=0, dtype=wide(x.dtype))
    if not _core.set_for_chunks(mean):
        return NotImplemented
    return call(batch_norm, (x,), *args, var, mean)


class Group:
    """The calls of one checkpoint: where a gradient goes to one, torch runs all of them again."""

    index = 0  # backward runs bodies in falling order of this: the body that ended last is first

    def __init__(self) -> None:
        self.regions: set[int] = set()  # of the tape, where its calls are
        self.moved: set[int] = set()  # ids of the statistics, while it is recorded


class Again(float):
    """The momentum of a batch_norm in the body of a checkpoint: backward moves its statistics by it
    once more."""

    groups: tuple[Group, ...]
    running: Pair
    n_batches: Tensor | None  # how many its module has counted
    is_mean: bool  # of all of these

    def next(self) -> float:
        """Count a batch, and return its weight in the running statistics (the momentum)."""
        if self.n_batches is not None:
            self.n_batches.add_(1)
        if self.is_mean and self.n_batches is not None:
            return 1.0 / int(self.n_batches)
        return float(self)


def without_again(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a call, of which a backward moves nothing once more."""
    return tuple(float(arg) if isinstance(arg, Again) else arg for arg in args)
