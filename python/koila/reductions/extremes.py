# SPDX-License-Identifier: Apache-2.0
"""Extremes, log-sum-exp, norms and products over the batch, from partial results of chunks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from koila.basics import engine
from koila.reductions import batch_softmax, products, scans
from koila.reductions.reduction import Call, Reduction, count, dims, total, widen


class Extreme(Reduction):
    """amax, amin, max and min: the parts are the extreme value and the number of elements equal to
    it.

    torch distributes the gradient evenly among ties. So does each chunk among its own ties;
    combining gives each chunk a share of the gradient in proportion to its ties.
    """

    @staticmethod
    def is_max(call: Call) -> bool:
        return call.func.__name__.endswith("max")

    def partial(self, part: int, call: Call) -> torch.Tensor:
        x: torch.Tensor = call.word("input")
        if part == 0:
            return call.run()
        over, keepdim = dims(x, call.word("dim")), call.word("keepdim", False)
        with torch.set_grad_enabled(False):
            op = torch.amax if self.is_max(call) else torch.amin
            best = op(x, over, True)
            ties = (x == best) | ((x != x) & (best != best))
            return ties.sum(over, keepdim=keepdim, dtype=torch.float64)

    def combine(self, parts: list[list[torch.Tensor]], call: Call) -> torch.Tensor:
        values, ties = parts
        with torch.set_grad_enabled(False):
            stack = torch.stack(values)
            best = stack.amax(0) if self.is_max(call) else stack.amin(0)
            holds = (stack == best) | ((stack != stack) & (best != best))
            held = torch.stack(ties) * holds
            shares = held / held.sum(0)
            # The gradient of amax and amin is nan if the result is: torch looks for elements equal
            # to it, and there are none.
            if call.func.__name__.startswith("a"):
                shares, holds = torch.where(best != best, torch.nan, shares), holds | (best != best)
        if not best.is_floating_point():
            return best
        best = widen(best)
        mixed = total(
            [
                torch.where(hold, widen(value), 0) * share.to(best.dtype)
                for value, hold, share in zip(values, holds, shares, strict=True)
            ]
        )
        # Rounding may make the sum of the shares differ from the value in the last bit: correct it.
        with torch.set_grad_enabled(False):
            rest = torch.where(best.isfinite(), best - mixed, 0)
        return (mixed + rest).to(call.dtype)


class LogSumExp(Reduction):
    """logsumexp: the parts are the maximum, detached, and the sum of exp(x - maximum)."""

    @staticmethod
    def finite(x: torch.Tensor) -> torch.Tensor:
        """Replace infinities by 0."""
        return torch.where(x.isinf(), 0.0, x)

    def partial(self, part: int, call: Call) -> torch.Tensor:
        x: torch.Tensor = call.word("input")
        x = x.to(call.wide)  # integers become floats
        over, keepdim = dims(x, call.word("dim")), call.word("keepdim", False)
        most = x.detach().amax(over, True)
        if part == 0:
            return most.sum(over, keepdim=keepdim)  # the dims have size 1: this drops them
        return torch.exp(x - self.finite(most)).sum(over, keepdim=keepdim)

    def combine(self, parts: list[list[torch.Tensor]], call: Call) -> torch.Tensor:
        logs, most = self.joined(*parts)
        return (logs + most).to(call.dtype)

    def joined(
        self, maxima: list[torch.Tensor], sums: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Combine the parts: return log(sum(exp(x - maximum))) and the maximum over all chunks."""
        most = self.finite(torch.stack(maxima).amax(0))
        scaled = [
            # The sum of a chunk whose elements are all -inf is 0, so it needs no scaling.
            s * torch.exp(torch.where(m == -torch.inf, 0.0, self.finite(m) - most))
            for m, s in zip(maxima, sums, strict=True)
        ]
        return total(scaled).log(), most


class Shares(LogSumExp):
    """The reduction of a softmax over the batch (`batch_softmax.shares`). It has as many parts as
    var_mean, whose row in the op table the call uses; two are read."""

    def partials(self, parts: Sequence[int], call: Call) -> tuple[torch.Tensor, ...]:
        x, dim = call.word("input"), call.word("dim")
        most = x.detach().amax(dim, True).to(call.wide)
        made = most, batch_softmax.Sums.apply(x, self.finite(most), dim), count(1)
        return tuple(map(made.__getitem__, parts))

    def combine(self, parts: list[list[torch.Tensor]], call: Call) -> Any:
        return self.joined(*parts[:2])


