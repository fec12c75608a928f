# SPDX-License-Identifier: Apache-2.0
"""What leaves koila is told: a large plain tensor that is made or written of lazy ones is named by
report(), and logged once with its line."""

from __future__ import annotations

import copy
import gc
import logging
import re
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import koila
from koila.planning import left_plain
from oracle import Lazy, eager

N_ROWS, N_STEPS, WIDE = 512, 8, 128
Make = Callable[[Any], Any]


pytestmark = pytest.mark.usefixtures("nothing_logged")


def decode(make: Make, lazy: Lazy) -> tuple[list[Tensor | None], int]:
    """A recurrent model writes what it makes, step by step, into what `make` gives."""
    torch.manual_seed(0)
    layers = nn.ModuleDict({"cell": nn.Linear(WIDE, WIDE), "head": nn.Linear(WIDE, 1)})
    x = lazy(torch.randn(N_ROWS, N_STEPS, WIDE))
    out = make(x)
    for t in range(N_STEPS):
        out[:, t] = layers["cell"](x[:, t]).tanh()
    layers["head"](out).square().mean().backward()
    return [p.grad for p in layers.parameters()], id(out)


def by_add(out: Any, x: Any) -> Any:
    out += x


def by_copy(out: Any, x: Any) -> Any:
    out.copy_(x)


def by_out(out: Any, x: Any) -> Any:
    torch.mul(x, 2, out=out)


def by_item(out: Any, x: Any) -> Any:
    out[:] = x


WRITES = [by_add, by_copy, by_out, by_item]


def left() -> list[str]:
    return [
        f"{ran.what}: {ran.why}" for ran in koila.report().programs if "plain tensor" in ran.why
    ]


def test_a_plain_tensor_that_rows_are_written_into(caplog: pytest.LogCaptureFixture) -> None:
    kept: list[Tensor] = []  # a tensor that only one name holds would become lazy

    def make(x: Any) -> Tensor:
        kept[:] = [torch.zeros(N_ROWS, N_STEPS, WIDE)]
        return kept[0]

    wanted, _ = decode(make, eager)
    with koila.config(memory_limit="64MiB"), caplog.at_level(logging.INFO, "koila"):
        for _ in range(2):
            got, _ = decode(make, koila.lazy)
    torch.testing.assert_close(got, wanted)
    assert len(left()) == 1
    assert "writes lazy values into a plain tensor of 2.0 MiB" in left()[0]
    assert "torch.zeros_like(h)" in left()[0]
    messages = [r for r in caplog.records if "into a plain tensor" in r.getMessage()]
    assert [r.levelname for r in messages] == ["WARNING"], "once, as its graph leaves koila"
    assert "test_left_plain.py:" in messages[0].getMessage()


def test_without_gradients_nothing_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    """An evaluation that writes its predictions into a plain tensor is no reason to warn."""
    found = torch.zeros(N_ROWS, N_STEPS * WIDE)
    with (
        koila.config(memory_limit="64MiB"),
        caplog.at_level(logging.INFO, "koila"),
        torch.no_grad(),
    ):
        found[:] = koila.lazy(torch.ones(N_ROWS, N_STEPS * WIDE)) * 2
    messages = [r for r in caplog.records if "into a plain tensor" in r.getMessage()]
    assert [r.levelname for r in messages] == ["INFO"]


