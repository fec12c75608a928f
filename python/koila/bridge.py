"""Where a call comes that cannot be recorded, the program is cut, and goes on behind it.

Such a call (a custom autograd function, compiled code, an op whose shape depends on numbers) wants
real tensors, on a real graph. They are given their numbers, which a run in chunks without a graph
has made, and the graph that they are on is one node: autograd's engine comes to it with the
gradients of all that was handed out there, and it runs what was recorded up to there in chunks,
forward and back. Its inputs are the parameters and the other tensors that the program began with,
so whoever walks the graph finds them, and each gets one gradient.

All that the user can reach is handed out at once: two cuts have no call in common, and none runs
oftener than once more forward than it would have. What has no call in common with the rest is on a
node of its own, that the engine passes by where it is sent no gradient.
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

from koila import (
    _core,
    draws,
    engine,
    explain,
    hooks,
    meta,
    overwritten,
    plan,
    replay,
    reports,
    steps,
    surroundings,
    unwritten,
    views,
)
from koila.errors import KoilaError
from koila.numbers import as_new
from koila.program import Info, Program

#: torch's own words.
_AGAIN = (
    "Trying to backward through the graph a second time (or directly access saved tensors after "
    "they have already been freed). Saved intermediate values of the graph are freed when you call "
    ".backward() or autograd.grad(). Specify retain_graph=True if you need to backward through the "
    "graph a second time or if you need to access saved tensors after calling backward."
)
_is_retained: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph


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


class _Copy(NamedTuple):
    """A tensor as it was at a version."""

    real: torch.Tensor
    version: int
    numbers: torch.Tensor


class _Cut:
    """What was recorded up to a cut, on a tape of its own."""

    def __init__(self) -> None:
        self.parts: list[weakref.ref[_Part]] = []  # they hold this
        self.early: dict[int, _Copy] = {}  # of buffers, which plain torch may write unseen
        self.originals: dict[int, torch.Tensor] = {}  # of copies that leaves were replaced by
        self.written: set[int] = set()  # these leaves
        self.uncounted: set[int] = set()  # those of them that were written through .data

    @property
    def roots(self) -> tuple[Any, ...]:
        """What stands for all that was handed out, and has still to go back; who asks holds it:
        parts are dropped at any time."""
        parts = (part() for part in self.parts)
        return tuple(root for part in parts if part is not None for root in part.roots)

    def copy_what_it_reads(
        self, tensors: Sequence[torch.Tensor | None], n_bytes: float = math.inf
    ) -> dict[int, _Copy]:
        """A call is made that may write these: leaves among them, by number, which are read again
        going back. None: buffers, if they are as small together."""
        copies: dict[int, _Copy] = {}
        roots = self.roots

        def copy() -> None:
            leaves = {leaf: _info(leaf).real for one in tensors for leaf in _core.leaves_of(one)}
            reals = {i: t for i, t in leaves.items() if t is not None and not t.is_inference()}
            if sum(real.nbytes for real in reals.values()) <= n_bytes:
                for leaf, real in reals.items():
                    copies[leaf] = _Copy(real, real._version, real.detach().clone())

        if roots:
            _core.held(roots[0], copy, (), {})
        return copies

    def keep_what_it_reads(self, copies: dict[int, _Copy]) -> None:
        """The call is over: leaves that it wrote stay what they were."""
        roots = self.roots if copies else ()
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

    def let_go(self, over: Sequence[Any]) -> None:
        """A part is over: what only it needed goes."""
        outputs, _ = self.__dict__.get("whole", ({}, {}))
        for root in over:
            outputs.pop(id(root), None)
        if len(self.roots) == len(over):  # no other has still to go back
            self.early = {}
            self.__dict__.pop("whole", None)

    @functools.cached_property
    def whole(self) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
        """What was handed out, on a graph of its own that nobody else goes through, of the whole
        batch; and what stands for the leaves there, as these may be on graphs that share leaves.
        By ids."""
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


class _Part:
    """What of it is made of one another: of two parts none is gone through for the other's sake."""

    def __init__(self, cut: _Cut, numbers: Iterable[Any], leaves: Sequence[torch.Tensor]) -> None:
        self.cut = cut
        self.numbers = tuple(numbers)
        self.leaves = leaves
        self.n_leaves = len(leaves)
        self.roots: tuple[Any, ...] = ()
        self.n_roots = len(self.numbers)
        #: What it handed out and x.data was taken of, by number: its memory, and what it was then.
        self.watched: dict[int, tuple[torch.Tensor, tuple[int, int]]] = {}
        cut.parts.append(weakref.ref(self))

    def is_inner(self, i: int) -> bool:
        """Whether what else was handed out was made of this: what comes through that is no part of
        the gradient of the tensor."""
        inner: bool = _core.held(self.roots[0], self._is_inner, (i,), {})
        return inner

    def _is_inner(self, i: int) -> bool:
        program = Program(list(self.roots), unwanted=self.cut.roots)
        value = program.roots[i]
        return any(
            program.imports[k].value == value
            for node in program.nodes.values()
            if any(program.info(out).requires_grad for out in node.outs)
            for k in node.imports
            if k >= 0
        )

    def go_back(self, gradients: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
        """Return the gradients of the leaves, given those of the outputs that were handed out.

        Where the engine passes no gradient at all, it only walks through all inputs of another
        node: no leaf gets a gradient, and the graph is not used up.
        """
        if all(gradient is None for gradient in gradients):
            return [None] * self.n_leaves
        self._check()
        if torch.is_grad_enabled():  # create_graph: they are to have a graph too
            twice: Sequence[torch.Tensor | None]
            twice = _apply(_Gradient, self, len(gradients), *gradients, *self.leaves)
            return twice
        is_retained = _is_retained()
        found = self.gradients_of(gradients, is_retained)
        if not is_retained:
            self.cut.let_go(self.roots)
            self.roots, self.leaves = (), ()
        return found

    def gradients_of(
        self, gradients: Sequence[torch.Tensor | None], is_retained: bool
    ) -> list[torch.Tensor | None]:
        """The same, without a graph."""
        pairs = zip(self.roots, gradients, strict=True)
        given = [(root, gradient) for root, gradient in pairs if gradient is not None]
        roots, sent = map(list, zip(*given, strict=True))
        if self.cut.written or self.watched:
            _core.held(roots[0], self._check_written, (roots,), {})
        found: Any = NotImplemented  # whole, where a mode sees each call
        if not surroundings.of_backward():
            found = replay.gradients_of(roots, sent, is_retained, self.cut.roots)
        if found is NotImplemented:
            with surroundings.outside():
                outputs, leaves = self._whole()
            found = self._differentiate(outputs, gradients, leaves)
            return [found.get(id(leaf)) for leaf in leaves]
        by_leaf: dict[int, torch.Tensor] = {}
        for leaf, gradient in found:
            key = id(self.cut.original(leaf))
            by_leaf[key] = by_leaf[key] + gradient if key in by_leaf else gradient
        return [by_leaf.get(id(leaf)) for leaf in self.leaves]

    def _check_written(self, roots: list[Any]) -> None:
        program = Program(roots, unwanted=self.cut.roots)
        moved = {
            _core.id(self.roots[i])
            for i, (memory, before) in self.watched.items()
            if meta.checksum(memory) != before
        }
        uncounted = self.cut.uncounted.union(value for value in moved if value is not None)
        overwritten.check_leaves(program, uncounted.union(self.cut.written), uncounted)

    def go_back_twice(
        self, gradients: Sequence[torch.Tensor | None], seconds: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """The gradients of `gradients` and of the leaves, from those of what `go_back` gave."""
        self._check()
        if torch.is_grad_enabled():
            raise KoilaError(
                "a gradient is differentiated a third time, through a program that was cut for a "
                "call that cannot be recorded; run it whole: koila.config(chunks=1)"
            )
        with surroundings.outside():
            outputs, leaves = self._whole()
        # Of tensors of their own: what the gradients were made of is gone through by others.
        given = [None if g is None else g.detach().requires_grad_() for g in gradients]
        with torch.enable_grad():
            first = self._differentiate(outputs, given, leaves, is_graph=True)
        inputs = [*given, *leaves]
        second = self._differentiate([first.get(id(leaf)) for leaf in leaves], seconds, inputs)
        return [second.get(id(one)) for one in inputs]

    def _check(self) -> None:
        if not self.roots:
            raise RuntimeError(_AGAIN)
        self.cut.keep_what_it_reads(self.cut.early)

    def _whole(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What was handed out of it on the whole batch, and what stands for its leaves there."""
        outputs, made = self.cut.whole
        return (
            [outputs[id(root)] for root in self.roots],
            [made.get(id(leaf), leaf) for leaf in self.leaves],
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
    """The gradients of a part, which can be differentiated."""

    @staticmethod
    def forward(ctx: Any, part: _Part, n: int, *tensors: torch.Tensor | None) -> tuple[Any, ...]:
        ctx.part = part
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors[:n])
        return tuple(part.gradients_of(tensors[:n], True))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        return None, None, *ctx.part.go_back_twice(ctx.saved_tensors, gradients)


_state = _State()


class _HandedOut(torch.autograd.Function):
    """The node that stands for the graph of a part."""

    runs_program = True

    @staticmethod
    def forward(ctx: Any, part: _Part, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.part = part
        ctx.set_materialize_grads(False)
        numbers, part.numbers = part.numbers, ()
        return tuple(map(as_new, numbers))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        return None, *ctx.part.go_back(gradients)


def runs_at_once(func: Callable[..., Any]) -> bool:
    """Whether a call must run where it stands, as code of the user's sees it there; that is told,
    and logged once."""
    why = surroundings.of_call()
    if why:
        reports.note_at_once(func, why)
        explain.log_at_once(func, why)
    return bool(why)


def _refuse_hook(node: Any, hook: Any) -> None:
    """A hook of the node that stands for the graph of a part."""
    raise KoilaError(
        f"{hook!r} cannot be registered on this grad_fn: the program was cut after the call that "
        "made the tensor, and the node stands for all calls before; register it on the tensor "
        "(Tensor.register_hook), or run it whole: koila.config(chunks=1)"
    )


for _name in ("register_hook", "register_prehook"):
    setattr(_HandedOut._backward_cls, _name, _refuse_hook)


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
    is_large = has_graph and not plan.is_whole() and _core.pending_bytes() >= _WORTH
    is_light = is_large and _core.won_whole() >= 0
    is_cut = not is_light and not plan.is_whole() and _cut(func)
    if is_light:
        reports.give_reason("its graph keeps no more than a part that reads its inputs again")
    elif has_graph and not is_cut:
        explain.decide_whole(func, surroundings.of_call())
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


def is_handed_out(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on the node of a part, which may go back without a gradient for it."""
    return isinstance(getattr(tensor.grad_fn, "part", None), _Part)


def whole_gradient_of(tensor: torch.Tensor) -> Any:
    """The lazy of a part whose gradient is that of a tensor; None: it is the tensor's own."""
    part: Any = getattr(tensor.grad_fn, "part", None)
    if not is_handed_out(tensor) or not part.roots or not part.is_inner(tensor.output_nr):
        return None
    return part.roots[tensor.output_nr]


def refuse_inner(tensors: Iterable[Any], what: str) -> None:
    """Raise where the gradient of one of these is asked for, and is in a part that was cut off."""
    for tensor in tensors:
        real = _core.real(tensor) if type(tensor) is _core.LazyTensor else tensor
        if isinstance(real, torch.Tensor) and whole_gradient_of(real) is not None:
            raise KoilaError(
                f"{what}: the program was cut after this value was made and used, for a call that "
                "cannot be recorded, and only a part of its gradient comes here; run it whole: "
                "koila.config(chunks=1)"
            )


def watch_handed_out(lazy: _core.LazyTensor) -> None:
    """The same of what a part handed out, or of a view of that: going back, a part would make again
    what eager's calls have kept, and find written."""
    value, tensor = _core.id(lazy), _core.real(lazy)
    if value is not None and tensor is None:
        tensor = _info(_info(value).base).real
    whole = tensor if tensor is None or tensor._base is None else tensor._base
    if whole is not None and is_handed_out(whole):
        part: Any = getattr(whole.grad_fn, "part")  # noqa: B009  torch's stubs do not know it
        part.watched.setdefault(whole.output_nr, (as_new(whole), meta.checksum(whole)))


def watch(tensor: torch.Tensor) -> None:
    """The memory of a tensor is handed out behind autograd's back: a write through that leaves no
    trace but the numbers."""
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
    draws.make_way()
    if not replay.read(False, func):
        return False
    reached = _core.reached()
    if reached is None:
        return False
    numbers = dict(reached[0])
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
    parts: list[_Part] = []
    handed: dict[int, torch.Tensor] = {}
    for values, leaves in _apart(roots, *reached[1:]):
        parts.append(_Part(cut, [roots[value] for value in values], leaves))
        hooks.leave_where_given(leaves)
        with torch.enable_grad(), engine.as_recorded(leaves):
            tensors = _apply(_HandedOut, parts[-1], *leaves)
        handed.update(zip(values, tensors, strict=True))
    others = {value: numbers[value] for value, whole in wholes.items() if whole not in roots}
    program = Program([]) if len(roots) + len(others) < len(wholes) else None
    for value, whole in wholes.items():
        if value not in handed and value not in others:
            assert program is not None
            others[value] = _taken(program, value, handed[whole])
    if any(others[value].requires_grad != _info(value).requires_grad for value in others):
        return False
    with steps.cutting():
        lazies = iter(_core.hand_out(list(handed.items()), list(others.items())))
    for part in parts:
        part.roots = tuple(itertools.islice(lazies, part.n_roots))
    n_bytes = sum(tensor.nbytes for tensor in handed.values())
    reports.note_handed_out(func, n_bytes)
    if parts:
        cut.early = cut.copy_what_it_reads([None], max(_SMALL, n_bytes // _SHARE))
        _state.cuts.add(cut)
    return True


def _apart(
    roots: Iterable[int], leaves: Sequence[tuple[int, torch.Tensor]], groups: Sequence[int]
) -> Iterator[tuple[list[int], list[torch.Tensor]]]:
    """Values that are made of one another, and the leaves that gradients of them go to. Autograd's
    engine goes on through all leaves of a node, also where no gradient comes: hooks there are
    called, and a graph that is used up raises."""
    values: dict[int, list[int]] = defaultdict(list)
    for value in roots:
        values[groups[value]].append(value)
    read: dict[int, dict[int, torch.Tensor]] = defaultdict(dict)
    for value, leaf in reversed(leaves):
        read[groups[value]].setdefault(id(leaf), leaf)
    for group, together in values.items():
        yield together, list(read[group].values())


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


def _info(value: int) -> Info:
    return Info(*_core.value(value))


def _memory(number: torch.Tensor, info: Info) -> torch.Tensor | None:
    """The tensor that a number is a view of, where that is all of its memory."""
    base = number._base
    is_whole = base is not None and (base.shape, base.dtype) == (info.shape, info.dtype)
    return base if is_whole else None


def _taken(program: Program, value: int, whole: torch.Tensor) -> torch.Tensor:
    """A view, taken again of what was handed out: a write through either shows in both."""
    with torch.enable_grad():
        return views.take(program, value, whole, -1, True)
