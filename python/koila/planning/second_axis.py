# SPDX-License-Identifier: Apache-2.0
"""Run the last segment of a chunk in pieces of a second axis, such as the positions of a text.

The scores of a model and their loss may need more memory than everything else, even for one row. So
their calls are recorded again, on a tape of their own, with the activations that they read as a
batch along another dim. That program is staged and run like any other, in the planned number of
pieces. Calls that do not run along the second axis run on whole values, so the numbers are the same
whatever the calls are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from koila import _core
from koila.basics import config
from koila.basics.rows import chunk_shape, cut, widen_gradient, without_memory
from koila.basics.table import Args, Func, Words
from koila.memory import estimates
from koila.reductions import calls
from koila.reporting import reports
from koila.staged.facts import Job, Run, name_of_call
from koila.staged.program import Program

#: A piece may need its share of the bytes of the whole segment times _MORE, and _FEW_BYTES. If it
#: needs more, the second axis is no use: some calls run once on all of it.
_MORE = 1.25
_FEW_BYTES = 2**16
_WHOLE = -1  # instead of a dim: a lazy tensor without rows, which every piece reads whole


class Recorded(NamedTuple):
    """The calls of a segment on one chunk, recorded on a tape of their own."""

    tape: object
    left: dict[int, Any]  # by exported value: a lazy tensor, or a tuple of them for partials

    def shapes(self) -> dict[int, Any]:
        """Return the results for the tail: numbers only of those without a gradient; for the others
        zeros of their shape, without memory."""
        return {value: _each(_sized, of) for value, of in self.left.items()}

    def numbers(self) -> dict[int, Any]:
        """Compute and return the results, detached."""
        return {value: _each(_number, of) for value, of in self.left.items()}


def can_run(program: Program, run: Run) -> bool:
    """Tell whether the calls of a segment may be recorded again.

    They must not draw random numbers or write in place, and not read the lengths of packed
    sequences, which do not exist while `find` records them on stand-ins.
    """
    nodes = list(map(program.node, run.nodes))
    if any(node.is_random or node.writes or node.leaf_writes for node in nodes):
        return False
    return not any(name_of_call(node.id).startswith("packed_") for node in nodes)


def _along(program: Program, run: Run, imports: Sequence[Any], dim: int) -> Iterator[int]:
    """Yield the imports with rows whose shape, up to dim `dim`, is that of the largest activation
    that the segment reads: they become batches along that dim. Whether calls do run along it is
    decided by the rules of the op table, so a wrong guess costs memory, not correctness."""
    largest = _largest(program, run, imports)
    for import_id in run.imports:
        _, place, is_range = program.imports[import_id]
        if place is not None and not is_range:
            shape = imports[import_id].shape
            if len(shape) > dim and shape[: dim + 1] == largest.shape[: dim + 1]:
                yield import_id


def _largest(program: Program, run: Run, imports: Sequence[Any]) -> torch.Tensor:
    """Return the largest activation that a segment reads from the segments before it."""
    tensors: Iterator[torch.Tensor] = (imports[i] for i in activations_of(program, run))
    return max(tensors, key=torch.Tensor.numel)


def activations_of(program: Program, run: Run) -> Iterator[int]:
    """Yield the imports with rows that the segments before made: activations, no inputs."""
    for import_id in run.imports:
        value, place, is_range = program.imports[import_id]
        if place is not None and not is_range and not program.is_leaf(value):
            yield import_id


def record(
    program: Program, run: Run, imports: Sequence[Any], rows: int, start: int, dim: int
) -> Recorded:
    """Record the calls of a segment on the chunk of `rows` rows from `start` on, along a second
    axis: dim `dim` in the largest activation that the segment reads. `imports` are tensors, by
    number of the import."""
    tape = _core.new_tape()
    given = list(imports)
    axis, along = _core.new_axis(), set(_along(program, run, imports, dim))
    for import_id in run.imports:
        if program.imports[import_id].place is not None:
            tensor, at = imports[import_id], dim if import_id in along else _WHOLE
            n = tensor.shape[dim] if import_id in along else 0
            given[import_id] = _core.input(tensor, at, axis, n)

    def run_other(i: int, func: Func, args: Args, kwargs: Words) -> Any:
        node = program.node(i)
        if node.first_out in run.parts:
            split = calls.split_of(program, node)
            words = run.parts[node.first_out], split.make(func, args, kwargs, start=start)
            return _core.held(tape, split.reduction.partials, words, {})
        return _core.held(tape, func, args, kwargs)

    def cut_import(tensor: torch.Tensor, import_id: int) -> torch.Tensor:
        place = program.imports[import_id].place
        assert place is not None
        n_rows = tensor.shape[place[1]] // (place[2] * place[3])
        words = tensor, place, n_rows, (start, start + rows)
        return _core.held(tape, cut, words, {})

    env: list[Any] = [None] * program.n_values
    job = Job(is_grad_off=False, run_other=run_other, cut=cut_import, cloned=set(), aside=tape)
    _core.run(program.handle, run.index, env, given, rows, job)
    return Recorded(tape, {value: env[value] for value in run.exports})


def send_back(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], n_pieces: int) -> None:
    """Run a recorded segment forward and backward in pieces, to the leaves that it reads. `pairs`
    are its results, each with its gradient."""
    if pairs:
        outputs, seeds = zip(*pairs, strict=True)
        with reports.aside(), config.config(chunks=n_pieces, memory_limit=None):
            torch.autograd.backward(outputs, seeds)


class Found(NamedTuple):
    """A second axis of a segment, and the bytes that the segment needs along it, for one row."""

    dim: int  # in the largest activation that the segment reads
    n: int  # entries of a row along it
    estimate: estimates.Estimate
    gradients: int  # bytes of the gradients of its inputs, which do not shrink with the pieces

    def is_in(self, n_pieces: int) -> bool:
        """Tell whether pieces of this number need about their share of the segment's memory."""
        share = min(1.0, 1 / n_pieces + 1 / self.n)
        by_parts = max(0.0, self.estimate.whole - self.gradients)
        asked = 2 * self.gradients + _MORE * share * by_parts + _FEW_BYTES
        return self.n >= n_pieces and self._needs(n_pieces) <= asked

    def _needs(self, n_pieces: int) -> float:
        return self.estimate.peak(-(-self.n // n_pieces))[0]


def find(program: Program, run: Run) -> Found | None:
    """Return the second axis along which a segment needs the least memory; None: there is none."""
    if not any(activations_of(program, run)) or not can_run(program, run):
        return None
    imports: list[Any] = [None] * program.n_imports
    for import_id in run.imports:
        imports[import_id] = _stand_in(program, import_id)
    sizes = enumerate(_largest(program, run, imports).shape)
    tried = (_try(program, run, imports, dim, n) for dim, n in sizes if n > 1)
    found = [one for one in tried if one is not None]
    return min(found, key=lambda one: one.estimate.least[1], default=None)


def _try(program: Program, run: Run, imports: Sequence[Any], dim: int, n: int) -> Found | None:
    """Record a segment along dim `dim`, measure it, and forget it; None if it has no chunks so."""
    recorded = record(program, run, imports, 1, 0, dim)
    lazies = [one for of in recorded.left.values() for one in (of if type(of) is tuple else (of,))]
    roots = [one for one in lazies if type(one) is _core.LazyTensor and one.requires_grad]

    def measure() -> Found | None:
        inner = Program(roots)
        if not inner.n_nodes or not inner.has_body or inner.unstageable is not None:
            return None
        gradients = sum(tensor.nbytes for tensor in inner.entered if tensor.requires_grad)
        return Found(dim, n, estimates.estimate(inner, True), gradients)

    try:
        return _core.held(recorded.tape, measure, (), {}) if roots else None
    finally:
        _core.held(recorded.tape, _core.forget, (), {})


def _stand_in(program: Program, import_id: int) -> torch.Tensor:
    """Return zeros, without memory, of the shape of an import on a chunk of one row."""
    value, place, _ = program.imports[import_id]
    info = program.info(value)
    shape = info.shape if place is None else chunk_shape(info.shape, place, 1)
    zeros = without_memory(shape, info.dtype, info.device)
    if program.needs_gradient(value):
        widen_gradient(zeros.requires_grad_())
    return zeros


def _each(make: Callable[[Any], Any], of: Any) -> Any:
    return tuple(map(make, of)) if type(of) is tuple else make(of)


def _sized(left: torch.Tensor) -> torch.Tensor:
    if not left.requires_grad:
        return _number(left)
    return without_memory(left.shape, left.dtype, left.device).requires_grad_()


def _number(left: torch.Tensor) -> torch.Tensor:
    return _core.read(left) if type(left) is _core.LazyTensor else left.detach()
