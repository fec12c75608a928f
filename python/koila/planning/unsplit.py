# SPDX-License-Identifier: Apache-2.0
"""What must run on the whole batch, predicted before it runs, and refused where it does not fit.

The bytes of a derivative that has a graph, and of the backward through it that follows, are found
by making the recorded calls on meta tensors: torch differentiates them there as it will, and what
is there at the worst moment is counted. Where meta tensors cannot (a shape depends on numbers), and
in a transform of torch.func, which calls the user's code, it is counted while it runs, and stopped
when there is more than is left.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from koila import _core
from koila.basics import config, engine, lines, surroundings, table
from koila.basics.counting import Counter, TooMuchError
from koila.memory import budget, estimates, outside, storages
from koila.messages.errors import MemoryLimitError, let_go
from koila.messages.words import count
from koila.planning import explain, limits, planner
from koila.reductions import norms
from koila.reporting import reports
from koila.staged import meta
from koila.staged.facts import name_of_node, where_of_node
from koila.staged.program import Program

LazyTensor = _core.LazyTensor
#: Of memory that is left so many times over, nobody asks what a derivative takes.
_PLENTY = 64
#: A gradient of a graph that was there before is kept, where that is differentiated with a graph,
#: with what its formula makes on the way; and it gets a gradient itself.
_TWICE = 4
#: Buffers of kernels that nobody counts, and what the loss makes of the gradients.
_ABOVE = 1.1


class Derivative(NamedTuple):
    """What is differentiated by a call that needs all that waits."""

    outputs: Sequence[Any]
    inputs: Sequence[Any] | None  # by what; None: by all leaves
    is_deep: bool  # the gradients have a graph, and are differentiated themselves


class Left(NamedTuple):
    """How much a call may make of which that is not known before, and why it runs whole."""

    func: Callable[..., Any]
    why: str
    n_bytes: float


def check(func: Callable[..., Any], why: str, of: Derivative | None = None) -> Left | None:
    """What waits is about to run whole, for a call that needs it with its graph: tell why, and see
    that it fits, with its backward.

    Args:
        func: the call.
        why: it cannot go by chunks.
        of: what it differentiates.

    Returns:
        What is left, where it is not known how much the call makes; None: it fits.

    Raises:
        MemoryLimitError: it takes more than is left.
    """
    explain.decide_whole(func, why)
    if planner.is_whole() or config.get("chunks") is not None:
        return None
    program = _waiting()
    decision = reports.Decision(f"for {reports.call_of(func)}, since {why}" if why else "")
    needed = estimates.estimate(program, bool(program.roots)).whole
    graphs = _graphs(program, of)
    if of is not None and (of.is_deep or graphs):
        left = limits.left_for(program)
        is_plenty = _PLENTY * (needed + outside.total(graphs)) <= left
        found = 0.0 if is_plenty else _of_derivative(program, of)
        needed = max(needed, found or 0.0)
        through = 0.0 if is_plenty else _through(graphs, of)
        if found is None or (through > 0 and needed + through > left):
            return Left(func, why, check_whole(program, decision, needed))
        needed += through
    check_whole(program, decision, needed)
    return None


def check_whole(program: Program, decision: reports.Decision, needed: float) -> float:
    """Refuse what runs whole, where it takes more than there is.

    Args:
        program: what is to run whole.
        decision: why it is not cut, and what makes most of it.
        needed: the bytes that it takes.

    Returns:
        How many bytes are left for it.

    Raises:
        MemoryLimitError: it does not fit.
    """
    if config.get("chunks") is not None:
        return math.inf

    def left() -> float:
        return limits.left_for(program, needed) + budget.slack()

    if needed <= left() or (storages.look_again(True) and needed <= left()):
        return left()
    large = "".join(one.made("makes") for one in decision.whole[:1] if one.n_bytes > 0)
    what = f"autograd's graph ({lines.user_line()}) is"
    if program.n_nodes:
        first, others = next(iter(program.nodes.values())), program.n_nodes - 1
        what = f"{name_of_node(first)} ({where_of_node(first)})"
        what += f" and {count(others, 'other call')} run" if others else " runs"
    what = f"{what} on the whole batch: {decision.why}"
    raise planner.too_large(program, what, needed, left(), large)


def check_known(func: Callable[..., Any], why: str, n_bytes: float) -> None:
    """As `check`, of a call that takes so many bytes, with its backward.

    Raises:
        MemoryLimitError: with what waits that is more than is left.
    """
    explain.decide_whole(func, why)
    if planner.is_whole() or config.get("chunks") is not None:
        return
    program = _waiting()
    decision = reports.Decision(f"for {reports.call_of(func)}, since {why}")
    waiting = estimates.estimate(program, bool(program.roots)).whole
    check_whole(program, decision, waiting + n_bytes)


def _too_much(func: Callable[..., Any], why: str, needed: float, left: float) -> MemoryLimitError:
    """What is raised of a call on the whole batch that made, or will make, more than was left."""
    what = f"{reports.name_of(func)} ({lines.user_line()}) runs on the whole batch: {why}"
    return planner.too_large(Program([]), what, needed, left)


def _waiting() -> Program:
    """All that waits, as a step that is differentiated."""
    step = Program([])
    ends = step.ends() if torch.is_grad_enabled() else ()
    return Program(ends) if ends else step


def _graphs(program: Program, of: Derivative | None) -> list[Tensor]:
    """Tensors that are there, and on a graph that a derivative may go through."""
    given = [] if of is None else [one for one in of.outputs if isinstance(one, Tensor)]
    reals = [_core.real(one) if type(one) is LazyTensor else one for one in given]
    return [
        one for one in (*program.entered, *reals) if one is not None and one.grad_fn is not None
    ]


def _through(graphs: Sequence[Tensor], of: Derivative) -> float:
    """Bytes of a derivative through graphs that are there, from above."""
    return _TWICE * outside.total(graphs) if of.is_deep else outside.peak(graphs)


def _of_derivative(program: Program, of: Derivative) -> float | None:
    """Bytes that a derivative takes at most: with the calls that wait and, where it is deep, the
    backward through its own graph to all leaves. None: meta tensors cannot tell."""
    try:
        with surroundings.making_calls(), Counter() as counter:
            _differentiate(_Trace(program), of)
    except Exception:  # of all of torch
        return None
    found: float = _ABOVE * (counter.most + sum(map(_of_layers, program.nodes)))
    return found


def reached_by_gradients(
    program: Program, outputs: Sequence[int], name: Callable[[Any], int], names: Collection[int]
) -> dict[int, frozenset[int]] | None:
    """What torch's graph of the gradients of a program's leaves leads to, by the leaf. None: meta
    tensors cannot tell.

    Args:
        program: the calls.
        outputs: the values that are differentiated.
        name: of a leaf.
        names: of what is looked for: of leaves, and of gradients of outputs, -1 for the first.
    """
    try:
        with surroundings.making_calls():
            trace = _Trace(program)
            heads = [trace.env[value] for value in outputs]
            leaves = {v: leaf for v, leaf in trace.leaves.items() if leaf.requires_grad}
            starts = [torch.empty_like(one).requires_grad_() for one in heads]
            found = engine.gradients_of(heads, list(leaves.values()), starts, True)
    except Exception:  # of all of torch
        return None
    named = {id(one): -1 - i for i, one in enumerate(starts)}
    named.update((id(leaf), name(program.info(v).real)) for v, leaf in leaves.items())
    wanted = {key: {one} for key, one in named.items() if one in names}
    reached: dict[Any, set[int]] = {}
    # A node was made after those that it leads to, but for those of leaves.
    nodes = list(outside.nodes([one for one in found if one is not None]))
    for node in sorted(nodes, key=lambda node: (not _is_of_leaf(node), node._sequence_nr())):
        following = [reached[one] for one, _ in node.next_functions if one is not None]
        own = wanted.get(id(node.variable), set()) if _is_of_leaf(node) else set()
        reached[node] = own.union(*following)
    result: dict[int, frozenset[int]] = {}
    for leaf, one in zip(leaves.values(), found, strict=True):
        if one is not None:
            behind = reached[one.grad_fn] if one.grad_fn else wanted.get(id(one), set())
            result[named[id(leaf)]] = result.get(named[id(leaf)], frozenset()).union(behind)
    return result


def leaves_behind(program: Program, values: Collection[int]) -> dict[int, set[int]] | None:
    """The leaves, by id, that torch's graphs of values lead to: a derivative is given calls' values
    and weights of which it need not be made. None: meta tensors cannot tell."""
    try:
        with surroundings.making_calls():
            trace = _Trace(program, values)
    except Exception:  # of all of torch
        return None
    if any(trace.env[value] is None for value in values):
        return None
    named = {id(leaf): id(program.info(v).real) for v, leaf in trace.leaves.items()}
    ends = ((v, node) for v in values for node in outside.nodes([trace.env[v]]))
    result: dict[int, set[int]] = {value: set() for value in values}
    for value, node in ends:
        if _is_of_leaf(node):
            result[value].add(named[id(node.variable)])
    return result


def gone_through(program: Program) -> set[int] | None:
    """The calls that torch's backward of a program comes to: a derivative is given what calls made
    that take no part in it. None: meta tensors cannot tell."""
    calls_of: dict[Any, int] = {}
    try:
        with surroundings.making_calls():
            trace = _Trace(program, calls_of=calls_of)
    except Exception:  # of all of torch
        return None
    reached = set(outside.nodes([trace.env[root] for root in program.roots]))
    return {call for node, call in calls_of.items() if node in reached}


def _is_of_leaf(node: Any) -> bool:
    return type(node) is engine.ACCUMULATE_GRAD


def _of_layers(i: int) -> int:
    """Bytes that a recurrent layer keeps and holds on the CPU, where its kernels go another way."""
    _, row, *_, saves = _core.node(i)
    _, _, kept, _, fixed, workspace, back = saves
    return kept + fixed + workspace + back if table.is_stepwise(str(row)) else 0


class _Trace:
    """The calls of a program, made on meta tensors in their order, as a live run makes them."""

    def __init__(
        self,
        program: Program,
        wanted: Iterable[int] = (),
        calls_of: dict[Any, int] | None = None,  # by their nodes, as they are made
    ) -> None:
        self.program = program
        self.leaves: dict[int, Tensor] = {}  # by value
        self.env: list[Any] = [None] * program.n_values
        calls = [n for _, n in sorted(program.nodes.items()) if not n.is_for_chunks]
        reads = [[v for v in _core.node(n.id)[5] if v >= 0] for n in calls]
        made = {out for node in calls for out in node.outs}
        kept = {*program.wanted, *program.roots, *wanted}
        last = {value: i for i, node in enumerate(calls) for value in (*reads[i], *node.outs)}
        with torch.utils._python_dispatch._disable_current_modes():  # leaves are there already
            for value in {v for some in reads for v in some} - made:
                self._enter(value)
        for i, node in enumerate(calls):
            _core.run_alone(node.id, self.env, -1, False, self._call)
            if calls_of is not None:  # which holds all graphs, with what they keep
                results = [self.env[out] for out in node.outs if self.env[out] is not None]
                calls_of.update((one.grad_fn, node.id) for one in results)
            for value in (*reads[i], *node.outs):
                if last[value] == i and value not in kept:
                    self.env[value] = None

    def _enter(self, value: int) -> None:
        info, maker = self.program.info(value), self.program.node_of(value)
        if maker is not None and maker.is_for_chunks:
            return  # whole it is torch's own call
        leaf = meta.stand_in(info.dtype, info.shape, info.strides, info.requires_grad)
        self.leaves[value] = leaf
        self.env[value] = leaf.clone() if info.requires_grad else leaf  # a leaf is not written

    @staticmethod
    def _call(_: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*norms.without_again(args), **kwargs)

    def value_of(self, given: Any) -> int | None:
        """The value that a tensor of the user's is in the program; None: it is not in it."""
        if type(given) is LazyTensor:
            value = _core.id(given)
            if value is not None and value < len(self.env):
                return value
            given = _core.real(given)
        found = (v for v in self.leaves if self.program.info(v).real is given)
        return next(found, None)

    def of(self, given: Any, is_input: bool) -> Tensor | None:
        """What stands for a tensor of the user's: as an input, what it entered as."""
        value = self.value_of(given)
        if value is None:
            return None
        made: Tensor | None = self.env[value]
        return self.leaves.get(value, made) if is_input else made


