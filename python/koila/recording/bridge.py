# SPDX-License-Identifier: Apache-2.0
"""Where a call comes that cannot be recorded, the program is cut, and goes on behind it.

Such a call (a custom autograd function, compiled code, an op whose shape depends on numbers) wants
real tensors, on a real graph. They are given their numbers, which a run in chunks without a graph
has made, each on a node of its own, which leads to nodes before the parameters and other tensors
that it was made of. Autograd's engine comes to the first of these with the gradients of all that
was handed out there, and it runs what was recorded up to there in chunks, forward and back. So
whoever walks the graph finds the leaves of each value, and each gets one gradient.

All that the user can reach is handed out at once: two cuts have no call in common, and none runs
oftener than once more forward than it would have.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from koila import _core
from koila.basics import engine, surroundings
from koila.basics.rows import without_memory
from koila.messages.errors import KoilaError
from koila.planning import explain, planner, steps, unsplit
from koila.random import generators
from koila.reporting import reports
from koila.running import checkpoints, overwritten, replay, spent, unwritten, views
from koila.running.numbers import as_new
from koila.staged import hooks, meta
from koila.staged.facts import Info, is_data
from koila.staged.program import Program

_data: Any = torch._C.TensorBase.data  # as torch has it
_is_retained: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
_task: Callable[[], int] = torch._C._current_graph_task_id


class _State(threading.local):
    """The cuts of this thread, of which parts have still to go back."""

    def __init__(self) -> None:
        self.cuts: weakref.WeakSet[_Cut] = weakref.WeakSet()


#: Of what a part reads that has neither rows nor gradients as many bytes are copied before anybody
#: writes it: so many, or such a share of what is handed out.
_SMALL, _SHARE = 2**18, 8
#: What waits runs whole before a call, if it makes so many bytes, where its graph keeps no more
#: than a part that is cut off.
_WORTH = 2**18


#: Under which the node of a view names what was handed out, and the number of the view's value.
_VIEW = "koila: a view of what was handed out"
_TWICE = (
    "a gradient that has a graph is differentiated, through a program that was cut for a call that "
    "cannot be recorded"
)


class _Copy(NamedTuple):
    """A tensor as it was at a version."""

    real: torch.Tensor
    version: int
    numbers: torch.Tensor


class _Cut:
    """What was recorded up to a cut, on a tape of its own."""

    def __init__(self) -> None:
        self.handed: list[weakref.ref[_Root]] = []  # their nodes hold them
        self.groups: list[_Group] = []
        self.passes: dict[int, _Pass] = {}  # of autograd's engine, by its number
        self.region = checkpoints.recording()  # it was cut in a body of this region
        self.early: dict[int, _Copy] = {}  # of buffers, which plain torch may write unseen
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
    ) -> dict[int, _Copy]:
        """A call is made that may write these: leaves among them, by number, which are read again
        going back. None: buffers, if they are as small together."""
        copies: dict[int, _Copy] = {}
        roots = self.waiting

        def copy() -> None:
            leaves = {leaf: _info(leaf).real for one in tensors for leaf in _core.leaves_of(one)}
            reals = {i: t for i, t in leaves.items() if t is not None and not t.is_inference()}
            if sum(real.nbytes for real in reals.values()) <= n_bytes:
                for leaf, real in reals.items():
                    copies[leaf] = _Copy(real, real._version, real.detach().clone())

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

    def keep_what_it_reads(self, copies: dict[int, _Copy]) -> None:
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

    def go_back(self, group: _Group) -> Sequence[torch.Tensor | None]:
        """Return the gradients of the leaves of a group. The first group that the engine comes to
        makes those of all: by then it has been to all values that it sends a gradient to, as it
        takes of what is ready the node that was made last.

        Where the engine passes no gradient at all, it only walks through all inputs of another
        node: no leaf gets a gradient, and the graph is not used up.
        """
        current = self.passes.get(_task())
        if current is not None and current.given:
            given, current.given = current.given, []
            values = {root.value for root, _ in given}
            ways = [one for one in self.groups if not values.isdisjoint(one.values)]
            groups = [one for one in ways if one.is_reached()]
            leaves, behind = ([leaf for g in some for leaf in g.leaves] for some in (groups, ways))
            found = iter(self._sent_to(leaves, given, behind))
            for one in groups:
                current.add(one, list(itertools.islice(found, one.n_leaves)))
        none = [None] * group.n_leaves
        if current is None:
            return none
        gradients = current.found.pop(group, none)
        if not current.found:
            del self.passes[_task()]
        return gradients

    def _sent_to(
        self,
        leaves: Sequence[torch.Tensor],
        given: Sequence[tuple[_Root, torch.Tensor]],
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
        roots: Sequence[_Root],
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
            twice = _apply(_Gradient, self, roots, *of, *ends)
            for i, one in zip(some, twice, strict=True):
                made[i] = one
        return made

    def _behind_gradients(
        self, roots: Sequence[_Root], watched: set[int]
    ) -> dict[int, frozenset[int]] | None:
        program = Program([root.lazy for root in roots], unwanted=self.roots)
        values = [root.value for root in roots]
        return unsplit.reached_by_gradients(
            program, values, lambda leaf: id(self.original(leaf)), watched
        )

    def gradients_of(
        self,
        roots: Sequence[_Root],
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

    def alive(self) -> list[_Root]:
        """What was handed out, is held, and has still to go back."""
        roots = (handed() for handed in self.handed)
        return [root for root in roots if root is not None and root.lazy is not None]

    def _check_written(
        self, roots: Sequence[_Root], gets: Callable[[torch.Tensor], bool] | None
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
        roots: Sequence[_Root],
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

    def _let_go(self, over: Sequence[_Root]) -> None:
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
                same: torch.Tensor = _apply(_Same, leaf.detach(), made[key])
            return same

        roots = self.roots
        _core.replace_leaves(roots[0], stand_in)
        return {id(root): _core.force(root) for root in roots}, made

    def _whole(
        self, roots: Sequence[_Root], leaves: Sequence[torch.Tensor]
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


class _Root:
    """A value that was handed out."""

    def __init__(self, cut: _Cut, value: int, number: torch.Tensor | None) -> None:
        self.cut = cut
        self.value = value
        self.number = number
        self.lazy: Any = None  # what stands for it, until it went back
        self.memory: StorageWeakRef | None = None
        #: It counts the writes to that memory, as all its tensors do, and holds none.
        self.counter, self.n_writes = torch.empty(0), 0
        #: Where x.data was taken of it: its memory, and what it was then.
        self.watched: tuple[torch.Tensor, tuple[int, int]] | None = None
        cut.handed.append(weakref.ref(self))

    def note(self, tensor: torch.Tensor) -> None:
        """It was handed out as this tensor."""
        self.memory = StorageWeakRef(tensor.untyped_storage())
        self.counter = tensor.detach()
        _data.__set__(self.counter, torch.empty(0, dtype=tensor.dtype, device=tensor.device))
        self.n_writes = self.counter._version

    def watch(self, tensor: torch.Tensor) -> None:
        """Its memory, which this tensor is of, is handed out behind autograd's back."""
        if self.watched is None:
            whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            whole.set_(tensor.untyped_storage())
            self.watched = whole, meta.checksum(whole)

    def how_written(self) -> str:
        """Whether its memory was written since, and whether torch counted that."""
        if self.counter._version != self.n_writes:
            return "counted"
        is_same = self.watched is None or meta.checksum(self.watched[0]) == self.watched[1]
        return "" if is_same else "uncounted"

    def is_inner(self, value: int) -> bool:
        """Whether what else was handed out, and can still be differentiated or asked about, was
        made of this, or of a view of it: what comes through that is no part of the gradient of the
        tensor."""
        others = (handed() for handed in self.cut.handed)
        return any(one not in (None, self) for one in others) and value in self.cut.inner


