# SPDX-License-Identifier: Apache-2.0
"""Predict the memory of calls that must run on the whole batch, and refuse them if they do not fit.

For a derivative with a graph (`create_graph=True`) and the backward through that graph, the
recorded calls are run and differentiated on meta tensors, and the bytes alive at the worst moment
are counted. If that is impossible, since a shape depends on numbers or a transform of torch.func
calls the user's code, bytes are counted in the real run, which stops if they exceed what is left.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from koila import _core
from koila.basics import config, engine, lines, surroundings, table
from koila.basics.counting import Counter, TooMuchError
from koila.basics.table import Args, Func, Words
from koila.memory import budget, estimates, outside, storages
from koila.messages.errors import MemoryLimitError, let_go
from koila.messages.words import count
from koila.planning import limits, logs, planner, refusals
from koila.reductions import norms
from koila.reporting import reports
from koila.staged import meta
from koila.staged.facts import call_in_words
from koila.staged.program import Program

LazyTensor = _core.LazyTensor
#: If this many times the bytes needed are left, derivatives are not measured.
_PLENTY = 64
#: The bytes that differentiating a graph with create_graph=True takes for each byte of gradient:
#: the gradient is kept, so are the intermediate results of its formula, and both get gradients.
_TWICE = 4
#: The margin for kernels' buffers, which are not counted, and for what the loss makes of gradients.
_ABOVE = 1.1


class Derivative(NamedTuple):
    """What a call differentiates that makes all pending calls run whole."""

    outputs: Sequence[Any]
    inputs: Sequence[Any] | None  # with respect to these; None: to all leaves
    is_deep: bool  # the gradients have a graph, through which a backward will go


class Left(NamedTuple):
    """The bytes left for a call that runs whole and whose memory could not be predicted."""

    func: Func
    why: str  # the reason it runs whole
    n_bytes: float


def check(func: Func, why: str, of: Derivative | None = None) -> Left | None:
    """Check that all pending calls fit whole, with their backward, and log why they run whole.
    Called before they run for a call that needs their real graph.

    Return the bytes that are left, if those that the call needs are not known; None: it fits. Raise
    a MemoryLimitError if it needs more than is left. `of`: what it differentiates.
    """
    reports.give_reason(why)
    if planner.is_whole():
        return None
    program = _pending()
    if of is not None or program.unstageable is not None or program.has_body:
        logs.log_live(func, why)  # else nothing that runs whole has samples
    if config.get("chunks") is not None:
        return None
    decision = reports.Decision(f"for {reports.call_of(func)}, since {why}")
    needed = estimates.estimate(program, bool(program.roots)).whole
    graphs = _graphs(program, of)
    if of is not None and (of.is_deep or graphs):
        left = limits.allowed_for(program)
        if _PLENTY * (needed + outside.total(graphs)) > left:
            found = _of_derivative(program, of)
            needed = max(needed, found or 0.0)
            # An upper bound of the bytes of a derivative through graphs that exist already.
            through = _TWICE * outside.total(graphs) if of.is_deep else outside.peak(graphs)
            if found is None or (through > 0 and needed + through > left):
                return Left(func, why, check_whole(program, decision, needed))
            needed += through
    check_whole(program, decision, needed)
    return None


def check_whole(program: Program, decision: reports.Decision, needed: float) -> float:
    """Return the bytes that are left for a program that needs `needed` bytes and is to run whole,
    for the reasons of `decision`. Raise a MemoryLimitError if it does not fit."""
    has, is_enough = _left(program, needed)
    if is_enough:
        return has
    large = "".join(one.made("makes") for one in decision.whole[:1] if one.n_bytes > 0)
    what = f"autograd's graph ({lines.user_line()}) is"
    if program.n_nodes:
        first, others = next(iter(program.nodes.values())), program.n_nodes - 1
        what = call_in_words(first)
        what += f" and {count(others, 'other call')} run" if others else " runs"
    what = f"{what} on the whole batch: {decision.why}"
    raise refusals.too_large(program, what, needed, has, large)


def _left(program: Program, needed: float) -> tuple[float, bool]:
    """Return the bytes left for a program that runs whole, and whether they are enough."""
    if config.get("chunks") is not None:
        return math.inf, True
    left = limits.allowed_for(program, needed=needed) + budget.slack()
    if needed > left and storages.look_again(True):
        left = limits.allowed_for(program, needed=needed) + budget.slack()
    return left, needed <= left


def fits() -> bool:
    """Return whether all pending calls fit whole, with their backward."""
    program = _pending()
    return _left(program, estimates.estimate(program, bool(program.roots)).whole)[1]


def too_much(
    func: Func, why: str, needed: float, left: float, *, is_stopped: bool = False
) -> MemoryLimitError:
    """Return the error for a call on the whole batch that needs more bytes than are left. If it was
    stopped (`is_stopped`), it needs more than `needed`."""
    what = f"{reports.name_of(func)} ({lines.user_line()}) runs on the whole batch: {why}"
    return refusals.too_large(Program([]), what, needed, left, is_stopped=is_stopped)


def _pending() -> Program:
    """Return all pending calls as a program that is differentiated."""
    step = Program([])
    ends = step.ends() if torch.is_grad_enabled() else ()
    return Program(ends) if ends else step


def _graphs(program: Program, of: Derivative | None) -> list[Tensor]:
    """Return the real tensors with a graph that a derivative may go through: inputs of the program
    and tensors that are differentiated."""
    outputs = [] if of is None else [one for one in of.outputs if isinstance(one, Tensor)]
    reals = [_core.real(one) if type(one) is LazyTensor else one for one in outputs]
    return [
        one for one in (*program.entered, *reals) if one is not None and one.grad_fn is not None
    ]


def _of_derivative(program: Program, of: Derivative) -> float | None:
    """Predict the peak bytes of a derivative on meta tensors; None: the calls cannot be run on
    these. They include the pending calls and, if the derivative is deep, the backward through its
    own graph to all leaves."""
    try:
        with surroundings.making_calls(), Counter() as counter:
            _differentiate(_Trace(program), of)
    except Exception:  # any function of torch may raise any error on meta tensors
        return None
    found: float = _ABOVE * (counter.most + sum(map(_of_layers, program.nodes)))
    return found


def reached_by_gradients(
    program: Program, outputs: Sequence[int], name: Callable[[Any], int], names: Collection[int]
) -> dict[int, frozenset[int]] | None:
    """Find what the gradients of a program's leaves depend on, according to torch's graph of them:
    the calls are differentiated on meta tensors. None: they cannot be run on these.

    `name` returns the name, a number, of a leaf's real tensor. `names` are those to look for: of
    leaves, and of the gradients of outputs, which are -1, -2, … Return, by the name of a leaf,
    those that its gradient depends on.
    """
    try:
        with surroundings.making_calls():
            trace = _Trace(program)
            heads = [trace.env[value] for value in outputs]
            leaves = {v: leaf for v, leaf in trace.leaves.items() if leaf.requires_grad}
            starts = [torch.empty_like(one).requires_grad_() for one in heads]
            found = engine.gradients_of(heads, list(leaves.values()), starts, True)
    except Exception:  # any function of torch may raise any error on meta tensors
        return None
    named = {id(one): -1 - i for i, one in enumerate(starts)}
    named.update((id(leaf), name(program.info(v).real)) for v, leaf in leaves.items())
    wanted = {key: {one} for key, one in named.items() if one in names}
    reached: dict[Any, set[int]] = {}
    # A node has a higher sequence number than its next nodes, except those of leaves.
    nodes = list(engine.nodes_behind(one for one in found if one is not None))
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
    """Find the leaves that torch's graphs of values lead to: by value, the ids of their real
    tensors. None: the calls cannot be run on meta tensors.

    Those of the recorded calls would be too many: a recorded derivative may read values and weights
    to which it sends no gradient.
    """
    trace = _traced(program, values)
    if trace is None or any(trace.env[value] is None for value in values):
        return None
    named = {id(leaf): id(program.info(v).real) for v, leaf in trace.leaves.items()}
    ends = ((v, node) for v in values for node in engine.nodes_behind([trace.env[v]]))
    result: dict[int, set[int]] = {value: set() for value in values}
    for value, node in ends:
        if _is_of_leaf(node):
            result[value].add(named[id(node.variable)])
    return result


def gone_through(program: Program) -> set[int] | None:
    """Return the ids of the calls that torch's backward of a program reaches.

    A recorded derivative may read the result of a call and yet send no gradient to it, so the
    recorded program does not tell. None: the calls cannot be run on meta tensors.
    """
    calls_of: dict[Any, int] = {}
    trace = _traced(program, calls_of=calls_of)
    if trace is None:
        return None
    reached = set(engine.nodes_behind(trace.env[root] for root in program.roots))
    return {call for node, call in calls_of.items() if node in reached}


def _is_of_leaf(node: Any) -> bool:
    return type(node) is engine.ACCUMULATE_GRAD


def _of_layers(i: int) -> int:
    """Return the bytes that a recurrent layer saves and holds: its CPU kernels take more than its
    meta kernel shows. 0 for any other call."""
    _, row, *_, saves = _core.node(i)
    _, _, kept, _, fixed, workspace, back = saves
    return kept + fixed + workspace + back if table.is_stepwise(str(row)) else 0


def enter(program: Program, values: Iterable[int], env: list[Any]) -> dict[int, Tensor]:
    """Put meta tensors into `env` for values that calls read and do not make. Return them, by
    value: for one that needs a gradient, calls get a clone, which they may write."""
    leaves: dict[int, Tensor] = {}
    for value in values:
        info, maker = program.info(value), program.node_of(value)
        if maker is None or not maker.is_for_chunks:  # else the next call does its work when whole
            leaf = meta.stand_in(info.dtype, info.shape, info.strides, info.requires_grad)
            with torch.enable_grad():
                leaves[value], env[value] = leaf, leaf.clone() if info.requires_grad else leaf
    return leaves


def call_whole(_: int, func: Any, args: Args, kwargs: Words) -> Any:
    """Make a call as a whole run does."""
    return func(*norms.without_again(args), **kwargs)


class _Trace:
    """The calls of a program, run on meta tensors in their order, as a live run does. Values that
    are `wanted` are kept, beside those of the program and its roots. `calls_of` receives, by the
    autograd node of each result, the id of its call, and keeps all graphs alive."""

    def __init__(
        self, program: Program, wanted: Iterable[int] = (), calls_of: dict[Any, int] | None = None
    ) -> None:
        self.program = program
        self.env: list[Any] = [None] * program.n_values
        calls = [n for _, n in sorted(program.nodes.items()) if not n.is_for_chunks]
        reads = [[v for v in _core.node(n.id)[5] if v >= 0] for n in calls]
        made = {out for node in calls for out in node.outs}
        kept = {*program.wanted, *program.roots, *wanted}
        last = {value: i for i, node in enumerate(calls) for value in (*reads[i], *node.outs)}
        # Leaves are not counted: they exist already.
        with torch.utils._python_dispatch._disable_current_modes():
            entered = {v for some in reads for v in some} - made
            self.leaves = enter(program, entered, self.env)
        for i, node in enumerate(calls):
            _core.run_alone(node.id, self.env, -1, False, call_whole)
            if calls_of is not None:
                results = [self.env[out] for out in node.outs if self.env[out] is not None]
                calls_of.update((one.grad_fn, node.id) for one in results)
            for value in (*reads[i], *node.outs):
                if last[value] == i and value not in kept:
                    self.env[value] = None

    def value_of(self, given: Any) -> int | None:
        """Return the id of the value that a tensor of the user stands for in the program; None: it
        is none of the program's."""
        if type(given) is LazyTensor:
            value = _core.id(given)
            # A larger number is of a value that was recorded after the program.
            if value is not None and value < len(self.env):
                return value
            given = _core.real(given)
        if given is None:
            return None
        found = (v for v in self.leaves if self.program.info(v).real is given)
        return next(found, None)

    def of(self, given: Any, is_input: bool) -> Tensor | None:
        """Return the meta tensor of a tensor of the user; None: it has none. Of a leaf that is
        differentiated with respect to (`is_input`), return the leaf and not the clone of calls."""
        value = self.value_of(given)
        if value is None:
            return None
        made: Tensor | None = self.env[value]
        return self.leaves.get(value, made) if is_input else made


