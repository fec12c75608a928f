# SPDX-License-Identifier: Apache-2.0
"""Steps of which not even one row fits as they are: cut into segments, made again, offloaded."""

from __future__ import annotations

import copy
import dataclasses
import errno
import itertools
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import koila
from allocations import Allocations
from koila import _core
from koila.basics.rows import largest
from koila.memory import estimates, offload
from koila.planning import fitting, planner, plans, strategies
from koila.planning.strategies import Option, Strategies
from koila.staged import cache
from koila.staged.program import Program
from koila.staged.schedule import Graph, Op, Policy, Schedule, Strategy
from limits import there
from oracle import assert_close
from policies import mixed

N_ROWS, WIDTH, LENGTH, N_WORDS = 4, 32, 96, 50
Loss = Callable[[Tensor, Tensor], Tensor]


class Block(nn.Module):
    """A block of a decoder, dropout and all."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        heads = [
            part.view(n, length, 4, width // 4).transpose(1, 2)
            for part in self.qkv(self.norms[0](x)).split(width, 2)
        ]
        y = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(n, length, width))
        return x + F.dropout(self.down(F.gelu(self.up(self.norms[1](x)))), 0.1)


class Decoder(nn.Module):
    """A small language model."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(N_WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(8))
        self.head = nn.Linear(WIDTH, N_WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


class Residual(nn.Module):
    """Two convolutions and two batch normalizations, and what goes around them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.layers(x))


def decoder() -> tuple[nn.Module, Tensor, Tensor, Loss]:
    x, y = (torch.randint(0, N_WORDS, (N_ROWS, LENGTH)) for _ in range(2))
    return Decoder().double(), x, y, lambda out, y: F.cross_entropy(out.transpose(1, 2), y)


def resnet() -> tuple[nn.Module, Tensor, Tensor, Loss]:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        *(Residual(16) for _ in range(6)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 5),
    )
    return (
        model.double(),
        torch.randn(12, 3, 16, 16).double(),
        torch.arange(12) % 5,
        F.cross_entropy,
    )


def step(
    made: tuple[nn.Module, Tensor, Tensor, Loss], limit: int | None
) -> tuple[dict[str, Tensor], int]:
    """The loss, gradients and buffers of a step, and its peak in bytes beside what was there."""
    model, x, y, loss_of = made
    model.zero_grad(set_to_none=True)
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    torch.manual_seed(1)
    peak = Allocations()
    with koila.config(memory_limit=limit) if limit is not None else koila.config():
        with peak:
            if limit is not None:
                x, y = koila.lazy(x, y)
            loss = loss_of(model(x), y)
        with peak:
            loss.backward()
    found = {"loss": loss.detach().clone()}
    found |= {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for name, buffer in model.named_buffers():
        found[name] = buffer.clone()
        buffer.copy_(kept[name])
    return found, peak.peak


def needs(made: tuple[nn.Module, Tensor, Tensor, Loss], rows: int) -> float:
    """Bytes of a step in chunks of so many rows, as it is."""
    model, x, y, loss_of = made
    with koila.config(memory_limit="100 GiB"):
        lazy = koila.lazy(x, y)
        loss = loss_of(model(lazy[0]), lazy[1])
        needed = estimates.estimate(Program([loss]), True).peak(rows)[0]
        _core.forget()
    return needed


@pytest.mark.parametrize("share", [0.8, 0.5])
def test_one_row_does_not_fit(share: float) -> None:
    """A chunk of one row goes through the model block after block."""
    torch.manual_seed(0)
    made = decoder()
    wanted, _ = step(made, None)
    one_row = needs(made, 1)
    made[0].zero_grad(set_to_none=True)
    seen, peak = step(made, int(there() + share * one_row))
    for name, value in wanted.items():
        assert_close(seen[name], value, name)
    assert peak <= share * one_row + 64 * 2**10
    (ran,) = koila.report().programs
    assert ran.n_chunks > 1 and "segments (a second forward of all but the last)" in ran.strategy
    assert ran.n_tries == 1, "it was planned"


@pytest.mark.parametrize("share", [0.65, 0.5, 0.35, 0.25])
def test_a_network_of_batch_normalizations(share: float) -> None:
    """What crosses each of its barriers is most of what it keeps."""
    torch.manual_seed(0)
    made = resnet()
    wanted, peak = step(made, None)
    made[0].zero_grad(set_to_none=True)
    seen, _ = step(made, int(there() + share * peak))
    for name, value in wanted.items():
        assert_close(seen[name], value, name)
    (ran,) = koila.report().programs
    assert ran.n_chunks > 1 and "activations between parts" in ran.strategy
    assert ran.bytes_predicted is not None and ran.bytes_predicted <= share * peak


def language_model() -> tuple[nn.Module, Tensor, Tensor, Loss]:
    """One of so many words that its scores are more than ten times everything else."""
    n_words = 4000
    model = nn.Sequential(nn.Embedding(n_words, WIDTH), Block(), nn.Linear(WIDTH, n_words))
    x, y = (torch.randint(0, n_words, (18, 12)) for _ in range(2))
    y[torch.rand(y.shape) < 0.2] = -100
    return model.double(), x, y, lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten())


@pytest.mark.parametrize("share", [0.5, 0.3])
def test_scores_that_are_most_of_it(share: float) -> None:
    """The body runs once, in one chunk as long as it fits, and the head in pieces of it."""
    torch.manual_seed(0)
    made = language_model()
    wanted, peak = step(made, None)
    gradients = sum(p.nbytes for p in made[0].parameters())
    made[0].zero_grad(set_to_none=True)
    seen, got = step(made, int(there() + gradients + share * (peak - gradients)))
    for name, value in wanted.items():
        assert_close(seen[name], value, name)
    (ran,) = koila.report().programs
    assert ran.n_chunks == 1 and ran.n_tries == 1
    assert "the last layers in" in ran.strategy and not ran.why
    assert got <= gradients + share * (peak - gradients)
    (of_labels, *of_body) = [stage.passes for stage in ran.stages if stage.n_rows is not None]
    assert of_labels == "1 forward" and of_body == ["1 forward, 1 backward"] * 2


def test_what_fits_runs_as_it_is() -> None:
    """A way that costs is chosen where there is no other."""
    torch.manual_seed(0)
    made = decoder()
    needed = needs(made, 1)
    step(made, int(there() + 2 * needed))
    (ran,) = koila.report().programs
    assert ran.n_chunks > 1 and not ran.strategy


def deep() -> tuple[nn.Module, Tensor, Tensor, Loss]:
    """Layers that are all alike: its head in pieces is half of it."""
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(40)]
    x, y = torch.randn(16, LENGTH, WIDTH).double(), torch.randn(16, LENGTH, WIDTH).double()
    return nn.Sequential(*layers).double(), x, y, F.mse_loss


@pytest.mark.parametrize("n_rows", [2, 3, 4, 6])
def test_no_pieces_of_half_a_model(n_rows: int) -> None:
    """In larger chunks the calls of its head would be made more often than in smaller chunks."""
    torch.manual_seed(0)
    made = deep()
    step(made, int(there() + n_rows * needs(made, 1)))
    (ran,) = koila.report().programs
    assert ran.n_chunks > 1 and not ran.strategy


def test_explain_tells() -> None:
    torch.manual_seed(0)
    model, x, y, loss_of = made = decoder()
    one_row = needs(made, 1)
    with koila.config(memory_limit=int(there() + 0.8 * one_row)):
        lazy = koila.lazy(x, y)
        text = koila.explain(loss_of(model(lazy[0]), lazy[1]), full=True)
    assert "in up to" in text and "segment 2 of" in text
    assert "2 forwards, 1 backward" in text


# How many ways are measured ----------------------------------------------------------------------


def forget() -> None:
    """Forget what was planned before."""
    cache._caches.clear()
    for seen in (strategies._seen, fitting._last_strategies, planner._least_limits):
        seen.clear()


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many programs are staged, and how many ways are measured."""
    found: Counter[str] = Counter()

    def counting(name: str, func: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any) -> Any:
            found[name] += 1
            return func(*args)

        return count

    for name in ("stage", "measure"):
        monkeypatch.setattr(_core, name, counting(name, getattr(_core, name)))
    forget()
    return found


def counts_of(
    made: tuple[nn.Module, Tensor, Tensor, Loss], limit: int, counted: Counter[str]
) -> tuple[tuple[int, int], str]:
    """How many programs a step stages and how many ways it measures; and why it is refused."""
    counted.clear()
    refused = ""
    try:
        step(made, limit)
    except koila.MemoryLimitError as error:
        refused = str(error)
        _core.forget()
    return (counted["stage"], counted["measure"]), refused


@pytest.mark.parametrize(("share", "most"), [(0.7, 4), (0.4, 4), (0.25, 6), (0.15, 5)])
def test_a_plan_stages_once_and_measures_few_ways(
    share: float, most: int, counted: Counter[str]
) -> None:
    """Those that fit certainly not, or are dearer than one that does, are not measured; nor does
    the next step look for its way again."""
    torch.manual_seed(0)
    made = resnet()
    whole = needs(made, 12)
    limit = int(there() + share * whole)
    forget()
    (n_staged, n_measured), refused = counts_of(made, limit, counted)
    assert n_staged == 1 and n_measured <= most and not refused, n_measured
    assert counts_of(made, limit, counted) == ((1, 0), "")


def test_a_refusal_measures_few_ways_and_the_next_none(counted: Counter[str]) -> None:
    """The second step raises the same message, from what the first one measured."""
    torch.manual_seed(0)
    made = resnet()
    limit = int(there() + needs(made, 12) / 50)
    forget()
    (n_staged, n_measured), refused = counts_of(made, limit, counted)
    assert n_staged <= 3 and n_measured <= 8 and "are needed" in refused
    assert counts_of(made, limit, counted) == ((1, 1), refused)


@pytest.mark.parametrize("make", [decoder, resnet, language_model, deep])
def test_the_cheapest_way_is_found_without_measuring_all(
    make: Callable[[], tuple[nn.Module, Tensor, Tensor, Loss]],
) -> None:
    """It is the one that is the cheapest of all, and the least is the least of all."""
    torch.manual_seed(0)
    model, x, y, loss_of = make()
    lazy = koila.lazy(x, y)
    loss = loss_of(model(lazy[0]), lazy[1])

    def options(some: Strategies, which: Iterable[Strategy]) -> list[Option]:
        return [some.option(way) for way in which if some.is_there(way)]

    program = Program([loss])
    every = Strategies(program, True)
    of_rows, along = options(every, every.all()), options(every, every.along())
    least = min(one.least for one in of_rows)
    for i in range(10):
        allowed = 1.3**i * least
        fits = [[one for one in some if one.rows(allowed) > 0] for some in (of_rows, along)]
        prices = [[every.cost(one, one.rows(allowed)) for one in some] for some in fits]
        forget()
        again = Program([loss])
        some = Strategies(again, True)
        found = some.cheapest(some.all(), allowed) or some.cheapest(some.along(allowed), allowed)
        price = None if found is None else some.cost(*found)
        assert price == min(prices[0] or prices[1], default=None)
    forget()
    assert Strategies(Program([loss]), True).least().least == least
    _core.forget()


# Policies of values -----------------------------------------------------------------------------


def narrow() -> tuple[nn.Module, Tensor, Tensor, Loss]:
    """The most is needed where its second wide layer runs backward, and what the first one left is
    still there."""

    def layer(n_in: int, n_out: int) -> nn.Module:
        return nn.Sequential(nn.Linear(n_in, n_out, bias=False), nn.BatchNorm1d(n_out), nn.ReLU())

    widths = [8] * 3 + [320] + [8] * 3 + [320] + [8] * 3
    layers = [layer(n_in, n_out) for n_in, n_out in itertools.pairwise(widths)]
    model = nn.Sequential(*layers, nn.Linear(8, 5))
    return model.double(), torch.randn(8192, 8).double(), torch.arange(8192) % 5, F.cross_entropy


@pytest.mark.rotated("chunks")
@pytest.mark.parametrize("chunks", [2, 3, 7, 12])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("make", [resnet, narrow])
def test_mixed_policies(
    make: Callable[[], tuple[nn.Module, Tensor, Tensor, Loss]],
    seed: int,
    chunks: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Loss, gradients and statistics are eager's, whatever becomes of each value."""
    torch.manual_seed(0)
    model, x, y, loss_of = make()
    made = model, x[:12], y[:12], loss_of
    wanted, _ = step(made, None)
    plan = planner.plan

    def changed(program: Program, *args: Any) -> plans.Plan:
        way = mixed(seed)(program)
        schedule = program.schedule(True, way)
        assert schedule.values_of(Op.RECOMPUTE) and schedule.values_of(Op.STORE)
        return dataclasses.replace(plan(program, *args), n_chunks=chunks, strategy=way)

    monkeypatch.setattr(planner, "plan", changed)
    got, _ = step(made, int(there() + 2**30))
    for name, value in wanted.items():
        assert_close(got[name], value, name)


@pytest.mark.parametrize("is_offloading", [False, True])
def test_one_narrow_place_frees_nothing_else(
    is_offloading: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One large value is freed, and no more than is missing beside it; all others stay."""
    monkeypatch.setattr(strategies, "can_offload", lambda program: is_offloading)
    torch.manual_seed(0)
    made = narrow()
    wanted, _ = step(made, None)
    forget()
    model, x, y, loss_of = made
    with koila.config(memory_limit="100 GiB"):
        lazy = koila.lazy(x, y)
        loss = loss_of(copy.deepcopy(model)(lazy[0]), lazy[1])
    program = Program([loss])
    allowed = 0.85 * Strategies(program, True).option(Strategy()).least
    limit = int(there() + allowed)
    with koila.config(memory_limit=limit):
        planned = planner.plan(program, True)
        schedule = program.schedule(True, planned.strategy)
    freed = schedule.values_of(Op.RECOMPUTE, Op.STORE)
    assert sum(program.bytes_of(value) == 8 * 320 * len(x) for value in freed) == 1
    # Without any of them it does not fit, and all others stay.
    rows = largest(len(x), planned.n_chunks, planned.unit)
    for value in freed:
        others = bytearray(planned.strategy.policies)
        others[program.boundary.index(value)] = Policy.KEEP
        estimate = estimates.estimate(program, True, Strategy(policies=bytes(others)))
        assert estimate.peak(rows)[0] > strategies.CHUNK_SHARE * allowed

    def n_graphs(schedule: Schedule) -> int:
        return sum(step.graph == Graph.RETAIN and step.op == Op.RUN for step in schedule.steps)

    # Only bodies that save them run again: the one that made it, for its variance, and a reader.
    assert n_graphs(schedule) == n_graphs(program.schedule(True)) - 2 * len(freed) >= 6
    _core.forget()
    got, taken = step(made, limit)
    assert taken <= allowed
    for name, tensor in wanted.items():
        assert_close(got[name], tensor, name)


# Offloading --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.bool])
@pytest.mark.parametrize(
    "change",
    [lambda x: x, lambda x: x.transpose(0, 1), lambda x: x[:0], lambda x: x[:, ::2]],
    ids=["as it is", "turned", "empty", "every second"],
)
def test_put(dtype: torch.dtype, change: Callable[[Tensor], Tensor]) -> None:
    """The same numbers, in the same order in memory, and no file that anybody sees."""
    before = set(Path(tempfile.gettempdir()).iterdir())
    x = change(torch.randn(4, 6).to(dtype))
    kept = offload.put(x)
    assert torch.equal(kept, x) and kept.dtype == dtype
    assert kept.stride() == torch.empty_like(x).stride()
    assert kept.untyped_storage()._cdata != x.untyped_storage()._cdata
    made = set(Path(tempfile.gettempdir()).iterdir()) - before
    assert not [path for path in made if path.name.startswith("koila-")]


def test_a_full_disk_is_memory_that_ran_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(MemoryError, match=r"no file of 24 bytes in .*No space left.*TMPDIR"):
        offload.put(torch.ones(6))


def test_an_accelerator_recomputes_before_it_offloads() -> None:
    """Its bus is slow beside its calls; the CPU's copy to mapped pages is fast beside its own."""

    torch.manual_seed(0)
    model, x, y, loss_of = resnet()

    def costs(device: str) -> tuple[float, float]:
        lazy = koila.lazy(x, y)
        loss = loss_of(model(lazy[0]), lazy[1])
        program = Program([loss])
        program.devices = {torch.device(device)}
        some, crossing, found = Strategies(program, True), program.crossing(True), []
        for policy in (Policy.RECOMPUTE, Policy.OFFLOAD):
            way = Strategy(policies=program.policies(dict.fromkeys(crossing, policy)))
            found.append(some.cost(some.option(way), 4))
        _core.forget()
        return found[0], found[1]

    recomputed, offloaded = costs("cuda")
    assert recomputed < offloaded / 2
    recomputed, offloaded = costs("cpu")
    assert offloaded < recomputed
