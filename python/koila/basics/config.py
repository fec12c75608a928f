# SPDX-License-Identifier: Apache-2.0
"""koila.config(): settings such as the number of chunks and the memory limit.

A call changes settings for the process, on all threads. A `with` block changes them for the context
(`contextvars`) that enters it: not for other threads, not even those started in the block, but for
asyncio tasks created in it.
"""

from __future__ import annotations

import contextvars
import os
import re
import sys
import threading
import weakref
from typing import Any, Final, NamedTuple

from koila.basics import machine

_DECIMAL = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
# A single letter is a binary unit, as in docker, slurm and the JVM.
_BINARY = {
    unit: 2 ** (10 * power)
    for power, letter in enumerate("kmgt", 1)
    for unit in (letter, f"{letter}i", f"{letter}ib")
}
_UNITS = _DECIMAL | _BINARY


class Settings(NamedTuple):
    """The settings; None: not set."""

    chunks: int | None = None
    memory_limit: int | None = None
    progress: bool | None = None
    #: The option or variable that set the memory_limit, as users write it; empty: config() did.
    option: str = ""

    def written(self) -> str:
        """Return the option that set the memory_limit, or a call of config() that sets all."""
        if self.option:
            return self.option
        given = self._asdict().items()
        parts = (f"{name}={value}" for name, value in given if value not in (None, ""))
        return f"koila.config({', '.join(parts)})"

    def value(self, limit: str) -> str:
        """Return a memory_limit as a user has to write it: as an option's value or in Python."""
        return limit if self.option else repr(limit)

    def assigned(self, limit: str) -> str:
        """Return what a user has to write to set a memory_limit instead of this one."""
        equals = " " if self.option.startswith("--") else "="
        return f"{self.option or 'memory_limit'}{equals}{self.value(limit)}"


_process = Settings()
#: The settings of the innermost block of this context; None: it is in no block.
_block: contextvars.ContextVar[Settings | None] = contextvars.ContextVar("koila", default=None)


class _Thread(threading.local):
    #: The last call of config() outside of blocks; it may still be entered as a block.
    call: weakref.ref[_Config] | None = None


_thread = _Thread()


def parse_bytes(limit: int | float | str | None) -> int | None:
    """Return the bytes of a memory_limit: an int, a text such as "512MiB", "4G" (4GiB) or "4GB"
    (decimal), or a share of all memory, such as "80%" or 0.8.

    Examples:
        >>> from koila.basics.config import parse_bytes
        >>> parse_bytes("512MiB")
        536870912
    """
    if limit is None:
        return None
    if isinstance(limit, bool) or not isinstance(limit, int | float | str):
        raise TypeError(
            f"config: memory_limit must be an int, a share, a text or None, not {limit!r}"
        )
    if isinstance(limit, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*|%)\s*", limit)
        if match is None or match[2].lower() not in _UNITS | {"%": 1}:
            raise ValueError(
                f'config: memory_limit={limit!r} is no size; write for example "512MiB", "4G" or '
                '"80%"'
            )
        number, unit = float(match[1]), match[2].lower()
        if not unit and number < 2**20:
            raise ValueError(
                f"config: memory_limit={limit!r} has no unit, and would be {number:g} bytes: write "
                f'for example "{match[1]}GiB", or "{match[1]}B"'
            )
        n_bytes = number / 100 if unit == "%" else int(number * _UNITS[unit])
    else:
        n_bytes = limit
    if isinstance(n_bytes, float):
        if not 0 < n_bytes <= 1:
            most = "at most 100 %" if isinstance(limit, str) else "at most 1; bytes are an int"
            raise ValueError(
                f"config: memory_limit={limit!r} is no share of memory: that is more than 0 and "
                f"{most}"
            )
        return int(n_bytes * machine.total())
    if n_bytes <= 0:
        raise ValueError(f"config: memory_limit must be positive, not {limit!r}")
    return n_bytes


def _check_chunks(chunks: int | None) -> int | None:
    if chunks is None:
        return None
    if isinstance(chunks, bool) or not isinstance(chunks, int):
        raise TypeError(f"config: chunks must be an int or None, not {chunks!r}")
    if chunks < 1:
        raise ValueError(f"config: chunks must be at least 1, not {chunks}")
    return chunks


class _Config:
    """The result of config(). If it is not entered as a block, it changes the process's settings:
    when they are next read, or when it is deleted."""

    def __init__(self, before: Settings | None, after: Settings) -> None:
        self._before = before
        self._after = after
        self._is_due = before is None  # the settings of the process have yet to be changed

    def __repr__(self) -> str:
        return self._after.written()

    def settle(self) -> None:
        """Change the settings of the process: the call is not entered as a block."""
        global _process
        if self._is_due:
            self._is_due = False
            _process = self._after

    def __del__(self) -> None:
        self.settle()

    def __enter__(self) -> None:
        self._is_due = False
        if _thread.call is not None and _thread.call() is self:
            _thread.call = None
        _block.set(self._after)

    def __exit__(self, *error: object) -> None:
        _block.set(self._before)


