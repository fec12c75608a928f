"""A script as users write it: mypy --strict and its like must have nothing against it."""

from collections.abc import Iterator

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
