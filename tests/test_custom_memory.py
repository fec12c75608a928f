# SPDX-License-Identifier: Apache-2.0
"""Custom autograd functions under a limit: what they allocate is counted, and refused if it does
not fit."""

from __future__ import annotations

import re
import traceback
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import koila
from allocations import Allocations
from collector import collector_off
from koila.basics.counting import Counter
from koila.messages.errors import MemoryLimitError
from koila.running import custom_memory
from limits import there
from oracle import Lazy, eager

WIDTH, ROWS = 64, 2048
SIZE = ROWS * WIDTH * 4


class Wide(torch.autograd.Function):
    """x ** 2, with so many temporaries as large as x in forward and in backward."""

    n_forward = n_back = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        temporaries = [x + i for i in range(Wide.n_forward)]
        del temporaries
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,), (gradient,) = ctx.saved_tensors, gradients
        temporaries = [x + i for i in range(Wide.n_back)]
        del temporaries
        return 2 * x * gradient


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No calls are known, and the function has no temporaries."""
    monkeypatch.setattr(custom_memory, "_peaks", {})
    monkeypatch.setattr(Wide, "n_forward", 0)
    monkeypatch.setattr(Wide, "n_back", 0)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.b(Wide.apply(self.a(x)))  # type: ignore[no-untyped-call]
        return made.tanh()


def step(lazy: Lazy) -> tuple[int, list[Tensor]]:
    """Return the peak of a step, and the gradients."""
    model, memory = Model(), Allocations()
    x = torch.randn(ROWS, WIDTH)
    memory.count(list(model.parameters()), x)
    with memory:
        pass
    with memory:
        model(lazy(x)).square().mean().backward()
    return memory.peak, [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("where", ["n_forward", "n_back"])
def test_what_does_not_fit_is_refused(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it would exceed the limit, the first time; before it runs, the second time."""
    plain, _ = step(eager)
    monkeypatch.setattr(Wide, where, 24)
    wide, _ = step(eager)
    assert wide > plain + 8 * SIZE
    name = "apply" if where == "n_forward" else "backward"
    ran: list[int] = []
    enter = Counter.__enter__
    monkeypatch.setattr(Counter, "__enter__", lambda one: (ran.append(1), enter(one))[1])
    limit = there() + plain + 8 * SIZE
    x, model = torch.randn(ROWS, WIDTH), Model()
    refused = pytest.raises(MemoryLimitError, match=rf"Wide.{name} .* runs on the whole batch")
    with koila.config(memory_limit=limit), refused:
        model(koila.lazy(x)).square().mean().backward()
    with koila.config(memory_limit=2**40):
        model(koila.lazy(x)).square().mean().backward()
    n_counted = len(ran)
    with koila.config(memory_limit=limit), refused:
        model(koila.lazy(x)).square().mean().backward()
    assert len(ran) == n_counted


def test_it_is_stopped_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Wide, "n_back", 24)
    x, model = torch.randn(ROWS, WIDTH), Model()
    plain = 2 * x.nbytes
    memory = Allocations()
    memory.count(list(model.parameters()), x)
    with memory:
        pass
    with memory, koila.config(memory_limit=plain + 12 * SIZE), pytest.raises(MemoryLimitError):
        model(koila.lazy(x)).square().mean().backward()
    assert memory.peak <= plain + 13 * SIZE


def test_what_fits_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """With eager's numbers, and without its function's memory after backward."""
    monkeypatch.setattr(Wide, "n_back", 6)
    peak, want = step(eager)
    for _ in range(2):
        with koila.config(memory_limit=there() + 2 * peak):
            _, got = step(koila.lazy)
        for ours, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    assert len(custom_memory._peaks) == 2


def test_second_derivatives() -> None:
    def penalty(lazy: Lazy) -> list[Tensor]:
        torch.manual_seed(0)
        model, x = Model().double(), torch.randn(12, WIDTH).double().requires_grad_()
        h = model.a(lazy(x) * 1)
        out = model.b(Wide.apply(h))  # type: ignore[no-untyped-call]
        (grad,) = torch.autograd.grad(out.sum(), h, create_graph=True)
        (out.sum() + grad.square().sum()).backward()
        return [p.grad for p in (x, *model.parameters()) if p.grad is not None]

    want = penalty(eager)
    for _ in range(2):
        with koila.config(memory_limit=2**40):
            got = penalty(koila.lazy)
        for ours, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_what_it_saved_is_freed() -> None:
    """Without the garbage collector: the node that counts is in no cycle."""
    with collector_off(), koila.config(memory_limit=2**40):
        h = nn.Linear(WIDTH, WIDTH)(koila.lazy(torch.randn(ROWS, WIDTH)))
        made: Any = Wide.apply(h)  # type: ignore[no-untyped-call]
        node = weakref.ref(koila._core.force(made).grad_fn)
        del h, made
        assert node() is None


def test_the_limit_that_is_proposed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call is stopped when it needs more than is left, so the least limit is not known: what is
    proposed has room, and few tries find a limit that works."""
    monkeypatch.setattr(Wide, "n_forward", 24)
    monkeypatch.setattr(Wide, "n_back", 48)
    x, model = torch.randn(ROWS, WIDTH), Model()
    limit, tries = there() + 8 * SIZE, []
    while len(tries) < 8:
        try:
            with koila.config(memory_limit=limit):
                model(koila.lazy(x)).square().mean().backward()
        except MemoryLimitError as error:
            text = str(error)
            said = re.search(r"more than .* set memory_limit='(\S+)MiB', and more if", text)
            assert said is not None, text
            assert error.least_limit is None
            frames = traceback.extract_tb(error.__traceback__)
            assert not any(one.filename.startswith(koila.__path__[0]) for one in frames)
            limit = int(float(said[1]) * 2**20)
            tries.append(limit)
            continue
        break
    assert 2 <= len(tries) <= 5, tries


class Reversible(torch.autograd.Function):
    """x + tanh(x w), recomputed and differentiated in its backward, as reversible layers do it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer = layer
        with torch.no_grad():
            return x + layer(x).tanh()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.layer(x).tanh().backward(gradients[0])
        return gradients[0] + x.grad, None


def test_a_backward_inside_of_a_function_s_backward(caplog: pytest.LogCaptureFixture) -> None:
    """It is a part of the backward around it, and no backward of plain tensors of the user."""
    first = nn.Linear(WIDTH, WIDTH)
    layer = nn.Sequential(nn.Linear(WIDTH, 512), nn.GELU(), nn.Linear(512, WIDTH))
    with koila.config(chunks=3):
        h = first(koila.lazy(torch.randn(2 * ROWS, WIDTH)))
        made: Any = Reversible.apply(h, layer)  # type: ignore[no-untyped-call]
        made.square().mean().backward()
    assert layer[0].weight.grad is not None
    assert "nothing in it is lazy" not in caplog.text + str(koila.report())
