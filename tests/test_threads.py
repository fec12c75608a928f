# SPDX-License-Identifier: Apache-2.0
"""Several threads record, read each other's values and run: no crash, no error, eager's numbers."""

from __future__ import annotations

import contextvars
import functools
import os
import queue
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import koila
from chunked import Watched, split
from stress_threads import stress

pytestmark = pytest.mark.sanitize


def run_threads(*bodies: Callable[[], object], seconds: float = 120) -> None:
    """Run each in a thread of its own, which is configured as the caller is; the first exception
    of any is raised here."""
    errors: list[BaseException] = []

    def guarded(body: Callable[[], object]) -> None:
        try:
            body()
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=contextvars.copy_context().run, args=(guarded, body), daemon=True)
        for body in bodies
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    assert not any(thread.is_alive() for thread in threads), "the threads wait for each other"
    if errors:
        raise errors[0]


def test_calls_with_index_tensors_are_recorded_on_two_threads() -> None:
    rows = torch.arange(64)

    def body() -> None:
        labels, z = torch.randint(0, 10, (64,)), torch.randn(64, 10)
        for _ in range(500):
            picked = (koila.lazy(z) * 2)[rows, labels]
        assert torch.equal(picked + 0, (z * 2)[rows, labels])

    run_threads(body, body)


@pytest.mark.parametrize("n_threads", [2, 4])
def test_threads_that_read_each_other(n_threads: int) -> None:
    """KOILA_STRESS_SECONDS=60 is the long version."""
    seconds = float(os.environ.get("KOILA_STRESS_SECONDS", "3"))
    with Watched(1).on() as seen:  # each thread asks for a number of its own
        board = stress(seconds, n_threads)
    assert seen.n_cut > 0
    assert board.n_steps > n_threads
    assert board.n_read > 0


@pytest.mark.parametrize("chunks", [1, 3])
def test_a_value_is_read_while_its_thread_runs_the_program(chunks: int) -> None:
    """The reader waits; neither is told that a program was running."""
    x, w = (
        torch.randn(12, 64, dtype=torch.float64),
        torch.randn(64, 64, dtype=torch.float64).requires_grad_(),
    )
    expected = (x @ w).tanh().sum().item()
    made: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def owner() -> None:
        for _ in range(100):
            loss = (koila.lazy(x) @ w).tanh().sum()
            made.put(loss)
            loss.backward()
            w.grad = None
        made.put(None)

    def reader() -> None:
        while (loss := made.get()) is not None:
            torch.testing.assert_close(loss.item(), expected)

    with split(chunks):
        run_threads(owner, reader)


@pytest.mark.parametrize("chunks", [1, 3])
def test_two_threads_wait_for_the_same_value(chunks: int) -> None:
    x, w = (
        torch.randn(12, 64, dtype=torch.float64),
        torch.randn(64, 64, dtype=torch.float64).requires_grad_(),
    )
    expected = (x @ w).exp().sum(0).detach()

    def look(lazy: Any) -> None:
        torch.testing.assert_close(torch.tensor(lazy.tolist(), dtype=x.dtype), expected)

    for whole in ("", "a call on a value of another's is given it with its graph"):
        check = functools.partial(torch.testing.assert_close, expected=expected) if whole else look
        with split(chunks, whole=whole):
            for _ in range(20):
                lazy = (koila.lazy(x) @ w).exp().sum(0)
                run_threads(*[functools.partial(check, lazy + 0)] * 3)


@pytest.mark.parametrize("chunks", [1, 2, 7])
def test_the_program_of_a_thread_that_has_ended(chunks: int) -> None:
    """Read, differentiated and gone on with by another thread."""
    x = torch.randn(7, 5, dtype=torch.float64)
    w = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    left: list[Any] = []

    def record() -> None:
        hidden = torch.tanh(koila.lazy(x) @ w)
        left.extend((hidden, hidden.exp().mean().log()))

    run_threads(record)
    hidden, loss = left
    expected = torch.tanh(x @ w).exp().mean().log()
    expected.backward()
    gradient, w.grad = w.grad, None
    with split(chunks, partly="a call on a value of another's is given it with its graph"):
        torch.testing.assert_close(loss.item(), expected.item())
        torch.testing.assert_close((hidden * 2).sum().item(), 2 * torch.tanh(x @ w).sum().item())
        loss.backward()
    torch.testing.assert_close(w.grad, gradient)


