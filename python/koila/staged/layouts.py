# SPDX-License-Identifier: Apache-2.0
"""Find out how a value lies in memory if no rule of its call tells: run the call on two rows.

Random calls need this: CPU kernels fill a tensor in the order of its memory, so only its layout
tells which number is whose. The layout that a call returns depends on the layouts of its inputs,
not on their numbers, nor on how many rows there are if there are several. So the call runs on
stand-ins that lie as its inputs do. An input whose layout is unknown too is made by its own call in
the same way.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from koila import _core
from koila.basics import generator_state, rows, surroundings
from koila.staged import one_call
from koila.staged.facts import Info

_N_ROWS = 2  # a single row would not tell where the rows are in memory
_MANY_BYTES = 1 << 20  # larger weights stay unfilled: the system gives no memory to those


def settled(value: int) -> Info:
    """Return the metadata of a value. If no rule knows its strides, they are those of a tensor
    whose dims have the same order in memory, with a gap behind each element if there are any gaps.

    The strides are None if the layout cannot be found out.
    """
    info = Info.of(value)
    if info.strides is not None or info.place is None or info.device.type != "cpu":
        return info
    layouts: dict[int, _Layout] = _core.notes().setdefault("layouts", {})
    try:
        # A value has a larger number than those that it is made of.
        for one in sorted(_needed(value, layouts)):
            layouts[one] = _found(one, layouts)
        strides, has_gaps = layouts[value]
    except Exception:  # a call does not take stand-ins, or no call makes the value
        return info
    step = 2 if has_gaps else 1
    dense = rows.dense_strides(info.shape, strides)
    return info._replace(strides=tuple(step * stride for stride in dense))


class _Layout(NamedTuple):
    """How two rows of a value lie in memory."""

    strides: tuple[int, ...]
    has_gaps: bool


def _strides_of(info: Info) -> tuple[int, ...] | None:
    """Return the strides of a value if a rule or its number tells them."""
    return info.strides if info.result is None else info.result.stride()


def _needed(value: int, layouts: dict[int, _Layout]) -> set[int]:
    """Return the values whose layouts have to be found out for that of a value, with itself."""
    needed, waiting = set[int](), [value]
    while waiting:
        one = waiting.pop()
        maker = _core.maker_of(one)
        if one in layouts or one in needed or maker is None:
            continue
        needed.add(one)
        for read, place, _ in maker[2]:
            info = Info.of(read)
            if _strides_of(info) is None and place == info.place:
                waiting.append(read)
    return needed


def _found(value: int, layouts: dict[int, _Layout]) -> _Layout:
    """Run the call that makes a value on stand-ins. It may write these, and its draws are undone.
    `layouts` gives the layouts of the call's inputs that no rule of the op table infers."""
    maker = _core.maker_of(value)
    assert maker is not None
    node, n_values, read = maker
    inputs = {one: _stand_in(one, place, layouts.get(one)) for one, place, _ in read}
    n_rows = min(_core.node(node)[4], _N_ROWS) or -1
    state = generator_state.get(torch.default_generator)
    try:
        with surroundings.making_calls():
            part: torch.Tensor = one_call.run(node, n_rows, inputs, n_values, True)[value]
    finally:
        generator_state.set_to(torch.default_generator, state)
    strides = part.stride()
    return _Layout(strides, has_gaps=rows.dense_strides(part.shape, strides) != strides)


def _stand_in(value: int, place: rows.Place | None, layout: _Layout | None) -> torch.Tensor:
    """Return ones that lie in memory as two rows of a value; zeros for indices. `place`: where a
    call finds its rows; None: it reads the whole value. `layout`: its own, if found."""
    info = Info.of(value)
    shape, strides = info.shape, _strides_of(info) or (layout.strides if layout else None)
    if place is not None:
        _, dim, outer, inner = place
        n_rows = min(shape[dim] // (outer * inner), _N_ROWS)
        shape = rows.chunk_shape(shape, place, n_rows)
    # An expanded input leaves the layout of the result to the others.
    is_expanded = [stride == 0 for stride in strides or ()]
    once = [1 if is_one else n for n, is_one in zip(shape, is_expanded, strict=False)]
    made = rows.empty(once if strides else shape, strides, info.dtype, info.device)
    is_number = info.dtype.is_floating_point or info.dtype.is_complex
    if not is_number or made.nbytes <= _MANY_BYTES:
        made.fill_(1 if is_number else 0)
    return made.expand(shape) if any(is_expanded) else made
