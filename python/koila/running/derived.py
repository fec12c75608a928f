# SPDX-License-Identifier: Apache-2.0
"""Record `torch.autograd.grad(..., create_graph=True)`: a gradient penalty, a derivative in a loss,
an energy's forces.

Where the calls between inputs and outputs are independent for each sample, the gradient of a sample
is a function of that sample and the weights. It is recorded as one call, `gradient_of`, that
autograd differentiates as any other.

On a chunk torch differentiates the graph from the inputs to the outputs, if all calls in between
ran together with this call, with a graph. Otherwise these calls run once more: where a value is
read without a graph, or where the calls are in several stages.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from koila import _core
from koila.basics import engine, surroundings
from koila.basics.enter import call_with_lazies
from koila.basics.rows import Place
from koila.messages.errors import KoilaError
from koila.planning import planner
from koila.staged import hooks, one_call
from koila.staged.facts import REDUCE, ROWS, Node, call_in_words, name_of_call
from koila.staged.program import Program

LazyTensor = _core.LazyTensor
#: By the number that a recorded call has as an argument; the tape of the call keeps them alive.
_recipes: weakref.WeakValueDictionary[int, Recipe] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


class Recipe:
    """The recorded calls between inputs and outputs, as numbers of nodes and values of the tape."""

    def __init__(
        self,
        nodes: Sequence[Node],
        inputs: Sequence[int],
        outputs: Sequence[int],
        read: Sequence[int],
        place: Place,
    ) -> None:
        self.nodes = [node.id for node in nodes]
        self.n_values = nodes[-1].outs.stop  # values are numbered in the order they are made
        self.inputs = inputs
        self.outputs = outputs
        self.read = read  # values that the calls read and none of them makes
        self.place = place  # where the first input has its rows

    def run(
        self,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        gradients: Sequence[Tensor],
        read: Sequence[Tensor],
    ) -> tuple[Tensor, ...]:
        """Return the gradients of `inputs`, with a graph if gradients are enabled."""
        is_graph = torch.is_grad_enabled()
        is_there = _state.beside is None or _state.beside.issuperset(self.nodes)
        heads: Sequence[Tensor] = inputs
        # Hooks that exist now came after the derivative was recorded: it must not call them.
        is_hooked = hooks.is_any() or any(map(_is_hooked, (*inputs, *outputs)))
        has_graph = is_graph and all(one.requires_grad for one in (*inputs, *outputs))
        if not (has_graph and is_there) or is_hooked:
            heads, outputs = self.run_again(inputs, read)
        found = engine.gradients_of(outputs, heads, gradients, is_graph)
        return tuple(one for one in found if one is not None)

    def run_again(
        self, inputs: Sequence[Tensor], read: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Run the calls once more with a graph. Return its inputs and outputs."""
        _, dim, outer, inner = self.place
        n_rows = inputs[0].shape[dim] // (outer * inner)
        with torch.enable_grad(), beside(self.nodes):
            heads = [
                one.view_as(one) if one.requires_grad else one.detach().requires_grad_()
                for one in inputs
            ]
            env: list[Any] = [None] * self.n_values
            given = zip((*self.read, *self.inputs), (*read, *heads), strict=True)
            for value, tensor in given:
                env[value] = tensor
            for i in self.nodes:
                _core.run_alone(i, env, n_rows, False, one_call.make)
            return heads, [env[value] for value in self.outputs]


class _State(threading.local):
    """The calls that run on one graph now; None: all calls."""

    def __init__(self) -> None:
        self.beside: frozenset[int] | None = None


_state = _State()


@contextlib.contextmanager
def beside(nodes: Iterable[int]) -> Iterator[None]:
    """Declare for a block that these calls, and no others, run on one graph."""
    before, _state.beside = _state.beside, frozenset(nodes)
    try:
        yield
    finally:
        _state.beside = before


