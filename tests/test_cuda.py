# SPDX-License-Identifier: Apache-2.0
"""What only a GPU can tell, in one command: `pytest tests/test_cuda.py`. Skipped without one.

Everything else that concerns GPUs is tried with fakes, in test_devices.py and test_budget.py.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

import koila
from koila.memory import budget
from oracle import Outcome, assert_outcomes, eager, run, run_lazy, split
from programs import PROGRAMS
from programs_kit import ANY, IN_ORDER, Program

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]

MIB = 2**20
GPU = torch.device("cuda", 0)
BY_NAME = {program.name: program for program in PROGRAMS}
DRAWING = [program.name for program in PROGRAMS if program.draws in (IN_ORDER, ANY)]


@pytest.fixture(autouse=True)
def same_kernels() -> Iterator[None]:
    """Two runs of one program are compared: let chance choose no kernel, and no TF32 round."""
    with torch.backends.cudnn.flags(deterministic=True, benchmark=False, allow_tf32=False):
        yield
    gc.collect()
    torch.cuda.empty_cache()


def on_gpu(program: Program) -> Program:
    """The same program, its model and its batch on the GPU."""

    def batch(n_rows: int, generator: torch.Generator) -> tuple[Any, ...]:
        made = program.batch(n_rows, generator)
        return tuple(tree_map(lambda x: x.to(GPU) if isinstance(x, Tensor) else x, made))

    return dataclasses.replace(program, model=lambda: program.model().to(GPU), batch=batch)


def wanted(program: Program, n_rows: int) -> Outcome:
    try:
        return run(program, n_rows)
    except RuntimeError as error:
        if "device" not in str(error) and "CPU" not in str(error):
            raise
        return pytest.skip(f"it makes tensors on the CPU: {error}")


# Programs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in BY_NAME if n not in DRAWING])
def test_programs(name: str) -> None:
    """Every program in float64, whole, in chunks that do not divide the rows, and row by row."""
    program = on_gpu(BY_NAME[name])
    n_rows = program.rows(7)
    want = wanted(program, n_rows)
    for chunks in (1, 3, n_rows):
        got = run_lazy(program, n_rows, chunks=chunks)
        assert_outcomes(got, want, generator=False)


def outcome_and_state(program: Program, chunks: int) -> tuple[Outcome, Tensor]:
    got = run_lazy(program, program.rows(7), chunks=chunks)
    return got, torch.cuda.get_rng_state(GPU)


@pytest.mark.parametrize("name", DRAWING)
def test_programs_that_draw(name: str) -> None:
    """Whole: eager's own numbers. In chunks: the same again from the same seed."""
    program = on_gpu(BY_NAME[name])
    want = wanted(program, program.rows(7))
    state = torch.cuda.get_rng_state(GPU)
    got, whole_state = outcome_and_state(program, 1)
    assert_outcomes(got, want)
    assert torch.equal(whole_state, state)
    first, first_state = outcome_and_state(program, 3)
    again, again_state = outcome_and_state(program, 3)
    assert_outcomes(again, first)
    assert torch.equal(first_state, again_state)


# Draws --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("root", [False, True], ids=["one pass", "two passes"])
def test_dropout_of_forward_and_backward_is_the_same(root: bool) -> None:
    torch.manual_seed(0)
    weight = torch.ones(8, 1000, device=GPU, requires_grad=True)
    with split(3):
        x = koila.lazy(torch.ones(8, 1000, device=GPU))
        y = F.dropout(x * koila.lazy(weight), 0.5)
        loss = (y * y).mean().sqrt() if root else (y * y).mean()
        loss.backward()
    assert weight.grad is not None
    dropped = weight.grad == 0
    assert torch.equal(y.detach() == 0, dropped)
    assert 0.4 < dropped.double().mean().item() < 0.6
    assert not torch.equal(dropped[0], dropped[-1]), "chunks drew the same"


def test_plain_draws_go_on_behind_those_of_chunks() -> None:
    def draw() -> Tensor:
        torch.manual_seed(0)
        with split(3):
            F.dropout(koila.lazy(torch.ones(9, 100, device=GPU)), 0.5).sum().item()
        return torch.rand(100, device=GPU)

    first = draw()
    assert torch.equal(first, draw())
    torch.manual_seed(0)
    assert not torch.equal(first, torch.rand(100, device=GPU))


