# SPDX-License-Identifier: Apache-2.0
"""A program that was staged before is known again: what the core tells of it is asked once, and is
asked anew for a program that differs in anything that decides it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import koila
from koila import _core
from koila.staged import cache, program
from koila.staged.schedule import Strategy

Step = Callable[[nn.Module, Tensor, Tensor], object]
N_ROWS = 12


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[cache.ProgramCache]]:
    """The programs that were asked for and not known yet. What is kept of a program is compared
    with what the core tells of it now, at each use."""
    found: list[cache.ProgramCache] = []
    of, begin, schedule = cache.cache_of, cache.ProgramCache.__init__, cache.ProgramCache.schedule
    is_compared = False

    def told(one: cache.ProgramCache, handle: object) -> dict[str, Any]:
        found = {
            name: one.facts_with(name, handle)[name]
            for name in ("nodes", "imports", "runs", "moved")
        }
        for name in ("is_leaf", "needs_gradient", "is_kept"):
            found[name] = [*one.facts_with(name, handle)[name].__self__]
        return found

    def asked_anew(handle: object) -> cache.ProgramCache:
        nonlocal is_compared
        is_compared = True
        try:
            return cache.ProgramCache(_core.print_of(handle))
        finally:
            is_compared = False

    def note(self: cache.ProgramCache, *args: Any) -> None:
        if not is_compared:
            found.append(self)
        begin(self, *args)

    def compared(handle: object, *args: Any) -> cache.ProgramCache:
        one = of(handle, *args)
        assert told(one, handle) == told(asked_anew(handle), handle)
        return one

    def schedule_compared(self: cache.ProgramCache, handle: object, policy: Any) -> Any:
        one = schedule(self, handle, policy)
        assert one == schedule(asked_anew(handle), handle, policy)
        return one

    monkeypatch.setattr(cache, "_caches", [])
    monkeypatch.setattr(cache.ProgramCache, "__init__", note)
    monkeypatch.setattr(cache.ProgramCache, "schedule", schedule_compared)
    monkeypatch.setattr(program, "cache_of", compared)
    yield found
    assert len(cache._caches) == len(found)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def as_it_is(model: nn.Module, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(model(x), y).backward()


def freezing(model: nn.Module, x: Tensor, y: Tensor) -> None:
    for parameter in model[0].parameters():  # type: ignore[index]
        parameter.requires_grad_(False)
    as_it_is(model, x, y)


def hooking(model: nn.Module, x: Tensor, y: Tensor) -> None:
    h = model(x)
    h.register_hook(lambda gradient: 2 * gradient)
    F.cross_entropy(h, y).backward()


def retaining(model: nn.Module, x: Tensor, y: Tensor) -> None:
    h = model(x)
    h.retain_grad()
    F.cross_entropy(h, y).backward()


def holding(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    h: Tensor = model(x)
    F.cross_entropy(h, y).backward()
    return h.detach().clone()


def evaluating(model: nn.Module, x: Tensor, y: Tensor) -> None:
    as_it_is(model.eval(), x, y)


def of_other_rows(model: nn.Module, x: Tensor, y: Tensor) -> None:
    as_it_is(model, torch.cat([x, x]), torch.cat([y, y]))


def of_another_dtype(model: nn.Module, x: Tensor, y: Tensor) -> None:
    as_it_is(model.double(), x.double(), y)


def under_autocast(model: nn.Module, x: Tensor, y: Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    loss.backward()


def of_another_loss(model: nn.Module, x: Tensor, y: Tensor) -> None:
    F.log_softmax(model(x), 1).square().sum().backward()


OTHERS: list[Step] = [
    freezing,
    hooking,
    retaining,
    holding,
    evaluating,
    of_other_rows,
    of_another_dtype,
    under_autocast,
    of_another_loss,
]


def gradients(step: Step, model: nn.Module, is_lazy: bool) -> list[Tensor | None]:
    """The gradients of a step, and the statistics that it leaves."""
    torch.manual_seed(1)
    x, y = torch.randn(N_ROWS, 4), torch.randint(3, (N_ROWS,))
    model.zero_grad()
    with koila.config(chunks=3):
        made = step(model, *(koila.lazy(x, y, batch=0) if is_lazy else (x, y)))
    del made
    return [*(p.grad for p in model.parameters()), *model.buffers()]


@pytest.mark.parametrize("other", OTHERS, ids=lambda step: step.__name__)
def test_what_differs_is_asked_anew(other: Step, made: list[cache.ProgramCache]) -> None:
    """After a step and again, another step, and the first once more."""
    models = network(), network()
    counts = []
    for step in (as_it_is, as_it_is, other, other, as_it_is):
        if step is as_it_is:  # what the other step changed is set back
            for model in models:
                model.train().float().requires_grad_(True)
        expected, found = gradients(step, models[0], False), gradients(step, models[1], True)
        for one, two in zip(expected, found, strict=True):
            assert (one is None) == (two is None)
            near = 5e-2 if step is under_autocast else 1e-4
            torch.testing.assert_close(one, two, rtol=near, atol=0.1 * near)
        counts.append(len(made))
    assert counts[0] == counts[1] < counts[2] == counts[3] == counts[4]


def test_a_program_is_kept_for_each_of_its_cuts(
    made: list[cache.ProgramCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_N_KEPT", 4)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(4, 4), nn.Tanh())))
    for _ in range(2):
        loss = model(koila.lazy(torch.randn(N_ROWS, 4), batch=0)).square().mean()
        staged, runs = program.Program([loss]), set()
        for strategy in (Strategy(), Strategy(2), Strategy(3), Strategy(n_pieces=2)):
            cut = staged.cut_for(strategy)
            cut.schedule(True, strategy)
            runs.add(tuple(tuple(run.nodes) for run in cut.runs))
        assert len(runs) == len(made) == 4
        del loss


def test_the_oldest_are_dropped(
    made: list[cache.ProgramCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_N_BYTES_KEPT", 1)
    monkeypatch.setattr(cache, "_N_KEPT", 1)
    model = network()
    for _ in range(3):
        gradients(as_it_is, model, True)
        assert cache._caches == made[-1:]
        gradients(of_other_rows, model, True)
    assert len(made) == 6
    made[:] = made[-1:]


def test_calls_after_a_second_block_of_autocast_are_as_before_it(
    made: list[cache.ProgramCache],
) -> None:
    model = network()
    gradients(as_it_is, model, True)
    x = koila.lazy(torch.randn(N_ROWS, 4), batch=0)
    for _ in range(2):  # the calls of the first block wait in the second
        with torch.autocast("cpu", torch.bfloat16):
            x = model[0](x).float()[:, :4]  # type: ignore[index]
    del x
    gradients(as_it_is, model, True)
    assert len(made) == 1


def test_what_is_kept_is_bounded_however_long_the_tape_is(
    made: list[cache.ProgramCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a value is held that was never read, calls of earlier steps stay on the tape, and no
    step is like the last one."""
    monkeypatch.setattr(cache, "_N_BYTES_KEPT", 2**17)
    model = network()
    held = model(koila.lazy(torch.randn(N_ROWS, 4), batch=0))
    for _ in range(30):
        gradients(as_it_is, model, True)
        older = cache._caches[: -cache._N_KEPT]
        assert sum(len(part) for one in older for part in one.printed[-1] if part) <= 2**17
    del held
    made[:] = cache._caches
