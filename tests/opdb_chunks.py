# SPDX-License-Identifier: Apache-2.0
"""Every op of torch's own `op_db` with its rows cut in chunks: the numbers are the whole's.

Whatever koila makes of a batch dim (split it, or run the op once on the whole) must not show. Each
dim of the first tensor is the batch in turn; it alone enters, or all tensors that have that size
there, counted from the left or from the right, as broadcasting suggests.
"""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch.testing._internal.opinfo.core import OpInfo

import koila
import opdb
from brute import Cuts, alignments, can_cut
from chunked import Watched
from opdb import Case
from outcome import How, Outcome, Program, assert_same_numbers, observe

#: What an op can come to.
CUT, NO_ROWS = "cut", "nothing to cut: no float64 sample of a few numbers that has a dim"
NO_ROW = "nothing of it waits: no row in the op table for its samples, or it gives its input back"
WHOLE = "it has a row, by which none of its samples can be cut"

KINDS = ("function", "in-place method")

#: Ways to cut an op's samples that are tried: a pooling has thousands, which differ in its words.
MOST = 100
#: An op with more ways than these is cut in one number of chunks each way, drawn; else in all.
FEW = 20


@dataclass
class ChunkReport:
    """What came of an op's cases.

    An op is what is called where `opdb.Case` calls it: not the loss and the reads around it.
    """

    same: int = 0
    same_error: int = 0
    ways: int = 0  # to cut it, that were tried
    known: int = 0  # of these: a call it is made of has a row in the op table
    cut: int = 0  # and of these: ran by rows
    differing: list[str] = field(default_factory=list)  # name: what differs

    @property
    def verdict(self) -> str:
        """Whether it was ever cut, or why not."""
        if self.ways == 0:
            return NO_ROWS
        return CUT if self.cut else WHOLE if self.known else NO_ROW


def chunk_counts(rows: int) -> list[int]:
    """Return the chunk counts to try: two, three (with sizes that differ), one row each."""
    return sorted({min(count, rows) for count in (2, 3, rows)})


def run_in_chunks(
    case: Case, cuts: Cuts, count: int, is_read_first: bool
) -> tuple[Outcome, Watched]:
    """Run a case with the rows of its tensors cut; tensors with one batch dim enter together.

    In every second sample each enters by a call of its own: axes that meet aligned become one.
    Returns what was seen, and what ran in chunks.
    """
    program = case.program()
    made: dict[int, torch.Tensor] = {}

    def enter(tensor: torch.Tensor) -> torch.Tensor:
        return made.get(id(tensor), tensor)

    with koila.config(chunks=count), Watched(count).on() as watched:
        for group in _groups(program, cuts, case.number % 2 == 0):
            dim = cuts[group[0]]
            lazies = koila.lazy(*(program.tensors[i] for i in group), batch=dim)
            lazies = lazies if len(group) > 1 else (lazies,)
            made |= {id(program.tensors[i]): x for i, x in zip(group, lazies, strict=True)}
        return observe(program, enter, is_read_first), watched


def _groups(program: Program, cuts: Cuts, is_barrier: bool) -> list[list[int]]:
    if not is_barrier:
        return [[number] for number in cuts]
    return [[n for n, at in cuts.items() if at == dim] for dim in sorted(set(cuts.values()))]


def _how(name: str) -> How:
    """Say how far values can be compared: not at all where they are left over from others."""
    return "unknown" if opdb.NOT_REPEATED.get(name) == opdb.MEANINGLESS else "close"


def cases_of(op: OpInfo) -> Iterator[Case]:
    """Yield the op's float64 samples, as function and in place; the random ones unseeded."""
    if opdb.dtype_of(op) != torch.float64:
        return
    variants = [variant for variant, _ in opdb.calls_of(op)]
    wanted = [f"{kind} unseeded" for kind in KINDS if f"{kind} unseeded" in variants]
    wanted += [kind for kind in KINDS if f"{kind} unseeded" not in variants]
    for case in opdb.cases_of(op):
        if case.name.partition("] ")[2] in wanted:
            yield case


def check_op(op: OpInfo, most: int | None = MOST) -> ChunkReport:
    """Run an op's samples cut in every way; in so many, drawn from all, where there are more.

    `most` is None for all ways in all numbers of chunks, which takes ten minutes.
    """
    report, draw = ChunkReport(), random.Random(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ways = [way for case in cases_of(op) for way in _ways_to_cut(case)]
        if most is not None and len(ways) > most:
            chosen = draw.sample(range(len(ways)), most)
            ways = [ways[i] for i in sorted(chosen)]
        one = None if most is None or len(ways) <= FEW else draw
        for case, of_case in itertools.groupby(ways, key=lambda way: way[0]):
            _check_case(report, case, [cuts for _, cuts in of_case], opdb.full_name(op), one)
    return report


def _ways_to_cut(case: Case) -> list[tuple[Case, Cuts]]:
    tensors = case.program().tensors
    return [(case, cuts) for cuts in alignments(tensors)] if can_cut(tensors) else []


def _check_case(
    report: ChunkReport, case: Case, ways: list[Cuts], op: str, one: random.Random | None
) -> None:
    """Compare a case in each way; in all numbers of chunks, or where `one` is there in one."""
    is_read_first = case.number % 2 == 0
    tensors = case.program().tensors
    wanted = observe(case.program(), is_read_first=is_read_first)
    how = _how(op)
    report.ways += len(ways)
    for cuts in ways:
        number, dim = next(iter(cuts.items()))
        counts = chunk_counts(tensors[number].shape[dim])
        for count in counts if one is None else [one.choice(counts)]:
            got, watched = run_in_chunks(case, cuts, count, is_read_first)
            name = f"{case.name} cut at {dict(cuts)} in {count} chunks"
            _compare(report, name, wanted, got, how)
            report.differing += [f"{name}: {wrong}" for wrong in sorted(watched.wrong)]
            report.known += any(map(_is_case, watched.known))
            report.cut += any(map(_is_case, watched.lines))
            if not watched.n_cut:
                break  # it ran whole, and would with any other number of chunks


def _is_case(line: str) -> bool:
    return f", {opdb.__file__}:" in line


def _compare(report: ChunkReport, name: str, wanted: Outcome, got: Outcome, how: How) -> None:
    try:
        assert_same_numbers(wanted, got, how)
    except AssertionError as error:
        report.differing.append(f"{name}: {error}")
        return
    if wanted.failure is None:
        report.same += 1
    else:
        report.same_error += 1
