"""The gradients of a run in chunks reach the user's tensors: all of them, or none.

Torch's own backward hands them out. What can fail there are calls of the user's, hooks of
parameters, and graphs that were made outside of the program: then some tensors have had theirs, and
the step, asked for again, would add them a second time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

_ACCUMULATE = type(torch.autograd.graph.get_gradient_edge(torch.ones((), requires_grad=True)).node)


def _behind(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The leaves of the graph that a tensor is on."""
    seen: set[Any] = set()
    stack: list[Any] = [tensor.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node) is _ACCUMULATE:
            leaf: Any = getattr(node, "variable", None)  # torch's stubs do not know it
            yield leaf
        stack.extend(following for following, _ in node.next_functions)


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
            found = [real] if real.is_leaf else list(_behind(real))
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
