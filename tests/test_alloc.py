# SPDX-License-Identifier: Apache-2.0
"""Memory that runs out in the recorder, at any request: MemoryError, and nothing else has changed.

The core's nth request is made to fail, for n = 0, 1, 2 ... until the program runs through. Then the
same program, without a failure, gives eager's numbers.
"""

from __future__ import annotations

import contextvars
import gc
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import koila
import sanitizers
from koila.memory import storages
from oracle import Lazy, assert_seen, eager, split

pytestmark = pytest.mark.sanitize

ROWS = 7


class Model(nn.Module):
    """What writes statistics, draws, views and writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(F.relu(self.norm(self.first(x))), 0.25)
        parts = x.view(x.shape[0], 2, 3).unbind(1)
        x = torch.cat([part * (i + 1) for i, part in enumerate(parts)], dim=1)
        x[:, 0] = x[:, 1] * 2
        result: Tensor = self.last(x)
        return result


def train(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss.detach()


def read_first(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    out = model(x)
    loss = F.cross_entropy(out, y)
    value = loss.item()
    loss.backward()
    return value, out.argmax(1)


def two_barriers(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    out = model(x)
    near = out / out.norm(dim=1, keepdim=True)
    loss = F.cross_entropy(near @ near.T, torch.arange(x.shape[0])) + out.std().sqrt()
    grads = torch.autograd.grad(loss, list(model.parameters()))
    return loss.detach(), grads


def evaluate(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    model.eval()
    with torch.no_grad():
        out = model(x)
        right = (out.argmax(1) == y).sum()
    model.train()
    return out, right


def live(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    """Calls that run at once, and many arguments."""
    out = model(x)
    rows = [row for part in (out, out * 2, y.view(-1, 1) * out) for row in part.unbind(0)]
    rows = [entry for row in rows for entry in row.unbind(0)]
    chosen = out[out > 0].sum()
    loss = torch.stack(rows).pow(2).mean() + chosen
    loss.backward()
    return loss.detach(), out.shape, out.stride(), repr(type(out * 1))[:0]


def explained(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    loss = F.cross_entropy(model(x), y)
    koila.explain(loss)
    answers = loss.requires_grad, loss.dtype, loss.shape, loss.stride()
    loss.backward()
    return answers


def plain_step(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    """Nothing that outlives a failed forward: the next step needs no help to forget it."""
    assert isinstance(model, Model)
    out = model.last(F.gelu(model.first(x)))
    loss, aside = F.mse_loss(out, F.one_hot(y, 4).double()), out.sin()
    loss.backward()
    return loss.detach(), aside.detach()


Run = Callable[[nn.Module, Tensor, Tensor], Any]
PROGRAMS: dict[str, Run] = {
    f.__name__: f for f in (train, read_first, two_barriers, evaluate, live, explained, plain_step)
}
#: What runs in the middle of these has its effects there, as in eager; and they go on after their
#: backward, so that a call there may fail: gradients are as before, or all there.
COMMITS_EARLY = {"read_first", "live"}


@pytest.fixture(autouse=True)
def memory_again() -> Iterator[None]:
    yield
    koila._core.fail_alloc_after(-1)


def make() -> tuple[Model, Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(ROWS, 3, dtype=torch.float64)
    return Model().double(), x, torch.arange(ROWS) % 4


def state(model: nn.Module) -> Any:
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    # Its count of batches is written by the layer itself, at once.
    buffers = [buffer.clone() for buffer in model.buffers() if buffer.is_floating_point()]
    return grads, buffers, torch.get_rng_state()


def run(name: str, lazy: Lazy) -> Any:
    """What a program returns and leaves behind."""
    model, x, y = make()
    seen = PROGRAMS[name](model, *lazy(x, y))
    return seen, state(model)


def fails_at(n: int, name: str, want: Any) -> bool:
    """Whether a program is stopped where all requests from the nth on fail, leaving no trace.

    `want` is what eager leaves where nothing fails.
    """
    model, x, y = make()
    rows, labels = koila.lazy(x, y)
    before = state(model)
    koila._core.fail_alloc_after(n)
    try:
        PROGRAMS[name](model, rows, labels)
    except MemoryError:
        failed = True
    else:
        failed = False
    finally:
        koila._core.fail_alloc_after(-1)
    if name != "plain_step":
        koila._core.forget()  # draws of a failed forward: a look at the generator makes them
    after = state(model)
    if failed and name in COMMITS_EARLY:
        is_delivered = after[0][0] is not None
        gradients = want[0] if is_delivered else before[0]
        assert_seen(after[0], gradients, "gradients", exact_bits=not is_delivered)
    elif failed:
        assert_seen(after, before, "state", exact_bits=True)
    return failed


def in_a_thread(work: Callable[[], Any]) -> Any:
    """Do something with a tape that has no memory yet, and is freed afterwards; settings hold."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(contextvars.copy_context().run, work).result()


@pytest.mark.rotated
@pytest.mark.filterwarnings("ignore:koila. random numbers were drawn")
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_request_may_fail(name: str, chunks: int) -> None:
    storages.forget()  # another test's limit: what follows the collector asks for memory too
    want = run(name, eager)

    def fail_then_run(n: int) -> bool:
        failed = fails_at(n, name, want[1])
        got = run(name, koila.lazy)
        what = f"after request {n} failed"
        assert_seen(got, want, what, exact_bits=chunks == 1)
        return failed

    with split(chunks):
        in_a_thread(lambda: run(name, koila.lazy))  # what is kept for good
        gc.collect()
        gc.freeze()  # or each collection would look at all of torch
        n_blocks = koila._core.n_blocks()
        # Under sanitizers every third, from another on in each program.
        step = sanitizers.fewer(1, 3)
        for n in itertools.count((list(PROGRAMS).index(name) + chunks) % step, step):
            failed = in_a_thread(lambda n=n: fail_then_run(n))
            gc.collect()
            assert koila._core.n_blocks() == n_blocks, f"request {n} leaked"
            if not failed:
                break
    assert n > 10, "requests were made"
