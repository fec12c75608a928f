# SPDX-License-Identifier: Apache-2.0
"""The memory of this machine and the limits of this process's control groups, on Linux."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


def _read(path: Path) -> str:
    """Return the text of a file in /proc or /sys; empty if there is none."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _read_int(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None  # "max" means no limit


def _kilobytes(path: Path) -> dict[str, int]:
    """Return bytes by name, from lines such as "VmData:  1234 kB"."""
    found = {}
    for line in _read(path).splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB":
            found[name] = int(words[0]) * 1024
    return found


def status() -> dict[str, int]:
    """Return the memory of this process, in bytes, by the kernel's names."""
    return _kilobytes(_PROC / "self/status")


def available() -> int | None:
    """Return the bytes that can be allocated without swapping; None: the kernel does not say."""
    return _kilobytes(_PROC / "meminfo").get("MemAvailable")


@dataclass(frozen=True)
class _Files:
    """The files of a version of control groups."""

    root: Path
    limit: str  # the file with the limit
    used: str  # the file with the bytes used
    cache: str  # the entry of memory.stat with the cached pages, which the kernel can drop


def _groups() -> Iterator[tuple[Path, _Files]]:
    """Yield the control groups of this process and all groups that contain them. In a container,
    /proc names the path on the host, while the files of the group are at the root."""
    second = _Files(_CGROUPS, "memory.max", "memory.current", "inactive_file")
    first = _Files(
        _CGROUPS / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
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
    """Yield the bytes that each control group still allows."""
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
    """Return the bytes of "all memory", of which a memory_limit can be a share: the memory of the
    current GPU, if there is one; else that of the machine, or what the control groups of this
    process allow, if that is less. Raise a RuntimeError if the kernel does not say."""
    if torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    found = [_read_int(group / files.limit) for group, files in _groups()]
    sizes = [n for n in (*found, _kilobytes(_PROC / "meminfo").get("MemTotal")) if n is not None]
    if not sizes:
        raise RuntimeError("/proc/meminfo does not say how much memory there is")
    return min(sizes)
