# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C in the middle of a program is heard at once, and nothing of it is run again unasked."""

from __future__ import annotations

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
    """Some seconds of matrix products; each runs for a few milliseconds."""

    def __init__(self) -> None:
        self.x = torch.randn(300, 300) / 17
        self.w = (torch.randn(300, 300) / 17).requires_grad_()
        self.hidden: Any = koila.lazy(self.x)
        for _ in range(N_CALLS):
            self.hidden = self.hidden @ self.w
        self.loss = self.hidden.sum()
        self.loss.weight = self.w

    def expected(self) -> torch.Tensor:
        with torch.no_grad():
            h = self.x
            for _ in range(N_CALLS):
                h = h @ self.w
        return h


@pytest.fixture(autouse=True)
def interrupts_are_heard() -> Iterator[None]:
    """A command in the background is started deaf to them, and Python then leaves it so."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def no_callback_of_the_collector_hears_them() -> Iterator[None]:
    """What is raised in one (hypothesis has one) Python reports and drops: no interrupt is left."""
    with collector_off():
        yield


class Interrupt:
    """Sends SIGINT after a while, and knows how long it took to be heard.

    In seconds of this process: others that keep the machine busy do not count.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.sent = 0.0

    def _send(self) -> None:
        time.sleep(self.seconds)
        self.sent = time.process_time()
        os.kill(os.getpid(), signal.SIGINT)

    def during(self, run: Callable[[], object]) -> float:
        """Interrupt `run`; how many seconds it went on."""
        thread = threading.Thread(target=self._send)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            run()
            thread.join()
            pytest.fail("it was not interrupted")
        thread.join()
        return time.process_time() - self.sent


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
        loss = Program().loss
        begun = time.process_time()
        RUNS[name](loss)
        whole = time.process_time() - begun

        program = Program()
        # In the first forward: its calls are short, where a chunk's backward is one call of torch.
        seconds = Interrupt(whole / 20).during(lambda: RUNS[name](program.loss))
        assert seconds < 0.1 + whole / 10
        assert count_calls(unrelated) < 20
        assert count_calls(lambda: koila.lazy(torch.ones(3, 2)).sum().item()) == 0
        torch.optim.SGD([program.w], lr=0.0).step()
        assert not _core.is_busy()


def test_an_interrupt_in_a_backward_is_heard_after_its_chunk() -> None:
    with split(7):
        unrelated()
        loss = Program().loss
        begun = time.process_time()
        loss.backward()
        whole = time.process_time() - begun
        program = Program()
        seconds = Interrupt(whole / 4).during(program.loss.backward)
        assert seconds < 0.1 + whole / 4


@pytest.mark.parametrize("chunks", [1, 3])
def test_an_interrupted_value_can_be_asked_for(chunks: int) -> None:
    with split(chunks):
        program = Program()
        Interrupt(0.1).during(program.loss.backward)
        assert program.w.grad is None
        unrelated()
        torch.testing.assert_close(_core.read(program.hidden).detach(), program.expected())


@pytest.mark.parametrize("chunks", [1, 3])
def test_weights_may_change_after_an_interrupt(chunks: int) -> None:
    """The program can no longer be run: whoever asks for it is told, and nobody else."""
    with split(chunks):
        program = Program()
        Interrupt(0.1).during(program.loss.backward)
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
        program = Program()
        torch.manual_seed(0)
        loss = torch.nn.functional.dropout(program.hidden).sum()
        Interrupt(0.1).during(loss.backward)
        assert torch.equal(torch.rand(3), wanted)


@pytest.mark.parametrize(
    ("when", "chunks"), [("Program", 3), ("Replay", 3), ("settle_outdated", 1)]
)
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
    program = Program()
    with koila.config(chunks=1):
        reader = threading.Thread(target=lambda: program.loss.item())
        reader.start()
        while not _core.is_busy():
            time.sleep(0.001)
        seconds = Interrupt(0.05).during(lambda: program.hidden.sum().item())
        assert seconds < 0.3
        reader.join()
        assert program.loss.item() == pytest.approx(program.expected().sum().item(), rel=1e-4)
