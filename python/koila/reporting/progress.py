# SPDX-License-Identifier: Apache-2.0
"""A progress bar for programs that run in chunks for over three seconds: config(progress=True)."""

from __future__ import annotations

import importlib
import sys
import time
import warnings
from collections.abc import Iterable
from typing import Any

from koila.staged.schedule import Op, Step

#: The bar appears after this time.
AFTER_SECONDS = 3.0


def n_ticks(steps: Iterable[Step], n_chunks: int) -> int:
    """Return how often chunks run a segment of a schedule, at most."""
    return n_chunks * sum(step.op == Op.RUN for step in steps)


class _Text:
    """A line on stderr that is overwritten, for when tqdm is not installed."""

    def __init__(self, total: int) -> None:
        self.total, self.n = total, 0

    def update(self, n: int) -> None:
        self.n += n
        done = 100 * self.n // max(1, self.total)
        print(f"\rkoila: {done} % of this step", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        print("\r" + " " * 40 + "\r", end="", file=sys.stderr, flush=True)


def _open(total: int) -> Any:
    """Return a bar of tqdm, which also works in notebooks, or a line on stderr."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # in a notebook tqdm asks for ipywidgets
            module = importlib.import_module("tqdm.auto")
    except ImportError:
        return _Text(total)
    return module.tqdm(total=total, desc="koila", unit="chunk", leave=False)


class Bar:
    """Counts the chunks of a program, and appears if they take long."""

    def __init__(self, total: int) -> None:
        self._total, self._n, self._n_shown = total, 0, 0
        self._begun = time.monotonic()
        self._shown: Any = None

    def tick(self) -> None:
        """Note that a chunk is about to run a segment of the program."""
        if self._shown is None and time.monotonic() - self._begun >= AFTER_SECONDS:
            self._shown = _open(self._total)
        if self._shown is not None:
            self._shown.update(self._n - self._n_shown)
            self._n_shown = self._n
        self._n = min(self._n + 1, self._total)

    def close(self) -> None:
        """Remove the bar, when the program has run or failed."""
        if self._shown is not None:
            self._shown.close()
            self._shown = None
