# SPDX-License-Identifier: Apache-2.0
"""What the tests of tests/binding share: a batch, lazies that wait, and ops of their own."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

import koila
from koila import _core
from koila.recording import functions


def batch() -> Tensor:
    """Return the same 4 rows at each call."""
    return torch.arange(12.0, dtype=torch.float64).view(4, 3) / 7


def pending() -> Tensor:
    """Return a recorded call on a batch of its own."""
    return koila.lazy(batch()) * 2


def number_of(lazy: Any) -> Tensor | None:
    """Return the number of a lazy, or None while it is pending."""
    real, value = _core.real(lazy), _core.id(lazy)
    return real if real is not None or value is None else _core.value(value)[6]


def is_pending(lazy: Any) -> bool:
    """Tell whether neither its number nor its graph is there."""
    return koila.is_lazy(lazy) and number_of(lazy) is None


def lazies(obj: Any) -> list[Any]:
    """Return all lazies in containers."""
    if koila.is_lazy(obj):
        return [obj]
    if isinstance(obj, dict):
        return [lazy for item in obj.values() for lazy in lazies(item)]
    if isinstance(obj, tuple | list):
        return [lazy for item in obj for lazy in lazies(item)]
    return []


@contextmanager
def op(
    run: Callable[..., Any],
    kind: int = functions.OP,
    handler: Any = None,
    row: str | None = None,
) -> Iterator[Callable[..., Any]]:
    """Register `run` as torch's own functions are, for a block; with a row where one is named."""

    def call(*args: Any, **kwargs: Any) -> Any:
        met = lazies((args, kwargs))
        if met:
            return handle_torch_function(call, met, *args, **kwargs)
        return run(*args, **kwargs)

    call.__name__ = run.__name__
    entry = functions.Entry(kind, run.__name__, handler, has_meta=True, row=row, container=tuple)
    _core.register(call, entry)
    yield call
    _core.forget()


def in_a_thread(work: Callable[[], Any]) -> Any:
    """Return what `work` returns in a thread of its own, or raise what it raises."""
    answers: list[tuple[bool, Any]] = []

    def run() -> None:
        try:
            answers.append((True, work()))
        except BaseException as error:
            answers.append((False, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    ((is_done, answer),) = answers
    if not is_done:
        raise answer
    return answer


def in_a_child(work: Callable[[], Any]) -> None:
    """Do `work` in a forked process, where it may change what outlives a test."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        text = ""
        try:
            work()
        except BaseException:
            text = traceback.format_exc()
        finally:
            os.write(writer, text.encode()[-60_000:])
            os._exit(bool(text))
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    _, status = os.waitpid(pid, 0)
    if status != 0:
        raise AssertionError(f"the child ended with status {status}\n{text}")


def staged_as(roots: Any, is_no_grad_only: bool, n_segments: int = 1) -> dict[str, Any]:
    """The facts of a program, by name."""
    handle, roots, wanted, *rest = _core.stage(roots, is_no_grad_only)
    handle = _core.cut_program(handle, n_segments, False)[0] if n_segments > 1 else handle
    facts = {name: _core.facts_of(handle, name) for name in ("nodes", "imports", "runs", "drops")}
    return {"handle": handle, "roots": roots, "wanted": wanted, "rest": rest, **facts}


def live(x: Any) -> Any:
    """A lazy tensor that has run."""
    _core.force(x)
    return x
