# SPDX-License-Identifier: Apache-2.0
"""Predict the memory of torch's backward through autograd graphs that were made outside a program:
by plain calls, or by calls that had to run at once, such as a custom autograd.Function."""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from koila import _core
from koila.basics import config
from koila.basics.engine import ACCUMULATE_GRAD, nodes_behind
from koila.memory import storages

# Nodes whose backward returns its gradient, or a view of it, and so allocates nothing.
_RETURNS_GRADIENT = frozenset(
    "AddBackward0 AliasBackward0 DetachBackward0 PermuteBackward0 ReshapeAliasBackward0 "
    "SqueezeBackward0 SqueezeBackward1 TBackward0 TransposeBackward0 UnsafeViewBackward0 "
    "UnsqueezeBackward0 ViewBackward0 HandedOutBackward "
    "RegisterPostBackwardFunctionBackward".split()
)
#: For a module whose parameters are gathered from shards (`sharded.py`), the multiples of their
#: bytes that are alive until its gradients are reduced: the parameters, the gradients, a buffer for
#: each, the parameters of the next module, and the buffer of the module before.
_REDUCES, _COPIES = "RegisterPostBackwardFunctionBackward", 6
#: Nodes of second derivatives, and the factor on gradients that covers their intermediate results.
_OF_SECOND = "BackwardBackward"
_ABOVE = 1.1

#: The memory that a backward formula holds beside the gradients that it returns, as a multiple of
#: the result of its call. By the op's name as in torch's nodes: lower-case, without underscores.
_HELD = {row["name"].replace("_", ""): max(row["held"][1]) for row in _core.op_table()}


def _held(node: Any) -> float:
    """Return the bytes that the backward of a node holds beside gradients."""
    n_results: float = _HELD.get(node.name().partition("Backward")[0].lower(), 0.0)
    return n_results * max(results(node), default=0) if n_results else 0.0


def results(node: Any) -> list[int]:
    """Return the bytes of each result of a node's call."""
    return [_bytes(node, output) for output in range(len(node._input_metadata))]


def _bytes(node: Any, output: int) -> int:
    """Return the bytes of a result of a node's call. A node does not know the size of a nested
    tensor: it is taken to be as large as what its graph made it of."""
    found = 0
    seen: set[tuple[Any, int]] = {(node, output)}
    steps: list[tuple[Any, int]] = [(node, output)]
    while steps:
        node, output = steps.pop()
        if type(node) is ACCUMULATE_GRAD:
            found += node.variable.nbytes  # type: ignore[attr-defined]
            continue
        made = node._input_metadata[output]
        if not getattr(made, "is_nested_tensor", False):
            found += torch.Size(made.shape).numel() * made.dtype.itemsize
            continue
        following = {step for step in node.next_functions if step[0] is not None} - seen
        seen |= following
        steps += following
    return found