class _Group:
    """Leaves that gradients of the same values go to. Autograd's engine goes on through all leaves
    of a node, also where no gradient comes: hooks there are called, and a graph that is used up
    raises. So no value leads to a leaf that it was not made of."""

    def __init__(self, values: Iterable[int], leaves: Sequence[torch.Tensor]) -> None:
        self.values = frozenset(values)
        self.leaves = leaves
        self.n_leaves = len(leaves)
        self.node: Callable[[], Any] = lambda: None

    def is_reached(self) -> bool:
        """Whether the engine, which goes through a graph, comes to the leaves."""
        node = self.node()
        return node is not None and bool(torch._C._will_engine_execute_node(node))


class _Pass:
    """What one pass of autograd's engine has brought to values of a cut, and made of that."""

    def __init__(self) -> None:
        self.given: list[tuple[_Root, torch.Tensor]] = []
        self.found: dict[_Group, list[torch.Tensor | None]] = {}

    def add(self, group: _Group, gradients: list[torch.Tensor | None]) -> None:
        """Note gradients of the leaves of a group."""
        known = self.found.get(group, [None] * len(gradients))
        self.found[group] = [
            one if other is None else other if one is None else one + other
            for one, other in zip(known, gradients, strict=True)
        ]


def _apply(function: Any, *args: Any) -> Any:
    return function.apply(*args)


