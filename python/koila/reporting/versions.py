# SPDX-License-Identifier: Apache-2.0
"""The versions of torch that koila is tested with, and the private names of torch that it uses; and
that no other package koila, such as PyPI's koila 0.1, is installed in this folder."""

from __future__ import annotations

import contextlib
import logging
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from koila.messages.errors import KoilaError

#: The versions that the test suite was run with, as major.minor.
TESTED = ("2.13", "2.14", "2.15")
#: The least version that the package requires.
LEAST = "2.10"

#: Private names of torch that koila uses only when a program runs: `check` looks for them.
_USED_LATER = (
    "_C._autograd._get_sequence_nr",
    "_C._current_graph_task_id",
    "_C._functorch.peek_interpreter_stack",
    "_C._get_tracing_state",
    "_C._storage_Use_Count",
)

_logger = logging.getLogger("koila")


def check_alone(file: str) -> None:
    """Raise an ImportError if the folder of `file`, one of this package, holds files of another
    package koila too: those that both have would be of the one installed last."""
    folder = Path(file).parent
    if (folder / "prepasses.py").exists():  # only the other has it
        raise ImportError(
            f"{folder} holds two packages: this one, koila-c, and PyPI's older koila; remove both "
            "and install this one again: pip uninstall koila koila-c, then pip install koila-c"
        )


def note_untested(version: str = torch.__version__) -> None:
    """Log a warning if a version of torch, by default the imported one, is not tested: its ops may
    save other tensors for backward.

    Every run in chunks checks that, so such a change causes an error, not a wrong number.
    """
    if ".".join(version.split(".")[:2]) not in TESTED:
        _logger.warning(
            "koila is tested with torch %s, and this is %s: where it differs, koila raises rather "
            "than give another number than torch",
            ", ".join(TESTED),
            version,
        )


def _belongs_to_torch(obj: Any) -> bool:
    names = (getattr(obj, "__module__", None), getattr(obj, "__name__", None))
    return any(str(name).split(".")[0] == "torch" for name in names)


def _missing(error: Exception) -> str | None:
    """Return the name that torch does not have; None: the error has another cause."""
    if isinstance(error, AttributeError) and _belongs_to_torch(error.obj):
        return f"{getattr(error.obj, '__name__', error.obj)}.{error.name}"
    if isinstance(error, ImportError) and (error.name or "").split(".")[0] == "torch":
        return f"{error.name} ({error.msg})"
    return None


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Wrap a block, and replace an error about a name that this torch lacks by a KoilaError that
    says which versions have it."""
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
    """Look for the private names that are used only when a program runs. Raise an AttributeError if
    this torch lacks one."""
    for name in _USED_LATER:
        operator.attrgetter(name)(torch)


def note_slow_ways(ways: dict[str, bool]) -> None:
    """Log which fast paths of recording are missing with this torch or Python."""
    missing = [name for name, is_there in ways.items() if not is_there]
    if missing:
        _logger.info("koila records more slowly with this torch or Python: %s", "; ".join(missing))
