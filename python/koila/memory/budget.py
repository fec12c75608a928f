# SPDX-License-Identifier: Apache-2.0
"""The bytes that a step may use: what the user's limit leaves, or what the device has free."""

from __future__ import annotations

import math
import os
import resource
import time
from collections.abc import Iterable, Iterator, Sequence

import torch

from koila import _core
from koila.basics import config, machine
from koila.memory import heap, optimizers, resident, storages

# Kept back of a limit of the process, for what the interpreter and torch's threads take.
SLACK = 16 * 2**20
# Kept back on a GPU: cuBLAS allocates a workspace of at most 32 MiB for each thread that calls it,
# of which there are two, one forward and one backward.
CUDA_SLACK = 64 * 2**20
# The kernels that oneDNN caches by default, an upper bound of the bytes that one takes on average
# (0.3 to 0.7 MiB; with AVX-512, the backward of a convolution with a stride takes up to 5 MiB), and
# the environment variables that set the size of the cache.
_KERNELS, _KERNEL_BYTES = 1024, 2**20
_KERNELS_KEPT = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY")
# The share of the memory left that cached kernels may take, and the least number of kernels: a step
# that uses more kernels than are cached compiles them again each time.
_KERNELS_SHARE, _LEAST_KERNELS = 1 / 16, 8


def _limits() -> tuple[int, int]:
    """Return the current limits of the process on data and on address space (RLIMIT_DATA, _AS)."""
    return resource.getrlimit(resource.RLIMIT_DATA)[0], resource.getrlimit(resource.RLIMIT_AS)[0]


