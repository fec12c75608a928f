"""config(): how many chunks, how much memory; as a call, or for a block."""

from __future__ import annotations

import re
from types import TracebackType
from typing import Any

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}

_settings: dict[str, int | None] = {"chunks": None, "memory_limit": None}


def parse_bytes(limit: int | str | None) -> int | None:
    """Read a number of bytes: an int, or a text such as "512MiB".

    Example:
        >>> from koila.config import parse_bytes
        >>> parse_bytes("512MiB")
        536870912
    """
    if limit is None:
        return None
    if isinstance(limit, bool) or not isinstance(limit, int | str):
        raise TypeError(f"config: memory_limit must be an int, a text or None, not {limit!r}")
    if isinstance(limit, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", limit)
        if match is None or match[2].lower() not in _UNITS:
            raise ValueError(
                f'config: memory_limit={limit!r} is no size; write for example "512MiB"'
            )
        limit = int(float(match[1]) * _UNITS[match[2].lower()])
    if limit <= 0:
        raise ValueError(f"config: memory_limit must be positive, not {limit}")
    return limit


def _check_chunks(chunks: int | None) -> int | None:
    if chunks is None:
        return None
    if isinstance(chunks, bool) or not isinstance(chunks, int):
        raise TypeError(f"config: chunks must be an int or None, not {chunks!r}")
    if chunks < 1:
        raise ValueError(f"config: chunks must be at least 1, not {chunks}")
    return chunks


class _Config:
    """What a call of config() changed; as a context manager it is changed back at the end."""

    def __init__(self, before: dict[str, int | None]) -> None:
        self._before = before

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _settings.update(self._before)


def get(name: str) -> int | None:
    """A setting as it is now."""
    return _settings[name]


def config(**changes: Any) -> _Config:
    """Change settings, for good or (in a `with` statement) for a block.

    Args:
        chunks: run every program in this many chunks wherever it can be cut (at most one row a
            chunk); None: as few as fit into memory.
        memory_limit: bytes that all tensors may take, an int or a text such as "512MiB"; None: what
            the device has free.

    Raises:
        TypeError, ValueError: an unknown setting, or a value that is none.

    Example:
        >>> import torch, koila
        >>> with koila.config(chunks=3):
        ...     koila.lazy(torch.ones(7, 2)).sum().item()
        14.0
    """
    unknown = sorted(set(changes) - set(_settings))
    if unknown:
        raise TypeError(f"config: unknown setting {unknown[0]!r}; there are {sorted(_settings)}")
    before = dict(_settings)
    after = dict(_settings)
    if "chunks" in changes:
        after["chunks"] = _check_chunks(changes["chunks"])
    if "memory_limit" in changes:
        after["memory_limit"] = parse_bytes(changes["memory_limit"])
    _settings.update(after)
    return _Config(before)
