# SPDX-License-Identifier: Apache-2.0
"""Reductions over the batch, split: what each chunk computes, and how the results become one.

A node in mode REDUCE runs on every chunk as `partial`, once for each of its parts, and `combine`
makes the node's value from the parts of all chunks. Both are torch ops under autograd: no gradient
is written by hand. Parts are in the accumulation type, float32 at least, so that neither a sum of
halves overflows nor many small chunks round worse than one large one.

    reduction = REDUCTIONS["MEAN"]
    parts = [[reduction.partial(i, chunk) for chunk in chunks] for i in range(reduction.n_parts)]
    value = reduction.combine(parts, call)
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from koila import engine, meets, norms, scans
from koila.errors import NotInChunksError
from koila.table import bind, parse

NONE, MEAN, SUM = 0, 1, 2  # the word `reduction` of a loss


class Call:
    """One call of a torch function: a recorded one, or the same on a chunk.

    >>> x = torch.ones(2, 3)
    >>> call = Call(torch.sum, (x, 1), {}, "input, dim=None, keepdim=False", x.dtype)
    >>> call.word("dim")
    1
    >>> call.run(dim=0)
    tensor([2., 2., 2.])
    """

    def __init__(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        signature: str,
        dtype: torch.dtype,
        start: int = 0,
        n_rows: int = 0,
        memo: dict[str, Any] | None = None,
    ) -> None:
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.signature = signature  # the row's, from _core.op_table()
        self.dtype = dtype  # of the first output
        self.wide = widened(dtype)  # to accumulate in
        self.start = start  # the first row of the chunk
        self.n_rows = n_rows  # of all chunks
        self.memo = {} if memo is None else memo  # of what other runs of the chunk have found
        #: The arguments that were given, by the signature's words.
        self.words = bind(signature, args, kwargs)

    def word(self, name: str, fallback: Any = None) -> Any:
        return self.words.get(name, fallback)

    def run(self, **changes: Any) -> torch.Tensor:
        """Call the function with some words replaced, or given where they were not."""
        names, n_positional, _ = parse(self.signature)
        words = {**self.words, **changes}
        args = []
        for name in names[:n_positional]:
            if name not in words:
                break
            args.append(words.pop(name))
        result: torch.Tensor = self.func(*args, **words)
        return result


def widened(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def widen(value: Any) -> Any:
    """Give tensors of a half type the type they are accumulated in."""
    if isinstance(value, torch.Tensor):
        return value.to(widened(value.dtype))
    if isinstance(value, (list, tuple)):
        return type(value)(map(widen, value))
    return value


def total(parts: list[torch.Tensor]) -> torch.Tensor:
    return functools.reduce(torch.add, parts)


def count(n: int) -> torch.Tensor:
    """Return a number of terms, as a part: on the CPU, where it meets tensors of any device."""
    return torch.tensor(n, dtype=torch.float64, device="cpu")


class _Known(threading.local):
    terms: dict[int, torch.Tensor] | None = None  # by id


_known = _Known()


@contextlib.contextmanager
def counting(terms: Iterable[torch.Tensor]) -> Iterator[dict[int, torch.Tensor]]:
    """A block in which reductions are combined of which these parts are numbers of terms.

    Yields:
        These, and the sums that are made of nothing else, by id.
    """
    _known.terms = {id(part): part for part in terms}
    try:
        yield _known.terms
    finally:
        _known.terms = None


def ratio(parts: list[list[torch.Tensor]], dtype: torch.dtype) -> torch.Tensor:
    """Divide the sum of the first part by the sum of the second."""
    above = total(parts[0])
    below = total(parts[1]).to(above.dtype)
    if _known.terms is not None and all(id(part) in _known.terms for part in parts[1]):
        _known.terms[id(below)] = below
    return (above / below).to(dtype)


def dims(x: torch.Tensor, dim: Any) -> tuple[int, ...]:
    """Return the dims that a word `dim` stands for: all where none is given."""
    if dim is None or dim == () or dim == []:
        return tuple(range(x.dim()))
    given = (dim,) if isinstance(dim, int) else tuple(dim)
    return tuple(d % max(x.dim(), 1) for d in given) if x.dim() else ()


def n_reduced(x: torch.Tensor, over: tuple[int, ...]) -> int:
    n = 1
    for d in over:
        n *= x.shape[d]
    return n


class Reduction:
    """One way to split a reduction."""

    n_parts = 1
    counts: frozenset[int] = frozenset()  #: parts that are numbers of terms, by sizes alone
    is_by_chunk = False  #: each chunk is given a part of its value

    def partial(self, part: int, call: Call) -> torch.Tensor:
        """Compute one part on a chunk; `call` holds the chunk's arguments."""
        raise NotImplementedError

    def partials(self, parts: Sequence[int], call: Call) -> tuple[torch.Tensor, ...]:
        """Compute several parts on a chunk."""
        return tuple(self.partial(part, call) for part in parts)

    def combine(self, parts: list[list[torch.Tensor]], call: Call) -> Any:
        """Make the node's value of parts[part][chunk]; `call`'s tensors are not read."""
        raise NotImplementedError


