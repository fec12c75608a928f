# SPDX-License-Identifier: Apache-2.0
"""Training under limits: which programs finish with eager's numbers, in a share of eager's memory.

    python -m benchmarks.bench_limits

Each case is a process of its own. It makes a model and a batch, trains two steps, and is limited
beyond what it has then to a share of what eager's step takes at its peak: by the system
(RLIMIT_DATA), or by `koila.config(memory_limit=)`. "Equal" are loss, gradients and buffers in
float64, to 1e-10. Then a model is trained on batches of random shapes: oneDNN compiles kernels for
each that it meets (gelu, convolutions: 0.3 to 0.5 MiB each) and keeps 1024 of them, in eager too. A
process that has its limit when it imports koila keeps as few as the limit leaves room for.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import hashlib
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import koila
from benchmarks.bench import parser, publish, table
from tests.profiled import bytes_over_time

SHARES = (0.8, 0.5, 0.3)
TOLERANCE = 1e-10


# Programs ---------------------------------------------------------------------------------------


class Block(nn.Module):
    """A block of a language model."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        shape = *x.shape[:2], self.heads, x.shape[2] // self.heads
        q, k, v = (t.view(shape).transpose(1, 2) for t in self.qkv(self.first(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.second(x))


class Gpt(nn.Module):
    """A small language model."""

    def __init__(self, words: int = 256, width: int = 128, layers: int = 4) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(512, width)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(layers)))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        return self.head(self.blocks(x))


