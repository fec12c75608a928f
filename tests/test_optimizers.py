# SPDX-License-Identifier: Apache-2.0
"""What optimizers take: their state, and what a step allocates; and what is said where that is more
than the limit."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import koila
from allocations import Allocations
from koila.memory import optimizers
from koila.messages.words import size
from koila.planning import logs
from koila.reporting.report_types import ProgramReport
from limits import there
from oracle import Lazy, eager
from profiled import bytes_over_time


@pytest.mark.parametrize(
    ("make", "n_kept"),
    [
        (lambda ps: torch.optim.AdamW(ps), 2),
        (lambda ps: torch.optim.Adam(ps, amsgrad=True), 3),
        (lambda ps: torch.optim.NAdam(ps), 2),
        (lambda ps: torch.optim.RAdam(ps), 2),
        (lambda ps: torch.optim.Adamax(ps), 2),
        (lambda ps: torch.optim.Adadelta(ps), 2),
        (lambda ps: torch.optim.Rprop(ps), 2),
        (lambda ps: torch.optim.ASGD(ps), 1),
        (lambda ps: torch.optim.SGD(ps), 0),
        (lambda ps: torch.optim.SGD(ps, momentum=0.9), 1),
        (lambda ps: torch.optim.RMSprop(ps), 1),
        (lambda ps: torch.optim.RMSprop(ps, momentum=0.9, centered=True), 3),
    ],
)
def test_what_an_optimizer_will_keep(
    make: Callable[[Any], torch.optim.Optimizer], n_kept: int
) -> None:
    """It is known before the first step, and equals what is there after it."""
    model = torch.nn.Linear(300, 200)
    optimizer = make(model.parameters())
    size = sum(p.nbytes for p in model.parameters())
    assert optimizers.coming_state(model.parameters()) == n_kept * size
    model(torch.ones(1, 300)).sum().backward()
    optimizer.step()
    state = [t for kept in optimizer.state.values() for t in kept.values()]
    kept = sum(t.nbytes for t in state if isinstance(t, torch.Tensor) and t.numel() > 1)
    assert kept == n_kept * size
    assert optimizers.coming_state(model.parameters()) == 0


def test_optimizers_are_known_however_they_were_made() -> None:
    """Before koila was imported, afterwards, and as a copy; and forgotten when they are gone."""
    model = torch.nn.Linear(30, 20)
    size = 2 * sum(p.nbytes for p in model.parameters())
    optimizers.look_for_all()  # as when koila is imported
    first = torch.optim.Adam(model.parameters())
    assert optimizers.coming_state(model.parameters()) == size
    second = torch.optim.Adam(model.parameters())
    assert optimizers.coming_state(model.parameters()) == 2 * size
    both = copy.deepcopy((model, second))
    assert optimizers.coming_state(both[0].parameters()) == size
    del first, second
    gc.collect()
    assert optimizers.coming_state(model.parameters()) == 0


def test_optimizer_state_is_held() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    found = {id(t) for t in optimizers.state()}
    assert {id(optimizer.state[p]["exp_avg"]) for p in model.parameters()} <= found


KINDS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.Adam, {}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.Adam, {"weight_decay": 0.1}),
    (torch.optim.AdamW, {}),
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (torch.optim.RMSprop, {"weight_decay": 0.1}),
    (torch.optim.NAdam, {"weight_decay": 0.1}),
    (torch.optim.RAdam, {"weight_decay": 0.1}),
    (torch.optim.Adamax, {"weight_decay": 0.1}),
    (torch.optim.Adadelta, {}),
    (torch.optim.Adagrad, {}),
    (torch.optim.ASGD, {"weight_decay": 0.1}),
    (torch.optim.Adafactor, {}),
]
MODES: list[dict[str, bool]] = [{"foreach": False}, {"foreach": True}, {"fused": True}]
FUSED = {torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad}


@pytest.mark.parametrize("sizes", [[64], [64, 64, 64], [64, 64, 128]], ids=str)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param(kind, options | mode, id=f"{kind.__name__}-{options | mode}")
        for kind, options in KINDS
        for mode in MODES
        if "fused" not in mode or kind in FUSED
    ],
)
def test_what_a_step_allocates(
    kind: type[torch.optim.Optimizer], options: dict[str, Any], sizes: list[int]
) -> None:
    """Beside parameters, gradients and state, as torch's allocator hands it out."""
    parameters = [nn.Parameter(torch.randn(n, 256)) for n in sizes]
    optimizer: Any = kind(parameters, **options)  # type: ignore[call-arg]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    took = max(bytes_over_time(optimizer.step), default=0)
    assert optimizers.temporaries(parameters) == pytest.approx(took, rel=0.05, abs=2**10)
    assert optimizers.of_step(optimizer) == (0, optimizers.temporaries(parameters))