def _traced(program: Program, *args: Any, **words: Any) -> _Trace | None:
    """Run a program as a `_Trace` with these arguments; None: that is impossible."""
    try:
        with surroundings.making_calls():
            return _Trace(program, *args, **words)
    except Exception:  # any function of torch may raise any error on meta tensors
        return None


def _differentiate(trace: _Trace, of: Derivative) -> None:
    """Differentiate on meta tensors, and if the derivative is deep, run the backward after it."""
    leaves = [leaf for leaf in trace.leaves.values() if leaf.requires_grad]
    heads = [one for one in (trace.of(output, False) for output in of.outputs) if one is not None]
    by = leaves if of.inputs is None else [trace.of(one, True) for one in of.inputs]
    # An input outside the program is reached through leaves of the program that have a graph.
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
    """Return gradients of ones, expanded, so without memory of their size."""
    return [torch.ones((), dtype=one.dtype, device=one.device).expand(one.shape) for one in tensors]


@contextlib.contextmanager
def counting(left: Left) -> Iterator[Counter]:
    """Wrap a call on the whole batch, and stop it with a MemoryLimitError when it allocates more
    bytes than are `left`."""
    counter = Counter(left.n_bytes)
    try:
        with counter:
            yield counter
    except TooMuchError as error:
        let_go(error)
        words = left.func, left.why, counter.most, left.n_bytes
        raise too_much(*words, is_stopped=True) from None


