"""A block in which the batches of all data loaders are lazy: for the launcher and for notebooks."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path

from koila import loaders, reports
from koila.config import config
from koila.lazy import of_loader
from koila.summary import Summary


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


@contextlib.contextmanager
def lazy_loaders() -> Iterator[Summary]:
    """A block in which the batches of all loaders are lazy, and what runs is added up."""
    summary = Summary()
    reports.observe(summary)
    loaders.make_all_lazy(of_loader)
    try:
        yield summary
    finally:
        reports.settle()
        loaders.make_all_lazy(None)
        reports.observe(None)
        summary.end()


def write(summary: Summary, path: Path) -> None:
    """Write what was done to a file."""
    is_json = path.suffix == ".json"
    text = summary.as_json() if is_json else "\n".join([*summary.lines(), *map(str, summary.last)])
    path.write_text(text + "\n")
