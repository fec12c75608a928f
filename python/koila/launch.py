# SPDX-License-Identifier: Apache-2.0
"""Make the batches of all data loaders lazy in a block: for the launcher and for notebooks."""

from __future__ import annotations

import argparse
import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from koila import loaders
from koila.basics.config import config, restore, set_limit, settings
from koila.lazy import of_draw, of_loader
from koila.random import plain
from koila.reporting import reports
from koila.summary import Summary

_logger = logging.getLogger("koila")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how to run."""
    parser.add_argument(
        "--memory-limit",
        metavar="SIZE",
        help='what all tensors may take, as "4GiB" or "80%%" (of the GPU, or else of the machine); '
        "without it: what is free",
    )
    parser.add_argument(
        "--chunks",
        type=int,
        metavar="N",
        help="run in N chunks, unless that takes more memory than the whole batch",
    )
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
    """Set the process's options. Raise a ValueError if they are invalid or exclude each other."""
    if args.chunks is not None and args.memory_limit is not None:
        raise ValueError(
            "--chunks sets the number of chunks, --memory-limit takes as few chunks as fit: give "
            "one of the two"
        )
    if args.report is not None and not args.report.parent.is_dir():
        raise ValueError(f"--report {args.report}: there is no folder {str(args.report.parent)!r}")
    if args.report is not None and args.report.is_dir():
        raise ValueError(f"--report {args.report}: it is a folder; write for example report.json")
    if args.chunks is not None:
        config(chunks=args.chunks, memory_limit=None)
    if args.memory_limit is not None:
        set_limit(args.memory_limit, "--memory-limit")
    if args.progress:
        config(progress=True)


_n_open = 0  # open blocks of lazy loaders: the end of the last one undoes the patches


@contextlib.contextmanager
def lazy_loaders() -> Iterator[Summary]:
    """Make the batches of all loaders lazy in a block, and noise with as many rows. Yield a summary
    of the steps that run in it. Blocks may be nested."""
    global _n_open
    summary = Summary()
    _n_open += 1
    loaders.make_all_lazy(of_loader)
    plain.follow(of_draw)
    try:
        with reports.observed_by(summary):
            yield summary
    finally:
        _n_open -= 1
        if _n_open == 0:
            plain.follow(None)
            loaders.make_all_lazy(None)
        summary.end()


def write(summary: Summary, path: Path) -> None:
    """Write a summary to a file: as JSON if its name ends in .json, else as text."""
    is_json = path.suffix == ".json"
    text = summary.as_json() if is_json else "\n".join([*summary.lines(), *map(str, summary.last)])
    path.write_text(text + "\n")


@contextlib.contextmanager
def settings_kept() -> Iterator[None]:
    """Restore the settings of the process at the end of a block."""
    before = settings()
    try:
        yield
    finally:
        restore(before)


class Session:
    """Lazy loaders from `begin` to `end`: the base class of the callbacks for frameworks.

    Args:
        memory_limit: as for `koila.config`; None: keep the current setting.
        chunks: as for `koila.config`; None: keep the current setting.

    Attributes:
        summary: of the last session that has begun; None before the first.
    """

    def __init__(
        self, memory_limit: int | float | str | None = None, *, chunks: int | None = None
    ) -> None:
        self.summary: Summary | None = None
        self._memory_limit, self._chunks = memory_limit, chunks
        self._stack = contextlib.ExitStack()

    def begin(self) -> None:
        """Begin a session; end the one before if it failed without calling `end`."""
        self._stack.close()
        with contextlib.ExitStack() as stack:
            if self._memory_limit is not None or self._chunks is not None:
                stack.enter_context(settings_kept())
                config(memory_limit=self._memory_limit, chunks=self._chunks).settle()
            self.summary = stack.enter_context(lazy_loaders())
            self._stack = stack.pop_all()

    def end(self) -> None:
        """End the session, and log its summary."""
        self._stack.close()
        for line in self.summary.lines() if self.summary is not None else ():
            _logger.info("%s", line)
