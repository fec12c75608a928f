# SPDX-License-Identifier: Apache-2.0
"""Gradients of values that were handed out at a cut (`bridge.py`), and that the part before the cut
has read itself. A share of such a gradient comes through the part, and never to the tensor.

    h = net(x)
    k = h.sin()             # the part reads h
    loss = F.apply(k).sum() + h.sum()
    autograd.grad(loss, h)  # what arrives at h and at k, and from k through the part
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from koila import _core
from koila.recording.cut import Cut
from koila.recording.freed import forget_numbers
from koila.recording.handed_out import Root, root_of
from koila.running.numbers import settle_outdated
from koila.staged import hooks
from koila.staged.facts import Info
from koila.staged.program import Program

#: Returns the gradients that arrive at tensors from outside of the part.
Find = Callable[[list[torch.Tensor]], Sequence[torch.Tensor | None]]


def gradients(tensors: Sequence[Any], find: Find) -> list[torch.Tensor | None] | None:
    """Return the gradients of such values; None if they are not such values of one part, or if
    something else would see gradients (a hook, a checkpoint), or if one of them was written since.

    For each value, the part runs backward from all that was computed from it, and ends there. It
    can run backward again.
    """
    reals = [_core.real(one) if type(one) is _core.LazyTensor else one for one in tensors]
    found = [root_of(one) if isinstance(one, torch.Tensor) else None for one in reals]
    values = [root for root in found if root is not None]
    cut: Any = values[0].cut if values else None
    if len(values) < len(tensors) or any(value.cut is not cut for value in values):
        return None
    if not any(value.is_inner(value.value) for value in values):
        return None
    return _within(cut, values, find)


def _within(cut: Cut, values: list[Root], find: Find) -> list[torch.Tensor | None] | None:
    alive = cut.alive()
    is_watched = any(root.has_hook for root in alive) or "whole" in cut.__dict__
    is_gone = any(value.lazy is None or value.how_written() for value in values)
    if cut.region or is_watched or is_gone:
        return None
    own = [value.value for value in values]
    after = _core.held(alive[0].lazy, _computed_from, (cut.roots, own), {})
    if after is None:
        return None
    roots = [root for root in alive if any(root.value in found for found in after)]
    tensors = [tensor for root in roots if (tensor := root.tensor()) is not None]
    if len(tensors) < len(roots):
        return None
    sent = zip(roots, find(tensors), strict=True)
    arrived = [(root, gradient) for root, gradient in sent if gradient is not None]
    if arrived:
        cut.prepare([root for root, _ in arrived])
    return [
        _gradient_of(cut, value, [one for one in arrived if one[0].value in found])
        for value, found in zip(values, after, strict=True)
    ]


def _gradient_of(
    cut: Cut, value: Root, arrived: list[tuple[Root, torch.Tensor]]
) -> torch.Tensor | None:
    """Return the gradient of a value, given those that arrived from outside at it, and at what is
    computed from it.

    Meanwhile the number of the value is a leaf of the part, where the way of the gradients ends.
    """
    total = next((gradient for root, gradient in arrived if root is value), None)
    starts = [(root, gradient) for root, gradient in arrived if root is not value]
    if not starts:
        return total
    tensor = value.tensor()
    assert tensor is not None  # it was asked for
    leaf = _core.held(value.lazy, _as_leaf, (value.value, tensor.detach()), {})
    cut.originals[id(leaf)] = value.lazy
    try:
        ends, seeds = [root for root, _ in starts], [gradient for _, gradient in starts]
        (found,) = cut.gradients_of(ends, seeds, [value.lazy], True, True)
    finally:
        forget_numbers(cut)
        del cut.originals[id(leaf)]
    return found if total is None or found is None else total + found


def _as_leaf(value: int, number: torch.Tensor) -> torch.Tensor:
    """Let gradients of the part end at a value. Return the tensor that gets them: the number, or
    what stands for it since a parameter that it was computed with was changed."""
    if Info.of(value).real is None:
        _core.deliver(value, number, False)
        settle_outdated()
    real = Info.of(value).real
    return number if real is None else real


def _computed_from(roots: tuple[Any, ...], values: list[int]) -> list[set[int]] | None:
    """Return, for each of `values`, it and the values that differentiated calls compute from it;
    None if a hook is on a value of the part, or a call read a value before it was written, whose
    number is gone."""
    program, after = Program(list(roots), unwanted=roots), [{value} for value in values]
    before = {_core.graph_of(value) for value in values}.difference(values)
    for _, node in sorted(program.nodes.items()):
        reads = {value for value in program.reads(node) if program.info(value).requires_grad}
        made = [out for out in node.outs if program.info(out).requires_grad]
        for found in after:
            if not found.isdisjoint(reads):
                found.update(made)
        if any(map(hooks.is_on, node.outs)) or not before.isdisjoint(reads):
            return None
    return after