class _Same(torch.autograd.Function):
    """Numbers that may be written in place, and whose gradient is that of a leaf."""

    @staticmethod
    def forward(ctx: Any, numbers: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
        return as_new(numbers)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, gradient


class _Gradient(torch.autograd.Function):
    """The gradients of leaves, which can be differentiated by what they were made of: gradients of
    roots, and the leaves `behind` these. What is in `gone` they were not made of."""

    @staticmethod
    def forward(
        ctx: Any,
        cut: _Cut,
        roots: Sequence[_Root],
        leaves: Sequence[torch.Tensor],
        found: Sequence[torch.Tensor | None],
        behind: Sequence[torch.Tensor],
        gone: set[int],
        *tensors: torch.Tensor,
    ) -> tuple[Any, ...]:
        ctx.cut, ctx.roots, ctx.leaves, ctx.behind, ctx.gone = cut, roots, leaves, behind, gone
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors[: len(roots)])
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *seconds: torch.Tensor | None) -> tuple[Any, ...]:
        given, behind = ctx.saved_tensors, ctx.behind
        found = ctx.cut.go_back_twice(ctx.roots, ctx.leaves, behind, given, seconds)
        names = [*range(-1, -1 - len(given), -1), *map(id, behind)]
        for name, gradient in zip(names, found, strict=True):
            if gradient is not None and name in ctx.gone:
                raise KoilaError(
                    f"a second derivative, of shape {list(gradient.shape)}, is of a tensor that "
                    "the first was not made of: a mistake of koila's, please report it"
                )
        return (None,) * 6 + tuple(found)


_state = _State()


class _Leaves(torch.autograd.Function):
    """The node before the leaves of a group: it gives a stand-in for each value made of them."""

    runs_program = True

    @staticmethod
    def forward(
        ctx: Any, cut: _Cut, group: _Group, like: Sequence[torch.Tensor], *leaves: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.cut, ctx.group, group.node = cut, group, weakref.ref(ctx)
        ctx.set_materialize_grads(False)
        return tuple(without_memory(one.shape, one.dtype, one.device) for one in like)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor | None) -> tuple[Any, ...]:
        return None, None, None, *ctx.cut.go_back(ctx.group)


class _HandedOut(torch.autograd.Function):
    """The node of a value that was handed out, which takes its gradient."""

    @staticmethod
    def forward(ctx: Any, root: _Root, *stand_ins: torch.Tensor) -> torch.Tensor:
        ctx.root, ctx.n = root, len(stand_ins)
        ctx.set_materialize_grads(False)
        number, root.number = root.number, None
        assert number is not None
        return as_new(number)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[Any, ...]:
        if gradient is not None:
            passes = ctx.root.cut.passes
            passes.setdefault(_task(), _Pass()).given.append((ctx.root, gradient))
        return None, *[gradient] * ctx.n