def cnn(norm: Callable[[int], nn.Module], width: int = 32, layers: int = 3) -> nn.Module:
    """Convolutions with a normalization after each."""
    made: list[nn.Module] = []
    for i in range(layers):
        made += [nn.Conv2d(width if i else 3, width, 3, padding=1), norm(width), nn.ReLU()]
    return nn.Sequential(*made, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def tower(width: int = 512, layers: int = 4) -> nn.Sequential:
    """One half of a contrastive model."""
    made = [nn.Linear(64, width), nn.GELU()]
    for _ in range(layers - 1):
        made += [nn.Linear(width, width), nn.GELU()]
    return nn.Sequential(*made, nn.Linear(width, 64))


def two_towers_loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """All rows against all rows, both ways."""
    logits = F.normalize(model[0](x), dim=1) @ F.normalize(model[1](y), dim=1).T * 10
    labels = torch.arange(len(x))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def classify(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The loss of a model that classifies rows."""
    return F.cross_entropy(model(x), y)


def predict(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The loss of a language model."""
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


@dataclass(frozen=True)
class Case:
    """A model, a batch and a loss."""

    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[[Any, Tensor, Tensor], Tensor]


def mlp() -> nn.Module:
    layers = [layer for _ in range(8) for layer in (nn.Linear(512, 512), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(512, 10))


def pictures(n_rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n_rows, 3, 32, 32), torch.randint(10, (n_rows,))


def sentences(n_rows: int, length: int, words: int = 256) -> tuple[Tensor, Tensor]:
    return torch.randint(words, (n_rows, length)), torch.randint(words, (n_rows, length))


CASES = {
    "MLP": Case(mlp, lambda: (torch.randn(2048, 512), torch.randint(10, (2048,))), classify),
    "GPT": Case(Gpt, lambda: sentences(32, 128), predict),
    "GPT, one text": Case(lambda: Gpt(8192, 64), lambda: sentences(1, 512, 8192), predict),
    "CNN, GroupNorm": Case(
        lambda: cnn(lambda width: nn.GroupNorm(4, width)), lambda: pictures(96), classify
    ),
    "CNN, BatchNorm": Case(lambda: cnn(nn.BatchNorm2d), lambda: pictures(96), classify),
    "contrastive": Case(
        lambda: nn.ModuleList([tower(), tower()]),
        lambda: (torch.randn(2048, 64), torch.randn(2048, 64)),
        two_towers_loss,
    ),
}


# A process that is limited ----------------------------------------------------------------------


def vm_data() -> int:
    """Bytes of private memory, as the system counts them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))


def step(case: Case, model: nn.Module, x: Tensor, y: Tensor, is_lazy: bool) -> Tensor:
    model.zero_grad(set_to_none=True)
    if is_lazy:
        x, y = koila.lazy(x, y)
    loss = case.loss(model, x, y)
    loss.backward()
    return loss.detach()


def peak_of(work: Callable[[], Any]) -> int:
    """At most so many bytes more are there during `work` than before, by torch's allocator."""
    return max(bytes_over_time(work), default=0)


def limit_to(n_bytes: int) -> None:
    """Let the system give this process so much more."""
    ctypes.CDLL(None).malloc_trim(0)
    now = vm_data() + n_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (now, resource.RLIM_INFINITY))


def unlimited() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def make(case: Case) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a model and a batch, after torch's first backward, for which it loads a lot."""
    nn.Linear(4, 4)(torch.ones(2, 4)).sum().backward()
    torch.manual_seed(0)
    model = case.model().double()
    x, y = (t.double() if t.is_floating_point() else t for t in case.batch())
    return model, x, y


def seen(model: nn.Module, losses: list[Tensor]) -> list[Tensor]:
    """Return what is compared."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [*losses, *gradients, *model.buffers()]


def run_case(name: str, kind: str, n_bytes: int, out: str) -> dict[str, Any]:
    """Train two steps under a limit, or without ("none": eager)."""
    case = CASES[name]
    model, x, y = make(case)
    found: dict[str, Any] = {}
    if kind == "none":
        found["peak"] = peak_of(lambda: step(case, model, x, y, False))
        torch.save(seen(model, [step(case, model, x, y, False) for _ in range(1)]), out)
        return found
    is_lazy = kind != "eager"
    limit = None
    if kind == "memory_limit":
        gc.collect()
        there = sum(t.nbytes for t in (x, y, *model.parameters(), *model.buffers()))
        limit = there + n_bytes
    else:
        limit_to(n_bytes)
    chunks = []
    try:
        with koila.config(memory_limit=limit):
            losses = []
            for _ in range(2):
                losses.append(step(case, model, x, y, is_lazy))
                chunks.append(koila.report().n_chunks if is_lazy else 1)
    except RuntimeError as error:
        unlimited()
        found["error"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        found["trace"] = traceback.format_exc()
        return found
    unlimited()
    found["chunks"] = chunks
    wanted = torch.load(out)
    got = seen(model, losses[1:])
    found["far"] = max(
        float((a - b).abs().max() / b.abs().max().clamp_min(1e-300))
        for a, b in zip(got, wanted, strict=True)
        if a.is_floating_point() and float(b.abs().max()) > 1e-12
    )
    return found


def run_shapes(n_bytes: int, n_steps: int) -> dict[str, Any]:
    """Train a language model on batches of random shapes, with so many bytes in all; in eager
    without a limit (0)."""
    start = vm_data()
    if n_bytes:
        koila.memory.heap.fix_malloc(0)
        limit_to(n_bytes)
        koila.memory.budget.keep_fewer_kernels()
    case = CASES["GPT"]
    torch.manual_seed(0)
    # What libraries take at first, some MiB more on some machines, is there: buffers for products.
    step(case, Gpt(width=64, layers=2), *sentences(2, 128), False)
    model = Gpt(width=64, layers=2)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    there = vm_data() - start
    shapes = random.Random(0)
    found: dict[str, Any] = {"errors": 0, "data": [], "rows": [], "there": there}
    if not n_bytes:
        found["peak"] = peak_of(lambda: step(case, model, *sentences(32, 128), False))
    for i in range(n_steps):
        x, y = sentences(shapes.randint(1, 32), shapes.choice(range(8, 129, 8)))
        try:
            step(case, model, x, y, n_bytes > 0)
        except RuntimeError as error:
            found["errors"] += 1
            found["error"] = f"step {i}, {list(x.shape)}: {str(error).splitlines()[0]}"
            continue
        optimizer.step()
        found["rows"].append(-(-len(x) // max(1, koila.report().n_chunks)))
        found["data"].append(vm_data() - start - there)
    return found


def child(task: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    work = {"case": run_case, "shapes": run_shapes}[task.pop("work")]
    print(json.dumps(work(**task)))


# The tables -------------------------------------------------------------------------------------


def ask(**task: Any) -> dict[str, Any]:
    """Run a task in a process of its own."""
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "benchmarks.bench_limits",
            "--child",
            json.dumps(task),
        ],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    if done.returncode != 0:
        return {"error": f"the process ended with {done.returncode}: {done.stderr[-300:]}"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def verdict(found: dict[str, Any]) -> str:
    """Say in a word what came of a case."""
    if "error" in found:
        return "refused" if "MemoryLimitError" in found["error"] else "out of memory"
    text = "equal" if found["far"] <= TOLERANCE else f"WRONG by {found['far']:.1e}"
    return f"{text}, {found['chunks'][-1]} chunks"


def rows(names: list[str], errors: list[str]) -> list[list[str]]:
    made = []
    for name in names:
        with tempfile.NamedTemporaryFile(suffix=hashlib.md5(name.encode()).hexdigest()) as file:
            plain = ask(work="case", name=name, kind="none", n_bytes=0, out=file.name)
            peak = plain["peak"]
            for kind in ("eager", "process", "memory_limit"):
                row = [name, f"{peak / 2**20:.0f}", kind]
                for share in SHARES:
                    if kind == "eager" and share < max(SHARES):
                        row.append("")
                        continue
                    found = ask(
                        work="case", name=name, kind=kind, n_bytes=int(share * peak), out=file.name
                    )
                    row.append(verdict(found))
                    if "error" in found:
                        errors.append(f"{name}, {kind}, {share}: {found['error']}")
                print(row, flush=True)
                made.append(row)
    return made


def shape_rows(n_steps: int, errors: list[str]) -> list[list[str]]:
    made = []
    eager = ask(work="shapes", n_bytes=0, n_steps=n_steps)
    peak = eager["peak"]
    for share in (0.0, 0.4, 0.2):
        limit = eager["there"] + int(share * peak)
        found = ask(work="shapes", n_bytes=limit, n_steps=n_steps) if share else eager
        if "data" not in found:
            made.append([f"{share:.0%}", found["error"], "", "", ""])
            continue
        data, sizes = found["data"], sorted(set(found["rows"]))
        of_peak = f"{share:.0%} of {peak / 2**20:.0f} MiB" if share else "none, eager"
        made.append(
            [
                of_peak,
                f"{found['errors']} of {n_steps}",
                f"{max(data[: len(data) // 3]) / 2**20:.1f}",
                f"{max(data) / 2**20:.1f}",
                " ".join(map(str, sizes)) if share else "",
            ]
        )
        if "error" in found:
            errors.append(f"random shapes, {made[-1][0]}: {found['error']}")
        print(made[-1], flush=True)
    return made


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    made.add_argument("--only", action="append", choices=list(CASES), help="some of the programs")
    made.add_argument("--steps", type=int, default=300, help="steps of random shapes")
    args = made.parse_args()
    if args.child is not None:
        child(args.child)
        return
    errors: list[str] = []
    heads = ["program", "eager, MiB", "limit", *(f"{share:.0%}" for share in SHARES)]
    tables = [table(heads, rows(args.only or list(CASES), errors))]
    if args.only is None and args.steps:
        heads = ["limit", "refused", "MiB, first third", "MiB", "rows of a chunk"]
        tables.append(table(heads, shape_rows(args.steps, errors)))
    publish(args, "Training under limits", [*tables, "\n".join(errors)])


if __name__ == "__main__":
    main()
