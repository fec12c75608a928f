# SPDX-License-Identifier: Apache-2.0
"""A script as users write it: mypy --strict and pyright have nothing against it, and infer the
types that it says."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import assert_type

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import koila


def train(model: nn.Module, loader: DataLoader[tuple[Tensor, ...]]) -> koila.Report:
    koila.config(memory_limit="80%")
    koila.config(memory_limit=0.5)
    with koila.config(chunks=3, memory_limit=None):
        for x, y in koila.lazy(loader):
            loss: Tensor = nn.functional.cross_entropy(model(x), y)
            loss.backward()
    return koila.report()


def once(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, str]:
    x, y = koila.lazy(x, y)
    batch: dict[str, Tensor] = koila.lazy({"x": x, "y": y}, batch=0)
    one: Tensor = koila.lazy(batch["x"])
    loss = nn.functional.mse_loss(model(one), y)
    told: koila.Explanation = koila.explain(loss)
    if isinstance(one, koila.LazyTensor) and koila.is_lazy(one):
        print(told)
    try:
        with koila.off():
            return loss.item(), told
    except (koila.MemoryLimitError, koila.StaleError, koila.KoilaError) as error:
        return 0.0, str(error)


def batches(data: TensorDataset) -> Iterator[Tensor]:
    yield from koila.lazy(iter(torch.ones(4, 2).split(2)))


@dataclass
class Batch:
    x: Tensor
    y: Tensor


def of_the_same_types(loader: DataLoader[tuple[Tensor, Tensor]], x: Tensor, y: Tensor) -> None:
    """What is made lazy has the type that it had."""
    assert_type(koila.lazy(x), Tensor)
    assert_type(koila.lazy(x, y), tuple[Tensor, Tensor])
    assert_type(koila.lazy(x, y, x, batch=(0, 0, None)), tuple[Tensor, Tensor, Tensor])
    pair = (x, y)
    assert_type(koila.lazy(*pair), tuple[Tensor, Tensor])
    assert_type(koila.lazy([x, y]), list[Tensor])
    assert_type(koila.lazy(Batch(x, y)), Batch)
    assert_type(koila.lazy(loader), DataLoader[tuple[Tensor, Tensor]])
    assert_type(koila.is_lazy(x), bool)


def fields_of_reports(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """What a program reads of what koila tells."""
    report = koila.report()
    assert_type(report.n_chunks, int)
    assert_type(report.n_rows, int | None)
    assert_type(report.n_tries, int)
    assert_type(report.bytes_predicted, float | None)
    assert_type(report.bytes_allowed, float | None)
    assert_type(report.bytes_measured, int | None)
    assert_type(report.training, koila.Report | None)
    for ran in report.programs:
        assert_type(ran.what, str)
        assert_type(ran.why, str)
        for stage in ran.stages:
            assert_type(stage.n_chunks, int)
            assert_type(stage.passes, str)
        for entry in ran.whole:
            assert_type(str(entry), str)
        for layer in ran.layers:
            assert_type(layer.n_bytes, int)
            assert_type(layer.is_whole, bool)

    def loss_of(a: Tensor, b: Tensor) -> Tensor:
        return nn.functional.mse_loss(model(a), b)

    largest = koila.largest_batch(loss_of, x, y, memory_limit="1GiB")
    assert_type(largest.whole, int)
    assert_type(largest.in_chunks, int)

    def step() -> None:
        loss_of(*koila.lazy(x, y)).backward()

    checked = koila.verify(step, model, chunks=2)
    assert_type(str(checked), str)
    explained = koila.explain(loss_of(x, y), full=True)
    assert_type(explained.lines, tuple[str, ...])
    assert_type(explained.upper(), str)
