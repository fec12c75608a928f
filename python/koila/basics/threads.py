# SPDX-License-Identifier: Apache-2.0
"""Threads: exclusive use of a thread's tape, and a key for what is noted by thread."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch

from koila import _core

P = ParamSpec("P")
R = TypeVar("R")


class Thread:
    """A thread's key. It dies with its thread: the next thread may get the same `get_ident()`."""

    __slots__ = ("__weakref__",)


_own = threading.local()


def this_thread() -> Thread:
    """Return the running thread's key, to note things by thread in a weak set or mapping."""
    try:
        return cast("Thread", _own.key)
    except AttributeError:
        _own.key = Thread()
        return cast("Thread", _own.key)


def in_turn(func: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function so that no other thread uses this thread's tape while it runs. If a
    KeyboardInterrupt leaves it, the pending program stays, and runs when a value is asked for."""

    @functools.wraps(func)
    def held(*args: P.args, **kwargs: P.kwargs) -> R:
        return _core.held(None, func, args, kwargs)

    return held


def is_autograd_worker() -> bool:
    """Tell whether this is one of autograd's own threads, which runs hooks while another waits."""
    if torch._C._current_graph_task_id() < 0:
        return False
    me = threading.get_ident()
    return not any(
        thread.ident == me and not isinstance(thread, threading._DummyThread)
        for thread in threading.enumerate()
    )
