# SPDX-License-Identifier: Apache-2.0
"""Heads that are larger than all else, of which not one row fits: in pieces of a second axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import koila
from allocations import Allocations
from koila import _core
from koila.memory import estimates
from koila.planning import fitting, plans, second_axis
from koila.reporting.report_types import ProgramReport
from koila.staged.program import Program
from koila.staged.schedule import Strategy
from limits import there
from oracle import assert_close

N_WORDS, WIDTH, LENGTH = 1500, 16, 64
Loss = Callable[[Tensor, Tensor], Tensor]


class Block(nn.Module):
    """Attention and a layer by itself: no position is apart from the others."""

    def __init__(self, p: float = 0.1) -> None:
        super().__init__()
        self.norm, self.p = nn.LayerNorm(WIDTH), p
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        parts = self.qkv(self.norm(x)).split(width, 2)
        q, k, v = (part.view(n, length, 4, width // 4).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = self.out(y.transpose(1, 2).reshape(n, length, width))
        return x + F.dropout(y, self.p, self.training)


class LM(nn.Module):
    """A language model whose scores are more than everything else."""

    def __init__(self, n_blocks: int = 2, is_tied: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(N_WORDS, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(n_blocks)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, N_WORDS, bias=not is_tied)
        if is_tied:
            self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.blocks(self.words(words))))
        return logits


WEIGHT = torch.linspace(0.1, 1, N_WORDS).double()


def masked(out: Tensor, y: Tensor) -> Tensor:
    losses = F.cross_entropy(out.flatten(0, 1), y.flatten(), reduction="none").view(y.shape)
    mask = (y % 3 > 0).double()
    return (losses * mask).sum() / mask.sum()


def by_row(out: Tensor, y: Tensor) -> Tensor:
    scores = out.log_softmax(-1).gather(-1, y.unsqueeze(-1)).squeeze(-1)
    return -scores.mean(1).mean()


def shifted(out: Tensor, y: Tensor) -> Tensor:
    y = F.pad(y, (0, 1), value=-100)[..., 1:]
    return F.cross_entropy(out.flatten(0, 1), y.flatten())


LOSSES: dict[str, Loss] = {
    "flat": lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()),
    "view": lambda out, y: F.cross_entropy(out.view(-1, N_WORDS), y.view(-1)),
    "classes first": lambda out, y: F.cross_entropy(out.transpose(1, 2), y),
    "weights": lambda out, y: F.cross_entropy(
        out.flatten(0, 1), y.flatten(), weight=WEIGHT, ignore_index=5, label_smoothing=0.1
    ),
    "sum": lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten(), reduction="sum"),
    "masked": masked,
    "by row": by_row,
    "shifted labels": shifted,
    "one-hot": lambda out, y: F.kl_div(
        out.log_softmax(-1), F.one_hot(y, N_WORDS).double(), reduction="batchmean"
    ),
    "two terms": lambda out, y: (
        F.cross_entropy(out.flatten(0, 1), y.flatten()) + 0.01 * out.logsumexp(-1).square().mean()
    ),
    "soft cap": lambda out, y: F.cross_entropy(9 * torch.tanh(out / 9).flatten(0, 1), y.flatten()),
}


def words(n_rows: int) -> tuple[Tensor, Tensor]:
    x, y = torch.randint(0, N_WORDS, (2, n_rows, LENGTH))
    y[0, 3] = 5
    return x, y


def step(
    model: nn.Module, loss_of: Callable[[], Tensor], limit: int | None
) -> tuple[dict[str, Tensor], int]:
    """The loss and gradients of a step, and its peak in bytes beside what was there."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    peak = Allocations()
    with koila.config(memory_limit=limit):
        with peak:
            loss = loss_of()
        with peak:
            loss.backward()
    found = {"loss": loss.detach().clone()}
    found |= {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found, peak.peak


def check(
    model: nn.Module, loss: Loss, x: Tensor, y: Tensor, share: float, batch: int = 0
) -> ProgramReport:
    """Hold a step at a share of what a row takes to the plain one, and its peak to the plan."""
    model.double()
    wanted, whole = step(model, lambda: loss(model(x), y), None)
    gradients = sum(p.numel() * 8 for p in model.parameters())
    n_rows = x.shape[batch]
    limit = there() + int(1.5 * gradients + share * (whole - gradients) / n_rows)

    def lazily() -> Tensor:
        a, b = koila.lazy(x, y, batch=batch)
        return loss(model(a), b)

    model.zero_grad(set_to_none=True)
    limit = min(limit, there() + int(1.5 * gradients + share * (whole - gradients) / n_rows))
    seen, peak = step(model, lazily, limit)
    ran = koila.report().programs[-1]
    assert seen.keys() == wanted.keys()
    for name, value in wanted.items():
        assert_close(seen[name], value, name)
    assert ran.bytes_predicted is not None
    assert peak <= 1.01 * ran.bytes_predicted + 2**16
    return ran


@pytest.mark.parametrize("n_rows", [1, 3, 7])
@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str, n_rows: int) -> None:
    torch.manual_seed(0)
    ran = check(LM(), LOSSES[name], *words(n_rows), 0.2)
    assert "pieces along dim 1" in ran.strategy


