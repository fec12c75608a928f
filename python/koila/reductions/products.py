# SPDX-License-Identifier: Apache-2.0
"""Products along the batch: prod and cumprod, with torch's gradients also for zeros, inf and nan.

torch divides the whole product by each element if no element of the tensor is zero; else it
multiplies the others. The two differ where an element is inf. Also, it adds up the terms of a
gradient before it multiplies them, and inf - inf is nan. So the functions here send each other,
instead of the gradients of products, what they need to follow torch's formula for the whole batch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from koila.basics import engine

# prod ---------------------------------------------------------------------------------------------

_DIVIDE, _MULTIPLY, _NOTHING = 0, 1, 2  # torch's formulas for the gradient of a product


class Chunk(engine.Function):
    """The product of a chunk, along a dim or (None) of all elements, and its number of zeros.
    `Product` sends the gradient of the product, and as that of the number torch's formula."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int | None, keepdim: bool) -> tuple[Tensor, Tensor]:
        made = x.prod() if dim is None else x.prod(dim, keepdim)
        ctx.save_for_backward(x, made)
        ctx.dim, ctx.is_dropped = dim, dim is not None and not keepdim
        n_zeros = x.numel() - torch.count_nonzero(x)
        return made, n_zeros.to(torch.float64)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (x, made), (gradient, formula) = ctx.saved_tensors, gradients
        if ctx.is_dropped:
            made, gradient = made.unsqueeze(ctx.dim), gradient.unsqueeze(ctx.dim)
        if formula == _DIVIDE:
            return (made / x).conj().mul_(gradient), None, None
        if formula == _NOTHING:
            return torch.zeros_like(x), None, None
        if ctx.dim is not None:
            return _others(x, ctx.dim).conj().mul_(gradient), None, None
        return _others(x.reshape(-1), 0).view(x.shape).conj().mul_(gradient), None, None


