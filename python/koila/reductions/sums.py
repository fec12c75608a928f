# SPDX-License-Identifier: Apache-2.0
"""Sums, means and variances over the batch, computed from partial results of chunks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from koila.basics import engine
from koila.basics.table import parse
from koila.messages.errors import NotInChunksError
from koila.reductions import norms, reduction
from koila.reductions.reduction import Call, Reduction, count, dims, n_reduced, ratio, total, widen


class Sum(Reduction):
    """Any op that sums over the rows: sum, a product that contracts them, einsum, count_nonzero."""

    def partial(self, part: int, call: Call) -> torch.Tensor:
        if call.wide == call.dtype:
            return call.run()
        if any("dtype" in word.names for word in parse(call.signature)):
            return call.run(dtype=call.wide)
        return call.run(**{name: widen(value) for name, value in call.words.items()})

    def combine(self, parts: list[list[torch.Tensor]], call: Call) -> torch.Tensor:
        return total(parts[0]).to(call.dtype)


class Mean(Reduction):
    """mean: the parts are the sum and the number of terms."""

    counts = frozenset((1,))

    def partial(self, part: int, call: Call) -> torch.Tensor:
        x, dim = call.word("input"), call.word("dim")
        if part == 1:
            return count(n_reduced(x, dims(x, dim)))
        return torch.sum(x, dims(x, dim), call.word("keepdim", False), dtype=call.wide)

    def combine(self, parts: list[list[torch.Tensor]], call: Call) -> torch.Tensor:
        return ratio(parts, call.dtype)


class Var(Reduction):
    """var, std and var_mean: the parts are the number of terms, the mean, and the sum of squared
    deviations from it; they are combined by Chan's formula."""

    @staticmethod
    def options(call: Call) -> tuple[Any, bool, float]:
        """Return dim, keepdim and correction. `std(x, False)` means `unbiased`, not a dim."""
        dim, unbiased = call.word("dim"), call.word("unbiased")
        if isinstance(dim, bool):
            dim, unbiased = None, dim
        correction = call.word("correction")
        if correction is None:
            correction = 0 if unbiased is False else 1
        return dim, call.word("keepdim", False), correction

    def partials(self, parts: Sequence[int], call: Call) -> tuple[torch.Tensor, ...]:
        x: torch.Tensor = call.word("input")
        dim, keepdim, _ = self.options(call)
        over = dims(x, dim)
        n = count(n_reduced(x, over))
        x = widen(x)
        mean = _mean(x, over)
        # The sum of squares is minimal at the mean, so its gradient for the mean is 0.
        squares = abs_squared(x - mean.detach()).sum(over, keepdim=keepdim)
        mean = mean if keepdim else mean.squeeze(over) if over else mean
        if self.has_mean(call) and mean.device.type == "cpu" and not mean.isfinite().all():
            squares = engine.Instead.apply(squares, torch.where(mean.isinf(), mean.real, squares))
            _, own = torch.var_mean(x, over, correction=0, keepdim=keepdim)
            mean = engine.Instead.apply(mean, own)
        made = n, mean, squares
        return tuple(map(made.__getitem__, parts))

    @staticmethod
    def has_mean(call: Call) -> bool:
        """Tell whether the call returns the mean too."""
        return call.func.__name__.endswith(("_mean", "_moments"))

    def combine(self, parts: list[list[torch.Tensor]], call: Call) -> Any:
        _, _, correction = self.options(call)
        ns, means, squares = parts
        ns = [one.detach() for one in ns]  # their gradients would take as much as the others'
        n = total(ns)
        if n <= correction:
            raise NotInChunksError(f"{call.func.__name__}: {int(n)} terms leave no freedom")
        mean = _RunningMean.apply(*ns, *means)
        middle = mean.detach()
        if not _is_known_finite([mean, *squares]):
            means, squares, middle = _beside_infinities(ns, means, squares, mean)

        def deviation(k: int) -> torch.Tensor:
            return abs_squared(means[k] - middle) * ns[k].to(squares[k].dtype) + squares[k]

        var = deviation(0)
        for k in range(1, len(ns)):  # one at a time: each is as large as the result
            var = var + deviation(k)
        var = var / (n - correction).to(var.dtype)
        value = root(var) if call.func.__name__.startswith("std") else var
        value = value.to(call.dtype.to_real() if call.dtype.is_complex else call.dtype)
        mean = mean if mean.is_complex() else mean.to(call.dtype)
        return (value, mean) if self.has_mean(call) else value


def _mean(x: torch.Tensor, over: tuple[int, ...]) -> torch.Tensor:
    """Return the mean over dims, with `keepdim`: exactly c where all terms are c. The variance is
    then exactly 0, as with torch's running mean, and so is the gradient of std."""
    mean = x.mean(over, keepdim=True)
    if x.numel() == 0:
        return mean
    terms = first = x.detach()
    for dim in over:
        first = first.narrow(dim, 0, 1)
    are_equal = terms == first
    if over:  # not of a scalar
        are_equal = are_equal.all(over, keepdim=True)
    exact: torch.Tensor = engine.Instead.apply(mean, torch.where(are_equal, first, mean.detach()))
    return exact


def _is_known_finite(values: list[torch.Tensor]) -> bool:
    """Tell whether all values are known to be finite; False on an accelerator, whose numbers would
    have to be waited for."""
    if values[0].device.type != "cpu":
        return False
    return bool(total([value.detach().real for value in values]).isfinite().all())


