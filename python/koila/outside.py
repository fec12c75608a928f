# SPDX-License-Identifier: Apache-2.0
"""What torch's own backward takes through a graph that was made outside of the program: by plain
calls, or by what had to run at once (a custom autograd.Function, a gradient inside the program)."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Any

import torch

from koila.engine import ACCUMULATE_GRAD

# They hand the gradient on as it is, or a view of it.
_HANDS_ON = frozenset(
    "AddBackward0 AliasBackward0 DetachBackward0 PermuteBackward0 ReshapeAliasBackward0 "
    "SqueezeBackward0 SqueezeBackward1 TBackward0 TransposeBackward0 UnsafeViewBackward0 "
    "UnsqueezeBackward0 ViewBackward0 _HandedOutBackward "
    "RegisterPostBackwardFunctionBackward".split()
)
#: While a module has parameters gathered that are let go of (`sharded.py`), until their gradients
#: are reduced: those, these, a buffer for each, those of the next module, the last one's buffer.
_REDUCES, _COPIES = "RegisterPostBackwardFunctionBackward", 6


def _bytes(metadata: Any) -> int:
    n: int = torch.Size(metadata.shape).numel() * metadata.dtype.itemsize
    return n


def peak(tensors: Iterable[torch.Tensor]) -> float:
    """The most bytes of gradients at once, beside those of `tensors`, which are there.

    Nodes are gone through as torch does, the last made first. What they keep counts as being there
    to the end: how much of it goes on the way, they do not tell.
    """
    waiting: dict[Any, float] = {t.grad_fn: 0.0 for t in tensors if t.grad_fn is not None}
    arrived: set[tuple[Any, int]] = set()
    heap = [(-node._sequence_nr(), id(node), node) for node in waiting]
    heapq.heapify(heap)
    live = worst = 0.0  # gradients on their way, and those that leaves were given
    gathered = 0.0
    while heap:
        _, _, node = heapq.heappop(heap)
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
        live += kept - taken
    return worst