def is_bound() -> bool:
    """Tell whether the process has a limit on its data or address space. All its memory counts
    against it, that of compiled kernels too."""
    return _limits() != (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


def _left_to_process() -> Iterator[int]:
    """Yield the bytes that each limit of the process still allows."""
    if not is_bound():
        return
    status = machine.status()
    for limit, name in zip(_limits(), ("VmData", "VmSize"), strict=True):
        if limit != resource.RLIM_INFINITY and name in status:
            yield limit - status[name]


def _kept_back(left: int) -> int:
    """Return how many of the bytes that a limit of the process leaves koila keeps free for
    libraries: SLACK, but at most half."""
    return min(SLACK, max(0, left) // 2)


def keep_fewer_kernels() -> None:
    """Limit oneDNN's cache of kernels if the process or its control groups have a memory limit.

    oneDNN compiles kernels for each shape and caches `_KERNELS` of them, hundreds of MiB with many
    shapes, in eager mode too. It reads the size of its cache once, before its first kernel. A size
    that the environment sets already is left as it is.
    """
    left = min((*machine.left_in_groups(), *_left_to_process()), default=None)
    if left is None or any(name in os.environ for name in _KERNELS_KEPT):
        return
    kept = max(_LEAST_KERNELS, int(_KERNELS_SHARE * left) // _KERNEL_BYTES)
    if kept < _KERNELS:
        os.environ[_KERNELS_KEPT[0]] = str(kept)


def is_limited() -> bool:
    """Tell whether the user set a memory_limit or the process has a limit."""
    return config.get("memory_limit") is not None or is_bound()


def slack() -> int:
    """Return the bytes kept back for what libraries take in a first step."""
    return min(map(_kept_back, _left_to_process()), default=0)


def free_on_cpu() -> int:
    """Return the bytes that this process may still allocate: the least that any limit leaves."""
    left: list[int] = []
    available = machine.available()
    if available is not None:
        left.append(available)
    left.extend(machine.left_in_groups())
    for bytes_left in _left_to_process():
        heap.fix_malloc(bytes_left)
        left.append(bytes_left - _kept_back(bytes_left))
    heap.reuse_freed()
    return max(0, min(left)) if left else 2**62


def _fraction(index: int) -> float:
    """Return the share of a GPU's memory that this process may use."""
    ask = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    try:
        return float(ask(index)) if ask is not None else 1.0
    except RuntimeError:  # a custom allocator has no fraction
        return 1.0


def _stats(index: int) -> dict[str, int]:
    """Return the statistics of a GPU's allocator; empty for a custom allocator."""
    try:
        return torch.cuda.memory_stats(index)
    except RuntimeError:
        return {}


def free_on_cuda(device: torch.device) -> int:
    """Return the bytes that the allocator can still hand out on a GPU.

    These are what the driver has free and what the allocator has cached and does not use, on any
    stream. The free parts of blocks in use do not count, since little may fit into them. A memory
    fraction set for this process bounds the result. CUDA_SLACK is kept back for the buffers that
    libraries allocate on their first call.
    """
    index = device.index if device.index is not None else torch.cuda.current_device()
    free, total = torch.cuda.mem_get_info(index)
    stats = _stats(index)
    reserved = stats.get("reserved_bytes.all.current", 0)
    # cudaMallocAsync counts allocated bytes only.
    names = ("active_bytes.all.current", "allocated_bytes.all.current")
    taken = max(stats.get(name, 0) for name in names)
    taken += stats.get("inactive_split_bytes.all.current", 0)
    left = free + max(0, reserved - taken)
    fraction = _fraction(index)
    if fraction < 1:
        left = min(left, int(total * fraction) - taken)
    return max(0, left - CUDA_SLACK)


def watch() -> resident.Peak:
    """Begin to measure the peak of the process's resident memory, and keep that near
    `config(memory_limit=)` if there is one."""
    limit, now = config.get("memory_limit"), resident.n_bytes()
    if limit is None or now is None:
        return resident.Peak()
    return heap.Bounded(limit, storages.n_bytes([]), now)


def defragment() -> None:
    """Return the memory that malloc and the GPU allocators have cached, after memory ran out.

    The GPU allocators do so themselves before they fail; but afterwards their cache is split into
    blocks of the sizes of the failed run, and the next run has other sizes.
    """
    heap.free_of_mkl()
    _core.return_free()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def taken_on_cuda(device: torch.device) -> int:
    """Return the bytes of all tensors on a GPU."""
    index = device.index if device.index is not None else torch.cuda.current_device()
    return _stats(index).get("allocated_bytes.all.current", 0)


class Meter:
    """Measures the peak bytes of tensors on GPUs since its creation, beyond those at that time."""

    def __init__(self) -> None:
        self._before = {i: _stats(i) for i in _used_gpus()} if torch.cuda.is_initialized() else {}

    def bytes(self) -> int | None:
        """Return the peak bytes; None: allocators keep no count, or an earlier peak was higher."""
        if not self._before:
            return None
        peak = "allocated_bytes.all.peak"
        after = {index: _stats(index) for index in self._before}
        if any(after[i].get(peak, 0) <= self._before[i].get(peak, 0) for i in after):
            return None
        current = "allocated_bytes.all.current"
        return sum(after[i].get(peak, 0) - self._before[i].get(current, 0) for i in after)


def _used_gpus() -> list[int]:
    """Return the GPUs that hold tensors: reading the statistics of any other would initialize
    it."""
    if not torch.cuda.is_initialized():
        return []
    found = range(torch.cuda.device_count())
    return [i for i in found if _stats(i).get("reserved_bytes.all.current", 0) > 0]


def _storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the distinct storages of tensors."""
    seen = {}
    # A statistic whose write is pending is a subclass that would run the pending program here.
    with torch._C.DisableTorchFunctionSubclass():
        for tensor in tensors:
            if tensor.layout == torch.strided:
                storage = tensor.untyped_storage()
                seen[storage._cdata] = storage.nbytes()
    return sum(seen.values())


def taken(device: torch.device, held: Iterable[torch.Tensor]) -> int:
    """Return the bytes of all tensors on a device, `held` and their gradients included; of these
    alone if the device keeps no count."""
    if device.type == "cpu":
        with torch._C.DisableTorchFunctionSubclass():  # statistics that are watched are a subclass
            return storages.n_bytes(list(held))
    n_held = _held_bytes(device, held)
    return max(n_held, taken_on_cuda(device)) if device.type == "cuda" else n_held


def _held_bytes(device: torch.device, held: Iterable[torch.Tensor]) -> int:
    """Return the bytes of tensors on a device, and of their gradients."""
    with torch._C.DisableTorchFunctionSubclass():  # as above
        here = [tensor for tensor in held if tensor.device == device]
        grads = [tensor.grad for tensor in here if tensor.is_leaf]
    return _storage_bytes(here + [grad for grad in grads if grad is not None])


def outside(device: torch.device, held: Iterable[torch.Tensor]) -> int:
    """Return the bytes of tensors on a device that are not in `held` and count against
    `config(memory_limit=)`."""
    if config.get("memory_limit") is None:
        return 0
    held = list(held)
    return max(0, taken(device, held) - _held_bytes(device, held))


#: What `counted` calls the gradients of parameters.
GRADIENTS = "gradients"


def counted(
    device: torch.device, parameters: Sequence[torch.Tensor], entered: Iterable[torch.Tensor]
) -> list[tuple[str, int]]:
    """Return what counts against `config(memory_limit=)` on a device: kinds of tensors with their
    bytes. A storage counts for the first of its kinds. `parameters` are the leaves that a program
    reads, `entered` all tensors that it reads."""
    found, before, all_before = [], 0, list[torch.Tensor]()
    with torch._C.DisableTorchFunctionSubclass():  # they could run the pending program
        here = [t for t in entered if t.device == device and t.layout == torch.strided]
        leaves = [t for t in parameters if t.device == device and t.layout == torch.strided]
        foreign = [t for t in here if t.numel() and not t.untyped_storage().resizable()]
        kinds = (
            ("parameters", leaves),
            (GRADIENTS, [t.grad for t in leaves if t.grad is not None]),
            ("optimizer state", [t for t in optimizers.state() if t.device == device]),
            ("tensors in NumPy's or shared memory", foreign),
            ("the batch and other inputs", here),
        )
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
    """Return the bytes that a step may allocate on a device.

    Args:
        device: where the step runs.
        held: the existing tensors of the step, which count against `config(memory_limit=)`, as do
            their gradients.
        is_alone: ignore all other tensors.
        needed: the most that the step will allocate, if known. If many times as much was free a
            moment ago, that number is used again.
    """
    limit = config.get("memory_limit")
    if math.isfinite(needed) and _is_plenty(needed):
        free = int(_quick[0])
    else:
        free = free_on_cuda(device) if device.type == "cuda" else free_on_cpu()
    if limit is None:
        return free
    if is_alone:
        return max(0, min(free, limit - _held_bytes(device, held)))
    return max(0, min(free, limit - taken(device, held)))


def least_left() -> int:
    """Return the least bytes left on the CPU and any GPU that holds tensors, under the limit."""
    gpus = (torch.device("cuda", index) for index in _used_gpus())
    return min(free_bytes(device, ()) for device in (torch.device("cpu"), *gpus))


_QUICK_SECONDS = 0.5
_quick: tuple[float, float, tuple[float, ...]] = (0.0, -1.0, ())


def _free_anywhere() -> float:
    """Return the least bytes free on the CPU and any GPU that holds tensors."""
    gpus = (torch.device("cuda", index) for index in _used_gpus())
    return float(min((free_on_cpu(), *map(free_on_cuda, gpus))))


def _is_plenty(n_bytes: float) -> bool:
    """Tell whether 64 times `n_bytes` are free, or were half a second ago under the same limits.

    Reading what is free takes a tenth of a millisecond or more, too long for each step of a small
    model. The old number would mislead only if 63 times `n_bytes` were allocated in between. If a
    program is larger than that, reading again takes little of its time.
    """
    global _quick
    now = time.monotonic()
    bounds: tuple[float, ...] = _limits()
    if torch.cuda.is_initialized():
        bounds += tuple(map(_fraction, range(torch.cuda.device_count())))
    is_recent = _quick[1] >= 0 and now - _quick[1] <= _QUICK_SECONDS and bounds == _quick[2]
    if not is_recent or 64 * n_bytes > _quick[0]:
        _quick = (_free_anywhere(), now, bounds)
    return 64 * n_bytes <= _quick[0]


def is_ample(n_bytes: int) -> bool:
    """Tell whether a program with values of `n_bytes` certainly fits, with its gradients."""
    return _is_plenty(n_bytes) or 4 * n_bytes <= _quick[0]
