# SPDX-License-Identifier: Apache-2.0
"""Packed sequences: the memory they are said to need, by the steps that a chunk really has."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import koila
from allocations import Allocations, measure
from chunked import split
from koila.basics.rows import grid, largest
from koila.memory import uneven
from koila.planning import fitting, planner, plans
from koila.staged.schedule import Strategy
from limits import there
from oracle import eager
from programs_kit import Program
from programs_losses import randn
from test_memory_limit import Prediction

N_STEPS, N_ROWS = 48, 96
SINGLE = {"dtype": torch.float32, "rounded": torch.float32}


def some(least: int, most: int, n: int) -> Tensor:
    return torch.randint(least, most + 1, (n,), generator=torch.Generator().manual_seed(3))


def one_long(n: int) -> Tensor:
    lengths = torch.full((n,), 3)
    lengths[n // 2] = N_STEPS
    return lengths


#: How many steps the rows have.
LENGTHS: dict[str, Callable[[int], Tensor]] = {
    "near": lambda n: some(N_STEPS - 3, N_STEPS, n),
    "spread": lambda n: some(1, N_STEPS, n),
    "sorted": lambda n: some(1, N_STEPS, n).sort(descending=True).values,
    "rising": lambda n: some(1, N_STEPS, n).sort().values,
    "one long": one_long,
}
KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}


class Layer(nn.Module):
    """Of `n_in` numbers a step, `n_hidden` are made."""

    def __init__(
        self, kind: str, lengths: str, n_in: int = 24, n_hidden: int = 32, **options: Any
    ) -> None:
        super().__init__()
        self.layer = KINDS[kind](n_in, n_hidden, **options)
        self.lengths, self.n_in = lengths, n_in
        n_hidden = self.layer.proj_size or n_hidden
        self.head = nn.Linear(n_hidden * (1 + self.layer.bidirectional), 5)

    def forward(self, x: Tensor) -> Tensor:
        is_first = self.layer.batch_first
        lengths = LENGTHS[self.lengths](x.shape[0 if is_first else 1])
        is_sorted = self.lengths == "sorted"
        given = pack_padded_sequence(x, lengths, is_first, enforce_sorted=is_sorted)
        return self.head(pad_packed_sequence(self.layer(given)[0], is_first)[0])


class Last(Layer):
    """Of the last states alone."""

    def forward(self, x: Tensor) -> Tensor:
        given = pack_padded_sequence(x, LENGTHS[self.lengths](len(x)), True, enforce_sorted=False)
        return self.head(self.layer(given)[1][-1])


def program_of(make: Callable[[], Layer]) -> Program:
    is_first, n_in = make().layer.batch_first, make().n_in

    def batch(n: int, g: torch.Generator) -> tuple[Tensor]:
        x = randn(g, n, N_STEPS, n_in)
        return (x if is_first else x.transpose(0, 1).contiguous(),)

    return Program(
        "packed", make, batch, lambda model, x: model(x).pow(2).mean(), 0 if is_first else 1
    )


def check(make: Callable[[], Layer], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole and in three chunks, what is said is what is taken, within 5 %."""
    program = program_of(make)
    measure(program, 8, koila.lazy, **SINGLE)
    for chunks in (1, 3):
        memory = Allocations()
        options = koila.config(memory_limit=2**40) if chunks == 1 else split(chunks)
        with monkeypatch.context() as patch, options:
            said = Prediction(memory, patch, is_whole=chunks == 1)
            _, peak = measure(program, N_ROWS, koila.lazy, memory, **SINGLE)
        assert 0.98 <= said.n_bytes / peak <= 1.05, (chunks, said.n_bytes, peak)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_lengths(kind: str, lengths: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(lambda: Layer(kind, lengths, batch_first=True), monkeypatch)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", ["near", "sorted", "spread"])
@pytest.mark.parametrize(
    "options",
    [
        {"num_layers": 2},
        {"bidirectional": True},
        {"num_layers": 2, "bidirectional": True, "batch_first": True},
        {"n_in": 8, "n_hidden": 64, "batch_first": True},
        {"n_in": 96, "n_hidden": 16},
        {"num_layers": 2, "dropout": 0.3},
        {"num_layers": 3, "bidirectional": True, "batch_first": True, "dropout": 0.3},
    ],
    ids=["layers", "both", "layers-both", "narrow", "wide", "dropout", "dropout-both"],
)
def test_layers(
    kind: str, lengths: str, options: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    check(lambda: Layer(kind, lengths, **options), monkeypatch)


def test_projections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gates are of the cell, results of what it is projected to."""
    check(lambda: Layer("lstm", "spread", proj_size=8, batch_first=True), monkeypatch)


@pytest.mark.parametrize("kind", KINDS)
def test_last_states(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No gradient of any step comes, and none is counted."""
    check(lambda: Last(kind, "spread", batch_first=True), monkeypatch)


class Below(Layer):
    """What is packed has a gradient of its own."""

    def __init__(self, kind: str, lengths: str, **options: int) -> None:
        super().__init__(kind, lengths, n_in=48, batch_first=True, **options)
        self.below, self.n_in = nn.Linear(24, 48), 24

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.below(x))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_both", [False, True])
def test_input_that_has_a_gradient(
    kind: str, is_both: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(lambda: Below(kind, "spread", bidirectional=is_both), monkeypatch)


class Tagged(Layer):
    """Words, and scores of each step: the layer is one of the last, which run in pieces."""

    def __init__(self, kind: str, lengths: str, **options: int) -> None:
        super().__init__(kind, lengths, n_in=48, n_hidden=64, batch_first=True, **options)
        self.words = nn.Embedding(100, 48)
        self.head = nn.Linear(self.head.in_features, 100)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.words(x))


@pytest.mark.rotated("chunks")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_both", [False, True])
@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize(("lengths", "most"), [("spread", 1.05), ("sorted", 1.12)])
def test_pieces(
    kind: str,
    is_both: bool,
    chunks: int,
    lengths: str,
    most: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In pieces of a chunk. If rows are sorted, the first piece has the most steps; the gradient
    that all pieces add to is counted with it, though it exists only afterwards."""
    program = Program(
        "tagged",
        lambda: Tagged(kind, lengths, num_layers=2, bidirectional=is_both),
        lambda n, g: (torch.randint(100, (n, N_STEPS), generator=g),),
        lambda model, x: model(x).pow(2).mean(),
    )
    plan, memory = planner.plan, Allocations()

    def in_pieces(*args: Any) -> plans.Plan:
        return dataclasses.replace(plan(*args), strategy=Strategy(n_pieces=4))

    measure(program, 8, koila.lazy, **SINGLE)
    with monkeypatch.context() as patch, split(chunks):
        patch.setattr(planner, "plan", in_pieces)
        said = Prediction(memory, patch)
        _, taken = measure(program, 2 * N_ROWS, koila.lazy, memory, **SINGLE)
        report = str(koila.report())
    assert "the last layers in 4 pieces" in report
    assert 0.97 <= said.n_bytes / taken <= most, (said.n_bytes, taken)


@pytest.mark.parametrize("seed", range(4))
def test_shares_of_pieces(seed: int) -> None:
    """Steps and turns of the worst piece of the worst chunk, by hand."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (53,), generator=generator)
    for rows, n_pieces in itertools.product((7, 8, 20, 53), (2, 4, 16)):
        whole = fitting._chunks_of(53, rows, fitting.AS_IT_IS) if rows < 53 else (1, 1)
        pieces = [
            lengths[start + first : start + last]
            for start, stop in grid(53, *whole)
            for first, last in grid(stop - start, n_pieces)
        ]
        share = (rows / n_pieces + 1) / 53
        *_, of_steps, of_turns = uneven.parts([lengths], 53, rows, n_pieces)
        assert of_steps * share * int(lengths.sum()) >= max(int(p.sum()) for p in pieces) - 1e-6
        assert of_turns * share * turns_by_hand(lengths) >= max(map(turns_by_hand, pieces)) - 1e-6


@pytest.mark.parametrize("lengths", LENGTHS)
def test_limit_is_kept(lengths: str) -> None:
    """And with few chunks where each has its share of the steps."""
    program = program_of(lambda: Layer("gru", lengths, batch_first=True))
    _, peak = measure(program, N_ROWS, eager, **SINGLE)
    limit = int(0.6 * peak)
    with koila.config(memory_limit=there() + limit):
        _, found = measure(program, N_ROWS, koila.lazy, **SINGLE)
        n_chunks = koila.report().n_chunks
    assert found <= limit
    assert n_chunks <= (4 if lengths in ("near", "spread") else 8)


def turns_by_hand(lengths: Tensor) -> int:
    sizes = [int((lengths > step).sum()) for step in range(int(lengths.max()))]
    return sum(now for now, after in itertools.pairwise(sizes) if now > after)


@pytest.mark.parametrize("seed", range(4))
def test_shares(seed: int) -> None:
    """Steps and turns of the worst chunk, of those that the planner may make, by hand."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (53,), generator=generator)
    assert uneven.turns(lengths) == turns_by_hand(lengths)
    for rows in (1, 2, 7, 8, 9, 20, 30, 52, 53):
        n_chunks, steps, turns = -(-53 // rows), 0, 0
        whole = fitting._chunks_of(53, rows, fitting.AS_IT_IS) if rows < 53 else (1, 1)
        for bounds in (grid(53, *whole), grid(53, n_chunks)):
            steps = max(int(lengths[start:stop].sum()) for start, stop in [*bounds])
            turns = max(turns_by_hand(lengths[start:stop]) for start, stop in bounds)
            share = rows / 53 if n_chunks > 1 else 1
            of_steps, of_turns = uneven.parts([lengths], 53, rows)[:2]
            assert of_steps * share * int(lengths.sum()) >= steps - 1e-6
            assert of_turns * share * turns_by_hand(lengths) >= turns - 1e-6
        assert largest(53, *whole) <= rows


def test_the_worst_share_counts() -> None:
    """Of several layers over the same rows, and of an axis with fewer."""
    even, first = torch.full((16,), 4), torch.tensor([8] * 4 + [1] * 12)
    assert uneven.parts([even], 16, 4)[:2] == (1.0, 0.0)
    steps, turns = uneven.parts([first, even], 16, 4)[:2]
    assert steps == 32 / (44 / 4)
    assert turns == 0
    assert uneven.parts([first[:8]], 16, 8)[:2] == (32 / 18, 0.0)
    assert uneven.parts([first], 16, 16)[:2] == (1.0, 1.0)
