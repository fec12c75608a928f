# SPDX-License-Identifier: Apache-2.0
"""What the chunks of a body are given of tensors that entered the program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from koila.facts import Run

if TYPE_CHECKING:
    from koila.replay import Replay


class Reads:
    """Found once, and not for each chunk."""

    def __init__(self, replay: Replay, run: Run, is_graph: bool) -> None:
        self.common: list[Any] = [None] * replay.program.n_imports
        self.pieces: list[tuple[int, Sequence[torch.Tensor]]] = []  # by chunk
        self.others: list[int] = []  # what the program made
        grid = replay.grid_of(run)
        for import_id in run.imports:
            value, place, is_range = replay.program.imports[import_id]
            cross = replay.cross_of(value)
            cut = None
            if replay.program.is_leaf(value) and not is_range:
                if place is None:
                    self.common[import_id] = cross.read_whole(is_graph)
                    continue
                cut = cross.cut_all(place, grid, is_graph)
            if cut is None:
                self.others.append(import_id)
            else:
                self.pieces.append((import_id, cut))
