"""report(): how the last program was run."""

from __future__ import annotations

import threading
from dataclasses import dataclass


@dataclass(frozen=True)
class Report:
    """How a program was run.

    Attributes:
        n_chunks: in how many chunks; 1: whole, as it was written.
        n_rows: rows of the largest chunk; None where it ran whole.
        n_tries: more than 1 where memory ran out and smaller chunks were tried.
        bytes_predicted: what it was thought to need at its worst moment, beyond what was there.
            None where that was not asked: it certainly fits, or config(chunks=) decided.
        bytes_allowed: what it was allowed.
    """

    n_chunks: int
    n_rows: int | None = None
    n_tries: int = 1
    bytes_predicted: float | None = None
    bytes_allowed: float | None = None


class _State(threading.local):
    last: Report | None = None


_state = _State()


def note(made: Report | None) -> None:
    """Remember how a program was run; None: one is about to, and might fail."""
    _state.last = made


def note_whole() -> None:
    """The program that was about to run has run as it was written."""
    _state.last = _state.last or Report(1)


def report() -> Report | None:
    """How the last program of this thread was run: the last backward(), or number that was read.

    Returns:
        None before the first, and after a backward() that failed.

    Example:
        >>> import torch, koila
        >>> with koila.config(chunks=3):
        ...     koila.lazy(torch.ones(7, 2)).sum().item()
        14.0
        >>> koila.report().n_chunks, koila.report().n_rows
        (3, 3)
    """
    return _state.last
