# SPDX-License-Identifier: Apache-2.0
"""A number read before the rest of a step is recorded costs nothing of what chunks save: its graph
is not held, and the rest has the chunks that it needs, with eager's draws in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import koila
from allocations import Allocations
from koila.planning import steps
from koila.staged import noise
from limits import there
from oracle import FlopCounter, Lazy, assert_close, assert_seen, eager, tell
from test_draws_order import ALL, Model

ROWS, WIDTH, CLASSES, DEPTH = 1024, 128, 10, 12

READS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "mean": lambda h, y: float(f"{h.mean():.6f}"),
    "item": lambda h, y: h.pow(2).mean().item(),
    "accuracy": lambda h, y: (h.argmax(1) == y).float().mean().item(),
    "all numbers": lambda h, y: float(h.detach().numpy().sum()),
}
#: The layers after which something is read.
PLACES = {
    "first": (0,),
    "middle": (5,),
    "late": (9,),
    "two": (1, 6),
    "all": tuple(range(DEPTH)),
}


def make_model(p: float) -> nn.ModuleList:
    torch.manual_seed(0)
    layers = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(p)) for _ in range(DEPTH)
    ]
    return nn.ModuleList([*layers, nn.Linear(WIDTH, CLASSES)])


def forward(model: nn.ModuleList, x: Tensor, y: Tensor, name: str, place: str) -> Any:
    """Run a model and read after some of its layers; the loss, and what was read."""
    h, seen = x, []
    for k, layer in enumerate(model):
        h = layer(h)
        if k in PLACES[place]:
            seen.append(READS[name](h, y))
    return F.cross_entropy(h, y), seen


class Step:
    """One step with reads in its midst: what it saw, left behind and took."""

    def __init__(self, name: str, place: str, lazy: Lazy, p: float) -> None:
        self.model = make_model(p)
        x, y = torch.randn(ROWS, WIDTH), torch.randint(CLASSES, (ROWS,))
        self.held = sum(t.nbytes for t in (*self.model.parameters(), x, y))
        memory = Allocations()
        memory.count(list(self.model.parameters()), x, y)
        torch.manual_seed(1)
        with memory:
            loss, self.seen = forward(self.model, *lazy(x, y), name, place)
        with memory:
            loss.backward()
        self.loss = loss.item()
        self.peak = memory.peak
        self.generator = torch.get_rng_state()


@pytest.mark.parametrize(
    ("name", "p", "place", "share"),
    [
        *(("mean", 0.1, place, share) for place in PLACES for share in (0.8, 0.5, 0.3)),
        *(("item", 0.0, place, 0.3) for place in ("middle", "all")),
        *((name, 0.1, "all", 0.3) for name in ("accuracy", "all numbers")),
    ],
)
def test_early_reads_keep_the_limit(name: str, p: float, place: str, share: float) -> None:
    """The limit holds to the end, in as many chunks as the whole step needs, and draws are
    eager's."""
    steps._shares.clear()
    want = Step(name, place, eager, p)
    limit = want.held + int(share * (want.peak - want.held))
    for _ in range(2):  # the second time it is known how much comes after the read
        with koila.config(memory_limit=there() + limit):
            got = Step(name, place, koila.lazy, p)
        report = koila.report()
        assert report is not None
        assert report.programs[-1].n_chunks > 1
        assert got.peak <= limit, f"{got.peak} bytes, the limit is {limit}, eager's {want.peak}"
        assert got.seen == pytest.approx(want.seen, rel=1e-5)
        assert got.loss == pytest.approx(want.loss, rel=1e-5)
        assert torch.equal(got.generator, want.generator)
        for (key, found), other in zip(
            got.model.named_parameters(), want.model.parameters(), strict=True
        ):
            assert found.grad is not None
            assert other.grad is not None
            assert_close(found.grad, other.grad, key, tolerance=1e-4)
        del got, found  # what the next may take is counted beside what is there


def flops_of_steps(place: str, limit: int, n: int) -> list[int]:
    steps._shares.clear()
    before = there()
    model, found = make_model(0.1), []
    with koila.config(memory_limit=before + limit):
        for _ in range(n):
            x, y = koila.lazy(torch.randn(ROWS, WIDTH), torch.randint(CLASSES, (ROWS,)))
            counter = FlopCounter()
            with counter:
                forward(model, x, y, "mean", place)[0].backward()
            found.append(counter.flops)
    return found


