# SPDX-License-Identifier: Apache-2.0
"""How many bytes a step may use: what the user allows, or what the device has free."""

from __future__ import annotations

import gc
import math
import os
import resource
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from koila import _core
from koila.basics import config, machine
from koila.memory import resident, storages

# What the interpreter and torch's own threads may still take beside tensors.
SLACK = 16 * 2**20
# cuBLAS takes a workspace for each thread that calls it, forward and backward: of 32 MiB at most.
CUDA_SLACK = 64 * 2**20
# How many kernels oneDNN keeps, which variables say so, and what one takes: 0.3 to 0.5 MiB.
_KERNELS, _KERNEL_BYTES = 1024, 2**19
_KERNELS_KEPT = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY")
# A step that meets more kernels than are kept compiles them anew, so they are not fewer than this.
_KERNELS_SHARE, _LEAST_KERNELS = 1 / 16, 8

#: From what size on freed blocks go back at once; None: as malloc sees fit.
_threshold: int | None = None


#: A heap that fragments may take some times what its tensors do. Where that is left, it may: memory
#: that goes back at each free comes in new pages, which take a twentieth of a step and more.
_HEAP_SHARE = 4
#: Smaller blocks stay on the heap, where they leave holes of about their size: a small share of
#: what is left to a process. The least costs each call new pages, the most nearly nothing.
_BLOCK_SHARE, _LEAST_BLOCK, _MOST_BLOCK = 1 / 256, 2**16, 2**22


def fix_malloc(left: float = 0.0) -> None:
    """Make blocks of memory that are freed go back to the system at once.

    Args:
        left: bytes that a limit leaves. Of more, larger blocks may stay with the process.
    """
    global _threshold
    size = int(min(max(_BLOCK_SHARE * left, _LEAST_BLOCK), _MOST_BLOCK))
    if _threshold is None or size < _threshold:
        _threshold = size
        _core.fix_malloc(size)


def _limits() -> tuple[int, int]:
    """The process's own limits on data and on address space, as they are now."""
    return resource.getrlimit(resource.RLIMIT_DATA)[0], resource.getrlimit(resource.RLIMIT_AS)[0]


def is_bound() -> bool:
    """Whether this process has a limit of its own, which code that libraries compile counts
    against."""
    return any(limit != resource.RLIM_INFINITY for limit in _limits())


def _left_to_process() -> Iterator[int]:
    """Bytes that each of the process's own limits still allows."""
    if not is_bound():
        return
    status = machine.status()
    for limit, name in zip(_limits(), ("VmData", "VmSize"), strict=True):
        if limit != resource.RLIM_INFINITY and name in status:
            yield limit - status[name]


