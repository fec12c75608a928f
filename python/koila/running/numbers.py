# SPDX-License-Identifier: Apache-2.0
"""The numbers that lazies get after a run; lazies of one storage get views of one tensor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from koila import _core
from koila.basics import rows
from koila.basics.rows import as_inference, as_new
from koila.basics.threads import in_turn
from koila.running import read_numbers, views
from koila.running.boundary import BoundaryValue, read_whole
from koila.running.freed_graphs import OfFreedGraph, Outdated, hung_on
from koila.staged import hooks, layouts, leaves
from koila.staged.facts import Info
from koila.staged.program import Program


def _in_memory_of(number: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the shape and strides of `made` in the memory of `number`, which a user
    has read. No number is copied: an earlier run left them in that memory. Return `made` itself if
    the memory is too small for it."""
    memory = number.untyped_storage()
    if memory.nbytes() < made.untyped_storage().nbytes():
        return made
    return rows.in_memory(memory, made)


def _laid_out(value: int, number: torch.Tensor) -> torch.Tensor:
    """Return the number of a value with the strides that eager would give it. Chunks give the
    gradient for a tensor the strides of that tensor."""
    made_by = _core.maker_of(value) if Info.of(value).strides is None else None
    if made_by is None or _core.node(made_by[0])[1] != "gradient_of":
        return number
    strides = layouts.settled(value).strides
    if strides is None or strides == number.stride():
        return number
    return rows.empty(number.shape, strides, number.dtype, number.device).copy_(number)


class GoneGraphs:
    """The graphs that raise, in place of those that a backward freed or a write made outdated. Each
    leads to the leaves, and to the numbers of the user's other values, that its value depends on:
    so a gradient for one of these raises, too, where another path leads to it."""

    def __init__(self) -> None:
        #: By value: its number, which needs a gradient, and the user's values it depends on.
        self.numbers: dict[int, torch.Tensor] = {}
        self.held: dict[int, set[int]] = {}

    def put(self, function: Any, value: int, number: torch.Tensor) -> torch.Tensor:
        """Return the number of a value with such a graph; those of values before it come first.

        Args:
            function: the class of the node behind it: OfFreedGraph or Outdated.
            value: its id.
            number: its number.
        """
        leaves, held = _core.behind(value)
        before, reached = [*leaves], set[int]()  # what the graphs of `before` lead to
        for one in sorted(self.numbers.keys() & held, reverse=True):
            if one not in reached:
                before.append(self.numbers[one])
                reached |= self.held.get(one, set())
        self.held[value] = set(held)
        self.numbers[value] = hung_on(function, number, before)
        return self.numbers[value]