def gradient_of(
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor],
    read: Sequence[Tensor],
    recipe: int,
    n_kept: int,
    n_alone: int,
) -> tuple[Tensor, ...]:
    """Return the gradients of the inputs, which can be differentiated again.

    Args:
        inputs: the tensors to differentiate by.
        outputs: the tensors to differentiate.
        gradients: of the outputs.
        read: all other values that the calls in between read.
        recipe: the number of the `Recipe` of these calls.
        n_kept: bytes, for all samples, that autograd saves for the backward of this call, without
            what it saves of the calls in between.
        n_alone: bytes, for all samples, that this call takes if it runs the calls once more.
    """
    return _recipes[recipe].run(inputs, outputs, gradients, read)


class _Found(NamedTuple):
    """The calls between inputs and outputs."""

    nodes: list[Node]
    read: dict[int, Place | None]  # other values that they read, and the place of the rows


def record(
    outputs: Sequence[Any], inputs: Sequence[Any], gradients: Sequence[Any]
) -> tuple[Tensor, ...] | str:
    """Record the gradients of `inputs` as a call, given those of the outputs; None stands for 1.
    Return a text if they cannot be recorded and have to be computed now: why."""
    if planner.is_whole() or not torch.is_grad_enabled():
        return "nothing goes by samples here"
    if hooks.is_any():
        return _HOOKED
    if seen := surroundings.of_call() or surroundings.of_backward():
        return seen
    if torch.is_autocast_enabled("cpu"):
        return "autocast is on, and after its block autograd.grad goes by samples"
    if any(type(one) is not LazyTensor for one in inputs):
        return "it is differentiated by weights, or by what is not lazy"
    are_lazy = all(type(one) is LazyTensor for one in outputs)
    if not are_lazy or not all(one.requires_grad for one in (*outputs, *inputs)):
        return "not all of it is lazy and requires a gradient"
    if not all(map(_core.is_pending_here, outputs)) or len(gradients) != len(outputs):
        return "what is differentiated was computed before"
    program = Program(list(outputs))
    ids = [one for one in map(_core.id, inputs) if one is not None]
    places = [program.info(one).place for one in ids]
    if any(map(_has_hooks, map(_core.real, inputs))):
        return _HOOKED
    if len(ids) < len(inputs) or None in places or places[0] is None:
        return "an input has no samples"
    ends = [_end(program, *pair) for pair in zip(outputs, gradients, strict=True)]
    if why := next((one for one in ends if isinstance(one, str)), ""):
        return why
    pairs = [one for one in ends if not isinstance(one, str)]
    found = _between(program, ids, [value for value, _ in pairs], places[0][0])
    if isinstance(found, str):
        return found
    if program.has_writes and (write := _find_write_between(program, found, ids, pairs)):
        return _why_not(write)
    read = {value: _given(program, value, at, inputs[0]) for value, at in found.read.items()}
    if any(one is None for one in read.values()):
        return _OTHERS
    recipe = Recipe(found.nodes, ids, [value for value, _ in pairs], list(read), places[0])
    n_bytes = _try(program, recipe, found)
    if n_bytes is None:
        return "some gradient has no graph, or torch has no derivative of it"
    number = next(_numbers)
    _recipes[number] = recipe
    _core.notes().setdefault("recipes", []).append(recipe)
    n_rows = program.info(ids[0]).rows
    ends_of = tuple(map(_core.lazy_of, recipe.outputs)), tuple(gradient for _, gradient in pairs)
    given = tuple(inputs), *ends_of, tuple(read.values())
    lazies = (*inputs, *ends_of[0])
    made = call_with_lazies(gradient_of, lazies, *given, number, *(n_rows * one for one in n_bytes))
    return (made,) if type(made) is LazyTensor else tuple(made)


#: Reasons why a gradient is computed at once, where no single call is the reason.
_HOOKED = "a hook is called when a gradient is made, or a gradient is retained"
_OTHERS = "a tensor is read by samples in another dim or for other samples"


