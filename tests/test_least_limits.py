# SPDX-License-Identifier: Apache-2.0
"""The least limit of a report is found when it is read, and is what a plan would have found."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import koila
from koila import _core
from koila.planning import fitting, least_limits, limits, planner, refusals, strategies
from koila.reporting.report_types import ProgramReport
from koila.staged import cache
from koila.staged.program import Program
from limits import there

N_ROWS = 512


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_caches", [])
    monkeypatch.setattr(least_limits, "_kept", [])
    gc.collect()  # what tests before this one left counts against a limit until it is collected
    clear()


@pytest.fixture
def n_measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """How often something was measured since the last time it was asked."""
    found: list[Any] = []
    measure = _core.measure

    def noting(*args: Any) -> Any:
        found.append(args)
        return measure(*args)

    def count() -> int:
        n, found[:] = len(found), []
        return n

    monkeypatch.setattr(_core, "measure", noting)
    yield count


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda h: self.last(torch.tanh(self.first(h))), x, use_reentrant=False)


def network(kind: str) -> nn.Module:
    middle: dict[str, list[nn.Module]] = {
        "plain": [nn.Tanh(), nn.Linear(64, 64), nn.Sigmoid()],
        "norm": [nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 64), nn.BatchNorm1d(64)],
        "written": [nn.ReLU(inplace=True), nn.Linear(64, 64), nn.ReLU(inplace=True)],
        "drawn": [nn.Dropout(0.2), nn.Linear(64, 64), nn.Dropout(0.2)],
        "wide": [nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1024)],
    }
    if kind == "checkpoint":
        return nn.Sequential(Checkpointed(), nn.Linear(64, 4))
    last = nn.Linear(1024 if kind == "wide" else 64, 4)
    return nn.Sequential(nn.Linear(32, 64), *middle[kind], last)


def step(model: nn.Module, x: Tensor, y: Tensor, limit: int) -> ProgramReport:
    with koila.config(memory_limit=limit):
        lazy_x, lazy_y = koila.lazy(x, y, batch=0)
        F.cross_entropy(model(lazy_x), lazy_y).backward()
    return koila.report().programs[-1]


def batch(n_rows: int = N_ROWS) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(n_rows, 32), torch.randint(4, (n_rows,))


def limit_for(model: nn.Module, x: Tensor, y: Tensor, share: float) -> int:
    """Return a memory_limit that leaves `share` of the bytes that the step takes when it runs
    whole."""
    with koila.config(memory_limit=2**40):
        lazy_x, lazy_y = koila.lazy(x, y, batch=0)
        loss = F.cross_entropy(model(lazy_x), lazy_y)
        whole = planner.plan(Program([loss]), True).predicted
        _core.forget()
    clear()
    assert whole is not None
    return there() + int(share * whole)


def clear() -> None:
    cache._caches.clear()
    for one in (planner._least_limits, fitting._last_strategies, strategies._seen):
        one.clear()


def eager_limit(model: nn.Module, x: Tensor, y: Tensor, limit: int) -> float:
    """What a plan finds that measures all strategies at once."""
    with koila.config(memory_limit=limit):
        lazy_x, lazy_y = koila.lazy(x, y, batch=0)
        loss = F.cross_entropy(model(lazy_x), lazy_y)
        program = Program([loss])
        before = refusals.before(program)[0]
        found = before + fitting.Trial(program, True).least
        _core.forget()
    return limits.in_tenths(found)


@pytest.mark.parametrize("kind", ["plain", "norm", "written", "drawn", "wide", "checkpoint"])
@pytest.mark.parametrize("is_accumulating", [False, True])
def test_it_is_what_a_plan_finds(
    kind: str, is_accumulating: bool, n_measured: Callable[[], int]
) -> None:
    model = network(kind)
    x, y = batch()
    if is_accumulating:
        F.cross_entropy(model(x), y).backward()
    limit = limit_for(model, x, y, 0.5)
    expected = eager_limit(model, x, y, limit)
    clear()
    n_measured()
    ran = step(model, x, y, limit)
    assert any(stage.n_chunks > 1 for stage in ran.stages)
    n_measured()
    assert ran.least_limit == expected
    assert not (is_accumulating and n_measured())  # the gradients that exist count
    n_measured()
    assert ran.least_limit == expected
    assert n_measured() == 0


def test_nothing_is_measured_for_it_before_it_is_read(n_measured: Callable[[], int]) -> None:
    x, y = batch()
    model = network("norm")
    limit = limit_for(model, x, y, 0.8)
    n_measured()
    ran = step(model, x, y, limit)
    assert ran.n_chunks > 1
    assert n_measured() <= 5
    assert "least limit that works" in str(ran)
    assert n_measured() > 0


def test_no_tensor_is_kept_for_it() -> None:
    x, y = batch()
    model = network("drawn")
    ran = step(model, x, y, there() + 2**19)
    assert ran.n_chunks > 1
    gone = [weakref.ref(one) for one in (x, y, *model.parameters())]
    del model, x, y
    assert not any(ref() is not None for ref in gone)
    assert ran.least_limit is not None


def test_a_report_that_is_held_is_answered_after_many_other_programs() -> None:
    model = network("plain")
    held = [step(model, *batch(N_ROWS + i), there() + 2**19) for i in range(8)]
    assert sum(one._kept is not None for one in least_limits._kept) <= least_limits._N_KEPT
    for i, ran in enumerate(held):
        assert ran.n_chunks > 1
        assert ran.least_limit == eager_limit(model, *batch(N_ROWS + i), there() + 2**19)


def test_a_report_that_nobody_holds_is_not_measured(n_measured: Callable[[], int]) -> None:
    model = network("norm")
    limit, counts = limit_for(model, *batch(N_ROWS + 16 * 7), 0.8), []
    n_measured()
    for i in range(8):
        model.zero_grad()
        assert step(model, *batch(N_ROWS + 16 * i), limit).n_chunks > 1
        counts.append(n_measured())
    assert max(counts) <= 2


def test_a_plan_that_is_used_again_can_be_asked_after_others(n_measured: Callable[[], int]) -> None:
    model = network("norm")
    limit = there() + 2**20
    for n_rows in (512, 513, 514, 515, 516, 512):
        model.zero_grad()
        ran = step(model, *batch(n_rows), limit)
        n_measured()
    assert ran.least_limit == step(network("norm"), *batch(), limit).least_limit


def test_copies_and_pickles_have_the_number() -> None:
    x, y = batch()
    ran = step(network("plain"), x, y, there() + 2**19)
    changed = ran.changed(n_tries=2)
    assert changed.n_tries == 2 and ran.n_tries == 1
    made = pickle.loads(pickle.dumps(ran)), copy.copy(ran), copy.deepcopy(ran)
    assert all(one == ran and one.least_limit == ran.least_limit for one in made)
    assert changed.least_limit == ran.least_limit
