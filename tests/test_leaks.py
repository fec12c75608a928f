"""Nothing grows: as many objects, blocks and bytes after a thousand steps as after a hundred."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import koila
from oracle import split

ROWS = 6
FIRST, LAST = 100, 1000


class MallInfo(ctypes.Structure):
    """What glibc's mallinfo2() answers."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names.split())


def bytes_in_use() -> int:
    """Bytes that are allocated and not freed: tensors, and the arrays of the tape."""
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = MallInfo
    info = ask()
    return int(info.uordblks + info.hblkhd)


def look() -> dict[str, int]:
    gc.collect()
    return {
        "objects": len(gc.get_objects()),
        "Python's blocks": sys.getallocatedblocks(),
        "blocks of the core": koila._core.n_blocks(),
        "bytes": bytes_in_use(),
    }


#: How much more there may be at the end: lists of free objects still fill, but no step may leave
#: one thing behind.
SLACK = {"objects": 20, "Python's blocks": 800, "blocks of the core": 0, "bytes": 16 * 1024}


class Bench:
    """A small model and its optimizer, and a batch that is made anew for each step."""

    def __init__(self) -> None:
        layers = nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.1)
        self.model = nn.Sequential(*layers, nn.Linear(8, 3)).double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01, momentum=0.9)
        self.total: Any = 0.0

    def batch(self) -> tuple[Tensor, Tensor]:
        x, y = koila.lazy(torch.ones(ROWS, 5, dtype=torch.float64), torch.arange(ROWS) % 3)
        return x, y

    def loss(self) -> Tensor:
        x, y = self.batch()
        return F.cross_entropy(self.model(x), y)

    def update(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def train(bench: Bench) -> None:
    bench.update(bench.loss())


def add_up_losses(bench: Bench) -> None:
    """The sum has a graph, which torch itself lets grow."""
    loss = bench.loss()
    bench.update(loss)
    bench.total += loss


def add_up_detached_losses(bench: Bench) -> None:
    loss = bench.loss()
    bench.update(loss)
    bench.total += loss.detach()


def read_losses(bench: Bench) -> None:
    loss = bench.loss()
    bench.total += loss.item()
    bench.update(loss)


def evaluate(bench: Bench) -> None:
    bench.model.eval()
    with torch.no_grad():
        x, y = bench.batch()
        bench.total += (bench.model(x).argmax(1) == y).sum()
    bench.model.train()


def ask_for_gradients(bench: Bench) -> None:
    torch.autograd.grad(bench.loss(), list(bench.model.parameters()))


def forget_the_result(bench: Bench) -> None:
    """Statistics only: the result is dropped."""
    bench.model(bench.batch()[0])


def fail_when_recorded(bench: Bench) -> None:
    x, _ = bench.batch()
    with contextlib.suppress(RuntimeError):
        bench.model(x) @ torch.ones(4, 4, dtype=x.dtype)


def fail_when_run(bench: Bench) -> None:
    x, y = bench.batch()
    with contextlib.suppress(IndexError):
        loss = F.cross_entropy(bench.model(x), y + 2)
        loss.backward()
    bench.optimizer.zero_grad()


def run_live(bench: Bench) -> None:
    x, _ = bench.batch()
    out = bench.model(x)
    loss = out[out > 0].sum() + (out * 2)[0, 0]
    loss.register_hook(lambda grad: grad * 2)
    bench.update(loss)


STEPS: dict[str, Callable[[Bench], None]] = {
    step.__name__: step
    for step in (
        train,
        add_up_losses,
        add_up_detached_losses,
        read_losses,
        evaluate,
        ask_for_gradients,
        forget_the_result,
        fail_when_recorded,
        fail_when_run,
        run_live,
    )
}


@pytest.fixture(autouse=True)
def only_new_objects() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="asks glibc 2.33")
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("name", STEPS)
def test_nothing_grows(name: str, chunks: int) -> None:
    bench = Bench()
    whole = "it fails before it runs" if name == "fail_when_recorded" else ""
    with split(chunks, whole=whole):
        for i in range(LAST):
            if i == FIRST:
                before = look()
            STEPS[name](bench)
        after = look()
    grown = {what: n - before[what] for what, n in after.items() if n - before[what] > SLACK[what]}
    if name == "add_up_losses":
        del grown["bytes"]
    assert not grown, f"more than after {FIRST} steps: {grown}"
