# SPDX-License-Identifier: Apache-2.0
"""The gradients of a run in chunks reach the user's tensors: all of them, or none.

Torch's own backward hands them out. What can fail there are calls of the user's, hooks of
parameters, and graphs that were made outside of the program: then some tensors have had theirs, and
the step, asked for again, would add them a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from koila.basics import surroundings
from koila.basics.engine import ACCUMULATE_GRAD, as_recorded
from koila.basics.rows import without_memory


def _nodes_behind(tensor: torch.Tensor) -> Iterator[Any]:
    """The nodes of the graph that a tensor is on."""
    seen: set[Any] = set()
    stack: list[Any] = [tensor.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        stack.extend(following for following, _ in node.next_functions)


def leaves_behind(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The leaves of the graph that a tensor is on."""
    for node in _nodes_behind(tensor):
        if type(node) is ACCUMULATE_GRAD:
            yield getattr(node, "variable")  # noqa: B009  torch's stubs do not know it


def goes_on(found: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Whether programs that were cut off (`bridge.py`) run when these gradients are handed out."""
    functions = (
        getattr(node, "_forward_cls", None) for real, _ in found for node in _nodes_behind(real)
    )
    return any(getattr(function, "runs_program", False) for function in functions)


def _has_hooks(leaf: torch.Tensor) -> bool:
    return bool(leaf._backward_hooks or leaf._post_accumulate_grad_hooks)


class Undo:
    """What gradients were before the new ones are handed out.

    Of one that is there already its numbers are copied, but only where something can fail: torch
    adds to it in place, for which it needs no memory.
    """

    def __init__(self, reals: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        leaves: dict[int, torch.Tensor] = {}
        is_risky = any(gradient.layout != torch.strided for gradient in gradients)
        for real in reals:
            found = [real] if real.is_leaf else list(leaves_behind(real))
            is_risky = is_risky or not real.is_leaf or any(map(_has_hooks, found))
            leaves.update((id(leaf), leaf) for leaf in found)
        self._before: list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]] = [
            (leaf, leaf.grad, leaf.grad.clone() if is_risky and leaf.grad is not None else None)
            for leaf in leaves.values()
        ]

    def put_back(self) -> None:
        """Give every leaf the gradient that it had."""
        with torch.no_grad():
            for leaf, gradient, numbers in self._before:
                if gradient is not None and numbers is not None:
                    gradient.copy_(numbers)
                leaf.grad = gradient


class _Give(torch.autograd.Function):
    """Hands a gradient on that nobody else holds: it is there no longer than autograd needs it."""

    @staticmethod
    def forward(ctx: Any, real: torch.Tensor, box: list[torch.Tensor]) -> torch.Tensor:
        ctx.box = box
        return without_memory(real.shape, real.dtype, real.device)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.box.pop(), None


def _entry(
    real: torch.Tensor, gradient: torch.Tensor, is_shared: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where a gradient enters the user's graphs, and what is sent there. Shared: more comes to the
    leaf, and torch adds that to it out of place."""
    if gradient.is_sparse:
        return real, gradient
    if real.is_leaf and not is_shared:
        return real.view_as(real), gradient
    give: Any = _Give
    return give.apply(real, [gradient]), without_memory(real.shape, real.dtype, real.device)


def deliver(
    found: list[tuple[torch.Tensor, torch.Tensor]],
    finish: Callable[[list[torch.Tensor], list[torch.Tensor]], Any],
) -> Any:
    """Hand out the gradients of real tensors, all or none.

    Args:
        found: the tensors, and their gradients; it is used up.
        finish: given outputs and gradients, calls torch's backward.

    Returns:
        What `finish` returns.
    """
    undo = Undo([real for real, _ in found], [gradient for _, gradient in found])
    with torch.enable_grad(), as_recorded([real for real, _ in found]):  # hooks of frozen ones, too
        shared = {id(leaf) for real, _ in found if not real.is_leaf for leaf in leaves_behind(real)}
        entries = [_entry(real, gradient, id(real) in shared) for real, gradient in found]
    found.clear()
    try:
        with surroundings.inside():
            return finish([output for output, _ in entries], [sent for _, sent in entries])
    except BaseException:
        undo.put_back()
        raise
