# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C in the middle of a program is heard at once, and nothing of it is run again unasked."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import koila
from chunked import split
from collector import collector_off
from koila import _core
from koila.basics import engine
from koila.running import replay

N_CALLS = 400
#: Called with a pending loss: each runs the whole program.
RUNS: dict[str, Callable[[Any], object]] = {
    "backward": lambda loss: loss.backward(),
    "grad": lambda loss: torch.autograd.grad(loss, loss.weight),
    "item": lambda loss: loss.item(),
    "print": str,
    "a call that runs at once": lambda loss: torch.tensor(loss),
}


class Program:
    """Matrix products, each of which runs for about a millisecond."""

    def __init__(self, n_calls: int = N_CALLS) -> None:
        self.n_calls = n_calls
        self.x = torch.randn(300, 300) / 17
        self.w = (torch.randn(300, 300) / 17).requires_grad_()
        self.hidden: Any = koila.lazy(self.x)
        for _ in range(n_calls):
            self.hidden = self.hidden @ self.w
        self.loss = self.hidden.sum()
        self.loss.weight = self.w

    def expected(self) -> torch.Tensor:
        with torch.no_grad():
            h = self.x
            for _ in range(self.n_calls):
                h = h @ self.w
        return h


@pytest.fixture(autouse=True)
def no_callback_of_the_collector_hears_them() -> Iterator[None]:
    """What is raised in one (hypothesis has one) Python reports and drops: no interrupt is left."""
    with collector_off():
        yield


def interrupt(run: Callable[[], object], when: float | threading.Event) -> None:
    """Send SIGINT during `run`: after some seconds, or once an event is set."""

    def send() -> None:
        time.sleep(when) if isinstance(when, float) else when.wait()
        os.kill(os.getpid(), signal.SIGINT)

    thread, is_over = threading.Thread(target=send), False
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run()
        is_over = True
        thread.join()
    thread.join()
    assert not is_over, "it was not interrupted"


@functools.cache
def seconds_of(name: str, chunks: int) -> float:
    """Of a program of this file, with what else runs on the machine."""
    unrelated()  # torch imports a lot for its first backward
    taken = []
    for _ in range(2):
        with split(chunks):
            loss, begun = Program().loss, time.perf_counter()
            RUNS[name](loss)
            taken.append(time.perf_counter() - begun)
    return min(taken)


def interrupter(chunks: int) -> Callable[[Any], None]:
    """Return what interrupts the run of a loss in the middle. In one chunk it is a read, since
    torch's backward is a single call there. To be made before the loss: a run takes all calls."""
    name = "backward" if chunks > 1 else "item"
    seconds = seconds_of(name, chunks) / 4
    return lambda loss: interrupt(lambda: RUNS[name](loss), seconds)


def count_calls(run: Callable[[], object]) -> int:
    """How many matrix products torch makes in `run`."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    return sum(event.count for event in profile.key_averages() if event.key == "aten::mm")


def unrelated() -> None:
    """A step of another program: two matrix products, forward and backward."""
    u = torch.randn(4, 4, requires_grad=True)
    (koila.lazy(torch.ones(4, 4)) @ u).exp().mean().log().backward()
    assert u.grad is not None


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("name", RUNS)
def test_an_interrupt_is_heard(name: str, chunks: int) -> None:
    with split(chunks):
        unrelated()  # torch imports a lot for its first backward
        loss, begun = Program().loss, time.perf_counter()
        n_all = count_calls(lambda: RUNS[name](loss))
        seconds = time.perf_counter() - begun
        # The signal may come late where others use the cores; a run that is deaf makes all calls.
        for part in (20, 50, 100):
            program = Program()
            run = functools.partial(RUNS[name], program.loss)
            n_calls = count_calls(functools.partial(interrupt, run, seconds / part))
            if n_calls < n_all / 4:
                break
        assert n_calls < n_all / 4
        assert count_calls(unrelated) < 20
        assert count_calls(lambda: koila.lazy(torch.ones(3, 2)).sum().item()) == 0
        torch.optim.SGD([program.w], lr=0.0).step()
        assert not _core.is_busy()


def test_an_interrupt_in_a_backward_is_heard_after_its_chunk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The backward of a chunk is one call of torch, of two products for each of the forward's."""
    goes_back, backward = threading.Event(), engine.run_backward

    def noted(*args: Any, **kwargs: Any) -> None:
        goes_back.set()
        backward(*args, **kwargs)

    monkeypatch.setattr(engine, "run_backward", noted)
    with split(7):
        program = Program()
        n_calls = count_calls(lambda: interrupt(program.loss.backward, goes_back))
        assert N_CALLS <= n_calls <= 3 * N_CALLS


