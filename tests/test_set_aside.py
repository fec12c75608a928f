# SPDX-License-Identifier: Apache-2.0
"""A step that failed costs the steps after it nothing, and can be run later.

Its values are still reachable: after a notebook's cell, `sys.last_value` holds them.
"""

from __future__ import annotations

import signal
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import koila
from chunked import split
from collector import collector_off
from koila.running import replay

N_ROWS = 12
CHUNKS = [1, 2, 3, 7, N_ROWS]


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    with collector_off():
        yield


def model(seed: int = 0, rate: float = 0.3) -> nn.Module:
    torch.manual_seed(seed)
    layers = nn.Linear(4, 8), nn.Tanh(), nn.Dropout(rate), nn.BatchNorm1d(8), nn.Linear(8, 3)
    return nn.Sequential(*layers).double()


def batch(seed: int = 1) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(N_ROWS, 4).double()


def loss_of(m: nn.Module, x: Any) -> Any:
    return (m(x) ** 2).mean()


def by_an_optimizer(m: nn.Module) -> None:
    for weight in m.parameters():
        weight.grad = torch.ones_like(weight)
    torch.optim.SGD(m.parameters(), 0.1).step()


def by_a_fused_optimizer(m: nn.Module) -> None:
    for weight in m.parameters():
        weight.grad = torch.ones_like(weight)
    torch.optim.Adam(m.parameters(), 0.1, fused=True).step()


def unseen(m: nn.Module) -> None:
    torch.ops.aten.mul_(next(m.parameters()).detach(), 2)


@pytest.mark.parametrize("chunks", [None, 1, 3])
@pytest.mark.parametrize("write", [by_an_optimizer, by_a_fused_optimizer, unseen])
def test_a_value_that_is_kept_and_not_read(
    write: Callable[[nn.Module], None], chunks: int | None
) -> None:
    """The script keeps a value and then writes the weights that it was computed with. Backwards of
    other values do not raise, in the same batch or a new one; reading the kept value may."""
    m, other, data = nn.Linear(4, 3).double(), nn.Linear(4, 3).double(), batch()
    other(data).sum().backward()
    wanted, other.weight.grad = other.weight.grad, None
    with koila.config(chunks=chunks):
        x = koila.lazy(data)
        kept, value = m(x).tanh(), m(data).tanh().sum().item()
        write(m)
        for again in (x, koila.lazy(data)):
            other.zero_grad()
            other(again).sum().backward()
            torch.testing.assert_close(other.weight.grad, wanted, rtol=1e-10, atol=0)
        m(koila.lazy(data)).sum().backward()
        if write is unseen:
            with pytest.raises(koila.StaleError):
                kept.sum().item()
        else:
            assert kept.sum().item() == pytest.approx(value, rel=1e-12)


def error_of(loss: Any) -> BaseException:
    try:  # what pytest.raises gives is in a cycle with its own frame
        loss.backward()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def out_of_memory(loss: Any) -> BaseException:
    with koila.config(chunks=None, memory_limit=1):
        error = error_of(loss)
    assert isinstance(error, koila.MemoryLimitError)
    return error


def interrupted(loss: Any) -> BaseException:
    """Ctrl-C before its first call runs."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("Program", "_is_whole"):  # of runs in chunks, and of all
            patch.setattr(replay, name, lambda *_, **__: signal.raise_signal(signal.SIGINT))
        error = error_of(loss)
    assert isinstance(error, KeyboardInterrupt)
    return error


Fail = Callable[[Any], BaseException]
FAILURES: list[Fail] = [out_of_memory, interrupted]
fails = pytest.mark.parametrize("fail", FAILURES)


def results(m: nn.Module, *losses: Any) -> list[Tensor]:
    found = [torch.as_tensor(loss.detach()) for loss in losses]
    found += [weight.grad.clone() for weight in m.parameters() if weight.grad is not None]
    return found + [buffer.clone() for buffer in m.buffers()]


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected) > 1
    for one, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-10, atol=1e-12)


def n_chunks() -> int:
    return koila.report().programs[-1].n_chunks or 1


def eager(x: Tensor) -> Tensor:
    return x


class Failed:
    """A program whose backward failed, except in eager, and everything that keeps it reachable.

    A program that was refused has drawn nothing: the step can be made again. So it has no dropout.
    """

    def __init__(self, fail: Fail, lazy: Callable[..., Any] = koila.lazy) -> None:
        self.model = model(rate=0.3 if fail is interrupted else 0.0)
        self.x = lazy(batch())
        torch.manual_seed(5)
        self.hidden = self.model(self.x)
        self.loss = (self.hidden**2).mean()
        self.error = fail(self.loss) if lazy is not eager else None


@fails
@pytest.mark.parametrize("chunks", CHUNKS)
def test_nothing_of_the_next_steps_stays(fail: Fail, chunks: int) -> None:
    with split(chunks):
        failed = Failed(fail)
        left = []
        for step in range(3):
            m, x = model(step), batch(step)
            left += [weakref.ref(tensor) for tensor in (x, *m.parameters())]
            torch.manual_seed(step)
            loss = loss_of(m, koila.lazy(x))
            loss.backward()
            assert n_chunks() == chunks
            found = results(m, loss)
            m = model(step)
            torch.manual_seed(step)
            loss = loss_of(m, x)
            loss.backward()
            assert_equal(found, results(m, loss))
            del m, x, loss
        assert [tensor() for tensor in left if tensor() is not None] == []
    assert failed.error is not None


@pytest.mark.rotated("chunks")
@fails
@pytest.mark.parametrize("is_between", [False, True])
@pytest.mark.parametrize("chunks", CHUNKS)
def test_it_can_be_run_later(fail: Fail, is_between: bool, chunks: int) -> None:
    """By itself, or with calls on what it made; also after another model's step on its inputs."""
    for use in (lambda of: of.loss, lambda of: of.loss * 2, lambda of: of.hidden.exp().sum()):
        wanted = Failed(fail, eager)
        expected = use(wanted)
        expected.backward()
        with split(chunks):
            failed = Failed(fail)
            if is_between:
                other = model(3)
                loss_of(other, failed.x).backward()
                assert n_chunks() == chunks
            loss = use(failed)
            loss.backward()
            assert n_chunks() == chunks
        assert_equal(results(failed.model, loss), results(wanted.model, expected))


