# SPDX-License-Identifier: Apache-2.0
"""What crosses from body to body and light calls make again (KlLight): it is emptied when it was
read for the last time going forward, and filled a chunk at a time for the graphs that need it.

They have it still: its memory is taken, and given back where it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from koila.staged.facts import Run
from koila.staged.program import Program
from koila.staged.schedule import Light

if TYPE_CHECKING:
    from koila.running.stages import Stages


def homes_of(program: Program, run: Run) -> list[int]:
    """What a body leaves by rows."""
    made = [(value, program.node_of(value)) for value in run.exports]
    return [
        value
        for value, node in made
        if node is not None and node.id not in run.parts and program.info(value).place is not None
    ]


class Filled:
    """Of values that were emptied, those of which a chunk is there.

    Args:
        stages: the step.
        lights: how they are made.
    """

    def __init__(self, stages: Stages, lights: Mapping[int, Light]) -> None:
        self.stages = stages
        self.lights = lights
        self.values: set[int] = set()

    def fill(self, values: Iterable[int], chunk: int) -> None:
        """Make a chunk of these again, and before of those that they are made of, which then
        go."""
        stages = self.stages
        for value in values:
            if not stages.cross[value].is_empty(chunk):
                continue
            number, needs = self.lights[value]
            run, before = stages.program.runs[number], set(self.values)
            self.fill(needs, chunk)
            homes = {home: stages.cross[home] for home in homes_of(stages.program, run)}
            there = (home for home, of in homes.items() if not of.is_empty(chunk))
            known = {home: homes[home].of_rows(stages.grid_of(run), chunk) for home in there}
            env = stages.run_nodes(run, chunk, False, again={**known, value: None})
            stages.cross[value].fill(chunk, env[value])
            del env, known
            self.empty(chunk, before)
            self.values.add(value)

    def empty(self, chunk: int, but: Iterable[int] = ()) -> None:
        """Let the numbers go of what was filled, but for these."""
        for value in self.values.difference(but):
            self.values.discard(value)
            if chunk in self.stages.cross[value].chunks:
                self.stages.cross[value].empty(chunk)
