# SPDX-License-Identifier: Apache-2.0
"""The ways to schedule a step, each with what it takes and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from koila.memory import estimates, offload
from koila.planning import across
from koila.staged.program import Program
from koila.staged.schedule import AS_IT_IS, WITHOUT_CHECKPOINTS, Op, Way

# The model does not know an allocator's rounding, nor buffers inside kernels.
CHUNK_SHARE = 0.9
_KEEP = 2, 3, 4, 6, 8
#: Of what crosses from body to body, every so manieth is offloaded; the last is all of it.
_OFFLOAD = 4, 2, 1
_LIGHT = 1, 2, 4, 8
_PIECES = 2, 4, 8, 16, 32
_ACROSS = 2, 4, 8, 16, 32, 64
SEGMENTS = 2, 3, 4, 6, 8, 12, 16, 32, 64
DEAR = 1.1  # a cost from which on other ways are looked for
# What a call of a chunk takes, forward and back, whatever its rows: as to make so many bytes by
# calls. Measured on a CPU; an accelerator makes a hundred times as many in that time.
_CALL = 2**16
_CALL_ON_ACCELERATOR = 2**23
# What it takes to offload all that crosses and to fetch it, as a share of the step's time. On a CPU
# it is a copy to mapped pages. An accelerator makes bytes thrice as fast as its bus moves them.
_OFFLOADED, _OFFLOADED_FROM_ACCELERATOR = 0.2, 3.0
# What is given whole is read by each chunk, and its gradient added up: so much of its bytes.
_GIVEN = 1 / 8


class Option(NamedTuple):
    """A way to run a program, and what it needs."""

    way: Way
    estimate: estimates.Estimate
    n_calls: int  # of each chunk

    def rows(self, allowed: float) -> int:
        """Of the largest chunk that fits with room to spare; 0: none does."""
        return self.estimate.largest_chunk(CHUNK_SHARE * allowed)


def option_of(program: Program, is_graph: bool, way: Way) -> Option:
    return Option(way, estimates.estimate(program, is_graph, way), program.n_calls(way))


def cost(program: Program, option: Option, rows: int) -> float:
    """The time of a step run this way in chunks of so many rows, as a multiple of its time without
    what chunks cost: roughly, to choose among ways."""
    way, amounts = option.way, program.amounts
    is_cpu = all(device.type == "cpu" for device in program.devices)
    of_chunk = option.n_calls * (_CALL if is_cpu else _CALL_ON_ACCELERATOR) + _GIVEN * amounts.given
    n_chunks = -(-option.estimate.rows // rows)
    is_again = way.n_segments > 1 or (way.n_segments == 1 and program.has_checkpoints)
    of_offload = _OFFLOADED if is_cpu else _OFFLOADED_FROM_ACCELERATOR
    more = (
        0.35 * (way.keep_every > 1)
        + 0.35 * is_again
        + (of_offload / way.offload_every if way.offload_every else 0)
    )
    more += 0.05 * (way.n_light > 0) + 0.02 * way.n_light
    return (1 + more) * (1 + n_chunks * of_chunk / max(1, amounts.made))


def can_offload(program: Program) -> bool:
    """Whether what crosses has a home beside the memory that is short."""
    is_cpu = all(device.type == "cpu" for device in devices_of(program))
    return not is_cpu or offload.is_worth_it()


def options(program: Program, is_graph: bool) -> Iterator[Option]:
    """The ways to run a program; they give the same numbers."""
    plain = option_of(program, is_graph, AS_IT_IS)
    yield plain
    is_back = is_graph and bool(program.roots)
    has_homes = bool(program.schedule(is_back, Way(1, 1, 1)).values_of(Op.HOME))
    is_offloadable = has_homes and can_offload(program)
    if not is_back:
        if is_offloadable:
            yield option_of(program, False, Way(1, 1, 1))
        return
    yield from recomputing_cheap(program)
    yield from recomputing(program)
    for offload_every in _OFFLOAD if is_offloadable else ():
        yield option_of(program, is_graph, Way(1, 1, offload_every))
    needed = plain.estimate.peak(1)[0]
    yield from in_pieces(program, is_graph, lambda best: best.estimate.peak(1)[0] < needed)
    n_before = program.n_cut
    for n_segments in SEGMENTS:
        cut = program.cut_for(Way(n_segments))
        if cut.unstageable is not None or cut.n_cut <= n_before:
            continue  # a write would cross where none can, or there is nothing left to cut
        n_before = cut.n_cut
        for way in (Way(n_segments), *((Way(n_segments, 1, 1),) if is_offloadable else ())):
            yield option_of(cut, is_graph, way)
    if program.has_checkpoints:
        cut = program.cut_for(WITHOUT_CHECKPOINTS)
        yield from recomputing_cheap(cut, WITHOUT_CHECKPOINTS)
        yield from recomputing(cut, WITHOUT_CHECKPOINTS)


def recomputing_cheap(program: Program, base: Way = AS_IT_IS) -> Iterator[Option]:
    """The ways that empty what light calls make of what crosses, as far as there is such."""
    lengths: set[int] = set()
    for n_light in _LIGHT:
        lights = program.schedule(True, base._replace(n_light=n_light)).lights
        if not lights or len(lights) in lengths:
            return
        lengths.add(len(lights))
        yield option_of(program, True, base._replace(n_light=n_light))


def _crosses(program: Program) -> bool:
    """Whether anything that crosses from body to body can be made again, or offloaded."""
    return bool(program.schedule(True, Way(keep_every=2)).values_of(Op.REMAKE))


def recomputing(program: Program, base: Way = AS_IT_IS) -> Iterator[Option]:
    """The ways that keep a part of what crosses, and make the rest again."""
    if _crosses(program):
        ways = (base._replace(keep_every=n) for n in _KEEP)
        yield from (option_of(program, True, way) for way in ways)


def in_pieces(
    program: Program, is_graph: bool, may_help: Callable[[Option], bool]
) -> Iterator[Option]:
    """The ways that run the head in pieces, where there is one that can: none, unless it may help
    to need as little as the most pieces do, for no more calls than the fewest make."""
    fewest, most = Way(n_pieces=_PIECES[0]), Way(n_pieces=_PIECES[-1])
    cut = program.cut_for(fewest)
    if not is_graph or cut.n_cut <= program.n_cut or cut.unstageable is not None:
        return
    last = option_of(cut, is_graph, most)
    if may_help(Option(most, last.estimate, cut.n_calls(fewest))):
        for n_pieces in _PIECES[:-1]:
            yield option_of(cut, is_graph, Way(n_pieces=n_pieces))
        yield last


def along_second_axis(program: Program, is_graph: bool) -> Iterator[Option]:
    """The ways that run the head in parts of a second axis, and what is before it in segments."""
    if not is_graph or not program.roots or not program.is_tail_linear:
        return
    n_before = program.n_cut
    for n_segments in (1, *SEGMENTS):
        way = Way(n_segments, n_pieces=_PIECES[0])
        cut = program.cut_for(way)
        if cut.unstageable is not None or cut.n_cut <= n_before:
            continue
        n_before = cut.n_cut
        found = across.find(cut, cut.last_segment)
        for n_pieces in _ACROSS:
            if found is not None and found.is_in(n_pieces):
                along = way._replace(n_pieces=n_pieces, n_across=found.n, across=found.dim)
                yield option_of(cut, is_graph, along)


def smallest(program: Program, is_graph: bool) -> tuple[Way, int]:
    """The way that needs least, and in how many chunks."""
    option = min(options(program, is_graph), key=lambda one: one.estimate.least()[1])
    rows, _, _ = option.estimate.least()
    return option.way, -(-option.estimate.rows // rows)


def devices_of(program: Program) -> list[torch.device]:
    """Where the program's values are made: on the CPU only where no accelerator makes any.

    A batch may still be on the CPU when it is made lazy, and be moved by a call of the program.
    """
    others = sorted((d for d in program.devices if d.type != "cpu"), key=str)
    return others or [torch.device("cpu")]