def run(func: Func, args: Args, kwargs: Words, left: Left | None) -> Any:
    """Run a call on real tensors of the whole batch. Unless it is known that all fits (None), raise
    a MemoryLimitError if the call, or the backward through the graph of its result, needs more
    bytes than are `left`."""
    with counting(left) if left is not None else contextlib.nullcontext():
        made = _core.live(func, args, kwargs, True)
    outside.note_kept(_tensors(made))
    if left is not None:
        needed, has = outside.peak(_tensors(made)), limits.allowed_for(_pending())
        if needed > has:
            raise too_much(func, left.why, needed, has)
    return made


def _tensors(made: Any) -> Iterator[Tensor]:
    """Yield the tensors in the result of a call, without those of a functorch transform."""
    return itertools.filterfalse(
        torch._C._functorch.is_functorch_wrapped_tensor, meta.tensors(made)
    )


def transform(original: Func, args: Args, kwargs: Words, is_plain: bool) -> Any:
    """Run a transform of torch.func, which calls the user's function on the whole batch."""
    logs.log_live(original, _TRANSFORMS, leaves=True)
    reports.note_at_once(original, _TRANSFORMS)
    check(original, _TRANSFORMS)
    is_free = planner.is_whole() or config.get("chunks") is not None
    left = None if is_free else Left(original, _TRANSFORMS, limits.allowed_for(_pending()))
    return run(original, args, kwargs, left)


_TRANSFORMS = "a transform of torch.func runs on the whole batch"