def _why_not(node: Node) -> str:
    """Return why a call cannot be differentiated sample by sample."""
    call = call_in_words(node)
    if node.is_random:
        return f"{call} draws random numbers"
    if node.region:
        return f"{call} runs in a checkpoint"
    if name_of_call(node.id).endswith("_"):
        return f"{call} writes in place, and without that (inplace=False) it goes by samples"
    return f"{call} has to do with other samples"


def _is_hooked(real: Tensor) -> bool:
    return bool(real._backward_hooks) or (real.retains_grad and not real.is_leaf)


def _has_hooks(real: Tensor | None) -> bool:
    """Return whether a gradient of an input may call hooks. Those of a graph behind it cannot be
    seen."""
    return real is not None and (not real.is_leaf or bool(real._backward_hooks))


def _end(program: Program, output: Any, gradient: Any) -> tuple[int, Any] | str:
    """Return the value with samples at which differentiating starts, and its gradient.

    For a sum or mean over all samples that is the input of the reduction. Return a text if the
    gradient cannot start there: why.
    """
    value = _core.id(output)
    assert value is not None
    info, node = program.info(value), program.node_of(value)
    if info.place is not None:
        is_plain = isinstance(gradient, Tensor) and gradient.shape == info.shape
        if is_plain and type(gradient) is not LazyTensor:
            gradient = _core.like(gradient, output)
        elif not is_plain or gradient.requires_grad:
            return "grad_outputs is of another shape, or requires a gradient"
        at = _core.id(gradient)
        is_fit = at is None or _core.value(at)[3] == info.place
        return (value, gradient) if is_fit else "grad_outputs is of other samples"
    if node is None or node.mode != REDUCE or info.shape:
        return "it starts from what is no sum() or mean() of the batch"
    if gradient is not None:
        return "a sum or mean is given grad_outputs, and without them it goes by samples"
    name, terms = program.row_of(node), program.imports[node.imports[0]].value
    of = program.info(terms)
    # Ops by name: nansum() is split as sum() is, but has another gradient.
    if name not in ("sum", "mean") or of.place is None or of.dtype != info.dtype:
        start = call_in_words(node)
        return f"it starts from {start}, and only a sum() or mean() of samples goes by samples"
    ones = torch.ones((), dtype=of.dtype, device=of.device).expand(of.shape)
    each: Any = _core.like(ones, _core.lazy_of(terms))
    if name == "mean":
        each = each / math.prod(of.shape)  # as in eager: it is dense, and so is what it leads to
    return terms, each


def _between(
    program: Program, inputs: Sequence[int], outputs: Sequence[int], axis: int
) -> _Found | str:
    """Return the calls that gradients go through from outputs to inputs; or a text: why not all of
    them go sample by sample along this axis."""
    reached, made, needed = set(inputs), set[int](), set(outputs)
    nodes = []
    for _, node in sorted(program.nodes.items()):
        outs = [out for out in node.outs if program.info(out).requires_grad]
        if outs and not reached.isdisjoint(program.reads(node)):
            reached.update(outs)
            nodes.append(node)
    found = []
    for node in reversed(nodes):
        if needed.isdisjoint(node.outs):
            continue
        is_other = node.mode != ROWS or node.axis != axis or node.is_random or node.region
        if is_other or node.leaf_writes:
            return _why_not(node)
        found.append(node)
        made.update(node.outs)
        needed.update(program.reads(node))
    if not needed.issuperset(inputs) or not made.issuperset(outputs):
        return "not all that is differentiated is made of all inputs"
    read: dict[int, Place | None] = {}
    for node in found:
        for one in (program.imports[k] for k in node.imports if k >= 0):
            if one.value in made or one.value in inputs:
                if one.is_range or one.place != program.info(one.value).place:
                    return _OTHERS  # a sample reads values of other samples
                continue
            if one.is_range or read.setdefault(one.value, one.place) != one.place:
                return _OTHERS
    return _Found(found[::-1], read)


