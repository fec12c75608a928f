# SPDX-License-Identifier: Apache-2.0
"""torch's autograd engine, called as `torch.autograd.backward` and `grad` call it.

Those two compare the sizes of given gradients symbolically first, and import sympy for it: some
40 MiB that a first step under a limit may not have, and half a second.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

_run: Any = torch.autograd.graph._engine_run_backward


def _accumulate_grad() -> type:
    """The type of the node that adds a gradient to its leaf, however gradients are switched where
    koila is imported."""
    with torch._C._InferenceMode(False), torch.enable_grad():
        leaf = torch.ones((), dtype=torch.float32, device="cpu", requires_grad=True)
        return type(torch.autograd.graph.get_gradient_edge(leaf).node)


ACCUMULATE_GRAD = _accumulate_grad()


class Function(torch.autograd.Function):
    """A function of koila's own: it is given no lazies and called in no transform of functorch, for
    which everybody else's arguments are gone through in Python at each call."""

    apply: Any = vars(torch._C._FunctionBase)["apply"]


@contextlib.contextmanager
def as_recorded(leaves: Iterable[torch.Tensor]) -> Iterator[None]:
    """A block in which leaves that recorded calls took to need a gradient do need one: the user may
    have frozen them since. As in a graph that was made before that, they are given one only if they
    need one again when it comes."""
    frozen = [leaf for leaf in leaves if not leaf.requires_grad and not leaf.is_inference()]
    with torch._C.DisableTorchFunctionSubclass():
        for leaf in frozen:
            leaf.requires_grad_()
        try:
            yield
        finally:
            for leaf in frozen:
                leaf.requires_grad_(False)


def thawed(leaf: torch.Tensor) -> torch.Tensor:
    """A leaf that was frozen since it was recorded, for a call that takes it as it was."""
    with torch._C._InferenceMode(False), torch.enable_grad(), as_recorded([leaf]):
        alias: torch.Tensor = torch.ops.aten.alias.default(leaf)
    return alias


def is_in_hook() -> bool:
    """Whether torch's engine calls a hook, or a backward of the user's, on this thread."""
    node: Any = torch._C._current_autograd_node()
    function = getattr(node, "_forward_cls", None)
    return node is not None and not getattr(function, "runs_program", False)


def getters(inputs: Sequence[torch.Tensor]) -> Callable[[torch.Tensor], bool]:
    """Whether a gradient of a tensor is, or goes on to, that of one of `inputs`; or may, where the
    graph ends at a number of which only that is left (`spent.py`)."""
    wanted: set[tuple[Any, int | None]] = {(id(t), None) for t in inputs}
    wanted.update((t.grad_fn, t.output_nr) for t in inputs if t.grad_fn is not None)

    def gets(tensor: torch.Tensor) -> bool:
        if (id(tensor), None) in wanted:
            return True
        steps: list[Any] = [(tensor.grad_fn, tensor.output_nr)] if tensor.grad_fn else []
        seen: set[Any] = set()
        while steps:
            step = steps.pop()
            if step in wanted or (id(getattr(step[0], "variable", None)), None) in wanted:
                return True
            if getattr(getattr(step[0], "_forward_cls", None), "is_left", False):
                return True
            if step[0] is not None and step[0] not in seen:
                seen.add(step[0])
                steps += step[0].next_functions
        return False

    return gets


def backward(
    outputs: Sequence[torch.Tensor | GradientEdge],
    gradients: Sequence[torch.Tensor],
    *,
    is_retained: bool = False,
    inputs: Sequence[torch.Tensor] = (),
) -> None:
    """Send gradients through the graphs of outputs, and add what comes to the leaves.

    Args:
        outputs: where it starts.
        gradients: one for each, of its sizes.
        is_retained: whether the graphs can be gone through again.
        inputs: the only tensors that are given gradients; none: all leaves.
    """
    _run(
        tuple(outputs),
        tuple(gradients),
        is_retained,
        False,
        tuple(inputs),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def gradients_of(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    is_graph: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    """Send gradients through the graphs of outputs, and return what comes to `inputs`, on a graph
    of its own if that is asked for: None to those that are not there."""
    found: tuple[torch.Tensor | None, ...] = _run(
        tuple(outputs),
        tuple(gradients),
        is_graph,
        is_graph,
        tuple(inputs),
        allow_unreachable=True,
        accumulate_grad=False,
    )
    return found