class Sum(Reduction):
    """Any op that is a sum over the rows: sum, matmul over them, einsum; also count_nonzero."""

    def partial(self, part: int, call: Call) -> torch.Tensor:
        if call.wide == call.dtype:
            return call.run()
        if "dtype" in parse(call.signature)[0]:
            return call.run(dtype=call.wide)
        return call.run(**{name: widen(value) for name, value in call.words.items()})

    def combine(self, parts: list[list[torch.Tensor]], call: Call) -> torch.Tensor:
        return total(parts[0]).to(call.dtype)


class Mean(Reduction):
    """A sum, and the number of terms."""

    n_parts = 2
    counts = frozenset((1,))

    def partial(self, part: int, call: Call) -> torch.Tensor:
        x, dim = call.word("input"), call.word("dim")
        if part == 1:
            return count(n_reduced(x, dims(x, dim)))
        return torch.sum(x, dims(x, dim), call.word("keepdim", False), dtype=call.wide)

    def combine(self, parts: list[list[torch.Tensor]], call: Call) -> torch.Tensor:
        return ratio(parts, call.dtype)


class NanMean(Reduction):
    """The sum of what is a number, and how much of it is."""

    n_parts = 2

    def partial(self, part: int, call: Call) -> torch.Tensor:
        x, keepdim = call.word("input"), call.word("keepdim", False)
        over = dims(x, call.word("dim"))
        if part == 1:
            counted: torch.Tensor = x.isnan().logical_not().sum(over, keepdim)
            return counted
        return torch.nansum(x, over, keepdim, dtype=call.wide)

    def combine(self, parts: list[list[torch.Tensor]], call: Call) -> torch.Tensor:
        return ratio(parts, call.dtype)


class Var(Reduction):
    """Number of terms, mean, and sum of squared distances from it, joined by Chan's formula."""

    n_parts = 3

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

    def partial(self, part: int, call: Call) -> torch.Tensor:
        return self.partials((part,), call)[0]

    def partials(self, parts: Sequence[int], call: Call) -> tuple[torch.Tensor, ...]:
        x: torch.Tensor = call.word("input")
        dim, keepdim, _ = self.options(call)
        over = dims(x, dim)
        n = count(n_reduced(x, over))
        x = widen(x)
        mean = x.mean(over, keepdim=True)
        # The squares add up to the least around the mean: no gradient goes to it that way.
        squares = abs_squared(x - mean.detach()).sum(over, keepdim=keepdim)
        mean = mean if keepdim else mean.squeeze(over) if over else mean
        if self.has_mean(call) and mean.device.type == "cpu" and not mean.isfinite().all():
            squares = _Instead.apply(squares, torch.where(mean.isinf(), mean.real, squares))
            mean = _Instead.apply(mean, torch.var_mean(x, over, correction=0, keepdim=keepdim)[1])
        made = n, mean, squares
        return tuple(made[part] for part in parts)

    @staticmethod
    def has_mean(call: Call) -> bool:
        return call.func.__name__.endswith(("_mean", "_moments"))

    def combine(self, parts: list[list[torch.Tensor]], call: Call) -> Any:
        _, _, correction = self.options(call)
        ns, means, squares = parts
        n = total(ns)
        if n <= correction:
            raise NotInChunksError(f"{call.func.__name__}: {int(n)} terms leave no freedom")
        mean = _RunningMean.apply(*ns, *means)
        middle = mean.detach()
        if not _is_known_finite([mean, *squares]):
            means, squares, middle = _beside_infinities(ns, means, squares, mean)
        deviations = [
            abs_squared(m - middle) * one.to(s.dtype) + s
            for one, m, s in zip(ns, means, squares, strict=True)
        ]
        var = total(deviations) / (n - correction).to(squares[0].dtype)
        value = root(var) if call.func.__name__.startswith("std") else var
        value = value.to(real_of(call.dtype))
        return (value, mean.to(call_mean_dtype(call, mean))) if self.has_mean(call) else value