@fails
@pytest.mark.parametrize("chunks", CHUNKS)
def test_it_is_read_in_the_middle_of_another(fail: Fail, chunks: int) -> None:
    def run(lazy: Callable[..., Any]) -> list[Tensor]:
        failed = Failed(fail, lazy)
        other = model(3)
        x = lazy(batch(4))
        torch.manual_seed(6)
        hidden = other(x)
        found = failed.loss.item()
        loss = (hidden**2).mean()
        loss.backward()
        failed.loss.backward()
        return [
            torch.tensor(found),
            *results(other, loss),
            *results(failed.model, failed.loss),
            torch.rand(2),
        ]

    expected = run(eager)
    with split(chunks):
        assert_equal(run(koila.lazy), expected)


@fails
@pytest.mark.parametrize("chunks", CHUNKS)
def test_calls_on_it_and_on_another(fail: Fail, chunks: int) -> None:
    """It runs whole then, and the report says so."""

    def run(lazy: Callable[..., Any]) -> list[Tensor]:
        failed = Failed(fail, lazy)
        other = model(3)
        torch.manual_seed(6)
        loss = (other(failed.x) * failed.hidden).mean() + failed.loss
        loss.backward()
        return results(failed.model, loss) + results(other)

    expected = run(eager)
    with koila.config(chunks=chunks):
        assert_equal(run(koila.lazy), expected)
    assert n_chunks() == chunks
    assert chunks == 1 or "run whole" in str(koila.report())
    with koila.config(memory_limit="1GB"):
        assert_equal(run(koila.lazy), expected)


@fails
def test_its_weights_change(fail: Fail) -> None:
    """Whoever asks for the failed program gets a StaleError; steps of other models run."""
    with split(3):
        failed = Failed(fail)
        with torch.no_grad():
            for weight in failed.model.parameters():
                weight.mul_(0.5)
        other = model(3)
        loss_of(other, failed.x).backward()
        with pytest.raises(koila.StaleError, match="changed in place"):
            failed.loss.backward()
        with pytest.raises(koila.StaleError, match="changed in place"):
            (failed.loss * 2).backward()
        loss_of(other, failed.x).backward()
        assert n_chunks() == 3


@fails
@pytest.mark.parametrize("chunks", CHUNKS)
def test_a_view_of_an_input_was_to_be_written(fail: Fail, chunks: int) -> None:
    """The input is a leaf of the failed program, whose pending write another program must see."""

    def run(lazy: Callable[..., Any]) -> list[Tensor]:
        x = lazy(batch())
        x[:, 1].mul_(2)
        m = model(2).eval()
        error = fail(loss_of(m, x)) if lazy is not eager else None
        other = model(3).eval()
        loss = loss_of(other, x)
        loss.backward()
        assert (error is None) == (lazy is eager)
        return [*results(other, loss), torch.as_tensor(x.detach()).clone()]

    expected = run(eager)
    with split(chunks):
        assert_equal(run(koila.lazy), expected)


@fails
def test_it_dies_with_its_last_value(fail: Fail) -> None:
    with split(3):
        failed = Failed(fail)
        weights = [weakref.ref(weight) for weight in failed.model.parameters()]
        x = failed.x
        other = model(3)
        loss = loss_of(other, x)
        assert failed.error is not None
        failed.error.__traceback__ = None
        del failed
        assert all(weight() is None for weight in weights)
        loss.backward()
        assert n_chunks() == 3


@pytest.mark.parametrize("chunks", [1, 3])
def test_steps_beside_a_value_that_is_never_read(chunks: int) -> None:
    """A frozen teacher's prediction, say: the inputs of the student's steps die as in eager."""
    with split(chunks):
        kept = model()(koila.lazy(batch()))
        left = []
        for step in range(3):
            m, x = model(step), batch(step)
            left += [weakref.ref(tensor) for tensor in (x, *m.parameters())]
            loss = loss_of(m, koila.lazy(x))
            loss.backward()
            assert n_chunks() == chunks
            del m, x, loss
        assert [tensor() for tensor in left if tensor() is not None] == []
        assert torch.as_tensor(kept.detach()).shape == (N_ROWS, 3)


@pytest.mark.parametrize("chunks", [1, 3])
def test_a_failed_call_keeps_no_calls_before_it(chunks: int) -> None:
    """Every other step fails for its labels, and the script holds the last error. Its values are on
    a tape that the step after it clears."""
    m, error, sizes = model(), None, []
    with split(chunks):
        for i in range(8):
            x, y = koila.lazy(batch(), torch.arange(N_ROWS) % 3)
            out = m(x)
            sizes.append(koila._core.id(out) or 0)
            loss = nn.functional.cross_entropy(out, y + 5 * (i % 2))
            if i % 2 == 0:
                loss.backward()
            else:
                error = error_of(loss)
    assert isinstance(error, IndexError)
    assert max(sizes[4:]) <= max(sizes[:4])
