# SPDX-License-Identifier: Apache-2.0
"""What a step is said to need against what torch's allocator hands out, whole and in chunks.

Rows are so many that eager's peak is some MiB: one tensor too many, or too few, shows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import koila
import test_memory_kernels as kernels
import test_never_worse as models
from allocations import Allocations, measure
from chunked import split
from koila.planning import steps
from oracle import eager
from programs_kit import Program
from test_memory_limit import Prediction

SLACK = 64 * 2**10
TARGET = 6 * 2**20
N_CHUNKS = 4

TAPE = "what only the recorded program holds goes as a whole run goes on"
CUT = "what joints put together is counted from the start, and gradients come chunk by chunk"
FORMULAS = "what the formulas of a graph that was there before hold counts as there to the end"
OUTSIDE = "what backward takes through graphs of plain calls is said to stay to the end"

#: What is said of these is further off than 3 % and `SLACK`: how far at most, whole and in chunks.
OFF: dict[str, tuple[str, float, float]] = {
    "diffusion": (TAPE, 0.04, 0.0),
    "gan_discriminator": (OUTSIDE, 0.0, 0.28),
    "gan_generator": (TAPE, 0.04, 0.0),
    "distillation": (OUTSIDE, 0.08, 0.0),
    "maml": (FORMULAS, 0.05, 0.05),
    "time_major_scan": (TAPE, 0.05, 0.0),
    "mlp-selected_by_value": (CUT, 0.11, 0.0),
    "hard_triplet": (CUT, 0.07, 0.0),
    "sparse_mixture": (OUTSIDE, 0.18, 0.3),
    "reused": (CUT, 0.0, 0.09),
    "critic": ("the second backward is predicted from above", 0.11, 0.0),
}

PROGRAMS = [program for program in models.VARIED if not program.whole and not program.baked]
ALL = [*PROGRAMS, *kernels.PROGRAMS]
IN_ONE = {name for name, _ in models.MORE}


@functools.cache
def rows_of(program: Program) -> int:
    """How many rows make eager's peak some MiB: no multiple of four."""
    if program in kernels.PROGRAMS:
        return kernels.N_ROWS.get(program.name, 64)
    if program.name in models.PAIRED:
        return 257
    _, peak = measure(program, 64, eager)
    n_rows = min(4096, TARGET // (peak // 64) // 42 * 42) + 1
    return min(n_rows, 256) if program.name in models.SLOW else n_rows


@pytest.mark.parametrize(
    ("program", "chunks"),
    [(one, n) for one in ALL for n in (1, N_CHUNKS) if n == 1 or one.name not in IN_ONE],
    ids=lambda word: getattr(word, "name", word),
)
def test_prediction(program: Program, chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 3 %, and never 1 % too little, but for what is known, which must go from here when it
    is mended."""
    n_rows = rows_of(program)
    options = kernels.single if program in kernels.PROGRAMS else {}
    monkeypatch.setattr(steps, "_known", {})  # or how it reads depends on what ran before it
    measure(program, 8 if program in kernels.PROGRAMS else 2, koila.lazy, **options)
    memory = Allocations()
    said = Prediction(memory, monkeypatch, is_whole=chunks == 1)
    if chunks == 1:
        with koila.config(memory_limit=2**40):
            _, peak = measure(program, n_rows, koila.lazy, memory, **options)
    else:
        with split(chunks, whole=program.whole, partly=program.partly):
            _, peak = measure(program, n_rows, koila.lazy, memory, **options)
    off = said.n_bytes / peak - 1
    known = OFF.get(program.name, ("", 0.0, 0.0))[1 if chunks == 1 else 2]
    least, most = max(0.01 * peak, SLACK), max(0.03 * peak, SLACK)
    is_off = not -least <= said.n_bytes - peak <= most
    text = f"{said.n_bytes:.0f} bytes were predicted, {peak} used: {off:+.3f}"
    assert min(known, 0.0) - 0.01 <= off <= max(known, 0.0) or not is_off, text
    assert is_off == (known != 0), f"{text}: it is mended, strike it off"


class Halved(torch.nn.Module):
    """Hooks halve the gradient of each activation: what they return is as large."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4))
        self.head = torch.nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
            if x.requires_grad:
                x.register_hook(lambda grad: grad * 0.5)
        return self.head(x)


@pytest.mark.parametrize("chunks", [15, 30])
def test_gradients_that_hooks_return(chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are there beside the gradients that hooks get, of all rows."""
    program = Program(
        "halved",
        Halved,
        lambda n, g: (torch.randn(n, 64, generator=g),),
        lambda model, x: model(x).pow(2).mean(),
    )
    measure(program, 8, koila.lazy, **kernels.single)
    memory = Allocations()
    said = Prediction(memory, monkeypatch)
    with split(chunks):
        _, peak = measure(program, 3000, koila.lazy, memory, **kernels.single)
    assert 0.99 <= said.n_bytes / peak <= 1.03, (said.n_bytes, peak)


def set_column(h: Tensor, v: Tensor) -> Tensor:
    h[:, 0] = v
    return h


#: What is written in place, of x @ w and a bias: a view's gradient goes through all of its memory.
WRITES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "a product": lambda x, w, v: (x @ w).sigmoid_(),
    "rows of two dims": lambda x, w, v: F.linear(x[:, 0], w, v).relu_(),
    "no view inside of linear": lambda x, w, v: F.linear(x, w).relu_(),
    "a view inside of linear": lambda x, w, v: F.linear(x, w, v).relu_(),
    "a view inside of a norm": lambda x, w, v: F.leaky_relu_(F.instance_norm(x @ w)),
    "a view": lambda x, w, v: (x @ w).view(-1, 6).relu_(),
    "a view, times": lambda x, w, v: (x @ w).view(-1, 6).mul_(v),
    "a column": lambda x, w, v: set_column(x @ w, v),
}


@pytest.mark.parametrize("write", WRITES)
def test_writes(write: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, and within 1 %."""
    w, v = (torch.randn(*shape, requires_grad=True) for shape in ((6, 6), (6,)))
    x = torch.randn(4096, 8, 6)
    memory = Allocations()
    said = Prediction(memory, monkeypatch, is_whole=True)
    memory.count(x, w, v)
    with koila.config(memory_limit=2**40):
        with memory:
            pass
        with memory:
            WRITES[write](koila.lazy(x), w, v).sum().backward()
    assert abs(said.n_bytes - memory.peak) <= 0.01 * memory.peak


#: What reads the gradient of a sum, or of a mean in chunks: one number, expanded, which kernels
#: that do not go element by element copy.
SUMMED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "convolution": lambda x, w: F.conv1d(x, w[:, :, None]),
    "written convolution": lambda x, w: F.conv1d(F.conv1d(x, w[:, :, None]).relu_(), w[:, :, None]),
    "product": F.linear,
    "viewed product": lambda x, w: (x @ w).flatten(1),
    "softmax": lambda x, w: (x * w[0]).softmax(-1),
    "layer_norm": lambda x, w: F.layer_norm(x, (6,), w[0]),
    "pooling": lambda x, w: F.max_pool1d(x * w[0], 2),
    "interpolation": lambda x, w: F.interpolate(x * w[0], scale_factor=2.0),
    "element by element": lambda x, w: (x @ w).sigmoid(),
    "square": lambda x, w: (x @ w).pow(2),
    "bilinear": lambda x, w: F.bilinear(x @ w, x, torch.stack([w, w])),
}


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("call", SUMMED)
def test_expanded_gradients(call: str, chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 1 %."""
    w, x = torch.randn(6, 6, requires_grad=True), torch.randn(4096, 6, 6)
    memory = Allocations()
    said = Prediction(memory, monkeypatch, is_whole=chunks == 1)
    memory.count(x, w)
    with koila.config(memory_limit=2**40) if chunks == 1 else split(chunks):
        with memory:
            pass
        with memory:
            out = SUMMED[call](koila.lazy(x), w)
            (out.sum() if chunks == 1 else out.mean()).backward()
    assert abs(said.n_bytes - memory.peak) <= 0.01 * memory.peak
