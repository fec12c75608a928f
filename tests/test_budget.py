# SPDX-License-Identifier: Apache-2.0
"""How much memory koila believes there is: the system's, its groups', the process's, the GPU's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import koila
from koila.basics import machine
from koila.basics.config import parse_bytes
from koila.memory import budget, heap
from limits import there

MIB = 2**20
GIB = 2**30
CPU = torch.device("cpu")


# A system made of files ---------------------------------------------------------------------------


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A system with 8 GiB available, no control group, and no limit of the process."""
    monkeypatch.setattr(machine, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(machine, "_CGROUPS", tmp_path / "cgroup")
    unlimited = (budget.resource.RLIM_INFINITY, budget.resource.RLIM_INFINITY)
    monkeypatch.setattr(budget, "_limits", lambda: unlimited)
    write(tmp_path / "proc/meminfo", "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n")
    return tmp_path


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def write_group(group: Path, limit: object, used: int, cache: int = 0) -> None:
    """A control group of version 2."""
    write(group / "memory.max", limit)
    write(group / "memory.current", used)
    write(group / "memory.stat", f"anon 1\ninactive_file {cache}\nactive_file 5")


def test_what_the_system_has_available(system: Path) -> None:
    assert budget.free_on_cpu() == 8 * GIB


def test_no_files_at_all(system: Path) -> None:
    """Where nothing says how much there is, nothing is refused."""
    (system / "proc/meminfo").unlink()
    assert budget.free_on_cpu() >= 2**60


def test_group_of_a_container(system: Path) -> None:
    """Inside a container its own group is at the root, whatever path the host has for it."""
    write(system / "proc/self/cgroup", "0::/")
    write_group(system / "cgroup", 2 * GIB, GIB)
    assert budget.free_on_cpu() == GIB
    write(system / "proc/self/cgroup", "0::/docker/0123")
    assert budget.free_on_cpu() == GIB


def test_group_without_a_limit(system: Path) -> None:
    write(system / "proc/self/cgroup", "0::/")
    write_group(system / "cgroup", "max", GIB)
    assert budget.free_on_cpu() == 8 * GIB


@pytest.mark.parametrize(
    ("inner", "outer", "left"), [(4 * GIB, 2 * GIB, GIB), (GIB + MIB, 4 * GIB, MIB)]
)
def test_groups_above_count(system: Path, inner: int, outer: int, left: int) -> None:
    """The limit of a group holds for all groups in it."""
    write(system / "proc/self/cgroup", "0::/user.slice/job.scope")
    write_group(system / "cgroup/user.slice/job.scope", inner, GIB)
    write_group(system / "cgroup/user.slice", outer, GIB)
    assert budget.free_on_cpu() == left


def test_cached_files_of_a_group_can_be_dropped(system: Path) -> None:
    """A group that read its data set is full of pages, and not of memory."""
    write(system / "proc/self/cgroup", "0::/")
    write_group(system / "cgroup", 2 * GIB, 2 * GIB - MIB, cache=GIB)
    assert budget.free_on_cpu() == GIB + MIB


def test_groups_of_version_1(system: Path) -> None:
    write(system / "proc/self/cgroup", "5:cpu,cpuacct:/a\n4:memory:/jobs/7\n0::/")
    group = system / "cgroup/memory/jobs/7"
    write(group / "memory.limit_in_bytes", 3 * GIB)
    write(group / "memory.usage_in_bytes", 2 * GIB)
    write(group / "memory.stat", f"inactive_file 1\ntotal_inactive_file {GIB // 2}")
    root = system / "cgroup/memory"
    write(root / "memory.limit_in_bytes", 9223372036854771712)  # version 1's way to say max
    write(root / "memory.usage_in_bytes", 5 * GIB)
    assert budget.free_on_cpu() == GIB + GIB // 2


def test_more_used_than_allowed(system: Path) -> None:
    write(system / "proc/self/cgroup", "0::/")
    write_group(system / "cgroup", GIB, 2 * GIB)
    assert budget.free_on_cpu() == 0


@pytest.mark.parametrize(("name", "which"), [("VmData", 0), ("VmSize", 1)])
def test_limits_of_the_process(
    system: Path, monkeypatch: pytest.MonkeyPatch, name: str, which: int
) -> None:
    """RLIMIT_DATA bounds private memory, RLIMIT_AS all addresses; some is left for others."""
    limits = [budget.resource.RLIM_INFINITY] * 2
    limits[which] = GIB
    monkeypatch.setattr(budget, "_limits", lambda: tuple(limits))
    monkeypatch.setattr(heap, "fix_malloc", lambda left: None)
    write(system / "proc/self/status", f"Name: python\n{name}:\t{600 * 1024} kB")
    assert budget.free_on_cpu() == GIB - 600 * MIB - budget.SLACK


# A process with limits of its own -----------------------------------------------------------------

LIMIT_SET_LATE = """
import resource, sys
from koila.basics import machine
from koila.memory import budget, heap, storages

limit, field = getattr(resource, sys.argv[1]), sys.argv[2]
assert budget.is_ample(200 * 2**20), budget.free_on_cpu()
bytes_limit = machine.status()[field] + 100 * 2**20
resource.setrlimit(limit, (bytes_limit, bytes_limit))
assert budget.free_on_cpu() <= 100 * 2**20 - budget.SLACK
assert not budget.is_ample(40 * 2**20)
assert budget.is_ample(10 * 2**20)
"""

FITS = """
import resource
import torch
import koila
from koila.basics import machine
from koila.memory import budget, heap, storages

torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(256, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 8))
x = torch.randn(20_000, 256)

def step(x):
    loss = model(x).pow(2).mean()
    loss.backward()
    return loss.detach()

want = step(koila.lazy(x[:64])).item()  # libraries and threads are there for good
gradients = [p.grad.zero_() for p in model.parameters()]
limit = machine.status()["VmData"] + 160 * 2**20
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
try:
    step(x)
except RuntimeError as error:
    assert "allocate memory" in str(error), error
else:
    raise AssertionError("the plain step fits: the limit is too high to show anything")
for p in model.parameters():
    p.grad = None
step(koila.lazy(x))
assert all(p.grad.isfinite().all() for p in model.parameters())
"""


CONVOLUTIONS = """
import resource, sys
import torch
from torch import nn
import koila
from koila.basics import machine
from koila.memory import budget, heap, storages

torch.set_num_threads(1)
torch.manual_seed(0)
widths = [3, 8, 12, 16]
layers = [
    nn.Sequential(nn.Conv2d(n, m, 3, padding=1), nn.ReLU()) for n, m in zip(widths, widths[1:])
]
model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
x = torch.randn(128, 3, 12, 12)
model(x[:1]).mean().backward()  # libraries and threads are there for good
# So is Python's table of names, which doubles, by 2 MiB, whenever that is full.
names = [sys.intern(f"name {i}") for i in range(100_000)]
del names
optimizer.zero_grad()
extra, n_chunks, n_steps = map(int, sys.argv[1:])
heap.fix_malloc(0)
limit = machine.status()["VmData"] + extra * 2**20
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
seen = []
for _ in range(n_steps):
    if n_chunks > 0:  # by hand
        for part in x.tensor_split(n_chunks):
            (model(part).pow(2).sum() / x[:, 0].numel()).backward()
    else:
        model(koila.lazy(x)).pow(2).mean().backward()
        seen.append(koila.report().n_chunks)
    optimizer.step()
    optimizer.zero_grad()
print(*seen)
"""


def run_python(code: str, *args: str) -> None:
    subprocess.run([sys.executable, "-c", code, *args], check=True, timeout=900)


def sizes_in(extra: int, n_chunks: int, n_steps: int) -> set[int] | None:
    """Train a convolutional net in so many MiB more, by hand in chunks or (0) lazily.

    Returns:
        The numbers of chunks that its steps had; None: it did not go through.
    """
    words = [sys.executable, "-c", CONVOLUTIONS, str(extra), str(n_chunks), str(n_steps)]
    run = subprocess.run(words, check=False, timeout=900, capture_output=True, text=True)
    return set(map(int, run.stdout.split())) if run.returncode == 0 else None


@pytest.fixture(scope="module")
def tight() -> int:
    """About the least MiB in which a loop by hand over two chunks goes through."""
    return next(extra for extra in range(8, 64, 2) if sizes_in(extra, 2, 8) is not None)


@pytest.mark.parametrize(("limit", "field"), [("RLIMIT_DATA", "VmData"), ("RLIMIT_AS", "VmSize")])
def test_a_limit_of_the_process_counts_at_once(limit: str, field: str) -> None:
    run_python(LIMIT_SET_LATE, limit, field)


def test_a_step_fits_into_a_limit_that_eager_breaks() -> None:
    run_python(FITS)


def test_one_shape_keeps_one_size_of_chunk(tight: int) -> None:
    """oneDNN compiles kernels for each size and keeps them: other sizes would take the rest."""
    sizes = sizes_in(tight + 2, 0, 200)
    assert sizes is not None
    assert len(sizes) == 1


def test_what_a_loop_by_hand_survives_is_not_refused(tight: int) -> None:
    """Kernels take nearly all of what the limit leaves: what is kept back is for them. Python asks
    for memory by the MiB, and may need one more for what is recorded."""
    assert sizes_in(tight + 1, 0, 40) is not None


# What is believed without looking again -----------------------------------------------------------


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What is free, and how often it was asked for."""
    asked = SimpleNamespace(bytes=GIB, times=0, now=100.0)

    def look() -> float:
        asked.times += 1
        return float(asked.bytes)

    monkeypatch.setattr(budget, "_free_anywhere", look)
    monkeypatch.setattr(budget, "_quick", (0.0, -1.0, ()))
    monkeypatch.setattr(budget, "_limits", lambda: (1, 2))
    monkeypatch.setattr(budget.time, "monotonic", lambda: asked.now)
    return asked


def test_small_programs_ask_twice_a_second(free: SimpleNamespace) -> None:
    for _ in range(5):
        assert budget.is_ample(MIB)
    assert free.times == 1
    free.now += 0.6
    assert budget.is_ample(MIB)
    assert free.times == 2


def test_large_programs_ask_each_time(free: SimpleNamespace) -> None:
    """A model may have been made since: half a second is enough for gigabytes."""
    assert budget.is_ample(GIB // 8)
    free.bytes = GIB // 4
    assert not budget.is_ample(GIB // 8)


def test_other_limits_are_looked_at(free: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    assert budget.is_ample(MIB)
    free.bytes = MIB
    monkeypatch.setattr(budget, "_limits", lambda: (1, 3))
    assert not budget.is_ample(MIB)


# memory_limit= ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        (None, None),
        (4096, 4096),
        ("512MiB", 512 * MIB),
        ("1.5 GiB", 3 * GIB // 2),
        ("2gb", 2 * 10**9),
        ("100B", 100),
        ("4294967296", 4 * GIB),
        ("7KB", 7000),
        ("1TiB", 2**40),
        ("4G", 4 * GIB),
        ("4g", 4 * GIB),
        ("4Gi", 4 * GIB),
        ("3M", 3 * MIB),
        ("7 K", 7 * 1024),
        ("0.5T", 2**39),
    ],
)
def test_sizes(text: int | str | None, n_bytes: int | None) -> None:
    assert parse_bytes(text) == n_bytes


@pytest.mark.parametrize("text", ["", "MiB", "12 parsecs", "-1MiB", "1e9", 0, -5, "0", 1.5])
def test_no_sizes(text: int | str) -> None:
    with pytest.raises(ValueError, match="memory_limit"):
        koila.config(memory_limit=text)


@pytest.mark.parametrize("limit", [1j, True, b"1MiB", [1]])
def test_no_kinds_of_size(limit: Any) -> None:
    with pytest.raises(TypeError, match="memory_limit"):
        koila.config(memory_limit=limit)


def test_limit_less_what_is_held(system: Path) -> None:
    """Views count once; what is on another device is not counted."""
    before = there()
    x = torch.zeros(MIB, dtype=torch.float32)
    held = [x, x[:10], x.view(-1, 2), torch.empty(MIB, device="meta")]
    with koila.config(memory_limit=before + 64 * MIB):
        assert budget.free_bytes(CPU, held) == 60 * MIB
    assert budget.free_bytes(CPU, held) == 8 * GIB


def test_limit_is_never_more_than_is_free(system: Path) -> None:
    with koila.config(memory_limit="1TiB"):
        assert budget.free_bytes(CPU, []) == 8 * GIB


def test_limit_that_is_taken_up_already(system: Path) -> None:
    with koila.config(memory_limit="1MiB"):
        assert budget.free_bytes(CPU, [torch.zeros(MIB)]) == 0


# A GPU that is not there --------------------------------------------------------------------------


class Gpu:
    """What torch.cuda would say of two devices, the second of which has not been used."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.info = {0: (6 * GIB, 16 * GIB), 1: (GIB, 16 * GIB)}
        self.stats: dict[int, dict[str, int]] = {0: {}, 1: {}}
        self.fraction = 1.0
        self.asked: list[int] = []
        fakes = {
            "mem_get_info": self.mem_get_info,
            "memory_stats": lambda index: self.stats[index],
            "get_per_process_memory_fraction": lambda index: self.fraction,
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "device_count": lambda: 2,
            "current_device": lambda: 0,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    def mem_get_info(self, index: int) -> tuple[int, int]:
        self.asked.append(index)
        return self.info[index]

    def hold(self, reserved: int, active: int, split: int = 0) -> None:
        self.stats[0] = {
            "reserved_bytes.all.current": reserved,
            "active_bytes.all.current": active,
            "inactive_split_bytes.all.current": split,
        }


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


CUDA = torch.device("cuda", 0)


def test_gpu_before_its_first_tensor(gpu: Gpu) -> None:
    assert budget.free_on_cuda(CUDA) == 6 * GIB - budget.CUDA_SLACK
    assert budget.free_on_cuda(torch.device("cuda")) == 6 * GIB - budget.CUDA_SLACK


def test_gpu_cache_is_free(gpu: Gpu) -> None:
    """Of 5 GiB that the allocator holds 2 are in use, and 1 is the rest of blocks in use."""
    gpu.hold(reserved=5 * GIB, active=2 * GIB, split=GIB)
    assert budget.free_on_cuda(CUDA) == 8 * GIB - budget.CUDA_SLACK


def test_gpu_fraction(gpu: Gpu) -> None:
    """A quarter of 16 GiB, of which 1 GiB is in use and half of one in pieces."""
    gpu.fraction = 0.25
    gpu.hold(reserved=2 * GIB, active=GIB, split=GIB // 2)
    assert budget.free_on_cuda(CUDA) == 4 * GIB - GIB - GIB // 2 - budget.CUDA_SLACK


def test_gpu_fraction_that_is_used_up(gpu: Gpu) -> None:
    gpu.fraction = 0.0625
    gpu.hold(reserved=2 * GIB, active=2 * GIB)
    assert budget.free_on_cuda(CUDA) == 0


def test_gpu_whose_allocator_counts_less(gpu: Gpu) -> None:
    """With cudaMallocAsync all but what is reserved and allocated is zero."""
    gpu.stats[0] = {
        "reserved_bytes.all.current": 5 * GIB,
        "allocated_bytes.all.current": 4 * GIB,
        "active_bytes.all.current": 0,
    }
    assert budget.free_on_cuda(CUDA) == 7 * GIB - budget.CUDA_SLACK


def test_gpu_whose_allocator_counts_nothing(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the user's own: what the driver says is all that is known."""

    def refuse(index: int) -> Any:
        raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats")

    monkeypatch.setattr(torch.cuda, "memory_stats", refuse)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", refuse)
    assert budget.free_on_cuda(CUDA) == 6 * GIB - budget.CUDA_SLACK
    with koila.config(memory_limit="4GiB"):
        assert budget.free_bytes(CUDA, []) == 4 * GIB


def test_limit_on_a_gpu(gpu: Gpu) -> None:
    """The allocator knows all tensors that are there, also those that no call reads."""
    with koila.config(memory_limit="4GiB"):
        assert budget.free_bytes(CUDA, [torch.zeros(MIB)]) == 4 * GIB
        gpu.stats[0] = {"allocated_bytes.all.current": GIB}
        assert budget.free_bytes(CUDA, [torch.zeros(MIB)]) == 3 * GIB
    gpu.stats[0] = {}
    assert budget.free_bytes(CUDA, []) == 6 * GIB - budget.CUDA_SLACK


def test_quick_look_at_gpus_in_use(gpu: Gpu, system: Path) -> None:
    """A device without tensors is not asked: that alone would take memory on it."""
    gpu.hold(reserved=GIB, active=GIB)
    assert budget._free_anywhere() == 6 * GIB - budget.CUDA_SLACK
    assert gpu.asked == [0]
    gpu.stats[1] = {"reserved_bytes.all.current": 1, "active_bytes.all.current": 1}
    assert budget._free_anywhere() == GIB - budget.CUDA_SLACK


def test_a_share_of_a_gpu_that_was_set_a_moment_ago(gpu: Gpu, system: Path) -> None:
    """What was free half a second ago is not believed under another share."""
    gpu.hold(reserved=GIB, active=GIB)
    assert budget.is_ample(MIB)
    gpu.fraction = 0.0625
    assert not budget.is_ample(MIB)


def test_caches_of_gpus_are_emptied(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a run that met the end of memory; not where CUDA has not been set up."""
    emptied: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    budget.defragment()
    assert emptied == [True]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    budget.defragment()
    assert emptied == [True]


# What a run took --------------------------------------------------------------------------------


def told(monkeypatch: pytest.MonkeyPatch, stats: dict[int, dict[str, int]]) -> None:
    """Let GPUs say these numbers of themselves."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(budget, "_used_gpus", lambda: list(stats))
    monkeypatch.setattr(budget, "_stats", lambda index: dict(stats[index]))


def counted(current: int, peak: int) -> dict[str, int]:
    return {"allocated_bytes.all.current": current, "allocated_bytes.all.peak": peak}


def test_a_peak_is_measured_from_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = {0: counted(100, 300), 1: counted(5, 5)}
    told(monkeypatch, stats)
    meter = budget.Meter()
    stats.update({0: counted(120, 450), 1: counted(5, 9)})
    assert meter.bytes() == 350 + 4


@pytest.mark.parametrize("after", [{0: (100, 300), 1: (5, 9)}, {0: (100, 450), 1: (5, 5)}])
def test_an_older_peak_tells_nothing(
    monkeypatch: pytest.MonkeyPatch, after: dict[int, tuple[int, int]]
) -> None:
    stats = {0: counted(100, 300), 1: counted(5, 5)}
    told(monkeypatch, stats)
    meter = budget.Meter()
    stats.update({index: counted(*pair) for index, pair in after.items()})
    assert meter.bytes() is None


def test_on_the_cpu_nobody_counts() -> None:
    if not torch.cuda.is_initialized():
        assert budget.Meter().bytes() is None
