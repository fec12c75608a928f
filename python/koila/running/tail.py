# SPDX-License-Identifier: Apache-2.0
"""Differentiate the tail, the barriers after the last body, before that body has run.

This is possible if the gradients of the tail do not depend on values of the body: the tail runs on
stand-ins for the outputs of the body. With these gradients each chunk of the body goes forward and
back at once: one forward pass is enough.

The op table says whether a tail is linear: it knows what each op saves for backward. torch is asked
too: saved-tensor hooks see each tensor that the run on stand-ins saves. If all of these were there
before the body, or are numbers of terms (`counts` of a reduction), then no gradient depends on a
value of the body. If not, the tail runs once more on the real outputs of the body, and its
gradients must equal those that were sent. If they do not, the op table is wrong: that is an error.

The gradients of a tail that only combines reductions follow from a few numbers: the gradients of
the roots, and the numbers of terms. They are kept for the next step with the same numbers.
"""

from __future__ import annotations

import marshal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from koila import _core
from koila.basics import engine
from koila.basics.rows import cut, without_memory
from koila.messages.errors import KoilaError
from koila.reductions import calls, reduction
from koila.running.boundary import BoundaryValue, read_whole
from koila.running.watched import GATHERED, Key
from koila.staged.facts import REDUCE, Run
from koila.staged.program import Program
from koila.staged.schedule import Step

if TYPE_CHECKING:
    from koila.running.stages import Stages

#: The largest difference of two gradients of the same calls, in units of the dtype's precision:
#: kernels that add in no fixed order differ in the last bits.
_PRECISIONS = 256
_FAR = 0.1  # the largest difference in any dtype, as a share of the largest gradient


#: Numbers are kept for the next step if each tensor of them has at most so many.
_FEW = 64
_CONSTANTS = frozenset((bool, int, float, str, type(None)))

#: Values, with a key of their `BoundaryValue.seeds` and its gradient.
_Found = list[tuple[int, Key, "torch.Tensor | None"]]


class Sent:
    """The gradients that `seed` found last, of a tail that only combines reductions and calculates
    with constants. They are computed again if a number differs that they are computed from: the
    gradients of the roots, numbers of terms, constants. `runs` are the segments of the last
    body."""

    def __init__(self, program: Program, runs: Sequence[Run]) -> None:
        tail = list(_tail(program))
        made = {value for run in runs for value in run.parts}
        self.nodes = [program.node(i) for run in tail for i in (*run.combined, *run.nodes)]
        reduced = [program.node(i).first_out for run in tail for i in run.combined]
        self.is_closed = (
            not any(run.imports for run in tail)
            and made.issuperset(reduced)
            and all(calls.is_of_parts(program, value) for value in reduced)
            and all(map(program.row_of, self.nodes))
            and not any(n.is_random or n.writes or n.leaf_writes for n in self.nodes)
            and not program.is_derived
        )
        #: What the last gradients were computed from, these, and whether `seed` was certain; one
        #: tuple, since other threads run this program too.
        self.last: tuple[tuple[Any, ...] | None, _Found, bool] = None, [], False

    def computed_from(
        self, stages: Stages, runs: Sequence[Run], left: Mapping[int, Any]
    ) -> tuple[Any, ...] | None:
        """Return what the gradients are computed from in this step; None: too much, or not only
        numbers on the CPU."""
        if not self.is_closed or torch.is_anomaly_enabled():  # it raises if one is not finite
            return None
        terms = [*stages.gradients]
        for run in runs:
            for value, of_body in run.parts.items():
                for part in left[value] if stages.program.needs_gradient(value) else ():
                    if not part.requires_grad:
                        terms.append(part)
                for parts in stages.boundary[value].parts.values():
                    terms += map(parts.__getitem__, parts.keys() - of_body)
        for term in terms:
            is_plain = type(term) is torch.Tensor and term.layout is torch.strided
            if not is_plain or term.numel() > _FEW or term.device.type != "cpu":
                return None
        functions, words = [], []
        for node in self.nodes:
            func, args, kwargs = _core.call(node.id)
            if not _CONSTANTS.issuperset(map(type, (*args, *kwargs.values()))):
                return None
            functions.append(func)
            words.append((args, kwargs))
        # As bytes, numbers of several types, 0.0 and -0.0 differ. Version 2 knows no references.
        dtypes, lists = [], []
        for term in terms:
            dtypes.append(term.dtype)
            lists.append(term.tolist())
        numbers = marshal.dumps((lists, words), 2)
        return list(map(stages.grid_of, runs)), dtypes, functions, numbers

    def keep(self, of: tuple[Any, ...] | None, found: _Found, is_certain: bool) -> None:
        """Keep copies of gradients that were computed from `of`: some may be the caller's. Only
        those of partial results: a hook may write the gradient of a whole value."""
        if of is None:
            return
        own: _Found = []
        for value, key, gradient in found:
            if key[0] != "part" or (gradient is not None and gradient.numel() > _FEW):
                return
            own.append((value, key, None if gradient is None else gradient.clone()))
        self.last = of, own, is_certain


