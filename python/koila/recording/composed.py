# SPDX-License-Identifier: Apache-2.0
"""Record composite calls, which have no row of their own, as the calls that ATen composes them of.

Each function makes the same calls as ATen's, so that a run in one chunk equals eager bit for bit.
It returns NotImplemented for arguments that it does not handle.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from koila import _core
from koila.basics.table import Args, Func, Handler, Words
from koila.planning import planner


def broadcast_tensors(*tensors: Any) -> Any:
    """Return tensors that have the common shape as they are, and expand the others to it.
    `expand_as` a lazy that has the shape tells the recorder which dim has the rows."""
    listed = tensors[0] if len(tensors) == 1 and not isinstance(tensors[0], Tensor) else tensors
    try:
        shape = torch.broadcast_shapes(*(x.shape for x in listed))
    except (AttributeError, RuntimeError):  # torch raises its own error
        return NotImplemented
    wide = [x for x in listed if x.shape == shape]
    lender = next(filter(_is_lazy, wide), None)
    if lender is None:
        lender = next(filter(_is_lazy, listed)).expand(shape)
    return tuple(x if x.shape == shape else x.expand_as(lender) for x in listed)


def _is_lazy(x: Tensor) -> bool:
    return type(x) is _core.LazyTensor


def _plain_as(view: Callable[..., Tensor]) -> Callable[[Tensor, Tensor], Any]:
    """Return a handler of `plain.view_as(lazy)` and its kin: it takes the view now, and gives it
    the rows of the lazy."""

    def call(x: Tensor, other: Any) -> Any:
        if _is_lazy(x) or not _is_lazy(other):
            return NotImplemented
        return _core.like(view(x, other.shape), other)

    return call


def bucketize(x: Any, boundaries: Tensor, *, out_int32: bool = False, right: bool = False) -> Any:
    """Record `bucketize` as `searchsorted` with one sequence for all rows, as ATen does."""
    if not isinstance(x, Tensor) or boundaries.dim() != 1:
        return NotImplemented
    return torch.searchsorted(boundaries, x, out_int32=out_int32, right=right)


def max_pool1d(x: Any, *args: Any, **kwargs: Any) -> Any:
    """Record a pooling that has a gradient as ATen calls it, also for a run that needs none: the
    kernel without a gradient gives its result another layout, and so noise another order."""
    if not (_is_lazy(x) and x.requires_grad and torch.is_grad_enabled()):
        return NotImplemented
    try:
        return torch.max_pool1d_with_indices(x, *args, **kwargs)[0]
    except RuntimeError:  # torch raises max_pool1d's own error
        return NotImplemented


# Parts --------------------------------------------------------------------------------------------


def tensor_split(x: Tensor, indices_or_sections: Any = None, dim: int = 0, **words: Any) -> Any:
    """Split into parts whose sizes differ by at most one, or at the indices of a list."""
    given = words.pop("sections", words.pop("indices", indices_or_sections))
    if words or x.dim() == 0:
        return NotImplemented
    size = x.shape[dim]
    if isinstance(given, int) and not isinstance(given, bool) and given > 0:
        least, n_more = divmod(size, given)
        ends = [least * (i + 1) + min(i + 1, n_more) for i in range(given)]
    elif isinstance(given, tuple | list) and all(isinstance(i, int) for i in given):
        ends = [*given, size]
    else:
        return NotImplemented
    before = (slice(None),) * (dim % x.dim())
    starts = [0, *ends[:-1]]
    return tuple(x[*before, slice(start, end)] for start, end in zip(starts, ends, strict=True))


def _split_along(least: int, dim: int) -> Callable[..., Any]:
    def split(x: Tensor, *sections: Any, **words: Any) -> Any:
        given = words.pop("sections", words.pop("indices", None))
        if given is None and sections:
            given = sections[0] if len(sections) == 1 else sections
        along = 0 if dim == 1 and x.dim() == 1 else dim
        is_even = not isinstance(given, int) or (given > 0 and x.shape[along] % given == 0)
        if words or x.dim() < least or not is_even:
            return NotImplemented
        return tensor_split(x, given, along)

    return split


# Joins --------------------------------------------------------------------------------------------


def _all(of_one: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """Apply a function to one tensor, to several arguments, or to a list."""

    def of_each(*tensors: Any) -> Any:
        if len(tensors) == 1 and isinstance(tensors[0], Tensor):
            return of_one(tensors[0])
        listed = tensors[0] if len(tensors) == 1 else tensors
        return tuple(of_one(tensor) for tensor in listed)

    return of_each


def _row(x: Tensor) -> Tensor:
    return x.reshape(1) if x.dim() == 0 else x


def _matrix(x: Tensor) -> Tensor:
    return x.reshape(1, 1) if x.dim() == 0 else x.unsqueeze(0) if x.dim() == 1 else x


def _block(x: Tensor) -> Tensor:
    if x.dim() < 2:
        return x.reshape(1, 1, 1) if x.dim() == 0 else x.unsqueeze(0).unsqueeze(-1)
    return x.unsqueeze(-1) if x.dim() == 2 else x


def hstack(tensors: Sequence[Tensor]) -> Any:
    """Concatenate along dim 1; vectors along dim 0."""
    rows = [_row(x) for x in tensors]
    return torch.cat(rows, 0 if rows[0].dim() == 1 else 1)


def _stack(shaped: Callable[[Tensor], Tensor], dim: int) -> Callable[[Sequence[Tensor]], Tensor]:
    """Concatenate along a dim tensors that `shaped` gave that dim."""
    return lambda tensors: torch.cat([shaped(x) for x in tensors], dim)


def column_stack(tensors: Sequence[Tensor]) -> Any:
    """Concatenate along dim 1; vectors become columns first."""
    return hstack([x.reshape(x.numel(), 1) if x.dim() <= 1 else x for x in tensors])


# Order and repetition -----------------------------------------------------------------------------


def _flip(dim: int) -> Callable[[Tensor], Any]:
    return lambda x: x.flip(dim) if x.dim() > dim else NotImplemented


def repeat_interleave(
    x: Tensor, repeats: Any = None, dim: int | None = None, *, output_size: int | None = None
) -> Any:
    """Record a call with `output_size` without it, since torch only checks it."""
    if not isinstance(repeats, int) or output_size is None:
        return NotImplemented
    if (x.numel() if dim is None else x.shape[dim]) * repeats != output_size:
        return NotImplemented
    return x.repeat_interleave(repeats, dim)


def diff(x: Tensor, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> Any:
    """Subtract from each entry the one before, `n` times."""
    if n < 1 or x.dim() == 0 or not -x.dim() <= dim < x.dim() or x.dtype is torch.bool:
        return NotImplemented
    parts = [part for part in (prepend, x, append) if part is not None]
    x = torch.cat(parts, dim) if len(parts) > 1 else x
    for _ in range(min(n, x.shape[dim])):
        size = max(x.shape[dim] - 1, 0)
        before = x.narrow(dim, 0, size)
        x = x.narrow(dim, 1, size) - before
    return x


# Writes -------------------------------------------------------------------------------------------


def fill_diagonal_(x: Tensor, fill_value: Any, wrap: bool = False) -> Any:
    """Record a `masked_fill_` whose mask is cut into chunks with the rows."""
    if planner.is_whole():
        return NotImplemented  # torch's own call needs no mask
    is_exact = x.is_floating_point() and isinstance(fill_value, float | int)
    if not is_exact and not (x.dtype is torch.int64 and type(fill_value) is int):
        return NotImplemented  # fill_diagonal_() converts the number, masked_fill_() refuses it
    mask = torch.zeros(x.shape, dtype=torch.bool, device=x.device).fill_diagonal_(True, wrap)
    return x.masked_fill_(mask, fill_value)


def index_put_(x: Tensor, indices: Any, values: Any, accumulate: bool = False) -> Any:
    """Record an assignment, `x[indices] = values`."""
    is_listed = isinstance(indices, tuple | list)
    if accumulate or not is_listed or not all(isinstance(x, Tensor) for x in (*indices, values)):
        return NotImplemented
    x[tuple(indices)] = values
    return x


def index_put(x: Tensor, indices: Any, values: Any, accumulate: bool = False) -> Any:
    """Record an assignment to a copy, as ATen does."""
    return index_put_(x.clone(), indices, values, accumulate)


# Products -----------------------------------------------------------------------------------------


def einsum(equation: Any, operands: Any = (), path: Any = None, *more: Any) -> Any:
    """Record an einsum of one operand without repeated letters as a permute and a sum."""
    if not isinstance(equation, str) or not isinstance(operands, tuple | list) or more:
        return NotImplemented
    text = equation.replace(" ", "")
    if len(operands) != 1 or "," in text or "." in text:
        return NotImplemented
    x = operands[0]
    term, arrow, out = text.partition("->")
    if not arrow:
        out = "".join(sorted(letter for letter in set(term) if term.count(letter) == 1))
    is_legal = len(term) == x.dim() and term.isalpha() and set(out) <= set(term)
    if not is_legal or len(set(out)) < len(out) or len(set(term)) < len(term):  # diagonals
        return NotImplemented
    summed = sorted(letter for letter in term if letter not in out)
    x = x.permute([term.index(letter) for letter in (*out, *summed)])
    return x.sum(list(range(len(out), x.dim()))) if summed else x


def margin_ranking_loss(
    x: Tensor, y: Tensor, target: Tensor, margin: float = 0.0, reduction: int = 1
) -> Any:
    """Compute the loss, for targets whose dtype is not that of the values."""
    terms = (-target * (x - y) + margin).clamp_min_(0)
    return terms if reduction == 0 else terms.mean() if reduction == 1 else terms.sum()


def linalg_norm(
    x: Tensor, ord: Any = None, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    """Record a norm of vectors as `vector_norm`; decline norms of matrices."""
    n_dims = 1 if isinstance(dim, int) else x.dim() if dim is None else len(dim)
    if ord is not None and (n_dims != 1 or isinstance(ord, str)):
        return NotImplemented
    return torch.linalg.vector_norm(x, 2 if ord is None else ord, dim, keepdim, dtype=dtype)


def ctc_loss(
    log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, *more: Any, **words: Any
) -> Any:
    """Lay targets that follow one after the other out in rows as long as the longest, for which
    torch allocates: the bytes of a call are predicted from shapes."""
    read = _core.read if _is_lazy(target_lengths) else torch.as_tensor
    sizes = read(target_lengths).to("cpu", torch.int64)
    total = int(sizes.sum())
    is_flat = log_probs.dim() == 3 and targets.dim() == sizes.dim() == 1
    if not is_flat or not len(targets) == total > 0 or sizes.min() < 0:
        return NotImplemented  # torch raises its own error, or the loss is of one sequence
    places = (sizes.cumsum(0) - sizes)[:, None] + torch.arange(int(sizes.max()), device="cpu")
    padded = targets[places.clamp_(max=total - 1)]  # torch does not read behind a target
    return torch.ctc_loss(log_probs, padded, input_lengths, target_lengths, *more, **words)


def _handler(compose: Callable[..., Any]) -> Handler:
    signature = inspect.signature(compose)

    def call(func: Func, args: Args, kwargs: Words) -> Any:
        try:
            signature.bind(*args, **kwargs)
        except TypeError:  # torch raises its own error
            return NotImplemented
        return compose(*args, **kwargs)

    return call


#: Ops by name: the function that records each; most have no row.
_COMPOSED: dict[str, Callable[..., Any]] = {
    "atleast_1d": _all(_row),
    "atleast_2d": _all(_matrix),
    "atleast_3d": _all(_block),
    "broadcast_tensors": broadcast_tensors,
    "broadcast_to": lambda x, *size: x.expand(*size),
    "bucketize": bucketize,
    "column_stack": column_stack,
    "ctc_loss": ctc_loss,
    "diff": diff,
    "dsplit": _split_along(3, 2),
    "dstack": _stack(_block, 2),
    "einsum": einsum,
    "expand_as": _plain_as(Tensor.expand),
    "fill_diagonal_": fill_diagonal_,
    "fliplr": _flip(1),
    "flipud": _flip(0),
    "hsplit": _split_along(1, 1),
    "hstack": hstack,
    "index_put": index_put,
    "index_put_": index_put_,
    "linalg_norm": linalg_norm,
    "margin_ranking_loss": margin_ranking_loss,
    "max_pool1d": max_pool1d,
    "repeat_interleave": repeat_interleave,
    "reshape_as": _plain_as(Tensor.reshape),
    "row_stack": _stack(_matrix, 0),
    "tensor_split": tensor_split,
    "view_as": _plain_as(Tensor.view),
    "vsplit": _split_along(2, 0),
    "vstack": _stack(_matrix, 0),
}

HANDLERS = {name: _handler(compose) for name, compose in _COMPOSED.items()}
