# SPDX-License-Identifier: Apache-2.0
"""largest_batch(): the number it says fits, and not many more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import koila
from limits import there

N_MORE = 1.15  # of what fits, by the plan's share that is kept back


def make() -> nn.Module:
    torch.manual_seed(0)
    layers = [
        nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1))
        for _ in range(4)
    ]
    return nn.Sequential(*layers, nn.Linear(64, 10))


def test_it_fits() -> None:
    """Nothing runs: buffers, gradients, generator and what is recorded stay as they are."""
    model, x, y = make(), torch.randn(8, 64), torch.randint(10, (8,))
    waiting = model[4](koila.lazy(torch.ones(3, 64))).sum()
    buffers = [b.clone() for b in model.buffers()]
    generator = torch.get_rng_state()
    limit = there() + 6 * 2**20

    def step(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    found = koila.largest_batch(step, x, y, memory_limit=limit)
    assert 500 < found.whole < found.in_chunks < found.most
    assert (
        f"{found.whole} samples fit whole, {found.in_chunks} samples in at most 16 chunks"
        in str(found)
    )
    assert all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(p.grad is None for p in model.parameters())
    assert waiting.item() == pytest.approx(model[4](torch.ones(3, 64)).sum().item(), rel=1e-5)

    def n_chunks(n_rows: int) -> int:
        model.zero_grad()
        with koila.config(memory_limit=limit):
            step(*koila.lazy(torch.randn(n_rows, 64), torch.randint(10, (n_rows,)))).backward()
            return koila.report().n_chunks

    assert n_chunks(found.whole) == 1
    assert n_chunks(int(N_MORE * found.whole)) > 1
    assert 1 < n_chunks(found.in_chunks) <= 20


def test_batches_in_containers() -> None:
    """As lazy() takes them; what has no dims is the same for all samples."""
    model, x, y = make(), torch.randn(8, 64), torch.randint(10, (8,))
    limit = there() + 6 * 2**20

    def step(batch: Any, scale: Any = 1.0) -> Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"]) * scale

    found = koila.largest_batch(step, {"x": x, "y": y}, memory_limit=limit)
    assert 500 < found.whole < found.in_chunks < found.most
    scaled = koila.largest_batch(step, {"x": x, "y": y}, torch.tensor(2.0), memory_limit=limit)
    assert abs(scaled.whole - found.whole) < 3
    with pytest.raises(ValueError, match="give the tensors of a batch"):
        koila.largest_batch(step, {"x": x[:0], "y": y[:0]})
    with pytest.raises(TypeError, match="give the batch as plain tensors"):
        koila.largest_batch(step, {"x": koila.lazy(x), "y": y})


def test_samples_in_another_dim() -> None:
    """Also for one of several tensors; a table that is the same for all samples does not grow."""
    model, x = nn.LSTM(16, 32), torch.randn(12, 5, 16)
    limit = there() + 6 * 2**20

    def step(x: Tensor, table: Any = 0.0) -> Tensor:
        return (model(x)[0] + table).pow(2).mean()

    first = nn.LSTM(16, 32, batch_first=True)
    wanted = koila.largest_batch(
        lambda x: first(x)[0].pow(2).mean(), x.mT.reshape(5, 12, 16), memory_limit=limit
    )
    found = koila.largest_batch(step, x, batch=1, memory_limit=limit)
    assert 50 < found.whole < found.in_chunks < found.most
    assert abs(found.whole - wanted.whole) <= 0.1 * wanted.whole
    table = torch.zeros(1, 1, 32)
    beside = koila.largest_batch(step, x, table, batch=(1, None), memory_limit=limit)
    assert abs(beside.whole - found.whole) <= 0.2 * found.whole
    given = koila.largest_batch(
        lambda batch: step(batch["x"]), {"x": x}, batch={"x": 1}, memory_limit=limit
    )
    assert abs(given.whole - found.whole) <= 1
    with pytest.raises(ValueError, match="batch=5 is not a dim of"):
        koila.largest_batch(step, x, batch=5)


def test_what_runs_whole_has_no_chunks() -> None:
    """The answer is that of a whole run, which a batch of that size then makes."""
    weights = torch.randn(64, 64, requires_grad=True)
    limit = there() + 2**21

    def step(x: Tensor) -> Tensor:
        return (x @ weights).sort(0).values.cumsum(0).sum()

    found = koila.largest_batch(step, torch.randn(8, 64), memory_limit=limit)
    assert 100 < found.whole == found.in_chunks < found.most
    for n_rows, fits in ((found.whole, True), (2 * found.whole, False)):
        x = torch.randn(n_rows, 64)
        with koila.config(memory_limit=limit):
            try:
                step(koila.lazy(x)).backward()
                assert fits
            except koila.MemoryLimitError:
                assert not fits


def test_where_not_even_two_samples_fit() -> None:
    model, x = make(), torch.randn(8, 64)
    found = koila.largest_batch(lambda x: model(x).sum(), x, memory_limit=there() + 2**10, most=64)
    assert found.whole == found.in_chunks == 0 < found.bytes_least
    assert "not even 2 samples fit: they need at least" in str(found)


def test_what_it_cannot_say() -> None:
    model, x = make(), torch.randn(8, 64)
    with pytest.raises(ValueError, match="what it returned is of type Tensor"):
        koila.largest_batch(lambda x: torch.tensor(model(x).sum().item()), x)
    with pytest.raises(ValueError, match=r"neither call .* what it returned is of type NoneType"):
        koila.largest_batch(lambda x: None, x)

    def run(x: Any) -> Any:
        (loss := model(x).sum()).item()
        return loss

    with pytest.raises(ValueError, match="what it returned has run"):
        koila.largest_batch(run, x)

    def train(x: Any) -> Any:
        model(x).sum().backward()
        torch.optim.SGD(model.parameters(), 1.0).step()

    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(ValueError, match="nor read a number: it calls backward"):
        koila.largest_batch(train, x)
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert parameter.grad is None and torch.equal(parameter, value)
    model(koila.lazy(x)).sum().backward()  # only the step's own backward() is refused
    with pytest.raises(ValueError, match="give the tensors of a batch"):
        koila.largest_batch(lambda: torch.ones(()))
    with pytest.raises(TypeError, match="give the batch as plain tensors"):
        koila.largest_batch(lambda x: model(x).sum(), koila.lazy(x))
    found = koila.largest_batch(lambda x: model[0](x).sum(), x, memory_limit=there() + 100, most=64)
    assert found.whole == found.in_chunks == 0
    found = koila.largest_batch(lambda x: model[0](x).sum(), x, most=64)
    assert found.whole == found.in_chunks == 64
    assert "64 samples and more fit whole" in str(found)
