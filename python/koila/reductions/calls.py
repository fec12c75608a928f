# SPDX-License-Identifier: Apache-2.0
"""Run the reductions of a program: their partials on chunks, and the combination at a barrier."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from koila import _core
from koila.basics import rows, table
from koila.reductions.partials import OF_CALLS, REDUCTIONS
from koila.reductions.reduction import Call, Reduction
from koila.staged.facts import ADDED, REDUCE, Node
from koila.staged.facts import REDUCTION_NAMES as NAMES
from koila.staged.program import Program


class Split(NamedTuple):
    """How a recorded call is split.

    Attributes:
        reduction: its parts, and how they are combined.
        is_of_chunks: whether only chunks run the call: a whole run does not.
        make: makes the call as it was recorded, of its function, positional and keyword arguments.
    """

    reduction: Reduction
    is_of_chunks: bool
    make: Callable[..., Call]


def split_of(program: Program, node: Node) -> Split:
    """Return how a call is split; it is the same in each step."""
    splits: dict[int, Split] = program.cache.splits
    found = splits.get(node.id)
    if found is None:
        func, row, _, _, n_rows, *_ = _core.node(node.id)
        assert row is not None  # only a row says that a call is a reduction
        own, dtype = OF_CALLS.get(func), program.info(node.first_out).dtype
        make = functools.partial(
            Call, signature=table.ROWS[row]["call"], dtype=dtype, n_rows=n_rows, node=node.id
        )
        reduction = REDUCTIONS[NAMES[node.reduce]] if own is None else own
        found = splits[node.id] = Split(reduction, own is not None, make)
    return found


def added_by_maker(program: Program, value: int) -> frozenset[int]:
    """Return which partials of the reduction that makes a value are added up as chunks finish."""
    node = program.node_of(value)
    if node is None or node.mode != REDUCE:
        return frozenset()
    return ADDED[-1 if split_of(program, node).is_of_chunks else node.reduce]


def is_by_chunk(program: Program, value: int) -> bool:
    """Tell whether a value is of a reduction that has one entry for each chunk."""
    node = program.node_of(value)
    if node is None or node.mode != REDUCE:
        return False
    return value == node.first_out and split_of(program, node).reduction.is_by_chunk


def is_of_parts(program: Program, value: int) -> bool:
    """Tell whether a reduction makes a value whose rows no chunk reads."""
    node = program.node_of(value)
    return node is not None and node.mode == REDUCE and not is_by_chunk(program, node.first_out)


def dim_of_chunks(program: Program, node: Node) -> int:
    """Return the dim along which the value of a reduction has a slice for each chunk."""
    dim = split_of(program, node).make(*_core.call(node.id)).word("dim")
    return int(dim) % len(program.info(node.first_out).shape)


def bits_of_all() -> int:
    """Return, for the recorder, a bit for each reduction of reductions.def that the table has."""
    return sum(1 << i for i, name in enumerate(NAMES) if name in REDUCTIONS)


def combine(
    program: Program, node: Node, split: Split, parts: list[list[torch.Tensor]]
) -> tuple[torch.Tensor, ...]:
    """Return the outputs of a reduction from the partials of all chunks, parts[part][chunk]."""
    reduction, _, make = split
    value = reduction.combine(parts, make(*_core.call(node.id)))
    values = tuple(value) if isinstance(value, tuple | list) else (value,)
    if reduction.is_by_chunk:
        return values
    laid_out = []
    for out, tensor in zip(node.outs, values, strict=True):
        has_order = tensor.dim() > 1 and tensor.layout == torch.strided
        laid_out.append(_laid_out(program, node, out, tensor) if has_order else tensor)
    return tuple(laid_out)


def _laid_out(program: Program, node: Node, out: int, tensor: torch.Tensor) -> torch.Tensor:
    """Return a value with its dims in the order in memory that a whole run would give it.

    A product of a chunk of one row may have other strides than a whole run. Views of the value, and
    random numbers drawn in its layout, would then differ.
    """
    dims = [dim for dim, size in enumerate(tensor.shape) if size > 1]
    if len(dims) < 2:
        return tensor
    strides = program.info(out).strides or _strides_of_whole(program, node, out)
    if strides is None or all(tensor.stride(dim) == strides[dim] for dim in dims):
        return tensor
    whole = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device="meta")
    return rows.in_order_of(tensor, whole)


def _strides_of_whole(program: Program, node: Node, out: int) -> tuple[int, ...] | None:
    """Return the strides of torch's own result, by meta tensors; None: an input's are not known."""
    env: list[torch.Tensor | None] = [None] * program.n_values
    for value in set(program.reads(node)):
        info = program.info(value)
        strides = info.real.stride() if info.real is not None else info.strides
        if strides is None:
            return None
        env[value] = torch.empty_strided(info.shape, strides, dtype=info.dtype, device="meta")
    _core.run_alone(node.id, env, -1, True, lambda _, func, args, kwargs: func(*args, **kwargs))
    made = env[out]
    return made.stride() if made is not None else None
