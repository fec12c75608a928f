# SPDX-License-Identifier: Apache-2.0
"""A part of a program that was cut off (`bridge.py`), on a tape of its own.

When autograd's engine gets to the values that it handed out, the part runs forward again and
backward. It reads its leaves again then, so copies are kept of those that are written meanwhile.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from koila import _core
from koila.basics import engine, surroundings
from koila.messages.errors import KoilaError
from koila.planning import unsplit
from koila.recording.handed_out import Gradient, Group, Memory, Pass, Root, apply, task
from koila.running import checkpoints, freed_graphs, overwritten, replay
from koila.running.repeated import Layout
from koila.staged import aliases
from koila.staged.facts import Info
from koila.staged.program import Program

_is_retained: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
_TWICE = (
    "a gradient that has a graph is differentiated, through a program that was cut for a call that "
    "cannot be recorded"
)


class Copy(NamedTuple):
    """A copy of a tensor's numbers at a version."""

    real: torch.Tensor
    version: int
    numbers: torch.Tensor


class Freed(NamedTuple):
    """A leaf without memory."""

    stand_in: torch.Tensor
    layout: Layout  # of the tensor that was freed
    compute: Callable[[], torch.Tensor]


class Cut:
    """What was recorded up to a cut: a part."""

    def __init__(self, before_call: str) -> None:
        self.before_call = before_call  # the call at which it was cut, and its line
        self.handed: list[weakref.ref[Root]] = []  # autograd's nodes keep the roots alive
        self.groups: list[Group] = []
        self.others: list[Memory] = []  # values that need no gradient, whose numbers the user has
        self.passes: dict[int, Pass] = {}  # by the number of a pass of autograd's engine
        self.region = checkpoints.recording()  # of the checkpoint in which it was cut; 0: none
        self.early: dict[int, Copy] = {}  # of buffers, which plain torch may write unseen
        self.originals: dict[int, torch.Tensor] = {}  # id of a copy -> the leaf that it replaced
        self.written: set[int] = set()  # leaves that were written, and replaced by copies
        self.uncounted: set[int] = set()  # those of them that were written through .data
        self.before: dict[int, Callable[[], None]] = {}  # called before the part's backward, by key
        self.freed: dict[int, Freed] = {}  # leaves that were freed (`freed.py`)
        #: What entered the part, with its passes (`leaf_passes`), and the ids of the roots then.
        self.entered: tuple[tuple[int, ...], checkpoints.Passes] = ((), [])
        self.memory: frozenset[Any] | None = None  # that it depends on (`parts.py`), once asked for

    @property
    def roots(self) -> tuple[Any, ...]:
        """The lazies of all values that were handed out and have not run backward yet. Keep the
        result while the tape is used: the lazies may die at any time, and the tape with them."""
        return tuple(root.lazy for root in self.alive())

    def on_tape(self, func: Callable[..., Any], *args: Any) -> Any:
        """Call a function with the part's tape as that of this thread; return None if there is no
        root `waiting`."""
        roots = self.waiting
        return _core.held(roots[0], func, args, {}) if roots else None

    @property
    def waiting(self) -> tuple[Any, ...]:
        """As `roots`; none if the part ran `whole`: autograd has saved what its graph reads, and
        its tape is gone."""
        return () if "whole" in self.__dict__ else self.roots

    def copy_what_it_reads(
        self, tensors: Sequence[torch.Tensor | None], n_bytes: float = math.inf
    ) -> dict[int, Copy]:
        """Copy the leaves of the part that are in the memory of `tensors`, before a call that may
        write them. Return the copies, by leaf.

        None among `tensors` stands for all buffers. Copy nothing if the leaves have more than
        `n_bytes` together.
        """
        copies: dict[int, Copy] = {}

        def copy() -> None:
            leaves = {leaf: Info.of(leaf).real for one in tensors for leaf in _core.leaves_of(one)}
            reals = {i: t for i, t in leaves.items() if t is not None and not t.is_inference()}
            if sum(real.nbytes for real in reals.values()) <= n_bytes:
                for leaf, real in reals.items():
                    copies[leaf] = Copy(real, real._version, real.detach().clone())

        self.on_tape(copy)
        return copies

    def take_again(self, leaves: list[int], is_same: bool) -> None:
        """Accept that these leaves have new memory after theirs was freed. Unless `is_same`, the
        numbers in it are not those that the part has read, and its backward raises."""

        def take() -> None:
            for leaf in leaves if is_same else ():
                _core.refresh_leaf(leaf)
            if not is_same:
                aliases.lose(leaves)
            self.memory = None

        self.on_tape(take)

    def keep_what_it_reads(self, copies: dict[int, Copy]) -> None:
        """After the call, replace the leaves that it wrote by their copies."""
        roots = self.waiting if copies else ()
        for leaf, copy in copies.items() if roots else ():
            is_same = copy.real._version == copy.version  # a write through .data leaves it so
            if leaf in self.written or (is_same and torch.equal(copy.real, copy.numbers)):
                continue
            numbers = copy.numbers.requires_grad_(copy.real.requires_grad)
            _core.replace_leaf(roots[0], leaf, numbers)
            self.originals[id(numbers)] = copy.real
            self.written.add(leaf)
            self.memory = None
            if is_same:
                self.uncounted.add(leaf)

    def fill(self, read: Sequence[torch.Tensor] | None = None) -> None:
        """Compute again the leaves that were freed (`freed.py`): all, or those that `read` has."""
        roots = self.waiting if self.freed else ()
        ids = set(map(id, read or ()))
        for leaf, one in list(self.freed.items()) if roots else ():
            is_read = read is None or id(one.stand_in) in ids
            tensor = one.compute() if is_read and leaf in self.freed else None
            if tensor is not None and leaf in self.freed:  # a nested call may have put it back
                self._put_back(roots[0], leaf, tensor)

    def _put_back(self, lazy: Any, leaf: int, tensor: torch.Tensor) -> None:
        number, self.memory = tensor.detach().requires_grad_(), None
        _core.replace_leaf(lazy, leaf, number)
        self.originals[id(number)] = self.freed.pop(leaf).stand_in

    def keep_memory_of(self, tensor: torch.Tensor) -> None:
        """Read the leaves that were freed in the memory of a tensor there, and compute none of them
        again: x.data was taken of the tensor."""
        roots = self.waiting if self.freed else ()
        for leaf, freed in list(self.freed.items()) if roots else ():
            if freed.layout.is_of(tensor):
                self._put_back(roots[0], leaf, freed.layout.taken_of(tensor))

    def original(self, leaf: torch.Tensor) -> torch.Tensor:
        """Return the user's tensor that a copy has replaced, or `leaf` itself."""
        return self.originals.get(id(leaf), leaf)

    def go_back(self, group: Group) -> Sequence[torch.Tensor | None]:
        """Return the gradients of the leaves of a group.

        The first group that the engine gets to computes the gradients of all groups. By then the
        engine has visited all values that it sends a gradient to: of the nodes that are ready it
        takes the one that was made last.

        If no gradient has arrived at all, the engine only visits every input of some other node:
        no leaf gets a gradient, and the graph is not freed.
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
        behind: Sequence[torch.Tensor],  # all leaves that the roots were computed from
    ) -> Sequence[torch.Tensor | None]:
        if any(root.lazy is None for root, _ in given):
            raise freed_graphs.used_up()
        roots = [root for root, _ in given]
        self.prepare(roots)
        gradients = [gradient for _, gradient in given]
        if torch.is_grad_enabled():  # create_graph=True: the gradients need a graph
            return self._on_a_graph(roots, gradients, leaves, behind)
        is_retained, is_some = _is_retained(), len(leaves) < len(behind)
        found = self.gradients_of(roots, gradients, leaves, is_retained, is_some)
        if not is_retained:
            self._free(roots)
        return found

    def prepare(self, roots: Sequence[Root]) -> None:
        """Make what the part reads as it was, before a backward from these roots."""
        checkpoints.write_what_is_moved()
        for prepare in self.before.values():
            prepare()
        lazies = [root.lazy for root in roots if self.freed]
        if lazies:

            def read() -> list[torch.Tensor]:
                return Program(lazies, unwanted=self.roots).entered

            self.fill(_core.held(lazies[0], read, (), {}))
        self.keep_what_it_reads(self.early)

    def _on_a_graph(
        self,
        roots: Sequence[Root],
        gradients: Sequence[torch.Tensor],
        leaves: Sequence[torch.Tensor],
        behind: Sequence[torch.Tensor],
    ) -> Sequence[torch.Tensor | None]:
        """Return the gradients of leaves, with a graph that can be differentiated.

        Their nodes must not lead to a graph or a hook that eager's would not lead to: autograd's
        engine goes there also without a gradient, and functions may turn that into zeros.
        """
        watched = {id(one) for one in behind if one.grad_fn is not None or one._backward_hooks}
        if len(roots) > 1:
            watched.update(-1 - i for i, one in enumerate(gradients) if one.requires_grad)
        by_value: dict[int, frozenset[int]] | None = None
        if watched and "whole" not in self.__dict__:
            by_value = _core.held(roots[0].lazy, self._behind_gradients, (roots, watched), {})
        if by_value is None:  # not known: on all of them
            by_value = dict.fromkeys(map(id, leaves), frozenset(watched))
        with torch.no_grad():
            is_some = len(leaves) < len(behind)
            found = self.gradients_of(roots, gradients, leaves, True, is_some)
        alike: dict[frozenset[int], list[int]] = defaultdict(list)
        for i, leaf in enumerate(leaves):
            alike[by_value.get(id(leaf), frozenset())].append(i)
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
        """Return the gradients of leaves (or of lazies whose numbers are known), without a graph,
        given those of roots. `is_retained`: the part can go back again. `is_some`: it has leaves
        whose gradient nobody asks for."""
        lazies = [root.lazy for root in roots]
        wanted = {id(leaf) for leaf in leaves}

        def is_wanted(leaf: torch.Tensor) -> bool:
            return id(self.original(leaf)) in wanted

        gets = is_wanted if is_some else None
        if self.written or any(one.how_written() for one in (*self.alive(), *self.others)):
            _core.held(lazies[0], self._check_written, (roots, gets), {})
        found: Any = NotImplemented  # run whole if a mode of the user's observes the backward
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
        """Return what entered the part, with the passes of torch's engine that get there."""
        roots = self.waiting
        ids = tuple(map(id, roots))
        if ids != self.entered[0]:

            def find() -> checkpoints.Passes:
                return checkpoints.own_passes(Program(list(roots), unwanted=self.roots))

            self.entered = ids, _core.held(roots[0], find, (), {}) if roots else []
        return self.entered[1]

    def alive(self) -> list[Root]:
        """Return the roots that are referred to, have not run backward yet, and can."""
        roots = filter(None, (handed() for handed in self.handed))
        return [
            root
            for root in roots
            if root.lazy is not None and not freed_graphs.is_failed(root.lazy)
        ]

    def _check_written(
        self, roots: Sequence[Root], gets: Callable[[torch.Tensor], bool] | None
    ) -> None:
        program = Program([root.lazy for root in roots], gets=gets, unwanted=self.roots)
        moved: dict[str, set[int]] = {"": set(), "counted": set(), "uncounted": set()}
        values = [(root, _core.id(root.lazy)) for root in self.alive()]
        for one, value in [*values, *((other, other.value) for other in self.others)]:
            if value is not None and value < program.n_values:  # else that tape is gone
                moved[one.how_written()].add(program.info(value).storage)
        uncounted = self.uncounted | overwritten.values_in(program, moved["uncounted"])
        counted = self.written | overwritten.values_in(program, moved["counted"])
        overwritten.check_leaves(program, counted | uncounted, uncounted, self.region)

    def go_back_twice(
        self,
        roots: Sequence[Root],
        leaves: Sequence[torch.Tensor],
        behind: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        seconds: Sequence[torch.Tensor | None],
    ) -> list[torch.Tensor | None]:
        """Differentiate the gradients that `go_back` returned for `leaves`, given the gradients of
        these (`seconds`). Return those of `gradients`, which the roots had, and of `behind`, the
        leaves that the roots were computed from."""
        if any(root.lazy is None for root in roots):
            raise freed_graphs.used_up()
        self.fill()
        self.keep_what_it_reads(self.early)
        if torch.is_grad_enabled():
            raise KoilaError(
                "a gradient is differentiated a third time, through a program that was cut for a "
                "call that cannot be recorded; run it whole: koila.config(chunks=1)"
            )
        if any(root.has_hook for root in self.alive()):
            raise KoilaError(
                f"{_TWICE}, and a value of it has a hook or retains its gradient, which eager "
                "would give it once more; run it whole: koila.config(chunks=1)"
            )
        lazies = [root.lazy for root in roots]
        of = unsplit.Derivative(lazies, None, True)
        left = _core.held(lazies[0], unsplit.check, (torch.autograd.backward, _TWICE, of), {})
        with unsplit.counting(left) if left is not None else contextlib.nullcontext():
            with surroundings.outside():
                outputs, stand_ins = self._whole(roots, leaves)
                _, others = self._whole(roots, behind)
            # Detached: other nodes go back through what the gradients were computed from.
            given = [gradient.detach().requires_grad_() for gradient in gradients]
            with torch.enable_grad():
                first = self._differentiate(outputs, given, stand_ins, is_graph=True)
            inputs = [*given, *others]
            gone = [first.get(id(leaf)) for leaf in stand_ins]
            second = self._differentiate(gone, seconds, inputs)
            return [second.get(id(one)) for one in inputs]

    @functools.cached_property
    def inner(self) -> frozenset[int]:
        """The values that differentiated calls of the part read, also before a write. If one of
        them was handed out, a share of its gradient comes through the part, not to its tensor."""
        roots = self.roots
        return _core.held(roots[0], self._inner, (roots,), {})

    def _note_inner(self) -> None:
        """Compute `inner` while the part's tape is there."""
        if len(self.handed) > 1:
            _ = self.inner

    @staticmethod
    def _inner(roots: tuple[Any, ...]) -> frozenset[int]:
        program = Program(list(roots), unwanted=roots)
        nodes = program.nodes.values()
        differentiated = [
            n for n in nodes if any(program.info(out).requires_grad for out in n.outs)
        ]
        found = {value for node in differentiated for value in program.reads(node)}
        ids = [value for value in map(_core.id, roots) if value is not None]
        return frozenset(found.union(one for one in ids if _core.graph_of(one) in found))

    def _free(self, over: Sequence[Root]) -> None:
        """Free what the backward of these roots, and of the values before them, needed."""
        self._note_inner()
        outputs, _ = self.__dict__.get("whole", ({}, {}))
        for root in filter(None, [handed() for handed in self.handed]):
            if root in over or (root.lazy is not None and _core.is_graph_freed(root.lazy)):
                outputs.pop(id(root.lazy), None)
                root.lazy = None
        values = {root.value for root in self.alive()}
        for group in self.groups:
            group.leaves = () if values.isdisjoint(group.values) else group.leaves
        if not values:  # every root has run backward
            self.early, self.before, self.freed, self.entered = {}, {}, {}, ((), [])
            self.memory = frozenset()
            self.__dict__.pop("whole", None)

    @functools.cached_property
    def whole(self) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
        """Run the part on the whole batch, with an autograd graph that no other tensor shares.
        Return the real tensors of the values that were handed out, by the ids of their lazies; and,
        by the ids of the leaves, the tensors that replace the leaves in that graph: the leaves may
        have graphs of their own, which other backward passes go through."""
        made: dict[int, torch.Tensor] = {}

        def stand_in(leaf: torch.Tensor) -> torch.Tensor:
            key = id(self.original(leaf))
            made.setdefault(key, self.original(leaf).detach().requires_grad_())
            with torch.enable_grad():
                same: torch.Tensor = engine.Instead.apply(made[key], leaf.detach())
            return same  # it may be written

        self.fill()
        self._note_inner()
        roots = self.roots
        _core.replace_leaves(roots[0], stand_in)
        return {id(root): _core.force(root) for root in roots}, made

    def _whole(
        self, roots: Sequence[Root], leaves: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return, from `whole`, the real tensors of roots and what replaces leaves, or lazies."""
        outputs, made = self.whole
        return (
            [outputs[id(root.lazy)] for root in roots],
            [made.get(id(leaf), outputs.get(id(leaf), leaf)) for leaf in leaves],
        )

    @staticmethod
    def _differentiate(
        outputs: Sequence[torch.Tensor | None],
        gradients: Sequence[torch.Tensor | None],
        inputs: Sequence[torch.Tensor | None],
        is_graph: bool = False,
    ) -> dict[int, torch.Tensor]:
        """Return the gradients of inputs, by their ids; skip outputs without a gradient."""
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
