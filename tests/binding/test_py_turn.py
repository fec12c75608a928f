# SPDX-License-Identifier: Apache-2.0
"""One thread at a time uses a tape; who waits can be interrupted, and never waits for itself."""

from __future__ import annotations

import functools
import threading
import time
from typing import Any

import pytest
import torch

import koila
from binding_kit import batch, in_a_child, in_a_thread, is_pending, pending
from koila import _core
from koila.basics import threads

core: Any = _core

pytestmark = pytest.mark.sanitize


def held(lazy: Any, work: Any) -> Any:
    return core.held(lazy, work, (), {})


class Holder:
    """A thread that has its turn at the tape of a lazy until it is told to end it."""

    def __init__(self, lazy: Any) -> None:
        self.has_begun, self.may_end = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=held, args=(lazy, self._hold))

    def _hold(self) -> None:
        self.has_begun.set()
        self.may_end.wait(20)

    def __enter__(self) -> Holder:
        self.thread.start()
        assert self.has_begun.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        self.may_end.set()
        self.thread.join(60)


def test_a_call_in_a_turn() -> None:
    assert core.held(None, max, (3, 5), {}) == 5
    assert core.held(pending(), sorted, ([2, 1],), {"reverse": True}) == [2, 1]
    with pytest.raises(ZeroDivisionError):
        held(None, lambda: 1 // 0)
    assert core.drawing(lambda: 7) == 7
    assert core.drawing(lambda: core.drawing(lambda: 8)) == 8


@pytest.mark.parametrize("args", [(), (None,), (None, max, [], {}), (None, max, (), None)])
def test_wrong_arguments(args: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError):
        core.held(*args)
    with pytest.raises(TypeError):
        core.drawing(3)


def test_the_tape_of_another_thread_is_used() -> None:
    theirs = in_a_thread(pending)
    mine = pending()
    assert core.is_pending_here(mine)
    assert not core.is_pending_here(theirs)
    assert held(theirs, lambda: core.is_pending_here(theirs) and not core.is_pending_here(mine))
    assert core.is_pending_here(mine)
    assert in_a_thread(lambda: held(mine, lambda: core.is_pending_here(mine)))
    with pytest.raises(ZeroDivisionError):
        held(theirs, lambda: 1 // 0)
    assert core.is_pending_here(mine)
    assert theirs.tolist() == mine.tolist() == (batch() * 2).tolist()


@pytest.mark.parametrize(
    "work",
    [
        lambda lazy: lazy.tolist(),
        core.force,
        core.read,
        lambda lazy: lazy + 1,
        lambda lazy: lazy.requires_grad,
        lambda lazy: koila.lazy(batch()),
        lambda lazy: koila.explain(lazy),
    ],
    ids=["tolist", "force", "read", "a call", "requires_grad", "lazy", "explain"],
)
def test_a_turn_is_waited_for(work: Any) -> None:
    lazy = pending()
    with Holder(lazy) as holder:
        threading.Timer(0.2, holder.may_end.set).start()
        begin = time.monotonic()
        work(lazy)
        assert time.monotonic() - begin > 0.1
    assert lazy.tolist() == (batch() * 2).tolist()


@pytest.mark.parametrize("work", [lambda lazy: lazy.shape, lambda lazy: lazy.dtype, repr])
def test_metadata_waits_for_nobody(work: Any) -> None:
    lazy = pending()
    with Holder(lazy):
        work(lazy)
    assert is_pending(lazy)


def test_the_first_to_wait_is_the_next() -> None:
    lazy = pending()
    order: list[int] = []
    with Holder(lazy):
        waiting = []
        for i in range(4):
            work = functools.partial(order.append, i)
            waiting.append(threading.Thread(target=held, args=(lazy, work)))
            waiting[-1].start()
            time.sleep(0.05)
    for thread in waiting:
        thread.join(60)
    assert order == [0, 1, 2, 3]


def test_threads_that_wait_for_each_other_are_told() -> None:
    first, second = pending(), in_a_thread(pending)
    met = threading.Barrier(2, timeout=900)
    told = []

    def work(other: Any) -> None:
        met.wait()
        try:
            core.force(other)
        except koila.KoilaError as error:
            told.append(str(error))

    thread = threading.Thread(target=held, args=(second, lambda: work(first)))
    thread.start()
    held(first, lambda: work(second))
    thread.join(60)
    assert len(told) == 1
    assert "wait for each other" in told[0]
    assert first.tolist() == second.tolist() == (batch() * 2).tolist()


def test_a_thread_that_fork_left_behind() -> None:
    lazy = pending()

    def ask() -> None:
        with pytest.raises(koila.KoilaError, match="was forked"):
            lazy.tolist()

    with Holder(lazy):
        in_a_child(ask)
    assert lazy.tolist() == (batch() * 2).tolist()


def test_an_interrupt_leaves_the_program_to_wait() -> None:
    lazy = pending()

    def work() -> None:
        core.set_busy(True)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        held(lazy, work)
    assert not core.is_busy()
    core.flush()
    assert is_pending(lazy)
    assert lazy.tolist() == (batch() * 2).tolist()


def test_autograd_has_threads_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """They run hooks for a thread that waits for them: there nothing waits for a program."""
    assert not threads.is_autograd_worker()
    asked: list[bool] = []
    x = torch.ones(3, requires_grad=True)
    x.register_hook(lambda _: asked.append(threads.is_autograd_worker()))
    x.sum().backward()
    assert asked == [False], "the thread that called backward()"
    lazy = pending()
    with Holder(lazy), monkeypatch.context() as patch:
        patch.setattr(torch._C, "_current_graph_task_id", lambda: 0)
        patch.setattr(threading, "enumerate", list)
        assert threads.is_autograd_worker()
        with pytest.raises(koila.KoilaError, match="is running"):
            lazy.tolist()
    assert lazy.tolist() == (batch() * 2).tolist()
