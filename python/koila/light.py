# SPDX-License-Identifier: Apache-2.0
"""What crosses from body to body and light calls make again (KlLight): it is emptied when it was
read for the last time going forward, and filled a chunk at a time for the graphs that need it.

They have it still: its memory is taken, and given back where it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from koila.program import Program, Run, Step

if TYPE_CHECKING:
    from koila.replay import Replay


def homes_of(program: Program, run: Run) -> list[int]:
    """What a body leaves by rows."""
    made = [(value, program.node_of(value)) for value in run.exports]
    return [
        value
        for value, node in made
        if node is not None and node.id not in run.parts and program.info(value).place is not None
    ]


def given(replay: Replay, step: Step) -> Sequence[int]:
    """What a body that runs again is given and was emptied, those first that are made first."""
    imports = replay.program.imports
    read = {imports[i].value for run in step.runs for i in run.imports} if replay.lights else ()
    return [value for value in replay.lights if value in read]


def let_go(replay: Replay, step: Step) -> None:
    """Empty all chunks of some values."""
    for value in step.values:
        for chunk in replay.cross[value].chunks:
            replay.cross[value].empty(chunk)


def fill(replay: Replay, values: Iterable[int], chunk: int) -> None:
    """Make a chunk of these again, and before of those that they are made of, which then go."""
    for value in values:
        if not replay.cross[value].is_empty(chunk):
            continue
        number, needs = replay.lights[value]
        run, before = replay.program.runs[number], set(replay.filled)
        fill(replay, needs, chunk)
        homes = {home: replay.cross[home] for home in homes_of(replay.program, run)}
        there = (home for home, of in homes.items() if not of.is_empty(chunk))
        known = {home: homes[home].of_rows(replay.grid_of(run), chunk) for home in there}
        env = replay.run_nodes(run, chunk, False, again={**known, value: None})
        replay.cross[value].fill(chunk, env[value])
        del env, known
        empty(replay, chunk, before)
        replay.filled.add(value)


def empty(replay: Replay, chunk: int, but: Iterable[int] = ()) -> None:
    """Let the numbers go of what was filled, but for these."""
    for value in replay.filled.difference(but):
        replay.filled.discard(value)
        if chunk in replay.cross[value].chunks:
            replay.cross[value].empty(chunk)
