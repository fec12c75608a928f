# SPDX-License-Identifier: Apache-2.0
"""What torch's own backward takes through a graph that was made outside of the program: by plain
calls, or by what had to run at once (a custom autograd.Function, a gradient inside the program)."""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from koila import _core
from koila.basics import config
from koila.basics.engine import ACCUMULATE_GRAD
from koila.memory import storages

# They hand the gradient on as it is, or a view of it.
_HANDS_ON = frozenset(
    "AddBackward0 AliasBackward0 DetachBackward0 PermuteBackward0 ReshapeAliasBackward0 "
    "SqueezeBackward0 SqueezeBackward1 TBackward0 TransposeBackward0 UnsafeViewBackward0 "
    "UnsqueezeBackward0 ViewBackward0 HandedOutBackward "
    "RegisterPostBackwardFunctionBackward".split()
)
#: While a module has parameters gathered that are let go of (`sharded.py`), until their gradients
#: are reduced: those, these, a buffer for each, those of the next module, the last one's buffer.
_REDUCES, _COPIES = "RegisterPostBackwardFunctionBackward", 6
#: What formulas of second derivatives make on the way, as a share of the gradients.
_OF_SECOND = "BackwardBackward"
_ABOVE = 1.1

#: What formulas hold beside the gradients that they make, in results of their call, by the letters
#: of its row: as torch names its nodes.
_HELD = {row["name"].replace("_", ""): max(row["held"][1]) for row in _core.op_table()}


def _held(node: Any) -> float:
    n_results: float = _HELD.get(node.name().partition("Backward")[0].lower(), 0.0)
    return n_results * max(map(_bytes, node._input_metadata), default=0) if n_results else 0.0


def _bytes(metadata: Any) -> int:
    n: int = torch.Size(metadata.shape).numel() * metadata.dtype.itemsize
    return n


def peak(tensors: Iterable[torch.Tensor]) -> float:
    """The most bytes of gradients at once, and of what formulas hold, beside those of `tensors`,
    which are there.

    Nodes are gone through as torch does, the last made first. What they keep counts as being there
    to the end: how much of it goes on the way, they do not tell.
    """
    tensors = [t for t in tensors if t.grad_fn is not None]
    note_kept(tensors)
    waiting: dict[Any, float] = {t.grad_fn: 0.0 for t in tensors}
    arrived: set[tuple[Any, int]] = set()
    heap = [(-node._sequence_nr(), id(node), node) for node in waiting]
    heapq.heapify(heap)
    live = worst = 0.0  # gradients on their way, and those that leaves were given
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
            is_leaf = type(following) is ACCUMULATE_GRAD  # a custom node may have any attribute
            leaf = getattr(following, "variable", None) if is_leaf else None
            size = leaf.nbytes if leaf is not None else _bytes(following._input_metadata[output])
            made += 0 if node.name() in _HANDS_ON and size <= taken else size
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


def nodes(tensors: Iterable[torch.Tensor]) -> Iterator[Any]:
    """The nodes of the graphs of tensors."""
    steps = [t.grad_fn for t in tensors if t.grad_fn is not None]
    seen: set[Any] = set()
    while steps:
        node = steps.pop()
        if node not in seen:
            seen.add(node)
            yield node
            steps += [following for following, _ in node.next_functions if following is not None]


def ends(tensor: torch.Tensor) -> Iterator[Any]:
    """The leaves that the graph of a tensor leads to, and the parts of programs that were cut off
    (`bridge.py`)."""
    steps, seen = [tensor.grad_fn], set[Any]()
    while steps:
        node = steps.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if getattr(getattr(node, "_forward_cls", None), "runs_program", False):
            yield node.cut  # type: ignore[attr-defined]
        elif type(node) is ACCUMULATE_GRAD:
            yield node.variable  # type: ignore[attr-defined]
        else:
            steps += [following for following, _ in node.next_functions]


def total(tensors: Iterable[torch.Tensor]) -> float:
    """Bytes of all gradients that a backward through the graphs of tensors makes."""
    found = 0.0
    for node in nodes(tensors):
        leaf = getattr(node, "variable", None) if type(node) is ACCUMULATE_GRAD else None
        found += sum([leaf.nbytes] if leaf is not None else map(_bytes, node._input_metadata))
    return found


def note_kept(tensors: Iterable[torch.Tensor]) -> None:
    """See to it that what the graphs of tensors keep counts against a limit: most of it has no
    Python object, so that nobody else sees it."""
    if config.get("memory_limit") is not None:
        storages.n_bytes([one for node in nodes(tensors) for one in _kept_by(node)])


#: By the type of a node: the attributes that have what it keeps.
_attributes: dict[type, list[str]] = {}


def _kept_by(node: Any) -> Iterator[torch.Tensor]:
    """The tensors that a node keeps for its backward, but those that the user's hooks packed."""
    kind = type(node)
    if kind not in _attributes:
        _attributes[kind] = [name for name in dir(kind) if name.startswith("_raw_saved_")]
    for name in _attributes[kind]:
        with contextlib.suppress(RuntimeError):  # it went back, or what it keeps was written
            kept = getattr(node, name)
            for one in kept if isinstance(kept, tuple | list) else (kept,):
                found = one.data if one is not None and one.unpack_hook is None else None
                if isinstance(found, torch.Tensor) and found.device.type == "cpu":
                    yield found
