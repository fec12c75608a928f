# SPDX-License-Identifier: Apache-2.0
"""Running statistics of normalizations: collected from the chunks of a step, written at its commit.

Until the commit the calls of a program write copies of the statistics.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from koila import _core
from koila.basics.rows import as_new
from koila.messages.errors import NotInChunksError
from koila.reductions import norms
from koila.running import checkpoints
from koila.staged.facts import ROWS, Node
from koila.staged.program import Program


class Statistics:
    """Running statistics, and the batch statistics that update them: of all rows, or of each chunk,
    weighted by its rows."""

    def __init__(self, mean: Tensor, var: Tensor, momentum: float) -> None:
        self.running = mean, var
        self.momentum = momentum
        self.of_chunks: dict[int, tuple[int, Tensor, Tensor]] = {}  # rows, mean, var of a sample
        self.towards: list[Tensor] = []

    def settle(self) -> None:
        """Compute the batch statistics, so that the update itself needs no memory. Once more at the
        commit, if a hook has seen them before."""
        n_rows, *both = zip(*self.of_chunks.values(), strict=True)
        self.towards = []
        for one, of_chunks in zip(self.running, both, strict=True):
            total = of_chunks[0].double()
            if len(n_rows) > 1:
                total = n_rows[0] / sum(n_rows) * total
            for n, of_chunk in zip(n_rows[1:], of_chunks[1:], strict=True):
                total = total.add(of_chunk, alpha=n / sum(n_rows))
            self.towards.append(total.to(one.dtype))

    def write(self) -> None:
        """Update the running statistics."""
        self.move(self.running, self.momentum)

    def move(self, running: tuple[Tensor, Tensor], momentum: float) -> None:
        """Update some running statistics with these of the batch, as torch does: without a new
        version, and without a graph, which the caller has turned off."""
        for one, towards in zip(running, self.towards, strict=True):
            as_new(one).mul_(1 - momentum).add_(towards, alpha=momentum)


_WORDS = "input weight bias running_mean running_var training momentum eps cudnn_enabled".split()


def _words_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments of a norm in the order of `_WORDS`. instance_norm calls one of them
    `use_input_stats`."""
    named = {"training": kwargs.get("use_input_stats"), **kwargs}
    return [*args[: len(_WORDS)], *(named[name] for name in _WORDS[len(args) :])]


class Tracked:
    """The running statistics that the calls of one step update, by call."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.moves: dict[int, Statistics] = {}
        self.agains: dict[int, norms.Again] = {}  # of calls in the functions of checkpoints
        #: Leaves that several calls update: at the commit, in the order of the calls.
        self._shared = set[int]()
        if program.moved:
            moved = Counter(itertools.chain(*program.moved.values()))
            self._shared.update(value for value, n in moved.items() if n > 1)

    def note(self, node: Node, func: Any, args: tuple[Any, ...]) -> None:
        """Note the statistics of a call that gets statistics of all rows, if it is a batch_norm."""
        if func is norms.batch_norm and args[3] is not None:
            shape = self.program.info(node.first_out).shape
            n = math.prod(shape) // shape[1]  # of the terms of each channel
            found = self.moves[node.id] = Statistics(args[3], args[4], args[6])
            var = args[9].detach() * (n / (n - 1) if n > 1 else math.nan)
            found.of_chunks[0] = 1, args[10].detach(), var

    def note_again(self, node: Node, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Note a batch_norm in a checkpoint, whose statistics `move_again` updates once more.
        Return its arguments with a plain momentum."""
        self.agains[node.id] = args[6]
        return *args[:6], float(args[6]), *args[7:]

    def waits(self, node: Node, func: Any, is_alone: bool) -> bool:
        """Return whether a call, which updates running statistics, must leave that to the commit.
        It must if other calls update them too, or if a checkpoint makes the call twice. `is_alone`:
        it runs on the only chunk of all rows, without a gradient."""
        is_by_rows = node.mode == ROWS and not is_alone
        if func is torch.instance_norm and is_by_rows:
            return True
        is_shared = bool(self._shared) and not self._shared.isdisjoint(self.program.moved[node.id])
        return (is_shared or node.id in self.agains) and not is_by_rows

    def norm(
        self,
        node: Node,
        stage: int,
        chunk: int,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Tensor:
        """Run a norm with running statistics on a chunk or on all rows; leave these as they are.

        With a momentum of 1 torch leaves what it would move them towards: the statistics of what it
        is given, for instance_norm the mean of its rows' own. In evaluation instance_norm writes
        back what it read, so it gets copies.
        """
        x, weight, bias, mean, var, is_training, momentum, *rest = _words_of(args, kwargs)
        if not is_training:
            if any(map(self.program.moved_by(node).__contains__, self._moved_before(node))):
                why = "its running statistics are still to be moved"
                raise NotInChunksError(f"{_core.node(node.id)[3]}: {why}")
            own = mean.clone(), var.clone()
            return torch.instance_norm(x, weight, bias, *own, False, momentum, *rest)
        of_chunk = torch.zeros_like(mean), torch.zeros_like(var)
        made: Tensor = func(x, weight, bias, *of_chunk, True, 1.0, *rest)
        if node.stage == stage:  # in another stage it is recomputed, maybe in other chunks
            found = self.moves.setdefault(node.id, Statistics(mean, var, momentum))
            found.of_chunks[chunk] = x.shape[0], *of_chunk
        return made

    def _moved_before(self, node: Node) -> Iterator[int]:
        """Yield the leaves that earlier calls in training mode will write at the commit."""
        done: set[int] = _core.notes().get("effects", set())
        for other in self.program.nodes.values():
            if other.leaf_writes and other.id < node.id and other.id not in done:
                _, args, kwargs = _core.call(other.id)
                if _words_of(args, kwargs)[_WORDS.index("training")]:
                    yield from self.program.moved_by(other)

    def settle(self) -> None:
        """Compute all batch statistics: nothing after this takes memory."""
        for found in self.moves.values():
            found.settle()

    def write(self, done: set[int]) -> None:
        """Update the statistics in the order of the calls, except those already `done`."""
        with torch.set_grad_enabled(False):
            for i in sorted(self.moves.keys() - done):
                self.moves[i].write()

    def move_again(self) -> None:
        """Update the statistics of calls in checkpoints once more, as torch's second run of their
        functions in backward does: last checkpoint first, its calls in their order."""
        if not self.agains:
            return
        groups = {group for again in self.agains.values() for group in again.groups}
        regions = checkpoints.reached(self.program) if groups else set()
        for group in sorted(groups, key=lambda group: group.index, reverse=True):
            if not group.regions & regions:
                continue
            for i in sorted(i for i, again in self.agains.items() if group in again.groups):
                node = self.program.node(i)
                again = self.agains[node.id]
                with torch.set_grad_enabled(False):
                    self.moves[node.id].move(again.running, again.next())
                for value in self.program.moved_by(node):
                    _core.refresh_leaf(value)
