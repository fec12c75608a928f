# SPDX-License-Identifier: Apache-2.0
"""Record calls, most without a row of their own, as others, where the calls that ATen composes them
of (`traced.py`) would not do: they depend on numbers, do not tell where the rows are, or run once.

Each function makes calls that give ATen's numbers, so that a run in one chunk equals eager bit for
bit. It returns NotImplemented for arguments that it does not handle.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
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


def repeat_interleave(
    x: Tensor, repeats: Any = None, dim: int | None = None, *, output_size: int | None = None
) -> Any:
    """Record a call with `output_size` without it, since torch only checks it."""
    if not isinstance(repeats, int) or output_size is None:
        return NotImplemented
    if (x.numel() if dim is None else x.shape[dim]) * repeats != output_size:
        return NotImplemented
    return x.repeat_interleave(repeats, dim)


def to_cuda(x: Tensor, device: Any = None, non_blocking: bool = False, **words: Any) -> Any:
    """Record x.cuda() as x.to(device)."""
    if isinstance(device, int):
        device = torch.device("cuda", device)
    device = torch.device("cuda" if device is None else device)
    if device.type != "cuda":
        return NotImplemented  # torch raises its own error
    return x.to(device, non_blocking=non_blocking, **words)


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
    "broadcast_tensors": broadcast_tensors,
    "bucketize": bucketize,
    "cpu": lambda x, **words: x.to("cpu", **words),
    "ctc_loss": ctc_loss,
    "cuda": to_cuda,
    "expand_as": _plain_as(Tensor.expand),
    "fill_diagonal_": fill_diagonal_,
    "index_put": index_put,
    "index_put_": index_put_,
    "max_pool1d": max_pool1d,
    "repeat_interleave": repeat_interleave,
    "reshape_as": _plain_as(Tensor.reshape),
    "view_as": _plain_as(Tensor.view),
}

HANDLERS = {name: _handler(compose) for name, compose in _COMPOSED.items()}