def runs_at_once(func: Callable[..., Any]) -> bool:
    """Whether a call must run where it stands, as code of the user's sees it there; that is told,
    and logged once."""
    why = surroundings.of_call()
    if why:
        reports.note_at_once(func, why)
        explain.log_at_once(func, why)
    return bool(why)


def _refuse_hook(node: Any, hook: Any) -> None:
    """A hook of a node that stands for the graph of a part."""
    raise KoilaError(
        f"{hook!r} cannot be registered on this grad_fn: the program was cut after the call that "
        "made the tensor, and the node stands for all calls before; register it on the tensor "
        "(Tensor.register_hook), or run it whole: koila.config(chunks=1)"
    )


for _name in ("register_hook", "register_prehook"):
    for _function in (_HandedOut, _Leaves):
        setattr(_function._backward_cls, _name, _refuse_hook)


def call(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    has_graph: bool,
    is_plain: bool,
) -> Any:
    """Make a call that cannot be recorded, and that is given values which wait.

    Where the program runs in chunks it is cut before; else all that was recorded runs on the whole
    batch, which is logged.

    Args:
        func: the call.
        args: its arguments.
        kwargs: its arguments by name.
        has_graph: whether anything waits that needs a gradient; else what waits may be light.
        is_plain: whether its results are to be plain tensors.

    Returns:
        What it returns, with lazies in place of tensors unless `is_plain`.
    """
    unwritten.note_read((args, kwargs))
    is_large = has_graph and not planner.is_whole() and _core.pending_bytes(False) >= _WORTH
    is_light = is_large and _core.won_whole() >= 0
    is_cut = not is_light and not planner.is_whole() and _cut(func)
    if is_light:
        reports.give_reason("its graph keeps no more than a part that reads its inputs again")
    elif has_graph and not is_cut:
        unsplit.check(func, surroundings.of_call())
    if not is_cut and any(map(_core.leaves_of, _tensors_in((args, kwargs), False))):
        _core.flush()  # what waits reads a plain tensor that the call may write
    return _core.live(func, args, kwargs, is_plain)


@surroundings.in_outside
def before_write(func: Callable[..., Any], given: Any) -> list[tuple[_Cut, dict[int, _Copy]]]:
    """A call runs at once, and may write what it is given, which parts may read again: what they
    were is kept until `after_write`. A weight is no such thing where the call says how it is
    differentiated."""
    is_custom = isinstance(getattr(func, "__self__", None), type)
    tensors = [t for t in _tensors_in(given) if not (is_custom and t.requires_grad and t.is_leaf)]
    cuts = list(_state.cuts) if tensors else ()
    return [(cut, cut.copy_what_it_reads(tensors)) for cut in cuts]


@surroundings.in_outside
def after_write(kept: list[tuple[_Cut, dict[int, _Copy]]]) -> None:
    """The call is over."""
    for cut, copies in kept:
        cut.keep_what_it_reads(copies)


def _root_of(tensor: torch.Tensor) -> _Root | None:
    """What a tensor stands for, where it is one that was handed out."""
    root = getattr(tensor.grad_fn, "root", None)
    return root if isinstance(root, _Root) else None


def whole_gradient_of(tensor: torch.Tensor) -> Any:
    """The lazy of a part whose gradient is that of a tensor; None: it is the tensor's own, or there
    is none."""
    root = _root_of(tensor)
    return root.lazy if root is not None and _is_inner(tensor) else None


def _is_inner(tensor: torch.Tensor) -> bool:
    root = _root_of(tensor)
    if root is not None:
        return root.is_inner(root.value)
    # A view that was taken again when its memory was handed out.
    node: Any = tensor.grad_fn
    root, value = node.metadata.get(_VIEW, (None, -1)) if node is not None else (None, -1)
    return root is not None and root.is_inner(value)


