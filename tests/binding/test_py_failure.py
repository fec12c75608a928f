# SPDX-License-Identifier: Apache-2.0
"""A call that raised has no number, nor has what reads it: each who asks is told what it raised."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import koila
from binding_kit import batch, in_a_thread, op
from chunked import split
from koila import _core


class TwoWordsError(Exception):
    """An exception that is not made of its args."""

    def __init__(self, first: str, *, second: str) -> None:
        super().__init__(f"{first} {second}")


class Failing:
    """An op that raises an error, until it has none."""

    def __init__(self) -> None:
        self.error: Callable[[], BaseException] | None = lambda: ValueError("in the", "middle")
        self.n_runs = 0

    def run(self, x: Tensor) -> Tensor:
        if x.device.type != "meta":
            self.n_runs += 1
            if self.error is not None:
                raise self.error()
        return x * 2


@pytest.fixture
def failing() -> Failing:
    return Failing()


@pytest.fixture
def fail(failing: Failing) -> Iterator[Any]:
    def fail(x: Tensor) -> Tensor:
        return failing.run(x)

    with op(fail) as recorded:
        yield recorded


ASKS: dict[str, Callable[[Any], Any]] = {
    "item": lambda t: t.sum().item(),
    "tolist": lambda t: t.tolist(),
    "force": _core.force,
    "read": _core.read,
    "shape": lambda t: t.shape,
    "dtype": lambda t: t.dtype,
    "requires_grad": lambda t: t.requires_grad,
    "size": lambda t: t.size(0),
    "numel": lambda t: t.numel(),
    "another call": lambda t: t + 1,
    "a call that runs at once": lambda t: t[t > 0],
    "backward": lambda t: t.sum().backward(),
    "switch": lambda t: setattr(t, "requires_grad", False),
    "text": str,
    "another thread": lambda t: in_a_thread(t.tolist),
}


def check_reported(ask: Callable[[Any], Any], lazy: Any) -> None:
    with pytest.raises(ValueError) as told:
        ask(lazy)
    assert told.value.args == ("in the", "middle")
    (note,) = told.value.__notes__
    assert re.fullmatch(r"koila: recorded at call 1, .*binding_kit\.py:\d+", note)


@pytest.mark.parametrize("name", ASKS)
@pytest.mark.parametrize("is_run_first", [True, False])
def test_who_asks_is_reported(name: str, is_run_first: bool, fail: Any) -> None:
    """The value itself, what reads it, and what reads that; again and again."""
    w = torch.ones(3, dtype=torch.float64, requires_grad=True)
    x = koila.lazy(batch()) * w
    failed = fail(x)
    reader = failed.exp()
    last = torch.cat([reader, x])
    if is_run_first:
        check_reported(_core.force, last)
    elif name not in ("shape", "dtype", "requires_grad", "size", "numel", "another call"):
        check_reported(ASKS[name], last)
    else:
        return
    for _ in range(2):
        for lazy in (failed, reader, last):
            check_reported(ASKS[name], lazy)


def test_what_does_not_read_it_has_its_number(fail: Any, failing: Failing) -> None:
    x = koila.lazy(batch())
    before, failed = x * 2, fail(x)
    after, reader = before + 1, failed + before
    with pytest.raises(ValueError):
        reader.tolist()
    assert after.tolist() == (batch() * 2 + 1).tolist()
    assert before.tolist() == (batch() * 2).tolist()
    assert failing.n_runs == 1


def test_the_first_of_two_failures_is_reported(fail: Any, failing: Failing) -> None:
    x = koila.lazy(batch())
    errors = iter([ValueError("one"), ValueError("two")])
    failing.error = lambda: next(errors)
    first, second = fail(x), fail(x + 1)
    both, other = first + second, second * 2
    with pytest.raises(ValueError, match="one"):
        both.tolist()
    with pytest.raises(ValueError, match="one"):
        both.tolist()
    with pytest.raises(ValueError, match="two"):
        other.tolist()


def test_a_program_that_failed_can_be_recorded_again(fail: Any, failing: Failing) -> None:
    x = koila.lazy(batch())
    with pytest.raises(ValueError):
        fail(x).tolist()
    failing.error = None
    assert fail(x).tolist() == (batch() * 2).tolist()


def test_an_interrupt_says_nothing_of_the_call(fail: Any, failing: Failing) -> None:
    failing.error = KeyboardInterrupt
    made = fail(koila.lazy(batch()))
    with pytest.raises(KeyboardInterrupt):
        made.tolist()
    failing.error = None
    assert made.tolist() == (batch() * 2).tolist()


def test_an_error_that_is_not_made_of_its_args(fail: Any, failing: Failing) -> None:
    failing.error = lambda: TwoWordsError("in the", second="middle")
    made = fail(koila.lazy(batch()))
    for _ in range(3):
        with pytest.raises(TwoWordsError, match="in the middle") as told:
            made.tolist()
        assert told.value.args == ("in the middle",)


def test_the_errors_of_the_system_keep_their_numbers(fail: Any, failing: Failing) -> None:
    failing.error = lambda: FileNotFoundError(2, "not there", "name")
    made = fail(koila.lazy(batch()))
    for _ in range(3):
        with pytest.raises(FileNotFoundError) as told:
            made.tolist()
        assert (told.value.errno, told.value.strerror) == (2, "not there")


def test_what_is_kept_holds_no_frames(fail: Any, failing: Failing) -> None:
    """The exception has a traceback, whose frames hold the tensors of the program."""
    w = torch.ones(3, dtype=torch.float64)
    watch = weakref.ref(w)
    made = fail(koila.lazy(batch()) * w)
    with pytest.raises(ValueError) as told:
        made.tolist()
    del told, w
    gc.collect()
    assert watch() is None
    with pytest.raises(ValueError):
        made.tolist()


@pytest.mark.parametrize("chunks", [2, 4])
def test_in_chunks_a_failure_is_told_too(chunks: int, fail: Any) -> None:
    w = torch.ones(3, dtype=torch.float64, requires_grad=True)
    x = koila.lazy(batch()) * w
    made = fail(x) * 2
    with split(chunks):
        for _ in range(2):
            with pytest.raises(ValueError) as told:
                made.sum().backward()
            assert told.value.args == ("in the", "middle")
        assert w.grad is None
        del made, told
        assert x.tolist() == batch().tolist()