def _differentiate(trace: _Trace, of: Derivative) -> None:
    """Differentiate what stands for the user's tensors, and the gradients, as a step does it."""
    leaves = [leaf for leaf in trace.leaves.values() if leaf.requires_grad]
    heads = [one for one in (trace.of(output, False) for output in of.outputs) if one is not None]
    by = leaves if of.inputs is None else [trace.of(one, True) for one in of.inputs]
    # Through what is not in the program, a gradient comes to leaves of it that have a graph.
    ends = leaves if any(one is None for one in by) else [one for one in by if one is not None]
    rest = [trace.env[root] for root in trace.program.roots]
    trace.env.clear()
    if not heads or not ends:
        return
    found = engine.gradients_of(heads, ends, _ones(heads), of.is_deep)
    made = [one for one in found if one is not None and one.requires_grad]
    if of.is_deep and made:
        starts = [torch.ones_like(one) for one in made] + _ones(rest)
        engine.gradients_of([*made, *rest], leaves, starts)


def _ones(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of ones without memory to speak of."""
    return [torch.ones((), dtype=one.dtype, device=one.device).expand(one.shape) for one in tensors]


@contextlib.contextmanager
def counting(left: Left | None) -> Iterator[None]:
    """A block in which a call that runs whole is stopped, where it makes more than is left.

    None: it is known that it does not.

    Raises:
        MemoryLimitError: it was stopped.
    """
    if left is None:
        yield
        return
    counter = Counter(left.n_bytes)
    try:
        with counter:
            yield
    except TooMuchError as error:
        let_go(error)
        raise _too_much(left.func, left.why, counter.most, left.n_bytes) from None


def run(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], left: Left | None
) -> Any:
    """Make a call that runs whole on real tensors. Left: as of `counting`; the backward through the
    graph that it leaves must fit too."""
    with counting(left):
        made = _core.live(func, args, kwargs, True)
    outside.note_kept(_tensors(made))
    if left is not None:
        needed, has = outside.peak(_tensors(made)), limits.left_for(_waiting())
        if needed > has:
            raise _too_much(func, left.why, needed, has)
    return made


def _tensors(made: Any) -> Iterator[Tensor]:
    """The tensors in what a call returned."""
    if isinstance(made, Tensor):
        if not torch._C._functorch.is_functorch_wrapped_tensor(made):  # it is of a transform
            yield made
    elif isinstance(made, dict):
        yield from _tensors(list(made.values()))
    elif isinstance(made, tuple | list):
        for one in made:
            yield from _tensors(one)


def transform(
    original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], is_plain: bool
) -> Any:
    """A transform of torch.func, which calls the user's function on tensors of the whole batch."""
    check(original, _TRANSFORMS)
    is_free = planner.is_whole() or config.get("chunks") is not None
    left = None if is_free else Left(original, _TRANSFORMS, limits.left_for(_waiting()))
    return run(original, args, kwargs, left)


_TRANSFORMS = "a transform of torch.func runs on the whole batch"