# Moving -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("how", ["cuda", "to cuda", "to cuda:0", "not blocking"])
def test_lazy_first_then_moved(how: str, chunks: int) -> None:
    moves = {
        "cuda": lambda t: t.cuda(),
        "to cuda": lambda t: t.to("cuda"),
        "to cuda:0": lambda t: t.to(GPU),
        "not blocking": lambda t: t.to("cuda", non_blocking=True),
    }
    x, y = torch.randn(7, 6).double().pin_memory(), torch.randint(5, (7,)).pin_memory()
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).double().to(GPU)

    def step(lazy: Any) -> list[Tensor]:
        model.zero_grad()
        a, b = lazy(x, y)
        out = model(moves[how](a))
        loss = F.cross_entropy(out, moves[how](b))
        loss.backward()
        return [loss.detach().cpu() + 0, *(p.grad.clone() for p in model.parameters())]

    want = step(eager)
    for _ in range(2):  # in the second step its device is known
        with split(chunks):
            got = step(koila.lazy)
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("chunks", [1, 4])
def test_copies_to_the_cpu_that_do_not_block(chunks: int) -> None:
    x = torch.randn(64, 1000, 100, device=GPU)
    want = (x @ x.mT).cpu()
    with split(chunks):
        lazy = koila.lazy(x)
        near = (lazy @ lazy.mT).to("cpu", non_blocking=True)
        torch.cuda.synchronize()
        torch.testing.assert_close(torch.from_numpy(near.numpy()), want)


def test_a_side_stream() -> None:
    """Recorded on a stream of its own, run on another: each waits for what it reads."""
    layer = nn.Linear(512, 512, device=GPU)
    stream = torch.cuda.Stream()
    for _ in range(5):
        layer.zero_grad()
        x = torch.randn(64, 512, device=GPU)
        layer(x).square().mean().backward()
        want = layer.weight.grad.clone()
        layer.zero_grad()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), koila.config(chunks=2):
            loss = layer(koila.lazy(x)).square().mean()
        torch.cuda.current_stream().wait_stream(stream)
        with split(2):
            loss.backward()
        torch.testing.assert_close(layer.weight.grad, want, rtol=1e-4, atol=1e-6)


# Nothing that waits -------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [1, 3])
def test_a_step_waits_for_nothing(chunks: int) -> None:
    """No call of a step, recorded or run, makes the CPU wait for the GPU."""
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 5)).to(GPU)
    x, y = torch.randn(7, 6, device=GPU), torch.randint(5, (7,), device=GPU)

    def step() -> None:
        with split(chunks):
            a, b = koila.lazy(x, y)
            out = model(a)
            (F.cross_entropy(out, b) + F.mse_loss(out, out * 2) + out.mean()).backward()

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# Memory -------------------------------------------------------------------------------------------


def deep() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8)))


@pytest.fixture
def small_gpu() -> Iterator[int]:
    """512 MiB more than is in use; the libraries' own buffers are there already."""
    deep().to(GPU)(torch.ones(8, 256, device=GPU)).sum().backward()
    gc.collect()
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info(GPU)
    limit = torch.cuda.memory_reserved(GPU) + 512 * MIB
    torch.cuda.set_per_process_memory_fraction(limit / total, GPU)
    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0, GPU)


def test_what_is_free_can_be_had(small_gpu: int) -> None:
    free = budget.free_on_cuda(GPU)
    assert 512 * MIB - budget.CUDA_SLACK - 4 * MIB <= free <= 512 * MIB
    block = torch.empty(free, dtype=torch.uint8, device=GPU)
    assert budget.free_on_cuda(GPU) == 0
    assert budget.taken_on_cuda(GPU) >= free
    del block
    assert budget.free_on_cuda(GPU) == free, "what is cached is free"


def test_a_batch_that_does_not_fit(small_gpu: int) -> None:
    """Eager runs out of memory; in as few chunks as fit the gradients are those of more memory."""
    torch.manual_seed(0)
    model = deep().to(GPU)
    x = torch.randn(65536, 256, device=GPU)  # 64 MiB, and 16 times that for the activations
    with pytest.raises(torch.OutOfMemoryError):
        model(x).square().mean().backward()
    model.zero_grad()
    torch.cuda.reset_peak_memory_stats(GPU)
    before = torch.cuda.memory_allocated(GPU)
    model(koila.lazy(x)).square().mean().backward()
    peak = torch.cuda.max_memory_allocated(GPU) - before
    report = koila.report()
    assert report is not None
    assert report.n_chunks > 1
    assert report.n_tries == 1, "the prediction was too low"
    assert report.bytes_predicted is not None
    assert report.bytes_predicted / 2 <= peak <= report.bytes_predicted + 2 * MIB
    torch.cuda.set_per_process_memory_fraction(1.0, GPU)
    got = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x).square().mean().backward()
    for one, parameter in zip(got, model.parameters(), strict=True):
        scale = float(parameter.grad.abs().max())
        torch.testing.assert_close(one, parameter.grad, rtol=0, atol=1e-4 * scale)


