# SPDX-License-Identifier: Apache-2.0
"""Writes through NumPy to memory that recorded calls read: eager's numbers, or a StaleError."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import koila

N_ROWS, N_BATCHES = 12, 4


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


class Refilled(IterableDataset[Tensor]):
    """Every batch is in the same array, as of a reader with a buffer."""

    def __iter__(self) -> Iterator[Tensor]:
        buffer = np.empty((N_ROWS, 6))
        for i in range(N_BATCHES):
            buffer[...] = np.random.default_rng(i).normal(size=buffer.shape)
            yield torch.from_numpy(buffer)


class Again:
    """An iterable that is no loader."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(Refilled())


def loader() -> DataLoader[Tensor]:
    return DataLoader(Refilled(), batch_size=None)


def evaluate(batches: Any) -> list[Tensor]:
    model, outs = make(), []
    with torch.no_grad():
        for x in batches:
            outs.append(model(x).pow(2).sum())
    return outs


@pytest.mark.parametrize("chunks", [None, 1, 5])
@pytest.mark.parametrize("kind", ["loader", "iterable", "iterator"])
def test_a_buffer_that_the_loader_fills_again(kind: str, chunks: int | None) -> None:
    """The numbers of a batch are computed before the next one is fetched."""
    given = {"loader": loader, "iterable": Again, "iterator": lambda: iter(Refilled())}[kind]
    wanted = [out.item() for out in evaluate(loader())]
    assert len(set(wanted)) == N_BATCHES
    with koila.config(chunks=chunks):
        found = evaluate(koila.lazy(given()))
        assert all(map(koila.is_lazy, found))
        assert [out.item() for out in found] == pytest.approx(wanted, rel=1e-10)


def step(x: Tensor, write: Callable[[], Any]) -> list[Tensor]:
    model = make()
    loss = model(x).pow(2).sum()
    write()
    loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("chunks", [None, 1, 5])
@pytest.mark.parametrize("is_slice", [False, True])
def test_an_array_that_became_lazy(is_slice: bool, chunks: int | None) -> None:
    """Whether it is written after calls on it were recorded, or nothing is."""
    array = np.random.default_rng(0).normal(size=(2 * N_ROWS, 6))

    def given() -> Tensor:
        whole = torch.from_numpy(array)
        return whole[N_ROWS:] if is_slice else whole

    wanted = step(given().clone(), lambda: None)
    with koila.config(chunks=chunks):
        for want, got in zip(wanted, step(koila.lazy(given()), lambda: None), strict=True):
            torch.testing.assert_close(want, got, rtol=1e-10, atol=1e-12)
        with pytest.raises(koila.StaleError, match="linear"):
            step(koila.lazy(given()), lambda: array.fill(0.0))


@pytest.mark.parametrize("chunks", [None, 1, 5])
@pytest.mark.parametrize("of", [lambda t: t.numpy(), np.asarray, lambda t: t.detach().numpy()[:]])
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_array_of_what_is_read(
    when: str, of: Callable[[Tensor], Any], chunks: int | None
) -> None:
    """Of a batch or of a weight, taken before calls read it or afterwards."""
    for is_weight in (False, True):
        model, x = make(), torch.randn(N_ROWS, 6, dtype=torch.float64)
        read = next(model.parameters()).requires_grad_(False) if is_weight else x
        array = of(read) if when == "before" else None
        with koila.config(chunks=chunks), torch.no_grad():
            out = model(koila.lazy(x)).sum()
            if array is None:
                array = of(read)
            array[...] *= 2
            with pytest.raises(koila.StaleError, match="linear"):
                out.item()


def shared_with(kind: str) -> tuple[Tensor, Any]:
    """Return a tensor of six entries, and what else has its memory and can be written."""
    if kind == "buffer":
        buffer = bytearray(np.arange(1.0, 7.0).tobytes())
        return torch.frombuffer(buffer, dtype=torch.float64), np.frombuffer(buffer)
    array = np.arange(1.0, 13.0)[: 6 if kind == "array" else None]
    return torch.from_numpy(array)[-6:], array


@pytest.mark.parametrize("chunks", [None, 1, 5])
@pytest.mark.parametrize("kind", ["array", "slice", "buffer"])
def test_an_array_whose_tensor_calls_read(kind: str, chunks: int | None) -> None:
    """The tensor is no input, and nothing of koila's was asked for the array."""
    for is_written in (False, True, False):
        beside, array = shared_with(kind)
        x = torch.randn(N_ROWS, 6, dtype=torch.float64)
        model = make()
        wanted = model(x * beside.clone()).pow(2).sum()
        with koila.config(chunks=chunks):
            loss = model(koila.lazy(x) * beside).pow(2).sum()
            if is_written:
                array.fill(0.0)
                with pytest.raises(koila.StaleError, match="mul"):
                    loss.backward()
            else:
                loss.backward()
                torch.testing.assert_close(loss * 1, wanted * 1, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("chunks", [None, 1, 5])
def test_an_array_that_is_filled_again_for_each_step(chunks: int | None) -> None:
    """Calls of the next step read its new numbers; those of the last one have run."""

    def train(lazy: Callable[[Tensor], Tensor]) -> list[Tensor]:
        torch.manual_seed(0)
        model, array = make(), np.zeros((N_ROWS, 1))
        weights = torch.from_numpy(array)
        for i in range(N_BATCHES):
            array[:, 0] = np.random.default_rng(i).normal(size=N_ROWS)
            x = lazy(torch.randn(N_ROWS, 6, dtype=torch.float64))
            (model(x).pow(2) * weights).sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    wanted = train(lambda x: x)
    with koila.config(chunks=chunks):
        for want, got in zip(wanted, train(koila.lazy), strict=True):
            torch.testing.assert_close(want, got, rtol=1e-10, atol=1e-12)


def test_memory_of_torch_is_not_read_again() -> None:
    """Checksums cost a pass over the memory."""
    x = torch.randn(N_ROWS, 6, dtype=torch.float64)
    loss = make()(koila.lazy(x)).sum()
    assert not koila._core.notes().get("watched")
    loss.backward()
