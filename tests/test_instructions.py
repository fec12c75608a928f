# SPDX-License-Identifier: Apache-2.0
"""A run in chunks that ends at any of its instructions leaves all as it was.

Whatever happens there: memory runs out, once or until chunks are smaller; Ctrl-C; an exception of
the user's, as from a hook.
"""

from __future__ import annotations

import contextlib
import functools
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import koila
from failures import CASES, FAULTS, Failing, Fault, assert_untouched, look, planned, run_eager
from koila.running.interpret import Interpreter
from oracle import assert_seen, tell


class StopError(Exception):
    """What the user's code raises."""


#: What happens at an instruction; what `Fault` says of memory.
EVENTS: dict[str, Fault | type[BaseException]] = {
    **{fault.name: fault for fault in FAULTS},
    "Ctrl-C": KeyboardInterrupt,
    "an exception": StopError,
}


class Instructions:
    """Counts the instructions of each try, loops that go on among them; one of them ends it."""

    def __init__(self, event: Fault | type[BaseException] | None, number: int) -> None:
        self.event, self.number = event, number
        self.failing = Failing(event if isinstance(event, Fault) else None, number)
        self.n_ended = 0

    def step(self) -> None:
        """Another instruction."""
        failing, event = self.failing, self.event
        is_due = failing.is_due() if isinstance(event, Fault) else failing.n_calls == self.number
        failing.n_calls += 1
        failing.most = max(failing.most, failing.n_calls)
        if is_due and event is not None:
            self.n_ended += 1
            if isinstance(event, Fault):
                raise torch.OutOfMemoryError("injected into an instruction")
            self.event = None
            raise event()

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """A block in which programs begin in two chunks, and their instructions are counted."""

        def before(original: Callable[..., Any]) -> Callable[..., Any]:
            def patched(*args: Any) -> Any:
                self.step()
                later = original(*args)  # what executes it on later chunks
                return before(later) if callable(later) else later

            return patched

        done = {op: before(do) for op, do in Interpreter._DO.items()}
        with contextlib.ExitStack() as stack:
            patch = unittest.mock.patch.object
            stack.enter_context(planned(self.failing))
            stack.enter_context(patch(Interpreter, "_DO", done))
            for name in ("_open_loop", "_close_loop"):
                original = getattr(Interpreter, name)
                stack.enter_context(patch(Interpreter, name, before(original)))
            yield


def run(name: str, place: int, instructions: Instructions) -> Any:
    """Run a case; at its `place`-th use of `at` an instruction ends it, and it is asked again.

    Returns:
        What is to be compared with eager's; None: what was asked for is gone, with the call that
        an exception was raised in, as in eager.
    """
    n_places = 0

    def story(lazy: Any) -> Any:
        case = CASES[name]()

        def at(go: Callable[[], Any]) -> Any:
            nonlocal n_places
            is_place = n_places == place
            n_places += 1
            if not is_place:
                with planned(Failing(None, -1)):
                    return go()
            before = look(case.tensors())
            try:
                with instructions.counted():
                    return go()
            except (torch.OutOfMemoryError, KeyboardInterrupt, StopError) as error:
                is_refusal = isinstance(error, torch.OutOfMemoryError)
                now = look(case.tensors())
                if not is_refusal:  # what was drawn before it stays drawn, as in eager
                    before["generator"] = now["generator"]
                assert_untouched(now, before)
                if isinstance(error, StopError):
                    raise
            with planned(Failing(None, -1)):
                return go()

        result = case.run(lazy, at)
        named = case.tensors()
        return result, named, {key: tensor.grad for key, tensor in named.items()}

    try:
        return tell(story, koila.lazy)
    except StopError:
        return None
    finally:
        koila._core.forget()


@functools.cache
def count(name: str, place: int) -> int:
    """The instructions of the first try at a place; 0 where there is no such place."""
    instructions = Instructions(None, -1)
    run(name, place, instructions)
    return instructions.failing.most


@pytest.mark.rotated
@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("name", CASES)
def test_what_ends_an_instruction_changes_nothing(name: str, event: str) -> None:
    want = run_eager(name).seen
    numbers = [
        (place, number)
        for place in range(run_eager(name).n_places)
        for number in range(count(name, place))
    ]
    assert numbers
    every = 1 if event in ("once", "Ctrl-C") else 3
    for place, number in numbers[::every]:
        instructions = Instructions(EVENTS[event], number)
        got = run(name, place, instructions)
        where = f"instruction {number} of place {place}"
        assert instructions.n_ended, where
        assert (got is None) == (event == "an exception"), where
        if got is not None:
            assert_seen(got[0], want[0], where, exact_bits=False)
            assert torch.equal(got[1], want[1]), f"{where}: the generator is elsewhere"
    koila._core.forget()
