# SPDX-License-Identifier: Apache-2.0
"""GPUs that are not there, and what of them can be seen without: fakes in place of torch.cuda."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import koila
from koila import _core
from koila.basics import devices, switches
from koila.messages import errors
from koila.planning import strategies
from koila.random import generators
from koila.staged import meta
from koila.staged.program import Program
from oracle import eager, split


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)


# Names of devices ---------------------------------------------------------------------------------


def test_a_name_without_an_index_is_the_current_device(two_gpus: None) -> None:
    assert devices.meant("cuda") == torch.device("cuda", 1)
    assert devices.meant(torch.device("cuda", 0)) == torch.device("cuda", 0)
    assert devices.meant("cuda:2") is None
    assert devices.meant("cpu") == torch.device("cpu")
    assert devices.meant("float32") is None


def test_a_move_to_a_gpu_is_recorded(two_gpus: None) -> None:
    """By a name without index too; where there is no such device torch is asked, and says so."""
    x = torch.ones(3, 2)
    for name in ("cuda", torch.device("cuda"), "cuda:0"):
        assert _core.infer("to", (x, name), {})["status"] == "OK"
    assert _core.infer("to", (x, "cuda:2"), {})["status"] == "DECLINED"


def test_without_a_gpu_a_move_raises_at_once() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|NVIDIA"):
        koila.lazy(torch.ones(3)).to("cuda")


def test_get_device_computes_nothing() -> None:
    x = koila.lazy(torch.ones(3)) * 2
    assert x.get_device() == torch.ones(3).get_device() == -1
    assert _core.real(x) is None


def test_a_move_to_the_cpu_is_recorded() -> None:
    x = koila.lazy(torch.ones(5, 2))
    with split(3):
        moved = (x * 2).cpu()
        assert _core.real(moved) is None
        assert moved.sum().item() == 20
    assert (koila.report().n_chunks, koila.report().n_rows) == (3, 2)
    for wrong in ({"device": "cpu"}, {"non_blocking": True, "device": "meta"}):
        with pytest.raises((RuntimeError, AssertionError)) as eagers:
            torch.ones(2).cuda(**wrong)
        with pytest.raises(type(eagers.value)) as ours:
            (x * 2).cuda(**wrong)
        assert str(ours.value) == str(eagers.value)


# What writes behind autograd's back change --------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool])
def test_a_checksum_sees_a_write(dtype: torch.dtype) -> None:
    """In any block of a large tensor, to a NaN too; and nothing where nothing was written."""
    tensor = torch.zeros(2**20 + 3, dtype=dtype)
    if dtype.is_floating_point:
        tensor[7] = float("nan")
    before = meta.checksum(tensor)
    assert meta.checksum(tensor) == before
    tensor[-1] = 1
    after = meta.checksum(tensor)
    assert after != before
    tensor[[0, -1]] = tensor[[-1, 0]]
    assert meta.checksum(tensor) not in (before, after)


@pytest.mark.parametrize("take", ["expand", "step", "odd", "turned", "conj", "none"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.complex64, torch.bool])
def test_a_checksum_of_any_layout(dtype: torch.dtype, take: str) -> None:
    whole = torch.ones(24, dtype=dtype)
    tensor = {
        "expand": whole[:1].expand(8),
        "step": whole[::2],
        "odd": whole[1:9],
        "turned": whole.view(4, 6).t(),
        "conj": whole.conj(),
        "none": whole[:0],
    }[take]
    before = meta.checksum(tensor)
    whole.zero_()
    assert (meta.checksum(tensor) == before) == (take == "none")


# Default devices ----------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [1, 3])
def test_a_default_device_moves_nothing_of_koilas(chunks: int) -> None:
    """Tensors that koila makes for itself are where the program's are."""
    rows = torch.randn(7, 300, dtype=torch.float64)

    def step(lazy: Any) -> Tensor:
        torch.manual_seed(3)
        with torch.device("meta"):
            x = lazy(rows)
            with torch.no_grad():
                y = F.dropout(x, 0.5)
                result = y.mean() + y.var() + F.cross_entropy(y, y.softmax(1))
        return result + 0

    want = step(eager)
    with split(chunks):
        got = step(koila.lazy)
    assert koila.report() is not None
    torch.testing.assert_close(got.item(), want.item())


