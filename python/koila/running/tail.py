# SPDX-License-Identifier: Apache-2.0
"""The joints after the last body, where their gradients do not depend on values: they are run on
stand-ins, so that the gradients of what the body leaves are known before it runs.

Whether that is so, the table of ops says: what each op keeps for its backward. torch is asked too:
it hands over each tensor that it keeps of the run on stand-ins. Where all of them were there before
the body, or are numbers of terms, which reductions say of their parts (`counts`), no value of the
body is in a gradient. Else, when the body has run, the joints run on what it really left, and are
differentiated as any others: the gradients that come out must be those that were sent. If not, the
table is wrong, and that is an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from koila import _core
from koila.basics import engine
from koila.basics.rows import cut, without_memory
from koila.messages.errors import KoilaError
from koila.reductions import calls, reduction
from koila.running.cross import Cross
from koila.running.watched import GATHERED, Key
from koila.staged.facts import REDUCE, Run
from koila.staged.program import Program

if TYPE_CHECKING:
    from koila.running.stages import Stages

#: How far gradients of the same calls may be apart, in units of the dtype's precision: kernels that
#: add in any order give other last bits.
_PRECISIONS = 256
_FAR = 0.1  # in any dtype, as a share of the largest


class _Kept:
    """What torch keeps, for backward, of a run on stand-ins: can any of it have come from them?"""

    def __init__(self, known: Callable[[], set[int]]) -> None:
        self.is_from_them = False
        self._known = known  # storages of what is there already

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """See a tensor that is kept, and keep it without its graph, of which it may be a result."""
        if not self.is_from_them:
            storage = tensor.untyped_storage()._cdata if tensor.layout == torch.strided else 0
            self.is_from_them = storage not in self._known()
        return tensor.detach()

    @contextlib.contextmanager
    def look(self) -> Iterator[None]:
        """A block whose graphs are seen."""
        with contextlib.ExitStack() as block:
            try:
                hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda tensor: tensor)
                block.enter_context(hooks)
            except RuntimeError:  # torch was told to call no such hooks
                self.is_from_them = True
            yield


def parts_of(run: Run, env: Sequence[Any]) -> dict[int, tuple[torch.Tensor, ...]]:
    """The parts that a segment left, and whether they require gradients, without their graphs."""
    parts = {value: env[value] for value in run.exports if isinstance(env[value], tuple)}
    return {
        value: tuple(part.detach().requires_grad_(part.requires_grad) for part in made)
        for value, made in parts.items()
    }


def seed(
    stages: Stages, runs: Sequence[Run], left: Mapping[int, Any], gradients: list[torch.Tensor]
) -> bool:
    """Give what the last body leaves its gradients, seen the values of its first chunk.

    The tail runs on zeros; only their sizes and types matter.

    Args:
        stages: the step.
        runs: the segments of the body.
        left: what the reductions of its first chunk left, by value.
        gradients: of the roots.

    Returns:
        Whether it is certain already that no value is in them.
    """
    program = stages.program
    stand_ins: dict[int, Cross] = {}
    leaves: list[tuple[Cross, Any, torch.Tensor]] = []
    parts = {i: (numbers, run) for run in runs for i, numbers in run.parts.items()}
    read = _read_by_tail(program)
    for value in filter(read.union(program.roots).__contains__, program.left_by(runs)):
        node = program.node_of(value)
        assert node is not None
        cross = Cross(program.info(value), program.needs_gradient(value), stages.fresh)
        if node.id in parts:
            early = stages.cross[value].parts
            numbers, run = parts[node.id]
            leaves += cross.zero_parts(numbers, left[value], stages.grid_of(run), early)
        else:
            leaves += cross.zero_whole(value in read)
        stand_ins[value] = cross
    with reduction.counting(_counts(program, stages, stand_ins)) as counts:
        kept = _Kept(lambda: _storages(stages, counts.values()))
        with kept.look():
            outputs = _run(stages, stand_ins, kept)
    inputs = [leaf for _, _, leaf in leaves if leaf.requires_grad]
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
    for cross, key, leaf in leaves:
        cross.seeds[key] = grads.get(id(leaf))
    for value, cross in stand_ins.items():
        stages.cross[value].seeds.update(cross.seeds)
    return not kept.is_from_them


def _tail(program: Program) -> Iterator[Run]:
    assert program.last_body is not None
    for run in program.runs:
        if not run.is_body and run.stage >= program.last_body:
            yield run


def _read_by_tail(program: Program) -> set[int]:
    """What the joints after the last body read."""
    read: set[int] = set()
    for run in _tail(program):
        read.update(program.imports[import_id].value for import_id in run.imports)
        read.update(node.first_out for node in run.combined)
    return read


def _counts(
    program: Program, stages: Stages, stand_ins: Mapping[int, Cross]
) -> Iterator[torch.Tensor]:
    """The parts of reductions that are numbers of terms: by sizes, or of labels that were there
    before the body."""
    for value, cross in stand_ins.items():
        node = program.node_of(value)
        if node is None or node.mode != REDUCE:
            continue
        by_sizes = calls.reduction_of(node).counts
        for chunk, parts in cross.parts.items():
            early = stages.cross[value].parts.get(chunk, {})
            yield from (t for part, t in parts.items() if part in by_sizes or part in early)


def _storages(stages: Stages, counts: Iterable[torch.Tensor]) -> set[int]:
    """The memory of what is there whole before the tail, and of numbers of terms."""
    there = (*(cross.whole for cross in stages.cross.values()), *counts)
    strided = (t for t in there if t is not None and t.layout == torch.strided)
    return {tensor.untyped_storage()._cdata for tensor in strided}


def _is_there(stages: Stages, value: int) -> bool:
    """Whether a value was made before the tail; of a reduction after it the labels may have been
    counted."""
    cross = stages.cross.get(value)
    return cross is not None and cross.is_there


def _run(stages: Stages, stand_ins: dict[int, Cross], kept: _Kept) -> list[torch.Tensor | None]:
    """Run the joints of the tail; the roots, None for one that is made before the tail.

    Only what gradients go through: all else in the tail is made from values of the body, so it is
    in no gradient, and stand-ins in their place may have no meaning.
    """
    program = stages.program
    made = dict(stand_ins)
    for run in _tail(program):
        part = program.gradient_part(run, made)
        for value in {program.imports[import_id].value for import_id in part.imports}:
            if not (value in made or _is_there(stages, value) or program.is_leaf(value)):
                info = program.info(value)
                made[value] = Cross(info, False, stages.fresh, stages.zeros(value, info.shape))
                kept.is_from_them = True  # it may be, and torch's word would not tell
        env = stages.run_nodes(part, 0, True, made)
        for value in [out for node in part.combined for out in node.outs] + part.exports:
            made[value] = Cross(program.info(value), False, stages.fresh, env[value], True)
    return [made[root].read_whole(True) if root in made else None for root in program.roots]


def check(stages: Stages, roots: dict[int, torch.Tensor]) -> None:
    """Raise where the gradients of what the last body left are others than were sent back.

    Called when the joints after the last body have been differentiated on its values.
    """
    for value, cross in stages.watched.items():
        assert cross.watch is not None
        found, grid = cross.watch.found, cross.watch.grid
        place = cross.info.place
        sent: dict[Key, torch.Tensor | None]
        if stages.program.node(_maker(stages, value)).mode == REDUCE:
            sent = cross.seeds
        else:
            sent = {("chunk", c): cross.seed(grid, c) for c in range(len(grid))}
            for whole in (found.pop(GATHERED, None), roots.get(value)):
                if whole is None or place is None:
                    continue
                for c, bounds in enumerate(grid):
                    part = cut(whole, place, grid[-1][1], bounds)
                    known = found.get(("chunk", c))
                    found["chunk", c] = part if known is None else known + part
        for key in {**sent, **found}:
            _compare(stages, value, found.get(key), sent.get(key))
    stages.watched.clear()


def _maker(stages: Stages, value: int) -> int:
    node = stages.program.node_of(value)
    assert node is not None
    return node.id


def _compare(
    stages: Stages, value: int, found: torch.Tensor | None, sent: torch.Tensor | None
) -> None:
    if found is None or sent is None:
        one = found if sent is None else sent
        if one is None:
            return
        found, sent = one, without_memory(one.shape, one.dtype, one.device)
    is_waited_for = found.device.type != "cpu"
    if found.numel() == 0 or (not is_waited_for and torch.equal(found, sent)):
        return
    share = min(_FAR, _PRECISIONS * torch.finfo(sent.dtype).eps)
    size = torch.where(sent.isfinite(), sent, 0).abs().amax()
    is_near = (found - sent).abs() <= share * size
    is_same = (is_near | (found == sent) | (found.isnan() & sent.isnan())).all()
    detail = _core.node(_maker(stages, value))
    text = (
        f"{detail[1] or getattr(detail[0], '__name__', 'a call')}: what follows it was taken to be "
        f"linear, and is not ({detail[3]}): a mistake in koila's table of what torch keeps for "
        "backward, please report it"
    )
    if is_waited_for:
        torch._assert_async(is_same, text)  # nothing waits for a device; no gradient leaves it
    elif not is_same:
        raise KoilaError(text)
