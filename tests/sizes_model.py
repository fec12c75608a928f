"""Bytes of the values of a program, whole and for each row of a chunk: a part of memory_model."""

from __future__ import annotations

import math

import torch

from koila.program import Import, Program
from koila.rows import is_cut_in_place

Size = tuple[float, float]  # fixed, and for each row


class Sizes:
    """Bytes of values, split into a fixed part and one for each row."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._known: dict[int, Size] = {}
        self._n_elements: dict[int, int] = {}

    def n_elements(self, value: int) -> int:
        """The elements of all rows of a value."""
        if value not in self._n_elements:
            self._n_elements[value] = math.prod(self.program.info(value).shape)
        return self._n_elements[value]

    def whole(self, value: int) -> int:
        """All rows of a value."""
        return self.n_elements(value) * self.program.info(value).dtype.itemsize

    def of(self, value: int) -> Size:
        """A value as it is in a chunk."""
        if value not in self._known:
            info = self.program.info(value)
            whole = self.whole(value)
            by_rows = info.place is not None and info.rows > 0
            self._known[value] = (0.0, whole / info.rows) if by_rows else (float(whole), 0.0)
        return self._known[value]

    def gradient(self, value: int) -> int:
        """A gradient that is summed over chunks: of half precision in float32."""
        is_half = self.program.info(value).dtype in (torch.float16, torch.bfloat16)
        return self.whole(value) * (2 if is_half else 1)

    def is_view(self, entry: Import) -> bool:
        """Whether a chunk of what is read lies in the memory of the whole."""
        if entry.place is None:
            return True
        info = self.program.info(entry.value)
        tensor = info.real if info.real is not None else info.number
        if tensor is not None:
            return is_cut_in_place(tensor, entry.place)
        _, dim, outer, _ = entry.place
        return outer == 1 and math.prod(info.shape[:dim]) == 1
