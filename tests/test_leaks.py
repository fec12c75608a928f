# SPDX-License-Identifier: Apache-2.0
"""Nothing grows: as many objects, blocks and bytes after 700 steps as after a hundred."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
import threading
import unittest.mock
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import koila
from collector import collector_off
from koila.running import attempt
from koila.running.replay import Replay
from koila.staged.facts import Run
from oracle import Lazy, eager, split

ROWS = 6
FIRST, LAST = 100, 700


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
#: one thing behind; of the least there is, 600 steps would leave 600 blocks, or 19,200 bytes.
SLACK = {"objects": 20, "Python's blocks": 550, "blocks of the core": 0, "bytes": 16 * 1024}

#: What a node may take that stands for a loss in the graph of a sum, of which torch's own has more.
OF_A_NODE = {"objects": 1, "Python's blocks": 5, "blocks of the core": 0}


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


def teach(bench: Bench) -> None:
    """Views that share memory, hooks, a mask, and a pass without gradients."""
    x, y = bench.batch()
    with torch.no_grad():
        target = bench.model(x)
    hidden = bench.model[0](x)
    hidden.register_hook(lambda grad: grad * 2)
    hidden.retain_grad()
    out = bench.model[1:](hidden)
    first, rest = out[:, :1], out[:, 1:]
    bench.total += bool((y > 0).any()) + out[y > 0].sum().item()
    bench.update((out - target).pow(2).mean() + first.sum() + rest.exp().mean())


def refuse(bench: Bench) -> None:
    loss = bench.loss()
    with koila.config(chunks=None, memory_limit=1), contextlib.suppress(koila.MemoryLimitError):
        loss.backward()


def try_again(bench: Bench) -> None:
    """Memory runs out in the first try."""
    run_nodes, n_left = Replay.run_nodes, [1]

    def fail(replay: Replay, run: Run, *args: Any, **kwargs: Any) -> list[Any]:
        if run.is_body and n_left[0] > 0:
            n_left[0] -= 1
            raise torch.OutOfMemoryError
        return run_nodes(replay, run, *args, **kwargs)

    with (
        unittest.mock.patch.object(Replay, "run_nodes", fail),
        unittest.mock.patch.object(attempt, "get", lambda name: None),
    ):
        train(bench)


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

#: Why nothing of a step is cut.
WHOLE = {"refuse": "it fits in no number"}
#: What hundreds of steps of would take too long.
MORE_STEPS = {step.__name__: step for step in (teach, refuse, try_again)}


@pytest.fixture(autouse=True)
def only_new_objects() -> None:
    # After a limit of a test before: of storages that died, up to as many as live are remembered.
    koila._core.follow_storages(None)
    gc.collect()
    gc.freeze()


@pytest.mark.rotated("chunks")
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="asks glibc 2.33")
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("name", STEPS)
def test_nothing_grows(name: str, chunks: int) -> None:
    bench = Bench()
    with split(chunks, whole=WHOLE.get(name, "")):
        for _ in range(FIRST):
            STEPS[name](bench)
        grown = grown_by(STEPS[name], bench)
        # What comes late, and once, as caches do that go by time, is no leak: that grows on.
        grown = grown and grown_by(STEPS[name], bench)
    if name == "add_up_losses":
        of_nodes = {what: n * (LAST - FIRST) + SLACK[what] for what, n in OF_A_NODE.items()}
        grown = {what: n for what, n in grown.items() if what in of_nodes and n > of_nodes[what]}
    assert not grown, f"more than {LAST - FIRST} steps before: {grown}"


def grown_by(step: Callable[[Bench], None], bench: Bench) -> dict[str, int]:
    """What there is more of after hundreds of steps, beyond what may be."""
    before = look()
    for _ in range(LAST - FIRST):
        step(bench)
    after = look()
    return {what: n - before[what] for what, n in after.items() if n - before[what] > SLACK[what]}


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("name", STEPS | MORE_STEPS)
def test_nothing_waits_for_the_collector(name: str, chunks: int) -> None:
    """No step leaves a cycle: what it made is gone when the script has dropped it."""
    bench = Bench()
    asked = split(chunks, whole=WHOLE.get(name, ""))
    if name == "try_again":
        asked = koila.config(chunks=chunks)  # it is tried in more
    with asked, collector_off():
        for _ in range(3):
            (STEPS | MORE_STEPS)[name](bench)
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            gc.collect()
            left = sorted({type(thing).__name__ for thing in gc.garbage})
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
    assert not left


def bytes_after(lazy: Lazy, is_normed: bool, is_read: bool) -> int:
    """How many bytes more there are when 100 steps are done."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(2):
        layers += [nn.Linear(64, 64), nn.BatchNorm1d(64) if is_normed else nn.GELU()]
        layers += [nn.ReLU(), nn.Dropout(0.1)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = MallInfo
    for i in range(110):
        if i == 10:
            before = ask()
        x, y = lazy(torch.ones(256, 64), torch.arange(256) % 64)
        out = model(x)
        loss = F.cross_entropy(out, y)
        if is_read:
            assert loss.item() > 0
            assert (out.argmax(1) == y).sum().item() >= 0
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    after = ask()
    return int(after.uordblks + after.hblkhd - before.uordblks - before.hblkhd)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="asks glibc 2.33")
@pytest.mark.parametrize("is_normed", [True, False])
@pytest.mark.parametrize("is_read", [True, False])
def test_live_bytes_are_eagers(is_normed: bool, is_read: bool) -> None:
    """After 100 steps in chunks, with the collector off; Python's lists of free objects, which fill
    in the first hundreds, are filled before."""
    with collector_off():
        with split(3):
            bytes_after(koila.lazy, is_normed, is_read)
        want = bytes_after(eager, is_normed, is_read)
        with split(3):
            got = bytes_after(koila.lazy, is_normed, is_read)
    assert got <= want + SLACK["bytes"]


def test_a_hook_that_holds_its_own_tensor_is_collected() -> None:
    """What a thread recorded and never ran goes with it, whatever its hooks refer to."""
    seen: list[weakref.ref[Any]] = []

    def record() -> None:
        hidden = koila.lazy(torch.ones(4, 3, requires_grad=True)) * 2
        held = {hidden}
        seen.append(weakref.ref(held))
        hidden.register_hook(lambda gradient: gradient * len(held))

    thread = threading.Thread(target=record)
    thread.start()
    thread.join()
    gc.collect()
    assert seen[0]() is None