def refuse_inner(tensors: Iterable[Any], what: str) -> None:
    """Raise where the gradient of one of these is asked for, and is in a part that was cut off."""
    for tensor in tensors:
        real = _core.real(tensor) if type(tensor) is _core.LazyTensor else tensor
        if isinstance(real, torch.Tensor) and _is_inner(real):
            raise KoilaError(
                f"{what}: the program was cut after this value was made and used, for a call that "
                "cannot be recorded, and only a part of its gradient comes here; run it whole: "
                "koila.config(chunks=1)"
            )


def watch_handed_out(lazy: _core.LazyTensor) -> None:
    """The same of what has the memory of what a part handed out: going back, the part would make
    again what eager's calls have kept, and find written."""
    value, tensor = _core.id(lazy), _core.real(lazy)
    if value is not None and tensor is None:
        tensor = _info(_info(value).base).real
    if tensor is not None:
        _watch_roots(tensor)


def _watch_roots(tensor: torch.Tensor) -> None:
    roots = [root for cut in _state.cuts for root in cut.alive() if root.watched is None]
    memory = StorageWeakRef(tensor.untyped_storage()) if roots else None
    for root in roots:
        if root.memory == memory:
            root.watch(tensor)


def is_read(tensor: torch.Tensor) -> bool:
    """Whether calls wait that read this memory, or parts that have still to go back."""
    return bool(_core.leaves_of(tensor)) or bool(parts_that_read(tensor))


def parts_that_read(tensor: torch.Tensor) -> dict[_Cut, list[int]]:
    """Those that have still to go back, and read this memory: as which of their leaves."""
    found: dict[_Cut, list[int]] = {}
    for cut, roots in [(cut, cut.roots) for cut in _state.cuts]:
        leaves = _core.held(roots[0], _core.leaves_of, (tensor,), {}) if roots else ()
        if leaves:
            found[cut] = leaves
    return found


def watch(tensor: torch.Tensor) -> None:
    """The memory of a tensor is handed out behind autograd's back: a write through that leaves no
    trace but the numbers."""
    _watch_roots(tensor)
    for roots in [cut.roots for cut in _state.cuts]:
        if roots:
            _core.held(roots[0], watch_here, (tensor,), {})


def watch_here(tensor: torch.Tensor) -> None:
    """The same, of what this thread's tape reads."""
    watched = _core.memo().setdefault("watched", {})
    for leaf in _core.leaves_of(tensor):
        real = _info(leaf).real
        assert real is not None
        watched.setdefault(leaf, meta.checksum(real))