class Product(engine.Function):
    """The product of the products of chunks, given together with their numbers of zeros."""

    @staticmethod
    def forward(ctx: Any, is_of_all: bool, *parts: Tensor) -> Tensor:
        factors, numbers = parts[: len(parts) // 2], parts[len(parts) // 2 :]
        ctx.save_for_backward(*factors)
        ctx.n_zeros, ctx.is_of_all = sum(numbers), is_of_all
        return torch.stack(factors).prod(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        others = _others(torch.stack(ctx.saved_tensors), 0).conj().mul_(gradients[0])
        most = _NOTHING if ctx.is_of_all else _MULTIPLY
        return None, *others, *(ctx.n_zeros.clamp(max=most) for _ in others)


def _others(x: Tensor, dim: int) -> Tensor:
    """Return for each element the product of the others along a dim."""
    if x.shape[dim] == 1:
        return torch.ones_like(x)
    one, n = torch.ones_like(x.narrow(dim, 0, 1)), x.shape[dim] - 1
    before = torch.cat([one, x.narrow(dim, 0, n)], dim).cumprod(dim)
    after = torch.cat([one, x.narrow(dim, 1, n).flip(dim)], dim).cumprod(dim).flip(dim)
    return before.mul_(after)


# cumprod ------------------------------------------------------------------------------------------
#
# In torch's formula for a column, the elements before the first zero have the sum of the shares
# (result * gradient) from there up to that zero, divided by the element. The first zero has the
# product before it times the sum of (product since it * gradient) up to the second zero. The
# elements behind it have 0. So a chunk sends, as the gradient of its start, its sum of shares;
# behind a zero, its sum of (its own product * gradient).


class Total(engine.Function):
    """The product of a chunk along a dim, which is kept, and whether a factor is 0.

    `_Starts` sends the sum that is to be divided by the elements or multiplied with those beside
    the first zero, and as the gradient of the flag whether the chunk is behind a zero.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        ctx.dim = dim
        return x.prod(dim, True, dtype=x.dtype), (x == 0).any(dim, True).to(torch.float64)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (x,), (shares, behind), dim = ctx.saved_tensors, gradients, ctx.dim
        made, zeros = shares / x.conj(), x == 0
        if zeros.any():
            n_zeros = zeros.sum(dim, True)
            of_first = _others(x, dim).conj().mul_(shares).masked_fill_(~zeros | (n_zeros > 1), 0)
            made = torch.where(n_zeros == 0, made, of_first)
        return made.masked_fill_(behind > 0, 0), None


class _Starts(engine.Function):
    """The start of each chunk: the product of totals before. A nan behind a zero is negative."""

    @staticmethod
    def forward(ctx: Any, dim: int, *parts: Tensor) -> Tensor:
        totals, flags = parts[: len(parts) // 2], parts[len(parts) // 2 :]
        starts, behind = list(_before(totals, torch.mul)), list(_before(flags, torch.maximum))
        ctx.save_for_backward(*totals, *starts, *flags, *behind)
        ctx.dim = dim
        if not totals[0].is_floating_point():
            return torch.cat(starts, dim)
        is_negative = torch.cat(behind, dim) > 0
        joined = torch.cat(starts, dim)
        return joined.masked_fill_(is_negative & joined.isnan(), -math.nan)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        given = gradients[0].split(1, ctx.dim)
        n, saved = len(given), ctx.saved_tensors
        totals, starts, flags, behind = (saved[i * n : (i + 1) * n] for i in range(4))
        shares = since = torch.zeros_like(totals[0])  # nobody reads the total of the last chunk
        made = [shares]
        for k in range(n - 2, -1, -1):
            after = k + 1
            if after < n - 1:
                later = totals[after].conj() * since
                since = given[after] + later.masked_fill_(flags[after] > 0, 0)
            else:
                since = given[after]
            # A start of 0 behind no zero is too small a product, and its chunk cannot tell.
            share = torch.where(starts[after] == 0, given[after] * 0, given[after])
            shares = (shares + share).masked_fill_(behind[after] > 0, 0)
            made.insert(0, torch.where(flags[k] > 0, starts[k].conj() * since, shares))
        return None, *made, *behind


def _before(parts: Sequence[Tensor], join: Callable[[Tensor, Tensor], Tensor]) -> Iterator[Tensor]:
    """Yield for each part what those before it give."""
    first = torch.ones_like(parts[0]) if join is torch.mul else torch.zeros_like(parts[0])
    return itertools.accumulate((first, *parts[:-1]), join)


class Multiply(engine.Function):
    """cumprod from a start."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, start: Tensor, dim: int) -> Tensor:
        ctx.save_for_backward(x, start)
        ctx.dim = dim
        return torch.cumprod(x, dim).mul_(start)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        x, start = ctx.saved_tensors
        (gradient,), dim = gradients, ctx.dim
        behind = start == 0
        if not x.is_complex():
            behind |= start.isnan() & start.signbit()
        if behind.any() or (x == 0).any():
            return *_beside_zeros(x, start, behind, gradient, dim), None
        shares = torch.cumprod(x, dim).mul_(start).conj() * gradient
        of_start = shares.sum(dim, keepdim=True)
        return shares.flip(dim).cumsum(dim).flip(dim) / x.conj(), of_start, None


def _beside_zeros(
    x: Tensor, start: Tensor, behind: Tensor, gradient: Tensor, dim: int
) -> tuple[Tensor, Tensor]:
    """Return the gradient of the elements of a chunk, and what it sends for its start."""
    factors = torch.cat([start.masked_fill(behind, 0), x], dim).requires_grad_()
    given = torch.cat([torch.zeros_like(start), gradient], dim)
    with torch.enable_grad():
        made = factors.cumprod(dim)
    (of_factors,) = torch.autograd.grad(made, factors, given)
    is_past = (x == 0).cumsum(dim) > 0
    # Behind a zero, a nan as the start says that the product since that zero is not finite.
    first = torch.where(behind, torch.where(start.isnan(), math.inf, 1), start)
    products = x.masked_fill(is_past, 1).cumprod(dim).mul_(first).conj()
    shares = products * gradient.masked_fill(is_past, 0)
    shares.masked_fill_(is_past & ~behind, 0)
    return of_factors.narrow(dim, 1, x.shape[dim]), shares.sum(dim, keepdim=True)


def starts(parts: list[list[Tensor]], dim: int) -> Tensor:
    """Return the starts of all chunks, concatenated, from what `Total` returned of each."""
    made: Tensor = _Starts.apply(dim, *parts[0], *parts[1])
    return made
