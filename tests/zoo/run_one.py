# SPDX-License-Identifier: Apache-2.0
"""Run an entry of the zoo and print a line of JSON: plain, in one chunk, in six, and under a limit.

    python tests/zoo/run_one.py NAME
    python tests/zoo/run_one.py --serve    lines `seconds name` from stdin, each run in a fork

Numbers: the loss, every gradient and every buffer. In one chunk, with the library's own dtype, they
are plain torch's bit for bit. In chunks they are compared in float64, each tensor relative to the
largest number of its kind. "Peak" is the most bytes that torch's allocator hands out beyond what
was there before the step. The limit is what the model, its gradients and the batch take, and
`SHARE` of the most that plain torch's forward takes beside.

KOILA_ZOO_DEVICE=cuda puts models and batches on a GPU. There each chunk draws numbers of its own:
nothing is dropped where numbers in chunks are compared.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import pickle
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "python")]

from zoo import libraries  # noqa: E402  isort: skip: before any of the libraries

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves, tree_map_only  # noqa: E402

import koila  # noqa: E402
from allocations import Allocations  # noqa: E402
from koila.memory import budget, storages  # noqa: E402
from zoo.entries import ROWS, Entry, Step, all_entries  # noqa: E402

SHARE = 0.4
CHUNKS = 6
DEVICE = torch.device(os.environ.get("KOILA_ZOO_DEVICE", "cpu"))


class GpuAllocations:
    """Measure on a GPU what `Allocations` measures on the CPU: the most bytes that torch's
    allocator hands out during a step, beyond those before it. Enter it for each half of a step."""

    def __init__(self) -> None:
        self.peak = 0
        self._before: int | None = None

    def __enter__(self) -> None:
        torch.cuda.synchronize()
        if self._before is None:
            gc.collect()
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()

    def __exit__(self, *_: object) -> None:
        torch.cuda.synchronize()
        assert self._before is not None
        self.peak = torch.cuda.max_memory_allocated() - self._before


def allocations() -> Allocations | GpuAllocations:
    """What notes the memory of a step, entered for each of its two halves."""
    return Allocations() if DEVICE.type == "cpu" else GpuAllocations()


def _moved(value: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(DEVICE), value)


def _drop_nothing() -> None:
    """Let dropout and attention keep everything from now on."""

    def keep(x: Tensor, *_: object, **__: object) -> Tensor:
        return x

    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout"):
        setattr(F, name, keep)
    attend = F.scaled_dot_product_attention

    def attend_to_all(*args: Any, **words: Any) -> Tensor:
        if len(args) > 4:
            args = *args[:4], 0.0, *args[5:]
        return attend(*args, **{**words, "dropout_p": 0.0} if "dropout_p" in words else words)

    F.scaled_dot_product_attention = attend_to_all  # type: ignore[assignment]


def _same(value: Any) -> Any:
    return value


@dataclass
class Outcome:
    """What a run left behind, and what it took."""

    numbers: dict[str, Tensor]
    peak: int = 0
    forward_peak: int = 0
    seconds: float = 0.0
    reports: list[str] = field(default_factory=list)
    n_chunks: int = 1


def _double(value: Any) -> Any:
    def convert(tensor: Tensor) -> Tensor:
        return tensor.double() if tensor.is_floating_point() else tensor

    return tree_map_only(Tensor, convert, value)


class _Singles(TorchDispatchMode):
    """Notes whether anything is computed in float32."""

    sees_koila = True

    def __init__(self) -> None:
        super().__init__()
        self.is_seen = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **kwargs or {})
        tensors = (value for value in tree_leaves(made) if isinstance(value, Tensor))
        self.is_seen |= any(tensor.dtype == torch.float32 for tensor in tensors)
        return made


class Runner:
    """A step that can be repeated from the same state."""

    def __init__(self, step: Step, is_double: bool) -> None:
        self.step = step
        torch.manual_seed(1)
        self.batch = _moved(step.batch(ROWS))
        for module in step.modules:
            module.to(DEVICE)
        if is_double:
            self.batch = _double(self.batch)
            for module in step.modules:
                module.double()
        self.start = [
            {name: value.clone() for name, value in module.state_dict().items()}
            for module in step.modules
        ]

    def reset(self) -> None:
        """Put back parameters and buffers, drop gradients, and seed the generator."""
        for module, state in zip(self.step.modules, self.start, strict=True):
            module.load_state_dict(state)
            module.zero_grad(set_to_none=True)
        torch.manual_seed(2)
        np.random.seed(2)  # some libraries draw masks with it

    def run(
        self, lazy: Callable[..., Any], memory: Allocations | GpuAllocations | None = None
    ) -> Outcome:
        """Run the step once."""
        self.reset()
        start = time.perf_counter()
        with memory or contextlib.nullcontext():
            loss = self.step.loss(**lazy(self.batch))
        with memory or contextlib.nullcontext():
            loss.backward()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        numbers = {"loss": torch.tensor(loss.detach().item(), dtype=loss.dtype)}
        for i, module in enumerate(self.step.modules):
            for name, parameter in module.named_parameters():
                if parameter.grad is not None:
                    numbers[f"{i}.{name}.grad"] = parameter.grad.clone()
            for name, buffer in module.named_buffers():
                numbers[f"{i}.{name}"] = buffer.detach().clone()
        return Outcome(numbers, seconds=seconds)

    def measure(self, lazy: Callable[..., Any]) -> Outcome:
        """Run the step twice: for its time, and for its memory, which the profiler slows."""
        seconds = self.run(lazy).seconds  # its numbers are freed: they would count under a limit
        memory = allocations()
        outcome = self.run(lazy, memory)
        outcome.peak = memory.peak
        outcome.seconds = seconds
        return outcome

    def forward_peak(self) -> int:
        """The most bytes that the plain forward takes."""
        self.reset()
        memory = allocations()
        with memory:
            loss = self.step.loss(**self.batch)
        with memory:
            del loss
        return memory.peak

    def gradient_bytes(self) -> int:
        return sum(p.nbytes for m in self.step.modules for p in m.parameters() if p.requires_grad)

    def largest_gradient(self) -> int:
        return max(p.nbytes for m in self.step.modules for p in m.parameters() if p.requires_grad)

    def lazy(self, batch: dict[str, Any]) -> dict[str, Any]:
        dims = self.step.dims
        return {
            name: koila.lazy(value, batch=dims.get(name, 0))
            if isinstance(value, Tensor) and dims.get(name, 0) is not None
            else value
            for name, value in batch.items()
        }


def difference(wanted: dict[str, Tensor], got: dict[str, Tensor]) -> float:
    """The largest difference of a number, relative to the largest of its kind.

    What is not finite must be the same number in both.
    """
    if wanted.keys() != got.keys():
        return float("inf")
    kinds: dict[str, float] = {}

    def kind(name: str) -> str:
        return name.rpartition(".")[2]  # grad, running_mean, ...

    for name, value in wanted.items():
        largest = value.double().nan_to_num(0, 0, 0).abs().max().item() if value.numel() else 0.0
        kinds[kind(name)] = max(kinds.get(kind(name), 0.0), largest)
    worst = 0.0
    for name, value in wanted.items():
        if torch.equal(value, got[name]) or not value.numel():
            continue
        is_same = (value == got[name]) | (value.isnan() & got[name].isnan())
        gaps = (value.double() - got[name].double()).abs()
        gap = gaps.masked_fill(is_same, 0.0).max().item()
        if name == "loss" and value.dtype == torch.float32:
            gap *= 1e-8  # a library that takes its loss in float32: it has so many digits fewer
        worst = max(worst, gap / (kinds[kind(name)] or 1.0)) if gap == gap else float("inf")
    return worst


def is_equal(wanted: dict[str, Tensor], got: dict[str, Tensor]) -> bool:
    return wanted.keys() == got.keys() and all(
        torch.allclose(value, got[name], rtol=0, atol=0, equal_nan=True)
        for name, value in wanted.items()
    )


def says(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def whole(report: Any) -> list[str]:
    """What a report says ran whole."""
    return [line.strip()[:160] for line in str(report).splitlines() if "whole:" in line][:5]


def attempt(line: dict[str, Any], run: Callable[[], None]) -> None:
    try:
        run()
    except Exception as error:
        line["error"] = says(error)
    finally:
        koila._core.forget()


def _in_one_chunk(entry: Entry, result: dict[str, Any]) -> None:
    assert entry.build is not None
    torch.manual_seed(0)
    runner = Runner(entry.build(), is_double=False)
    plain = runner.run(_same)
    again = runner.run(_same)
    line: dict[str, Any] = {}
    result["one chunk"] = line
    if not is_equal(plain.numbers, again.numbers):
        line["skipped"] = "plain torch is not equal to itself"
        return
    got = runner.run(runner.lazy)
    line["is_equal"] = is_equal(plain.numbers, got.numbers)
    if not line["is_equal"]:
        line["difference"] = difference(plain.numbers, got.numbers)


def _in_chunks(entry: Entry, result: dict[str, Any]) -> None:
    assert entry.build is not None
    if DEVICE.type == "cuda":
        _drop_nothing()
    torch.manual_seed(0)
    runner = Runner(entry.build(), is_double=True)
    try:
        with _Singles() as singles:
            loss = runner.run(_same).numbers["loss"]
        if not loss.isfinite():  # some mask with the least number of float32
            raise ArithmeticError
        result["dtype"] = "float64, float32 within" if singles.is_seen else "float64"
    except Exception:
        torch.manual_seed(0)
        runner = Runner(entry.build(), is_double=False)
        result["dtype"] = "float32"
    plain = runner.measure(_same)
    forward = runner.forward_peak()
    gradients = runner.gradient_bytes()
    result["plain"] = {
        "peak": plain.peak,
        "forward": forward,
        "gradients": gradients,
        "largest gradient": runner.largest_gradient(),
        "seconds": plain.seconds,
    }
    line: dict[str, Any] = {}
    result["chunks"] = line

    def chunked() -> None:
        with koila.config(chunks=CHUNKS):
            got = runner.measure(runner.lazy)
        report = koila.report()
        line["difference"] = difference(plain.numbers, got.numbers)
        line["peak"], line["seconds"] = got.peak, got.seconds
        line["n_chunks"], line["whole"] = report.n_chunks, whole(report)

    attempt(line, chunked)
    limited: dict[str, Any] = {}
    result["limit"] = limited

    def under_limit() -> None:
        runner.reset()
        storages.look_again(True)
        there = budget.taken(DEVICE, [])
        allowed = gradients + int(SHARE * forward)
        limited["allowed"] = allowed
        with koila.config(memory_limit=there + allowed):
            got = runner.measure(runner.lazy)
        limited["difference"] = difference(plain.numbers, got.numbers)
        limited["peak"], limited["seconds"] = got.peak, got.seconds
        limited["n_chunks"], limited["whole"] = koila.report().n_chunks, whole(koila.report())

    attempt(limited, under_limit)


def run(entry: Entry) -> dict[str, Any]:
    """Everything the zoo wants to know of an entry."""
    result: dict[str, Any] = {"name": entry.name, "library": entry.library}
    start = time.perf_counter()
    try:
        if entry.loop is not None:
            from zoo.run_loop import run_loop

            run_loop(entry, result)
        elif entry.script is not None:
            from zoo.run_script import run_script

            run_script(entry, result)
        else:
            _in_one_chunk(entry, result)
            _in_chunks(entry, result)
    except Exception as error:
        result["error"] = says(error)
    result["seconds"] = round(time.perf_counter() - start, 1)
    return result


def in_a_fork(work: Callable[[], Any], seconds: float) -> Any:
    """What `work` returns in a fork of this process, which may take so many seconds.

    Raises:
        RuntimeError: it took longer, or its process ended early.
    """
    result_end, child_end = os.pipe()
    with tempfile.TemporaryFile() as said:
        child = os.fork()
        if child == 0:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            with os.fdopen(child_end, "wb") as file:
                file.write(pickle.dumps(work()))
            os._exit(0)
        os.close(child_end)
        made = b""
        deadline = time.monotonic() + seconds
        with os.fdopen(result_end, "rb", buffering=0) as pipe:
            while select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
                part = pipe.read(2**16)
                made += part
                if not part:
                    break
            else:
                os.kill(child, signal.SIGKILL)
                made = b""
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if made and status == 0:
            return pickle.loads(made)
        said.seek(0)
        words = said.read().decode(errors="replace").strip().splitlines()[-1:] or [""]
    if status == -signal.SIGKILL and time.monotonic() >= deadline:
        raise RuntimeError(f"took more than {seconds:.0f} s")
    raise RuntimeError(f"ended with status {status}: {words[0][:200]}")


def serve() -> None:
    """Answer each line `seconds name` of stdin with a line of JSON."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for library in libraries.SHARED:
        with contextlib.suppress(Exception):  # an entry that needs it says what is wrong
            importlib.import_module(library)
    entries = all_entries()
    for line in sys.stdin:
        seconds, name = line.split()
        try:
            result = in_a_fork(functools.partial(run, entries[name]), float(seconds))
        except RuntimeError as error:
            result = {"name": name, "error": str(error)}
        print(json.dumps(result), file=answers, flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if DEVICE.type == "cuda":  # two plain runs are equal, where torch has kernels for that
        torch.use_deterministic_algorithms(True, warn_only=True)
    if sys.argv[1] == "--serve":
        serve()
    else:
        print(json.dumps(run(all_entries()[sys.argv[1]])), flush=True)
