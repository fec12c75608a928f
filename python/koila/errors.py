"""The exceptions koila raises by itself; torch's own pass through unchanged."""

import torch


class KoilaError(RuntimeError):
    """A program that koila cannot run with exactly eager's numbers, with op, line and reason."""


class StaleError(KoilaError):
    """A tensor was changed between the moment a call was recorded and the moment it ran."""


class NotInChunksError(KoilaError):
    """A run in chunks found that it cannot be right; the program is then run whole."""


class MemoryLimitError(KoilaError, torch.OutOfMemoryError):
    """Not even one row at a time fits into the memory there is."""