@pytest.mark.parametrize("share", [0.5, 0.35, 0.25])
def test_tied_weights(share: float) -> None:
    """The gradient of one weight comes from the head's own program and from the body."""
    torch.manual_seed(0)
    ran = check(LM(is_tied=True), LOSSES["flat"], *words(3), share)
    assert "pieces along dim" in ran.strategy


def test_rows_come_second() -> None:
    """Time comes first: the second axis is the first dim."""
    torch.manual_seed(0)

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.cell = nn.Embedding(N_WORDS, WIDTH), nn.GRU(WIDTH, WIDTH)
            self.head = nn.Linear(WIDTH, N_WORDS)

        def forward(self, words: Tensor) -> Tensor:
            logits: Tensor = self.head(self.cell(self.words(words))[0])
            return logits

    x, y = (part.T.contiguous() for part in words(2))
    ran = check(Recurrent(), LOSSES["flat"], x, y, 0.3, batch=1)
    assert "pieces along dim 0" in ran.strategy


def test_body_in_segments() -> None:
    """Neither a row's scores fit nor the graph of what is before them."""
    torch.manual_seed(0)
    model = LM(n_blocks=24)
    ran = check(model, LOSSES["flat"], *words(1), 0.12)
    assert "segments" in ran.strategy and "the last layers in" in ran.strategy


def test_lines_of_images() -> None:
    """Scores of pixels, by lines."""
    torch.manual_seed(0)

    class Pixels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Conv2d(3, 8, 3, padding=1)
            self.head = nn.Linear(8, 300)

        def forward(self, images: Tensor) -> Tensor:
            scores: Tensor = self.head(self.body(images).relu().permute(0, 2, 3, 1))
            return scores

    x, y = torch.randn(3, 3, 16, 20).double(), torch.randint(300, (3, 16, 20))
    ran = check(Pixels(), lambda out, y: F.cross_entropy(out.flatten(0, 2), y.flatten()), x, y, 0.3)
    assert "pieces along dim" in ran.strategy


@pytest.mark.parametrize("n_rows", [2, 3])
def test_body_and_head_read_a_batch_that_needs_a_gradient(n_rows: int) -> None:
    """The head reads all rows of its chunk, as the body does: both gradients count."""
    torch.manual_seed(0)
    n_words = 2000
    body, head = nn.Linear(8, 8).double(), nn.Linear(8, n_words).double()
    images, y = torch.randn(n_rows, LENGTH, 8).double(), torch.randint(n_words, (n_rows, LENGTH))

    def gradient(lazy: Callable[..., Any]) -> Tensor:
        for p in (*body.parameters(), *head.parameters()):
            p.grad = None
        x = images.clone().requires_grad_()
        a, b = lazy(x, y)
        h = torch.softmax(body(a) @ a.mT, -1) @ a
        scores = head(h) * a.mean(-1, keepdim=True)
        F.cross_entropy(scores.flatten(0, 1), b.flatten()).backward()
        assert x.grad is not None
        return x.grad

    want = gradient(lambda *tensors: tensors)
    for p in (*body.parameters(), *head.parameters()):
        p.grad = None
    n_bytes = 8 * (18 * n_words + 6 * LENGTH * n_words)
    with koila.config(memory_limit=there() + n_bytes):
        got = gradient(koila.lazy)
    report = koila.report()
    assert report is not None and "pieces along dim 1" in report.programs[-1].strategy
    assert_close(got, want, "gradient of the batch")


