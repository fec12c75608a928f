# SPDX-License-Identifier: Apache-2.0
"""Free activations between bodies that cheap calls can recompute (KlCheap).

After the last read in the forward pass the storage of such a value is freed; the tensor stays, in
the graphs that saved it. Before the backward of a chunk the storage is allocated again and gets
the recomputed numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from koila.staged.facts import Run
from koila.staged.program import Program
from koila.staged.schedule import Cheap

if TYPE_CHECKING:
    from koila.running.stages import Stages


def stored_of(program: Program, run: Run) -> list[int]:
    """Return the outputs of a body that have rows and are no partials of reductions."""
    stored = []
    for value in run.exports:
        if value not in run.parts and program.info(value).place is not None:
            stored.append(value)
    return stored


class Rematerialized:
    """The values whose storage was freed and is now rematerialized for one chunk."""

    def __init__(self, stages: Stages, cheap_values: Mapping[int, Cheap]) -> None:
        self.stages = stages
        self.cheap_values = cheap_values
        self.values: set[int] = set()

    def add(self, values: Iterable[int], chunk: int) -> None:
        """Recompute a chunk of these values, and before it of the values that they need. The
        latter are freed again."""
        stages = self.stages
        for value in values:
            if chunk not in stages.boundary[value].freed:
                continue
            number, needs = self.cheap_values[value]
            run, before = stages.program.runs[number], set(self.values)
            self.add(needs, chunk)
            stored = {value: stages.boundary[value] for value in stored_of(stages.program, run)}
            there = (value for value, of in stored.items() if of.is_near(chunk))
            stored_rows = {
                value: stored[value].of_rows(stages.grid_of(run), chunk) for value in there
            }
            env = stages.run_nodes(run, chunk, False, again={**stored_rows, value: None})
            stages.boundary[value].rematerialize(chunk, env[value])
            del env, stored_rows
            self.free(chunk, before)
            self.values.add(value)

    def free(self, chunk: int, but: Iterable[int] = ()) -> None:
        """Free the storage of all rematerialized values except `but`."""
        for value in self.values.difference(but):
            self.values.discard(value)
            if chunk in self.stages.boundary[value].chunks:
                self.stages.boundary[value].free_storage(chunk)
