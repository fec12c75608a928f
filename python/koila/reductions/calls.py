# SPDX-License-Identifier: Apache-2.0
"""Reductions of a program: partials on a chunk, combined at the joint, by partials.py's table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from koila import _core
from koila.basics import rows, table
from koila.reductions.partials import OF_CALLS, REDUCTIONS
from koila.reductions.reduction import Call, Reduction
from koila.staged.facts import REDUCTION_NAMES as NAMES
from koila.staged.facts import Node
from koila.staged.program import Program


def reduction_of(node: Node) -> Reduction:
    return OF_CALLS.get(_core.node(node.id)[0]) or REDUCTIONS[NAMES[node.reduce]]


def is_of_chunks(node: Node) -> bool:
    """Whether it is made of parts or not at all."""
    return _core.node(node.id)[0] in OF_CALLS


def dim_of_chunks(program: Program, node: Node) -> int | None:
    """The dim along which the value has a part for each chunk; None: it has none."""
    if not reduction_of(node).is_by_chunk:
        return None
    func, args, kwargs = _core.call(node.id)
    (dim,) = _call(program, node, func, args, kwargs).word("dim")
    return int(dim) % len(program.info(node.first_out).shape)


def n_parts(node: Node) -> int:
    return reduction_of(node).n_parts


def known() -> int:
    """The reductions there is a table entry for, as bits, for the recorder."""
    return sum(1 << i for i, name in enumerate(NAMES) if name in REDUCTIONS)


def _call(
    program: Program,
    node: Node,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    start: int = 0,
    memo: dict[str, Any] | None = None,
) -> Call:
    known = program.signatures.get(node.id)
    if known is None:
        _, row, _, _, n_rows, *_ = _core.node(node.id)
        assert row is not None  # only a row says that a call is a reduction
        known = program.signatures[node.id] = table.ROWS[row]["call"], n_rows
    signature, n_rows = known
    dtype = program.info(node.first_out).dtype
    return Call(func, args, kwargs, signature, dtype, start, n_rows, memo)


def parts_of(
    program: Program,
    node: Node,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    start: int,
    memo: dict[str, Any] | None = None,
) -> tuple[Reduction, Call]:
    """What makes the partials of one chunk, which begins at row `start`, and the call that they are
    of. The memo is that of all runs of the chunk."""
    return reduction_of(node), _call(program, node, func, args, kwargs, start, memo)


def combine(
    program: Program, node: Node, parts: list[list[torch.Tensor]]
) -> tuple[torch.Tensor, ...]:
    """The outputs of a reduction from the partials of all chunks."""
    func, args, kwargs = _core.call(node.id)
    value = reduction_of(node).combine(parts, _call(program, node, func, args, kwargs))
    values = tuple(value) if isinstance(value, tuple | list) else (value,)
    if reduction_of(node).is_by_chunk:
        return values
    return tuple(
        _laid_out(program, node, out, one) for out, one in zip(node.outs, values, strict=True)
    )


def _laid_out(program: Program, node: Node, out: int, tensor: torch.Tensor) -> torch.Tensor:
    """A value as it lies in memory whole: what a product of one row gives may lie otherwise, and
    what is drawn for it, or is a view of it, would be another."""
    dims = [dim for dim, size in enumerate(tensor.shape) if size > 1]
    if len(dims) < 2 or tensor.layout != torch.strided:
        return tensor
    strides = program.info(out).strides or _strides_of_whole(program, node, out)
    if strides is None or all(tensor.stride(dim) == strides[dim] for dim in dims):
        return tensor
    whole = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device="meta")
    return rows.in_order_of(tensor, whole)


def _strides_of_whole(program: Program, node: Node, out: int) -> tuple[int, ...] | None:
    """How what torch's own call gives lies in memory, on tensors without any; None: nobody knows
    how what it reads lies."""
    env: list[torch.Tensor | None] = [None] * program.n_values
    for value in {program.imports[i].value for i in node.imports if i >= 0}:
        info = program.info(value)
        strides = info.real.stride() if info.real is not None else info.strides
        if strides is None:
            return None
        env[value] = torch.empty_strided(info.shape, strides, dtype=info.dtype, device="meta")
    _core.run_alone(node.id, env, -1, True, lambda _, func, args, kwargs: func(*args, **kwargs))
    made = env[out]
    return made.stride() if made is not None else None