class Own(torch.optim.Optimizer):
    """An optimizer that koila does not know."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["kept"] = torch.ones_like(parameter)


def test_other_optimizers() -> None:
    """What they take is not guessed; their state counts once it is there."""
    model = nn.Linear(30, 20)
    own = Own(model.parameters())
    assert optimizers.coming_state(model.parameters()) == 0
    assert optimizers.temporaries(model.parameters()) == 0
    own.step()
    kept = {id(state["kept"]) for state in own.state.values()}
    assert kept <= {id(tensor) for tensor in optimizers.state()}


def took(lazy: Lazy, make: Callable[[Any], Any], limit: int | None = None) -> Allocations:
    """Three steps of a model whose parameters take as much as its activations."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 1024), nn.GELU(), nn.Linear(1024, 64), nn.Linear(64, 10))
    optimizer = make(model.parameters())
    batch, memory = (torch.randn(512, 64), torch.randint(10, (512,))), Allocations()
    memory.count(batch, list(model.parameters()))
    with memory:
        pass
    with koila.config(memory_limit=limit), memory:
        for _ in range(3):
            x, y = lazy(*batch)
            optimizer.zero_grad()
            memory.label("model")
            F.cross_entropy(model(x), y).backward()
            memory.label("optimizer")
            optimizer.step()
            memory.label("")
    return memory


def told() -> list[ProgramReport]:
    """The steps of optimizers in the last report."""
    return [ran for ran in koila.report().programs if ran.what.endswith(".step()")]


LOOPS: dict[str, Callable[[Any], Any]] = {
    "adam": lambda parameters: torch.optim.AdamW(parameters, foreach=False),
    "adam, all at once": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "amsgrad": lambda parameters: torch.optim.Adam(parameters, amsgrad=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, 0.9, weight_decay=0.1, foreach=True),
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_step_over_the_limit_is_told(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """With the least limit that holds: under it all of a later step stays."""
    make = LOOPS[name]
    of_step = took(eager, make).peaks["optimizer"]
    logs.logged.clear()
    base, short = there(), 2**14
    memory = took(koila.lazy, make, base + of_step - short)
    assert memory.peaks["optimizer"] == pytest.approx(of_step, abs=2**10)
    assert memory.peaks["model"] <= of_step - short
    assert koila.report().n_chunks > 1
    (ran,) = told()
    assert "fused=True" in ran.why
    assert ran.least_limit is not None
    assert base + of_step <= ran.least_limit + 2**10 <= base + of_step + 2**17
    warnings = [one for one in caplog.records if "chunks do not change that" in one.message]
    assert len(warnings) == 1
    base = there()
    memory = took(koila.lazy, make, int(ran.least_limit))
    assert memory.peak <= ran.least_limit - base
    assert koila.report().n_chunks > 1
    assert not told()


def test_limits_have_room_for_the_step() -> None:
    """What explain() and a report propose suffices for the optimizer too."""
    model = nn.Sequential(nn.Linear(64, 1024), nn.GELU(), nn.Linear(1024, 64))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    x, n_bytes = torch.randn(512, 64), sum(p.nbytes for p in model.parameters())

    def step(limit: int) -> tuple[str, float]:
        """What explain() says, and the least limit of the report."""
        optimizer.zero_grad()
        with koila.config(memory_limit=limit):
            loss = model(koila.lazy(x)).pow(2).mean()
            text = koila.explain(loss)
            loss.backward()
            optimizer.step()
        least = koila.report().programs[0].least_limit
        assert least is not None
        return str(text), least

    logs.logged.clear()
    _, first = step(there() + 8 * n_bytes)
    optimizer.zero_grad()
    base = there()
    text, least = step(base + 8 * n_bytes)
    assert first == pytest.approx(least, abs=2**17)
    assert base + 2 * n_bytes <= least <= base + 2 * n_bytes + 2**18
    assert f"least limit that works: {size(least)}" in text
    text, _ = step(int(least))
    assert "but not for the optimizer's step" not in text
    assert koila.report().n_chunks > 1
    assert not told()
    text, _ = step(int(least) - 2**18)
    assert "but not for the optimizer's step" in text
    assert told()


def test_a_plan_has_the_step() -> None:
    """As much as torch's allocator hands out, in the first step and in the second."""
    model = nn.Sequential(nn.Linear(64, 1024), nn.GELU(), nn.Linear(1024, 64))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    x = torch.randn(512, 64)
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(koila.lazy(x)).pow(2).mean()
        said = koila.plan(loss).phases["optimizer's step"]
        loss.backward()
        gradients = sum(p.nbytes for p in model.parameters())
        peak = gradients + max(bytes_over_time(optimizer.step))
        assert said == pytest.approx(peak, rel=0.01, abs=2**10)