def _is_known_finite(values: list[torch.Tensor]) -> bool:
    """Whether no value is inf or nan; an accelerator is not waited for, and is never known."""
    if values[0].device.type != "cpu":
        return False
    return bool(total([value.detach().real for value in values]).isfinite().all())


def _beside_infinities(
    ns: list[torch.Tensor],
    means: list[torch.Tensor],
    squares: list[torch.Tensor],
    mean: torch.Tensor,
) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """Means and squared deviations of chunks, and what the means deviate from, where some are inf
    or nan.

    Beside inf the mean that torch gives is nan, and the one that its gradient is made of inf.
    """
    means = [
        _Instead.apply(m, torch.where(m.isnan() & s.isinf(), s, m))
        for m, s in zip(means, squares, strict=True)
    ]
    plain = total([m * (k / total(ns)).to(m.dtype) for k, m in zip(ns, means, strict=True)])
    middle = torch.where(mean.isfinite(), mean, plain).detach()
    squares = [
        _Instead.apply(s, torch.where(m.isinf(), torch.nan, s))
        for m, s in zip(means, squares, strict=True)
    ]
    # The difference of two equal infinities is nan.
    means = [torch.where(m == middle, middle, m) for m in means]
    return means, squares, middle


class _Instead(engine.Function):
    """Another value for a tensor, whose gradient goes to that."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.detach().clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


class _RunningMean(engine.Function):
    """The mean of all terms, found as torch finds it: chunk after chunk, so that means that are the
    same stay what they are. First come the numbers of terms, then the means."""

    @staticmethod
    def forward(ctx: Any, *ns_and_means: torch.Tensor) -> torch.Tensor:
        n_chunks = len(ns_and_means) // 2
        ns, means = ns_and_means[:n_chunks], ns_and_means[n_chunks:]
        mean, n = means[0].clone(), ns[0]
        for one, m in zip(ns[1:], means[1:], strict=True):
            n = n + one
            mean += (m - mean) * (one / n).to(mean.dtype)
        ctx.shares = [one / n for one in ns]
        return mean

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        sent = (gradients[0] * share.to(gradients[0].dtype) for share in ctx.shares)
        return *(None for _ in ctx.shares), *sent


class Moments(Var):
    """What a batch normalization is made of: put together in double, for it would show the
    rounding."""

    def partials(self, parts: Sequence[int], call: Call) -> tuple[torch.Tensor, ...]:
        x: torch.Tensor = call.word("input")
        mean, squares = norms.moments(x, call.memo)
        made = count(x.numel() // x.shape[1]), mean, squares
        return tuple(made[part] for part in parts)

    def combine(self, parts: list[list[torch.Tensor]], call: Call) -> Any:
        return super().combine([[part.double() for part in of] for of in parts], call)


def real_of(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


def call_mean_dtype(call: Call, mean: torch.Tensor) -> torch.dtype:
    return mean.dtype if mean.is_complex() else call.dtype


def abs_squared(x: torch.Tensor) -> torch.Tensor:
    return (x * x.conj()).real if x.is_complex() else x * x


def root(x: torch.Tensor) -> torch.Tensor:
    """Return the square root, with torch.std's gradient of 0 at 0."""
    is_zero = x == 0
    return torch.where(is_zero, x.detach(), torch.where(is_zero, 1.0, x).sqrt())


