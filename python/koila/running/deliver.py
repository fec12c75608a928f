# SPDX-License-Identifier: Apache-2.0
"""Deliver the gradients of a run in chunks to the user's tensors: to all of them, or to none.

torch's own backward accumulates them. The user's hooks on parameters, and graphs outside of the
program, may raise in it after some tensors have got their gradient. These gradients are then taken
back: if the user asks for the step again, it would add them a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from koila.basics import surroundings
from koila.basics.engine import as_recorded, leaves_behind, nodes_behind
from koila.basics.rows import without_memory

#: What a program read of a graph behind it, if it is no more, is held while this graph runs: where
#: it fails, the step can be asked for again.
_FEW_BYTES = 2**16


def goes_on(found: Sequence[tuple[torch.Tensor, torch.Tensor]], is_graph_freed: bool) -> bool:
    """Return whether the program is over before these gradients are delivered: other programs run
    then, parts that were cut off (`bridge.py`); or a graph of plain calls of which it read much,
    which it frees if its own graph `is_graph_freed`."""
    behind = [real for real, _ in found if real.grad_fn is not None]
    if not behind:
        return False
    functions = (getattr(node, "_forward_cls", None) for node in nodes_behind(behind))
    runs_program = any(getattr(function, "runs_program", False) for function in functions)
    return runs_program or (is_graph_freed and sum(t.nbytes for t in behind) > _FEW_BYTES)


class Undo:
    """The `.grad` of leaves before delivery. torch accumulates into an existing `.grad` in place.
    So its numbers are copied, which takes memory, but only where delivery can raise."""

    def __init__(self, found: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        leaves: dict[int, torch.Tensor] = {}
        is_risky = False
        for real, sent in found:
            is_risky |= not real.is_leaf or sent.layout is not torch.strided
            for leaf in (real,) if real.is_leaf else leaves_behind([real]):
                is_risky |= bool(leaf._backward_hooks or leaf._post_accumulate_grad_hooks)
                leaves[id(leaf)] = leaf
        self._before: list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]] = []
        for leaf in leaves.values():
            gradient = leaf.grad
            numbers = gradient.clone() if is_risky and gradient is not None else None
            self._before.append((leaf, gradient, numbers))

    def put_back(self) -> None:
        """Restore the `.grad` of every leaf."""
        with torch.set_grad_enabled(False):
            for leaf, gradient, numbers in self._before:
                if gradient is not None and numbers is not None:
                    gradient.copy_(numbers)
                leaf.grad = gradient


class _Give(torch.autograd.Function):
    """Passes on the gradient in a box. Only the box holds it, so torch can free it, or take it as
    a leaf's `.grad` without a copy."""

    @staticmethod
    def forward(ctx: Any, real: torch.Tensor, box: list[torch.Tensor]) -> torch.Tensor:
        ctx.box = box
        return without_memory(real.shape, real.dtype, real.device)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.box.pop(), None


def _entries(
    found: Sequence[tuple[torch.Tensor, torch.Tensor]], shared: set[int]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return outputs and their gradients for torch's backward to deliver these gradients.

    A view of a leaf will do, unless the leaf is shared with a graph outside of the program
    (`shared`): torch then adds the leaf's gradients out of place and needs to free this one.
    """
    outputs: list[torch.Tensor] = []
    sent: list[torch.Tensor] = []
    give: Any = _Give
    for real, gradient in found:
        is_given = not gradient.is_sparse and (not real.is_leaf or id(real) in shared)
        if is_given:
            outputs.append(give.apply(real, [gradient]))
            sent.append(without_memory(real.shape, real.dtype, real.device))
        else:
            outputs.append(real if gradient.is_sparse else real.view_as(real))
            sent.append(gradient)
    return outputs, sent


def deliver(
    found: list[tuple[torch.Tensor, torch.Tensor]],
    finish: Callable[[list[torch.Tensor], list[torch.Tensor]], Any],
) -> Any:
    """Deliver the gradients of real tensors, all or none. `found` is emptied, to free each gradient
    early. Return what `finish` returns: it is given outputs and their gradients, and calls torch's
    backward."""
    reals = [real for real, _ in found]
    undo = Undo(found)
    with torch.enable_grad(), as_recorded(reals):  # they may be frozen now
        outputs, sent = _entries(found, set(map(id, leaves_behind(reals))))
    found.clear()
    reals.clear()  # the graphs behind run now, without what only this program still holds of them
    try:
        with surroundings.inside():
            return finish(outputs, sent)
    except BaseException:
        undo.put_back()
        raise