def test_a_default_device_is_that_of_torchs_factories() -> None:
    """Those that are patched too: it goes by the functions themselves. In a process of its own,
    where nothing has asked for a default device before koila was imported."""
    script = """
import torch, koila
with torch.device("meta"):
    made = [torch.tensor([1.0]), torch.as_tensor([1.0]), torch.asarray([1.0])]
    made += [torch.scalar_tensor(1.0)]
print({t.device.type for t in made})
"""
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "{'meta'}"


# Which memory a program needs ---------------------------------------------------------------------


def test_the_device_that_computes_has_the_budget() -> None:
    """A batch made lazy on the CPU and moved by the program is planned for where it goes."""
    x = koila.lazy(torch.ones(6, 2))
    assert strategies.devices_of(Program([(x * 2).sum()])) == [torch.device("cpu")]
    loss = (x * 2).to("meta").sum()
    assert strategies.devices_of(Program([loss])) == [torch.device("meta")]
    koila._core.forget()


# Layouts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "args"),
    [
        ("group_norm", (2,)),
        ("pixel_shuffle", (2,)),
        ("pad", ((1, 1, 1, 1), "reflect")),
        ("log_sigmoid", ()),
    ],
)
def test_a_layout_that_a_gpu_chooses_is_not_promised(row: str, args: tuple[Any, ...]) -> None:
    x = torch.randn(2, 4, 6, 6)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for device, is_promised in (("cpu", True), ("cuda", False)):
            plain = torch.empty(x.shape, device=device)
            last = plain.to(memory_format=torch.channels_last)
            said = [_core.infer(row, (t, *args), {})["outs"][0][2] for t in (plain, last)]
            assert said[0] == torch.empty(_core.infer(row, (x, *args), {})["outs"][0][1]).stride()
            assert (said[1] is not None) == is_promised


# Out of memory ------------------------------------------------------------------------------------


def test_frames_of_a_failed_attempt_let_go_of_their_tensors() -> None:
    """Of what led to the error too, which a library may have raised another one for."""
    seen: list[weakref.ref[Tensor]] = []

    def fail(depth: int) -> None:
        kept = torch.ones(3)
        seen.append(weakref.ref(kept))
        if depth:
            raise torch.OutOfMemoryError("CUDA out of memory")
        try:
            fail(1)
        except torch.OutOfMemoryError:
            raise RuntimeError("CUDA error: out of memory") from None

    try:
        fail(0)
    except RuntimeError as error:
        assert errors.is_out_of_memory(error)
        errors.let_go(error)
        gc.collect()
        assert [ref() for ref in seen] == [None, None]


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "CUDA error: out of memory",
    ],
)
def test_what_libraries_say_when_memory_is_out(text: str) -> None:
    assert errors.is_out_of_memory(RuntimeError(text))


# Copies to the CPU --------------------------------------------------------------------------------


class Copies(TorchDispatchMode):
    """Copies from "meta" to the CPU, which stands for a GPU here, give ones."""

    sees_koila = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device = (kwargs or {}).get("device")
        if func is torch.ops.aten._to_copy.default and device == torch.device("cpu"):
            return torch.ones(args[0].shape)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("chunks", [1, 3])