@surroundings.in_outside
def _cut(func: Any) -> bool:
    if hooks.is_any() or not _core.can_cut():
        return False
    generators.make_way()
    if not replay.read(False, func):
        return False
    reached = _core.reached()
    if reached is None:
        return False
    numbers = dict(reached)
    sharing: dict[int, list[int]] = defaultdict(list)
    for value in numbers:
        sharing[_info(value).storage].append(value)
    # Of each memory the value that is all of it, or the only one: the others are views of that.
    wholes = {
        value: values[0] if len(values) == 1 else _info(values[0]).base
        for values in sharing.values()
        for value in values
    }
    roots = {whole: numbers.get(whole) for whole in wholes.values() if _info(whole).requires_grad}
    for value, whole in wholes.items():
        if whole in roots and roots[whole] is None:
            roots[whole] = _memory(numbers[value], _info(whole))
    if any(number is None for number in roots.values()):
        return False
    cut = _Cut()
    made = {value: _Root(cut, value, number) for value, number in roots.items()}
    handed = _handed_out(cut, made)
    for value, root in made.items():
        root.note(handed[value])
    others = {value: numbers[value] for value, whole in wholes.items() if whole not in roots}
    program = Program([]) if len(roots) + len(others) < len(wholes) else None
    taken: dict[int, torch.Tensor] = {}  # a gradient of a view goes on through the views before
    for value, whole in wholes.items():
        if value not in handed and value not in others:
            assert program is not None
            others[value] = _taken(program, value, handed[whole], taken)
            node: Any = others[value].grad_fn
            if node is not None:
                node.metadata[_VIEW] = made[whole], value
            if _is_data(value):
                made[whole].watch(handed[whole])
    if any(others[value].requires_grad != _info(value).requires_grad for value in others):
        return False
    with steps.cutting():
        lazies = _core.hand_out(list(handed.items()), list(others.items()))
    for root, lazy in zip(made.values(), lazies, strict=True):
        root.lazy = lazy
    n_bytes = sum(tensor.nbytes for tensor in handed.values())
    reports.note_handed_out(func, n_bytes)
    if made:
        cut.early = cut.copy_what_it_reads([None], max(_SMALL, n_bytes // _SHARE))
        _state.cuts.add(cut)
    return True


def _handed_out(cut: _Cut, roots: dict[int, _Root]) -> dict[int, torch.Tensor]:
    """The tensors of values, on nodes that lead to the leaves that each was made of."""
    leaves: dict[int, torch.Tensor] = {}
    made_of: dict[int, list[int]] = defaultdict(list)  # values, by ids of leaves
    has_derivatives = "recipes" in _core.memo()
    known = unsplit.leaves_behind(Program(list(roots)), roots) if has_derivatives else None
    for value in roots:
        behind = {id(leaf): leaf for leaf in reversed(_core.behind(value))}
        if known is not None:
            behind = {key: leaf for key, leaf in behind.items() if key in known[value]}
        leaves.update(behind)
        for leaf in behind:
            made_of[leaf].append(value)
    together: dict[tuple[int, ...], list[torch.Tensor]] = defaultdict(list)
    for key, values in made_of.items():
        together[tuple(values)].append(leaves[key])
    stand_ins: dict[int, list[torch.Tensor]] = {value: [] for value in roots}
    with torch.enable_grad(), engine.as_recorded(leaves.values()):
        for behind_of, group in together.items():
            cut.groups.append(_Group(behind_of, group))
            like = [roots[value].number for value in behind_of]
            made = _apply(_Leaves, cut, cut.groups[-1], like, *group)
            for value, stand_in in zip(behind_of, made, strict=True):
                stand_ins[value].append(stand_in)
        return {value: _apply(_HandedOut, root, *stand_ins[value]) for value, root in roots.items()}


def _tensors_in(given: Any, of_lazies: bool = True) -> Iterator[torch.Tensor]:
    """The tensors that are there among arguments, and those of lazies."""
    if type(given) is _core.LazyTensor:
        real = _core.real(given) if of_lazies else None
        if real is not None:
            yield real
    elif isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, tuple | list):
        for one in given:
            yield from _tensors_in(one, of_lazies)
    elif isinstance(given, dict):
        yield from _tensors_in(list(given.values()), of_lazies)


def _is_data(value: int) -> bool:
    """Whether a value is x.data, or a view of that."""
    view = _info(value).view
    while view is not None and not is_data(_core.node(view[0])[0]):
        view = _info(view[2]).view
    return view is not None


def _info(value: int) -> Info:
    return Info(*_core.value(value))


def _memory(number: torch.Tensor, info: Info) -> torch.Tensor | None:
    """The tensor that a number is a view of, where that is all of its memory."""
    base = number._base
    is_whole = base is not None and (base.shape, base.dtype) == (info.shape, info.dtype)
    return base if is_whole else None


def _taken(
    program: Program, value: int, whole: torch.Tensor, taken: dict[int, torch.Tensor]
) -> torch.Tensor:
    """A view, taken again of what was handed out: a write through either shows in both."""
    with torch.enable_grad():
        return views.take(program, value, whole, -1, True, taken)
