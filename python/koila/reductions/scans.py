# SPDX-License-Identifier: Apache-2.0
"""Scans along the batch (cumsum, cumprod, logcumsumexp): each chunk starts from the end of the
last.

A scan is recorded as two calls, like batch normalization (norms.py): a reduction that only chunks
run, and the scan, which is torch's own call if the program runs whole. In the reduction, each chunk
computes its total. The totals are combined into a start for each chunk, concatenated along the dim
of the scan; each chunk of the second call reads its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from koila import _core
from koila.basics import engine
from koila.basics.enter import call_with_lazies
from koila.basics.rows import CONTINUOUS, WIDENED
from koila.basics.table import words_of
from koila.reductions import products


class Scan(NamedTuple):
    """One kind of scan."""

    run: Callable[..., Tensor]  # torch's own function
    #: Returns its last entry along a dim, which is kept; with it what else `starts` needs.
    total: Callable[[Tensor, int], tuple[Tensor, ...]]
    #: Returns the starts of all chunks, concatenated along a dim, from the totals[part][chunk].
    starts: Callable[[list[list[Tensor]], int], Tensor]
    go_on: Callable[[Tensor, Tensor, int], Tensor]  # scans along a dim from a start


def _total(x: Tensor, dim: int) -> tuple[Tensor]:
    return (x.sum(dim, True, dtype=x.dtype),)


def _add(x: Tensor, start: Tensor, dim: int) -> Tensor:
    return torch.cumsum(x, dim).add_(start)  # in place is safe: backward reads no result of cumsum


class _TotalExponentials(engine.Function):
    """logsumexp, with a gradient of 0 if all elements are -inf, or nan if the given one is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        total = x.logsumexp(dim, keepdim=True)
        ctx.save_for_backward(x, total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        x, total = ctx.saved_tensors
        is_nothing = (total == -math.inf) & ~gradients[0].isnan()
        return ((x - total).exp_() * gradients[0]).masked_fill_(is_nothing, 0), None


class _AddExponentials(engine.Function):
    """logcumsumexp from a start, with torch's gradient formula for the whole batch.

    If a result is inf, torch sends a gradient to no finite element, so none is sent to a total that
    is inf. `are_totals`: the elements `x` are the totals of chunks, which `Scan.starts` scans.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, start: Tensor, dim: int, are_totals: bool) -> Tensor:
        made = torch.logaddexp(start, torch.logcumsumexp(x, dim))
        ctx.save_for_backward(x, start, made)
        ctx.dim, ctx.are_totals = dim, are_totals
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, start, made = ctx.saved_tensors
        (gradient,), dim = gradients, ctx.dim
        of_x, of_start = torch.zeros_like(x), torch.zeros_like(start)
        least = torch.finfo(gradient.dtype).min
        for sign in (1, -1):
            logs = torch.where(gradient * sign > 0, gradient.abs().log(), least) - made
            logs = logs.flip(dim).logcumsumexp(dim).flip(dim)
            of_x += _exponentials(logs, x, ctx.are_totals) * sign
            of_start += _exponentials(logs.narrow(dim, 0, 1), start, True) * sign
        # A nan among the gradients of starts must reach the elements of all chunks before.
        if ctx.are_totals:
            of_x += torch.where(gradient.isnan(), gradient, 0).flip(dim).cumsum(dim).flip(dim)
        return of_x, of_start, None, None


def _exponentials(logs: Tensor, x: Tensor, is_total: bool) -> Tensor:
    """Return exp(logs + x); for a total that is inf, what the finite elements of it get."""
    made = (logs + x).exp_()
    return made.masked_fill_((x == math.inf) & ~logs.isnan(), 0) if is_total else made


def _add_exponentials(x: Tensor, start: Tensor, dim: int) -> Tensor:
    if x.is_complex():
        return torch.logaddexp(start, torch.logcumsumexp(x, dim))
    made: Tensor = _AddExponentials.apply(x, start, dim, False)
    return made


def _total_exponentials(x: Tensor, dim: int) -> tuple[Tensor]:
    if x.is_complex():
        return (x.logsumexp(dim, keepdim=True),)
    return (_TotalExponentials.apply(x, dim),)


def _starts_of_exponentials(parts: list[list[Tensor]], dim: int) -> Tensor:
    (totals,) = parts
    first = torch.full_like(totals[0], -math.inf)
    if len(totals) == 1:
        return first
    joined = torch.cat(totals[:-1], dim)
    if first.is_complex():
        return torch.cat([first, joined.logcumsumexp(dim)], dim)
    return torch.cat([first, _AddExponentials.apply(joined, first, dim, True)], dim)


def _starts_of_sums(parts: list[list[Tensor]], dim: int) -> Tensor:
    (totals,) = parts
    first = torch.zeros_like(totals[0])
    # torch sums integers in int64: converted to fewer bits they wrap around as a sum in those does.
    return torch.cat([first, *totals[:-1]], dim).cumsum(dim).to(first.dtype)


_ALL = (
    Scan(torch.cumsum, _total, _starts_of_sums, _add),
    Scan(torch.cumprod, products.Total.apply, products.starts, products.Multiply.apply),
    Scan(torch.logcumsumexp, _total_exponentials, _starts_of_exponentials, _add_exponentials),
)
SCANS = {scan.run.__name__: scan for scan in _ALL}


def _make(name: str, scan: Scan) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Make the two functions that are recorded for a scan: the starts, and the scan from them."""

    def starts(x: Tensor, dim: int, *, keepdim: bool, dtype: torch.dtype) -> Tensor:
        """Stand for the reduction on the tape; chunks compute it by `partials.Starts`."""
        raise NotImplementedError

    def goes_on(
        x: Tensor, dim: int, *, dtype: torch.dtype | None = None, starts: Tensor | None = None
    ) -> Tensor:
        """Scan from the starts; without them, in a whole run, by torch's own call."""
        if starts is None:
            return scan.run(x, dim) if dtype is None else scan.run(x, dim, dtype=dtype)
        return scan.go_on(x.to(starts.dtype), starts, dim).to(_made_in(x, dtype))

    goes_on.__name__ = name
    return starts, goes_on


def _made_in(x: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype of the result: torch scans integers in int64."""
    return dtype or (x.dtype if x.dtype in CONTINUOUS else torch.int64)


_MADE = {name: _make(name, scan) for name, scan in SCANS.items()}
#: By the recorded function: the scan of a reduction to starts; the name of a scan from starts.
STARTS = {starts: SCANS[name] for name, (starts, _) in _MADE.items()}
CALLS = {goes_on: name for name, (_, goes_on) in _MADE.items()}


def record(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record a scan along the rows as two calls; NotImplemented: as a single one."""
    words = words_of(("input", "dim"), args, kwargs)
    x, dtype = words.pop("input", None), words.pop("dtype", None)
    dim = words.pop("dim", words.pop("axis", None))
    if type(x) is not _core.LazyTensor or not isinstance(dim, int) or words:
        return NotImplemented
    starts, goes_on = _MADE[func.__name__]
    begun = call_with_lazies(starts, (x,), x, dim, keepdim=True, dtype=WIDENED[_made_in(x, dtype)])
    if not _core.set_for_chunks(begun):
        return NotImplemented
    own = {} if dtype is None else {"dtype": dtype}
    return call_with_lazies(goes_on, (x,), x, dim, **own, starts=begun)