def settings() -> Settings:
    """Return the settings in force in this context."""
    call = _thread.call() if _thread.call is not None else None
    if call is not None:
        call.settle()
    return _block.get() or _process


def get(name: str) -> int | None:
    """Return one setting in force in this context."""
    now = settings() if _thread.call is not None else _block.get() or _process
    value: int | None = getattr(now, name)
    return value


def is_one_chunk() -> bool:
    """Tell whether the user asked for one chunk.

    What a call does while it is recorded may depend on this, but not on the bytes that are pending:
    later calls of the program may need many times as much.
    """
    return get("chunks") == 1


def _check_together(before: Settings, after: Settings) -> None:
    """Raise a ValueError if both chunks and memory_limit are set."""
    if after.chunks is None or after.memory_limit is None:
        return
    text = (
        "config: chunks= sets the number of chunks, memory_limit= takes as few chunks as fit: only "
        "one of them can hold"
    )
    if before.chunks is not None or before.memory_limit is not None:
        is_chunks = before.chunks is not None
        other = f"chunks=None, memory_limit={after.memory_limit}"
        other = other if is_chunks else f"chunks={after.chunks}, memory_limit=None"
        text += f", and {before.written()} is in force; to replace it, write config({other})"
    raise ValueError(text)


class _Unchanged:
    """The default of an argument whose setting stays as it is."""

    def __repr__(self) -> str:
        return "unchanged"


_UNCHANGED: Final[Any] = _Unchanged()


def config(
    *,
    chunks: int | None = _UNCHANGED,
    memory_limit: int | float | str | None = _UNCHANGED,
    progress: bool | None = _UNCHANGED,
) -> _Config:
    """Change settings, for the process, or (in a `with` statement) for a block.

    A call changes them for all threads; inside a block, for the rest of the block. A block changes
    them only for the context that enters it: other threads keep the settings of the process.

    Args:
        chunks: run every program in this many chunks (of at least one row), if it can run in chunks
            and needs no more memory so than whole; None: as few chunks as fit into memory.
        memory_limit: the bytes that all tensors together may take: an int, a text such as "512MiB"
            or "4G" (of 2**30 bytes each), or a share of all memory, such as "80%" or 0.8: of the
            current GPU's memory if there is a GPU, else of the machine's. None: what the device has
            free. On the CPU, whose allocator keeps no count, tensors are found by their Python
            objects: tensors that only an autograd graph or C++ holds do not count, nor do mapped
            files. The environment variable KOILA_MEMORY_LIMIT sets it at import.
        progress: show a progress bar for programs that run in chunks for more than three seconds:
            by tqdm if it is installed, else as a line on stderr.

    Raises:
        TypeError, ValueError: a value is invalid, or both chunks and memory_limit would be set; to
            replace one by the other, pass None for it.

    Examples:
        >>> import torch, koila
        >>> with koila.config(chunks=3):
        ...     koila.lazy(torch.ones(7, 2)).sum().item()
        14.0
    """
    before = settings()
    after = before
    if chunks is not _UNCHANGED:
        after = after._replace(chunks=_check_chunks(chunks))
    if memory_limit is not _UNCHANGED:
        after = after._replace(memory_limit=parse_bytes(memory_limit), option="")
    if progress is not _UNCHANGED:
        if progress is not None and not isinstance(progress, bool):
            raise TypeError(f"config: progress must be True, False or None, not {progress!r}")
        after = after._replace(progress=progress)
    _check_together(before, after)
    block = _block.get()
    made = _Config(block, after)
    if block is None:
        _thread.call = weakref.ref(made)
    else:
        _block.set(after)
    return made


def set_limit(text: str, option: str) -> None:
    """Set the memory_limit of the process from a text that the user gave as an option. Messages,
    such as the ValueError for a text that is no size, then name the option."""
    global _process
    try:
        n_bytes = parse_bytes(text)
    except ValueError as error:
        reason = str(error).removeprefix("config: ").removeprefix(f"memory_limit={text!r} ")
        raise ValueError(f"{option}={text!r}: it {reason}") from None
    _process = settings()._replace(chunks=None, memory_limit=n_bytes, option=option)


def restore(before: Settings) -> None:
    """Make settings that `settings` returned those of the process again."""
    global _process
    settings()  # a call of config() whose settings wait takes effect before, not after
    _process = before


def read_environment() -> None:
    """Set the memory_limit of the process from KOILA_MEMORY_LIMIT. Raise a ValueError if that is no
    size; under `python -m koila` a SystemExit, since a command prints no traceback."""
    text = os.environ.get("KOILA_MEMORY_LIMIT", "").strip()
    if not text:
        return
    try:
        set_limit(text, "KOILA_MEMORY_LIMIT")
    except ValueError as error:
        if sys.argv[:1] == ["-m"]:  # so it is while Python imports the package of a module to run
            sys.exit(f"python -m koila: error: {error}")
        raise error.with_traceback(None) from None
