# SPDX-License-Identifier: Apache-2.0
"""Predict the memory of a step in the middle of which the script reads a number.

At the read, the rest of the step is not recorded yet. If the calls so far were run with their
graph, it would be held to the end of the step. So that is done only if the whole step will fit, as
predicted from a step with the same number of calls before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from koila import _core
from koila.staged.cache import remember
from koila.staged.program import Program

_N_SHARES = 256
#: By the number of calls before a read: the bytes of the whole step, divided by theirs.
_shares: dict[int, float] = {}


def _cut_off() -> tuple[int, float]:
    """Return how many calls of this step are on earlier tapes, and the bytes that they need."""
    return _core.notes().get("cut_off", (0, 0.0))


def whole(program: Program, so_far: float) -> float | None:
    """Predict the bytes that a step needs whole, without the calls on earlier tapes, from those
    that its calls on this tape so far need, with their graph. None: no such step has ended yet."""
    n_before, before = _cut_off()
    more = _shares.get(n_before + program.n_nodes)
    return None if more is None else more * (before + so_far) - before


def note_read(program: Program, so_far: float) -> None:
    """Note that a number was read in the middle of a step, without keeping the graph."""
    n_before, before = _cut_off()
    n_calls = n_before + program.n_nodes
    _core.notes().setdefault("read", {}).setdefault(n_calls, before + so_far)


@contextlib.contextmanager
def cutting() -> Iterator[None]:
    """Wrap a block that cuts a program off. What this module knows of the step moves from the tape
    of that program to the new tape."""
    read = _core.notes().pop("read", {})
    cut_off = max(read.items(), default=_cut_off())
    yield
    _core.notes().update({"read": read, "cut_off": cut_off})


def note_end(n_bytes: float | None) -> None:
    """Note the end of a step: its backward. `n_bytes`: what its calls on this tape need whole;
    None: it runs whole in any case, so a graph kept at a read costs nothing."""
    for n_calls, so_far in _core.notes().pop("read", {}).items():
        _, before = _cut_off()
        _shares.pop(n_calls, None)
        whole = 0.0 if n_bytes is None else before + n_bytes
        remember(_shares, n_calls, max(1.0, whole / max(so_far, 1.0)), _N_SHARES)
