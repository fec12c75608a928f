# SPDX-License-Identifier: Apache-2.0
"""Send gradients back through the graph of a chunk, to the aliases that its calls read."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from koila import _core
from koila.basics import engine
from koila.basics.holders import owned
from koila.running import sparse_gradients
from koila.running.boundary import Awaiting

#: Makes an edge of a node and the number of its output, without the frame that the class enters.
_edge: Callable[[tuple[Any, int]], GradientEdge] = functools.partial(tuple.__new__, GradientEdge)

#: Of an output, or of the partials of a reduction.
Edges = GradientEdge | None | tuple[GradientEdge | None, ...]
_NONE: Awaiting = {}


def number_of(gradient: Any) -> Any:
    """Return the number of a gradient that is lazy; any other as it is."""
    return _core.read(gradient) if type(gradient) is _core.LazyTensor else gradient


def is_fit(root: torch.Tensor, gradient: Any) -> bool:
    """Return whether torch takes this gradient of a root; None stands for ones."""
    if gradient is None:
        return math.prod(root.shape) == 1 and not root.dtype.is_complex
    return isinstance(gradient, torch.Tensor) and gradient.shape == root.shape


def filled(root: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor:
    """Return the gradient of a root, ones if none was given."""
    if gradient is not None:
        return gradient
    return torch.ones(root.shape, dtype=root.dtype, device=root.device)


def edges_of(env: Sequence[Any], values: Iterable[int]) -> dict[int, Edges]:
    """Return the edges at which backward enters the graphs of values, outputs or partials of
    reductions, that a run has made; they do not keep the memory of the values. None: a tensor has
    no graph, like a view taken without one, though its `requires_grad` is True."""
    found: dict[int, Edges] = {}
    tensors: list[torch.Tensor] = []
    for value in values:
        made = env[value]
        if isinstance(made, tuple):
            tensors += made
        else:
            tensors.append(made)
        found[value] = None
    edges: list[GradientEdge | None] = []
    of_functions = []
    for tensor in tensors:
        node: Any = tensor.grad_fn
        if node is not None:
            if isinstance(node, torch._C._FunctionBase):
                of_functions.append(len(edges))
            edges.append(_edge((node, tensor.output_nr)))
        else:
            is_leaf = tensor.requires_grad and not tensor._is_view()
            edges.append(get_gradient_edge(tensor) if is_leaf else None)
    if of_functions:
        with engine.AS_IT_IS if torch.is_grad_enabled() else torch.enable_grad():
            for i in of_functions:  # a reference to such a node does not keep its graph,
                view = tensors[i].view_as(tensors[i])  # but one to the node of a view does
                node = view.grad_fn
                edges[i] = _edge((node, view.output_nr))
    ordered = iter(edges)
    for value in found:
        made = env[value]
        is_many = isinstance(made, tuple)
        found[value] = tuple(itertools.islice(ordered, len(made))) if is_many else next(ordered)
    return found


def send_back(
    pairs: Sequence[tuple[GradientEdge, torch.Tensor]], awaiting: Awaiting, given: Awaiting = _NONE
) -> None:
    """Run the engine from edges, each with its gradient. Then make sure that each alias in
    `awaiting` that got its first gradient owns the memory of it.

    torch may let a leaf keep a view of a gradient that others still read (a seed, another leaf's
    gradient), and then adds the next chunk's gradient to it in place. A view of a larger storage
    would keep all of it alive. An alias with a sparse gradient stays in `awaiting`.

    Args:
        pairs: the edges and their gradients; none if the engine has run already.
        awaiting: the aliases that await a first gradient.
        given: those that a retained graph read, before other graphs ran. They await a gradient
            again; the stages that read them may have dropped them since.
    """
    if pairs:
        for i, (boundary, key, alias) in given.items():
            assert boundary.aliases.setdefault(key, alias) is alias, f"{key} has two aliases"
            if alias.grad is None:
                awaiting[i] = boundary, key, alias
        edges, seeds = zip(*pairs, strict=True)
        sparse = []
        for _, _, alias in awaiting.values():
            if alias.grad is not None:
                sparse.append(alias)
        with sparse_gradients.set_aside(sparse) if sparse else engine.AS_IT_IS:
            engine.run_backward(edges, seeds)
        del edges, seeds
    aliases, gradients = [], []
    for i, (_, _, alias) in list(awaiting.items()):
        gradient = alias.grad
        if gradient is None:
            continue
        if gradient.layout is torch.sparse_coo:
            own = sparse_gradients.shrink(gradient)
            if own is not gradient:
                alias.grad = own
        else:
            aliases.append(alias)
            gradients.append(gradient)
            del awaiting[i]
    for i, own in enumerate(owned(gradients) if gradients else ()):
        if own is not gradients[i]:
            aliases[i].grad = own
