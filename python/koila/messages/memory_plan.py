# SPDX-License-Identifier: Apache-2.0
"""The bytes of a step at each of its moments, before it runs: by phase, by category, by value.

The moments are those that the core measured, by which the number of chunks was chosen
(`measure.c`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from koila.messages import plan_files
from koila.messages.moments import Moment, Value
from koila.messages.words import size


@dataclass(frozen=True)
class MemoryPlan:
    """What a step will take, before it runs. It prints as a text, and as a card in a notebook.

    Attributes:
        fits: whether it fits; if not, all numbers are those of the chunks that need least.
        n_chunks: in how many chunks it runs.
        n_samples: samples of a chunk.
        n_bytes: bytes that it takes at its worst moment, beside what is there.
        whole: bytes that it takes on the whole batch at once.
        allowed: bytes that it may take.
        there: bytes by kind that are there already: parameters, gradients, optimizer state, ...
        phases: bytes at the worst moment of each phase: forward, backward, optimizer's step. The
            last is what gradients and new optimizer state take, without the step's temporaries.
        worst: the moment that takes most.
        largest: the ten values that take most of what is kept for backward.
        moments: all moments, in the order of the step; of equal chunks those of one.
        costs: what is recomputed or offloaded for it, and what that costs; empty: nothing is.
        summary: the numbers as sentences.
    """

    fits: bool
    n_chunks: int
    n_samples: int
    n_bytes: int
    whole: int
    allowed: int
    there: Mapping[str, int]
    phases: Mapping[str, int]
    worst: Moment
    largest: tuple[Value, ...]
    moments: tuple[Moment, ...] = dataclasses.field(repr=False)
    costs: str = ""
    summary: tuple[str, ...] = ()

    def categories(self) -> dict[str, int]:
        """Bytes at the worst moment by category, what was there before among them.

        Returns:
            Bytes by name, the largest first, without those that have none.
        """
        own = {
            "activations": self.worst.activations,
            "outputs that the script holds": self.worst.outputs,
            "gradients": self.worst.gradients,
            "temporaries": self.worst.temporaries,
        }
        for name, n_bytes in self.there.items():
            own[name] = own.get(name, 0) + n_bytes
        found = sorted(own.items(), key=lambda entry: -entry[1])
        return {name: n_bytes for name, n_bytes in found if n_bytes > 0}

    def lines(self) -> list[str]:
        """What it prints, but for the table of values."""
        phases = ", ".join(f"{name} {size(n)}" for name, n in self.phases.items())
        categories = ", ".join(f"{name} {size(n)}" for name, n in self.categories().items())
        found = [*self.summary, f"by phase: {phases}"]
        found.append(f"worst moment: {self.worst}: {size(self.n_bytes)} beside what is there")
        return [*found, f"all that is there then: {categories}"]

    def table(self) -> list[tuple[str, ...]]:
        """The largest values: call, layer, line, bytes of the whole batch, bytes at one time."""
        rows = [
            (one.call, one.layer, one.where, size(one.n_bytes), size(one.in_chunk))
            for one in self.largest
        ]
        return [("kept for backward", "layer", "line", "whole batch", "at one time"), *rows]

    def __str__(self) -> str:
        rows = self.table() if self.largest else []
        widths = [max(len(row[i]) for row in rows) for i in range(5)] if rows else []
        listed = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
        return "\n".join((*self.lines(), *listed))

    def __repr__(self) -> str:
        return str(self)

    def _repr_pretty_(self, printer: Any, is_cycle: bool) -> None:
        printer.text(str(self))

    def _repr_html_(self) -> str:
        return plan_files.html(self)

    def svg(self) -> str:
        """A picture of the bytes over the step, as SVG: categories, phases, and what is allowed."""
        return plan_files.svg(self)

    def as_dict(self) -> dict[str, Any]:
        """All numbers, as what JSON knows."""
        return {**dataclasses.asdict(self), "categories": self.categories()}

    def save(self, path: str | Path) -> None:
        """Write a file, of the kind that its name ends with.

        Args:
            path: `.svg` is the picture, `.html` the card, `.json` the numbers; `.trace.json` opens
                in Chrome's trace viewer and in Perfetto, with a counter of memory, `.pickle` in
                torch's memory viewer; any other name gets the text.
        """
        plan_files.save(self, Path(path))

    def plot(self, axes: Any = None) -> Any:
        """Draw the bytes over the step with matplotlib, which has to be installed.

        Args:
            axes: where to; None: new ones.

        Returns:
            The axes.
        """
        return plan_files.plot(self, axes)