class Extreme(Reduction):
    """amax, amin, max and min: the value, and how many entries have it.

    torch shares the gradient evenly among ties. A chunk does the same with its own; its share of
    the whole is the share of ties that it holds.
    """

    n_parts = 2

    @staticmethod
    def is_max(call: Call) -> bool:
        return call.func.__name__.endswith("max")

    def partial(self, part: int, call: Call) -> torch.Tensor:
        x: torch.Tensor = call.word("input")
        if part == 0:
            return call.run()
        over, keepdim = dims(x, call.word("dim")), call.word("keepdim", False)
        with torch.no_grad():
            op = torch.amax if self.is_max(call) else torch.amin
            best = op(x, over, True)
            ties = (x == best) | ((x != x) & (best != best))
            return ties.sum(over, keepdim=keepdim, dtype=torch.float64)

    def combine(self, parts: list[list[torch.Tensor]], call: Call) -> torch.Tensor:
        values, ties = parts
        with torch.no_grad():
            stack = torch.stack(values)
            best = stack.amax(0) if self.is_max(call) else stack.amin(0)
            holds = (stack == best) | ((stack != stack) & (best != best))
            held = torch.stack(ties) * holds
            shares = held / held.sum(0)
            if call.func.__name__.startswith("a"):  # amax: torch finds no entry that is nan
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
        # The shares of a number may add up to its neighbour; an infinity or NaN is what it is.
        with torch.no_grad():
            rest = torch.where(best.isfinite(), best - mixed, 0)
        return (mixed + rest).to(call.dtype)


