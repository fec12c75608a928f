# SPDX-License-Identifier: Apache-2.0
"""The result of koila.plan(): the bytes of a step at each of its moments, predicted before it runs.

The moments are those of `measure.c`, by which the number of chunks is chosen.
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
    """The predicted memory of a step. It prints as a text, and shows as a card in a notebook.

    Attributes:
        fits: whether the step fits; if not, all numbers are for the chunks that need least.
        n_chunks: the number of chunks.
        n_samples: the samples of a chunk.
        n_bytes: the peak bytes of the step, beside what exists before it.
        whole: the peak bytes if the whole batch ran at once.
        allowed: the bytes that the step may use.
        there: by kind, the bytes that exist before the step: parameters, optimizer state, ...
        phases: the peak bytes of each phase: forward, backward, optimizer's step. The last are the
            bytes of gradients and new optimizer state, without the optimizer's temporaries.
        worst: the moment with the most bytes.
        largest: the ten largest values that are kept for backward.
        moments: all moments, in the order of the step; equal chunks are listed once.
        costs: what is recomputed or offloaded, and what that costs; empty if nothing is.
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
        """Return the bytes at the worst moment by category, including what existed before the step:
        the largest first, without empty categories."""
        own = {
            "activations": self.worst.activations,
            "results that your script holds": self.worst.outputs,
            "gradients": self.worst.gradients,
            "temporaries": self.worst.temporaries,
        }
        for name, n_bytes in self.there.items():
            own[name] = own.get(name, 0) + n_bytes
        found = sorted(own.items(), key=lambda entry: -entry[1])
        return {name: n_bytes for name, n_bytes in found if n_bytes > 0}

    def lines(self) -> list[str]:
        """Return the lines that it prints above the table of values."""
        phases = ", ".join(f"{name} {size(n)}" for name, n in self.phases.items())
        categories = ", ".join(f"{name} {size(n)}" for name, n in self.categories().items())
        found = [*self.summary, f"by phase: {phases}"]
        found.append(f"worst moment: {self.worst}: {size(self.n_bytes)} more than is in use now")
        return [*found, f"all that is there then: {categories}"]

    def table(self) -> list[tuple[str, ...]]:
        """Return the largest values: call, layer, line, bytes of the whole batch and of a chunk."""
        rows = [
            (one.call, one.layer, one.where, size(one.n_bytes), size(one.in_chunk))
            for one in self.largest
        ]
        return [("kept for backward", "layer", "line", "whole batch", "at once"), *rows]

    def __str__(self) -> str:
        rows = self.table() if self.largest else []
        widths = [max(len(row[i]) for row in rows) for i in range(5)] if rows else []
        listed = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
        return "\n".join((*self.lines(), *listed))

    def __repr__(self) -> str:
        ends = ".html, .json, .trace.json, .pickle or .txt"
        return f"{self}\n(print() leaves this line out; .save('plan.svg') saves it, or {ends})"

    def _repr_pretty_(self, printer: Any, is_cycle: bool) -> None:
        printer.text(repr(self))

    def _repr_html_(self) -> str:
        return plan_files.html(self)

    def svg(self) -> str:
        """Return a picture of the bytes over the step, as SVG: categories, phases, the limit."""
        return plan_files.svg(self)

    def as_dict(self) -> dict[str, Any]:
        """Return all numbers, in types that JSON knows."""
        return {**dataclasses.asdict(self), "categories": self.categories()}

    def save(self, path: str | Path) -> None:
        """Write the plan to a file, in the format of its suffix.

        Args:
            path: `.svg` is the picture, `.html` the card, `.json` the numbers; `.trace.json` opens
                in Chrome's trace viewer and in Perfetto, with a counter of memory, `.pickle` in
                torch's memory viewer; `.txt` is the text.

        Raises:
            ValueError: the suffix is none of these.
        """
        plan_files.save(self, Path(path))

    def plot(self, axes: Any = None) -> Any:
        """Draw the bytes over the step with matplotlib, which must be installed.

        Args:
            axes: the axes to draw on; None: new ones.

        Returns:
            The axes.
        """
        return plan_files.plot(self, axes)
