# SPDX-License-Identifier: Apache-2.0
"""What memory this machine, and the control groups that this process is in, have: for Linux."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


def _read(path: Path) -> str:
    """The text of a file of the kernel's; empty where there is none."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _read_int(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None  # "max" is no limit


def _kilobytes(path: Path) -> dict[str, int]:
    """Bytes by name from lines such as "VmData:  1234 kB"."""
    found = {}
    for line in _read(path).splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB":
            found[name] = int(words[0]) * 1024
    return found


def status() -> dict[str, int]:
    """This process's own bytes, by the kernel's names."""
    return _kilobytes(_PROC / "self/status")


def available() -> int | None:
    """Bytes that the kernel can hand out without swapping; None where it does not say."""
    return _kilobytes(_PROC / "meminfo").get("MemAvailable")


@dataclass(frozen=True)
class _Files:
    """Where a version of control groups says what."""

    root: Path
    limit: str
    used: str
    cache: str  # in memory.stat: pages that the kernel drops before it ends a process


def _groups() -> Iterator[tuple[Path, _Files]]:
    """The control groups that this process is in, each with those above it.

    In a container the path is that of the host, while the group's own files are at the root.
    """
    second = _Files(_CGROUPS, "memory.max", "memory.current", "inactive_file")
    first = _Files(
        _CGROUPS / "memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    )
    paths = {"": "/", "memory": "/"}  # by controller; version 2 has one group for all
    for line in _read(_PROC / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), path))
    for files, path in ((second, paths[""]), (first, paths["memory"])):
        below = PurePosixPath(path.lstrip("/"))
        for group in (below, *below.parents):
            yield files.root / group, files


def left_in_groups() -> Iterator[int]:
    """Bytes that each control group still allows."""
    for group, files in _groups():
        limit, used = _read_int(group / files.limit), _read_int(group / files.used)
        if limit is None or used is None:
            continue
        cache = 0
        for line in _read(group / "memory.stat").splitlines():
            name, _, text = line.partition(" ")
            if name == files.cache and text.isdigit():
                cache = int(text)
        yield limit - max(0, used - cache)


def total() -> int:
    """Bytes that a share of "all memory" is of: of the current GPU where there is one, else of the
    machine, or of the control group that this process is in, if it allows less.

    Raises:
        RuntimeError: nobody says how much there is.
    """
    if torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    found = [_read_int(group / files.limit) for group, files in _groups()]
    known = [n for n in (*found, _kilobytes(_PROC / "meminfo").get("MemTotal")) if n is not None]
    if not known:
        raise RuntimeError("/proc/meminfo does not say how much memory there is")
    return min(known)
