# SPDX-License-Identifier: Apache-2.0
"""Cut chunks of rows out of a tensor, and concatenate chunks to a whole tensor.

A place says where the rows of a tensor are: (axis, dim, outer, inner). Dim `dim` has
outer * rows * inner entries, and entry (o * rows + row) * inner + i belongs to row `row`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Place = tuple[int, int, int, int]
Bounds = tuple[int, int]  # the first row of a chunk, and the first row after it

#: By dtype: the one in which its numbers are accumulated.
WIDENED = {one: one for one in vars(torch).values() if isinstance(one, torch.dtype)}
WIDENED[torch.float16] = WIDENED[torch.bfloat16] = torch.float32
#: The dtypes of values that can get a gradient.
CONTINUOUS = frozenset(one for one in WIDENED if one.is_floating_point or one.is_complex)
#: The dtypes whose numbers are accumulated as they are.
OWN_WIDTH = frozenset(one for one in WIDENED if WIDENED[one] is one)

_data: Any = torch._C.TensorBase.data

#: On multiples of this many rows kernels are fastest, and products round the same in each run.
UNIT = 8


def grid(rows: int, n_chunks: int, unit: int = 1) -> list[Bounds]:
    """Divide `rows` rows into at most `n_chunks` ranges whose sizes differ by at most one unit.

    If the rows are too few for a unit in each chunk, the unit is one row.

    Examples:
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
    """Return the rows of the largest chunk of the grid with these arguments."""
    return max((stop - start for start, stop in grid(rows, n_chunks, unit)), default=0)


def _goes_on(tensor: torch.Tensor, dim: int) -> bool:
    """Tell whether `dim` is contiguous with another dim in memory: a view may merge the two dims of
    the whole tensor, but not those of a slice of it."""
    strides = tensor.stride()
    end = strides[dim] * tensor.shape[dim]
    if end <= 0 or end not in strides:
        return False
    return any(
        size > 1 and stride == end for size, stride in zip(tensor.shape, strides, strict=True)
    )


