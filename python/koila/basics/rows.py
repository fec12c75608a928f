# SPDX-License-Identifier: Apache-2.0
"""Rows of a value: cutting a chunk out of it, and putting chunks together again.

A place is (axis, dim, outer, inner): dim `dim` has outer * rows * inner entries, and entry
(o * rows + row) * inner + i belongs to row `row`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Place = tuple[int, int, int, int]
Bounds = tuple[int, int]

#: Kernels are fastest, and matrix products of two passes the same, on multiples of so many rows.
UNIT = 8


def grid(rows: int, n_chunks: int, unit: int = 1) -> list[Bounds]:
    """Divide `rows` rows into at most `n_chunks` ranges whose sizes differ by one unit at most.

    Where there are too few rows for a unit in each chunk, a unit is one row.

    Example:
        >>> from koila.basics.rows import grid
        >>> grid(7, 3)
        [(0, 3), (3, 5), (5, 7)]
        >>> grid(100, 3, 8)
        [(0, 40), (40, 72), (72, 100)]
    """
    n_units = -(-rows // unit)
    if unit > 1 and n_units < n_chunks:
        return grid(rows, n_chunks)
    n_chunks = max(1, min(n_chunks, n_units))
    size, n_larger = divmod(n_units, n_chunks)
    bounds, start = [], 0
    for i in range(n_chunks):
        stop = min(rows, start + (size + (i < n_larger)) * unit)
        bounds.append((start, stop))
        start = stop
    return bounds


def largest(rows: int, n_chunks: int, unit: int = 1) -> int:
    """The rows of the largest chunk of such a grid."""
    return max((stop - start for start, stop in grid(rows, n_chunks, unit)), default=0)


def _goes_on(tensor: torch.Tensor, dim: int) -> bool:
    """Whether `dim` ends in memory where another begins: a view may join the two, and then cannot
    of a part."""
    end = tensor.stride(dim) * tensor.shape[dim]
    return end > 0 and any(
        size > 1 and stride == end
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _memory_order(strides: Sequence[int]) -> tuple[list[int], list[int]]:
    """The dims from the outermost in memory inwards, and the way back.

    An expanded dim stays where it stands among the others, as in torch's empty_like, in whose order
    a random call fills its numbers.
    """
    order = list(range(len(strides)))
    if 0 not in strides:
        order.sort(key=strides.__getitem__, reverse=True)
    else:
        inwards = order[::-1]
        for i in range(1, len(inwards)):
            at = i
            for before in range(i - 1, -1, -1):
                outer, inner = strides[inwards[at]], strides[inwards[before]]
                if 0 < outer < inner:
                    inwards[at], inwards[before] = inwards[before], inwards[at]
                    at = before
                elif 0 < inner < outer:
                    break
        order = inwards[::-1]
    return order, sorted(range(len(order)), key=order.__getitem__)


def in_order_of(part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """A copy of `part` with its dims in memory in the order of `whole`.

    What is legal for the whole, such as a view, is then legal for the part.
    """
    order, back = _memory_order(whole.stride())
    return part.permute(order).contiguous().permute(back)


def strides_like(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """The strides of empty_like(). On meta tensors that is written in Python, and imports torch's
    compiler; clone() asks it only where memory has gaps."""
    return torch.empty_strided(shape, strides, device="meta").clone().stride()


def without_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros of these sizes, with no memory to speak of."""
    return torch.zeros((), dtype=dtype, device=device).expand(tuple(shape))


def zeros(
    shape: Sequence[int], strides: Sequence[int] | None, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Zeros with their dims in memory in the order of `strides`; None: in the order of the dims."""
    return empty(shape, strides, dtype, device).zero_()


def empty(
    shape: Sequence[int], strides: Sequence[int] | None, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A tensor that lies so, of any numbers; it is no view."""
    order, _ = _memory_order(strides or [0] * len(shape))
    dense, step = [0] * len(shape), 1
    for dim in reversed(order):
        dense[dim] = step
        step *= max(1, shape[dim])
    return torch.empty_strided(shape, dense, dtype=dtype, device=device)


def is_cut_in_place(tensor: torch.Tensor, place: Place) -> bool:
    """Whether a chunk of a whole tensor is a view of it, and takes no memory."""
    _, dim, outer, _ = place
    return outer == 1 and not _goes_on(tensor, dim)


def _part(tensor: torch.Tensor, place: Place, rows: int, bounds: Bounds) -> torch.Tensor:
    """A view of some rows; where they are not outermost in their dim, of its three digits."""
    _, dim, outer, inner = place
    start, stop = bounds
    if outer == 1:
        return tensor.narrow(dim, start * inner, (stop - start) * inner)
    digits: torch.Tensor = tensor.unflatten(dim, (outer, rows, inner))
    return digits.narrow(dim + 1, start, stop - start)


def cut(tensor: torch.Tensor, place: Place, rows: int, bounds: Bounds) -> torch.Tensor:
    """Take the rows in `bounds` of a whole tensor, which has `rows` of them."""
    _, dim, outer, _ = place
    if bounds == (0, rows):
        return tensor
    part = _part(tensor, place, rows, bounds)
    if outer == 1:
        return part if is_cut_in_place(tensor, place) else in_order_of(part, tensor)
    return part.flatten(dim, dim + 2)


def put(
    tensor: torch.Tensor, place: Place, rows: int, bounds: Bounds, part: torch.Tensor, is_more: bool
) -> None:
    """Write the rows in `bounds` of a whole tensor, which has `rows` of them; or add to them."""
    to = _part(tensor, place, rows, bounds)
    _, dim, outer, _ = place
    if outer > 1:
        part = part.unflatten(dim, to.shape[dim : dim + 3])
    if is_more:
        to.add_(part)
    else:
        to.copy_(part)


def strides_of_chunk(part: torch.Tensor, place: Place) -> Sequence[int]:
    """How the whole may lie, as far as a chunk tells: the stride of a dim of one entry means
    nothing, and rows are outermost then."""
    strides = list(part.stride())
    if part.shape[place[1]] == 1:
        strides[place[1]] = max(*strides, part.numel()) + 1
    return strides


def gather(
    parts: Sequence[torch.Tensor], place: Place, strides: Sequence[int] | None = None
) -> torch.Tensor:
    """Put the chunks of a value together, in the order of the rows.

    Its dims are in memory in the order of `strides`, those of the whole value; None: in that of a
    chunk.
    """
    _, dim, outer, inner = place
    if len(parts) == 1:
        return parts[0]
    if strides is None:
        strides = strides_of_chunk(parts[0], place)
    order, back = _memory_order(strides)
    at = order.index(dim)
    laid = [part.permute(order) for part in parts]
    if outer == 1:
        return torch.cat(laid, at).permute(back)
    digits = [
        part.unflatten(at, (outer, part.shape[at] // (outer * inner), inner)) for part in laid
    ]
    return torch.cat(digits, at + 1).flatten(at, at + 2).permute(back)


def chunk_shape(shape: Sequence[int], place: Place, rows: int) -> tuple[int, ...]:
    """The shape of a value on a chunk of `rows` rows."""
    _, dim, outer, inner = place
    return (*shape[:dim], outer * rows * inner, *shape[dim + 1 :])


def alias_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a leaf of a graph of its own; gradients add up in at least float32."""
    alias = tensor.detach().requires_grad_()
    if tensor.dtype in (torch.float16, torch.bfloat16) and hasattr(alias, "grad_dtype"):
        alias.grad_dtype = torch.float32
    return alias