@pytest.mark.parametrize("chunks", [1, 3])
def test_an_interrupted_value_can_be_asked_for(chunks: int) -> None:
    with split(chunks):
        stop, program = interrupter(chunks), Program()
        stop(program.loss)
        assert program.w.grad is None
        unrelated()
        torch.testing.assert_close(_core.read(program.hidden).detach(), program.expected())


@pytest.mark.parametrize("chunks", [1, 3])
def test_weights_may_change_after_an_interrupt(chunks: int) -> None:
    """The program can no longer be run: whoever asks for it is told, and nobody else."""
    with split(chunks):
        stop, program = interrupter(chunks), Program()
        stop(program.loss)
        with torch.no_grad():
            program.w.mul_(0.5)
        unrelated()
        with pytest.raises(koila.StaleError, match="changed in place"):
            program.loss.item()


@pytest.mark.parametrize("chunks", [1, 3])
def test_an_interrupt_leaves_the_draws_made(chunks: int) -> None:
    """What is drawn next comes after the draws of the program, wherever it was stopped."""
    torch.manual_seed(0)
    torch.nn.functional.dropout(torch.ones(300, 300))
    wanted = torch.rand(3)
    with split(chunks):
        stop, program = interrupter(chunks), Program()
        torch.manual_seed(0)
        loss = torch.nn.functional.dropout(program.hidden).sum()
        stop(loss)
        assert torch.equal(torch.rand(3), wanted)


@pytest.mark.parametrize(("when", "chunks"), [("Program", 3), ("Replay", 3), ("_is_whole", 1)])
@pytest.mark.parametrize("name", RUNS)
def test_an_interrupt_before_anything_runs(
    name: str, when: str, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its draws count as made too, and nothing runs it later but its own value."""
    torch.manual_seed(0)
    torch.nn.functional.dropout(torch.ones(300, 300))
    wanted = torch.rand(3)

    made = getattr(replay, when)

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return made(*args, **kwargs)

    with split(chunks):
        unrelated()
        program = Program()
        torch.manual_seed(0)
        loss = torch.nn.functional.dropout(program.hidden).sum()
        loss.weight = program.w
        monkeypatch.setattr(replay, when, interrupted)
        with pytest.raises(KeyboardInterrupt):
            RUNS[name](loss)
        monkeypatch.undo()
        assert torch.equal(torch.rand(3), wanted)
        assert count_calls(unrelated) < 20
        assert count_calls(lambda: koila.lazy(torch.ones(3, 2)).sum().item()) == 0
        assert torch.isfinite(loss).item()


def test_an_interrupt_while_another_thread_runs_the_program() -> None:
    program = Program(4 * N_CALLS)
    with koila.config(chunks=1):
        reader = threading.Thread(target=program.loss.item)
        waits = threading.Event()

        def wait() -> None:
            waits.set()
            program.hidden.sum().item()

        reader.start()
        while not _core.is_busy():
            time.sleep(0.001)
        interrupt(wait, waits)
        assert reader.is_alive(), "it was heard at the end"
        reader.join()
        assert program.loss.item() == pytest.approx(program.expected().sum().item(), rel=1e-4)