def _find_write_between(
    program: Program, found: _Found, inputs: Sequence[int], ends: Sequence[tuple[int, Any]]
) -> Node | None:
    """Return a call that writes what the calls in `found` make or read, if they cannot be
    differentiated, or run once more, beside it; None if there is no such call.

    They can beside a write by one of them to the result of another, as by `nn.ReLU(inplace=True)`,
    if that write alone reads it and it has no views; and after a write that came before all of
    them.
    """
    made = {out for node in found.nodes for out in node.outs}
    own = {node.id: program.imports[node.imports[0]].value for node in found.nodes if node.writes}
    n_readers: dict[int, int] = {}
    by_storage: dict[int, set[int]] = {}
    for value in (
        *inputs,
        *found.read,
        *(out for node in program.nodes.values() for out in node.outs),
    ):
        by_storage.setdefault(program.info(value).storage, set()).add(value)
    for node in program.nodes.values():
        for value in set(program.reads(node)):
            n_readers[value] = n_readers.get(value, 0) + 1
    overwritten = made.intersection(own.values()).difference(value for value, _ in ends)
    is_free = {value for value in overwritten.difference(inputs) if n_readers[value] == 1}
    for write in (node for node in program.nodes.values() if node.writes):
        values = by_storage[program.info(write.first_out).storage]
        before = {value for value in values if value < write.first_out}
        if write.id in own:
            if write.writes != 1 or not before <= is_free:
                return write
        elif not before.isdisjoint(made.union(inputs, found.read)):
            return write
    return None


def _given(program: Program, value: int, place: Place | None, like: Any) -> Any:
    """Return a tensor to pass for a value that is read by the rows of this place; None: there is
    none."""
    info = program.info(value)
    if info.place == place:
        return info.real if place is None and info.real is not None else _core.lazy_of(value)
    if info.place is not None or info.real is None:
        return None
    like_id = _core.id(like)
    if like_id is not None and program.info(like_id).place == place:
        return _core.like(info.real, like)
    outs = (out for node in program.nodes.values() for out in node.outs)
    other = next((out for out in outs if program.info(out).place == place), None)
    return None if other is None else _core.like(info.real, _core.lazy_of(other))


def _try(program: Program, recipe: Recipe, found: _Found) -> tuple[int, int] | None:
    """Differentiate one sample of stand-ins, to measure what autograd saves of it.

    Return `n_kept` and `n_alone` of `gradient_of` for one sample. Return None if torch cannot
    differentiate the calls, or if a gradient has no graph.
    """
    saved: dict[int, int] = {}

    def stand_in(value: int, place: Place | None) -> Tensor:
        info = program.info(value)
        if info.real is not None and place is None:
            return info.real
        made = one_call.stand_in(value, place, 1)
        return made.requires_grad_(info.requires_grad)

    boxes: list[list[Tensor]] = []  # emptied afterwards: a node's own output would keep the node

    def pack(tensor: Tensor) -> list[Tensor]:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        boxes.append([tensor])
        return boxes[-1]

    read = [stand_in(value, place) for value, place in found.read.items()]
    inputs = [stand_in(value, program.info(value).place) for value in recipe.inputs]
    hooks_of = torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box[0])
    try:
        with surroundings.outside(), hooks_of:
            heads, outputs = recipe.run_again(inputs, read)
            before = set(saved)
            gradients = [torch.ones_like(one) for one in outputs]
            made = engine.gradients_of(outputs, heads, gradients, True)
    except KoilaError:
        raise  # koila's own error, which says nothing about torch's derivative
    except (RuntimeError, IndexError):
        return None
    finally:
        for box in boxes:
            box.clear()
    if not all(one is not None and one.requires_grad for one in made):
        return None
    weights = [one for one, at in zip(read, found.read.values(), strict=True) if at is None]
    for one in weights:
        saved.pop(one.untyped_storage().data_ptr(), None)
    is_one_part = len({node.stage for node in found.nodes}) == 1
    n_kept = sum(n for key, n in saved.items() if not is_one_part or key not in before)
    return n_kept, sum(saved.values())