class LogSumExp(Reduction):
    """The largest entry, detached, and the sum of the exponentials of what lies below it."""

    n_parts = 2

    @staticmethod
    def finite(x: torch.Tensor, instead: torch.Tensor | float = 0.0) -> torch.Tensor:
        return torch.where(x.isinf(), instead, x)

    def partial(self, part: int, call: Call) -> torch.Tensor:
        x: torch.Tensor = call.word("input")
        x = x.to(call.wide)  # ints too
        over, keepdim = dims(x, call.word("dim")), call.word("keepdim", False)
        most = x.detach().amax(over, True)
        if part == 0:
            return most.sum(over, keepdim=keepdim)  # of one entry each: drops the dims
        return torch.exp(x - self.finite(most)).sum(over, keepdim=keepdim)

    def combine(self, parts: list[list[torch.Tensor]], call: Call) -> torch.Tensor:
        logs, most = self.joined(*parts)
        return (logs + most).to(call.dtype)

    def joined(
        self, maxima: list[torch.Tensor], sums: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The logarithm of the sum of exponentials of what lies below the largest, and that."""
        most = self.finite(torch.stack(maxima).amax(0))
        scaled = [
            # a chunk of nothing but -inf has the sum 0 whatever its scale
            s * torch.exp(torch.where(m == -torch.inf, 0.0, self.finite(m) - most))
            for m, s in zip(maxima, sums, strict=True)
        ]
        return total(scaled).log(), most


class Shares(LogSumExp):
    """What a softmax over the batch is made of."""

    n_parts = 3  # as of the call it is laid out as

    def partials(self, parts: Sequence[int], call: Call) -> tuple[torch.Tensor, ...]:
        x, dim = call.word("input"), call.word("dim")
        most = x.detach().amax(dim, True).to(call.wide)
        made = most, meets.sums(x, self.finite(most), dim), count(1)
        return tuple(made[part] for part in parts)

    def combine(self, parts: list[list[torch.Tensor]], call: Call) -> Any:
        return self.joined(*parts[:2])


class Starts(Reduction):
    """What each chunk of a running sum starts from: its value is one after the other."""

    is_by_chunk = True

    def partial(self, part: int, call: Call) -> torch.Tensor:
        (dim,) = call.word("dim")
        return scans.STARTS[call.func].total(call.word("input").to(call.wide), dim)

    def combine(self, parts: list[list[torch.Tensor]], call: Call) -> torch.Tensor:
        (dim,) = call.word("dim")
        return scans.starts_of(scans.STARTS[call.func], parts[0], dim)


class _OfChunk(engine.Function):
    """The p-norm of a chunk. Its gradient comes as that of its power sum, over p: so the gradients
    of all chunks are made of the whole norm."""

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
    """The p-norm of the norms of chunks, whose gradients go back as those of power sums, over p."""

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
        if ctx.p >= 1:  # torch has a product with 0 for p = 2, and a 0 else
            scale = torch.where(norm == 0, gradients[0] * 0 if ctx.p == 2 else 0, scale)
        return None, *(scale for _ in range(ctx.n))


class Norm(Reduction):
    """A p-norm is the p-norm of the chunks' norms."""

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
    """A product of products; each has the gradient of all others."""

    def partial(self, part: int, call: Call) -> torch.Tensor:
        return call.run() if call.wide == call.dtype else call.run(dtype=call.wide)

    def combine(self, parts: list[list[torch.Tensor]], call: Call) -> torch.Tensor:
        made: torch.Tensor = _Product.apply(*parts[0])
        return made.to(call.dtype)


class _Product(engine.Function):
    """A product of tensors. torch divides it by each, which is nan where one is inf."""

    @staticmethod
    def forward(ctx: Any, *factors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*factors)
        return torch.stack(factors).prod(0)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        factors = ctx.saved_tensors
        ones = torch.ones_like(factors[0])
        before = list(itertools.accumulate((ones, *factors[:-1]), torch.mul))
        after = list(itertools.accumulate((ones, *factors[:0:-1]), torch.mul))[::-1]
        made = (one * other for one, other in zip(before, after, strict=True))
        return tuple(gradients[0] * others.conj() for others in made)


class Again(Reduction):
    """all and any: the op once more, on the chunks' answers."""

    def __init__(self, op: Callable[..., torch.Tensor]) -> None:
        self.op = op

    def partial(self, part: int, call: Call) -> torch.Tensor:
        return call.run()

    def combine(self, parts: list[list[torch.Tensor]], call: Call) -> torch.Tensor:
        return self.op(torch.stack(parts[0]), 0)


class Loss(Reduction):
    """Losses averaged over their terms: the sum, and the number of terms."""

    n_parts = 2
    counts = frozenset((1,))

    def partial(self, part: int, call: Call) -> torch.Tensor:
        if part == 1:
            return count(self.n_terms(call))
        if call.wide == call.dtype:
            return call.run(reduction=SUM)
        return call.run(reduction=NONE).sum(dtype=call.wide)  # the sum of halves may be infinite

    def n_terms(self, call: Call) -> int:
        given = [t for t in call.words.values() if isinstance(t, torch.Tensor)]
        shape: torch.Size = torch.broadcast_shapes(*(t.shape for t in given))
        return shape.numel()

    def combine(self, parts: list[list[torch.Tensor]], call: Call) -> torch.Tensor:
        if call.word("reduction", MEAN) == SUM:
            return total(parts[0]).to(call.dtype)
        return ratio(parts, call.dtype)


class RowLoss(Loss):
    """Losses whose terms are rows."""

    def n_terms(self, call: Call) -> int:
        first = next(t for t in call.words.values() if isinstance(t, torch.Tensor))
        return first.shape[0] if first.dim() > 1 else 1


class CrossEntropy(Loss):
    """Cross-entropy and nll: the weighted sum, and the weight of the labels that count."""

    counts = frozenset()  # labels can be made of scores

    def partial(self, part: int, call: Call) -> torch.Tensor:
        x: torch.Tensor = call.word("input")
        target: torch.Tensor = call.word("target")
        has_labels = target.dim() != x.dim()  # else probabilities, which count 1 each
        weight: torch.Tensor | None = call.word("weight") if has_labels else None
        if part == 0:
            if call.wide == call.dtype or weight is None or call.word("label_smoothing"):
                return super().partial(0, call)
            # weight / sum of weights must be rounded once, as eager does, not one after the other.
            losses = call.run(weight=None, reduction=NONE)
            summed: torch.Tensor = (losses * self.weights(call, weight)).sum()
            return summed
        if not has_labels:
            return count(x.numel() // x.shape[1])
        if weight is None:
            counts: torch.Tensor = target != call.word("ignore_index", -100)
            return counts.sum()
        return self.weights(call, weight).sum()

    def weights(self, call: Call, weight: torch.Tensor) -> torch.Tensor:
        """The weight of each label: 0 for those that do not count."""
        target: torch.Tensor = call.word("target")
        counts: torch.Tensor = target != call.word("ignore_index", -100)
        weights: torch.Tensor = weight.to(call.wide)[torch.where(counts, target, 0)] * counts
        return weights


class Classes(LogSumExp):
    """Cross-entropy and nll whose classes are the rows, as of a matrix of pairs turned over.

    Beside maxima and sums of exponentials: the scores of the labels that lie in the chunk, smoothed
    by those of all classes; and, of the first chunk, how much each label weighs, and whether it
    counts.
    """

    n_parts = 4

    def partials(self, parts: Sequence[int], call: Call) -> tuple[torch.Tensor, ...]:
        x = call.word("input").to(call.wide)
        most = x.detach().amax(1)
        if self.is_nll(call):
            sums = most.new_zeros(most.shape)
        else:
            sums = torch.exp(x - self.finite(most).unsqueeze(1)).sum(1)
        made = most, sums, self.scores(call, x), self.weights(call)
        return tuple(made[part] for part in parts)

    @staticmethod
    def is_nll(call: Call) -> bool:
        return call.func.__name__.startswith("nll")

    @staticmethod
    def scores(call: Call, x: torch.Tensor) -> torch.Tensor:
        at = call.word("target") - call.start
        is_here = (at >= 0) & (at < x.shape[1])
        # gather() would keep the scores, which may be written next, as after torch's own call.
        numbers = [torch.arange(n, device=at.device) for n in at.shape]
        terms = torch.meshgrid(*numbers, indexing="ij")
        found: torch.Tensor = x.movedim(1, -1)[(*terms, torch.where(is_here, at, 0))]
        found = torch.where(is_here, found, 0)
        smoothing: float = call.word("label_smoothing", 0.0)
        if not smoothing:
            return found
        return (1 - smoothing) * found + x.sum(1) * (smoothing / call.n_rows)

    @staticmethod
    def weights(call: Call) -> torch.Tensor:
        target: torch.Tensor = call.word("target")
        if call.start > 0:
            return target.new_zeros((), dtype=call.wide)
        counts: torch.Tensor = target != call.word("ignore_index", -100)
        # No chunk looks for a label that no class has.
        is_wrong = counts & ((target < 0) | (target >= call.n_rows))
        if target.device.type != "cpu":
            torch._assert_async(~is_wrong.any(), "a target is out of bounds")
        elif bool(is_wrong.any()):
            raise IndexError(f"Target {int(target[is_wrong][0])} is out of bounds.")
        given: torch.Tensor | None = call.word("weight")
        weights = counts.to(call.wide)
        if given is not None:
            weights = given.to(call.wide)[torch.where(counts, target, 0)] * weights
        return torch.stack([weights, counts.to(call.wide)])

    def combine(self, parts: list[list[torch.Tensor]], call: Call) -> torch.Tensor:
        weights, counts = parts[3][0]
        losses = -total(parts[2])
        if not self.is_nll(call):
            # log_softmax() of a row with inf is nan all over, and so is its gradient
            logs, most = self.joined(*parts[:2])
            losses = losses + most + logs * torch.where(logs == torch.inf, torch.nan, 1.0)
        losses = torch.where(counts == 0, 0.0, losses * weights)
        reduction = call.word("reduction", NONE)
        if reduction == NONE:
            return losses.to(call.dtype)
        loss = losses.sum()
        return (loss / weights.sum() if reduction == MEAN else loss).to(call.dtype)


REDUCTIONS: dict[str, Reduction] = {
    "SUM": Sum(),
    "COUNT": Sum(),
    "MEAN": Mean(),
    "NANMEAN": NanMean(),
    "VAR": Var(),
    "AMAX": Extreme(),
    "LOGSUMEXP": LogSumExp(),
    "NORM": Norm(),
    "PROD": Prod(),
    "ALL": Again(torch.all),
    "ANY": Again(torch.any),
    "LOSS": Loss(),
    "ROW_LOSS": RowLoss(),
    "CROSS_ENTROPY": CrossEntropy(),
    "CLASSES": Classes(),
}
#: Of calls that only chunks make.
OF_CALLS: dict[Callable[..., Any], Reduction] = {
    meets.shares: Shares(),
    norms.batch_moments: Moments(),
    **dict.fromkeys(scans.STARTS, Starts()),
}