def test_no_second_axis() -> None:
    """Where the head mixes the positions too nothing is won, and it is refused as before."""
    torch.manual_seed(0)
    model = LM()
    x, y = words(1)

    def mixed(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out.softmax(1).flatten(0, 1), y.flatten())

    with pytest.raises(koila.MemoryLimitError):
        check(model, mixed, x, y, 0.2)


def across_at(dim: int) -> Strategy:
    return Strategy(n_pieces=2, second_size=(1, LENGTH, WIDTH)[dim], second_dim=dim)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_any_dim_gives_the_same(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the second axis is decides what it takes, and no number."""
    torch.manual_seed(0)
    model = LM().double()
    x, y = words(1)
    wanted, _ = step(model, lambda: LOSSES["two terms"](model(x), y), None)
    monkeypatch.setattr(fitting, "fit", lambda *words: plans.Plan(1, strategy=across_at(dim)))
    seen, _ = step(model, lambda: LOSSES["two terms"](model(koila.lazy(x)), y), 2**40)
    assert f"along dim {dim}" in koila.report().programs[-1].strategy
    for name, value in wanted.items():
        assert_close(seen[name], value, name)


class Failing(TorchDispatchMode):
    """Memory runs out at one call of a run."""

    sees_koila = True

    def __init__(self, call: int) -> None:
        super().__init__()
        self.call, self.n_calls = call, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        is_meta = isinstance(made, Tensor) and made.is_meta
        is_run = _core.is_busy() and not is_meta  # else it is still planned
        self.n_calls += is_run
        if is_run and self.n_calls == self.call:
            raise torch.OutOfMemoryError("out of memory, in a test")
        return made


@pytest.mark.parametrize("n_rows", [1, 2])
def test_memory_runs_out(n_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At any call before gradients are delivered, in the head's program too."""
    torch.manual_seed(0)
    model = LM(n_blocks=1).double()
    x, y = words(n_rows)
    wanted, _ = step(model, lambda: LOSSES["weights"](model(x), y), None)
    monkeypatch.setattr(fitting, "fit", lambda *words: plans.Plan(n_rows, strategy=across_at(1)))

    def attempt(call: int) -> Failing:
        model.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        with koila.config(memory_limit=2**40):
            a, b = koila.lazy(x, y)
            loss = LOSSES["weights"](model(a), b)
            with Failing(call) as failing:
                loss.backward()
        return failing

    attempt(-1)
    n_calls = attempt(-1).n_calls
    tried: set[tuple[int, str]] = set()
    for call in range(1, n_calls - 3 * len(wanted), max(1, n_calls // 40)):
        assert attempt(call).n_calls > call
        tried.add((koila.report().programs[-1].n_tries, koila.report().programs[-1].strategy))
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            assert_close(parameter.grad, wanted[name], f"{name}, call {call}")
    assert (2, "the last layers in 4 pieces along dim 1") in tried


def test_what_a_piece_needs() -> None:
    """Of a program whose scores go along the second axis a piece needs its share."""
    torch.manual_seed(0)
    model = LM()
    x, y = words(1)
    with koila.config(memory_limit="100 GiB"):
        a, b = koila.lazy(x, y)
        program = Program([LOSSES["flat"](model(a), b)]).cut_for(Strategy(n_pieces=2))
        head = max((run for run in program.runs if run.is_body), key=lambda run: run.index)
        found = second_axis.find(program, head)
        assert found is not None
        assert (found.dim, found.n) == (1, LENGTH)
        assert all(found.is_in(n) for n in (2, 8, 16))
        assert not found.is_in(LENGTH + 1)
        whole = estimates.estimate(program, True).peak(1)[0]
        way = Strategy(n_pieces=16, second_size=found.n, second_dim=found.dim)
        assert estimates.estimate(program, True, way).peak(1)[0] < 0.4 * whole
        _core.forget()


def test_it_is_told() -> None:
    """In one chunk, and yet not whole."""
    torch.manual_seed(0)
    model = LM().double()
    x, y = words(1)
    gradients = sum(p.numel() * 8 for p in model.parameters())
    with koila.config(memory_limit=there() + int(1.5 * gradients + 10**6)):
        a, b = koila.lazy(x, y)
        loss = LOSSES["flat"](model(a), b)
        told = str(koila.explain(loss))
        assert "in 1 chunk of 1 sample" in told, told
        loss.backward()
    told = str(koila.report())
    assert "in 1 chunk of 1 sample" in told, told
