# SPDX-License-Identifier: Apache-2.0
"""What a step is said to need against what torch's allocator hands out, whole and in chunks.

Rows are so many that eager's peak is some MiB: one tensor too many, or too few, shows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import koila
import test_memory_kernels as kernels
import test_never_worse as models
from allocations import Allocations, measure
from chunked import split
from koila.memory import estimates
from koila.planning import planner, plans, steps
from koila.recording import functions
from koila.running.interpret import Interpreter
from koila.staged.program import Program as StagedProgram
from koila.staged.schedule import Step
from oracle import eager
from programs_kit import Program
from test_memory_limit import Prediction

SLACK = 64 * 2**10
TARGET = 6 * 2**20
N_CHUNKS = 4

TAPE = "what only the recorded program holds goes as a whole run goes on"
CUT = "what barriers put together is counted from the start, and gradients come chunk by chunk"
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
    "sparse_mixture": (OUTSIDE, 0.18, 0.0),
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
    monkeypatch.setattr(steps, "_shares", {})  # or how it reads depends on what ran before it
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


WAIT = "the forward of a part whose chunks keep their graphs"
FIRST = "a forward that is to be repeated, and the tail that it leads to"

#: What is said to be needed during some instruction is too much by more than 1 % of the peak and
#: `SLACK`: by what share of the peak at most, and where.
OVER: dict[str, tuple[str, float]] = {
    "vector_norm": (WAIT, 0.16),
    "recurrent": (FIRST, 0.06),
    "lstm_state-ce": ("the backward of the last chunk", 0.06),
    "states": ("the backward of the last chunk", 0.09),
}
if torch.bfloat16 in functions._tiled_halves():
    OVER["convolutions_autocast"] = ("the forward of a chunk, by kernels for tiles", 0.07)


class Instructions:
    """What is said of each instruction of the schedules that run, and its peak, in `memory`."""

    def __init__(self, memory: Allocations, monkeypatch: pytest.MonkeyPatch) -> None:
        self.memory = memory
        self.said: list[dict[int, float]] = []  # of each plan, by instruction: bytes
        self.numbers: dict[Interpreter, int] = {}
        self.names: list[list[str]] = []  # of each schedule that ran: the names of its instructions
        self.make_plan = planner.plan
        monkeypatch.setattr(planner, "plan", self.plan)
        run = {op: self.noted(do) for op, do in Interpreter._DO.items()}
        monkeypatch.setattr(Interpreter, "_DO", run)

    def plan(self, program: StagedProgram, is_graph: bool, is_final: bool = True) -> plans.Plan:
        made = self.make_plan(program, is_graph, is_final)
        self.memory.mark()
        estimate = estimates.estimate(program.cut_for(made.strategy), is_graph, made.strategy)
        said: dict[int, float] = {}
        for moment in estimate.course(-(-estimate.rows // made.n_chunks)):
            said[moment.step] = max(said.get(moment.step, 0.0), moment.n_bytes)
        self.said.append(said)
        return made

    def noted(self, do: Callable[[Interpreter, Step], Any]) -> Callable[[Interpreter, Step], Any]:
        def noted(interpreter: Interpreter, step: Step) -> Any:
            if interpreter not in self.numbers:
                self.numbers[interpreter] = len(self.names)
                self.names.append([one.op.name for one in interpreter.schedule.steps])
            at = next(i for i, one in enumerate(interpreter.schedule.steps) if one is step)
            return labelled(do, f"{self.numbers[interpreter]} {at}")(interpreter, step)

        def labelled(do: Callable[..., Any], label: str) -> Callable[..., Any]:
            def run(*args: Any) -> Any:
                self.memory.label(label)
                later = do(*args)
                self.memory.label("")
                return labelled(later, label) if callable(later) else None

            return run

        return noted

    def off(self) -> dict[str, float]:
        """By instruction: how many bytes more are said to be needed than were used."""
        assert len(self.said) == len(self.names) > 0
        pairs = enumerate(zip(self.said, self.memory.at_marks, strict=True))
        return {
            f"{self.names[k][at]} {at}": there + n_bytes - self.memory.peaks[f"{k} {at}"]
            for k, (said, there) in pairs
            for at, n_bytes in said.items()
            if f"{k} {at}" in self.memory.peaks
        }


@pytest.mark.parametrize(
    "program", [one for one in ALL if one.name not in IN_ONE], ids=lambda one: one.name
)
def test_each_instruction(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """During none are 1 % of the peak, or 64 KiB, more used than is said; nor less, but for what is
    known."""
    options = kernels.single if program in kernels.PROGRAMS else {}
    monkeypatch.setattr(steps, "_shares", {})
    measure(program, 8 if program in kernels.PROGRAMS else 2, koila.lazy, **options)
    memory = Allocations()
    found = Instructions(memory, monkeypatch)
    with split(N_CHUNKS, whole=program.whole, partly=program.partly):
        _, peak = measure(program, rows_of(program), koila.lazy, memory, **options)
    off, slack = found.off(), max(0.01 * peak, SLACK)
    assert len(off) >= 3, off
    over = max(off.items(), key=lambda pair: pair[1])
    under = min(((name, -n_bytes) for name, n_bytes in off.items()), key=lambda pair: -pair[1])
    assert under[1] <= slack, f"{under[0]}: {under[1] / peak:.3f} of the peak"
    _, known = OVER.get(program.name, ("", 0.0))
    text = f"{over[0]}: {over[1] / peak:.3f} of the peak"
    assert over[1] <= max(known * peak, slack), text
    assert (over[1] > slack) == (known > 0), f"{text}: it is mended, strike it off"


#: Over the batch, of far more features than rows: what combining the parts of chunks holds shows.
COMBINED: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda z: z.sum(0),
    "mean": lambda z: z.mean(0),
    "nanmean": lambda z: z.nanmean(0),
    "std": lambda z: z.std(0),
    "var": lambda z: z.var(0),
    "logsumexp": lambda z: z.logsumexp(0),
    "amax": lambda z: z.amax(0),
    "norm": lambda z: z.norm(dim=0),
    "norm of 3": lambda z: z.norm(3, dim=0),
    "prod": lambda z: z.prod(0),
    "batch_norm": lambda z: F.batch_norm(z, None, None, training=True).pow(2).sum(0),
}


@pytest.mark.parametrize("chunks", [2, 5])
@pytest.mark.parametrize("name", COMBINED)
def test_combining(name: str, chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """During none of its instructions is more used than is said."""
    program = Program(
        name,
        kernels.Features,
        lambda n, g: (torch.randn(n, 4, generator=g),),
        lambda model, x: COMBINED[name](model(x)).pow(2).mean(),
    )
    measure(program, 8, koila.lazy, **kernels.single)
    memory = Allocations()
    found = Instructions(memory, monkeypatch)
    with split(chunks):
        _, peak = measure(program, 65, koila.lazy, memory, **kernels.single)
    off = found.off()
    assert min(off.values()) >= -max(0.01 * peak, SLACK), off
    of_barriers = [n_bytes for step, n_bytes in off.items() if step.startswith("BARRIER")]
    assert max(of_barriers) <= 0.1 * peak, off


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