def test_memory_that_runs_out_all_the_same(small_gpu: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where too much was thought to be free the chunks are made smaller, from a clean start."""
    model = deep().to(GPU)
    x = torch.randn(65536, 256, device=GPU)
    monkeypatch.setattr(budget, "free_on_cuda", lambda device: 760 * MIB)  # whole: 1.25 GiB
    model(koila.lazy(x)).square().mean().backward()
    report = koila.report()
    assert report is not None
    assert report.n_tries > 1
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_a_limit_of_koilas_own() -> None:
    model = deep().to(GPU)
    x = torch.randn(32768, 256, device=GPU)
    limit = torch.cuda.memory_allocated(GPU) + 128 * MIB
    torch.cuda.reset_peak_memory_stats(GPU)
    with koila.config(memory_limit=limit):
        model(koila.lazy(x)).square().mean().backward()
    assert koila.report() is not None
    assert koila.report().n_chunks > 1
    # The workspaces of cuBLAS may come on top where this is the first product.
    assert torch.cuda.max_memory_allocated(GPU) <= limit + budget.CUDA_SLACK


# Half precision -----------------------------------------------------------------------------------


class Net(nn.Module):
    """Convolution, attention, normalisation: what autocast treats in different ways."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 16, 3, padding=1)
        self.norm = nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x).transpose(1, 2)
        h = self.norm(h + self.attention(h, h, h, need_weights=False)[0])
        out: Tensor = self.head(F.gelu(h).mean(1))
        return out


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_with_a_scaler(dtype: torch.dtype, chunks: int, fused: bool) -> None:
    """Three steps, the second of which overflows: it is skipped and the scale is halved."""
    x, y = torch.randn(11, 3, 6, device=GPU), torch.randint(5, (11,), device=GPU)

    def train(lazy: Any) -> tuple[list[Tensor], float]:
        torch.manual_seed(0)
        model = Net().to(GPU)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=fused)
        scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
        for factor in (1.0, float("inf"), 1.0):
            a, b = lazy(x, y)
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=dtype):
                loss = F.cross_entropy(model(a), b) * factor
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        return [p.detach() for p in model.parameters()], scaler.get_scale()

    want, want_scale = train(eager)
    with split(chunks):
        got, scale = train(koila.lazy)
    assert scale == want_scale == 512.0
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=4e-3)  # Adam: two steps of 1e-3


@pytest.mark.parametrize("kernel", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_attention(kernel: str, dropout: float) -> None:
    """Each kernel, chosen where it is recorded: whole as eager, in chunks the same each time."""
    q = torch.randn(6, 4, 128, 64, device=GPU, dtype=torch.float16)

    def step(lazy: Any) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        weight = torch.ones((), device=GPU, requires_grad=True)
        x = lazy(q)
        with sdpa_kernel(getattr(SDPBackend, kernel)):
            out = F.scaled_dot_product_attention(x * weight, x, x, dropout_p=dropout)
        loss = out.float().square().mean().sqrt()
        loss.backward()
        assert weight.grad is not None
        return loss.detach() + 0, weight.grad

    want = step(eager)
    with split(1):
        torch.testing.assert_close(step(koila.lazy), want, rtol=1e-4, atol=1e-5)
    with split(3):
        got, again = step(koila.lazy), step(koila.lazy)
    torch.testing.assert_close(got, again, rtol=1e-4, atol=1e-5)
    if dropout == 0:
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("chunks", [1, 3])
def test_convolutions_in_float32(chunks: int) -> None:
    """Channels last, with batch normalization, and with algorithms chosen by trial."""

    def step(lazy: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3)
        )
        model = model.to(GPU, memory_format=torch.channels_last)
        x = torch.randn(11, 3, 32, 32, device=GPU).to(memory_format=torch.channels_last)
        model(lazy(x)).square().mean().backward()
        found = [p.grad for p in model.parameters() if p.grad is not None]
        return [*found, *model.buffers()]

    with torch.backends.cudnn.flags(benchmark=True, allow_tf32=False):
        want = step(eager)
        with split(chunks):
            got = step(koila.lazy)
    for one, other in zip(got, want, strict=True):
        scale = float(other.abs().max())
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4 * scale + 1e-7)


# CUDA graphs --------------------------------------------------------------------------------------


def test_a_graph_takes_what_is_called_in_its_capture() -> None:
    layer = nn.Linear(8, 8, device=GPU)
    x = torch.randn(4, 8, device=GPU)
    with torch.no_grad():
        want = layer(x + 1) * 2
        lazy = koila.lazy(x)
        before = lazy + 1
        layer(before).sum().item()  # workspaces are there
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(before) * 2
        graph.replay()
    torch.testing.assert_close(out + 0, want)
    assert float((koila.lazy(x) * 0).sum()) == 0, "records again"
