# SPDX-License-Identifier: Apache-2.0
"""Repeat the recorded view calls of a value on another storage."""

from __future__ import annotations

import torch

from koila import _core
from koila.basics.rows import chunk_shape, without_memory
from koila.messages.errors import NotInChunksError
from koila.staged import one_call
from koila.staged.program import Program


def take(
    program: Program,
    value: int,
    memory: torch.Tensor,
    n_rows: int,
    is_graph: bool,
    taken: dict[int, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return the view of `memory` that `value` is of its storage.

    Args:
        program: the staged program.
        value: number of the value.
        memory: a tensor in place of the value's whole storage, or of a chunk of it.
        n_rows: rows of the chunk; -1: `memory` has all rows.
        is_graph: whether autograd records the views.
        taken: views that were taken before, by value; further views are taken of these, and added.

    Raises:
        NotInChunksError: a call that was a view is a copy on this memory.
    """
    if taken is not None and value in taken:
        return taken[value]
    view = program.info(value).view
    if view is None:
        return memory
    node, out, source = view
    given = {source: take(program, source, memory, n_rows, is_graph, taken)}
    for other in _core.node(node)[5]:
        if other >= 0 and other != source:  # view_as() reads the sizes of its second argument
            info = program.info(other)
            shape = info.shape
            if n_rows >= 0 and info.place is not None:
                shape = chunk_shape(shape, info.place, n_rows)
            given[other] = without_memory(shape, info.dtype, info.device)
    env = one_call.run(node, n_rows, given, program.n_values, not is_graph)
    result: torch.Tensor = env[out]
    if result.untyped_storage()._cdata != memory.untyped_storage()._cdata:
        raise NotInChunksError(f"{_core.node(node)[3]}: the memory is laid out otherwise")
    if taken is not None:
        taken[value] = result
    return result