def _beside_infinities(
    ns: list[torch.Tensor],
    means: list[torch.Tensor],
    squares: list[torch.Tensor],
    mean: torch.Tensor,
) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """Correct the parts of a variance if some values are inf or nan, so that results and gradients
    are those of torch. Return the means and squared deviations of the chunks, and the mean from
    which those means deviate.

    With an inf among the terms, the mean that torch returns is nan, but its gradient formula uses a
    mean that is inf. `ns` are the numbers of terms of the chunks, `mean` is that of all terms.
    """
    means = [
        engine.Instead.apply(m, torch.where(m.isnan() & s.isinf(), s, m))
        for m, s in zip(means, squares, strict=True)
    ]
    plain = total([m * (k / total(ns)).to(m.dtype) for k, m in zip(ns, means, strict=True)])
    middle = torch.where(mean.isfinite(), mean, plain).detach()
    squares = [
        engine.Instead.apply(s, torch.where(m.isinf(), torch.nan, s))
        for m, s in zip(means, squares, strict=True)
    ]
    # The difference of two equal infinities is nan.
    means = [torch.where(m == middle, middle, m) for m in means]
    return means, squares, middle


class _RunningMean(engine.Function):
    """The mean of all terms from the chunks' numbers of terms, followed by their means."""

    @staticmethod
    def forward(ctx: Any, *ns_and_means: torch.Tensor) -> torch.Tensor:
        n_chunks = len(ns_and_means) // 2
        ns, means = ns_and_means[:n_chunks], ns_and_means[n_chunks:]
        counts = tuple(map(float, ns))
        ctx.shares = [one / sum(counts) for one in counts]
        return _running_mean(counts, means)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        sent = [gradients[0] * share for share in ctx.shares]
        return *[None] * len(sent), *sent


def _running_mean(ns: Sequence[float], means: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the mean of all terms from the chunks' numbers of terms and means, updated chunk by
    chunk, as torch does: so the mean of equal means is exactly that mean."""
    mean, n = means[0].clone(), ns[0]
    for one, m in zip(ns[1:], means[1:], strict=True):
        n = n + one
        mean += (m - mean) * (one / n)
    return mean


def _pooled(
    ns: Sequence[float], means: Sequence[torch.Tensor], squares: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of squared deviations and the mean of all terms, in float64, from the chunks'
    numbers of terms, means and sums of squared deviations.

    A product with a number takes as long as two with a tensor, so the numbers are factors of sums.
    """
    mean, n = means[0].to(torch.float64, copy=True), ns[0]
    for one, m in zip(ns[1:], means[1:], strict=True):  # as `_running_mean`
        n += one
        mean.add_(m - mean, alpha=one / n)
    total = torch.zeros_like(mean)
    for one, m, s in zip(ns, means, squares, strict=True):
        deviation = m - mean
        total.addcmul_(deviation, deviation, value=one).add_(s)
    return total, mean


class _OfChunks(engine.Function):
    """The variance and the mean of all terms, from what `_pooled` made of the chunks' means and
    sums of squared deviations, which are finite."""

    @staticmethod
    def forward(
        ctx: Any, ns: tuple[float, ...], pooled: tuple[torch.Tensor, ...], *parts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.ns, ctx.n, ctx.dtype = ns, sum(ns), parts[-1].dtype
        squares, mean = pooled
        ctx.save_for_backward(mean, *parts[: len(ns)])
        return squares / ctx.n, mean.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        mean, *means = ctx.saved_tensors
        of_squares, of_mean = gradients[0] / ctx.n, gradients[1] / ctx.n
        # The mean of all terms is the number at which their squared deviations are minimal, so its
        # change changes the variance by nothing.
        sent, factors = [], dict[float, tuple[torch.Tensor, torch.Tensor]]()
        for n, m in zip(ctx.ns, means, strict=True):
            if n not in factors:  # most chunks have the same
                factors[n] = of_mean * n, of_squares * (2 * n)
            shift, slope = factors[n]
            sent.append(torch.addcmul(shift, m - mean, slope).to(m.dtype))
        return None, None, *sent, *[of_squares.to(ctx.dtype)] * len(sent)


class Moments(Var):
    """The statistics of a batch normalization: combined in float64, since normalization makes
    rounding errors of the mean and variance visible."""

    def partials(self, parts: Sequence[int], call: Call) -> tuple[torch.Tensor, ...]:
        return self.prepare(parts, call, reduction.Chunk())(*call.args, **call.kwargs)

    def prepare(self, parts: Sequence[int], call: Call, of: reduction.Chunk) -> reduction.Partials:
        counts: dict[int, torch.Tensor] = {}  # most chunks have the same

        def run(x: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, ...]:
            n = x.numel() // x.shape[1]
            if n not in counts:
                counts[n] = count(n)
            made = counts[n], *norms.Moments.apply(x, of.shared, (call.node, of.index))
            return tuple(map(made.__getitem__, parts))

        return run

    def combine(self, parts: list[list[torch.Tensor]], call: Call) -> Any:
        ns = tuple(map(torch.Tensor.item, parts[0]))
        if sum(ns) and parts[1][0].device.type == "cpu":
            with torch.set_grad_enabled(False):
                pooled = _pooled(ns, parts[1], parts[2])
                is_finite = math.isfinite(torch.add(*pooled).sum())
            if is_finite:
                var, mean = _OfChunks.apply(ns, pooled, *parts[1], *parts[2])
                return var.to(call.dtype), mean.to(call.dtype)
        return super().combine([[part.double() for part in of] for of in parts], call)


def abs_squared(x: torch.Tensor) -> torch.Tensor:
    return (x * x.conj()).real if x.is_complex() else x * x


def root(x: torch.Tensor) -> torch.Tensor:
    """Return the square root, with torch.std's gradient of 0 at 0."""
    is_zero = x == 0
    return torch.where(is_zero, x.detach(), torch.where(is_zero, 1.0, x).sqrt())