def test_a_read_runs_nothing_twice_where_the_step_is_known_to_fit() -> None:
    """The first step is read without a graph, as nobody knows what comes; later ones are not."""
    x, y = torch.randn(ROWS, WIDTH), torch.randint(CLASSES, (ROWS,))
    counter = FlopCounter()
    with counter:
        forward(make_model(0.1), x, y, "mean", "middle")[0].backward()
    for place in ("middle", "two", "all"):
        first, *_, last = flops_of_steps(place, 2**30, 4)
        assert first > counter.flops
        assert last == counter.flops


def test_reads_go_on_from_reads() -> None:
    """However much is read: all of the model runs forward once for it, and once for backward."""
    model = make_model(0.1)
    x = torch.randn(ROWS, WIDTH)
    counter = FlopCounter()
    with counter:
        nn.Sequential(*model)(x)
    forward_flops = counter.flops
    for place in ("two", "all"):
        (found,) = flops_of_steps(place, 6 * 2**20, 1)
        assert found <= 4 * forward_flops


# Draws ------------------------------------------------------------------------------------------

DRAWN_ROWS = 12


def read_first(model: Model, first: int, then: int) -> Callable[[Lazy], Any]:
    """A story that reads in some chunks, and goes on in others."""

    def story(lazy: Lazy) -> Any:
        weight = (torch.randn(6, 6, dtype=torch.float64) / 2).requires_grad_()
        x = lazy(torch.randn(DRAWN_ROWS, 4, 6, dtype=torch.float64))
        with koila.config(chunks=first):
            early = model(F.dropout(x, 0.1), weight)
            seen = early.sum().item()
        drawn = torch.rand(2)
        with koila.config(chunks=then):
            again = early.mean().item() if first == 1 else 0.0
            loss = early.pow(2).mean() + F.dropout(x @ weight, 0.5).mean()
            loss.backward()
            if lazy is koila.lazy:
                report = koila.report()
                assert report is not None
                assert report.programs[-1].n_chunks in (1, then)
                CUT.append(report.programs[-1].n_chunks == then)
        return seen, again, drawn, loss, weight.grad, torch.rand(2)

    return story


CUT: list[bool] = []


@pytest.mark.parametrize(("first", "then"), [(2, 7)])
@pytest.mark.parametrize("name", ALL)
def test_other_chunks_draw_the_same(name: str, first: int, then: int) -> None:
    """Each call's draws are found again in whatever chunks the rest of the step needs."""
    story = read_first(ALL[name], first, then)
    CUT.clear()
    want, want_state = tell(story, eager)
    got, state = tell(story, koila.lazy)
    assert_seen(got, want, "seen", exact_bits=False)
    assert torch.equal(state, want_state)
    assert CUT == [True] or "poisson" in name or "rrelu" in name


@pytest.mark.parametrize(("first", "then"), [(7, 3), (3, 12), (12, 3), (2, 5), (12, 2)])
@pytest.mark.parametrize("name", ["rows first", "normal_", "time-major", "features", "LSTM"])
def test_any_chunks_draw_the_same(name: str, first: int, then: int) -> None:
    test_other_chunks_draw_the_same(name, first, then)


def test_what_draws_by_chunks_keeps_its_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only the call itself knows what it draws, other chunks would draw other numbers: the
    rest of a step has those of the read, or is refused."""
    monkeypatch.setattr(noise, "of", lambda *_: None)
    weight = torch.randn(64, 64, requires_grad=True)
    x = torch.randn(256, 64)

    def early(limit: int) -> Tensor:
        with koila.config(chunks=2):
            hidden = F.dropout(koila.lazy(x) @ weight, 0.5)
            hidden.mean().item()
        with koila.config(memory_limit=there() + limit):
            for _ in range(12):
                hidden = (hidden @ weight).tanh()
            loss = hidden.pow(2).mean()
            loss.backward()
        return loss

    early(2**20 * 3 // 2)
    report = koila.report()
    assert report is not None
    assert [ran.n_chunks for ran in report.programs] == [2, 2]
    with pytest.raises(koila.MemoryLimitError, match="128 samples at a time"):
        early(2**17)
