# SPDX-License-Identifier: Apache-2.0
"""A step that was planned before, with as much memory left, has its plan without being measured."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import koila
from frames import frames_of
from koila import _core
from koila.planning import fitting, planner
from koila.staged import cache
from koila.staged.program import Program
from limits import there

N_ROWS = 1024


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The ways that are measured."""
    found: list[Any] = []
    measure = _core.measure

    def noting(*args: Any) -> Any:
        found.append(args[1])
        return measure(*args)

    monkeypatch.setattr(_core, "measure", noting)
    monkeypatch.setattr(cache, "_caches", [])
    fitting._last_strategies.clear()
    yield found


class Loop:
    """Steps under a limit that makes them run in chunks."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = nn.Linear(32, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 4)
        self.model = nn.Sequential(*layers)
        self.x, self.y = torch.randn(N_ROWS, 32), torch.randint(4, (N_ROWS,))

    def step(self, limit: int, is_accumulating: bool = False) -> int:
        """Run a step; its number of chunks."""
        if not is_accumulating:
            self.model.zero_grad()
        with koila.config(memory_limit=limit):
            x, y = koila.lazy(self.x, self.y, batch=0)
            F.cross_entropy(self.model(x), y).backward()
        return koila.report().programs[0].n_chunks

    def gradients(self) -> list[Tensor]:
        return [p.grad.clone() for p in self.model.parameters() if p.grad is not None]


def test_a_step_like_the_last_one_is_not_measured(measured: list[Any]) -> None:
    loop = Loop()
    limit = there() + 2**20
    chunks = loop.step(limit)
    first = loop.gradients()
    assert chunks > 1 and measured
    loop.step(limit)  # with less memory left, by these gradients
    measured.clear()
    for _ in range(3):
        assert loop.step(limit) >= chunks
        assert not measured
    for one, before in zip(loop.gradients(), first, strict=True):
        torch.testing.assert_close(one, before)


def _n_frames_of_a_seen_plan(n_layers: int) -> int:
    layers = [nn.Linear(8, 8)]
    for _ in range(n_layers):
        layers += [nn.BatchNorm1d(8), nn.Linear(8, 8)]
    model = nn.Sequential(*layers)
    x = torch.randn(N_ROWS, 8)
    with koila.config(memory_limit=there() + 2**15 * n_layers):
        loss = model(koila.lazy(x)).square().mean()
        for _ in range(2):
            chunks = planner.plan(Program([loss]), True).n_chunks
        n_frames = frames_of(lambda: planner.plan(Program([loss]), True))
    _core.forget()
    assert chunks > 1
    return n_frames


def test_a_seen_plan_asks_no_layer(measured: list[Any]) -> None:
    """With more layers, which have statistics, it enters no more of koila's functions."""
    few, many = _n_frames_of_a_seen_plan(2), _n_frames_of_a_seen_plan(8)
    assert measured
    assert many <= few


def test_other_strides_of_a_batch_make_another_plan(measured: list[Any]) -> None:
    loop = Loop()
    limit = there() + 2**20
    for _ in range(3):
        assert loop.step(limit) > 1
    measured.clear()
    loop.step(limit)
    assert not measured
    loop.x = loop.x.t().contiguous().t()
    loop.step(limit)
    assert measured


def test_with_less_or_more_memory_left_it_is_planned_again(measured: list[Any]) -> None:
    loop = Loop()
    limit = there() + 2**20
    chunks = loop.step(limit)

    def planned(limit: int) -> tuple[int, bool]:
        measured.clear()
        return loop.step(limit), bool(measured)

    assert planned(limit) == (chunks, False)
    assert planned(limit + 1024) == (chunks, False)  # not so much more that fewer might fit
    held = torch.ones(2**16)
    fewer, is_measured = planned(limit)
    assert fewer > chunks and is_measured
    assert planned(limit)[1] is False
    del held
    assert planned(limit)[1] is True
    assert planned(limit + 2**20)[1] is True


