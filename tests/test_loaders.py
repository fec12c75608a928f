# SPDX-License-Identifier: Apache-2.0
"""Data loaders whose batches are lazy: of one that lazy() is given, and of all there are."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import koila
from koila import _core, launch, loaders
from koila.lazy import of_draw, of_loader
from koila.random import plain
from oracle import assert_close

N = 22


def data() -> TensorDataset:
    torch.manual_seed(0)
    return TensorDataset(torch.randn(N, 6, dtype=torch.float64), torch.randint(5, (N,)))


@pytest.fixture
def all_lazy() -> Iterator[None]:
    loaders.make_all_lazy(of_loader)
    yield
    loaders.make_all_lazy(None)


def train(loader: Any, chunks: int | None = None) -> tuple[list[Tensor], int]:
    """The parameters after an epoch with dropout and a norm, and the chunks of its last step."""
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 5)
    ).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    n_chunks = 0
    with koila.config(chunks=chunks):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            n_chunks = koila.report().n_chunks if koila.is_lazy(x) else 0
    return [*model.parameters(), *model.buffers()], n_chunks


@pytest.mark.parametrize("n_workers", [0, 2])
@pytest.mark.parametrize("chunks", [1, 2, 3, 7])
def test_training_is_the_same(chunks: int, n_workers: int) -> None:
    """Also where the last batch is smaller, and rows are drawn in another order in each epoch."""
    loader = DataLoader(data(), batch_size=9, shuffle=True, num_workers=n_workers)
    torch.manual_seed(2)
    wanted, _ = train(loader)
    torch.manual_seed(2)
    lazy_loader = koila.lazy(loader)
    got, n_chunks = train(lazy_loader, chunks)
    assert n_chunks == min(chunks, 4)
    for value, want in zip(got, wanted, strict=True):
        assert_close(value.detach(), want.detach(), "parameters and buffers")


def test_a_loader_stays_what_it_is() -> None:
    class Own(DataLoader[Any]):
        def name(self) -> str:
            return f"of {len(self)} batches"

    loader = Own(data(), batch_size=5, drop_last=True)
    lazy_loader = koila.lazy(loader)
    assert type(lazy_loader) is Own
    assert lazy_loader.name() == "of 4 batches"
    assert lazy_loader.dataset is loader.dataset and lazy_loader.sampler is loader.sampler
    assert all(koila.is_lazy(x) and koila.is_lazy(y) for x, y in lazy_loader)
    assert not any(koila.is_lazy(x) for x, _ in loader)
    again = koila.lazy(lazy_loader)
    assert all(koila.is_lazy(x) for x, _ in again)


def test_workers_persist() -> None:
    loader = DataLoader(data(), batch_size=5, num_workers=1, persistent_workers=True)
    lazy_loader = koila.lazy(loader)
    firsts = [torch.cat([x.detach() * 1 for x, _ in lazy_loader]).tolist() for _ in range(2)]
    assert firsts[0] == firsts[1] == loader.dataset.tensors[0].tolist()  # type: ignore[attr-defined]
    iterator = iter(lazy_loader)
    next(iterator)
    assert len(iterator) == 5  # what a DataLoader's iterator has, it has


@dataclass
class Batch:
    x: Tensor
    n: int


class Encoding(collections.UserDict[str, Any]):
    """As a tokenizer's BatchEncoding is one."""


