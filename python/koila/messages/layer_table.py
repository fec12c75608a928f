# SPDX-License-Identifier: Apache-2.0
"""The table of layers: what each keeps for backward, as texts and as lines."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from koila.messages.words import count, size


@dataclass(frozen=True)
class Layer:
    """What the calls of one layer keep for their backward.

    Attributes:
        name: the path of the module, as "encoder.layers.3.linear1"; the line of calls that are in
            no module, as "train.py:40".
        kind: the class of the module; empty: no module.
        n_calls: recorded calls of it.
        n_bytes: bytes that autograd keeps of their results for backward, of the whole batch.
        per_sample: of these, for each sample of the batch.
        is_whole: whether a call of it needs the whole batch at once.
    """

    name: str
    kind: str
    n_calls: int
    n_bytes: int
    per_sample: float
    is_whole: bool = False

    def of_more(self, samples: int) -> Layer:
        """The same layer for so many more samples."""
        n_bytes = round(self.n_bytes + samples * self.per_sample)
        return dataclasses.replace(self, n_bytes=n_bytes)


def cells(layers: Iterable[Layer], most: int) -> tuple[list[tuple[Layer, tuple[str, ...]]], str]:
    """The table of the layers that keep most for backward, the largest first.

    Args:
        layers: those of a program.
        most: how many rows it has at most.

    Returns:
        Each layer with the texts of its row, in the order of `HEADS`; and what is left out, as
        "3 more layers with 1.0 MiB": empty where nothing is.
    """
    kept = sorted((one for one in layers if one.n_bytes), key=lambda one: -one.n_bytes)
    total = sum(one.n_bytes for one in kept)
    rows: list[tuple[Layer, tuple[str, ...]]] = [
        (
            one,
            (
                f"{one.name} ({one.kind})" if one.kind else one.name,
                size(one.per_sample),
                size(one.n_bytes),
                f"{100 * one.n_bytes / total:.0f} %",
                "with the whole batch" if one.is_whole else "in chunks",
            ),
        )
        for one in kept[:most]
    ]
    rest = sum(one.n_bytes for one in kept[most:])
    left_out = f"{count(len(kept) - most, 'more layer')} with {size(rest)}" if rest else ""
    return rows, left_out


#: Of the columns of `cells`.
HEADS = ("layer", "kept a sample", "whole batch", "share", "runs")


def table(layers: Iterable[Layer], most: int = 10) -> list[str]:
    """The table of `cells` as lines; none where nothing is kept."""
    found, left_out = cells(layers, most)
    if not found:
        return []
    rows = [HEADS, *(row for _, row in found)]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = [
        "  ".join((row[0].ljust(widths[0]), *(row[i].rjust(widths[i]) for i in (1, 2, 3)), row[4]))
        for row in rows
    ]
    return [*lines, left_out] if left_out else lines