class _Kept:
    """Finds out whether a run on stand-ins saves for backward what was computed from them."""

    def __init__(self, others: Callable[[], set[int]]) -> None:
        self.is_from_them = False
        self._storages = others  # the storages of tensors that do not come from stand-ins

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Look at a saved tensor, and save it detached: an output's graph would refer to itself."""
        if not self.is_from_them:
            storage = tensor.untyped_storage()._cdata if tensor.layout == torch.strided else 0
            self.is_from_them = storage not in self._storages()
        return tensor.detach()


def parts_of(run: Run, env: Sequence[Any]) -> dict[int, tuple[torch.Tensor, ...]]:
    """Return the partials of reductions that a segment computed, detached, by value. They keep
    their `requires_grad`."""
    parts = {value: env[value] for value in run.exports if isinstance(env[value], tuple)}
    return {
        value: tuple(part.detach().requires_grad_(part.requires_grad) for part in made)
        for value, made in parts.items()
    }


def seed(
    stages: Stages, step: Step, left: Mapping[int, Any], gradients: list[torch.Tensor]
) -> bool:
    """Compute the gradients of the last body's outputs after its first chunk went forward, and make
    them the `seeds` of the outputs. The tail runs on zeros of the right sizes and dtypes. Return
    whether it is certain that no gradient depends on a value of the body. Otherwise `check` has to
    compare.

    Args:
        stages: the step.
        step: the instruction: the segments of the body, and the outputs to replace.
        left: outputs of its first chunk, by value; the partials of its reductions are among them.
        gradients: of the roots.
    """
    cache = stages.program.cache
    sent = cache.sent = cache.sent or Sent(stages.program, step.runs)
    of = sent.computed_from(stages, step.runs, left)
    before, found, is_certain = sent.last
    if of is None or of != before:
        found, is_certain = _differentiate(stages, step, left, gradients)
        sent.keep(of, found, is_certain)
    for value, key, gradient in found:
        stages.boundary[value].seeds[key] = gradient
    return is_certain


def _differentiate(
    stages: Stages, step: Step, left: Mapping[int, Any], gradients: list[torch.Tensor]
) -> tuple[_Found, bool]:
    """Run the tail on zeros and differentiate it; see `seed`."""
    program = stages.program
    stand_ins: dict[int, BoundaryValue] = {}
    leaves: list[tuple[int, Any, torch.Tensor]] = []
    parts = {value: (numbers, run) for run in step.runs for value, numbers in run.parts.items()}
    for value in (*step.values, *step.others):
        added = calls.added_by_maker(program, value)
        info, needs_gradient = program.info(value), program.needs_gradient(value)
        boundary = BoundaryValue(info, needs_gradient, stages.awaiting, added=added)
        if value in parts:
            early = stages.boundary[value].parts
            numbers, run = parts[value]
            made = boundary.zero_parts(numbers, left[value], stages.grid_of(run), early)
        else:
            made = boundary.zero_whole(value in step.values)
        leaves += ((value, key, leaf) for _, key, leaf in made)
        stand_ins[value] = boundary
    of_body = {value: numbers for value, (numbers, _) in parts.items()}
    with reduction.counting(_counts(program, stand_ins, of_body)) as counts:
        kept = _Kept(lambda: _storages(stages, counts.values()))
        with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda tensor: tensor):
            outputs = _run(stages, stand_ins, kept)
    inputs = [leaf for *_, leaf in leaves if leaf.requires_grad]
    pairs = [
        (output, gradient)
        for output, gradient in zip(outputs, gradients, strict=True)
        if output is not None and output.requires_grad
    ]
    found: Sequence[torch.Tensor | None] = ()
    if pairs and inputs:
        found = engine.gradients_of(
            [output for output, _ in pairs], inputs, [gradient for _, gradient in pairs]
        )
    grads = dict(zip(map(id, inputs), found, strict=bool(found)))
    return [(value, key, grads.get(id(leaf))) for value, key, leaf in leaves], not kept.is_from_them


def _tail(program: Program) -> Iterator[Run]:
    assert program.last_body is not None
    for run in program.runs:
        if not run.is_body and run.stage >= program.last_body:
            yield run