@pytest.mark.parametrize("chunks", [1, 3])
def test_another_thread_differentiates(chunks: int) -> None:
    x = torch.randn(12, 5, dtype=torch.float64)
    w = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    (x @ w).exp().mean().backward()
    gradient, w.grad = w.grad, None
    with split(chunks):
        loss = (koila.lazy(x) @ w).exp().mean()
        pending = koila.lazy(x) * 3
        run_threads(lambda: loss.backward())
        report = koila.lazy(x) * 2  # this thread goes on with a tape of its own
        assert torch.equal(pending + 0, x * 3)
        assert torch.equal(report + 0, x * 2)
    torch.testing.assert_close(w.grad, gradient)


def test_an_input_is_shared() -> None:
    """Each thread records with it: none makes the other's program run."""
    x = torch.randn(12, 5)
    shared = koila.lazy(x)
    mine = shared * 2
    theirs: list[Any] = []
    run_threads(lambda: theirs.append(shared * 3))
    assert koila._core.real(mine) is None
    assert koila._core.real(theirs[0]) is None
    assert torch.equal(mine + shared, x * 3)
    assert torch.equal(theirs[0] + 0, x * 3)


@pytest.mark.parametrize("chunks", [1, 3])
def test_hooks_that_wait_for_each_other_are_told(chunks: int) -> None:
    """Each writes, in the middle of its backward, a value of the other's program: an error in one
    of them at least, and no thread waits for ever."""
    meet = threading.Barrier(2, timeout=900)
    losses: dict[int, Any] = {}
    told: list[str] = []

    def body(me: int) -> None:
        w = torch.randn(5, 3, requires_grad=True)
        is_met = False

        def hook(gradient: torch.Tensor) -> None:
            nonlocal is_met
            if is_met:
                return
            is_met = True
            meet.wait()
            assert losses[1 - me].item() > 0  # it is computed, and can be read
            with torch.no_grad():
                losses[1 - me].mul_(2)

        h = koila.lazy(torch.randn(12, 5)) @ w
        h.register_hook(hook)
        losses[me] = h.exp().mean()
        meet.wait()
        try:
            losses[me].backward()
        except koila.KoilaError as error:
            told.append(str(error))

    with split(chunks):
        run_threads(lambda: body(0), lambda: body(1), seconds=60)
    if chunks > 1:  # else torch's backward runs on what is there, and nobody waits
        assert told
        assert "wait for each other" in told[0]


@pytest.mark.parametrize("chunks", [2, 3])
def test_masks_stay_while_other_threads_draw(chunks: int) -> None:
    """The chunks run twice: the gradient must be of the mask that the value was made with."""

    def body() -> None:
        x = torch.ones(12, 50, dtype=torch.float64)
        w = torch.linspace(-1, 2, 50, dtype=torch.float64).requires_grad_()
        for _ in range(40):
            total = (F.dropout(koila.lazy(x), 0.5) * w).sum()
            loss = total.exp().log()  # not linear: forward, forward, backward
            value = total.item()
            (gradient,) = torch.autograd.grad(loss, w)
            torch.testing.assert_close((gradient * w).sum().item(), value)

    with split(chunks), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that draws of threads come in any order
        run_threads(body, body, body)


def test_a_plain_draw_between_two_runs_of_a_mask_is_told() -> None:
    """Plain draws of another thread cannot be kept apart: a mask that changed is an error."""
    stop = threading.Event()
    told: list[str] = []

    def draw() -> None:
        while not stop.is_set():
            torch.rand(20_000)

    def train() -> None:
        x = torch.ones(12, 20_000, dtype=torch.float64)
        w = torch.linspace(-1, 2, 20_000, dtype=torch.float64).requires_grad_()
        try:
            for _ in range(20):
                try:
                    total = (F.dropout(koila.lazy(x), 0.5) * w).sum()
                    loss = total.pow(2) / 2  # not linear: forward, forward, backward
                    value = total.item()
                    (gradient,) = torch.autograd.grad(loss, w)
                except koila.KoilaError as error:
                    told.append(str(error))
                    continue
                torch.testing.assert_close((gradient * w).sum().item(), value * value)
        finally:
            stop.set()

    with split(3), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_threads(draw, train)
    assert all("drew random numbers" in text or "were drawn" in text for text in told)
