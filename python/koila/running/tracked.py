# SPDX-License-Identifier: Apache-2.0
"""Running statistics of normalizations: what a step in chunks moves them by, written at its commit.

Until then what a program writes are copies; a call on a chunk leaves its share here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from koila import _core
from koila.messages.errors import NotInChunksError
from koila.reductions import norms
from koila.running import checkpoints
from koila.staged.facts import ROWS, Node
from koila.staged.program import Program


def without_version(tensor: Tensor) -> Tensor:
    """A tensor to write running statistics through: as in torch's own batch_norm, graphs that keep
    them do not take that for a write."""
    data: Any = torch._C.TensorBase.data
    shared: Tensor = data.__get__(tensor)
    return shared


class Statistics:
    """Running statistics, and those of a batch that they are moved towards: of all its rows, or of
    each of its chunks, which count by their rows."""

    def __init__(self, mean: Tensor, var: Tensor, momentum: float) -> None:
        self.running = mean, var
        self.momentum = momentum
        self.of_chunks: dict[int, tuple[int, Tensor, Tensor]] = {}  # rows, mean, var of a sample
        self.towards: list[Tensor] = []

    def settle(self) -> None:
        """Find what is moved towards; to move takes no memory then."""
        chunks = list(self.of_chunks.values())
        n_rows = sum(n for n, *_ in chunks)
        means = [n / n_rows * mean.double() for n, mean, _ in chunks]
        variances = [n / n_rows * var.double() for n, _, var in chunks]
        for one, shares in zip(self.running, (means, variances), strict=True):
            self.towards.append(sum(shares[1:], shares[0]).to(one.dtype))

    def write(self) -> None:
        """Move the running statistics."""
        self.move(self.running, self.momentum)

    def move(self, running: tuple[Tensor, Tensor], momentum: float) -> None:
        """Move some running statistics towards these, as torch does."""
        with torch.no_grad():
            for one, towards in zip(running, self.towards, strict=True):
                without_version(one).mul_(1 - momentum).add_(towards, alpha=momentum)


def of_batch(args: tuple[Any, ...], n_terms: int) -> Statistics:
    """Those of a batch_norm, which were made of `n_terms` for each channel."""
    mean, var, momentum = args[3], args[4], args[6]
    found = Statistics(mean, var, momentum)
    share = n_terms / (n_terms - 1) if n_terms > 1 else math.nan
    found.of_chunks[0] = 1, args[10].detach(), args[9].detach() * share
    return found


def of_whole(args: tuple[Any, ...]) -> Statistics:
    """Those of a batch_norm that runs once, on all rows."""
    x, _, _, mean, var, _, momentum, *_ = args
    n_terms = x.numel() // x.shape[1]
    of_x, squares = norms.moments(x.detach(), {})
    found = Statistics(mean, var, momentum)
    found.of_chunks[0] = 1, of_x, squares / (n_terms - 1) if n_terms > 1 else squares * math.nan
    return found


_WORDS = (
    "input weight bias running_mean running_var use_input_stats momentum eps cudnn_enabled".split()
)


class Tracked:
    """Those of one step, by the call that moves them."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.moves: dict[int, Statistics] = {}
        self.agains: dict[int, norms.Again] = {}  # of calls in the bodies of checkpoints
        self.of_whole: dict[int, Statistics] = {}  # of those that run once

    def note(self, node: Node, func: Any, args: tuple[Any, ...]) -> None:
        """A call on a chunk that is given what all rows have met in; be it a batch_norm."""
        is_norm = func is norms.batch_norm and args[3] is not None
        if is_norm and node.id not in self.moves:
            shape = self.program.info(node.first_out).shape
            self.moves[node.id] = of_batch(args, math.prod(shape) // shape[1])

    def note_again(self, node: Node, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """A batch_norm in the body of a checkpoint, whose statistics are moved again; its arguments
        without that."""
        if node.mode != ROWS and node.id not in self.of_whole:
            self.of_whole[node.id] = of_whole(args)
        self.agains[node.id] = args[6]
        return *args[:6], float(args[6]), *args[7:]

    def instance_norm(
        self,
        node: Node,
        stage: int,
        chunk: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Tensor:
        """instance_norm with running statistics on a chunk, which leaves these as they are.

        torch moves them by the mean of what its rows have, each by itself; with a momentum of 1
        they are that. In evaluation it writes what it has read.
        """
        args = (*args, *(kwargs[name] for name in _WORDS[len(args) :]))
        x, weight, bias, mean, var, is_training, momentum, *rest = args
        if not is_training:
            if any(map(self._moved_by(node).__contains__, self._moved_before(node))):
                why = "its running statistics are still to be moved"
                raise NotInChunksError(f"{_core.node(node.id)[3]}: {why}")
            own = mean.clone(), var.clone()
            return torch.instance_norm(x, weight, bias, *own, False, momentum, *rest)
        of_chunk = torch.zeros_like(mean), torch.zeros_like(var)
        made = torch.instance_norm(x, weight, bias, *of_chunk, True, 1.0, *rest)
        if node.stage == stage:  # else it is made again there, maybe in other chunks
            found = self.moves.setdefault(node.id, Statistics(mean, var, momentum))
            found.of_chunks[chunk] = x.shape[0], *of_chunk
        return made

    def _moved_by(self, node: Node) -> set[int]:
        """The leaves that a call writes on the side."""
        writes = (i for k, i in enumerate(node.imports) if node.leaf_writes >> k & 1)
        return {self.program.imports[i].value for i in writes}

    def _moved_before(self, node: Node) -> Iterator[int]:
        """The leaves that calls before one, which are in training, write at the commit."""
        done: set[int] = _core.memo().get("effects", set())
        for other in self.program.nodes.values():
            if other.leaf_writes and other.id < node.id and other.id not in done:
                _, args, kwargs = _core.call(other.id)
                if {**dict(zip(_WORDS, args, strict=False)), **kwargs}["use_input_stats"]:
                    yield from self._moved_by(other)

    def settle(self) -> None:
        """The last of what takes memory."""
        for found in (*self.moves.values(), *self.of_whole.values()):
            found.settle()

    def write(self, done: set[int]) -> None:
        """Move what is tracked, in the order of the calls, but for those that were `done`."""
        for i in sorted(self.moves.keys() - done):
            self.moves[i].write()

    def move_again(self) -> None:
        """What torch's backward would run again has moved its statistics twice: the last checkpoint
        first, its calls in their order."""
        groups = {group for again in self.agains.values() for group in again.groups}
        regions = checkpoints.reached(self.program) if groups else set()
        for group in sorted(groups, key=lambda group: group.index, reverse=True):
            if not group.regions & regions:
                continue
            for i in sorted(i for i, again in self.agains.items() if group in again.groups):
                node = self.program.node(i)
                again = self.agains[node.id]
                known = self.of_whole.get(node.id) or self.moves[node.id]
                known.move(again.running, again.next())
                for k, i in enumerate(node.imports):
                    if node.leaf_writes >> k & 1:
                        _core.refresh_leaf(self.program.imports[i].value)