def _counts(
    program: Program, stand_ins: Mapping[int, BoundaryValue], of_body: Mapping[int, Sequence[int]]
) -> Iterator[torch.Tensor]:
    """Yield the partials of reductions that are numbers of terms: those that sizes determine, and
    those of labels that were counted before the body, which computes the partials `of_body`."""
    for value, boundary in stand_ins.items():
        node = program.node_of(value)
        if node is None or node.mode != REDUCE:
            continue
        by_sizes = calls.split_of(program, node).reduction.counts
        late = set(of_body[value]) - by_sizes
        for parts in boundary.parts.values():
            yield from (t for part, t in parts.items() if part not in late)


def _storages(stages: Stages, counts: Iterable[torch.Tensor]) -> set[int]:
    """Return the storages of whole values that were there before the tail, and of `counts`."""
    there = [*[boundary.whole for boundary in stages.boundary.values()], *counts]
    return {
        tensor.untyped_storage()._cdata
        for tensor in there
        if tensor is not None and tensor.layout == torch.strided
    }


def _run(
    stages: Stages, stand_ins: dict[int, BoundaryValue], kept: _Kept
) -> list[torch.Tensor | None]:
    """Run the barriers of the tail on stand-ins. Return the roots; None: made before the tail.

    Only the calls that gradients go through run: the tail's other calls read values of the body,
    and might raise on stand-ins.
    """
    program = stages.program
    made = dict(stand_ins)
    for run in _tail(program):
        part = program.gradient_part(run, made)
        for value in {program.imports[import_id].value for import_id in part.imports}:
            before = stages.boundary.get(value)  # that of a later reduction has only counts
            is_there = before is not None and before.is_there
            if not (value in made or is_there or program.is_leaf(value)):
                info = program.info(value)
                zeros = without_memory(info.shape, info.dtype, info.device)
                made[value] = BoundaryValue(info, False, stages.awaiting, zeros)
                kept.is_from_them = True  # zeros replace it too, which the hooks cannot tell
        env = stages.run_nodes(part, 0, True, made)
        for value in [out for i in part.combined for out in program.node(i).outs] + part.exports:
            made[value] = BoundaryValue(
                program.info(value), False, stages.awaiting, env[value], True
            )
    of_roots = map(made.get, program.roots)
    return [None if of is None else read_whole((of,), True)[0] for of in of_roots]


def check(stages: Stages, roots: dict[int, torch.Tensor]) -> None:
    """Raise if the gradients of the last body's outputs differ from those that were sent back. Call
    it after the tail was differentiated on the real outputs."""
    for value, boundary in stages.watched.items():
        assert boundary.watch is not None
        found, grid = boundary.watch.found, boundary.watch.grid
        place = boundary.info.place
        sent: dict[Key, torch.Tensor | None]
        if stages.program.makers[value].mode == REDUCE:
            sent = boundary.seeds
        else:
            sent = {("chunk", c): boundary.seed(grid, c) for c in range(len(grid))}
            for whole in (found.pop(GATHERED, None), roots.get(value)):
                if whole is None or place is None:
                    continue
                for c, bounds in enumerate(grid):
                    part = cut(whole, place, grid[-1][1], bounds)
                    grad_sent = found.get(("chunk", c))
                    found["chunk", c] = part if grad_sent is None else grad_sent + part
        for key in {**sent, **found}:
            _compare(stages, value, found.get(key), sent.get(key))
    stages.watched.clear()


def _compare(
    stages: Stages, value: int, found: torch.Tensor | None, sent: torch.Tensor | None
) -> None:
    """Raise if two gradients of a value differ by more than rounding; None stands for zeros."""
    if found is None or sent is None:
        one = found if sent is None else sent
        if one is None:
            return
        found, sent = one, without_memory(one.shape, one.dtype, one.device)
    is_asynchronous = found.device.type != "cpu"
    if found.numel() == 0 or (not is_asynchronous and torch.equal(found, sent)):
        return
    share = min(_FAR, _PRECISIONS * torch.finfo(sent.dtype).eps)
    size = torch.where(sent.isfinite(), sent, 0).abs().amax()
    is_near = (found - sent).abs() <= share * size
    is_same = (is_near | (found == sent) | (found.isnan() & sent.isnan())).all()
    detail = _core.node(stages.program.makers[value].id)
    text = (
        f"{detail[1] or getattr(detail[0], '__name__', 'a call')}: what follows it was taken to be "
        f"linear, and is not ({detail[3]}): a mistake in koila's table of what torch keeps for "
        "backward, please report it"
    )
    if is_asynchronous:
        torch._assert_async(is_same, text)  # does not wait for the device, and still raises
    elif not is_same:
        raise KoilaError(text)
