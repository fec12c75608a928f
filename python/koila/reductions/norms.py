# SPDX-License-Identifier: Apache-2.0
"""Batch normalization in training, by chunks: the statistics of the batch are combined from those
of chunks, and each chunk is normalized with them.

It is recorded as two calls: the statistics, a reduction that only chunks run, and the
normalization, which is torch's own call if the program runs whole. The normalization sends
gradients to the statistics too: with x^ the normalized input, g the gradient of the result, and
sums over all dims but the channels,

    d loss / d mean = -w / std * sum(g)        d loss / d var = -w / (2 std^2) * sum(g x^)

with std^2 = var + eps; sum(g) and sum(g x^) are the gradients of bias and weight, which torch's own
backward gives (Ioffe and Szegedy, 2015, section 3).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from koila import _core
from koila.basics import engine
from koila.basics.enter import call_with_lazies
from koila.basics.rows import OWN_WIDTH, WIDENED

Pair = tuple[Tensor, Tensor]
# Taken at import: while a checkpoint's body is recorded, koila replaces torch.batch_norm.
_batch_norm: Callable[..., Tensor] = torch.batch_norm
_backward = torch.ops.aten.native_batch_norm_backward.default


#: Statistics are kept for later runs of a chunk if it has at least this many terms a channel.
_MANY = 256


class Moments(engine.Function):
    """The mean of each channel of a chunk, and the sum of squared deviations from it; saves only
    the input.

    They are computed by the kernel of torch's batch_norm, which sums halves in float32. `shared`
    keeps these numbers under `key` for other runs of the chunk.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, shared: dict[Any, Pair], key: Any) -> Pair:
        ctx.n = x.numel() // x.shape[1]
        computed = shared.get(key)
        if computed is None:
            # The kernel updates running statistics: these are not read. Of halves, they say that
            # it returns float32.
            unread = None
            if x.dtype not in OWN_WIDTH:
                unread = x.new_zeros(x.shape[1], dtype=WIDENED[x.dtype])
            mean, var = torch.batch_norm_update_stats(x, unread, unread, 0.0)
            squares = var.mul_(ctx.n)
        else:
            mean, squares = computed[0].detach(), computed[1].detach()
        if ctx.n >= _MANY:
            shared[key] = mean.detach(), squares.detach()
        ctx.save_for_backward(x, mean)
        return mean, squares

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        x, mean = ctx.saved_tensors
        of_mean, of_squares = gradients
        # 2 (x - mean) of_squares + of_mean / n, computed by a batch_norm with variance 1/4; a
        # product and a sum are faster if x is channels_last.
        shift = of_mean / ctx.n
        if x.is_contiguous():
            var = torch.full_like(mean, 0.25)
            made = torch.native_batch_norm(x, of_squares, shift, mean, var, False, 0.0, 0.0)
            return made[0], None, None
        shape, scale = [1, -1] + [1] * (x.dim() - 2), 2 * of_squares
        shift = (shift - scale * mean).view(shape)
        return torch.addcmul(shift, x, scale.view(shape)).to(x.dtype), None, None


class _Normalized(engine.Function):
    """batch_norm with the statistics as arguments, which get gradients.

    `factors` keeps, for all chunks, by what the gradients of bias and weight are multiplied to give
    those of mean and variance. The other arguments are those of `batch_norm`.
    """

    @staticmethod
    def forward(ctx: Any, factors: list[Tensor], x: Tensor, *words: Any) -> Tensor:
        weight, bias, *_, eps, _, var, mean = words
        ctx.save_for_backward(x, weight, mean, var)
        ctx.eps, ctx.factors = eps, factors
        weight = None if weight is None else weight.to(mean.dtype)
        bias = None if bias is None else bias.to(mean.dtype)
        return torch.native_batch_norm(x, weight, bias, mean, var, False, 0.0, eps)[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, var = ctx.saved_tensors
        scale = torch.ones_like(mean) if weight is None else weight.to(mean.dtype)
        needs, eps, factors = ctx.needs_input_grad, ctx.eps, ctx.factors
        if gradient.stride() != x.stride():  # torch's CPU kernels assume equal strides
            gradient = torch.empty_like(x).copy_(gradient)
        # What training would have saved is not read in evaluation; CUDA kernels require a tensor.
        of_x, of_weight, of_bias = _backward(
            gradient, x, scale, mean, var, mean, mean, False, eps, [needs[1], True, True]
        )
        if not factors and needs[-1]:
            inverse = torch.rsqrt(var + eps)
            factor = scale * inverse
            factors += -factor, factor * inverse * -0.5
        return (
            None,
            of_x if needs[1] else None,
            of_weight if needs[2] else None,
            of_bias if needs[3] else None,
            *[None] * 6,
            of_weight * factors[1] if needs[-1] else None,
            of_bias * factors[0] if needs[-1] else None,
        )


def with_statistics() -> Callable[..., Tensor]:
    """Return `batch_norm`, to be called with the same statistics on the chunks of one loop."""
    return functools.partial(_Normalized.apply, [])


def batch_moments(
    x: Tensor, dim: list[int], *, correction: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The recorded reduction: variance and mean. Chunks compute its parts by `partials.Moments`.

    This function runs only if the call is not recorded, which happens with no rows.
    """
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
    """Normalize with the results of `batch_moments`, or in a whole run by torch's own function."""
    words = weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled
    if var is None or mean is None:
        return _batch_norm(x, *words)
    made: Tensor = with_statistics()(x, *words, var, mean)
    return made


def record(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record batch_norm in training as two calls; NotImplemented: as a single one."""
    if len(args) > 9:
        # The second call cannot be recorded after all, since pending calls read the running
        # statistics that it updates. Their graphs save that memory: all of them run whole now.
        return _core.live(func, args[:9], {}, False)
    if kwargs or len(args) != 9 or not args[5] or type(args[0]) is not _core.LazyTensor:
        return NotImplemented
    x = args[0]
    over = [0, *range(2, x.dim())]  # all dims but the channels
    var, mean = call_with_lazies(batch_moments, (x,), x, over, correction=0, dtype=WIDENED[x.dtype])
    if not _core.set_for_chunks(mean):
        return NotImplemented
    return call_with_lazies(batch_norm, (x,), *args, var, mean)


class Group:
    """The calls of one checkpoint: if a gradient reaches any of them, torch recomputes all."""

    index = 0  # backward recomputes groups in decreasing order of it: the one that ended last first

    def __init__(self) -> None:
        self.regions: set[int] = set()  # the numbers of its regions on the tape
        self.moved: set[int] = set()  # ids of the statistics that it updates, while it is recorded
        self.moved_before: set[int] = set()  # those that a part updates which was cut off meanwhile


class Again(float):
    """The momentum of a batch_norm inside a checkpoint, which says that backward, by recomputing
    the checkpoint, updates the running statistics a second time."""

    groups: tuple[Group, ...]  # the checkpoints that the call is in
    running: Pair  # the running statistics
    n_batches: Tensor | None  # the module's num_batches_tracked
    is_mean: bool  # the running statistics are averages over all batches (momentum=None)

    def next(self) -> float:
        """Count a batch, and return its weight in the running statistics (the momentum)."""
        if self.n_batches is not None:
            self.n_batches.add_(1)
        if self.is_mean and self.n_batches is not None:
            return 1.0 / int(self.n_batches)
        return float(self)


def without_again(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return arguments with plain numbers for `Again`, so that nothing is updated twice."""
    return tuple(float(arg) if isinstance(arg, Again) else arg for arg in args)
