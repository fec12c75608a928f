# SPDX-License-Identifier: Apache-2.0
"""verify(): what differs between a step that is whole and the same in chunks."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import koila
from koila.basics.config import get


def make(*extra: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), *extra, nn.Linear(16, 5)
    )
    optimizer = torch.optim.Adam(model.parameters())
    return model, optimizer, torch.randn(23, 6), torch.randint(5, (23,))


def test_a_step_that_makes_nothing_lazy_is_refused() -> None:
    """It would be compared with itself. A report of an earlier step says nothing about it."""
    model, _, x, y = make()
    F.cross_entropy(model(lazy_x := koila.lazy(x)), y).backward()
    model.zero_grad()
    with pytest.raises(ValueError, match="verify: the step uses no lazy tensor"):
        koila.verify(lambda: F.cross_entropy(model(x), y).backward(), model)
    assert koila.verify(lambda: model(lazy_x).pow(2).mean().backward(), model, chunks=2).is_equal


class Same(torch.autograd.Function):
    """Ends a program: it is given the numbers of the whole batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


def test_chunks_of_any_part_are_told() -> None:
    """Also where the largest part of the step ran whole."""
    model, x = nn.Sequential(nn.Linear(6, 512), nn.Tanh(), nn.Linear(512, 4)), torch.randn(20, 6)

    def step() -> None:
        inner = Same.apply(model[1](model[0](koila.lazy(x))))
        model[2](inner).pow(2).mean().backward()

    told = koila.verify(step, chunks=5)
    assert told.is_equal and told.n_chunks == 5
    assert str(told).startswith("whole and in 5 chunks: equal up to rounding")


@pytest.mark.parametrize("chunks", [2, 7, 23])
def test_a_step_that_is_equal(chunks: int) -> None:
    """Afterwards all is as before, the generator too; the model is found by its name."""
    model, optimizer, x, y = make()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    before = [t.clone() for t in (*model.parameters(), *model.buffers())]
    grads = [p.grad for p in model.parameters()]
    values = [grad.clone() for grad in grads if grad is not None]
    state = str(optimizer.state_dict())
    generator = torch.get_rng_state()

    def step() -> Tensor:
        optimizer.zero_grad()
        batch = koila.lazy(x, y)
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss

    told = koila.verify(step, chunks=chunks)
    assert told.is_equal and told.n_chunks == chunks
    assert "equal up to rounding" in str(told)
    names = {one.name for one in told.differences}
    assert names >= {"result of 0", "gradient of 0.weight", "buffer of 1.running_mean"}
    # Its gradient is 0: what is there of it is rounding, whose quotient with itself says nothing.
    only_rounding = {one.name for one in told.differences if one.is_only_rounding}
    assert only_rounding == {"gradient of 0.bias"}
    assert "gradient of 0.bias  (itself little but rounding)" in str(told)
    for tensor, value in zip((*model.parameters(), *model.buffers()), before, strict=True):
        assert torch.equal(tensor, value)
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        assert parameter.grad is grad
    for grad, value in zip(grads, values, strict=True):
        assert grad is not None and torch.equal(grad, value)
    assert str(optimizer.state_dict()) == state
    assert torch.equal(torch.get_rng_state(), generator)


def test_a_step_that_differs() -> None:
    """It says so, and where first: here the step itself counts its runs."""
    model, _, x, y = make(nn.Identity())

    def step() -> None:
        n_runs.append(0)
        with torch.no_grad():
            model[1].weight.mul_(len(n_runs))  # type: ignore[operator]
        batch = koila.lazy(x, y)
        F.cross_entropy(model(batch[0]), batch[1]).backward()

    n_runs: list[int] = []
    told = koila.verify(step, model, chunks=3)
    assert not told.is_equal
    assert told.first_module == "1"
    assert "NOT equal" in str(told) and "the first module whose output differs: 1" in str(told)
    assert not told.differences[0].is_rounding


def test_what_it_finds() -> None:
    model, _, x, y = make()

    class Trainer:
        def __init__(self) -> None:
            self.model = model

        def step(self) -> None:
            batch = koila.lazy(x, y)
            F.cross_entropy(self.model(batch[0]), batch[1]).backward()

    def of(net: nn.Module, rows: Tensor) -> Any:
        return net(koila.lazy(rows)).pow(2).mean().backward()

    assert koila.verify(Trainer().step, chunks=2).is_equal
    assert koila.verify(functools.partial(of, model, x), chunks=2).is_equal

    def helper() -> None:
        of(model, x)

    told = koila.verify(lambda: helper(), chunks=2)
    assert told.is_equal and told.n_chunks == 2
    assert "gradient of 0.weight" in {one.name for one in told.differences}
    with pytest.raises(ValueError, match="the step names no module"):
        koila.verify(lambda: None)


@pytest.mark.parametrize("n_rows", [8, 23])
@pytest.mark.parametrize("is_wrong", [False, True])
def test_equal_samples_under_a_batch_normalization(n_rows: int, is_wrong: bool) -> None:
    """Their variance is rounding, which the normalization makes large: that is no difference. What
    is none is found all the same."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 5))
    x = torch.randn(1, 6).repeat(n_rows, 1)

    def step() -> Tensor:
        loss = model(koila.lazy(x)).pow(2).mean()
        loss.backward()
        if is_wrong and get("chunks") != 1:
            model[3].bias.grad *= 1.01  # type: ignore[operator]
        return loss

    told = koila.verify(step, model, chunks=3)
    assert told.is_equal != is_wrong, told
    assert ("NOT equal" in str(told)) == is_wrong


def test_a_step_of_which_nothing_is_in_chunks() -> None:
    """The result says so: it has compared nothing that a user wants to know."""
    model, x = nn.Linear(3, 1), torch.randn(8, 3)
    found = koila.verify(lambda: model(koila.lazy(x)).mean(), model)
    assert found.n_chunks == 1 and found.is_equal
    assert str(found).startswith("nothing ran in chunks, so both runs were whole: equal")


def test_what_is_no_step() -> None:
    with pytest.raises(TypeError, match="step must be a function, which runs a step, not 3"):
        koila.verify(3, nn.Linear(3, 1))  # type: ignore[arg-type]