@pytest.mark.parametrize("make", [torch.zeros_like, lambda x: x.new_zeros(x.shape)])
def test_what_is_advised_is_recorded(make: Make) -> None:
    wanted, _ = decode(make, eager)
    with koila.config(chunks=4):
        got, _ = decode(make, koila.lazy)
    torch.testing.assert_close(got, wanted)
    assert koila.report().n_chunks == 4
    assert not left()


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("has_graph", [False, True])
def test_every_way_to_write(
    write: Callable[[Any, Any], Any], has_graph: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Of pending rows, and of those that are computed."""
    weight = torch.ones(N_STEPS * WIDE, requires_grad=has_graph and write is not by_out)
    with koila.config(memory_limit="64MiB"), caplog.at_level(logging.INFO, "koila"):
        pending = koila.lazy(torch.ones(N_ROWS, N_STEPS * WIDE)) * weight
        computed = koila.lazy(torch.ones(N_ROWS, N_STEPS * WIDE)) * weight
        computed.sum().item()
        for h in (pending, computed):
            out = torch.zeros(N_ROWS, N_STEPS * WIDE)
            write(out, h)
            assert left()
    assert any("into a plain tensor" in r.getMessage() for r in caplog.records)


@pytest.mark.parametrize("write", [by_add, by_copy, by_item])
def test_what_is_written_goes_with_its_graph(write: Callable[[Any, Any], Any]) -> None:
    """Also where no backward comes: it holds what was recorded, which must not hold it."""
    weight = torch.ones(4, requires_grad=True)
    with koila.config(memory_limit="64MiB"):
        out = torch.zeros(8, 4)
        write(out, koila.lazy(torch.ones(8, 4)) * weight)
    assert out.requires_grad
    gone = weakref.ref(weight)
    del out, weight
    gc.collect()
    assert gone() is None


def exits(h: Any, buffer: Tensor, at: int) -> Tensor:
    """Make or write a plain tensor of a lazy one, each at a line of its own."""
    if at == 0:
        return torch.from_numpy(h.detach().numpy())
    if at == 1:
        return nn.Parameter(h)
    if at == 2:
        return torch.tensor(h.detach().tolist())
    if at == 3:
        return copy.deepcopy(h.detach())
    if at == 4:
        return torch.from_dlpack(h.detach())
    if at == 5:
        return torch.Tensor(h.detach())
    if at == 6:
        torch.mul(h.detach(), 1, out=buffer)
        return buffer
    buffer.copy_(h.detach())
    return buffer


WRITTEN_AT, N_EXITS = 6, 8


def test_each_line_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Of several lines where values leave, before one backward; a loop logs no line again."""
    caplog.set_level(logging.WARNING, "koila")
    weight, head = torch.ones(64, 64, requires_grad=True), nn.Linear(64, 64)
    begins = exits.__code__.co_firstlineno
    logged = []
    with koila.config(chunks=3):
        for at in range(N_EXITS):
            told = f"{__file__}:{begins + 3 + 2 * at}"
            for _ in range(3):
                h = koila.lazy(torch.ones(8192, 64)) @ weight
                buffer = torch.zeros(8192, 64)  # two names hold it: koila cannot replace it
                left = exits(h, buffer, at)
                head(left).square().mean().backward()
                (ran,) = [p for p in koila.report().programs if "nothing in it is lazy" in p.why]
                assert told in ran.why and "koila.lazy(values)" in ran.why
                assert "noise" not in ran.why
                assert (f"{told}: writes lazy values" in str(koila.report())) == (at >= WRITTEN_AT)
            (message,) = [r.getMessage() for r in caplog.records]
            assert told in message
            logged.append("writes lazy" in message)
            caplog.clear()
    assert logged == [at >= WRITTEN_AT for at in range(N_EXITS)]


def test_small_ones_are_not_reported() -> None:
    with koila.config(memory_limit="64MiB"):
        buffer = torch.zeros(4)
        buffer.mul_(0.9).add_(koila.lazy(torch.ones(8, 4)).mean(0))
    assert not left()


@pytest.mark.parametrize("are_labels_lazy", [True, False])
def test_an_input_that_left_by_numpy(
    are_labels_lazy: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """However small: the model is computed from it. Labels that stay lazy do not hide that."""
    left_plain._reported.clear()
    model = nn.Sequential(nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 4))
    data, labels = torch.randn(512, 8), torch.randint(4, (512,))

    def step(is_left: bool) -> str:
        x, y = koila.lazy(data, labels)
        scaled = torch.from_numpy(x.numpy() / 2) if is_left else x / 2
        y = y if are_labels_lazy else labels
        with koila.config(memory_limit="1GiB"), caplog.at_level(logging.WARNING, "koila"):
            nn.functional.cross_entropy(model(scaled), y).backward()
        return "\n".join(ran.why for ran in koila.report().programs)

    head = "only its last calls are lazy" if are_labels_lazy else "nothing in it is lazy"
    assert head not in step(False) and not caplog.records
    told = step(True)
    assert re.search(
        rf"{head}: [\d.]+ MiB of results with 512 samples were made on the whole", told
    )
    left_at = rf"left koila \(numpy\(\) at {__file__}:\d+\), compute with the lazy tensor itself"
    assert re.search(left_at, told) and "noise" not in told
    (record,) = caplog.records
    assert f"{head}: " in record.getMessage()


def test_a_plain_result() -> None:
    """What has no rows is computed once and for all: what is made of it is made at once, and plain
    where nothing waits that may be written with it."""
    code = """
import torch, koila
h = koila.lazy(torch.ones(8, 1024))
products = h.T @ h
products.sum().item()
assert type(products * 2) is torch.Tensor
assert type(products.sum() * 2) is torch.Tensor
(left,) = [ran for ran in koila.report().programs if "plain tensor" in ran.why]
assert "makes a plain tensor of 4.0 MiB" in left.why
"""
    subprocess.run([sys.executable, "-c", code], check=True)
