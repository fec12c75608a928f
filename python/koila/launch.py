# SPDX-License-Identifier: Apache-2.0
"""A block in which the batches of all data loaders are lazy: for the launcher and for notebooks."""

from __future__ import annotations

import argparse
import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from koila import loaders
from koila.basics.config import config, settings
from koila.lazy import of_draw, of_loader
from koila.random import plain
from koila.reporting import reports
from koila.summary import Summary

_logger = logging.getLogger("koila")


def add_options(parser: argparse.ArgumentParser) -> None:
    """What can be said of how to run."""
    parser.add_argument(
        "--memory-limit",
        metavar="SIZE",
        help='what all tensors may take, as "4GiB" or "80%%" (of the GPU, or else of the machine); '
        "without it: what is free",
    )
    parser.add_argument("--chunks", type=int, metavar="N", help="run in exactly N chunks")
    parser.add_argument(
        "--progress",
        action="store_true",
        help="show a progress bar for what runs in chunks for long",
    )
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="write what was done to this file too: JSON where its name ends in .json, else text",
    )


def configure(args: argparse.Namespace) -> None:
    """Set what the options say for the process.

    Raises:
        ValueError: they are no settings, or exclude each other.
    """
    if args.chunks is not None and args.memory_limit is not None:
        raise ValueError(
            "--chunks says how many chunks whatever memory there is, --memory-limit has as few as "
            "fit: give one of the two"
        )
    if args.chunks is not None:
        config(chunks=args.chunks, memory_limit=None)
    if args.memory_limit is not None:
        config(chunks=None, memory_limit=args.memory_limit)
    if args.progress:
        config(progress=True)


_n_open = 0  # blocks of lazy loaders that are entered: the last that ends puts torch back


@contextlib.contextmanager
def _all_lazy() -> Iterator[None]:
    global _n_open
    _n_open += 1
    loaders.make_all_lazy(of_loader)
    plain.follow(of_draw)
    try:
        yield
    finally:
        _n_open -= 1
        if _n_open == 0:
            plain.follow(None)
            loaders.make_all_lazy(None)


@contextlib.contextmanager
def lazy_loaders() -> Iterator[Summary]:
    """A block in which the batches of all loaders are lazy, and so is noise of as many rows; what
    runs is added up. One may be in another."""
    summary = Summary()
    try:
        with _all_lazy(), reports.observed_by(summary):
            yield summary
    finally:
        summary.end()


def write(summary: Summary, path: Path) -> None:
    """Write what was done to a file."""
    is_json = path.suffix == ".json"
    text = summary.as_json() if is_json else "\n".join([*summary.lines(), *map(str, summary.last)])
    path.write_text(text + "\n")


@contextlib.contextmanager
def settings_kept() -> Iterator[None]:
    """A block after which the settings of the process are as before."""
    before = settings()
    try:
        yield
    finally:
        config(**before._asdict()).settle()


class Session:
    """Lazy loaders from `begin` to `end`: the part of a framework's callback that is koila's.

    Args:
        memory_limit: as for `koila.config`; None: what holds stays as it is.
        chunks: likewise.

    Attributes:
        summary: what was done, of the last that has begun; None before.
    """

    def __init__(
        self, memory_limit: int | float | str | None = None, *, chunks: int | None = None
    ) -> None:
        self.summary: Summary | None = None
        self._memory_limit, self._chunks = memory_limit, chunks
        self._stack = contextlib.ExitStack()

    def begin(self) -> None:
        """Begin, and end what has failed before."""
        self._stack.close()
        with contextlib.ExitStack() as stack:
            if self._memory_limit is not None or self._chunks is not None:
                stack.enter_context(settings_kept())
                config(memory_limit=self._memory_limit, chunks=self._chunks).settle()
            self.summary = stack.enter_context(lazy_loaders())
            self._stack = stack.pop_all()

    def end(self) -> None:
        """End, and log what was done."""
        self._stack.close()
        for line in self.summary.lines() if self.summary is not None else ():
            _logger.info("%s", line)
