# SPDX-License-Identifier: Apache-2.0
"""The versions of torch that koila was tried with, and what it needs of torch that is private."""

from __future__ import annotations

import contextlib
import logging
import operator
from collections.abc import Iterator
from typing import Any

import torch

from koila.messages.errors import KoilaError

#: major.minor of the versions that the suite was run with.
TESTED = ("2.13", "2.14", "2.15")
#: What the package asks for.
LEAST = "2.10"

#: Private names of torch that are not used before a program runs.
_USED_LATER = (
    "_C._current_graph_task_id",
    "_C._functorch.peek_interpreter_stack",
    "_C._get_tracing_state",
    "_C._storage_Use_Count",
)

_logger = logging.getLogger("koila")


def note_untested(version: str) -> None:
    """Say so where this torch is another: what ops keep for backward may have changed in it.

    A program in chunks is held against that in every run, so a change is an error, no number.
    """
    if ".".join(version.split(".")[:2]) not in TESTED:
        _logger.warning(
            "koila is tested with torch %s, and this is %s: where it differs, koila raises rather "
            "than give another number than torch",
            ", ".join(TESTED),
            version,
        )


def note_this() -> None:
    """Say so of the torch that is imported."""
    note_untested(torch.__version__)


def _belongs_to_torch(obj: Any) -> bool:
    names = (getattr(obj, "__module__", None), getattr(obj, "__name__", None))
    return any(str(name).split(".")[0] == "torch" for name in names)


def _missing(error: Exception) -> str | None:
    """The name that torch does not have; None where the error is about something else."""
    if isinstance(error, AttributeError) and _belongs_to_torch(error.obj):
        return f"{getattr(error.obj, '__name__', error.obj)}.{error.name}"
    if isinstance(error, ImportError) and (error.name or "").split(".")[0] == "torch":
        return f"{error.name} ({error.msg})"
    return None


@contextlib.contextmanager
def told() -> Iterator[None]:
    """A name that torch does not have, and koila needs, is a KoilaError that says which torch has
    it."""
    try:
        yield
    except (AttributeError, ImportError) as error:
        name = _missing(error)
        if name is None:
            raise
        raise KoilaError(
            f"this torch, {torch.__version__}, has no {name}, which koila needs: it works with "
            f"torch {LEAST} or later, and is tested with {', '.join(TESTED)}"
        ) from error


def check() -> None:
    """Look for the private names that are used later only."""
    for name in _USED_LATER:
        operator.attrgetter(name)(torch)


def note_slow_ways(ways: dict[str, bool]) -> None:
    """Say which quick ways are not there with this torch or Python: the numbers are the same."""
    missing = [name for name, is_there in ways.items() if not is_there]
    if missing:
        _logger.info("koila records more slowly with this torch or Python: %s", "; ".join(missing))
