"""Cells of a notebook: what one left behind, a failed one too, is told to who asks for it, and to
nobody else. The next cell's step works, and is exact."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import koila
from chunked import split
from oracle import Lazy, eager, plain

N_ROWS = 6
Cell = Callable[[nn.Module, Any, list[Any]], None]


def update(model: nn.Module) -> None:
    """A step by hand, which plain torch takes unseen."""
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1


def left_stale(model: nn.Module, x: Any, kept: list[Any]) -> None:
    kept.append(model(x))
    update(model)


def left_stale_among_others(model: nn.Module, x: Any, kept: list[Any]) -> None:
    """What is recorded after the write, on the same batch, is not stale."""
    kept.append(model(x).sum())
    update(model)
    model(x).mean().backward()
    model.zero_grad()


def asked_stale(model: nn.Module, x: Any, kept: list[Any]) -> None:
    loss = model(x).mean()
    kept.append(loss)
    update(model)
    with pytest.raises(koila.StaleError, match="linear: a parameter"):
        loss.backward()


def wrong_shape(model: nn.Module, x: Any, kept: list[Any]) -> None:
    out = model(x)
    kept.append(out.exp())
    with pytest.raises(RuntimeError, match="size of tensor a"):
        F.l1_loss(out + torch.ones(N_ROWS, 5, dtype=torch.float64), out).backward()


class _Interrupted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise KeyboardInterrupt


def interrupted(model: nn.Module, x: Any, kept: list[Any]) -> None:
    out = model(x)
    loss = _Interrupted.apply(out).mean()  # type: ignore[no-untyped-call]
    kept.extend((out.exp(), loss * 2))
    with pytest.raises(KeyboardInterrupt):
        loss.backward()


def refused(model: nn.Module, x: Any, kept: list[Any]) -> None:
    loss = model(x).mean()
    kept.append(loss)
    with koila.config(chunks=None, memory_limit="1KB"), pytest.raises(koila.MemoryLimitError):
        loss.backward()


def no_scalar(model: nn.Module, x: Any, kept: list[Any]) -> None:
    out = model(x)
    kept.append(out)
    with pytest.raises(RuntimeError, match="scalar"):
        out.backward()


CELLS: list[Cell] = [
    left_stale,
    left_stale_among_others,
    asked_stale,
    wrong_shape,
    interrupted,
    refused,
    no_scalar,
]


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()


def data() -> Tensor:
    return torch.linspace(-1, 1, N_ROWS * 4, dtype=torch.float64).view(N_ROWS, 4)


def good(model: nn.Module, lazy: Lazy, x: Any = None) -> list[Tensor]:
    model.zero_grad()
    loss = model(lazy(data()) if x is None else x).square().mean()
    loss.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [plain(loss), *gradients]


def assert_good(model: nn.Module, chunks: int | None, x: Any = None) -> None:
    wanted = good(model, eager)
    with split(chunks):
        got = good(model, koila.lazy, x)
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("chunks", [None, 1, 2, 3, N_ROWS])
@pytest.mark.parametrize("cells", [*zip(CELLS), *itertools.permutations(CELLS, 2)])
def test_good_steps_after_cells(cells: tuple[Cell, ...], chunks: int | None) -> None:
    model, kept = make(), list[Any]()
    for cell in cells:
        x = koila.lazy(data())
        with koila.config(chunks=chunks):
            cell(model, x, kept)
        for again in (x, None):  # the batch of the cell, and another
            assert_good(model, chunks, again)
            update(model)
    stale = 0
    for value in kept:
        try:
            value.tolist()
        except koila.StaleError:
            stale += 1
    assert (stale > 0) == bool(
        {left_stale, left_stale_among_others, asked_stale, refused} & {*cells}
    )


@pytest.mark.parametrize("chunks", [None, 3])
def test_statistics_that_cannot_be_written_are_told(chunks: int | None) -> None:
    """Nobody asks for those: who runs a program next is told, once."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double()
    kept = model(koila.lazy(data()))
    update(model)
    with koila.config(chunks=chunks), pytest.raises(koila.StaleError, match="a parameter"):
        model.eval()(koila.lazy(data())).mean().backward()
    assert_good(model, None)
    with pytest.raises(koila.StaleError):
        kept.tolist()


@pytest.mark.parametrize("chunks", [None, 3])
def test_draws_of_what_is_stale_were_made(chunks: int | None) -> None:
    """What is drawn next has the numbers that come after those."""

    def story(lazy: Lazy) -> tuple[Any, Tensor]:
        model = make()
        torch.manual_seed(1)
        kept = F.dropout(model[0](lazy(data())))  # type: ignore[index]
        update(model)
        out = F.dropout(model(lazy(data())))
        out.sum().backward()
        return kept, plain(out)

    wanted = story(eager)[1]
    with koila.config(chunks=chunks):
        kept, got = story(koila.lazy)
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)
    with pytest.raises(koila.StaleError):
        kept.tolist()