def test_the_limits_that_a_refusal_proposes_are_found_once(
    measured: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[float] = []
    n_chunks = fitting.Trial.n_chunks

    def noting(trial: fitting.Trial, allowed: float) -> int:
        tried.append(allowed)
        return n_chunks(trial, allowed)

    monkeypatch.setattr(fitting.Trial, "n_chunks", noting)
    loop, texts, counts = Loop(), [], []
    limit = there() + 2**15
    for _ in range(3):
        with pytest.raises(koila.MemoryLimitError) as raised:
            loop.step(limit)
        texts.append(str(raised.value).replace("\n", " ").partition("  needs most")[0])
        counts.append(len(tried))
        _core.forget()
    n_tried = counts[0]
    assert n_tried > 0 and counts == [n_tried] * 3
    assert len(set(texts)) == 1
    kept = torch.empty(2**18)  # with less memory left, other limits are proposed
    with pytest.raises(koila.MemoryLimitError) as raised:
        loop.step(limit)
    _core.forget()
    del kept
    assert len(tried) > n_tried and raised.value.least_limit is not None


def test_gradients_that_exist_make_another_plan(measured: list[Any]) -> None:
    loop = Loop()
    limit = there() + 2**20
    loop.step(limit)
    measured.clear()
    loop.step(limit, is_accumulating=True)
    assert measured


def test_a_graph_that_is_differentiated_too_is_measured_each_time(measured: list[Any]) -> None:
    loop = Loop()
    limit = there() + 2**21
    scale = torch.ones(4, requires_grad=True)
    for _ in range(2):
        measured.clear()
        with koila.config(memory_limit=limit):
            x = koila.lazy(loop.x, batch=0)
            (loop.model(x) * (scale * torch.ones(4))).square().mean().backward()
        assert measured


def test_the_plan_of_a_large_program_is_kept(
    measured: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan measures the program by many strategies, and each cut of it enters the cache too.
    These must not push out the program itself, which keeps the plan."""
    monkeypatch.setattr(cache, "_N_BYTES_KEPT", 1)
    x, w = koila.lazy(torch.ones(64, 4)), torch.ones(4, requires_grad=True)
    for _ in range(50):
        x = torch.tanh(x * w)
    loss = x.mean()
    with koila.config(memory_limit=there() + 50 * 64 * 4 * 2):
        chunks = planner.plan(Program([loss]), True).n_chunks
        assert chunks > 1 and len(measured) > 1
        measured.clear()
        assert planner.plan(Program([loss]), True).n_chunks == chunks
    assert not measured
    _core.forget()


def flip(model: nn.Sequential) -> None:
    model[0].weight.requires_grad_(not model[0].weight.requires_grad)


def widen(model: nn.Sequential) -> None:
    model.double()


def replace(model: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(torch.randn_like(model[0].weight))


def swap_data(model: nn.Sequential) -> None:
    model[3].weight.data = torch.randn(4, 256, dtype=model[3].weight.dtype)[:, ::2]


def share(model: nn.Sequential) -> None:
    model[1].bias = model[0].bias


def give_gradients(model: nn.Sequential) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)


def nothing(model: nn.Sequential) -> None:
    pass


def evaluate(model: nn.Sequential) -> None:
    model[1].eval()


CHANGES = [flip, widen, replace, swap_data, share, give_gradients, evaluate, nothing]


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_changed_has_no_plan_of_before(
    change: Callable[[nn.Sequential], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each change the step has the plan that it has if nothing is cached, and eager's
    gradients."""
    loop = Loop()
    loop.x, loop.model = loop.x.double(), loop.model.double()
    for _ in range(3):
        assert loop.step(there() + 9 * 2**18) > 1
    if change is widen:
        loop.x, loop.model = loop.x.float(), loop.model.float()
        assert loop.step(there() + 2**20) > 1
        loop.x = loop.x.double()
    loop.model.zero_grad()
    change(loop.model)
    eager = copy.deepcopy(loop.model)
    for one, own in zip(eager.parameters(), loop.model.parameters(), strict=True):
        one.grad = None if own.grad is None else own.grad.clone()
    F.cross_entropy(eager(loop.x), loop.y).backward()
    limit = there() + 9 * 2**18
    plans = []
    plan = planner.plan

    def noting(*args: Any) -> Any:
        plans.append(plan(*args))
        kept = [dict(one.plans) for one in cache._caches]
        for one in cache._caches:
            one.plans.clear()
        plans.append(plan(*args))
        for one, before in zip(cache._caches, kept, strict=True):
            one.plans.update(before)
        return plans[0]

    monkeypatch.setattr(planner, "plan", noting)
    assert loop.step(limit, is_accumulating=True) > 1
    cached, fresh = plans
    assert (cached.n_chunks, cached.unit, cached.strategy) == (
        fresh.n_chunks,
        fresh.unit,
        fresh.strategy,
    )
    assert cached.predicted == fresh.predicted
    expected = [one.grad for one in eager.parameters() if one.grad is not None]
    for found, right in zip(loop.gradients(), expected, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-12)


def test_a_model_of_the_same_shape_has_the_plan_and_its_own_gradients(measured: list[Any]) -> None:
    loop, other = Loop(), Loop()
    torch.manual_seed(1)
    for parameter in other.model.parameters():
        nn.init.normal_(parameter)
    loop.x, other.x = loop.x.double(), other.x.double()
    loop.model, other.model = loop.model.double(), other.model.double()
    limit = there() + 9 * 2**18
    assert loop.step(limit) > 1
    loop.model.zero_grad()
    measured.clear()
    assert other.step(limit) > 1
    assert not measured
    eager = copy.deepcopy(other.model)
    eager.zero_grad()
    F.cross_entropy(eager(other.x), other.y).backward()
    for found, right in zip(other.gradients(), eager.parameters(), strict=True):
        torch.testing.assert_close(found, right.grad, rtol=1e-10, atol=1e-12)
