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
from koila.recording.handed_out import Root, root_of
from koila.running import overwritten
from koila.staged import hooks
from koila.staged.program import Program

#: Returns the gradients that arrive at tensors from outside of the part.
Find = Callable[[list[torch.Tensor]], Sequence[torch.Tensor | None]]


def gradients(tensors: Sequence[Any], find: Find) -> list[torch.Tensor | None] | None:
    """Return the gradients of such values; None if they are not such values of one part, if
    something else would see gradients (a hook, a checkpoint), or if the part cannot run backward.

    The part runs backward from all values that were computed from these, down to its leaves, and
    hooks on the values tell their gradients. It can run backward again. It cannot run backward if a
    value that the way to the leaves needs was written in place.
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
    if cut.region or is_watched or any(value.lazy is None for value in values):
        return None
    own = {value.value for value in values}
    after = _core.held(alive[0].lazy, _computed_from, (cut.roots, own), {})
    roots = [root for root in alive if after is not None and root.value in after]
    tensors = [tensor for root in roots if (tensor := root.tensor()) is not None]
    if after is None or len(tensors) < len(roots):
        return None
    groups = [group for group in cut.groups if not own.isdisjoint(group.values)]
    leaves = [leaf for group in groups for leaf in group.leaves]
    if _core.held(alive[0].lazy, _is_overwritten, (cut, roots, leaves), {}):
        return None
    made: dict[int, torch.Tensor] = {}
    sent = zip(roots, find(tensors), strict=True)
    arrived = [(root, gradient) for root, gradient in sent if gradient is not None]
    handles = [_tell(value, made) for value in values]
    try:
        if arrived:
            cut.prepare()
            starts, seeds = [root for root, _ in arrived], [gradient for _, gradient in arrived]
            cut.gradients_of(starts, seeds, leaves, True, True)
    finally:
        for handle in handles:
            handle.remove()
    return [made.get(value.value) for value in values]


def _is_overwritten(cut: Cut, starts: list[Root], leaves: list[torch.Tensor]) -> bool:
    """Return whether the backward from values to leaves needs what was written since."""
    wanted = set(map(id, leaves))
    program = Program(
        [root.lazy for root in starts],
        gets=lambda leaf: id(cut.original(leaf)) in wanted,
        unwanted=cut.roots,
    )
    return overwritten.is_any(program)


def _tell(value: Root, made: dict[int, torch.Tensor]) -> Any:
    """Register a hook on a value, in the part, that puts its gradient into `made`."""

    def tell(gradient: torch.Tensor) -> None:
        made[value.value] = gradient.detach()

    words: Any = torch.Tensor.register_hook, (value.lazy, tell), {}
    return _core.held(value.lazy, hooks.register, words, {})


def _computed_from(roots: tuple[Any, ...], values: set[int]) -> set[int] | None:
    """Return `values` and the values that differentiated calls compute from them; None if a hook is
    on a value of the part."""
    program, found = Program(list(roots), unwanted=roots), values.copy()
    for _, node in sorted(program.nodes.items()):
        reads = (program.imports[k].value for k in node.imports if k >= 0)
        if any(value in found and program.info(value).requires_grad for value in reads):
            found.update(out for out in node.outs if program.info(out).requires_grad)
        if any(map(hooks.is_on, node.outs)):
            return None
    return found