def _kept_back(left: int) -> int:
    """Of what a limit leaves, what others get: half of a little, which may still do for both."""
    return min(SLACK, max(0, left) // 2)


def keep_fewer_kernels() -> None:
    """Where a limit is set for this process or its control groups, let the kernels that oneDNN
    compiles take a small share of what is left at most.

    oneDNN compiles kernels for each shape that it meets and keeps `_KERNELS` of them, for eager's
    steps too: hundreds of MiB where shapes are many. It reads how many before its first kernel, and
    never again. An environment that says how many is left as it is.
    """
    left = min((*machine.left_in_groups(), *_left_to_process()), default=None)
    if left is None or any(name in os.environ for name in _KERNELS_KEPT):
        return
    kept = max(_LEAST_KERNELS, int(_KERNELS_SHARE * left) // _KERNEL_BYTES)
    if kept < _KERNELS:
        os.environ[_KERNELS_KEPT[0]] = str(kept)


def is_limited() -> bool:
    """Whether the user, or the system for this process, allows less than there is."""
    return config.get("memory_limit") is not None or is_bound()


def slack() -> int:
    """Bytes that are kept back for what a first step takes beside tensors."""
    return min(map(_kept_back, _left_to_process()), default=0)


def free_on_cpu() -> int:
    """Bytes that this process may still take: the least that any limit leaves."""
    left: list[int] = []
    available = machine.available()
    if available is not None:
        left.append(available)
    left.extend(machine.left_in_groups())
    for bytes_left in _left_to_process():
        fix_malloc(bytes_left)
        left.append(bytes_left - _kept_back(bytes_left))
    return max(0, min(left)) if left else 2**62


def _fraction(index: int) -> float:
    """The share of a GPU that this process may take."""
    ask = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    try:
        return float(ask(index)) if ask is not None else 1.0
    except RuntimeError:  # an allocator of the user's own knows of none
        return 1.0


def _stats(index: int) -> dict[str, int]:
    """What the allocator of a GPU tells of itself; nothing where it is one of the user's own."""
    try:
        return torch.cuda.memory_stats(index)
    except RuntimeError:
        return {}


def free_on_cuda(device: torch.device) -> int:
    """Bytes that the allocator can still hand out on a GPU.

    That is what the driver has and what the allocator has cached, but for what is in use (by
    another stream too) and the free parts of blocks in use, into which not much may fit. A fraction
    of the device set for this process bounds what the allocator may hold. The libraries' own
    buffers, which they take on their first call, are kept back.
    """
    index = device.index if device.index is not None else torch.cuda.current_device()
    free, total = torch.cuda.mem_get_info(index)
    stats = _stats(index)
    reserved = stats.get("reserved_bytes.all.current", 0)
    # With cudaMallocAsync only what is allocated is counted.
    names = ("active_bytes.all.current", "allocated_bytes.all.current")
    taken = max(stats.get(name, 0) for name in names)
    taken += stats.get("inactive_split_bytes.all.current", 0)
    left = free + max(0, reserved - taken)
    fraction = _fraction(index)
    if fraction < 1:
        left = min(left, int(total * fraction) - taken)
    return max(0, left - CUDA_SLACK)


#: More bytes than after the last time are worth the while to look for holes.
_MORE_RESIDENT = 2**22
_after_trim = 0


def trim(now: int) -> None:
    """Give back what is free between small blocks on malloc's heap, where that is to be small and
    more is resident `now` than when that was done last."""
    global _after_trim
    if _threshold is None or now <= _after_trim + _MORE_RESIDENT:
        _after_trim = min(_after_trim, now)
        return
    _core.fix_malloc(_threshold)
    _after_trim = resident.n_bytes() or now


def defragment() -> None:
    """Give back what malloc and the allocators of GPUs have cached, after memory ran out.

    The latter do so themselves before they give up; but what is left then is cut to the sizes of
    the run that failed, and the next has others.
    """
    if _threshold is not None:
        _core.fix_malloc(_threshold)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def taken_on_cuda(device: torch.device) -> int:
    """Bytes of all tensors on a GPU."""
    index = device.index if device.index is not None else torch.cuda.current_device()
    return _stats(index).get("allocated_bytes.all.current", 0)


class Meter:
    """Bytes that tensors on GPUs take at the worst moment, beyond what was there at its start."""

    def __init__(self) -> None:
        self._before = {index: _stats(index) for index in _used_gpus()}

    def bytes(self) -> int | None:
        """None where nobody counts, or a peak from before its start was not reached again."""
        peak = "allocated_bytes.all.peak"
        after = {index: _stats(index) for index in self._before}
        if not after or any(after[i].get(peak, 0) <= self._before[i].get(peak, 0) for i in after):
            return None
        current = "allocated_bytes.all.current"
        return sum(after[i].get(peak, 0) - self._before[i].get(current, 0) for i in after)


def _used_gpus() -> list[int]:
    """The GPUs that hold tensors already: asking others sets them up."""
    if not torch.cuda.is_initialized():
        return []
    found = range(torch.cuda.device_count())
    return [i for i in found if _stats(i).get("reserved_bytes.all.current", 0) > 0]


def _storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind some tensors."""
    seen = {}
    with torch._C.DisableTorchFunctionSubclass():  # of a tensor that is to be written: not for this
        for tensor in tensors:
            if tensor.layout == torch.strided:
                storage = tensor.untyped_storage()
                seen[storage._cdata] = storage.nbytes()
    return sum(seen.values())


def taken(device: torch.device, held: Iterable[torch.Tensor]) -> int:
    """Bytes of all tensors on a device, `held` among them, and of these alone where nobody knows
    of others."""
    here = [t for t in held if t.device == device]
    if device.type == "cpu":
        return storages.n_bytes(here)
    known = _storage_bytes(here)
    return max(known, taken_on_cuda(device)) if device.type == "cuda" else known


def outside(device: torch.device, held: Iterable[torch.Tensor]) -> int:
    """Bytes of tensors on a device that are not of `held`, counted against
    `config(memory_limit=)`."""
    if config.get("memory_limit") is None:
        return 0
    held = list(held)
    return max(0, taken(device, held) - _storage_bytes(t for t in held if t.device == device))


def counted(device: torch.device, entered: Iterable[torch.Tensor]) -> list[tuple[str, int]]:
    """What counts against `config(memory_limit=)`: kinds of tensors with their bytes, none twice.

    Args:
        device: where it is.
        entered: the tensors that a program reads. Of subclasses of the user's, or koila's, none is
            asked: they may run what waits.
    """
    with torch._C.DisableTorchFunctionSubclass():
        return _counted(device, entered)


def _counted(device: torch.device, entered: Iterable[torch.Tensor]) -> list[tuple[str, int]]:
    here = [t for t in entered if t.device == device and t.layout == torch.strided]
    leaves = [t for t in here if t.is_leaf and t.requires_grad]
    foreign = [t for t in here if t.numel() and not t.untyped_storage().resizable()]
    kinds = (
        ("parameters", leaves),
        ("gradients", [t.grad for t in leaves if t.grad is not None]),
        ("optimizer state", [t for t in optimizer_state() if t.device == device]),
        ("tensors in NumPy's or shared memory", foreign),
        ("the batch and other inputs", here),
    )
    found, before, all_before = [], 0, list[torch.Tensor]()
    for name, tensors in kinds:
        all_before += tensors
        total = _storage_bytes(all_before)
        found += [(name, total - before)] if total > before else []
        before = total
    others = taken(device, all_before) - before
    return [*found, ("other tensors", others)] if others > 0 else found


def free_bytes(
    device: torch.device,
    held: Iterable[torch.Tensor],
    is_alone: bool = False,
    needed: float = math.inf,
) -> int:
    """Bytes that a step may add on `device`.

    Args:
        device: where the step runs.
        held: what the step itself holds already, of the tensors that are counted against
            `config(memory_limit=)`.
        is_alone: as if there were no others.
        needed: what it would add at most, if that is known: of memory that is free many times over,
            what was free a moment ago is believed.
    """
    limit = config.get("memory_limit")
    if math.isfinite(needed) and _is_plenty(needed):
        free = int(_quick[0])
    else:
        free = free_on_cuda(device) if device.type == "cuda" else free_on_cpu()
    if limit is None:
        return free
    if device.type == "cpu" and min(free, limit) < _HEAP_SHARE * needed:
        fix_malloc(min(free, limit))
    if is_alone:
        return max(0, min(free, limit - _storage_bytes(t for t in held if t.device == device)))
    return max(0, min(free, limit - taken(device, held)))


_QUICK_SECONDS = 0.5
_quick: tuple[float, float, tuple[float, ...]] = (0.0, -1.0, ())


def _bounds() -> tuple[float, ...]:
    """What bounds this process now: its own limits, and its shares of the GPUs."""
    n_gpus = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    return *_limits(), *map(_fraction, range(n_gpus))


def _free_anywhere() -> float:
    """The least that is free on the CPU and on the GPUs that hold tensors already."""
    free = float(free_on_cpu())
    for index in _used_gpus():
        free = min(free, float(free_on_cuda(torch.device("cuda", index))))
    return free


def _is_plenty(n_bytes: float) -> bool:
    """Whether 64 times as much is free, or was half a second ago under the same limits.

    Reading what is free takes a tenth of a millisecond and more: too long for each step of a small
    model. The rest would have to be taken in between for what is believed to be wrong. A program
    that is not so small runs for longer than it takes to ask again.
    """
    global _quick
    now, bounds = time.monotonic(), _bounds()
    is_recent = _quick[1] >= 0 and now - _quick[1] <= _QUICK_SECONDS and bounds == _quick[2]
    if not is_recent or 64 * n_bytes > _quick[0]:
        _quick = (_free_anywhere(), now, bounds)
    return 64 * n_bytes <= _quick[0]


def is_ample(n_bytes: int) -> bool:
    """Whether a program whose values take `n_bytes` certainly fits, gradients and all."""
    return _is_plenty(n_bytes) or 4 * n_bytes <= _quick[0]


_optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def note_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Remember an optimizer that stepped: its state counts as memory that is taken."""
    _optimizers.add(optimizer)


#: How many tensors of a parameter's size torch's optimizers keep for it, from their first step on.
_N_KEPT: dict[type[torch.optim.Optimizer], Callable[[dict[str, Any]], int]] = {
    torch.optim.Adam: lambda group: 2 + bool(group["amsgrad"]),
    torch.optim.NAdam: lambda group: 2,
    torch.optim.RAdam: lambda group: 2,
    torch.optim.Adamax: lambda group: 2,
    torch.optim.Adadelta: lambda group: 2,
    torch.optim.Rprop: lambda group: 2,
    torch.optim.ASGD: lambda group: 1,
    torch.optim.SGD: lambda group: int(group["momentum"] != 0),
    torch.optim.RMSprop: lambda group: 1 + (group["momentum"] > 0) + bool(group["centered"]),
}
_searched = storages.Clock()


def coming_state(parameters: Iterable[torch.Tensor], is_sure: bool = False) -> int:
    """Bytes that optimizers which have yet to make their first step will keep for some parameters.

    The steps after it have so much less. Optimizers are looked for among all objects: seldom, so
    that it takes little of the time; in between nothing is known of them, but for who has to be
    sure.
    """
    if not is_sure and not _searched.is_due():
        return 0
    with _searched:
        found = [o for o in gc.get_objects() if issubclass(type(o), torch.optim.Optimizer)]
    wanted = {id(parameter) for parameter in parameters}
    n_bytes = 0
    for optimizer in found:
        kinds = [kind for kind in type(optimizer).__mro__ if kind in _N_KEPT]
        if not kinds or optimizer in _optimizers:
            continue
        for group in optimizer.param_groups:
            size = sum(p.nbytes for p in group["params"] if id(p) in wanted and p.requires_grad)
            n_bytes += _N_KEPT[kinds[0]](group) * size
    return n_bytes


def optimizer_state() -> list[torch.Tensor]:
    """The tensors that optimizers keep between steps."""
    return [
        tensor
        for optimizer in list(_optimizers)
        for state in optimizer.state.values()
        for tensor in state.values()
        if isinstance(tensor, torch.Tensor)
    ]
