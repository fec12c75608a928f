# SPDX-License-Identifier: Apache-2.0
"""Send gradients back through the graph of a chunk, to the aliases that its calls read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from koila.basics import engine
from koila.basics.holders import owned
from koila.running import sparse_gradients

#: Of an output, or of the partials of a reduction.
Edges = GradientEdge | None | tuple[GradientEdge | None, ...]
#: Aliases that a graph read and that have no gradient so far, by id: whose, its key there, it.
Awaiting = dict[int, tuple[Any, Any, torch.Tensor]]


def edge_of(tensor: torch.Tensor) -> GradientEdge | None:
    """Return the edge at which backward enters the graph of a tensor, without the tensor's memory.
    None: it has none, like a view taken without a graph, though its `requires_grad` is True."""
    if not tensor.requires_grad:
        return None
    node: Any = tensor.grad_fn
    if node is None and tensor._is_view():
        return None
    if node is None:
        return get_gradient_edge(tensor)
    if isinstance(node, torch._C._FunctionBase):  # a reference to it does not keep its graph
        with torch.enable_grad():
            tensor = tensor.view_as(tensor)  # but one to the node of a view does
        node = tensor.grad_fn
    return GradientEdge(node, tensor.output_nr)


def edges_of(env: Sequence[Any], values: Iterable[int]) -> dict[int, Edges]:
    """Return the edges of the values, outputs or partials of reductions, that a run has made."""
    edges: dict[int, Edges] = {}
    for value in values:
        made = env[value]
        edges[value] = tuple(map(edge_of, made)) if isinstance(made, tuple) else edge_of(made)
    return edges


def send_back(pairs: Sequence[tuple[GradientEdge, torch.Tensor]], awaiting: Awaiting) -> None:
    """Run the engine from edges, each with its gradient, then call `own` for `awaiting`."""
    if not pairs:
        return
    edges, seeds = zip(*pairs, strict=True)
    sparse = []  # `own` left them
    for _, _, alias in awaiting.values():
        if alias.grad is not None:
            sparse.append(alias)
    if sparse:
        with sparse_gradients.set_aside(sparse):
            engine.backward(edges, seeds)
    else:
        engine.backward(edges, seeds)
    if awaiting:
        own(awaiting)


def own(awaiting: Awaiting) -> None:
    """Make sure that each alias in `awaiting` that got its first gradient owns the memory of it.

    torch may let a leaf keep a view of a gradient that others still read (a seed, another leaf's
    gradient), and then adds the next chunk's gradient to it in place. A view of a larger storage
    would keep all of it alive. An alias with a sparse gradient stays in `awaiting`.
    """
    for i, (_, _, alias) in list(awaiting.items()):
        gradient = alias.grad
        if gradient is None:
            continue
        if gradient.layout is torch.sparse_coo:
            own = sparse_gradients.shrink(gradient)
        else:
            own = owned(gradient)
            del awaiting[i]
        if own is not gradient:
            alias.grad = own
