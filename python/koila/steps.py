"""How much a step takes whose numbers are read on the way, as its first time told.

A read comes before the rest of its step is recorded. Run with its graph, what was recorded so far
would be held to the end, so that is done only where the whole step fitted, when it was last seen.
"""

from __future__ import annotations

from koila import _core
from koila.program import Program

_N_KNOWN = 256
#: By the number of calls up to a read: the bytes of the whole step, as multiples of those so far.
_known: dict[int, float] = {}


def whole(program: Program, so_far: float) -> float | None:
    """Bytes that a step is thought to take whole.

    Args:
        program: the step as far as it was recorded.
        so_far: bytes of that, with its graph.

    Returns:
        None: nobody knows, until the step has been seen to its end.
    """
    more = _known.get(program.n_nodes)
    return None if more is None else more * so_far


def note_read(program: Program, so_far: float) -> None:
    """A number was read in the midst of a step, and the graph of what ran was not kept."""
    _core.memo().setdefault("read", {}).setdefault(program.n_nodes, so_far)


def note_end(n_bytes: float | None) -> None:
    """A step is differentiated that takes so many bytes whole; None: it runs whole, whatever it
    takes, so that a read costs it nothing."""
    for n_calls, so_far in _core.memo().pop("read", {}).items():
        _known.pop(n_calls, None)
        _known[n_calls] = 1.0 if n_bytes is None else max(1.0, n_bytes / max(so_far, 1.0))
    while len(_known) > _N_KNOWN:
        _known.pop(next(iter(_known)))
