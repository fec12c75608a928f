# SPDX-License-Identifier: Apache-2.0
"""Turns in Python: what looks at a tape more than once, or runs its program, does so alone."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch

from koila import _core

P = ParamSpec("P")
R = TypeVar("R")


def in_turn(func: Callable[P, R]) -> Callable[P, R]:
    """`func`, which no other thread interrupts with a use of this thread's tape.

    An interrupt (Ctrl-C) that comes out of it leaves the program to wait until it is asked for.
    """

    @functools.wraps(func)
    def held(*args: P.args, **kwargs: P.kwargs) -> R:
        return cast("R", _core.held(None, func, args, kwargs))

    return held


def is_autograd_worker() -> bool:
    """Whether this is one of autograd's own threads: it runs hooks for a thread that waits."""
    if torch._C._current_graph_task_id() < 0:
        return False
    me = threading.get_ident()
    return not any(
        thread.ident == me and not isinstance(thread, threading._DummyThread)
        for thread in threading.enumerate()
    )
