# SPDX-License-Identifier: Apache-2.0
"""The table of layers and the bytes that each keeps for backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from koila.messages.words import count, size


@dataclass(frozen=True)
class Layer:
    """A layer, and the bytes that autograd keeps of its calls for backward.

    Attributes:
        name: the path of the module, such as "encoder.layers.3.linear1"; for calls in no module
            their line, such as "train.py:40".
        kind: the class of the module; empty: no module.
        n_calls: the number of its recorded calls.
        n_bytes: bytes of their results that autograd saves, for the whole batch.
        per_sample: the part of n_bytes that grows with the batch, for one sample.
        is_whole: a call of it needs the whole batch at once.
    """

    name: str
    kind: str
    n_calls: int
    n_bytes: int
    per_sample: float
    is_whole: bool = False

    def of_more(self, samples: int) -> Layer:
        """Return the same layer for `samples` more samples."""
        n_bytes = round(self.n_bytes + samples * self.per_sample)
        return dataclasses.replace(self, n_bytes=n_bytes)


def cells(layers: Iterable[Layer], most: int) -> tuple[list[tuple[Layer, tuple[str, ...]]], str]:
    """Return the table of the layers that keep most for backward, the largest first, in `most` rows
    at most: each layer with the texts of its row, in the order of `HEADS`; and a text about the
    layers left out, such as "3 more layers with 1.0 MiB", empty if there are none."""
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
                "no" if one.is_whole else "yes",
            ),
        )
        for one in kept[:most]
    ]
    rest = sum(one.n_bytes for one in kept[most:])
    left_out = f"{count(len(kept) - most, 'more layer')} with {size(rest)}" if rest else ""
    return rows, left_out


#: The heads of the columns of `cells`.
HEADS = ("layer", "kept per sample", "whole batch", "share", "can run in chunks")


def table(layers: Iterable[Layer], most: int = 10) -> list[str]:
    """Return the table of `cells` as lines; none if no layer keeps anything."""
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