class Numbers(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        yield from torch.arange(float(N)).view(N, 1).unbind()


@pytest.mark.usefixtures("all_lazy")
def test_containers() -> None:
    """What a batch is made of stays what it is."""

    def collate(rows: list[tuple[Tensor, Tensor]]) -> Any:
        x, y = (torch.stack(list(column)) for column in zip(*rows, strict=True))
        return {
            "batch": Batch(x, len(rows)),
            "encoding": Encoding(ids=y, text=["a"] * len(rows)),
            "pair": (x.T, [y]),
            "sparse": torch.eye(len(rows)).to_sparse(),
            "none": None,
            "scale": torch.tensor(2.0),
            "classes": torch.arange(17),
        }

    loader = DataLoader(data(), batch_size=4, collate_fn=collate)
    for batch in loader:
        n = batch["batch"].n
        assert isinstance(batch["batch"], Batch) and koila.is_lazy(batch["batch"].x)
        assert isinstance(batch["encoding"], Encoding) and koila.is_lazy(batch["encoding"]["ids"])
        assert batch["encoding"]["text"] == ["a"] * n
        columns, labels = batch["pair"]
        assert koila.is_lazy(columns) and columns.shape == (6, n)
        assert type(labels) is list and koila.is_lazy(labels[0])
        assert not koila.is_lazy(batch["sparse"]) and batch["sparse"].is_sparse
        assert batch["none"] is None
        assert not koila.is_lazy(batch["scale"]) and not koila.is_lazy(batch["classes"])
        with koila.config(chunks=2):
            assert_close(
                (columns * labels[0]).sum(1).detach(),
                (batch["batch"].x * batch["encoding"]["ids"][:, None]).sum(0).detach(),
                "sums",
            )


@pytest.mark.usefixtures("all_lazy")
def test_all_loaders_of_every_kind() -> None:
    found = [x for x in DataLoader(Numbers(), batch_size=5)]
    assert all(map(koila.is_lazy, found))
    assert [len(x) for x in found] == [5, 5, 5, 5, 2]
    one_by_one = list(DataLoader(Numbers(), batch_size=None))
    assert all(map(koila.is_lazy, one_by_one))  # a batch as the dataset makes it
    sampled = DataLoader(data(), batch_sampler=[[0, 1, 2], [3, 4]])
    assert [len(x) for x, _ in sampled if koila.is_lazy(x)] == [3, 2]
    with koila.off():
        assert not any(koila.is_lazy(x) for x, _ in DataLoader(data(), batch_size=5))
    assert not any(
        isinstance(x, Tensor) for x in DataLoader(Words(), batch_size=2, collate_fn=list)
    )
    loaders.make_all_lazy(None)
    assert not any(koila.is_lazy(x) for x, _ in DataLoader(data(), batch_size=5))


def test_a_block_in_another() -> None:
    """As a framework's callback in a script of the launcher: both are told, and nothing is left."""
    loader = DataLoader(data(), batch_size=11)
    with launch.lazy_loaders() as outer:
        train(loader, 2)
        with launch.lazy_loaders() as inner:
            train(loader, 2)
        assert all(koila.is_lazy(x) and koila.is_lazy(torch.randn(11, 3)) for x, _ in loader)
        assert not koila.is_lazy(torch.randn(11, 3))  # another data set, say: no batch is in use
    assert not any(koila.is_lazy(x) for x, _ in loader)
    assert not koila.is_lazy(torch.randn(11, 3))
    assert (inner.n_steps, inner.n_batches, inner.most_chunks) == (2, 2, 2)
    assert (outer.n_steps, outer.n_batches) == (4, 6)


def test_a_data_set_that_is_drawn_between_batches(all_lazy: None) -> None:
    """It is as large as the batch by chance, and is taken for noise; its batches have samples."""
    plain.follow(of_draw)
    try:
        for _ in DataLoader(data(), batch_size=11):
            drawn = TensorDataset(torch.randn(11, 3))
            assert koila.is_lazy(drawn.tensors[0])
            (x,) = next(iter(DataLoader(drawn, batch_size=11)))
            assert koila.is_lazy(x) and _core.rows_dim(x) == 0
            assert (x == drawn.tensors[0]).all().item()
        assert not koila.is_lazy(torch.randn(11, 3))  # that loader is exhausted
    finally:
        plain.follow(None)


class Words(Dataset[str]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> str:
        return "abcd"[index]


def test_an_iterator_that_is_no_loader() -> None:
    """As scripts make batches by hand."""

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, N, 8):
            rows = data()[start : start + 8]
            yield rows[0], rows[1]

    wanted, _ = train(batches())
    got, n_chunks = train(koila.lazy(batches()), 2)
    assert n_chunks == 2
    for value, want in zip(got, wanted, strict=True):
        assert_close(value.detach(), want.detach(), "parameters and buffers")


def test_what_hands_out_batches_again_and_again() -> None:
    """Libraries' own loaders, which are no DataLoader."""

    class Buckets:
        name = "buckets"

        def __iter__(self) -> Iterator[Tensor]:
            yield from torch.ones(6, 2).split(2)

        def __len__(self) -> int:
            return 3

    buckets = koila.lazy(Buckets())
    assert len(buckets) == 3 and buckets.name == "buckets"
    for _ in range(2):
        found = list(buckets)
        assert len(found) == 3 and all(map(koila.is_lazy, found))


def test_a_loader_made_of_its_parts_is_lazy() -> None:
    """As accelerate and Lightning make loaders anew; in workers too that are started afresh."""
    first = koila.lazy(DataLoader(data(), batch_size=5, collate_fn=Stack()))
    assert first.collate_fn.pad == 7
    again = DataLoader(
        first.dataset,
        batch_sampler=first.batch_sampler,
        collate_fn=first.collate_fn,
        num_workers=1,
        multiprocessing_context="spawn",
    )
    found = list(again)
    assert len(found) == 5 and all(map(koila.is_lazy, found))


class Stack:
    """A collator as a class with settings."""

    pad = 7

    def __call__(self, rows: list[tuple[Tensor, Tensor]]) -> Tensor:
        return torch.stack([x for x, _ in rows])


def test_the_dim_of_the_rows_can_be_given() -> None:
    loader = DataLoader(
        data(), batch_size=4, collate_fn=lambda rows: torch.stack([x for x, _ in rows])
    )
    for x in koila.lazy(loader, batch=1):
        assert koila._core.rows_dim(x) == 1


@pytest.mark.parametrize(
    ("shapes", "n_rows", "dims"),
    [
        ([(4, 3), (4,), ()], 4, [0, 0, None]),
        ([(3, 3), (3,)], 4, [0, 0]),  # the last batch
        ([(7, 4), (4,)], 4, [1, 0]),
        ([(7, 3), (3,), (3,)], 4, [1, 0, 0]),
        ([(50, 6), (50,)], None, [0, 0]),
        ([(9,), (9,), (5, 9)], 4, [0, 0, 1]),  # a batch of other batches' pieces
        ([(0, 6)], 4, [None]),
        ([], 4, []),
    ],
)
def test_row_dims(
    shapes: list[tuple[int, ...]], n_rows: int | None, dims: list[int | None]
) -> None:
    assert loaders.row_dims([torch.empty(shape) for shape in shapes], n_rows) == dims


@pytest.mark.usefixtures("all_lazy")
@pytest.mark.parametrize("n_workers", [0, 1])
def test_the_last_batch_of_a_time_major_loader(n_workers: int) -> None:
    """Its rows are in dim 1 too, though it has fewer; so has a loader of one such batch."""

    def collate(rows: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        return torch.stack([x for x, _ in rows], 1), torch.ones(7, len(rows))

    for size, sizes in ((9, [9, 9, 4]), (30, [22])):
        # The collate_fn of a forked worker need not be pickled.
        start: Any = {"multiprocessing_context": "fork"} if n_workers else {}
        loader = DataLoader(data(), size, collate_fn=collate, num_workers=n_workers, **start)
        for _ in range(2):
            batches = list(loader)
            assert [x.size(1) for x, _ in batches] == sizes
            assert all(_core.rows_dim(each) == 1 for batch in batches for each in batch)
