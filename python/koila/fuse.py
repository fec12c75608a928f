# SPDX-License-Identifier: Apache-2.0
"""Each chunk of the last body goes forward and at once back, where the gradients of what it leaves
are known before it runs (koila/tail.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from koila import across, tail
from koila.cross import Cross, add, own
from koila.program import Op, Run, Step

if TYPE_CHECKING:
    from koila.replay import Replay


def fuse(replay: Replay, step: Step) -> None:
    """Do a step of the schedule."""
    replay.make_homes(step)
    go = _in_pieces if step.op == Op.PIECES else _in_segments
    is_certain = go(replay, step.runs)
    for run in step.runs:
        for value in set(run.exports).difference(run.inner):
            cross = replay.cross[value]
            if is_certain:
                cross.needs_gradient = False  # it is sent back already
            else:
                cross.watch = tail.Watch(cross.seeds, replay.grid_of(run))
                replay.watched[value] = cross


def _in_pieces(replay: Replay, runs: Sequence[Run]) -> bool:
    """Chunk by chunk; the graph of one waits while its head goes forward and back in pieces.

    Returns:
        Whether the gradients that were sent are certain.
    """
    body, head = runs
    handed = replay.handed_by(runs)
    is_certain = False
    pieces = replay.grid_of(head)
    piece = 0
    for chunk, bounds in enumerate(replay.grid_of(body)):
        env = replay.run_nodes(body, chunk, True)
        replay.collect(body, env, chunk, body.exports)
        whole = {value: replay.cross[value].of_chunk(env[value], bounds) for value in handed}
        while piece < len(pieces) and pieces[piece][0] < bounds[1]:
            left = tail.parts_of(body, env) if piece == 0 else None
            is_certain |= _last(replay, runs, piece, whole, left)
            replay.take_rows_of(head, piece, whole)
            piece += 1
        while whole:
            value, cross = whole.popitem()
            seeds, key = replay.cross[value].seeds, ("chunk", chunk)
            seeds[key] = add(seeds.get(key), cross.take_total_gradient())
            replay.forget(cross.aliases.values())
            del cross
        replay.send_back(body, env, chunk)
        replay.take_rows_of(body, chunk, {})
        for value in handed:
            replay.cross[value].seeds.pop(("chunk", chunk), None)
        for value in body.inner:
            replay.cross[value].chunks.pop(chunk, None)
    return is_certain


def _in_segments(replay: Replay, runs: Sequence[Run]) -> bool:
    """Chunk by chunk, all segments of it but the last without their graphs at first."""
    *others, last = runs
    handed = replay.handed_by(runs)
    is_certain = False
    for chunk in range(len(replay.grid_of(last))):
        left: dict[int, Any] = {}  # what the tail starts from
        for run in others:
            # The first chunk tells which parts gradients go to.
            env = replay.run_nodes(run, chunk, chunk == 0)
            replay.collect(run, env, chunk, run.exports)
            left.update(tail.parts_of(run, env))
            del env  # or the next segment would run beside what is left of this one
        is_certain |= _last(replay, runs, chunk, None, left if chunk == 0 else None)
        del left
        replay.settle_chunk(last, chunk)
        inner = {value for run in others for value in run.inner}
        replay.back_through_others(others, chunk, inner)
        replay.let_go_of_chunk(runs, chunk, inner, handed)
        for value in handed:  # what later segments sent back has gone back
            replay.cross[value].seeds.pop(("chunk", chunk), None)
    return is_certain


def _last(
    replay: Replay,
    runs: Sequence[Run],
    chunk: int,
    stand_ins: dict[int, Cross] | None,
    left: dict[int, Any] | None,
) -> bool:
    """The last segment of a body forward and at once back.

    Args:
        replay: the step.
        runs: the segments.
        chunk: on which chunk of the last.
        stand_ins: what is given for values of other segments.
        left: of the first chunk, what the reductions of the other segments left.

    Returns:
        Whether the gradients that are sent are certain, as far as the first chunk tells.
    """
    run, way, is_certain = runs[-1], replay.planned.way, False
    recorded, env = None, []
    if way.n_across:
        recorded = _record(replay, run, chunk, stand_ins)
    else:
        env = replay.run_nodes(run, chunk, True, stand_ins)
        replay.collect(run, env, chunk, run.exports)
    if left is not None:
        made: Any = env if recorded is None else recorded.shapes()
        left.update((value, made[value]) for value in run.exports)
        del made
        is_certain = tail.seed(replay, runs, left, replay.gradients)
        left.clear()
    if recorded is None:
        replay.send_back(run, env, chunk)
        return is_certain
    pairs = replay.seeds(run, recorded.left, chunk)
    across.send_back([(out, seed) for out, seed in pairs if out.requires_grad], way.n_pieces)
    own(replay.fresh)
    replay.collect(run, recorded.numbers(), chunk, run.exports)
    return is_certain


def _record(
    replay: Replay, run: Run, chunk: int, stand_ins: dict[int, Cross] | None
) -> across.Recorded:
    """The last segment on one chunk, for pieces of a second axis."""
    start, stop = replay.grid_of(run)[chunk]
    imports = replay.given_to(run, chunk, True, stand_ins)
    for value in run.exports:
        replay.cross_left(value)  # what is sent back is found there
    dim = replay.planned.way.across
    return across.record(replay.program, run, imports, stop - start, start, dim)
