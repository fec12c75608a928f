# SPDX-License-Identifier: Apache-2.0
"""Let torch's engine run the nodes of autograd in eager's order, although recorded calls run later
than they were made.

Torch numbers nodes as they are made, and its engine takes the highest number that is ready. The
nodes of a recorded call are made when it runs, after those of plain calls that followed it. So a
large lazy half of a graph would run backward while a small plain half still holds what it saved,
where in eager the plain half was done. Also, hooks would be called and gradients be added up in
another order.

So a live run leaves gaps in its numbers: as many between two recorded calls as plain calls used
between them. The nodes of these plain calls are moved there, once they are found: those behind the
leaves of the program when it has run, others when torch's engine starts from them.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterable
from typing import Any

import torch

from koila.basics.engine import ACCUMULATE_GRAD

#: So many gaps are kept at most, if no backward comes.
_N_GAPS = 4096


class _Gaps(threading.local):
    """What the live runs since the last backward left."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.starts: list[int] = []  # plain nodes from this number on …
        self.ends: list[int] = []  # up to this one …
        self.moved: list[int] = []  # are numbered from this one on instead
        self.runs: list[tuple[int, int]] = []  # the first number of a run, and that after its last


_gaps = _Gaps()


def note_gap(start: int, end: int, moved: int) -> None:
    """Note that a run skipped numbers from `moved` on, for plain nodes from `start` to `end`."""
    if len(_gaps.starts) >= _N_GAPS:
        _gaps.clear()
    _gaps.starts.append(start)
    _gaps.ends.append(end)
    _gaps.moved.append(moved)


def note_run(first: int, leaves: list[torch.Tensor]) -> None:
    """Note that a run with gaps is over, whose nodes have the numbers from `first` on."""
    _gaps.runs.append((first, torch._C._autograd._get_sequence_nr()))
    _move(leaves)


def move(roots: Iterable[Any]) -> None:
    """Before torch's engine starts from `roots`: put plain nodes in their place."""
    if _gaps.starts:
        _move(root for root in roots if isinstance(root, torch.Tensor))
        _gaps.clear()


def _move(tensors: Iterable[torch.Tensor]) -> None:
    """Move the plain nodes behind tensors, up to nodes of runs: those behind these were moved."""
    steps: list[Any] = [tensor.grad_fn for tensor in tensors]
    seen: set[Any] = set()
    while steps:
        node = steps.pop()
        if node is None or node in seen or type(node) is ACCUMULATE_GRAD:
            continue
        seen.add(node)
        number = node._sequence_nr()
        in_run = any(first <= number < end for first, end in _gaps.runs)
        if in_run or not _gaps.starts or number < _gaps.starts[0]:
            continue
        i = bisect.bisect_right(_gaps.starts, number) - 1
        if number < _gaps.ends[i]:
            node._set_sequence_nr(_gaps.moved[i] + number - _gaps.starts[i])
        steps += [following for following, _ in node.next_functions]
