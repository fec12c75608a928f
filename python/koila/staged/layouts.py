# SPDX-License-Identifier: Apache-2.0
"""Find out how a value lies in memory if no rule of its call tells: run the call on two rows.

Random calls need this: CPU kernels fill a tensor in the order of its memory, so only its layout
tells which number is whose. The layout that a call returns depends on the layouts of its inputs,
not on their numbers, nor on how many rows there are if there are several. So the call runs on
stand-ins that lie as its inputs do. An input whose layout is unknown too is made by its own call in
the same way.
"""

from __future__ import annotations

import torch

from koila import _core
from koila.basics import rows
from koila.staged import one_call
from koila.staged.facts import Info

_N_ROWS = 2  # a single row would not tell where the rows are in memory
_MANY_BYTES = 1 << 20  # larger weights stay unfilled: the system gives no memory to those

# Taken before koila patches these methods: the patched ones first let pending random calls draw.
_get_state = torch._C.Generator.get_state
_set_state = torch._C.Generator.set_state


def settled(value: int) -> Info:
    """Return the metadata of a value. If no rule knows its strides, they are those of a tensor
    whose dims have the same order in memory, with a gap behind each element if there are any gaps.

    The strides are None if the layout cannot be found out.
    """
    info = Info.of(value)
    if info.strides is not None or info.place is None or info.device.type != "cpu":
        return info
    try:
        part = _part(value, info.place, {})
    except Exception:  # a call does not take stand-ins
        return info
    step = 1 if _dense(part.shape, part) == part.stride() else 2
    return info._replace(strides=tuple(step * stride for stride in _dense(info.shape, part)))


def _dense(shape: tuple[int, ...], like: torch.Tensor) -> tuple[int, ...]:
    """Return strides without gaps for `shape`, in the order in memory of the dims of `like`."""
    return rows.empty(shape, like.stride(), like.dtype, torch.device("meta")).stride()


def _part(
    value: int, place: rows.Place | None, parts: dict[tuple[int, rows.Place | None], torch.Tensor]
) -> torch.Tensor:
    """Return a tensor that lies in memory as two rows of a value do.

    Args:
        value: the value.
        place: where a call finds its rows; None: it reads the whole value.
        parts: those that are known, by value and place.

    Raises:
        RuntimeError: a call does not take stand-ins.
    """
    if (value, place) not in parts:
        info, maker = Info.of(value), _core.maker_of(value)
        strides = info.strides if info.result is None else info.result.stride()
        if strides is not None or maker is None or place != info.place:
            parts[value, place] = _stand_in(info, place, strides)
        else:
            node, n_values, inputs = maker
            tensors = {one: _part(one, at, parts) for one, at, _ in inputs}
            parts[value, place] = _made_alone(value, node, n_values, tensors)
    return parts[value, place]


def _stand_in(
    info: Info, place: rows.Place | None, strides: tuple[int, ...] | None
) -> torch.Tensor:
    """Return ones that lie in memory as two rows of a value; zeros for indices."""
    shape = info.shape
    if place is not None:
        _, dim, outer, inner = place
        n_rows = min(shape[dim] // (outer * inner), _N_ROWS)
        shape = rows.chunk_shape(shape, place, n_rows)
    made = rows.empty(shape, strides, info.dtype, info.device)
    is_number = info.dtype.is_floating_point or info.dtype.is_complex
    return made if is_number and made.nbytes > _MANY_BYTES else made.fill_(1 if is_number else 0)


def _made_alone(
    value: int, node: int, n_values: int, inputs: dict[int, torch.Tensor]
) -> torch.Tensor:
    """Return what a call makes of stand-ins. It may write these, and its draws are undone."""
    n_rows = min(_core.node(node)[4], _N_ROWS)
    state = _get_state(torch.default_generator)
    try:
        made: torch.Tensor = one_call.run(node, n_rows or -1, inputs, n_values, True)[value]
    finally:
        _set_state(torch.default_generator, state)
    return made
