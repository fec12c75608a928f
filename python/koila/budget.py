"""How many bytes a step may use: what the user allows, or what the device has free."""

from __future__ import annotations

import resource
import time
import weakref
from collections.abc import Iterable
from pathlib import Path

import torch

from koila import _core, config

_CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)
# What the interpreter and torch's own threads may still take beside tensors.
SLACK = 16 * 2**20

_fixed = False


def _read_int(path: str) -> int | None:
    try:
        text = Path(path).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _status() -> dict[str, int]:
    """Bytes by name from /proc/self/status."""
    found = {}
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return {}
    for line in lines:
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB":
            found[name] = int(words[0]) * 1024
    return found


def _available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def fix_malloc() -> None:
    """Under a limit on the CPU, make freed memory go back at once."""
    global _fixed
    if not _fixed:
        _fixed = True
        _core.fix_malloc()


def _limits() -> tuple[int, int]:
    """The process's own limits on data and on address space, as they are now."""
    return resource.getrlimit(resource.RLIMIT_DATA)[0], resource.getrlimit(resource.RLIMIT_AS)[0]


def free_on_cpu() -> int:
    """Bytes that this process may still take: the least that any limit leaves."""
    left: list[int] = []
    available = _available()
    if available is not None:
        left.append(available)
    for limit_file, used_file in _CGROUP_FILES:
        limit, used = _read_int(limit_file), _read_int(used_file)
        if limit is not None and used is not None:
            left.append(limit - used)
    status = _status()
    for limit, name in zip(_limits(), ("VmData", "VmSize"), strict=True):
        if limit != resource.RLIM_INFINITY and name in status:
            fix_malloc()
            left.append(limit - status[name] - SLACK)
    return max(0, min(left)) if left else 2**62


def free_on_cuda(device: torch.device) -> int:
    """Bytes that the allocator can still hand out on a GPU, its own cache included."""
    free, total = torch.cuda.mem_get_info(device)
    stats = torch.cuda.memory_stats(device)
    allocated = stats.get("allocated_bytes.all.current", 0)
    reserved = stats.get("reserved_bytes.all.current", 0)
    fragments = stats.get("inactive_split_bytes.all.current", 0)
    usable = free + max(0, reserved - allocated - fragments)
    fraction = torch.cuda.get_per_process_memory_fraction(device)
    return int(min(usable, total * fraction - allocated))


def _storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind some tensors."""
    seen = {}
    for tensor in tensors:
        if tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            seen[storage._cdata] = storage.nbytes()
    return sum(seen.values())


def free_bytes(device: torch.device, held: Iterable[torch.Tensor]) -> int:
    """Bytes that a step may add on `device`.

    Args:
        device: where the step runs.
        held: tensors that are there already, counted against `config(memory_limit=)`.
    """
    limit = config.get("memory_limit")
    free = free_on_cuda(device) if device.type == "cuda" else free_on_cpu()
    if limit is None:
        return free
    if device.type == "cpu":
        fix_malloc()
    return max(0, min(free, limit - _storage_bytes(t for t in held if t.device == device)))


_QUICK_SECONDS = 0.5
_quick: tuple[float, float, tuple[int, int]] = (0.0, -1.0, (0, 0))


def quick_free() -> float:
    """What was free half a second ago at most, under the same limits: for wide margins."""
    global _quick
    now, limits = time.monotonic(), _limits()
    if now - _quick[1] > _QUICK_SECONDS or _quick[1] < 0 or limits != _quick[2]:
        free = float(free_on_cpu())
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            device = torch.device("cuda", torch.cuda.current_device())
            free = min(free, float(free_on_cuda(device)))
        _quick = (free, now, limits)
    return _quick[0]


_optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def note_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Remember an optimizer that stepped: its state counts as memory that is taken."""
    _optimizers.add(optimizer)


def optimizer_state() -> list[torch.Tensor]:
    """The tensors that optimizers keep between steps."""
    return [
        tensor
        for optimizer in list(_optimizers)
        for state in optimizer.state.values()
        for tensor in state.values()
        if isinstance(tensor, torch.Tensor)
    ]