def peak(tensors: Iterable[torch.Tensor]) -> float:
    """Predict the peak bytes of a backward through the graphs of `tensors`.

    Gradients and the memory that formulas hold count, without the gradients of `tensors`, which
    exist. Nodes are visited in the order of torch's engine, the last made first. Saved tensors
    count as alive to the end, since nodes do not tell when they free them.
    """
    tensors = [t for t in tensors if t.grad_fn is not None]
    note_kept(tensors)
    waiting: dict[Any, float] = {t.grad_fn: 0.0 for t in tensors}
    arrived: set[tuple[Any, int]] = set()
    heap = [(-node._sequence_nr(), id(node), node) for node in waiting]
    heapq.heapify(heap)
    live = worst = 0.0  # gradients that wait for their node, and those of leaves
    gathered, above, most = 0.0, 1.0, 0.0
    while heap:
        _, _, node = heapq.heappop(heap)
        above = _ABOVE if _OF_SECOND in node.name() else above
        if node.name() == _REDUCES:
            live, gathered = live - gathered, 0.0
        taken, made, kept = waiting.pop(node), 0.0, 0.0
        for following, output in node.next_functions:
            if following is None:
                continue
            # By its type, since a custom node may have any attribute, `variable` too.
            is_leaf = type(following) is ACCUMULATE_GRAD
            leaf = getattr(following, "variable", None) if is_leaf else None
            size = leaf.nbytes if leaf is not None else _bytes(following, output)
            made += 0 if node.name() in _RETURNS_GRADIENT and size <= taken else size
            shard = getattr(leaf, "_koila_shard", None)
            if shard is not None and (following, output) not in arrived:
                arrived.add((following, output))
                gathered += _COPIES * size
                made += (_COPIES - 1) * size
                kept += _COPIES * size + (shard.to_local().nbytes if shard.grad is None else 0)
            elif leaf is not None:
                kept += size if leaf.grad is None and (following, output) not in arrived else 0
                arrived.add((following, output))
            elif (following, output) not in arrived:
                arrived.add((following, output))
                if following not in waiting:
                    waiting[following] = 0.0
                    heapq.heappush(heap, (-following._sequence_nr(), id(following), following))
                waiting[following] += size
                kept += size
        worst = max(worst, live + made)
        most = max(most, live + made + _held(node))
        live += kept - taken
    return max(most, above * worst)


#: The key in the metadata of a node that a call in a reentrant checkpoint made, running live.
IN_REENTRANT = "koila: in a reentrant checkpoint"


def ends(tensor: torch.Tensor) -> Iterator[tuple[Any, bool]]:
    """Yield the leaves of the graph of a tensor, and the parts of programs that the bridge cut off
    in it (`bridge.py`), beyond which it does not look; and whether such a leaf is behind a call in
    a reentrant checkpoint. If it is also elsewhere, yield it twice."""
    steps: list[tuple[Any, bool]] = [(tensor.grad_fn, False)]
    seen = set[tuple[Any, bool]]()
    while steps:
        node, is_behind = steps.pop()
        if node is None or (node, is_behind) in seen:
            continue
        seen.add((node, is_behind))
        if getattr(getattr(node, "_forward_cls", None), "runs_program", False):
            yield node.cut, is_behind
        elif type(node) is ACCUMULATE_GRAD:
            yield node.variable, is_behind  # type: ignore[attr-defined]
        else:
            is_behind = is_behind or IN_REENTRANT in node.metadata
            steps += [(following, is_behind) for following, _ in node.next_functions]


def total(tensors: Iterable[torch.Tensor]) -> float:
    """Return the bytes of all gradients that a backward through the graphs of tensors computes."""
    found = 0.0
    for node in nodes_behind(tensors):
        leaf = getattr(node, "variable", None) if type(node) is ACCUMULATE_GRAD else None
        found += sum([leaf.nbytes] if leaf is not None else results(node))
    return found


def note_kept(tensors: Iterable[torch.Tensor]) -> None:
    """Count the saved tensors of graphs against a limit: most have no Python object, so the garbage
    collector does not know them."""
    if config.get("memory_limit") is not None:
        kept = [one for node in nodes_behind(tensors) for one in _kept_by(node)]
        storages.note_leaves(one for one in kept if one.requires_grad and one.is_leaf)
        storages.n_bytes(kept)


#: By the type of a node: its attributes that hold saved tensors.
_attributes: dict[type, list[str]] = {}


def _kept_by(node: Any) -> Iterator[torch.Tensor]:
    """Yield the saved tensors of a node on the CPU, without those packed by the user's hooks."""
    kind = type(node)
    if kind not in _attributes:
        _attributes[kind] = [name for name in dir(kind) if name.startswith("_raw_saved_")]
    for name in _attributes[kind]:
        # torch raises if the graph was freed, or a saved tensor was written in place.
        with contextlib.suppress(RuntimeError):
            kept = getattr(node, name)
            for one in kept if isinstance(kept, tuple | list) else (kept,):
                found = one.data if one is not None and one.unpack_hook is None else None
                if isinstance(found, torch.Tensor) and found.device.type == "cpu":
                    yield found
