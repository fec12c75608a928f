# SPDX-License-Identifier: Apache-2.0
"""Free activations between bodies that cheap ("light") calls can recompute (KlLight).

After the last read in the forward pass the storage of such a value is freed; the tensor stays, in
the graphs that saved it. Before the backward of a chunk the storage is allocated again and filled.
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
    """Return the outputs of a body that have rows and are no partials of reductions."""
    exports = (value for value in run.exports if value not in run.parts)
    return [value for value in exports if program.info(value).place is not None]


class Filled:
    """The values whose storage was freed and is now filled for one chunk.

    Args:
        stages: the step.
        lights: by value, how to recompute it.
    """

    def __init__(self, stages: Stages, lights: Mapping[int, Light]) -> None:
        self.stages = stages
        self.lights = lights
        self.values: set[int] = set()

    def fill(self, values: Iterable[int], chunk: int) -> None:
        """Recompute a chunk of these values, and before it of the values that they need. The
        latter are freed again."""
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
        """Free the storage of all filled values except `but`."""
        for value in self.values.difference(but):
            self.values.discard(value)
            if chunk in self.stages.cross[value].chunks:
                self.stages.cross[value].empty(chunk)
