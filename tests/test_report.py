"""report(): how the last program was run, as a user is told it."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

import koila
from chunked import split
from koila import replay
from test_plan import Fails, limited_step, small


def loss(rows: int = 7) -> Tensor:
    w = torch.ones(2, requires_grad=True)
    return (koila.lazy(torch.ones(rows, 2)) * w).tanh().sum()


def test_nothing_has_run_in_this_thread() -> None:
    seen: list[object] = []
    thread = threading.Thread(target=lambda: seen.append(koila.report()))
    thread.start()
    thread.join()
    assert seen == [None]


def test_whole() -> None:
    loss().backward()
    assert koila.report() == koila.Report(1)


def test_chunks_that_were_asked_for() -> None:
    with split(3):
        loss().backward()
    assert koila.report() == koila.Report(3, 3)


@pytest.mark.parametrize(("chunks", "made"), [(None, (1,)), (1, (1,)), (2, (2, 4))])
def test_a_read_reports_too(chunks: int | None, made: tuple[int, ...]) -> None:
    with split(chunks):
        loss().item()
    assert koila.report() == koila.Report(*made)


@pytest.mark.parametrize("n_bytes", [40_000, 10**9])
def test_memory_limit(n_bytes: int) -> None:
    with koila.config(memory_limit=n_bytes):
        loss(2048).backward()
    made = koila.report()
    assert made is not None
    assert made.bytes_predicted is not None and made.bytes_allowed is not None
    assert 0 < made.bytes_predicted <= made.bytes_allowed < n_bytes
    assert (made.n_chunks > 1) == (n_bytes == 40_000)


def test_nothing_pending_is_not_a_run() -> None:
    """An optimizer's step runs what is pending, and here nothing is."""
    w = torch.ones(2, requires_grad=True)
    with split(3):
        total = (koila.lazy(torch.ones(7, 2)) * w).sum()
        total.backward()
        torch.optim.SGD([w]).step()
    total.item()
    assert koila.report() == koila.Report(3, 3)


def test_a_program_that_cannot_be_cut() -> None:
    """What runs live is one chunk, whatever ran before."""
    with split(3, partly="create_graph"):
        loss().backward()
        w = torch.ones(2, requires_grad=True)
        torch.autograd.grad((koila.lazy(torch.ones(7, 2)) * w).sum(), w, create_graph=True)
    assert koila.report() == koila.Report(1)


def test_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = small(), torch.randn(2048, 6).double(), torch.randint(5, (2048,))
    Fails(monkeypatch, 40)
    limited_step(model, x, y)
    made = koila.report()
    assert made is not None and made.n_tries > 1
    assert made.n_rows is not None and made.n_rows <= 40


def test_a_failure_is_not_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(replay.Replay, "differentiate", stop)
    with koila.config(chunks=3), pytest.raises(KeyboardInterrupt):
        loss().backward()
    assert koila.report() is None
