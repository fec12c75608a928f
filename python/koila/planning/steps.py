# SPDX-License-Identifier: Apache-2.0
"""How much a step takes whose numbers are read on the way, as its first time told.

A read comes before the rest of its step is recorded. Run with its graph, what was recorded so far
would be held to the end, so that is done only where the whole step fitted, when it was last seen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from koila import _core
from koila.staged.program import Program

_N_KNOWN = 256
#: By the number of calls up to a read: the bytes of the whole step, as multiples of those so far.
_known: dict[int, float] = {}


def _cut_off() -> tuple[int, float]:
    """Calls of this step that were cut off, and what they take whole."""
    cut_off: tuple[int, float] = _core.memo().get("cut off", (0, 0.0))
    return cut_off


def whole(program: Program, so_far: float) -> float | None:
    """Bytes that a step is thought to take whole, from here on.

    Args:
        program: the step as far as it was recorded, since it was cut last.
        so_far: bytes of that, with its graph.

    Returns:
        None: nobody knows, until the step has been seen to its end.
    """
    n_before, before = _cut_off()
    more = _known.get(n_before + program.n_nodes)
    return None if more is None else more * (before + so_far) - before


def note_read(program: Program, so_far: float) -> None:
    """A number was read in the midst of a step, and the graph of what ran was not kept."""
    n_before, before = _cut_off()
    n_calls = n_before + program.n_nodes
    _core.memo().setdefault("read", {}).setdefault(n_calls, before + so_far)


@contextlib.contextmanager
def cutting() -> Iterator[None]:
    """A block in which a step that was read just now is cut: it goes on on another tape."""
    read = _core.memo().pop("read", {})
    cut_off = max(read.items(), default=_cut_off())
    yield
    _core.memo().update({"read": read, "cut off": cut_off})


def note_end(n_bytes: float | None) -> None:
    """A step is differentiated that takes so many bytes whole, from where it was cut last on; None:
    it runs whole, whatever it takes, so that a read costs it nothing."""
    _, before = _cut_off()
    for n_calls, so_far in _core.memo().pop("read", {}).items():
        _known.pop(n_calls, None)
        whole = 0.0 if n_bytes is None else before + n_bytes
        _known[n_calls] = max(1.0, whole / max(so_far, 1.0))
    while len(_known) > _N_KNOWN:
        _known.pop(next(iter(_known)))
