# SPDX-License-Identifier: Apache-2.0
"""The bytes of a program's step, as the core predicts them, and the largest chunk that fits."""

from __future__ import annotations

import array
import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from koila import _core
from koila.basics import table
from koila.memory import outside, uneven
from koila.random import draws
from koila.staged.program import Program
from koila.staged.schedule import AS_IT_IS, Strategy

# The bytes of a state of the CPU's generator.
_STATE = torch.Generator().get_state().nbytes


class Course(NamedTuple):
    """The bytes alive at one moment of a step, for one size of chunks."""

    step: int  # the index of the instruction in the schedule
    node: int  # the call that runs
    is_back: bool  # its backward runs
    n_bytes: float
    gradients: float  # the part of n_bytes that gradients take
    temporary: float  # the part of n_bytes that is alive only while the call runs


@dataclass(frozen=True)
class Estimate:
    """The bytes that a step needs at each of its moments, beside what exists already (leaves)."""

    moments: bytes  # KlMoment[] of measure.h
    rows: int  # of the batch
    whole: float = math.inf  # the peak bytes of a live run of the whole batch
    front: bytes | None = None  # the moments without most that are no peaks; None: all
    #: For rows of many lengths: returns the moments for chunks of this many rows.
    again: Callable[[int], bytes] | None = None

    def _at(self, rows: int, moments: bytes | None = None) -> tuple[bytes, int, int]:
        moments = self.again(rows) if self.again is not None else moments or self.moments
        return moments, self.rows, rows

    def peak(self, rows: int) -> tuple[float, int]:
        """Return the peak bytes with chunks of `rows` rows, and the call that needs them."""
        n_bytes, _, node = _core.peak(*self._at(rows, self.front))
        return n_bytes, node

    def fixed(self, rows: int) -> float:
        """Return the part of these peak bytes that does not shrink with the chunks."""
        return _core.peak(*self._at(rows, self.front))[1]

    @functools.cached_property
    def least(self) -> tuple[int, float, int]:
        """The chunk size that needs the least memory: its rows, its peak bytes, the call. That is
        one row, unless each chunk leaves much behind. Only powers of two are tried."""
        sizes = [1 << i for i in range(self.rows.bit_length())] or [1]
        return min(((rows, *self.peak(rows)) for rows in sizes), key=lambda entry: entry[1])

    def peaks(self, rows: int) -> dict[int, float]:
        """Return the most bytes at each instruction of the schedule, with chunks of `rows` rows."""
        found: dict[int, float] = {}
        for step, _, _, n_bytes, *_ in _core.moments(*self._at(rows)):
            if n_bytes > found.get(step, 0.0):
                found[step] = n_bytes
        return found

    def course(self, rows: int) -> list[Course]:
        """Return all moments in order, with chunks of `rows` rows; equal chunks are listed once."""
        return [Course(*one) for one in _core.moments(*self._at(rows))]

    def largest_chunk(self, budget: float) -> int:
        """Return the most rows of a chunk that fits; 0: none was found.

        Smaller chunks do not always need less memory: each chunk leaves something behind, and in
        packed sequences an added row may be short. So the search may miss the largest size, but the
        size that it returns fits.
        """
        fits, more = self.rows, self.rows + 1
        while fits > 0 and self.peak(fits)[0] > budget:
            fits, more = fits // 2, fits
        while fits > 0 and more - fits > 1:
            middle = (fits + more) // 2
            fits, more = (middle, more) if self.peak(middle)[0] <= budget else (fits, middle)
        return fits


def of_nodes(program: Program) -> tuple[bytes, bytes, bytes, bytes]:
    """Return what the core has to know of each recorded call, as arrays of KlOutside: whether it
    writes a clone, the bytes of its noise, and its checkpoint, with those around each of these.
    An array of zeros is empty."""
    cloned = bytearray(program.n_recorded if program.cloned else 0)
    for node in program.cloned:
        cloned[node] = True
    if program.noise is None:
        program.noise = _noise_of(program).tobytes() if program.is_drawing else b""
    return bytes(cloned), program.noise, *program.regions


def _noise_of(program: Program) -> array.array[int]:
    noise = array.array("q", [0] * program.n_recorded)
    for one in program.nodes.values():
        if one.is_random and one.stage % 2 == 1:
            noise[one.id] = draws.bytes_whole(one.id, one.first_out)
    return noise


def estimate(
    program: Program,
    is_graph: bool,
    strategy: Strategy = AS_IT_IS,
    is_live: bool = False,
    graphs: Callable[[Iterable[torch.Tensor]], float] = outside.peak,
    whole: float | None = None,
) -> Estimate:
    """Predict the bytes that a program needs, beside what exists already; with its backward if
    `is_graph`.

    `is_live`: return the moments of a live run, of the whole batch in the order of the calls.
    `graphs` returns the bytes of a backward through graphs that exist already. `whole`: the bytes
    of a live run, if these are known: they are not computed again.
    """
    states = _STATE * program.is_drawing, draws.bytes_kept()
    policy = strategy.as_tuple(is_graph, is_live)
    # The program keeps its estimates, so `again` must not refer to it: a cycle would hold the
    # tensors of a step until the garbage collector runs.
    beside = program.beside

    def peak_of(found: set[torch.Tensor]) -> float:
        return graphs([*found, *beside])

    arguments = program.handle, policy, of_nodes(program), states, peak_of
    is_known = whole is not None
    with torch._C.DisableTorchFunctionSubclass():  # statistics that are watched are a subclass
        moments, rows, found, front = _core.measure(*arguments, (1, 1, 1, 1, is_known))
    whole = found if whole is None else whole
    lengths = list(_core.notes().get("lengths", {}).values())
    if not lengths or is_live:
        return Estimate(moments, rows, whole, front)

    n_pieces = 1 if strategy.second_size else strategy.n_pieces

    @functools.cache
    def again(of_chunk: int) -> bytes:
        shares = uneven.parts(lengths, rows, of_chunk, n_pieces)
        return _core.measure(*arguments, (*shares, True))[0]

    return Estimate(moments, rows, whole, again=again)


def bytes_shared(program: Program) -> int:
    """Return the bytes of gradients that only chunks make: of values that have a graph and to which
    a call hands the gradient of its result on. A whole run sends one tensor to all of them."""
    behind: dict[int, int] = {}  # import -> bytes
    for import_id, entry in enumerate(() if program.is_part else program.imports):
        real = program.info(entry.value).real
        if real is not None and real.grad_fn is not None:
            behind[import_id] = real.nbytes
    found = 0
    for node in program.nodes.values() if behind else ():
        if behind.keys().isdisjoint(node.imports):
            continue
        row, of_graphs = program.row_of(node), []
        for k, import_id in enumerate(node.imports):
            if import_id in behind and table.hands_on(row, k):
                of_graphs.append(behind[import_id])
        found += sum(of_graphs[1:])
    return found
