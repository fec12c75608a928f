# SPDX-License-Identifier: Apache-2.0
"""The ways to schedule a step, each with the bytes it needs and the time it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from koila.memory import estimates, offload
from koila.planning import across
from koila.staged.program import Program
from koila.staged.schedule import AS_IT_IS, WITHOUT_CHECKPOINTS, Op, Way

# The share of the allowed memory to plan with: predictions do not know how allocators round, nor
# the buffers inside kernels.
CHUNK_SHARE = 0.9
# The values of the fields of a Way that are tried: keep_every, offload_every, n_light, n_pieces of
# rows, n_pieces of a second axis, n_segments.
_KEEP = 2, 3, 4, 6, 8
_OFFLOAD = 4, 2, 1
_LIGHT = 1, 2, 4, 8
_PIECES = 2, 4, 8, 16, 32
_ACROSS = 2, 4, 8, 16, 32, 64
SEGMENTS = 2, 3, 4, 6, 8, 12, 16, 32, 64
DEAR = 1.1  # with a higher cost, other ways are looked for
# The fixed time of a call on a chunk, forward and backward, expressed as the bytes of results that
# calls compute in that time. Measured on a CPU; an accelerator computes a hundred times as many.
_CALL = 2**16
_CALL_ON_ACCELERATOR = 2**23
# The time to offload and fetch all activations kept between bodies, as a share of the step's time.
# On a CPU it is a copy to mapped pages. An accelerator computes bytes three times as fast as its
# bus moves them.
_OFFLOADED, _OFFLOADED_FROM_ACCELERATOR = 0.2, 3.0
# Each chunk reads the inputs without rows, such as weights, and adds to their gradients. This takes
# the time in which calls compute this share of their bytes.
_GIVEN = 1 / 8


class Option(NamedTuple):
    """A way to run a program, with its predicted memory and its number of calls a chunk."""

    way: Way
    estimate: estimates.Estimate
    n_calls: int

    def rows(self, allowed: float) -> int:
        """Return the rows of the largest chunk that fits with room to spare; 0 if none does."""
        return self.estimate.largest_chunk(CHUNK_SHARE * allowed)


def option_of(program: Program, is_graph: bool, way: Way) -> Option:
    return Option(way, estimates.estimate(program, is_graph, way), program.n_calls(way))


def cost(program: Program, option: Option, rows: int) -> float:
    """Estimate the time of a step that is run in a way, to choose among ways.

    Args:
        program: the program.
        option: the way.
        rows: the rows of a chunk.

    Returns:
        The time as a multiple of that of the calls alone, each made once.
    """
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
    """Tell whether activations can be offloaded to something other than the memory that is
    short."""
    return all(map(offload.is_worth_it, devices_of(program)))


def options(program: Program, is_graph: bool) -> Iterator[Option]:
    """Yield the ways to run a program that need no second axis; all give the same numbers."""
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
            continue  # a segment would write what another made, or there is nothing more to cut
        n_before = cut.n_cut
        for way in (Way(n_segments), *((Way(n_segments, 1, 1),) if is_offloadable else ())):
            yield option_of(cut, is_graph, way)
    if program.has_checkpoints:
        cut = program.cut_for(WITHOUT_CHECKPOINTS)
        yield from recomputing_cheap(cut, WITHOUT_CHECKPOINTS)
        yield from recomputing(cut, WITHOUT_CHECKPOINTS)


def recomputing_cheap(program: Program, base: Way = AS_IT_IS) -> Iterator[Option]:
    """Yield the ways that free activations which cheap calls can recompute, if there are any."""
    lengths: set[int] = set()
    for n_light in _LIGHT:
        lights = program.schedule(True, base._replace(n_light=n_light)).lights
        if not lights or len(lights) in lengths:
            return
        lengths.add(len(lights))
        yield option_of(program, True, base._replace(n_light=n_light))


def _can_recompute(program: Program) -> bool:
    """Tell whether any activation kept between bodies can be recomputed."""
    return bool(program.schedule(True, Way(keep_every=2)).values_of(Op.REMAKE))


def recomputing(program: Program, base: Way = AS_IT_IS) -> Iterator[Option]:
    """Yield the ways that keep a part of the activations between bodies and recompute the
    others."""
    if _can_recompute(program):
        ways = (base._replace(keep_every=n) for n in _KEEP)
        yield from (option_of(program, True, way) for way in ways)


def in_pieces(
    program: Program, is_graph: bool, may_help: Callable[[Option], bool]
) -> Iterator[Option]:
    """Yield the ways that run the head in pieces of a chunk, if there is a head that can.

    Args:
        program: the program.
        is_graph: whether it is differentiated.
        may_help: called once with the memory of the most pieces and the calls of the fewest, which
            no single way reaches; if it returns False, no way is yielded.
    """
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
    """Yield the ways that run the head in parts of a second axis, and the calls before it in
    segments."""
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
    """Return the way that needs the least memory, and its number of chunks."""
    option = min(options(program, is_graph), key=lambda one: one.estimate.least()[1])
    rows, _, _ = option.estimate.least()
    return option.way, -(-option.estimate.rows // rows)


def devices_of(program: Program) -> list[torch.device]:
    """Return the accelerators that a program computes on; only the CPU if it uses none.

    A batch may be on the CPU when it becomes lazy, and be moved by a call of the program.
    """
    others = sorted((d for d in program.devices if d.type != "cpu"), key=str)
    return others or [torch.device("cpu")]