def _memory_order(strides: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the dims from the outermost in memory to the innermost, and the inverse permutation.

    An expanded dim (stride 0) keeps its position among the others, as in torch's empty_like: random
    calls fill their numbers in that order.
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
    """Return a copy of `part` whose dims have the order in memory of those of `whole`, so that
    views which are legal for the whole tensor are legal for the part."""
    order, back = _memory_order(whole.stride())
    return part.permute(order).contiguous().permute(back)


def strides_like(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of empty_like() of a tensor with these strides.

    They are those of clone(), since empty_like() on a meta tensor imports torch's compiler; clone()
    calls it only if memory has gaps.
    """
    return torch.empty_strided(shape, strides, device="meta").clone().stride()


def without_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros of this shape, expanded from a single element."""
    return torch.zeros((), dtype=dtype, device=device).expand(tuple(shape))


def dense_strides(shape: Sequence[int], like: Sequence[int] | None = None) -> tuple[int, ...]:
    """Return strides without gaps for `shape`, whose dims have the order in memory that strides
    `like` have; None: row-major.

    Examples:
        >>> from koila.basics.rows import dense_strides
        >>> dense_strides((2, 3)), dense_strides((2, 3), (1, 10))
        ((3, 1), (1, 2))
    """
    order, _ = _memory_order(like or [0] * len(shape))
    dense, step = [0] * len(shape), 1
    for dim in reversed(order):
        dense[dim] = step
        step *= max(1, shape[dim])
    return tuple(dense)


def zeros(
    shape: Sequence[int], strides: Sequence[int] | None, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return zeros whose dims have the order in memory that `strides` have; None: row-major."""
    return empty(shape, strides, dtype, device).zero_()


def empty(
    shape: Sequence[int], strides: Sequence[int] | None, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return an uninitialized dense tensor whose dims have the order in memory that `strides` have;
    None: row-major."""
    return torch.empty_strided(shape, dense_strides(shape, strides), dtype=dtype, device=device)


def is_cut_in_place(tensor: torch.Tensor, place: Place) -> bool:
    """Tell whether `cut` returns a view of a whole tensor, and no copy."""
    _, dim, outer, _ = place
    return outer == 1 and not _goes_on(tensor, dim)


def _part(tensor: torch.Tensor, place: Place, rows: int, bounds: Bounds) -> torch.Tensor:
    """Return a view of the rows in `bounds`; if outer > 1, `dim` is split into three dims."""
    _, dim, outer, inner = place
    start, stop = bounds
    if outer == 1:
        return tensor.narrow(dim, start * inner, (stop - start) * inner)
    digits: torch.Tensor = tensor.unflatten(dim, (outer, rows, inner))
    return digits.narrow(dim + 1, start, stop - start)


def cut(tensor: torch.Tensor, place: Place, rows: int, bounds: Bounds) -> torch.Tensor:
    """Return the rows in `bounds` of a whole tensor with `rows` rows, as a view if possible."""
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
    """Write `part` to the rows in `bounds` of a whole tensor of `rows` rows; `is_more`: add it."""
    to = _part(tensor, place, rows, bounds)
    _, dim, outer, _ = place
    if outer > 1:
        part = part.unflatten(dim, to.shape[dim : dim + 3])
    if is_more:
        to.add_(part)
    else:
        to.copy_(part)


def strides_of_chunk(part: torch.Tensor, place: Place) -> Sequence[int]:
    """Return strides for the order of dims of the whole tensor, as far as a chunk shows it.

    If a chunk has one entry in the rows' dim, its stride means nothing: the dim becomes the
    outermost.
    """
    strides = list(part.stride())
    if part.shape[place[1]] == 1:
        strides[place[1]] = max(*strides, part.numel()) + 1
    return strides


def gather(
    parts: Sequence[torch.Tensor], place: Place, strides: Sequence[int] | None = None
) -> torch.Tensor:
    """Concatenate the chunks of a value, in the order of the rows. Its dims get the order in memory
    that `strides`, those of the whole value, have; None: that of a chunk."""
    _, dim, outer, inner = place
    if len(parts) == 1:
        return parts[0]
    if strides is None:
        strides = strides_of_chunk(parts[0], place)
    order, back = _memory_order(strides)
    at = order.index(dim)
    permuted = [part.permute(order) for part in parts]
    if outer == 1:
        return torch.cat(permuted, at).permute(back)
    digits = [
        part.unflatten(at, (outer, part.shape[at] // (outer * inner), inner)) for part in permuted
    ]
    return torch.cat(digits, at + 1).flatten(at, at + 2).permute(back)


def chunk_shape(shape: Sequence[int], place: Place, rows: int) -> tuple[int, ...]:
    """Return the shape of a value on a chunk of `rows` rows."""
    _, dim, outer, inner = place
    return (*shape[:dim], outer * rows * inner, *shape[dim + 1 :])


def as_new(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the same memory that autograd takes for a new one: not a view, version
    0, without a graph. Graphs that saved `tensor` allow writes through it."""
    with torch._C.DisableTorchFunctionSubclass():  # a watched tensor would run pending calls
        made: torch.Tensor = _data.__get__(tensor)
    return made


#: Tells whether two tensors have the same storage.
is_alias: Callable[[torch.Tensor, torch.Tensor], bool] = vars(torch._C)["_is_alias_of"]

#: Size, strides and offset of a tensor in its storage, and whether its numbers are conjugated or
#: negated only when they are read, as conj() and imag of a conjugate leave them.
Layout = tuple[torch.Size, tuple[int, ...], int, bool, bool]


def layout_of(tensor: torch.Tensor) -> Layout:
    """Return the layout of a tensor in its storage."""
    start = int(tensor.storage_offset())
    return tensor.shape, tensor.stride(), start, tensor.is_conj(), tensor.is_neg()


def with_layout(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return the view of a tensor's storage that has a layout and the tensor's dtype."""
    size, strides, start, is_conj, is_neg = layout
    view = tensor.as_strided(size, strides, start)
    view = view.conj() if view.is_conj() != is_conj else view
    return torch._neg_view(view) if view.is_neg() != is_neg else view


def in_memory(memory: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor in this memory, with the offset, shape and strides of `like`."""
    layout = like.storage_offset(), like.shape, like.stride()
    return set_memory(torch.empty(0, dtype=like.dtype, device=like.device), memory, *layout)


def set_memory(tensor: torch.Tensor, memory: Any, *layout: Any) -> torch.Tensor:
    """Set the memory of a tensor of koila's own, past the patch that watches what scripts set."""
    own: Any = torch._C.TensorBase.set_
    made: torch.Tensor = own(tensor, memory, *layout)
    return made


def as_inference(tensor: torch.Tensor) -> torch.Tensor:
    """Return an inference tensor with the same memory."""
    with torch.inference_mode():
        return in_memory(tensor.untyped_storage(), tensor)


def widen_gradient(leaf: torch.Tensor) -> None:
    """Let the gradients of a new leaf accumulate in at least float32."""
    if hasattr(leaf, "grad_dtype"):
        leaf.grad_dtype = WIDENED[leaf.dtype]


def with_stride(tensor: torch.Tensor, dim: int, stride: int) -> torch.Tensor:
    """Return a view of a tensor, or itself, whose dim `dim` has this stride."""
    strides = list(tensor.stride())
    if strides[dim] == stride:
        return tensor
    strides[dim] = stride
    return tensor.as_strided(tensor.shape, strides)