class Numbers:
    """The numbers of the lazies that the user can reach, at the end of a run in chunks.

    A later write through one lazy has to show in all lazies that share its memory. So a view is not
    gathered from chunks: the view calls are repeated on the whole storage. A value that may be a
    view or a copy stays on the tape, where a write to it runs live. After its backward it cannot
    stay, and a write to it is refused.
    """

    def __init__(
        self,
        program: Program,
        boundary: Mapping[int, BoundaryValue],
        is_graph_freed: bool,
        values: Iterable[int] | None = None,
    ) -> None:
        self.program = program
        self.boundary = boundary
        self.made: dict[int, torch.Tensor] = {}
        #: By storage, and whether autograd sees them: views, each of that which it was taken of. A
        #: write with a graph through one gives those the graph that torch would give it.
        self.taken: dict[tuple[int, bool], dict[int, torch.Tensor]] = {}
        wanted = list(program.wanted if values is None else values)
        self.freed = self._find_freed(wanted) if is_graph_freed else frozenset[int]()
        groups: dict[int, list[int]] = defaultdict(list)
        for value in wanted:
            groups[program.info(value).storage].append(value)
        #: By storage, a number that the user has read: numbers that share its memory go into it.
        self.read: dict[int, torch.Tensor] = {}
        for value in wanted:
            result, info = Info.of(value).result, program.info(value)
            if result is not None and not info.is_uncertain:
                self.read[info.storage] = result
        is_final: dict[int, bool] = {}
        for storage, group in groups.items():
            # A recorded call may write a lazy that stays. So lazies of a storage stay or leave
            # together.
            n_leaving = sum(v in self.freed or not program.info(v).requires_grad for v in group)
            are_final = n_leaving >= program.n_sharing.get(storage, len(group))
            if program.info(group[0]).is_uncertain:
                are_final = not self.freed.isdisjoint(group)
            is_final.update(dict.fromkeys(group, are_final))
        self.gone = GoneGraphs()
        #: (value, its number, whether it leaves the tape), for `deliver` at the commit.
        self.found: list[tuple[int, torch.Tensor, bool]] = []
        for value in sorted(is_final):
            number = self._number(value)
            self.found.append((value, number, is_final[value]))
            if number.requires_grad:
                self.gone.numbers.setdefault(value, number)

    def _find_freed(self, values: Iterable[int]) -> frozenset[int]:
        """Return those of the values whose graph a backward freed.

        It went through the call that made such a value, or a gradient of the value would have to
        go through calls that it freed. That also holds for all before it that the user holds: a
        backward for some tensors alone leaves those before these pending. The tape knows which
        calls were freed, and a second backward through them raises.
        """
        tracked = set()
        for value in values:
            if self.program.info(value).requires_grad:
                tracked.add(value)
        found = set(filter(self._is_passed, tracked))
        if found == tracked:
            return frozenset(found)
        found |= tracked & self._beyond_freed(tracked)
        return frozenset(value for value in found if found.issuperset(_core.behind(value)[1]))

    def _beyond_freed(self, held: set[int]) -> set[int]:
        """Return the values from which no gradient gets to a leaf, or to a value that is `held`,
        except through freed calls.

        Without a graph, such a metric of a model's outputs does not read the parameters again.
        """
        program, beyond, ends = self.program, set[int](), set[int]()
        for i, node in sorted(program.nodes.items()):
            ways = [value for value in program.reads(node) if program.info(value).requires_grad]
            is_freed = any(map(program.needs_gradient, node.outs)) and any(_core.node(i)[6])
            is_beyond = bool(ways) and ends.issuperset(ways)
            beyond.update(node.outs if is_beyond else ())
            if is_freed or is_beyond:
                ends.update(value for value in node.outs if value not in held)
        return beyond

    def _is_passed(self, value: int) -> bool:
        """Return whether backward went through the node of a value, by any output of the node."""
        node = self.program.node_of(value)
        return any(map(self.program.needs_gradient, node.outs if node is not None else (value,)))

    def _number(self, value: int) -> torch.Tensor:
        number = self._number_of(value)
        return number.detach().requires_grad_() if leaves.is_begun(value) else number

    def _number_of(self, value: int) -> torch.Tensor:
        if self.program.is_kept(value):
            return self._of_kept(value)
        result = self._of_storage(value)
        is_new = value in self.freed and not result.requires_grad
        return self.gone.put(OfFreedGraph, value, result) if is_new else result

    def _of_kept(self, value: int) -> torch.Tensor:
        """Return the number of a value that the run kept whole; the same tensor at each call.

        It is the tensor that the user may hold already. Else it is read from the run, or taken
        from the memory of a number of the same storage that the user has read.
        """
        if value not in self.made:
            result = Info.of(value).result  # the user may hold this tensor already
            if result is None:
                # It may be a view taken without a graph, and torch would refuse a write to that.
                result = _laid_out(value, as_new(*read_whole((self.boundary[value],), False)))
                read = self.read.get(self.program.info(value).storage)
                result = result if read is None else _in_memory_of(read, result)
                if self.boundary[value].is_inference and not result.is_inference():
                    result = as_inference(result)
            is_graph_freed = value in self.freed
            self.made[value] = (
                self.gone.put(OfFreedGraph, value, result) if is_graph_freed else result
            )
        return self.made[value]

    def _of_storage(self, value: int) -> torch.Tensor:
        """Repeat the recorded view calls of a value on the memory that its storage has now.

        Thus autograd sees a view, and a write through it with a graph gives all views the graph.
        """
        base = self.program.info(value).base
        real = self.program.info(base).real
        memory = real if real is not None else self._of_kept(base)
        is_graph_freed = value in self.freed
        if memory.requires_grad and (real is not None or not is_graph_freed):
            memory = memory.detach()
        is_graph = is_graph_freed or not memory.requires_grad
        taken = self.taken.setdefault((base, is_graph), {})
        return views.take(self.program, value, memory, -1, is_graph, taken)

    def deliver(self) -> None:
        """Give each lazy its number, at the commit."""
        for value, result, is_final in self.found:
            number = hooks.give(value, result) if value in self.freed else result
            if is_final and not number.requires_grad:
                read_numbers.note(value, number)
            _core.deliver(value, number, is_final)
            if leaves.is_begun(value):
                _core.cut(value, number)

    def leave(self) -> None:
        """Turn values that backward went through into leaves for the calls that still read them.

        The leaf is the tensor that the lazy left the tape with. Its gradient may be asked for, but
        goes no further back.
        """
        for value, result, is_final in self.found:
            if is_final and value in self.freed:
                _core.cut(value, result)


@in_turn
def settle_outdated(is_over: bool = False) -> None:
    """Take the graph from values that have a number and can no longer be differentiated.

    Those are values whose parameters have changed since. If the step `is_over`, they are also
    values whose gradient would have to go through a graph that a backward freed: a script that
    keeps such values would otherwise keep their programs alive.
    """
    all_such, some = _core.outdated(is_over)
    if not all_such and not some:
        if is_over and not _core.is_busy():
            _core.close()  # frees what only calls read whose results nobody can reach
        return
    gone = GoneGraphs()
    numbers: dict[int, torch.Tensor] = {}
    for value in sorted((*all_such, *some)):  # all before one leaves the tape: they lead there
        result, requires_grad = _core.value(value)[6], _core.value(value)[2]
        assert result is not None
        numbers[value] = gone.put(Outdated, value, result) if requires_grad else result
    for value, number in numbers.items():
        result = hooks.give(value, number) if number.requires_grad else number
        if all_such:
            _core.deliver(value, result, True)
        else:
            _core.cut(value, result)
    _core.close()
