# SPDX-License-Identifier: Apache-2.0
"""A part of a program that was cut off (`bridge.py`): what was recorded up to there, on a tape of
its own, how it goes back when autograd's engine comes to what it handed out, and what it reads
again then, which others may have written meanwhile."""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from koila import _core
from koila.basics import surroundings
from koila.messages.errors import KoilaError
from koila.planning import unsplit
from koila.recording.handed_out import Gradient, Group, Pass, Root, Same, apply, task
from koila.running import checkpoints, overwritten, replay, spent
from koila.staged.facts import Info
from koila.staged.program import Program

_is_retained: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
_TWICE = (
    "a gradient that has a graph is differentiated, through a program that was cut for a call that "
    "cannot be recorded"
)


class Copy(NamedTuple):
    """A tensor as it was at a version."""

    real: torch.Tensor
    version: int
    numbers: torch.Tensor


class Cut:
    """What was recorded up to a cut, on a tape of its own."""

    def __init__(self) -> None:
        self.handed: list[weakref.ref[Root]] = []  # their nodes hold them
        self.groups: list[Group] = []
        self.passes: dict[int, Pass] = {}  # of autograd's engine, by its number
        self.region = checkpoints.recording()  # it was cut in a body of this region
        self.early: dict[int, Copy] = {}  # of buffers, which plain torch may write unseen
        self.originals: dict[int, torch.Tensor] = {}  # of copies that leaves were replaced by
        self.written: set[int] = set()  # these leaves
        self.uncounted: set[int] = set()  # those of them that were written through .data
        self.before: dict[int, Callable[[], None]] = {}  # by asker: called before its backward

    @property
    def roots(self) -> tuple[Any, ...]:
        """What stands for all that was handed out, and has still to go back; who asks holds it: it
        is dropped at any time."""
        return tuple(root.lazy for root in self.alive())

    @property
    def waiting(self) -> tuple[Any, ...]:
        """The same of a part that has still to run: where it ran whole to go back, autograd keeps
        what its graph reads, and its tape is gone."""
        return () if "whole" in self.__dict__ else self.roots

    def copy_what_it_reads(
        self, tensors: Sequence[torch.Tensor | None], n_bytes: float = math.inf
    ) -> dict[int, Copy]:
        """A call is made that may write these: leaves among them, by number, which are read again
        going back. None: buffers, if they are as small together."""
        copies: dict[int, Copy] = {}
        roots = self.waiting

        def copy() -> None:
            leaves = {leaf: Info.of(leaf).real for one in tensors for leaf in _core.leaves_of(one)}
            reals = {i: t for i, t in leaves.items() if t is not None and not t.is_inference()}
            if sum(real.nbytes for real in reals.values()) <= n_bytes:
                for leaf, real in reals.items():
                    copies[leaf] = Copy(real, real._version, real.detach().clone())

        if roots:
            _core.held(roots[0], copy, (), {})
        return copies

    def take_again(self, leaves: list[int], is_same: bool) -> None:
        """Leaves whose memory was freed have other memory. Same: with the numbers that they had."""

        def take() -> None:
            for leaf in leaves:
                if is_same:
                    _core.refresh_leaf(leaf)
                else:
                    _core.memo().setdefault("watched", {})[leaf] = None

        roots = self.waiting
        if roots:
            _core.held(roots[0], take, (), {})

    def keep_what_it_reads(self, copies: dict[int, Copy]) -> None:
        """The call is over: leaves that it wrote stay what they were."""
        roots = self.waiting if copies else ()
        for leaf, copy in copies.items():
            is_same = copy.real._version == copy.version  # a write through .data leaves it so
            if (
                roots
                and leaf not in self.written
                and not (is_same and torch.equal(copy.real, copy.numbers))
            ):
                numbers = copy.numbers.requires_grad_(copy.real.requires_grad)
                _core.replace_leaf(roots[0], leaf, numbers)
                self.originals[id(numbers)] = copy.real
                self.written.add(leaf)
                if is_same:
                    self.uncounted.add(leaf)

    def original(self, leaf: torch.Tensor) -> torch.Tensor:
        """The user's tensor, where a copy stands for it."""
        return self.originals.get(id(leaf), leaf)

    def go_back(self, group: Group) -> Sequence[torch.Tensor | None]:
        """Return the gradients of the leaves of a group. The first group that the engine comes to
        makes those of all: by then it has been to all values that it sends a gradient to, as it
        takes of what is ready the node that was made last.

        Where the engine passes no gradient at all, it only walks through all inputs of another
        node: no leaf gets a gradient, and the graph is not used up.
        """
        current = self.passes.get(task())
        if current is not None and current.given:
            given, current.given = current.given, []
            values = {root.value for root, _ in given}
            ways = [one for one in self.groups if not values.isdisjoint(one.values)]
            asked = {one: one.asked_for() for one in ways}
            behind = [leaf for one in ways for leaf in one.leaves]
            is_asked = itertools.chain.from_iterable(asked.values())
            leaves = list(itertools.compress(behind, is_asked))
            found = iter(self._sent_to(leaves, given, behind))
            for one in filter(lambda one: any(asked[one]), ways):
                current.add(one, [next(found) if is_one else None for is_one in asked[one]])
        none = [None] * group.n_leaves
        if current is None:
            return none
        gradients = current.found.pop(group, none)
        if not current.found:
            del self.passes[task()]
        return gradients

    def _sent_to(
        self,
        leaves: Sequence[torch.Tensor],
        given: Sequence[tuple[Root, torch.Tensor]],
        behind: Sequence[torch.Tensor],  # all leaves that what is given was made of
    ) -> Sequence[torch.Tensor | None]:
        if any(root.lazy is None for root, _ in given):
            raise spent.used_up()
        checkpoints.write_what_is_moved()
        for prepare in self.before.values():
            prepare()
        self.keep_what_it_reads(self.early)
        roots = [root for root, _ in given]
        gradients = [gradient for _, gradient in given]
        if torch.is_grad_enabled():  # create_graph: they are to have a graph too
            return self._on_a_graph(roots, gradients, leaves, behind)
        is_retained, is_some = _is_retained(), len(leaves) < len(behind)
        found = self.gradients_of(roots, gradients, leaves, is_retained, is_some)
        if not is_retained:
            self._let_go(roots)
        return found

    def _on_a_graph(
        self,
        roots: Sequence[Root],
        gradients: Sequence[torch.Tensor],
        leaves: Sequence[torch.Tensor],
        behind: Sequence[torch.Tensor],
    ) -> Sequence[torch.Tensor | None]:
        """The gradients of leaves, on nodes that lead to no graph or hook which eager's do not lead
        to: autograd's engine goes there also where no gradient comes, and functions, which may make
        zeros of that, send them on."""
        watched = {id(one) for one in behind if one.grad_fn is not None or one._backward_hooks}
        if len(roots) > 1:
            watched.update(-1 - i for i, one in enumerate(gradients) if one.requires_grad)
        known: dict[int, frozenset[int]] | None = None
        if watched and "whole" not in self.__dict__:
            known = _core.held(roots[0].lazy, self._behind_gradients, (roots, watched), {})
        with torch.no_grad():
            is_some = len(leaves) < len(behind)
            found = self.gradients_of(roots, gradients, leaves, True, is_some)
        alike: dict[frozenset[int], list[int]] = defaultdict(list)
        for i, leaf in enumerate(leaves):
            reached = frozenset(watched) if known is None else known.get(id(leaf), frozenset())
            alike[reached].append(i)
        made: list[torch.Tensor | None] = [None] * len(leaves)
        tensors = {-1 - i: one for i, one in enumerate(gradients)} | {id(t): t for t in behind}
        for reached, some in alike.items():
            gone = watched.difference(reached)
            of = [leaves[i] for i in some], [found[i] for i in some], behind, gone
            ends = [t.detach() if name in gone else t for name, t in tensors.items()]
            twice = apply(Gradient, self, roots, *of, *ends)
            for i, one in zip(some, twice, strict=True):
                made[i] = one
        return made

    def _behind_gradients(
        self, roots: Sequence[Root], watched: set[int]
    ) -> dict[int, frozenset[int]] | None:
        program = Program([root.lazy for root in roots], unwanted=self.roots)
        values = [root.value for root in roots]
        return unsplit.reached_by_gradients(
            program, values, lambda leaf: id(self.original(leaf)), watched
        )

    def gradients_of(
        self,
        roots: Sequence[Root],
        gradients: Sequence[torch.Tensor],
        leaves: Sequence[torch.Tensor],
        is_retained: bool,
        is_some: bool,
    ) -> list[torch.Tensor | None]:
        """The same, without a graph. Some: there are leaves that no gradient is asked for."""
        lazies = [root.lazy for root in roots]
        wanted = {id(leaf) for leaf in leaves}

        def is_wanted(leaf: torch.Tensor) -> bool:
            return id(self.original(leaf)) in wanted

        gets = is_wanted if is_some else None
        if self.written or any(root.how_written() for root in self.alive()):
            _core.held(lazies[0], self._check_written, (roots, gets), {})
        found: Any = NotImplemented  # whole, where a mode sees each call
        if not surroundings.of_backward():
            found = replay.gradients_of(lazies, list(gradients), is_retained, self.roots, gets)
        if found is NotImplemented:
            with surroundings.outside():
                outputs, inputs = self._whole(roots, leaves)
            by_input = self._differentiate(outputs, gradients, inputs)
            return [by_input.get(id(one)) for one in inputs]
        by_leaf: dict[int, torch.Tensor] = {}
        for leaf, gradient in found:
            key = id(self.original(leaf))
            by_leaf[key] = by_leaf[key] + gradient if key in by_leaf else gradient
        return [by_leaf.get(id(leaf)) for leaf in leaves]

    def leaf_passes(self) -> checkpoints.Passes:
        """Which passes of torch's engine come to what the part was made of."""
        roots = self.waiting

        def find() -> checkpoints.Passes:
            return checkpoints.passes(Program(list(roots), unwanted=self.roots))

        return _core.held(roots[0], find, (), {}) if roots else {}

    def alive(self) -> list[Root]:
        """What was handed out, is held, and has still to go back."""
        roots = (handed() for handed in self.handed)
        return [root for root in roots if root is not None and root.lazy is not None]

    def _check_written(
        self, roots: Sequence[Root], gets: Callable[[torch.Tensor], bool] | None
    ) -> None:
        program = Program([root.lazy for root in roots], gets=gets, unwanted=self.roots)
        moved: dict[str, set[int]] = {"": set(), "counted": set(), "uncounted": set()}
        for root in self.alive():
            if (value := _core.id(root.lazy)) is not None:
                moved[root.how_written()].add(program.info(value).storage)
        uncounted = self.uncounted | _values_in(program, moved["uncounted"])
        counted = self.written | _values_in(program, moved["counted"])
        overwritten.check_leaves(program, counted | uncounted, uncounted, self.region)

    def go_back_twice(
        self,
        roots: Sequence[Root],
        leaves: Sequence[torch.Tensor],
        behind: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        seconds: Sequence[torch.Tensor | None],
    ) -> list[torch.Tensor | None]:
        """The gradients of `gradients` and of the leaves `behind` them, from those of what
        `go_back` gave for `leaves`."""
        if any(root.lazy is None for root in roots):
            raise spent.used_up()
        self.keep_what_it_reads(self.early)
        if torch.is_grad_enabled():
            raise KoilaError(
                "a gradient is differentiated a third time, through a program that was cut for a "
                "call that cannot be recorded; run it whole: koila.config(chunks=1)"
            )
        lazies = [root.lazy for root in roots]
        of = unsplit.Derivative(lazies, None, True)
        left = _core.held(lazies[0], unsplit.check, (torch.autograd.backward, _TWICE, of), {})
        with unsplit.counting(left):
            with surroundings.outside():
                outputs, stand_ins = self._whole(roots, leaves)
                _, others = self._whole(roots, behind)
            # Of tensors of their own: what the gradients were made of is gone through by others.
            given = [gradient.detach().requires_grad_() for gradient in gradients]
            with torch.enable_grad():
                first = self._differentiate(outputs, given, stand_ins, is_graph=True)
            inputs = [*given, *others]
            gone = [first.get(id(leaf)) for leaf in stand_ins]
            second = self._differentiate(gone, seconds, inputs)
            return [second.get(id(one)) for one in inputs]

    @functools.cached_property
    def inner(self) -> frozenset[int]:
        """The values that calls of the part read: of the gradient of one that was handed out, a
        share comes through what these calls made."""
        roots = self.roots
        found: frozenset[int] = _core.held(roots[0], self._inner, (roots,), {})
        return found

    @staticmethod
    def _inner(roots: tuple[Any, ...]) -> frozenset[int]:
        program = Program(list(roots), unwanted=roots)
        differentiated = [
            node
            for node in program.nodes.values()
            if any(program.info(out).requires_grad for out in node.outs)
        ]
        reads = itertools.chain.from_iterable(node.imports for node in differentiated)
        return frozenset(program.imports[k].value for k in reads if k >= 0)

    def _let_go(self, over: Sequence[Root]) -> None:
        """What these and those that they were made of needed goes."""
        if len(self.handed) > 1:
            _ = self.inner  # it is asked for afterwards, too
        outputs, _ = self.__dict__.get("whole", ({}, {}))
        for root in filter(None, [handed() for handed in self.handed]):
            if root in over or (root.lazy is not None and _core.is_spent(root.lazy)):
                outputs.pop(id(root.lazy), None)
                root.lazy = None
        values = {root.value for root in self.alive()}
        for group in self.groups:
            group.leaves = () if values.isdisjoint(group.values) else group.leaves
        if not values:  # no other has still to go back
            self.early, self.before = {}, {}
            self.__dict__.pop("whole", None)

    @functools.cached_property
    def whole(self) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
        """Run the part on the whole batch, with an autograd graph that no other tensor shares.

        Returns:
            What was handed out, by the ids of the lazies; and the tensors that stand for the leaves
            in that graph, by the ids of the leaves: the leaves themselves may have graphs that
            other backwards go through.
        """
        made: dict[int, torch.Tensor] = {}

        def stand_in(leaf: torch.Tensor) -> torch.Tensor:
            key = id(self.original(leaf))
            made.setdefault(key, self.original(leaf).detach().requires_grad_())
            with torch.enable_grad():
                same: torch.Tensor = apply(Same, leaf.detach(), made[key])
            return same

        roots = self.roots
        _core.replace_leaves(roots[0], stand_in)
        return {id(root): _core.force(root) for root in roots}, made

    def _whole(
        self, roots: Sequence[Root], leaves: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """From `whole`: the tensors of some values, and those that stand for some leaves."""
        outputs, made = self.whole
        return (
            [outputs[id(root.lazy)] for root in roots],
            [made.get(id(leaf), leaf) for leaf in leaves],
        )

    @staticmethod
    def _differentiate(
        outputs: Sequence[torch.Tensor | None],
        gradients: Sequence[torch.Tensor | None],
        inputs: Sequence[torch.Tensor | None],
        is_graph: bool = False,
    ) -> dict[int, torch.Tensor]:
        """The gradients of inputs, by id."""
        pairs = [
            (output, gradient)
            for output, gradient in zip(outputs, gradients, strict=True)
            if output is not None and gradient is not None and output.requires_grad
        ]
        wanted = [one for one in inputs if one is not None]
        if not pairs:
            return {}
        found = torch.autograd.grad(
            [output for output, _ in pairs],
            wanted,
            [gradient for _, gradient in pairs],
            retain_graph=True,
            create_graph=is_graph,
            allow_unused=True,
        )
        by_input = zip(wanted, found, strict=True)
        return {id(one): gradient for one, gradient in by_input if gradient is not None}


def _values_in(program: Program, storages: set[int]) -> set[int]:
    """The values of a program that lie in some memories."""
    if not storages:
        return set()
    nodes = program.nodes.values()
    read = (program.imports[i].value for node in nodes for i in node.imports if i >= 0)
    made = (value for node in nodes for value in node.outs)
    values = set(itertools.chain(read, made))
    return {value for value in values if program.info(value).storage in storages}