class Starts(Reduction):
    """The value from which each chunk of a running sum starts (`scans.py`), concatenated. That of
    cumprod has as many parts as prod, whose row in the op table the call uses; others have one."""

    is_by_chunk = True

    def partials(self, parts: Sequence[int], call: Call) -> tuple[torch.Tensor, ...]:
        x: torch.Tensor = call.word("input").to(call.wide)
        made = scans.STARTS[call.func].total(x, call.word("dim"))
        return tuple(map(made.__getitem__, parts))

    def combine(self, parts: list[list[torch.Tensor]], call: Call) -> torch.Tensor:
        return scans.STARTS[call.func].starts(parts, call.word("dim"))


class _OfChunk(engine.Function):
    """The p-norm of a chunk.

    `_OfChunks` sends it, instead of the gradient g of the norm of all chunks, g / norm^(p - 1), and
    the backward multiplies by sgn(x) |x|^(p - 1). So the gradient is that of the norm of the batch,
    without dividing by the norm of the chunk.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, p: float, over: tuple[int, ...], keepdim: bool, dtype: Any
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.p, ctx.dims = p, () if keepdim else tuple(sorted(over))
        norm: torch.Tensor = torch.linalg.vector_norm(x, p, over, keepdim, dtype=dtype)
        return norm

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x: torch.Tensor = ctx.saved_tensors[0]
        scale, p = gradients[0], ctx.p
        for dim in ctx.dims:
            scale = scale.unsqueeze(dim)
        if p == 2:
            made = x * scale
        elif p > 2:
            made = x * x.abs().pow_(p - 2) * scale
        else:
            power = x.abs().pow_(p - 1)
            made = x.sgn() * (power.masked_fill_(x == 0, 0) if p < 1 else power) * scale
        return made.to(x.dtype), None, None, None, None


class _OfChunks(engine.Function):
    """The p-norm of the norms of chunks; its gradient is the one that `_OfChunk` expects."""

    @staticmethod
    def forward(ctx: Any, p: float, *norms: torch.Tensor) -> torch.Tensor:
        norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), p, 0)
        ctx.save_for_backward(norm)
        ctx.p, ctx.n = p, len(norms)
        return norm

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (norm,) = ctx.saved_tensors
        scale = gradients[0] / norm.pow(ctx.p - 1)
        # For a norm of 0, torch's gradient is a product with 0 (nan for an infinite gradient) if
        # p = 2, and 0 otherwise.
        if ctx.p >= 1:
            scale = torch.where(norm == 0, gradients[0] * 0 if ctx.p == 2 else 0, scale)
        return None, *(scale for _ in range(ctx.n))


class Norm(Reduction):
    """A p-norm: the p-norm of the norms of chunks."""

    @staticmethod
    def p(call: Call) -> float:
        return float(call.word("ord", 2))

    def partial(self, part: int, call: Call) -> torch.Tensor:
        p, x = self.p(call), call.word("input")
        if p in (0, 1) or math.isinf(p):
            return call.run() if call.wide == call.dtype else call.run(dtype=call.wide)
        over, keepdim = dims(x, call.word("dim")), call.word("keepdim", False)
        dtype = x.dtype if call.wide == call.dtype else call.wide
        made: torch.Tensor = _OfChunk.apply(x, p, over, keepdim, call.word("dtype") or dtype)
        return made

    def combine(self, parts: list[list[torch.Tensor]], call: Call) -> torch.Tensor:
        p = self.p(call)
        if p in (0, 1):
            return total(parts[0]).to(call.dtype)
        if math.isinf(p):
            norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(parts[0]), p, 0)
        else:
            norm = _OfChunks.apply(p, *parts[0])
        return norm.to(call.dtype)


class Prod(Reduction):
    """prod: the product of the products of chunks (`products.py`)."""

    def partials(self, parts: Sequence[int], call: Call) -> tuple[torch.Tensor, ...]:
        x, dim = call.word("input").to(call.wide), call.word("dim")
        made = products.Chunk.apply(x, dim, bool(call.word("keepdim", False)))
        return tuple(map(made.__getitem__, parts))

    def combine(self, parts: list[list[torch.Tensor]], call: Call) -> torch.Tensor:
        made: torch.Tensor = products.Product.apply(call.word("dim") is None, *parts[0], *parts[1])
        return made.to(call.dtype)