def test_a_copy_to_the_cpu_is_waited_for(chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded, a copy that does not block is made after the user's own wait for the device."""
    waited: list[torch.device] = []
    monkeypatch.setitem(devices._WAITS, "meta", waited.append)
    with split(chunks):
        far = koila.lazy(torch.empty(6, 2, device="meta"))
        near = (far * 2).to("cpu", non_blocking=True)
        assert near.device.type == "cpu"
        assert _core.real(near) is None
        assert waited == []
        with Copies():
            assert near.sum().item() == 12
    assert waited == [torch.device("meta")] * chunks


# Draws --------------------------------------------------------------------------------------------


def test_seeds_come_from_the_place_of_the_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU no kernel runs for a seed: the same place gives the same, the next another."""

    class Generator:
        device = torch.device("cuda", 1)
        offset = 8

        def initial_seed(self) -> int:
            return 5

        def get_offset(self) -> int:
            return self.offset

        def set_offset(self, offset: int) -> None:
            assert offset % 4 == 0
            self.offset = offset

    started: list[bool] = []
    monkeypatch.setattr(torch.cuda, "init", lambda: started.append(True))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "default_generators", (None, Generator()))
    generator: Any = generators.generator_of(torch.device("cuda"))
    assert started == [True]
    seeds = [generators.seed_from(generator) for _ in range(3)]
    assert len(set(seeds)) == 3
    assert all(0 <= seed < 2**63 for seed in seeds)
    generator.offset = 8
    assert generators.seed_from(generator) == seeds[0]


# Kernels of attention -----------------------------------------------------------------------------


class Kernels(TorchDispatchMode):
    """Which kernels attention ran with."""

    sees_koila = True

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name.startswith("_scaled_dot_product") and "backward" not in name:
            self.seen.append(name)
        elif name == "_safe_softmax":
            self.seen.append("math")
        return func(*args, **(kwargs or {}))


FLASH = "_scaled_dot_product_flash_attention_for_cpu"


@pytest.mark.parametrize("chunks", [1, 3])
def test_attention_runs_with_the_kernels_of_its_record(chunks: int) -> None:
    q = torch.randn(6, 2, 4, 8)
    before = switches.now()
    with split(chunks), Kernels() as kernels:
        x = koila.lazy(q)
        with sdpa_kernel(SDPBackend.MATH):
            inside = F.scaled_dot_product_attention(x, x, x)
        outside = F.scaled_dot_product_attention(x, x, x)
        number = (inside + outside).sum().item()
    assert sorted(set(kernels.seen)) == [FLASH, "math"]
    want = 2 * F.scaled_dot_product_attention(q, q, q).sum()
    torch.testing.assert_close(number, want.item(), rtol=1e-5, atol=1e-5)
    assert torch.backends.cuda.flash_sdp_enabled()
    assert switches.now() == before


def test_attention_read_inside_runs_what_was_recorded_outside_with_its_own() -> None:
    q = torch.randn(6, 2, 4, 8)
    with Kernels() as kernels:
        x = koila.lazy(q)
        outside = F.scaled_dot_product_attention(x, x, x)
        with sdpa_kernel(SDPBackend.MATH):
            outside.sum().item()
            assert not torch.backends.cuda.flash_sdp_enabled()
    assert kernels.seen == [FLASH]


# CUDA graphs --------------------------------------------------------------------------------------


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A graph whose capture only says that it is under way."""
    state = {"on": False}
    raw: Any = torch.cuda.CUDAGraph.__mro__[1]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state["on"])
    monkeypatch.setattr(generators, "states", dict)
    monkeypatch.setattr(
        raw, "capture_begin", lambda self, **_: state.update(on=True), raising=False
    )
    monkeypatch.setattr(raw, "capture_end", lambda self: state.update(on=False), raising=False)
    # A build for CPUs has a class there whose own __new__ raises.
    make: Any = raw.__new__ if torch.backends.cuda.is_built() else object.__new__
    yield make(torch.cuda.CUDAGraph)


def test_nothing_is_recorded_in_a_capture(capture: Any) -> None:
    """What was recorded before runs before, what is called inside runs at once."""
    capture._tracker = None
    x = koila.lazy(torch.ones(4, 2))
    before = x * 2
    try:
        capture.capture_begin()
        assert _core.real(before) is not None
        inside = (before + x).sum()
        assert not koila.is_lazy(inside)
    finally:
        capture.capture_end()
    after = x * 3
    assert _core.real(after) is None
    assert float(inside + after.sum()) == 24 + 24


# Checkpoint ---------------------------------------------------------------------------------------


def test_checkpoint_asks_for_devices_without_computing() -> None:
    layer = nn.Linear(3, 3)
    x = koila.lazy(torch.ones(4, 3))
    with koila.config(chunks=2):
        h = checkpoint(layer, layer(x), use_reentrant=False)
    assert _core.real(h) is None
    h.sum().backward()
    assert layer.weight.grad is not None
