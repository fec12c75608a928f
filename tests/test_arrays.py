# SPDX-License-Identifier: Apache-2.0
"""Writes to NumPy arrays that share a lazy tensor's memory: torch counts none of them. What reads
the tensor has eager's numbers, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import koila

F64 = torch.float64
ROWS = 11
CHUNKS = [1, 2, 3, 7, ROWS]
Make = Callable[[Tensor, nn.Module], Tensor]


def clip(array: Any) -> None:
    np.clip(array, -0.1, 0.1, out=array)


def run(make: Make, lazy: Callable[[Tensor], Tensor]) -> list[Any]:
    torch.manual_seed(0)
    layer = nn.Linear(5, 5, dtype=F64)
    loss = make(lazy(torch.randn(ROWS, 5, dtype=F64)), layer)
    loss.backward()
    return [loss.item(), *(one.grad for one in layer.parameters())]


def check(make: Make, chunks: int) -> None:
    want = run(make, lambda x: x)
    with koila.config(chunks=chunks):
        got = run(make, lambda x: koila.lazy(x, batch=0))
    for one, wanted in zip(got, want, strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-10, atol=1e-14)


def refused(make: Make, chunks: int) -> None:
    with koila.config(chunks=chunks), pytest.raises(koila.StaleError, match=r"NumPy|in place"):
        run(make, lambda x: koila.lazy(x, batch=0))


def written_before(x: Tensor, layer: nn.Module) -> Tensor:
    h = layer(x)
    clip(h.detach().numpy())
    return h.sum()


def written_in_part(x: Tensor, layer: nn.Module) -> Tensor:
    h = layer(x)
    clip(h.detach()[2:5].numpy()[:, 1:])
    return h.pow(2).sum()


def of_a_view(x: Tensor, layer: nn.Module) -> Tensor:
    h = layer(x)
    clip(np.asarray(h.detach().view(-1)))
    return h.exp().sum()


def written_twice(x: Tensor, layer: nn.Module) -> Tensor:
    h = layer(x)
    first, second = h.detach().numpy(), h.detach().numpy()
    del first
    clip(second)
    return h.sum()


def written_after(x: Tensor, layer: nn.Module) -> Tensor:
    h = layer(x)
    array, loss = h.detach().numpy(), h.sum()
    clip(array)
    return loss


def made_without_gradient(x: Tensor, layer: nn.Module) -> Tensor:
    h = x * 2
    array, loss = h.numpy(), layer(h).sum()
    clip(array)
    return loss


REFUSED = [written_before, written_in_part, of_a_view, written_twice]


@pytest.mark.parametrize("chunks", CHUNKS[1:])
@pytest.mark.parametrize("make", REFUSED)
def test_a_value_that_chunks_compute_again_is_refused(make: Make, chunks: int) -> None:
    refused(make, chunks)


@pytest.mark.parametrize("make", REFUSED)
def test_one_chunk_reads_what_was_written(make: Make) -> None:
    check(make, 1)


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("make", [written_after, made_without_gradient])
def test_a_write_after_the_call_is_refused(make: Make, chunks: int) -> None:
    refused(make, chunks)


def first_then_read(x: Tensor, layer: nn.Module) -> Tensor:
    h = x * 2
    clip(h.numpy())
    return layer(h).sum()


def first_then_a_view(x: Tensor, layer: nn.Module) -> Tensor:
    h = x * 2
    clip(np.asarray(h))
    return layer(h.view(-1, 5)).sum()


def of_the_batch(x: Tensor, layer: nn.Module) -> Tensor:
    clip(x.numpy())
    return layer(x).sum()


def only_read(x: Tensor, layer: nn.Module) -> Tensor:
    h = layer(x)
    array = h.detach().numpy()
    return h.sum() * float(array.max())


def of_a_copy(x: Tensor, layer: nn.Module) -> Tensor:
    h = layer(x)
    clip(h.detach().numpy().copy())
    clip(h.detach().clone().numpy())
    clip(np.asarray(h.detach(), dtype=np.float32))
    return h.sum()


def of_what_no_call_reads(x: Tensor, layer: nn.Module) -> Tensor:
    h = layer(x)
    scores = h.softmax(1)
    clip(scores.detach().numpy())
    return h.sum()


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize(
    "make",
    [
        first_then_read,
        first_then_a_view,
        of_the_batch,
        only_read,
        of_a_copy,
        of_what_no_call_reads,
    ],
)
def test_others_are_as_in_eager(make: Make, chunks: int) -> None:
    check(make, chunks)


def test_the_message_says_what_and_where() -> None:
    text = (
        r"sum: a tensor of shape \[11, 5\] that the call reads \(.*test_arrays.py:\d+\) was "
        r"written through a NumPy array of its memory \(.*test_arrays.py:\d+\); write to a copy"
    )
    with koila.config(chunks=2), pytest.raises(koila.StaleError, match=text):
        run(written_before, lambda x: koila.lazy(x, batch=0))


def test_the_next_step_is_not_spoilt() -> None:
    with koila.config(chunks=2):
        for _ in range(2):
            with pytest.raises(koila.StaleError):
                run(written_before, lambda x: koila.lazy(x, batch=0))
            got = run(only_read, lambda x: koila.lazy(x, batch=0))
    want = run(only_read, lambda x: x)
    for one, wanted in zip(got, want, strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-10, atol=1e-14)


def summed_then_written(x: Tensor, layer: nn.Module) -> Tensor:
    """The array is gone when torch writes the tensor, in its memory."""
    h = layer(x)[:, :4]
    _ = h.detach().numpy().sum().item()
    with torch.autograd.graph.save_on_cpu():
        _ = h * 3
    h.add_(0.1)
    return h.pow(2).sum()


@pytest.mark.parametrize("chunks", CHUNKS)
def test_an_array_that_is_gone(chunks: int) -> None:
    check(summed_then_written, chunks)


INDICES = {
    "int64": np.array([3, 1, 1]),
    "int32": np.array([3, 1], np.int32),
    "int16": np.array([3, 1], np.int16),
    "uint16": np.array([3, 1], np.uint16),
    "float64": np.array([3.0, 1.5]),
    "bool": np.arange(ROWS) % 2 == 0,
    "strided": np.arange(ROWS)[::2],
    "two dims": np.array([[0, 3], [2, 1]]),
    "empty": np.array([]),
    "reversed": np.arange(3)[::-1],
    "swapped": np.array([3, 1], ">i8"),
    "objects": np.array([3, 1], object),
}


@pytest.mark.rotated("chunks")
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("name", INDICES)
def test_an_array_as_an_index(name: str, chunks: int) -> None:
    """As torch converts it, or its error."""
    index = INDICES[name]

    def made(x: Tensor) -> Any:
        weight = torch.full((5,), 2.0, dtype=F64, requires_grad=True)
        h = x * weight
        try:
            taken, column = h[index], h[index, 0]
        except (TypeError, ValueError) as error:
            return type(error), str(error)
        h = h.clone()
        h[index] = 1.0
        (taken.sum() + column.sum() + h.pow(2).sum()).backward()
        return taken.tolist(), column.tolist(), h.tolist(), weight.grad.tolist()

    x = torch.arange(ROWS * 5, dtype=F64).view(ROWS, 5)
    want = made(x.clone())
    with koila.config(chunks=chunks):
        assert made(koila.lazy(x.clone())) == want


@pytest.mark.parametrize("chunks", [None, *CHUNKS])
def test_an_index_is_written_before_backward(chunks: int | None) -> None:
    """Eager's backward would read what was written: no run of koila does, so it is refused. What
    needs no gradient reads the index as it was."""
    layer, x = nn.Linear(5, 5, dtype=F64), torch.randn(ROWS, 5, dtype=F64)
    with koila.config(chunks=chunks):
        for is_written in (True, False):
            index, lazy_x = np.array([3, 1, 1]), koila.lazy(x)
            taken, loss = lazy_x[index] * 2, layer(lazy_x)[index].pow(2).sum()
            want = x[index] * 2
            if is_written:
                index[:] = 2
                with pytest.raises(koila.StaleError, match="through a NumPy"):
                    loss.backward()
            else:
                loss.backward()
            del loss
            assert torch.equal(taken.detach().clone(), want)
    assert layer.weight.grad is not None


def test_an_index_may_be_shuffled_in_place() -> None:
    """As loops over a data set do: the rows of a batch need no gradient."""
    data, order = torch.randn(ROWS, 5, dtype=F64), np.arange(ROWS)
    lazy_data, batches, want = koila.lazy(data), [], []
    for _ in range(3):
        for i in range(0, ROWS, 4):
            batches.append(lazy_data[order[i : i + 4]] + 1)
            want.append(data[order[i : i + 4]] + 1)
        order[:] = np.roll(order, 5)
    for got, wanted in zip(batches, want, strict=True):
        assert torch.equal(got.detach().clone(), wanted)


MASKS = {
    "rows": np.arange(ROWS) % 3 != 1,
    "columns": np.array([True, False, True, True, False]),
    "both": np.arange(ROWS * 5).reshape(ROWS, 5) % 3 != 1,
    "bytes": (np.arange(ROWS) % 3 != 1).astype(np.uint8),
}


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize("chunks", [None, *CHUNKS])
@pytest.mark.parametrize("name", MASKS)
def test_a_mask_is_written_before_backward(name: str, chunks: int | None) -> None:
    """A call that runs at once keeps the array, as eager does; others are refused."""

    def run(x: Tensor) -> Tensor:
        mask = MASKS[name].copy()
        h = x * torch.full((5,), 2.0, dtype=F64, requires_grad=True)
        taken = (h[:, mask] if name == "columns" else h[mask]).pow(2)
        mask[...] = np.flip(mask).copy()
        loss = taken.sum()
        (found,) = torch.autograd.grad(loss, h)
        return found.clone()

    x = torch.arange(ROWS * 5, dtype=F64).view(ROWS, 5)
    want = run(x.clone())
    with koila.config(chunks=chunks):
        if name == "bytes" or chunks == 1:
            assert torch.equal(run(koila.lazy(x.clone())), want)
        else:
            with pytest.raises(koila.StaleError, match="through a NumPy"):
                run(koila.lazy(x.clone()))
